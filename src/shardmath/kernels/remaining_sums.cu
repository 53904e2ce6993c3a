// The sums that the product's blocks have not begun with, when it has ended and all tiles have come: by all
// multiprocessors. See tile_sums.cuh.
//
// Then all ranks are told that this one has taken its tiles; where sums are shared, that its sums are everywhere,
// and the kernel ends when those of all ranks are here.
#include "tile_sums.cuh"

using namespace shardmath;

constexpr u32 kThreads = 512;

struct RestArgument {
    Team team;
    TileSumsArgument sums;
};

// What nobody has claimed of 32 chunks or fewer, the first of them `low`: one warp's share.
__device__ inline void reduce_unclaimed(const TileSumsArgument& a, u32 low, u32 warp, u32 warps) {
    const u32 chunk = low + threadIdx.x % 32;
    u32 from = 0, end = 0;
    if (chunk < a.count) {
        end = a.chunks[chunk].end * kVectors;
        from = a.first_tile(chunk) * kVectors + a.claimed[chunk] * kPiece;
    }
    for (u32 left = __ballot_sync(~0u, from < end); left; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        reduce_tiles<1>(a, __shfl_sync(~0u, from, lane), __shfl_sync(~0u, end, lane), warp, warps);
    }
}

// This block has ended. The last one tells all ranks and its own next launch, and waits for shared sums. By a warp.
__device__ inline void end_block(const Team& team, const TileSumsArgument& a) {
    const u32 lane = threadIdx.x % 32;
    Ledger* const own = a.ledger[team.rank];
    bool last = false;
    if (lane == 0) {
        fence();  // what the block has written to peers comes first
        last = add_here(&own->blocks, 1) + 1 == gridDim.x;
    }
    if (!__shfl_sync(~0u, last, 0)) return;
    const u64 launches = a.launch(team) + 1;
    for (u32 chunk = lane; chunk < a.count; chunk += 32) a.claimed[chunk] = 0;
    __syncwarp();
    if (lane == 0) {
        own->blocks = 0;
        own->launches = launches;
    }
    if (load_relaxed(&team.own().failed)) return;
    for (u32 rank = lane; rank < kRanks; rank += 32) store_release(&a.ledger[rank]->taken[team.rank], launches);
    for (u32 rank = lane; SHARED && rank < kRanks; rank += 32) wait(team, &own->taken[rank], launches, rank, kProduct);
}

extern "C" __global__ void __launch_bounds__(kThreads) remaining_sums(const __grid_constant__ RestArgument a) {
    asm volatile("griddepcontrol.wait;" ::: "memory");  // it is launched early
    constexpr u32 kWarps = kThreads / 32;
    const u32 warp = blockIdx.x * kWarps + threadIdx.x / 32, warps = gridDim.x * kWarps;
    const bool lost = load_relaxed(&a.team.own().failed);  // tiles have not come, or their rank has not begun
    for (u32 low = 0; !lost && low < a.sums.count; low += 32) reduce_unclaimed(a.sums, low, warp, warps);
    __syncthreads();
    if (threadIdx.x < 32) end_block(a.team, a.sums);
}
