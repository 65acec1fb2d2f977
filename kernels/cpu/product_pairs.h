/* A weight and rows of x as pairs of bf16, where the processor multiplies those (AVX512-BF16): what
 * product_vector.c multiplies. */
#pragma once
#include "job.h"

typedef bf16 number, few_number;
#define GROUP 12
#define RUN 8                 /* blocks of 32 k decoded at a time: 16 KB */
#define RUN_FEW 2             /* of few rows: decoding and products alternate closely */
#define X_BYTES (512 << 10)   /* of a block of rows, to stay in the second cache */
#define WORDS(k) ((k) / 2)    /* of 4 bytes that k numbers of x take */
#define PAIRS (STEP / 2)

/* sums[r][0:32] (+)= n rows of x by `blocks` blocks of a panel. */
INLINE void multiply(const int n, const uint8_t *x, const int64_t apart, const int64_t next,
                     const bf16 *w, int64_t blocks, float *sums, int fresh, struct ahead soon) {
    __m512 a[GROUP], b[GROUP];
#pragma GCC unroll 12
    for (int r = 0; r < n; r++) {
        a[r] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + 32 * r);
        b[r] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + 32 * r + 16);
    }
    for (; blocks > 0; blocks--, w += BLOCK) {
        for (int i = 0; i < soon.lines; i++, soon.at += 64)
            _mm_prefetch((const char *)soon.at, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int p = 0; p < PAIRS; p++, x += next) {
            __m512bh w0 = (__m512bh)_mm512_load_si512(w + 32 * p);
            __m512bh w1 = (__m512bh)_mm512_load_si512(w + 512 + 32 * p);
#pragma GCC unroll 12
            for (int r = 0; r < n; r++) {
                int32_t pair;
                memcpy(&pair, x + r * apart, 4);
                __m512bh v = (__m512bh)_mm512_set1_epi32(pair);
                a[r] = _mm512_dpbf16_ps(a[r], v, w0);
                b[r] = _mm512_dpbf16_ps(b[r], v, w1);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < n; r++) {
        _mm512_store_ps(sums + 32 * r, a[r]);
        _mm512_store_ps(sums + 32 * r + 16, b[r]);
    }
}

#define WITH(n) case n: multiply(n, x, apart, next, w, blocks, sums, fresh, soon); break;

static __attribute__((noinline)) void multiply_some(int n, const uint8_t *x, int64_t apart,
                                                    int64_t next, const bf16 *w, int64_t blocks,
                                                    float *sums, int fresh, struct ahead soon) {
    switch (n) {
        WITH(1) WITH(2) WITH(3) WITH(4) WITH(5) WITH(6) WITH(7) WITH(8) WITH(9) WITH(10) WITH(11)
        WITH(12)
    }
}

/* All rows of a group: the usual case has all distances known. */
static __attribute__((noinline)) void multiply_group(const int32_t *x, const bf16 *w,
                                                     int64_t blocks, float *sums, int fresh,
                                                     struct ahead soon) {
    multiply(GROUP, (const uint8_t *)x, 4, 4 * GROUP, w, blocks, sums, fresh, soon);
}

/* n rows as `arrange_group` leaves them. */
INLINE void multiply_arranged(int n, const int32_t *x, const bf16 *w, int64_t blocks, float *sums,
                              int fresh, struct ahead soon) {
    if (n == GROUP) multiply_group(x, w, blocks, sums, fresh, soon);
    else multiply_some(n, (const uint8_t *)x, 4, 4 * GROUP, w, blocks, sums, fresh, soon);
}

/* Rows as they are given, `apart` numbers from row to row. */
INLINE void multiply_rows(int n, const bf16 *rows, int64_t apart, const bf16 *w, int64_t blocks,
                          float *sums, int fresh, struct ahead soon) {
    multiply_some(n, (const uint8_t *)rows, 2 * apart, 4, w, blocks, sums, fresh, soon);
}

#define decoded_run plain_run
#define few_run plain_run

/* n rows to [pairs of k][GROUP]; rows beyond them are zero. */
INLINE void arrange_group(const bf16 *x, int n, int64_t apart, int64_t ins, int32_t *to) {
    for (int64_t k = 0; k < ins / 2; k += 16) {
        int32_t part[GROUP][16] __attribute__((aligned(64)));
        for (int i = 0; i < GROUP; i++)
            _mm512_store_si512(part[i], i < n ? _mm512_loadu_si512(x + i * apart + 2 * k)
                                              : _mm512_setzero_si512());
        for (int p = 0; p < 16; p++)
            for (int i = 0; i < GROUP; i++) to[(k + p) * GROUP + i] = part[i][p];
    }
}
