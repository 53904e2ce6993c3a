// A team's operations that move no data: barriers, flags and words. One block each; a channel is used by
// one stream at a time.
#include "symm.cuh"

using namespace shardmath;

struct BarrierArgument {
    Team team;
    u32 channel;
};

// As barrier() of symm.cuh, for one warp with a lane for each peer. In a graph what counts is what comes after
// the end of the kernel ahead: so the addresses are there before, the round comes during the fence, and its
// successor is written during the wait, not at the end, which would have to wait for it.
//
// The fence is for what kernels before this one have written to peers. Their end makes it visible to this
// GPU, and the fence to all; a relaxed store alone would take 0.7 us less, and order nothing.
__device__ inline void barrier_of_a_warp(const Team& team, u32 channel) {
    const int peer = threadIdx.x;
    const bool takes_part = peer < kRanks && peer != team.rank;
    Channel& own = team.own().channel(channel);
    u64* const passed = &own.round[takes_part ? peer : team.rank];
    const u64* const inbox = &own.barrier[takes_part ? peer : team.rank];
    u64* const theirs = &team.pad[takes_part ? peer : team.rank]->channel(channel).barrier[team.rank];
    asm volatile("" ::"l"(passed), "l"(inbox), "l"(theirs));
    await_earlier();
    u64 round = load_relaxed(passed);  // not from a cache that an earlier kernel has filled meanwhile
    fence();
    round += 1;
    bool arrived = true;
    if (takes_part) store_relaxed(theirs, round);
    if (peer < kRanks) *passed = round;
    if (takes_part) arrived = wait(team, inbox, round, peer, kBarrier, channel);
    arrived = __all_sync(~0u, arrived);
    if (!arrived && peer < kRanks) *passed = round - 1;
}

extern "C" __global__ void __launch_bounds__(1024) team_barrier(const __grid_constant__ BarrierArgument a) {
    if (kRanks <= 32) return barrier_of_a_warp(a.team, a.channel);
    await_earlier();
    barrier(a.team, a.channel);
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
    for (bool last = false; load_flag(a.slot) != from; last = deadline.passed(a.team, a.peer))
        if (last) return expire(a.team, a.peer, operation, a.channel, from, !from);
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(a.slot), "r"(from ^ 1) : "memory");
}

// torch's semaphore of one bit: the peer's slot goes from 0 to 1, once the peer has lowered it.
extern "C" __global__ void raise_flag(const __grid_constant__ FlagArgument a) { change_flag(a, 0, kFlag); }

// And this rank's own from 1 to 0, once the peer has raised it.
extern "C" __global__ void lower_flag(const __grid_constant__ FlagArgument a) { change_flag(a, 1, kSignal); }

struct WordArgument {
    Team team;
    u64* word;
    u64 value;
    int peer;  // who sets the word that is waited for; -1: any rank
    u32 at_least;
};

// Set a word, mostly a peer's: after all that kernels and copies before this one have written there.
extern "C" __global__ void set_word(const __grid_constant__ WordArgument a) {
    await_earlier();
    fence();
    store_release(a.word, a.value);
}

// Wait until this rank's word has the value, or one that is at least that. It stays as it is.
extern "C" __global__ void await_word(const __grid_constant__ WordArgument a) {
    await_earlier();
    const auto sets = [&](int peer) { return a.peer < 0 ? peer != a.team.rank || kRanks == 1 : peer == a.peer; };
    const auto any_gone = [&] {
        bool found = false;
        for (int peer = 0; peer < kRanks; ++peer) found |= sets(peer) && gone(a.team, peer);
        return found;
    };
    Deadline deadline;
    for (bool last = false;; last = deadline.passed(a.team, any_gone)) {
        const u64 seen = load_acquire(a.word);
        if (a.at_least ? seen >= a.value : seen == a.value) return;
        if (!last) continue;
        for (int peer = 0; peer < kRanks; ++peer)
            if (sets(peer)) note(a.team, peer, kWord, 0, a.value, seen);
        return report(a.team);
    }
}
