// How an owner takes its tiles: the ranks' partial products are added in the order of the ranks as float32 and
// rounded once, so that the sum has the same bits every time.
//
// Compiled with ADDEND (float16, bfloat16), WHOLE (1 where rows of the sums begin at multiples of 16 bytes and
// have multiples of 8 elements) and SHARED: 1 where peers will read the sums, who are told of each chunk, and
// who must have read those of the launch before.
#pragma once

#include "elements.cuh"
#include "slots.cuh"

namespace shardmath {

constexpr u32 kVectors = kTileBytes / 16;  // of 8 elements, in a tile

struct TakeArgument {
    const char* slots;      // of this rank: [source][tile]
    u64 stride;             // bytes from one source's to the next's
    const Tile* tiles;      // of this rank, in the order of their slots
    const Chunk* chunks;
    u32 count;              // of chunks
    u32 late;               // the last ones, which are taken after the product
    u64 columns;
    const u64* arrived;     // [source][chunk]: half tiles
    u64* summed;            // [chunk]: warps that have taken their part of it early
    u64 pitch;              // bytes from one row of the sums to the next
    char* sums;
    Ledger* ledger[kRanks];
    u64* ready[kRanks];     // [chunk], this rank's at each peer: launches whose sum is there
};

struct alignas(16) Vector {
    ADDEND element[8];
};

__device__ inline Vector load_slot(const char* from) {  // past the first cache: peers have written it
    Vector vector;
    u32* words = (u32*)&vector;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
    return vector;
}

// Whether all ranks' tiles of a chunk have come. By all threads of a warp.
__device__ inline bool arrived(const Team& team, const TakeArgument& a, u32 chunk, u64 launch) {
    bool here = true;
    for (u32 rank = threadIdx.x % 32; rank < kRanks; rank += 32)
        here &= wait(team, a.arrived + rank * a.count + chunk, (launch + 1) * a.chunks[chunk].halves, rank,
                     kProduct, chunk);
    here = __all_sync(~0u, here);
    __syncwarp();  // what one thread has seen, all of the warp see
    return here;
}

__device__ inline void add_up(const TakeArgument& a, const Vector (&parts)[kRanks], u32 number) {
    const Tile tile = a.tiles[number / kVectors];
    const u32 half = number / 2048 % 2, block = number / 1024 % 2, row = half * 64 + number % 1024 / 16;
    const u32 column = tile.column + block * 128 + ((number % 16) ^ (row & 7)) * 8;
    if (row >= tile.rows() || column >= a.columns) return;
    Vector sum;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float all = Wide<ADDEND>::widen(parts[0].element[i]);
#pragma unroll
        for (int rank = 1; rank < kRanks; ++rank) all += Wide<ADDEND>::widen(parts[rank].element[i]);
        sum.element[i] = Wide<ADDEND>::narrow(all);
    }
    ADDEND* to = (ADDEND*)(a.sums + (tile.row + row) * a.pitch) + column;
    if (WHOLE) {
        *(Vector*)to = sum;
    } else {
        for (u32 i = 0; i < 8 && column + i < a.columns; ++i) to[i] = sum.element[i];
    }
}

__device__ inline u32 first_tile(const TakeArgument& a, u32 chunk) { return chunk ? a.chunks[chunk - 1].end : 0; }

// Whether the peers have read what the launch before left in the sums. By all threads of a warp.
__device__ inline bool read_by_all(const Team& team, const TakeArgument& a, u64 launch) {
    bool over = true;
    for (u32 rank = threadIdx.x % 32; SHARED && rank < kRanks; rank += 32)
        over &= wait(team, &a.ledger[team.rank]->read[rank], launch, rank, kProduct, 0);
    return __all_sync(~0u, over);
}

// A rank that has given up tells nobody: then they do, too.
__device__ inline void tell_ready(const Team& team, const TakeArgument& a, u32 chunk, u64 launch) {
    if (load_relaxed(&team.own().failed)) return;
    for (int i = 1; i <= kRanks; ++i) store_release(&a.ready[(team.rank + i) % kRanks][chunk], launch + 1);
}

// This warp has taken its part of a chunk; the last of `warps` to do so tells the peers.
__device__ inline void finish_chunk(const Team& team, const TakeArgument& a, u32 chunk, u64 launch, u32 warps) {
    __syncwarp();
    if (!SHARED || threadIdx.x % 32) return;
    u64 before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(&a.summed[chunk]) : "memory");
    if (before + 1 == (launch + 1) * warps) tell_ready(team, a, chunk, launch);
}

// The vectors of a chunk that fall to thread `thread` of `threads`, which has kAtOnce of each rank's under way.
template <int kAtOnce>
__device__ inline void take(const TakeArgument& a, u32 chunk, u32 thread, u32 threads) {
    const u32 end = a.chunks[chunk].end * kVectors;
    for (u32 number = first_tile(a, chunk) * kVectors + thread; number < end; number += kAtOnce * threads) {
        Vector parts[kAtOnce][kRanks];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const char* from = a.slots + (u64)(number + i * threads) * 16;
#pragma unroll
            for (int rank = 0; rank < kRanks; ++rank)
                if (number + i * threads < end) parts[i][rank] = load_slot(from + rank * a.stride);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (number + i * threads < end) add_up(a, parts[i], number + i * threads);
    }
}

// All chunks but the late ones, as they come, by some warps beside the product; then those are waited for.
__device__ inline void take_early(const Team& team, const TakeArgument& a, u32 warp, u32 warps, u64 launch) {
    if (!read_by_all(team, a, launch)) return;
    for (u32 chunk = 0; chunk + a.late < a.count; ++chunk) {
        if (!arrived(team, a, chunk, launch)) return;
        take<kRanks <= 8 ? 2 : 1>(a, chunk, warp * 32 + threadIdx.x % 32, warps * 32);
        finish_chunk(team, a, chunk, launch, warps);
    }
    for (u32 chunk = a.count - a.late; warp == 0 && chunk < a.count; ++chunk)
        if (!arrived(team, a, chunk, launch)) return;
}

}  // namespace shardmath
