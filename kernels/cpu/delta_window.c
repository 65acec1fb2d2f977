/* One token a sequence, or a window of drafts, through a GatedDeltaNet layer (delayed commit: see
 * `kernels/reference/window.py`). A step is a window of one token, and runs the same code: what is committed
 * is to the bit the same. A state is read and written once, however many tokens go through it. */
#include "program.h"
#include "delta.h"

typedef struct {
    Delta d;      /* its rows of p and out: `count` tokens of each sequence */
    bf16 *pending; /* [slots, held, channels + 2 values]: queries, keys, values, b, a */
    const int64_t *accepted;
    int count, held, prompt; /* prompt: all tokens are certain, there are no drafts */
} Window;

/* The inputs of a token: queries, keys and values; b and a. */
typedef struct {
    const bf16 *x, *b;
} Token;

/* y = silu(sum of `width` inputs, each times its own taps). x: the oldest input first. */
INLINE void convolve(const bf16 *const *x, const float *taps, int64_t step, const int width,
                     int count, float *y) {
    for (int i = 0; i < count; i++) {
        float sum = wide(x[0][i]) * taps[i];
#pragma GCC unroll 8
        for (int j = 1; j < width; j++) sum += wide(x[j][i]) * taps[j * step + i];
        y[i] = silu(sum);
    }
}

/* The convolution of `count` channels from `first` on for `tokens` tokens, y: [tokens, wide_count];
 * the columns move on by `certain` of them. */
static void convolve_all(const Delta *d, const Token *from, int tokens, int certain, bf16 *columns,
                         int first, int count, float *y, int wide_count) {
    int last = d->width - 1;
    int64_t channels = 2 * d->keys * d->key_dim + d->values * d->value_dim;
    const float *taps = d->conv + first;
    const bf16 *inputs[last + tokens];
    for (int j = 0; j < last; j++) inputs[j] = columns + j * channels + first;
    for (int t = 0; t < tokens; t++) inputs[last + t] = from[t].x + first;
    for (int t = 0; t < tokens; t++, y += wide_count) {
        if (last == 3) convolve(inputs + t, taps, channels, 4, count, y);
        else convolve(inputs + t, taps, channels, d->width, count, y);
    }
    for (int j = 0; j < last; j++)
        memcpy(columns + j * channels + first, inputs[certain + j], count * sizeof(bf16));
}

/* --- S = decay S + beta (v - decay S k) k^T; y = S q ------------------------------------------ */

typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t shorts __attribute__((vector_size(32), aligned(2), may_alias));
typedef float half __attribute__((vector_size(32)));
typedef float quarter __attribute__((vector_size(16)));
#define LANES 16
#define ROWS 8 /* of the state at once: enough to hide what each waits for */
#define HALF_ROWS 4 /* of one in bf16 */

INLINE float sum(lanes x) {
    half y = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)
             + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    quarter z = __builtin_shufflevector(y, y, 0, 1, 2, 3)
                + __builtin_shufflevector(y, y, 4, 5, 6, 7);
    return (z[0] + z[2]) + (z[1] + z[3]);
}

INLINE lanes widened(shorts x) {
    return (lanes)(__builtin_convertvector(x, words) << 16);
}

INLINE shorts narrowed(lanes x) {
#ifdef __AVX512BF16__
    return (shorts)_mm512_cvtneps_pbh((__m512)x);
#else
    words bits = (words)x;
    return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, shorts);
#endif
}

/* Tokens of one head: arrays of [tokens, n rounded up to LANES], the rest 0, or [tokens, rows]. */
typedef struct {
    const float *q, *k, *v, *kq, *decay, *beta;
    float *y;
    int tokens, certain, rows, n, wide_n, narrow_state, before;
} Tokens;

/* Rows of a state, `stride` elements apart. */
typedef struct {
    void *at;
    int stride, narrow;
} Rows;

/* One pass over `count` rows of the state: token t changes it (if `write`), and the next one reads
 * it (if `read`; its output too, if `see`). half: the pool's rows are bf16. */
INLINE void pass(const Tokens *w, Rows from, Rows to, int t, const float *change, float *mem,
                 float *seen, const int count, const int half, const int write, const int read,
                 const int see) {
    lanes a[ROWS], b[ROWS];
    const float *k = w->k + (int64_t)t * w->wide_n, *next = k + w->wide_n;
    const float *q = w->q + (int64_t)(t + 1) * w->wide_n;
    float decay = write ? w->decay[t] : 0;
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) a[r] = b[r] = (lanes){0};
    for (int i = 0; i < w->wide_n; i += LANES) {
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            int64_t old = (int64_t)r * from.stride + i, new = (int64_t)r * to.stride + i;
            lanes x;
            if (half && from.narrow) x = widened(*(const shorts *)((const bf16 *)from.at + old));
            else x = *(const lanes *)((const float *)from.at + old);
            if (write) {
                x = x * decay + *(const lanes *)(k + i) * change[r];
                shorts kept;
                if (half) x = widened(kept = narrowed(x));
                if (half && to.narrow) *(shorts *)((bf16 *)to.at + new) = kept;
                else *(lanes *)((float *)to.at + new) = x;
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

/* `count` rows of the pool to the front of wider ones, filled up with zeros; or back. */
INLINE void move(const Tokens *w, void *pool, float *rows, int count, int in) {
    for (int r = 0; r < count; r++)
        for (int i = 0; i < w->wide_n; i++) {
            float *own = rows + r * w->wide_n + i;
            int64_t at = (int64_t)r * w->n + i;
            if (in && i >= w->n) *own = 0;
            else if (in) *own = w->narrow_state ? wide(((bf16 *)pool)[at]) : ((float *)pool)[at];
            else if (i < w->n && w->narrow_state) ((bf16 *)pool)[at] = narrow(*own);
            else if (i < w->n) ((float *)pool)[at] = *own;
        }
}

/* What the certain tokens leave goes to the pool, what the others do to `guess`. Where the pool's
 * rows are not whole lanes both are done in `guess`, and the first is copied. */
INLINE void rows_of(const Tokens *w, void *pool, int first, const int count, const int half) {
    float guess[ROWS * MAX_DIM], change[ROWS], mem[ROWS], seen[ROWS] = {0};
    int direct = w->n == w->wide_n;
    Rows aside = {guess, w->wide_n, 0}, home = direct ? (Rows){pool, w->n, half} : aside;
    if (!direct) move(w, pool, guess, count, 1);
    if (w->before) pass(w, home, aside, -1, change, mem, seen, count, half, 0, 1, 0);
    else pass(w, home, aside, -1, change, mem, seen, count, half, 0, 1, 1);
    for (int t = 0; t < w->tokens; t++) {
        for (int r = 0; r < count; r++) {
            int64_t at = (int64_t)t * w->rows + first + r;
            change[r] = w->beta[t] * (w->v[at] - w->decay[t] * mem[r]);
            w->y[at] = w->decay[t] * seen[r] + change[r] * w->kq[t];
        }
        Rows from = t == 0 || t == w->certain ? home : aside;
        Rows to = t + 1 == w->certain ? home : aside;
        if (t + 1 < w->before) pass(w, from, to, t, change, mem, seen, count, half, 1, 1, 0);
        else if (t + 1 < w->tokens) pass(w, from, to, t, change, mem, seen, count, half, 1, 1, 1);
        else if (t < w->certain) pass(w, from, to, t, change, mem, seen, count, half, 1, 0, 0);
        if (t + 1 == w->certain && !direct) move(w, pool, guess, count, 0);
    }
}

INLINE void recur_by(const Tokens *w, char *state, const int count, const int half) {
    int64_t each = (int64_t)w->n * (half ? 2 : 4);
    int r = 0;
    for (; r + count <= w->rows; r += count) rows_of(w, state + r * each, r, count, half);
    for (; r < w->rows; r++) rows_of(w, state + r * each, r, 1, half);
}

static void recur(const Tokens *w, void *state) {
    if (w->narrow_state) recur_by(w, state, HALF_ROWS, 1);
    else recur_by(w, state, ROWS, 0);
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
    if (slot < 0) { /* padding: there is no such state */
        for (int t = 0; t < w->count; t++)
            memset(d->out + ((row + t) * d->values + head * shared) * m, 0,
                   shared * m * sizeof(bf16));
        return;
    }
    int64_t inputs = channels + 2 * d->values, before = w->held ? w->accepted[sequence] : 0;
    before = before < 0 ? 0 : before > w->held ? w->held : before;
    int tokens = (int)before + w->count, certain = w->prompt ? tokens : (int)before + 1;
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
    if (w->count > 1 && !w->prompt) keep(w, row, pending, inputs, head);
}

int64_t delta_window_tasks(int64_t rows, const int *sizes) { return rows * sizes[1]; }

/* Key head by key head of every sequence. */
void delta_window_task(const bf16 *p, int64_t stride, const int64_t *slots, bf16 *columns,
                       const float *conv, void *states, const float *decay, const float *bias,
                       const float *norm, bf16 *out, const int *sizes, bf16 *pending,
                       const int64_t *accepted, int count, int held, float eps, int64_t task) {
    Window w = {{p, stride, slots, columns, conv, states, decay, bias, norm, out,
                 sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], eps},
                pending, accepted, count, held, 0};
    window_of(&w, task / w.d.keys, (int)(task % w.d.keys));
}

/* `count` tokens of each of `rows` sequences, which follow one another; at most held + 1. Without
 * drafts before or now (held = 0) neither pending nor accepted is read. */
void delta_window(const bf16 *p, int64_t stride, int64_t rows, const int64_t *slots, bf16 *columns,
                  const float *conv, void *states, const float *decay, const float *bias,
                  const float *norm, bf16 *out, const int *sizes, bf16 *pending,
                  const int64_t *accepted, int count, int held, float eps, int threads) {
    int64_t tasks = delta_window_tasks(rows, sizes);
#pragma omp parallel for num_threads(threads) if (tasks > 1)
    for (int64_t t = 0; t < tasks; t++)
        delta_window_task(p, stride, slots, columns, conv, states, decay, bias, norm, out, sizes,
                          pending, accepted, count, held, eps, t);
}

void delta_step(const bf16 *p, int64_t stride, int64_t rows, const int64_t *slots, bf16 *columns,
                const float *conv, void *states, const float *decay, const float *bias,
                const float *norm, bf16 *out, const int *sizes, float eps, int threads) {
    delta_window(p, stride, rows, slots, columns, conv, states, decay, bias, norm, out, sizes, NULL,
                 NULL, 1, 0, eps, threads);
}

/* The channels and states of a key head, from one row of the pools to another. */
static void copy_head(const Delta *d, int64_t from, int64_t to, int head) {
    int n = d->key_dim, m = d->value_dim, shared = d->values / d->keys, last = d->width - 1;
    int64_t edge = 2 * d->keys * n, channels = edge + d->values * m;
    for (int j = 0; j < last; j++) {
        const bf16 *x = d->columns + (from * last + j) * channels;
        bf16 *y = d->columns + (to * last + j) * channels;
        memcpy(y + head * n, x + head * n, n * sizeof(bf16));
        memcpy(y + (d->keys + head) * n, x + (d->keys + head) * n, n * sizeof(bf16));
        memcpy(y + edge + head * shared * m, x + edge + head * shared * m,
               shared * m * sizeof(bf16));
    }
    memcpy(state_at(d, to, head * shared), state_at(d, from, head * shared),
           (size_t)shared * m * n * (d->narrow_states ? 2 : 4));
}

#define BLOCK 32 /* tokens of a prompt at once */

/* `delta_extend` token by token, with the bits that as many calls of `delta_step` give. Arguments as
 * there. A window of certain tokens reads and writes few rows of a state for all of them, while they
 * are near. */
void delta_extend_steps(const bf16 *p, int64_t stride, int64_t count, const int64_t *runs,
                        const int64_t *saves, const int64_t *save_starts, bf16 *columns,
                        const float *conv, void *states, const float *decay, const float *bias,
                        const float *norm, bf16 *out, const int *sizes, float eps, int threads) {
    int64_t tasks = count * sizes[1], width = (int64_t)sizes[2] * sizes[4];
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (tasks > 1)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t i = task / sizes[1], save = save_starts[i];
        const int64_t *run = runs + 3 * i; /* first token, tokens, row */
        int head = (int)(task % sizes[1]);
        Window w = {{p, stride, run + 2, columns, conv, states, decay, bias, norm, out, sizes[0],
                     sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], eps}, NULL, NULL, 0, 0, 1};
        for (int64_t t = 0; t <= run[1]; t += w.count) {
            for (; save < save_starts[i + 1] && saves[2 * save] == t; save++)
                if (saves[2 * save + 1] != run[2])
                    copy_head(&w.d, run[2], saves[2 * save + 1], head);
            if (t == run[1]) break;
            int64_t end = save < save_starts[i + 1] && saves[2 * save] < run[1] ? saves[2 * save]
                                                                                 : run[1];
            w.count = (int)(end - t < BLOCK ? end - t : BLOCK);
            w.d.p = p + (run[0] + t) * stride;
            w.d.out = out + (run[0] + t) * width;
            window_of(&w, 0, head);
        }
    }
}
