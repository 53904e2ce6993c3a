// Products of halves in tiles of 128 x WIDTH, one block on a multiprocessor: how its warps work together.
//
// Compiled for sm_90a with ELEMENT (Float16, Bfloat16), A_ALONG_K and B_ALONG_K (1 where the factor's contiguous
// axis is k), C_ALONG_N (0 where C's columns are contiguous), ALIGNED (0 where C's lines are not aligned to 16
// bytes), WIDTH, CLUSTER (1 or 2 blocks that share the columns of B that they load) and STAGES.
//
//     warp 0, one thread: loads boxes of A and B  -- stages -->  8 warps: multiply
//     warp 1: stores lines of C                   <--- gaps ---
//
// A multiprocessor writes a tile in the time of three steps: too long to wait for. So a gap follows the steps of each
// tile, a stage into which nothing is loaded. The tile is packed there, rounded, and stored beside the next one's
// steps; what is packed beyond the stage has memory behind the stages. Without ALIGNED there are no gaps.
//
// A kernel says which tiles there are, in which order, and waits for what they need.
#pragma once

#include "clusters.cuh"
#include "widths.cuh"

namespace shardmath {

constexpr bool kAAlongK = A_ALONG_K, kBAlongK = B_ALONG_K, kCAlongN = C_ALONG_N;
constexpr u32 kWidth = WIDTH, kStages = STAGES;
constexpr u32 kRows = 128, kDepth = 64;
constexpr u32 kBox = 64 * 128;  // bytes of 64 x 64 elements
constexpr u32 kABytes = kRows * kDepth * 2;
constexpr u32 kSlabs = (kWidth + 63) / 64;
constexpr u32 kBBytes = kBAlongK ? kWidth * 128 : kSlabs * kBox;
constexpr u32 kStageBytes = kABytes + kBBytes;
constexpr u32 kThreads = 384, kGroup = 128, kWarps = 8;  // each group of four warps multiplies 64 rows

// Rows of C where they are contiguous, else columns; packed so far apart that a warp writes into all banks at once.
constexpr u32 kLines = kCAlongN ? kRows : kWidth, kLineBytes = (kCAlongN ? kWidth : kRows) * 2;
constexpr u32 kLineStep = kLineBytes + 16, kLinesInGap = kStageBytes / kLineStep;

struct Shared {
    u32 stages, full, empty, packed, stored;  // shared addresses
    __device__ u32 a(u32 stage) const { return stages + stage * kStageBytes; }
    __device__ u32 b(u32 stage) const { return a(stage) + kABytes; }
    __device__ u32 line(u32 gap, u32 number) const {
        return number < kLinesInGap ? a(gap) + number * kLineStep : a(kStages) + (number - kLinesInGap) * kLineStep;
    }
};

// Where a stage comes from: kDepth of k of each factor.
struct Boxes {
    const TensorMap *a, *b;
    u32 row, column, k_of_a, k_of_b;
};

// One thread of each block of a cluster.
__device__ inline void load_stage(const Shared& s, u32 stage, u32 block, const Boxes& from) {
    const u32 full = s.full + 8 * stage, to_a = s.a(stage), to_b = s.b(stage);
    bar_expect(full, kStageBytes);
    if (kAAlongK) {
        load_box(to_a, from.a, from.k_of_a, from.row, full);
    } else {
        load_box(to_a, from.a, from.row, from.k_of_a, full);
        load_box(to_a + kBox, from.a, from.row + 64, from.k_of_a, full);
    }
    if (kBAlongK) {
        constexpr u32 kShare = kWidth / kCluster;
        load_box_for_all(to_b + block * kShare * 128, from.b, from.k_of_b, from.column + block * kShare, full);
    } else {
        constexpr u32 kShare = kDepth / kCluster;
#pragma unroll
        for (u32 i = 0; i < kSlabs; ++i)
            load_box_for_all(to_b + i * kBox + block * kShare * 128, from.b, from.column + 64 * i,
                             from.k_of_b + block * kShare, full);
    }
}

// Multiply steps `first` to before `last` of a tile, which are loaded, one stage each; `number` counts all steps of
// this block. d holds the sums of the group's 64 rows as widths.cuh says. By four warps.
__device__ inline void multiply_steps(float (&d)[kWidth / 2], const Shared& s, u32 group, u32 first, u32 last,
                                      u32& number) {
#pragma unroll 1  // else the body is copied for the first step, and again
    for (u32 step = first; step < last; ++step, ++number) {
        const u32 stage = number % kStages;
        bar_wait(s.full + 8 * stage, number / kStages & 1);
        products_begin();
#pragma unroll
        for (u32 k = 0; k < kDepth / 16; ++k) {
            const u32 of_a = s.a(stage) + group * kBox + k * (kAAlongK ? 32 : 2048);
            const u32 of_b = s.b(stage) + k * (kBAlongK ? 32 : 2048);
            Multiply<ELEMENT, kAAlongK, kBAlongK>::add(d, describe<kAAlongK>(of_a, kBox),
                                                       describe<kBAlongK>(of_b, kBox), step > first || k);
        }
        products_commit();
        products_wait<1>();  // the step before has been multiplied
        if (step > first) release(s.empty, (number - 1) % kStages);
    }
    products_wait<0>();
    if (first < last) release(s.empty, (number - 1) % kStages);
}

// -- from registers to C -------------------------------------------------------------------------------

// One thread, behind the steps of a tile.
__device__ inline void leave_gap(const Shared& s, u32& number) {
    if (!ALIGNED) return;
    const u32 stage = number % kStages;
    bar_wait(s.empty + 8 * stage, (number++ / kStages & 1) ^ 1);
    bar_arrive(s.full + 8 * stage);
}

// As store_matrices does, transposed.
__device__ inline void store_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// A group's 64 rows into the gap. `number` counts stages, `tile` tiles that are stored. By four warps.
__device__ inline void pack_tile(const Shared& s, u32 group, u32& number, u32& tile, const float (&d)[kWidth / 2]) {
    const u32 gap = number % kStages, lane = threadIdx.x % 32, top = 64 * group + threadIdx.x / 32 % 4 * 16;
    bar_wait(s.full + 8 * gap, number++ / kStages & 1);
    bar_wait(s.stored, (tile++ & 1) ^ 1);
    const u32 row = s.line(gap, top + lane % 16) + lane / 16 * 16;
#pragma unroll
    for (u32 j = 0; j < kWidth / 8; j += 2) {  // pairs of 8 columns
        const float* v = d + 4 * j;
        const u32 p0 = ELEMENT::pack(v[0], v[1]), p1 = ELEMENT::pack(v[2], v[3]);
        const u32 p2 = ELEMENT::pack(v[4], v[5]), p3 = ELEMENT::pack(v[6], v[7]);
        if (kCAlongN)
            store_matrices(row + j * 16, p0, p1, p2, p3);
        else
            store_transposed(s.line(gap, j * 8 + lane / 16 * 8 + lane % 8) + (top + lane / 8 % 2 * 8) * 2, p0, p1, p2, p3);
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) bar_arrive(s.packed);
}

// Where tiles go; `pitch` is the bytes from one line to the next.
struct Target {
    char* out;
    u64 pitch;
    u32 rows, columns;

    __device__ char* at(u32 row, u32 column) const {
        return out + (kCAlongN ? row : column) * pitch + (kCAlongN ? column : row) * 2;
    }
};

// What is packed, as far as it is within C; then the gap is a stage again. By a warp.
__device__ inline void store_tile(const Shared& s, const Target& c, u32 row, u32 column, u32& number, u32& tile) {
    const u32 gap = number++ % kStages, lane = threadIdx.x % 32;
    const u32 rows = row < c.rows ? min(kRows, c.rows - row) : 0, columns = min(kWidth, c.columns - column);
    const u32 lines = rows == 0 ? 0 : kCAlongN ? rows : columns, nbytes = (kCAlongN ? columns : rows) * 2;
    bar_wait(s.packed, tile++ & 1);
    for (u32 i = lane; i < lines; i += 32) {
        const u32 down = kCAlongN ? i : 0, right = kCAlongN ? 0 : i;
        store_bulk(c.at(row + down, column + right), s.line(gap, i), nbytes);
    }
    stores_have_read();
    __syncwarp();
    if (lane == 0) bar_arrive(s.stored);
    for (u32 i = 0; i < kWarps; ++i) release(s.empty, gap);
}

// The same, one element at a time, of a group's rows from registers. By four warps.
__device__ inline void store_elements(const Target& c, u32 row, u32 column, u32 group, const float (&d)[kWidth / 2]) {
    row += 64 * group + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    column += threadIdx.x % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < kWidth / 2; ++i) {
        const u32 down = row + (i & 2) * 4, right = column + i / 4 * 8 + i % 2;
        if (down < c.rows && right < c.columns)
            *(unsigned short*)c.at(down, right) = (unsigned short)ELEMENT::pack(d[i], 0);
    }
}

// All of a block: the kernel's `load_tiles(a, s, block)` by one thread, its `store_tiles(a, s, block)` by a warp where C
// is aligned, and its `multiply_tiles(a, s, block, group)` by each of two groups of four warps.
template <class Argument>
__device__ inline void run_block(const Argument& a) {
    extern __shared__ char memory[];
    __shared__ u64 bars[2 * kStages + 2];
    Shared s;
    s.stages = (shared_address(memory) + 1023) & ~1023u;
    s.full = shared_address(bars);
    s.empty = s.full + 8 * kStages;
    s.packed = s.empty + 8 * kStages;
    s.stored = s.packed + 8;
    const u32 block = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) bar_init(s.full + 8 * i, 1), bar_init(s.empty + 8 * i, kWarps * kCluster);
        bar_init(s.packed, kWarps), bar_init(s.stored, 1);
        bars_visible();
    }
    cluster_barrier();
    if (threadIdx.x < kGroup) {
        give_registers<40>();
        if (threadIdx.x == 0) load_tiles(a, s, block);
        if (ALIGNED && threadIdx.x / 32 == 1) store_tiles(a, s, block);
    } else {
        take_registers<232>();
        multiply_tiles(a, s, block, threadIdx.x / kGroup - 1);
    }
    __syncwarp();
    cluster_barrier();  // a block's barriers and stages are there until its neighbour needs them no more
}

}  // namespace shardmath
