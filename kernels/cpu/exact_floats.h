/* Scores and outputs of an exact decode in f32, where there are no fast products of bf16. */
#pragma once
#include "extend_round.h"

typedef float number;
#define KEY_STEP 1 /* numbers that a key of a round lies behind the one before */

#ifdef FLOATS16_512
#define AT_ONCE 4 /* registers of keys whose scores are summed side by side */

/* 16 keys to their places in a round: [dims][KEYS]. */
INLINE void turn_keys(const bf16 *const at[16], int dim, float *to) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    for (int d = 0; d < dim; d += 32) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(at[i] + d);
        turn_pairs(r);
        for (int i = 0; i < 16; i++) {
            float *own = to + (int64_t)(d + 2 * i) * KEYS;
            _mm512_storeu_ps(own, _mm512_castsi512_ps(_mm512_slli_epi32(r[i], 16)));
            _mm512_storeu_ps(own + KEYS, _mm512_castsi512_ps(_mm512_and_si512(r[i], upper)));
        }
    }
}
#else
#define AT_ONCE 2

/* 16 keys to their places in a round: [dims][KEYS]. */
INLINE void turn_keys(const bf16 *const at[16], int dim, float *to) {
    for (int d = 0; d < dim; d += 8)
        for (int half = 0; half < 16; half += 8) {
            __m256 r[8];
            for (int i = 0; i < 8; i++) r[i] = wide_8(at[half + i] + d);
            turn_floats(r);
            for (int i = 0; i < 8; i++) _mm256_storeu_ps(to + (int64_t)(d + i) * KEYS + half, r[i]);
        }
}
#endif

/* Scores of `n` queries (1 or 2) with `groups` registers of a round's keys, from `s` on. */
INLINE void score_some(float query[][MAX_HEAD], const float *keys, int s, int dim,
                       float scores[][KEYS], const int n, const int groups) {
    floats16 sum[2][AT_ONCE];
    for (int h = 0; h < n; h++)
        for (int g = 0; g < groups; g++) sum[h][g] = no_lanes();
    for (int d = 0; d < dim; d++)
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            floats16 key = load_lanes(keys + (int64_t)d * KEYS + s + 16 * g);
            for (int h = 0; h < n; h++)
                sum[h][g] = fma_lanes(key, all_lanes(query[h][d]), sum[h][g]);
        }
    for (int h = 0; h < n; h++)
        for (int g = 0; g < groups; g++) store_lanes(scores[h] + s + 16 * g, sum[h][g]);
}

/* Scores with the first `count` keys, in whole registers; what is behind those may be anything. */
INLINE void score_keys(const bf16 *const q[2], const float *keys, int count, int dim,
                       float scores[][KEYS], const int n) {
    float query[2][MAX_HEAD];
    for (int h = 0; h < n; h++)
        for (int d = 0; d < dim; d++) query[h][d] = wide(q[h][d]);
    int s = 0;
    for (; s + 16 * (AT_ONCE - 1) < count; s += 16 * AT_ONCE)
        score_some(query, keys, s, dim, scores, n, AT_ONCE);
    for (; s < count; s += 16) score_some(query, keys, s, dim, scores, n, 1);
}

/* `count` keys' values, an even number, of dims d to d + 16 * parts. */
INLINE void gather_part(const bf16 *const *at, int count, int d, float weights[][KEYS],
                        float pairs[][KEYS / 2], float *const outputs[2], float sums[2],
                        const int parts, const int n) {
    floats16 sum[2][4];
    for (int h = 0; h < n; h++)
        for (int p = 0; p < parts; p++) sum[h][p] = load_lanes(outputs[h] + d + 16 * p);
    for (int s = 0; s < count; s++) {
        if (d == 0 && s % 2) add_pair(pairs, s / 2, sums, n);
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) {
            floats16 value = wide_lanes(at[s] + d + 16 * p);
            for (int h = 0; h < n; h++)
                sum[h][p] = fma_lanes(value, all_lanes(weights[h][s]), sum[h][p]);
        }
    }
    for (int h = 0; h < n; h++)
        for (int p = 0; p < parts; p++) store_lanes(outputs[h] + d + 16 * p, sum[h][p]);
}

/* outputs += weights x values of `count` keys, of n queries (1 or 2), and sums += pairs, which takes
 * no time of its own there. */
INLINE void gather_keys(const bf16 *const *at, int count, int dim, float weights[][KEYS],
                        float pairs[][KEYS / 2], float *const outputs[2], float sums[2],
                        const int n) {
    int d = 0;
#ifdef FLOATS16_512
    for (; d + 64 <= dim; d += 64) gather_part(at, count, d, weights, pairs, outputs, sums, 4, n);
#endif
    for (; d < dim; d += 32) gather_part(at, count, d, weights, pairs, outputs, sums, 2, n);
}

/* A query's outputs, times share, as bf16. */
INLINE void give_outputs(const float *outputs, float share, int dim, bf16 *to) {
    for (int d = 0; d < dim; d += 16)
        narrow_lanes(to + d, mul_lanes(load_lanes(outputs + d), all_lanes(share)));
}
