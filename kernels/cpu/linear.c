/* Matrix products with few rows. */
#include "common.h"

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
