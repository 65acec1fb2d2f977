/* An indexer's scores of tokens (kernels/reference/token_choice.py): the sum over heads of weight *
 * relu(query . key), in f32.
 *
 * Keys lie across lanes, 16 tokens to a block that begins at a multiple of 16. Each score is made
 * number by number and head by head, in this order, so that it depends neither on how many rows or
 * tokens there are beside it nor on its lane: the same tokens are chosen in a prompt, in any chunk of
 * it, and for a decode. */
#include "common.h"

#define AT_ONCE 8 /* heads whose products are under way */

#ifdef FLOATS16
/* 16 keys of a sequence, from token `from` on, number by number; those behind `len` are zeros. */
static void columns_of(const bf16 *keys, const int32_t *table, int64_t from, int64_t len, int bits,
                       int dim, float *to) {
    for (int i = 0; i < 16; i++) {
        const int64_t s = from + i;
        const bf16 *key = keys;
        if (s < len) key += (((int64_t)table[s >> bits] << bits) + (s & ((1 << bits) - 1))) * dim;
        for (int d = 0; d < dim; d++) to[d * 16 + i] = s < len ? wide(key[d]) : 0;
    }
}

/* Adds the scores of n heads. q: n x dim, f32. */
INLINE floats16 add_heads(const float *q, const float *weights, const float *keys, int dim,
                          floats16 sum, const int n) {
    floats16 products[AT_ONCE];
    for (int h = 0; h < n; h++) products[h] = no_lanes();
    for (int d = 0; d < dim; d++) {
        const floats16 key = load_lanes(keys + d * 16);
        for (int h = 0; h < n; h++)
            products[h] = fma_lanes(all_lanes(q[h * dim + d]), key, products[h]);
    }
    for (int h = 0; h < n; h++)
        sum = fma_lanes(all_lanes(weights[h]), max_lanes(products[h], no_lanes()), sum);
    return sum;
}
#endif

/* q: f32[B, rows, heads, dim]; weights: f32[B, rows, heads]; keys: bf16[pages << bits, dim]; tables:
 * i32[B, width]; lens: i32[B], tokens of each sequence; scores: f32[B, rows, span], -inf behind a
 * length. */
void token_scores(const float *q, const float *weights, const bf16 *keys, const int32_t *tables,
                  int64_t width, const int32_t *lens, float *scores, int64_t batch, int64_t rows,
                  int64_t span, int heads, int dim, int bits, int threads) {
    const int64_t blocks = (span + 15) / 16;
#pragma omp parallel for collapse(2) schedule(dynamic, 4) num_threads(threads)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t from = block * 16, len = lens[b] < span ? lens[b] : span;
            float *to = scores + b * rows * span + from;
            const int64_t held = span - from < 16 ? span - from : 16;
#ifdef FLOATS16
            float columns[MAX_HEAD * 16] __attribute__((aligned(64)));
            if (from < len) columns_of(keys, tables + b * width, from, len, bits, dim, columns);
            for (int64_t r = 0; r < rows; r++, to += span) {
                const float *own = q + (b * rows + r) * heads * dim;
                const float *by = weights + (b * rows + r) * heads;
                floats16 sum = no_lanes();
                if (from >= len) {
                    store_some(to, all_lanes(-INFINITY), held);
                    continue;
                }
                int h = 0;
                for (; h + AT_ONCE <= heads; h += AT_ONCE)
                    sum = add_heads(own + h * dim, by + h, columns, dim, sum, AT_ONCE);
                for (; h < heads; h++)
                    sum = add_heads(own + h * dim, by + h, columns, dim, sum, 1);
                store_some(to, first_of(sum, (int)(len - from)), held);
            }
#else
            for (int64_t r = 0; r < rows; r++, to += span)
                for (int64_t i = 0; i < held; i++) {
                    const int64_t s = from + i;
                    float sum = 0;
                    for (int h = 0; s < len && h < heads; h++) {
                        const int64_t at = (int64_t)tables[b * width + (s >> bits)] << bits;
                        const bf16 *key = keys + (at + (s & ((1 << bits) - 1))) * dim;
                        const float *own = q + ((b * rows + r) * heads + h) * dim;
                        float product = 0;
                        for (int d = 0; d < dim; d++) product += own[d] * wide(key[d]);
                        sum += weights[(b * rows + r) * heads + h] * (product > 0 ? product : 0);
                    }
                    to[i] = s < len ? sum : -INFINITY;
                }
#endif
        }
}
