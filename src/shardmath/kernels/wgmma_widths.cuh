// Products of 64 rows by a group of four warps, for tiles of WIDTH columns: what hopper.cuh has for 256.
//
// WIDTH is 128, 160, 192, 224 or 256; d holds WIDTH / 2 numbers of each thread: of row 16 w + l / 4 (warp w, lane
// l) the columns 8 j + l % 4 * 2 and the next at d[4 j], and of the row 8 below at d[4 j + 2].
#pragma once
#include "hopper.cuh"

#define SHARDMATH_D16(i)                                                                                       \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]), "+f"(d[i + 12]),     \
        "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#define SHARDMATH_R64                                                                                          \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                   \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                         \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                         \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                           
#define SHARDMATH_D64 SHARDMATH_D16(0), SHARDMATH_D16(16), SHARDMATH_D16(32), SHARDMATH_D16(48)
#if WIDTH == 128
#define SHARDMATH_REGISTERS SHARDMATH_R64
#define SHARDMATH_NUMBERS SHARDMATH_D64
#define SHARDMATH_INPUTS "%64, %65, keep, 1, 1, %67, %68"
#define SHARDMATH_KEEP "%66"
#elif WIDTH == 160
#define SHARDMATH_REGISTERS                                                                                    \
    SHARDMATH_R64                                                                                              \
    ", " "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define SHARDMATH_NUMBERS SHARDMATH_D64, SHARDMATH_D16(64)
#define SHARDMATH_INPUTS "%80, %81, keep, 1, 1, %83, %84"
#define SHARDMATH_KEEP "%82"
#elif WIDTH == 192
#define SHARDMATH_REGISTERS                                                                                    \
    SHARDMATH_R64                                                                                              \
    ", " "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"                      \
    ", " "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SHARDMATH_NUMBERS SHARDMATH_D64, SHARDMATH_D16(64), SHARDMATH_D16(80)
#define SHARDMATH_INPUTS "%96, %97, keep, 1, 1, %99, %100"
#define SHARDMATH_KEEP "%98"
#elif WIDTH == 224
#define SHARDMATH_REGISTERS                                                                                    \
    SHARDMATH_R64                                                                                              \
    ", " "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"                      \
    ", " "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"                      \
    ", " "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define SHARDMATH_NUMBERS SHARDMATH_D64, SHARDMATH_D16(64), SHARDMATH_D16(80), SHARDMATH_D16(96)
#define SHARDMATH_INPUTS "%112, %113, keep, 1, 1, %115, %116"
#define SHARDMATH_KEEP "%114"
#elif WIDTH == 256
#define SHARDMATH_REGISTERS                                                                                    \
    SHARDMATH_R64                                                                                              \
    ", " "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"                      \
    ", " "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"                      \
    ", " "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"          \
    ", " "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SHARDMATH_NUMBERS SHARDMATH_D64, SHARDMATH_D16(64), SHARDMATH_D16(80), SHARDMATH_D16(96), SHARDMATH_D16(112)
#define SHARDMATH_INPUTS "%128, %129, keep, 1, 1, %131, %132"
#define SHARDMATH_KEEP "%130"
#endif
#define SHARDMATH_TEXT_OF(n) #n
#define SHARDMATH_TEXT(n) SHARDMATH_TEXT_OF(n)
#define SHARDMATH_MULTIPLY(TYPE)                                                                               \
    asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, " SHARDMATH_KEEP                                  \
                 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" SHARDMATH_TEXT(WIDTH) "k16.f32." TYPE "." TYPE     \
                 " {" SHARDMATH_REGISTERS "}, " SHARDMATH_INPUTS ";\n\t}"                                       \
                 : SHARDMATH_NUMBERS                                                                           \
                 : "l"(a), "l"(b), "r"(keep), "n"(kAAlongK ? 0 : 1), "n"(kBAlongK ? 0 : 1))

namespace shardmath {

// d = a b where `keep` is 0, else d += a b; a and b are made by `wgmma_descriptor`.
template <class Element, bool kAAlongK, bool kBAlongK>
struct Multiply;
template <bool kAAlongK, bool kBAlongK>
struct Multiply<Float16, kAAlongK, kBAlongK> {
    static __device__ void add(float (&d)[WIDTH / 2], u64 a, u64 b, u32 keep) { SHARDMATH_MULTIPLY("f16"); }
};
template <bool kAAlongK, bool kBAlongK>
struct Multiply<Bfloat16, kAAlongK, kBAlongK> {
    static __device__ void add(float (&d)[WIDTH / 2], u64 a, u64 b, u32 keep) { SHARDMATH_MULTIPLY("bf16"); }
};

}  // namespace shardmath

#undef SHARDMATH_MULTIPLY
#undef SHARDMATH_TEXT
#undef SHARDMATH_TEXT_OF
#undef SHARDMATH_KEEP
#undef SHARDMATH_INPUTS
#undef SHARDMATH_NUMBERS
#undef SHARDMATH_REGISTERS
#undef SHARDMATH_D64
#undef SHARDMATH_R64
#undef SHARDMATH_D16
