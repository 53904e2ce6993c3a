// A product of float64 panels: C = A B, where rows of A and columns of B come while others are multiplied.
//
// Compiled for sm_90 with A_ALONG_K and B_ALONG_K (1 where the factor's contiguous axis is k), CLUSTER, STAGES,
// PAIRS (0 where the rows of C are not aligned to 16 bytes) and REGIONS. One block on a multiprocessor walks over
// tiles of 128 x 128, region by region (panels.cuh):
//
//     warp 0: waits until panels are here, loads boxes of A and B  ->  8 warps: multiply 64 x 32 each, store
//
// A box's rows are 16 numbers, 128 bytes, swizzled: the 16 bytes number c of row r lie at c ^ (r % 8). Lane (g, t),
// g = lane / 4, t = lane % 4, gives mma the numbers of row or column g, and of k = t. Which rows and columns of the
// tile these are is free: they are chosen so that 16 lanes always read from 16 different places of 128 bytes.
//
//     boxes with rows along k:  g is the row g % 4 * 2 + g / 4 of 8
//     rows across k:            g is the column g % 2 * 8 + g / 4 * 2 + g / 2 % 2 of 16; those 4 on are the next 8
#include "panels.cuh"

using namespace shardmath;

constexpr bool kAAlongK = A_ALONG_K, kBAlongK = B_ALONG_K;
constexpr u32 kStages = STAGES;
constexpr u32 kRows = 128, kWidth = 128;
constexpr u32 kBox = 16 * 128;  // bytes of 16 x 16 numbers
constexpr u32 kABytes = kRows * 128, kStageBytes = kABytes + kWidth * 128;
constexpr u32 kThreads = 384, kMultipliers = 8;
constexpr u32 kHigh = 64, kWide = 32;  // of a warp's part of the tile
constexpr u32 kDown = kHigh / 16, kAcross = kWide / 8;

// What mma takes, of a lane, for 8 of k: 16 rows of A, and all columns of the warp's part of B.
struct Rows {
    double of[4];
};
struct Columns {
    double of[kAcross][2];
};

// d += a b for 16 rows, 8 columns and 8 of k.
__device__ inline void multiply(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}

__device__ inline double load_number(u32 from) {
    double x;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(from) : "memory");
    return x;
}

// -- loading -------------------------------------------------------------------------------------------

struct Shared {
    u32 stages, full, empty;  // shared addresses
    __device__ u32 a(u32 stage) const { return stages + stage * kStageBytes; }
    __device__ u32 b(u32 stage) const { return a(stage) + kABytes; }
};

__device__ inline void load_stage(const PanelsArgument& a, const Shared& s, const Tile& tile, Step at, u32 stage,
                                  u32 block) {
    const u32 full = s.full + 8 * stage, to_a = s.a(stage), to_b = s.b(stage);
    const TensorMap *of_a = a.map_a(at), *of_b = a.map_b(at);
    const u32 k_of_a = at.a & ~kOwn, k_of_b = at.b & ~kOwn;
    bar_expect(full, kStageBytes);
    if (kAAlongK) {
        load_box(to_a, of_a, k_of_a, tile.row, full);
    } else {
#pragma unroll
        for (u32 i = 0; i < kRows / 16; ++i) load_box(to_a + i * kBox, of_a, tile.row + 16 * i, k_of_a, full);
    }
    constexpr u32 kShare = kWidth / kCluster;
    const u32 first = block * kShare;
    if (kBAlongK) {
        load_box_for_all(to_b + first * 128, of_b, k_of_b, tile.column + first, full);
    } else {
#pragma unroll
        for (u32 i = 0; i < kShare / 16; ++i)
            load_box_for_all(to_b + first * 128 + i * kBox, of_b, tile.column + first + 16 * i, k_of_b, full);
    }
}

// -- multiplying ---------------------------------------------------------------------------------------

// Where a lane's numbers lie in 16 rows or columns of a tile, of which there are two eights, for 4 of 16 of k.
template <bool kAlongK>
struct Place {
    u32 of[4];
    __device__ Place() {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const u32 row = kAlongK ? g % 4 * 2 + g / 4 : t;
        const u32 sixteen = (kAlongK ? t / 2 : g % 2 * 4 + g / 4) ^ row, eight = kAlongK ? t % 2 : g / 2 % 2;
        const u32 first = row * 128 + sixteen * 16 + eight * 8;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) of[i] = first ^ i << 5;
    }
    __device__ u32 at(u32 eight, u32 four) const {
        return kAlongK ? of[four] + eight * 1024 : of[eight + four % 2 * 2] + four * 512;
    }
};

// `from` is where the warp's part of a stage begins, `half` of k 0 or 1.
__device__ inline void load_rows(Rows& x, u32 from, const Place<kAAlongK>& place, u32 half, u32 i) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) x.of[j] = load_number(from + i * kBox + place.at(j % 2, 2 * half + j / 2));
}

__device__ inline void load_columns(Columns& x, u32 from, const Place<kBAlongK>& place, u32 half) {
#pragma unroll
    for (u32 i = 0; i < kAcross; ++i)
#pragma unroll
        for (u32 j = 0; j < 2; ++j) x.of[i][j] = load_number(from + i / 2 * kBox + place.at(i % 2, 2 * half + j));
}

// -- storing -------------------------------------------------------------------------------------------

__device__ inline void store(const PanelsArgument& a, u32 row, u32 columns, u32 column, double one, double two) {
    double* const to = (double*)(a.out + row * a.pitch) + column;
    if (PAIRS && column + 1 < columns) {
        *(double2*)to = {one, two};
    } else {
        if (column < columns) to[0] = one;
        if (column + 1 < columns) to[1] = two;
    }
}

// Two lanes exchange one of their two numbers, so that each has neighbours.
__device__ inline void store_tile(const PanelsArgument& a, u32 first_row, u32 first_column,
                                  const double (&d)[kDown][kAcross][4]) {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr u32 kPartner = kBAlongK ? 2 : 1;
    const bool upper = t & kPartner;
#pragma unroll
    for (u32 i = 0; i < kDown; ++i) {
#pragma unroll
        for (u32 eight = 0; eight < 2; ++eight) {
            const u32 of_k = 8 * eight + g % 4 * 2 + g / 4, across = g % 2 * 8 + g / 4 * 2 + g / 2 % 2 + 4 * eight;
            const u32 row = first_row + 16 * i + (kAAlongK ? of_k : across);
            const u32 columns = row < a.rows ? a.columns : 0;
#pragma unroll
            for (u32 j = 0; j < kAcross; ++j) {
                const double one = d[i][j][2 * eight], two = d[i][j][2 * eight + 1];
                const double other = __shfl_xor_sync(~0u, upper ? one : two, kPartner);
                const u32 column = first_column + (kBAlongK ? 8 * j + t % 2 * 4 + t / 2 * 2
                                                            : j / 2 * 16 + j % 2 * 4 + t / 2 * 2 + t % 2 * 8);
                store(a, row, columns, column, upper ? other : one, upper ? two : other);
            }
        }
    }
}

// What the next products need is loaded while these run: 16 rows, and at the middle of 8 of k all columns.
__device__ inline void multiply_tiles(const PanelsArgument& a, const Shared& s, u32 block, u32 warp) {
    const u32 top = warp / 4 * kHigh, left = warp % 4 * kWide;
    const Place<kAAlongK> of_a;
    const Place<kBAlongK> of_b;
    Rows rows[2];
    Columns columns[2];
    u32 number = 0;
    for (u32 unit = blockIdx.x / kCluster; unit < a.units; unit += gridDim.x / kCluster) {
        double d[kDown][kAcross][4] = {};
        u32 stage = number % kStages;
        bar_wait(s.full + 8 * stage, number / kStages & 1);
        load_columns(columns[0], s.b(stage) + left * 128, of_b, 0);
        load_rows(rows[0], s.a(stage) + top * 128, of_a, 0, 0);
        for (u32 step = 0; step < a.depth; ++step) {
            const u32 from_a = s.a(stage) + top * 128, from_b = s.b(stage) + left * 128;
            const u32 left_stage = stage;
            ++number, stage = number % kStages;
            const bool more = step + 1 < a.depth;
#pragma unroll
            for (u32 turn = 0; turn < 2 * kDown; ++turn) {
                const u32 half = turn / kDown, i = turn % kDown;
                if (turn + 1 < 2 * kDown) {
                    load_rows(rows[(turn + 1) % 2], from_a, of_a, (turn + 1) / kDown, (turn + 1) % kDown);
                    if (turn == 1) load_columns(columns[1], from_b, of_b, 1);
                } else {
                    __syncwarp();
                    release(s.empty, left_stage);
                    if (more) {
                        bar_wait(s.full + 8 * stage, number / kStages & 1);
                        load_columns(columns[0], s.b(stage) + left * 128, of_b, 0);
                        load_rows(rows[0], s.a(stage) + top * 128, of_a, 0, 0);
                    }
                }
#pragma unroll
                for (u32 j = 0; j < kAcross; ++j) multiply(d[i][j], rows[turn % 2].of, columns[half].of[j]);
            }
        }
        const Tile tile = locate<kRows, kWidth>(a, unit, block);
        store_tile(a, tile.row + top, tile.column + left, d);
    }
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    doubles(const __grid_constant__ PanelsArgument a) {
    extern __shared__ char memory[];
    __shared__ u64 bars[2 * kStages];
    Shared s;
    s.stages = (shared_address(memory) + 1023) & ~1023u;
    s.full = shared_address(bars);
    s.empty = s.full + 8 * kStages;
    const u32 block = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i)
            bar_init(s.full + 8 * i, 1), bar_init(s.empty + 8 * i, kMultipliers * kCluster);
        bars_visible();
    }
    cluster_barrier();
    if (threadIdx.x < 128) {
        give_registers<40>();
        if (threadIdx.x == 0)
            load_tiles<kRows, kWidth, kStages>(a, s.empty, block, [&](const Tile& tile, Step at, u32 stage) {
                load_stage(a, s, tile, at, stage, block);
            });
    } else {
        take_registers<232>();
        multiply_tiles(a, s, block, threadIdx.x / 32 - 4);
    }
    __syncwarp();
    cluster_barrier();  // a block's barriers and stages are there until its neighbour needs them no more
}
