/* Chunks of tokens made ready: what a call and its rows are, a thread's scratch, and its keys and
 * values, in whatever form extend_tiles.h or extend_floats.h multiplies. */
#pragma once
#include "extend_round.h"
#ifdef TILES
typedef bf16 element;
#define PACKED (1 << 18)          /* elements of the keys packed at once: with the values, 1 MB */
#else
typedef float element;
#ifdef LATENT
#define PACKED (1 << 17)          /* a round of the widest rows */
#else
#define PACKED (1 << 16)          /* the same: half of it, as second caches are smaller there */
#endif
#endif

#ifdef SAGE
typedef int8_t factor;            /* what keys and queries are multiplied as */
#define KEY_ROOM(dim) ((dim) + 8) /* of a packed key: see sage_codes.h */
#else
typedef element factor;
#define KEY_ROOM(dim) (dim)
#endif

#define COLS 32                   /* queries per round: two tiles */
#ifdef LATENT
#define MAX_COLUMNS 2048          /* of a task: bounds its sums and outputs to some megabytes */
#else
#define MAX_COLUMNS 4096
#endif
#define STREAM_FROM (1 << 20)     /* elements of a result that caches would not keep */

struct row { int64_t table, first, start, count; };

struct call {
    const bf16 *q;
    const void *pages;
    const bf16 *scales; /* of codes; 0: pages are bf16 */
    bf16 *out;
    int64_t q_stride;
    int heads, kv_heads, dim, page_bits, window, stream; /* stream: see `finish` */
    float scale; /* of scores, in bits; of capped ones, before that */
    const float *means; /* of keys, [kv_heads, dim]: see sage.c */
    int row;            /* numbers of a row, `dim` rounded down: see latent.c */
    const float *sinks; /* see `struct paged_decode`; so is cap, but in bits */
    float cap;
    const float *slopes;
};

/* What a thread works on; all in one aligned piece that grows and stays. */
struct scratch {
    factor *keys, *query;
    element *values, *weights;
    float *scores, *state;
};

/* Keys and values of 32 tokens of one head, those of `zeros` as zeros, to the place of token `in` of
 * a thread's scratch. */
INLINE void pack_tokens(const bf16 *const at[32], int apart, int dim, int64_t in, struct scratch *s);

/* Queries of 16 columns; what scores of each column are to be multiplied by. */
INLINE floats16 pack_queries(const bf16 *const at[16], int dim, factor *query);
#ifdef SAGE
#include "sage_codes.h"
#endif

#ifdef LATENT
/* Rows of 32 tokens, but for `zeros`, as bf16 with zeros behind them; scales: of codes, or 0. */
static void widen_rows(const bf16 *at[32], const bf16 *const scales[32], int row, int dim,
                       bf16 wider[32][WIDEST]) {
    for (int i = 0; i < 32; i++) {
        if (at[i] == zeros) continue;
        if (scales[i]) widen_codes((const int8_t *)at[i], *scales[i], row, wider[i]);
        else memcpy(wider[i], at[i], row * sizeof(bf16));
        memset(wider[i] + row, 0, (dim - row) * sizeof(bf16));
        at[i] = wider[i];
    }
}
#else
/* Codes of keys and values of 32 tokens as bf16, but for `zeros`; scales: of each token's. */
static void widen(const bf16 *at[32], const bf16 *const scales[32], int kv_heads, int dim,
                  bf16 wider[32][2 * MAX_HEAD]) {
    for (int i = 0; i < 32; i++) {
        if (at[i] == zeros) continue;
        const int8_t *codes = (const int8_t *)at[i];
        for (int both = 0; both < 2; both++)
            widen_codes(codes + both * kv_heads * dim, scales[i][both * kv_heads], dim,
                        wider[i] + both * dim);
        at[i] = wider[i];
    }
}
#endif

/* Packs tokens begin..end; those before `low`, and those up to a whole number of tiles after `end`,
 * as zeros: what lies in their places is not read. */
static void pack(const struct call *c, const struct row *row, int k, int64_t begin, int64_t end,
                 int64_t low, struct scratch *s) {
    const int64_t size = c->scales ? 1 : sizeof(bf16), inside = (1 << c->page_bits) - 1;
#ifdef LATENT
    const int64_t rows = 1, stride = c->row * size;
    bf16 wider[32][WIDEST] __attribute__((aligned(64)));
#else
    const int64_t rows = 2 * c->kv_heads, stride = rows * c->dim * size;
    bf16 wider[32][2 * MAX_HEAD] __attribute__((aligned(64)));
#endif
    const char *pages = (const char *)c->pages + k * c->dim * size;
    const int32_t *table = (const int32_t *)row->table;
    for (int64_t j = begin; j < end; j += 32) {
        const bf16 *at[32], *scales[32];
        for (int i = 0; i < 32; i++) {
            int64_t p = j + i, token = 0;
            if (p >= low && p < end)
                token = ((int64_t)table[p >> c->page_bits] << c->page_bits) + (p & inside);
            at[i] = p < low || p >= end ? zeros : (const bf16 *)(pages + token * stride);
            scales[i] = c->scales ? c->scales + token * rows + k : 0;
        }
#ifdef SAGE
        factor *keys = s->keys + (j - begin) * KEY_ROOM(c->dim);
        if (c->scales) take_codes(at, scales, c->dim, keys);
        else pack_codes(at, c->means ? c->means + k * c->dim : 0, c->dim, keys);
#endif
#ifdef LATENT
        if (c->scales || c->row < c->dim) widen_rows(at, scales, c->row, c->dim, wider);
        pack_tokens(at, 0, c->dim, j - begin, s);
#else
        if (c->scales) widen(at, scales, c->kv_heads, c->dim, wider);
        pack_tokens(at, c->scales ? c->dim : c->kv_heads * c->dim, c->dim, j - begin, s);
#endif
    }
}
