/* Rounds of a decode in f32, where the processor has no products of bf16: of 16 numbers in bf16 the
 * even ones are multiplied as they come shifted up, the odd ones with what is below them cut off. */
#pragma once
#include "decode_round.h"

#define HEADS 2   /* queries that keys and values are read for at a time */
#define AT_ONCE 4 /* tokens whose scores are summed side by side */

INLINE int heads_of(int dim) { return (void)dim, HEADS; }

/* 8 numbers of each kind. */
struct both { __m256 even, odd; };

INLINE struct both load_both(const bf16 *x) {
    __m256i all = _mm256_loadu_si256((const __m256i *)x);
    __m256i odd = _mm256_and_si256(all, _mm256_set1_epi32((int)0xffff0000));
    return (struct both){_mm256_castsi256_ps(_mm256_slli_epi32(all, 16)), _mm256_castsi256_ps(odd)};
}

/* Sums of 4 registers. */
INLINE __m128 sums_4(const __m256 r[4]) {
    __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

/* Scores of all queries with the round's tokens, times scale, when asked for the first. */
INLINE void score_round(struct query q, const struct round *r, int64_t head, int dim, int h_asked,
                        const int heads, floats16 scores[][2]) {
    if (h_asked) return;
    float found[2][ROUND];
    for (int t = 0; t < ROUND; t += AT_ONCE) {
        __m256 sum[2][AT_ONCE];
#pragma GCC unroll 8
        for (int i = 0; i < 2 * AT_ONCE; i++) sum[i / AT_ONCE][i % AT_ONCE] = _mm256_setzero_ps();
        for (int d = 0; d < dim; d += 16) {
            struct both query[2];
#pragma GCC unroll 2
            for (int h = 0; h < heads; h++) query[h] = load_both(q.at + h * dim + d);
#pragma GCC unroll 4
            for (int i = 0; i < AT_ONCE; i++) {
                struct both key = load_both(r->at[t + i] + head + d);
#pragma GCC unroll 2
                for (int h = 0; h < heads; h++) {
                    sum[h][i] = _mm256_fmadd_ps(query[h].even, key.even, sum[h][i]);
                    sum[h][i] = _mm256_fmadd_ps(query[h].odd, key.odd, sum[h][i]);
                }
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < heads; h++) _mm_storeu_ps(found[h] + t, sums_4(sum[h]));
    }
#pragma GCC unroll 2
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < 2; i++)
            scores[h][i] = mul_lanes(load_lanes(found[h] + 16 * i), all_lanes(q.scale));
}

struct weights { float of[2][ROUND]; };

INLINE void put_weights(struct weights *w, int h, const floats16 x[2], const struct round *r) {
    (void)r;
    store_lanes(w->of[h], x[0]);
    store_lanes(w->of[h] + 16, x[1]);
}

/* outputs += weights x values, of `heads` queries; outputs: [heads][dim / 16][8 even, 8 odd]. */
INLINE void gather(const struct round *r, int64_t values, const struct weights *weights,
                   float *outputs, int dim, const int heads) {
    const int parts = heads == 1 ? 4 : 2; /* of 16 dims: as many as registers take */
    for (int d = 0; d < dim; d += 16 * parts) {
        struct both sum[2][4];
#pragma GCC unroll 2
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) {
                const float *o = outputs + h * dim + (d + 16 * p < dim ? d + 16 * p : d);
                sum[h][p] = (struct both){_mm256_loadu_ps(o), _mm256_loadu_ps(o + 8)};
            }
        for (int i = 0; i < ROUND; i++)
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) {
                struct both x = load_both(r->at[i] + values + (d + 16 * p < dim ? d + 16 * p : d));
#pragma GCC unroll 2
                for (int h = 0; h < heads; h++) {
                    __m256 weight = _mm256_broadcast_ss(&weights->of[h][i]);
                    sum[h][p].even = _mm256_fmadd_ps(weight, x.even, sum[h][p].even);
                    sum[h][p].odd = _mm256_fmadd_ps(weight, x.odd, sum[h][p].odd);
                }
            }
#pragma GCC unroll 2
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) {
                if (d + 16 * p >= dim) continue;
                float *o = outputs + h * dim + d + 16 * p;
                _mm256_storeu_ps(o, sum[h][p].even);
                _mm256_storeu_ps(o + 8, sum[h][p].odd);
            }
    }
}

/* 32 dims of outputs, times share, as bf16 in their order. */
INLINE void put_outputs(const float *outputs, float share, bf16 *to) {
    const __m256 times = _mm256_set1_ps(share);
    for (int d = 0; d < 32; d += 16) {
        floats16 even_odd = join_lanes(_mm256_mul_ps(_mm256_loadu_ps(outputs + d), times),
                                       _mm256_mul_ps(_mm256_loadu_ps(outputs + d + 8), times));
        __m256i x = to_bf16(even_odd); /* 8 even, 8 odd */
        __m128i even = _mm256_castsi256_si128(x), odd = _mm256_extracti128_si256(x, 1);
        _mm_storeu_si128((__m128i *)(to + d), _mm_unpacklo_epi16(even, odd));
        _mm_storeu_si128((__m128i *)(to + d + 8), _mm_unpackhi_epi16(even, odd));
    }
}
