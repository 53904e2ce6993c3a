// Products of halves in tiles of 128 x WIDTH, one block on a multiprocessor: how its warps work together.
//
// Compiled for sm_90a with ELEMENT (Float16, Bfloat16), A_ALONG_K and B_ALONG_K (1 where the factor's contiguous
// axis is k), WIDTH, CLUSTER (1 or 2 blocks that share the columns of B that they load) and STAGES.
//
//     warp 0, one thread: loads boxes of A and B  -- stages -->  8 warps: multiply, and store
//
// A kernel says which tiles there are, in which order, and waits for what they need.
#pragma once

#include "clusters.cuh"
#include "widths.cuh"

namespace shardmath {

constexpr bool kAAlongK = A_ALONG_K, kBAlongK = B_ALONG_K;
constexpr u32 kWidth = WIDTH, kStages = STAGES;
constexpr u32 kRows = 128, kDepth = 64;
constexpr u32 kBox = 64 * 128;  // bytes of 64 x 64 elements
constexpr u32 kABytes = kRows * kDepth * 2;
constexpr u32 kSlabs = (kWidth + 63) / 64;
constexpr u32 kBBytes = kBAlongK ? kWidth * 128 : kSlabs * kBox;
constexpr u32 kThreads = 384, kGroup = 128;  // each group of four warps multiplies 64 rows
constexpr u32 kOut = 32;                     // columns that are stored at once
constexpr u32 kOutBytes = 64 * kOut * 2;

struct Shared {
    u32 stages, out, full, empty;  // shared addresses
    __device__ u32 a(u32 stage) const { return stages + stage * (kABytes + kBBytes); }
    __device__ u32 b(u32 stage) const { return a(stage) + kABytes; }
};

__device__ inline void group_barrier(u32 group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroup) : "memory");
}

// Where a stage comes from: kDepth of k of each factor.
struct Boxes {
    const TensorMap *a, *b;
    u32 row, column, k_of_a, k_of_b;
};

// One thread of each block of a cluster.
__device__ inline void load_stage(const Shared& s, u32 stage, u32 block, const Boxes& from) {
    const u32 full = s.full + 8 * stage, to_a = s.a(stage), to_b = s.b(stage);
    bar_expect(full, kABytes + kBBytes);
    if (kAAlongK) {
        load_box(to_a, from.a, from.k_of_a, from.row, full);
    } else {
        load_box(to_a, from.a, from.row, from.k_of_a, full);
        load_box(to_a + kBox, from.a, from.row + 64, from.k_of_a, full);
    }
    if (kBAlongK) {
        constexpr u32 kShare = kWidth / kCluster;
        load_box_for_all(to_b + block * kShare * 128, from.b, from.k_of_b, from.column + block * kShare, full);
    } else {
        constexpr u32 kShare = kDepth / kCluster;
#pragma unroll
        for (u32 i = 0; i < kSlabs; ++i)
            load_box_for_all(to_b + i * kBox + block * kShare * 128, from.b, from.column + 64 * i,
                             from.k_of_b + block * kShare, full);
    }
}

// Multiply steps `first` to before `last` of a tile, which are loaded, one stage each; `number` counts all steps of
// this block. d holds the sums of the group's 64 rows as widths.cuh says. By four warps.
__device__ inline void multiply_steps(float (&d)[kWidth / 2], const Shared& s, u32 group, u32 first, u32 last,
                                      u32& number) {
#pragma unroll 1  // else the body is copied for the first step, and again
    for (u32 step = first; step < last; ++step, ++number) {
        const u32 stage = number % kStages;
        bar_wait(s.full + 8 * stage, number / kStages & 1);
        products_begin();
#pragma unroll
        for (u32 k = 0; k < kDepth / 16; ++k) {
            const u32 of_a = s.a(stage) + group * kBox + k * (kAAlongK ? 32 : 2048);
            const u32 of_b = s.b(stage) + k * (kBAlongK ? 32 : 2048);
            Multiply<ELEMENT, kAAlongK, kBAlongK>::add(d, describe<kAAlongK>(of_a, kBox),
                                                       describe<kBAlongK>(of_b, kBox), step > first || k);
        }
        products_commit();
        products_wait<1>();  // the step before has been multiplied
        if (step > first) release(s.empty, (number - 1) % kStages);
    }
    products_wait<0>();
    if (first < last) release(s.empty, (number - 1) % kStages);
}

// All of a block: the kernel's `load_tiles(a, s, block)` by one thread, and its `multiply_tiles(a, s, block, group)`
// by each of two groups of four warps.
template <class Argument>
__device__ inline void run_block(const Argument& a) {
    extern __shared__ char memory[];
    __shared__ u64 bars[2 * kStages];
    Shared s;
    s.stages = (shared_address(memory) + 1023) & ~1023u;
    s.out = s.stages + kStages * (kABytes + kBBytes);
    s.full = shared_address(bars);
    s.empty = s.full + 8 * kStages;
    const u32 block = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) bar_init(s.full + 8 * i, 1), bar_init(s.empty + 8 * i, 8 * kCluster);
        bars_visible();
    }
    cluster_barrier();
    if (threadIdx.x < kGroup) {
        give_registers<40>();
        if (threadIdx.x == 0) load_tiles(a, s, block);
    } else {
        take_registers<232>();
        multiply_tiles(a, s, block, threadIdx.x / kGroup - 1);
    }
    __syncwarp();
    cluster_barrier();  // a block's barriers and stages are there until its neighbour needs them no more
}

}  // namespace shardmath
