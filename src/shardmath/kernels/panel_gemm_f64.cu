// Panel GEMM of float64: C = A B, where rows of A and columns of B arrive while others are multiplied.
//
// Compiled for sm_90a with A_ALONG_K and B_ALONG_K (1 where the operand's contiguous axis is k), CLUSTER, STAGES,
// PAIRS (0 where the rows of C are not aligned to 16 bytes) and REGIONS. One block on a multiprocessor computes
// tiles of 128 x 128, region by region (panel_gemm.cuh):
//
//     warp 0: waits until panels have arrived, loads boxes of A and B  ->  8 warps: multiply 64 x 32 each, store
//
// mma multiplies 16 rows of a tall factor by 8 columns of a wide one, 16 of k at a time; lane (g, t), g = lane / 4,
// t = lane % 4, gives it rows g and g + 8, column g, and t, t + 4, t + 8 and t + 12 of k. Which rows, columns and
// indices of k these stand for is free. A box's rows are 128 bytes, swizzled: the 16 bytes number c of row r lie at
// c ^ (r % 8). So they are chosen such that lanes which read together read from different places:
//
//     pairs    A and B lie along different axes. The one along k is wide: two of k are read at once, 2 t and 2 t + 1,
//              2 t + 8 and 2 t + 9, of row g % 2 * 4 + g / 2. The other is tall: rows 2 g and 2 g + 1 at once.
//     singles  A is tall, B is wide, k is t, t + 4, ... Along k, g is row g % 4 * 2 + g / 4 of 8. Across, it is
//              g % 2 * 8 + g / 4 * 2 + g / 2 % 2 of 16, and the next 8 are those 4 on.
#include "panel_gemm.cuh"

using namespace shardmath;

constexpr bool kAAlongK = A_ALONG_K, kBAlongK = B_ALONG_K;
constexpr bool kPairs = kAAlongK != kBAlongK;
constexpr bool kTurned = kPairs && kAAlongK;  // B is tall: sums are those of the transposed tile
constexpr u32 kStages = STAGES;
constexpr u32 kRows = 128, kWidth = 128;
constexpr u32 kBox = 16 * 128;  // bytes of 16 x 16 numbers
constexpr u32 kABytes = kRows * 128, kStageBytes = kABytes + kWidth * 128;
constexpr u32 kThreads = 384;
constexpr u32 kTall = 64, kWide = 32;  // of a warp's part of the tile
constexpr u32 kDown = kTall / 16, kAcross = kWide / 8, kSums = kDown * kAcross * 4;

// -- loading -------------------------------------------------------------------------------------------

struct Shared {
    u32 stages, full, empty;  // shared addresses
    __device__ u32 a(u32 stage) const { return stages + stage * kStageBytes; }
    __device__ u32 b(u32 stage) const { return a(stage) + kABytes; }
    __device__ u32 tall(u32 stage) const { return kTurned ? b(stage) : a(stage); }
    __device__ u32 wide(u32 stage) const { return kTurned ? a(stage) : b(stage); }
};

__device__ inline void load_stage(const PanelGemmArgument& a, const Shared& s, const Tile& tile, Step at, u32 stage,
                                  u32 block) {
    const u32 full = s.full + 8 * stage, to_a = s.a(stage), to_b = s.b(stage);
    const TensorMap *of_a = a.map_a(at), *of_b = a.map_b(at);
    const u32 k_of_a = at.a & ~kOwn, k_of_b = at.b & ~kOwn;
    mbarrier_expect_tx(full, kStageBytes);
    if (kAAlongK) {
        tma_load(to_a, of_a, k_of_a, tile.row, full);
    } else {
#pragma unroll
        for (u32 i = 0; i < kRows / 16; ++i) tma_load(to_a + i * kBox, of_a, tile.row + 16 * i, k_of_a, full);
    }
    constexpr u32 kShare = kWidth / kCluster;
    const u32 first = block * kShare;
    if (kBAlongK) {
        tma_load_multicast(to_b + first * 128, of_b, k_of_b, tile.column + first, full);
    } else {
#pragma unroll
        for (u32 i = 0; i < kShare / 16; ++i)
            tma_load_multicast(to_b + first * 128 + i * kBox, of_b, tile.column + first + 16 * i, k_of_b, full);
    }
}

// -- what mma takes ------------------------------------------------------------------------------------

struct Rows {  // a lane's numbers of 16 rows: two of each of its four indices of k
    double of[8];
};
struct Columns {
    double of[kAcross][4];
};

__device__ inline void multiply(double* d, const double (&a)[8], const double (&b)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]),
          "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

__device__ inline double load_number(u32 from) {
    double x;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(from) : "memory");
    return x;
}
__device__ inline void load_pair(u32 from, double& one, double& two) {
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(one), "=d"(two) : "r"(from) : "memory");
}

// How a lane reads its part of the factors. `from` is where the warp's part of a stage begins, `i` counts 16 rows
// or 8 columns. `tall` and `wide` say which rows and columns its sums are: of d[2 lower + right].
template <bool>
struct Lane;

template <>
struct Lane<true> {  // pairs
    u32 across[2], along;
    __device__ Lane() {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = g % 2 * 4 + g / 2;
        for (u32 j = 0; j < 2; ++j) across[j] = (2 * t + j) * 128 + ((g ^ (2 * t + j)) << 4);
        along = row * 128 + ((t ^ row) << 4);
    }
    __device__ void load(Rows& x, u32 from, u32 i) const {
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            load_pair(from + i * kBox + across[j % 2] + j / 2 * (kBox / 2), x.of[2 * j], x.of[2 * j + 1]);
    }
    __device__ void load(Columns& x, u32 from, u32 i) const {
#pragma unroll
        for (u32 j = 0; j < 2; ++j)
            load_pair(from + i * (kBox / 2) + (along ^ j << 6), x.of[i][2 * j], x.of[i][2 * j + 1]);
    }
    static __device__ u32 tall(u32 i, u32 lower) { return 16 * i + threadIdx.x % 32 / 4 * 2 + lower; }
    static __device__ u32 wide(u32 i, u32 right) { return 8 * i + 4 * right + threadIdx.x % 4; }
};

template <bool kAlongK>
struct Singles {
    u32 of[4];
    __device__ Singles() {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = kAlongK ? g % 4 * 2 + g / 4 : t;
        const u32 sixteen = (kAlongK ? t / 2 : g % 2 * 4 + g / 4) ^ row, eight = kAlongK ? t % 2 : g / 2 % 2;
        for (u32 i = 0; i < 4; ++i) of[i] = row * 128 + (sixteen ^ 2 * i) * 16 + eight * 8;
    }
    __device__ double load(u32 from, u32 eight, u32 four) const {
        return load_number(from + (kAlongK ? of[four] + eight * (kBox / 2) : of[eight + four % 2 * 2] + four * 512));
    }
    static __device__ u32 place(u32 g, u32 eight) {
        return kAlongK ? 8 * eight + g % 4 * 2 + g / 4 : g % 2 * 8 + g / 4 * 2 + g / 2 % 2 + 4 * eight;
    }
};

template <>
struct Lane<false> {  // singles
    Singles<kAAlongK> a;
    Singles<kBAlongK> b;
    __device__ void load(Rows& x, u32 from, u32 i) const {
#pragma unroll
        for (u32 j = 0; j < 8; ++j) x.of[j] = a.load(from + i * kBox, j % 2, j / 2);
    }
    __device__ void load(Columns& x, u32 from, u32 i) const {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) x.of[i][j] = b.load(from + i / 2 * kBox, i % 2, j);
    }
    static __device__ u32 tall(u32 i, u32 lower) {
        return 16 * i + Singles<kAAlongK>::place(threadIdx.x % 32 / 4, lower);
    }
    static __device__ u32 wide(u32 i, u32 right) {
        return i / 2 * 16 + Singles<kBAlongK>::place(threadIdx.x % 4 * 2 + right, i % 2);
    }
};

// -- multiplying ---------------------------------------------------------------------------------------

__device__ inline void store_tile(const PanelGemmArgument& a, u32 first_row, u32 first_column,
                                  const double (&d)[kSums]) {
    using Own = Lane<kPairs>;
#pragma unroll
    for (u32 i = 0; i < kDown * kAcross; ++i) {
        const double* const sums = d + 4 * i;
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            if (kTurned) {  // two columns side by side
                const u32 row = first_row + Own::wide(i % kAcross, e), column = first_column + Own::tall(i / kAcross, 0);
                double* const to = (double*)(a.out + row * a.pitch) + column;
                if (row >= a.rows) continue;
                if (PAIRS && column + 1 < a.columns) {
                    *(double2*)to = {sums[e], sums[2 + e]};
                } else {
                    if (column < a.columns) to[0] = sums[e];
                    if (column + 1 < a.columns) to[1] = sums[2 + e];
                }
            } else {
                const u32 row = first_row + Own::tall(i / kAcross, e);
#pragma unroll
                for (u32 right = 0; right < 2; ++right) {
                    const u32 column = first_column + Own::wide(i % kAcross, right);
                    if (row < a.rows && column < a.columns)
                        *((double*)(a.out + row * a.pitch) + column) = sums[2 * e + right];
                }
            }
        }
    }
}

// What later products need is loaded behind one that runs, into registers of which the one before was the last to
// read: rows further down, and in a stage's last rows the columns of the next. Beyond the last step what is loaded
// is not used.
__device__ inline void multiply_tiles(const PanelGemmArgument& a, const Shared& s, u32 block, u32 thread) {
    const u32 warp = thread / 32, top = warp / 4 * kTall, left = warp % 4 * kWide;
    const u32 steps = total_steps(a);
    if (steps == 0) return;
    const Lane<kPairs> lane;
    Rows rows[2];
    Columns columns;
    u32 number = 0, next = 0, turn = 0;
    mbarrier_wait(s.full, 0);
#pragma unroll
    for (u32 j = 0; j + 1 < kAcross; ++j) lane.load(columns, s.wide(0) + left * 128, j);
    lane.load(rows[0], s.tall(0) + top * 128, 0);
    for (Work work = first_work(a); work.unit < a.units; work = next_work(a, work)) {
        double d[kSums] = {};
        for (u32 step = work.first; step < work.last; ++step) {
            const u32 stage = next;
            ++number;
            if (++next == kStages) next = 0, turn ^= 1;
#pragma unroll
            for (u32 i = 0; i < kDown; ++i) {
#pragma unroll
                for (u32 j = 0; j < kAcross; ++j) {
                    multiply(d + 4 * (i * kAcross + j), rows[i % 2].of, columns.of[j]);
                    if (j == 0 && i == 0) lane.load(columns, s.wide(stage) + left * 128, kAcross - 1);
                    if (j == 0 && i + 1 < kDown) lane.load(rows[(i + 1) % 2], s.tall(stage) + top * 128, i + 1);
                    if (j == 0 && i + 1 == kDown) {
                        __syncwarp();
                        release(s.empty, stage);
                        if (number < steps) mbarrier_wait(s.full + 8 * next, turn);
                        lane.load(rows[0], s.tall(next) + top * 128, 0);
                    }
                    if (j > 0 && i + 1 == kDown) lane.load(columns, s.wide(next) + left * 128, j - 1);
                }
            }
        }
        if (!completes(a, d, work, thread)) continue;
        const Tile tile = locate<kRows, kWidth>(a, work.unit, block);
        store_tile(a, tile.row + (kTurned ? left : top), tile.column + (kTurned ? top : left), d);
    }
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    panel_gemm_f64(const __grid_constant__ PanelGemmArgument a) {
    extern __shared__ char memory[];
    __shared__ u64 bars[2 * kStages];
    Shared s;
    s.stages = (shared_address(memory) + 1023) & ~1023u;
    s.full = shared_address(bars);
    s.empty = s.full + 8 * kStages;
    const u32 block = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i)
            mbarrier_init(s.full + 8 * i, 1), mbarrier_init(s.empty + 8 * i, kConsumers / 32 * kCluster);
        fence_mbarrier_init();
    }
    cluster_barrier();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0)
            load_tiles<kRows, kWidth, kStages>(a, s.empty, block, [&](const Tile& tile, Step at, u32 stage) {
                load_stage(a, s, tile, at, stage, block);
            });
    } else {
        setmaxnreg_inc<232>();
        multiply_tiles(a, s, block, threadIdx.x - 128);
    }
    __syncwarp();
    cluster_barrier();  // a block's barriers and stages are there until its neighbour needs them no more
}
