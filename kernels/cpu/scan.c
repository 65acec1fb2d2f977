/* The selective scan of Mamba (`kernels/reference/selective_scan.py`), token by token, with its time
 * steps: prompts and decodes run the same code, so that they have the same bits. A sequence's block
 * of channels is a task. */
#include "delta.h"
#include "program.h"

#define BLOCK 32   /* channels of a task */
#define MAX_STATE 64

typedef struct {
    const bf16 *x, *dt; /* [tokens, channels] */
    const bf16 *b, *c;  /* [tokens, state_dim] */
    const int64_t *runs, *saves, *save_starts; /* see `delta_native.Runs`; a row below 0: padding */
    void *states;       /* [slots, channels, state_dim] */
    const float *a, *skip, *bias; /* [channels, state_dim], below 0; [channels] each */
    float *y;           /* [tokens, channels] */
    int64_t channels;
    int state_dim, narrow_states;
} Scan;

/* The states of `count` channels from the first of them on, between their pool and `own`. */
INLINE void move_states(const Scan *s, int64_t slot, int64_t first, int count, float *own,
                        const int back) {
    int64_t at = (slot * s->channels + first) * s->state_dim, n = (int64_t)count * s->state_dim;
    if (!s->narrow_states) {
        float *there = (float *)s->states + at;
        memcpy(back ? there : own, back ? own : there, n * sizeof(float));
        return;
    }
    bf16 *there = (bf16 *)s->states + at;
    for (int64_t i = 0; i < n; i++) {
        if (back) there[i] = narrow(own[i]);
        else own[i] = wide(there[i]);
    }
}

INLINE void scan_token(const Scan *s, int64_t token, int64_t first, int count, float *state) {
    int dims = s->state_dim;
    float b[MAX_STATE], c[MAX_STATE];
    for (int n = 0; n < dims; n++) {
        b[n] = wide(s->b[token * dims + n]);
        c[n] = wide(s->c[token * dims + n]);
    }
    for (int i = 0; i < count; i++) {
        int64_t channel = first + i, at = token * s->channels + channel;
        const float *a = s->a + channel * dims;
        float *own = state + (int64_t)i * dims, x = wide(s->x[at]), read = 0;
        float dt = wide(s->dt[at]) + s->bias[channel];
        dt = dt > 20.0f ? dt : log1pf(expf(dt));
        float new = dt * x;
        for (int n = 0; n < dims; n++) own[n] = own[n] * exp_neg(dt * a[n]) + new * b[n];
        for (int n = 0; n < dims; n++) read += own[n] * c[n];
        s->y[at] = read + x * s->skip[channel];
    }
    if (s->narrow_states) /* as they are kept between steps */
        for (int64_t i = 0; i < (int64_t)count * dims; i++) state[i] = wide(narrow(state[i]));
}

static __attribute__((noinline)) void scan_run(const Scan *s, int64_t i, int64_t first) {
    const int64_t *run = s->runs + 3 * i;
    int64_t left = s->channels - first, save = s->save_starts[i];
    int count = left < BLOCK ? (int)left : BLOCK;
    float state[BLOCK * MAX_STATE] __attribute__((aligned(64)));
    if (run[2] < 0) { /* padding: there is no such state */
        for (int64_t t = run[0]; t < run[0] + run[1]; t++)
            memset(s->y + t * s->channels + first, 0, count * sizeof(float));
        return;
    }
    move_states(s, run[2], first, count, state, 0);
    for (int64_t t = 0; t <= run[1]; t++) {
        for (; save < s->save_starts[i + 1] && s->saves[2 * save] == t; save++)
            if (s->saves[2 * save + 1] != run[2])
                move_states(s, s->saves[2 * save + 1], first, count, state, 1);
        if (t < run[1]) scan_token(s, run[0] + t, first, count, state);
    }
    move_states(s, run[2], first, count, state, 1);
}

/* `count` sequences of a step, whose tokens follow one another. sizes: state_dim (64 at most),
 * whether states are bf16. */
void scan_steps(const bf16 *x, const bf16 *dt, const bf16 *b, const bf16 *c, int64_t count,
                const int64_t *runs, const int64_t *saves, const int64_t *save_starts, void *states,
                const float *a, const float *skip, const float *bias, float *y, int64_t channels,
                int state_dim, int narrow_states, int threads) {
    Scan s = {x, dt, b, c, runs, saves, save_starts, states, a, skip, bias, y, channels, state_dim,
              narrow_states};
    int64_t blocks = (channels + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads) if (count * blocks > 1)
    for (int64_t task = 0; task < count * blocks; task++)
        scan_run(&s, task / blocks, task % blocks * BLOCK);
}

int64_t scan_tasks(int64_t count, int64_t channels) { return count * ((channels + BLOCK - 1) / BLOCK); }

/* One of its tasks. */
void scan_task(const bf16 *x, const bf16 *dt, const bf16 *b, const bf16 *c, int64_t count,
               const int64_t *runs, const int64_t *saves, const int64_t *save_starts, void *states,
               const float *a, const float *skip, const float *bias, float *y, int64_t channels,
               int state_dim, int narrow_states, int64_t task) {
    Scan s = {x, dt, b, c, runs, saves, save_starts, states, a, skip, bias, y, channels, state_dim,
              narrow_states};
    int64_t blocks = scan_tasks(1, channels);
    (void)count;
    scan_run(&s, task / blocks, task % blocks * BLOCK);
}
