/* A mixture of experts between its router's product and its result, all in C: who is chosen, which rows
 * lie side by side, products of each expert's rows (those of codes: grouped_product.c), and their
 * weighted sum. What a row comes to does not depend on the others. */
#include <omp.h>

#include "job.h"
#include "program.h"

#define MAX_EXPERTS 1024

/* --- the choice ------------------------------------------------------------------------------- */

/* The best of so many scores that are not taken yet; of equal ones the first. Scores that are no
 * numbers are chosen last. */
static int best_of(const float *scores, const uint8_t *taken, int count) {
    int best = -1;
    for (int i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
    return best;
}

/* Closes the experts of all groups but the best, of whose best experts the scores are summed. */
static void close_groups(const float *scores, uint8_t *closed, const struct choice *c) {
    int each = c->experts / c->groups;
    uint8_t open[MAX_EXPERTS] = {0};
    float sums[MAX_EXPERTS];
    for (int g = 0; g < c->groups; g++) {
        uint8_t seen[MAX_EXPERTS] = {0};
        sums[g] = 0;
        for (int i = 0; i < c->best && i < each; i++) {
            int own = best_of(scores + g * each, seen, each);
            sums[g] += scores[g * each + own];
            seen[own] = 1;
        }
    }
    for (int i = 0; i < c->chosen_groups; i++) open[best_of(sums, open, c->groups)] = 1;
    for (int e = 0; e < c->experts; e++) closed[e] = !open[e / each];
}

static __attribute__((noinline)) void choose_row(const struct choice *c, const float *logits, float *weights, int64_t *chosen) {
    float scores[MAX_EXPERTS], biased[MAX_EXPERTS], sum = 0, most = logits[0];
    uint8_t taken[MAX_EXPERTS] = {0};
    for (int e = 1; e < c->experts; e++) most = logits[e] > most ? logits[e] : most;
    for (int e = 0; e < c->experts; e++) {
        float power = exp_neg(c->softmax ? logits[e] - most : -fabsf(logits[e]));
        scores[e] = c->softmax || logits[e] < 0 ? power : 1.0f;
        if (!c->softmax) scores[e] /= 1.0f + power;
        sum += power;
    }
    for (int e = 0; e < c->experts; e++) {
        if (c->softmax) scores[e] /= sum;
        biased[e] = c->bias ? scores[e] + c->bias[e] : scores[e];
    }
    if (c->chosen_groups < c->groups) close_groups(biased, taken, c);
    sum = 0;
    for (int i = 0; i < c->chosen; i++) {
        chosen[i] = best_of(biased, taken, c->experts);
        taken[chosen[i]] = 1;
        sum += weights[i] = scores[chosen[i]];
    }
    sum += c->added;
    sum = sum < c->least ? c->least : sum;
    for (int i = 0; i < c->chosen; i++)
        weights[i] = (c->normalised ? weights[i] / sum : weights[i]) * c->factor;
}

void choose_rows(const struct choice *c, int64_t first, int64_t end) {
    for (int64_t t = first; t < end; t++) {
        float wide_logits[MAX_EXPERTS], weights[MAX_EXPERTS];
        const float *logits = (const float *)c->logits + t * c->stride;
        if (!c->floats) {
            for (int e = 0; e < c->experts; e++)
                wide_logits[e] = wide(((const bf16 *)c->logits)[t * c->stride + e]);
            logits = wide_logits;
        }
        choose_row(c, logits, weights, c->places + t * c->chosen);
        for (int i = 0; i < c->chosen; i++) c->weights[t * c->chosen + i] = narrow(weights[i]);
    }
}

/* Of each of `rows` rows of logits, f32 or bf16, those of the experts that are `chosen`, and their
 * weights in bf16: see `kernels.reference.experts.choose`. */
void choose_experts(const void *logits, int64_t stride, int floats, int64_t rows, int experts,
                    int chosen, int groups, int chosen_groups, int best, int softmax, int normalised,
                    const float *bias, float added, float least, float factor, bf16 *weights,
                    int64_t *places, int threads) {
    struct choice c = {logits, stride, floats, experts, chosen, groups, chosen_groups, best, softmax,
                       normalised, bias, added, least, factor, weights, places};
#pragma omp parallel for num_threads(threads) if (rows * experts > 16384)
    for (int64_t t = 0; t < rows; t++) choose_rows(&c, t, t + 1);
}

/* Brings the rows of each expert together. chosen: [rows, each]. sources: of each place, the row that
 * lies there; back: where each choice's place is; starts [experts + 1]: of each expert's places;
 * active: how many experts have some, and then these. */
void group_rows(const int64_t *chosen, int64_t rows, int64_t each, int64_t experts, int64_t *sources,
                int64_t *back, int64_t *starts, int64_t *active) {
    int64_t next[MAX_EXPERTS + 1] = {0}, count = 0;
    for (int64_t i = 0; i < rows * each; i++) next[chosen[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) {
        if (next[e + 1]) active[++count] = e;
        next[e + 1] += next[e];
    }
    active[0] = count;
    memcpy(starts, next, (experts + 1) * sizeof *starts);
    for (int64_t i = 0; i < rows * each; i++) {
        int64_t place = next[chosen[i]]++;
        sources[place] = i / each;
        back[i] = place;
    }
}

/* --- products --------------------------------------------------------------------------------- */

#ifdef PRODUCTS
/* Runs of panels that each expert's product is cut in. */
static int64_t runs_each(const struct packed_experts *c) {
    const struct packed *w = c->w[0];
    int64_t panels = (w->outs + PANEL - 1) / PANEL, active = c->active[0];
    if (c->threads < 2 || w->outs * w->ins * c->starts[c->experts] <= 65536) return 1;
    int64_t runs = (8 * c->threads + active - 1) / active;
    return runs > panels ? panels : runs;
}

static struct job expert_job(const struct packed_experts *c, int64_t e) {
    const struct packed *w = c->w[e];
    int64_t outs = w->outs / (c->kind == OUT_SILU ? 2 : 1), first = c->starts[e];
    return (struct job){w, c->x + first * w->ins, c->biases ? c->biases[e] : 0, 0,
                        (bf16 *)c->y + first * outs, c->starts[e + 1] - first, c->kind, 0, w->ins};
}

int64_t packed_experts_tasks(const struct packed_experts *c) { return c->active[0] * runs_each(c); }

void packed_experts_task(const struct packed_experts *c, int64_t task) {
    int64_t runs = runs_each(c), run = task % runs;
    struct job j = expert_job(c, c->active[1 + task / runs]);
    int64_t panels = (j.w->outs + PANEL - 1) / PANEL, rows = j.rows;
    int64_t width = j.w->outs / (j.kind == OUT_SILU ? 2 : 1);
    for (; rows > 0; rows -= MAX_FEW) {
        j.rows = rows < MAX_FEW ? rows : MAX_FEW;
        product_few(&j, panels * run / runs, panels * (run + 1) / runs);
        j.x += MAX_FEW * j.w->ins;
        j.y = (bf16 *)j.y + MAX_FEW * width;
    }
}

void linear_packed(const struct packed *w, const bf16 *x, const bf16 *bias, const bf16 *add, void *y,
                   int64_t rows, int kind, int threads);

/* The rows of each expert, places starts[e] to starts[e + 1] of x and y, times its weight (+ bias). */
void expert_packed(const struct packed *const *w, int64_t experts, const int64_t *starts,
                   const int64_t *active, const bf16 *x, const bf16 *const *biases, bf16 *y, int kind,
                   int threads) {
    struct packed_experts c = {w, experts, starts, active, x, biases, y, kind, threads};
    int64_t most = 0;
    for (int64_t e = 0; e < experts; e++)
        if (starts[e + 1] - starts[e] > most) most = starts[e + 1] - starts[e];
    if (most > MAX_FEW) {
        for (int64_t i = 1; i <= active[0]; i++) {
            struct job j = expert_job(&c, active[i]);
            linear_packed(j.w, j.x, j.bias, 0, j.y, j.rows, kind, threads);
        }
        return;
    }
    int64_t tasks = packed_experts_tasks(&c);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (tasks > active[0])
    for (int64_t task = 0; task < tasks; task++) packed_experts_task(&c, task);
}
#else
int64_t packed_experts_tasks(const struct packed_experts *c) {
    (void)c;
    return 1;
}

void packed_experts_task(const struct packed_experts *c, int64_t task) { (void)c, (void)task; }
void expert_packed(void) {}
#endif

/* --- element by element ------------------------------------------------------------------------ */

/* What a row's experts gave, weighted: one expert after the other, whatever the number of rows. back:
 * where the outputs of each choice lie; 0: in their order. */
__attribute__((noinline)) void combine_row(const bf16 *weights, const bf16 *outs, const int64_t *back, bf16 *y, int64_t t,
                 int chosen, int dim) {
    const bf16 *w = weights + t * chosen, *in[MAX_EXPERTS];
    for (int e = 0; e < chosen; e++)
        in[e] = outs + (back ? back[t * chosen + e] : t * chosen + e) * (int64_t)dim;
#ifdef FLOATS16
    for (int i = 0; i < dim; i += 16) {
        floats16 sum = no_lanes();
        for (int e = 0; e < chosen; e++)
            sum = fma_lanes(all_lanes(wide(w[e])), wide_some(in[e] + i, dim - i), sum);
        narrow_some(y + t * dim + i, sum, dim - i);
    }
#else
    for (int i = 0; i < dim; i++) {
        float sum = 0;
        for (int e = 0; e < chosen; e++) sum += wide(w[e]) * wide(in[e][i]);
        y[t * dim + i] = narrow(sum);
    }
#endif
}

void expert_combine(const bf16 *weights, const bf16 *outs, const int64_t *back, bf16 *y, int64_t rows,
                    int chosen, int dim, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * chosen * dim > 32768)
    for (int64_t t = 0; t < rows; t++) combine_row(weights, outs, back, y, t, chosen, dim);
}

INLINE float sigmoid(float x) {
    float e = exp_neg(-fabsf(x));
    return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

/* Gates [rows, dim] and what they are times, behind them: see `reference.activation`. */
__attribute__((noinline)) void clamped_row(const bf16 *gate_up, bf16 *y, int dim, float alpha, float limit) {
    for (int i = 0; i < dim; i++) {
        float gate = wide(gate_up[i]), up = wide(gate_up[dim + i]);
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        y[i] = narrow((up + 1) * gate * sigmoid(alpha * gate));
    }
}

void clamped_swiglu(const bf16 *gate_up, bf16 *y, int64_t rows, int dim, float alpha, float limit,
                    int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 16384)
    for (int64_t t = 0; t < rows; t++) clamped_row(gate_up + t * 2 * dim, y + t * dim, dim, alpha, limit);
}

/* y = add + x * sigmoid(gate), a gate a row, `stride` numbers apart; add: 0: nothing. */
__attribute__((noinline)) void gated_row(const bf16 *x, const bf16 *gate, const bf16 *add, bf16 *y, int dim) {
    float by = sigmoid(wide(*gate));
    for (int i = 0; i < dim; i++) y[i] = narrow((add ? wide(add[i]) : 0) + wide(x[i]) * by);
}

void gate_rows(const bf16 *x, const bf16 *gate, int64_t stride, const bf16 *add, bf16 *y, int64_t rows,
               int dim, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * dim > 16384)
    for (int64_t t = 0; t < rows; t++)
        gated_row(x + t * dim, gate + t * stride, add ? add + t * dim : 0, y + t * dim, dim);
}
