/* A causal convolution of each channel, token by token, with or without SiLU: the same code for
 * prompts and decodes, so that they have the same bits. */
#pragma once
#include "delta.h"

typedef struct {
    const bf16 *p;      /* [tokens, stride]: the channels */
    int64_t stride;
    const int64_t *runs, *saves, *save_starts; /* see `delta_native.Runs`; a row below 0: padding */
    bf16 *columns;      /* [slots, width - 1, channels] */
    const float *weight, *bias; /* [width, channels], [channels] or NULL */
    float *out;         /* [tokens, channels] */
    int64_t channels;
    int width, activate;
} Conv;

/* What it sees as token t of a run: a row of p, or a column kept from before. */
INLINE const bf16 *input_of(const Conv *c, const int64_t *run, int64_t t) {
    return t >= 0 ? c->p + (run[0] + t) * c->stride
                  : c->columns + (run[2] * (c->width - 1) + c->width - 1 + t) * c->channels;
}

/* Not inlined: every caller rounds alike. */
static __attribute__((noinline)) void convolve_token(const Conv *c, const int64_t *run, int64_t t) {
    const bf16 *x[MAX_WIDTH];
    float *y = c->out + (run[0] + t) * c->channels;
    for (int j = 0; j < c->width; j++) x[j] = input_of(c, run, t - c->width + 1 + j);
    for (int64_t i = 0; i < c->channels; i++) {
        float sum = wide(x[0][i]) * c->weight[i];
        for (int j = 1; j < c->width; j++) sum += wide(x[j][i]) * c->weight[j * c->channels + i];
        if (c->bias) sum += c->bias[i];
        y[i] = c->activate ? silu(sum) : sum;
    }
}

/* The columns behind token t of a run, to a row of their pool. Its own comes last: what is moved
 * there lies behind what is overwritten. */
INLINE void keep_columns(const Conv *c, const int64_t *run, int64_t t, int64_t row) {
    int64_t last = c->width - 1;
    for (int64_t j = 0; j < last; j++)
        memmove(c->columns + (row * last + j) * c->channels, input_of(c, run, t - last + j),
                c->channels * sizeof(bf16));
}

/* A token, which is of this sequence. */
INLINE void convolve_of(const Conv *c, const int64_t *run, int64_t t) {
    if (run[2] >= 0) convolve_token(c, run, t - run[0]);
    else memset(c->out + t * c->channels, 0, c->channels * sizeof(float));
}

/* The columns that sequence i leaves. */
INLINE void keep_all_columns(const Conv *c, int64_t i) {
    const int64_t *run = c->runs + 3 * i;
    for (int64_t s = c->save_starts[i]; s < c->save_starts[i + 1]; s++)
        if (c->saves[2 * s + 1] != run[2])
            keep_columns(c, run, c->saves[2 * s], c->saves[2 * s + 1]);
    if (run[2] >= 0) keep_columns(c, run, run[1], run[2]);
}

/* Sequence i, by one thread. */
INLINE void convolve_run(const Conv *c, int64_t i) {
    const int64_t *run = c->runs + 3 * i;
    for (int64_t t = run[0]; t < run[0] + run[1]; t++) convolve_of(c, run, t);
    keep_all_columns(c, i);
}

/* All tokens of `count` sequences, then the columns that they leave; within a parallel region.
 * owners: which sequence each token is of. */
INLINE void convolve_all(const Conv *c, int64_t count, int64_t tokens, const int64_t *owners) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; t++) convolve_of(c, c->runs + 3 * owners[t], t);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) keep_all_columns(c, i);
}
