// Before copy engines hand this rank's rows to all peers: have they read those of the launch before? A thread a peer.
//
// Copies cannot be called off. Where a peer is waited for in vain, `sending` stays as it is: none is told of rows.
#include "row_push.cuh"

using namespace shardmath;

struct RowPushArgument {
    Team team;
    Words* own;
};

extern "C" __global__ void __launch_bounds__(64) await_readers(const __grid_constant__ RowPushArgument a) {
    Words& own = *a.own;
    const u32 me = threadIdx.x;
    const u64 launch = own.begun + 1;
    bool well = true;
    if (me < kRanks && me != a.team.rank) well = wait(a.team, &own.read[me], launch - 1, me, kShard, me);
    well = __syncthreads_and(well);
    if (well && me < kChunks) own.sending[me] = launch;
    if (me == 0) own.begun = launch;
}
