// The verbs by which a kernel works with the same kernel on other ranks: peer, put, get, signal, wait,
// barrier. For CUDA C++ compiled by NVRTC or nvcc; it includes nothing.
//
// A signal is a 64-bit word that only one rank writes and only one rank waits for. It counts up and never
// returns, so a signal can come early, and a wait can be repeated. What was written before a signal is
// sent is seen after the wait for it.
//
// Every wait is bounded. One that expires notes in host memory whom it waited for, and returns false; so
// do all later waits that would not be over at once, until the host has raised its error and cleared the
// mark. Nothing traps: the CUDA context stays usable.
#pragma once

#ifndef SHARDMATH_RANKS
#define SHARDMATH_RANKS 8  // the number of ranks; the host compiles with the right one
#endif
#ifndef SHARDMATH_CHANNELS
#define SHARDMATH_CHANNELS 64  // independent barriers and signals of one team
#endif

namespace shardmath {

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int kRanks = SHARDMATH_RANKS;
constexpr int kChannels = SHARDMATH_CHANNELS;
constexpr int kBlocks = 512;    // the most blocks that a kernel on cells has

enum Operation : u32 { kBarrier = 1, kSignal = 2, kCollective = 3, kUser = 4, kFlag = 5, kProduct = 6 };

// What the host reads after a wait has expired. In host memory, written by one kernel at a time.
struct Late {
    u64 operation;  // an Operation, and the channel or block times 2^32
    u64 expected;
    u64 seen;
};
struct Status {
    u64 expired;  // set after the entries
    Late late[kRanks];  // by the rank that was waited for
};

// Each rank's symmetric words. Peers write the inboxes, each its own column; the rest belongs to the
// rank itself, and is what makes a kernel that is replayed in a CUDA graph know which round it is in.
struct Pad {
    u64 barrier[kChannels][kRanks];  // inbox: the round that a peer has reached
    u64 signal[kChannels][kRanks];   // inbox: how many signals a peer has sent
    u64 round[kChannels];            // barriers passed
    u64 sent[kChannels][kRanks];     // signals sent to a peer
    u64 taken[kChannels][kRanks];    // a peer's signals waited for
    u64 turn[kBlocks];               // collectives that a block has taken part in
    u64 failed;                      // a wait has expired, and the host does not know yet
};

// The ranks, as a kernel sees them. Passed by value.
struct Team {
    int rank;
    int size;
    u64 timeout;  // nanoseconds
    Status* status;
    Pad* pad[kRanks];

    __device__ Pad& own() const { return *pad[rank]; }
};

// -- words ---------------------------------------------------------------------------------------------

__device__ inline u64 load_acquire(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ inline u64 load_relaxed(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ inline void store_release(u64* word, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ inline void store_relaxed(u64* word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ inline u64 nanoseconds() {
    u64 value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

// -- waiting -------------------------------------------------------------------------------------------

// How long a wait has lasted. The clock is read only now and then: it costs more than a poll.
struct Deadline {
    u64 end = 0;
    u32 polls = 0;

    __device__ bool passed(const Team& team) {
        if (++polls & 255) return false;
        const u64 now = nanoseconds();
        if (end == 0) end = now + team.timeout;
        return now > end || load_relaxed(&team.own().failed) != 0;
    }
};

// Note that a wait for `src` has come to its end. The first note for a rank stays.
__device__ __noinline__ inline void expire(const Team& team, int src, u32 operation, u32 place, u64 expected, u64 seen) {
    Late& late = team.status->late[src];
    if (load_relaxed(&late.operation) == 0) {
        store_relaxed(&late.expected, expected);
        store_relaxed(&late.seen, seen);
        store_relaxed(&late.operation, operation | (u64)place << 32);
    }
    store_relaxed(&team.own().failed, 1);
    store_release(&team.status->expired, 1);
}

// Wait until `word`, which `src` writes, is at least `target`. False when that takes too long.
__device__ inline bool wait(const Team& team, const u64* word, u64 target, int src, u32 operation = kUser,
                            u32 place = 0) {
    Deadline deadline;
    for (;;) {
        const u64 seen = load_acquire(word);
        if (seen >= target) return true;
        if (deadline.passed(team)) {
            expire(team, src, operation, place, target, seen);
            return false;
        }
    }
}

// Raise `word` in a peer's memory: what this thread wrote before, and what it knows of others', comes first.
__device__ inline void signal(u64* word, u64 value) { store_release(word, value); }

// -- whole blocks --------------------------------------------------------------------------------------

// Wait until every rank's block has called it with the same channel: before reading what peers wrote, after
// writing what they will read. To be called by all threads of one block; false for all when it expired.
__device__ inline bool barrier(const Team& team, u32 channel, u32 operation = kBarrier) {
    Pad& own = team.own();
    const u64 round = own.round[channel] + 1;
    __syncthreads();  // every thread has read the round, and has written what it will
    bool arrived = true;
    for (int peer = threadIdx.x; peer < team.size; peer += blockDim.x) {
        if (peer == team.rank) continue;
        signal(&team.pad[peer]->barrier[channel][team.rank], round);
        arrived &= wait(team, &own.barrier[channel][peer], round, peer, operation, channel);
    }
    arrived = __syncthreads_and(arrived);
    // An expired round is waited for again by the next call: the peers may still come.
    if (arrived && threadIdx.x == 0) own.round[channel] = round;
    return arrived;
}

// Copy `nbytes`, both addresses multiples of 16 where they can be: by all threads of one block.
__device__ inline void copy(void* to, const void* from, u64 nbytes) {
    const u64 misfit = ((u64)to | (u64)from) & 15;
    const u64 wide = misfit ? 0 : nbytes / 16;
    for (u64 i = threadIdx.x; i < wide; i += blockDim.x) ((uint4*)to)[i] = ((const uint4*)from)[i];
    for (u64 i = wide * 16 + threadIdx.x; i < nbytes; i += blockDim.x)
        ((char*)to)[i] = ((const char*)from)[i];
}

// Write this rank's bytes into a peer's memory, or read a peer's into this rank's. By one block.
__device__ inline void put(void* peer_memory, const void* own_memory, u64 nbytes) {
    copy(peer_memory, own_memory, nbytes);
}
__device__ inline void get(void* own_memory, const void* peer_memory, u64 nbytes) {
    copy(own_memory, peer_memory, nbytes);
}

}  // namespace shardmath
