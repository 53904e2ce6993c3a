// What ranks tell each other of the rows that copy engines hand to all peers.
//
// A rank's rows go straight into every peer's memory. They are counted in chunks of k. Words count launches, each has
// one writer, and they are signals as symm.cuh has them: the host's replay of a CUDA graph needs to change nothing. A
// rank writes into a peer's memory once the peer's product has read what the launch before left there.
#pragma once

#include "symm.cuh"

namespace shardmath {

constexpr u32 kChunks = 8;  // of k

struct Words {
    u64 arrived[kRanks][kChunks];  // by the rank whose rows have come; that rank's copy engine writes
    u64 read[kRanks];              // launches that a peer has read; it writes
    u64 sending[kChunks];          // the launch whose rows go out: a copy engine copies it to `arrived` behind them
    u64 begun;                     // launches whose rows were to go out
    u64 launches;                  // of the product
    u64 ended;                     // its blocks that have ended
};

}  // namespace shardmath
