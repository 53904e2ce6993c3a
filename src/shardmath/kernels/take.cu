// An owner takes its tiles: the ranks' partial products, added in the order of the ranks as float32 and
// rounded once, so that the result has the same bits every time.
//
// Compiled with ELEMENT (float16, bfloat16), WHOLE (1 where rows of the result begin at multiples of 16 bytes
// and have multiples of 8 elements) and SHARED: 1 where the result is what peers will read (gather.cu), who are
// told of each chunk, and who must have read that of the launch before. `take_early` waits for each chunk of tiles and takes all but the
// last, on few multiprocessors, while the product goes on; then it waits for the last, which `take_last`
// takes on all of them. So no kernel that waits fills the GPU.
#include "elements.cuh"
#include "slots.cuh"

using namespace shardmath;

typedef shardmath::ELEMENT Element;
constexpr u32 kThreads = 512;
constexpr u32 kUnitRows = 32, kUnits = kTileBytes / (kThreads * 16);  // a unit is 32 x 128 elements

struct TakeArgument {
    Team team;
    const char* slots;      // of this rank: [source][tile]
    u64 stride;             // bytes from one source's to the next's
    const Tile* tiles;      // of this rank, in the order of their slots
    u32 early, count;       // tiles before the last chunk, and all
    Ledger* ledger;
    const u64* arrived;     // [source][chunk]
    const u64* expected;    // [chunk], by launch
    u64* summed;            // [chunk]: blocks that have taken their part of it
    u32 chunks;
    u32 columns;
    u64 pitch;              // bytes from one row of the result to the next
    char* result;
    Ledger* peers[kRanks];
    u64* ready[kRanks];     // [chunk], this rank's at each peer: launches whose sum is there
};

struct alignas(16) Piece {
    Element element[8];
};

__device__ inline Piece load_slot(const char* from) {  // past the first cache: peers have written it
    Piece piece;
    u32* words = (u32*)&piece;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
    return piece;
}

// Whether all ranks' tiles of a chunk have come. By all threads of a block.
__device__ inline bool arrived(const TakeArgument& a, u32 chunk, u64 launch) {
    bool here = true;
    if (threadIdx.x < kRanks)
        here = wait(a.team, a.arrived + threadIdx.x * a.chunks + chunk, (launch + 1) * a.expected[chunk],
                    threadIdx.x, kProduct, chunk);
    return __syncthreads_and(here);
}

__device__ inline void take(const TakeArgument& a, const Tile& tile, u32 number, u32 unit) {
    const u32 row = unit / 4 * 64 + unit % 2 * kUnitRows + threadIdx.x / 16;
    const u32 column = tile.column + unit / 2 % 2 * 128 + ((threadIdx.x % 16) ^ (row & 7)) * 8;
    if (row >= tile.rows() || column >= a.columns) return;
    const char* from = a.slots + (u64)number * kTileBytes + unit * (kThreads * 16) + threadIdx.x * 16;
    Piece pieces[kRanks];
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) pieces[rank] = load_slot(from + rank * a.stride);
    Piece sum;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float all = Wide<Element>::widen(pieces[0].element[i]);
#pragma unroll
        for (int rank = 1; rank < kRanks; ++rank) all += Wide<Element>::widen(pieces[rank].element[i]);
        sum.element[i] = Wide<Element>::narrow(all);
    }
    Element* to = (Element*)(a.result + (tile.row + row) * a.pitch) + column;
    if (WHOLE) {
        *(Piece*)to = sum;
    } else {
        for (u32 i = 0; i < 8 && column + i < a.columns; ++i) to[i] = sum.element[i];
    }
}

// Whether the peers have read what the launch before left in the result. By all threads of a block.
__device__ inline bool read_by_all(const TakeArgument& a, u64 launch) {
    bool over = true;
    if (SHARED && threadIdx.x < kRanks)
        over = wait(a.team, &a.ledger->read[threadIdx.x], launch, threadIdx.x, kProduct, 0);
    return __syncthreads_and(over);
}

__device__ inline void tell_ready(const TakeArgument& a, u32 chunk, u64 launch) {
    for (int i = 1; i <= kRanks; ++i) store_release(&a.ready[(a.team.rank + i) % kRanks][chunk], launch + 1);
}

// This block has taken its part of a chunk; the last to do so tells the peers.
__device__ inline void finish_chunk(const TakeArgument& a, u32 chunk, u64 launch) {
    __syncthreads();
    if (!SHARED || threadIdx.x) return;
    u64 before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(&a.summed[chunk]) : "memory");
    if (before + 1 == (launch + 1) * gridDim.x) tell_ready(a, chunk, launch);
}

extern "C" __global__ void __launch_bounds__(kThreads) take_early(const __grid_constant__ TakeArgument a) {
    const u64 launch = a.ledger->launches;
    if (!read_by_all(a, launch)) return;
    u32 item = blockIdx.x;
    for (u32 chunk = 0; chunk + 1 < a.chunks; ++chunk) {
        if (!arrived(a, chunk, launch)) return;
        for (; item < a.early * kUnits; item += gridDim.x) {
            const Tile tile = a.tiles[item / kUnits];
            if (tile.chunk() != chunk) break;
            take(a, tile, item / kUnits, item % kUnits);
        }
        finish_chunk(a, chunk, launch);
    }
    if (blockIdx.x == 0) arrived(a, a.chunks - 1, launch);
}

extern "C" __global__ void __launch_bounds__(kThreads) take_last(const __grid_constant__ TakeArgument a) {
    for (u32 item = a.early * kUnits + blockIdx.x; item < a.count * kUnits; item += gridDim.x)
        take(a, a.tiles[item / kUnits], item / kUnits, item % kUnits);
    __syncthreads();
    if (threadIdx.x || !ends_last(a.ledger)) return;
    const u64 launch = a.ledger->launches;
    for (int rank = 0; rank < kRanks; ++rank) store_release(&a.peers[rank]->taken[a.team.rank], launch + 1);
    if (SHARED) tell_ready(a, a.chunks - 1, launch);
    else a.ledger->launches = launch + 1;
}
