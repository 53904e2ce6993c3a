// Packets sent into peers' cells: data that says itself that it has come, without fence or flag.
//
//     rank 0, thread t  --- 16 bytes, one store --->  cell (block, t, from 0) of rank 1, thread t
//
// A cell is empty (all ones) or full. Its one writer is a thread of a peer, its one reader the same thread of
// the owner, who empties it right after reading. Threads of one rank never wait for each other.
//
// Reuse. A collective is a row of turns, and a block uses two sets of cells in turn. Nobody completes a
// turn before everybody has entered it; so a peer that writes in turn t + 2 has completed t + 1, which the
// reader entered after it had emptied the cells of turn t. A fence between turns, or the end of the kernel,
// makes that emptying visible first.
//
// Floats fill all 16 bytes: all ones is a NaN, and a packet that ends with it travels as a neighbouring
// NaN. Other data may have any bits: it fills 8 bytes, and the number of the turn stands beside it.
#pragma once

#include "elements.cuh"
#include "symm.cuh"

namespace shardmath {

constexpr int kThreads = 512;  // the most threads of a block that uses cells

struct __align__(16) Packet {
    u64 low, high;
};

__device__ inline Packet load_cell(const Packet* cell) {
    Packet p;
    asm volatile(
        "{\n\t.reg .b128 whole;\n\tld.relaxed.sys.global.b128 whole, [%2];\n\tmov.b128 {%0, %1}, whole;\n\t}"
        : "=l"(p.low), "=l"(p.high)
        : "l"(cell)
        : "memory");
    return p;
}

__device__ inline void store_cell(Packet* cell, Packet p) {
    asm volatile(
        "{\n\t.reg .b128 whole;\n\tmov.b128 whole, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], whole;\n\t}" ::"l"(cell),
        "l"(p.low), "l"(p.high)
        : "memory");
}

// How data of one kind travels.
template <bool floats>
struct Wire;
template <>
struct Wire<true> {
    static constexpr int kBytes = 16;
    static __device__ Packet seal(Packet p, u64) {
        // The last word is never all ones: that NaN becomes its neighbour, on its sender too.
        if ((p.high >> 32) == 0xffffffffu) p.high -= 1ull << 32;
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

// Every rank's cells, [block][turn & 1][phase][from][thread].
struct Cells {
    Team team;
    Packet* of[kRanks];
    static constexpr int kPhases = 2;

    __device__ Packet* cell(int rank, u64 turn, int phase, int from) const {
        const u64 row = ((blockIdx.x * 2 + (turn & 1)) * kPhases + phase) * kRanks + from;
        return of[rank] + row * kThreads + threadIdx.x;
    }
};

// Poll the cells of the peers for which `expected(rank)` until all are full, and empty them. Other entries of
// `packets` are left alone. False when that takes too long.
template <class Wire, class Expected>
__device__ inline bool receive(const Cells& cells, u64 turn, int phase, Packet (&packets)[kRanks],
                               Expected expected) {
    const int rank = cells.team.rank;
    Deadline deadline;
    for (;;) {
        Packet seen[kRanks];
        bool full = true;
#pragma unroll
        for (int from = 0; from < kRanks; ++from)
            if (from != rank && expected(from)) seen[from] = load_cell(cells.cell(rank, turn, phase, from));
#pragma unroll
        for (int from = 0; from < kRanks; ++from)
            if (from != rank && expected(from)) full &= Wire::full(seen[from], turn);
        if (full) {
#pragma unroll
            for (int from = 0; from < kRanks; ++from) {
                if (from == rank || !expected(from)) continue;
                packets[from] = seen[from];
                store_cell(cells.cell(rank, turn, phase, from), {~0ull, ~0ull});
            }
            return true;
        }
        if (deadline.passed(cells.team)) {
#pragma unroll
            for (int from = 0; from < kRanks; ++from)
                if (from != rank && expected(from) && !Wire::full(seen[from], turn))
                    expire(cells.team, from, kCollective, blockIdx.x, turn, turn - 1);
            return false;
        }
    }
}

struct Everyone {
    __device__ bool operator()(int) const { return true; }
};

// Put this rank's own packet among the others. (A comparison for each entry keeps them in registers.)
__device__ inline void include(Packet (&packets)[kRanks], int rank, Packet own) {
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
        packets[i].low = i == rank ? own.low : packets[i].low;
        packets[i].high = i == rank ? own.high : packets[i].high;
    }
}

// The turn that a block is in; `finish` is called by all its threads when they have taken part in `turns`.
__device__ inline u64 first_turn(const Team& team) { return team.own().turn[blockIdx.x] + 1; }
__device__ inline void finish(const Team& team, u64 next) {
    __syncthreads();
    if (threadIdx.x == 0) team.own().turn[blockIdx.x] = next - 1;
}

// -- memory of any alignment ---------------------------------------------------------------------------

// `nbytes` (up to kBytes) from `address`, zeros behind them. `unit` divides the address and nbytes.
template <int kBytes, class Unit>
__device__ inline Packet read(const char* address, int nbytes) {
    Packet p = {0, 0};
    if (nbytes == kBytes && ((u64)address & (kBytes - 1)) == 0) {
        if (kBytes == 16) {
            const ulonglong2 whole = *(const ulonglong2*)address;
            return {whole.x, whole.y};
        }
        return {*(const u64*)address, 0};
    }
    Unit* units = (Unit*)&p;
#pragma unroll
    for (int i = 0; i < kBytes / (int)sizeof(Unit); ++i)
        if (i * (int)sizeof(Unit) < nbytes) units[i] = ((const Unit*)address)[i];
    return p;
}

template <int kBytes, class Unit>
__device__ inline void write(char* address, int nbytes, Packet p) {
    if (nbytes == kBytes && ((u64)address & (kBytes - 1)) == 0) {
        if (kBytes == 16)
            *(ulonglong2*)address = make_ulonglong2(p.low, p.high);
        else
            *(u64*)address = p.low;
        return;
    }
    const Unit* units = (const Unit*)&p;
#pragma unroll
    for (int i = 0; i < kBytes / (int)sizeof(Unit); ++i)
        if (i * (int)sizeof(Unit) < nbytes) ((Unit*)address)[i] = units[i];
}

}  // namespace shardmath
