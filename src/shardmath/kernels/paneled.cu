// A product of panels of halves: C = A B, where rows of A and columns of B come while others are multiplied.
//
// Compiled as tiles.cuh says, with BOXES (0 where the rows of C are not aligned to 16 bytes) and REGIONS. Tiles are
// walked region by region, as panels.cuh says:
//
//     warp 0: waits until panels are here, loads boxes of A and B  ->  8 warps: multiply, round, store
#include "panels.cuh"
#include "tiles.cuh"

namespace shardmath {  // where run_block looks for what a kernel does

// -- loading -------------------------------------------------------------------------------------------

__device__ inline void load_tiles(const PanelsArgument& a, const Shared& s, u32 block) {
    load_tiles<kRows, kWidth, kStages>(a, s.empty, block, [&](const Tile& tile, Step at, u32 stage) {
        const u32 k_of_a = at.a & ~kOwn, k_of_b = at.b & ~kOwn;
        load_stage(s, stage, block, {a.map_a(at), a.map_b(at), tile.row, tile.column, k_of_a, k_of_b});
    });
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
        multiply_steps(d, s, group, work.first, work.last, number);
        if (!completes(a, d, work, threadIdx.x - kGroup)) continue;
        const Tile tile = locate<kRows, kWidth>(a, work.unit, block);
        if (BOXES)
            store_tile(a, s, tile, group, d);
        else
            store_elements(a, tile, group, d);
    }
    if (threadIdx.x % kGroup == 0) stores_have_read();
}

}  // namespace shardmath

using namespace shardmath;

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    paneled(const __grid_constant__ PanelsArgument a) {
    run_block(a);
}
