// A product of panels: C = A B, where rows of A and columns of B come while others are multiplied.
//
// Compiled for sm_90a with ELEMENT (Float16, Bfloat16), A_ALONG_K and B_ALONG_K (1 where the factor's contiguous
// axis is k), WIDTH of a tile, CLUSTER (1 or 2 blocks that share the columns of B that they load), STAGES, BOXES
// (0 where the rows of C are not aligned to 16 bytes) and REGIONS (how many there can be). One block on a
// multiprocessor walks over tiles of 128 x WIDTH, region by region:
//
//     warp 0: waits until panels are here, loads boxes of A and B  ->  8 warps: multiply, round, store
//
// The panels lie in this GPU's memory. A copy engine fills them, and after each piece its stream writes to the
// word of the rows or columns how far along k they have come; this kernel only reads the words.
#include "clusters.cuh"
#include "symm.cuh"
#include "widths.cuh"

using namespace shardmath;

constexpr bool kAAlongK = A_ALONG_K, kBAlongK = B_ALONG_K;
constexpr u32 kWidth = WIDTH, kStages = STAGES;
constexpr u32 kRows = 128, kDepth = 64;
constexpr u32 kBox = 64 * 128;  // bytes of 64 x 64 elements
constexpr u32 kABytes = kRows * kDepth * 2;
constexpr u32 kSlabs = (kWidth + 63) / 64;
constexpr u32 kBBytes = kBAlongK ? kWidth * 128 : kSlabs * kBox;
constexpr u32 kThreads = 384, kMultipliers = 128;  // each group of four warps multiplies 64 rows
constexpr u32 kOut = 32;                           // columns that are stored at once
constexpr u32 kOutBytes = 64 * kOut * 2;
constexpr u32 kBand = 16 / kCluster;  // tiles above each other that are computed at about the same time

struct Region {  // of the result: tiles that need the same panels
    u32 first;             // its first unit; a unit is a tile of each block of a cluster
    u32 row, heights;      // in units
    u32 column, across;    // in tiles
    u32 a, b;              // the words of its rows and columns
    u32 reserved;
};

struct PaneledArgument {
    TensorMap a, b, c;
    Team team;
    const u64* come;  // how far along k, by word
    char* out;        // C
    u64 pitch;        // bytes
    u32 regions, units, depth, columns, rows, reserved;
    Region region[REGIONS];
};

struct Shared {
    u32 stages, out, full, empty;  // shared addresses
    __device__ u32 a(u32 stage) const { return stages + stage * (kABytes + kBBytes); }
    __device__ u32 b(u32 stage) const { return a(stage) + kABytes; }
};

struct Tile {
    u32 region, row, column;
};

// -- one block ----------------------------------------------------------------------------------------

__device__ inline void group_barrier(u32 group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kMultipliers) : "memory");
}

// -- the walk ------------------------------------------------------------------------------------------

// Columns come one after another, in bands of kBand units: what is in flight at once needs little of A and B.
__device__ inline Tile locate(const PaneledArgument& a, u32 unit, u32 block) {
    u32 number = 0;
    while (number + 1 < a.regions && unit >= a.region[number + 1].first) ++number;
    const Region& region = a.region[number];
    const u32 local = unit - region.first;
    const u32 band = local / (kBand * region.across), within = local % (kBand * region.across);
    const u32 left = region.heights - band * kBand, heights = left < kBand ? left : kBand;
    const u32 height = region.row + band * kBand + within % heights;
    return {number, (height * kCluster + block) * kRows, (region.column + within / heights) * kWidth};
}

// How far along k both panels of a region are here, at least `target`: what has not come in time is
// multiplied as it lies, and the host, which is told, raises.
__device__ inline u32 come(const PaneledArgument& a, const Region& region, u32 target) {
    const u64 *of_a = &a.come[region.a], *of_b = &a.come[region.b];
    wait(a.team, of_a, target, a.team.rank, kUser, region.a);
    wait(a.team, of_b, target, a.team.rank, kUser, region.b);
    const u64 there = load_acquire(of_a), too = load_acquire(of_b);
    fence_async();
    return (u32)(there < too ? there : too);
}

__device__ inline void load_stage(const PaneledArgument& a, const Shared& s, const Tile& tile, u32 k, u32 stage,
                                  u32 block) {
    const u32 full = s.full + 8 * stage, to_a = s.a(stage), to_b = s.b(stage);
    bar_expect(full, kABytes + kBBytes);
    if (kAAlongK) {
        load_box(to_a, &a.a, k, tile.row, full);
    } else {
        load_box(to_a, &a.a, tile.row, k, full);
        load_box(to_a + kBox, &a.a, tile.row + 64, k, full);
    }
    if (kBAlongK) {
        constexpr u32 kShare = kWidth / kCluster;
        load_box_for_all(to_b + block * kShare * 128, &a.b, k, tile.column + block * kShare, full);
    } else {
        constexpr u32 kShare = kDepth / kCluster;
#pragma unroll
        for (u32 i = 0; i < kSlabs; ++i)
            load_box_for_all(to_b + i * kBox + block * kShare * 128, &a.b, tile.column + 64 * i, k + block * kShare,
                             full);
    }
}

// One thread.
__device__ inline void load_tiles(const PaneledArgument& a, const Shared& s, u32 block) {
    const u32 steps = (a.depth + kDepth - 1) / kDepth;
    u32 number = 0;
    for (u32 unit = blockIdx.x / kCluster; unit < a.units; unit += gridDim.x / kCluster) {
        const Tile tile = locate(a, unit, block);
        u32 here = 0;
        for (u32 step = 0; step < steps; ++step, ++number) {
            const u32 end = (step + 1) * kDepth < a.depth ? (step + 1) * kDepth : a.depth;
            if (here < end) here = max(end, come(a, a.region[tile.region], end));
            const u32 stage = number % kStages;
            bar_wait(s.empty + 8 * stage, (number / kStages & 1) ^ 1);
            load_stage(a, s, tile, step * kDepth, stage, block);
        }
    }
}

// -- what the other warps do ---------------------------------------------------------------------------

// The stage has been multiplied by this warp: to all blocks that write into it.
__device__ inline void release(const Shared& s, u32 stage) {
    const u32 lane = threadIdx.x % 32;
    if (kCluster == 1) {
        if (lane == 0) bar_arrive(s.empty + 8 * stage);
    } else if (lane < kCluster) {
        arrive_at(s.empty + 8 * stage, lane);
    }
}

__device__ inline void store_tile(const PaneledArgument& a, const Shared& s, const Tile& tile, u32 group,
                                  const float (&d)[kWidth / 2]) {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, right = lane / 16;
    const bool issues = threadIdx.x % kMultipliers == 0;
    const bool has_rows = tile.row + 64 * group < a.rows;
#pragma unroll
    for (u32 i = 0; i < kWidth / kOut; ++i) {
        const u32 to = s.out + (group * 2 + i % 2) * kOutBytes;
        if (issues) all_but_last_store_has_read();
        group_barrier(group);
#pragma unroll
        for (u32 j = 0; j < kOut / 8; j += 2) {  // pairs of 8 columns
            const float* v = d + kOut / 2 * i + 4 * j;
            const u32 place = (j + right) ^ (row >> 1 & 3);
            store_matrices(to + row * kOut * 2 + place * 16, ELEMENT::pack(v[0], v[1]), ELEMENT::pack(v[2], v[3]),
                           ELEMENT::pack(v[4], v[5]), ELEMENT::pack(v[6], v[7]));
        }
        fence_async_shared();
        group_barrier(group);
        if (issues) {
            const u32 column = tile.column + kOut * i;
            if (has_rows && column < a.columns) store_box(&a.c, column, tile.row + 64 * group, to);
            stores_commit();
        }
    }
}

// Rows that boxes cannot be stored to, because they are not aligned.
__device__ inline void store_elements(const PaneledArgument& a, const Tile& tile, u32 group,
                                      const float (&d)[kWidth / 2]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const u32 row = tile.row + 64 * group + 16 * warp + lane / 4;
#pragma unroll
    for (u32 i = 0; i < kWidth / 2; ++i) {
        const u32 column = tile.column + i / 4 * 8 + lane % 4 * 2 + i % 2, at = row + (i & 2) * 4;
        if (at < a.rows && column < a.columns)
            *(unsigned short*)(a.out + at * a.pitch + column * 2) = (unsigned short)ELEMENT::pack(d[i], 0);
    }
}

__device__ inline void multiply_tiles(const PaneledArgument& a, const Shared& s, u32 block, u32 group) {
    const u32 steps = (a.depth + kDepth - 1) / kDepth;
    float d[kWidth / 2];
    u32 number = 0;
    for (u32 unit = blockIdx.x / kCluster; unit < a.units; unit += gridDim.x / kCluster) {
        for (u32 step = 0; step < steps; ++step, ++number) {
            const u32 stage = number % kStages;
            bar_wait(s.full + 8 * stage, number / kStages & 1);
            products_begin();
#pragma unroll
            for (u32 k = 0; k < kDepth / 16; ++k) {
                const u32 of_a = s.a(stage) + group * kBox + k * (kAAlongK ? 32 : 2048);
                const u32 of_b = s.b(stage) + k * (kBAlongK ? 32 : 2048);
                Multiply<ELEMENT, kAAlongK, kBAlongK>::add(d, describe<kAAlongK>(of_a, kBox),
                                                           describe<kBAlongK>(of_b, kBox), step | k);
            }
            products_commit();
            products_wait<1>();  // the step before has been multiplied
            if (step) release(s, (number - 1) % kStages);
        }
        products_wait<0>();
        release(s, (number - 1) % kStages);
        const Tile tile = locate(a, unit, block);
        if (BOXES)
            store_tile(a, s, tile, group, d);
        else
            store_elements(a, tile, group, d);
    }
    if (threadIdx.x % kMultipliers == 0) stores_have_read();
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    paneled(const __grid_constant__ PaneledArgument a) {
    extern __shared__ char memory[];
    __shared__ u64 bars[2 * kStages];
    Shared s;
    s.stages = (shared_address(memory) + 1023) & ~1023u;
    s.out = s.stages + kStages * (kABytes + kBBytes);
    s.full = shared_address(bars);
    s.empty = s.full + 8 * kStages;
    const u32 block = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) bar_init(s.full + 8 * i, 1), bar_init(s.empty + 8 * i, 8 * kCluster);
        bars_visible();
    }
    cluster_barrier();
    if (threadIdx.x < kMultipliers) {
        give_registers<40>();
        if (threadIdx.x == 0) load_tiles(a, s, block);
    } else {
        take_registers<232>();
        multiply_tiles(a, s, block, threadIdx.x / kMultipliers - 1);
    }
    __syncwarp();
    cluster_barrier();  // a block's barriers and stages are there until its neighbour needs them no more
}
