/* Keys and queries in 8 bits, and their products: half of SageAttention (arXiv 2410.02367).
 *
 * A number is its code, -127 to 127, times a scale of its own token and head. Keys are coded less a
 * mean that is fixed for their head, so that a bias which all of them share does not use up the
 * codes: it adds the same to all scores of a query, which a softmax does not see. A token's codes
 * follow from it alone, wherever a chunk begins and whatever is beside it.
 *
 * VNNI multiplies unsigned by signed bytes: queries are kept 128 higher, and the sums that stand for
 * it, -128 times the sum of a key's codes, are what its products begin with. */
#pragma once
#include "common.h"

#define LEAST 1e-30f /* of the largest number of a row: below it all its codes are 0 */

#ifdef FLOATS16_512
#define KEYS_AT_ONCE 8
INLINE wholes all_wholes(int32_t x) { return _mm512_set1_epi32(x); }
INLINE wholes add_wholes(wholes x, wholes y) { return _mm512_add_epi32(x, y); }
INLINE wholes to_wholes(floats16 x) { return _mm512_cvtps_epi32(x); }
INLINE floats16 to_floats(wholes x) { return _mm512_cvtepi32_ps(x); }
INLINE int32_t sum_wholes(wholes x) { return _mm512_reduce_add_epi32(x); }
INLINE void store_codes(int8_t *to, wholes x) {
    _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(x));
}
/* The larger by magnitude, as positive numbers; NaN is larger than any. */
INLINE wholes larger_bits(wholes most, floats16 x) {
    wholes bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    return _mm512_max_epi32(most, bits);
}
INLINE int32_t largest_bits(wholes x) { return _mm512_reduce_max_epi32(x); }
/* sums += products of four codes, of 16 queries and one key. */
INLINE wholes dot_codes(wholes sums, wholes queries, int32_t key) {
    return _mm512_dpbusd_epi32(sums, queries, _mm512_set1_epi32(key));
}
#else
#define KEYS_AT_ONCE 4
INLINE wholes all_wholes(int32_t x) { return (wholes){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE wholes add_wholes(wholes x, wholes y) {
    return (wholes){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
INLINE wholes to_wholes(floats16 x) {
    return (wholes){_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
INLINE floats16 to_floats(wholes x) {
    return (floats16){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
INLINE int32_t sum_wholes(wholes x) {
    __m256i both = _mm256_add_epi32(x.a, x.b);
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
INLINE void store_codes(int8_t *to, wholes x) {
    __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    __m128i lo = _mm256_castsi256_si128(pairs), hi = _mm256_extracti128_si256(pairs, 1);
    _mm_storeu_si128((__m128i *)to, _mm_packs_epi16(lo, hi));
}
INLINE wholes larger_bits(wholes most, floats16 x) {
    __m256i sign = _mm256_set1_epi32(0x7fffffff);
    return (wholes){_mm256_max_epi32(most.a, _mm256_and_si256(_mm256_castps_si256(x.a), sign)),
                    _mm256_max_epi32(most.b, _mm256_and_si256(_mm256_castps_si256(x.b), sign))};
}
INLINE int32_t largest_bits(wholes x) {
    int32_t every[8], most = 0;
    _mm256_storeu_si256((__m256i *)every, _mm256_max_epi32(x.a, x.b));
    for (int i = 0; i < 8; i++) most = every[i] > most ? every[i] : most;
    return most;
}
INLINE wholes dot_codes(wholes sums, wholes queries, int32_t key) {
    __m256i four = _mm256_set1_epi32(key);
    return (wholes){_mm256_dpbusd_avx_epi32(sums.a, queries.a, four),
                    _mm256_dpbusd_avx_epi32(sums.b, queries.b, four)};
}
#endif

/* The codes of dim numbers, less their mean where there is one; their scale, and their sum. NaN and
 * infinite numbers leave a scale that is one. */
INLINE float code_numbers(const bf16 *at, const float *mean, int dim, int8_t *to, int32_t *sum) {
    float numbers[MAX_DIM], largest;
    wholes most = all_wholes(0), total = all_wholes(0);
    for (int d = 0; d < dim; d += 16) {
        floats16 x = wide_lanes(at + d);
        if (mean) x = sub_lanes(x, load_lanes(mean + d));
        store_lanes(numbers + d, x);
        most = larger_bits(most, x);
    }
    int32_t bits = largest_bits(most);
    memcpy(&largest, &bits, 4);
    floats16 by = all_lanes(largest < LEAST ? 0 : 127.0f / largest);
    for (int d = 0; d < dim; d += 16) {
        wholes codes = to_wholes(mul_lanes(load_lanes(numbers + d), by));
        total = add_wholes(total, codes);
        store_codes(to + d, codes);
    }
    *sum = sum_wholes(total);
    return largest / 127.0f;
}

/* 32 keys: [32][dim] codes, and what their products begin with and their scales, 32 of each. */
static void pack_codes(const bf16 *const at[32], const float *mean, int dim, int8_t *to) {
    int32_t *begin = (int32_t *)(to + 32 * dim), sum;
    float *scales = (float *)(begin + 32);
    for (int i = 0; i < 32; i++) {
        scales[i] = code_numbers(at[i], mean, dim, to + i * dim, &sum);
        begin[i] = -128 * sum;
    }
}

/* The same of codes that lie in the pages, with their scales. */
static void take_codes(const bf16 *const at[32], const bf16 *const scales[32], int dim, int8_t *to) {
    int32_t *begin = (int32_t *)(to + 32 * dim);
    float *steps = (float *)(begin + 32);
    for (int i = 0; i < 32; i++) {
        const int8_t *codes = (const int8_t *)at[i];
        int32_t sum = 0;
        for (int d = 0; d < dim; d++) to[i * dim + d] = codes[d], sum += codes[d];
        begin[i] = -128 * sum, steps[i] = wide(*scales[i]);
    }
}

/* Into [dim / 4][16 columns][4]. */
INLINE floats16 pack_queries(const bf16 *const at[16], int dim, int8_t *query) {
    int8_t codes[4][MAX_DIM];
    float scales[16];
    int32_t sum;
    const __m128i up = _mm_set1_epi8(-128);
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 4; j++) {
            float scale = code_numbers(at[i + j], 0, dim, codes[j], &sum);
            scales[i + j] = scale < LEAST ? LEAST : scale; /* 0 times a masked score would be NaN */
        }
        for (int d = 0; d < dim; d += 16) {
            __m128 r[4];
            for (int j = 0; j < 4; j++)
                r[j] = _mm_castsi128_ps(_mm_xor_si128(
                    _mm_loadu_si128((const __m128i *)(codes[j] + d)), up));
            _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
            for (int j = 0; j < 4; j++)
                _mm_storeu_ps((float *)(query + (d + 4 * j) * 16 + 4 * i), r[j]);
        }
    }
    return load_lanes(scales);
}

/* Scores of n keys and 16 * m columns, less the columns' scale; `apart` from the first 16 to the
 * others. */
INLINE void score_keys(const int n, const int m, const int8_t *keys, const int32_t *begin,
                       const float *scales, const int8_t *query, float *scores, int64_t apart,
                       int dim) {
    wholes s[KEYS_AT_ONCE][2];
#pragma GCC unroll 8
    for (int r = 0; r < n; r++)
#pragma GCC unroll 2
        for (int w = 0; w < m; w++) s[r][w] = all_wholes(begin[r]);
#pragma GCC unroll 2
    for (int d = 0; d < dim; d += 4) {
        wholes q[2];
#pragma GCC unroll 2
        for (int w = 0; w < m; w++)
            q[w] = load_wholes((const int32_t *)(query + w * dim * 16 + d * 16));
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) {
            int32_t four;
            memcpy(&four, keys + r * dim + d, 4);
#pragma GCC unroll 2
            for (int w = 0; w < m; w++) s[r][w] = dot_codes(s[r][w], q[w], four);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < n; r++)
#pragma GCC unroll 2
        for (int w = 0; w < m; w++)
            store_lanes(scores + w * apart + r * 16,
                        mul_lanes(to_floats(s[r][w]), all_lanes(scales[r])));
}

/* Functions, not inlined: a call is little beside what they do. */
static __attribute__((noinline)) void score_two(const int8_t *keys, const int8_t *query,
                                                float *scores, int dim) {
    const int32_t *begin = (const int32_t *)(keys + 32 * dim);
    const float *scales = (const float *)(begin + 32);
    for (int r = 0; r < 32; r += KEYS_AT_ONCE)
#ifdef FLOATS16_512
        score_keys(KEYS_AT_ONCE, 2, keys + r * dim, begin + r, scales + r, query, scores + r * 16,
                   KEYS * 16, dim);
#else
        for (int w = 0; w < 2; w++)
            score_keys(KEYS_AT_ONCE, 1, keys + r * dim, begin + r, scales + r,
                       query + w * dim * 16, scores + w * KEYS * 16 + r * 16, 0, dim);
#endif
}

static __attribute__((noinline)) void score_one(const int8_t *keys, const int8_t *query,
                                                float *scores, int dim) {
    const int32_t *begin = (const int32_t *)(keys + 32 * dim);
    const float *scales = (const float *)(begin + 32);
    for (int r = 0; r < 32; r += KEYS_AT_ONCE)
        score_keys(KEYS_AT_ONCE, 1, keys + r * dim, begin + r, scales + r, query, scores + r * 16, 0,
                   dim);
}
