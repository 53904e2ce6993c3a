// A product of gathered rows: C = A B, where A's rows come from all ranks and tiles wait for the rows they need.
//
// Compiled for sm_90a with ELEMENT (Float16, Bfloat16), A_ALONG_K and B_ALONG_K (1 where the operand's contiguous
// axis is k), C_ALONG_N (0 where C's columns are contiguous), WIDTH of a tile, CLUSTER (1 or 2 blocks that share
// the columns of B that they load), STAGES, and BOXES (0 where C is not aligned to 16 bytes). One block on a
// multiprocessor walks over tiles of 128 x WIDTH, the parts of A in the order in which they come:
//
//     warp 0: waits for the part, loads boxes of A and B  ->  8 warps: multiply, round, store
//
// A part's maps end with its rows, so a tile at its end reads zeros beyond them, and writes nothing there.
#include "clusters.cuh"
#include "shards.cuh"
#include "widths.cuh"

using namespace shardmath;

constexpr bool kAAlongK = A_ALONG_K, kBAlongK = B_ALONG_K, kAlongN = C_ALONG_N;
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

struct Rows {  // of one rank
    u32 first;     // its first unit
    u32 heights;   // units above each other; a unit is a tile of each block of a cluster
    u32 rows;
    u32 src;
};

struct GatheredArgument {
    TensorMap a[kRanks], c[kRanks];  // by order of arrival
    TensorMap b;
    Team team;
    Words* own;
    Words* left;      // of the rank that writes into this one's memory, or null
    char* out;        // C
    u64 pitch;        // bytes from one row, or column, to the next
    u32 parts, units, steps, columns;
    u32 neighbour;    // on the left: its rows come in chunks of k
    u32 chunk;        // steps
    Rows rows[kRanks];
    u32 start[kRanks];  // in C
};

struct Shared {
    u32 stages, out, full, empty;  // shared addresses
    __device__ u32 a(u32 stage) const { return stages + stage * (kABytes + kBBytes); }
    __device__ u32 b(u32 stage) const { return a(stage) + kABytes; }
};

struct Tile {
    u32 part, row, column;
};

// -- one block ----------------------------------------------------------------------------------------

// As store_matrices does, transposed.
__device__ inline void store_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
__device__ inline void group_barrier(u32 group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kMultipliers) : "memory");
}

__device__ inline void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// -- the walk ------------------------------------------------------------------------------------------

// Columns come one after another, in bands of kBand units: what is in flight at once needs little of A and B.
__device__ inline Tile locate(const GatheredArgument& a, u32 unit, u32 block) {
    u32 part = 0;
    while (part + 1 < a.parts && unit >= a.rows[part + 1].first) ++part;
    const Rows& rows = a.rows[part];
    const u32 across = (a.columns + kWidth - 1) / kWidth;
    const u32 local = unit - rows.first, band = local / (kBand * across), within = local % (kBand * across);
    const u32 left = rows.heights - band * kBand, heights = left < kBand ? left : kBand;
    const u32 height = band * kBand + within % heights;
    return {part, (height * kCluster + block) * kRows, within / heights * kWidth};
}

__device__ inline void load_stage(const GatheredArgument& a, const Shared& s, const Tile& tile, u32 k, u32 stage,
                                  u32 block) {
    const u32 full = s.full + 8 * stage, to_a = s.a(stage), to_b = s.b(stage);
    bar_expect(full, kABytes + kBBytes);
    const TensorMap* map = &a.a[tile.part];
    if (kAAlongK) {
        load_box(to_a, map, k, tile.row, full);
    } else {
        load_box(to_a, map, tile.row, k, full);
        load_box(to_a + kBox, map, tile.row + 64, k, full);
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

// One thread. Rows that have not come in time are multiplied as they lie: the host knows, and raises.
__device__ inline void load_tiles(const GatheredArgument& a, const Shared& s, u32 block) {
    const u64 launch = a.own->launches[kProducts] + 1;
    u32 number = 0, known = 0;  // parts that are here
    for (u32 unit = blockIdx.x / kCluster; unit < a.units; unit += gridDim.x / kCluster) {
        const Tile tile = locate(a, unit, block);
        const u32 src = a.rows[tile.part].src;
        const bool awaits = tile.part >= known && src != a.team.rank;
        const bool in_chunks = awaits && a.chunk < a.steps && src == a.neighbour;
        if (awaits && !in_chunks) {
            wait(a.team, &a.own->arrived[src], launch, src, kShard, src);
            fence_async();
        }
        known = tile.part + 1;
        for (u32 step = 0; step < a.steps; ++step, ++number) {
            if (in_chunks && step % a.chunk == 0) {
                const bool last = step + a.chunk >= a.steps;
                wait(a.team, last ? &a.own->arrived[src] : &a.own->begun[step / a.chunk], launch, src, kShard, src);
                fence_async();
            }
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

__device__ inline void store_tile(const GatheredArgument& a, const Shared& s, const Tile& tile, u32 group,
                                  const float (&d)[kWidth / 2]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool issues = threadIdx.x % kMultipliers == 0;
    const bool has_rows = tile.row + 64 * group < a.rows[tile.part].rows;
#pragma unroll
    for (u32 i = 0; i < kWidth / kOut; ++i) {
        const u32 to = s.out + (group * 2 + i % 2) * kOutBytes;
        if (issues) all_but_last_store_has_read();
        group_barrier(group);
#pragma unroll
        for (u32 j = 0; j < kOut / 8; j += 2) {  // pairs of 8 columns
            const float* v = d + kOut / 2 * i + 4 * j;
            const u32 p0 = ELEMENT::pack(v[0], v[1]), p1 = ELEMENT::pack(v[2], v[3]);
            const u32 p2 = ELEMENT::pack(v[4], v[5]), p3 = ELEMENT::pack(v[6], v[7]);
            if (kAlongN) {  // rows of 64 bytes, of which 16-byte piece p of row r lies in place p ^ r / 2 % 4
                const u32 row = warp * 16 + lane % 16, piece = j + lane / 16;
                store_matrices(to + row * 64 + (piece ^ (row >> 1 & 3)) * 16, p0, p1, p2, p3);
            } else {  // columns of 128 bytes, of which piece p of column c lies in place p ^ c % 8
                const u32 column = j * 8 + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
                store_transposed(to + column * 128 + (piece ^ (column & 7)) * 16, p0, p1, p2, p3);
            }
        }
        fence_async_shared();
        group_barrier(group);
        if (issues) {
            const u32 column = tile.column + kOut * i, row = tile.row + 64 * group;
            if (has_rows && column < a.columns)
                store_box(&a.c[tile.part], kAlongN ? column : row, kAlongN ? row : column, to);
            stores_commit();
        }
    }
}

// For a C that boxes cannot be stored to, because it is not aligned.
__device__ inline void store_elements(const GatheredArgument& a, const Tile& tile, u32 group,
                                      const float (&d)[kWidth / 2]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const u32 row = tile.row + 64 * group + 16 * warp + lane / 4, rows = a.rows[tile.part].rows;
    const u64 down = kAlongN ? a.pitch : 2, across = kAlongN ? 2 : a.pitch;
    char* const out = a.out + a.start[tile.part] * down;
#pragma unroll
    for (u32 i = 0; i < kWidth / 2; ++i) {
        const u32 column = tile.column + i / 4 * 8 + lane % 4 * 2 + i % 2, at = row + (i & 2) * 4;
        if (at < rows && column < a.columns)
            *(unsigned short*)(out + at * down + column * across) = (unsigned short)ELEMENT::pack(d[i], 0);
    }
}

__device__ inline void multiply_tiles(const GatheredArgument& a, const Shared& s, u32 block, u32 group) {
    float d[kWidth / 2];
    u32 number = 0;
    for (u32 unit = blockIdx.x / kCluster; unit < a.units; unit += gridDim.x / kCluster) {
        if (a.steps == 0) {
#pragma unroll
            for (u32 j = 0; j < kWidth / 2; ++j) d[j] = 0;
        }
        for (u32 step = 0; step < a.steps; ++step, ++number) {
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
        if (a.steps) release(s, (number - 1) % kStages);
        const Tile tile = locate(a, unit, block);
        if (BOXES)
            store_tile(a, s, tile, group, d);
        else
            store_elements(a, tile, group, d);
    }
    if (threadIdx.x % kMultipliers == 0) stores_have_read();
}

// The last block says that all rows have been read.
__device__ inline void say_read(const GatheredArgument& a) {
    Words& own = *a.own;
    const u64 launch = own.launches[kProducts] + 1;
    __threadfence();
    if (atomicAdd(&own.ended, 1ull) != gridDim.x - 1) return;
    own.ended = 0;
    own.launches[kProducts] = launch;
    __threadfence();
    signal(&a.left->read[kProducts], launch);
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gathered(const __grid_constant__ GatheredArgument a) {
    extern __shared__ char memory[];
    __shared__ u64 bars[2 * kStages];
    Shared s;
    s.stages = (shared_address(memory) + 1023) & ~1023u;
    s.out = s.stages + kStages * (kABytes + kBBytes);
    s.full = shared_address(bars);
    s.empty = s.full + 8 * kStages;
    const u32 block = rank_in_cluster();
    if (a.steps && threadIdx.x - 32 < a.parts) prefetch(&a.a[threadIdx.x - 32]);
    if (a.steps && threadIdx.x == 32) prefetch(&a.b);
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
    if (threadIdx.x == 0 && a.left) say_read(a);
}
