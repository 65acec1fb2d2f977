/* What adapters add to rows of a product (kernels/reference/adapt.py): scale * B(A x), in f32, rounded
 * once. Each sum is made in the same order whatever rows there are beside it. */
#include "common.h"
#include "program.h"

#define CHUNK 256 /* columns that a thread takes together */
#define AHEAD 128 /* columns of a row of B that are fetched before they are needed */
#define FEW 65536 /* numbers of matrices of which no thread takes a share */
#ifdef FLOATS16_512
#define LOW_ROWS 4 /* rows of A whose sums are under way, for as many of x */
#else
#define LOW_ROWS 2
#endif

/* Rows of one adapter, of which x and y have their own numbers. */
struct rows {
    const int32_t *numbers;
    int slot, count;
    float *low; /* f32[count, modules * rank]: scale * A x */
};

INLINE float *low_of(const struct adapt_call *w, const struct rows *r, int row, int module) {
    return r->low + (row * w->modules + module) * w->rank;
}

#ifdef FLOATS16
/* sums[i][j] = x[i] . a[j] */
INLINE void low_sums(const bf16 *const *x, const bf16 *const *a, const int n, int64_t ins,
                     float sums[4][LOW_ROWS]) {
    const bf16 *ahead = a[LOW_ROWS - 1] + ins; /* the next rows: few are read before they are needed */
    floats16 s[4][LOW_ROWS], v[4];
    for (int i = 0; i < n; i++)
        for (int j = 0; j < LOW_ROWS; j++) s[i][j] = no_lanes();
    for (int64_t k = 0; k < ins; k += 16) {
        const int64_t left = ins - k;
        for (int i = 0; i < n; i++)
            v[i] = left < 16 ? wide_some(x[i] + k, left) : wide_lanes(x[i] + k);
        for (int j = 0; j < LOW_ROWS; j += 2) __builtin_prefetch(ahead + LOW_ROWS * k + 16 * j);
        for (int j = 0; j < LOW_ROWS; j++) {
            floats16 by = left < 16 ? wide_some(a[j] + k, left) : wide_lanes(a[j] + k);
            for (int i = 0; i < n; i++) s[i][j] = fma_lanes(v[i], by, s[i][j]);
        }
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < LOW_ROWS; j++) sums[i][j] = sum_lanes(s[i][j]);
}

INLINE void low_rows(const struct adapt_call *w, const struct rows *r, const bf16 *x, int64_t apart,
                     int module, int first, const int n) {
    const int rank = w->ranks[r->slot * w->modules + module];
    const bf16 *top = w->a + (r->slot * w->modules + module) * w->rank * w->ins;
    const float scale = w->scales[r->slot * w->modules + module];
    const bf16 *from[4], *a[LOW_ROWS];
    float sums[4][LOW_ROWS];
    for (int i = 0; i < n; i++) {
        const int row = first + i < r->count ? first + i : r->count - 1; /* again: not kept */
        from[i] = x + r->numbers[row] * apart;
    }
    for (int k = 0; k < rank; k += LOW_ROWS) {
        for (int j = 0; j < LOW_ROWS; j++) a[j] = top + (k + j < rank ? k + j : rank - 1) * w->ins;
        low_sums(from, a, n, w->ins, sums);
        for (int i = 0; i < n && first + i < r->count; i++)
            for (int j = 0; j < LOW_ROWS && k + j < rank; j++)
                low_of(w, r, first + i, module)[k + j] = sums[i][j] * scale;
    }
}

INLINE floats16 floats_some(const float *x, int64_t n) {
    float some[16] = {0};
    if (n >= 16) return load_lanes(x);
    for (int64_t i = 0; i < n; i++) some[i] = x[i];
    return load_lanes(some);
}

/* Adds to 32 columns, of which `left` are the module's. y: of bf16, or of f32 where it is wide. */
INLINE void add_columns(const struct adapt_call *w, const struct rows *r, void *y, int64_t apart,
                        const int is_wide, int module, int64_t column, const int64_t left, int first,
                        const int n) {
    const int rank = w->ranks[r->slot * w->modules + module];
    const bf16 *b = w->b + r->slot * w->rank * w->outs + column;
    const int64_t ahead = column + AHEAD < w->outs ? AHEAD : AHEAD + (rank - 1) * w->outs;
    const float *low[4];
    floats16 s[4][2];
    for (int i = 0; i < n; i++) {
        low[i] = low_of(w, r, first + i < r->count ? first + i : r->count - 1, module);
        s[i][0] = s[i][1] = no_lanes();
    }
    for (int k = 0; k < rank; k++, b += w->outs) {
        __builtin_prefetch(b + ahead, 0, 2);
        for (int c = 0; c < 2; c++) {
            floats16 by = left < 32 ? wide_some(b + 16 * c, left - 16 * c) : wide_lanes(b + 16 * c);
            for (int i = 0; i < n; i++) s[i][c] = fma_lanes(all_lanes(low[i][k]), by, s[i][c]);
        }
    }
    for (int i = 0; i < n && first + i < r->count; i++)
        for (int c = 0; c < 2 && left > 16 * c; c++) {
            const int64_t at = r->numbers[first + i] * apart + column + 16 * c;
            if (is_wide) {
                float *to = (float *)y + at;
                store_some(to, add_lanes(floats_some(to, left - 16 * c), settled_lanes(s[i][c])), left - 16 * c);
            } else {
                bf16 *to = (bf16 *)y + at;
                narrow_some(to, add_lanes(wide_some(to, left - 16 * c), settled_lanes(s[i][c])), left - 16 * c);
            }
        }
}

INLINE void add_rows(const struct adapt_call *w, const struct rows *r, void *y, int64_t apart,
                     const int is_wide, int module, int64_t from, int64_t to, int first,
                     const int n) {
    int64_t column = from;
    for (; column + 32 <= to; column += 32)
        add_columns(w, r, y, apart, is_wide, module, column, 32, first, n);
    if (column < to) add_columns(w, r, y, apart, is_wide, module, column, to - column, first, n);
}
#else
INLINE void low_rows(const struct adapt_call *w, const struct rows *r, const bf16 *x, int64_t apart,
                     int module, int first, const int n) {
    const int rank = w->ranks[r->slot * w->modules + module];
    const bf16 *a = w->a + (r->slot * w->modules + module) * w->rank * w->ins;
    for (int i = first; i < first + n && i < r->count; i++)
        for (int k = 0; k < rank; k++) {
            const bf16 *from = x + r->numbers[i] * apart;
            float sum = 0;
            for (int64_t j = 0; j < w->ins; j++) sum += wide(from[j]) * wide(a[k * w->ins + j]);
            low_of(w, r, i, module)[k] = sum * w->scales[r->slot * w->modules + module];
        }
}

INLINE void add_rows(const struct adapt_call *w, const struct rows *r, void *y, int64_t apart,
                     const int is_wide, int module, int64_t from, int64_t to, int first,
                     const int n) {
    const int rank = w->ranks[r->slot * w->modules + module];
    const bf16 *b = w->b + r->slot * w->rank * w->outs;
    for (int i = first; i < first + n && i < r->count; i++)
        for (int64_t j = from; j < to; j++) {
            const float *low = low_of(w, r, i, module);
            const int64_t at = r->numbers[i] * apart + j;
            float sum = 0;
            for (int k = 0; k < rank; k++) sum += low[k] * wide(b[k * w->outs + j]);
            if (is_wide) ((float *)y)[at] += sum;
            else ((bf16 *)y)[at] = narrow(wide(((bf16 *)y)[at]) + sum);
        }
}
#endif

static void low_task(const struct adapt_call *w, const struct rows *r, const bf16 *x, int64_t apart,
                     int module) {
    int first = 0;
    for (; first + 2 < r->count; first += 4) low_rows(w, r, x, apart, module, first, 4);
    if (first + 1 < r->count) low_rows(w, r, x, apart, module, first, 2);
    else if (first < r->count) low_rows(w, r, x, apart, module, first, 1);
}

static void add_task(const struct adapt_call *w, const struct rows *r, void *y, int64_t apart,
                     const int is_wide, int64_t from, int64_t to) {
    int64_t start = 0;
    for (int module = 0; module < w->modules; start = w->ends[module++]) {
        const int64_t begin = from > start ? from : start;
        const int64_t end = to < w->ends[module] ? to : w->ends[module];
        if (begin >= end || !w->ranks[r->slot * w->modules + module]) continue;
        int first = 0;
        for (; first + 2 < r->count; first += 4)
            add_rows(w, r, y, apart, is_wide, module, begin, end, first, 4);
        if (first + 1 < r->count) add_rows(w, r, y, apart, is_wide, module, begin, end, first, 2);
        else if (first < r->count) add_rows(w, r, y, apart, is_wide, module, begin, end, first, 1);
    }
}

INLINE struct rows rows_of(const struct adapt_call *w, int64_t block) {
    const int32_t *own = w->blocks + 3 * block;
    return (struct rows){w->numbers + own[1], own[0], own[2],
                         w->low + own[1] * w->modules * w->rank};
}

/* Parts that a phase can be cut in: modules of each block, or chunks of columns. */
static int64_t parts_of(const struct adapt_call *w, int phase) {
    int64_t count = 0;
    while (count < w->most && w->blocks[3 * count + 2]) count++;
    return count * (phase ? (w->outs + CHUNK - 1) / CHUNK : w->modules);
}

int64_t adapt_tasks(const struct adapt_call *w, int phase) {
    const int64_t parts = parts_of(w, phase), tasks = 4 * (int64_t)w->threads;
    if (parts * w->rank * (phase ? CHUNK : w->ins) <= FEW) return parts > 0;
    return parts < tasks ? parts : tasks;
}

/* Phase 0: to the low rank; phase 1: from it. */
void adapt_task(const struct adapt_call *w, int phase, int64_t task, int64_t tasks) {
    const int64_t parts = parts_of(w, phase), end = parts * (task + 1) / tasks;
    const int64_t each = phase ? (w->outs + CHUNK - 1) / CHUNK : w->modules;
    for (int64_t part = parts * task / tasks; part < end; part++) {
        const struct rows r = rows_of(w, part / each);
        const int64_t from = part % each * CHUNK, to = from + CHUNK < w->outs ? from + CHUNK : w->outs;
        if (!phase) low_task(w, &r, w->x, w->x_apart, (int)(part % each));
        else if (w->is_wide) add_task(w, &r, w->y, w->y_apart, 1, from, to);
        else add_task(w, &r, w->y, w->y_apart, 0, from, to);
    }
}

void adapt_rows(const bf16 *x, int64_t x_apart, void *y, int64_t y_apart, int is_wide,
                const int32_t *numbers, const int32_t *blocks, int64_t most, const bf16 *a,
                const bf16 *b, const float *scales, const int32_t *ranks, const int32_t *ends,
                float *low, int64_t modules, int64_t rank, int64_t ins, int64_t outs, int threads) {
    const struct adapt_call w = {x, x_apart, y, y_apart, is_wide, numbers, blocks, most, a, b, scales,
                                 ranks, ends, low, modules, rank, ins, outs, threads};
    const int64_t tasks[] = {adapt_tasks(&w, 0), adapt_tasks(&w, 1)};
#pragma omp parallel num_threads(threads) if (tasks[0] > 1 || tasks[1] > 1)
    for (int phase = 0; phase < 2; phase++) {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks[phase]; task++) adapt_task(&w, phase, task, tasks[phase]);
    }
}
