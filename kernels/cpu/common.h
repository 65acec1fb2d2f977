/* What the CPU kernels share: bf16 <-> fp32, and a vectorisable exponential.
 *
 * The kernels serve bf16 models; what torch does in many passes is done in one. Plain C with OpenMP,
 * written so that the compiler vectorises it; tiles (tiles.h) are used where the processor has
 * them. Arithmetic is fp32, rounded to bf16 once, to nearest even. Every function takes
 * the number of threads; `native_library.py` lists the arguments. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef uint16_t bf16;
#define INLINE static inline __attribute__((always_inline))
#include "lanes.h"
#include "tiles.h"
#define MAX_DIM 256  /* numbers of a head in recurrent layers, towers and attention in 8 bits */
#define MAX_HEAD 512 /* the same in all other attention */

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
/* tanh, 2e-5 off beyond 3 and a few in the last place below: its continued fraction, cut off. */
INLINE float tanh_of(float x) {
    x = x > 5 ? 5 : x < -5 ? -5 : x;
    const float y = x * x;
    return x * (((y + 378) * y + 17325) * y + 135135)
           / (((28 * y + 3150) * y + 62370) * y + 135135);
}

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
