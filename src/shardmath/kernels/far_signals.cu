// The two halves of a barrier of GPUs of several hosts. Between them, copies on the stream carry this rank's
// round to the ranks on other hosts, whose pads have no address here: those of `pad` are null.
#include "symm.cuh"

using namespace shardmath;

struct BarrierArgument {
    Team team;
    u32 channel;
};

// This rank has come to its next round: told to the ranks of its own host, and written down for the copies.
extern "C" __global__ void advance(const __grid_constant__ BarrierArgument a) {
    Channel& own = a.team.own().channel(a.channel);
    fence();  // what kernels before this one have written to peers
    for (int peer = threadIdx.x; peer < kRanks; peer += blockDim.x) {
        const u64 round = load_relaxed(&own.round[peer]) + 1;
        own.round[peer] = round;
        Pad* const theirs = a.team.pad[peer];
        if (peer != a.team.rank && theirs) signal(&theirs->channel(a.channel).barrier[a.team.rank], round);
    }
}

// Wait until every rank has come to this round. One that expires is taken back: the next call sends and
// waits for the same again.
extern "C" __global__ void await_round(const __grid_constant__ BarrierArgument a) {
    Channel& own = a.team.own().channel(a.channel);
    bool arrived = true;
    for (int peer = threadIdx.x; peer < kRanks; peer += blockDim.x)
        if (peer != a.team.rank)
            arrived &= wait(a.team, &own.barrier[peer], load_relaxed(&own.round[peer]), peer, kBarrier, a.channel);
    arrived = __syncthreads_and(arrived);
    if (!arrived)
        for (int peer = threadIdx.x; peer < kRanks; peer += blockDim.x) own.round[peer] -= 1;
}

struct SignalArgument {
    Team team;
    u32 channel;
    int peer;
};

// torch's semaphore of one bit as two counts: it is raised while more was sent than the peer has taken. What the
// peer has taken comes back in the upper half of its signal. One that expires has sent, or taken, nothing.
extern "C" __global__ void raise_flag(const __grid_constant__ SignalArgument a) {
    Channel& own = a.team.own().channel(a.channel);
    Pad* const theirs = a.team.pad[a.peer];
    const u64 sent = load_relaxed(&own.sent[a.peer]);
    if (!wait(a.team, &own.signal[a.peer].high, sent, a.peer, kFlag, a.channel)) return;
    own.sent[a.peer] = sent + 1;
    fence();  // what kernels before this one have written to peers
    if (theirs) signal(&theirs->channel(a.channel).signal[a.team.rank].low, sent + 1);
}

extern "C" __global__ void lower_flag(const __grid_constant__ SignalArgument a) {
    Channel& own = a.team.own().channel(a.channel);
    Pad* const theirs = a.team.pad[a.peer];
    const u64 next = load_relaxed(&own.taken[a.peer]) + 1;
    if (!wait(a.team, &own.signal[a.peer].low, next, a.peer, kSignal, a.channel)) return;
    own.taken[a.peer] = next;
    if (theirs) signal(&theirs->channel(a.channel).signal[a.team.rank].high, next);
}
