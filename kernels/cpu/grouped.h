/* A weight of codes in 4, 5, 6 or 8 bits whose groups of columns share a scale, as the products read
 * it; what it means is in kernels/grouped_rows.py.
 *
 * Panels of 16 outputs (N is padded with zeros), two of them side by side: of every two panels come
 * blocks of 32 columns, that of the first panel, then that of the second. Only the last panel may
 * stand alone. A block is bits * 64 bytes and makes eight vectors of 64 codes, vector v those of
 * columns 4v to 4v + 3, four bytes an output, as vpdpbusd takes them:
 *
 *   8 bits  the vectors
 *   4 bits  four lines; line i holds vector 2i in its low nibbles and vector 2i + 1 in its high ones
 *   5 bits  a line whose bit v is the fifth bit of vector v, then the lines of 4 bits
 *   6 bits  two lines; line h holds in its bits 2j, 2j + 1 the upper bits of vector 4h + j; then
 *           the lines of 4 bits
 *
 * Scales lie apart, in the same order: for every group, of the first panel and of the second, 16
 * scales and, where there are any, 16 mins: f16 (times `factor`, a power of two) or, where a row has
 * one scale (group 0), f32.
 *
 * Of MXFP4 (fp4) codes of 4 bits are numbers in e2m1, and scales are bytes in e8m0, powers of two.
 * They are multiplied as integers too: twice the number, and 12. */
#pragma once
#include "common.h"
#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define OUTS 16  /* of a panel */
#define COLUMNS 32 /* of a block */
#define LINE 64

/* Filled by kernels/cpu/grouped_native.py: nine 64-bit words, and the factor. */
struct grouped {
    uint8_t *codes, *scales;
    int64_t outs, ins, bits, group, mins, zero, fp4;
    double factor;
};

/* How products read codes: their bits, or FP4, which are 4. */
enum { FP4 = 32 + 4 };
INLINE int reading_of(const struct grouped *w) { return w->fp4 ? FP4 : (int)w->bits; }
#define WIDTH(bits) ((bits) & 15)

#define FP4_ZERO 12
static const uint8_t fp4_codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

INLINE int64_t panels_of(const struct grouped *w) { return (w->outs + OUTS - 1) / OUTS; }
INLINE int64_t columns_each(const struct grouped *w) { return w->group ? w->group : w->ins; }
INLINE int64_t groups_of(const struct grouped *w) { return w->ins / columns_each(w); }

/* Bytes of the scales (and mins) of a group of a panel. */
INLINE int64_t scale_bytes(const struct grouped *w) {
    return OUTS * (w->fp4 ? 1 : w->group ? 2 : 4) * (1 + w->mins);
}

/* Where a panel's blocks and scales begin, and how far apart they are. */
struct place { uint8_t *codes, *scales; int64_t codes_step, scales_step; };

INLINE struct place place_of(const struct grouped *w, int64_t panel) {
    int64_t both = panel / 2 * 2, second = panel % 2, count = panels_of(w) - both >= 2 ? 2 : 1;
    int64_t block = w->bits * LINE, scale = scale_bytes(w);
    return (struct place){w->codes + both * (w->ins / COLUMNS) * block + second * block,
                          w->scales + both * groups_of(w) * scale + second * scale,
                          count * block, count * scale};
}

/* A power of two in e8m0; the least is 0. */
INLINE float from_power(uint8_t power) {
    uint32_t bits = (uint32_t)power << 23;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Byte i of vector v of a block. bits: see `reading_of`. */
INLINE int code_at(const uint8_t *block, int64_t bits, int v, int i) {
    if (bits == FP4) return fp4_codes[block[v / 2 * LINE + i] >> 4 * (v % 2) & 15];
    if (bits == 8) return block[v * LINE + i];
    int upper = bits == 5 ? (block[i] >> v & 1) << 4
              : bits == 6 ? (block[v / 4 * LINE + i] >> 2 * (v % 4) & 3) << 4 : 0;
    return upper | (block[(bits - 4 + v / 2) * LINE + i] >> 4 * (v % 2) & 15);
}

INLINE float from_half(uint16_t half) {
#ifdef __F16C__
    return _cvtsh_ss(half);
#else
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits = rest << 13;
    float y;
    if (rest >= 0x7c00) bits += 0x70000000;
    else if (rest >= 0x400) bits += 0x38000000;
    else {
        y = (float)rest * 5.9604644775390625e-8f; /* 2**-24 */
        memcpy(&bits, &y, 4);
    }
    bits |= sign;
    memcpy(&y, &bits, 4);
    return y;
#endif
}

/* To nearest even. */
INLINE uint16_t to_half(float x) {
#ifdef __F16C__
    return _cvtss_sh(x, 0);
#else
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { /* below 2**-14: counted in 2**-24 */
        memcpy(&x, &bits, 4);
        return (uint16_t)(sign | (uint32_t)rintf(x * 16777216.0f));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | (bits - 0x38000000) >> 13);
#endif
}
