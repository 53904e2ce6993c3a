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
//
// Hosts do not meet before each launch. So each block sends the same block of every peer a word that says which
// launch it is in, and by a tag which call the host meant; it writes nothing of a result before all ranks' words
// have come and are equal. The word goes out with the first packets, and is awaited with them. Where words
// differ, or do not come, the launch and all later ones of these ranks write nothing. There are two places for the
// words of a block, used in turn: who sends the word of launch n + 2 has ended launch n + 1, in which it heard from
// every peer's block, which began to answer after it had ended launch n.
#pragma once

#include "elements.cuh"
#include "symm.cuh"

namespace shardmath {

constexpr int kThreads = 512;  // the most threads of a block that uses cells
constexpr int kMaxBlocks = 132;  // the most blocks

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
    u64* counts;  // by block: the steps that it has done in these cells, and the launches
    u64 tag;      // of 48 bits: which call this is
    Packet* to[kRanks];

    __device__ Packet* own() const { return to[kRanks - 1]; }

    // Where each rank's word of a launch lies for a block, in the memory of to[i]: behind cells and counts.
    __device__ u64* words(int i, u64 launch, u32 block) const {
        constexpr u64 kCells = (u64)kMaxBlocks * kSets * kPhases * kRanks * kThreads;
        u64* const first = (u64*)(to[i] + kCells + kMaxBlocks);
        return first + (block * 2 + (launch & 1)) * kRanks;
    }
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
        number = cells.counts[2 * blockIdx.x] + 1;
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

// The launch that a thread's block is in, as it tells the peers' when it is made. `agreed`: this thread knows that all
// ranks are in the same. Not `usable`: an earlier launch has failed, and nobody is told of this one. A kernel that
// counts by launches alone uses the words of block 0 in all its blocks; then that one tells.
struct Launch {
    u64 number, word;
    u32 block;
    bool usable, agreed = false, equal = false;

    __device__ explicit Launch(const Cells& cells) : Launch(cells, blockIdx.x) {}
    __device__ Launch(const Cells& cells, u32 block) : block(block) {
        number = cells.counts[2 * block + 1] + 1;
        word = cells.tag << 16 | (number & 0xffff);
        usable = load_relaxed(&cells.team.own().broken) == 0;
        // By one thread, to its own rank last: other blocks of this rank that see all words may refuse the call, and
        // whoever looked at `broken` after that would tell its peer nothing, who would wait for it.
        if (usable && block == blockIdx.x && threadIdx.x == 0)
#pragma unroll
            for (int i = 0; i < kRanks; ++i) store_relaxed(words(cells, i) + cells.team.rank, word);
    }
    __device__ u64* words(const Cells& cells, int i = kRanks - 1) const { return cells.words(i, number, block); }
    __device__ bool come(u64 seen) const { return ((seen ^ word) & 0xffff) == 0; }

    // Whether the words of all ranks have come; `equal` then says whether they are this rank's own.
    __device__ bool all_come(const Cells& cells) {
        const u64* const own = words(cells);
        bool all = equal = true;
#pragma unroll
        for (int from = 0; from < kRanks; ++from) {
            const u64 seen = load_relaxed(own + from);
            all &= come(seen);
            equal &= seen == word;
        }
        return all;
    }
};

// Note whose `words` of a launch differ from this rank's: of all ranks, before anybody is told that there are any.
__device__ __noinline__ inline void refuse(const Cells& cells, const u64* words, u64 word) {
    store_relaxed(&cells.team.own().broken, 1);
#pragma unroll 1
    for (int from = 0; from < kRanks; ++from) {
        const u64 seen = load_relaxed(words + from);
        if (seen != word) note(cells.team, from, kMismatch, blockIdx.x, word >> 16, seen >> 16);
    }
    report(cells.team);
}

// Between two steps: the cells that this thread has emptied are empty for the peers too, before it sends
// anything more. Cells are this GPU's own memory, and its L2 cache is where the peers' stores to them arrive:
// a fence of the GPU suffices. One of the system would wait for all that is on its way to the peers.
__device__ inline void fence_cells() { __threadfence(); }

// Called by all threads of a block, with the step after its last.
__device__ inline void finish(const Cells& cells, const Launch& launch, const Step& after) {
    __syncthreads();
    if (threadIdx.x) return;
    cells.counts[2 * blockIdx.x] = after.number - 1;
    cells.counts[2 * blockIdx.x + 1] = launch.number;
}

// Send a packet to every rank: `pick(i)` to the one of to[i].
template <class Pick>
__device__ inline void send(const Cells& cells, const Step& step, int phase, Pick pick) {
    const u32 place = step.cell(phase) + cells.team.rank * kThreads;
#pragma unroll
    for (int i = 0; i < kRanks; ++i) store_packet(cells.to[i] + place, pick(i));
}

// Poll this thread's cells until all are full, and the first time until all ranks' words have come; then empty
// the cells. False on a timeout, and where the ranks do not agree.
template <class Format>
__device__ inline bool receive(const Cells& cells, Launch& launch, const Step& step, int phase,
                               Packet (&packets)[kRanks]) {
    Packet* const first = cells.own() + step.cell(phase);
    Deadline deadline;
    const auto missing = [&](int from) {
        return !launch.come(load_relaxed(launch.words(cells) + from)) ||
               !Format::full(load_packet(first + from * kThreads), step.number);
    };
    const auto any_gone = [&] {
        bool found = false;
#pragma unroll 1
        for (int from = 0; from < kRanks && !found; ++from) found = gone(cells.team, from) && missing(from);
        return found;
    };
    for (bool last = false;; last = deadline.passed(cells.team, any_gone)) {
        bool full = true;
#pragma unroll
        for (int from = 0; from < kRanks; ++from) packets[from] = load_packet(first + from * kThreads);
        if (!launch.agreed) {
            if (!launch.usable) return false;
            // Without waiting for the packets: those of another call never come.
            const bool come = launch.all_come(cells);
            if (come && !launch.equal) {
                refuse(cells, launch.words(cells), launch.word);
                return false;
            }
            full = launch.agreed = come;
        }
#pragma unroll
        for (int from = 0; from < kRanks; ++from) full &= Format::full(packets[from], step.number);
        if (full) break;
        if (last) {
            store_relaxed(&cells.team.own().broken, 1);
#pragma unroll 1
            for (int from = 0; from < kRanks; ++from)
                if (missing(from)) expire(cells.team, from, kCollective, blockIdx.x, step.number, step.number - 1);
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
    Launch launch(cells);
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
            come = receive<Format>(cells, launch, step, k, have);
            if (come) write(first + k * stride, have);
        }
        if (!come) break;
        if (first + kAtOnce * stride < packets) fence_cells();
    }
    finish(cells, launch, step);
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
