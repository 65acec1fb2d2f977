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
#else
int latent_ready(void) { return 0; }

void latent_extend(const bf16 *q, int64_t q_stride, const void *pages, const bf16 *scales,
                   const int64_t *rows, int64_t n, bf16 *out, int heads, int row, int page_bits,
                   int window, float scale, int threads) {}
#endif
