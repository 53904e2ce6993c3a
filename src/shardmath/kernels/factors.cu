// What factorisations do to matrices beside the routines of libraries. A matrix has any strides; neighbouring
// threads take neighbouring rows. `status` becomes the least of all that is noted in it. Compiled with ELEMENT,
// the type of a matrix.
#include "numbers.cuh"
#include "permutation.cuh"

#ifndef ELEMENT
#define ELEMENT float64
#endif

using namespace shardmath;

struct FactorsArgument {
    i64 rows, columns, first;
    Matrix a;
    int64* status;
    int64 code;
};

template <class Real>
__device__ bool is_finite(Real x) {
    return x - x == 0;
}
template <class Real>
__device__ bool is_finite(complex_of<Real> x) {
    return is_finite(x.real) && is_finite(x.imag);
}
// f(row, column, element) of all elements.
template <class Function>
__device__ void for_each(const FactorsArgument& a, Function f) {
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < a.rows * a.columns; at += stride) {
        const i64 j = at / a.rows, i = at - j * a.rows;
        f(i, j, ((ELEMENT*)a.a.data)[i * a.a.row + j * a.a.column]);
    }
}

// Note `code` where an element is NaN or infinite.
extern "C" __global__ void __launch_bounds__(256) check_finite(const __grid_constant__ FactorsArgument a) {
    bool wrong = false;
    for_each(a, [&](i64, i64, ELEMENT& x) { wrong = wrong || !is_finite(x); });
    if (__syncthreads_or(wrong) && threadIdx.x == 0) atomicMin(a.status, a.code);
}

extern "C" __global__ void __launch_bounds__(256) conjugate(const __grid_constant__ FactorsArgument a) {
    for_each(a, [](i64, i64, ELEMENT& x) { x = conjugate_of(x); });
}

// Columns of the identity, from column `first` of it on.
extern "C" __global__ void __launch_bounds__(256) set_identity(const __grid_constant__ FactorsArgument a) {
    const i64 first = a.first;
    for_each(a, [=](i64 i, i64 j, ELEMENT& x) { x = i == first + j ? ELEMENT{1} : ELEMENT{0}; });
}

// Zeros above the diagonal, which begins in row `first`.
extern "C" __global__ void __launch_bounds__(256) keep_lower(const __grid_constant__ FactorsArgument a) {
    const i64 first = a.first;
    for_each(a, [=](i64 i, i64 j, ELEMENT& x) {
        if (i < first + j) x = ELEMENT{0};
    });
}

// Note the number, from `first` + 1 on, of the first 0 on the diagonal. One block.
extern "C" __global__ void __launch_bounds__(256) note_zeros(const __grid_constant__ FactorsArgument a) {
    for (i64 i = threadIdx.x; i < a.rows; i += blockDim.x)
        if (is_zero(((const ELEMENT*)a.a.data)[i * (a.a.row + a.a.column)])) {
            atomicMin(a.status, a.first + i + 1);
            break;
        }
}

struct WordsArgument {
    int64 *status, *words;
    int64 count, number;
    const int32* info;  // what a routine says is wrong
};

// The status is `number`.
extern "C" __global__ void begin(const __grid_constant__ WordsArgument a) { *a.status = a.number; }

// The least of the words of all ranks.
extern "C" __global__ void least(const __grid_constant__ WordsArgument a) {
    int64 found = a.words[0];
    for (int64 i = 1; i < a.count; ++i) found = a.words[i] < found ? a.words[i] : found;
    *a.status = found;
}

// Note a routine's number, counted from `number`, where it is one of the matrix.
extern "C" __global__ void note_info(const __grid_constant__ WordsArgument a) {
    if (*a.info > 0) atomicMin(a.status, a.number + *a.info);
}

constexpr int kChunk = 512;  // exchanges that are made as one permutation

struct ExchangeArgument {
    i64 rows, columns, first;  // `first`: the row of the matrix that row 0 is
    ELEMENT* data;
    i64 leading;        // elements between columns, each of which is contiguous
    const int32* pivots;
    i64 count, begin;   // of all pivots; those from `begin` on are for this launch
    int backward;
    int64* status;
    int64 code;         // is noted where a pivot is no row: then none are exchanged
};

typedef Permutation<kChunk> Exchanges;

// Row i is exchanged with row pivots[i], one after the other, from `begin` on: in all columns.
extern "C" __global__ void __launch_bounds__(kChunk) exchange_rows(const __grid_constant__ ExchangeArgument a) {
    __shared__ Exchanges exchanges;
    const int t = threadIdx.x;
    bool wrong = false;
    for (i64 i = t; i < a.count; i += kChunk) {
        const i64 pivot = a.pivots[i] - a.first;
        wrong = wrong || pivot < 0 || pivot >= a.rows;
    }
    if (__syncthreads_or(wrong)) {
        if (t == 0 && blockIdx.x == 0) atomicMin(a.status, a.code);
        return;
    }
    const int count = a.count - a.begin < kChunk ? (int)(a.count - a.begin) : kChunk;
    exchanges.find(a.pivots, a.first, a.begin, count, a.backward);
    for (i64 j = blockIdx.x; j < a.columns; j += gridDim.x) exchanges.apply(a.data + j * a.leading);
}

constexpr int kTall = 512, kTogether = 2;  // rows of a triangle, and columns that a block solves for

struct TriangleArgument {
    const ELEMENT* a;
    ELEMENT* b;
    i64 leading, leading_of_b;
    int32 n, columns;       // of b
    int32 lower, op, unit;  // op: 0 for A, 1 for its transpose, 2 for its conjugate transpose
};

struct Known {
    ELEMENT x[2][32][kTogether];  // unknowns of a warp, in two places in turn
};

template <class Real>
__device__ inline Real from_lane(Real x, int lane) {
    return __shfl_sync(~0u, x, lane);
}
template <class Real>
__device__ inline complex_of<Real> from_lane(complex_of<Real> x, int lane) {
    return {from_lane(x.real, lane), from_lane(x.imag, lane)};
}

// b = op(A)^-1 b, of a few columns and a triangle of up to kTall rows: what a library takes for it is the time of its
// many kernels. A thread has a row of unknowns, in the order in which they are found. A warp finds 32, which then all
// warps behind it use, whose elements of A have come meanwhile:
//
//     warp 0   find ┐
//     warp 1   load ┴ use ─ find ┐
//     warp 2   load ─ use ─ load ┴ use ─ find
extern "C" __global__ void __launch_bounds__(kTall) solve_few(const __grid_constant__ TriangleArgument a) {
    __shared__ Known known;
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const bool forward = (a.lower != 0) == (a.op == 0);
    const auto row = [&](int place) -> i64 { return forward ? place : a.n - 1 - place; };
    const auto element = [&](i64 i, i64 k) {
        const ELEMENT x = a.op == 0 ? a.a[i + k * a.leading] : a.a[k + i * a.leading];
        return a.op == 2 ? conjugate_of(x) : x;
    };
    ELEMENT x[kTogether];
#pragma unroll
    for (int c = 0; c < kTogether; ++c) {
        const int column = blockIdx.x * kTogether + c;
        x[c] = t < a.n && column < a.columns ? a.b[row(t) + column * a.leading_of_b] : ELEMENT{};
    }
#pragma unroll 1
    for (int block = 0; block * 32 < a.n; ++block) {
        ELEMENT of_row[32];
#pragma unroll
        for (int k = 0; k < 32; ++k) {
            const int place = block * 32 + k;
            const bool used = t < a.n && (place < t || (place == t && !a.unit));
            of_row[k] = used ? element(row(t), row(place)) : ELEMENT{};
        }
        if (warp == block) {
#pragma unroll
            for (int k = 0; k < 32; ++k)
#pragma unroll
                for (int c = 0; c < kTogether; ++c) {
                    if (lane == k && !a.unit && t < a.n) x[c] = quotient(x[c], of_row[k]);
                    const ELEMENT found = from_lane(x[c], k);
                    if (lane > k) x[c] = minus_product(x[c], of_row[k], found);
                }
#pragma unroll
            for (int c = 0; c < kTogether; ++c) known.x[block % 2][lane][c] = x[c];
        }
        __syncthreads();
        if (warp > block)
#pragma unroll
            for (int k = 0; k < 32; ++k)
#pragma unroll
                for (int c = 0; c < kTogether; ++c) x[c] = minus_product(x[c], of_row[k], known.x[block % 2][k][c]);
    }
#pragma unroll
    for (int c = 0; c < kTogether; ++c) {
        const int column = blockIdx.x * kTogether + c;
        if (t < a.n && column < a.columns) a.b[row(t) + column * a.leading_of_b] = x[c];
    }
}
