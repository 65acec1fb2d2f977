/* Many tokens a sequence through a GatedDeltaNet layer, in blocks: with the state as [key, value],
 * 32 values at a time are a product with the block's keys and queries, a forward substitution, and
 * a product back. Where tiles are AMX's, they do the blocks (delta_tiles.c). */
#include "delta_run.h"
#include <stdlib.h>
#define BLOCK 32
#define FEW 8 /* tokens of a run that are not worth tiles, which are always 32 */

typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));
#define WIDTH 32 /* values at once */

/* q and k lie together, a token's after the other's, so that both read the state in one product. */
typedef struct {
    float kq[2 * BLOCK * MAX_DIM], v[BLOCK * MAX_DIM], y[BLOCK * MAX_DIM];
    float kk[BLOCK * BLOCK], qk[BLOCK * BLOCK]; /* products of keys, of queries and keys */
    float seen[2 * BLOCK * WIDTH], change[BLOCK * WIDTH];
    float decay[BLOCK], beta[BLOCK];
    float *state; /* [values of a key head, key_dim, value_dim rounded up to WIDTH] */
} Block;

/* y[t] = sum_i x[t][i] * s[i] for `tokens` rows (up to 8) of WIDTH lanes. */
#define ROWS 8
INLINE void read_some(const float *x, int n, const float *s, int stride, float *y,
                      const int tokens) {
    lanes a[ROWS], b[ROWS];
    for (int t = 0; t < tokens; t++) a[t] = b[t] = (lanes){0};
    for (int i = 0; i < n; i++) {
        lanes low = *(const lanes *)(s + (int64_t)i * stride);
        lanes high = *(const lanes *)(s + (int64_t)i * stride + 16);
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) {
            a[t] += low * x[t * n + i];
            b[t] += high * x[t * n + i];
        }
    }
    for (int t = 0; t < tokens; t++) {
        *(lanes *)(y + t * WIDTH) = a[t];
        *(lanes *)(y + t * WIDTH + 16) = b[t];
    }
}

static void read_state(const float *x, int rows, int n, const float *s, int stride, float *y) {
    int t = 0;
    for (; t + 8 <= rows; t += 8) read_some(x + t * n, n, s, stride, y + t * WIDTH, 8);
    for (; t + 2 <= rows; t += 2) read_some(x + t * n, n, s, stride, y + t * WIDTH, 2);
}

/* s[i] = decay * s[i] + sum_t k[t][i] * change[t]; k: every other row of kq. */
INLINE void write_some(float *s, int stride, float decay, const float *k, int n,
                       const float *change, int tokens, const int count) {
    lanes a[ROWS], b[ROWS];
    for (int i = 0; i < count; i++) {
        a[i] = *(lanes *)(s + (int64_t)i * stride) * decay;
        b[i] = *(lanes *)(s + (int64_t)i * stride + 16) * decay;
    }
    for (int t = 0; t < tokens; t++) {
        lanes low = *(const lanes *)(change + t * WIDTH);
        lanes high = *(const lanes *)(change + t * WIDTH + 16);
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            a[i] += low * k[2 * t * n + i];
            b[i] += high * k[2 * t * n + i];
        }
    }
    for (int i = 0; i < count; i++) {
        *(lanes *)(s + (int64_t)i * stride) = a[i];
        *(lanes *)(s + (int64_t)i * stride + 16) = b[i];
    }
}

/* WIDTH values of one head over the tokens of a block: the recurrence unrolled, so that the state
 * is read once and written once. from: decay from after one token up to another; reach: from the
 * block's start. */
static void values_by(Block *b, int tokens, int n, int m, int first, float *s, int stride,
                      const float *from, const float *reach) {
    read_state(b->kq, 2 * tokens, n, s, stride, b->seen);
    int some = m - first < WIDTH ? m - first : WIDTH;
    for (int t = 0; t < tokens; t++) {
        float *old = b->seen + 2 * t * WIDTH, *out = old + WIDTH, *change = b->change + t * WIDTH;
        lanes c[2], y[2];
        for (int h = 0; h < 2; h++) {
            c[h] = *(lanes *)(old + 16 * h) * reach[t];
            y[h] = *(lanes *)(out + 16 * h) * reach[t];
        }
        for (int j = 0; j < t; j++) {
            const lanes *before = (const lanes *)(b->change + j * WIDTH);
            float kk = b->kk[t * BLOCK + j] * from[t * BLOCK + j];
            float qk = b->qk[t * BLOCK + j] * from[t * BLOCK + j];
            for (int h = 0; h < 2; h++) {
                c[h] += before[h] * kk;
                y[h] += before[h] * qk;
            }
        }
        float v[WIDTH] = {0}, result[WIDTH];
        memcpy(v, b->v + t * m + first, some * 4);
        for (int h = 0; h < 2; h++) {
            c[h] = (*(lanes *)(v + 16 * h) - c[h]) * b->beta[t];
            *(lanes *)(change + 16 * h) = c[h];
            *(lanes *)(result + 16 * h) = y[h] + c[h] * b->qk[t * BLOCK + t];
        }
        memcpy(b->y + t * m + first, result, some * 4);
    }
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < WIDTH; i++)
            b->change[t * WIDTH + i] *= t + 1 < tokens ? from[(tokens - 1) * BLOCK + t] : 1.0f;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        write_some(s + (int64_t)i * stride, stride, reach[tokens - 1], b->kq + i, n, b->change,
                   tokens, 8);
    for (; i < n; i++)
        write_some(s + (int64_t)i * stride, stride, reach[tokens - 1], b->kq + i, n, b->change,
                   tokens, 1);
}

static void through(Block *b, int tokens, float *state, int m, int n) {
    float from[BLOCK * BLOCK], reach[BLOCK];
    for (int t = 0; t < tokens; t++) {
        reach[t] = b->decay[t] * (t ? reach[t - 1] : 1.0f);
        float d = b->decay[t];
        for (int j = t - 1; j >= 0; d *= b->decay[j--]) from[t * BLOCK + j] = d;
    }
    int stride = (m + WIDTH - 1) / WIDTH * WIDTH;
    for (int first = 0; first < m; first += WIDTH)
        values_by(b, tokens, n, m, first, state + first, stride, from, reach);
}

INLINE void convolve_at(const Delta *d, const Run *run, int64_t t, int channels, int first,
                        int count, float *y) {
    for (int j = 0; j < d->width; j++) {
        const bf16 *x = input(d, run, t - d->width + 1 + j) + first;
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
               input(d, run, tokens - last + j) + first, count * sizeof(bf16));
}

/* The states of `shared` heads between the pool, [value, key], and the block, [key, value]. */
static void load_states(const Delta *d, Block *b, int64_t slot, int head, int shared) {
    int n = d->key_dim, m = d->value_dim, stride = (m + WIDTH - 1) / WIDTH * WIDTH;
    for (int h = 0; h < shared; h++) {
        const void *from = state_at(d, slot, head + h);
        float *to = b->state + (int64_t)h * n * stride;
        for (int i = 0; i < n; i++)
            for (int r = 0; r < stride; r++)
                to[(int64_t)i * stride + r] = r >= m ? 0 : d->narrow_states
                    ? wide(((const bf16 *)from)[(int64_t)r * n + i])
                    : ((const float *)from)[(int64_t)r * n + i];
    }
}

static void keep_states(const Delta *d, const Block *b, int64_t slot, int head, int shared) {
    int n = d->key_dim, m = d->value_dim, stride = (m + WIDTH - 1) / WIDTH * WIDTH;
    for (int h = 0; h < shared; h++) {
        void *to = state_at(d, slot, head + h);
        const float *from = b->state + (int64_t)h * n * stride;
        for (int r = 0; r < m; r++)
            for (int i = 0; i < n; i++) {
                float x = from[(int64_t)i * stride + r];
                if (d->narrow_states) ((bf16 *)to)[(int64_t)r * n + i] = narrow(x);
                else ((float *)to)[(int64_t)r * n + i] = x;
            }
    }
}

static void block_of(const Delta *d, const Run *run, int64_t at, int tokens, int head,
                     Block *b) {
    int n = d->key_dim, m = d->value_dim, shared = d->values / d->keys;
    int edge = 2 * d->keys * n, channels = edge + d->values * m;
    for (int t = 0; t < tokens; t++) {
        float *k = b->kq + 2 * t * n, *q = k + n;
        convolve_at(d, run, at + t, channels, head * n, n, q);
        convolve_at(d, run, at + t, channels, (d->keys + head) * n, n, k);
        to_length(q, n, 1.0f / sqrtf(n));
        to_length(k, n, 1.0f);
        for (int j = 0; j <= t; j++) {
            const float *before = b->kq + 2 * j * n;
            float kk = 0, qk = 0;
            for (int i = 0; i < n; i++) {
                kk += k[i] * before[i];
                qk += q[i] * before[i];
            }
            b->kk[t * BLOCK + j] = kk;
            b->qk[t * BLOCK + j] = qk;
        }
    }
    int stride = (m + WIDTH - 1) / WIDTH * WIDTH;
    for (int h = head * shared; h < (head + 1) * shared; h++) {
        const bf16 *p = d->p + (run->start + at) * d->stride;
        for (int t = 0; t < tokens; t++) {
            convolve_at(d, run, at + t, channels, edge + h * m, m, b->v + t * m);
            gates(d, p + t * d->stride + channels + d->values * m, h, b->decay + t, b->beta + t);
        }
        through(b, tokens, b->state + (int64_t)(h - head * shared) * stride * n, m, n);
        for (int t = 0; t < tokens; t++)
            gated_norm(d, b->y + t * m, p + t * d->stride + channels + h * m,
                       d->out + ((run->start + at + t) * d->values + h) * m);
    }
}

/* saves: [count, 2], rising: after so many tokens, the state goes to this row too. */
static void run_of(const Delta *d, const Run *run, const int64_t *saves, int64_t count, int head,
                   Block *b, struct tiles *tiles) {
    int n = d->key_dim, m = d->value_dim, shared = d->values / d->keys, first = head * shared;
    int edge = 2 * d->keys * n, channels = channels_of(d);
    if (run->count < FEW) tiles = NULL;
    if (tiles) tiles_load(d, tiles, run->slot, first);
    else load_states(d, b, run->slot, first, shared);
    for (int64_t at = 0, save = 0; at < run->count || save <= count;) {
        int64_t stop = save < count ? saves[2 * save] : run->count;
        if (at == stop) {
            int64_t slot = save < count ? saves[2 * save + 1] : run->slot;
            if (tiles) tiles_keep(d, tiles, slot, first);
            else keep_states(d, b, slot, first, shared);
            keep_columns(d, run, at, slot, channels, head * n, n);
            keep_columns(d, run, at, slot, channels, (d->keys + head) * n, n);
            keep_columns(d, run, at, slot, channels, edge + first * m, shared * m);
            save++;
            continue;
        }
        int tokens = stop - at < BLOCK ? (int)(stop - at) : BLOCK;
        if (tiles) tiles_block(d, run, at, tokens, head, tiles);
        else block_of(d, run, at, tokens, head, b);
        at += tokens;
    }
}

/* runs: [count, 3], see Run; saves: [.., 2] of all runs, those of run i from save_starts[i] on.
 * sizes[6]: whether to use tiles, which must be ready. */
void delta_extend(const bf16 *p, int64_t stride, int64_t count, const int64_t *runs,
                  const int64_t *saves, const int64_t *save_starts, bf16 *columns,
                  const float *conv, void *states, const float *decay, const float *bias,
                  const float *norm, bf16 *out, const int *sizes, float eps, int threads) {
    Delta d = {p, stride, NULL, columns, conv, states, decay, bias, norm, out,
               sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], eps};
    int64_t tasks = count * d.keys;
#pragma omp parallel num_threads(threads) if (tasks > 1)
    {
        int stride = (d.value_dim + WIDTH - 1) / WIDTH * WIDTH;
        struct tiles *tiles = sizes[6] ? tiles_open(&d) : NULL;
        Block *b = malloc(sizeof(Block));
        b->state = malloc(sizeof(float) * d.values / d.keys * d.key_dim * stride);
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < tasks; t++) {
            int64_t i = t / d.keys, from = save_starts[i];
            run_of(&d, (const Run *)runs + i, saves + 2 * from, save_starts[i + 1] - from,
                   (int)(t % d.keys), b, tiles);
        }
        if (tiles) tiles_close(tiles);
        free(b->state);
        free(b);
    }
}
