/* CPU kernels for bf16 models: what torch does in many passes, done in one.
 *
 * Plain C with OpenMP, written so that the compiler vectorises it; AVX512-BF16 is used where the
 * processor has it. Arithmetic is fp32, rounded to bf16 once, to nearest even. Every function takes
 * the number of threads; `native.py` describes the arguments. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef uint16_t bf16;
#define INLINE static inline __attribute__((always_inline))
#define CHUNK 128 /* tokens per round of the online softmax */
#define GROUP 8   /* query heads per round */
#define AHEAD 6   /* tokens whose keys are fetched ahead: too scattered for the processor to guess */
#define MAX_DIM 256

INLINE float wide(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* e**x for x <= 0 (Cephes' polynomial), vectorisable. */
INLINE float exp_neg(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

INLINE float inverse_rms(const bf16 *x, int n, float eps) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += wide(x[i]) * wide(x[i]);
    return 1.0f / sqrtf(sum / n + eps);
}

int actorium_version(void) { return 1; }

void rms_norm(const bf16 *x, const bf16 *w, bf16 *y, int64_t rows, int dim, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 32768)
    for (int64_t t = 0; t < rows; t++) {
        const bf16 *in = x + t * dim;
        bf16 *out = y + t * dim;
        float r = inverse_rms(in, dim, eps);
        for (int i = 0; i < dim; i++) out[i] = narrow(wide(in[i]) * r * wide(w[i]));
    }
}

void silu_mul(const bf16 *gate_up, bf16 *y, int64_t rows, int dim, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 16384)
    for (int64_t t = 0; t < rows; t++) {
        const bf16 *gate = gate_up + t * 2 * dim, *up = gate + dim;
        bf16 *out = y + t * dim;
        for (int i = 0; i < dim; i++) {
            float g = wide(gate[i]);
            float e = exp_neg(-fabsf(g));
            float s = (g >= 0 ? 1.0f : e) / (1.0f + e);
            out[i] = narrow(g * s * wide(up[i]));
        }
    }
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

void rotate_write(bf16 *qkv, const bf16 *w, const bf16 *turns, bf16 *pages, const int64_t *index,
                  int64_t rows, int heads, int kv_heads, int dim, float eps, int threads) {
    int64_t width = (int64_t)(heads + 2 * kv_heads) * dim, kv = (int64_t)2 * kv_heads * dim;
#pragma omp parallel for num_threads(threads) if (rows * width > 16384)
    for (int64_t t = 0; t < rows; t++) {
        bf16 *row = qkv + t * width;
        for (int h = 0; h < heads + kv_heads; h++)
            turn(row + h * dim, w ? w + h * dim : 0, turns + t * 2 * dim, dim, eps);
        memcpy(pages + index[t] * kv, row + heads * dim, kv * sizeof(bf16));
    }
}

/* Attention of `group` query heads, which share one key head, over tokens first..len of a row. */
INLINE void attend(const bf16 *q, const bf16 *pages, const int32_t *table, int page_bits, int first,
                   int len, int group, int64_t stride, int values, int dim, float scale, bf16 *out) {
    float query[GROUP][MAX_DIM], acc[GROUP][MAX_DIM], score[GROUP][CHUNK];
    float top[GROUP], sum[GROUP];
    for (int g = 0; g < group; g++) {
        top[g] = -INFINITY, sum[g] = 0;
        for (int i = 0; i < dim; i++) query[g][i] = wide(q[g * dim + i]) * scale, acc[g][i] = 0;
    }
    int mask = (1 << page_bits) - 1;
    const bf16 *at[CHUNK];
    for (int begin = first; begin < len; begin += CHUNK) {
        int count = len - begin < CHUNK ? len - begin : CHUNK;
        for (int s = 0; s < count; s++) {
            int p = begin + s;
            at[s] = pages + (((int64_t)table[p >> page_bits] << page_bits) + (p & mask)) * stride;
        }
        for (int s = 0; s < count; s++) {
            const bf16 *soon = at[s + AHEAD < count ? s + AHEAD : count - 1];
            for (int i = 0; i < dim; i += 32)
                __builtin_prefetch(soon + i), __builtin_prefetch(at[s] + values + i);
            float key[MAX_DIM];
            for (int i = 0; i < dim; i++) key[i] = wide(at[s][i]);
            for (int g = 0; g < group; g++) {
                float dot = 0;
                for (int i = 0; i < dim; i++) dot += query[g][i] * key[i];
                score[g][s] = dot;
            }
        }
        for (int g = 0; g < group; g++) {
            float best = top[g];
            for (int s = 0; s < count; s++) best = score[g][s] > best ? score[g][s] : best;
            float fade = exp_neg(top[g] - best), total = 0;
            for (int s = 0; s < count; s++) total += score[g][s] = exp_neg(score[g][s] - best);
            top[g] = best, sum[g] = sum[g] * fade + total;
            for (int i = 0; i < dim; i++) acc[g][i] *= fade;
        }
        for (int s = 0; s < count; s++) {
            float value[MAX_DIM];
            for (int i = 0; i < dim; i++) value[i] = wide(at[s][values + i]);
            for (int g = 0; g < group; g++) {
                float p = score[g][s];
                for (int i = 0; i < dim; i++) acc[g][i] += p * value[i];
            }
        }
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < dim; i++) out[g * dim + i] = narrow(acc[g][i] / sum[g]);
}

void paged_decode(const bf16 *q, int64_t q_stride, const bf16 *pages, const int32_t *tables,
                  int64_t table_stride, const int32_t *lens, bf16 *out, int64_t rows, int heads,
                  int kv_heads, int dim, int page_bits, int window, float scale, int threads) {
    int group = heads / kv_heads, kv = kv_heads * dim;
    int64_t tasks = rows * kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (rows > 1 || lens[0] > 64)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t b = task / kv_heads;
        int k = (int)(task % kv_heads), len = lens[b];
        int first = window && len > window ? len - window : 0;
        for (int g = 0; g < group; g += GROUP) {
            int n = group - g < GROUP ? group - g : GROUP;
            int64_t h = (int64_t)k * group + g;
#define CALL(N, D) attend(q + b * q_stride + h * dim, pages + k * dim, tables + b * table_stride, \
                          page_bits, first, len, N, 2 * kv, kv, D, scale, out + (b * heads + h) * dim)
            if (dim == 128) CALL(n, 128);
            else if (dim == 64) CALL(n, 64);
            else CALL(n, dim);
        }
    }
}

INLINE float dot(const bf16 *a, const bf16 *b, int n) {
#ifdef __AVX512BF16__
    __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
    int i = 0;
#define LOAD(p) ((__m512bh)_mm512_loadu_si512(p))
    for (; i + 128 <= n; i += 128) {
        s0 = _mm512_dpbf16_ps(s0, LOAD(a + i), LOAD(b + i));
        s1 = _mm512_dpbf16_ps(s1, LOAD(a + i + 32), LOAD(b + i + 32));
        s2 = _mm512_dpbf16_ps(s2, LOAD(a + i + 64), LOAD(b + i + 64));
        s3 = _mm512_dpbf16_ps(s3, LOAD(a + i + 96), LOAD(b + i + 96));
    }
    for (; i + 32 <= n; i += 32) s0 = _mm512_dpbf16_ps(s0, LOAD(a + i), LOAD(b + i));
    float sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(s0, s1), _mm512_add_ps(s2, s3)));
    for (; i < n; i++) sum += wide(a[i]) * wide(b[i]);
    return sum;
#else
    float sum = 0;
    for (int i = 0; i < n; i++) sum += wide(a[i]) * wide(b[i]);
    return sum;
#endif
}

/* y[t, n] = x[t] . w[n] (+ bias[n]) (+ add[t, n]); bias and add may be 0. */
void linear(const bf16 *x, const bf16 *w, const bf16 *bias, const bf16 *add, bf16 *y, int64_t rows,
            int outs, int ins, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if ((int64_t)outs * ins > 65536)
    for (int n = 0; n < outs; n++) {
        for (int64_t t = 0; t < rows; t++) {
            float sum = dot(x + t * ins, w + (int64_t)n * ins, ins);
            if (bias) sum += wide(bias[n]);
            if (add) sum += wide(add[t * outs + n]);
            y[t * outs + n] = narrow(sum);
        }
    }
}
