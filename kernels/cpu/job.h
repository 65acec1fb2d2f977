/* A product with a packed weight, and what is done with each row of 32 sums. */
#pragma once
#include "packed.h"

enum { OUT_BF16, OUT_FLOAT, OUT_SILU };
#define MAX_LEVELS 4 /* of a tree of 16 leaves: see `linear_leaves` */

struct job {
    const struct packed *w;
    const bf16 *x, *bias, *add; /* [rows, ins]; [outs] or 0; [rows, outs] or 0 */
    void *y;                    /* [rows, outs]; OUT_SILU: [rows, outs / 2], of gate and up columns
                                   that alternate by 16 */
    int64_t rows;
    int kind;
    int stream; /* not OUT_FLOAT: write whole lines past the caches */
    int64_t apart;                  /* numbers from row to row of x */
    int folds;                      /* so many of `parts` are added, in their order */
    const float *parts[MAX_LEVELS]; /* [rows, outs], PANEL numbers behind the last readable */
};

/* What is fetched meanwhile: so many lines with every block. */
struct ahead { const uint8_t *at; int lines; };

#ifdef PRODUCTS
/* g * sigmoid(g), 1e-4 off: far below what rounding to bf16 takes. */
INLINE floats16 silu_lanes(floats16 g) {
    floats16 e = exp2_lanes(mul_lanes(g, all_lanes(-1.44269504f)));
    return mul_lanes(g, inverse_lanes(add_lanes(all_lanes(1), e)));
}

/* Bias, residual and rounding of one row of a panel's sums, and the store. half: with OUT_SILU and
 * `stream`, where the half of a line that an even panel gives waits for that of the next. */
INLINE void finish_row(const struct job *j, floats16 a, floats16 b, int64_t row, int64_t panel,
                       __m256i *half) {
    int64_t n = panel * PANEL, outs = j->w->outs, left = outs - n;
    if (j->bias) {
        a = add_lanes(a, wide_some(j->bias + n, left));
        b = add_lanes(b, wide_some(j->bias + n + 16, left - 16));
    }
    for (int i = 0; i < j->folds; i++) {
        const float *part = j->parts[i] + row * outs + n;
        a = add_lanes(settled_lanes(a), load_lanes(part));
        b = add_lanes(settled_lanes(b), load_lanes(part + 16));
    }
    if (j->folds) a = settled_lanes(a), b = settled_lanes(b);
    if (j->kind == OUT_SILU) {
        __m256i out = to_bf16(mul_lanes(silu_lanes(a), b));
        bf16 *y = (bf16 *)j->y + row * (outs / 2) + n / 2;
        if (!j->stream) _mm256_storeu_si256((__m256i *)y, out);
        else if (panel % 2 == 0) _mm256_store_si256(half, out);
        else stream_line(y - 16, _mm256_load_si256(half), out);
        return;
    }
    if (j->add) {
        a = add_lanes(a, wide_some(j->add + row * outs + n, left));
        b = add_lanes(b, wide_some(j->add + row * outs + n + 16, left - 16));
    }
    if (j->kind == OUT_FLOAT) {
        float *y = (float *)j->y + row * outs + n;
        store_some(y, a, left);
        store_some(y + 16, b, left - 16);
        return;
    }
    bf16 *y = (bf16 *)j->y + row * outs + n;
    if (j->stream) stream_line(y, to_bf16(a), to_bf16(b));
    else if (left >= PANEL) narrow_line(y, a, b);
    else {
        narrow_some(y, a, left);
        narrow_some(y + 16, b, left - 16);
    }
}

/* Panels [from, to) for at most MAX_FEW rows. */
#define MAX_FEW 32
void product_few(const struct job *j, int64_t from, int64_t to);

/* Many rows go in blocks of `many_rows`. A block is arranged in a thread's scratch once, and then
 * multiplied by panels [from, to), `from` even, as often as there are any. */
int64_t many_scratch(void);
int64_t many_rows(const struct job *j);
void many_arrange(const struct job *j, int64_t row0, int64_t rows, uint8_t *scratch);
void product_many(const struct job *j, int64_t row0, int64_t rows, int64_t from, int64_t to,
                  uint8_t *scratch);
#endif
