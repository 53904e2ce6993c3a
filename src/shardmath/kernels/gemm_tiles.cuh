// Products of 16-bit operands in tiles of 128 x WIDTH, one block on a multiprocessor: how its warps work together.
//
// Compiled for sm_90a with ELEMENT (Float16, Bfloat16), A_ALONG_K and B_ALONG_K (1 where the factor's contiguous axis
// is k), C_ALONG_N (0 where C's columns are contiguous), ALIGNED (1 where all lines of C begin and end at multiples of
// 16 bytes), WIDTH, CLUSTER (1 or 2 blocks that share the columns of B that they load) and STAGES.
//
//     warp 1, one thread: watches what comes  -- seen -->  warp 0, one thread: loads boxes of A and B
//     warp 0  -- stages -->  8 warps: multiply, and store
//
// A kernel says which tiles there are, in which order, and waits for what they need.
#pragma once

#include "clusters.cuh"
#include "wgmma_widths.cuh"

namespace shardmath {

constexpr bool kAAlongK = A_ALONG_K, kBAlongK = B_ALONG_K, kCAlongN = C_ALONG_N;
constexpr u32 kWidth = WIDTH, kStages = STAGES;
constexpr u32 kRows = 128, kDepth = 64;
constexpr u32 kBox = 64 * 128;  // bytes of 64 x 64 elements
constexpr u32 kABytes = kRows * kDepth * 2;
constexpr u32 kSlabs = (kWidth + 63) / 64;
constexpr u32 kBBytes = kBAlongK ? kWidth * 128 : kSlabs * kBox;
constexpr u32 kThreads = 384, kGroup = 128;  // each group of four warps multiplies 64 rows

struct Shared {
    u32 stages, full, empty, seen;  // shared addresses
    __device__ u32 a(u32 stage) const { return stages + stage * (kABytes + kBBytes); }
    __device__ u32 b(u32 stage) const { return a(stage) + kABytes; }
};

// Where a stage comes from: kDepth of k of each factor.
struct Boxes {
    const TensorMap *a, *b;
    u32 row, column, k_of_a, k_of_b;
};

// One thread of each block of a cluster.
__device__ inline void load_stage(const Shared& s, u32 stage, u32 block, const Boxes& from) {
    const u32 full = s.full + 8 * stage, to_a = s.a(stage), to_b = s.b(stage);
    mbarrier_expect_tx(full, kABytes + kBBytes);
    if (kAAlongK) {
        tma_load(to_a, from.a, from.k_of_a, from.row, full);
    } else {
        tma_load(to_a, from.a, from.row, from.k_of_a, full);
        tma_load(to_a + kBox, from.a, from.row + 64, from.k_of_a, full);
    }
    if (kBAlongK) {
        constexpr u32 kShare = kWidth / kCluster;
        tma_load_multicast(to_b + block * kShare * 128, from.b, from.k_of_b, from.column + block * kShare, full);
    } else {
        constexpr u32 kShare = kDepth / kCluster;
#pragma unroll
        for (u32 i = 0; i < kSlabs; ++i)
            tma_load_multicast(to_b + i * kBox + block * kShare * 128, from.b, from.column + 64 * i,
                             from.k_of_b + block * kShare, full);
    }
}

// The lower group waits for the upper one to begin its last step of a tile, when it has itself as many steps left
// as can be loaded: then either stores its half of the tile while the other multiplies.
constexpr u32 kLead = kStages - 1;

__device__ inline void upper_has_begun() { asm volatile("bar.arrive 1, %0;" ::"n"(2 * kGroup) : "memory"); }
__device__ inline void await_upper() { asm volatile("bar.sync 1, %0;" ::"n"(2 * kGroup) : "memory"); }

// Multiply steps `first` to before `last` of a tile, which are loaded, one stage each; `number` counts all steps of
// this block. d holds the sums of the group's 64 rows as wgmma_widths.cuh says. By four warps.
__device__ inline void multiply_steps(float (&d)[kWidth / 2], const Shared& s, u32 group, u32 first, u32 last,
                                      u32& number) {
#pragma unroll 1  // else the body is copied for the first step, and again
    for (u32 step = first; step < last; ++step, ++number) {
        const u32 stage = number % kStages;
        if (group == 1 && step + kLead == last) await_upper();
        mbarrier_wait(s.full + 8 * stage, number / kStages & 1);
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < kDepth / 16; ++k) {
            const u32 of_a = s.a(stage) + group * kBox + k * (kAAlongK ? 32 : 2048);
            const u32 of_b = s.b(stage) + k * (kBAlongK ? 32 : 2048);
            Multiply<ELEMENT, kAAlongK, kBAlongK>::add(d, wgmma_descriptor<kAAlongK>(of_a, kBox),
                                                       wgmma_descriptor<kBAlongK>(of_b, kBox), step > first || k);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the step before has been multiplied
        if (step > first) release(s.empty, (number - 1) % kStages);
    }
    if (group == 0 && first + kLead <= last) upper_has_begun();
    wgmma_wait<0>();
    if (first < last) release(s.empty, (number - 1) % kStages);
}

// -- from registers to C -------------------------------------------------------------------------------

// Where tiles go; `pitch` is the bytes from one row, or column, to the next.
struct Target {
    char* out;
    u64 pitch;
    u32 rows, columns;

    __device__ bool has(u32 row, u32 column) const { return row < rows && column < columns; }
    __device__ char* at(u32 row, u32 column) const {
        return out + (kCAlongN ? row : column) * pitch + (kCAlongN ? column : row) * 2;
    }
};

// Of an 8 x 8 matrix each lane has two elements of a row: those of a column in their place.
__device__ inline u32 turned(u32 word) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(word));
    return word;
}

// Of four lanes side by side the one numbered q gets the words w[q] of all four.
__device__ inline void exchange(u32 (&w)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const u32 a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    (odd ? w[0] : w[1]) = a, (odd ? w[2] : w[3]) = b;
    const u32 c = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), e = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
    (high ? w[0] : w[2]) = c, (high ? w[1] : w[3]) = e;
}

// This warp's 16 rows from `top` on, in 8 x 8 matrices: four at a time, of which each lane stores 16 bytes.
__device__ inline void store_words(const Target& c, u32 top, u32 left, const float (&d)[kWidth / 2]) {
    const u32 line = threadIdx.x % 32 / 4, place = threadIdx.x % 4;
#pragma unroll
    for (u32 n = 0; n < kWidth / 4; n += 4) {
        u32 w[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {  // beside each other, or two beside two
            const u32 across = kCAlongN ? n / 8 * 4 + i : n / 2 + i / 2, down = kCAlongN ? n / 4 % 2 : i % 2;
            const u32 word = ELEMENT::pack(d[4 * across + 2 * down], d[4 * across + 2 * down + 1]);
            w[i] = kCAlongN ? word : turned(word);
        }
        exchange(w);
        const u32 row = top + (kCAlongN ? n / 4 % 2 * 8 + line : place % 2 * 8);
        const u32 column = left + (kCAlongN ? (n / 8 * 4 + place) * 8 : (n / 2 + place / 2) * 8 + line);
        if (c.has(row, column)) *(uint4*)c.at(row, column) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

__device__ inline void store_elements(const Target& c, u32 top, u32 left, const float (&d)[kWidth / 2]) {
    const u32 line = threadIdx.x % 32 / 4, place = threadIdx.x % 4;
#pragma unroll
    for (u32 i = 0; i < kWidth / 2; ++i) {
        const u32 row = top + line + (i & 2) * 4, column = left + i / 4 * 8 + place * 2 + i % 2;
        if (c.has(row, column)) *(unsigned short*)c.at(row, column) = (unsigned short)ELEMENT::pack(d[i], 0);
    }
}

// Round what a group has of a tile, and store what of it is within C. By four warps.
__device__ inline void store_tile(const Target& c, u32 row, u32 column, u32 group, const float (&d)[kWidth / 2]) {
    const u32 top = row + 64 * group + threadIdx.x / 32 % 4 * 16;
    if (ALIGNED)
        store_words(c, top, column, d);
    else
        store_elements(c, top, column, d);
}

// All of a block: the kernel's `load_tiles(a, s, block)` and `watch(a, s)` by one thread each, and its
// `multiply_tiles(a, s, block, group)` by each of two groups of four warps.
template <class Argument>
__device__ inline void run_block(const Argument& a) {
    extern __shared__ char memory[];
    __shared__ u64 bars[2 * kStages];
    __shared__ u32 seen;
    Shared s;
    s.stages = (shared_address(memory) + 1023) & ~1023u;
    s.seen = shared_address(&seen);
    s.full = shared_address(bars);
    s.empty = s.full + 8 * kStages;
    const u32 block = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) {
            mbarrier_init(s.full + 8 * i, 1);
            mbarrier_init(s.empty + 8 * i, 8 * kCluster);
        }
        fence_mbarrier_init();
        seen = 0;
    }
    cluster_barrier();
    if (threadIdx.x < kGroup) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0) load_tiles(a, s, block);
        if (threadIdx.x == 32) watch(a, s);
    } else {
        setmaxnreg_inc<232>();
        multiply_tiles(a, s, block, threadIdx.x / kGroup - 1);
    }
    __syncwarp();
    cluster_barrier();  // a block's barriers and stages are there until its neighbour needs them no more
}

}  // namespace shardmath
