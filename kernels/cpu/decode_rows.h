/* A decode's rows, round by round: an online softmax over keys and values as they lie in pages.
 *
 * A flavour is included before: decode_pairs.h, decode_floats.h (pages in bf16), decode_codes.h
 * (int8). It says what an `element` of a page is, how many tokens a `struct round` has, and how
 * scores, weights and outputs come about. */
#pragma once
#include "program.h"

#define PARTS (ROUND / 16) /* registers of a round's scores */
#define STATE 8192         /* elements of the outputs that a task keeps */

/* How a step is cut. Rows behind a window do not begin with the same token. */
struct cut { int64_t jobs, parts, pieces; int each, share; };

/* Tokens still to be fetched, some at a time: were all asked for at once, the loads of a round that
 * the second cache has would wait behind those. */
struct fetch {
    const struct paged_decode *d;
    const int32_t *table;
    int at, stop, first_head, end_head, dim;
};

/* Fetches keys and values of some heads of up to `count` tokens: pages lie scattered, and memory
 * would else be waited for at the beginning of each. */
INLINE void fetch_some(struct fetch *f, int count) {
    int64_t kv = (int64_t)f->d->kv_heads * f->dim;
    for (; count > 0 && f->at < f->stop; count--, f->at++) {
        int64_t token = token_of(f->d, f->table, f->at);
        const element *at = (const element *)f->d->pages + token * 2 * kv;
        for (int64_t i = (int64_t)f->first_head * f->dim; i < (int64_t)f->end_head * f->dim;
             i += 64 / (int)sizeof(element)) {
            _mm_prefetch((const char *)(at + i), _MM_HINT_T0);
            _mm_prefetch((const char *)(at + kv + i), _MM_HINT_T0);
        }
        fetch_scales(f->d, token, f->first_head);
    }
}

/* A round of `heads` queries that share a key head. cap: of scores in bits, or 0. slopes: of these
 * heads, or 0; ahead: where the round's first token lies, as seen from the query's. */
INLINE void attend_round(struct query q, const struct round *r, int64_t head, int64_t values,
                         float *outputs, float *top, float *sum, int dim, int heads,
                         struct fetch *soon, int each, float cap, const float *slopes,
                         int ahead) {
    struct weights weights;
    floats16 scores[HEADS][PARTS];
    for (int h = 0; h < heads; h++) {
        fetch_some(soon, each);
        score_round(q, r, head, dim, h, heads, scores);
        floats16 *x = scores[h], most;
        for (int i = 0; i < PARTS; i++) {
            if (cap) x[i] = capped_lanes(x[i], cap);
            if (slopes)
                x[i] = add_lanes(x[i], mul_lanes(all_lanes(slopes[h] * 1.44269504f),
                                                 lanes_from(ahead + 16 * i)));
            x[i] = first_of(x[i], r->count - 16 * i);
            most = i ? max_lanes(most, x[i]) : x[i];
        }
        float best = top_lanes(most);
        if (!(best <= top[h])) {
            float fade = exp_neg((top[h] - best) * 0.693147181f);
            for (int d = 0; d < dim; d += 16) {
                float *o = outputs + h * dim + d;
                store_lanes(o, mul_lanes(load_lanes(o), all_lanes(fade)));
            }
            sum[h] *= fade, top[h] = best;
        }
        floats16 total;
        for (int i = 0; i < PARTS; i++) {
            x[i] = exp2_lanes(sub_lanes(x[i], all_lanes(top[h])));
            total = i ? add_lanes(total, x[i]) : x[i];
        }
        sum[h] += sum_lanes(total);
        put_weights(&weights, h, x, r);
    }
    gather(r, head + values, &weights, outputs, dim, heads);
}

/* A round as a row sees it whose last token is `behind` tokens before the end of it. */
INLINE const struct round *cut_round(const struct round *r, int behind, struct round *cut) {
    if (behind <= 0) return r;
    cut->count = r->count - behind;
    for (int s = 0; s < ROUND; s++) cut->at[s] = r->at[s < cut->count ? s : cut->count - 1];
    cut_scales(r, cut);
    return cut;
}

/* Attention of n rows of a sequence, one token after the other, that see tokens first..len, the last
 * of them; heads that share key heads first_head..end_head. All of a token's heads are read in turn:
 * they lie side by side. */
INLINE void attend_rows(const struct paged_decode *d, const bf16 *q, int n, const int32_t *table,
                        int first, int len, int first_head, int end_head, int dim, bf16 *out) {
    float outputs[STATE] __attribute__((aligned(64))), top[STATE / 32], sum[STATE / 32];
    struct queries queries;
    int group = d->heads / d->kv_heads, width = (end_head - first_head) * group;
    int64_t kv = (int64_t)d->kv_heads * dim, out_stride = (int64_t)d->heads * dim;
    ready_queries(&queries, q + (int64_t)first_head * group * dim, d->q_stride, n, width, dim,
                  d->cap ? d->scale / d->cap : d->scale * 1.44269504f);
    memset(outputs, 0, (size_t)n * width * dim * sizeof(float));
    for (int h = 0; h < n * width; h++) {
        top[h] = first_top(d->sinks, (int64_t)first_head * group + h % width);
        sum[h] = top[h] > -3e38f;
    }
    for (int begin = first; begin < len; begin += ROUND) {
        struct round r, cut;
        r.count = len - begin < ROUND ? len - begin : ROUND;
        for (int s = 0; s < ROUND; s++)
            place(&r, s, d, token_of(d, table, s < r.count ? begin + s : len - 1), 2 * kv);
        int next = begin + ROUND < len ? begin + ROUND : len;
        int stop = next + ROUND < len ? next + ROUND : len;
        struct fetch soon = {d, table, next, stop, first_head, end_head, dim};
        int each = (ROUND + n * width - 1) / (n * width), most = heads_of(dim);
        for (int k = first_head; k < end_head; k++) {
            take_scales(&r, k, d->kv_heads);
            for (int row = 0; row < n; row++) {
                int last = len - n + 1 + row, behind = begin + r.count - (last > 1 ? last : 1);
                if (behind >= r.count) continue;
                const struct round *own = cut_round(&r, behind, &cut);
                int column = (k - first_head) * group, h = row * width + column;
#define GO(N) attend_round(query_of(&queries, row, column + g, width, dim), own, (int64_t)k * dim, \
                           kv, outputs + (h + g) * dim, top + h + g, sum + h + g, dim, N, &soon, each, \
                           d->cap * 1.44269504f, \
                           d->slopes ? d->slopes + (int64_t)k * group + g : 0, \
                           begin - (last > 1 ? last : 1) + 1)
                for (int g = 0, left = group; left > 0; g += most, left -= most)
                    if (HEADS > 3 && left > 3 && most > 3) GO(HEADS);
                    else if (HEADS > 2 && left > 2 && most > 2) GO(HEADS - 1);
                    else if (left > 1) GO(2);
                    else GO(1);
#undef GO
            }
        }
        fetch_some(&soon, ROUND);
    }
    for (int h = 0; h < n * width; h++)
        for (int i = 0; i < dim; i += 32)
            put_outputs(outputs + h * dim + i, 1 / sum[h],
                        out + h / width * out_stride
                            + ((int64_t)first_head * group + h % width) * dim + i);
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
#define ROWS(D) attend_rows(d, d->q + b * d->q_stride, n, d->tables + own * d->table_stride, from, \
                            len, first, end, D, d->out + b * d->heads * D)
    if (d->dim == 128) ROWS(128);
    else if (d->dim == 64) ROWS(64);
    else ROWS(d->dim);
#undef ROWS
}
