// Panel GEMM: a persistent kernel whose operands arrive in panels while it runs. Tiles go region by region.
//
// Compiled with CLUSTER (1 or 2 blocks that share the columns of B that they load) and REGIONS (how many there can
// be). An operand lies in panels, which copy engines fill, and, where a rank holds some of k itself, in its own array
// too. k is cut into steps, in an order of the rank's own: local steps first. After each fetch the copy stream writes
// to the progress counter of the rows or columns how many steps have arrived; the kernel only reads the counters.
//
//     producer warp: wait for progress, load boxes by TMA  -- stages -->  consumer warps: multiply, store
#pragma once
#include "clusters.cuh"
#include "symm.cuh"

namespace shardmath {

struct Region {  // of the result: tiles that need the same panels
    u32 first;             // its first unit; a unit is a tile of each block of a cluster
    u32 row, unit_rows;    // in units
    u32 column, tile_columns;  // in tiles
    u32 a, b;              // the progress counters of its rows and columns
    u32 reserved;
};

// Where the indices of k of a step begin in each operand: in its panels, or, with the highest bit, in the own array.
struct Step {
    u32 a, b;
};
constexpr u32 kOwn = 1u << 31;

struct PanelGemmArgument {
    TensorMap panel_a, panel_b, own_a, own_b;
    Team team;
    const u64* progress;  // how many steps have arrived, by part
    const Step* steps;
    char* out;        // C
    u64 pitch;        // bytes
    u64* sums_ready;  // by block: whether its partial sums of another block's tile are written
    char* partial_sums;  // by block, kSumsBytes each
    u32 regions, units, k_steps, columns, rows;
    u32 local_steps_a, local_steps_b;  // steps for which nothing of the operand is fetched
    u32 data_parallel_units;  // units that one cluster computes; stream-K splits the steps of the others
    Region region[REGIONS];

    __device__ const TensorMap* map_a(Step step) const { return step.a & kOwn ? &own_a : &panel_a; }
    __device__ const TensorMap* map_b(Step step) const { return step.b & kOwn ? &own_b : &panel_b; }
};

struct Tile {
    u32 region, row, column;
};

template <u32 kRows, u32 kWidth>
__device__ inline Tile locate(const PanelGemmArgument& a, u32 unit, u32 block) {
    u32 number = 0;
    while (number + 1 < a.regions && unit >= a.region[number + 1].first) ++number;
    const Region& region = a.region[number];
    const Unit at(unit - region.first, region.unit_rows, region.tile_columns);
    return {number, ((region.row + at.row) * kCluster + block) * kRows, (region.column + at.column) * kWidth};
}

// How many steps of one operand have arrived, at least `target`. After a timeout the product goes on with what is
// in the panel: the team has recorded the error, and the host raises.
__device__ inline u32 await_steps(const PanelGemmArgument& a, u32 word, u32 here, u32 target) {
    if (target <= here) return here;
    wait(a.team, &a.progress[word], target, a.team.rank, kUser, word);
    const u32 there = (u32)load_acquire(&a.progress[word]);
    return max(there, target);
}

// -- what a cluster computes ---------------------------------------------------------------------------

// Steps `first` to before `last` of a unit.
struct Work {
    u32 unit, first, last;
};

// The first of a cluster's steps, among those of all units that stream-K splits.
__device__ inline u64 stream_k_begin(const PanelGemmArgument& a, u32 cluster) {
    return (u64)(a.units - a.data_parallel_units) * a.k_steps * cluster / (gridDim.x / kCluster);
}

__device__ inline Work stream_k_work(const PanelGemmArgument& a, u64 at) {
    const u64 end = stream_k_begin(a, blockIdx.x / kCluster + 1);
    if (at >= end) return {a.units, 0, 0};
    const u32 first = (u32)(at % a.k_steps);
    return {a.data_parallel_units + (u32)(at / a.k_steps), first, (u32)min((u64)a.k_steps, first + end - at)};
}

// Whole units are first: when stream-K begins, all panels have arrived.
__device__ inline Work first_work(const PanelGemmArgument& a) {
    const u32 cluster = blockIdx.x / kCluster;
    if (cluster < a.data_parallel_units) return {cluster, 0, a.k_steps};
    return stream_k_work(a, stream_k_begin(a, cluster));
}

__device__ inline Work next_work(const PanelGemmArgument& a, const Work& work) {
    if (work.unit >= a.data_parallel_units)
        return stream_k_work(a, (u64)(work.unit - a.data_parallel_units) * a.k_steps + work.last);
    const u32 unit = work.unit + gridDim.x / kCluster;
    if (unit < a.data_parallel_units) return {unit, 0, a.k_steps};
    return stream_k_work(a, stream_k_begin(a, blockIdx.x / kCluster));
}

__device__ inline u32 total_steps(const PanelGemmArgument& a) {
    const u32 cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
    const u32 units = cluster < a.data_parallel_units ? (a.data_parallel_units - 1 - cluster) / clusters + 1 : 0;
    return units * a.k_steps + (u32)(stream_k_begin(a, cluster + 1) - stream_k_begin(a, cluster));
}

// -- loading -------------------------------------------------------------------------------------------

// One thread: for each step of each tile of this block, wait until it has arrived and its stage is empty, and load it.
template <u32 kRows, u32 kWidth, u32 kStages, class Load>
__device__ inline void load_tiles(const PanelGemmArgument& a, u32 empty, u32 block, Load load_stage) {
    u32 number = 0, region = ~0u, here = 0;
    for (Work work = first_work(a); work.unit < a.units; work = next_work(a, work)) {
        const Tile tile = locate<kRows, kWidth>(a, work.unit, block);
        if (tile.region != region) region = tile.region, here = 0;
        for (u32 step = work.first; step < work.last; ++step, ++number) {
            if (here <= step) {
                const Region& needs = a.region[region];
                here = min(await_steps(a, needs.a, a.local_steps_a, step + 1),
                           await_steps(a, needs.b, a.local_steps_b, step + 1));
                fence_proxy_async();
            }
            const u32 stage = number % kStages;
            const Step at = a.steps[step];
            mbarrier_wait(empty + 8 * stage, (number / kStages & 1) ^ 1);
            load_stage(tile, at, stage);
        }
    }
}

// -- stream-K: partial sums of several blocks ------------------------------------------------------------------

// The block that has a tile's first steps adds the partial sums of the blocks after it, in their order. Those have
// published theirs before they wait for others': first the end of one tile, then the beginning of the next.
// By kConsumers threads, numbered by `thread`, which hold `kCount` sums each.
constexpr u32 kConsumers = 256, kSumsBytes = 1 << 17;

__device__ inline void consumer_barrier() { asm volatile("bar.sync 7, %0;" ::"n"(kConsumers) : "memory"); }

template <class T, u32 kCount>
__device__ inline void publish_sums(const PanelGemmArgument& a, const T (&d)[kCount], u32 thread) {
    static_assert(kCount * sizeof(T) * kConsumers == kSumsBytes);
    T* const to = (T*)(a.partial_sums + (u64)blockIdx.x * kSumsBytes) + thread;
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) to[i * kConsumers] = d[i];
    fence();
    consumer_barrier();
    if (thread == 0) store_release(&a.sums_ready[blockIdx.x], 1);
}

template <class T, u32 kCount>
__device__ inline void add_sums(const PanelGemmArgument& a, T (&d)[kCount], const Work& work, u32 thread) {
    const u64 end = (u64)(work.unit - a.data_parallel_units + 1) * a.k_steps;
    for (u32 cluster = blockIdx.x / kCluster + 1; stream_k_begin(a, cluster) < end; ++cluster) {
        const u32 block = cluster * kCluster + blockIdx.x % kCluster;
        if (thread == 0) wait(a.team, &a.sums_ready[block], 1, a.team.rank, kUser, block);
        consumer_barrier();
        fence();
        const T* const from = (const T*)(a.partial_sums + (u64)block * kSumsBytes) + thread;
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) d[i] += __ldcg(from + i * kConsumers);
    }
}

// Whether the block has the complete sums of the tile, and is to store it; else its partial sums are published.
template <class T, u32 kCount>
__device__ inline bool completes(const PanelGemmArgument& a, T (&d)[kCount], const Work& work, u32 thread) {
    if (work.first > 0) {
        publish_sums(a, d, thread);
        return false;
    }
    if (work.last < a.k_steps) add_sums(a, d, work, thread);
    return true;
}

}  // namespace shardmath
