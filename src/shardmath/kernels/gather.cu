// Every rank reads the sums of all owners, where take.cu has left them, into its own result.
//
// `await_sums` waits for them, by one block, so that no kernel that waits fills the GPU. `gather` copies them by
// all multiprocessors, and ends the launch: the owners may write their sums again.
#include "slots.cuh"

using namespace shardmath;

constexpr u32 kThreads = 512, kPieces = 4;  // 16-byte pieces that a thread has under way

struct Box {
    const char* from;
    char* to;
    u32 width;  // in bytes
    u32 rows;
};

struct GatherArgument {
    Team team;
    Ledger* ledger;
    const u64* ready;  // [owner][chunk]
    u64 chunks;
    u64 from_pitch, to_pitch;
    Box boxes[kRanks];  // from the next rank's on to this one's
    Ledger* peers[kRanks];
};

extern "C" __global__ void __launch_bounds__(kThreads) await_sums(const __grid_constant__ GatherArgument a) {
    for (u32 i = threadIdx.x; i < kRanks * a.chunks; i += kThreads)
        if (!wait(a.team, a.ready + i, a.ledger->launches + 1, i / a.chunks, kProduct, i % a.chunks)) return;
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

__device__ inline void copy_box(const GatherArgument& a, const Box& box) {
    const u32 across = (box.width + 15) / 16, count = box.rows * across, stride = gridDim.x * kThreads;
    for (u32 i = blockIdx.x * kThreads + threadIdx.x; i < count; i += stride * kPieces) {
        uint4 pieces[kPieces];
#pragma unroll
        for (u32 p = 0; p < kPieces; ++p) {
            const u32 at = i + p * stride;
            if (at < count) pieces[p] = load_sum(box.from + at / across * a.from_pitch + at % across * 16);
        }
#pragma unroll
        for (u32 p = 0; p < kPieces; ++p) {
            const u32 at = i + p * stride, column = at % across * 16;
            if (at >= count) break;
            const u32 left = box.width - column;
            store_piece(box.to + at / across * a.to_pitch + column, pieces[p], left < 16 ? left : 16);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) gather(const __grid_constant__ GatherArgument a) {
    for (int i = 0; i < kRanks; ++i) copy_box(a, a.boxes[(i + blockIdx.x) % kRanks]);  // all links at once
    __syncthreads();
    if (threadIdx.x || !ends_last(a.ledger)) return;
    const u64 launches = a.ledger->launches + 1;
    a.ledger->launches = launches;
    for (int rank = 0; rank < kRanks; ++rank) store_release(&a.peers[rank]->read[a.team.rank], launches);
}
