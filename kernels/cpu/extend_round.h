/* Rounds of keys as prompts' attention has them, for what must give the same bits. */
#pragma once
#include "common.h"

#define KEYS 128    /* keys per round of the online softmax */
#define SLACK 8.0f  /* how far, in bits, scores may pass the maximum subtracted */

#ifdef LATENT
#define WIDEST 1024 /* numbers of a row, which is key and value */
#else
#define WIDEST MAX_HEAD
#endif

/* A key or value of nobody's. */
static const bf16 zeros[WIDEST] __attribute__((aligned(64)));

/* Numbers in int8 as bf16. */
INLINE void widen_codes(const int8_t *codes, bf16 scale, int dim, bf16 *to) {
    float step = wide(scale);
    for (int d = 0; d < dim; d++) to[d] = narrow(codes[d] * step);
}

#ifdef __AVX2__
/* 8 x 8. */
INLINE void turn_floats(__m256 r[8]) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
            r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
        }
    for (int i = 0; i < 4; i++) t[i] = r[i], t[i + 4] = r[i + 4];
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
}
#endif

#ifdef __AVX512F__
/* 16 x 16 elements of 32 bits. */
INLINE void turn_pairs(__m512i r[16]) {
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
#endif
