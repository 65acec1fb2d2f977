/* A Mamba-2 layer between its two projections, token by token: convolution, time steps, recurrence
 * (`kernels/reference/ssd.py`); and the gated norm behind it. Prompts and decodes run the same code,
 * so that a state and what is read of it have the same bits however the tokens came.
 *
 * Channels are convolved first, as those of b and c serve many heads; then each head is a task. */
#include "conv.h"
#include "program.h"

typedef struct {
    const bf16 *p;      /* [tokens, stride]: x, b, c (the convolution's channels), dt */
    int64_t stride;
    const int64_t *runs, *saves, *save_starts; /* as in `Conv` */
    void *states;       /* [slots, heads, head_dim, state_dim] */
    const float *a, *skip, *bias; /* [heads]; a below 0 */
    const float *mixed; /* [tokens, channels]: what the convolution gives */
    float *y;           /* [tokens, heads, head_dim] */
    int heads, groups, head_dim, state_dim, narrow_states;
    float low, high;    /* of time steps */
} Mamba;

typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t shorts __attribute__((vector_size(32), aligned(2), may_alias));
#define LANES 16
#define ROWS 4 /* of a state at once */

INLINE int64_t mixed_channels(const Mamba *m) {
    return (int64_t)m->heads * m->head_dim + 2 * (int64_t)m->groups * m->state_dim;
}

INLINE float sum_of(lanes x) {
    float s[LANES];
    memcpy(s, &x, sizeof s);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) s[i] += s[i + n];
    return s[0];
}

INLINE lanes load_state(const void *at, int64_t i, const int half) {
    if (half) return (lanes)(__builtin_convertvector(*(const shorts *)((const bf16 *)at + i), words) << 16);
    return *(const lanes *)((const float *)at + i);
}

INLINE void store_state(void *at, int64_t i, lanes x, const int half) {
    if (!half) {
        *(lanes *)((float *)at + i) = x;
        return;
    }
    words bits = (words)x;
    *(shorts *)((bf16 *)at + i) =
        __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, shorts);
}

/* `count` rows of a head's state take in one token: S = decay S + x b^T; y = S c. */
INLINE void advance_rows(void *state, int64_t first, int n, float decay, const float *x,
                         const float *b, const float *c, float *y, const int count, const int half) {
    lanes sums[ROWS];
    int i = 0;
    for (int r = 0; r < count; r++) sums[r] = (lanes){0};
    for (; i + LANES <= n; i += LANES) {
        lanes own = *(const lanes *)(b + i), seen = *(const lanes *)(c + i);
        for (int r = 0; r < count; r++) {
            int64_t at = (first + r) * n + i;
            lanes s = load_state(state, at, half) * decay + own * x[r];
            sums[r] += s * seen;
            store_state(state, at, s, half);
        }
    }
    for (int r = 0; r < count; r++) {
        float rest = 0;
        for (int j = i; j < n; j++) {
            int64_t at = (first + r) * n + j;
            float s = half ? wide(((bf16 *)state)[at]) : ((float *)state)[at];
            s = s * decay + b[j] * x[r];
            rest += s * c[j];
            if (half) ((bf16 *)state)[at] = narrow(s);
            else ((float *)state)[at] = s;
        }
        y[r] = sum_of(sums[r]) + rest;
    }
}

INLINE void advance_by(const Mamba *m, void *state, float decay, const float *x, const float *b,
                       const float *c, float *y, const int half) {
    int r = 0, n = m->state_dim;
    for (; r + ROWS <= m->head_dim; r += ROWS)
        advance_rows(state, r, n, decay, x + r, b, c, y + r, ROWS, half);
    for (; r < m->head_dim; r++) advance_rows(state, r, n, decay, x + r, b, c, y + r, 1, half);
}

INLINE void *head_state(const Mamba *m, int64_t slot, int head) {
    int64_t size = (int64_t)m->head_dim * m->state_dim * (m->narrow_states ? 2 : 4);
    return (char *)m->states + (slot * m->heads + head) * size;
}

static void advance_token(const Mamba *m, int64_t token, int head, void *state) {
    int64_t channels = mixed_channels(m), inner = (int64_t)m->heads * m->head_dim;
    int dim = m->head_dim, group = head / (m->heads / m->groups);
    const float *x = m->mixed + token * channels + (int64_t)head * dim;
    const float *b = m->mixed + token * channels + inner + (int64_t)group * m->state_dim;
    const float *c = b + (int64_t)m->groups * m->state_dim;
    float *y = m->y + token * inner + (int64_t)head * dim, new[dim];
    float dt = wide(m->p[token * m->stride + channels + head]) + m->bias[head];
    dt = dt > 20.0f ? dt : log1pf(expf(dt));
    dt = dt < m->low ? m->low : dt > m->high ? m->high : dt;
    float decay = expf(dt * m->a[head]);
    for (int i = 0; i < dim; i++) new[i] = x[i] * dt;
    if (m->narrow_states) advance_by(m, state, decay, new, b, c, y, 1);
    else advance_by(m, state, decay, new, b, c, y, 0);
    for (int i = 0; i < dim; i++) y[i] += x[i] * m->skip[head];
}

/* A head of a sequence, all its tokens; its state is kept on the way where the plan says. */
static __attribute__((noinline)) void advance_run(const Mamba *m, int64_t i, int head) {
    const int64_t *run = m->runs + 3 * i;
    int64_t save = m->save_starts[i], inner = (int64_t)m->heads * m->head_dim;
    size_t size = (size_t)m->head_dim * m->state_dim * (m->narrow_states ? 2 : 4);
    if (run[2] < 0) { /* padding: there is no such state */
        for (int64_t t = 0; t < run[1]; t++)
            memset(m->y + (run[0] + t) * inner + (int64_t)head * m->head_dim, 0,
                   m->head_dim * sizeof(float));
        return;
    }
    void *state = head_state(m, run[2], head);
    for (int64_t t = 0; t <= run[1]; t++) {
        for (; save < m->save_starts[i + 1] && m->saves[2 * save] == t; save++)
            if (m->saves[2 * save + 1] != run[2])
                memcpy(head_state(m, m->saves[2 * save + 1], head), state, size);
        if (t < run[1]) advance_token(m, run[0] + t, head, state);
    }
}

/* `count` sequences of a step, whose tokens follow one another in p, `tokens` together. owners: which
 * sequence each token is of. sizes: width, heads, groups, head_dim, state_dim, whether states are
 * bf16. */
void mamba_steps(const bf16 *p, int64_t stride, int64_t count, int64_t tokens, const int64_t *owners,
                 const int64_t *runs, const int64_t *saves, const int64_t *save_starts,
                 bf16 *columns, const float *conv, const float *conv_bias, void *states,
                 const float *a, const float *skip, const float *bias, float *mixed, float *y,
                 const int *sizes, float low, float high, int threads) {
    Mamba m = {p, stride, runs, saves, save_starts, states, a, skip, bias, mixed, y, sizes[1],
               sizes[2], sizes[3], sizes[4], sizes[5], low, high};
    Conv c = {p, stride, runs, saves, save_starts, columns, conv, conv_bias, mixed,
              mixed_channels(&m), sizes[0], 1};
    int64_t tasks = count * m.heads;
#pragma omp parallel num_threads(threads) if (tasks > 1)
    {
        convolve_all(&c, count, tokens, owners);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++)
            advance_run(&m, task / m.heads, (int)(task % m.heads));
    }
}

/* The same in tasks: in phase 0 a sequence's convolution, in phase 1 a head of one. */
void mamba_task(const bf16 *p, int64_t stride, int64_t count, int64_t tokens, const int64_t *owners,
                const int64_t *runs, const int64_t *saves, const int64_t *save_starts,
                bf16 *columns, const float *conv, const float *conv_bias, void *states,
                const float *a, const float *skip, const float *bias, float *mixed, float *y,
                const int *sizes, float low, float high, int phase, int64_t task) {
    Mamba m = {p, stride, runs, saves, save_starts, states, a, skip, bias, mixed, y, sizes[1],
               sizes[2], sizes[3], sizes[4], sizes[5], low, high};
    Conv c = {p, stride, runs, saves, save_starts, columns, conv, conv_bias, mixed,
              mixed_channels(&m), sizes[0], 1};
    if (phase) advance_run(&m, task / m.heads, (int)(task % m.heads));
    else convolve_run(&c, task);
}

void conv_task(const bf16 *p, int64_t stride, const int64_t *runs, const int64_t *saves,
               const int64_t *save_starts, bf16 *columns, const float *weight, const float *bias,
               float *out, int64_t channels, int width, int activate, int64_t task) {
    Conv c = {p, stride, runs, saves, save_starts, columns, weight, bias, out, channels, width,
              activate};
    convolve_run(&c, task);
}

/* A convolution alone; see `Conv`. */
void conv_steps(const bf16 *p, int64_t stride, int64_t count, int64_t tokens, const int64_t *owners,
                const int64_t *runs, const int64_t *saves, const int64_t *save_starts,
                bf16 *columns, const float *weight, const float *bias, float *out,
                int64_t channels, int width, int activate, int threads) {
    Conv c = {p, stride, runs, saves, save_starts, columns, weight, bias, out, channels, width,
              activate};
#pragma omp parallel num_threads(threads) if (tokens > 1)
    convolve_all(&c, count, tokens, owners);
}

/* A part of a row; see `norm_gated`. */
__attribute__((noinline)) void norm_gated_part(const float *y, const float *weight, const bf16 *z, int64_t stride, bf16 *out,
                     int dim, int groups, float eps, int64_t part) {
    int each = dim / groups;
    int64_t row = part / groups, from = part % groups * each;
    const float *x = y + row * dim + from;
    const bf16 *gate = z + row * stride + from;
    float gated[each], sum = 0;
    for (int i = 0; i < each; i++) gated[i] = x[i] * silu(wide(gate[i]));
    for (int i = 0; i < each; i++) sum += gated[i] * gated[i];
    float scale = 1.0f / sqrtf(sum / each + eps);
    for (int i = 0; i < each; i++)
        out[row * dim + from + i] = narrow(gated[i] * scale * weight[from + i]);
}

/* out = norm of y * silu(z) over each of `groups` parts of a row, * weight. y: [rows, dim]; z: [rows,
 * stride]. */
void norm_gated(const float *y, const float *weight, const bf16 *z, int64_t stride, bf16 *out,
                int64_t rows, int dim, int groups, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * dim > 32768)
    for (int64_t part = 0; part < rows * groups; part++)
        norm_gated_part(y, weight, z, stride, out, dim, groups, eps, part);
}
