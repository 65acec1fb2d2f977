/* Attention of chunks in f32, where there are no products of bf16: keys and values [token][dim],
 * queries [dim][16 columns]. */
#pragma once
#include "extend_pack.h"
#include "lanes_dot.h"

static inline void tiles_full(void) {}
static inline void tiles_release(void) {}

INLINE void pack_tokens(const bf16 *const at[32], int apart, int dim, int64_t in,
                        struct scratch *s) {
    for (int i = 0; i < 32; i++) {
        const bf16 *values = at[i] == zeros ? zeros : at[i] + apart;
        int64_t to = (in + i) * dim;
        for (int d = 0; d < dim; d += 16) {
#ifndef SAGE
            store_lanes(s->keys + to + d, wide_lanes(at[i] + d));
#endif
            store_lanes(s->values + to + d, wide_lanes(values + d));
        }
    }
}

#ifndef SAGE
INLINE floats16 pack_queries(const bf16 *const at[16], int dim, float *query) {
    for (int d = 0; d < dim; d += 8)
        for (int half = 0; half < 16; half += 8) {
            __m256 r[8];
            for (int i = 0; i < 8; i++) r[i] = wide_8(at[half + i] + d);
            turn_floats(r);
            for (int i = 0; i < 8; i++) _mm256_storeu_ps(query + (d + i) * 16 + half, r[i]);
        }
    return all_lanes(1);
}
#endif

INLINE void put_weights(float *to, floats16 x, floats16 y) {
    store_lanes(to, x);
    store_lanes(to + 16, y);
}

/* 32 dims of outputs [32][16], times share, to where each of n columns has them. */
INLINE void put_outputs(const float *o, floats16 share, bf16 *const at[16], int n, int d,
                        int stream) {
    float by[16];
    store_lanes(by, share);
    (void)stream;
    for (int half = 0; half < n; half += 8)
        for (int part = 0; part < 32; part += 16) {
            __m256 r[2][8];
            for (int p = 0; p < 2; p++) {
                for (int i = 0; i < 8; i++)
                    r[p][i] = _mm256_mul_ps(_mm256_loadu_ps(o + (part + 8 * p + i) * 16 + half),
                                            _mm256_loadu_ps(by + half));
                turn_floats(r[p]);
            }
            for (int i = 0; i < 8 && half + i < n; i++)
                narrow_lanes(at[half + i] + d + part, join_lanes(r[0][i], r[1][i]));
        }
}

/* 32 rows in as many as registers take at a time. */
INLINE void dot_32(struct dot_rows a, const float *b, int64_t steps, float *sums, int fresh) {
#ifdef FLOATS16_512
    static const int parts[] = {12, 12, 8};
#define PARTS_32 3
#else
    static const int parts[] = {6, 6, 6, 6, 4, 4};
#define PARTS_32 6
#endif
#pragma GCC unroll 6
    for (int i = 0; i < PARTS_32; i++) {
        dot_block(parts[i], 1, a, b, 16, steps, sums, 16, fresh);
        a.at += parts[i] * a.apart, sums += 16 * parts[i];
    }
}

/* Functions, not inlined: a call is little beside what they do, and there are several of them. */
#ifndef SAGE
static __attribute__((noinline)) void score_32(const float *keys, int dim, const float *query,
                                               float *scores) {
    dot_32((struct dot_rows){keys, dim, 1}, query, dim, scores, 1);
}
#endif

static __attribute__((noinline)) void gather_32(const float *values, int dim, const float *weights,
                                                int n, float *outputs, int fresh) {
    dot_32((struct dot_rows){values, 1, dim}, weights, n, outputs, fresh);
}

