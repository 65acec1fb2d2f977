/* Attention of chunks on tiles (tiles.h): keys, values and queries as tiles, and products of them. Two
 * rows of P^T side by side are what O^T = V^T P^T wants for its right operand. */
#pragma once
#include "extend_pack.h"

#define TILE 512                  /* elements of a bf16 tile */

/* Into tiles: keys [dim / 32][2][16 keys][32], values of KEYS tokens [dim / 32][KEYS / 32][2]
 * [16 dims][32 keys]. */
INLINE void pack_tokens(const bf16 *const at[32], int apart, int dim, int64_t in,
                        struct scratch *s) {
    bf16 *values = s->values + in / KEYS * KEYS * dim + in % KEYS / 32 * 2 * TILE;
    for (int d = 0; d < dim; d += 32) {
#ifndef SAGE
        bf16 *keys = s->keys + in * dim + d * 32;
        for (int i = 0; i < 32; i++)
            _mm512_store_si512(keys + (i >> 4) * TILE + (i & 15) * 32, _mm512_loadu_si512(at[i] + d));
#endif
        __m512i lo[16], hi[16];
        for (int i = 0; i < 16; i++) {
            const bf16 *a = at[2 * i], *b = at[2 * i + 1];
            __m512i x = _mm512_loadu_si512((a == zeros ? a : a + apart) + d);
            __m512i y = _mm512_loadu_si512((b == zeros ? b : b + apart) + d);
            lo[i] = _mm512_unpacklo_epi16(x, y), hi[i] = _mm512_unpackhi_epi16(x, y);
        }
        turn_pairs(lo), turn_pairs(hi);
        bf16 *tile = values + d * KEYS;
        for (int i = 0; i < 16; i++) {
            int place = (i >> 2) * 8 + (i & 3);
            _mm512_store_si512(tile + place * 32, lo[i]);
            _mm512_store_si512(tile + (place + 4) * 32, hi[i]);
        }
    }
}

#ifndef SAGE
/* Queries of 16 columns into tiles [dim / 32][16 pairs of dims][16 columns]. */
INLINE floats16 pack_queries(const bf16 *const at[16], int dim, bf16 *query) {
    for (int d = 0; d < dim; d += 32) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(at[i] + d);
        turn_pairs(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512(query + d * 16 + i * 32, r[i]);
    }
    return all_lanes(1);
}
#endif

/* Weights of a pair of keys, bf16, side by side. */
INLINE void put_weights(bf16 *to, floats16 x, floats16 y) {
    __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                     23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(y, x);
    _mm512_store_si512(to, _mm512_permutexvar_epi16(pairs, both));
}

/* 32 dims of outputs [32][16], times share, to where each of n columns has them. */
INLINE void put_outputs(const float *o, floats16 share, bf16 *const at[16], int n, int d,
                        int stream) {
    __m512i lo[16], hi[16];
    for (int i = 0; i < 16; i++) {
        lo[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(o + i * 16), share);
        hi[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(o + 256 + i * 16), share);
    }
    turn_pairs(lo), turn_pairs(hi);
    for (int i = 0; i < n; i++) {
        __m512i out = (__m512i)_mm512_cvtne2ps_pbh((__m512)hi[i], (__m512)lo[i]);
        if (stream) _mm512_stream_si512((__m512i *)(at[i] + d), out);
        else _mm512_storeu_si512(at[i] + d, out);
    }
}

