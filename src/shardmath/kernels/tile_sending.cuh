// Products whose tiles are sent to the ranks that own them: what both kernels of that kind do alike.
//
// Compiled for sm_90a with ELEMENT (Float16, Bfloat16), A_ALONG_K and B_ALONG_K (1 where the operand's
// contiguous axis is k), CLUSTER (2 where two blocks with tiles of the same columns load half of B each, for
// both) and STAGES, and as tile_sums.cuh says. The first blocks, one on a multiprocessor, walk over tiles
// of 128 x 256.
//
//     warp 0: loads boxes of A and B  ->  8 warps: multiply, round, pack  ->  a warp or two: send to the owner
//
// Half a tile, 64 rows, is sent as blocks of 64 x 128 elements, in which 16-byte piece p of row r lies in place
// p ^ (r & 7). After it has arrived, the counter of this rank and the tile's chunk at the owner goes up by one.
// A rank's slots at an owner are written again only after the owner has taken what the launch before left there.
#pragma once

#include "clusters.cuh"
#include "tile_sums.cuh"

namespace shardmath {

constexpr bool kAAlongK = A_ALONG_K, kBAlongK = B_ALONG_K;
constexpr u32 kStages = STAGES;
constexpr u32 kDepth = 64;                                  // of a stage, along k
constexpr u32 kABytes = kTileRows * kDepth * 2, kBBytes = kTileColumns * kDepth * 2;
constexpr u32 kBox = 64 * 128;                              // bytes of 64 x 64 elements
constexpr u32 kThreads = 384, kMultipliers = 128;           // each group of four warps multiplies 64 rows

struct Product {
    TensorMap a, b;
    Team team;
    const Tile* tiles;
    u32 units;          // of as many tiles as a cluster has blocks
    u32 steps;          // along k
    u32 multipliers;    // blocks that multiply
    u32 apart;          // cycles by which each cluster begins later than the one before
    char* slots[kRanks];    // where this rank's tiles lie at each owner
    u64* arrived[kRanks];   // this rank's counters at each owner, by chunk
    TileSumsArgument sums;
};

struct Stages {
    u32 stages, full, empty;  // shared addresses
    __device__ Stages(u32 memory, u32 bars) : stages(memory), full(bars), empty(bars + 8 * kStages) {}
    __device__ u32 a(u32 stage) const { return stages + stage * (kABytes + kBBytes); }
    __device__ u32 b(u32 stage) const { return a(stage) + kABytes; }
    __device__ u32 behind() const { return a(kStages); }
    __device__ u32 bars_behind() const { return empty + 8 * kStages; }
    __device__ void init() const {
        for (u32 i = 0; i < kStages; ++i) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, 2 * kCluster);
    }
};

// -- clusters ------------------------------------------------------------------------------------------

// By all threads, whose warps may have gone apart.
__device__ inline void scattered_cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// A tile of this block; all blocks of a cluster walk alike.
__device__ inline u32 first_unit() { return blockIdx.x / kCluster; }
__device__ inline u32 next_unit(const Product& a, u32 unit) { return unit + a.multipliers / kCluster; }
__device__ inline Tile tile_of(const Product& a, u32 unit) {
    return a.tiles[unit * kCluster + rank_in_cluster()];
}

// -- what the warps do ---------------------------------------------------------------------------------

__device__ inline void load_stage(const Product& a, const Stages& s, const Tile& tile, u32 k, u32 stage) {
    const u32 full = s.full + 8 * stage, block = rank_in_cluster();
    mbarrier_expect_tx(full, kABytes + kBBytes);
    if (kAAlongK) {
        tma_load(s.a(stage), &a.a, k, tile.row, full);
    } else {
        tma_load(s.a(stage), &a.a, tile.row, k, full);
        tma_load(s.a(stage) + kBox, &a.a, tile.row + 64, k, full);
    }
    constexpr u32 kShare = kTileColumns / kCluster;
    const u32 column = tile.column + block * kShare, to = s.b(stage) + block * kShare * 128;
    if (kBAlongK) {
        tma_load_multicast(to, &a.b, k, column, full);
    } else {
#pragma unroll
        for (u32 i = 0; i < kShare; i += 64) tma_load_multicast(to + i * 128, &a.b, column + i, k, full);
    }
}

// Tiles that ended at the same time would be sent at the same time, with an idle link before.
__device__ inline void stagger_clusters(const Product& a) {
    const u64 start = clock64(), cycles = (u64)a.apart * first_unit();
    while (clock64() - start < cycles) __nanosleep(100);
}

// All stages of all tiles. One thread. With kGap a stage follows each tile into which nothing is loaded.
//
// Of a rank whose part of k is empty there is nothing to load, and those who multiply never wait for this thread: it
// must not follow them by barriers, whose phases have come round again when they are two ahead.
template <bool kGap>
__device__ inline void load_tiles(const Product& a, const Stages& s) {
    if (a.steps == 0) return;
    u32 number = 0;
    stagger_clusters(a);
    for (u32 unit = first_unit(); unit < a.units; unit = next_unit(a, unit)) {
        const Tile tile = tile_of(a, unit);
        for (u32 step = 0; step < a.steps; ++step, ++number) {
            const u32 stage = number % kStages;
            mbarrier_wait(s.empty + 8 * stage, (number / kStages & 1) ^ 1);
            load_stage(a, s, tile, step * kDepth, stage);
        }
        if (!kGap) continue;
        const u32 stage = number % kStages;
        mbarrier_wait(s.empty + 8 * stage, (number++ / kStages & 1) ^ 1);
        mbarrier_arrive(s.full + 8 * stage);
    }
}

// The stage has been multiplied by this group of warps, or sent: to all blocks that write into it.
__device__ inline void release_to(const Stages& s, u32 stage, u32 block) {
    if (kCluster == 1)
        mbarrier_arrive(s.empty + 8 * stage);
    else
        arrive_at(s.empty + 8 * stage, block);
}
__device__ inline void release(const Stages& s, u32 stage) {
    const u32 thread = threadIdx.x % kMultipliers;
    if (thread < kCluster) release_to(s, stage, thread);
}

// Which owners' slots this launch may write: those from which the launch before has been taken.
struct Usable {
    u32 owners = 0;  // as bits
    bool lost = false;

    // Whether a tile can be sent; false for all after a wait has expired. One thread.
    __device__ bool send_to(const Product& a, const Tile& tile, u64 launch) {
        const u32 dst = tile.dst();
        if (!lost && !(owners >> dst & 1)) {
            lost = !wait(a.team, &a.sums.ledger[a.team.rank]->taken[dst], launch, dst, kProduct, tile.chunk());
            fence_proxy_async();  // the owner's reads, and then the copies
            owners |= 1u << dst;
        }
        return !lost;
    }
};

// So many halves of a tile, which this thread has sent, are there: the owner may take them.
__device__ inline void signal_sent(const Product& a, const Tile& tile, u32 halves) {
    fence_proxy_async();
    fence();
    if (halves) add_release(&a.arrived[tile.dst()][tile.chunk()], halves);
}

// This warp's 16 rows of the accumulators, half of the columns for each block, to shared memory.
template <u32 kBlock>
__device__ inline void pack_block(const float (&d)[128], u32 to) {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, right = lane / 16;
#pragma unroll
    for (u32 j = 0; j < 16; j += 2) {  // pairs of 8 columns
        const float* v = d + 64 * kBlock + 4 * j;
        const u32 place = (j + right) ^ (row & 7);
        stmatrix_x4(to + row * 256 + place * 16, ELEMENT::pack(v[0], v[1]),
                       ELEMENT::pack(v[2], v[3]), ELEMENT::pack(v[4], v[5]), ELEMENT::pack(v[6], v[7]));
    }
}

// Multiply all tiles, 64 rows of each. `pack(d, tile, number)` takes the accumulators; `tile` counts tiles, and `number`
// stages: that of the gap behind the tile, where there is one. By four warps.
template <bool kGap, class Pack>
__device__ inline void multiply_tiles(const Product& a, const Stages& s, u32 half, Pack pack) {
    float d[128];
    u32 number = 0, tile = 0;
    for (u32 unit = first_unit(); unit < a.units; unit = next_unit(a, unit), ++tile) {
        if (a.steps == 0) {
#pragma unroll
            for (int j = 0; j < 128; ++j) d[j] = 0;
        }
        for (u32 step = 0; step < a.steps; ++step, ++number) {
            const u32 stage = number % kStages;
            mbarrier_wait(s.full + 8 * stage, number / kStages & 1);
            wgmma_fence();
#pragma unroll
            for (u32 k = 0; k < kDepth / 16; ++k) {
                const u32 of_a = s.a(stage) + half * kBox + k * (kAAlongK ? 32 : 2048);
                const u32 of_b = s.b(stage) + k * (kBAlongK ? 32 : 2048);
                ELEMENT::multiply<kAAlongK, kBAlongK>(d, wgmma_descriptor<kAAlongK>(of_a, kBox),
                                                      wgmma_descriptor<kBAlongK>(of_b, kBox), step | k);
            }
            wgmma_commit();
            wgmma_wait<1>();  // the step before has been multiplied: its stage is empty
            if (step) release(s, (number - 1) % kStages);
        }
        wgmma_wait<0>();
        if (a.steps) release(s, (number - 1) % kStages);
        pack(d, tile, number);
        if (kGap) ++number;
    }
}

// Until all tiles have come: what is not added up by then, remaining_sums.cu does. By a block that does not multiply.
__device__ inline void wait_for_all(const Product& a, u64 launch) {
    for (u32 chunk = 0; threadIdx.x < 32 && chunk < a.sums.count; ++chunk)
        if (!wait_for_tiles(a.team, a.sums, chunk, launch)) return;
}

}  // namespace shardmath
