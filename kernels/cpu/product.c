/* Matrix products with packed weights. */
#include <omp.h>

#include "job.h"

#ifdef TILES
#ifndef STREAM_FROM
#define STREAM_FROM (1 << 20) /* elements of a result that caches would not keep */
#endif
#define ROWS_EACH 256 /* rows a thread must have for threads to share rows, not columns */

int linear_scratch(void) { return (int)many_scratch(); }

/* Few rows: runs of panels, taken by whoever is free, since a thread that the scheduler and its kin
 * push aside must not hold up the product. */
static void few(const struct job *j, int threads) {
    int64_t panels = (j->w->outs + PANEL - 1) / PANEL;
    int64_t runs = threads > 1 ? 8 * threads : 1;
    if (runs > panels) runs = panels;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < runs; r++) product_few(j, panels * r / runs, panels * (r + 1) / runs);
}

/* Many rows: each thread a share of the rows, or, where they are not so many, of the panels. */
static void many(const struct job *j, int64_t part, int64_t parts) {
    int64_t panels = (j->w->outs + PANEL - 1) / PANEL;
    int64_t pairs = (panels + 1) / 2; /* two panels of OUT_SILU fill a line */
    int64_t from = pairs * part / parts * 2, to = pairs * (part + 1) / parts * 2;
    if (to > panels) to = panels;
    uint8_t *scratch = j->w->scratch + part * many_scratch();
    if (j->rows >= ROWS_EACH * parts) {
        int64_t runs = (j->rows + 31) / 32;
        int64_t row0 = runs * part / parts * 32, row1 = runs * (part + 1) / parts * 32;
        product_many(j, row0, row1 < j->rows ? row1 : j->rows, 0, panels, scratch);
    } else {
        product_many(j, 0, j->rows, from, to, scratch);
    }
}

/* y = x w^T (+ bias) (+ add), w packed; kind: see job.h. */
void linear_packed(const struct packed *w, const bf16 *x, const bf16 *bias, const bf16 *add, void *y,
                   int64_t rows, int kind, int threads) {
    int64_t line = kind == OUT_SILU ? 2 * PANEL : PANEL;
    int whole = w->outs % line == 0 && (uintptr_t)y % 64 == 0 && rows > MAX_FEW;
    struct job j = {w, x, bias, add, y, rows, kind,
                    kind != OUT_FLOAT && whole && rows * w->outs >= STREAM_FROM};
    if (w->outs * w->ins * rows <= 65536) threads = 1;
    if (rows <= MAX_FEW) {
        few(&j, threads);
        return;
    }
#pragma omp parallel num_threads(threads)
    many(&j, omp_get_thread_num(), omp_get_num_threads());
}
#else
int linear_scratch(void) { return 0; }
void linear_packed(void) {}
#endif
