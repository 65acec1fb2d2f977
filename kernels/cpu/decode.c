/* Attention of single tokens over paged keys and values. */
#include "common.h"

#define CHUNK 128 /* tokens per round of the online softmax */
#define GROUP 8   /* query heads per round */
#define AHEAD 6   /* tokens whose keys are fetched ahead: too scattered for the processor to guess */

/* Attention of `group` query heads, which share one key head, over tokens first..len of a row. */
INLINE void attend(const bf16 *q, const bf16 *pages, const int32_t *table, int page_bits, int first,
                   int len, int group, int64_t stride, int values, int dim, float scale, bf16 *out) {
    float query[GROUP][MAX_DIM], acc[GROUP][MAX_DIM], score[GROUP][CHUNK];
    float top[GROUP], sum[GROUP];
    for (int g = 0; g < group; g++) {
        top[g] = -INFINITY, sum[g] = 0;
        for (int i = 0; i < dim; i++) query[g][i] = wide(q[g * dim + i]) * scale, acc[g][i] = 0;
    }
    int mask = (1 << page_bits) - 1;
    const bf16 *at[CHUNK];
    for (int begin = first; begin < len; begin += CHUNK) {
        int count = len - begin < CHUNK ? len - begin : CHUNK;
        for (int s = 0; s < count; s++) {
            int p = begin + s;
            at[s] = pages + (((int64_t)table[p >> page_bits] << page_bits) + (p & mask)) * stride;
        }
        for (int s = 0; s < count; s++) {
            const bf16 *soon = at[s + AHEAD < count ? s + AHEAD : count - 1];
            for (int i = 0; i < dim; i += 32)
                __builtin_prefetch(soon + i), __builtin_prefetch(at[s] + values + i);
            float key[MAX_DIM];
            for (int i = 0; i < dim; i++) key[i] = wide(at[s][i]);
            for (int g = 0; g < group; g++) {
                float dot = 0;
                for (int i = 0; i < dim; i++) dot += query[g][i] * key[i];
                score[g][s] = dot;
            }
        }
        for (int g = 0; g < group; g++) {
            float best = top[g];
            for (int s = 0; s < count; s++) best = score[g][s] > best ? score[g][s] : best;
            float fade = exp_neg(top[g] - best), total = 0;
            for (int s = 0; s < count; s++) total += score[g][s] = exp_neg(score[g][s] - best);
            top[g] = best, sum[g] = sum[g] * fade + total;
            for (int i = 0; i < dim; i++) acc[g][i] *= fade;
        }
        for (int s = 0; s < count; s++) {
            float value[MAX_DIM];
            for (int i = 0; i < dim; i++) value[i] = wide(at[s][values + i]);
            for (int g = 0; g < group; g++) {
                float p = score[g][s];
                for (int i = 0; i < dim; i++) acc[g][i] += p * value[i];
            }
        }
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < dim; i++) out[g * dim + i] = narrow(acc[g][i] / sum[g]);
}

void paged_decode(const bf16 *q, int64_t q_stride, const bf16 *pages, const int32_t *tables,
                  int64_t table_stride, const int32_t *lens, bf16 *out, int64_t rows, int heads,
                  int kv_heads, int dim, int page_bits, int window, float scale, int threads) {
    int group = heads / kv_heads, kv = kv_heads * dim;
    int64_t tasks = rows * kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (rows > 1 || lens[0] > 64)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t b = task / kv_heads;
        int k = (int)(task % kv_heads), len = lens[b];
        int first = window && len > window ? len - window : 0;
        for (int g = 0; g < group; g += GROUP) {
            int n = group - g < GROUP ? group - g : GROUP;
            int64_t h = (int64_t)k * group + g;
#define CALL(N, D) attend(q + b * q_stride + h * dim, pages + k * dim, tables + b * table_stride, \
                          page_bits, first, len, N, 2 * kv, kv, D, scale, out + (b * heads + h) * dim)
            if (dim == 128) CALL(n, 128);
            else if (dim == 64) CALL(n, 64);
            else CALL(n, dim);
        }
    }
}
