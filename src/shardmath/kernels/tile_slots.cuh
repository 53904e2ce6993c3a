// Where the tiles of a product lie on their way to the rank that owns them.
//
// An owner has slots for each rank's tiles of its rows, in one order that all ranks derive alike; each slot
// holds a tile of 128 x 256 elements of two bytes. Counters only go up: launches are told apart by their number.
#pragma once

#include "symm.cuh"

namespace shardmath {

constexpr u32 kTileRows = 128, kTileColumns = 256;
constexpr u32 kBlockBytes = 64 * 128 * 2, kHalfBytes = 2 * kBlockBytes, kTileBytes = 2 * kHalfBytes;

struct Tile {
    u32 row, column;  // of its first element: in A and B of the sender, in the owner's part for the owner
    u32 what;         // the owner's rank, rows << 8, chunk << 16
    u32 slot;         // its number among the owner's tiles
    __device__ u32 dst() const { return what & 0xFF; }
    __device__ u32 rows() const { return what >> 8 & 0xFF; }
    __device__ u32 chunk() const { return what >> 16; }
};

// Of an owner's tiles. They lie in the order of their chunks.
struct Chunk {
    u32 halves;  // half tiles that each rank sends in one launch
    u32 end;     // the first tile behind it
};

// A rank's words about one plan. Peers write `taken`, and the counters of tiles.
struct Ledger {
    u64 launches;       // that are over on this rank
    u64 blocks;         // of the kernel at work that have ended
    u64 taken[kRanks];  // launches whose tiles an owner has taken, and whose sums it has shared
};

__device__ inline void add_release(u64* word, u64 value) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// To this GPU's threads and from them. What the word was before.
__device__ inline u64 add_here(u64* word, u64 value) {
    u64 before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
    return before;
}

}  // namespace shardmath
