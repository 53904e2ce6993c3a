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
    const TakeArgument& take = a.take;
    Ledger* const own = take.ledger[a.team.rank];
    const u32 first = first_tile(take, take.count - take.late) * kVectors, end = take.chunks[take.count - 1].end * kVectors;
    for (u32 number = first + blockIdx.x * kThreads + threadIdx.x; number < end; number += gridDim.x * kThreads) {
        Vector parts[kRanks];
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank)
            parts[rank] = load_slot(take.slots + rank * take.stride + (u64)number * 16);
        add_up(take, parts, number);
    }
    __syncthreads();
    if (threadIdx.x || !ends_last(own)) return;
    const u64 launch = own->launches;
    for (int rank = 0; rank < kRanks; ++rank) store_release(&take.ledger[rank]->taken[a.team.rank], launch + 1);
    for (u32 chunk = take.count - take.late; SHARED && chunk < take.count; ++chunk)
        tell_ready(a.team, take, chunk, launch);
    if (!SHARED) own->launches = launch + 1;
}
