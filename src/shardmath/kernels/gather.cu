// What is left of the sums when the product has ended. See gathering.cuh.
//
// `await_sums` waits for them, by one block, so that no kernel that waits fills the GPU. `gather` copies them by
// all multiprocessors, and ends the launch: the owners may write their sums again.
#include "gathering.cuh"

using namespace shardmath;

constexpr u32 kThreads = 512, kPieces = 4;  // 16-byte pieces that a thread has under way

struct RestArgument {
    Team team;
    GatherArgument gather;
    Ledger* ledger[kRanks];
};

extern "C" __global__ void __launch_bounds__(kThreads) await_sums(const __grid_constant__ RestArgument a) {
    const u64 launch = a.ledger[a.team.rank]->launches;
    const u32 left = a.gather.chunks - a.gather.early;
    for (u32 i = threadIdx.x; i < kRanks * left; i += kThreads)
        if (!ready(a.team, a.gather, i / left, a.gather.early + i % left, launch)) return;
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

__device__ inline void copy_part(const GatherArgument& a, const Part& part) {
    const char* from = a.sums[part.owner] + part.row * a.from_pitch + part.column;
    char* to = a.rows[part.owner] + part.row * a.to_pitch + part.column;
    const u32 across = (part.columns + 15) / 16, count = part.rows * across, stride = gridDim.x * kThreads;
    for (u32 i = blockIdx.x * kThreads + threadIdx.x; i < count; i += stride * kPieces) {
        uint4 pieces[kPieces];
#pragma unroll
        for (u32 p = 0; p < kPieces; ++p) {
            const u32 at = i + p * stride;
            if (at < count) pieces[p] = load_sum(from + at / across * a.from_pitch + at % across * 16);
        }
#pragma unroll
        for (u32 p = 0; p < kPieces; ++p) {
            const u32 at = i + p * stride, column = at % across * 16;
            if (at >= count) break;
            const u32 left = part.columns - column;
            store_piece(to + at / across * a.to_pitch + column, pieces[p], left < 16 ? left : 16);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) gather(const __grid_constant__ RestArgument a) {
    Ledger* const own = a.ledger[a.team.rank];
    for (u32 i = a.gather.early * kRanks; i < a.gather.chunks * kRanks; ++i) {  // all links at once
        const u32 first = i / kRanks * kRanks;
        copy_part(a.gather, a.gather.parts[first + (i + blockIdx.x) % kRanks]);
    }
    __syncthreads();
    if (threadIdx.x || !ends_last(own)) return;
    const u64 launches = own->launches + 1;
    own->launches = launches;
    for (int rank = 0; rank < kRanks; ++rank) store_release(&a.ledger[rank]->read[a.team.rank], launches);
}
