/* Attention of the last token, or few, of sequences over paged keys and values.
 *
 * Each token is a row of its own, and what lies behind it is not read: it comes out as it would
 * without those behind it, to the bit, whatever their pages hold. */
#include "program.h"

#define CHUNK 128 /* tokens per round of the online softmax */
#define GROUP 8   /* query heads per round */
#define AHEAD 6   /* tokens whose keys are fetched ahead: too scattered for the processor to guess */

/* A key or a value: numbers in bf16, or codes in int8. */
INLINE void widen(const char *at, const int codes, const bf16 *scale, int dim, float *to) {
    const float by = codes ? wide(*scale) : 1;
    for (int i = 0; i < dim; i++)
        to[i] = codes ? ((const int8_t *)at)[i] * by : wide(((const bf16 *)at)[i]);
}

/* Attention of `group` query heads, which share key head `head`, over tokens first..len of a row. */
INLINE void attend(const struct paged_decode *d, const bf16 *q, const int32_t *table, int first,
                   int len, int head, int group, const float *sinks, const float *slopes,
                   const int codes, int dim, bf16 *out) {
    const float by = d->cap ? d->scale / d->cap : d->scale;
    float query[GROUP][MAX_HEAD], acc[GROUP][MAX_HEAD], score[GROUP][CHUNK];
    float top[GROUP], sum[GROUP];
    for (int g = 0; g < group; g++) {
        top[g] = sinks && sinks[g] > -1e38f ? sinks[g] : -INFINITY, sum[g] = top[g] > -INFINITY;
        for (int i = 0; i < dim; i++) query[g][i] = wide(q[g * dim + i]) * by, acc[g][i] = 0;
    }
    const int64_t size = codes ? dim : 2 * dim, values = d->kv_heads * size;
    const char *pages = (const char *)d->pages + head * size, *at[CHUNK];
    const bf16 *scales[CHUNK] = {0};
    for (int begin = first; begin < len; begin += CHUNK) {
        int count = len - begin < CHUNK ? len - begin : CHUNK;
        for (int s = 0; s < count; s++) {
            int64_t token = token_of(d, table, begin + s);
            at[s] = pages + token * 2 * values;
            if (codes) scales[s] = d->scales + token * 2 * d->kv_heads + head;
        }
        for (int s = 0; s < count; s++) {
            const char *soon = at[s + AHEAD < count ? s + AHEAD : count - 1];
            for (int i = 0; i < size; i += 64)
                __builtin_prefetch(soon + i), __builtin_prefetch(at[s] + values + i);
            float key[MAX_HEAD];
            widen(at[s], codes, scales[s], dim, key);
            for (int g = 0; g < group; g++) {
                float dot = 0;
                for (int i = 0; i < dim; i++) dot += query[g][i] * key[i];
                score[g][s] = d->cap ? d->cap * tanh_of(dot) : dot;
                if (slopes) score[g][s] += slopes[g] * (begin + s - (len - 1));
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
            float value[MAX_HEAD];
            widen(at[s] + values, codes, scales[s] + (codes ? d->kv_heads : 0), dim, value);
            for (int g = 0; g < group; g++) {
                float p = score[g][s];
                for (int i = 0; i < dim; i++) acc[g][i] += p * value[i];
            }
        }
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < dim; i++) out[g * dim + i] = narrow(acc[g][i] / sum[g]);
}

#ifdef FLOATS16
#ifdef __AVX512BF16__
#include "decode_pairs.h"
#else
#include "decode_floats.h"
#endif
#include "decode_rows.h"

void decode_codes_task(const struct paged_decode *d, const struct cut *c, int64_t task);

static struct cut cut_step(const struct paged_decode *d) {
    int group = d->heads / d->kv_heads, most = d->window ? 1 : STATE / (group * d->dim);
    int kv_heads = d->kv_heads, each = d->q_len < most ? d->q_len : most;
    int64_t pieces = (d->q_len + each - 1) / each, jobs = d->rows / d->q_len * pieces;
    int64_t parts = (2 * d->threads + jobs - 1) / jobs;
    while (parts < kv_heads && (kv_heads + parts - 1) / parts * group * each * d->dim > STATE)
        parts++;
    int share = (int)(parts < kv_heads ? (kv_heads + parts - 1) / parts : 1);
    return (struct cut){jobs, (kv_heads + share - 1) / share, pieces, each, share};
}

static int whole_registers(const struct paged_decode *d) {
    return d->dim % 32 == 0 && d->heads / d->kv_heads * d->dim <= STATE;
}
#endif

/* A key head of a row. */
INLINE void head_task(const struct paged_decode *d, int64_t task, const int codes) {
    int group = d->heads / d->kv_heads, dim = d->dim;
    int64_t b = task / d->kv_heads, own = b / d->q_len;
    int k = (int)(task % d->kv_heads), last = d->lens[own] - d->q_len + 1 + (int)(b % d->q_len);
    int len = last > 1 ? last : 1; /* padding may be shorter than its rows */
    int first = d->window && len > d->window ? len - d->window : 0;
    for (int g = 0; g < group; g += GROUP) {
        int n = group - g < GROUP ? group - g : GROUP;
        int64_t h = (int64_t)k * group + g;
#define CALL(N, D) attend(d, d->q + b * d->q_stride + h * D, d->tables + own * d->table_stride, \
                          first, len, k, N, d->sinks ? d->sinks + h : 0, \
                          d->slopes ? d->slopes + h : 0, codes, D, \
                          d->out + (b * d->heads + h) * D)
        if (dim == 128) CALL(n, 128);
        else if (dim == 64) CALL(n, 64);
        else CALL(n, dim);
    }
}

int64_t paged_decode_tasks(const struct paged_decode *d) {
    if (d->exact) return decode_exact_tasks(d);
#ifdef FLOATS16
    if (whole_registers(d)) {
        struct cut c = cut_step(d);
        return c.jobs * c.parts;
    }
#endif
    return d->rows * d->kv_heads;
}

void paged_decode_task(const struct paged_decode *d, int64_t task) {
    if (d->exact) {
        decode_exact_task(d, task);
        return;
    }
#ifdef FLOATS16
    if (whole_registers(d)) {
        struct cut c = cut_step(d);
        if (d->scales) decode_codes_task(d, &c, task);
        else decode_task(d, &c, task);
        return;
    }
#endif
    if (d->scales) head_task(d, task, 1);
    else head_task(d, task, 0);
}

/* rows: q_len tokens of each sequence; tables and lens, with those tokens, are of the sequences.
 * scales: 0 where pages are bf16; where they are codes in int8, bf16 [tokens, 2 * kv_heads].
 * exact: with the bits of `paged_extend`, which must be ready; dim is a multiple of 32. */
void paged_decode(const bf16 *q, int64_t q_stride, const void *pages, const bf16 *scales,
                  const int32_t *tables, int64_t table_stride, const int32_t *lens, bf16 *out,
                  int64_t rows, int q_len, int heads, int kv_heads, int dim, int page_bits, int window,
                  float scale, int threads, int exact, const float *sinks, float cap,
                  const float *slopes) {
    struct paged_decode d = {q, q_stride, pages, scales, tables, table_stride, lens, out, rows, q_len,
                             heads, kv_heads, dim, page_bits, window, scale, threads,
                             exact, sinks, cap, slopes};
    int64_t tasks = paged_decode_tasks(&d);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (rows > q_len || lens[0] > 64)
    for (int64_t task = 0; task < tasks; task++) paged_decode_task(&d, task);
}
