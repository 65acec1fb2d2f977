/* 16 outputs side by side, as the processor has them: sums of products of codes (u8) with inputs
 * (s8) in int32, and what they are worth in f32. AVX512-VNNI, AVX2 (with AVX-VNNI or not), and C
 * that compiles anywhere.
 *
 * `load_codes(bits, block, half, v)` makes vectors 4 * half to 4 * half + 3 of a block, see
 * grouped.h, bits: `reading_of` the weight; `dot(bits, sums, codes, four)` adds to each output the products of its four codes with the
 * four inputs; `dot_half`, where HALVES is defined, those of four vectors. TOKENS times PANELS results fit the registers. */
#pragma once
#include "grouped.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define VNNI
#define TOKENS 4
#define PANELS 2
typedef __m512i ints;
typedef __m512 floats;

INLINE ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
INLINE floats no_floats(void) { return _mm512_setzero_ps(); }
INLINE ints dot(const int bits, ints sums, ints codes, int32_t four) {
    (void)bits;
    return _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(four));
}
INLINE floats load_halves(const uint8_t *at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
}
INLINE floats load_floats(const uint8_t *at) { return _mm512_loadu_ps(at); }
INLINE floats load_powers(const uint8_t *at) {
    __m512i powers = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(powers, 23));
}
INLINE void store_floats(float *to, floats x) { _mm512_storeu_ps(to, x); }
INLINE floats add_product(floats sum, floats a, float b) {
    return _mm512_fmadd_ps(a, _mm512_set1_ps(b), sum);
}
INLINE floats add_products(floats sum, floats a, floats b) { return _mm512_fmadd_ps(a, b, sum); }
INLINE floats to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
INLINE floats scaled(floats x, float by) { return _mm512_mul_ps(x, _mm512_set1_ps(by)); }

INLINE void load_codes(const int bits, const uint8_t *block, const int half, ints v[4]) {
    if (bits == 8) {
        for (int j = 0; j < 4; j++) v[j] = _mm512_loadu_si512(block + (4 * half + j) * LINE);
        return;
    }
    const ints nibble = _mm512_set1_epi8(15);
    for (int j = 0; j < 2; j++) {
        ints line = _mm512_loadu_si512(block + (WIDTH(bits) - 4 + 2 * half + j) * LINE);
        v[2 * j] = _mm512_and_si512(line, nibble);
        v[2 * j + 1] = _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble);
    }
    if (bits == FP4) {
        const ints codes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)fp4_codes));
        for (int j = 0; j < 4; j++) v[j] = _mm512_shuffle_epi8(codes, v[j]);
    }
    if (bits == 5) {
        const ints fifth = _mm512_set1_epi8(16);
        ints line = _mm512_loadu_si512(block);
        if (half) line = _mm512_srli_epi16(line, 4);
        for (int j = 0; j < 4; j++)
            v[j] = _mm512_ternarylogic_epi32(_mm512_slli_epi16(line, 4 - j), fifth, v[j], 0xea);
    }
    if (bits == 6) {
        const ints upper = _mm512_set1_epi8(48);
        ints line = _mm512_loadu_si512(block + half * LINE);
        ints at[4] = {_mm512_slli_epi16(line, 4), _mm512_slli_epi16(line, 2), line,
                      _mm512_srli_epi16(line, 2)};
        for (int j = 0; j < 4; j++) v[j] = _mm512_ternarylogic_epi32(at[j], upper, v[j], 0xea);
    }
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TOKENS 4
#define PANELS 1
typedef struct { __m256i a, b; } ints;
typedef struct { __m256 a, b; } floats;

INLINE ints all_ints(int32_t x) { return (ints){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE floats no_floats(void) { return (floats){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE floats load_halves(const uint8_t *at) {
    return (floats){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)),
                    _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at + 1))};
}
INLINE floats load_floats(const uint8_t *at) {
    return (floats){_mm256_loadu_ps((const float *)at), _mm256_loadu_ps((const float *)at + 8)};
}
INLINE floats load_powers(const uint8_t *at) {
    __m256i a = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
    __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at + 8)));
    return (floats){_mm256_castsi256_ps(_mm256_slli_epi32(a, 23)),
                    _mm256_castsi256_ps(_mm256_slli_epi32(b, 23))};
}
INLINE void store_floats(float *to, floats x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
}
INLINE floats add_product(floats sum, floats a, float b) {
    __m256 every = _mm256_set1_ps(b);
    return (floats){_mm256_fmadd_ps(a.a, every, sum.a), _mm256_fmadd_ps(a.b, every, sum.b)};
}
INLINE floats add_products(floats sum, floats a, floats b) {
    return (floats){_mm256_fmadd_ps(a.a, b.a, sum.a), _mm256_fmadd_ps(a.b, b.b, sum.b)};
}
INLINE floats to_floats(ints x) {
    return (floats){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
INLINE floats scaled(floats x, float by) {
    __m256 every = _mm256_set1_ps(by);
    return (floats){_mm256_mul_ps(x.a, every), _mm256_mul_ps(x.b, every)};
}

#ifdef __AVXVNNI__
INLINE ints dot(const int bits, ints sums, ints codes, int32_t four) {
    __m256i inputs = _mm256_set1_epi32(four);
    (void)bits;
    return (ints){_mm256_dpbusd_avx_epi32(sums.a, codes.a, inputs),
                  _mm256_dpbusd_avx_epi32(sums.b, codes.b, inputs)};
}
#else
/* Products of bytes are added up in 16 bits as far as those hold them: of 16 columns with codes of 4
 * or 5 bits, of 8 with 6 bits, of 4 with 8 bits less SHIFT, their signs given to the inputs. */
#define HALVES
#define SHIFT(bits) ((bits) == 8 ? 128 : 0)
INLINE __m256i half_8(const int bits, __m256i sums, const __m256i codes[4], const __m256i x[4]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i pairs[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        pairs[j] = bits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes[j]),
                                                    _mm256_sign_epi8(x[j], codes[j]))
                             : _mm256_maddubs_epi16(codes[j], x[j]);
    if (WIDTH(bits) < 8)
        for (int j = 0; j < 2; j++) pairs[j] = _mm256_add_epi16(pairs[j], pairs[j + 2]);
    if (WIDTH(bits) < 6) pairs[0] = _mm256_add_epi16(pairs[0], pairs[1]);
    for (int j = 0; j < (WIDTH(bits) < 6 ? 1 : WIDTH(bits) < 8 ? 2 : 4); j++)
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs[j], ones));
    return sums;
}

/* 16 columns; inputs `apart` numbers from four to four. */
INLINE ints dot_half(const int bits, ints sums, const ints codes[4], const int32_t *fours,
                     const int apart) {
    __m256i a[4], b[4], x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        a[j] = codes[j].a, b[j] = codes[j].b, x[j] = _mm256_set1_epi32(fours[j * apart]);
    return (ints){half_8(bits, sums.a, a, x), half_8(bits, sums.b, b, x)};
}
#endif

/* Half the vectors of `load_codes`: of 8 outputs. block: at their byte. */
INLINE void load_eight(const int bits, const uint8_t *block, const int half, __m256i v[4]) {
#define AT(line) _mm256_loadu_si256((const __m256i *)(block + (line) * LINE))
    if (bits == 8) {
        for (int j = 0; j < 4; j++) v[j] = AT(4 * half + j);
#ifdef SHIFT
        for (int j = 0; j < 4; j++) v[j] = _mm256_xor_si256(v[j], _mm256_set1_epi8(-128));
#endif
        return;
    }
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int j = 0; j < 2; j++) {
        __m256i line = AT(WIDTH(bits) - 4 + 2 * half + j);
        v[2 * j] = _mm256_and_si256(line, nibble);
        v[2 * j + 1] = _mm256_and_si256(_mm256_srli_epi16(line, 4), nibble);
    }
    if (bits == FP4) {
        const __m256i codes = _mm256_broadcastsi128_si256(
            _mm_loadu_si128((const __m128i *)fp4_codes));
        for (int j = 0; j < 4; j++) v[j] = _mm256_shuffle_epi8(codes, v[j]);
    }
    if (bits == 5) {
        __m256i line = half ? _mm256_srli_epi16(AT(0), 4) : AT(0), fifth = _mm256_set1_epi8(16);
        for (int j = 0; j < 4; j++)
            v[j] = _mm256_or_si256(v[j], _mm256_and_si256(_mm256_slli_epi16(line, 4 - j), fifth));
    }
    if (bits == 6) {
        __m256i line = AT(half), upper = _mm256_set1_epi8(48);
        __m256i at[4] = {_mm256_slli_epi16(line, 4), _mm256_slli_epi16(line, 2), line,
                         _mm256_srli_epi16(line, 2)};
        for (int j = 0; j < 4; j++) v[j] = _mm256_or_si256(v[j], _mm256_and_si256(at[j], upper));
    }
#undef AT
}

INLINE void load_codes(const int bits, const uint8_t *block, const int half, ints v[4]) {
    __m256i a[4], b[4];
    load_eight(bits, block, half, a);
    load_eight(bits, block + 32, half, b);
    for (int j = 0; j < 4; j++) v[j] = (ints){a[j], b[j]};
}

#else
#define TOKENS 2
#define PANELS 1
typedef struct { union { int32_t x[OUTS]; uint8_t bytes[LINE]; }; } ints;
typedef struct { float x[OUTS]; } floats;
#define EACH for (int i = 0; i < OUTS; i++)
/* Keeps the compiler from adding in another order here and there: a row's bits are its own. */
#define SETTLE(x) __asm__ volatile("" : "+m"(x))

INLINE ints all_ints(int32_t x) {
    ints y;
    EACH y.x[i] = x;
    return y;
}
INLINE floats no_floats(void) { return (floats){{0}}; }
INLINE ints dot(const int bits, ints sums, ints codes, int32_t four) {
    int8_t inputs[4];
    (void)bits;
    memcpy(inputs, &four, 4);
    EACH sums.x[i] += codes.bytes[4 * i] * inputs[0] + codes.bytes[4 * i + 1] * inputs[1]
                    + codes.bytes[4 * i + 2] * inputs[2] + codes.bytes[4 * i + 3] * inputs[3];
    return sums;
}
INLINE floats load_halves(const uint8_t *at) {
    uint16_t halves[OUTS];
    floats y;
    memcpy(halves, at, sizeof halves);
    EACH y.x[i] = from_half(halves[i]);
    return y;
}
INLINE floats load_floats(const uint8_t *at) {
    floats y;
    memcpy(&y, at, sizeof y);
    return y;
}
INLINE void store_floats(float *to, floats x) { memcpy(to, &x, sizeof x); }
INLINE floats load_powers(const uint8_t *at) {
    floats y;
    EACH y.x[i] = from_power(at[i]);
    return y;
}
INLINE floats add_product(floats sum, floats a, float b) {
    EACH sum.x[i] += a.x[i] * b;
    SETTLE(sum);
    return sum;
}
INLINE floats add_products(floats sum, floats a, floats b) {
    EACH sum.x[i] += a.x[i] * b.x[i];
    SETTLE(sum);
    return sum;
}
INLINE floats to_floats(ints x) {
    floats y;
    EACH y.x[i] = (float)x.x[i];
    return y;
}
INLINE floats scaled(floats x, float by) {
    EACH x.x[i] *= by;
    SETTLE(x);
    return x;
}

/* Not inlined: compilers would take half a minute over all its uses. */
static __attribute__((noinline)) void load_codes(int bits, const uint8_t *block, int half,
                                                 ints v[4]) {
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < LINE; i++) v[j].bytes[i] = (uint8_t)code_at(block, bits, 4 * half + j, i);
}
#endif

/* What codes are less than they should be where they are multiplied. WIDENS: nothing, so that codes
 * of fewer bits may be multiplied as if they had 8. */
#ifndef SHIFT
#define SHIFT(bits) 0
#define WIDENS
#endif
