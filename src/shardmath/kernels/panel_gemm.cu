// Panel GEMM of 16-bit floats: C = A B, where rows of A and columns of B arrive while others are multiplied.
//
// Compiled as gemm_tiles.cuh says, with REGIONS. Tiles go region by region, as panel_gemm.cuh says:
//
//     warp 0: waits until panels have arrived, loads boxes of A and B  ->  8 warps: multiply, round, store
#include "gemm_tiles.cuh"
#include "panel_gemm.cuh"

namespace shardmath {  // where run_block looks for what a kernel does

// -- loading -------------------------------------------------------------------------------------------

__device__ inline void load_tiles(const PanelGemmArgument& a, const Shared& s, u32 block) {
    load_tiles<kRows, kWidth, kStages>(a, s.empty, block, [&](const Tile& tile, Step at, u32 stage) {
        const u32 k_of_a = at.a & ~kOwn, k_of_b = at.b & ~kOwn;
        load_stage(s, stage, block, {a.map_a(at), a.map_b(at), tile.row, tile.column, k_of_a, k_of_b});
    });
}

__device__ inline void watch(const PanelGemmArgument&, const Shared&) {}

// -- what the other warps do ---------------------------------------------------------------------------

__device__ inline void multiply_tiles(const PanelGemmArgument& a, const Shared& s, u32 block, u32 group) {
    float d[kWidth / 2];
    u32 number = 0;
    for (Work work = first_work(a); work.unit < a.units; work = next_work(a, work)) {
        multiply_steps(d, s, group, work.first, work.last, number);
        if (!completes(a, d, work, threadIdx.x - kGroup)) continue;
        const Tile tile = locate<kRows, kWidth>(a, work.unit, block);
        store_tile({a.out, a.pitch, a.rows, a.columns}, tile.row, tile.column, group, d);
    }
}

}  // namespace shardmath

using namespace shardmath;

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    panel_gemm(const __grid_constant__ PanelGemmArgument a) {
    run_block(a);
}
