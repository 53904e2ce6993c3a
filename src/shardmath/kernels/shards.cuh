// What ranks that gather rows from each other tell each other, on the symmetric heap.
//
// Every word has one writer and only counts up, so that a launch needs nothing from the host but its place in
// the order of launches: it is what makes the kernel replayable in a CUDA graph. A rank writes into a peer's
// memory for one launch after the peer has said that it has read what the launch before left there.
#pragma once
#include "symm.cuh"

namespace shardmath {

constexpr int kChunks = 8;  // of k, at most

struct Words {
    u64 arrived[kRanks][kChunks];  // boxes of a rank's rows that have come, by chunk of k; that rank writes
    u64 read[kRanks];              // launches whose rows a peer has read; the peer writes
    u64 launches;                  // that are done here
    u64 ended;                     // blocks of this launch that have
};

// Add to a peer's word, after all that this thread wrote before.
__device__ inline void add_release(u64* word, u64 count) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(count) : "memory");
}

}  // namespace shardmath
