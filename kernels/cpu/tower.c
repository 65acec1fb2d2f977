/* What a vision tower takes beside products, norms and attention (extend.c): its heads are turned in
 * f32, and its activations are tables. Each number by itself, whatever others there are. */
#include "common.h"

/* One head by its angles, from x to y, which may be the same. turns: cos[dim], then signed sin[dim]. */
INLINE void turn_wide(const bf16 *x, bf16 *y, const float *turns, int dim) {
    float a[MAX_DIM];
    int half = dim / 2;
    for (int i = 0; i < dim; i++) a[i] = wide(x[i]);
    for (int i = 0; i < half; i++) {
        y[i] = narrow(a[i] * turns[i] + a[i + half] * turns[dim + i]);
        y[i + half] = narrow(a[i + half] * turns[half + i] + a[i] * turns[dim + half + i]);
    }
}

/* Turns queries in place, and keys on their way to `kept`, the values behind them. qkv: [rows, 3 *
 * heads, dim]; kept: [rows, 2 * heads, dim], as pages of one token each; turns: f32[rows, 2, dim]. */
void turn_heads_wide(bf16 *qkv, const float *turns, bf16 *kept, int64_t rows, int heads, int dim,
                     int threads) {
    int64_t all = (int64_t)heads * dim;
#pragma omp parallel for num_threads(threads) if (rows * all > 16384)
    for (int64_t t = 0; t < rows; t++) {
        bf16 *row = qkv + t * 3 * all, *to = kept + t * 2 * all;
        for (int64_t h = 0; h < all; h += dim) {
            turn_wide(row + h, row + h, turns + t * 2 * dim, dim);
            turn_wide(row + all + h, to + h, turns + t * 2 * dim, dim);
        }
        memcpy(to + all, row + 2 * all, all * sizeof(bf16));
    }
}

/* y[i] = numbers[x[i]]: a function of one number in bf16 is a table of all 65536. */
void map_numbers(const bf16 *x, const bf16 *numbers, bf16 *y, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) if (count > 16384)
    for (int64_t i = 0; i < count; i++) y[i] = numbers[x[i]];
}
