/* Rounds of a decode over pages of codes in int8, as products of integers in 16 bits, which are the
 * same on every processor: AVX-512 or AVX2, with VNNI or without.
 *
 * Queries become 15 bits and a sign with a scale for each head, and so do the weights of a round's
 * tokens, times the scales of their values, with a scale for each round: what is lost is far below
 * what rounding the output to bf16 takes. Sums of a round are exact, and are added up in f32. */
#pragma once
#include "program.h"

#define ROUND 64       /* tokens; sums of 128 of them would still be whole */
#define MOST 32767.0f  /* of a query's and a weight's integers */
#define TINY 1e-30f    /* what is smaller than that at its largest is 0 */
#define HEADS 4        /* queries that values are read for at a time: see heads_of */
typedef int8_t element;

/* Where a round's tokens lie, and the scales of one head; behind `count` tokens the last is repeated
 * with scales of 0. */
struct round {
    const int8_t *at[ROUND];
    const bf16 *scales[ROUND];
    float keys[ROUND], values[ROUND];
    int count;
};

INLINE void place(struct round *r, int s, const struct paged_decode *d, int64_t token,
                  int64_t stride) {
    r->at[s] = (const int8_t *)d->pages + token * stride;
    r->scales[s] = d->scales + token * 2 * d->kv_heads;
}

INLINE void fetch_scales(const struct paged_decode *d, int64_t token, int head) {
    _mm_prefetch((const char *)(d->scales + token * 2 * d->kv_heads + head), _MM_HINT_T0);
    _mm_prefetch((const char *)(d->scales + (token * 2 + 1) * d->kv_heads + head), _MM_HINT_T0);
}

INLINE void take_scales(struct round *r, int head, int kv_heads) {
    bf16 keys[ROUND] = {0}, values[ROUND] = {0};
    for (int s = 0; s < r->count; s++) {
        keys[s] = r->scales[s][head];
        values[s] = r->scales[s][kv_heads + head];
    }
    for (int s = 0; s < ROUND; s += 16) {
        store_lanes(r->keys + s, wide_lanes(keys + s));
        store_lanes(r->values + s, wide_lanes(values + s));
    }
}

/* A row does not see what the scales behind it are, nor whether they are numbers. */
INLINE void cut_scales(const struct round *r, struct round *cut) {
    for (int s = 0; s < ROUND; s++) {
        cut->keys[s] = s < cut->count ? r->keys[s] : 0;
        cut->values[s] = s < cut->count ? r->values[s] : 0;
    }
}

/* The queries of a task as integers; scales: with the scores'. */
struct queries { int16_t of[8192] __attribute__((aligned(64))); float scales[8192 / 32]; };
struct query { const int16_t *at; const float *scales; };

INLINE void ready_queries(struct queries *to, const bf16 *q, int64_t stride, int n, int width,
                          int dim, float scale) {
    for (int h = 0; h < n * width; h++) {
        const bf16 *x = q + h / width * stride + (int64_t)(h % width) * dim;
        uint16_t most = 0; /* as bits: infinities and NaN are above all numbers */
        for (int i = 0; i < dim; i++) {
            uint16_t size = x[i] & 0x7fff;
            most = size > most ? size : most;
        }
        float by = most < 0x7f80 && wide(most) > TINY ? MOST / wide(most) : 0;
        for (int i = 0; i < dim; i++) to->of[h * dim + i] = (int16_t)(int)rintf(wide(x[i]) * by);
        to->scales[h] = most < 0x7f80 ? wide(most) / MOST * scale : NAN;
    }
}

INLINE struct query query_of(const struct queries *q, int row, int column, int width, int dim) {
    int h = row * width + column;
    return (struct query){q->of + h * dim, q->scales + h};
}

#ifdef FLOATS16_512
#define STEP 32 /* codes of a register, as they are multiplied */
#define SUMS 16 /* sums of a register each that are under way at once */
typedef __m256i codes;
typedef __m512i pairs;

INLINE int heads_of(int dim) { return dim > 64 ? HEADS / 2 : HEADS; }
INLINE codes load_codes(const int8_t *x) { return _mm256_loadu_si256((const __m256i *)x); }
INLINE codes mixed_low(codes x, codes y) { return _mm256_unpacklo_epi8(x, y); }
INLINE codes mixed_high(codes x, codes y) { return _mm256_unpackhi_epi8(x, y); }
INLINE pairs widened(codes x) { return _mm512_cvtepi8_epi16(x); }
INLINE pairs load_pairs(const int16_t *x) { return _mm512_loadu_si512(x); }
INLINE pairs all_pairs(int32_t x) { return _mm512_set1_epi32(x); }
INLINE pairs no_pairs(void) { return _mm512_setzero_si512(); }
INLINE pairs dot(pairs sum, pairs x, pairs y) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, x, y);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(x, y));
#endif
}
/* y += x * by */
INLINE void add_times(float *y, pairs x, float by) {
    _mm512_storeu_ps(y, _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(by),
                                        _mm512_loadu_ps(y)));
}

/* Sums of registers: half of them to each place. */
INLINE void store_sums(__m512i r[SUMS], float *first, float *last) {
    for (int i = 0; i < 8; i++)
        r[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]),
                                _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        r[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(r[2 * i], r[2 * i + 1]),
                                _mm512_unpackhi_epi64(r[2 * i], r[2 * i + 1]));
    for (int n = 2; n; n /= 2)
        for (int i = 0; i < n; i++)
            r[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(r[2 * i], r[2 * i + 1], 0x88),
                                    _mm512_shuffle_i32x4(r[2 * i], r[2 * i + 1], 0xdd));
    __m512 all = _mm512_cvtepi32_ps(r[0]);
    _mm256_storeu_ps(first, _mm512_castps512_ps256(all));
    _mm256_storeu_ps(last, _mm512_extractf32x8_ps(all, 1));
}

/* The largest, and NaN if any is. */
INLINE float largest(const floats16 x[ROUND / 16]) {
    __m512i most = _mm512_castps_si512(x[0]);
    for (int i = 1; i < ROUND / 16; i++) most = _mm512_max_epu32(most, _mm512_castps_si512(x[i]));
    return _mm512_cvtss_f32(_mm512_castsi512_ps(
        _mm512_set1_epi32((int)_mm512_reduce_max_epu32(most))));
}

INLINE void store_wholes(int16_t *y, floats16 x) {
    _mm256_storeu_si256((__m256i *)y, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}

/* 32 dims of outputs, times share, as bf16 in their order: as codes were mixed, 0-7 and 16-23 come
 * before 8-15 and 24-31. */
INLINE void put_outputs(const float *o, float share, bf16 *to) {
    floats16 low = join_lanes(_mm256_loadu_ps(o), _mm256_loadu_ps(o + 16));
    floats16 high = join_lanes(_mm256_loadu_ps(o + 8), _mm256_loadu_ps(o + 24));
    narrow_line(to, mul_lanes(low, all_lanes(share)), mul_lanes(high, all_lanes(share)));
}
#else
#define STEP 16
#define SUMS 8
typedef __m128i codes;
typedef __m256i pairs;

INLINE int heads_of(int dim) { return (void)dim, HEADS / 2; }
INLINE codes load_codes(const int8_t *x) { return _mm_loadu_si128((const __m128i *)x); }
INLINE codes mixed_low(codes x, codes y) { return _mm_unpacklo_epi8(x, y); }
INLINE codes mixed_high(codes x, codes y) { return _mm_unpackhi_epi8(x, y); }
INLINE pairs widened(codes x) { return _mm256_cvtepi8_epi16(x); }
INLINE pairs load_pairs(const int16_t *x) { return _mm256_loadu_si256((const __m256i *)x); }
INLINE pairs all_pairs(int32_t x) { return _mm256_set1_epi32(x); }
INLINE pairs no_pairs(void) { return _mm256_setzero_si256(); }
INLINE pairs dot(pairs sum, pairs x, pairs y) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(sum, x, y);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
#endif
}
INLINE void add_times(float *y, pairs x, float by) {
    _mm256_storeu_ps(y, _mm256_fmadd_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(by),
                                        _mm256_loadu_ps(y)));
}

INLINE void store_4_sums(const __m256i *r, float *to) {
    __m256i x = _mm256_hadd_epi32(_mm256_hadd_epi32(r[0], r[1]), _mm256_hadd_epi32(r[2], r[3]));
    _mm_storeu_ps(to, _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(x),
                                                    _mm256_extracti128_si256(x, 1))));
}

INLINE void store_sums(__m256i r[SUMS], float *first, float *last) {
    store_4_sums(r, first);
    store_4_sums(r + 4, last);
}

INLINE float largest(const floats16 x[ROUND / 16]) {
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < ROUND / 16; i++) {
        most = _mm256_max_epu32(most, _mm256_castps_si256(x[i].a));
        most = _mm256_max_epu32(most, _mm256_castps_si256(x[i].b));
    }
    most = _mm256_max_epu32(most, _mm256_permute4x64_epi64(most, 0x4e));
    most = _mm256_max_epu32(most, _mm256_shuffle_epi32(most, 0x4e));
    most = _mm256_max_epu32(most, _mm256_shuffle_epi32(most, 0xb1));
    return _mm256_cvtss_f32(_mm256_castsi256_ps(most));
}

INLINE void store_wholes(int16_t *y, floats16 x) {
    __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    _mm256_storeu_si256((__m256i *)y, _mm256_permute4x64_epi64(both, 0xd8));
}

INLINE void put_outputs(const float *o, float share, bf16 *to) {
    narrow_line(to, mul_lanes(load_lanes(o), all_lanes(share)),
                mul_lanes(load_lanes(o + 16), all_lanes(share)));
}
#endif

/* Scores of queries h..h + n with the round's tokens. */
INLINE void score_some(struct query q, const struct round *r, int64_t head, int dim, int h,
                       const int n, floats16 scores[][ROUND / 16]) {
    float found[2][ROUND] = {{0}};
    for (int t = 0; t < r->count; t += SUMS / n) {
        pairs sum[SUMS];
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) sum[i] = no_pairs();
        for (int d = 0; d < dim; d += STEP) {
            pairs query[2];
#pragma GCC unroll 2
            for (int g = 0; g < n; g++) query[g] = load_pairs(q.at + (h + g) * dim + d);
#pragma GCC unroll 16
            for (int i = 0; i < SUMS / n; i++) {
                pairs key = widened(load_codes(r->at[t + i] + head + d));
#pragma GCC unroll 2
                for (int g = 0; g < n; g++)
                    sum[g * (SUMS / 2) + i] = dot(sum[g * (SUMS / 2) + i], key, query[g]);
            }
        }
        store_sums(sum, found[0] + t, n == 2 ? found[1] + t : found[0] + t + SUMS / 2);
    }
#pragma GCC unroll 2
    for (int g = 0; g < n; g++)
        for (int i = 0; i < ROUND / 16; i++)
            scores[h + g][i] = mul_lanes(mul_lanes(load_lanes(found[g] + 16 * i),
                                                   load_lanes(r->keys + 16 * i)),
                                         all_lanes(q.scales[h + g]));
}

/* Scores of query h, when asked for the first of two: of both. */
INLINE void score_round(struct query q, const struct round *r, int64_t head, int dim, int h,
                        int heads, floats16 scores[][ROUND / 16]) {
    if (h % 2) return;
    if (h + 1 < heads) score_some(q, r, head, dim, h, 2, scores);
    else score_some(q, r, head, dim, h, 1, scores);
}

/* Pairs of tokens; by: what their integers are to be multiplied by. */
struct weights { int32_t of[HEADS][ROUND / 2] __attribute__((aligned(64))); float by[HEADS]; };

INLINE void put_weights(struct weights *w, int h, const floats16 x[ROUND / 16],
                        const struct round *r) {
    floats16 own[ROUND / 16];
    for (int i = 0; i < ROUND / 16; i++) own[i] = mul_lanes(x[i], load_lanes(r->values + 16 * i));
    float most = largest(own), by = most > TINY && most <= 3e38f ? MOST / most : 0;
    for (int i = 0; i < ROUND / 16; i++)
        store_wholes((int16_t *)w->of[h] + 16 * i, mul_lanes(own[i], all_lanes(by)));
    w->by[h] = most / MOST;
}

/* outputs += weights x values, of `heads` queries. */
INLINE void gather(const struct round *r, int64_t values, const struct weights *weights,
                   float *outputs, int dim, const int heads) {
    const int most = STEP == 16 && heads == 2 ? 2 : heads > 2 ? 2 : 4; /* as many as registers take */
    for (int d = 0; d < dim; d += STEP * most) {
        int parts = dim - d < STEP * most ? (dim - d) / STEP : most;
        pairs sum[HEADS][4][2];
        for (int h = 0; h < heads; h++)
            for (int p = 0; p < parts; p++) sum[h][p][0] = sum[h][p][1] = no_pairs();
        for (int i = 0; i < (r->count + 1) / 2; i++)
            for (int p = 0; p < parts; p++) {
                codes x = load_codes(r->at[2 * i] + values + d + p * STEP);
                codes y = load_codes(r->at[2 * i + 1] + values + d + p * STEP);
                pairs low = widened(mixed_low(x, y)), high = widened(mixed_high(x, y));
                for (int h = 0; h < heads; h++) {
                    pairs weight = all_pairs(weights->of[h][i]);
                    sum[h][p][0] = dot(sum[h][p][0], low, weight);
                    sum[h][p][1] = dot(sum[h][p][1], high, weight);
                }
            }
        for (int h = 0; h < heads; h++)
            for (int p = 0; p < parts; p++)
                for (int j = 0; j < 2; j++)
                    add_times(outputs + h * dim + d + p * STEP + j * (STEP / 2), sum[h][p][j],
                              weights->by[h]);
    }
}
