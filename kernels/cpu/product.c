/* Matrix products with packed weights. */
#include <omp.h>

#include "job.h"

#ifdef __AMX_BF16__
#ifndef STREAM_FROM
#define STREAM_FROM (1 << 20) /* elements of a result that caches would not keep */
#endif
#define ROWS_EACH 256 /* rows a thread must have for threads to share rows, not columns */

int linear_scratch(void) { return (int)many_scratch(); }

static void product_part(const struct job *j, int64_t part, int64_t parts) {
    int64_t panels = (j->w->outs + PANEL - 1) / PANEL;
    int64_t from = panels * part / parts, to = panels * (part + 1) / parts;
    uint8_t *scratch = j->w->scratch + part * many_scratch();
    if (j->rows <= MAX_FEW) {
        product_few(j, from, to);
    } else if (j->rows >= ROWS_EACH * parts) {
        int64_t pairs = (j->rows + 31) / 32;
        int64_t row0 = pairs * part / parts * 32, row1 = pairs * (part + 1) / parts * 32;
        product_many(j, row0, row1 < j->rows ? row1 : j->rows, 0, panels, scratch);
    } else {
        product_many(j, 0, j->rows, from, to, scratch);
    }
}

/* y = x w^T (+ bias) (+ add), w packed; kind: see job.h. */
void linear_packed(const struct packed *w, const bf16 *x, const bf16 *bias, const bf16 *add, void *y,
                   int64_t rows, int kind, int threads) {
    int whole = w->outs % PANEL == 0 && (uintptr_t)y % 64 == 0;
    struct job j = {w, x, bias, add, y, rows, kind,
                    kind == OUT_BF16 && whole && rows * w->outs >= STREAM_FROM};
    if (w->outs * w->ins * rows <= 65536) {
        product_part(&j, 0, 1);
        return;
    }
#pragma omp parallel num_threads(threads)
    product_part(&j, omp_get_thread_num(), omp_get_num_threads());
}
#else
int linear_scratch(void) { return 0; }
void linear_packed(void) {}
#endif
