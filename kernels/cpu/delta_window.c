/* One token a sequence, or a window of drafts, through a GatedDeltaNet layer (delayed commit: see
 * `kernels/window.py`). A step is a window of one token, and runs the same code: what is committed is
 * to the bit the same. A state is read and written once, however many tokens go through it. */
#include "delta.h"

typedef struct {
    Delta d;      /* its rows of p and out: `count` tokens of each sequence */
    bf16 *pending; /* [slots, held, channels + 2 values]: queries, keys, values, b, a */
    const int64_t *accepted;
    int count, held;
} Window;

/* The inputs of a token: queries, keys and values; b and a. */
typedef struct {
    const bf16 *x, *b;
} Token;

/* The convolution of `count` channels from `first` on, whose columns move on by the new token.
 * columns: the oldest one's first of them; step: from a column to the next. */
INLINE void convolve(const Delta *d, const bf16 *x, bf16 *columns, int64_t step, int first,
                     int count, float *y) {
    int channels = 2 * d->keys * d->key_dim + d->values * d->value_dim, last = d->width - 1;
    const float *taps = d->conv + first;
    x += first;
    for (int i = 0; i < count; i++) y[i] = wide(x[i]) * taps[(int64_t)last * channels + i];
    for (int t = 0; t < last; t++) {
        bf16 *own = columns + t * step;
        const bf16 *next = t + 1 < last ? own + step : x;
        for (int i = 0; i < count; i++) {
            y[i] += wide(own[i]) * taps[(int64_t)t * channels + i];
            own[i] = next[i];
        }
    }
    for (int i = 0; i < count; i++) y[i] = silu(y[i]);
}

/* The same for `tokens` tokens, y: [tokens, width]; the columns keep what `certain` of them did. */
static void convolve_all(const Delta *d, const Token *from, int tokens, int certain, bf16 *columns,
                         int first, int count, float *y, int width) {
    bf16 guess[(MAX_WIDTH - 1) * MAX_DIM], *own = columns + first;
    int64_t step = 2 * d->keys * d->key_dim + d->values * d->value_dim;
    for (int t = 0; t < tokens; t++) {
        if (t == certain) {
            for (int j = 0; j < d->width - 1; j++)
                memcpy(guess + j * count, own + j * step, count * sizeof(bf16));
            own = guess;
            step = count;
        }
        convolve(d, from[t].x, own, step, first, count, y + t * width);
    }
}

/* --- S = decay S + beta (v - decay S k) k^T; y = S q ------------------------------------------ */

typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));
typedef float half __attribute__((vector_size(32)));
typedef float quarter __attribute__((vector_size(16)));
#define LANES 16
#define ROWS 8 /* of the state at once: enough to hide what each waits for */

INLINE float sum(lanes x) {
    half y = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)
             + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    quarter z = __builtin_shufflevector(y, y, 0, 1, 2, 3) + __builtin_shufflevector(y, y, 4, 5, 6, 7);
    return (z[0] + z[2]) + (z[1] + z[3]);
}

/* As bf16 keeps it. */
INLINE lanes rounded(lanes x) {
    words bits = (words)x;
    return (lanes)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
}

/* Tokens of one head: arrays of [tokens, n rounded up to LANES], the rest 0, or [tokens, rows]. */
typedef struct {
    const float *q, *k, *v, *kq, *decay, *beta;
    float *y;
    int tokens, certain, rows, n, wide_n, narrow_state, before;
} Tokens;

/* Rows of a state, `stride` apart. */
typedef struct {
    float *at;
    int stride;
} Rows;

/* One pass over `count` rows of the state: token t changes it (if `write`), and the next one reads it
 * (if `read`; its output too, if `see`). */
INLINE void pass(const Tokens *w, Rows from, Rows to, int t, const float *change, float *mem,
                 float *seen, const int count, const int write, const int read, const int see) {
    lanes a[ROWS], b[ROWS];
    const float *k = w->k + (int64_t)t * w->wide_n, *next = k + w->wide_n;
    const float *q = w->q + (int64_t)(t + 1) * w->wide_n;
    float decay = write ? w->decay[t] : 0;
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) a[r] = b[r] = (lanes){0};
    for (int i = 0; i < w->wide_n; i += LANES) {
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            lanes x = *(const lanes *)(from.at + (int64_t)r * from.stride + i);
            if (write) {
                x = x * decay + *(const lanes *)(k + i) * change[r];
                if (w->narrow_state) x = rounded(x);
                *(lanes *)(to.at + (int64_t)r * to.stride + i) = x;
            }
            if (read) a[r] += x * *(const lanes *)(next + i);
            if (see) b[r] += x * *(const lanes *)(q + i);
        }
    }
    if (read)
        for (int r = 0; r < count; r++) mem[r] = sum(a[r]);
    if (see)
        for (int r = 0; r < count; r++) seen[r] = sum(b[r]);
}

/* LANES of a row of the pool's state, or the `some` that are left of it. */
INLINE lanes load(const void *row, int i, int some, int narrow_state) {
    lanes x = {0};
    if (narrow_state) {
        const bf16 *from = (const bf16 *)row + i;
        if (some == LANES)
            for (int j = 0; j < LANES; j++) x[j] = wide(from[j]);
        else
            for (int j = 0; j < some; j++) x[j] = wide(from[j]);
    } else {
        const float *from = (const float *)row + i;
        if (some == LANES) return *(const lanes *)from;
        for (int j = 0; j < some; j++) x[j] = from[j];
    }
    return x;
}

INLINE void store(lanes x, void *row, int i, int some, int narrow_state) {
    if (narrow_state) {
        bf16 *to = (bf16 *)row + i;
        if (some == LANES)
            for (int j = 0; j < LANES; j++) to[j] = narrow(x[j]);
        else
            for (int j = 0; j < some; j++) to[j] = narrow(x[j]);
    } else if (some == LANES) {
        *(lanes *)((float *)row + i) = x;
    } else {
        for (int j = 0; j < some; j++) ((float *)row)[i + j] = x[j];
    }
}

/* `count` rows between the pool and `state`. */
INLINE void move(const Tokens *w, void *pool, Rows state, const int count, const int in,
                 const int narrow_state) {
    int64_t each = (int64_t)w->n * (narrow_state ? 2 : 4);
    for (int r = 0; r < count; r++)
        for (int i = 0; i < w->wide_n; i += LANES) {
            lanes *own = (lanes *)(state.at + r * state.stride + i);
            int some = w->n - i < LANES ? w->n - i : LANES;
            if (in) *own = load((char *)pool + r * each, i, some, narrow_state);
            else store(*own, (char *)pool + r * each, i, some, narrow_state);
        }
}

/* What the certain tokens leave goes to the pool, what the others do to `guess`. Where the pool's
 * rows are not whole lanes of floats both are done in `guess`, and the first is copied. */
INLINE void rows_of(const Tokens *w, void *pool, int first, const int count) {
    float guess[ROWS * MAX_DIM], change[ROWS], mem[ROWS], seen[ROWS] = {0};
    int direct = !w->narrow_state && w->n == w->wide_n;
    Rows aside = {guess, w->wide_n}, home = direct ? (Rows){pool, w->n} : aside;
    if (!direct && w->narrow_state) move(w, pool, aside, count, 1, 1);
    else if (!direct) move(w, pool, aside, count, 1, 0);
    if (w->before) pass(w, home, aside, -1, change, mem, seen, count, 0, 1, 0);
    else pass(w, home, aside, -1, change, mem, seen, count, 0, 1, 1);
    for (int t = 0; t < w->tokens; t++) {
        for (int r = 0; r < count; r++) {
            int64_t at = (int64_t)t * w->rows + first + r;
            change[r] = w->beta[t] * (w->v[at] - w->decay[t] * mem[r]);
            w->y[at] = w->decay[t] * seen[r] + change[r] * w->kq[t];
        }
        Rows from = t == 0 || t == w->certain ? home : aside;
        Rows to = t + 1 == w->certain ? home : aside;
        if (t + 1 < w->before) pass(w, from, to, t, change, mem, seen, count, 1, 1, 0);
        else if (t + 1 < w->tokens) pass(w, from, to, t, change, mem, seen, count, 1, 1, 1);
        else if (t < w->certain) pass(w, from, to, t, change, mem, seen, count, 1, 0, 0);
        if (t + 1 != w->certain || direct) continue;
        if (w->narrow_state) move(w, pool, aside, count, 0, 1);
        else move(w, pool, aside, count, 0, 0);
    }
}

static void recur(const Tokens *w, void *state) {
    int64_t each = (int64_t)w->n * (w->narrow_state ? 2 : 4);
    int r = 0;
    for (; r + ROWS <= w->rows; r += ROWS) rows_of(w, (char *)state + r * each, r, ROWS);
    for (; r < w->rows; r++) rows_of(w, (char *)state + r * each, r, 1);
}

/* The drafts of a key head's channels wait for the next step. */
static void keep(const Window *w, int64_t row, bf16 *pending, int64_t inputs, int head) {
    const Delta *d = &w->d;
    int n = d->key_dim, m = d->value_dim, shared = d->values / d->keys, first = head * shared;
    int edge = 2 * d->keys * n, channels = edge + d->values * m;
    for (int t = 1; t < w->count; t++, pending += inputs) {
        const bf16 *p = d->p + (row + t) * d->stride, *b = p + channels + d->values * m;
        memcpy(pending + head * n, p + head * n, n * sizeof(bf16));
        memcpy(pending + (d->keys + head) * n, p + (d->keys + head) * n, n * sizeof(bf16));
        memcpy(pending + edge + first * m, p + edge + first * m, shared * m * sizeof(bf16));
        memcpy(pending + channels + first, b + first, shared * sizeof(bf16));
        memcpy(pending + channels + d->values + first, b + d->values + first,
               shared * sizeof(bf16));
    }
}

/* A sequence's window, one key head: the accepted drafts of the last one, a token, new drafts. */
static void window_of(const Window *w, int64_t sequence, int head) {
    const Delta *d = &w->d;
    int n = d->key_dim, m = d->value_dim, shared = d->values / d->keys;
    int edge = 2 * d->keys * n, channels = edge + d->values * m;
    int64_t slot = d->slots[sequence], row = sequence * w->count;
    int64_t inputs = channels + 2 * d->values, before = w->held ? w->accepted[sequence] : 0;
    before = before < 0 ? 0 : before > w->held ? w->held : before;
    int tokens = (int)before + w->count, certain = (int)before + 1;
    bf16 *columns = d->columns + slot * (d->width - 1) * channels;
    bf16 *pending = w->held ? w->pending + slot * w->held * inputs : NULL;
    int wide_n = (n + LANES - 1) / LANES * LANES;
    float q[tokens * wide_n], k[tokens * wide_n], v[tokens * m], y[tokens * m];
    float kq[tokens], decay[tokens], beta[tokens];
    Tokens all = {q, k, v, kq, decay, beta, y, tokens, certain, m, n, wide_n, d->narrow_states,
                  (int)before};
    Token from[tokens];
    for (int t = 0; t < tokens; t++) {
        const bf16 *x = t < before ? pending + t * inputs : d->p + (row + t - before) * d->stride;
        from[t] = (Token){x, x + channels + (t < before ? 0 : d->values * m)};
    }
    convolve_all(d, from, tokens, certain, columns, head * n, n, q, wide_n);
    convolve_all(d, from, tokens, certain, columns, (d->keys + head) * n, n, k, wide_n);
    for (int t = 0; t < tokens; t++) {
        float *qt = q + t * wide_n, *kt = k + t * wide_n;
        to_length(qt, n, 1.0f / sqrtf(n));
        to_length(kt, n, 1.0f);
        for (int i = n; i < wide_n; i++) qt[i] = kt[i] = 0;
        kq[t] = 0;
        for (int i = 0; i < n; i++) kq[t] += kt[i] * qt[i];
    }
    for (int h = head * shared; h < (head + 1) * shared; h++) {
        convolve_all(d, from, tokens, certain, columns, edge + h * m, m, v, m);
        for (int t = 0; t < tokens; t++) gates(d, from[t].b, h, decay + t, beta + t);
        recur(&all, state_at(d, slot, h));
        for (int t = 0; t < w->count; t++)
            gated_norm(d, y + (before + t) * m,
                       d->p + (row + t) * d->stride + channels + h * m,
                       d->out + ((row + t) * d->values + h) * m);
    }
    if (w->count > 1) keep(w, row, pending, inputs, head);
}

/* `count` tokens of each of `rows` sequences, which follow one another; at most held + 1. Without
 * drafts before or now (held = 0) neither pending nor accepted is read. */
void delta_window(const bf16 *p, int64_t stride, int64_t rows, const int64_t *slots, bf16 *columns,
                  const float *conv, void *states, const float *decay, const float *bias,
                  const float *norm, bf16 *out, const int *sizes, bf16 *pending,
                  const int64_t *accepted, int count, int held, float eps, int threads) {
    Window w = {{p, stride, slots, columns, conv, states, decay, bias, norm, out,
                 sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], eps},
                pending, accepted, count, held};
    int64_t tasks = rows * w.d.keys;
#pragma omp parallel for num_threads(threads) if (tasks > 1)
    for (int64_t t = 0; t < tasks; t++) window_of(&w, t / w.d.keys, (int)(t % w.d.keys));
}

void delta_step(const bf16 *p, int64_t stride, int64_t rows, const int64_t *slots, bf16 *columns,
                const float *conv, void *states, const float *decay, const float *bias,
                const float *norm, bf16 *out, const int *sizes, float eps, int threads) {
    delta_window(p, stride, rows, slots, columns, conv, states, decay, bias, norm, out, sizes, NULL,
                 NULL, 1, 0, eps, threads);
}
