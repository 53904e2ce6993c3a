// What follows a matrix product on its way into D, element by element: D = F(alpha (P0 + P1 + ...) + beta C).
//
// The parts are added in order, in the type that sums are taken in; D is rounded once. Matrices have any
// strides, counted in elements, and may lie in a peer's memory. The semantics of F are those of
// local/epilog.py, which is its oracle. A thread has 8 rows of one column, so that no byte of a ReLU mask is
// written by two.
//
// Compiled with ELEMENT (of D), EXTRA (of bias and GELU's aux, if not that), PART and ADDEND (of the parts and of
// C), PARTS (how many there can be), ACTIVATION and GRADIENT (functors, below), and the switches BIAS, KEEP_AUX,
// HALVES (D and what an epilog reads and makes have 16 bits at most), and PLAIN (there is one part, which is not
// conjugated, alpha is 1, and there is no C: what follows a product that has done all that).
#include "elements.cuh"
#include "matrix.cuh"

#ifndef ELEMENT
#define ELEMENT float32
#define PART float32
#define ADDEND float32
#define PARTS 8
#define BIAS 1
#define ACTIVATION gelu
#define GRADIENT identity
#define KEEP_AUX 1
#endif

#ifndef EXTRA
#define EXTRA ELEMENT
#endif

#ifndef HALVES
#define HALVES 0
#define PLAIN 0
#endif

using namespace shardmath;

typedef Wide<ELEMENT>::type W;

constexpr int kRows = 8;        // of a thread
constexpr int kColumns = 4;     // that a thread walks where columns are contiguous

struct EpilogArgument {
    i64 m, n;
    Matrix d, c, aux, kept;  // data may be null but for d
    const void* bias;
    i64 bias_step;
    double alpha[2], beta[2];
    int parts;
    int conjugate;  // the parts
    int by_rows;    // neighbouring threads have neighbouring rows, not columns
    int reserved;
    Matrix part[PARTS];
};

template <class T>
__device__ T scaled(const double* factor, T x) {
    return (T)factor[0] * x;
}
template <class Real>
__device__ complex_of<Real> scaled(const double* factor, complex_of<Real> x) {
    const Real re = factor[0], im = factor[1];
    if (im == 0) return {re * x.real, re * x.imag};
    return {re * x.real - im * x.imag, re * x.imag + im * x.real};
}
__device__ inline bool is_one(const double* factor) { return factor[0] == 1 && factor[1] == 0; }
__device__ inline bool is_zero(const double* factor) { return factor[0] == 0 && factor[1] == 0; }

template <class T>
__device__ T conjugated(T x) {
    return x;
}
template <class Real>
__device__ complex_of<Real> conjugated(complex_of<Real> x) {
    return {x.real, -x.imag};
}

template <class Element>
__device__ W loaded(const Matrix& x, i64 i, i64 j) {
    return Wide<Element>::widen(((const Element*)x.data)[i * x.row + j * x.column]);
}

// x / (1 + exp(y)), for halves by the multiprocessor's own exponential and reciprocal: they are off by 1e-5 at
// most, a twentieth of what float16 rounds off, and else take longer than memory does.
template <class T>
__device__ T over_one_plus(T x, T exponent, T& e) {
#if HALVES
    e = __expf(exponent);
    return __fdividef(x, 1 + e);
#else
    e = exp(exponent);
    return x / (1 + e);
#endif
}

// The functions of epilogs, by the names that local/epilog.py has. The derivative of one with `kBits` is 1 where the
// input is positive, and a bit an element is kept of that; of others inputs are kept, and `slope` is the derivative.
struct Function {
    static constexpr bool kBits = false, kInputs = false;
    template <class T>
    static __device__ bool bit(T) {
        return false;
    }
    template <class T>
    static __device__ T descend(T gradient, T) {
        return gradient;
    }
};
struct identity : Function {
    template <class T>
    static __device__ T apply(T x) {
        return x;
    }
};
struct relu : Function {
    static constexpr bool kBits = true;
    template <class T>
    static __device__ T apply(T x) {
        return x > 0 || x != x ? x : 0;
    }
    template <class T>
    static __device__ bool bit(T x) {
        return x > 0;
    }
};
template <class Derived>
struct Smooth : Function {
    static constexpr bool kInputs = true;
    template <class T>
    static __device__ T descend(T gradient, T x) {
        return gradient * Derived::slope(x);
    }
};
struct gelu : Smooth<gelu> {
    static constexpr double kC0 = 0.7978845608028654, kC1 = 0.044715;  // sqrt(2 / pi), and the cubic's factor

    template <class T>
    static __device__ T apply(T x) {
        const T square = x * x;
        T e;
        return over_one_plus(x, (square * (T)(-2 * kC0 * kC1) - (T)(2 * kC0)) * x, e);
    }
    // p (1 + 2 (1 - p) x u'), p = 1 / (1 + e): see _gelu_slope of the host.
    template <class T>
    static __device__ T slope(T x) {
        x = x < -10 ? -10 : x > 10 ? 10 : x;
        const T square = x * x;
        T e;
        const T p = over_one_plus((T)1, (square * (T)(-2 * kC0 * kC1) - (T)(2 * kC0)) * x, e);
        return (e * p * (square * (T)(6 * kC0 * kC1) + (T)(2 * kC0)) * x + 1) * p;
    }
};

constexpr bool kKeepsBits = KEEP_AUX && ACTIVATION::kBits, kKeepsInputs = KEEP_AUX && ACTIVATION::kInputs;
constexpr bool kReadsBits = GRADIENT::kBits, kReadsInputs = GRADIENT::kInputs;

__device__ inline void finish(const EpilogArgument& a, i64 group, i64 j) {
    const i64 top = group * kRows;
    const i64 rows = a.m - top < kRows ? a.m - top : kRows;
    W x[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = W{};
    for (int p = 0; p < a.parts; ++p) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (r >= rows) continue;
            W y = loaded<PART>(a.part[p], top + r, j);
            if (a.conjugate) y = conjugated(y);
            x[r] = p == 0 ? y : sum::combine(x[r], y);
        }
    }
    const bool scale = !is_one(a.alpha), add = a.c.data && !is_zero(a.beta);
    [[maybe_unused]] unsigned mask = 0;
    if constexpr (kReadsBits) mask = ((const unsigned char*)a.aux.data)[group + j * a.aux.column];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (r >= rows) continue;
        const i64 i = top + r;
        W y = x[r];
        if (scale) y = scaled(a.alpha, y);
        if (add) {
            const W c = loaded<ADDEND>(a.c, i, j);
            y = sum::combine(y, is_one(a.beta) ? c : scaled(a.beta, c));
        }
#if BIAS
        y = sum::combine(y, Wide<EXTRA>::widen(((const EXTRA*)a.bias)[i * a.bias_step]));
#endif
        if constexpr (kKeepsBits) mask |= (unsigned)ACTIVATION::bit(y) << r;
        if constexpr (kKeepsInputs) ((EXTRA*)a.aux.data)[i + j * a.aux.column] = Wide<EXTRA>::narrow(y);
        y = ACTIVATION::apply(y);
        if constexpr (kReadsBits)
            if (!(mask >> r & 1)) y = W{};  // not a product: a masked infinity becomes 0
        if constexpr (kReadsInputs)
            y = GRADIENT::descend(y, Wide<EXTRA>::widen(((const EXTRA*)a.aux.data)[i + j * a.aux.column]));
        if (a.kept.data) ((W*)a.kept.data)[i * a.kept.row + j * a.kept.column] = y;
        ((ELEMENT*)a.d.data)[i * a.d.row + j * a.d.column] = Wide<ELEMENT>::narrow(y);
    }
    if constexpr (kKeepsBits) ((unsigned char*)a.aux.data)[group + j * a.aux.column] = (unsigned char)mask;
}

extern "C" __global__ void __launch_bounds__(256) epilog(const __grid_constant__ EpilogArgument a) {
    const i64 groups = (a.m + kRows - 1) / kRows;
    const i64 fast = a.by_rows ? groups : a.n, slow = a.by_rows ? a.n : groups;
    const i64 wide = (fast + blockDim.x - 1) / blockDim.x, high = (slow + kColumns - 1) / kColumns;
    for (i64 tile = blockIdx.x; tile < wide * high; tile += gridDim.x) {
        const i64 across = tile % wide * blockDim.x + threadIdx.x, down = tile / wide * kColumns;
        if (across >= fast) continue;
        for (i64 k = down; k < down + kColumns && k < slow; ++k)
            finish(a, a.by_rows ? across : k, a.by_rows ? k : across);
    }
}

constexpr int kRun = 8;  // elements that lie side by side in every matrix

// Elements of one type that lie side by side, as they are loaded and stored.
template <class Element>
union Run {
    uint4 wide[kRun * sizeof(Element) / 16 + (sizeof(Element) == 1)];  // eight bits go the other way
    Element each[kRun];

    __device__ void load(const Matrix& x, i64 start) {
        const uint4* from = (const uint4*)((const Element*)x.data + start);
#pragma unroll
        for (int i = 0; i < (int)(kRun * sizeof(Element) / 16); ++i) wide[i] = from[i];
    }
    __device__ void store(const Matrix& x, i64 start) const {
        uint4* to = (uint4*)((Element*)x.data + start);
#pragma unroll
        for (int i = 0; i < (int)(kRun * sizeof(Element) / 16); ++i) to[i] = wide[i];
    }
    __device__ void widen(W* out) const {
#pragma unroll
        for (int i = 0; i < kRun; ++i) out[i] = Wide<Element>::widen(each[i]);
    }
};

template <class Element>
__device__ void store_run(const Matrix& x, i64 start, const W* values) {
    Run<Element> run;
#pragma unroll
    for (int i = 0; i < kRun; ++i) run.each[i] = Wide<Element>::narrow(values[i]);
    run.store(x, start);
}

// Of a run of all matrices: its line, and its first element there.
struct Spot {
    i64 line, first;
    int by_rows;

    __device__ i64 in(const Matrix& x) const { return line * (by_rows ? x.column : x.row) + first; }
};

// One run of D, of whose first part and auxiliary matrix these are the elements.
__device__ inline void finish_run(const EpilogArgument& a, const Spot& at, const Run<PART>& part,
                                  [[maybe_unused]] const Run<EXTRA>& side) {
    W x[kRun];
    [[maybe_unused]] W y[kRun];
    part.widen(x);
#if !PLAIN
    const bool scale = !is_one(a.alpha), add = a.c.data && !is_zero(a.beta), whole = is_one(a.beta);
#pragma unroll
    for (int i = 0; i < kRun; ++i)
        if (a.conjugate) x[i] = conjugated(x[i]);
    for (int p = 1; p < a.parts; ++p) {
        Run<PART> next;
        next.load(a.part[p], at.in(a.part[p]));
        next.widen(y);
#pragma unroll
        for (int i = 0; i < kRun; ++i) x[i] = sum::combine(x[i], a.conjugate ? conjugated(y[i]) : y[i]);
    }
    if (add) {
        Run<ADDEND> c;
        c.load(a.c, at.in(a.c));
        c.widen(y);
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
        if (scale) x[i] = scaled(a.alpha, x[i]);
        if (add) x[i] = sum::combine(x[i], whole ? y[i] : scaled(a.beta, y[i]));
    }
#endif
#if BIAS
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
        const i64 row = a.by_rows ? at.first + i : at.line;
        x[i] = sum::combine(x[i], Wide<EXTRA>::widen(((const EXTRA*)a.bias)[row * a.bias_step]));
    }
#endif
    [[maybe_unused]] unsigned char* const bits =
        (unsigned char*)a.aux.data + at.line * a.aux.column + at.first / kRun;
    [[maybe_unused]] unsigned mask = 0;
    if constexpr (kKeepsBits) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) mask |= (unsigned)ACTIVATION::bit(x[i]) << i;
        *bits = (unsigned char)mask;
    }
    if constexpr (kKeepsInputs) store_run<EXTRA>(a.aux, at.in(a.aux), x);
    if constexpr (kReadsBits) mask = *bits;
    if constexpr (kReadsInputs) side.widen(y);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
        x[i] = ACTIVATION::apply(x[i]);
        if constexpr (kReadsBits)
            if (!(mask >> i & 1)) x[i] = W{};
        if constexpr (kReadsInputs) x[i] = GRADIENT::descend(x[i], y[i]);
    }
    if (a.kept.data) store_run<W>(a.kept, at.in(a.kept), x);
    store_run<ELEMENT>(a.d, at.in(a.d), x);
}

// The same as `epilog` where rows, or with by_rows columns, are contiguous and aligned in D, C, `kept` and all
// parts: a thread has 8 elements side by side, and loads several such runs before it goes on, a block what lies
// side by side. With an auxiliary matrix, of which the same holds, by_rows only: a byte of a mask has one thread.
extern "C" __global__ void __launch_bounds__(256) epilog_runs(const __grid_constant__ EpilogArgument a) {
    constexpr int kAtOnce = sizeof(PART) <= 2 ? 4 : sizeof(PART) == 4 ? 2 : 1;
    const uint32 runs = (uint32)((a.by_rows ? a.m : a.n) / kRun), step = blockDim.x;
    const i64 all = (a.by_rows ? a.n : a.m) * runs, stride = (i64)gridDim.x * step * kAtOnce;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");  // it is launched early
#endif
    for (i64 next = (i64)blockIdx.x * step * kAtOnce + threadIdx.x; next < all; next += stride) {
        Run<PART> part[kAtOnce];
        Run<EXTRA> side[kAtOnce];
        Spot at[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const i64 number = next + k * step;
            if (number >= all) break;
            const i64 line = number >> 32 ? number / runs : (uint32)number / runs;
            at[k] = {line, (number - line * runs) * kRun, a.by_rows};
            if (PLAIN || a.parts)
                part[k].load(a.part[0], at[k].in(a.part[0]));
            else
                part[k] = {};
            if constexpr (kReadsInputs) side[k].load(a.aux, at[k].in(a.aux));
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
            if (next + k * step < all) finish_run(a, at[k], part[k], side[k]);
    }
}

struct SumsArgument {
    i64 m, n;
    Matrix x;
    W* sums;
    i64 step;
    int conjugate;
    int by_rows;
};

constexpr int kSide = 32;

// sums[i] = x[i, 0] + x[i, 1] + ..., in an order that does not depend on timing. Blocks of 32 x 32 threads:
// neighbours read neighbouring rows, or columns.
extern "C" __global__ void __launch_bounds__(kSide * kSide) row_sums(const __grid_constant__ SumsArgument a) {
    __shared__ W shares[kSide][kSide + 1];
    const int fast = threadIdx.x % kSide, slow = threadIdx.x / kSide;
    const int row = a.by_rows ? fast : slow, slice = a.by_rows ? slow : fast;
    for (i64 top = (i64)blockIdx.x * kSide; top < a.m; top += (i64)gridDim.x * kSide) {
        W total{};
        if (top + row < a.m)
            for (i64 j = slice; j < a.n; j += kSide) {
                const W y = loaded<PART>(a.x, top + row, j);
                total = sum::combine(total, a.conjugate ? conjugated(y) : y);
            }
        shares[row][slice] = total;
        __syncthreads();
        if (slow == 0 && top + fast < a.m) {
            W all = shares[fast][0];
            for (int k = 1; k < kSide; ++k) all = sum::combine(all, shares[fast][k]);
            a.sums[(top + fast) * a.step] = all;
        }
        __syncthreads();
    }
}
