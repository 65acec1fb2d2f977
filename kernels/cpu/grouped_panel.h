/* Packing a panel of the layout in grouped.h. */
#pragma once
#include "grouped.h"

#define HALF_TOP 15 /* scales in f16 are times a power of two that brings the largest below 2**15 */

/* Row of the weight that output n of the layout holds; -1: none. half: 0, or the number of rows of
 * each of two stacked matrices, whose rows then alternate by 16. */
INLINE int64_t row_of(const struct grouped *w, int64_t n, int64_t half) {
    if (n >= w->outs) return -1;
    return half ? (n & 16 ? half : 0) + n / 32 * 16 + n % 16 : n;
}

/* Eight vectors of codes of a block: of each row, its columns [k, k + COLUMNS). */
INLINE void gather(const uint8_t *const rows[OUTS], int64_t k, uint8_t v[8][LINE]) {
#ifdef __AVX2__
    for (int h = 0; h < OUTS; h += 8) {
        __m256i a[8], b[8]; /* a transpose of 8 x 8 words of four codes */
        for (int n = 0; n < 8; n++) a[n] = _mm256_loadu_si256((const __m256i *)(rows[h + n] + k));
        for (int n = 0; n < 8; n += 2) {
            b[n] = _mm256_unpacklo_epi32(a[n], a[n + 1]);
            b[n + 1] = _mm256_unpackhi_epi32(a[n], a[n + 1]);
        }
        for (int n = 0; n < 8; n += 4)
            for (int j = 0; j < 2; j++) {
                a[n + 2 * j] = _mm256_unpacklo_epi64(b[n + j], b[n + 2 + j]);
                a[n + 2 * j + 1] = _mm256_unpackhi_epi64(b[n + j], b[n + 2 + j]);
            }
        for (int j = 0; j < 4; j++) {
            __m256i *low = (__m256i *)(v[j] + 4 * h), *high = (__m256i *)(v[4 + j] + 4 * h);
            _mm256_storeu_si256(low, _mm256_permute2x128_si256(a[j], a[4 + j], 0x20));
            _mm256_storeu_si256(high, _mm256_permute2x128_si256(a[j], a[4 + j], 0x31));
        }
    }
#else
    for (int n = 0; n < OUTS; n++)
        for (int j = 0; j < 8; j++) memcpy(v[j] + 4 * n, rows[n] + k + 4 * j, 4);
#endif
}

/* A block of codes: of each row, its columns [k, k + COLUMNS). */
INLINE void pack_block(const uint8_t *const rows[OUTS], int64_t k, int64_t bits, uint8_t *to) {
    uint8_t v[8][LINE], line[LINE];
    if (bits == 8) {
        gather(rows, k, (uint8_t(*)[LINE])to);
        return;
    }
    gather(rows, k, v);
    if (bits == 5) {
        for (int i = 0; i < LINE; i++) line[i] = v[0][i] >> 4 & 1;
        for (int j = 1; j < 8; j++)
            for (int i = 0; i < LINE; i++) line[i] |= (uint8_t)((v[j][i] >> 4 & 1) << j);
        memcpy(to, line, LINE);
    }
    if (bits == 6)
        for (int h = 0; h < 2; h++) {
            for (int i = 0; i < LINE; i++) line[i] = v[4 * h][i] >> 4 & 3;
            for (int j = 1; j < 4; j++)
                for (int i = 0; i < LINE; i++)
                    line[i] |= (uint8_t)((v[4 * h + j][i] >> 4 & 3) << 2 * j);
            memcpy(to + h * LINE, line, LINE);
        }
    to += (bits - 4) * LINE;
    for (int l = 0; l < 4; l++, to += LINE) {
        for (int i = 0; i < LINE; i++)
            line[i] = (uint8_t)((v[2 * l][i] & 15) | v[2 * l + 1][i] << 4);
        memcpy(to, line, LINE);
    }
}

/* Scales and mins of a panel in their place. rows: of each, f32[groups * (1 + mins)]. */
INLINE void pack_scales(const struct grouped *w, const uint8_t *const rows[OUTS], int64_t panel) {
    struct place at = place_of(w, panel);
    int64_t groups = groups_of(w);
    float inverse = (float)(1 / w->factor);
    for (int64_t g = 0; g < groups; g++, at.scales += at.scales_step)
        for (int m = 0; m <= w->mins; m++) {
            float x[OUTS];
            for (int n = 0; n < OUTS; n++) memcpy(x + n, rows[n] + 4 * (g + m * groups), 4);
            if (!w->group) {
                memcpy(at.scales + 4 * m * OUTS, x, sizeof x);
                continue;
            }
            if (w->fp4) {
                uint32_t bits[OUTS];
                memcpy(bits, x, sizeof x);
                for (int n = 0; n < OUTS; n++) at.scales[n] = (uint8_t)(bits[n] >> 23);
                continue;
            }
            for (int n = 0; n < OUTS; n++) x[n] *= inverse;
#if defined(__AVX2__) && defined(__F16C__)
            for (int n = 0; n < OUTS; n += 8)
                _mm_storeu_si128((__m128i *)(at.scales + 2 * (m * OUTS + n)),
                                 _mm256_cvtps_ph(_mm256_loadu_ps(x + n), 0));
#else
            for (int n = 0; n < OUTS; n++) {
                uint16_t narrow = to_half(x[n]);
                memcpy(at.scales + 2 * (m * OUTS + n), &narrow, 2);
            }
#endif
        }
}

/* The largest magnitude, in f32's bits; what is not finite aside. */
INLINE uint32_t largest_of(const void *floats, int64_t count) {
    uint32_t top = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, (const uint8_t *)floats + 4 * i, 4);
        bits &= 0x7fffffff;
        bits = bits < 0x7f800000 ? bits : 0;
        top = bits > top ? bits : top;
    }
    return top;
}

/* The power of two that scales in f16 are times. largest: see `largest_of`. */
INLINE double factor_of(uint32_t largest) {
    float number;
    int exponent;
    memcpy(&number, &largest, 4);
    frexpf(number, &exponent);
    exponent -= HALF_TOP;
    return ldexp(1.0, exponent < -100 ? -100 : exponent);
}
