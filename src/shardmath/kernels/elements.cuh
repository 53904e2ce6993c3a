// Element types, and the operations that combine them.
//
// A narrow float is summed as float32 and rounded once at the end. A NaN stays a NaN in every operation,
// minimum and maximum included, as in NumPy; integers wrap.
#pragma once

#include "numbers.cuh"

namespace shardmath {

struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};
typedef signed char int8;
typedef short int16;
typedef int int32;
typedef long long int64;
typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;

// What an element is summed in, and how it gets there and back.
template <class Element>
struct Wide {
    typedef Element type;
    static __device__ type widen(Element x) { return x; }
    static __device__ Element narrow(type x) { return x; }
};
template <>
struct Wide<float16> {
    typedef float type;
    static __device__ float widen(float16 x) {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
        return y;
    }
    static __device__ float16 narrow(float x) {
        float16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
template <>
struct Wide<bfloat16> {
    typedef float type;
    static __device__ float widen(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
    static __device__ bfloat16 narrow(float x) {
        bfloat16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};

// Eight-bit floats, which go by way of float16. What is too large becomes the greatest finite number.
struct float8_e4m3fn {
    unsigned char bits;
};
struct float8_e5m2 {
    unsigned char bits;
};
#define SHARDMATH_FLOAT8(element, name)                                                         \
    template <>                                                                                 \
    struct Wide<element> {                                                                      \
        typedef float type;                                                                     \
        static __device__ float widen(element x) {                                              \
            unsigned two;                                                                       \
            asm("cvt.rn.f16x2." name "x2 %0, %1;" : "=r"(two) : "h"((unsigned short)x.bits));   \
            return Wide<float16>::widen({(unsigned short)two});                                 \
        }                                                                                       \
        static __device__ element narrow(float x) {                                             \
            unsigned short two;                                                                 \
            asm("cvt.rn.satfinite." name "x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x)); \
            return {(unsigned char)two};                                                        \
        }                                                                                       \
    };
SHARDMATH_FLOAT8(float8_e4m3fn, "e4m3")
SHARDMATH_FLOAT8(float8_e5m2, "e5m2")
#undef SHARDMATH_FLOAT8

// One of the door's bool: a byte of its own, so that sums and products are "or" and "and".
struct boolean {
    unsigned char bits;
};

// Whether a packet of such elements has a pattern that stands for "empty"; see cells.cuh.
template <class Element>
struct IsFloat {
    static constexpr bool value = false;
};
#define SHARDMATH_FLOAT(type)                  \
    template <>                                \
    struct IsFloat<type> {                     \
        static constexpr bool value = true;    \
    };
SHARDMATH_FLOAT(float16)
SHARDMATH_FLOAT(bfloat16)
SHARDMATH_FLOAT(float32)
SHARDMATH_FLOAT(float64)
SHARDMATH_FLOAT(complex64)
SHARDMATH_FLOAT(complex128)
#undef SHARDMATH_FLOAT

struct sum {
    template <class T>
    static __device__ T combine(T a, T b) {
        return a + b;
    }
    static __device__ boolean combine(boolean a, boolean b) {
        return {(unsigned char)(a.bits | b.bits)};
    }
    template <class Real>
    static __device__ complex_of<Real> combine(complex_of<Real> a, complex_of<Real> b) {
        return {a.real + b.real, a.imag + b.imag};
    }
};
struct product {
    template <class T>
    static __device__ T combine(T a, T b) {
        return a * b;
    }
    static __device__ boolean combine(boolean a, boolean b) {
        return {(unsigned char)(a.bits & b.bits)};
    }
    template <class Real>
    static __device__ complex_of<Real> combine(complex_of<Real> a, complex_of<Real> b) {
        return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
    }
};
struct min {
    template <class T>
    static __device__ T combine(T a, T b) {
        return a <= b || a != a ? a : b;
    }
    static __device__ boolean combine(boolean a, boolean b) { return product::combine(a, b); }
};
struct max {
    template <class T>
    static __device__ T combine(T a, T b) {
        return a >= b || a != a ? a : b;
    }
    static __device__ boolean combine(boolean a, boolean b) { return sum::combine(a, b); }
};

// A mean is a sum that is divided once; `parts` is how many were added.
template <class Op>
struct Finish {
    template <class T>
    static __device__ T apply(T all, int) {
        return all;
    }
};
struct mean : sum {};
template <>
struct Finish<mean> {
    template <class T>
    static __device__ T apply(T all, int parts) {
        return all / (T)parts;
    }
    // NumPy divides by the complex number parts + 0i, by Smith's method: an infinite part makes the other a NaN.
    template <class Real>
    static __device__ complex_of<Real> apply(complex_of<Real> all, int parts) {
        const Real zero = (Real)0 / (Real)parts, scale = (Real)1 / (Real)parts;
        return {(all.real + all.imag * zero) * scale, (all.imag - all.real * zero) * scale};
    }
};

}  // namespace shardmath
