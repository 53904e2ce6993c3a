// How a rank brings the sums of all owners into its own result, from where they have put them.
//
// They come in the chunks in which their owners make them. A rank's words `ready` say which are there.
#pragma once

#include "slots.cuh"

namespace shardmath {

struct Part {  // of one owner's sums, in one chunk
    u32 owner;
    u32 row, rows;       // from the owner's first
    u32 column, columns; // bytes
    u32 unused[3];
};

struct GatherArgument {
    const u64* ready;     // [owner][chunk]: launches whose sum is here
    const Part* parts;    // [chunk][kRanks], the next rank's first; nothing of this one's, which are in place
    u32 chunks;
    u32 early;            // chunks that are copied while the product goes on
    u64 from_pitch, to_pitch;
    const char* sums[kRanks];  // each owner's
    char* rows[kRanks];        // where they begin in the result
};

// Whether the sums of so many chunks are here. By all threads of a warp.
__device__ inline bool sums_here(const GatherArgument& a, u32 first, u32 chunks, u64 launch) {
    bool here = true;
    for (u32 i = threadIdx.x % 32; i < kRanks * chunks; i += 32)
        here &= load_acquire(a.ready + i / chunks * a.chunks + first + i % chunks) > launch;
    here = __all_sync(~0u, here);
    __syncwarp();
    return here;
}

// Wait for them: false when that takes too long.
__device__ inline bool wait_for_sums(const Team& team, const GatherArgument& a, u32 first, u32 chunks, u64 launch) {
    bool here = true;
    for (u32 i = threadIdx.x % 32; i < kRanks * chunks; i += 32) {
        const u32 owner = i / chunks, chunk = first + i % chunks;
        here &= wait(team, a.ready + owner * a.chunks + chunk, launch + 1, owner, kProduct, chunk);
    }
    here = __all_sync(~0u, here);
    __syncwarp();
    return here;
}

__device__ inline uint4 load_sum(const char* from) {
    uint4 piece;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "l"(from)
                 : "memory");
    return piece;
}

// Sums begin at multiples of 16 bytes, and their rows too; rows of the result lie anywhere.
__device__ inline void store_piece(char* to, uint4 piece, u32 nbytes) {
    if (((u64)to & 15) == 0 && nbytes == 16) {
        *(uint4*)to = piece;
    } else {
        const unsigned short* words = (const unsigned short*)&piece;
        for (u32 i = 0; i < nbytes / 2; ++i) ((unsigned short*)to)[i] = words[i];
    }
}

// The sums of one owner's part of a chunk, which are here: the share of one of so many warps, which has kLines lines
// under way. A line is what a warp copies at once.
__device__ inline void copy_part(const GatherArgument& a, const Part& part, u32 warp, u32 warps) {
    constexpr u32 kLine = 32 * sizeof(uint4), kLines = 8;
    const char* from = a.sums[part.owner] + part.row * a.from_pitch + part.column;
    char* to = a.rows[part.owner] + part.row * a.to_pitch + part.column;
    const u32 across = (part.columns + kLine - 1) / kLine, count = part.rows * across;
    const u32 offset = threadIdx.x % 32 * sizeof(uint4);
    for (u32 line = warp; line < count; line += warps * kLines) {
        uint4 pieces[kLines];
#pragma unroll
        for (u32 i = 0; i < kLines; ++i) {
            const u32 at = line + i * warps, column = at % across * kLine + offset;
            if (at < count && column < part.columns) pieces[i] = load_sum(from + at / across * a.from_pitch + column);
        }
#pragma unroll
        for (u32 i = 0; i < kLines; ++i) {
            const u32 at = line + i * warps, column = at % across * kLine + offset;
            if (at >= count || column >= part.columns) continue;
            const u32 left = part.columns - column;
            store_piece(to + at / across * a.to_pitch + column, pieces[i], left < 16 ? left : 16);
        }
    }
}

__device__ inline void copy_chunk(const GatherArgument& a, u32 chunk, u32 warp, u32 warps) {
    for (u32 i = 0; i < kRanks; ++i) copy_part(a, a.parts[chunk * kRanks + i], warp, warps);
}

}  // namespace shardmath
