/* Products with packed weights in vectors, where the processor has no AMX.
 *
 * A run of a panel is decoded into the first cache; GROUP rows by its columns are then summed in
 * registers: for each step a load or two of weights and GROUP broadcasts of x serve twice as many
 * products, so that loads never hold up the two units that multiply. Every output is summed over k in
 * one order, whatever the number of rows: a row's results do not depend on those beside it. While a
 * run is multiplied the one after it is fetched, so that memory does not wait for the products. */
#include "job.h"

#if defined(TILES_OF_VECTORS) || defined(FLOATS)
#ifdef TILES_OF_VECTORS
#include "product_pairs.h"
#else
#include "product_floats.h"
#endif

#define AHEAD 6144            /* bytes of the weight fetched ahead, at least */
#define MAX_ROWS (64 * GROUP)

int64_t many_scratch(void) {
    int64_t bytes = X_BYTES + MAX_ROWS * PANEL * 4 + MAX_ROWS * sizeof(__m256i);
    return (bytes + 4095) & ~4095;
}

/* Rows row0.. by panels from..to. arranged: the rows as `many_arrange` leaves them; 0: as they are
 * given. sums: [rows, 32]. */
INLINE void panels(const struct job *j, const int32_t *arranged, int64_t row0, int64_t rows,
                   int64_t from, int64_t to, float *sums, __m256i *halves) {
    union {
        number all[RUN * BLOCK];
        few_number few[RUN_FEW * BLOCK];
    } decoded __attribute__((aligned(64)));
    const struct packed *w = j->w;
    int64_t steps = w->ins / STEP, most = arranged ? RUN : RUN_FEW;
    int64_t runs = (steps + most - 1) / most, each = (steps + runs - 1) / runs;
    int64_t groups = (rows + GROUP - 1) / GROUP, bytes = w->coded ? CODED_BYTES : PLAIN_BYTES;
    int64_t ahead = each * bytes < AHEAD ? AHEAD : each * bytes;
    int lines = (int)((bytes / 64 + groups - 1) / groups);
    for (int64_t panel = from; panel < to; panel++) {
        const struct exception *next = w->coded ? w->exceptions + w->starts[panel] : 0;
        for (int64_t first = 0; first < steps; first += each) {
            int64_t count = steps - first < each ? steps - first : each;
            const void *b = arranged
                ? (const void *)decoded_run(w, panel, first, count, &next, decoded.all)
                : few_run(w, panel, first, count, &next, decoded.few);
            struct ahead soon = {w->blocks + (panel * steps + first) * bytes + ahead, lines};
            for (int64_t r = 0; r < rows; r += GROUP, soon.at += 64 * lines * count) {
                int n = (int)(rows - r < GROUP ? rows - r : GROUP);
                if (arranged)
                    multiply_arranged(n, arranged + r * WORDS(w->ins) + first * WORDS(STEP) * GROUP,
                                      b, count, sums + PANEL * r, first == 0, soon);
                else
                    multiply_rows(n, j->x + (row0 + r) * j->apart + first * STEP, j->apart, b, count,
                                  sums + PANEL * r, first == 0, soon);
                if (first + count < steps) continue;
                for (int64_t i = r; i < r + n; i++)
                    finish_row(j, load_lanes(sums + PANEL * i), load_lanes(sums + PANEL * i + 16),
                               row0 + i, panel, halves + i);
            }
        }
    }
}

void product_few(const struct job *j, int64_t from, int64_t to) {
    float sums[MAX_FEW * PANEL] __attribute__((aligned(64)));
    panels(j, 0, 0, j->rows, from, to, sums, 0);
}

int64_t many_rows(const struct job *j) {
    int64_t most = X_BYTES / (WORDS(j->w->ins) * 4) / GROUP * GROUP;
    most = most > MAX_ROWS ? MAX_ROWS : most < GROUP ? GROUP : most;
    int64_t parts = (j->rows + most - 1) / most, groups = (j->rows + GROUP - 1) / GROUP;
    int64_t rows = (groups + parts - 1) / parts * GROUP;
    return rows < most ? rows : most;
}

/* Groups of GROUP rows, one behind the other. */
void many_arrange(const struct job *j, int64_t row0, int64_t rows, uint8_t *scratch) {
    const struct packed *w = j->w;
    for (int64_t r = 0; r < rows; r += GROUP)
        arrange_group(j->x + (row0 + r) * j->apart, (int)(rows - r < GROUP ? rows - r : GROUP),
                      j->apart, w->ins, (int32_t *)scratch + r * WORDS(w->ins));
}

void product_many(const struct job *j, int64_t row0, int64_t rows, int64_t from, int64_t to,
                  uint8_t *scratch) {
    float *sums = (float *)(scratch + X_BYTES);
    __m256i *halves = (__m256i *)(sums + MAX_ROWS * PANEL);
    panels(j, (const int32_t *)scratch, row0, rows, from, to, sums, halves);
}
#endif
