// Reductions over the ranks on cells: all_reduce in one shot and in two, and reduce_scatter.
//
// Compiled with ELEMENT (a type of elements.cuh) and OPERATION (sum, product, min, max, mean). The ranks'
// elements are combined in the order of the ranks, wherever that happens: the result has the same bits on
// all ranks, and every time. Operands are ordinary memory of any alignment of their elements.
#include "cells.cuh"

using namespace shardmath;

typedef shardmath::ELEMENT Element;
typedef shardmath::OPERATION Op;
typedef Wire<IsFloat<Element>::value> Travel;
constexpr int kBytes = Travel::kBytes;
static_assert(kBytes % sizeof(Element) == 0 || sizeof(Element) == 16, "a packet holds whole elements");
constexpr int kElements = kBytes / sizeof(Element);

// Packets combined in the order of the ranks, in the wide type.
struct Combined {
    typename Wide<Element>::type value[kElements];

    __device__ void add(Packet packet, bool first) {
        const Element* elements = (const Element*)&packet;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            const auto x = Wide<Element>::widen(elements[i]);
            value[i] = first ? x : Op::combine(value[i], x);
        }
    }
    __device__ Packet narrowed() const {
        Packet packet = {0, 0};
        Element* elements = (Element*)&packet;
#pragma unroll
        for (int i = 0; i < kElements; ++i) elements[i] = Wide<Element>::narrow(Finish<Op>::apply(value[i], kRanks));
        return packet;
    }
};

__device__ inline Packet combined(const Packet (&packets)[kRanks]) {
    Combined all;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) all.add(packets[rank], rank == 0);
    return all.narrowed();
}

// How many bytes of `all` the packet at `at` holds: 0 to kBytes.
__device__ inline int bytes_at(u64 at, u64 all) {
    const u64 start = at * kBytes;
    return start >= all ? 0 : (int)(all - start < kBytes ? all - start : kBytes);
}

__device__ inline Packet fetch(const char* from, u64 at, u64 all, u64 turn) {
    return Travel::seal(read<kBytes, Element>(from + at * kBytes, bytes_at(at, all)), turn);
}

__device__ inline void keep(char* to, u64 at, u64 all, Packet packet) {
    write<kBytes, Element>(to + at * kBytes, bytes_at(at, all), packet);
}

struct AllReduceArgument {
    Cells cells;
    const char* input;
    char* output;  // may be the input
    u64 nbytes;
};

// Every rank sends all it has to all others, and combines all: for small arrays.
extern "C" __global__ void __launch_bounds__(kThreads) one_shot(const __grid_constant__ AllReduceArgument a) {
    const Team& team = a.cells.team;
    const u64 packets = (a.nbytes + kBytes - 1) / kBytes;
    const u64 first = first_turn(team);
    u64 turn = first;
    for (u64 row = (u64)blockIdx.x * blockDim.x; row < packets; row += (u64)gridDim.x * blockDim.x, ++turn) {
        if (turn != first) __threadfence_system();
        const u64 at = row + threadIdx.x;
        if (at >= packets) continue;
        Packet have[kRanks] = {};
        const Packet own = fetch(a.input, at, a.nbytes, turn);
#pragma unroll
        for (int step = 1; step < kRanks; ++step) {
            const int peer = (team.rank + step) % kRanks;
            store_cell(a.cells.cell(peer, turn, 0, team.rank), own);
        }
        if (!receive<Travel>(a.cells, turn, 0, have, Everyone())) break;
        include(have, team.rank, own);
        keep(a.output, at, a.nbytes, Travel::seal(combined(have), turn));
    }
    finish(team, turn);
}

// Every rank combines one slice of the array, and sends the result to all others.
extern "C" __global__ void __launch_bounds__(kThreads) two_shot(const __grid_constant__ AllReduceArgument a) {
    const Team& team = a.cells.team;
    const u64 packets = (a.nbytes + kBytes - 1) / kBytes;
    const u64 slice = (packets + kRanks - 1) / kRanks;
    const u64 first = first_turn(team);
    u64 turn = first;
    for (u64 row = (u64)blockIdx.x * blockDim.x; row < slice; row += (u64)gridDim.x * blockDim.x, ++turn) {
        if (turn != first) __threadfence_system();
        const u64 at = row + threadIdx.x;
        if (at >= slice) continue;
        Packet have[kRanks] = {}, out[kRanks] = {};
#pragma unroll
        for (int step = 0; step < kRanks; ++step) {
            const u64 place = (u64)((team.rank + step) % kRanks) * slice + at;
            if (place < packets) out[step] = fetch(a.input, place, a.nbytes, turn);
        }
#pragma unroll
        for (int step = 1; step < kRanks; ++step) {
            const int peer = (team.rank + step) % kRanks;
            if ((u64)peer * slice + at < packets)
                store_cell(a.cells.cell(peer, turn, 0, team.rank), out[step]);
        }
        const u64 own = (u64)team.rank * slice + at;
        if (own < packets) {
            if (!receive<Travel>(a.cells, turn, 0, have, Everyone())) break;
            include(have, team.rank, out[0]);
            const Packet result = Travel::seal(combined(have), turn);
#pragma unroll
            for (int step = 1; step < kRanks; ++step) {
                const int peer = (team.rank + step) % kRanks;
                store_cell(a.cells.cell(peer, turn, 1, team.rank), result);
            }
            keep(a.output, own, a.nbytes, result);
        }
        const auto expected = [&](int rank) { return (u64)rank * slice + at < packets; };
        if (!receive<Travel>(a.cells, turn, 1, have, expected)) break;
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank)
            if (rank != team.rank && expected(rank))
                keep(a.output, (u64)rank * slice + at, a.nbytes, have[rank]);
    }
    finish(team, turn);
}

struct ReduceScatterArgument {
    Cells cells;
    const char* input;
    char* output;
    u64 most;            // bytes of the largest part
    u64 start[kRanks];   // of each rank's part in the input, in bytes
    u64 nbytes[kRanks];  // of each rank's part
};

// Every rank combines its own part. Parts may differ in size; shorter ones take part to the end.
extern "C" __global__ void __launch_bounds__(kThreads)
    reduce_scatter(const __grid_constant__ ReduceScatterArgument a) {
    const Team& team = a.cells.team;
    const u64 packets = (a.most + kBytes - 1) / kBytes;
    const u64 first = first_turn(team);
    u64 turn = first;
    for (u64 row = (u64)blockIdx.x * blockDim.x; row < packets; row += (u64)gridDim.x * blockDim.x, ++turn) {
        if (turn != first) __threadfence_system();
        const u64 at = row + threadIdx.x;
        if (at >= packets) continue;
        Packet have[kRanks] = {}, out[kRanks] = {};
#pragma unroll
        for (int step = 0; step < kRanks; ++step) {
            const int peer = (team.rank + step) % kRanks;
            out[step] = fetch(a.input + a.start[peer], at, a.nbytes[peer], turn);
        }
#pragma unroll
        for (int step = 1; step < kRanks; ++step) {
            const int peer = (team.rank + step) % kRanks;
            store_cell(a.cells.cell(peer, turn, 0, team.rank), out[step]);
        }
        if (!receive<Travel>(a.cells, turn, 0, have, Everyone())) break;
        include(have, team.rank, out[0]);
        keep(a.output, at, a.nbytes[team.rank], Travel::seal(combined(have), turn));
    }
    finish(team, turn);
}
