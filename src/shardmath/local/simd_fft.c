/* Fourier transforms of many lines at once, one line in each lane of a vector.
 *
 * Libraries that are built for every x86-64 processor use vectors of 16 bytes. These functions are
 * compiled for 32 and 64 bytes, and the processor is asked which it has. Built when the package is
 * installed where there is a C compiler; everything works without them. Invariant: as many lines as there
 * are lanes are read before any of them is written: source and destination may be the same array.
 */

#include <stddef.h>
#include <stdint.h>

enum { C2C, R2C, C2R };

/* What one call does: `extents` lines along two axes, whose elements are `step` bytes apart. A line is `n`
 * complex numbers; a real one of 2 n is taken for n complex ones. `order` says where element k lies before
 * the first pass, `factors` the radix of each pass, and 0. The twiddles are exp(-2 pi i k / circle), real
 * and imaginary parts, k = 0, ..., circle; circle is n, or 2 n of real lines. */
typedef struct {
    int64_t kind, inverse, n, circle, extents[2];
    int64_t src_strides[2], src_step, dst_strides[2], dst_step;
    double scale;
    const int64_t *factors, *order;
    const void *twiddles;
} Batch;

#if defined(__x86_64__)

/* As many lines as a vector has lanes: where they begin, and whether that is side by side. */
typedef struct {
    char *at[16];
    int64_t step;
    int dense;
} Lines;

enum { CHUNK = 16 }; /* elements that real lines become at a time */

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(what) JOIN(what, REAL, BYTES)
#define VECTOR NAME(vector)

/* ZIP interleaves the first halves of two vectors (h = 0), or the second (h = lanes / 2). UNZIP takes
 * the even elements of both (h = 0), or the odd (h = 1). */
#define ZIP4(a, b, h) __builtin_shufflevector(a, b, h, h + 4, h + 1, h + 5)
#define ZIP8(a, b, h)                                                                              \
    __builtin_shufflevector(a, b, h, h + 8, h + 1, h + 9, h + 2, h + 10, h + 3, h + 11)
#define ZIP16(a, b, h)                                                                             \
    __builtin_shufflevector(a, b, h, h + 16, h + 1, h + 17, h + 2, h + 18, h + 3, h + 19, h + 4,   \
                            h + 20, h + 5, h + 21, h + 6, h + 22, h + 7, h + 23)
#define UNZIP4(a, b, h) __builtin_shufflevector(a, b, h, h + 2, h + 4, h + 6)
#define UNZIP8(a, b, h)                                                                             \
    __builtin_shufflevector(a, b, h, h + 2, h + 4, h + 6, h + 8, h + 10, h + 12, h + 14)
#define UNZIP16(a, b, h)                                                                            \
    __builtin_shufflevector(a, b, h, h + 2, h + 4, h + 6, h + 8, h + 10, h + 12, h + 14, h + 16,   \
                            h + 18, h + 20, h + 22, h + 24, h + 26, h + 28, h + 30)

#define TARGET __attribute__((target("arch=x86-64-v4")))
#define BYTES 64
#define REAL float
#define LANES 16
#define ZIP ZIP16
#define UNZIP UNZIP16
#include "simd_fft.h"
#define REAL double
#define LANES 8
#define ZIP ZIP8
#define UNZIP UNZIP8
#include "simd_fft.h"
#undef TARGET
#undef BYTES

#define TARGET __attribute__((target("arch=x86-64-v3")))
#define BYTES 32
#define REAL float
#define LANES 8
#define ZIP ZIP8
#define UNZIP UNZIP8
#include "simd_fft.h"
#define REAL double
#define LANES 4
#define ZIP ZIP4
#define UNZIP UNZIP4
#include "simd_fft.h"
#endif

/* Bytes of the widest vectors that this processor has and that there are functions for; 0 if none. */
int shardmath_fft_width(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("x86-64-v4") ? 64 : __builtin_cpu_supports("x86-64-v3") ? 32 : 0;
#else
    return 0;
#endif
}

/* Transform a batch in vectors of `width` bytes, of float or double. `work` has 2 n of them, of C2R
 * 4 n + 2, and is aligned to one. */
void shardmath_fft(int width, int doubles, const Batch *batch, const char *src, char *dst, void *work) {
#if defined(__x86_64__)
    if (width == 64)
        (doubles ? transform_double_64 : transform_float_64)(batch, src, dst, work);
    else
        (doubles ? transform_double_32 : transform_float_32)(batch, src, dst, work);
#else
    (void)width, (void)doubles, (void)batch, (void)src, (void)dst, (void)work;
#endif
}
