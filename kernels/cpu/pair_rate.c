/* Whether products of pairs of bf16 (AVX512-BF16) are worth having on this processor.
 *
 * An instruction multiplies 16 pairs: 32 products. On an Intel processor whose AMX a virtual machine
 * hides it took as long as four of f32, 64 products: widening to f32 is the faster way there where
 * products and not memory take the time. The library is built after what this measures. */
#include "common.h"
#include <time.h>

#define TURNS 5
#define REPEATS 20000

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

#define TIMED(best, call)                                                                          \
    do {                                                                                           \
        double began = seconds();                                                                  \
        for (int i = 0; i < REPEATS; i++) {                                                        \
            _Pragma("GCC unroll 12") for (int j = 0; j < 12; j++) sums[j] = call;                  \
            __asm__ volatile("" : "+v"(x)); /* or all but one round are left out */                \
        }                                                                                          \
        double took = seconds() - began;                                                           \
        best = took < best ? took : best;                                                          \
    } while (0)

/* The time of as many products in f32, against that of pairs; of the best of some turns each. */
double pair_rate(void) {
    __m512 sums[12], x = _mm512_set1_ps(1e-9f);
    double pairs = 1e9, floats = 1e9;
    for (int j = 0; j < 12; j++) sums[j] = _mm512_setzero_ps();
    for (int turn = 0; turn < TURNS; turn++) {
        TIMED(pairs, _mm512_dpbf16_ps(sums[j], (__m512bh)x, (__m512bh)x));
        TIMED(floats, _mm512_fmadd_ps(x, x, sums[j]));
    }
    for (int j = 0; j < 12; j++) __asm__ volatile("" : : "v"(sums[j]));
    return 2 * floats / pairs;
}
#else
double pair_rate(void) { return 2; } /* nothing is to be chosen */
#endif
