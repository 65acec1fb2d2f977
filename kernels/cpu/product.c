/* Matrix products with packed weights. */
#include <omp.h>

#include "job.h"
#include "program.h"

#ifdef PRODUCTS
void linear_packed(const struct packed *w, const bf16 *x, const bf16 *bias, const bf16 *add, void *y,
                   int64_t rows, int kind, int threads);
void linear_leaves(const struct leaves *l, const bf16 *x, const bf16 *bias, const bf16 *add, void *y,
                   float *parts, int64_t rows, int kind, int64_t chunk, int threads);

#ifndef STREAM_FROM
#define STREAM_FROM (1 << 20) /* elements of a result that caches would not keep */
#endif
#define ROWS_EACH 256 /* rows a thread must have for threads to share rows, not columns */

int linear_scratch(void) { return (int)many_scratch(); }

/* Few rows: runs of panels, taken by whoever is free, since a thread that the scheduler and its kin
 * push aside must not hold up the product. */
static int64_t few_runs(const struct packed *w, int threads) {
    int64_t panels = (w->outs + PANEL - 1) / PANEL, runs = threads > 1 ? 8 * threads : 1;
    return runs > panels ? panels : runs;
}

static void few_run(const struct job *j, int64_t r, int64_t runs) {
    int64_t panels = (j->w->outs + PANEL - 1) / PANEL;
    product_few(j, panels * r / runs, panels * (r + 1) / runs);
}

static void few(const struct job *j, int threads) {
    int64_t runs = few_runs(j->w, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < runs; r++) few_run(j, r, runs);
}

int64_t linear_packed_tasks(const struct packed *w, int64_t rows, int threads) {
    return few_runs(w, rows > MAX_FEW || w->outs * w->ins * rows <= 65536 ? 1 : threads);
}

void linear_packed_task(const struct packed *w, const bf16 *x, const bf16 *bias, const bf16 *add,
                        void *y, int64_t rows, int kind, int64_t task, int64_t tasks) {
    struct job j = {w, x, bias, add, y, rows, kind, 0, w->ins};
    if (rows > MAX_FEW) linear_packed(w, x, bias, add, y, rows, kind, 1);
    else few_run(&j, task, tasks);
}

/* What threads take of a product of many rows, one number after the other: whole blocks of rows
 * first, then runs of panels of the blocks they share. */
struct deal { int64_t next, rows, blocks, whole, run, runs; };

/* A thread that is pushed aside, or whose core is slower, must not hold up the others: so the last
 * blocks are dealt out in runs, of a twelfth of the panels. What it costs is arranging these blocks
 * more than once. Where rows are not so many, all are shared. */
static struct deal deal_out(const struct job *j, int64_t parts) {
    int64_t panels = (j->w->outs + PANEL - 1) / PANEL, rows = many_rows(j);
    int64_t blocks = (j->rows + rows - 1) / rows, shared = blocks % parts ? blocks % parts : parts;
    if (j->rows < ROWS_EACH * parts) shared = blocks;
    if (parts == 1) shared = 0;
    int64_t run = (panels / 12 + 1) / 2 * 2; /* even: two panels of OUT_SILU fill a line */
    if (run < 2) run = 2;
    return (struct deal){0, rows, blocks, blocks - shared, run, (panels + run - 1) / run};
}

static void many(const struct job *j, struct deal *d, uint8_t *scratch) {
    int64_t panels = (j->w->outs + PANEL - 1) / PANEL, held = -1;
    for (;;) {
        int64_t turn = __atomic_fetch_add(&d->next, 1, __ATOMIC_RELAXED);
        int64_t late = turn - d->whole, block = late < 0 ? turn : d->whole + late / d->runs;
        if (block >= d->blocks) return;
        int64_t row = block * d->rows, left = j->rows - row, rows = left < d->rows ? left : d->rows;
        int64_t from = late < 0 ? 0 : late % d->runs * d->run, to = late < 0 ? panels : from + d->run;
        if (block != held) many_arrange(j, row, rows, scratch);
        product_many(j, row, rows, from, to < panels ? to : panels, scratch);
        held = block;
    }
}

/* y = x w^T (+ bias) (+ add), w packed; kind: see job.h. */
void linear_packed(const struct packed *w, const bf16 *x, const bf16 *bias, const bf16 *add, void *y,
                   int64_t rows, int kind, int threads) {
    int64_t line = kind == OUT_SILU ? 2 * PANEL : PANEL;
    int whole = w->outs % line == 0 && (uintptr_t)y % 64 == 0 && rows > MAX_FEW;
    struct job j = {w, x, bias, add, y, rows, kind,
                    kind != OUT_FLOAT && whole && rows * w->outs >= STREAM_FROM, w->ins};
    if (w->outs * w->ins * rows <= 65536) threads = 1;
    if (rows <= MAX_FEW) {
        few(&j, threads);
        return;
    }
    struct deal d = deal_out(&j, threads);
#pragma omp parallel num_threads(threads)
    many(&j, &d, w->scratch + omp_get_thread_num() * many_scratch());
}

/* Products of heads, each with rows and panels of its own. w: the heads' weights one behind the other,
 * an even number of panels each; x: [heads, rows, ins]; y: bf16 [rows, heads, outs of a head]. */
void linear_heads(const struct packed *w, const bf16 *x, bf16 *y, int64_t rows, int64_t heads,
                  int threads) {
    struct job one = {w, x, 0, 0, y, rows, OUT_BF16, 0, w->ins};
    int64_t panels = w->outs / PANEL / heads, few = rows <= MAX_FEW;
    int64_t each = few ? rows : many_rows(&one), blocks = rows ? (rows + each - 1) / each : 0;
    if (w->outs * w->ins * rows <= 65536) threads = 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t task = 0; task < heads * blocks; task++) {
        int64_t h = task / blocks, row = task % blocks * each;
        struct job j = one;
        j.x += h * rows * w->ins;
        if (few) {
            product_few(&j, h * panels, (h + 1) * panels);
            continue;
        }
        int64_t count = rows - row < each ? rows - row : each;
        uint8_t *scratch = w->scratch + omp_get_thread_num() * many_scratch();
        many_arrange(&j, row, count, scratch);
        product_many(&j, row, count, h * panels, (h + 1) * panels, scratch);
    }
}

void linear_heads_task(const struct packed *w, const bf16 *x, bf16 *y, int64_t rows, int64_t heads,
                       int64_t head) {
    int64_t panels = w->outs / PANEL / heads;
    struct job j = {w, x + head * rows * w->ins, 0, 0, y, 0, OUT_BF16, 0, w->ins};
    for (int64_t row = 0; row < rows; row += MAX_FEW) {
        j.rows = rows - row < MAX_FEW ? rows - row : MAX_FEW;
        product_few(&j, head * panels, (head + 1) * panels);
        j.x += MAX_FEW * w->ins;
        j.y = (bf16 *)j.y + MAX_FEW * w->outs;
    }
}

/* --- a tree of sums ---------------------------------------------------------------------------- */

/* A product whose columns are summed in parts, its leaves, which are added in a binary tree, all in
 * f32: so ranks sum that have a leaf each, or some neighbours. Filled by kernels/cpu/column_parts.py.
 *
 * A leaf adds to its sums those before it that are whole: the third of (0 + 1) + (2 + 3) first 2, then
 * 0 + 1, which wait in parts 0 and 1. So nothing is passed over once more. */
struct leaves {
    int64_t count, apart; /* a power of two; numbers from row to row of x */
    const struct packed *own[1 << MAX_LEVELS];
    int64_t from[1 << MAX_LEVELS]; /* a leaf's first column in x */
};

static struct job leaf_of(const struct leaves *l, int64_t i, const struct job *whole, float *parts) {
    struct job j = *whole;
    int64_t size = j.rows * j.w->outs;
    j.w = l->own[i], j.x += l->from[i], j.apart = l->apart;
    for (j.folds = 0; i >> j.folds & 1; j.folds++) j.parts[j.folds] = parts + j.folds * size;
    if (i) j.bias = 0;
    if (i + 1 < l->count) j.add = 0, j.y = parts + j.folds * size, j.kind = OUT_FLOAT, j.stream = 0;
    return j;
}

static void leaf_run(const struct leaves *l, const struct job *whole, float *parts, int64_t r,
                     int64_t runs) {
    for (int64_t i = 0; i < l->count; i++) {
        struct job j = leaf_of(l, i, whole, parts);
        few_run(&j, r, runs);
    }
}

static int leaf_threads(const struct leaves *l, int64_t rows, int threads) {
    return l->own[0]->outs * l->apart * rows <= 65536 ? 1 : threads;
}

int64_t linear_leaves_tasks(const struct leaves *l, int64_t rows, int threads) {
    return few_runs(l->own[0], rows > MAX_FEW ? 1 : leaf_threads(l, rows, threads));
}

void linear_leaves_task(const struct leaves *l, const bf16 *x, const bf16 *bias, const bf16 *add,
                        void *y, float *parts, int64_t rows, int kind, int64_t chunk, int64_t task,
                        int64_t tasks) {
    struct job j = {l->own[0], x, bias, add, y, rows, kind, 0, l->apart};
    if (rows > MAX_FEW) linear_leaves(l, x, bias, add, y, parts, rows, kind, chunk, 1);
    else leaf_run(l, &j, parts, task, tasks);
}

/* y = x w^T (+ bias) (+ add). parts: f32, for each level of the tree [chunk, outs], and PANEL numbers
 * behind them. chunk: rows that go through all leaves before the next. */
void linear_leaves(const struct leaves *l, const bf16 *x, const bf16 *bias, const bf16 *add, void *y,
                   float *parts, int64_t rows, int kind, int64_t chunk, int threads) {
    const struct packed *w = l->own[0];
    int64_t outs = w->outs, each = kind == OUT_FLOAT ? 4 : 2;
    int stream = kind != OUT_FLOAT && outs % PANEL == 0 && (uintptr_t)y % 64 == 0
                 && rows * outs >= STREAM_FROM;
    for (int64_t at = 0; at < rows; at += chunk) {
        struct job whole = {w, x + at * l->apart, bias, add ? add + at * outs : 0,
                            (uint8_t *)y + at * outs * each, rows - at < chunk ? rows - at : chunk,
                            kind, stream, l->apart};
        int team = leaf_threads(l, whole.rows, threads);
        if (whole.rows <= MAX_FEW) {
            int64_t runs = few_runs(w, team);
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
            for (int64_t r = 0; r < runs; r++) leaf_run(l, &whole, parts, r, runs);
            continue;
        }
        for (int64_t i = 0; i < l->count; i++) {
            struct job j = leaf_of(l, i, &whole, parts);
            struct deal d = deal_out(&j, team);
#pragma omp parallel num_threads(team)
            many(&j, &d, w->scratch + omp_get_thread_num() * many_scratch());
        }
    }
}
#else
int linear_scratch(void) { return 0; }
void linear_packed(void) {}
void linear_heads(void) {}

void linear_heads_task(const struct packed *w, const bf16 *x, bf16 *y, int64_t rows, int64_t heads,
                       int64_t head) {
    (void)w, (void)x, (void)y, (void)rows, (void)heads, (void)head;
}
void linear_leaves(void) {}

int64_t linear_leaves_tasks(const struct leaves *l, int64_t rows, int threads) {
    (void)l, (void)rows, (void)threads;
    return 1;
}

void linear_leaves_task(const struct leaves *l, const bf16 *x, const bf16 *bias, const bf16 *add,
                        void *y, float *parts, int64_t rows, int kind, int64_t chunk, int64_t task,
                        int64_t tasks) {
    (void)l, (void)x, (void)bias, (void)add, (void)y, (void)parts, (void)rows, (void)kind;
    (void)chunk, (void)task, (void)tasks;
}

int64_t linear_packed_tasks(const struct packed *w, int64_t rows, int threads) {
    (void)w, (void)rows, (void)threads;
    return 1;
}

void linear_packed_task(const struct packed *w, const bf16 *x, const bf16 *bias, const bf16 *add,
                        void *y, int64_t rows, int kind, int64_t task, int64_t tasks) {
    (void)w, (void)x, (void)bias, (void)add, (void)y, (void)rows, (void)kind, (void)task, (void)tasks;
}
#endif
