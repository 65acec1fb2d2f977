/* A GatedDeltaNet layer between its two projections: what one token, windows of drafts and many
 * tokens a sequence share. Gated delta rule, with all that is around it: convolution, SiLU, lengths
 * of queries and keys, gates, norm and output gate.
 *
 * A key head and the value heads it serves touch no other channel, so each is a task of its own. */
#pragma once
#include "common.h"
#define MAX_WIDTH 8

typedef struct {
    const bf16 *p;        /* [rows, stride]: queries, keys, values, z, b, a */
    int64_t stride;
    const int64_t *slots; /* [rows]: rows of columns and states; below 0: padding, without any */
    bf16 *columns;        /* [slots, width - 1, channels] */
    const float *conv;    /* [width, channels] */
    void *states;         /* [slots, values, value_dim, key_dim] */
    const float *decay, *bias, *norm;
    bf16 *out;            /* [rows, values * value_dim] */
    int width, keys, values, key_dim, value_dim, narrow_states;
    float eps;
} Delta;

INLINE float silu(float x) {
    float e = exp_neg(-fabsf(x));
    return x * (x >= 0 ? 1.0f : e) / (1.0f + e);
}

INLINE void to_length(float *x, int n, float length) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    float scale = length / sqrtf(sum + 1e-6f);
    for (int i = 0; i < n; i++) x[i] *= scale;
}

INLINE void gates(const Delta *d, const bf16 *b, int h, float *decay, float *beta) {
    float a = wide(b[d->values + h]) + d->bias[h];
    *decay = expf(-d->decay[h] * (a > 20.0f ? a : log1pf(expf(a))));
    *beta = 1.0f / (1.0f + expf(-wide(b[h])));
}

INLINE void gated_norm(const Delta *d, const float *y, const bf16 *z, bf16 *out) {
    int m = d->value_dim;
    float sum = 0;
    for (int i = 0; i < m; i++) sum += y[i] * y[i];
    float scale = 1.0f / sqrtf(sum / m + d->eps);
    for (int i = 0; i < m; i++) out[i] = narrow(y[i] * scale * d->norm[i] * silu(wide(z[i])));
}

INLINE void *state_at(const Delta *d, int64_t slot, int head) {
    int64_t size = (int64_t)d->value_dim * d->key_dim * (d->narrow_states ? 2 : 4);
    return (char *)d->states + (slot * d->values + head) * size;
}
