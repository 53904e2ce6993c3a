// A product of gathered rows: C = A B, where A's rows come from all ranks and tiles wait for the rows they need.
//
// Compiled as gemm_tiles.cuh says. Tiles are walked in the order in which the parts of A come:
//
//     warp 0: waits for the part, loads boxes of A and B  ->  8 warps: multiply, round, store
//
// A part's maps end with its rows, so a tile at its end reads zeros beyond them, and writes nothing there.
#include "gemm_tiles.cuh"
#include "row_push.cuh"

using namespace shardmath;

struct Rows {  // of one rank
    u32 first;     // its first unit
    u32 unit_rows;   // units above each other; a unit is a tile of each block of a cluster
    u32 rows;
    u32 src;
};

struct GatheredArgument {
    TensorMap a[kRanks];  // by order of arrival
    TensorMap b;
    Team team;
    Words* words[kRanks];  // by rank
    char* out;        // C
    u64 pitch;        // bytes from one row, or column, to the next
    u32 parts, units, steps, columns;
    u32 chunk, chunks;  // steps of k that come at once; how many times
    Rows rows[kRanks];
    u32 start[kRanks];  // in C

    __device__ Words& own() const { return *words[team.rank]; }
};

struct Tile {
    u32 part, row, column;
};

// -- one block ----------------------------------------------------------------------------------------

__device__ inline void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// -- the walk ------------------------------------------------------------------------------------------

__device__ inline u32 part_of(const GatheredArgument& a, u32 unit) {
    u32 part = 0;
    while (part + 1 < a.parts && unit >= a.rows[part + 1].first) ++part;
    return part;
}

__device__ inline Tile locate(const GatheredArgument& a, u32 unit, u32 block) {
    const u32 part = part_of(a, unit);
    const Rows& rows = a.rows[part];
    const Unit at(unit - rows.first, rows.unit_rows, (a.columns + kWidth - 1) / kWidth);
    return {part, (at.row * kCluster + block) * kRows, at.column * kWidth};
}

// One thread: counts the chunks that are here of the parts that this block multiplies, in its order. To look into
// words that others write takes longer than a step; the thread that loads asks this one. Rows that have not come in
// time are multiplied as they lie: the host knows, and raises.
__device__ inline void watch(const GatheredArgument& a, const Shared& s) {
    const u64 launch = a.own().launches + 1;
    u32 part = ~0u, seen = 0;
    for (u32 unit = blockIdx.x / kCluster; unit < a.units; unit += gridDim.x / kCluster) {
        if (part == part_of(a, unit)) continue;
        part = part_of(a, unit);
        const u32 src = a.rows[part].src;
        for (u32 chunk = 0; chunk < a.chunks; ++chunk) {
            if (src != a.team.rank) wait(a.team, &a.own().arrived[src][chunk], launch, src, kShard, src);
            tell(s.seen, ++seen);
        }
    }
}

// One thread.
__device__ inline void load_tiles(const GatheredArgument& a, const Shared& s, u32 block) {
    u32 number = 0, part = ~0u, before = 0, here = 0;  // chunks of the parts before; steps of this one that are here
    for (u32 unit = blockIdx.x / kCluster; unit < a.units; unit += gridDim.x / kCluster) {
        const Tile tile = locate(a, unit, block);
        if (part != ~0u && part != tile.part) before += a.chunks, here = 0;
        part = tile.part;
        for (u32 step = 0; step < a.steps; ++step, ++number) {
            if (step >= here) {
                while (here <= step) here = (max(told(s.seen), before) - before) * a.chunk;
                fence_proxy_async();
            }
            const u32 stage = number % kStages;
            mbarrier_wait(s.empty + 8 * stage, (number / kStages & 1) ^ 1);
            const u32 k = step * kDepth;
            load_stage(s, stage, block, {&a.a[tile.part], &a.b, tile.row, tile.column, k, k});
        }
    }
}

// -- what the other warps do ---------------------------------------------------------------------------

__device__ inline void multiply_tiles(const GatheredArgument& a, const Shared& s, u32 block, u32 group) {
    float d[kWidth / 2];
    u32 number = 0;
    for (u32 unit = blockIdx.x / kCluster; unit < a.units; unit += gridDim.x / kCluster) {
        if (a.steps == 0) {
#pragma unroll
            for (u32 j = 0; j < kWidth / 2; ++j) d[j] = 0;
        }
        multiply_steps(d, s, group, 0, a.steps, number);
        const Tile tile = locate(a, unit, block);
        const u32 start = a.start[tile.part], end = start + a.rows[tile.part].rows;
        store_tile({a.out, a.pitch, end, a.columns}, start + tile.row, tile.column, group, d);
    }
}

// The last block tells all peers that their rows have been read. One warp.
__device__ inline void publish_read(const GatheredArgument& a) {
    Words& own = a.own();
    u64 launch = 0;  // of the last block
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(&own.ended, 1ull) == gridDim.x - 1) own.ended = 0, launch = ++own.launches;
        __threadfence();
    }
    launch = __shfl_sync(~0u, launch, 0);
    __syncwarp();
    for (u32 i = threadIdx.x; launch && i < kRanks; i += 32) signal(&a.words[i]->read[a.team.rank], launch);
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    all_gather_gemm(const __grid_constant__ GatheredArgument a) {
    const bool loads = a.steps && a.units;
    if (loads && threadIdx.x - 32 < a.parts) prefetch(&a.a[threadIdx.x - 32]);
    if (loads && threadIdx.x == 32) prefetch(&a.b);
    run_block(a);
    if (threadIdx.x < 32) publish_read(a);
}
