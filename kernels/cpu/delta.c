/* Gated delta rule, with all that is around it in a GatedDeltaNet layer: convolution, SiLU, lengths
 * of queries and keys, gates, norm and output gate.
 *
 * A key head and the value heads it serves touch no other channel, so each is a task of its own. For
 * one token a sequence, its state is read and written once. Over many tokens, the rows of the state
 * (one for each value) know nothing of each other: a few at a time stay in registers while a block
 * of tokens, whose keys and queries lie in the nearest cache, goes by. */
#include "common.h"
#include <stdlib.h>
#define BLOCK 32
#define MAX_WIDTH 8

typedef struct {
    const bf16 *p;        /* [rows, stride]: queries, keys, values, z, b, a */
    int64_t stride;
    const int64_t *slots; /* [rows]: rows of columns and states */
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

/* The convolution of `count` channels from `first` on, whose columns move on by the new token. */
INLINE void convolve(const Delta *d, const bf16 *x, bf16 *columns, int first, int count, float *y) {
    int channels = 2 * d->keys * d->key_dim + d->values * d->value_dim, last = d->width - 1;
    const float *taps = d->conv + first;
    x += first;
    columns += first;
    for (int i = 0; i < count; i++) y[i] = wide(x[i]) * taps[(int64_t)last * channels + i];
    for (int t = 0; t < last; t++) {
        bf16 *own = columns + (int64_t)t * channels;
        const bf16 *next = t + 1 < last ? own + channels : x;
        for (int i = 0; i < count; i++) {
            y[i] += wide(own[i]) * taps[(int64_t)t * channels + i];
            own[i] = next[i];
        }
    }
    for (int i = 0; i < count; i++) y[i] = silu(y[i]);
}

INLINE void to_length(float *x, int n, float length) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    float scale = length / sqrtf(sum + 1e-6f);
    for (int i = 0; i < n; i++) x[i] *= scale;
}

/* S = decay S + beta (v - decay S k) k^T; y = S q. */
#define RECUR(TYPE, LOAD, STORE)                                                                  \
    for (int r = 0; r < rows; r++) {                                                              \
        TYPE *s = (TYPE *)state + (int64_t)r * n;                                                 \
        float mem = 0, seen = 0;                                                                  \
        for (int i = 0; i < n; i++) {                                                             \
            float x = LOAD(s[i]);                                                                 \
            mem += x * k[i];                                                                      \
            seen += x * q[i];                                                                     \
        }                                                                                         \
        float change = beta * (v[r] - decay * mem);                                               \
        y[r] = decay * seen + change * kq;                                                        \
        for (int i = 0; i < n; i++) s[i] = STORE(decay * LOAD(s[i]) + change * k[i]);             \
    }
#define SAME(x) (x)

static void recur(void *state, int narrow_state, int rows, int n, const float *q, const float *k,
                  const float *v, float decay, float beta, float *y) {
    float kq = 0;
    for (int i = 0; i < n; i++) kq += k[i] * q[i];
    if (narrow_state) {
        RECUR(bf16, wide, narrow)
    } else {
        RECUR(float, SAME, SAME)
    }
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

static void one(const Delta *d, int64_t row, int head) {
    float q[MAX_DIM], k[MAX_DIM], v[MAX_DIM], y[MAX_DIM], decay, beta;
    int n = d->key_dim, m = d->value_dim, shared = d->values / d->keys;
    int edge = 2 * d->keys * n, channels = edge + d->values * m;
    const bf16 *p = d->p + row * d->stride, *z = p + channels, *b = z + d->values * m;
    int64_t slot = d->slots[row];
    bf16 *columns = d->columns + slot * (d->width - 1) * channels;
    convolve(d, p, columns, head * n, n, q);
    convolve(d, p, columns, (d->keys + head) * n, n, k);
    to_length(q, n, 1.0f / sqrtf(n));
    to_length(k, n, 1.0f);
    for (int h = head * shared; h < (head + 1) * shared; h++) {
        convolve(d, p, columns, edge + h * m, m, v);
        gates(d, b, h, &decay, &beta);
        int64_t at = (slot * d->values + h) * m * n * (d->narrow_states ? 2 : 4);
        recur((char *)d->states + at, d->narrow_states, m, n, q, k, v, decay, beta, y);
        gated_norm(d, y, z + h * m, d->out + (row * d->values + h) * m);
    }
}

void delta_step(const bf16 *p, int64_t stride, int64_t rows, const int64_t *slots, bf16 *columns,
                const float *conv, void *states, const float *decay, const float *bias,
                const float *norm, bf16 *out, const int *sizes, float eps, int threads) {
    Delta d = {p, stride, slots, columns, conv, states, decay, bias, norm, out,
               sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], eps};
    int64_t tasks = rows * d.keys;
#pragma omp parallel for num_threads(threads) if (tasks > 1)
    for (int64_t t = 0; t < tasks; t++) one(&d, t / d.keys, (int)(t % d.keys));
}

/* --- many tokens a sequence ------------------------------------------------------------------- */

typedef struct {
    float q[BLOCK * MAX_DIM], k[BLOCK * MAX_DIM], v[BLOCK * MAX_DIM], y[BLOCK * MAX_DIM];
    float kq[BLOCK], decay[BLOCK], beta[BLOCK];
} Block;

typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));

INLINE float total(lanes x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += x[i];
    return sum;
#endif
}

/* COUNT rows of a state of 16 * PARTS keys, over all tokens of the block. */
#define DEFINE_ROWS(NAME, PARTS, COUNT)                                                           \
    static void NAME(Block *b, int tokens, float *state, int first, int m) {                      \
        enum { n = 16 * PARTS };                                                                  \
        lanes s[COUNT][PARTS];                                                                    \
        EACH_ROW EACH_PART s[r][i] = *(const lanes *)(state + (int64_t)(first + r) * n + 16 * i); \
        for (int t = 0; t < tokens; t++) {                                                        \
            const lanes *k = (const lanes *)(b->k + t * n), *q = (const lanes *)(b->q + t * n);   \
            lanes mem[COUNT][2], seen[COUNT][2];                                                  \
            EACH_ROW EACH_PART {                                                                  \
                mem[r][i & 1] = i < 2 ? s[r][i] * k[i] : mem[r][i & 1] + s[r][i] * k[i];          \
                seen[r][i & 1] = i < 2 ? s[r][i] * q[i] : seen[r][i & 1] + s[r][i] * q[i];        \
            }                                                                                     \
            float decay = b->decay[t], change[COUNT];                                             \
            EACH_ROW {                                                                            \
                int at = t * m + first + r;                                                       \
                change[r] = b->beta[t] * (b->v[at] - decay * total(mem[r][0] + mem[r][1]));       \
                b->y[at] = decay * total(seen[r][0] + seen[r][1]) + change[r] * b->kq[t];         \
            }                                                                                     \
            EACH_ROW EACH_PART s[r][i] = s[r][i] * decay + k[i] * change[r];                      \
        }                                                                                         \
        EACH_ROW EACH_PART *(lanes *)(state + (int64_t)(first + r) * n + 16 * i) = s[r][i];       \
    }
#define UNROLL _Pragma("GCC unroll 16")
#define EACH_ROW UNROLL for (int r = 0; r < (int)(sizeof s / sizeof *s); r++)
#define EACH_PART UNROLL for (int i = 0; i < (int)(sizeof *s / sizeof **s); i++)

DEFINE_ROWS(rows_4x4, 4, 4)
DEFINE_ROWS(rows_4x1, 4, 1)
DEFINE_ROWS(rows_8x2, 8, 2)
DEFINE_ROWS(rows_8x1, 8, 1)
DEFINE_ROWS(rows_16x1, 16, 1)

#define ALL_ROWS(SOME, COUNT, ONE)                                                                \
    {                                                                                             \
        int r = 0;                                                                                \
        for (; r + COUNT <= m; r += COUNT) SOME(b, tokens, state, r, m);                          \
        for (; r < m; r++) ONE(b, tokens, state, r, m);                                           \
    }

static void through(Block *b, int tokens, float *state, int m, int n) {
    if (n == 128) ALL_ROWS(rows_8x2, 2, rows_8x1)
    else if (n == 64) ALL_ROWS(rows_4x4, 4, rows_4x1)
    else if (n == 256) ALL_ROWS(rows_16x1, 1, rows_16x1)
    else
        for (int t = 0; t < tokens; t++)
            recur(state, 0, m, n, b->q + t * n, b->k + t * n, b->v + t * m, b->decay[t],
                  b->beta[t], b->y + t * m);
}

/* A sequence: its first row of p, its tokens, its row of the state pool. */
typedef struct {
    int64_t start, count, slot;
} Run;

/* `taps[j]` of token t of a run: a row of p, or a column kept from before. */
INLINE const bf16 *input(const Delta *d, const Run *run, int64_t t, int channels) {
    return t >= 0 ? d->p + (run->start + t) * d->stride
                  : d->columns + (run->slot * (d->width - 1) + d->width - 1 + t) * channels;
}

INLINE void convolve_at(const Delta *d, const Run *run, int64_t t, int channels, int first,
                        int count, float *y) {
    for (int j = 0; j < d->width; j++) {
        const bf16 *x = input(d, run, t - d->width + 1 + j, channels) + first;
        const float *taps = d->conv + (int64_t)j * channels + first;
        if (j == 0)
            for (int i = 0; i < count; i++) y[i] = wide(x[i]) * taps[i];
        else
            for (int i = 0; i < count; i++) y[i] += wide(x[i]) * taps[i];
    }
    for (int i = 0; i < count; i++) y[i] = silu(y[i]);
}

/* The columns of these channels after `tokens` tokens, to a row of the pool; from the oldest on, as
 * the row may be the run's own. */
INLINE void keep_columns(const Delta *d, const Run *run, int64_t tokens, int64_t slot, int channels,
                         int first, int count) {
    int last = d->width - 1;
    for (int j = 0; j < last; j++)
        memcpy(d->columns + (slot * last + j) * channels + first,
               input(d, run, tokens - last + j, channels) + first, count * sizeof(bf16));
}

INLINE void *state_at(const Delta *d, int64_t slot, int head) {
    int64_t size = (int64_t)d->value_dim * d->key_dim * (d->narrow_states ? 2 : 4);
    return (char *)d->states + (slot * d->values + head) * size;
}

/* The states of `shared` heads, which lie together, to a row of the pool. */
static void keep_states(const Delta *d, const float *from, int64_t slot, int head, int shared) {
    int64_t size = (int64_t)shared * d->value_dim * d->key_dim;
    void *to = state_at(d, slot, head);
    if (d->narrow_states)
        for (int64_t i = 0; i < size; i++) ((bf16 *)to)[i] = narrow(from[i]);
    else if (to != from)
        memcpy(to, from, size * 4);
}

static void block_of(const Delta *d, const Run *run, int64_t at, int tokens, int head, float *states,
                     Block *b) {
    int n = d->key_dim, m = d->value_dim, shared = d->values / d->keys;
    int edge = 2 * d->keys * n, channels = edge + d->values * m;
    for (int t = 0; t < tokens; t++) {
        float *q = b->q + t * n, *k = b->k + t * n, kq = 0;
        convolve_at(d, run, at + t, channels, head * n, n, q);
        convolve_at(d, run, at + t, channels, (d->keys + head) * n, n, k);
        to_length(q, n, 1.0f / sqrtf(n));
        to_length(k, n, 1.0f);
        for (int i = 0; i < n; i++) kq += k[i] * q[i];
        b->kq[t] = kq;
    }
    for (int h = head * shared; h < (head + 1) * shared; h++) {
        const bf16 *p = d->p + (run->start + at) * d->stride;
        for (int t = 0; t < tokens; t++) {
            convolve_at(d, run, at + t, channels, edge + h * m, m, b->v + t * m);
            gates(d, p + t * d->stride + channels + d->values * m, h, b->decay + t, b->beta + t);
        }
        through(b, tokens, states + (int64_t)(h - head * shared) * m * n, m, n);
        for (int t = 0; t < tokens; t++)
            gated_norm(d, b->y + t * m, p + t * d->stride + channels + h * m,
                       d->out + ((run->start + at + t) * d->values + h) * m);
    }
}

/* saves: [count, 2], rising: after so many tokens, the state goes to this row too. */
static void run_of(const Delta *d, const Run *run, const int64_t *saves, int64_t count, int head,
                   Block *b) {
    int n = d->key_dim, m = d->value_dim, shared = d->values / d->keys, first = head * shared;
    int edge = 2 * d->keys * n, channels = edge + d->values * m;
    int64_t size = (int64_t)shared * m * n;
    float *states = state_at(d, run->slot, first), *own = NULL;
    if (d->narrow_states) {
        const bf16 *from = (const bf16 *)states;
        states = own = malloc(size * sizeof(float));
        for (int64_t i = 0; i < size; i++) states[i] = wide(from[i]);
    }
    for (int64_t at = 0, save = 0; at < run->count || save <= count;) {
        int64_t stop = save < count ? saves[2 * save] : run->count;
        if (at == stop) {
            int64_t slot = save < count ? saves[2 * save + 1] : run->slot;
            keep_states(d, states, slot, first, shared);
            keep_columns(d, run, at, slot, channels, head * n, n);
            keep_columns(d, run, at, slot, channels, (d->keys + head) * n, n);
            keep_columns(d, run, at, slot, channels, edge + first * m, shared * m);
            save++;
            continue;
        }
        int tokens = stop - at < BLOCK ? (int)(stop - at) : BLOCK;
        block_of(d, run, at, tokens, head, states, b);
        at += tokens;
    }
    free(own);
}

/* runs: [count, 3], see Run; saves: [.., 2] of all runs, those of run i from save_starts[i] on. */
void delta_extend(const bf16 *p, int64_t stride, int64_t count, const int64_t *runs,
                  const int64_t *saves, const int64_t *save_starts, bf16 *columns,
                  const float *conv, void *states, const float *decay, const float *bias,
                  const float *norm, bf16 *out, const int *sizes, float eps, int threads) {
    Delta d = {p, stride, NULL, columns, conv, states, decay, bias, norm, out,
               sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], eps};
    int64_t tasks = count * d.keys;
#pragma omp parallel num_threads(threads) if (tasks > 1)
    {
        Block *b = malloc(sizeof(Block));
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < tasks; t++) {
            int64_t i = t / d.keys, from = save_starts[i];
            run_of(&d, (const Run *)runs + i, saves + 2 * from, save_starts[i + 1] - from,
                   (int)(t % d.keys), b);
        }
        free(b);
    }
}
