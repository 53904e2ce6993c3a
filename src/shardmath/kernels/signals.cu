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

struct FlagArgument {
    Team team;
    u32* slot;
    u32 channel;
    int peer;
};

__device__ inline u32 load_flag(const u32* slot) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(slot) : "memory");
    return value;
}

__device__ inline void change_flag(const FlagArgument& a, u32 from, Operation operation) {
    Deadline deadline;
    while (load_flag(a.slot) != from)
        if (deadline.passed(a.team)) return expire(a.team, a.peer, operation, a.channel, from, !from);
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(a.slot), "r"(from ^ 1) : "memory");
}

// torch's semaphore of one bit: the peer's slot goes from 0 to 1, once the peer has lowered it.
extern "C" __global__ void raise_flag(const __grid_constant__ FlagArgument a) { change_flag(a, 0, kFlag); }

// And this rank's own from 1 to 0, once the peer has raised it.
extern "C" __global__ void lower_flag(const __grid_constant__ FlagArgument a) { change_flag(a, 1, kSignal); }
