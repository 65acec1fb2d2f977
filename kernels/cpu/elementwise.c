/* Element by element: norms, activation, rotation. */
#include "common.h"

#define STREAM_FROM (1 << 20) /* elements of keys and values that caches would not keep */

#ifdef __AVX512BF16__
INLINE __m512 wide_16(const bf16 *x, __mmask16 some) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, x)), 16));
}

INLINE __m512 all_16(const bf16 *x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}

INLINE void put_16(bf16 *y, __m512 v) {
    _mm256_storeu_si256((__m256i *)y, (__m256i)_mm512_cvtneps_pbh(v));
}
#endif

int actorium_version(void) { return 1; }

INLINE float inverse_rms(const bf16 *x, int n, float eps) {
    float sum = 0;
    int i = 0;
#ifdef __AVX512BF16__
    __m512 a = _mm512_setzero_ps(), b = a; /* two chains: an addition takes 4 cycles */
    for (; i + 32 <= n; i += 32) {
        __m512 v = all_16(x + i), u = all_16(x + i + 16);
        a = _mm512_fmadd_ps(v, v, a);
        b = _mm512_fmadd_ps(u, u, b);
    }
    sum = _mm512_reduce_add_ps(_mm512_add_ps(a, b));
#endif
    for (; i < n; i++) sum += wide(x[i]) * wide(x[i]);
    return 1.0f / sqrtf(sum / n + eps);
}

void rms_norm(const bf16 *x, const bf16 *w, bf16 *y, int64_t rows, int dim, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 32768)
    for (int64_t t = 0; t < rows; t++) {
        const bf16 *in = x + t * dim;
        bf16 *out = y + t * dim;
#ifdef __AVX512BF16__
        for (int i = 0; i < dim && t + 1 < rows; i += 32)
            _mm_prefetch((const char *)(in + dim + i), _MM_HINT_T0);
#endif
        float r = inverse_rms(in, dim, eps);
#ifdef __AVX512BF16__
        __m512 scale = _mm512_set1_ps(r);
        for (int i = 0; i < dim; i += 16) {
            __mmask16 some = dim - i < 16 ? (__mmask16)((1 << (dim - i)) - 1) : 0xffff;
            __m512 v = _mm512_mul_ps(_mm512_mul_ps(wide_16(in + i, some), scale),
                                     wide_16(w + i, some));
            _mm256_mask_storeu_epi16(out + i, some, (__m256i)_mm512_cvtneps_pbh(v));
        }
#else
        for (int i = 0; i < dim; i++) out[i] = narrow(wide(in[i]) * r * wide(w[i]));
#endif
    }
}

INLINE float sigmoid(float x) {
    float e = exp_neg(-fabsf(x));
    return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

/* gelu in its tanh form is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)). */
INLINE void gate_mul(const bf16 *gate, bf16 *out, int dim, int gelu) {
#ifdef __AVX512BF16__
    for (int i = 0; i < dim; i += 16) {
        __mmask16 some = dim - i < 16 ? (__mmask16)((1 << (dim - i)) - 1) : 0xffff;
        __m512 g = wide_16(gate + i, some), x = _mm512_mul_ps(g, _mm512_set1_ps(-1.44269504f));
        if (gelu)
            x = _mm512_mul_ps(x, _mm512_fmadd_ps(_mm512_mul_ps(g, g), _mm512_set1_ps(0.0713548163f),
                                                 _mm512_set1_ps(1.5957691216f)));
        __m512 one = _mm512_set1_ps(1), s = _mm512_div_ps(one, _mm512_add_ps(one, exp2_16(x)));
        g = _mm512_mul_ps(_mm512_mul_ps(g, s), wide_16(gate + dim + i, some));
        _mm256_mask_storeu_epi16(out + i, some, (__m256i)_mm512_cvtneps_pbh(g));
    }
#else
    for (int i = 0; i < dim; i++) {
        float g = wide(gate[i]);
        float s = sigmoid(gelu ? g * (1.5957691216f + 0.0713548163f * g * g) : g);
        out[i] = narrow(g * s * wide(gate[dim + i]));
    }
#endif
}

void silu_mul(const bf16 *gate_up, bf16 *y, int64_t rows, int dim, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 16384)
    for (int64_t t = 0; t < rows; t++) gate_mul(gate_up + t * 2 * dim, y + t * dim, dim, 0);
}

void gelu_mul(const bf16 *gate_up, bf16 *y, int64_t rows, int dim, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 16384)
    for (int64_t t = 0; t < rows; t++) gate_mul(gate_up + t * 2 * dim, y + t * dim, dim, 1);
}

/* Norm (w may be 0) and rotate one head in place. table: cos[dim], then signed sin[dim]. */
INLINE void turn(bf16 *x, const bf16 *w, const bf16 *table, int dim, float eps) {
    float a[MAX_DIM];
    int half = dim / 2;
    if (w) {
        float r = inverse_rms(x, dim, eps);
        for (int i = 0; i < dim; i++) a[i] = wide(x[i]) * r * wide(w[i]);
    } else {
        for (int i = 0; i < dim; i++) a[i] = wide(x[i]);
    }
    for (int i = 0; i < half; i++) {
        float lo = a[i], hi = a[i + half];
        x[i] = narrow(lo * wide(table[i]) + hi * wide(table[dim + i]));
        x[i + half] = narrow(hi * wide(table[half + i]) + lo * wide(table[dim + half + i]));
    }
}

#ifdef __AVX512BF16__
/* 32 values as a line; stream: past the caches. */
INLINE void put_32(bf16 *y, __m512 first, __m512 last, const int stream) {
    __m512i line = (__m512i)_mm512_cvtne2ps_pbh(last, first);
    if (stream) _mm512_stream_si512((__m512i *)y, line);
    else _mm512_storeu_si512(y, line);
}

/* The same for a known dim, 64 or 128: all of a head in registers, from x to y. table: floats. */
INLINE void turn_fixed(const bf16 *x, bf16 *y, const bf16 *w, const float *table, const int dim,
                       float eps, const int stream) {
    __m512 v[8], sum = _mm512_setzero_ps();
    const int n = dim / 16, half = n / 2;
    for (int i = 0; i < n; i++) {
        v[i] = all_16(x + 16 * i);
        sum = _mm512_fmadd_ps(v[i], v[i], sum);
    }
    if (w) {
        __m512 r = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(sum) / dim + eps));
        for (int i = 0; i < n; i++)
            v[i] = _mm512_mul_ps(_mm512_mul_ps(v[i], r), all_16(w + 16 * i));
    }
    for (int i = 0; i < half; i++) {
        const float *cos = table + 16 * i, *sin = cos + dim;
        __m512 lo = v[i], hi = v[i + half];
        v[i] = _mm512_fmadd_ps(lo, _mm512_loadu_ps(cos), _mm512_mul_ps(hi, _mm512_loadu_ps(sin)));
        v[i + half] = _mm512_fmadd_ps(hi, _mm512_loadu_ps(cos + dim / 2),
                                      _mm512_mul_ps(lo, _mm512_loadu_ps(sin + dim / 2)));
    }
    for (int i = 0; i < n; i += 2) put_32(y + 16 * i, v[i], v[i + 1], stream);
}

INLINE void turn_heads(bf16 *row, bf16 *keys, const bf16 *w, const bf16 *turns, int heads,
                       int kv_heads, const int dim, float eps, const int stream) {
    float table[2 * 128];
    for (int i = 0; i < 2 * dim; i += 16) _mm512_storeu_ps(table + i, all_16(turns + i));
    for (int i = 0; stream && i < (heads + 2 * kv_heads) * dim; i += 32) /* the row after it */
        _mm_prefetch((const char *)(row + (heads + 2 * kv_heads) * dim + i), _MM_HINT_T0);
    for (int h = 0; h < heads; h++)
        turn_fixed(row + h * dim, row + h * dim, w ? w + h * dim : 0, table, dim, eps, 0);
    for (int h = heads; h < heads + kv_heads; h++)
        turn_fixed(row + h * dim, keys + (h - heads) * dim, w ? w + h * dim : 0, table, dim, eps,
                   stream);
}
#endif

/* Norm and rotate the heads of a row: queries in place, keys to where they are kept, the values
 * behind them. stream: dim is 64 or 128, and what is kept goes past the caches. */
INLINE void turn_row(bf16 *row, bf16 *keys, const bf16 *w, const bf16 *turns, int heads,
                     int kv_heads, int dim, float eps, int stream) {
    bf16 *values = keys + kv_heads * dim;
    const bf16 *from = row + (heads + kv_heads) * dim;
#ifdef __AVX512BF16__
    if (stream) {
        if (dim == 128) turn_heads(row, keys, w, turns, heads, kv_heads, 128, eps, 1);
        else turn_heads(row, keys, w, turns, heads, kv_heads, 64, eps, 1);
        for (int i = 0; i < kv_heads * dim; i += 32)
            _mm512_stream_si512((__m512i *)(values + i), _mm512_loadu_si512(from + i));
        return;
    }
    memcpy(values, from, (size_t)kv_heads * dim * sizeof(bf16));
    if (dim == 128) {
        turn_heads(row, keys, w, turns, heads, kv_heads, 128, eps, 0);
        return;
    }
    if (dim == 64) {
        turn_heads(row, keys, w, turns, heads, kv_heads, 64, eps, 0);
        return;
    }
#else
    memcpy(values, from, (size_t)kv_heads * dim * sizeof(bf16));
#endif
    for (int h = 0; h < heads + kv_heads; h++)
        turn(row + h * dim, w ? w + h * dim : 0, turns, dim, eps);
    memcpy(keys, row + heads * dim, (size_t)kv_heads * dim * sizeof(bf16));
}

void rotate_write(bf16 *qkv, const bf16 *w, const bf16 *turns, bf16 *pages, const int64_t *index,
                  int64_t rows, int heads, int kv_heads, int dim, float eps, int threads) {
    int64_t width = (int64_t)(heads + 2 * kv_heads) * dim, kv = (int64_t)2 * kv_heads * dim;
    int stream = (dim == 128 || dim == 64) && rows * kv >= STREAM_FROM && (uintptr_t)pages % 64 == 0;
#pragma omp parallel for num_threads(threads) if (rows * width > 16384)
    for (int64_t t = 0; t < rows; t++)
        turn_row(qkv + t * width, pages + index[t] * kv, w, turns + t * 2 * dim, heads, kv_heads,
                 dim, eps, stream);
}
