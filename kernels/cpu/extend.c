/* Attention of chunks of tokens over paged keys and values: online softmax over blocks of keys
 * (FlashAttention, arXiv 2205.14135, 2307.08691) on tiles, or in f32.
 *
 * Scores are computed transposed, S^T = K Q^T, so that a row of a tile is one key and its 16 lanes
 * are 16 queries: maximum, exponential and sum need nothing across lanes. A query is a column: one
 * token with one of the query heads that share a key head. */
#include "common.h"
#ifdef PRODUCTS
#ifdef TILES
#include "extend_tiles.h"
#else
#include "extend_floats.h"
#endif
#include <stdlib.h>
#include <sys/mman.h>
#include "program.h"

/* Scores, as they become weights: the columns' scale, the maximum subtracted, the sum so far. */
struct weighing { floats16 scale[2], top[2], sum[2]; };

/* What scores of columns are multiplied by before they are capped, and what then; 0: they are not. Or
 * the slopes by which they fall with the distance from the columns' tokens, `at`. */
struct cap { floats16 scale[2]; float by; int sloped; floats16 slope[2], at[2]; };

/* Pairs of a round's keys that are still scores, to be weights between other work. */
struct rest { const float *scores; element *weights; int next, end, share; };

/* Pairs of keys first..end of 32 to weights 2**(score * scale - top). */
INLINE void weigh(const float *scores, element *weights, int first, int end, struct weighing *to,
                  int w) {
    for (int i = first; i < end; i++) {
        const float *from = scores + (w * KEYS + 2 * i) * 16;
        floats16 x = exp2_lanes(fms_lanes(load_lanes(from), to->scale[w], to->top[w]));
        floats16 y = exp2_lanes(fms_lanes(load_lanes(from + 16), to->scale[w], to->top[w]));
        to->sum[w] = add_lanes(to->sum[w], add_lanes(x, y));
        put_weights(weights + w * KEYS * 16 + i * 32, x, y);
    }
}

/* Up to `many` more pairs of a round to weights. */
INLINE void weigh_some(struct rest *r, struct weighing *to, int many, int two) {
    int end = r->next + many < r->end ? r->next + many : r->end;
    for (; r->next < end; r->next++)
        for (int w = 0; w <= two; w++)
            weigh(r->scores, r->weights, r->next, r->next + 1, to, w);
}

#ifdef SAGE
/* Scores of 32 keys and 16 or 32 columns, less the columns' scale: [2][KEYS][16]. */
INLINE void score(const factor *keys, const factor *query, float *scores, int dim, int two,
                  struct rest *rest, struct weighing *to) {
    if (rest) weigh_some(rest, to, dim / 32 * rest->share, two);
    if (two) score_two(keys, query, scores, dim);
    else score_one(keys, query, scores, dim);
}
#endif

#ifdef FLOATS
#ifndef SAGE
/* Scores of 32 keys and 16 or 32 columns: [2][KEYS][16]. */
INLINE void score(const float *keys, const float *query, float *scores, int dim, int two,
                  struct rest *rest, struct weighing *to) {
    if (rest) weigh_some(rest, to, dim / 32 * rest->share, two);
    for (int w = 0; w <= two; w++)
        score_32(keys, dim, query + w * dim * 16, scores + w * KEYS * 16);
}
#endif

/* Outputs += values x weights of n keys. outputs: [dim / 32][2][32 dims][16]. */
INLINE void gather(const float *values, const float *weights, float *outputs, int n, int dim,
                   int two, int fresh, struct rest *rest, struct weighing *to) {
    if (rest) weigh_some(rest, to, dim / 32 * (n / 32) * rest->share, two);
    for (int d = 0; d < dim; d += 32)
        for (int w = 0; w <= two; w++)
            gather_32(values + d, dim, weights + w * KEYS * 16, n, outputs + d * 32 + w * 512, fresh);
}
#elif defined(TILES_OF_VECTORS)
/* As below, but sums stay in registers: one unit of the processor does it all. */
#ifndef SAGE
INLINE void score(const bf16 *keys, const bf16 *query, float *scores, int dim, int two,
                  struct rest *rest, struct weighing *to) {
    if (rest) weigh_some(rest, to, dim / 32 * rest->share, two);
    for (int w = 0; w <= two; w++)
        for (int k = 0; k < 2; k++)
            dot_chain(scores + w * KEYS * 16 + k * 256, (const uint8_t *)(keys + k * TILE),
                      4 * TILE, (const uint8_t *)(query + w * dim * 16), 2 * TILE, dim / 32, 1);
}
#endif

INLINE void gather(const bf16 *values, const bf16 *weights, float *outputs, int n, int dim, int two,
                   int fresh, struct rest *rest, struct weighing *to) {
    if (rest) weigh_some(rest, to, dim / 32 * (n / 32) * rest->share, two);
    for (int d = 0; d < dim; d += 32)
        for (int w = 0; w <= two; w++)
            for (int k = 0; k < 2; k++)
                dot_chain(outputs + d * 32 + w * 512 + k * 256,
                          (const uint8_t *)(values + d * KEYS + k * TILE), 4 * TILE,
                          (const uint8_t *)(weights + w * KEYS * 16), 2 * TILE, n / 32, fresh);
}
#else
/* Tiles 0..3 += products of 32 rows and 16 or 32 columns over a depth of n. a: [n / 32][2][16][32];
 * b: [n / 2][16] pairs, the second 16 columns `apart` elements behind the first. With `rest`, its
 * scores become weights meanwhile: tiles and vectors are different units of the processor. */
INLINE void dot_tiles(const bf16 *a, const bf16 *b, int apart, int n, int two, struct rest *rest,
                      struct weighing *to) {
    for (int k = 0; k < n; k += 32, a += 2 * TILE, b += TILE) {
        TILE_STREAM(4, a, 64);
        TILE_LOAD(6, b, 64);
        TILE_DOT(0, 4, 6);
        TILE_STREAM(5, a + TILE, 64);
        TILE_DOT(1, 5, 6);
        if (two) {
            TILE_LOAD(7, b + apart, 64);
            TILE_DOT(2, 4, 7);
            TILE_DOT(3, 5, 7);
        }
        if (rest) weigh_some(rest, to, rest->share, two);
    }
}

INLINE void clear_sums(int two) {
    TILE_ZERO(0); TILE_ZERO(1);
    if (two) { TILE_ZERO(2); TILE_ZERO(3); }
}

/* Tiles 0 and 1, of the first 16 columns, to `out` and behind it; 2 and 3 `apart` elements on. */
INLINE void store_sums(float *out, int apart, int two) {
    TILE_STORE(0, out, 64); TILE_STORE(1, out + 256, 64);
    if (two) { TILE_STORE(2, out + apart, 64); TILE_STORE(3, out + apart + 256, 64); }
}

/* Scores of 32 keys and 16 or 32 columns: [2][KEYS][16]. */
INLINE void score(const bf16 *keys, const bf16 *query, float *scores, int dim, int two,
                  struct rest *rest, struct weighing *to) {
    clear_sums(two);
    dot_tiles(keys, query, dim * 16, dim, two, rest, to);
    store_sums(scores, KEYS * 16, two);
}

/* Outputs += values x weights of n keys. outputs: [dim / 32][2][2][16 dims][16]. */
INLINE void gather(const bf16 *values, const bf16 *weights, float *outputs, int n, int dim, int two,
                   int fresh, struct rest *rest, struct weighing *to) {
    for (int d = 0; d < dim; d += 32) {
        float *o = outputs + d * 32;
        if (fresh) {
            clear_sums(two);
        } else {
            TILE_SUMS(0, o, 64); TILE_SUMS(1, o + 256, 64);
            if (two) { TILE_SUMS(2, o + 512, 64); TILE_SUMS(3, o + 768, 64); }
        }
        dot_tiles(values + d * KEYS, weights, KEYS * 16, n, two, rest, to);
        store_sums(o, 512, two);
    }
}
#endif

/* n scores of every column, capped. */
INLINE void cap_scores(float *scores, int n, const struct cap *cap, int w) {
    for (int i = 0; i < n; i++) {
        floats16 x = mul_lanes(load_lanes(scores + i * 16), cap->scale[w]);
        store_lanes(scores + i * 16, capped_lanes(x, cap->by));
    }
}

/* n scores of every column, of keys from `key` on, less what their distance takes. */
INLINE void slope_scores(float *scores, int n, int64_t key, const struct cap *cap, int w) {
    for (int i = 0; i < n; i++) {
        floats16 ahead = sub_lanes(all_lanes((float)(key + i)), cap->at[w]);
        store_lanes(scores + i * 16, sloped_lanes(load_lanes(scores + i * 16), cap->scale[w],
                                                  cap->slope[w], ahead));
    }
}

/* The largest of n scores of every column; with `edge`, what a column may not see becomes -inf. */
INLINE floats16 largest(float *scores, int n, int edge, wholes from, wholes to, int key) {
    floats16 m[4];
    for (int i = 0; i < 4; i++) m[i] = all_lanes(-INFINITY);
    for (int j = 0; j < n; j += 4)
        for (int i = 0; i < 4; i++) {
            floats16 x = load_lanes(scores + (j + i) * 16);
            if (edge) {
                x = where_seen(x, key + j + i, from, to);
                store_lanes(scores + (j + i) * 16, x);
            }
            m[i] = max_lanes(m[i], x);
        }
    return max_lanes(max_lanes(m[0], m[1]), max_lanes(m[2], m[3]));
}

/* Whether any score passes the maximum subtracted by far. */
INLINE int strays(const floats16 best[2], const struct weighing *to, int two) {
    int far = 0;
    for (int w = 0; w <= two; w++)
        far |= any_above(sub_lanes(best[w], to->top[w]), all_lanes(SLACK));
    return far;
}

/* Lets the maximum subtracted from a column's scores follow them, once they pass it by far: sums
 * and outputs so far are scaled to the new one. */
INLINE void follow(floats16 best, struct weighing *to, int w, float *outputs, int dim, int fresh) {
    floats16 far = add_lanes(to->top[w], all_lanes(SLACK));
    if (!any_above(best, far)) return;
    /* A column's result must not depend on its neighbours: those that did not pass stay as is. */
    floats16 top = where_above(best, far, best, to->top[w]);
    floats16 fade = where_above(best, far, exp2_lanes(sub_lanes(to->top[w], top)), all_lanes(1));
    to->top[w] = top, to->sum[w] = mul_lanes(to->sum[w], fade);
    if (fresh) return;
    for (int d = 0; d < dim; d += 32)
        for (int i = 0; i < 32; i++) {
            float *o = outputs + d * 32 + w * 512 + i * 16;
            store_lanes(o, mul_lanes(load_lanes(o), fade));
        }
}

/* Tokens of a unit of columns: the first and last any of them sees, and what all of them see. */
struct sight { int64_t low, high, all_low, all_high; wholes from[2], to[2]; };

/* Keys of the round at `at`, in whole tiles. */
INLINE int keys_of(int64_t at, int64_t high) {
    return high - at >= KEYS ? KEYS : high > at ? (int)(high - at + 31) & ~31 : 0;
}

/* Keys of a packed chunk begin..end into a unit's outputs. Scores of a round become weights while
 * the weights of the round before are used, and then while the scores of the next are computed: by
 * the time a score is replaced, it is a weight, as half of the round's are before the first. */
INLINE void attend(const struct scratch *s, const struct sight *see, int64_t begin, int64_t end,
                   struct weighing *to, const struct cap *cap, float *outputs, int dim, int two,
                   int fresh) {
    int64_t at = begin + ((see->low > begin ? see->low : begin) - begin) / KEYS * KEYS;
    int64_t high = see->high + 1 < end ? see->high + 1 : end;
    int n = keys_of(at, high), turn = 0, before = 0;
    for (int j = 0; j < n; j += 32)
        score(s->keys + (at - begin + j) * KEY_ROOM(dim), s->query, s->scores + j * 16, dim, two,
              0, 0);
    const element *values = 0;
    element *ready = 0;
    for (; n > 0; turn ^= 1) {
        int edge = at < see->all_low || at + n - 1 > see->all_high;
        floats16 best[2];
        for (int w = 0; w <= two; w++) {
            float *scores = s->scores + w * KEYS * 16;
            if (cap->by) cap_scores(scores, n, cap, w);
            if (cap->sloped) slope_scores(scores, n, at, cap, w);
            best[w] = edge ? largest(scores, n, 1, see->from[w], see->to[w], (int)at)
                           : largest(scores, n, 0, see->from[w], see->to[w], (int)at);
            best[w] = mul_lanes(best[w], to->scale[w]);
        }
        struct rest rest = {s->scores, s->weights + turn * KEYS * COLS, 0, n / 2,
                            (255 + dim) / dim};
        if (strays(best, to, two)) {
            if (before) {
                gather(values, ready, outputs, before, dim, two, fresh, 0, 0);
                fresh = before = 0;
            }
            for (int w = 0; w <= two; w++) follow(best[w], to, w, outputs, dim, fresh);
        }
        if (!before) weigh_some(&rest, to, KEYS / 4, two);
        else if (fresh) gather(values, ready, outputs, KEYS, dim, two, 1, &rest, to), fresh = 0;
        else gather(values, ready, outputs, KEYS, dim, two, 0, &rest, to);
        int64_t next = at + KEYS;
        int more = keys_of(next, high);
        for (int j = 0; j < more; j += 32)
            score(s->keys + (next - begin + j) * KEY_ROOM(dim), s->query, s->scores + j * 16, dim,
                  two, &rest, to);
        weigh_some(&rest, to, KEYS, two);
        values = s->values + (at - begin) * dim, ready = rest.weights, before = n;
        at = next, n = more;
    }
    if (before) gather(values, ready, outputs, before, dim, two, fresh, 0, 0);
}

/* Outputs over sums, as bf16, to where each of n columns belongs; stream: past the caches, as whole
 * lines, which would otherwise be read first. */
INLINE void finish(const float *outputs, floats16 sum, int w, bf16 *const at[16], int n, int dim,
                   int stream) {
    floats16 share = where_above(sum, no_lanes(), div_lanes(all_lanes(1), sum), sum);
    for (int d = 0; d < dim; d += 32)
        put_outputs(outputs + d * 32 + w * 512, share, at, n, d, stream);
}

/* Where columns first..end of a row have their queries and outputs; what their softmax begins with;
 * what tokens they see. */
struct unit {
    const bf16 *q[COLS];
    bf16 *out[COLS];
    float top[COLS], slope[COLS], at[COLS];
    int n;
    struct sight see;
};

static void aim(const struct call *c, const struct row *row, int k, int64_t first, int64_t end,
                struct unit *u) {
    int group = c->heads / c->kv_heads;
    int32_t from[COLS], to[COLS];
    u->n = end - first < COLS ? (int)(end - first) : COLS;
    for (int i = 0; i < COLS; i++) {
        int64_t column = i < u->n ? first + i : first + u->n - 1;
        int64_t token = column / group, head = (int64_t)k * group + column % group;
        u->q[i] = i < u->n ? c->q + (row->first + token) * c->q_stride + head * c->dim : zeros;
        u->out[i] = c->out + ((row->first + token) * c->heads + head) * c->dim;
        u->top[i] = first_top(c->sinks, head);
        int64_t last = row->start + (c->window < 0 ? row->count - 1 : token);
        to[i] = (int32_t)(last > 0 ? last : 0);
        u->at[i] = (float)to[i], u->slope[i] = c->slopes ? c->slopes[head] * 1.44269504f : 0;
        from[i] = c->window > 0 && to[i] >= c->window ? to[i] - c->window + 1 : 0;
    }
    u->see.low = from[0], u->see.high = to[COLS - 1];
    u->see.all_low = from[COLS - 1], u->see.all_high = to[0];
    for (int w = 0; w < 2; w++) {
        u->see.from[w] = load_wholes(from + w * 16);
        u->see.to[w] = load_wholes(to + w * 16);
    }
}

/* Columns first..end of a row and key head, a chunk of packed keys after another: what is between
 * chunks is kept for every unit of columns. */
INLINE void task_of(const struct call *c, const struct row *row, int k, int64_t first, int64_t end,
                 struct scratch *s, int dim) {
    int64_t span = PACKED / dim / KEYS * KEYS, size = dim * COLS + 64;
    struct unit u;
    aim(c, row, k, end - 1, end, &u);
    int64_t last = u.see.high;
    aim(c, row, k, first, end, &u);
    int64_t low = u.see.low, base = low / KEYS * KEYS;
    int several = base + span <= last;
    for (int64_t begin = base; begin <= last; begin += span) {
        int64_t stop = begin + span <= last ? begin + span : last + 1;
        pack(c, row, k, begin, stop, low, s);
        for (int64_t at = first; at < end; at += COLS) {
            aim(c, row, k, at, end, &u);
            if (u.see.high < begin || u.see.low >= stop) continue;
            float *outputs = s->state + (several ? (at - first) / COLS * size : 0);
            float *kept = outputs + dim * COLS;
            int two = u.n > 16, fresh = u.see.low >= begin;
            struct weighing state = {0};
            struct cap cap = {.by = c->cap, .sloped = c->slopes != 0};
            for (int w = 0; w <= two; w++) {
                state.scale[w] = mul_lanes(all_lanes(c->scale), pack_queries(
                    u.q + 16 * w, dim, s->query + w * dim * 16));
                if (!c->cap && !c->slopes) continue;
                cap.slope[w] = load_lanes(u.slope + w * 16), cap.at[w] = load_lanes(u.at + w * 16);
                cap.scale[w] = state.scale[w], state.scale[w] = all_lanes(1);
            }
            for (int w = 0; w < 2; w++) {
                state.top[w] = load_lanes(fresh ? u.top + w * 16 : kept + w * 16);
                state.sum[w] = fresh ? where_above(state.top[w], all_lanes(-3e38f), all_lanes(1),
                                                   no_lanes())
                                     : load_lanes(kept + 32 + w * 16);
            }
            if (two) attend(s, &u.see, begin, stop, &state, &cap, outputs, dim, 1, fresh);
            else attend(s, &u.see, begin, stop, &state, &cap, outputs, dim, 0, fresh);
            if (u.see.high < stop) {
                finish(outputs, state.sum[0], 0, u.out, two ? 16 : u.n, dim, c->stream);
                if (two) finish(outputs, state.sum[1], 1, u.out + 16, u.n - 16, dim, c->stream);
            } else
                for (int w = 0; w < 2; w++) {
                    store_lanes(kept + w * 16, state.top[w]);
                    store_lanes(kept + 32 + w * 16, state.sum[w]);
                }
        }
    }
}

/* This thread's scratch for tasks of `columns` columns; 0 where there is no memory. */
static int take(struct scratch *s, int dim, int64_t columns) {
    static __thread char *piece;
    static __thread size_t held;
    int64_t span = PACKED / dim / KEYS * KEYS;
    size_t packed = (size_t)span * dim * sizeof(element);
    size_t keys = (size_t)span * KEY_ROOM(dim) * sizeof(factor);
    size_t query = (size_t)COLS * dim * sizeof(factor), scores = COLS * KEYS * sizeof(float);
    size_t weights = 2 * COLS * KEYS * sizeof(element);
    size_t state = (size_t)((columns + COLS - 1) / COLS) * (dim * COLS + 64) * sizeof(float);
    size_t want = keys + packed + query + scores + weights + state;
    if (want > held) {
        free(piece);
        held = (want + 0x1fffff) & ~(size_t)0x1fffff;
        piece = aligned_alloc(0x200000, held);
        if (!piece) return held = 0;
        madvise(piece, held, MADV_HUGEPAGE);
    }
    s->keys = (factor *)piece, s->values = (element *)(piece + keys);
    s->query = (factor *)(piece + keys + packed);
    s->scores = (float *)(piece + keys + packed + query);
    s->weights = (element *)(s->scores + COLS * KEYS);
    s->state = (float *)(s->weights + 2 * COLS * KEYS);
    return 1;
}

/* All rows of a call. A row's work goes out in parts, the last and largest first. */
static void extend_rows(struct call c, const struct row *row, int64_t n, int threads) {
    int heads = c.heads, kv_heads = c.kv_heads, dim = c.dim;
    int64_t most = 0, pairs = n * kv_heads, total = 0, tokens = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t columns = row[i].count * (heads / kv_heads);
        most = columns > most ? columns : most, total += row[i].start + row[i].count;
        tokens += row[i].count;
    }
    c.stream = tokens * heads * dim >= STREAM_FROM && (uintptr_t)c.out % 64 == 0;
    int64_t parts = (most + MAX_COLUMNS - 1) / MAX_COLUMNS;
    if (pairs % threads && pairs < 4 * threads && most > 2 * COLS) parts *= 2 * threads;
    int64_t width = ((most + parts - 1) / parts + COLS - 1) / COLS * COLS;
#pragma omp parallel num_threads(threads) if (pairs * parts > 1 && total * most > 256)
    {
        struct scratch s;
        int ready = take(&s, dim, width);
        tiles_full();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pairs * parts; i++) {
            const struct row *r = row + i % pairs / kv_heads;
            int64_t first = (parts - 1 - i / pairs) * width, all = r->count * (heads / kv_heads);
            int64_t end = first + width < all ? first + width : all;
            int k = (int)(i % kv_heads);
            if (first >= end || !ready) continue;
#ifdef LATENT
            if (dim == 576) task_of(&c, r, k, first, end, &s, 576);
#else
            if (dim == 128) task_of(&c, r, k, first, end, &s, 128);
            else if (dim == 64) task_of(&c, r, k, first, end, &s, 64);
#endif
            else task_of(&c, r, k, first, end, &s, dim);
        }
        tiles_release();
    }
}

#if !defined(SAGE) && !defined(LATENT)
#ifdef TILES
int extend_ready(void) { return tiles_permitted(); }
#else
int extend_ready(void) { return 1; }
#endif

/* pages: bf16, or codes in int8 where there are scales, bf16 [tokens, 2 * kv_heads].
 * rows: of n sequences, the address of the page table, the first token in q and out, tokens before
 * it and tokens of it. q: [tokens, ...] of heads x dim every q_stride elements; out: [tokens, heads,
 * dim]; dim a multiple of 32. window: tokens that each sees at most, itself among them; 0: all up to
 * itself; below 0: all of its sequence, those behind it as well. sinks, cap, slopes: see `struct
 * paged_decode`. */
void paged_extend(const bf16 *q, int64_t q_stride, const void *pages, const bf16 *scales,
                  const int64_t *rows, int64_t n, bf16 *out, int heads, int kv_heads, int dim,
                  int page_bits, int window, float scale, int threads, const float *sinks,
                  float cap, const float *slopes) {
    struct call c = {q, pages, scales, out, q_stride, heads, kv_heads, dim, page_bits, window, 0,
                     cap ? scale / cap : scale * 1.44269504f, 0, 0, sinks, cap * 1.44269504f, slopes};
    extend_rows(c, (const struct row *)rows, n, threads);
}

#if !defined(TILES_OF_VECTORS) && !defined(FLOATS)
int64_t decode_exact_tasks(const struct paged_decode *d) {
    return d->rows / d->q_len * d->kv_heads;
}

/* See decode_exact.c. Each token is a row of its own: it reads nothing behind itself. */
void decode_exact_task(const struct paged_decode *d, int64_t task) {
    int64_t own = task / d->kv_heads, table = (int64_t)(d->tables + own * d->table_stride);
    struct call c = {d->q, d->pages, d->scales, d->out, d->q_stride, d->heads, d->kv_heads, d->dim,
                     d->page_bits, d->window, 0,
                     d->cap ? d->scale / d->cap : d->scale * 1.44269504f, 0, 0, d->sinks,
                     d->cap * 1.44269504f, d->slopes};
    int64_t group = d->heads / d->kv_heads;
    struct scratch s;
    if (!take(&s, d->dim, group)) return;
    tiles_full();
    for (int t = 0; t < d->q_len; t++) {
        int64_t at = d->lens[own] - d->q_len + t;
        struct row row = {table, own * d->q_len + t, at > 0 ? at : 0, 1};
        int k = (int)(task % d->kv_heads);
        if (d->dim == 128) task_of(&c, &row, k, 0, group, &s, 128);
        else if (d->dim == 64) task_of(&c, &row, k, 0, group, &s, 64);
        else task_of(&c, &row, k, 0, group, &s, d->dim);
    }
    tiles_release();
}
#endif
#endif
#else
int64_t decode_exact_tasks(void) { return 0; }
void decode_exact_task(void) {}
int extend_ready(void) { return 0; }

void paged_extend(const bf16 *q, int64_t q_stride, const void *pages, const bf16 *scales,
                  const int64_t *rows, int64_t n, bf16 *out, int heads, int kv_heads, int dim,
                  int page_bits, int window, float scale, int threads, const float *sinks,
                  float cap, const float *slopes) {}
#endif
