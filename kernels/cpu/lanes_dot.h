/* Products in f32 with 16 columns at a time, where the processor has no products of bf16: for each
 * step two loads at most and a broadcast of every row serve twice as many multiplications. Every sum
 * is made in the order of its steps, whatever the number of rows. */
#pragma once
#include "common.h"

#ifdef FLOATS16
#ifdef FLOATS16_512
#define DOT_ROWS 12 /* their sums fill the registers */
#else
#define DOT_ROWS 6
#endif

/* Rows of numbers: from row to row, and from step to step. */
struct dot_rows { const float *at; int64_t apart, next; };

/* sums[r][0:16 * m] (+)= n rows of a by `steps` rows of b, which lie b_next numbers apart, as sums'
 * rows lie sums_apart. */
INLINE void dot_block(const int n, const int m, struct dot_rows a, const float *b,
                      const int64_t b_next, int64_t steps, float *sums, const int64_t sums_apart,
                      int fresh) {
    floats16 s[DOT_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < n; r++)
#pragma GCC unroll 2
        for (int c = 0; c < m; c++)
            s[r][c] = fresh ? no_lanes() : load_lanes(sums + r * sums_apart + 16 * c);
#pragma GCC unroll 2
    for (int64_t k = 0; k < steps; k++, a.at += a.next, b += b_next) {
        floats16 w[2];
#pragma GCC unroll 2
        for (int c = 0; c < m; c++) w[c] = load_lanes(b + 16 * c);
#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            floats16 x = all_lanes(a.at[r * a.apart]);
#pragma GCC unroll 2
            for (int c = 0; c < m; c++) s[r][c] = fma_lanes(x, w[c], s[r][c]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < n; r++)
#pragma GCC unroll 2
        for (int c = 0; c < m; c++) store_lanes(sums + r * sums_apart + 16 * c, s[r][c]);
}
#endif
