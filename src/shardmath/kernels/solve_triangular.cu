// X of T X = B, in place of B, for a lower triangular T of up to 1024 rows and a few columns of B. Compiled with
// ELEMENT, the type, and BY_ROWS: 1 where neighbours of a row of T are neighbours in memory, 0 where those of a column
// are. Strides may be negative: so an upper triangle, counted from its last row and column on, is a lower one.
//
// A block has as many columns of B as make 16 bytes, and each of its threads one row of these, in registers. A step
// solves for kStep rows, 64 bytes of a row of T:
//
//     warp of these rows     solve, one row after the other, by shuffles ─ store in shared memory ─┐
//     warps of rows below    load the next columns of T                                            └ subtract, ...
//
// Each step has its own place in shared memory and one barrier. The next columns are loaded a step ahead. Divisions are
// products with reciprocals, which overflow where a number on the diagonal is below the least normal one.
#include "numbers.cuh"

typedef unsigned int u32;
typedef long long i64;

using namespace shardmath;

// -- words ---------------------------------------------------------------------------------------

__device__ inline char* dynamic_shared() {
    extern __shared__ __align__(16) char memory[];
    return memory;
}

// -- numbers -------------------------------------------------------------------------------------

constexpr u32 kAll = ~0u;                                // threads of a warp
constexpr int kRows = 1024;                              // at most
constexpr int kStep = 64 / sizeof(ELEMENT);              // rows that a step solves for
constexpr int kColumns = 16 / sizeof(ELEMENT);           // of B, of a block

struct alignas(16) Row {
    ELEMENT x[kColumns];
};
struct Tile {  // columns of T of a step, in a warp's rows; read by rows without conflicts of banks
    ELEMENT elements[32][kStep + 1];
};
struct Shared {
    Row solved[kRows];
    Tile tiles[BY_ROWS ? kRows / 32 : 1];  // the host gives memory for those that are used
};

template <class Real>
__device__ inline Real of_lane(Real x, int lane) {
    return __shfl_sync(kAll, x, lane);
}
template <class Real>
__device__ inline complex_of<Real> of_lane(complex_of<Real> x, int lane) {
    return {of_lane(x.real, lane), of_lane(x.imag, lane)};
}

// -- kernel --------------------------------------------------------------------------------------

struct SolveArgument {
    const ELEMENT* triangle;
    i64 row, column;                // strides in elements
    ELEMENT* target;
    i64 target_row, target_column;
    int rows, columns;              // of `target`
    int is_unit, is_conjugate;      // of `triangle`: its diagonal is taken for ones; it is to be conjugated
};

extern "C" __global__ void __launch_bounds__(kRows) solve_triangular(const __grid_constant__ SolveArgument a) {
    Shared& shared = *(Shared*)dynamic_shared();
    const int row = threadIdx.x, warp = row / 32, lane = row % 32;
    const i64 first = (i64)blockIdx.x * kColumns;
    ELEMENT* const target = a.target + row * a.target_row + first * a.target_column;
    ELEMENT x[kColumns], inverse = {1}, t[kStep], next[kStep];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
        x[c] = row < a.rows && first + c < a.columns ? target[c * a.target_column] : ELEMENT{};
    if (row < a.rows && !a.is_unit) {
        const ELEMENT diagonal = a.triangle[row * (a.row + a.column)];
        inverse = inverse_of(a.is_conjugate ? conjugate_of(diagonal) : diagonal);
    }

    // Elements below the diagonal of the kStep columns from `begin` on: neighbouring threads load neighbours in memory,
    // which are of one row, or of one column.
    const auto load = [&](int begin) {
        int i = BY_ROWS ? warp * 32 + lane / kStep : row, j = BY_ROWS ? begin + lane % kStep : begin;
        const ELEMENT* from = a.triangle + i * a.row + j * a.column;
#pragma unroll
        for (int k = 0; k < kStep; ++k) {
            next[k] = i < a.rows && j < i ? *from : ELEMENT{};
            (BY_ROWS ? i : j) += BY_ROWS ? 32 / kStep : 1;
            from += BY_ROWS ? 32 / kStep * a.row : a.column;
        }
    };
    load(0);
#pragma unroll 1
    for (int begin = 0; begin < a.rows; begin += kStep) {
#if BY_ROWS
        Tile& tile = shared.tiles[warp];
#pragma unroll
        for (int k = 0; k < kStep; ++k) tile.elements[(k * 32 + lane) / kStep][(k * 32 + lane) % kStep] = next[k];
        __syncwarp();
#endif
#pragma unroll
        for (int k = 0; k < kStep; ++k) {
#if BY_ROWS
            t[k] = tile.elements[lane][k];
#else
            t[k] = next[k];
#endif
            if (a.is_conjugate) t[k] = conjugate_of(t[k]);
        }
        __syncwarp();  // a tile has been read before the next step writes it
        load(begin + kStep);

        const int solving = begin / 32, lane_of_first = begin % 32;
        if (warp == solving) {
#pragma unroll
            for (int k = 0; k < kStep; ++k)
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const ELEMENT solved = of_lane(times(x[c], inverse), lane_of_first + k);
                    if (row > begin + k) x[c] = minus_product(x[c], t[k], solved);
                }
            if (lane >= lane_of_first && lane < lane_of_first + kStep)
#pragma unroll
                for (int c = 0; c < kColumns; ++c) shared.solved[row].x[c] = x[c] = times(x[c], inverse);
        }
        __syncthreads();
        if (warp > solving)
#pragma unroll
            for (int k = 0; k < kStep; ++k) {
                const Row solved = shared.solved[begin + k];
#pragma unroll
                for (int c = 0; c < kColumns; ++c) x[c] = minus_product(x[c], t[k], solved.x[c]);
            }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
        if (row < a.rows && first + c < a.columns) target[c * a.target_column] = x[c];
}
