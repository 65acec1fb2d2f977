/* fp32 in the bf16 of tiles, as sums of three bf16 (24 bits of mantissa: nothing is lost) or of two (16
 * bits, for what is rounded to bf16 in the end), and the vector arithmetic of a GatedDeltaNet
 * layer. */
#pragma once
#include "common.h"

#define TILE 512 /* bf16 of a tile */
#define FLOATS 256

INLINE __m512 wide_low(__m512i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)), 16));
}

INLINE __m512 wide_high(__m512i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1)), 16));
}

INLINE __m512 wide_at(const bf16 *x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}

/* 32 numbers, a before b, to `parts` times 32 bf16, `next` bf16 apart, the high ones first. */
INLINE void split_row(__m512 a, __m512 b, bf16 *to, int64_t next, const int parts) {
#pragma GCC unroll 3
    for (int i = 0; i < parts; i++, to += next) {
        __m512i h = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        _mm512_store_si512(to, h);
        a = _mm512_sub_ps(a, wide_low(h));
        b = _mm512_sub_ps(b, wide_high(h));
    }
}

/* Two rows of 16 numbers as a row of pairs. Bits are cut off, not rounded: three parts have all 24,
 * and nothing has to be put in another order. */
INLINE void split_pair(__m512 a, __m512 b, bf16 *to, int64_t next, const int parts) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
#pragma GCC unroll 3
    for (int i = 0; i < parts; i++, to += next) {
        __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
        __m512i below = _mm512_srli_epi32(x, 16);
        _mm512_store_si512(to, _mm512_ternarylogic_epi32(below, y, upper, 0xf8));
        a = _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_and_si512(x, upper)));
        b = _mm512_sub_ps(b, _mm512_castsi512_ps(_mm512_and_si512(y, upper)));
    }
}

/* A square of 16 x 16. */
INLINE void turn_square(__m512 r[16]) {
    __m512 t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512 a = _mm512_shuffle_f32x4(r[j], r[j + 4], 0x88);
        __m512 b = _mm512_shuffle_f32x4(r[j], r[j + 4], 0xdd);
        __m512 c = _mm512_shuffle_f32x4(r[j + 8], r[j + 12], 0x88);
        __m512 e = _mm512_shuffle_f32x4(r[j + 8], r[j + 12], 0xdd);
        t[j] = _mm512_shuffle_f32x4(a, c, 0x88);
        t[j + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
        t[j + 4] = _mm512_shuffle_f32x4(b, e, 0x88);
        t[j + 12] = _mm512_shuffle_f32x4(b, e, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

/* Operands of a product: tiles, in `parts`, so many bf16 apart. */
typedef struct {
    const bf16 *at;
    int64_t next;
} Split;

#define LOAD_TWO(first, second, x, part, other) \
    TILE_LOAD(first, (x) + (part), 64); \
    TILE_LOAD(second, (x) + (part) + (other), 64);
#define DOT_FOUR \
    TILE_DOT(0, 4, 6); \
    TILE_DOT(1, 4, 7); \
    TILE_DOT(2, 5, 6); \
    TILE_DOT(3, 5, 7);

/* c (+)= a b. a: [rows, steps] tiles, b: [columns, steps], c: [rows, columns], rows and columns
 * even. Of three parts all products are taken that fp32 would see, of two all but that of the low
 * ones. */
INLINE void multiply(Split a, Split b, float *c, int rows, int columns, int steps, const int parts,
                     const int more) {
    int64_t other = (int64_t)steps * TILE;
    for (int i = 0; i < rows; i += 2)
        for (int j = 0; j < columns; j += 2) {
            const bf16 *x = a.at + i * other, *y = b.at + j * other;
            float *to = c + (i * columns + j) * FLOATS, *under = to + columns * FLOATS;
            if (more) {
                TILE_SUMS(0, to, 64);
                TILE_SUMS(1, to + FLOATS, 64);
                TILE_SUMS(2, under, 64);
                TILE_SUMS(3, under + FLOATS, 64);
            } else {
                TILE_ZERO(0);
                TILE_ZERO(1);
                TILE_ZERO(2);
                TILE_ZERO(3);
            }
            for (int s = 0; s < steps; s++, x += TILE, y += TILE) {
                if (parts == 3) {
                    LOAD_TWO(4, 5, x, a.next, other)
                    LOAD_TWO(6, 7, y, b.next, other)
                    DOT_FOUR
                    LOAD_TWO(4, 5, x, 2 * a.next, other)
                    LOAD_TWO(6, 7, y, 0, other)
                    DOT_FOUR
                    LOAD_TWO(4, 5, x, a.next, other)
                } else {
                    LOAD_TWO(4, 5, x, a.next, other)
                    LOAD_TWO(6, 7, y, 0, other)
                }
                DOT_FOUR
                LOAD_TWO(4, 5, x, 0, other)
                DOT_FOUR
                LOAD_TWO(6, 7, y, b.next, other)
                DOT_FOUR
                if (parts == 3) {
                    LOAD_TWO(6, 7, y, 2 * b.next, other)
                    DOT_FOUR
                }
            }
            TILE_STORE(0, to, 64);
            TILE_STORE(1, to + FLOATS, 64);
            TILE_STORE(2, under, 64);
            TILE_STORE(3, under + FLOATS, 64);
        }
}

/* 2**t for t <= 126. */
INLINE __m512 two_to(__m512 t) {
    __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(t, n), p = _mm512_set1_ps(0.00015345812f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0013399931f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.009618489f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.055503286f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24022646f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931472f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(1)), n);
}

/* The same, 1e-7 off: enough where 1 is added. */
INLINE __m512 near_two_to(__m512 t) {
    __m512 f = _mm512_reduce_ps(t, 9), p = _mm512_set1_ps(0.00187757669f); /* t - floor(t) */
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.00898933969f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0558263175f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240153611f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693153083f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99999994f));
    return _mm512_scalef_ps(p, t);
}

/* 1 / (1 + e**-x): e**-x at most 2**100, so that nothing is infinite. */
INLINE __m512 sigmoid16(__m512 x) {
    __m512 t = _mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)), _mm512_set1_ps(100));
    __m512 d = _mm512_add_ps(_mm512_set1_ps(1), near_two_to(t)), r = _mm512_rcp14_ps(d);
    return _mm512_mul_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(2)));
}

/* x / (1 + e**-x) for what is rounded to bf16: 1e-4 off. */
INLINE __m512 silu_coarse(__m512 x) {
    __m512 e = exp2_lanes(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
    return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1), e)));
}

/* log(1 + e**x), from log u = log m + e log 2, m in [0.75, 1.5), and what 1 + e**x rounds off: an
 * addition the compiler does not see through, since it may reorder others. */
INLINE __m512 softplus16(__m512 x) {
    const __m512 one = _mm512_set1_ps(1);
    __m512 y = two_to(_mm512_mul_ps(_mm512_min_ps(x, _mm512_set1_ps(60)),
                                    _mm512_set1_ps(1.44269504f)));
    __m512 u = _mm512_add_round_ps(one, y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 lost = _mm512_sub_ps(y, _mm512_sub_ps(u, one));
    __m512 m = _mm512_getmant_ps(u, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_zero);
    __m512 e = _mm512_getexp_ps(u);
    e = _mm512_mask_add_ps(e, _mm512_cmp_ps_mask(m, one, _CMP_LT_OQ), e, one);
    __m512 f = _mm512_sub_ps(m, one), q = _mm512_set1_ps(-0.04507493f);
    q = _mm512_fmadd_ps(q, f, _mm512_set1_ps(0.104630314f));
    q = _mm512_fmadd_ps(q, f, _mm512_set1_ps(-0.13161191f));
    q = _mm512_fmadd_ps(q, f, _mm512_set1_ps(0.14478393f));
    q = _mm512_fmadd_ps(q, f, _mm512_set1_ps(-0.16647312f));
    q = _mm512_fmadd_ps(q, f, _mm512_set1_ps(0.19990861f));
    q = _mm512_fmadd_ps(q, f, _mm512_set1_ps(-0.25000095f));
    q = _mm512_fmadd_ps(q, f, _mm512_set1_ps(0.3333345f));
    __m512 square = _mm512_mul_ps(f, f);
    q = _mm512_fmadd_ps(q, _mm512_mul_ps(square, f), _mm512_div_ps(lost, u));
    q = _mm512_fnmadd_ps(square, _mm512_set1_ps(0.5f), q);
    q = _mm512_add_ps(_mm512_fmadd_ps(e, _mm512_set1_ps(0.69314718f), q), f);
    return _mm512_mask_mov_ps(q, _mm512_cmp_ps_mask(x, _mm512_set1_ps(20), _CMP_GT_OQ), x);
}
