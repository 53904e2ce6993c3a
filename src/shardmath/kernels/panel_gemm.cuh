// What products of factors that come while they run share: tiles, region by region, and how one thread loads them.
//
// Compiled with CLUSTER (1 or 2 blocks that share the columns of B that they load) and REGIONS (how many there can
// be). A factor lies in panels, which copy engines fill, and, where a rank holds some of k itself, in its own array
// too. Depth is walked in steps, in an order of the rank's own: what is here first. After each piece the copying
// stream writes to the word of the rows or columns how many steps have come; the kernel only reads the words.
#pragma once
#include "clusters.cuh"
#include "symm.cuh"

namespace shardmath {

struct Region {  // of the result: tiles that need the same panels
    u32 first;             // its first unit; a unit is a tile of each block of a cluster
    u32 row, heights;      // in units
    u32 column, across;    // in tiles
    u32 a, b;              // the words of its rows and columns
    u32 reserved;
};

// Where the indices of k of a step begin in each factor: in its panels, or, with the highest bit, in the own array.
struct Step {
    u32 a, b;
};
constexpr u32 kOwn = 1u << 31;

struct PanelsArgument {
    TensorMap panel_a, panel_b, own_a, own_b;
    Team team;
    const u64* come;  // how many steps, by word
    const Step* steps;
    char* out;        // C
    u64 pitch;        // bytes
    u64* summed;      // by block: whether its sums are there, which belong to another block's tile
    char* sums;       // by block, kSumsBytes each
    u32 regions, units, depth, columns, rows;  // depth in steps
    u32 here_a, here_b;  // steps for which nothing of the factor has to come
    u32 whole;           // units that one cluster computes; all share out the steps of the others
    Region region[REGIONS];

    __device__ const TensorMap* map_a(Step step) const { return step.a & kOwn ? &own_a : &panel_a; }
    __device__ const TensorMap* map_b(Step step) const { return step.b & kOwn ? &own_b : &panel_b; }
};

struct Tile {
    u32 region, row, column;
};

template <u32 kRows, u32 kWidth>
__device__ inline Tile locate(const PanelsArgument& a, u32 unit, u32 block) {
    u32 number = 0;
    while (number + 1 < a.regions && unit >= a.region[number + 1].first) ++number;
    const Region& region = a.region[number];
    const Unit at(unit - region.first, region.heights, region.across);
    return {number, ((region.row + at.height) * kCluster + block) * kRows, (region.column + at.column) * kWidth};
}

// How many steps of one factor are here, at least `target`: what has not come in time is multiplied as it lies,
// and the host, which is told, raises.
__device__ inline u32 come(const PanelsArgument& a, u32 word, u32 here, u32 target) {
    if (target <= here) return here;
    wait(a.team, &a.come[word], target, a.team.rank, kUser, word);
    const u32 there = (u32)load_acquire(&a.come[word]);
    return max(there, target);
}

// -- what a cluster computes ---------------------------------------------------------------------------

// Steps `first` to before `last` of a unit.
struct Work {
    u32 unit, first, last;
};

// Of the steps of all units that are shared out, those of a cluster begin here.
__device__ inline u64 share(const PanelsArgument& a, u32 cluster) {
    return (u64)(a.units - a.whole) * a.depth * cluster / (gridDim.x / kCluster);
}

__device__ inline Work shared_work(const PanelsArgument& a, u64 at) {
    const u64 end = share(a, blockIdx.x / kCluster + 1);
    if (at >= end) return {a.units, 0, 0};
    const u32 first = (u32)(at % a.depth);
    return {a.whole + (u32)(at / a.depth), first, (u32)min((u64)a.depth, first + end - at)};
}

// Whole units come first: when their steps are shared out, all that they need is here.
__device__ inline Work first_work(const PanelsArgument& a) {
    const u32 cluster = blockIdx.x / kCluster;
    if (cluster < a.whole) return {cluster, 0, a.depth};
    return shared_work(a, share(a, cluster));
}

__device__ inline Work next_work(const PanelsArgument& a, const Work& work) {
    if (work.unit >= a.whole) return shared_work(a, (u64)(work.unit - a.whole) * a.depth + work.last);
    const u32 unit = work.unit + gridDim.x / kCluster;
    if (unit < a.whole) return {unit, 0, a.depth};
    return shared_work(a, share(a, blockIdx.x / kCluster));
}

__device__ inline u32 steps_of_all_work(const PanelsArgument& a) {
    const u32 cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
    const u32 units = cluster < a.whole ? (a.whole - 1 - cluster) / clusters + 1 : 0;
    return units * a.depth + (u32)(share(a, cluster + 1) - share(a, cluster));
}

// -- loading -------------------------------------------------------------------------------------------

// One thread: for each step of each tile of this block, wait until it is here and its stage is empty, and load it.
template <u32 kRows, u32 kWidth, u32 kStages, class Load>
__device__ inline void load_tiles(const PanelsArgument& a, u32 empty, u32 block, Load load_stage) {
    u32 number = 0, region = ~0u, here = 0;
    for (Work work = first_work(a); work.unit < a.units; work = next_work(a, work)) {
        const Tile tile = locate<kRows, kWidth>(a, work.unit, block);
        if (tile.region != region) region = tile.region, here = 0;
        for (u32 step = work.first; step < work.last; ++step, ++number) {
            if (here <= step) {
                const Region& needs = a.region[region];
                here = min(come(a, needs.a, a.here_a, step + 1), come(a, needs.b, a.here_b, step + 1));
                fence_async();
            }
            const u32 stage = number % kStages;
            const Step at = a.steps[step];
            bar_wait(empty + 8 * stage, (number / kStages & 1) ^ 1);
            load_stage(tile, at, stage);
        }
    }
}

// -- sums of a tile by several blocks ------------------------------------------------------------------

// The block that has a tile's first steps adds what the blocks after it have of it, in their order. Those have
// told of their sums before they wait for others': first the end of one tile, then the beginning of the next.
// By kMultipliers threads, numbered by `thread`, which hold `kCount` sums each.
constexpr u32 kMultipliers = 256, kSumsBytes = 1 << 17;

__device__ inline void multipliers_barrier() { asm volatile("bar.sync 7, %0;" ::"n"(kMultipliers) : "memory"); }

template <class T, u32 kCount>
__device__ inline void tell_sums(const PanelsArgument& a, const T (&d)[kCount], u32 thread) {
    static_assert(kCount * sizeof(T) * kMultipliers == kSumsBytes);
    T* const to = (T*)(a.sums + (u64)blockIdx.x * kSumsBytes) + thread;
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) to[i * kMultipliers] = d[i];
    fence();
    multipliers_barrier();
    if (thread == 0) store_release(&a.summed[blockIdx.x], 1);
}

template <class T, u32 kCount>
__device__ inline void add_sums(const PanelsArgument& a, T (&d)[kCount], const Work& work, u32 thread) {
    const u64 end = (u64)(work.unit - a.whole + 1) * a.depth;
    for (u32 cluster = blockIdx.x / kCluster + 1; share(a, cluster) < end; ++cluster) {
        const u32 block = cluster * kCluster + blockIdx.x % kCluster;
        if (thread == 0) wait(a.team, &a.summed[block], 1, a.team.rank, kUser, block);
        multipliers_barrier();
        fence();
        const T* const from = (const T*)(a.sums + (u64)block * kSumsBytes) + thread;
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) d[i] += __ldcg(from + i * kMultipliers);
    }
}

// Whether the block has all sums of its part of the tile, and is to store it. Others have been told of.
template <class T, u32 kCount>
__device__ inline bool completes(const PanelsArgument& a, T (&d)[kCount], const Work& work, u32 thread) {
    if (work.first > 0) {
        tell_sums(a, d, thread);
        return false;
    }
    if (work.last < a.depth) add_sums(a, d, work, thread);
    return true;
}

}  // namespace shardmath
