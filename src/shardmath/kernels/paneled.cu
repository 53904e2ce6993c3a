// A product of panels of halves: C = A B, where rows of A and columns of B come while others are multiplied.
//
// Compiled for sm_90a with ELEMENT (Float16, Bfloat16), A_ALONG_K and B_ALONG_K (1 where the factor's contiguous
// axis is k), WIDTH of a tile, CLUSTER, STAGES, BOXES (0 where the rows of C are not aligned to 16 bytes) and
// REGIONS. One block on a multiprocessor walks over tiles of 128 x WIDTH, region by region (panels.cuh):
//
//     warp 0: waits until panels are here, loads boxes of A and B  ->  8 warps: multiply, round, store
#include "panels.cuh"
#include "widths.cuh"

using namespace shardmath;

constexpr bool kAAlongK = A_ALONG_K, kBAlongK = B_ALONG_K;
constexpr u32 kWidth = WIDTH, kStages = STAGES;
constexpr u32 kRows = 128, kDepth = 64;
constexpr u32 kBox = 64 * 128;  // bytes of 64 x 64 elements
constexpr u32 kABytes = kRows * kDepth * 2;
constexpr u32 kSlabs = (kWidth + 63) / 64;
constexpr u32 kBBytes = kBAlongK ? kWidth * 128 : kSlabs * kBox;
constexpr u32 kThreads = 384, kGroup = 128;  // each group of four warps multiplies 64 rows
constexpr u32 kOut = 32;                           // columns that are stored at once
constexpr u32 kOutBytes = 64 * kOut * 2;
struct Shared {
    u32 stages, out, full, empty;  // shared addresses
    __device__ u32 a(u32 stage) const { return stages + stage * (kABytes + kBBytes); }
    __device__ u32 b(u32 stage) const { return a(stage) + kABytes; }
};

// -- one block ----------------------------------------------------------------------------------------

__device__ inline void group_barrier(u32 group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroup) : "memory");
}

// -- loading -------------------------------------------------------------------------------------------

__device__ inline void load_stage(const PanelsArgument& a, const Shared& s, const Tile& tile, Step at, u32 stage,
                                  u32 block) {
    const u32 full = s.full + 8 * stage, to_a = s.a(stage), to_b = s.b(stage);
    const TensorMap *of_a = a.map_a(at), *of_b = a.map_b(at);
    const u32 k_of_a = at.a & ~kOwn, k_of_b = at.b & ~kOwn;
    bar_expect(full, kABytes + kBBytes);
    if (kAAlongK) {
        load_box(to_a, of_a, k_of_a, tile.row, full);
    } else {
        load_box(to_a, of_a, tile.row, k_of_a, full);
        load_box(to_a + kBox, of_a, tile.row + 64, k_of_a, full);
    }
    if (kBAlongK) {
        constexpr u32 kShare = kWidth / kCluster;
        load_box_for_all(to_b + block * kShare * 128, of_b, k_of_b, tile.column + block * kShare, full);
    } else {
        constexpr u32 kShare = kDepth / kCluster;
#pragma unroll
        for (u32 i = 0; i < kSlabs; ++i)
            load_box_for_all(to_b + i * kBox + block * kShare * 128, of_b, tile.column + 64 * i,
                             k_of_b + block * kShare, full);
    }
}

// -- what the other warps do ---------------------------------------------------------------------------

__device__ inline void store_tile(const PanelsArgument& a, const Shared& s, const Tile& tile, u32 group,
                                  const float (&d)[kWidth / 2]) {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, right = lane / 16;
    const bool issues = threadIdx.x % kGroup == 0;
    const bool has_rows = tile.row + 64 * group < a.rows;
#pragma unroll
    for (u32 i = 0; i < kWidth / kOut; ++i) {
        const u32 to = s.out + (group * 2 + i % 2) * kOutBytes;
        if (issues) all_but_last_store_has_read();
        group_barrier(group);
#pragma unroll
        for (u32 j = 0; j < kOut / 8; j += 2) {  // pairs of 8 columns
            const float* v = d + kOut / 2 * i + 4 * j;
            const u32 place = (j + right) ^ (row >> 1 & 3);
            store_matrices(to + row * kOut * 2 + place * 16, ELEMENT::pack(v[0], v[1]), ELEMENT::pack(v[2], v[3]),
                           ELEMENT::pack(v[4], v[5]), ELEMENT::pack(v[6], v[7]));
        }
        fence_async_shared();
        group_barrier(group);
        if (issues) {
            const u32 column = tile.column + kOut * i;
            if (has_rows && column < a.columns) store_box(&a.c, column, tile.row + 64 * group, to);
            stores_commit();
        }
    }
}

// Rows that boxes cannot be stored to, because they are not aligned.
__device__ inline void store_elements(const PanelsArgument& a, const Tile& tile, u32 group,
                                      const float (&d)[kWidth / 2]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const u32 row = tile.row + 64 * group + 16 * warp + lane / 4;
#pragma unroll
    for (u32 i = 0; i < kWidth / 2; ++i) {
        const u32 column = tile.column + i / 4 * 8 + lane % 4 * 2 + i % 2, at = row + (i & 2) * 4;
        if (at < a.rows && column < a.columns)
            *(unsigned short*)(a.out + at * a.pitch + column * 2) = (unsigned short)ELEMENT::pack(d[i], 0);
    }
}

__device__ inline void multiply_tiles(const PanelsArgument& a, const Shared& s, u32 block, u32 group) {
    float d[kWidth / 2];
    u32 number = 0;
    for (Work work = first_work(a); work.unit < a.units; work = next_work(a, work)) {
        for (u32 step = work.first; step < work.last; ++step, ++number) {
            const u32 stage = number % kStages;
            bar_wait(s.full + 8 * stage, number / kStages & 1);
            products_begin();
#pragma unroll
            for (u32 k = 0; k < kDepth / 16; ++k) {
                const u32 of_a = s.a(stage) + group * kBox + k * (kAAlongK ? 32 : 2048);
                const u32 of_b = s.b(stage) + k * (kBAlongK ? 32 : 2048);
                Multiply<ELEMENT, kAAlongK, kBAlongK>::add(d, describe<kAAlongK>(of_a, kBox),
                                                           describe<kBAlongK>(of_b, kBox), step > work.first || k);
            }
            products_commit();
            products_wait<1>();  // the step before has been multiplied
            if (step > work.first) release(s.empty, (number - 1) % kStages);
        }
        products_wait<0>();
        release(s.empty, (number - 1) % kStages);
        if (!completes(a, d, work, threadIdx.x - kGroup)) continue;
        const Tile tile = locate<kRows, kWidth>(a, work.unit, block);
        if (BOXES)
            store_tile(a, s, tile, group, d);
        else
            store_elements(a, tile, group, d);
    }
    if (threadIdx.x % kGroup == 0) stores_have_read();
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    paneled(const __grid_constant__ PanelsArgument a) {
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
        if (threadIdx.x == 0)
            load_tiles<kRows, kWidth, kStages>(a, s.empty, block, [&](const Tile& tile, Step at, u32 stage) {
                load_stage(a, s, tile, at, stage, block);
            });
    } else {
        take_registers<232>();
        multiply_tiles(a, s, block, threadIdx.x / kGroup - 1);
    }
    __syncwarp();
    cluster_barrier();  // a block's barriers and stages are there until its neighbour needs them no more
}
