/* Scores and outputs of an exact decode in pairs of bf16 (AVX512-BF16 without AMX). */
#pragma once
#include "decode_pairs.h"
#include "extend_round.h"

typedef bf16 number;
#define KEY_STEP 2 /* numbers that a key of a round lies behind the one before */
#define AT_ONCE 4  /* registers of keys whose scores are summed side by side */

/* 16 keys to their places in a round: [pairs of dims][KEYS]. */
INLINE void turn_keys(const bf16 *const at[16], int dim, bf16 *to) {
    for (int d = 0; d < dim; d += 32) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(at[i] + d);
        turn_pairs(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512(to + (int64_t)(d / 2 + i) * 2 * KEYS, r[i]);
    }
}

/* Scores of `n` queries (1 or 2) with `groups` registers of a round's keys, from `s` on. */
INLINE void score_some(const bf16 *const q[2], const bf16 *keys, int s, int dim,
                       float scores[][KEYS], const int n, const int groups) {
    __m512 sum[2][AT_ONCE];
    for (int h = 0; h < n; h++)
        for (int g = 0; g < groups; g++) sum[h][g] = _mm512_setzero_ps();
    for (int p = 0; p < dim / 2; p++) {
        __m512bh pair[2];
        for (int h = 0; h < n; h++) {
            int32_t both;
            memcpy(&both, q[h] + 2 * p, 4);
            pair[h] = (__m512bh)_mm512_set1_epi32(both);
        }
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            __m512bh key = load(keys + (int64_t)(p * KEYS + s + 16 * g) * 2);
            for (int h = 0; h < n; h++) sum[h][g] = _mm512_dpbf16_ps(sum[h][g], key, pair[h]);
        }
    }
    for (int h = 0; h < n; h++)
        for (int g = 0; g < groups; g++) _mm512_storeu_ps(scores[h] + s + 16 * g, sum[h][g]);
}

/* Scores with the first `count` keys, in whole registers; what is behind those may be anything. */
INLINE void score_keys(const bf16 *const q[2], const bf16 *keys, int count, int dim,
                       float scores[][KEYS], const int n) {
    int s = 0;
    for (; s + 16 * (AT_ONCE - 1) < count; s += 16 * AT_ONCE)
        score_some(q, keys, s, dim, scores, n, AT_ONCE);
    for (; s < count; s += 16) score_some(q, keys, s, dim, scores, n, 1);
}

/* outputs += weights, rounded to bf16, x values of `count` keys, of n queries (1 or 2), and
 * sums += pairs, which takes no time of its own there. outputs: [dim / 32][2][16], dims in the order
 * in which unpacking leaves them. */
INLINE void gather_keys(const bf16 *const *at, int count, int dim, float scores[][KEYS],
                        float pairs[][KEYS / 2], float *const outputs[2], float sums[2],
                        const int n) {
    int32_t weights[2][KEYS / 2] __attribute__((aligned(64)));
    for (int h = 0; h < n; h++)
        for (int s = 0; s < count; s += 32)
            _mm512_store_si512(weights[h] + s / 2, (__m512i)_mm512_cvtne2ps_pbh(
                _mm512_load_ps(scores[h] + s + 16), _mm512_load_ps(scores[h] + s)));
    for (int d = 0; d < dim; d += 128) {
        int parts = dim - d < 128 ? (dim - d) / 32 : 4;
        __m512 sum[2][4][2];
        for (int h = 0; h < n; h++)
            for (int p = 0; p < parts; p++)
                for (int j = 0; j < 2; j++)
                    sum[h][p][j] = _mm512_loadu_ps(outputs[h] + d + p * 32 + j * 16);
        for (int i = 0; i < count / 2; i++) {
            if (d == 0) add_pair(pairs, i, sums, n);
            for (int p = 0; p < parts; p++) {
                __m512i x = _mm512_loadu_si512(at[2 * i] + d + p * 32);
                __m512i y = _mm512_loadu_si512(at[2 * i + 1] + d + p * 32);
                __m512bh lo = (__m512bh)_mm512_unpacklo_epi16(x, y);
                __m512bh hi = (__m512bh)_mm512_unpackhi_epi16(x, y);
                for (int h = 0; h < n; h++) {
                    __m512bh weight = (__m512bh)_mm512_set1_epi32(weights[h][i]);
                    sum[h][p][0] = _mm512_dpbf16_ps(sum[h][p][0], lo, weight);
                    sum[h][p][1] = _mm512_dpbf16_ps(sum[h][p][1], hi, weight);
                }
            }
        }
        for (int h = 0; h < n; h++)
            for (int p = 0; p < parts; p++)
                for (int j = 0; j < 2; j++)
                    _mm512_storeu_ps(outputs[h] + d + p * 32 + j * 16, sum[h][p][j]);
    }
}

/* A query's outputs, times share, as bf16. */
INLINE void give_outputs(const float *outputs, float share, int dim, bf16 *to) {
    for (int d = 0; d < dim; d += 32) put_outputs(outputs + d, share, to + d);
}
