/* Tiles where the processor has AVX512-BF16 and no AMX (Zen 4 and 5, Cooper Lake): see tiles.h.
 *
 * A product of tiles keeps its 16 rows of sums in registers and takes a pair of a row at a time, to
 * all columns: 256 instructions, which is what the processor does at one a cycle anyway, for 16
 * loads and stores of sums. An operand is not copied: a tile knows where it lies. */
#pragma once
#include <immintrin.h>
#include <stdint.h>

struct vector_tiles {
    float sums[8][256];
    const uint8_t *at[8];
    long stride[8];
    uint8_t rows[8];
};

static __thread struct vector_tiles own_tiles __attribute__((aligned(64)));

static inline int tiles_permitted(void) { return 1; }

/* Tile i has rows[i] rows. */
static inline void tiles_shape(const uint8_t rows[8]) {
    for (int i = 0; i < 8; i++) own_tiles.rows[i] = rows[i];
}

static inline void tiles_release(void) {}

/* sums += rows [0, n) of a by b. */
INLINE void dot_pairs(__m512 sums[16], const uint8_t *a, long stride, const uint8_t *b, long next,
                      const int n) {
#pragma GCC unroll 2
    for (int p = 0; p < 16; p++) {
        __m512bh pairs = (__m512bh)_mm512_loadu_si512(b + p * next);
#pragma GCC unroll 16
        for (int r = 0; r < n; r++) {
            int32_t pair;
            __builtin_memcpy(&pair, a + r * stride + 4 * p, 4);
            sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)_mm512_set1_epi32(pair), pairs);
        }
    }
}

INLINE void vector_dot(float *c, const uint8_t *a, long stride, const uint8_t *b, long next,
                       const int n) {
    __m512 sums[16];
#pragma GCC unroll 16
    for (int r = 0; r < n; r++) sums[r] = _mm512_load_ps(c + 16 * r);
    dot_pairs(sums, a, stride, b, next, n);
#pragma GCC unroll 16
    for (int r = 0; r < n; r++) _mm512_store_ps(c + 16 * r, sums[r]);
}

/* Products of so many tiles one after the other, rows 64 bytes apart, a_step and b_step bytes from
 * tile to tile: the sums stay in registers. */
static __attribute__((noinline)) void dot_chain(float *c, const uint8_t *a, long a_step,
                                                const uint8_t *b, long b_step, int steps,
                                                int fresh) {
    __m512 sums[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        sums[r] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(c + 16 * r);
    for (; steps > 0; steps--, a += a_step, b += b_step) dot_pairs(sums, a, 64, b, 64, 16);
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) _mm512_store_ps(c + 16 * r, sums[r]);
}

/* Functions, not inlined: a call is little beside 256 products, and there are many of them. */
static __attribute__((noinline)) void dot_full(float *c, const uint8_t *a, long stride,
                                               const uint8_t *b, long next) {
    vector_dot(c, a, stride, b, next, 16);
}

static __attribute__((noinline)) void dot_rows(float *c, const uint8_t *a, long stride,
                                               const uint8_t *b, long next, int rows) {
    for (; rows >= 8; rows -= 8, c += 128, a += 8 * stride) vector_dot(c, a, stride, b, next, 8);
    for (; rows >= 4; rows -= 4, c += 64, a += 4 * stride) vector_dot(c, a, stride, b, next, 4);
    for (; rows > 0; rows--, c += 16, a += stride) vector_dot(c, a, stride, b, next, 1);
}

INLINE void tile_dot(int c, int a, int b) {
    struct vector_tiles *t = &own_tiles;
    if (t->rows[a] == 16) dot_full(t->sums[c], t->at[a], t->stride[a], t->at[b], t->stride[b]);
    else dot_rows(t->sums[c], t->at[a], t->stride[a], t->at[b], t->stride[b], t->rows[a]);
}

INLINE void tile_sums(int t, const void *at, long stride) {
    for (int r = 0; r < own_tiles.rows[t]; r++)
        _mm512_store_ps(own_tiles.sums[t] + 16 * r,
                        _mm512_loadu_ps((const char *)at + r * stride));
}

INLINE void tile_store(int t, void *at, long stride) {
    for (int r = 0; r < own_tiles.rows[t]; r++)
        _mm512_storeu_ps((char *)at + r * stride, _mm512_load_ps(own_tiles.sums[t] + 16 * r));
}

INLINE void tile_zero(int t) {
    for (int r = 0; r < own_tiles.rows[t]; r++)
        _mm512_store_ps(own_tiles.sums[t] + 16 * r, _mm512_setzero_ps());
}

#define TILE_ZERO(t) tile_zero(t)
#define TILE_SUMS(t, from, apart) tile_sums(t, from, apart)
#define TILE_STORE(t, to, apart) tile_store(t, to, apart)
#define TILE_DOT(c, a, b) tile_dot(c, a, b)
#define TILE_LOAD(t, from, apart) \
    (own_tiles.at[t] = (const uint8_t *)(from), own_tiles.stride[t] = (apart))
#define TILE_STREAM(t, from, apart) TILE_LOAD(t, from, apart)
