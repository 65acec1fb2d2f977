/* Products with weights in 4 to 8 bits (grouped.h): inputs are quantised to 8 bits on the way, unless
 * they are already, each token and group of columns by its own largest number; codes are multiplied as integers, and the
 * sums of groups added up in f32, one group after the other.
 *
 * So a token's result does not depend on what other tokens there are: tokens are multiplied up to
 * TOKENS at once, but each as if it were alone. */
#include <omp.h>
#include <stdlib.h>

#include "grouped_sums.h"
#include "job.h"
#include "program.h"

#define MAX_SEGMENTS 256
#define L2_BYTES (384 << 10) /* of quantised tokens that a run of panels is multiplied with */

/* `out` is as if of a packed weight, of which only the number of outputs is asked for. */
struct grouped_job {
    const struct grouped *w;
    struct packed shape;
    struct job out;
    const int8_t *codes; /* [rows, ins] in place of x, and their scales; or 0 */
    const float *scales;
};

/* Rows of one weight that are multiplied in one sweep. */
struct segment {
    struct grouped_job *job;
    uint8_t *scratch;
    int64_t first, rows;   /* of the job */
    int64_t own, runs;     /* tokens that a cache keeps; runs of panels */
    int64_t blocks, units; /* of this segment and those before it */
};

#ifdef PRODUCTS
/* The results of some tokens, the first of which is `row`, and one or two panels from `panel` on. */
static void finish(const struct grouped_job *j, float *sums, int count, int64_t np, int64_t row,
                   int64_t panel) {
    for (int t = 0; t < count; t++, sums += np * OUTS) {
        floats16 second = np == 2 ? load_lanes(sums + OUTS) : no_lanes();
        finish_row(&j->out, load_lanes(sums), second, row + t, panel / 2, 0);
    }
}
#else
INLINE float silu(float g) {
    float e = exp_neg(-fabsf(g)), s = g / (1 + e);
    return g < 0 ? s * e : s;
}

/* 16 sums to the results, or fewer. */
INLINE void finish_panel(const struct job *j, float *sums, int64_t at, int64_t n, int64_t count) {
    if (j->bias)
        for (int i = 0; i < count; i++) sums[i] += wide(j->bias[n + i]);
    if (j->add)
        for (int i = 0; i < count; i++) sums[i] += wide(j->add[at + i]);
    if (j->kind == OUT_FLOAT) {
        memcpy((float *)j->y + at, sums, count * sizeof(float));
        return;
    }
    for (int i = 0; i < count; i++) ((bf16 *)j->y)[at + i] = narrow(sums[i]);
}

/* gate: 16 sums, those of up behind them. */
INLINE void finish_gated(const struct job *j, float *gate, int64_t n, bf16 *y) {
    if (j->bias)
        for (int i = 0; i < 2 * OUTS; i++) gate[i] += wide(j->bias[n + i]);
    for (int i = 0; i < OUTS; i++) y[i] = narrow(silu(gate[i]) * gate[OUTS + i]);
}

/* The results of some tokens, the first of which is `row`, and one or two panels from `panel` on. */
static void finish(const struct grouped_job *j, float *sums, int count, int64_t np, int64_t row,
                   int64_t panel) {
    int64_t outs = j->w->outs, n = panel * OUTS;
    for (int t = 0; t < count; t++, row++)
        if (j->out.kind == OUT_SILU) {
            finish_gated(&j->out, sums + t * 2 * OUTS, n,
                         (bf16 *)j->out.y + row * (outs / 2) + n / 2);
        } else {
            for (int64_t p = 0; p < np; p++) {
                int64_t from = n + p * OUTS, left = outs - from;
                float *own = sums + (t * np + p) * OUTS;
                if (left >= OUTS) finish_panel(&j->out, own, row * outs + from, from, OUTS);
                else finish_panel(&j->out, own, row * outs + from, from, left);
            }
        }
}
#endif

/* Tokens [from, to) of a segment by two panels, or the last one. fetched: their codes were fetched
 * while the panels before them were multiplied; more: those of the next ones are to be. */
static void multiply_panels(const struct segment *s, int64_t from, int64_t to, int64_t panel,
                            int fetched, int more) {
    const struct grouped_job *j = s->job;
    const struct grouped *w = j->w;
    int64_t np = panels_of(w) - panel < 2 ? 1 : 2, lines = np * w->bits;
    struct place at[2] = {place_of(w, panel), place_of(w, panel + np - 1)};
    int opened = OPENS(w, to - from), kind = opened || w->bits == 8 ? 3 : w->fp4 ? 4 : (int)w->bits - 4;
    uint8_t open[opened ? np * OUTS * w->ins : 1] __attribute__((aligned(LINE)));
    struct fetch fetch = {fetched ? 0 : AHEAD, 0, lines * LINE, (lines + QUARTERS - 1) / QUARTERS};
    if (more) fetch.next = at[0].codes + w->ins / COLUMNS * lines * LINE;
    if (opened) {
        open_panels(w, panel, np, fetch.ahead, open);
        fetch.ahead = 0;
        for (int p = 0; p < np; p++) at[p].codes = open + p * 8 * LINE, at[p].codes_step = np * 8 * LINE;
    }
    for (int64_t t = from; t < to; t += TOKENS) {
        float sums[TOKENS * 2 * OUTS] __attribute__((aligned(64)));
        struct tokens x = tokens_at(w, s->scratch, t, s->rows);
        if (np <= PANELS) {
            products[kind][np - 1][x.count - 1](w, at[0], &x, fetch, sums);
        } else {
            float apart[2][TOKENS * OUTS];
            for (int p = 0; p < 2; p++)
                products[kind][0][x.count - 1](w, at[p], &x, fetch, apart[p]);
            for (int i = 0; i < 2 * x.count; i++)
                memcpy(sums + i * OUTS, apart[i % 2] + i / 2 * OUTS, OUTS * sizeof(float));
        }
        fetch.ahead = 0;
        fetch.next = more && t < from + (QUARTERS - 1) * TOKENS ? fetch.next + fetch.lines * LINE : 0;
        finish(j, sums, x.count, np, s->first + t, panel);
    }
}

static void quantise_block(const struct segment *s, int64_t t) {
    const struct grouped_job *j = s->job;
    struct tokens to = tokens_at(j->w, s->scratch, t, s->rows);
    if (j->codes) {
        const int8_t *codes[TOKENS];
        const float *scales[TOKENS];
        int64_t parts = input_parts(j->w), row = s->first + t;
        for (int i = 0; i < to.count; i++) {
            codes[i] = j->codes + (row + i) * j->w->ins;
            scales[i] = j->scales + (row + i) * parts;
        }
        arrange_tokens(j->w, codes, scales, &to);
        return;
    }
    const bf16 *rows[TOKENS];
    for (int i = 0; i < to.count; i++) rows[i] = j->out.x + (s->first + t + i) * j->w->ins;
    quantise_tokens(j->w, rows, &to);
}

static void multiply_unit(const struct segment *s, int64_t u) {
    int64_t pairs = (panels_of(s->job->w) + 1) / 2, run = u % s->runs, from = u / s->runs * s->own;
    int64_t to = from + s->own < s->rows ? from + s->own : s->rows;
    int64_t first = pairs * run / s->runs, end = pairs * (run + 1) / s->runs;
    int many = to - from > (QUARTERS - 1) * TOKENS;
    for (int64_t pair = first; pair < end; pair++)
        multiply_panels(s, from, to, 2 * pair, many && pair > first, many && pair + 1 < end);
}

/* How a segment is cut, of so many that are multiplied together. */
static void cut(struct segment *s, int64_t count, int threads) {
    const struct grouped *w = s->job->w;
    int64_t pairs = (panels_of(w) + 1) / 2, own = L2_BYTES / token_bytes(w) / TOKENS * TOKENS;
    s->own = own < TOKENS ? TOKENS : own;
    int64_t parts = (s->rows + s->own - 1) / s->own, wanted = 8 * threads / count;
    s->runs = threads > 1 ? (wanted + parts - 1) / parts : 1;
    s->runs = s->runs > pairs ? pairs : s->runs < 1 ? 1 : s->runs;
    s->blocks = (s->rows + TOKENS - 1) / TOKENS;
    s->units = parts * s->runs;
}

INLINE int64_t next_of(int64_t *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }

/* Quantises the rows of all segments, then multiplies them. Runs of panels are taken by whoever is
 * free, since a thread that the scheduler pushes aside must not hold up the product. */
static void sweep(struct segment *segments, int64_t count, int threads) {
    int64_t blocks = 0, units = 0, next_block = 0, next_unit = 0;
    for (struct segment *s = segments; s < segments + count; s++) {
        cut(s, count, threads);
        s->blocks = blocks += s->blocks;
        s->units = units += s->units;
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const struct segment *s = segments;
        for (int64_t b; (b = next_of(&next_block)) < blocks;) {
            while (b >= s->blocks) s++;
            quantise_block(s, (b - (s == segments ? 0 : s[-1].blocks)) * TOKENS);
        }
#pragma omp barrier
        s = segments;
        for (int64_t u; (u = next_of(&next_unit)) < units;) {
            while (u >= s->units) s++;
            multiply_unit(s, u - (s == segments ? 0 : s[-1].units));
        }
    }
}

/* Rows under way to a sweep. */
struct batch {
    struct segment segments[MAX_SEGMENTS];
    int64_t count, used, bytes; /* of scratch */
    uint8_t *scratch;
    int threads;
};

static void begin(struct batch *b, uint8_t *scratch, int64_t bytes, int threads) {
    b->count = b->used = 0;
    b->bytes = bytes, b->scratch = scratch, b->threads = threads;
}

static void flush(struct batch *b) {
    if (b->count) sweep(b->segments, b->count, b->threads);
    b->count = b->used = 0;
}

/* Rows [first, end) of a job; those that scratch has no room for wait for the next sweep. */
static void put(struct batch *b, struct grouped_job *j, int64_t first, int64_t end) {
    int64_t each = token_bytes(j->w);
    while (first < end) {
        int64_t room = (b->bytes - LINE - b->used) / each / TOKENS * TOKENS;
        if (room <= 0 || b->count == MAX_SEGMENTS) {
            flush(b);
            continue;
        }
        int64_t rows = end - first < room ? end - first : room;
        b->segments[b->count++] = (struct segment){j, b->scratch + b->used, first, rows, 0, 0, 0, 0};
        b->used += (rows * each + LINE - 1) / LINE * LINE;
        first += rows;
    }
}

/* All rows of a call, of few, as one segment. */
static struct segment whole_call(const struct grouped_call *c, struct grouped_job *j) {
    int alone = c->w->outs * c->w->ins * c->rows <= 65536;
    *j = (struct grouped_job){c->w, {.outs = c->w->outs},
                              {0, c->x, c->bias, c->add, c->y, c->rows, c->kind, 0}, c->codes,
                              c->scales};
    j->out.w = &j->shape;
    struct segment s = {j, c->scratch, 0, c->rows, 0, 0, 0, 0};
    cut(&s, 1, alone ? 1 : c->threads);
    return s;
}

int64_t grouped_linear_tasks(const struct grouped_call *c, int phase) {
    struct grouped_job j;
    struct segment s = whole_call(c, &j);
    return phase ? s.units : s.blocks;
}

void grouped_linear_task(const struct grouped_call *c, int phase, int64_t task) {
    struct grouped_job j;
    struct segment s = whole_call(c, &j);
    if (phase) multiply_unit(&s, task);
    else quantise_block(&s, task * TOKENS);
}

static void multiply_all(struct grouped_job *j, uint8_t *scratch, int64_t scratch_bytes,
                         int threads) {
    int64_t rows = j->out.rows;
    struct batch b;
    j->out.w = &j->shape;
    begin(&b, scratch, scratch_bytes, j->w->outs * j->w->ins * rows <= 65536 ? 1 : threads);
    put(&b, j, 0, rows);
    flush(&b);
}

/* y = x w^T (+ bias) (+ add). scratch: at least TOKENS times `token_bytes`, and a line. */
void grouped_linear(const struct grouped *w, const bf16 *x, const bf16 *bias, const bf16 *add, void *y,
                    int64_t rows, int kind, uint8_t *scratch, int64_t scratch_bytes, int threads) {
    struct grouped_job j = {w, {.outs = w->outs}, {0, x, bias, add, y, rows, kind, 0}, 0, 0};
    multiply_all(&j, scratch, scratch_bytes, threads);
}

/* The same of an input in codes [rows, ins], with scales [rows, ins / columns_shared(w)]. */
void grouped_linear_int8(const struct grouped *w, const int8_t *codes, const float *scales,
                         const bf16 *bias, const bf16 *add, void *y, int64_t rows, int kind,
                         uint8_t *scratch, int64_t scratch_bytes, int threads) {
    struct grouped_job j = {w, {.outs = w->outs}, {0, 0, bias, add, y, rows, kind, 0}, codes, scales};
    multiply_all(&j, scratch, scratch_bytes, threads);
}

/* --- experts ------------------------------------------------------------------------------------ */

static void expert_job(const struct grouped_experts *c, int64_t e, struct grouped_job *j) {
    *j = (struct grouped_job){c->w[e], {.outs = c->w[e]->outs},
                              {0, c->x, c->biases ? c->biases[e] : 0, 0, c->y, c->starts[c->experts],
                               c->kind, 0}, 0, 0};
    j->out.w = &j->shape;
}

/* Bytes of scratch in front of the rows of the active expert of this number. */
static int64_t expert_scratch(const struct grouped_experts *c, int64_t number) {
    return (c->starts[c->active[1 + number]] * token_bytes(c->w[0]) / LINE + number) * LINE;
}

/* The rows of an active expert as one segment. */
static struct segment expert_segment(const struct grouped_experts *c, int64_t number,
                                     struct grouped_job *j) {
    int64_t e = c->active[1 + number], first = c->starts[e];
    expert_job(c, e, j);
    struct segment s = {j, c->scratch + expert_scratch(c, number), first, c->starts[e + 1] - first,
                        0, 0, 0, 0};
    cut(&s, c->active[0], c->threads);
    return s;
}

/* The tasks of each phase up to each active expert's last: [2, experts]. */
void plan_experts(const struct grouped_experts *c, int64_t *plan) {
    int64_t blocks = 0, units = 0;
    for (int64_t i = 0; i < c->active[0]; i++) {
        struct grouped_job j;
        struct segment s = expert_segment(c, i, &j);
        plan[i] = blocks += s.blocks;
        plan[c->experts + i] = units += s.units;
    }
}

int64_t grouped_experts_tasks(const struct grouped_experts *c, const int64_t *plan, int phase) {
    return plan[phase * c->experts + c->active[0] - 1];
}

/* Phase 0 quantises rows, phase 1 multiplies them. All have room in scratch. */
void grouped_experts_task(const struct grouped_experts *c, const int64_t *plan, int phase,
                          int64_t task) {
    const int64_t *ends = plan + phase * c->experts;
    int64_t low = 0, high = c->active[0] - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (ends[middle] > task) high = middle;
        else low = middle + 1;
    }
    struct grouped_job j;
    struct segment s = expert_segment(c, low, &j);
    task -= low ? ends[low - 1] : 0;
    if (phase) multiply_unit(&s, task);
    else quantise_block(&s, task * TOKENS);
}

/* `expert_packed` of weights in codes. plan: [2, experts], for programs. */
void expert_grouped(const struct grouped *const *w, int64_t experts, const int64_t *starts,
                    const int64_t *active, const bf16 *x, const bf16 *const *biases, bf16 *y, int kind,
                    uint8_t *scratch, int64_t scratch_bytes, int64_t *plan, int threads) {
    struct grouped_experts c = {w, experts, starts, active, x, biases, y, kind, threads, scratch};
    struct grouped_job *jobs = malloc(experts * sizeof *jobs);
    struct batch b;
    (void)plan;
    begin(&b, scratch, scratch_bytes, threads);
    for (int64_t i = 1; i <= active[0]; i++) {
        int64_t e = active[i];
        expert_job(&c, e, jobs + e);
        put(&b, jobs + e, starts[e], starts[e + 1]);
    }
    flush(&b);
    free(jobs);
}

void expert_plan(const struct grouped *const *w, int64_t experts, const int64_t *starts,
                 const int64_t *active, int64_t *plan, int threads) {
    struct grouped_experts c = {w, experts, starts, active, 0, 0, 0, 0, threads, 0};
    plan_experts(&c, plan);
}
