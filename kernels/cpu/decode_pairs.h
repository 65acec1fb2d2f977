/* Rounds of a decode in pairs of bf16, where the processor multiplies those (AVX512-BF16). */
#pragma once
#include "decode_round.h"

#define HEADS 4 /* queries of up to 64 dims, half as many of more, that values are read for at a time:
                 * their sums stay in registers */

INLINE int heads_of(int dim) { return dim > 64 ? HEADS / 2 : HEADS; }

INLINE __m512bh load(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }

/* Sums of 16 registers, one a lane. */
INLINE __m512 sums(__m512 r[16]) {
    for (int i = 0; i < 8; i++)
        r[i] = _mm512_add_ps(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]),
                             _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(r[2 * i]), y = _mm512_castps_pd(r[2 * i + 1]);
        r[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int n = 2; n; n /= 2)
        for (int i = 0; i < n; i++)
            r[i] = _mm512_add_ps(_mm512_shuffle_f32x4(r[2 * i], r[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(r[2 * i], r[2 * i + 1], 0xdd));
    return r[0];
}

/* Scores of a query with 16 tokens, times scale. */
INLINE __m512 score(const bf16 *q, const bf16 *const at[16], int64_t head, int dim, float scale) {
    __m512 r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 32) {
        __m512bh query = load(q + d);
        for (int i = 0; i < 16; i++) r[i] = _mm512_dpbf16_ps(r[i], query, load(at[i] + head + d));
    }
    return _mm512_mul_ps(sums(r), _mm512_set1_ps(scale));
}

/* Scores of query h with the round's tokens, times scale. */
INLINE void score_round(struct query q, const struct round *r, int64_t head, int dim, int h,
                        int heads, floats16 scores[][2]) {
    (void)heads;
    q.at += h * dim;
    scores[h][0] = score(q.at, r->at, head, dim, q.scale);
    scores[h][1] = r->count > 16 ? score(q.at, r->at + 16, head, dim, q.scale) : no_lanes();
}

/* A first part of each weight and the rest: memory is what takes time here, and the weights stay as
 * good as in fp32. */
struct weights { int32_t of[HEADS][2][ROUND / 2] __attribute__((aligned(64))); };

INLINE void put_weights(struct weights *w, int h, const floats16 of[2], const struct round *r) {
    floats16 x = of[0], y = of[1];
    (void)r;
    __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    __m512 u = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), upper));
    __m512 v = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(y), upper));
    _mm512_storeu_si512(w->of[h][0], (__m512i)_mm512_cvtne2ps_pbh(v, u));
    _mm512_storeu_si512(w->of[h][1], (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(y, v),
                                                                  _mm512_sub_ps(x, u)));
}

/* outputs += weights x values, of `heads` queries. outputs: [heads][dim / 32][2][16], dims in the
 * order in which unpacking leaves them. */
INLINE void gather(const struct round *r, int64_t values, const struct weights *weights,
                   float *outputs, int dim, int heads) {
    for (int d = 0; d < dim; d += 128) {
        int parts = dim - d < 128 ? (dim - d) / 32 : 4;
        __m512 sum[HEADS][4][2];
        for (int h = 0; h < heads; h++)
            for (int p = 0; p < parts; p++)
                for (int j = 0; j < 2; j++)
                    sum[h][p][j] = _mm512_loadu_ps(outputs + h * dim + d + p * 32 + j * 16);
        for (int i = 0; i < ROUND / 2; i++)
            for (int p = 0; p < parts; p++) {
                __m512i x = (__m512i)load(r->at[2 * i] + values + d + p * 32);
                __m512i y = (__m512i)load(r->at[2 * i + 1] + values + d + p * 32);
                __m512bh lo = (__m512bh)_mm512_unpacklo_epi16(x, y);
                __m512bh hi = (__m512bh)_mm512_unpackhi_epi16(x, y);
                for (int h = 0; h < heads; h++)
                    for (int part = 0; part < 2; part++) {
                        __m512bh weight = (__m512bh)_mm512_set1_epi32(weights->of[h][part][i]);
                        sum[h][p][0] = _mm512_dpbf16_ps(sum[h][p][0], lo, weight);
                        sum[h][p][1] = _mm512_dpbf16_ps(sum[h][p][1], hi, weight);
                    }
            }
        for (int h = 0; h < heads; h++)
            for (int p = 0; p < parts; p++)
                for (int j = 0; j < 2; j++)
                    _mm512_storeu_ps(outputs + h * dim + d + p * 32 + j * 16, sum[h][p][j]);
    }
}

/* 32 dims of outputs, times share, as bf16 in their order. */
INLINE void put_outputs(const float *outputs, float share, bf16 *to) {
    __m512i order = _mm512_set_epi16(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8,
                                     23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    __m512 lo = _mm512_mul_ps(_mm512_loadu_ps(outputs), _mm512_set1_ps(share));
    __m512 hi = _mm512_mul_ps(_mm512_loadu_ps(outputs + 16), _mm512_set1_ps(share));
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(hi, lo);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
}
