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
    constexpr u32 kWarps = kThreads / 32;
    for (u32 chunk = a.take.count - a.take.late; chunk < a.take.count; ++chunk)
        take<1>(a.take, chunk, blockIdx.x * kWarps + threadIdx.x / 32, gridDim.x * kWarps);
    __syncthreads();
    if (threadIdx.x == 0) end_block(a.team, a.take.ledger);
}
