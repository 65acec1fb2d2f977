/* Inputs of products with codes: bf16 to 8 bits, each token and part of its columns by its own largest
 * number, TOKENS side by side as the products read them. A token that was quantised before, for all
 * products that take it (quantised_rows.c), is brought into that order: the codes are the same.
 *
 * A part is a group of the weight, or half of one of 32 columns: finer scales cost a multiplication
 * and an addition for each four products, and leave six tenths of the divergence. */
#pragma once
#include "grouped_lanes.h"

#define TINY 1.5e-36f    /* what is smaller has no inverse in f32: taken as 0 */
#define MAX_PARTS 4096 /* of an input */
#define PART 16        /* columns of the smallest */

/* At most TOKENS quantised tokens, `count` of them. */
struct tokens {
    int32_t *fours;  /* [ins / 4, count]: four columns each */
    float *scales;   /* [parts, count] */
    int32_t *starts; /* [parts, count]: -zero times the sum of a part; with mins f32 [groups, count],
                        what the parts of a group sum to, times their scales */
    int count;
};

/* Columns of an input that share a scale, how many such parts it has, and each group of the weight. */
INLINE int64_t columns_shared(const struct grouped *w) {
    return w->group && w->group <= 2 * PART ? PART : columns_each(w);
}
INLINE int64_t input_parts(const struct grouped *w) { return w->ins / columns_shared(w); }
INLINE int64_t parts_each(const struct grouped *w) { return columns_each(w) / columns_shared(w); }

/* Bytes of a quantised token. */
INLINE int64_t token_bytes(const struct grouped *w) { return w->ins + 8 * input_parts(w); }

/* Those whose first is number `at` of a pass. */
INLINE struct tokens tokens_at(const struct grouped *w, uint8_t *scratch, int64_t at, int64_t rows) {
    int count = rows - at < TOKENS ? (int)(rows - at) : TOKENS;
    uint8_t *own = scratch + at * token_bytes(w), *scales = own + count * w->ins;
    return (struct tokens){(int32_t *)own, (float *)scales,
                           (int32_t *)(scales + 4 * count * input_parts(w)), count};
}

/* The largest magnitude, as bits of bf16: of NaN, were there any. count: a multiple of PART. */
INLINE uint16_t largest_of(const bf16 *x, int64_t count) {
#ifdef VNNI
    __m256i half = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; i += 16)
        half = _mm256_max_epu16(half, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + i)),
                                                       _mm256_set1_epi16(0x7fff)));
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

/* The scale of a part with this largest number, and what its columns are times. */
INLINE float scale_of(float largest) { return largest < TINY ? 0 : largest / 127; }
INLINE float inverse_of(float largest) { return largest < TINY ? 0 : 127 / largest; }

/* Scales of a token, `apart` numbers from part to part, and what its columns are times. */
static void scale_token(const struct grouped *w, const bf16 *x, float *inverses, float *to,
                        int64_t apart) {
    const float factor = w->group ? (float)w->factor : 1;
    int64_t shared = columns_shared(w), count = input_parts(w);
    for (int64_t s = 0; s < count; s++) inverses[s] = wide(largest_of(x + s * shared, shared));
    for (int64_t s = 0; s < count; s++, to += apart) {
        float largest = inverses[s];
        *to = scale_of(largest) * factor;
        inverses[s] = inverse_of(largest);
    }
}

#ifdef VNNI
/* How 16 columns of so many tokens are put side by side. */
struct order { __m512i from; __mmask16 some; };

INLINE struct order order_of(const int count) {
    int32_t from[16] = {0};
    for (int i = 0; i < 4 * count; i++) from[i] = i % count * 4 + i / count;
    return (struct order){_mm512_loadu_si512(from), (__mmask16)((1 << 4 * count) - 1)};
}

INLINE void put_columns(const __m128i q[TOKENS], const struct order *order, int32_t *to) {
    __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(q[1], q[0])),
                                     _mm256_set_m128i(q[3], q[2]), 1);
    _mm512_mask_storeu_epi32(to, order->some, _mm512_permutexvar_epi32(order->from, all));
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

/* Columns of each token, `shared` of them times one inverse. */
INLINE void quantise_columns(const bf16 *const x[TOKENS], const int count, int64_t ins,
                             int64_t shared, float inverses[TOKENS][MAX_PARTS], int32_t *to) {
    const struct order order = order_of(count);
    for (int64_t k = 0, s = 0; k < ins; s++)
        for (int64_t end = k + shared; k < end; k += 16, to += 4 * count) {
            __m128i q[TOKENS];
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; t++)
                q[t] = t < count ? sixteen_codes(x[t] + k, _mm512_set1_ps(inverses[t][s]))
                                 : _mm_setzero_si128();
            put_columns(q, &order, to);
        }
}

/* Codes of so many tokens, side by side. */
INLINE void arrange_columns(const int8_t *const codes[TOKENS], const int count, int64_t ins,
                            int32_t *to) {
    const struct order order = order_of(count);
    for (int64_t k = 0; k < ins; k += 16, to += 4 * count) {
        __m128i q[TOKENS];
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; t++)
            q[t] = t < count ? _mm_loadu_si128((const __m128i *)(codes[t] + k))
                             : _mm_setzero_si128();
        put_columns(q, &order, to);
    }
}

/* What the sums of parts of all tokens are for. */
INLINE void sum_parts(const struct grouped *w, const struct tokens *x) {
    const int count = x->count;
    const int64_t steps = columns_shared(w) / 4, each = parts_each(w);
    const __mmask8 some = (__mmask8)((1 << count) - 1);
    const __m256i ones = _mm256_set1_epi8(1);
    const int32_t *from = x->fours;
    int32_t *to = x->starts;
    for (int64_t s = 0; s < input_parts(w);) {
        __m256 worth = _mm256_setzero_ps();
        for (int64_t end = s + each; s < end; s++) {
            __m256i sums[4];
            for (int i = 0; i < 4; i++) sums[i] = _mm256_setzero_si256();
            for (int64_t k = 0; k < steps; k += 4)
                for (int i = 0; i < 4; i++, from += count)
                    sums[i] = _mm256_dpbusd_epi32(sums[i], ones,
                                                  _mm256_maskz_loadu_epi32(some, from));
            __m256i sum = _mm256_add_epi32(_mm256_add_epi32(sums[0], sums[1]),
                                           _mm256_add_epi32(sums[2], sums[3]));
            if (w->mins) {
                __m256 scales = _mm256_maskz_loadu_ps(some, x->scales + s * count);
                worth = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scales, worth);
                continue;
            }
            sum = _mm256_mullo_epi32(sum, _mm256_set1_epi32(-(int)w->zero));
            _mm256_mask_storeu_epi32(to, some, sum);
            to += count;
        }
        if (!w->mins) continue;
        _mm256_mask_storeu_ps((float *)to, some, worth);
        to += count;
    }
}
#else
INLINE void codes_of(const bf16 *x, float times, int8_t *to) {
    for (int i = 0; i < 16; i++) to[i] = (int8_t)(int32_t)rintf(wide(x[i]) * times);
}

INLINE void quantise_columns(const bf16 *const x[TOKENS], const int count, int64_t ins,
                             int64_t shared, float inverses[TOKENS][MAX_PARTS], int32_t *to) {
    for (int t = 0; t < count; t++)
        for (int64_t k = 0, s = 0; k < ins; s++)
            for (int64_t end = k + shared; k < end; k += 16) {
                int8_t q[16];
                codes_of(x[t] + k, inverses[t][s], q);
                for (int i = 0; i < 4; i++) memcpy(to + (k / 4 + i) * count + t, q + 4 * i, 4);
            }
}

INLINE void arrange_columns(const int8_t *const codes[TOKENS], const int count, int64_t ins,
                            int32_t *to) {
    for (int64_t k = 0; k < ins; k += 4, to += count)
        for (int t = 0; t < count; t++) memcpy(to + t, codes[t] + k, 4);
}

INLINE void sum_parts(const struct grouped *w, const struct tokens *x) {
    const int64_t count = x->count, steps = columns_shared(w) / 4, each = parts_each(w);
    for (int64_t s = 0; s < input_parts(w); s++)
        for (int64_t t = 0; t < count; t++) {
            int32_t sum = 0;
            for (int64_t k = s * steps; k < (s + 1) * steps; k++) {
                int8_t q[4];
                memcpy(q, x->fours + k * count + t, 4);
                sum += q[0] + q[1] + q[2] + q[3];
            }
            if (!w->mins) {
                x->starts[s * count + t] = (SHIFT(w->bits) - (int32_t)w->zero) * sum;
                continue;
            }
            float *to = (float *)x->starts + s / each * count + t;
            float worth = (float)sum * x->scales[s * count + t];
            *to = s % each ? *to + worth : worth;
        }
}
#endif

/* to->count tokens. x: their rows. */
static void quantise_tokens(const struct grouped *w, const bf16 *const x[TOKENS],
                            const struct tokens *to) {
    const int64_t shared = columns_shared(w);
    float inverses[TOKENS][MAX_PARTS];
    for (int t = 0; t < to->count; t++)
        scale_token(w, x[t], inverses[t], to->scales + t, to->count);
    if (to->count == 1) quantise_columns(x, 1, w->ins, shared, inverses, to->fours);
    else if (to->count == TOKENS) quantise_columns(x, TOKENS, w->ins, shared, inverses, to->fours);
    else quantise_columns(x, to->count, w->ins, shared, inverses, to->fours);
    sum_parts(w, to);
}

/* The same of tokens that are codes already. codes, scales: their rows, of `columns_shared`. */
static void arrange_tokens(const struct grouped *w, const int8_t *const codes[TOKENS],
                           const float *const scales[TOKENS], const struct tokens *to) {
    const float factor = w->group ? (float)w->factor : 1;
    float *at = to->scales;
    for (int64_t s = 0; s < input_parts(w); s++)
        for (int t = 0; t < to->count; t++) *at++ = scales[t][s] * factor;
    if (to->count == 1) memcpy(to->fours, codes[0], (size_t)w->ins);
    else if (to->count == TOKENS) arrange_columns(codes, TOKENS, w->ins, to->fours);
    else arrange_columns(codes, to->count, w->ins, to->fours);
    sum_parts(w, to);
}

/* A row of bf16 as codes, and the scale of each `shared` columns of it. */
INLINE void quantise_row(const bf16 *x, int64_t ins, int64_t shared, int8_t *codes,
                         float *scales) {
    float inverses[MAX_PARTS];
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
