// A product of gathered rows: C = A B, where A's rows come from all ranks and tiles wait for the rows they need.
//
// Compiled as tiles.cuh says, with C_ALONG_N (0 where C's columns are contiguous) and BOXES (0 where C is not
// aligned to 16 bytes). Tiles are walked in the order in which the parts of A come:
//
//     warp 0: waits for the part, loads boxes of A and B  ->  8 warps: multiply, round, store
//
// A part's maps end with its rows, so a tile at its end reads zeros beyond them, and writes nothing there.
#include "shards.cuh"
#include "tiles.cuh"

using namespace shardmath;

constexpr bool kAlongN = C_ALONG_N;

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
    Words* words[kRanks];  // by rank
    char* out;        // C
    u64 pitch;        // bytes from one row, or column, to the next
    u32 parts, units, steps, columns;
    u32 chunk;        // steps of k that come at once
    u32 unused;
    Rows rows[kRanks];
    u32 start[kRanks];  // in C

    __device__ Words& own() const { return *words[team.rank]; }
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
__device__ inline void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// -- the walk ------------------------------------------------------------------------------------------

__device__ inline Tile locate(const GatheredArgument& a, u32 unit, u32 block) {
    u32 part = 0;
    while (part + 1 < a.parts && unit >= a.rows[part + 1].first) ++part;
    const Rows& rows = a.rows[part];
    const Unit at(unit - rows.first, rows.heights, (a.columns + kWidth - 1) / kWidth);
    return {part, (at.height * kCluster + block) * kRows, at.column * kWidth};
}

// One thread. Rows that have not come in time are multiplied as they lie: the host knows, and raises.
__device__ inline void load_tiles(const GatheredArgument& a, const Shared& s, u32 block) {
    const Words& own = a.own();
    const u64 launch = own.launches + 1;
    u32 number = 0, known = 0;  // parts that are here
    for (u32 unit = blockIdx.x / kCluster; unit < a.units; unit += gridDim.x / kCluster) {
        const Tile tile = locate(a, unit, block);
        const u32 src = a.rows[tile.part].src;
        const bool awaits = tile.part >= known && src != a.team.rank;
        known = tile.part + 1;
        for (u32 step = 0; step < a.steps; ++step, ++number) {
            if (awaits && step % a.chunk == 0) {
                wait(a.team, &own.arrived[src][step / a.chunk], launch, src, kShard, src);
                fence_async();
            }
            const u32 stage = number % kStages;
            bar_wait(s.empty + 8 * stage, (number / kStages & 1) ^ 1);
            const u32 k = step * kDepth;
            load_stage(s, stage, block, {&a.a[tile.part], &a.b, tile.row, tile.column, k, k});
        }
    }
}

// -- what the other warps do ---------------------------------------------------------------------------

__device__ inline void store_tile(const GatheredArgument& a, const Shared& s, const Tile& tile, u32 group,
                                  const float (&d)[kWidth / 2]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool issues = threadIdx.x % kGroup == 0;
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
        multiply_steps(d, s, group, 0, a.steps, number);
        const Tile tile = locate(a, unit, block);
        if (BOXES)
            store_tile(a, s, tile, group, d);
        else
            store_elements(a, tile, group, d);
    }
    if (threadIdx.x % kGroup == 0) stores_have_read();
}

// The last block tells all peers that their rows have been read.
__device__ inline void say_read(const GatheredArgument& a) {
    Words& own = a.own();
    const u64 launch = own.launches + 1;
    __threadfence();
    if (atomicAdd(&own.ended, 1ull) != gridDim.x - 1) return;
    own.ended = 0;
    own.launches = launch;
    __threadfence();
    for (u32 i = 0; i < kRanks; ++i) signal(&a.words[i]->read[a.team.rank], launch);
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gathered(const __grid_constant__ GatheredArgument a) {
    const bool loads = a.steps && a.units;
    if (loads && threadIdx.x - 32 < a.parts) prefetch(&a.a[threadIdx.x - 32]);
    if (loads && threadIdx.x == 32) prefetch(&a.b);
    run_block(a);
    if (threadIdx.x == 0) say_read(a);
}
