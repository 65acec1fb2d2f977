/* AMX's tiles in memory, for processors that have none: -DEMULATED_TILES beside -mamx-bf16.
 *
 * What the instructions do, step by step, is their own description's (Intel, Software Developer's
 * Manual, TDPBF16PS): even and odd numbers of pairs are summed apart, from zero and in their order,
 * and only then added to the sums there were; subnormal numbers are zeros. What the processor
 * would refuse ends the process. For tests: products take three to four times as long as with
 * AVX512-BF16 (one thread of an AMD EPYC, 1,024 x 1,024, 1 to 512 rows). */
#pragma once
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A thread's. Each source file has its own, so that one which counts on another's ends the process. */
static _Thread_local struct tile_shapes tile_now;
static _Thread_local uint8_t tile_rows[8][16][64] __attribute__((aligned(64)));

static inline int tiles_permitted(void) { return 1; }

static inline void load_shapes(const struct tile_shapes *shapes) {
    memcpy(&tile_now, shapes, sizeof tile_now);
    memset(tile_rows, 0, sizeof tile_rows);
}

static inline void tile_need(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "emulated tiles: %s\n", what);
    abort();
}

static inline void tile_zero(int t) {
    tile_need(tile_now.palette == 1 && tile_now.rows[t], "a tile without a shape");
    memset(tile_rows[t], 0, sizeof tile_rows[t]);
}

static inline void tile_load(int t, const void *at, long stride) {
    tile_zero(t);
    for (int m = 0; m < tile_now.rows[t]; m++)
        memcpy(tile_rows[t][m], (const char *)at + m * stride, tile_now.bytes[t]);
}

static inline void tile_store(int t, void *at, long stride) {
    tile_need(tile_now.palette == 1 && tile_now.rows[t], "a tile without a shape");
    for (int m = 0; m < tile_now.rows[t]; m++)
        memcpy((char *)at + m * stride, tile_rows[t][m], tile_now.bytes[t]);
}

static __attribute__((unused)) void tile_dot(int c, int a, int b) {
    const struct tile_shapes *s = &tile_now;
    tile_need(s->palette == 1 && s->rows[c] && s->rows[a] == s->rows[c]
              && s->bytes[a] == 4 * s->rows[b] && s->bytes[b] == s->bytes[c],
              "shapes that do not go together");
    const unsigned modes = _mm_getcsr(); /* neither asked nor changed by the instruction */
    _mm_setcsr(0x9fc0);                  /* to nearest even, subnormals are zeros, no exceptions */
    __asm__ volatile("" : : : "memory"); /* what is multiplied is read after this, and stored */
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    for (int m = 0; m < s->rows[c]; m++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int p = 0; p < s->rows[b]; p++) {
            int pair;
            memcpy(&pair, tile_rows[a][m] + 4 * p, 4);
            const __m512i left = _mm512_set1_epi32(pair), right = _mm512_load_si512(tile_rows[b][p]);
            even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)),
                                   _mm512_castsi512_ps(_mm512_slli_epi32(right, 16)), even);
            odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(left, high)),
                                  _mm512_castsi512_ps(_mm512_and_si512(right, high)), odd);
        }
        const __m512 before = _mm512_load_ps(tile_rows[c][m]);
        _mm512_store_ps(tile_rows[c][m], _mm512_add_ps(before, _mm512_add_ps(even, odd)));
    }
    __asm__ volatile("" : : : "memory"); /* before this */
    _mm_setcsr(modes);
}

static inline void tiles_release(void) { memset(&tile_now, 0, sizeof tile_now); }

#define TILE_ZERO(t) tile_zero(t)
#define TILE_LOAD(t, at, stride) tile_load(t, at, stride)
#define TILE_SUMS(t, at, stride) tile_load(t, at, stride)
#define TILE_STREAM(t, at, stride) tile_load(t, at, stride)
#define TILE_STORE(t, at, stride) tile_store(t, at, stride)
#define TILE_DOT(c, a, b) tile_dot(c, a, b)
