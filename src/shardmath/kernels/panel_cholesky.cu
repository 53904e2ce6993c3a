// The Cholesky factor of up to 32 columns of a panel, in two launches: of the block on the diagonal, and of the rows
// below it. Compiled with ELEMENT, the type of the matrix, and THREADS, the size of a block of `divide`.
//
// A thread keeps one row in registers, and loops over the columns:
//
//     factorise_diagonal   one warp       l = x / sqrt(d),  row -= l * the columns' conjugates
//     divide               all rows       x = x / d,        row -= x * the column's conjugates
//
// At column j, x[0] is its element: the row is rotated by one each time, and elements of the factor enter at the end, so
// that registers have constant numbers while the loop stays a loop. What is multiplied with elements that are already
// there is 0. Columns beyond `width` are those of the identity.
// It includes nothing.

typedef unsigned u32;
typedef long long i64;

template <class Real>
struct Complex {
    Real real, imag;
};

constexpr u32 kThreads = THREADS;
constexpr u32 kWidth = 32;  // columns at most, as many as a warp has threads
constexpr u32 kAll = ~0u;   // threads of a warp

struct PanelArgument {
    i64 leading;      // elements between columns
    ELEMENT* data;    // the first element of the block on the diagonal
    i64* status;      // becomes the least order of a leading minor that is not positive
    i64 first;        // the row of the matrix that the block begins with
    u32 rows, width;  // of the panel, and its columns
};

// -- arithmetic ----------------------------------------------------------------------------------

template <class Real>
__device__ Real real_part(Real x) {
    return x;
}
template <class Real>
__device__ Real real_part(Complex<Real> x) {
    return x.real;
}
template <class Real>
__device__ Real conjugate(Real x) {
    return x;
}
template <class Real>
__device__ Complex<Real> conjugate(Complex<Real> x) {
    return {x.real, -x.imag};
}
template <class Real>
__device__ Real times(Real x, Real y) {
    return x * y;
}
template <class Real>
__device__ Complex<Real> times(Complex<Real> x, Real y) {
    return {x.real * y, x.imag * y};
}
// z - x y
template <class Real>
__device__ Real minus_product(Real z, Real x, Real y) {
    return z - x * y;
}
template <class Real>
__device__ Complex<Real> minus_product(Complex<Real> z, Complex<Real> x, Complex<Real> y) {
    return {z.real - x.real * y.real + x.imag * y.imag, z.imag - x.real * y.imag - x.imag * y.real};
}

typedef decltype(real_part(ELEMENT{})) Real;

// -- kernels -------------------------------------------------------------------------------------

struct Diagonal {
    ELEMENT column[2][2 * kWidth];  // conjugates of a column's elements, and zeros behind them; two columns in turn
};

struct Factor {
    ELEMENT column[kWidth][kWidth];  // conjugates of what is below each element of the diagonal, then zeros
    Real inverse[kWidth];            // of the elements of the diagonal
};

extern "C" __global__ void __launch_bounds__(kWidth) factorise_diagonal(const __grid_constant__ PanelArgument a) {
    __shared__ Diagonal shared;
    const u32 i = threadIdx.x;
    ELEMENT x[kWidth];
#pragma unroll
    for (u32 c = 0; c < kWidth; ++c) {
        x[c] = i == c ? ELEMENT{1} : ELEMENT{0};
        if (i < a.width && c <= i) x[c] = a.data[i + c * a.leading];
    }
    shared.column[0][kWidth + i] = shared.column[1][kWidth + i] = ELEMENT{0};

    // The next pivot is known before the rest of its row, which is brought up to date while its root is taken.
    Real pivot = __shfl_sync(kAll, real_part(x[0]), 0), scale = rsqrt(pivot);
#pragma unroll 1
    for (u32 j = 0; j < kWidth; ++j) {
        if (i == j && !(pivot > 0)) atomicMin(a.status, a.first + j + 1);
        ELEMENT l{0};
        if (i == j) l = times(ELEMENT{1}, pivot * scale);
        if (i > j) l = times(x[0], scale);
        pivot = __shfl_sync(kAll, real_part(minus_product(x[1], l, conjugate(l))), (j + 1) % kWidth);
        scale = rsqrt(pivot);
        ELEMENT* const column = shared.column[j & 1];
        column[i] = conjugate(l);
        __syncwarp();
#pragma unroll
        for (u32 c = 1; c < kWidth; ++c) x[c - 1] = minus_product(x[c], l, column[j + c]);
        x[kWidth - 1] = l;
    }

#pragma unroll
    for (u32 c = 0; c < kWidth; ++c)
        if (i < a.width && c <= i) a.data[i + c * a.leading] = x[c];
}

extern "C" __global__ void __launch_bounds__(kThreads) divide(const __grid_constant__ PanelArgument a) {
    __shared__ Factor shared;
    const u32 row = a.width + blockIdx.x * kThreads + threadIdx.x;
    ELEMENT x[kWidth];
#pragma unroll
    for (u32 c = 0; c < kWidth; ++c) x[c] = row < a.rows && c < a.width ? a.data[row + c * a.leading] : ELEMENT{0};
#pragma unroll
    for (u32 first = 0; first < kWidth * kWidth; first += kThreads) {
        const u32 c = (first + threadIdx.x) / kWidth, below = threadIdx.x % kWidth, i = c + below;
        const ELEMENT l = i < a.width ? a.data[i + c * a.leading] : ELEMENT{0};
        shared.column[c][below] = conjugate(l);
    }
    if (threadIdx.x < kWidth) {
        const u32 c = threadIdx.x;
        shared.inverse[c] = c < a.width ? 1 / real_part(a.data[c + c * a.leading]) : Real(1);
    }
    __syncthreads();
    if (row >= a.rows) return;

#pragma unroll 1
    for (u32 j = 0; j < kWidth; ++j) {
        const ELEMENT l = times(x[0], shared.inverse[j]);
#pragma unroll
        for (u32 c = 1; c < kWidth; ++c) x[c - 1] = minus_product(x[c], l, shared.column[j][c]);
        x[kWidth - 1] = l;
    }

#pragma unroll
    for (u32 c = 0; c < kWidth; ++c)
        if (c < a.width) a.data[row + c * a.leading] = x[c];
}
