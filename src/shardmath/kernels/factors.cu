// What factorisations do to matrices beside the routines of libraries. A matrix has any strides; neighbouring
// threads take neighbouring rows. `status` becomes the least of all that is noted in it. Compiled with ELEMENT,
// the type of a matrix.
#include "elements.cuh"
#include "matrix.cuh"

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
template <class Real>
__device__ bool is_zero(Real x) {
    return x == 0;
}
template <class Real>
__device__ bool is_zero(complex_of<Real> x) {
    return x.real == 0 && x.imag == 0;
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
    const int32* rows;  // that a routine has exchanged, from 1
    int32* pivots;
};

// The status is `number`.
extern "C" __global__ void begin(const __grid_constant__ WordsArgument a) { *a.status = a.number; }

// The least of the words of all ranks.
extern "C" __global__ void least(const __grid_constant__ WordsArgument a) {
    int64 found = a.words[0];
    for (int64 i = 1; i < a.count; ++i) found = a.words[i] < found ? a.words[i] : found;
    *a.status = found;
}

// Rows of the matrix, from 0, of a panel whose first row is `number`. One block.
extern "C" __global__ void __launch_bounds__(256) number_pivots(const __grid_constant__ WordsArgument a) {
    for (int64 i = threadIdx.x; i < a.count; i += blockDim.x) a.pivots[i] = a.rows[i] + (int32)a.number - 1;
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

// Row i is exchanged with row pivots[i], one after the other, from `begin` on. Each block finds out first where
// rows come to lie, for which a slot stands: those of the chunk, then the others, at the first pivot that names
// each. Then it moves them, column by column.
extern "C" __global__ void __launch_bounds__(kChunk) exchange_rows(const __grid_constant__ ExchangeArgument a) {
    __shared__ int32 row[2 * kChunk], source[2 * kChunk], partner[kChunk];
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
    const int width = a.count - a.begin < kChunk ? (int)(a.count - a.begin) : kChunk;
    const i64 pivot = t < width ? a.pivots[a.begin + t] - a.first : 0;
    row[t] = (int32)(a.begin + t);
    row[kChunk + t] = (int32)pivot;
    source[t] = t;
    source[kChunk + t] = kChunk + t;
    __syncthreads();
    if (t < width) {
        if (pivot >= a.begin && pivot < a.begin + width) {
            partner[t] = (int32)(pivot - a.begin);
        } else {
            int at = 0;
            while (row[kChunk + at] != (int32)pivot) ++at;
            partner[t] = kChunk + at;
        }
    }
    __syncthreads();
    if (t == 0)
        for (int k = 0; k < width; ++k) {
            const int i = a.backward ? width - 1 - k : k, j = partner[i];
            const int32 held = source[i];
            source[i] = source[j];
            source[j] = held;
        }
    __syncthreads();
    for (i64 j = blockIdx.x; j < a.columns; j += gridDim.x) {
        ELEMENT* const column = a.data + j * a.leading;
        ELEMENT held[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int slot = half * kChunk + t;
            if (source[slot] != slot) held[half] = column[row[source[slot]]];
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int slot = half * kChunk + t;
            if (source[slot] != slot) column[row[slot]] = held[half];
        }
    }
}
