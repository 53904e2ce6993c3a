/* The functions of simd_fft.c for one type REAL and vectors of BYTES, which are LANES numbers. Included
 * once for each. In `work` an element of the lines is a vector of real parts and one of imaginary parts;
 * lane l of both belongs to line l. */

typedef REAL VECTOR __attribute__((vector_size(BYTES)));
typedef REAL NAME(loose) __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
#define LOOSE NAME(loose)
#define INNER TARGET static inline __attribute__((always_inline))

INNER VECTOR NAME(load_vector)(const char *at) { return *(const LOOSE *)at; }
INNER void NAME(store_vector)(char *at, VECTOR v) { *(LOOSE *)at = v; }

/* LANES rows become LANES columns: halves are interleaved until all are where they belong. */
INNER void NAME(transpose)(VECTOR *row) {
    VECTOR other[LANES];
#pragma GCC unroll 4
    for (int done = 1; done < LANES; done *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; i++) {
            other[2 * i] = ZIP(row[i], row[i + LANES / 2], 0);
            other[2 * i + 1] = ZIP(row[i], row[i + LANES / 2], LANES / 2);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            row[i] = other[i];
    }
}

/* Where number `at` of a row of complex ones goes. `swapped`: real and imaginary parts change places. */
INNER int64_t NAME(slot)(int64_t at, const int64_t *order, int swapped) {
    return 2 * (order ? order[at / 2] : at / 2) + ((at & 1) ^ swapped);
}

/* `count` numbers of each of LANES rows, which begin `skip` bytes later than said. */
INNER void NAME(load_rows)(VECTOR *to, const int64_t *order, int swapped,
                          const char *const *rows, int64_t skip, int64_t count) {
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        VECTOR part[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            part[i] = NAME(load_vector)(rows[i] + skip + at * sizeof(REAL));
        NAME(transpose)(part);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            to[NAME(slot)(at + i, order, swapped)] = part[i];
    }
    for (; at < count; at++) {
        REAL *last = (REAL *)(to + NAME(slot)(at, order, swapped));
        for (int i = 0; i < LANES; i++)
            last[i] = ((const REAL *)(rows[i] + skip))[at];
    }
}

INNER void NAME(store_rows)(char *const *rows, int64_t skip, const VECTOR *from, int swapped,
                           int64_t count) {
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        VECTOR part[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            part[i] = from[NAME(slot)(at + i, NULL, swapped)];
        NAME(transpose)(part);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            NAME(store_vector)(rows[i] + skip + at * sizeof(REAL), part[i]);
    }
    for (; at < count; at++) {
        const REAL *last = (const REAL *)(from + NAME(slot)(at, NULL, swapped));
        for (int i = 0; i < LANES; i++)
            ((REAL *)(rows[i] + skip))[at] = last[i];
    }
}

/* Elements first, ..., first + count - 1 of LANES complex lines. Element k goes to place order[k], or
 * k - first where there is no order. `swapped`: real and imaginary parts change places. */
INNER void NAME(load_complex)(VECTOR *to, const int64_t *order, int swapped, const Lines *lines,
                              int64_t first, int64_t count) {
    const int64_t step = lines->step, skip = first * step;
    if (lines->dense) {
        for (int64_t k = 0; k < count; k++) {
            const char *from = lines->at[0] + skip + k * step;
            VECTOR one = NAME(load_vector)(from), two = NAME(load_vector)(from + BYTES);
            int64_t place = order ? order[k] : k;
            to[2 * place + swapped] = UNZIP(one, two, 0);
            to[2 * place + !swapped] = UNZIP(one, two, 1);
        }
    } else if (step == 2 * sizeof(REAL)) {
        NAME(load_rows)(to, order, swapped, (const char *const *)lines->at, skip, 2 * count);
    } else {
        for (int64_t k = 0; k < count; k++) {
            int64_t place = order ? order[k] : k;
            for (int i = 0; i < LANES; i++) {
                const REAL *from = (const REAL *)(lines->at[i] + skip + k * step);
                ((REAL *)(to + 2 * place + swapped))[i] = from[0];
                ((REAL *)(to + 2 * place + !swapped))[i] = from[1];
            }
        }
    }
}

INNER void NAME(store_complex)(const Lines *lines, const VECTOR *from, int swapped, int64_t first,
                               int64_t count) {
    const int64_t step = lines->step, skip = first * step;
    if (lines->dense) {
        for (int64_t k = 0; k < count; k++) {
            char *to = lines->at[0] + skip + k * step;
            VECTOR re = from[2 * k + swapped], im = from[2 * k + !swapped];
            NAME(store_vector)(to, ZIP(re, im, 0));
            NAME(store_vector)(to + BYTES, ZIP(re, im, LANES / 2));
        }
    } else if (step == 2 * sizeof(REAL)) {
        NAME(store_rows)(lines->at, skip, from, swapped, 2 * count);
    } else {
        for (int64_t k = 0; k < count; k++)
            for (int i = 0; i < LANES; i++) {
                REAL *to = (REAL *)(lines->at[i] + skip + k * step);
                to[0] = ((const REAL *)(from + 2 * k + swapped))[i];
                to[1] = ((const REAL *)(from + 2 * k + !swapped))[i];
            }
    }
}

/* `count` real numbers of LANES lines: each two of a line are a complex number. */
INNER void NAME(load_real)(VECTOR *to, const int64_t *order, const Lines *lines, int64_t count) {
    if (lines->step == sizeof(REAL)) {
        NAME(load_rows)(to, order, 0, (const char *const *)lines->at, 0, count);
        return;
    }
    for (int64_t k = 0; k < count; k++) {
        const int64_t skip = k * lines->step;
        VECTOR *place = to + NAME(slot)(k, order, 0);
        if (lines->dense) {
            *place = NAME(load_vector)(lines->at[0] + skip);
            continue;
        }
        for (int i = 0; i < LANES; i++)
            ((REAL *)place)[i] = *(const REAL *)(lines->at[i] + skip);
    }
}

INNER void NAME(store_real)(const Lines *lines, const VECTOR *from, int swapped, int64_t count) {
    if (lines->step == sizeof(REAL)) {
        NAME(store_rows)(lines->at, 0, from, swapped, count);
        return;
    }
    for (int64_t k = 0; k < count; k++) {
        const int64_t skip = k * lines->step;
        const VECTOR *place = from + NAME(slot)(k, NULL, swapped);
        if (lines->dense) {
            NAME(store_vector)(lines->at[0] + skip, *place);
            continue;
        }
        for (int i = 0; i < LANES; i++)
            *(REAL *)(lines->at[i] + skip) = ((const REAL *)place)[i];
    }
}

typedef struct {
    VECTOR re, im;
} NAME(complex);
#define COMPLEX NAME(complex)

INNER COMPLEX NAME(add)(COMPLEX a, COMPLEX b) {
    return (COMPLEX){a.re + b.re, a.im + b.im};
}
INNER COMPLEX NAME(subtract)(COMPLEX a, COMPLEX b) {
    return (COMPLEX){a.re - b.re, a.im - b.im};
}
INNER COMPLEX NAME(times_minus_i)(COMPLEX a) { /* times -i */
    return (COMPLEX){a.im, -a.re};
}
INNER COMPLEX NAME(scale)(COMPLEX a, REAL by) {
    return (COMPLEX){a.re * by, a.im * by};
}
INNER COMPLEX NAME(multiply)(COMPLEX a, const REAL *w) {
    return (COMPLEX){a.re * w[0] - a.im * w[1], a.re * w[1] + a.im * w[0]};
}

/* The transforms of 2, 3, 4, 5 numbers, in place. */
INNER void NAME(butterfly)(COMPLEX *x, int radix) {
    if (radix == 2) {
        COMPLEX a = x[0];
        x[0] = NAME(add)(a, x[1]);
        x[1] = NAME(subtract)(a, x[1]);
    } else if (radix == 3) {
        const REAL half = (REAL)-0.5, sine = (REAL)0.86602540378443864676;
        COMPLEX sum = NAME(add)(x[1], x[2]);
        COMPLEX across = NAME(times_minus_i)(NAME(scale)(NAME(subtract)(x[1], x[2]), sine));
        COMPLEX middle = NAME(add)(x[0], NAME(scale)(sum, half));
        x[0] = NAME(add)(x[0], sum);
        x[1] = NAME(add)(middle, across);
        x[2] = NAME(subtract)(middle, across);
    } else if (radix == 4) {
        COMPLEX a = NAME(add)(x[0], x[2]), b = NAME(subtract)(x[0], x[2]);
        COMPLEX c = NAME(add)(x[1], x[3]), d = NAME(times_minus_i)(NAME(subtract)(x[1], x[3]));
        x[0] = NAME(add)(a, c);
        x[1] = NAME(add)(b, d);
        x[2] = NAME(subtract)(a, c);
        x[3] = NAME(subtract)(b, d);
    } else {
        const REAL c1 = (REAL)0.30901699437494742410, c2 = (REAL)-0.80901699437494742410;
        const REAL s1 = (REAL)0.95105651629515357212, s2 = (REAL)0.58778525229247312917;
        COMPLEX p = NAME(add)(x[1], x[4]), q = NAME(add)(x[2], x[3]);
        COMPLEX r = NAME(subtract)(x[1], x[4]), t = NAME(subtract)(x[2], x[3]);
        COMPLEX a = NAME(add)(x[0], NAME(add)(NAME(scale)(p, c1), NAME(scale)(q, c2)));
        COMPLEX b = NAME(add)(x[0], NAME(add)(NAME(scale)(p, c2), NAME(scale)(q, c1)));
        COMPLEX c = NAME(times_minus_i)(NAME(add)(NAME(scale)(r, s1), NAME(scale)(t, s2)));
        COMPLEX d = NAME(times_minus_i)(NAME(subtract)(NAME(scale)(r, s2), NAME(scale)(t, s1)));
        x[0] = NAME(add)(x[0], NAME(add)(p, q));
        x[1] = NAME(add)(a, c);
        x[2] = NAME(add)(b, d);
        x[3] = NAME(subtract)(b, d);
        x[4] = NAME(subtract)(a, c);
    }
}

/* One pass: each of the transforms of `done` elements so far is one of `radix` parts of a longer
 * one. Part j is multiplied by its powers of the twiddle first. */
INNER void NAME(pass)(COMPLEX *x, const Batch *batch, int64_t done, int radix) {
    const int64_t n = batch->n, apart = 2 * (batch->circle / (done * radix));
    const REAL *twiddles = batch->twiddles;
    for (int64_t base = 0; base < n; base += done * radix)
        for (int64_t q = 0; q < done; q++) {
            COMPLEX part[8], *at = x + base + q;
            part[0] = at[0];
#pragma GCC unroll 8
            for (int j = 1; j < radix; j++)
                part[j] = q ? NAME(multiply)(at[j * done], twiddles + apart * q * j) : at[j * done];
            NAME(butterfly)(part, radix);
#pragma GCC unroll 8
            for (int j = 0; j < radix; j++)
                at[j * done] = part[j];
        }
}

/* The transforms of lines whose elements lie in the order of Batch. */
INNER void NAME(passes)(const Batch *batch, COMPLEX *x) {
    int64_t done = 1;
    for (const int64_t *radix = batch->factors; *radix; done *= *radix++) {
        if (*radix == 2)
            NAME(pass)(x, batch, done, 2);
        else if (*radix == 3)
            NAME(pass)(x, batch, done, 3);
        else if (*radix == 4)
            NAME(pass)(x, batch, done, 4);
        else
            NAME(pass)(x, batch, done, 5);
    }
}

/* Real lines were transformed as complex ones of half as many elements, z. With their even elements'
 * transform e and the odd ones' o, z is e + i o, and the result e + w^k o. */
INNER void NAME(store_half)(const Lines *lines, const COMPLEX *z, const Batch *batch) {
    const int64_t n = batch->n;
    const REAL half = (REAL)(batch->scale / 2), *w = batch->twiddles;
    for (int64_t k = 0, count; k <= n; k += count) {
        COMPLEX part[CHUNK];
        count = n + 1 - k < CHUNK ? n + 1 - k : CHUNK;
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = k + i;
            COMPLEX p = z[at < n ? at : 0], q = z[at ? n - at : 0];
            COMPLEX even = {p.re + q.re, p.im - q.im}, odd = {p.re - q.re, p.im + q.im};
            odd = NAME(times_minus_i)(NAME(multiply)(odd, w + 2 * at));
            part[i] = NAME(scale)(NAME(add)(even, odd), half);
        }
        NAME(store_complex)(lines, (VECTOR *)part, 0, k, count);
    }
}

/* The reverse: z has real and imaginary parts swapped, as the inverse wants them. What is imaginary of
 * the first and the last of the elements `x` is left out. */
INNER void NAME(load_half)(COMPLEX *z, COMPLEX *x, const Lines *lines, const Batch *batch) {
    const int64_t n = batch->n;
    const REAL *w = batch->twiddles;
    NAME(load_complex)((VECTOR *)x, NULL, 0, lines, 0, n + 1);
    x[0].im = x[n].im = (VECTOR){0};
    for (int64_t k = 0; k < n; k++) {
        COMPLEX p = x[k], q = x[n - k];
        COMPLEX even = {p.re + q.re, p.im - q.im}, odd = {p.re - q.re, p.im + q.im};
        const REAL back[2] = {w[2 * k], -w[2 * k + 1]};
        odd = NAME(multiply)(odd, back);
        z[batch->order[k]] = (COMPLEX){even.im + odd.re, even.re - odd.im};
    }
}

TARGET static void NAME(scale_all)(COMPLEX *x, int64_t n, REAL scale) {
    if (scale != 1)
        for (int64_t k = 0; k < n; k++)
            x[k] = NAME(scale)(x[k], scale);
}

/* LANES lines from number `first` on; past the last one, that one again. They are dense if they begin
 * `size` bytes apart. */
INNER void NAME(locate)(Lines *lines, const char *start, const int64_t *extents, const int64_t *strides,
                        int64_t first, int64_t size) {
    int64_t i = first / extents[1], j = first % extents[1];
    if (i >= extents[0])
        i = extents[0] - 1, j = extents[1] - 1;
    lines->dense = 1;
    for (int lane = 0; lane < LANES; lane++) {
        lines->at[lane] = (char *)start + i * strides[0] + j * strides[1];
        lines->dense &= lines->at[lane] == lines->at[0] + lane * size;
        if (j + 1 < extents[1])
            j++;
        else if (i + 1 < extents[0])
            i++, j = 0;
    }
}

TARGET static void NAME(transform)(const Batch *batch, const char *src, char *dst, void *work) {
    const int64_t n = batch->n, count = batch->extents[0] * batch->extents[1];
    const int64_t src_size = sizeof(REAL) << (batch->kind != R2C);
    const int64_t dst_size = sizeof(REAL) << (batch->kind != C2R);
    const int swapped = batch->inverse != 0;
    COMPLEX *x = work;
    Lines from = {.step = batch->src_step}, to = {.step = batch->dst_step};
    for (int64_t first = 0; first < count; first += LANES) {
        NAME(locate)(&from, src, batch->extents, batch->src_strides, first, src_size);
        NAME(locate)(&to, dst, batch->extents, batch->dst_strides, first, dst_size);
        if (batch->kind == C2C)
            NAME(load_complex)(work, batch->order, swapped, &from, 0, n);
        else if (batch->kind == R2C)
            NAME(load_real)(work, batch->order, &from, 2 * n);
        else
            NAME(load_half)(x, x + n, &from, batch);
        NAME(passes)(batch, x);
        if (batch->kind == R2C) {
            NAME(store_half)(&to, x, batch);
            continue;
        }
        NAME(scale_all)(x, n, (REAL)batch->scale);
        if (batch->kind == C2C)
            NAME(store_complex)(&to, work, swapped, 0, n);
        else
            NAME(store_real)(&to, work, swapped, 2 * n);
    }
}

#undef LOOSE
#undef INNER
#undef COMPLEX
#undef REAL
#undef LANES
#undef ZIP
#undef UNZIP
