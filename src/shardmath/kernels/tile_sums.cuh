// How an owner takes its tiles: the ranks' partial products are added in the order of the ranks as float32 and
// rounded once, so that the sum has the same bits every time.
//
//     while the product goes on           warps claim pieces of a chunk that is here, and add them up
//     after it, in remaining_sums.cu      all multiprocessors share what nobody has claimed
//
// Compiled with ADDEND (float16, bfloat16), WHOLE (1 where rows of the sums begin at multiples of 16 bytes and
// have multiples of 8 elements) and SHARED: 1 where the sums are written to all peers too. A peer's tiles of this
// launch say that it has begun it: so it no longer reads what was there before.
#pragma once

#include "elements.cuh"
#include "tile_slots.cuh"

namespace shardmath {

constexpr u32 kVectors = kTileBytes / 16;  // of 8 elements, in a tile
constexpr u32 kPiece = 128;                // of them, that a warp claims at once

struct TileSumsArgument {
    const char* slots;      // of this rank: [source][tile]
    u64 stride;             // bytes from one source's to the next's
    const Tile* tiles;      // of this rank, in the order of their slots
    const Chunk* chunks;
    u32 count;              // of chunks
    u64 columns;
    const u64* arrived;     // [source][chunk]: half tiles
    u32* claimed;           // [chunk]: pieces of this launch; more than there are when all are claimed
    u64 pitch;              // bytes from one row of the sums to the next
    char* sums;
    Ledger* ledger[kRanks];
    u64 copy_pitch;
    char* copies[kRanks];   // where the sums go at the next rank, the one behind it, ...

    __device__ u64 launch(const Team& team) const { return ledger[team.rank]->launches; }
    __device__ u32 first_tile(u32 chunk) const { return chunk ? chunks[chunk - 1].end : 0; }
};

struct alignas(16) Vector {
    ADDEND element[8];
};

// -- waiting -------------------------------------------------------------------------------------------

// How many half tiles of a chunk a rank has sent when all of this launch's have come.
__device__ inline u64 all_halves(const TileSumsArgument& a, u32 chunk, u64 launch) {
    return (launch + 1) * a.chunks[chunk].halves;
}

__device__ inline bool wait_for_tiles_of(const Team& team, const TileSumsArgument& a, u32 rank, u32 chunk, u64 launch) {
    return wait(team, a.arrived + rank * a.count + chunk, all_halves(a, chunk, launch), rank, kProduct, chunk);
}

// Whether all ranks' tiles of a chunk are here. By all threads of a warp.
__device__ inline bool here(const TileSumsArgument& a, u32 chunk, u64 launch) {
    bool here = true;
    for (u32 rank = threadIdx.x % 32; rank < kRanks; rank += 32)
        here &= load_acquire(a.arrived + rank * a.count + chunk) >= all_halves(a, chunk, launch);
    here = __all_sync(~0u, here);
    __syncwarp();  // what one thread has seen, all of the warp see
    return here;
}

// Wait for them: false when that takes too long.
__device__ inline bool wait_for_tiles(const Team& team, const TileSumsArgument& a, u32 chunk, u64 launch) {
    bool here = true;
    for (u32 rank = threadIdx.x % 32; rank < kRanks; rank += 32)
        here &= wait_for_tiles_of(team, a, rank, chunk, launch);
    here = __all_sync(~0u, here);
    __syncwarp();
    return here;
}

// -- adding --------------------------------------------------------------------------------------------

__device__ inline Vector load_slot(const char* from) {  // past the first cache: peers have written it
    Vector vector;
    u32* words = (u32*)&vector;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
    return vector;
}

__device__ inline void write_sum(const TileSumsArgument& a, u32 number, const float (&all)[8]) {
    const Tile tile = a.tiles[number / kVectors];
    const u32 half = number / 2048 % 2, block = number / 1024 % 2, row = half * 64 + number % 1024 / 16;
    const u32 column = tile.column + block * 128 + ((number % 16) ^ (row & 7)) * 8;
    if (row >= tile.rows() || column >= a.columns) return;
    Vector sum;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum.element[i] = Wide<ADDEND>::narrow(all[i]);
    ADDEND* to = (ADDEND*)(a.sums + (tile.row + row) * a.pitch) + column;
    if (WHOLE) {
        *(Vector*)to = sum;
    } else {
        for (u32 i = 0; i < 8 && column + i < a.columns; ++i) to[i] = sum.element[i];
    }
    if (SHARED) {
        const u64 at = (tile.row + row) * a.copy_pitch + column * sizeof(ADDEND);
#pragma unroll
        for (int i = 0; i < kRanks - 1; ++i) *(Vector*)(a.copies[i] + at) = sum;
    }
}

// Vectors `from` to before `end`: the share of one of so many warps, which has kAtOnce of each rank's under way.
template <int kAtOnce>
__device__ inline void reduce_tiles(const TileSumsArgument& a, u32 from, u32 end, u32 warp, u32 warps) {
    constexpr int kTogether = kRanks < 8 ? kRanks : 8;  // ranks whose parts are under way
    const u32 lane = threadIdx.x % 32, stride = warps * 32;
    for (u32 number = from + warp * 32 + lane; number < end; number += kAtOnce * stride) {
        float all[kAtOnce][8];
#pragma unroll
        for (int first = 0; first < kRanks; first += kTogether) {
            Vector parts[kAtOnce][kTogether];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const char* from = a.slots + (u64)(number + i * stride) * 16;
#pragma unroll
                for (int rank = 0; rank < kTogether; ++rank)
                    if (number + i * stride < end && first + rank < kRanks)
                        parts[i][rank] = load_slot(from + (first + rank) * a.stride);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                for (int rank = 0; rank < kTogether && first + rank < kRanks; ++rank)
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const float part = Wide<ADDEND>::widen(parts[i][rank].element[e]);
                        all[i][e] = first + rank ? all[i][e] + part : part;
                    }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (number + i * stride < end) write_sum(a, number + i * stride, all[i]);
    }
}

// Add up pieces of a chunk whose tiles are here, until all are claimed, or soon after `over()`. By a warp.
template <class Over>
__device__ inline void reduce_pieces(const TileSumsArgument& a, u32 chunk, Over&& over) {
    const u32 first = a.first_tile(chunk) * kVectors, end = a.chunks[chunk].end * kVectors;
    u32 piece = 0;
    if (threadIdx.x % 32 == 0) piece = atomicAdd(&a.claimed[chunk], 1);
    for (;;) {
        const u32 from = first + __shfl_sync(~0u, piece, 0) * kPiece;
        if (from >= end) return;
        const bool last = over();
        if (!last && threadIdx.x % 32 == 0) piece = atomicAdd(&a.claimed[chunk], 1);  // the next, while this is added
        reduce_tiles<(kRanks <= 8 ? 2 : 1)>(a, from, from + kPiece, 0, 1);
        if (last) return;
    }
}

}  // namespace shardmath
