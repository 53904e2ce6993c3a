// Packets sent into peers' cells: data that says itself that it has come, without fence or flag.
//
//     rank 0, thread t  --- 16 bytes, one store --->  cell (block, t, from 0) of rank 1, thread t
//
// A cell is empty (all ones) or full. Its one writer is a thread of a peer, its one reader the same thread of
// the owner, who empties it right after reading. Threads of one rank never wait for each other.
//
// Reuse. A collective is a row of turns, and a block uses three sets of cells in turn. In each turn every
// thread that takes part hears from every peer, even from one that has nothing to say; and it sends nothing
// of turn t + 2 before it has completed turn t. So a peer that writes into the cells of turn t has heard from
// the reader in turn t + 1 or later, which the reader began to answer after it had emptied them. `settle`
// between turns, or the end of the kernel, makes the emptying take effect first.
//
// Floats fill all 16 bytes: all ones is a NaN, and a packet that ends with it travels as a neighbouring
// NaN. Other data may have any bits: it fills 8 bytes, and the number of the turn stands beside it.
#pragma once

#include "elements.cuh"
#include "symm.cuh"

namespace shardmath {

constexpr int kThreads = 512;  // the most threads of a block that uses cells

// How data of one kind travels.
template <bool floats>
struct Wire;
template <>
struct Wire<true> {
    static constexpr int kBytes = 16;
    static __device__ Packet seal(Packet p, u64) {
        // The last word is never all ones: that NaN becomes its neighbour.
        const u32 last = (u32)(p.high >> 32);
        p.high = (u64)(last < 0xfffffffeu ? last : 0xfffffffeu) << 32 | (u32)p.high;
        return p;
    }
    static __device__ bool full(Packet p, u64) { return (p.high >> 32) != 0xffffffffu; }
};
template <>
struct Wire<false> {
    static constexpr int kBytes = 8;
    static __device__ Packet seal(Packet p, u64 turn) { return {p.low, turn}; }
    static __device__ bool full(Packet p, u64 turn) { return p.high == turn; }
};

constexpr int kSets = 3;
constexpr int kMostAtOnce = kRanks == 2 ? 4 : 1;  // packets of a thread to each rank in a turn: see take_turns
constexpr int kPhases = kRanks == 2 ? 4 : 2;

// Every rank's cells, [block][set][phase][from][thread]: to[i] are those of rank (rank + 1 + i) % size. A rank
// sends to its own cells too: that is cheaper than an exception for its own packet everywhere.
struct Cells {
    Team team;
    u64* turns;  // by block: those that it has taken in these cells
    Packet* to[kRanks];

    __device__ Packet* own() const { return to[kRanks - 1]; }
};

// The rank that to[i] belongs to.
__device__ inline u32 rank_at(const Cells& cells, int i) {
    const u32 rank = cells.team.rank + 1 + i;
    return rank < kRanks ? rank : rank - kRanks;
}

// One thread's place in the turns of its block.
struct Turn {
    u64 number;
    u32 set;

    __device__ explicit Turn(const Cells& cells) {
        number = cells.turns[blockIdx.x] + 1;
        set = (u32)(number % kSets);
    }
    __device__ Turn next() const {
        Turn later = *this;
        later.number += 1;
        later.set = set + 1 == kSets ? 0 : set + 1;
        return later;
    }
    // The thread's cell for packets from rank 0, counted from a rank's first cell.
    __device__ u32 cell(int phase) const {
        return ((blockIdx.x * kSets + set) * kPhases + phase) * kRanks * kThreads + threadIdx.x;
    }
};

// Between two turns: the cells that this thread has emptied are empty for the peers too, before it sends
// anything more. Cells are this GPU's own memory, and its L2 cache is where the peers' stores to them arrive:
// a fence of the GPU suffices. One of the system would wait for all that is on its way to the peers.
__device__ inline void settle() { __threadfence(); }

// Called by all threads of a block, with the turn after its last.
__device__ inline void finish(const Cells& cells, const Turn& after) {
    __syncthreads();
    if (threadIdx.x == 0) cells.turns[blockIdx.x] = after.number - 1;
}

// Send a packet to every rank: `pick(i)` to the one of to[i].
template <class Pick>
__device__ inline void send(const Cells& cells, const Turn& turn, int phase, Pick pick) {
    const u32 place = turn.cell(phase) + cells.team.rank * kThreads;
#pragma unroll
    for (int i = 0; i < kRanks; ++i) store_packet(cells.to[i] + place, pick(i));
}

// Poll this thread's cells until all are full, and empty them. False when that takes too long.
template <class Wire>
__device__ inline bool receive(const Cells& cells, const Turn& turn, int phase, Packet (&packets)[kRanks]) {
    Packet* const first = cells.own() + turn.cell(phase);
    Deadline deadline;
    for (;;) {
        bool full = true;
#pragma unroll
        for (int from = 0; from < kRanks; ++from) packets[from] = load_packet(first + from * kThreads);
#pragma unroll
        for (int from = 0; from < kRanks; ++from) full &= Wire::full(packets[from], turn.number);
        if (full) break;
        if (deadline.passed(cells.team)) {
#pragma unroll 1
            for (int from = 0; from < kRanks; ++from)
                if (!Wire::full(load_packet(first + from * kThreads), turn.number))
                    expire(cells.team, from, kCollective, blockIdx.x, turn.number, turn.number - 1);
            return false;
        }
    }
#pragma unroll
    for (int from = 0; from < kRanks; ++from) store_packet(first + from * kThreads, {~0ull, ~0ull});
    return true;
}

// The turns of this block in an exchange of `packets`: `read(at, out)` says what goes to the ranks of to[], and
// `write(at, have)` gets what all ranks have sent for the same place. Each packet of a turn has a phase of its own.
template <class Wire, int kAtOnce, class Read, class Write>
__device__ inline void take_turns_of(const Cells& cells, u32 packets, Read read, Write write) {
    static_assert(kAtOnce <= kPhases, "a phase for each");
    const u32 stride = gridDim.x * blockDim.x;
    Turn turn(cells);
    for (u32 row = blockIdx.x * blockDim.x; row < packets; row += kAtOnce * stride, turn = turn.next()) {
        const u32 first = row + threadIdx.x;
        if (first >= packets) continue;
        Packet out[kAtOnce][kRanks];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) read(first + k * stride, out[k]);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
            if (first + k * stride < packets)
                send(cells, turn, k, [&](int i) { return Wire::seal(out[k][i], turn.number); });
        bool come = true;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            Packet have[kRanks];
            if (!come || first + k * stride >= packets) break;
            come = receive<Wire>(cells, turn, k, have);
            if (come) write(first + k * stride, have);
        }
        if (!come) break;
        if (first + kAtOnce * stride < packets) settle();
    }
    finish(cells, turn);
}

// Between two ranks one packet of each thread is too little to fill the link until it is answered. Where there are
// no more, what sends several is 0.2 us later.
template <class Wire, class Read, class Write>
__device__ inline void take_turns(const Cells& cells, u32 packets, Read read, Write write) {
    if (kMostAtOnce == 1 || packets <= gridDim.x * blockDim.x)
        take_turns_of<Wire, 1>(cells, packets, read, write);
    else
        take_turns_of<Wire, kMostAtOnce>(cells, packets, read, write);
}

// -- operands ------------------------------------------------------------------------------------------

// Bytes in packets of kBytes. With kWhole, address and size are multiples of kBytes; else `Unit` divides them.
template <int kBytes, class Unit, bool kWhole>
struct Stretch {
    char* start;
    u64 nbytes;

    __device__ u32 packets() const { return (u32)((nbytes + kBytes - 1) / kBytes); }

    // The packet at `at`, all of which is inside and at its alignment.
    __device__ Packet whole(u32 at) const {
        const char* address = start + (u64)at * kBytes;
        if (kBytes == 8) return {*(const u64*)address, 0};
        const ulonglong2 words = *(const ulonglong2*)address;
        return {words.x, words.y};
    }

    // The packet at `at`; zeros from the end on.
    __device__ Packet read(u32 at) const {
        Packet p = {0, 0};
        const char* address = start + (u64)at * kBytes;
        if (at >= packets()) return p;
        if (kWhole || is_whole(at)) return whole(at);
        Unit* units = (Unit*)&p;
#pragma unroll
        for (int i = 0; i < kBytes / (int)sizeof(Unit); ++i)
            if ((u64)at * kBytes + i * sizeof(Unit) < nbytes) units[i] = ((const Unit*)address)[i];
        return p;
    }

    // Put a packet there; what lies beyond the end is dropped.
    __device__ void write(u32 at, Packet p) const {
        char* address = start + (u64)at * kBytes;
        if (at >= packets()) return;
        if (kWhole || is_whole(at)) {
            if (kBytes == 8)
                *(u64*)address = p.low;
            else
                *(ulonglong2*)address = make_ulonglong2(p.low, p.high);
            return;
        }
        const Unit* units = (const Unit*)&p;
#pragma unroll
        for (int i = 0; i < kBytes / (int)sizeof(Unit); ++i)
            if ((u64)at * kBytes + i * sizeof(Unit) < nbytes) ((Unit*)address)[i] = units[i];
    }

    __device__ bool is_whole(u32 at) const {
        return ((u64)start & (kBytes - 1)) == 0 && ((u64)at + 1) * kBytes <= nbytes;
    }
};

}  // namespace shardmath
