// Eight-bit elements and their scales, and the numbers that they stand for. Matrices have any strides.
//
// A NaN or a number is greater than another as its absolute value's bits are, NaN being the greatest: so maxima
// of any number of threads need no order. Compiled with ELEMENT, an eight-bit type, and OUTS, how many matrices
// the same numbers go to: some may be peers'.
#include "elements.cuh"
#include "matrix.cuh"

#ifndef ELEMENT
#define ELEMENT float8_e4m3fn
#endif
#ifndef OUTS
#define OUTS 1
#endif

using namespace shardmath;

struct DequantizeArgument {
    i64 m, n;
    Matrix elements, scales;  // without `elements`, of all ones; without `scales`, of `factor` alone
    i64 rows, columns;        // of a block that has one scale
    i64 known_rows;           // rows of the source; those below are of all zeros
    float factor;
    int by_rows;  // neighbouring threads have neighbouring rows
    Matrix out[OUTS];
};

// out = elements x scales x factor, block by block.
extern "C" __global__ void __launch_bounds__(256) dequantize(const __grid_constant__ DequantizeArgument a) {
    const i64 fast = a.by_rows ? a.m : a.n, stride = (i64)gridDim.x * blockDim.x;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < a.m * a.n; at += stride) {
        const i64 slow = at / fast, rest = at - slow * fast;
        const i64 i = a.by_rows ? rest : slow, j = a.by_rows ? slow : rest;
        float y = 0;
        if (i < a.known_rows) {
            y = a.factor;
            if (a.scales.data)
                y *= ((const float*)a.scales.data)[i / a.rows * a.scales.row + j / a.columns * a.scales.column];
            if (a.elements.data)
                y *= Wide<ELEMENT>::widen(
                    ((const ELEMENT*)a.elements.data)[i * a.elements.row + j * a.elements.column]);
        }
#pragma unroll
        for (int out = 0; out < OUTS; ++out)
            ((float*)a.out[out].data)[i * a.out[out].row + j * a.out[out].column] = y;
    }
}

struct QuantizeArgument {
    i64 m, n;
    Matrix source, out;  // of float32, of ELEMENT
    const float* scale;  // of one element; may be null
    uint32* amax;        // the bits of the greatest absolute value so far; may be null
    float factor;
    int by_rows;
};

constexpr int kRun = 4;  // rows or columns of a thread

// out = source x scale x factor, rounded; `amax` is of the source, times nothing.
extern "C" __global__ void __launch_bounds__(256) quantize(const __grid_constant__ QuantizeArgument a) {
    const float factor = a.scale ? *a.scale * a.factor : a.factor;
    const i64 fast = a.by_rows ? a.m : a.n, lines = a.by_rows ? a.n : a.m;
    const i64 runs = (fast + kRun - 1) / kRun, stride = (i64)gridDim.x * blockDim.x;
    const i64 from = a.by_rows ? a.source.row : a.source.column, to = a.by_rows ? a.out.row : a.out.column;
    const i64 next_from = a.by_rows ? a.source.column : a.source.row;
    const i64 next_to = a.by_rows ? a.out.column : a.out.row;
    const bool whole = from == 1 && to == 1 && (next_from | next_to | fast) % kRun == 0 &&
                       (((uint64)a.source.data | (uint64)a.out.data * 4) & 15) == 0;
    uint32 largest = 0;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < lines * runs; at += stride) {
        const i64 line = at / runs, first = (at - line * runs) * kRun;
        const float* x = (const float*)a.source.data + line * next_from + first * from;
        ELEMENT* y = (ELEMENT*)a.out.data + line * next_to + first * to;
        union {
            float4 wide;
            float each[kRun];
        } in;
        union {
            uint32 wide;
            ELEMENT each[kRun];
        } out;
        if (whole) in.wide = *(const float4*)x;
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            if (!whole && first + i >= fast) break;
            const float value = whole ? in.each[i] : x[i * from];
            const uint32 bits = __float_as_uint(value) & 0x7fffffff;
            largest = bits > largest ? bits : largest;
            out.each[i] = Wide<ELEMENT>::narrow(value * factor);
            if (!whole) y[i * to] = out.each[i];
        }
        if (whole) *(uint32*)y = out.wide;
    }
    if (!a.amax) return;
    largest = __reduce_max_sync(0xffffffff, largest);
    if (threadIdx.x % 32 == 0 && largest) atomicMax(a.amax, largest);
}

constexpr int kRanks = 64;

struct AmaxArgument {
    uint32* out;
    i64 count;
    const uint32* each[kRanks];
};

// out = the greatest of the ranks' absolute values, and of what it is already. One warp.
extern "C" __global__ void __launch_bounds__(32) amax(const __grid_constant__ AmaxArgument a) {
    uint32 largest = *a.out;
    for (i64 i = threadIdx.x; i < a.count; i += 32) largest = *a.each[i] > largest ? *a.each[i] : largest;
    largest = __reduce_max_sync(0xffffffff, largest);
    if (threadIdx.x == 0) *a.out = largest;
}
