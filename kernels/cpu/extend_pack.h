/* Chunks of tokens made ready for tiles: what a call and its rows are, a thread's scratch, and keys,
 * values and queries as tiles. Include only under `#ifdef TILES`. */
#pragma once
#include "common.h"

#define COLS 32                   /* queries per round: two tiles */
#define KEYS 128                  /* keys per round of the online softmax */
#define PACKED (1 << 18)          /* elements of the keys packed at once: with the values, 1 MB */
#define MAX_COLUMNS 4096          /* of a task: bounds its sums and outputs to some megabytes */
#define STREAM_FROM (1 << 20)     /* elements of a result that caches would not keep */
#define TILE 512                  /* elements of a bf16 tile */
#define SLACK 8.0f                /* how far, in bits, scores may pass the maximum subtracted */

struct row { int64_t table, first, start, count; };

struct call {
    const bf16 *q, *pages;
    bf16 *out;
    int64_t q_stride;
    int heads, kv_heads, dim, page_bits, window, stream; /* stream: see `finish` */
    float scale; /* of scores, in bits */
};

/* What a thread works on; all in one aligned piece that grows and stays. */
struct scratch {
    bf16 *keys, *values, *query, *weights;
    float *scores, *state;
};

static const bf16 zeros[MAX_DIM] __attribute__((aligned(64)));

/* 16 x 16 elements of 32 bits. */
INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 4) {
        __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]);
        __m512i d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
        t[i] = _mm512_unpacklo_epi64(a, c), t[i + 1] = _mm512_unpackhi_epi64(a, c);
        t[i + 2] = _mm512_unpacklo_epi64(b, d), t[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
        __m512i b = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        __m512i d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
        r[i] = _mm512_shuffle_i32x4(a, c, 0x88), r[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

/* Keys and values of 32 tokens of one head into tiles: keys [dim / 32][2][16 keys][32], values
 * [dim / 32] x `step` elements, each [2][16 dims][32 keys]. */
INLINE void pack_tokens(const bf16 *const at[32], int apart, int dim, bf16 *keys, bf16 *values,
                        int64_t step) {
    for (int d = 0; d < dim; d += 32) {
        for (int i = 0; i < 32; i++)
            _mm512_store_si512(keys + (d * 2 + (i >> 4) * 32) * 16 + (i & 15) * 32,
                               _mm512_loadu_si512(at[i] + d));
        __m512i lo[16], hi[16];
        for (int i = 0; i < 16; i++) {
            const bf16 *a = at[2 * i], *b = at[2 * i + 1];
            __m512i x = _mm512_loadu_si512((a == zeros ? a : a + apart) + d);
            __m512i y = _mm512_loadu_si512((b == zeros ? b : b + apart) + d);
            lo[i] = _mm512_unpacklo_epi16(x, y), hi[i] = _mm512_unpackhi_epi16(x, y);
        }
        transpose(lo), transpose(hi);
        bf16 *tile = values + d / 32 * step;
        for (int i = 0; i < 16; i++) {
            int place = (i >> 2) * 8 + (i & 3);
            _mm512_store_si512(tile + place * 32, lo[i]);
            _mm512_store_si512(tile + (place + 4) * 32, hi[i]);
        }
    }
}

/* Packs tokens begin..end; those before `low`, and those up to a whole number of tiles after `end`,
 * as zeros: what lies in their places is not read. */
static void pack(const struct call *c, const struct row *row, int k, int64_t begin, int64_t end,
                 int64_t low, struct scratch *s) {
    int64_t stride = (int64_t)2 * c->kv_heads * c->dim, inside = (1 << c->page_bits) - 1;
    const int32_t *table = (const int32_t *)row->table;
    for (int64_t j = begin; j < end; j += 32) {
        const bf16 *at[32];
        for (int i = 0; i < 32; i++) {
            int64_t p = j + i;
            at[i] = p < low || p >= end ? zeros
                : c->pages + (((int64_t)table[p >> c->page_bits] << c->page_bits) + (p & inside))
                    * stride + k * c->dim;
        }
        int64_t in = j - begin, block = in / KEYS, part = in % KEYS / 32;
        pack_tokens(at, c->kv_heads * c->dim, c->dim, s->keys + in * c->dim,
                    s->values + block * KEYS * c->dim + part * 2 * TILE, KEYS * 32);
    }
}

/* Queries of 16 columns into tiles [dim / 32][16 pairs of dims][16 columns]. */
INLINE void pack_queries(const bf16 *const at[16], int dim, bf16 *query) {
    for (int d = 0; d < dim; d += 32) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(at[i] + d);
        transpose(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512(query + d * 16 + i * 32, r[i]);
    }
}
