/* Inputs of products with codes: bf16 to 8 bits, each token and group of columns by its own largest
 * number, TOKENS side by side as the products read them. A token that was quantised before, for all
 * products that take it (quantised_rows.c), is brought into that order: the codes are the same. */
#pragma once
#include "grouped_lanes.h"

#define TINY 1.5e-36f    /* what is smaller has no inverse in f32: taken as 0 */
#define MAX_SHARED 2048 /* groups of columns of an input, each of COLUMNS at least */

/* At most TOKENS quantised tokens, `count` of them. */
struct tokens {
    int32_t *fours;  /* [ins / 4, count]: four columns each */
    float *scales;   /* [groups, count] */
    int32_t *starts; /* [groups, count]: -zero times the sum of a group; with mins f32, that sum times
                        the scale */
    int count;
};

/* Bytes of a quantised token. */
INLINE int64_t token_bytes(const struct grouped *w) { return w->ins + 8 * groups_of(w); }

/* Those whose first is number `at` of a pass. */
INLINE struct tokens tokens_at(const struct grouped *w, uint8_t *scratch, int64_t at, int64_t rows) {
    int count = rows - at < TOKENS ? (int)(rows - at) : TOKENS;
    uint8_t *own = scratch + at * token_bytes(w), *scales = own + count * w->ins;
    return (struct tokens){(int32_t *)own, (float *)scales,
                           (int32_t *)(scales + 4 * count * groups_of(w)), count};
}

/* The largest magnitude, as bits of bf16: of NaN, were there any. count: a multiple of 32. */
INLINE uint16_t largest_of(const bf16 *x, int64_t count) {
#ifdef VNNI
    __m512i top = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 32)
        top = _mm512_max_epu16(top, _mm512_and_si512(_mm512_loadu_si512(x + i),
                                                     _mm512_set1_epi16(0x7fff)));
    __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(top), _mm512_extracti64x4_epi64(top, 1));
    __m128i few = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    few = _mm_minpos_epu16(_mm_xor_si128(few, _mm_set1_epi16(-1)));
    return (uint16_t)~_mm_extract_epi16(few, 0);
#else
    uint16_t top = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t bits = x[i] & 0x7fff;
        top = bits > top ? bits : top;
    }
    return top;
#endif
}

/* Columns of an input that share a scale. */
INLINE int64_t columns_shared(const struct grouped *w) {
    return columns_each(w) < COLUMNS ? COLUMNS : columns_each(w);
}

/* The scale of a group with this largest number, and what its columns are times. */
INLINE float scale_of(float largest) { return largest < TINY ? 0 : largest / 127; }
INLINE float inverse_of(float largest) { return largest < TINY ? 0 : 127 / largest; }

/* Scales of a token, `apart` numbers from group to group, and what its columns are times. */
static void scale_token(const struct grouped *w, const bf16 *x, float *inverses, float *to,
                        int64_t apart) {
    float worth[MAX_SHARED], factor = w->group ? (float)w->factor : 1;
    int64_t shared = columns_shared(w), count = w->ins / shared, repeat = shared / columns_each(w);
    for (int64_t s = 0; s < count; s++) inverses[s] = wide(largest_of(x + s * shared, shared));
    for (int64_t s = 0; s < count; s++) {
        float largest = inverses[s];
        worth[s] = scale_of(largest) * factor;
        inverses[s] = inverse_of(largest);
    }
    for (int64_t s = 0; s < count; s++)
        for (int64_t i = 0; i < repeat; i++, to += apart) *to = worth[s];
}

#ifdef VNNI
/* How 16 columns of so many tokens are put side by side. */
struct order { __m512i from[2]; __mmask16 some[2]; };

INLINE struct order order_of(const int count) {
    int32_t from[32] = {0};
    for (int i = 0; i < 4 * count; i++) from[i] = i % count * 4 + i / count;
    const int more = 4 * count - 16;
    return (struct order){{_mm512_loadu_si512(from), _mm512_loadu_si512(from + 16)},
                          {more < 0 ? (__mmask16)((1 << 4 * count) - 1) : 0xffff,
                           more > 0 ? (__mmask16)((1 << more) - 1) : 0}};
}

INLINE void put_columns(const __m128i q[8], const struct order *order, int32_t *to) {
    __m512i all[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++)
        all[h] = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm256_set_m128i(q[4 * h + 1], q[4 * h])),
            _mm256_set_m128i(q[4 * h + 3], q[4 * h + 2]), 1);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++)
        if (order->some[h])
            _mm512_mask_storeu_epi32(to + 16 * h, order->some[h],
                                     _mm512_permutex2var_epi32(all[0], order->from[h], all[1]));
}

/* 16 columns of a token. */
INLINE __m128i sixteen_codes(const bf16 *x, __m512 times) {
    __m256i some16 = _mm256_loadu_si256((const __m256i *)x);
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(some16), 16);
    __m512 v = _mm512_mul_ps(_mm512_castsi512_ps(bits), times);
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v));
}

INLINE void codes_of(const bf16 *x, float times, int8_t *to) {
    _mm_storeu_si128((__m128i *)to, sixteen_codes(x, _mm512_set1_ps(times)));
}

/* Columns [k, k + n) of each token, with their inverses. */
INLINE void quantise_columns(const bf16 *const x[TOKENS], const int count, int64_t k, int64_t n,
                             const float *inverses[TOKENS], int32_t *to) {
    const struct order order = order_of(count);
    __m512 times[TOKENS];
#pragma GCC unroll 6
    for (int t = 0; t < count; t++) times[t] = _mm512_set1_ps(*inverses[t]);
    for (int64_t end = k + n; k < end; k += 16, to += 4 * count) {
        __m128i q[8];
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++)
            q[t] = t < count ? sixteen_codes(x[t] + k, times[t]) : _mm_setzero_si128();
        put_columns(q, &order, to);
    }
}

/* Codes of so many tokens, side by side. */
INLINE void arrange_columns(const int8_t *const codes[TOKENS], const int count, int64_t ins,
                            int32_t *to) {
    const struct order order = order_of(count);
    for (int64_t k = 0; k < ins; k += 16, to += 4 * count) {
        __m128i q[8];
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++)
            q[t] = t < count ? _mm_loadu_si128((const __m128i *)(codes[t] + k))
                             : _mm_setzero_si128();
        put_columns(q, &order, to);
    }
}

/* What the sums of groups of all tokens are for. */
INLINE void sum_groups(const struct grouped *w, const struct tokens *x) {
    const int count = x->count;
    const int64_t steps = columns_each(w) / 4;
    const __mmask8 some = (__mmask8)((1 << count) - 1);
    const __m256i ones = _mm256_set1_epi8(1);
    const int32_t *from = x->fours;
    for (int64_t g = 0; g < groups_of(w); g++) {
        __m256i sums[4];
        for (int i = 0; i < 4; i++) sums[i] = _mm256_setzero_si256();
        for (int64_t k = 0; k < steps; k += 4)
            for (int i = 0; i < 4; i++, from += count)
                sums[i] = _mm256_dpbusd_epi32(sums[i], ones, _mm256_maskz_loadu_epi32(some, from));
        __m256i sum = _mm256_add_epi32(_mm256_add_epi32(sums[0], sums[1]),
                                       _mm256_add_epi32(sums[2], sums[3]));
        __m256 scales = _mm256_maskz_loadu_ps(some, x->scales + g * count);
        __m256i worth = _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), scales));
        __m256i start = _mm256_mullo_epi32(sum, _mm256_set1_epi32(-(int)w->zero));
        _mm256_mask_storeu_epi32(x->starts + g * count, some, w->mins ? worth : start);
    }
}
#else
INLINE void codes_of(const bf16 *x, float times, int8_t *to) {
    for (int i = 0; i < 16; i++) to[i] = (int8_t)(int32_t)rintf(wide(x[i]) * times);
}

INLINE void quantise_columns(const bf16 *const x[TOKENS], const int count, int64_t k, int64_t n,
                             const float *inverses[TOKENS], int32_t *to) {
    for (int t = 0; t < count; t++) {
        const bf16 *own = x[t] + k;
        const float times = *inverses[t];
        for (int64_t c = 0; c < n; c += 16) {
            int8_t q[16];
            codes_of(own + c, times, q);
            for (int i = 0; i < 4; i++) memcpy(to + (c / 4 + i) * count + t, q + 4 * i, 4);
        }
    }
}

INLINE void arrange_columns(const int8_t *const codes[TOKENS], const int count, int64_t ins,
                            int32_t *to) {
    for (int64_t k = 0; k < ins; k += 4, to += count)
        for (int t = 0; t < count; t++) memcpy(to + t, codes[t] + k, 4);
}

INLINE void sum_groups(const struct grouped *w, const struct tokens *x) {
    const int64_t count = x->count, steps = columns_each(w) / 4;
    for (int64_t g = 0; g < groups_of(w); g++)
        for (int64_t t = 0; t < count; t++) {
            int32_t sum = 0;
            for (int64_t k = g * steps; k < (g + 1) * steps; k++) {
                int8_t q[4];
                memcpy(q, x->fours + k * count + t, 4);
                sum += q[0] + q[1] + q[2] + q[3];
            }
            float worth = (float)sum * x->scales[g * count + t];
            int32_t start = (SHIFT(w->bits) - (int32_t)w->zero) * sum;
            memcpy(x->starts + g * count + t, w->mins ? (void *)&worth : (void *)&start, 4);
        }
}
#endif

INLINE void quantise_all(const struct grouped *w, const bf16 *const x[TOKENS], const int count,
                         const struct tokens *to, float inverses[TOKENS][MAX_SHARED]) {
    int64_t shared = columns_shared(w);
    for (int64_t k = 0; k < w->ins; k += shared) {
        const float *own[TOKENS];
        for (int t = 0; t < count; t++) own[t] = inverses[t] + k / shared;
        quantise_columns(x, count, k, shared, own, to->fours + k / 4 * count);
    }
}

/* to->count tokens. x: their rows. */
static void quantise_tokens(const struct grouped *w, const bf16 *const x[TOKENS],
                            const struct tokens *to) {
    float inverses[TOKENS][MAX_SHARED];
    for (int t = 0; t < to->count; t++)
        scale_token(w, x[t], inverses[t], to->scales + t, to->count);
    if (to->count == 1) quantise_all(w, x, 1, to, inverses);
    else if (to->count == TOKENS) quantise_all(w, x, TOKENS, to, inverses);
    else quantise_all(w, x, to->count, to, inverses);
    sum_groups(w, to);
}

/* The same of tokens that are codes already. codes, scales: their rows, of `columns_shared`. */
static void arrange_tokens(const struct grouped *w, const int8_t *const codes[TOKENS],
                           const float *const scales[TOKENS], const struct tokens *to) {
    const float factor = w->group ? (float)w->factor : 1;
    const int64_t shared = columns_shared(w), repeat = shared / columns_each(w);
    float *at = to->scales;
    for (int64_t s = 0; s < w->ins / shared; s++)
        for (int64_t i = 0; i < repeat; i++)
            for (int t = 0; t < to->count; t++) *at++ = scales[t][s] * factor;
    if (to->count == 1) memcpy(to->fours, codes[0], (size_t)w->ins);
    else if (to->count == TOKENS) arrange_columns(codes, TOKENS, w->ins, to->fours);
    else arrange_columns(codes, to->count, w->ins, to->fours);
    sum_groups(w, to);
}

/* A row of bf16 as codes, and the scale of each `shared` columns of it. */
INLINE void quantise_row(const bf16 *x, int64_t ins, int64_t shared, int8_t *codes,
                         float *scales) {
    float inverses[MAX_SHARED];
    int64_t count = ins / shared;
    for (int64_t s = 0; s < count; s++) inverses[s] = wide(largest_of(x + s * shared, shared));
    for (int64_t s = 0; s < count; s++) {
        scales[s] = scale_of(inverses[s]);
        inverses[s] = inverse_of(inverses[s]);
    }
    for (int64_t s = 0; s < count; s++)
        for (int64_t k = s * shared; k < (s + 1) * shared; k += 16)
            codes_of(x + k, inverses[s], codes + k);
}
