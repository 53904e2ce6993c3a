// What the ring and the product that waits for it tell each other and their neighbours, on the symmetric heap.
//
// Every word has one writer and counts launches: it is a signal as symm.cuh has them, and the host's replay of a
// CUDA graph needs to change nothing. A launch of the ring may write into the right neighbour's memory once both
// the neighbour's ring and its product have read what the launch before left there.
#pragma once
#include "symm.cuh"

namespace shardmath {

constexpr int kChunks = 4;  // at most

enum Part { kRing = 0, kProducts = 1 };

struct Words {
    u64 arrived[kRanks];  // by the rank whose rows have come; the left neighbour writes
    u64 begun[kChunks];   // by chunk of the left neighbour's own rows: it has come; the last chunk raises arrived
    u64 read[2];          // by Part, how far the right neighbour has come; it writes
    u64 launches[2];      // by Part, how many this rank has done
    u64 spoiled;          // the launch in which the ring has waited in vain: it passes nothing on
    u64 ended;            // blocks of the product that have ended
};

}  // namespace shardmath
