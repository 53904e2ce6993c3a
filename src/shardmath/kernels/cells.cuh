// Packets stored into peers' cells: each store carries data and its own arrival flag, and needs no fence, as
// in NCCL's low-latency (LL) protocol.
//
//     rank 0, thread t  --- 16 bytes, one store --->  cell (block, t, from 0) of rank 1, thread t
//
// A cell is empty (all ones) or full. Its one writer is a thread of a peer, its one reader the same thread of
// the owner, who empties it right after reading. Threads of one rank never wait for each other.
//
// Reuse. A collective is a sequence of steps, and a block uses three sets of cells, one after the other. In each
// step every thread that takes part hears from every peer, even from one that has nothing to say; and it sends nothing
// of step t + 2 before it has completed step t. So a peer that writes into the cells of step t has heard from
// the reader in step t + 1 or later, which the reader began to answer after it had emptied them. `fence_cells`
// between steps, or the end of the kernel, makes the emptying take effect first.
//
// Floats fill all 16 bytes: all ones is a NaN, and a packet that ends with it travels as a neighbouring
// NaN. Other data may have any bits: it fills 8 bytes, and the number of the step stands beside it.
#pragma once

#include "elements.cuh"
#include "symm.cuh"

namespace shardmath {

constexpr int kThreads = 512;  // the most threads of a block that uses cells

// How a packet carries data and its arrival flag.
template <bool floats>
struct PacketFormat;
template <>
struct PacketFormat<true> {
    static constexpr int kBytes = 16;
    static __device__ Packet encode(Packet p, u64) {
        // The last word is never all ones: that NaN becomes its neighbour.
        const u32 last = (u32)(p.high >> 32);
        p.high = (u64)(last < 0xfffffffeu ? last : 0xfffffffeu) << 32 | (u32)p.high;
        return p;
    }
    static __device__ bool full(Packet p, u64) { return (p.high >> 32) != 0xffffffffu; }
};
template <>
struct PacketFormat<false> {
    static constexpr int kBytes = 8;
    static __device__ Packet encode(Packet p, u64 step) { return {p.low, step}; }
    static __device__ bool full(Packet p, u64 step) { return p.high == step; }
};

constexpr int kSets = 3;
constexpr int kAtOnce = kRanks == 2 ? 4 : 1;  // packets of a thread to each rank that are under way: see run_steps
constexpr int kPhases = kRanks == 2 ? 4 : 2;

// Every rank's cells, [block][set][phase][from][thread]: to[i] are those of rank (rank + 1 + i) % size. A rank
// sends to its own cells too: that is cheaper than an exception for its own packet everywhere.
struct Cells {
    Team team;
    u64* steps;  // by block: those that it has done in these cells
    Packet* to[kRanks];

    __device__ Packet* own() const { return to[kRanks - 1]; }
};

// The rank that to[i] belongs to.
__device__ inline u32 rank_at(const Cells& cells, int i) {
    const u32 rank = cells.team.rank + 1 + i;
    return rank < kRanks ? rank : rank - kRanks;
}

// The step that a thread is in.
struct Step {
    u64 number;
    u32 set;

    __device__ explicit Step(const Cells& cells) {
        number = cells.steps[blockIdx.x] + 1;
        set = (u32)(number % kSets);
    }
    __device__ Step next() const {
        Step later = *this;
        later.number += 1;
        later.set = set + 1 == kSets ? 0 : set + 1;
        return later;
    }
    // The thread's cell for packets from rank 0, counted from a rank's first cell.
    __device__ u32 cell(int phase) const {
        return ((blockIdx.x * kSets + set) * kPhases + phase) * kRanks * kThreads + threadIdx.x;
    }
};

// Between two steps: the cells that this thread has emptied are empty for the peers too, before it sends
// anything more. Cells are this GPU's own memory, and its L2 cache is where the peers' stores to them arrive:
// a fence of the GPU suffices. One of the system would wait for all that is on its way to the peers.
__device__ inline void fence_cells() { __threadfence(); }

// Called by all threads of a block, with the step after its last.
__device__ inline void finish(const Cells& cells, const Step& after) {
    __syncthreads();
    if (threadIdx.x == 0) cells.steps[blockIdx.x] = after.number - 1;
}

// Send a packet to every rank: `pick(i)` to the one of to[i].
template <class Pick>
__device__ inline void send(const Cells& cells, const Step& step, int phase, Pick pick) {
    const u32 place = step.cell(phase) + cells.team.rank * kThreads;
#pragma unroll
    for (int i = 0; i < kRanks; ++i) store_packet(cells.to[i] + place, pick(i));
}

// Poll this thread's cells until all are full, and empty them. False on a timeout.
template <class Format>
__device__ inline bool receive(const Cells& cells, const Step& step, int phase, Packet (&packets)[kRanks]) {
    Packet* const first = cells.own() + step.cell(phase);
    Deadline deadline;
    const auto empty = [&](int from) { return !Format::full(load_packet(first + from * kThreads), step.number); };
    const auto any_gone = [&] {
        bool found = false;
#pragma unroll 1
        for (int from = 0; from < kRanks && !found; ++from) found = gone(cells.team, from) && empty(from);
        return found;
    };
    for (bool last = false;; last = deadline.passed(cells.team, any_gone)) {
        bool full = true;
#pragma unroll
        for (int from = 0; from < kRanks; ++from) packets[from] = load_packet(first + from * kThreads);
#pragma unroll
        for (int from = 0; from < kRanks; ++from) full &= Format::full(packets[from], step.number);
        if (full) break;
        if (last) {
#pragma unroll 1
            for (int from = 0; from < kRanks; ++from)
                if (empty(from))
                    expire(cells.team, from, kCollective, blockIdx.x, step.number, step.number - 1);
            return false;
        }
    }
#pragma unroll
    for (int from = 0; from < kRanks; ++from) store_packet(first + from * kThreads, {~0ull, ~0ull});
    return true;
}

// The steps of this block in an exchange of `packets`: `read(at, out)` says what goes to the ranks of to[], and
// `write(at, have)` gets what all ranks have sent for the same place. Each packet of a step has a phase of its own.
// Between two ranks one packet of each thread is too little to fill the link for as long as it takes to answer.
template <class Format, class Read, class Write>
__device__ inline void run_steps(const Cells& cells, u32 packets, Read read, Write write) {
    static_assert(kAtOnce <= kPhases, "a phase for each");
    const u32 stride = gridDim.x * blockDim.x;
    Step step(cells);
    for (u32 row = blockIdx.x * blockDim.x; row < packets; row += kAtOnce * stride, step = step.next()) {
        const u32 first = row + threadIdx.x;
        if (first >= packets) continue;
        Packet out[kAtOnce][kRanks];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) read(first + k * stride, out[k]);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
            if (first + k * stride < packets)
                send(cells, step, k, [&](int i) { return Format::encode(out[k][i], step.number); });
        bool come = true;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            Packet have[kRanks];
            if (!come || first + k * stride >= packets) break;
            come = receive<Format>(cells, step, k, have);
            if (come) write(first + k * stride, have);
        }
        if (!come) break;
        if (first + kAtOnce * stride < packets) fence_cells();
    }
    finish(cells, step);
}

// -- operands ------------------------------------------------------------------------------------------

// Bytes in packets of kBytes. With kAligned, address and size are multiples of kBytes; else `Unit` divides them.
template <int kBytes, class Unit, bool kAligned>
struct Span {
    char* start;
    u64 nbytes;

    __device__ u32 packets() const { return (u32)((nbytes + kBytes - 1) / kBytes); }

    // The packet at `at`, all of which is inside and at its alignment.
    __device__ Packet load_aligned(u32 at) const {
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
        if (kAligned || is_aligned(at)) return load_aligned(at);
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
        if (kAligned || is_aligned(at)) {
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

    __device__ bool is_aligned(u32 at) const {
        return ((u64)start & (kBytes - 1)) == 0 && ((u64)at + 1) * kBytes <= nbytes;
    }
};

}  // namespace shardmath
