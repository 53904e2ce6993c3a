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
    TensorMap panel_a, panel_b, own_a, own_b, c;
    Team team;
    const u64* come;    // how many steps, by word
    const Step* steps;
    char* out;          // C
    u64 pitch;          // bytes
    u32 regions, units, depth, columns, rows;  // depth in steps
    u32 here_a, here_b;  // steps for which nothing of the factor has to come
    u32 reserved;
    Region region[REGIONS];

    __device__ const TensorMap* map_a(Step step) const { return step.a & kOwn ? &own_a : &panel_a; }
    __device__ const TensorMap* map_b(Step step) const { return step.b & kOwn ? &own_b : &panel_b; }
};

struct Tile {
    u32 region, row, column;
};

constexpr u32 kBand = 16 / kCluster;  // tiles above each other that are computed at about the same time

// Columns come one after another, in bands of kBand units: what is in flight at once needs little of A and B.
template <u32 kRows, u32 kWidth>
__device__ inline Tile locate(const PanelsArgument& a, u32 unit, u32 block) {
    u32 number = 0;
    while (number + 1 < a.regions && unit >= a.region[number + 1].first) ++number;
    const Region& region = a.region[number];
    const u32 local = unit - region.first;
    const u32 band = local / (kBand * region.across), within = local % (kBand * region.across);
    const u32 left = region.heights - band * kBand, heights = left < kBand ? left : kBand;
    const u32 height = region.row + band * kBand + within % heights;
    return {number, (height * kCluster + block) * kRows, (region.column + within / heights) * kWidth};
}

// How many steps of one factor are here, at least `target`: what has not come in time is multiplied as it lies,
// and the host, which is told, raises.
__device__ inline u32 come(const PanelsArgument& a, u32 word, u32 here, u32 target) {
    if (target <= here) return here;
    wait(a.team, &a.come[word], target, a.team.rank, kUser, word);
    const u32 there = (u32)load_acquire(&a.come[word]);
    return max(there, target);
}

// One thread: for each step of each tile of this block, wait until it is here and its stage is empty, and load it.
template <u32 kRows, u32 kWidth, u32 kStages, class Load>
__device__ inline void load_tiles(const PanelsArgument& a, u32 empty, u32 block, Load load_stage) {
    u32 number = 0, region = ~0u, here = 0;
    for (u32 unit = blockIdx.x / kCluster; unit < a.units; unit += gridDim.x / kCluster) {
        const Tile tile = locate<kRows, kWidth>(a, unit, block);
        if (tile.region != region) region = tile.region, here = 0;
        for (u32 step = 0; step < a.depth; ++step, ++number) {
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

// The stage has been multiplied by this warp: to all blocks that write into it.
__device__ inline void release(u32 empty, u32 stage) {
    const u32 lane = threadIdx.x % 32;
    if (kCluster == 1) {
        if (lane == 0) bar_arrive(empty + 8 * stage);
    } else if (lane < kCluster) {
        arrive_at(empty + 8 * stage, lane);
    }
}

}  // namespace shardmath
