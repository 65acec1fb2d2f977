/* Kimi Delta Attention (`kernels/reference/kda.py`), token by token, with its gates: prompts and
 * decodes run the same code, so that they have the same bits. A head of a sequence is a task. */
#include "delta.h"
#include "program.h"

#define MAX_HEAD 256

typedef struct {
    const float *qkv;   /* [tokens, 3 * heads * dim] */
    const bf16 *f, *b;  /* [tokens, heads * dim], [tokens, heads] */
    const int64_t *runs, *saves, *save_starts; /* see `delta_native.Runs`; a row below 0: padding */
    void *states;       /* [slots, heads, dim, dim] */
    const float *decay, *bias; /* [heads], [heads * dim] */
    float *y;           /* [tokens, heads, dim] */
    int heads, dim, narrow_states;
} Kda;

/* A head's state, between its pool and `own`. */
INLINE void move_state(const Kda *m, int64_t slot, int head, float *own, const int back) {
    int64_t n = (int64_t)m->dim * m->dim, at = (slot * m->heads + head) * n;
    if (!m->narrow_states) {
        float *there = (float *)m->states + at;
        memcpy(back ? there : own, back ? own : there, n * sizeof(float));
        return;
    }
    bf16 *there = (bf16 *)m->states + at;
    for (int64_t i = 0; i < n; i++) {
        if (back) there[i] = narrow(own[i]);
        else own[i] = wide(there[i]);
    }
}

static void kda_token(const Kda *m, int64_t token, int head, float *state) {
    int n = m->dim;
    int64_t inner = (int64_t)m->heads * n;
    float q[MAX_HEAD], k[MAX_HEAD], fade[MAX_HEAD];
    const float *x = m->qkv + token * 3 * inner + (int64_t)head * n, *v = x + 2 * inner;
    memcpy(q, x, n * sizeof(float));
    memcpy(k, x + inner, n * sizeof(float));
    to_length(q, n, 1.0f / sqrtf((float)n));
    to_length(k, n, 1.0f);
    for (int i = 0; i < n; i++) {
        float g = wide(m->f[token * inner + (int64_t)head * n + i]) + m->bias[(int64_t)head * n + i];
        fade[i] = expf(-m->decay[head] * (g > 20.0f ? g : log1pf(expf(g))));
    }
    float beta = 1.0f / (1.0f + expf(-wide(m->b[token * m->heads + head])));
    for (int r = 0; r < n; r++) {
        float *row = state + (int64_t)r * n, seen = 0, out = 0;
        for (int i = 0; i < n; i++) row[i] *= fade[i];
        for (int i = 0; i < n; i++) seen += row[i] * k[i];
        float delta = (v[r] - seen) * beta;
        for (int i = 0; i < n; i++) row[i] += delta * k[i];
        for (int i = 0; i < n; i++) out += row[i] * q[i];
        m->y[token * inner + (int64_t)head * n + r] = out;
    }
    if (m->narrow_states) /* as they are kept between steps */
        for (int64_t i = 0; i < (int64_t)n * n; i++) state[i] = wide(narrow(state[i]));
}

static __attribute__((noinline)) void kda_run(const Kda *m, int64_t i, int head) {
    const int64_t *run = m->runs + 3 * i;
    int64_t save = m->save_starts[i];
    if (run[2] < 0) { /* padding: there is no such state */
        for (int64_t t = run[0]; t < run[0] + run[1]; t++)
            memset(m->y + (t * m->heads + head) * m->dim, 0, m->dim * sizeof(float));
        return;
    }
    float state[(int64_t)m->dim * m->dim] __attribute__((aligned(64)));
    move_state(m, run[2], head, state, 0);
    for (int64_t t = 0; t <= run[1]; t++) {
        for (; save < m->save_starts[i + 1] && m->saves[2 * save] == t; save++)
            if (m->saves[2 * save + 1] != run[2])
                move_state(m, m->saves[2 * save + 1], head, state, 1);
        if (t < run[1]) kda_token(m, run[0] + t, head, state);
    }
    move_state(m, run[2], head, state, 1);
}

/* `count` sequences of a step, whose tokens follow one another. */
void kda_steps(const float *qkv, const bf16 *f, const bf16 *b, int64_t count, const int64_t *runs,
               const int64_t *saves, const int64_t *save_starts, void *states, const float *decay,
               const float *bias, float *y, int heads, int dim, int narrow_states, int threads) {
    Kda m = {qkv, f, b, runs, saves, save_starts, states, decay, bias, y, heads, dim, narrow_states};
#pragma omp parallel for schedule(static) num_threads(threads) if (count * heads > 1)
    for (int64_t task = 0; task < count * heads; task++)
        kda_run(&m, task / heads, (int)(task % heads));
}

/* A head of a sequence. */
void kda_task(const float *qkv, const bf16 *f, const bf16 *b, const int64_t *runs, const int64_t *saves,
              const int64_t *save_starts, void *states, const float *decay, const float *bias, float *y,
              int heads, int dim, int narrow_states, int64_t task) {
    Kda m = {qkv, f, b, runs, saves, save_starts, states, decay, bias, y, heads, dim, narrow_states};
    kda_run(&m, task / heads, (int)(task % heads));
}
