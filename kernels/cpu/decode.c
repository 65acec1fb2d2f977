/* Attention of the last token, or few, of sequences over paged keys and values.
 *
 * Each token is a row of its own, and what lies behind it is not read: it comes out as it would
 * without those behind it, to the bit, whatever their pages hold. */
#include "program.h"

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

#ifdef FLOATS16
#ifdef __AVX512BF16__
#include "decode_pairs.h"
#else
#include "decode_floats.h"
#endif
#define STATE 8192 /* elements of the outputs that a task keeps */

/* Tokens still to be fetched, some at a time: were all asked for at once, the loads of a round that
 * the second cache has would wait behind those. */
struct fetch {
    const bf16 *pages;
    const int32_t *table;
    int page_bits, at, stop;
    int64_t kv, first, end;
};

/* Fetches keys and values of heads first..end of up to `count` tokens: pages lie scattered, and
 * memory would else be waited for at the beginning of each. */
INLINE void fetch_some(struct fetch *f, int count) {
    int mask = (1 << f->page_bits) - 1;
    for (; count > 0 && f->at < f->stop; count--, f->at++) {
        const bf16 *at = f->pages + (((int64_t)f->table[f->at >> f->page_bits] << f->page_bits)
                                     + (f->at & mask)) * 2 * f->kv;
        for (int64_t i = f->first; i < f->end; i += 32) {
            _mm_prefetch((const char *)(at + i), _MM_HINT_T0);
            _mm_prefetch((const char *)(at + f->kv + i), _MM_HINT_T0);
        }
    }
}

/* A round of `heads` queries that share a key head. */
INLINE void attend_round(const bf16 *q, const struct round *r, int64_t head, int64_t values,
                         float *outputs, float *top, float *sum, int dim, int heads, float scale,
                         struct fetch *soon, int each) {
    struct weights weights;
    floats16 scores[HEADS][2];
    for (int h = 0; h < heads; h++) {
        fetch_some(soon, each);
        score_round(q, r, head, dim, h, heads, scale, scores);
        floats16 x = first_of(scores[h][0], r->count), y = first_of(scores[h][1], r->count - 16);
        float best = top_lanes(max_lanes(x, y));
        if (!(best <= top[h])) {
            float fade = exp_neg((top[h] - best) * 0.693147181f);
            for (int d = 0; d < dim; d += 16) {
                float *o = outputs + h * dim + d;
                store_lanes(o, mul_lanes(load_lanes(o), all_lanes(fade)));
            }
            sum[h] *= fade, top[h] = best;
        }
        x = exp2_lanes(sub_lanes(x, all_lanes(top[h])));
        y = exp2_lanes(sub_lanes(y, all_lanes(top[h])));
        sum[h] += sum_lanes(add_lanes(x, y));
        put_weights(&weights, h, x, y);
    }
    gather(r, head + values, &weights, outputs, dim, heads);
}

/* A round as a row sees it whose last token is `behind` tokens before the end of it. */
INLINE const struct round *cut_round(const struct round *r, int behind, struct round *cut) {
    if (behind <= 0) return r;
    cut->count = r->count - behind;
    for (int s = 0; s < ROUND; s++) cut->at[s] = r->at[s < cut->count ? s : cut->count - 1];
    return cut;
}

/* Attention of n rows of a sequence, one token after the other, that see tokens first..len, the last
 * of them; heads that share key heads first_head..end_head. All of a token's heads are read in turn:
 * they lie side by side. */
INLINE void attend_rows(const bf16 *q, int64_t q_stride, int n, const bf16 *pages,
                        const int32_t *table, int page_bits, int first, int len, int first_head,
                        int end_head, int group, int kv, int dim, float scale, bf16 *out,
                        int64_t out_stride) {
    float outputs[STATE] __attribute__((aligned(64))), top[STATE / 32], sum[STATE / 32];
    int width = (end_head - first_head) * group, mask = (1 << page_bits) - 1;
    memset(outputs, 0, (size_t)n * width * dim * sizeof(float));
    for (int h = 0; h < n * width; h++) top[h] = -3e38f, sum[h] = 0;
    for (int begin = first; begin < len; begin += ROUND) {
        struct round r = {.count = len - begin < ROUND ? len - begin : ROUND}, cut;
        for (int s = 0; s < ROUND; s++) {
            int p = s < r.count ? begin + s : len - 1;
            r.at[s] = pages + (((int64_t)table[p >> page_bits] << page_bits) + (p & mask)) * 2 * kv;
        }
        int next = begin + ROUND < len ? begin + ROUND : len;
        int stop = next + ROUND < len ? next + ROUND : len;
        struct fetch soon = {pages, table, page_bits, next, stop, kv, (int64_t)first_head * dim,
                             (int64_t)end_head * dim};
        int each = (ROUND + n * width - 1) / (n * width), most = heads_of(dim);
        for (int k = first_head; k < end_head; k++)
            for (int row = 0; row < n; row++) {
                int last = len - n + 1 + row, behind = begin + r.count - (last > 1 ? last : 1);
                if (behind >= r.count) continue;
                const struct round *own = cut_round(&r, behind, &cut);
                const bf16 *query = q + row * q_stride + (int64_t)k * group * dim;
                int h = row * width + (k - first_head) * group;
#define GO(N) attend_round(query + g * dim, own, (int64_t)k * dim, kv, outputs + (h + g) * dim, \
                           top + h + g, sum + h + g, dim, N, scale, &soon, each)
                for (int g = 0, left = group; left > 0; g += most, left -= most)
                    if (HEADS > 3 && left > 3 && most > 3) GO(HEADS);
                    else if (HEADS > 2 && left > 2 && most > 2) GO(HEADS - 1);
                    else if (left > 1) GO(2);
                    else GO(1);
            }
        fetch_some(&soon, ROUND);
    }
    for (int h = 0; h < n * width; h++)
        for (int d = 0; d < dim; d += 32)
            put_outputs(outputs + h * dim + d, 1 / sum[h],
                        out + h / width * out_stride
                            + ((int64_t)first_head * group + h % width) * dim + d);
}

/* How a step is cut. Rows behind a window do not begin with the same token. */
struct cut { int64_t jobs, parts, pieces; int each, share; };

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

static void decode_task(const struct paged_decode *d, const struct cut *c, int64_t task) {
    int64_t job = task / c->parts, own = job / c->pieces;
    int first = (int)(task % c->parts) * c->share, row = (int)(job % c->pieces) * c->each;
    int end = first + c->share < d->kv_heads ? first + c->share : d->kv_heads;
    int n = d->q_len - row < c->each ? d->q_len - row : c->each;
    int last = d->lens[own] - d->q_len + row + n;
    int len = last > 1 ? last : 1; /* padding may be shorter than its rows */
    int from = d->window && len > d->window ? len - d->window : 0;
    int64_t b = own * d->q_len + row;
#define ROWS(D) attend_rows(d->q + b * d->q_stride, d->q_stride, n, d->pages, \
                            d->tables + own * d->table_stride, d->page_bits, from, len, first, end, \
                            d->heads / d->kv_heads, d->kv_heads * D, D, d->scale * 1.44269504f, \
                            d->out + b * d->heads * D, (int64_t)d->heads * D)
    if (d->dim == 128) ROWS(128);
    else if (d->dim == 64) ROWS(64);
    else ROWS(d->dim);
}

static int whole_registers(const struct paged_decode *d) {
    return d->dim % 32 == 0 && d->heads / d->kv_heads * d->dim <= STATE;
}
#endif

/* A key head of a row. */
static void head_task(const struct paged_decode *d, int64_t task) {
    int group = d->heads / d->kv_heads, kv = d->kv_heads * d->dim, dim = d->dim;
    int64_t b = task / d->kv_heads, own = b / d->q_len;
    int k = (int)(task % d->kv_heads), last = d->lens[own] - d->q_len + 1 + (int)(b % d->q_len);
    int len = last > 1 ? last : 1; /* padding may be shorter than its rows */
    int first = d->window && len > d->window ? len - d->window : 0;
    for (int g = 0; g < group; g += GROUP) {
        int n = group - g < GROUP ? group - g : GROUP;
        int64_t h = (int64_t)k * group + g;
#define CALL(N, D) attend(d->q + b * d->q_stride + h * D, d->pages + k * D, \
                          d->tables + own * d->table_stride, d->page_bits, first, len, N, 2 * kv, kv, \
                          D, d->scale, d->out + (b * d->heads + h) * D)
        if (dim == 128) CALL(n, 128);
        else if (dim == 64) CALL(n, 64);
        else CALL(n, dim);
    }
}

int64_t paged_decode_tasks(const struct paged_decode *d) {
#ifdef FLOATS16
    if (whole_registers(d)) {
        struct cut c = cut_step(d);
        return c.jobs * c.parts;
    }
#endif
    return d->rows * d->kv_heads;
}

void paged_decode_task(const struct paged_decode *d, int64_t task) {
#ifdef FLOATS16
    if (whole_registers(d)) {
        struct cut c = cut_step(d);
        decode_task(d, &c, task);
        return;
    }
#endif
    head_task(d, task);
}

/* rows: q_len tokens of each sequence; tables and lens, with those tokens, are of the sequences. */
void paged_decode(const bf16 *q, int64_t q_stride, const bf16 *pages, const int32_t *tables,
                  int64_t table_stride, const int32_t *lens, bf16 *out, int64_t rows, int q_len,
                  int heads, int kv_heads, int dim, int page_bits, int window, float scale,
                  int threads) {
    struct paged_decode d = {q, q_stride, pages, tables, table_stride, lens, out, rows, q_len, heads,
                             kv_heads, dim, page_bits, window, scale, threads};
    int64_t tasks = paged_decode_tasks(&d);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (rows > q_len || lens[0] > 64)
    for (int64_t task = 0; task < tasks; task++) paged_decode_task(&d, task);
}
