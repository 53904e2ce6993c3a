/* Add what several ranks have, in one pass.
 *
 * NumPy adds two arrays at a time and keeps the sum of a block in a cache: each number is loaded and stored
 * once more for every rank. Here it stays in a register, and what is left is memory. Built when the
 * package is installed where there is a C compiler; everything works without it. Invariant: numbers are
 * added in the order of the inputs, and all inputs are read at a place before any output is written there.
 */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

enum { LINE = 64 }; /* bytes of a cache line */

/* Integers wrap, which is defined of those without a sign. */
#define SUM(NAME, TYPE)                                                                                \
    typedef TYPE NAME##_line __attribute__((vector_size(LINE), aligned(sizeof(TYPE)), may_alias));     \
    CLONES void shardmath_sum_##NAME(int inputs, const char *const *in, int outputs, char *const *out, \
                                     int64_t nbytes) {                                                 \
        int64_t at = 0;                                                                                \
        for (; at + LINE <= nbytes; at += LINE) {                                                      \
            NAME##_line sum = *(const NAME##_line *)(in[0] + at);                                      \
            for (int i = 1; i < inputs; i++)                                                           \
                sum += *(const NAME##_line *)(in[i] + at);                                             \
            for (int i = 0; i < outputs; i++)                                                          \
                *(NAME##_line *)(out[i] + at) = sum;                                                   \
        }                                                                                              \
        for (; at < nbytes; at += sizeof(TYPE)) {                                                      \
            TYPE sum, next;                                                                            \
            memcpy(&sum, in[0] + at, sizeof(sum));                                                     \
            for (int i = 1; i < inputs; i++) {                                                         \
                memcpy(&next, in[i] + at, sizeof(next));                                               \
                sum += next;                                                                           \
            }                                                                                          \
            for (int i = 0; i < outputs; i++)                                                          \
                memcpy(out[i] + at, &sum, sizeof(sum));                                                \
        }                                                                                              \
    }

SUM(float32, float)
SUM(float64, double)
SUM(int32, uint32_t)
SUM(int64, uint64_t)
