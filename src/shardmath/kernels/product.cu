// A product whose tiles travel to the ranks that own them while the next ones are computed.
//
// Compiled for sm_90a with ELEMENT (Float16, Bfloat16), A_ALONG_K and B_ALONG_K (1 where the operand's
// contiguous axis is k), CLUSTER (2 where two blocks with tiles of the same columns load half of B each, for
// both), STAGES and PARTS, and as taking.cuh says. The first blocks, one on a multiprocessor, walk over tiles
// of 128 x 256; the others take what has come.
//
//     warp 0: loads boxes of A and B  ->  8 warps: multiply, round, pack  ->  warps 1, 2: send to the owner
//
// Half a tile, 64 rows, is sent as blocks of 64 x 128 elements, in which 16-byte piece p of row r lies in place
// p ^ (r & 7). After it has arrived, the counter of this rank and the tile's chunk at the owner goes up by one.
// A rank's slots at an owner are written again only after the owner has taken what the launch before left there.
#include "clusters.cuh"
#include "gathering.cuh"
#include "taking.cuh"

using namespace shardmath;

constexpr bool kAAlongK = A_ALONG_K, kBAlongK = B_ALONG_K;
constexpr u32 kStages = STAGES, kParts = PARTS;
constexpr u32 kDepth = 64;                                  // of a stage, along k
constexpr u32 kABytes = kTileRows * kDepth * 2, kBBytes = kTileColumns * kDepth * 2;
constexpr u32 kBox = 64 * 128;                              // bytes of 64 x 64 elements
constexpr u32 kPacked = 2 / kParts * kBlockBytes;           // bytes of a half tile, or half of that
constexpr u32 kBars = 2 * kStages + 4 > Pull::kStages ? 2 * kStages + 4 : Pull::kStages;
constexpr u32 kThreads = 384, kMultipliers = 128;           // each group of four warps multiplies 64 rows

struct ProductArgument {
    TensorMap a, b;
    Team team;
    const Tile* tiles;
    u32 units;          // of as many tiles as a cluster has blocks
    u32 steps;          // along k
    u32 multipliers;    // blocks that multiply
    char* slots[kRanks];    // where this rank's tiles lie at each owner
    u64* arrived[kRanks];   // this rank's counters at each owner, by chunk
    TakeArgument take;
    GatherArgument gather;  // where the sums are shared
};

struct Shared {
    u32 stages, packed, full, empty, ready, room;  // shared addresses
    __device__ u32 a(u32 stage) const { return stages + stage * (kABytes + kBBytes); }
    __device__ u32 b(u32 stage) const { return a(stage) + kABytes; }
};

// -- clusters ------------------------------------------------------------------------------------------

// By all threads, whose warps may have gone apart.
__device__ inline void scattered_cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// A tile of this block; all blocks of a cluster walk alike.
__device__ inline u32 first_unit() { return blockIdx.x / kCluster; }
__device__ inline u32 next_unit(const ProductArgument& a, u32 unit) { return unit + a.multipliers / kCluster; }
__device__ inline Tile tile_of(const ProductArgument& a, u32 unit) {
    return a.tiles[unit * kCluster + rank_in_cluster()];
}

// -- what the warps do ---------------------------------------------------------------------------------

__device__ inline void load_stage(const ProductArgument& a, const Shared& s, const Tile& tile, u32 k, u32 stage) {
    const u32 full = s.full + 8 * stage, block = rank_in_cluster();
    bar_expect(full, kABytes + kBBytes);
    if (kAAlongK) {
        load_box(s.a(stage), &a.a, k, tile.row, full);
    } else {
        load_box(s.a(stage), &a.a, tile.row, k, full);
        load_box(s.a(stage) + kBox, &a.a, tile.row + 64, k, full);
    }
    constexpr u32 kShare = kTileColumns / kCluster;
    const u32 column = tile.column + block * kShare, to = s.b(stage) + block * kShare * 128;
    if (kBAlongK) {
        load_box_for_all(to, &a.b, k, column, full);
    } else {
#pragma unroll
        for (u32 i = 0; i < kShare; i += 64) load_box_for_all(to + i * 128, &a.b, column + i, k, full);
    }
}

__device__ inline void load_tiles(const ProductArgument& a, const Shared& s) {
    u32 number = 0;
    for (u32 unit = first_unit(); unit < a.units; unit = next_unit(a, unit)) {
        const Tile tile = tile_of(a, unit);
        for (u32 step = 0; step < a.steps; ++step, ++number) {
            const u32 stage = number % kStages;
            bar_wait(s.empty + 8 * stage, (number / kStages & 1) ^ 1);
            load_stage(a, s, tile, step * kDepth, stage);
        }
    }
}

// The stage has been multiplied by this group of warps: to all blocks that write into it.
__device__ inline void release(const Shared& s, u32 stage) {
    const u32 thread = threadIdx.x % kMultipliers;
    if (kCluster == 1) {
        if (thread == 0) bar_arrive(s.empty + 8 * stage);
    } else if (thread < kCluster) {
        arrive_at(s.empty + 8 * stage, thread);
    }
}

// Send half `half` of each tile, if it has rows. One thread.
__device__ inline void send_tiles(const ProductArgument& a, const Shared& s, u32 half) {
    const Ledger& own = *a.take.ledger[a.team.rank];
    const u64 launch = own.launches;
    u32 part = 0, usable = 0;  // owners whose slots may be written, as bits
    bool lost = false;
    for (u32 unit = first_unit(); unit < a.units; unit = next_unit(a, unit)) {
        const Tile tile = tile_of(a, unit);
        const u32 dst = tile.dst();
        const bool sent = tile.rows() > 64 * half;
        if (sent && !lost && !(usable >> dst & 1)) {
            lost = !wait(a.team, &own.taken[dst], launch, dst, kProduct, tile.chunk());
            fence_async();  // the owner's reads, and then the copies
            usable |= 1u << dst;
        }
        char* to = a.slots[dst] + (u64)tile.slot * kTileBytes + half * kHalfBytes;
        for (u32 p = 0; p < kParts; ++p, ++part) {
            bar_wait(s.ready + 8 * half, part & 1);
            if (sent && !lost) store_bulk(to + p * kPacked, s.packed + half * kPacked, kPacked);
            if (p + 1 < kParts)
                stores_have_read();
            else
                stores_are_done();
            bar_arrive(s.room + 8 * half);
        }
        fence_async();
        fence();
        if (sent && !lost) add_release(&a.arrived[dst][tile.chunk()], 1);
    }
}

// This warp's 16 rows of the accumulators, half of the columns for each block, to shared memory.
template <u32 kBlock>
__device__ inline void pack_block(const float (&d)[128], u32 to) {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, right = lane / 16;
#pragma unroll
    for (u32 j = 0; j < 16; j += 2) {  // pairs of 8 columns
        const float* v = d + 64 * kBlock + 4 * j;
        const u32 place = (j + right) ^ (row & 7);
        store_matrices(to + kBlock % (2 / kParts) * kBlockBytes + row * 256 + place * 16, ELEMENT::pack(v[0], v[1]),
                       ELEMENT::pack(v[2], v[3]), ELEMENT::pack(v[4], v[5]), ELEMENT::pack(v[6], v[7]));
    }
}

__device__ inline void multiply_tiles(const ProductArgument& a, const Shared& s, u32 half) {
    float d[128];
    u32 number = 0, part = 0;
    const u32 packed = s.packed + half * kPacked;
    for (u32 unit = first_unit(); unit < a.units; unit = next_unit(a, unit)) {
        if (a.steps == 0) {
#pragma unroll
            for (int j = 0; j < 128; ++j) d[j] = 0;
        }
        for (u32 step = 0; step < a.steps; ++step, ++number) {
            const u32 stage = number % kStages;
            bar_wait(s.full + 8 * stage, number / kStages & 1);
            products_begin();
#pragma unroll
            for (u32 k = 0; k < kDepth / 16; ++k) {
                const u32 of_a = s.a(stage) + half * kBox + k * (kAAlongK ? 32 : 2048);
                const u32 of_b = s.b(stage) + k * (kBAlongK ? 32 : 2048);
                ELEMENT::multiply<kAAlongK, kBAlongK>(d, describe<kAAlongK>(of_a, kBox),
                                                      describe<kBAlongK>(of_b, kBox), step | k);
            }
            products_commit();
            products_wait<1>();  // the step before has been multiplied: its stage is empty
            if (step) release(s, (number - 1) % kStages);
        }
        products_wait<0>();
        if (a.steps) release(s, (number - 1) % kStages);
#pragma unroll
        for (u32 p = 0; p < kParts; ++p, ++part) {
            bar_wait(s.room + 8 * half, (part & 1) ^ 1);
            if (kParts == 1 || p == 0) pack_block<0>(d, packed);
            if (kParts == 1 || p == 1) pack_block<1>(d, packed);
            fence_async_shared();
            bar_arrive(s.ready + 8 * half);
        }
    }
}

// A block that does not multiply: its last warp reads peers' sums, where they are shared, and the others take.
__device__ inline void take_and_gather(const ProductArgument& a, u32 memory, u32 bars) {
    constexpr u32 kWarps = kThreads / 32 - SHARED;
    const u32 block = blockIdx.x - a.multipliers, blocks = gridDim.x - a.multipliers, warp = threadIdx.x / 32;
    const u64 launch = a.take.ledger[a.team.rank]->launches;
    if (warp < kWarps)
        take_early(a.team, a.take, block * kWarps + warp, blocks * kWarps, launch);
    else if (threadIdx.x % 32 == 0)
        gather_early(a.team, a.gather, launch, memory, bars, block, blocks);
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ ProductArgument a) {
    extern __shared__ char memory[];
    __shared__ u64 bars[kBars];
    Shared s;
    s.stages = (shared_address(memory) + 1023) & ~1023u;
    if (blockIdx.x >= a.multipliers) return take_and_gather(a, s.stages, shared_address(bars));
    s.packed = s.stages + kStages * (kABytes + kBBytes);
    s.full = shared_address(bars);
    s.empty = s.full + 8 * kStages;
    s.ready = s.empty + 8 * kStages;
    s.room = s.ready + 16;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) bar_init(s.full + 8 * i, 1), bar_init(s.empty + 8 * i, 2 * kCluster);
        for (u32 half = 0; half < 2; ++half) {
            bar_init(s.ready + 8 * half, kMultipliers);
            bar_init(s.room + 8 * half, 1);
        }
        bars_visible();
    }
    __syncthreads();
    if (kCluster > 1) scattered_cluster_barrier();
    if (threadIdx.x < kMultipliers) {
        give_registers<40>();
        if (threadIdx.x == 0) load_tiles(a, s);
        if (threadIdx.x == 32 || threadIdx.x == 64) send_tiles(a, s, threadIdx.x / 32 - 1);
    } else {
        take_registers<232>();
        multiply_tiles(a, s, threadIdx.x / kMultipliers - 1);
    }
    __syncwarp();
    if (kCluster > 1) scattered_cluster_barrier();  // the other block may still write into this one's memory
}
