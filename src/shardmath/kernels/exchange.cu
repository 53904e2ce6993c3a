// Any part of any rank's memory to any other rank, on cells: all_gather, all_to_all and broadcast of small
// arrays in ordinary memory. The bits arrive as they are. Compiled with ALIGNED: 1 where all places and sizes
// are multiples of 8.
#include "cells.cuh"

using namespace shardmath;

typedef PacketFormat<false> Format;
constexpr int kBytes = Format::kBytes;

struct ExchangeArgument {
    Cells cells;
    char* input;
    char* output;
    u64 most;               // bytes of the largest part that any rank sends to any other
    u64 from[kRanks];       // where the part for each rank starts in the input
    u64 sent[kRanks];       // its bytes
    u64 to[kRanks];         // where the part of each rank starts in the output
    u64 received[kRanks];   // its bytes
};

typedef Span<kBytes, uint8, ALIGNED> Bytes;

// Every step joins every two ranks, also those with nothing to say: see Reuse in cells.cuh.
extern "C" __global__ void __launch_bounds__(kThreads, 2) exchange(const __grid_constant__ ExchangeArgument a) {
    const auto read = [&](u32 at, Packet (&out)[kRanks]) {
#pragma unroll
        for (int i = 0; i < kRanks; ++i) {
            const u32 peer = rank_at(a.cells, i);
            out[i] = Bytes{a.input + a.from[peer], a.sent[peer]}.read(at);
        }
    };
    run_steps<Format>(a.cells, Bytes{a.input, a.most}.packets(), read, [&](u32 at, const Packet (&have)[kRanks]) {
#pragma unroll
        for (int from = 0; from < kRanks; ++from) Bytes{a.output + a.to[from], a.received[from]}.write(at, have[from]);
    });
}
