// The verbs by which a kernel works with the same kernel on other ranks: peer, put, get, signal, wait,
// barrier. For CUDA C++ compiled by NVRTC or nvcc; it includes nothing.
//
// A signal is a 64-bit count that only one rank writes and only one rank waits for. It counts up and never
// returns, so a signal can come early, and a wait can be repeated. What was written before a signal is
// sent is seen after the wait for it.
//
// Every wait is bounded. One that expires notes in host memory whom it waited for, and returns false; so
// do all later waits that would not be over at once, until the host has raised its error and cleared the
// mark. A channel or a rank that does not exist is noted in the same way. Nothing traps: the CUDA context
// stays usable.
//
// Verbs of whole blocks are called by all threads of a block, in one, two or three dimensions. A channel is
// used by one block at a time.
#pragma once

#ifndef SHARDMATH_RANKS
#error "compile with -DSHARDMATH_RANKS=n, n the number of ranks: a handle's compile_options say it"
#endif

namespace shardmath {

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int kRanks = SHARDMATH_RANKS;

// What a wait was for, or why a call was refused.
enum Operation : u32 {
    kBarrier = 1,
    kSignal = 2,
    kCollective = 3,
    kUser = 4,
    kFlag = 5,
    kNoChannel = 6,
    kNoPeer = 7,
    kWrongRanks = 8,
    kProduct = 9,
    kShard = 10,
    kMismatch = 11,  // a peer's launch is another; the tags of both in place of `expected` and `seen`
    kMisfit = 12,    // what the ranks send is not what one takes; the tag and the launch in their place
    kWord = 13,      // a word that a peer sets to a value
    kNoRoom = 14,    // of experts.cu: more rows come to a rank than its result takes
    kBadRows = 15,   // a rank's counts name rows that it does not have
    kOtherRows = 16, // a rank makes another exchange
};

// What the host reads after a wait has expired. In host memory, written by one kernel at a time.
struct Late {
    u64 operation;  // an Operation, and the channel or block times 2^32
    u64 expected;
    u64 seen;
};
struct Status {
    u64 expired;  // set after the entries
    Late late[kRanks];  // by the rank that was waited for; a refused call has this rank's own
    const u64* gone;    // by rank: not 0 once the host knows that it sends no more; in host memory too, or null
};

// Sixteen bytes that one store writes and one load reads, whole.
struct __align__(16) Packet {
    u64 low, high;
};

// One channel's symmetric words. Peers write the inboxes, each its own column; the rest belongs to the rank
// itself, and is what makes a kernel that is replayed in a CUDA graph know which round it is in.
struct Channel {
    Packet signal[kRanks];  // inbox: how many signals a peer has sent, and the value of the last
    u64 barrier[kRanks];    // inbox: the round that a peer has reached
    u64 round[kRanks];      // the round that this rank has passed, one copy for each peer's thread
    u64 sent[kRanks];       // signals sent to a peer
    u64 taken[kRanks];      // a peer's signals waited for
};

// Each rank's symmetric words. As many channels follow as the team has.
struct Pad {
    u64 failed;         // a wait has expired, and the host does not know yet
    u64 broken;         // a collective has failed: these ranks' later ones do nothing

    __device__ Channel& channel(u32 number) { return ((Channel*)(this + 1))[number]; }
};

// The ranks, as a kernel sees them. Passed by value.
struct Team {
    int rank;
    int size;
    u32 channels;
    u32 unused;
    u64 timeout;  // nanoseconds
    Status* status;
    Pad* pad[kRanks];

    __device__ Pad& own() const { return *pad[rank]; }
};

// A handle, as a kernel sees it: the team that signals, and where every rank's array lies for this GPU.
struct SymmetricMemory : Team {
    char* buffer[kRanks];
    u64 nbytes[kRanks];  // from there to the end of the rank's allocation

    template <class T>
    __device__ T* peer(int number) const;
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

// Add to a word that other GPUs add to, too.
__device__ inline void add_for_all(u64* word, u64 value) {
    asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Between what was written before, by this thread or seen by it, and what it stores after, for all to see.
__device__ inline void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// For kernels that are launched before the one ahead of them on the stream has ended: what it, and all before
// it, wrote is there after this. So their launch overlaps with the kernel ahead.
__device__ inline void await_earlier() {
#if __CUDA_ARCH__ >= 900
    // The next of these kernels may come to this point too, and will wait there for the end of this one.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline Packet load_packet(const Packet* packet) {
    Packet p;
    asm volatile(
        "{\n\t.reg .b128 whole;\n\tld.relaxed.sys.global.b128 whole, [%2];\n\tmov.b128 {%0, %1}, whole;\n\t}"
        : "=l"(p.low), "=l"(p.high)
        : "l"(packet)
        : "memory");
    return p;
}

__device__ inline void store_packet(Packet* packet, Packet p) {
    asm volatile(
        "{\n\t.reg .b128 whole;\n\tmov.b128 whole, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], whole;\n\t}" ::"l"(
            packet),
        "l"(p.low), "l"(p.high)
        : "memory");
}

__device__ inline u64 nanoseconds() {
    u64 value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

// The threads of a block in a row.
__device__ inline u32 thread_number() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
__device__ inline u32 thread_count() { return blockDim.x * blockDim.y * blockDim.z; }

// -- waiting -------------------------------------------------------------------------------------------

// Whether the host knows that rank `src` sends no more. What it has sent is seen after this.
__device__ inline bool gone(const Team& team, int src) {
    const u64* const words = team.status->gone;
    return words && load_acquire(words + src) != 0;
}

// How long a wait has lasted. The clock is read only now and then: it costs more than a poll; and the host's
// memory, which is further away, more rarely. Look once more after it has passed: what was waited for may have
// come before its sender went.
struct Deadline {
    u64 end = 0;
    u32 polls = 0;

    // Of a wait for several ranks: `any_gone()` says whether one of them sends no more.
    template <class Gone>
    __device__ bool passed(const Team& team, Gone any_gone) {
        if (++polls & 255) return false;
        const u64 now = nanoseconds();
        if (end == 0) end = now + team.timeout;
        if (now > end || load_relaxed(&team.own().failed) != 0) return true;
        return (polls & 4095) == 0 && any_gone();
    }
    __device__ bool passed(const Team& team, int src) {
        return passed(team, [&] { return gone(team, src); });
    }
};

// Note why a wait for `src` has come to its end. The first note for a rank stays.
__device__ inline void note(const Team& team, int src, u32 operation, u32 place, u64 expected, u64 seen) {
    Late& late = team.status->late[src];
    if (load_relaxed(&late.operation) == 0) {
        store_relaxed(&late.expected, expected);
        store_relaxed(&late.seen, seen);
        store_relaxed(&late.operation, operation | (u64)place << 32);
    }
}

// Let the host read what was noted, and this rank's kernels wait no more.
__device__ inline void report(const Team& team) {
    store_relaxed(&team.own().failed, 1);
    store_release(&team.status->expired, 1);
}

__device__ __noinline__ inline void expire(const Team& team, int src, u32 operation, u32 place, u64 expected,
                                           u64 seen) {
    note(team, src, operation, place, expected, seen);
    report(team);
}

// Whether the kernel was compiled for these ranks, and `peer` is one of them. What is wrong is noted.
__device__ inline bool known(const Team& team, int peer) {
    if (team.size == kRanks && (u32)peer < (u32)kRanks) return true;
    if (team.size != kRanks)
        expire(team, team.rank, kWrongRanks, 0, team.size, kRanks);
    else
        expire(team, team.rank, kNoPeer, 0, kRanks, (u32)peer);
    return false;
}

// And whether the channel exists.
__device__ inline bool known(const Team& team, int peer, u32 channel) {
    if (channel >= team.channels) {
        expire(team, team.rank, kNoChannel, 0, team.channels, channel);
        return false;
    }
    return known(team, peer);
}

// Wait until `word`, which `src` writes, is at least `target`. False when that takes too long. By one thread.
__device__ inline bool wait(const Team& team, const u64* word, u64 target, int src, u32 operation = kUser,
                            u32 place = 0) {
    Deadline deadline;
    for (bool last = false;; last = deadline.passed(team, src)) {
        const u64 seen = load_acquire(word);
        if (seen >= target) return true;
        if (last) {
            expire(team, src, operation, place, target, seen);
            return false;
        }
    }
}

// Raise `word` in a peer's memory: what this thread wrote before, and what it knows of others', comes first.
// By one thread.
__device__ inline void signal(u64* word, u64 value) { store_release(word, value); }

// -- whole blocks: memory ------------------------------------------------------------------------------

// Where rank `number`'s array lies for this GPU; null, and noted, for a rank that does not exist.
template <class T>
__device__ inline T* SymmetricMemory::peer(int number) const {
    return known(*this, number) ? (T*)buffer[number] : nullptr;
}

// Copy `nbytes`, sixteen at a time where both addresses are multiples of 16.
__device__ inline void copy(void* to, const void* from, u64 nbytes) {
    const u64 me = thread_number(), all = thread_count();
    const u64 wide = (((u64)to | (u64)from) & 15) ? 0 : nbytes / 16;
    u64 i = me;
    for (; i + 3 * all < wide; i += 4 * all) {
        uint4 have[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) have[k] = ((const uint4*)from)[i + k * all];
#pragma unroll
        for (int k = 0; k < 4; ++k) ((uint4*)to)[i + k * all] = have[k];
    }
    for (; i < wide; i += all) ((uint4*)to)[i] = ((const uint4*)from)[i];
    for (u64 k = wide * 16 + me; k < nbytes; k += all) ((char*)to)[k] = ((const char*)from)[k];
}

// Write this rank's bytes into a peer's memory, or read a peer's into this rank's.
__device__ inline void put(void* peer_memory, const void* own_memory, u64 nbytes) {
    copy(peer_memory, own_memory, nbytes);
}
__device__ inline void get(void* own_memory, const void* peer_memory, u64 nbytes) {
    copy(own_memory, peer_memory, nbytes);
}

// -- whole blocks: signals -----------------------------------------------------------------------------

// Wait until every rank's block has called it with the same channel: before reading what peers wrote, after
// writing what they will read. False for all threads when it expired; the next call then waits for the same
// round again, for the peers may still come.
__device__ inline bool barrier(const Team& team, u32 channel, u32 operation = kBarrier) {
    if (!known(team, 0, channel)) return false;
    Channel& own = team.own().channel(channel);
    const int me = thread_number(), all = thread_count();
    // All copies of the round are equal. Each is read and written by one thread, so that no thread can
    // find the round of the next call before it has finished this one.
    u64 round = 0;
    if (me < team.size) round = load_relaxed(&own.round[me]);
    __syncthreads();  // every thread has written what it will
    if (me < team.size) fence();  // which takes as long as the round needs to come
    round += 1;
    for (int peer = me; peer < team.size; peer += all)
        if (peer != team.rank) store_relaxed(&team.pad[peer]->channel(channel).barrier[team.rank], round);
    bool arrived = true;
    for (int peer = me; peer < team.size; peer += all)
        if (peer != team.rank) arrived &= wait(team, &own.barrier[peer], round, peer, operation, channel);
    arrived = __syncthreads_and(arrived);
    if (arrived)
        for (int peer = me; peer < team.size; peer += all) own.round[peer] = round;
    return arrived;
}

// Send one more signal to `dst`: what this block has written before comes first. Never waits for the peer.
__device__ inline bool put_signal(const Team& team, int dst, u32 channel) {
    if (!known(team, dst, channel)) return false;
    __syncthreads();
    if (thread_number() == 0) {
        u64* const sent = &team.own().channel(channel).sent[dst];
        const u64 count = load_relaxed(sent) + 1;
        signal(&team.pad[dst]->channel(channel).signal[team.rank].low, count);
        *sent = count;
    }
    return true;
}

// Write `nbytes` into the memory of `dst`, and then send it one more signal.
__device__ inline bool put_signal(const Team& team, int dst, u32 channel, void* peer_memory, const void* own_memory,
                                  u64 nbytes) {
    if (!known(team, dst, channel)) return false;
    put(peer_memory, own_memory, nbytes);
    return put_signal(team, dst, channel);
}

// Wait for one more signal of `src`; what it wrote before is then seen by all threads. One that expires is
// still owed: the next call waits for it again.
__device__ inline bool wait_signal(const Team& team, int src, u32 channel) {
    if (!known(team, src, channel)) return false;
    bool arrived = true;
    if (thread_number() == 0) {
        Channel& own = team.own().channel(channel);
        const u64 next = load_relaxed(&own.taken[src]) + 1;
        arrived = wait(team, &own.signal[src].low, next, src, kSignal, channel);
        if (arrived) own.taken[src] = next;
    }
    return __syncthreads_and(arrived);
}

// -- whole blocks: data that says itself that it has come ------------------------------------------------

// Send one more signal with eight bytes, in one store: nothing is waited for, and nothing else that was
// written is ordered before it. The peer sees the value of the last signal only, so send the next one when
// you know that it has taken this one.
__device__ inline bool put_value(const Team& team, int dst, u32 channel, u64 value) {
    if (!known(team, dst, channel)) return false;
    if (thread_number() == 0) {
        u64* const sent = &team.own().channel(channel).sent[dst];
        const u64 count = load_relaxed(sent) + 1;
        store_packet(&team.pad[dst]->channel(channel).signal[team.rank], {count, value});
        *sent = count;
    }
    return true;
}

// Wait for one more signal of `src`, and give its value to all threads.
__device__ inline bool wait_value(const Team& team, int src, u32 channel, u64& value) {
    if (!known(team, src, channel)) return false;
    Channel& own = team.own().channel(channel);
    const u64 next = load_relaxed(&own.taken[src]) + 1;
    Deadline deadline;
    bool arrived = true;
    for (bool last = false;; last = deadline.passed(team, src)) {
        const Packet seen = load_packet(&own.signal[src]);
        value = seen.high;
        if (seen.low >= next) break;
        if (last) {
            expire(team, src, kSignal, channel, next, seen.low);
            arrived = false;
            break;
        }
    }
    arrived = __syncthreads_and(arrived);
    if (arrived && thread_number() == 0) own.taken[src] = next;
    __syncthreads();  // no thread looks for the next signal before that is written
    return arrived;
}

// How many packets carry `nbytes`.
__device__ inline u64 packets_for(u64 nbytes) { return (nbytes + 7) / 8; }

// Eight bytes of memory from byte 8 * i on, of which `nbytes` count; and back.
__device__ inline u64 load_eight(const void* memory, u64 i, u64 nbytes) {
    if (((u64)memory & 7) == 0 && 8 * i + 8 <= nbytes) return ((const u64*)memory)[i];
    u64 data = 0;
    for (u64 k = 8 * i; k < 8 * i + 8 && k < nbytes; ++k)
        data |= (u64)((const unsigned char*)memory)[k] << 8 * (k & 7);
    return data;
}
__device__ inline void store_eight(void* memory, u64 i, u64 nbytes, u64 data) {
    if (((u64)memory & 7) == 0 && 8 * i + 8 <= nbytes) {
        ((u64*)memory)[i] = data;
        return;
    }
    for (u64 k = 8 * i; k < 8 * i + 8 && k < nbytes; ++k)
        ((unsigned char*)memory)[k] = (unsigned char)(data >> 8 * (k & 7));
}

// Send `nbytes` as packets: eight bytes, and beside them `number`. No fence, and no signal; twice the bytes.
// `room`, of packets_for(nbytes), is in the peer's memory. It is zero at first, and each time that it is
// used again `number` is greater, and the peer has taken what was there before.
__device__ inline void put_packets(Packet* room, const void* own_memory, u64 nbytes, u64 number) {
    for (u64 i = thread_number(); i < packets_for(nbytes); i += thread_count())
        store_packet(room + i, {load_eight(own_memory, i, nbytes), number});
}

// Wait for all packets of `number` from `src`, and write what they carry to `own_memory`.
__device__ inline bool wait_packets(const Team& team, int src, void* own_memory, const Packet* room, u64 nbytes,
                                    u64 number) {
    if (!known(team, src)) return false;
    Deadline deadline;
    bool arrived = true;
    for (u64 i = thread_number(); arrived && i < packets_for(nbytes); i += thread_count()) {
        Packet seen = load_packet(room + i);
        for (bool last = false; seen.high < number && !last; seen = load_packet(room + i))
            last = deadline.passed(team, src);
        arrived = seen.high >= number;
        if (arrived)
            store_eight(own_memory, i, nbytes, seen.low);
        else
            expire(team, src, kUser, 0, number, seen.high);
    }
    return __syncthreads_and(arrived);
}

}  // namespace shardmath
