/* 16 numbers in f32 side by side: one register of AVX-512, or two of AVX2. `FLOATS16` is defined where
 * there are any; what is written with them is written once for both. */
#pragma once
#ifdef __AVX2__
/* 8 bf16. */
INLINE __m256 wide_8(const bf16 *x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
}
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define FLOATS16
#define FLOATS16_512
typedef __m512 floats16;
typedef __m512i wholes; /* 16 numbers i32 */

INLINE floats16 no_lanes(void) { return _mm512_setzero_ps(); }
INLINE floats16 all_lanes(float x) { return _mm512_set1_ps(x); }
INLINE floats16 load_lanes(const float *x) { return _mm512_loadu_ps(x); }
INLINE floats16 join_lanes(__m256 x, __m256 y) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(x), y, 1);
}
INLINE void store_lanes(float *y, floats16 x) { _mm512_storeu_ps(y, x); }
INLINE floats16 add_lanes(floats16 x, floats16 y) { return _mm512_add_ps(x, y); }
/* A sum that is made before anything is added to it, whatever the compiler may otherwise regroup. */
INLINE floats16 settled_lanes(floats16 x) {
    __asm__("" : "+v"(x));
    return x;
}
INLINE floats16 sub_lanes(floats16 x, floats16 y) { return _mm512_sub_ps(x, y); }
INLINE floats16 mul_lanes(floats16 x, floats16 y) { return _mm512_mul_ps(x, y); }
INLINE floats16 div_lanes(floats16 x, floats16 y) { return _mm512_div_ps(x, y); }
INLINE floats16 max_lanes(floats16 x, floats16 y) { return _mm512_max_ps(x, y); }
/* x * y + z, x * y - z: rounded once. */
INLINE floats16 fma_lanes(floats16 x, floats16 y, floats16 z) { return _mm512_fmadd_ps(x, y, z); }
INLINE floats16 fms_lanes(floats16 x, floats16 y, floats16 z) { return _mm512_fmsub_ps(x, y, z); }
INLINE float sum_lanes(floats16 x) { return _mm512_reduce_add_ps(x); }
INLINE float top_lanes(floats16 x) { return _mm512_reduce_max_ps(x); }
INLINE int any_above(floats16 x, floats16 y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ) != 0; }
/* x > y ? a : b */
INLINE floats16 where_above(floats16 x, floats16 y, floats16 a, floats16 b) {
    return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), a);
}
INLINE wholes load_wholes(const int32_t *x) { return _mm512_loadu_si512(x); }
/* from <= i <= to ? x : -inf */
INLINE floats16 where_seen(floats16 x, int32_t i, wholes from, wholes to) {
    wholes at = _mm512_set1_epi32(i);
    __mmask16 seen = _mm512_cmple_epi32_mask(at, to) & _mm512_cmpge_epi32_mask(at, from);
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x);
}

/* n of them, the others -inf. */
INLINE floats16 first_of(floats16 x, int n) {
    __mmask16 own = n >= 16 ? 0xffff : n > 0 ? (__mmask16)((1 << n) - 1) : 0;
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), own, x);
}

/* 2**t for t <= 100, 7e-5 off; 0 for -inf. */
INLINE floats16 exp2_lanes(floats16 t) {
    __m512 f = _mm512_reduce_ps(t, 9); /* t - floor(t) */
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.0780245145f), f, _mm512_set1_ps(0.2260671706f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6958335638f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.9999251962f));
    return _mm512_scalef_ps(p, t);
}
/* 1 / x, 1e-4 off. */
INLINE floats16 inverse_lanes(floats16 x) { return _mm512_rcp14_ps(x); }

/* 16 bf16. */
INLINE floats16 wide_lanes(const bf16 *x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}
/* n of them, the others 0; `n` of 16 and more are all. */
INLINE __mmask16 first_lanes(int64_t n) {
    return n >= 16 ? 0xffff : n > 0 ? (__mmask16)((1 << n) - 1) : 0;
}
INLINE floats16 wide_some(const bf16 *x, int64_t n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), x)), 16));
}
INLINE void store_some(float *y, floats16 x, int64_t n) {
    _mm512_mask_storeu_ps(y, first_lanes(n), x);
}
INLINE __m256i to_bf16(floats16 x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_srli_epi32(bits, 16);
    odd = _mm512_and_si512(odd, _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
#endif
}
INLINE void narrow_some(bf16 *y, floats16 x, int64_t n) {
    _mm256_mask_storeu_epi16(y, first_lanes(n), to_bf16(x));
}

#elif defined(__AVX2__) && defined(__FMA__)
#define FLOATS16
typedef struct { __m256 a, b; } floats16;
typedef struct { __m256i a, b; } wholes;
#define BOTH(op, x, y) ((floats16){op((x).a, (y).a), op((x).b, (y).b)})

INLINE floats16 all_lanes(float x) { return (floats16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE floats16 no_lanes(void) { return (floats16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE floats16 join_lanes(__m256 x, __m256 y) { return (floats16){x, y}; }
INLINE floats16 load_lanes(const float *x) {
    return (floats16){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
}
INLINE void store_lanes(float *y, floats16 x) {
    _mm256_storeu_ps(y, x.a);
    _mm256_storeu_ps(y + 8, x.b);
}
INLINE floats16 add_lanes(floats16 x, floats16 y) { return BOTH(_mm256_add_ps, x, y); }
INLINE floats16 settled_lanes(floats16 x) {
    __asm__("" : "+x"(x.a), "+x"(x.b));
    return x;
}
INLINE floats16 sub_lanes(floats16 x, floats16 y) { return BOTH(_mm256_sub_ps, x, y); }
INLINE floats16 mul_lanes(floats16 x, floats16 y) { return BOTH(_mm256_mul_ps, x, y); }
INLINE floats16 div_lanes(floats16 x, floats16 y) { return BOTH(_mm256_div_ps, x, y); }
INLINE floats16 max_lanes(floats16 x, floats16 y) { return BOTH(_mm256_max_ps, x, y); }
INLINE floats16 fma_lanes(floats16 x, floats16 y, floats16 z) {
    return (floats16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE floats16 fms_lanes(floats16 x, floats16 y, floats16 z) {
    return (floats16){_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)};
}
INLINE float sum_8(__m256 x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
INLINE float sum_lanes(floats16 x) { return sum_8(_mm256_add_ps(x.a, x.b)); }
INLINE float top_lanes(floats16 x) {
    __m256 both = _mm256_max_ps(x.a, x.b);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
INLINE __m256 above_8(__m256 x, __m256 y) { return _mm256_cmp_ps(x, y, _CMP_GT_OQ); }
INLINE int any_above(floats16 x, floats16 y) {
    return _mm256_movemask_ps(_mm256_or_ps(above_8(x.a, y.a), above_8(x.b, y.b))) != 0;
}
INLINE floats16 where_above(floats16 x, floats16 y, floats16 a, floats16 b) {
    return (floats16){_mm256_blendv_ps(b.a, a.a, above_8(x.a, y.a)),
                   _mm256_blendv_ps(b.b, a.b, above_8(x.b, y.b))};
}
INLINE wholes load_wholes(const int32_t *x) {
    return (wholes){_mm256_loadu_si256((const __m256i *)x),
                    _mm256_loadu_si256((const __m256i *)x + 1)};
}
INLINE __m256 where_seen_8(__m256 x, __m256i at, __m256i from, __m256i to) {
    __m256i hidden = _mm256_or_si256(_mm256_cmpgt_epi32(at, to), _mm256_cmpgt_epi32(from, at));
    return _mm256_blendv_ps(x, _mm256_set1_ps(-INFINITY), _mm256_castsi256_ps(hidden));
}
INLINE floats16 where_seen(floats16 x, int32_t i, wholes from, wholes to) {
    __m256i at = _mm256_set1_epi32(i);
    return (floats16){where_seen_8(x.a, at, from.a, to.a), where_seen_8(x.b, at, from.b, to.b)};
}

INLINE floats16 first_of(floats16 x, int n) {
    wholes places = {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                     _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
    wholes most = {_mm256_set1_epi32(INT32_MAX), _mm256_set1_epi32(INT32_MAX)};
    return where_seen(x, n - 1, places, most);
}

/* Beyond 2**-127 and 2**128 the power's own bits are 0 and inf; NaN stays. */
INLINE __m256 exp2_8(__m256 t) {
    t = _mm256_min_ps(_mm256_set1_ps(128), _mm256_max_ps(_mm256_set1_ps(-127), t));
    __m256 n = _mm256_floor_ps(t), f = _mm256_sub_ps(t, n);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(0.0780245145f), f, _mm256_set1_ps(0.2260671706f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.6958335638f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.9999251962f));
    __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)));
}
INLINE floats16 exp2_lanes(floats16 t) { return (floats16){exp2_8(t.a), exp2_8(t.b)}; }
INLINE floats16 inverse_lanes(floats16 x) { return div_lanes(all_lanes(1), x); }

INLINE floats16 wide_lanes(const bf16 *x) { return (floats16){wide_8(x), wide_8(x + 8)}; }
INLINE floats16 wide_some(const bf16 *x, int64_t n) {
    if (n >= 16) return wide_lanes(x);
    bf16 some[16] = {0};
    for (int64_t i = 0; i < n; i++) some[i] = x[i];
    return wide_lanes(some);
}
INLINE void store_some(float *y, floats16 x, int64_t n) {
    float all[16];
    if (n >= 16) {
        store_lanes(y, x);
        return;
    }
    store_lanes(all, x);
    for (int64_t i = 0; i < n; i++) y[i] = all[i];
}
/* As bf16 to nearest even, in the upper halves. */
INLINE __m256i rounded_8(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_srli_epi32(bits, 16);
    odd = _mm256_and_si256(odd, _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
INLINE __m256i to_bf16(floats16 x) {
    __m256i a = _mm256_srli_epi32(rounded_8(x.a), 16), b = _mm256_srli_epi32(rounded_8(x.b), 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
}
INLINE void narrow_some(bf16 *y, floats16 x, int64_t n) {
    bf16 all[16];
    if (n >= 16) {
        _mm256_storeu_si256((__m256i *)y, to_bf16(x));
        return;
    }
    _mm256_storeu_si256((__m256i *)all, to_bf16(x));
    for (int64_t i = 0; i < n; i++) y[i] = all[i];
}
#undef BOTH
#endif

#ifdef FLOATS16
INLINE void narrow_lanes(bf16 *y, floats16 x) {
    _mm256_storeu_si256((__m256i *)y, to_bf16(x));
}

/* A line of 32 bf16. */
INLINE void narrow_line(bf16 *y, floats16 x, floats16 z) {
#ifdef __AVX512BF16__
    _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(z, x));
#else
    narrow_lanes(y, x);
    narrow_lanes(y + 16, z);
#endif
}

/* at, at + 1, ... */
INLINE floats16 lanes_from(int at) {
    static const float count[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return add_lanes(load_lanes(count), all_lanes((float)at));
}

/* A line past the caches. */
INLINE void stream_line(bf16 *y, __m256i first, __m256i last) {
#ifdef FLOATS16_512
    _mm512_stream_si512((__m512i *)y, _mm512_inserti64x4(_mm512_castsi256_si512(first), last, 1));
#else
    _mm256_stream_si256((__m256i *)y, first);
    _mm256_stream_si256((__m256i *)y + 1, last);
#endif
}

/* Scores x, scaled, that fall by a slope with each token of distance. */
INLINE floats16 sloped_lanes(floats16 x, floats16 scale, floats16 slope, floats16 ahead) {
    return fma_lanes(x, scale, settled_lanes(mul_lanes(slope, ahead)));
}

/* Scores x that are capped, by * tanh(x), as a call of its own would give them: see `tanh_of`. */
INLINE floats16 capped_lanes(floats16 x, float by) {
    const floats16 most = all_lanes(5), least = all_lanes(-5);
    x = where_above(x, most, most, x);
    x = where_above(least, x, least, x);
    floats16 y = mul_lanes(x, x);
    floats16 over = fma_lanes(add_lanes(y, all_lanes(378)), y, all_lanes(17325));
    floats16 under = fma_lanes(fma_lanes(y, all_lanes(28), all_lanes(3150)), y, all_lanes(62370));
    over = mul_lanes(x, fma_lanes(over, y, all_lanes(135135)));
    under = fma_lanes(under, y, all_lanes(135135));
    return settled_lanes(mul_lanes(div_lanes(over, under), all_lanes(by)));
}
#endif
