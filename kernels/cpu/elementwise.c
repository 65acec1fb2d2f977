/* Element by element: norms, activation, rotation. */
#include "common.h"
#include "program.h"

#define STREAM_FROM (1 << 20) /* elements of keys and values that caches would not keep */

int actorium_version(void) { return 1; }

INLINE float inverse_rms(const bf16 *x, int n, float eps) {
    float sum = 0;
    int i = 0;
#ifdef FLOATS16
    floats16 a = no_lanes(), b = a; /* two chains: an addition takes 4 cycles */
    for (; i + 32 <= n; i += 32) {
        floats16 v = wide_lanes(x + i), u = wide_lanes(x + i + 16);
        a = fma_lanes(v, v, a);
        b = fma_lanes(u, u, b);
    }
    sum = sum_lanes(add_lanes(a, b));
#endif
    for (; i < n; i++) sum += wide(x[i]) * wide(x[i]);
    return 1.0f / sqrtf(sum / n + eps);
}

void norm_row(const bf16 *in, const bf16 *w, bf16 *out, int dim, float eps, int more) {
#ifdef FLOATS16
    for (int i = 0; i < dim && more; i += 32)
        _mm_prefetch((const char *)(in + dim + i), _MM_HINT_T0);
#endif
    float r = inverse_rms(in, dim, eps);
#ifdef FLOATS16
    for (int i = 0; i < dim; i += 16) {
        floats16 v = mul_lanes(wide_some(in + i, dim - i), all_lanes(r));
        narrow_some(out + i, mul_lanes(v, wide_some(w + i, dim - i)), dim - i);
    }
#else
    for (int i = 0; i < dim; i++) out[i] = narrow(wide(in[i]) * r * wide(w[i]));
#endif
}

void rms_norm(const bf16 *x, const bf16 *w, bf16 *y, int64_t rows, int dim, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 32768)
    for (int64_t t = 0; t < rows; t++)
        norm_row(x + t * dim, w, y + t * dim, dim, eps, t + 1 < rows);
}

/* The parts of a row, each with a weight and, behind those of all, a bias of its own. Rows of x and y
 * lie so many numbers apart, and may be the same. w: [2, parts, dim]. */
void layer_norm(const bf16 *x, int64_t x_stride, const bf16 *w, bf16 *y, int64_t y_stride,
                int64_t rows, int parts, int dim, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * parts * dim > 32768)
    for (int64_t t = 0; t < rows * parts; t++) {
        int64_t part = t % parts * dim;
        const bf16 *in = x + t / parts * x_stride + part, *by = w + part, *bias = by + parts * dim;
        bf16 *out = y + t / parts * y_stride + part;
        float sum = 0, squares = 0;
        for (int i = 0; i < dim; i++) sum += wide(in[i]);
        float mean = sum / dim;
        for (int i = 0; i < dim; i++) squares += (wide(in[i]) - mean) * (wide(in[i]) - mean);
        float r = 1.0f / sqrtf(squares / dim + eps);
        for (int i = 0; i < dim; i++)
            out[i] = narrow((wide(in[i]) - mean) * r * wide(by[i]) + wide(bias[i]));
    }
}

INLINE float sigmoid(float x) {
    float e = exp_neg(-fabsf(x));
    return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

/* gelu in its tanh form is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)). */
INLINE void gate_mul(const bf16 *gate, bf16 *out, int dim, int gelu) {
#ifdef FLOATS16
    for (int i = 0; i < dim; i += 16) {
        floats16 g = wide_some(gate + i, dim - i), x = mul_lanes(g, all_lanes(-1.44269504f));
        if (gelu)
            x = mul_lanes(x, fma_lanes(mul_lanes(g, g), all_lanes(0.0713548163f),
                                       all_lanes(1.5957691216f)));
        floats16 one = all_lanes(1), s = div_lanes(one, add_lanes(one, exp2_lanes(x)));
        g = mul_lanes(mul_lanes(g, s), wide_some(gate + dim + i, dim - i));
        narrow_some(out + i, g, dim - i);
    }
#else
    for (int i = 0; i < dim; i++) {
        float g = wide(gate[i]);
        float s = sigmoid(gelu ? g * (1.5957691216f + 0.0713548163f * g * g) : g);
        out[i] = narrow(g * s * wide(gate[dim + i]));
    }
#endif
}

void gate_row(const bf16 *gate_up, bf16 *y, int dim, int gelu) {
    if (gelu) gate_mul(gate_up, y, dim, 1);
    else gate_mul(gate_up, y, dim, 0);
}

void silu_mul(const bf16 *gate_up, bf16 *y, int64_t rows, int dim, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 16384)
    for (int64_t t = 0; t < rows; t++) gate_mul(gate_up + t * 2 * dim, y + t * dim, dim, 0);
}

void gelu_mul(const bf16 *gate_up, bf16 *y, int64_t rows, int dim, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 16384)
    for (int64_t t = 0; t < rows; t++) gate_mul(gate_up + t * 2 * dim, y + t * dim, dim, 1);
}

/* Gates below the row's mean and so many deviations are cut off: see `reference.activation`. */
__attribute__((noinline)) void cut_row(const bf16 *gate_up, bf16 *y, int dim, float deviations,
                                       float width) {
    float sum = 0, squares = 0;
    for (int i = 0; i < dim; i++) sum += wide(gate_up[i]);
    for (int i = 0; i < dim; i++) squares += wide(gate_up[i]) * wide(gate_up[i]);
    float mean = sum / width, spread = squares / width - mean * mean;
    float limit = mean + (spread > 0 ? sqrtf(spread) : 0) * deviations;
    for (int i = 0; i < dim; i++) {
        float g = wide(gate_up[i]) - limit;
        g = g > 0 ? g : 0;
        y[i] = narrow(g * sigmoid(g * (1.5957691216f + 0.0713548163f * g * g)) * wide(gate_up[dim + i]));
    }
}

void cut_gelu_mul(const bf16 *gate_up, bf16 *y, int64_t rows, int dim, float deviations, float width,
                  int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 16384)
    for (int64_t t = 0; t < rows; t++)
        cut_row(gate_up + t * 2 * dim, y + t * dim, dim, deviations, width);
}

/* x with the mean square of `as_of`; its own counts as 1e-5 at least. */
__attribute__((noinline)) void as_large_row(const bf16 *x, const bf16 *as_of, bf16 *y, int dim) {
    float wanted = 0, own = 0;
    for (int i = 0; i < dim; i++) wanted += wide(as_of[i]) * wide(as_of[i]);
    for (int i = 0; i < dim; i++) own += wide(x[i]) * wide(x[i]);
    own /= dim;
    float by = sqrtf(wanted / dim) / sqrtf(own < 1e-5f ? 1e-5f : own);
    for (int i = 0; i < dim; i++) y[i] = narrow(wide(x[i]) * by);
}

void as_large(const bf16 *x, const bf16 *as_of, bf16 *y, int64_t rows, int dim, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 16384)
    for (int64_t t = 0; t < rows; t++) as_large_row(x + t * dim, as_of + t * dim, y + t * dim, dim);
}

/* Norm (w may be 0) and rotate one head in place. table: cos[dim], then signed sin[dim]. */
INLINE void turn(bf16 *x, const bf16 *w, const bf16 *table, int dim, float eps) {
    float a[MAX_HEAD];
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

#ifdef FLOATS16
/* 32 values as a line; stream: past the caches. */
INLINE void put_32(bf16 *y, floats16 first, floats16 last, const int stream) {
    if (stream) stream_line(y, to_bf16(first), to_bf16(last));
    else narrow_line(y, first, last);
}

/* The same for a known dim, 64 or 128: all of a head in registers, from x to y. table: floats. */
INLINE void turn_fixed(const bf16 *x, bf16 *y, const bf16 *w, const float *table, const int dim,
                       float eps, const int stream) {
    floats16 v[8], sum = no_lanes();
    const int n = dim / 16, half = n / 2;
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) {
        v[i] = wide_lanes(x + 16 * i);
        sum = fma_lanes(v[i], v[i], sum);
    }
    if (w) {
        floats16 r = all_lanes(1.0f / sqrtf(sum_lanes(sum) / dim + eps));
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) v[i] = mul_lanes(mul_lanes(v[i], r), wide_lanes(w + 16 * i));
    }
#pragma GCC unroll 4
    for (int i = 0; i < half; i++) {
        const float *cos = table + 16 * i, *sin = cos + dim;
        floats16 lo = v[i], hi = v[i + half];
        v[i] = fma_lanes(lo, load_lanes(cos), mul_lanes(hi, load_lanes(sin)));
        v[i + half] = fma_lanes(hi, load_lanes(cos + dim / 2),
                                mul_lanes(lo, load_lanes(sin + dim / 2)));
    }
#pragma GCC unroll 4
    for (int i = 0; i < n; i += 2) put_32(y + 16 * i, v[i], v[i + 1], stream);
}

INLINE void turn_heads(bf16 *row, bf16 *keys, const bf16 *w, const bf16 *turns, int heads,
                       int kv_heads, const int dim, float eps, const int stream) {
    float table[2 * 128];
    for (int i = 0; i < 2 * dim; i += 16) store_lanes(table + i, wide_lanes(turns + i));
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
    size_t bytes = keys == row + heads * dim ? 0 : (size_t)kv_heads * dim * sizeof(bf16);
#ifdef FLOATS16
    if (stream) {
        if (dim == 128) turn_heads(row, keys, w, turns, heads, kv_heads, 128, eps, 1);
        else turn_heads(row, keys, w, turns, heads, kv_heads, 64, eps, 1);
        for (int i = 0; i < kv_heads * dim; i += 32)
            stream_line(values + i, _mm256_loadu_si256((const __m256i *)(from + i)),
                        _mm256_loadu_si256((const __m256i *)(from + i + 16)));
        return;
    }
    memcpy(values, from, bytes);
    if (dim == 128) {
        turn_heads(row, keys, w, turns, heads, kv_heads, 128, eps, 0);
        return;
    }
    if (dim == 64) {
        turn_heads(row, keys, w, turns, heads, kv_heads, 64, eps, 0);
        return;
    }
#else
    memcpy(values, from, bytes);
#endif
    for (int h = 0; h < heads + kv_heads; h++)
        turn(row + h * dim, w ? w + h * dim : 0, turns, dim, eps);
    memcpy(keys, row + heads * dim, bytes);
}

/* A head as codes in int8 and its scale: |x|'s largest / 127 rounded up to bf16, so that no code is
 * beyond 127. Of zeros all is 0; with infinities or NaN the scale is NaN. */
INLINE void quantise(const bf16 *x, int8_t *codes, bf16 *scale, int dim) {
    uint16_t most = 0; /* as bits: infinities and NaN are above all numbers */
    for (int i = 0; i < dim; i++) {
        uint16_t size = x[i] & 0x7fff;
        most = size > most ? size : most;
    }
    float step = wide(most) / 127;
    uint32_t bits;
    memcpy(&bits, &step, 4);
    *scale = most < 0x7f80 ? (bf16)((bits + 0xffff) >> 16) : 0x7fc0;
    if (!most || most >= 0x7f80) {
        memset(codes, 0, (size_t)dim);
        return;
    }
    step = wide(*scale);
    for (int i = 0; i < dim; i++) codes[i] = (int8_t)(int)rintf(wide(x[i]) / step);
}

/* scales: 0: pages are bf16; otherwise pages are codes in int8, and each head of a token has a scale:
 * bf16 [tokens, 2 * kv_heads]. Keys, normed and rotated, are bf16 before they become codes. */
void rotate_write(bf16 *qkv, const bf16 *w, const bf16 *turns, void *pages, bf16 *scales,
                  const int64_t *index, int64_t rows, int heads, int kv_heads, int dim, float eps,
                  int threads) {
    int64_t width = (int64_t)(heads + 2 * kv_heads) * dim, kv = (int64_t)2 * kv_heads * dim;
    int stream = (dim == 128 || dim == 64) && rows * kv >= STREAM_FROM && (uintptr_t)pages % 64 == 0;
#pragma omp parallel for num_threads(threads) if (rows * width > 16384)
    for (int64_t t = 0; t < rows; t++) {
        bf16 *row = qkv + t * width, *own = row + heads * dim;
        bf16 *to = scales ? own : (bf16 *)pages + index[t] * kv;
        turn_row(row, to, w, turns + t * 2 * dim, heads, kv_heads, dim, eps, stream && !scales);
        for (int h = 0; scales && h < 2 * kv_heads; h++)
            quantise(own + h * dim, (int8_t *)pages + index[t] * kv + h * dim,
                     scales + index[t] * 2 * kv_heads + h, dim);
    }
}
