// A team's operations that move no data: barrier, put_signal, wait_signal. One block each; a channel is
// used by one stream at a time.
#include "symm.cuh"

using namespace shardmath;

struct BarrierArgument {
    Team team;
    u32 channel;
};

extern "C" __global__ void __launch_bounds__(1024) team_barrier(const __grid_constant__ BarrierArgument a) {
    barrier(a.team, a.channel);
}

struct SignalArgument {
    Team team;
    u32 channel;
    int peer;
};

// One more signal to `peer`. Never waits: signals are counted.
extern "C" __global__ void put_signal(const __grid_constant__ SignalArgument a) {
    u64& sent = a.team.own().sent[a.channel][a.peer];
    signal(&a.team.pad[a.peer]->signal[a.channel][a.team.rank], ++sent);
}

// Wait for one more signal of `peer`. One that expires is still owed: the next call waits for it again.
extern "C" __global__ void wait_signal(const __grid_constant__ SignalArgument a) {
    Pad& own = a.team.own();
    const u64 next = own.taken[a.channel][a.peer] + 1;
    if (wait(a.team, &own.signal[a.channel][a.peer], next, a.peer, kSignal, a.channel))
        own.taken[a.channel][a.peer] = next;
}
