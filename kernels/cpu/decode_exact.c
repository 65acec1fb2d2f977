/* A decode whose results have the bits that `paged_extend` gives the same tokens.
 *
 * A token may be decoded, verified as a draft, or computed again as part of a prompt, once pages were
 * taken from its sequence or a worker died. For its bits to be the same each time, all of extend.c's
 * sums come about in their order here: scores dimension by dimension, outputs key by key, in rounds
 * of KEYS keys that begin at multiples of it, with a maximum that follows the scores only once they
 * pass it by far.
 *
 * There queries lie across lanes. Of a decode there are too few, so here it is keys, and dimensions
 * of values; products in vectors do not mind. Those of AMX's tiles are summed otherwise, so with
 * them extend.c itself does the work. */
#include "program.h"
#if defined(TILES_OF_VECTORS) || defined(FLOATS)
#include "extend_round.h"

/* One pair of weights after the other into the sums of `n` queries, in this order. */
INLINE void add_pair(float pairs[][KEYS / 2], int i, float sums[2], const int n) {
    for (int h = 0; h < n; h++) {
        sums[h] += pairs[h][i];
        __asm__("" : "+x"(sums[h]));
    }
}

#ifdef FLOATS
#include "exact_floats.h"
#else
#include "exact_pairs.h"
#endif

#define MOST 32 /* queries of a task that are under way at once */

/* What is kept of a query from round to round. */
struct column { float top, sum, outputs[MAX_HEAD] __attribute__((aligned(64))); };

/* Scores of a query that sees keys [from, to) of a round become weights; those of whole registers
 * behind `to` are left: they would be 0, and are not looked at. cap: of scores in bits, or 0. slope:
 * in bits, or 0; ahead: where the round's first token lies, as seen from the query's. */
INLINE void weigh_keys(float *scores, int from, int to, float scale, float cap, float slope,
                       int ahead, struct column *c, int dim) {
    for (int s = 0; cap && s < to; s += 16)
        store_lanes(scores + s, capped_lanes(mul_lanes(load_lanes(scores + s), all_lanes(scale)),
                                             cap));
    for (int s = 0; slope && s < to; s += 16)
        store_lanes(scores + s, sloped_lanes(load_lanes(scores + s), all_lanes(scale),
                                             all_lanes(slope), lanes_from(ahead + s)));
    if (cap || slope) scale = 1;
    for (int s = 0; s < from; s++) scores[s] = -INFINITY;
    const int all = (to + 31) & ~31;
    for (int s = to; s < all; s++) scores[s] = -INFINITY;
    floats16 most = load_lanes(scores);
    for (int s = 16; s < all; s += 16) most = max_lanes(most, load_lanes(scores + s));
    float best = top_lanes(most) * scale;
    if (best > c->top + SLACK) {
        floats16 fade = exp2_lanes(sub_lanes(all_lanes(c->top), all_lanes(best)));
        float by[16];
        store_lanes(by, fade);
        for (int d = 0; d < dim; d += 16)
            store_lanes(c->outputs + d, mul_lanes(load_lanes(c->outputs + d), fade));
        c->sum *= by[0], c->top = best;
    }
    floats16 by = all_lanes(scale), top = all_lanes(c->top);
    for (int s = 0; s < all; s += 16)
        store_lanes(scores + s, exp2_lanes(fms_lanes(load_lanes(scores + s), by, top)));
}

/* Sums of two neighbouring weights each, which the compiler must leave as they are. */
INLINE void pair_up(float weights[][KEYS], int count, float pairs[][KEYS / 2], const int n) {
    for (int h = 0; h < n; h++)
        for (int s = 0; s < count / 2; s++) pairs[h][s] = weights[h][2 * s] + weights[h][2 * s + 1];
    __asm__("" : "+m"(*(float(*)[2][KEYS / 2])pairs));
}

/* Queries of a row, n of them (1 or 2), over a round of which it sees [from, to). */
INLINE void round_of(const bf16 *const q[2], const number *keys, const bf16 *const *values,
                     int from, int to, float scale, float cap, const float *slopes, int ahead,
                     int dim, struct column *c, const int n) {
    float scores[2][KEYS] __attribute__((aligned(64)));
    float pairs[2][KEYS / 2], sums[2], *outputs[2] = {c[0].outputs, c[n - 1].outputs};
    score_keys(q, keys, to, dim, scores, n);
    for (int h = 0; h < n; h++) {
        weigh_keys(scores[h], from, to, scale, cap, slopes ? slopes[h] * 1.44269504f : 0, ahead,
                   c + h, dim);
        sums[h] = c[h].sum;
    }
    pair_up(scores, (to + 1) & ~1, pairs, n);
    gather_keys(values, (to + 1) & ~1, dim, scores, pairs, outputs, sums, n);
    for (int h = 0; h < n; h++) c[h].sum = sums[h];
}

/* Tokens of the round from `begin` on up to `end`, whole registers of them. */
INLINE int length_of(int begin, int end) {
    int left = end - begin < KEYS ? end - begin : KEYS;
    return left > 0 ? (left + 15) & ~15 : 0;
}

/* A round's first `count` tokens, -1 where no row sees one; `low`, `end`: what any row sees. */
INLINE void find(const struct paged_decode *d, const int32_t *table, int begin, int low, int end,
                 int count, int64_t tokens[KEYS]) {
    for (int s = 0; s < count; s++) {
        int p = begin + s;
        tokens[s] = p < low || p >= end ? -1 : token_of(d, table, p);
    }
}

/* Where their keys and values of key head k lie. */
INLINE void find_head(const struct paged_decode *d, const int64_t tokens[KEYS], int count, int k,
                      int dim, bf16 wider[KEYS][2 * MAX_HEAD], const bf16 *at[KEYS],
                      const bf16 *values[KEYS]) {
    const int64_t size = d->scales ? 1 : sizeof(bf16), kv = (int64_t)d->kv_heads * dim * size;
    const char *pages = (const char *)d->pages + (int64_t)k * dim * size;
    for (int s = 0; s < count; s++) {
        at[s] = values[s] = zeros;
        if (tokens[s] < 0) continue;
        const char *from = pages + tokens[s] * 2 * kv;
        at[s] = (const bf16 *)from, values[s] = (const bf16 *)(from + kv);
        if (!d->scales) continue;
        const bf16 *scales = d->scales + tokens[s] * 2 * d->kv_heads + k;
        for (int both = 0; both < 2; both++)
            widen_codes((const int8_t *)from + both * kv, scales[both * d->kv_heads], dim,
                        wider[s] + both * dim);
        at[s] = wider[s], values[s] = wider[s] + dim;
    }
}

/* Asks for the keys and values of head k of 16 tokens that come next: they lie too scattered for the
 * processor to guess. */
INLINE void fetch_tokens(const struct paged_decode *d, const int64_t tokens[16], int k, int dim) {
    const int64_t size = d->scales ? 1 : sizeof(bf16), kv = (int64_t)d->kv_heads * dim * size;
    const char *pages = (const char *)d->pages + (int64_t)k * dim * size;
    for (int s = 0; s < 16; s++) {
        if (tokens[s] < 0) continue;
        const char *soon = pages + tokens[s] * 2 * kv;
        for (int i = 0; i < dim * size; i += 64) {
            _mm_prefetch(soon + i, _MM_HINT_T0);
            _mm_prefetch(soon + kv + i, _MM_HINT_T0);
        }
    }
}

/* Some of a sequence's queries: `rows` rows from `row` on, and of each `count` queries from `first`
 * on of `share` key heads from k on. */
struct part { int64_t own; int row, rows, k, share, first, count; };

/* Key heads one after another within a round: what a token has lies together. */
INLINE void attend_exact(const struct paged_decode *d, struct part a, int dim) {
    number keys[KEYS * MAX_HEAD] __attribute__((aligned(64)));
    bf16 wider[KEYS][2 * MAX_HEAD] __attribute__((aligned(64)));
    struct column column[MOST];
    const int group = d->heads / d->kv_heads;
    const int32_t *table = d->tables + a.own * d->table_stride;
    const float cap = d->cap * 1.44269504f;
    const float scale = d->cap ? d->scale / d->cap : d->scale * 1.44269504f;
    int last = d->lens[a.own] - d->q_len + a.row + a.rows, end = last > 1 ? last : 1;
    int low = last - a.rows + 1 > 1 ? last - a.rows + 1 : 1; /* what the first row sees */
    low = d->window && low > d->window ? low - d->window : 0;
    for (int i = 0; i < a.share * a.rows * a.count; i++) {
        int64_t head = (int64_t)(a.k + i / (a.rows * a.count)) * group + a.first + i % a.count;
        column[i].top = first_top(d->sinks, head), column[i].sum = column[i].top > -3e38f;
        memset(column[i].outputs, 0, dim * sizeof(float));
    }
    int64_t tokens[2][KEYS];
    int begin = low / KEYS * KEYS, count = length_of(begin, end);
    find(d, table, begin, low, end, count, tokens[0]);
    for (int at_hand = 0, next; begin < end; begin += KEYS, count = next, at_hand ^= 1) {
        const bf16 *at[KEYS], *values[KEYS];
        next = length_of(begin + KEYS, end);
        find(d, table, begin + KEYS, low, end, next, tokens[!at_hand]);
        for (int i = 0; i < a.share; i++) {
            find_head(d, tokens[at_hand], count, a.k + i, dim, wider, at, values);
            for (int s = 0; s < count; s += 16) {
                if (i + 1 < a.share) fetch_tokens(d, tokens[at_hand] + s, a.k + i + 1, dim);
                else if (s < next) fetch_tokens(d, tokens[!at_hand] + s, a.k, dim);
                turn_keys(at + s, dim, keys + s * KEY_STEP);
            }
            for (int r = 0; r < a.rows; r++) {
                int seen = last - a.rows + 1 + r, len = seen > 1 ? seen : 1;
                int from = d->window && len > d->window ? len - d->window - begin : 0;
                int to = len - begin < KEYS ? len - begin : KEYS;
                if (from < 0) from = 0;
                if (from >= to) continue;
                /* What a draft behind this row left may be anything; 0 times that is not 0. */
                const bf16 *own_values[KEYS], *const *of = values;
                if (a.rows > 1) {
                    for (int s = 0; s < count; s++)
                        own_values[s] = s >= from && s < to ? values[s] : zeros;
                    of = own_values;
                }
                const bf16 *q = d->q + (a.own * d->q_len + a.row + r) * d->q_stride
                                + ((int64_t)(a.k + i) * group + a.first) * dim;
                for (int h = 0; h < a.count; h += 2) {
                    const bf16 *two[2] = {q + h * dim, q + (h + 1) * dim};
                    struct column *c = column + (i * a.rows + r) * a.count + h;
                    const float *slopes = d->slopes ? d->slopes + (int64_t)(a.k + i) * group
                                                      + a.first + h : 0;
#define GO(N) round_of(two, keys, of, from, to, scale, cap, slopes, begin - len + 1, dim, c, N)
                    if (h + 1 < a.count) GO(2);
                    else GO(1);
#undef GO
                }
            }
        }
    }
    struct column *c = column;
    for (int i = 0; i < a.share; i++)
        for (int r = 0; r < a.rows; r++)
            for (int h = 0; h < a.count; h++, c++) {
                int64_t to = (a.own * d->q_len + a.row + r) * d->heads
                             + (int64_t)(a.k + i) * group + a.first + h;
                give_outputs(c->outputs, c->sum > 0 ? 1 / c->sum : c->sum, dim, d->out + to * dim);
            }
}

/* Key heads of a task: as many as leave every thread two, and as can be under way at once. */
INLINE int share_of(const struct paged_decode *d) {
    int64_t sequences = d->rows / d->q_len, parts = (2 * d->threads + sequences - 1) / sequences;
    int group = d->heads / d->kv_heads, most = MOST / (group * d->q_len);
    int share = (int)(parts < d->kv_heads ? (d->kv_heads + parts - 1) / parts : 1);
    return share < most ? share : most > 1 ? most : 1;
}

int64_t decode_exact_tasks(const struct paged_decode *d) {
    int share = share_of(d);
    return d->rows / d->q_len * ((d->kv_heads + share - 1) / share);
}

/* Some key heads of a sequence. */
void decode_exact_task(const struct paged_decode *d, int64_t task) {
    int share = share_of(d), cuts = (d->kv_heads + share - 1) / share;
    int k = (int)(task % cuts) * share, group = d->heads / d->kv_heads;
    struct part a = {task / cuts, 0, 0, k, d->kv_heads - k < share ? d->kv_heads - k : share, 0, 0};
    for (; a.first < group; a.first += MOST) {
        a.count = group - a.first < MOST ? group - a.first : MOST;
        int each = MOST / (a.count * a.share);
        for (a.row = 0; a.row < d->q_len; a.row += each) {
            a.rows = d->q_len - a.row < each ? d->q_len - a.row : each;
            if (d->dim == 128) attend_exact(d, a, 128);
            else if (d->dim == 64) attend_exact(d, a, 64);
            else attend_exact(d, a, d->dim);
        }
    }
}
#endif
