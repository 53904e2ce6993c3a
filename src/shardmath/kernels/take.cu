// The last chunks of the tiles that an owner takes, which have all come: by all multiprocessors, after the
// product has ended. See taking.cuh.
#include "taking.cuh"

using namespace shardmath;

constexpr u32 kThreads = 512;

struct LastArgument {
    Team team;
    TakeArgument take;
};

extern "C" __global__ void __launch_bounds__(kThreads) take_last(const __grid_constant__ LastArgument a) {
    const TakeArgument& tiles = a.take;
    Ledger* const own = tiles.ledger[a.team.rank];
    for (u32 chunk = tiles.count - tiles.late; chunk < tiles.count; ++chunk)
        take<1>(tiles, chunk, blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);
    __syncthreads();
    if (threadIdx.x || !ends_last(own)) return;
    const u64 launch = own->launches;
    for (int rank = 0; rank < kRanks; ++rank) store_release(&tiles.ledger[rank]->taken[a.team.rank], launch + 1);
    for (u32 chunk = tiles.count - tiles.late; SHARED && chunk < tiles.count; ++chunk)
        tell_ready(a.team, tiles, chunk, launch);
    if (!SHARED) own->launches = launch + 1;
}
