// The last chunk of the tiles that an owner takes, which have all come: by all multiprocessors, after the
// product has ended. See taking.cuh.
#include "taking.cuh"

using namespace shardmath;

constexpr u32 kThreads = 512;

struct LastArgument {
    Team team;
    TakeArgument take;
};

extern "C" __global__ void __launch_bounds__(kThreads) take_last(const __grid_constant__ LastArgument a) {
    Ledger* const own = a.take.ledger[a.team.rank];
    take<1>(a.take, a.take.count - 1, blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);
    __syncthreads();
    if (threadIdx.x || !ends_last(own)) return;
    const u64 launch = own->launches;
    for (int rank = 0; rank < kRanks; ++rank) store_release(&a.take.ledger[rank]->taken[a.team.rank], launch + 1);
    if (SHARED)
        tell_ready(a.team, a.take, a.take.count - 1, launch);
    else
        own->launches = launch + 1;
}
