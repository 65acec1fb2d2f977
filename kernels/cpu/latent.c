/* Attention over latents (multi-head latent attention, kernels/reference/latent.py): extend.c where a
 * token's row in the pages is key and value of all heads.
 *
 * Decodes are chunks of one token: the heads of one fill the columns of a round by themselves. So a
 * token has the same bits in a prompt, in any chunk of it, and decoded. */
#define LATENT
#include "common.h"
#ifdef PRODUCTS
#include "extend.c"

#ifdef TILES
int latent_ready(void) { return tiles_permitted(); }
#else
int latent_ready(void) { return 1; }
#endif

/* pages: [tokens, row], bf16, or codes in int8 where there are scales, bf16 [tokens]. rows: as of
 * `paged_extend`. q: [tokens, ...] of heads x dim every q_stride elements, out: [tokens, heads, dim],
 * dim the next multiple of 32 of `row`, at most 1024; what lies behind a row counts for nothing. */
void latent_extend(const bf16 *q, int64_t q_stride, const void *pages, const bf16 *scales,
                   const int64_t *rows, int64_t n, bf16 *out, int heads, int row, int page_bits,
                   int window, float scale, int threads) {
    struct call c = {q, pages, scales, out, q_stride, heads, 1, (row + 31) & ~31, page_bits, window,
                     0, scale * 1.44269504f, 0, row};
    extend_rows(c, (const struct row *)rows, n, threads);
}

/* Columns of a task: so many heads of a token. */
static int64_t heads_each(const struct latent_decode *d) {
    int64_t parts = (d->heads + MAX_COLUMNS - 1) / MAX_COLUMNS;
    if (d->rows % d->threads && d->rows < 4 * d->threads && d->heads > 2 * COLS)
        parts *= 2 * d->threads;
    return ((d->heads + parts - 1) / parts + COLS - 1) / COLS * COLS;
}

int64_t latent_decode_tasks(const struct latent_decode *d) {
    int64_t each = heads_each(d);
    return d->rows * ((d->heads + each - 1) / each);
}

void latent_decode_task(const struct latent_decode *d, int64_t task) {
    struct call c = {d->q, d->pages, d->scales, d->out, d->q_stride, d->heads, 1, (d->row + 31) & ~31,
                     d->page_bits, d->window, 0, d->scale * 1.44269504f, 0, d->row};
    int64_t each = heads_each(d), token = task % d->rows, first = task / d->rows * each;
    int64_t end = first + each < d->heads ? first + each : d->heads, own = token / d->q_len;
    int64_t at = d->lens[own] - d->q_len + token % d->q_len;
    struct row row = {(int64_t)(d->tables + own * d->table_stride), token, at > 0 ? at : 0, 1};
    struct scratch s;
    if (!take(&s, c.dim, each)) return;
    tiles_full();
    if (c.dim == 576) task_of(&c, &row, 0, first, end, &s, 576);
    else task_of(&c, &row, 0, first, end, &s, c.dim);
    tiles_release();
}

/* The last `q_len` tokens of each sequence; see `paged_decode`. */
void latent_decode(const bf16 *q, int64_t q_stride, const void *pages, const bf16 *scales,
                   const int32_t *tables, int64_t table_stride, const int32_t *lens, bf16 *out,
                   int64_t rows, int q_len, int heads, int row, int page_bits, int window, float scale,
                   int threads) {
    struct latent_decode d = {q, q_stride, pages, scales, tables, table_stride, lens, out, rows, q_len,
                              heads, row, page_bits, window, scale, threads};
    int64_t tasks = latent_decode_tasks(&d);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (tasks > 1)
    for (int64_t task = 0; task < tasks; task++) latent_decode_task(&d, task);
}
#else
int64_t latent_decode_tasks(const struct latent_decode *d) {
    (void)d;
    return 1;
}

void latent_decode_task(const struct latent_decode *d, int64_t task) { (void)d, (void)task; }
void latent_decode(void) {}

int latent_ready(void) { return 0; }

void latent_extend(const bf16 *q, int64_t q_stride, const void *pages, const bf16 *scales,
                   const int64_t *rows, int64_t n, bf16 *out, int heads, int row, int page_bits,
                   int window, float scale, int threads) {}
#endif
