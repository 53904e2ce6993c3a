// Any part of any rank's memory to any other rank, on cells: all_gather, all_to_all and broadcast of small
// arrays in ordinary memory. The bits arrive as they are.
#include "cells.cuh"

using namespace shardmath;

typedef Wire<false> Travel;
constexpr int kBytes = Travel::kBytes;

struct ExchangeArgument {
    Cells cells;
    const char* input;
    char* output;
    u64 most;               // bytes of the largest part that any rank sends to any other
    u64 from[kRanks];       // where the part for each rank starts in the input
    u64 sent[kRanks];       // its bytes
    u64 to[kRanks];         // where the part of each rank starts in the output
    u64 received[kRanks];   // its bytes
};

__device__ inline int bytes_at(u64 at, u64 all) {
    const u64 start = at * kBytes;
    return start >= all ? 0 : (int)(all - start < kBytes ? all - start : kBytes);
}

// Every turn joins every two ranks, also those with nothing to say: see Reuse in cells.cuh.
extern "C" __global__ void __launch_bounds__(kThreads) exchange(const __grid_constant__ ExchangeArgument a) {
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
            const char* part = a.input + a.from[peer] + at * kBytes;
            out[step] = Travel::seal(read<kBytes, uint8>(part, bytes_at(at, a.sent[peer])), turn);
        }
#pragma unroll
        for (int step = 1; step < kRanks; ++step) {
            const int peer = (team.rank + step) % kRanks;
            store_cell(a.cells.cell(peer, turn, 0, team.rank), out[step]);
        }
        if (!receive<Travel>(a.cells, turn, 0, have, Everyone())) break;
        include(have, team.rank, out[0]);
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank)
            write<kBytes, uint8>(a.output + a.to[rank] + at * kBytes, bytes_at(at, a.received[rank]), have[rank]);
    }
    finish(team, turn);
}
