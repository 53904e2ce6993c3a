// A factor of a product in a lower precision, packed as tensor cores like it: the numbers of each line, a row of the
// left factor or a column of the right one, lie behind each other. Compiled with ELEMENT, float32 or complex64, and
// SPLIT: 0 to round to bfloat16; 1 for two numbers of TF32, `high` and `low`, in place of each of float32, so that one
// product of three times the depth has all terms but low * low:
//
//     left line    high | low  | high
//     right line   high | high | low
//
// A product of complex factors is one of real numbers: a row of the left factor becomes two lines, one for real parts
// and one for imaginary parts of the result, in which real and imaginary parts take turns as in memory.
//
//     left lines   re -im | ...        right line   re im | ...
//                  im  re | ...
//
// Each part of a line is filled up with zeros to `padded` numbers. Source of the split: Markidis and others, "NVIDIA
// tensor core programmability, performance and precision", IPDPSW 2018; Ootomo, Yokota, "Recovering single precision
// accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", IJHPCA 36 (2022).
#include "numbers.cuh"

typedef unsigned int u32;
typedef long long i64;

using namespace shardmath;

// -- words ---------------------------------------------------------------------------------------

// Two numbers rounded to bfloat16, the first in the lower half.
__device__ inline u32 bfloat16_pair(float32 first, float32 second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// -- numbers -------------------------------------------------------------------------------------

// The nearest number of 11 bits, ties to even, which is one of TF32. NaN and infinity stay as they are.
__device__ inline float32 near_tf32(float32 x) {
    const u32 bits = __float_as_uint(x), exponent = 0x7f800000;
    if ((bits & exponent) == exponent) return x;
    return __uint_as_float((bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000);
}

struct alignas(16) Group {  // what a thread stores at once
    u32 words[4];
};

constexpr int kThreads = 256, kLines = 32, kDepth = 64;    // of a tile
constexpr int kLoads = kLines * kDepth / kThreads;         // of a thread
constexpr int kReal = sizeof(ELEMENT) / sizeof(float32);   // real numbers of an element
constexpr int kNumbers = SPLIT ? 4 : 8;                    // of a group
constexpr int kGroups = kDepth * kReal / kNumbers;         // of a line of a tile

struct Tile {
    ELEMENT elements[kLines][kDepth + 1];
};

// Number `at` of a packed line: of an element's first or second line, if it has two.
__device__ inline float32 number_of(const float32* elements, int at, bool, bool) { return elements[at]; }
__device__ inline float32 number_of(const complex64* elements, int at, bool is_right, bool is_second) {
    const complex64 z = elements[at / 2];
    const bool is_odd = at % 2;
    if (is_right) return is_odd ? z.imag : z.real;
    return is_second ? (is_odd ? z.real : z.imag) : (is_odd ? -z.imag : z.real);
}

// -- kernel --------------------------------------------------------------------------------------

struct PackArgument {
    const ELEMENT* data;
    i64 lines, depth;     // of the factor
    i64 line, along;      // elements from one line to the next, and from one element of a line to the next
    char* target;
    i64 leading;          // bytes from one packed line to the next
    i64 padded;           // numbers of a part of a line, a multiple of 8
    int is_right, is_conjugate;
};

extern "C" __global__ void __launch_bounds__(kThreads) pack_factor(const __grid_constant__ PackArgument a) {
    __shared__ Tile tile;
    const i64 first_line = (i64)blockIdx.x * kLines, first = (i64)blockIdx.y * kDepth;
    const int t = threadIdx.x;

    // Neighbouring threads read neighbours in memory: of one line, or the same element of several lines.
    const bool across = a.line < a.along;
    const auto line_at = [=](int load) { return across ? (load * kThreads + t) % kLines : (load * kThreads + t) / kDepth; };
    const auto depth_at = [=](int load) { return across ? (load * kThreads + t) / kLines : (load * kThreads + t) % kDepth; };
    ELEMENT held[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
        const i64 line = first_line + line_at(load), at = first + depth_at(load);
        held[load] = line < a.lines && at < a.depth ? a.data[line * a.line + at * a.along] : ELEMENT{};
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load)
        tile.elements[line_at(load)][depth_at(load)] = a.is_conjugate ? conjugate_of(held[load]) : held[load];
    __syncthreads();

    const int each = kReal == 2 && !a.is_right ? 2 : 1;  // packed lines of a line
    for (int at = t; at < kLines * each * kGroups; at += kThreads) {
        const int packed = at / kGroups, begin = at % kGroups * kNumbers;
        const i64 line = first_line * each + packed, place = first * kReal + begin;
        if (line >= a.lines * each || place >= a.padded) continue;
        float32 x[kNumbers];
#pragma unroll
        for (int i = 0; i < kNumbers; ++i)
            x[i] = number_of(tile.elements[packed / each], begin + i, a.is_right, packed % each);
        char* const target = a.target + line * a.leading;
        Group high;
#if SPLIT
        Group low;
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) {
            const float32 rounded = near_tf32(x[i]);
            high.words[i] = __float_as_uint(rounded);
            low.words[i] = __float_as_uint(near_tf32(x[i] - rounded));
        }
        float32* const to = (float32*)target + place;
        *(Group*)to = high;
        *(Group*)(to + a.padded) = a.is_right ? high : low;
        *(Group*)(to + 2 * a.padded) = a.is_right ? low : high;
#else
#pragma unroll
        for (int i = 0; i < 4; ++i) high.words[i] = bfloat16_pair(x[2 * i], x[2 * i + 1]);
        *(Group*)(target + place * 2) = high;
#endif
    }
}
