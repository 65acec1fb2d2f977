/* Attention of chunks with products of queries and keys in 8 bits: extend.c with other keys and scores,
 * see sage_codes.h. Weights and values are as they are there, and so are pages.
 *
 * Tiles of AMX are not used: where there are some, extend.c is faster. */
#define VECTOR_TILES
#include "common.h"
#if defined(PRODUCTS) && (defined(__AVX512VNNI__) || !defined(FLOATS16_512) && defined(__AVXVNNI__))
#define SAGE
#include "extend.c"

int sage_ready(void) { return 1; }

/* means: of keys, [kv_heads, dim], taken off all that are no codes yet; everything else is as in
 * `paged_extend`. */
void sage_extend(const bf16 *q, int64_t q_stride, const void *pages, const bf16 *scales,
                 const float *means, const int64_t *rows, int64_t n, bf16 *out, int heads,
                 int kv_heads, int dim, int page_bits, int window, float scale, int threads) {
    struct call c = {q, pages, scales, out, q_stride, heads, kv_heads, dim, page_bits, window,
                     0, scale * 1.44269504f, means};
    extend_rows(c, (const struct row *)rows, n, threads);
}
#else
int sage_ready(void) { return 0; }

void sage_extend(const bf16 *q, int64_t q_stride, const void *pages, const bf16 *scales,
                 const float *means, const int64_t *rows, int64_t n, bf16 *out, int heads,
                 int kv_heads, int dim, int page_bits, int window, float scale, int threads) {}
#endif
