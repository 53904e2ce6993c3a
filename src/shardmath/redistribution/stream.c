/* Copy a strided box of bytes past the caches.
 *
 * An ordinary store first reads the line that it overwrites: a copy larger than the caches moves three
 * bytes for two. Streaming stores do not. Built when the package is installed where there is a C compiler;
 * everything works without it. Invariant: no byte is read or written outside the box, and all stores are
 * visible to other processes before any store that the caller makes afterwards.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64, PAGE = 4096, STREAMS = 4 };

static void load_line(__m128i line[4], const char *src) {
    for (int i = 0; i < 4; i++)
        line[i] = _mm_loadu_si128((const __m128i *)src + i);
}

static void stream_line(char *dst, const __m128i line[4]) {
    for (int i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)dst + i, line[i]);
}

/* One line of each of four stretches, which begin `apart` bytes apart. All are loaded before any is
 * stored: a load waits for an earlier store to the same offset in another page, which the processor
 * cannot tell from the same address. */
static void stream_lines(char *dst, const char *src, size_t apart) {
    __m128i line[STREAMS][4];
    for (int i = 0; i < STREAMS; i++) {
        _mm_prefetch(src + i * apart + 4 * LINE, _MM_HINT_T0); /* needs no valid address */
        load_line(line[i], src + i * apart);
    }
    for (int i = 0; i < STREAMS; i++)
        stream_line(dst + i * apart, line[i]);
}

/* Copy `n` contiguous bytes. Whole lines of the destination are streamed, from four stretches of up to a
 * page in turn, so that several banks of the memory are at work. */
static void copy_row(char *dst, const char *src, size_t n) {
    size_t head = (LINE - (uintptr_t)dst % LINE) % LINE;
    if (n < head + LINE) {
        memcpy(dst, src, n);
        return;
    }
    memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    while (n >= STREAMS * LINE) {
        size_t apart = n / STREAMS / LINE * LINE;
        if (apart > PAGE)
            apart = PAGE;
        for (size_t at = 0; at < apart; at += LINE)
            stream_lines(dst + at, src + at, apart);
        dst += STREAMS * apart, src += STREAMS * apart, n -= STREAMS * apart;
    }
    for (; n >= LINE; dst += LINE, src += LINE, n -= LINE) {
        __m128i line[4];
        load_line(line, src);
        stream_line(dst, line);
    }
    memcpy(dst, src, n);
}

/* One row for every index of the first `ndim` axes; the last of them runs fastest. */
static void copy_axes(char *dst, const char *src, int ndim, const int64_t *shape,
                      const int64_t *dst_strides, const int64_t *src_strides, size_t unit) {
    if (ndim == 0) {
        copy_row(dst, src, unit);
        return;
    }
    for (int64_t i = 0; i < shape[0]; i++)
        copy_axes(dst + i * dst_strides[0], src + i * src_strides[0], ndim - 1, shape + 1,
                  dst_strides + 1, src_strides + 1, unit);
}

/* Copy units of `unit` bytes. Returns 0, or 1 where this machine has no streaming stores. */
int shardmath_stream(char *dst, const char *src, int ndim, const int64_t *shape,
                     const int64_t *dst_strides, const int64_t *src_strides, size_t unit) {
    copy_axes(dst, src, ndim, shape, dst_strides, src_strides, unit);
    _mm_sfence();
    return 0;
}

#else

int shardmath_stream(char *dst, const char *src, int ndim, const int64_t *shape,
                     const int64_t *dst_strides, const int64_t *src_strides, size_t unit) {
    (void)dst, (void)src, (void)ndim, (void)shape, (void)dst_strides, (void)src_strides, (void)unit;
    return 1;
}

#endif
