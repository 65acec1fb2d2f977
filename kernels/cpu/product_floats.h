/* A weight and rows of x in f32, where the processor has no products of bf16: what product_vector.c
 * multiplies. */
#pragma once
#include "job.h"
#include "lanes_dot.h"

typedef float number;
#define GROUP DOT_ROWS
#define RUN 4               /* blocks of 32 k decoded at a time: 16 KB */
#define RUN_FEW 2           /* of few rows: decoding and products alternate closely */
#define X_BYTES (1 << 20)   /* of a block of rows: each is read once for 128 k of a panel */
#define WORDS(k) (k)        /* of 4 bytes that k numbers of x take */

INLINE void fetch_lines(struct ahead *soon, int64_t blocks) {
    for (int64_t i = 0; i < blocks * soon->lines; i++, soon->at += 64)
        _mm_prefetch((const char *)soon->at, _MM_HINT_T0);
}

/* sums[r][0:32] (+)= n rows of x by `blocks` blocks of a panel. Few rows have all columns at once,
 * to have enough sums under way. */
INLINE void multiply(const int n, struct dot_rows x, const float *w, int64_t blocks, float *sums,
                     int fresh) {
    if (n <= DOT_ROWS / 2) {
        dot_block(n, 2, x, w, PANEL, blocks * STEP, sums, PANEL, fresh);
        return;
    }
    dot_block(n, 1, x, w, PANEL, blocks * STEP, sums, PANEL, fresh);
    dot_block(n, 1, x, w + 16, PANEL, blocks * STEP, sums + 16, PANEL, fresh);
}

#define WITH(n) case n: multiply(n, x, w, blocks, sums, fresh); break;

static __attribute__((noinline)) void multiply_some(int n, struct dot_rows x, const float *w,
                                                    int64_t blocks, float *sums, int fresh) {
    switch (n) {
        WITH(1) WITH(2) WITH(3) WITH(4) WITH(5) WITH(6)
#if DOT_ROWS > 6
        WITH(7) WITH(8) WITH(9) WITH(10) WITH(11) WITH(12)
#endif
    }
}

#ifdef FLOATS16_512
typedef bf16 few_number;
#define few_run plain_run

/* `multiply` with a weight in plain tiles, which is widened in registers: with few rows, storing it
 * as floats takes as long as the products do. Sums come about in the same order. */
INLINE void multiply_plain(const int n, const int m, const float *x, const bf16 *w, int64_t blocks,
                           float *sums, int fresh, struct ahead *soon) {
    __m512 s[GROUP][2];
#pragma GCC unroll 12
    for (int r = 0; r < n; r++)
#pragma GCC unroll 2
        for (int c = 0; c < m; c++)
            s[r][c] = fresh ? no_lanes() : load_lanes(sums + r * PANEL + 16 * c);
    for (; blocks > 0; blocks--, w += BLOCK) {
        if (soon) fetch_lines(soon, 1);
#pragma GCC unroll 2
        for (int p = 0; p < STEP / 2; p++, x += 2) {
            __m512i pairs[2];
#pragma GCC unroll 2
            for (int c = 0; c < m; c++) pairs[c] = _mm512_loadu_si512(w + 512 * c + 32 * p);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++)
#pragma GCC unroll 2
                for (int c = 0; c < m; c++) {
                    __m512i wide = i ? _mm512_and_si512(pairs[c], _mm512_set1_epi32((int)0xffff0000))
                                     : _mm512_slli_epi32(pairs[c], 16);
#pragma GCC unroll 12
                    for (int r = 0; r < n; r++)
                        s[r][c] = fma_lanes(all_lanes(x[r * RUN_FEW * STEP + i]),
                                            _mm512_castsi512_ps(wide), s[r][c]);
                }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < n; r++)
#pragma GCC unroll 2
        for (int c = 0; c < m; c++) store_lanes(sums + r * PANEL + 16 * c, s[r][c]);
}

#define FEW(n)                                                                                     \
    case n:                                                                                        \
        if (n <= GROUP / 2) multiply_plain(n, 2, x, w, blocks, sums, fresh, &soon);                \
        else {                                                                                     \
            multiply_plain(n, 1, x, w, blocks, sums, fresh, &soon);                                \
            multiply_plain(n, 1, x, w + 512, blocks, sums + 16, fresh, 0);                         \
        }                                                                                          \
        break;

static __attribute__((noinline)) void multiply_few(int n, const float *x, const bf16 *w,
                                                   int64_t blocks, float *sums, int fresh,
                                                   struct ahead soon) {
    switch (n) {
        FEW(1) FEW(2) FEW(3) FEW(4) FEW(5) FEW(6) FEW(7) FEW(8) FEW(9) FEW(10) FEW(11) FEW(12)
    }
}
#else
typedef float few_number;
#define few_run decoded_run

static const float *decoded_run(const struct packed *w, int64_t panel, int64_t first, int64_t count,
                                const struct exception **next, float *to);

INLINE void multiply_few(int n, const float *x, const float *w, int64_t blocks, float *sums,
                         int fresh, struct ahead soon) {
    fetch_lines(&soon, blocks);
    multiply_some(n, (struct dot_rows){x, RUN_FEW * STEP, 1}, w, blocks, sums, fresh);
}
#endif

/* Rows as they are given, `apart` numbers from row to row. */
INLINE void multiply_rows(int n, const bf16 *rows, int64_t apart, const few_number *w, int64_t blocks,
                          float *sums, int fresh, struct ahead soon) {
    float own[GROUP][RUN_FEW * STEP];
    for (int r = 0; r < n; r++)
        for (int64_t k = 0; k < blocks * STEP; k += 16)
            store_lanes(own[r] + k, wide_lanes(rows + r * apart + k));
    multiply_few(n, own[0], w, blocks, sums, fresh, soon);
}

/* All rows of a group: the usual case has all distances known. */
static __attribute__((noinline)) void multiply_group(const int32_t *x, const float *w,
                                                     int64_t blocks, float *sums, int fresh) {
    multiply(GROUP, (struct dot_rows){(const float *)x, 1, GROUP}, w, blocks, sums, fresh);
}

/* n rows as `arrange_group` leaves them. */
INLINE void multiply_arranged(int n, const int32_t *x, const float *w, int64_t blocks, float *sums,
                              int fresh, struct ahead soon) {
    fetch_lines(&soon, blocks);
    if (n == GROUP) multiply_group(x, w, blocks, sums, fresh);
    else multiply_some(n, (struct dot_rows){(const float *)x, 1, GROUP}, w, blocks, sums, fresh);
}

#ifdef FLOATS16_512
/* Pairs of k of 16 columns, as a tile row has them, to the rows of both. */
INLINE void widen_pairs(__m512i pairs, float *to) {
    __m512i upper = _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000));
    _mm512_storeu_ps(to, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
    _mm512_storeu_ps(to + PANEL, _mm512_castsi512_ps(upper));
}

/* A block to [32 k][32 columns]; exceptions are the caller's. */
INLINE void widen_coded(const uint8_t *from, __m512i table, float *to) {
    for (int g = 0; g < 8; g++) {
        __m512i v[4];
        decode_group(from + 192 * g, table, v);
        for (int i = 0; i < 4; i++)
            widen_pairs(v[i], to + (g % 4 * 4 + i) * 2 * PANEL + g / 4 * 16);
    }
}

INLINE void widen_plain(const uint8_t *from, float *to) {
    for (int i = 0; i < BLOCK / 32; i++)
        widen_pairs(_mm512_loadu_si512(from + 64 * i), to + i % 16 * 2 * PANEL + i / 16 * 16);
}
#else
/* Pairs of k of 8 columns, as half a tile row has them, to the rows of both. */
INLINE void widen_pairs(__m256i pairs, float *to) {
    __m256i upper = _mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000));
    _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
    _mm256_storeu_ps(to + PANEL, _mm256_castsi256_ps(upper));
}

/* A block to [32 k][32 columns]; exceptions are the caller's. */
INLINE void widen_coded(const uint8_t *from, __m256i table, float *to) {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int g = 0; g < 8; g++, from += 192)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const __m256i *at = (const __m256i *)from + h;
            __m256i codes = _mm256_loadu_si256(at);
            __m256i low0 = _mm256_loadu_si256(at + 2), low1 = _mm256_loadu_si256(at + 4);
            __m256i high0 = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, nibble));
            __m256i high1 = _mm256_shuffle_epi8(
                table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
            float *own = to + g % 4 * 8 * PANEL + g / 4 * 16 + 8 * h;
            widen_pairs(_mm256_unpacklo_epi8(low0, high0), own);
            widen_pairs(_mm256_unpackhi_epi8(low0, high0), own + 2 * PANEL);
            widen_pairs(_mm256_unpacklo_epi8(low1, high1), own + 4 * PANEL);
            widen_pairs(_mm256_unpackhi_epi8(low1, high1), own + 6 * PANEL);
        }
}

INLINE void widen_plain(const uint8_t *from, float *to) {
    for (int i = 0; i < BLOCK / 16; i++, from += 32)
        widen_pairs(_mm256_loadu_si256((const __m256i *)from),
                    to + i % 32 / 2 * 2 * PANEL + i / 32 * 16 + i % 2 * 8);
}

INLINE __m256i code_table(const struct packed *w) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)w->table));
}
#endif

/* Blocks [first, first + count) of a panel, [k][32 columns]; `next`: the panel's exceptions still to
 * come. */
static const float *decoded_run(const struct packed *w, int64_t panel, int64_t first, int64_t count,
                                const struct exception **next, float *to) {
    const uint8_t *from = w->blocks
        + (panel * (w->ins / STEP) + first) * (w->coded ? CODED_BYTES : PLAIN_BYTES);
    if (!w->coded) {
        for (int64_t b = 0; b < count; b++) widen_plain(from + b * PLAIN_BYTES, to + b * BLOCK);
        return to;
    }
    const struct exception *end = w->exceptions + w->starts[panel + 1];
    for (int64_t b = 0; b < count; b++) widen_coded(from + b * CODED_BYTES, code_table(w), to + b * BLOCK);
    for (; *next < end && (*next)->at < (first + count) * BLOCK; (*next)++)
        to[(place_k((*next)->at) - first * STEP) * PANEL + place_column((*next)->at)]
            = wide((*next)->value);
    return to;
}

/* n rows to [k][GROUP]; rows beyond them are zero. */
INLINE void arrange_group(const bf16 *x, int n, int64_t apart, int64_t ins, int32_t *to) {
    for (int64_t k = 0; k < ins; k++)
        for (int i = 0; i < GROUP; i++) to[k * GROUP + i] = i < n ? x[i * apart + k] << 16 : 0;
}
