/* Attention of chunks of tokens over paged keys and values: online softmax over blocks of keys
 * (FlashAttention, arXiv 2205.14135, 2307.08691) on tiles (tiles.h).
 *
 * Scores are computed transposed, S^T = K Q^T, so that a row of a tile is one key and its 16 lanes
 * are 16 queries: maximum, exponential and sum need nothing across lanes. A query is a column: one
 * token with one of the query heads that share a key head. Two rows of P^T side by side are what
 * O^T = V^T P^T wants for its right operand. */
#include "common.h"
#ifdef TILES
#include "extend_pack.h"
#include <stdlib.h>
#include <sys/mman.h>

/* Scores, as they become weights: the columns' scale, the maximum subtracted, the sum so far. */
struct weighing { __m512 scale, top[2], sum[2]; };

/* Pairs of a round's keys that are still scores, to be weights between other work. */
struct rest { const float *scores; bf16 *weights; int next, end, share; };

/* Pairs of keys first..end of 32 to weights 2**(score * scale - top), bf16, side by side. */
INLINE void weigh(const float *scores, bf16 *weights, int first, int end, struct weighing *to, int w) {
    __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                     23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int i = first; i < end; i++) {
        const float *from = scores + (w * KEYS + 2 * i) * 16;
        __m512 x = exp2_16(_mm512_fmsub_ps(_mm512_load_ps(from), to->scale, to->top[w]));
        __m512 y = exp2_16(_mm512_fmsub_ps(_mm512_load_ps(from + 16), to->scale, to->top[w]));
        to->sum[w] = _mm512_add_ps(to->sum[w], _mm512_add_ps(x, y));
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(y, x);
        _mm512_store_si512(weights + w * KEYS * 16 + i * 32, _mm512_permutexvar_epi16(pairs, both));
    }
}

/* Up to `many` more pairs of a round to weights. */
INLINE void weigh_some(struct rest *r, struct weighing *to, int many, int two) {
    int end = r->next + many < r->end ? r->next + many : r->end;
    for (; r->next < end; r->next++)
        for (int w = 0; w <= two; w++)
            weigh(r->scores, r->weights, r->next, r->next + 1, to, w);
}

#ifdef TILES_OF_VECTORS
/* As below, but sums stay in registers: one unit of the processor does it all. */
INLINE void score(const bf16 *keys, const bf16 *query, float *scores, int dim, int two,
                  struct rest *rest, struct weighing *to) {
    if (rest) weigh_some(rest, to, dim / 32 * rest->share, two);
    for (int w = 0; w <= two; w++)
        for (int k = 0; k < 2; k++)
            dot_chain(scores + w * KEYS * 16 + k * 256, (const uint8_t *)(keys + k * TILE),
                      4 * TILE, (const uint8_t *)(query + w * dim * 16), 2 * TILE, dim / 32, 1);
}

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
/* Scores of 32 keys and 16 or 32 columns: [2][KEYS][16]. With `rest`, the scores that were there
 * become weights meanwhile: tiles and vectors are different units of the processor. */
INLINE void score(const bf16 *keys, const bf16 *query, float *scores, int dim, int two,
                  struct rest *rest, struct weighing *to) {
    TILE_ZERO(0); TILE_ZERO(1);
    if (two) { TILE_ZERO(2); TILE_ZERO(3); }
    for (int d = 0; d < dim; d += 32) {
        TILE_STREAM(4, keys + d * 32, 64);
        TILE_LOAD(6, query + d * 16, 64);
        TILE_DOT(0, 4, 6);
        TILE_STREAM(5, keys + d * 32 + TILE, 64);
        TILE_DOT(1, 5, 6);
        if (two) {
            TILE_LOAD(7, query + (dim + d) * 16, 64);
            TILE_DOT(2, 4, 7);
            TILE_DOT(3, 5, 7);
        }
        if (rest) weigh_some(rest, to, rest->share, two);
    }
    TILE_STORE(0, scores, 64); TILE_STORE(1, scores + 256, 64);
    if (two) { TILE_STORE(2, scores + KEYS * 16, 64); TILE_STORE(3, scores + KEYS * 16 + 256, 64); }
}

/* Outputs += values x weights of n keys. outputs: [dim / 32][2][2][16 dims][16]. */
INLINE void gather(const bf16 *values, const bf16 *weights, float *outputs, int n, int dim, int two,
                   int fresh, struct rest *rest, struct weighing *to) {
    for (int d = 0; d < dim; d += 32) {
        float *o = outputs + d * 32;
        const bf16 *v = values + d * KEYS;
        if (fresh) {
            TILE_ZERO(0); TILE_ZERO(1);
            if (two) { TILE_ZERO(2); TILE_ZERO(3); }
        } else {
            TILE_SUMS(0, o, 64); TILE_SUMS(1, o + 256, 64);
            if (two) { TILE_SUMS(2, o + 512, 64); TILE_SUMS(3, o + 768, 64); }
        }
        for (int j = 0; j < n; j += 32) {
            TILE_STREAM(4, v + j * 32, 64);
            TILE_LOAD(6, weights + j * 16, 64);
            TILE_DOT(0, 4, 6);
            TILE_STREAM(5, v + j * 32 + TILE, 64);
            TILE_DOT(1, 5, 6);
            if (two) {
                TILE_LOAD(7, weights + (KEYS + j) * 16, 64);
                TILE_DOT(2, 4, 7);
                TILE_DOT(3, 5, 7);
            }
            if (rest) weigh_some(rest, to, rest->share, two);
        }
        TILE_STORE(0, o, 64); TILE_STORE(1, o + 256, 64);
        if (two) { TILE_STORE(2, o + 512, 64); TILE_STORE(3, o + 768, 64); }
    }
}
#endif

/* The largest of n scores of every column; with `edge`, what a column may not see becomes -inf. */
INLINE __m512 largest(float *scores, int n, int edge, __m512i from, __m512i to, int key) {
    __m512 m[4];
    for (int i = 0; i < 4; i++) m[i] = _mm512_set1_ps(-INFINITY);
    for (int j = 0; j < n; j += 4)
        for (int i = 0; i < 4; i++) {
            __m512 x = _mm512_load_ps(scores + (j + i) * 16);
            if (edge) {
                __m512i at = _mm512_set1_epi32(key + j + i);
                __mmask16 seen = _mm512_cmple_epi32_mask(at, to)
                    & _mm512_cmpge_epi32_mask(at, from);
                x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x);
                _mm512_store_ps(scores + (j + i) * 16, x);
            }
            m[i] = _mm512_max_ps(m[i], x);
        }
    return _mm512_max_ps(_mm512_max_ps(m[0], m[1]), _mm512_max_ps(m[2], m[3]));
}

/* Whether any score passes the maximum subtracted by far. */
INLINE int strays(const __m512 best[2], const struct weighing *to, int two) {
    int far = 0;
    for (int w = 0; w <= two; w++)
        far |= _mm512_cmp_ps_mask(_mm512_sub_ps(best[w], to->top[w]), _mm512_set1_ps(SLACK),
                                  _CMP_GT_OQ);
    return far;
}

/* Lets the maximum subtracted from a column's scores follow them, once they pass it by far: sums
 * and outputs so far are scaled to the new one. */
INLINE void follow(__m512 best, struct weighing *to, int w, float *outputs, int dim, int fresh) {
    __m512 far = _mm512_add_ps(to->top[w], _mm512_set1_ps(SLACK));
    __mmask16 passed = _mm512_cmp_ps_mask(best, far, _CMP_GT_OQ);
    if (!passed) return;
    /* A column's result must not depend on its neighbours: those that did not pass stay as is. */
    __m512 top = _mm512_mask_mov_ps(to->top[w], passed, best);
    __m512 fade = _mm512_mask_mov_ps(_mm512_set1_ps(1), passed,
                                     exp2_16(_mm512_sub_ps(to->top[w], top)));
    to->top[w] = top, to->sum[w] = _mm512_mul_ps(to->sum[w], fade);
    if (fresh) return;
    for (int d = 0; d < dim; d += 32)
        for (int i = 0; i < 32; i++) {
            float *o = outputs + d * 32 + w * 512 + i * 16;
            _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), fade));
        }
}

/* Tokens of a unit of columns: the first and last any of them sees, and what all of them see. */
struct sight { int64_t low, high, all_low, all_high; __m512i from[2], to[2]; };

/* Keys of the round at `at`, in whole tiles. */
INLINE int keys_of(int64_t at, int64_t high) {
    return high - at >= KEYS ? KEYS : high > at ? (int)(high - at + 31) & ~31 : 0;
}

/* Keys of a packed chunk begin..end into a unit's outputs. Scores of a round become weights while
 * the weights of the round before are used, and then while the scores of the next are computed: by
 * the time a score is replaced, it is a weight, as half of the round's are before the first. */
INLINE void attend(const struct scratch *s, const struct sight *see, int64_t begin, int64_t end,
                   struct weighing *to, float *outputs, int dim, int two, int fresh) {
    int64_t at = begin + ((see->low > begin ? see->low : begin) - begin) / KEYS * KEYS;
    int64_t high = see->high + 1 < end ? see->high + 1 : end;
    int n = keys_of(at, high), turn = 0, before = 0;
    for (int j = 0; j < n; j += 32)
        score(s->keys + (at - begin + j) * dim, s->query, s->scores + j * 16, dim, two, 0, 0);
    const bf16 *values = 0;
    bf16 *ready = 0;
    for (; n > 0; turn ^= 1) {
        int edge = at < see->all_low || at + n - 1 > see->all_high;
        __m512 best[2];
        for (int w = 0; w <= two; w++) {
            float *scores = s->scores + w * KEYS * 16;
            best[w] = edge ? largest(scores, n, 1, see->from[w], see->to[w], (int)at)
                           : largest(scores, n, 0, see->from[w], see->to[w], (int)at);
            best[w] = _mm512_mul_ps(best[w], to->scale);
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
            score(s->keys + (next - begin + j) * dim, s->query, s->scores + j * 16, dim, two,
                  &rest, to);
        weigh_some(&rest, to, KEYS, two);
        values = s->values + (at - begin) * dim, ready = rest.weights, before = n;
        at = next, n = more;
    }
    if (before) gather(values, ready, outputs, before, dim, two, fresh, 0, 0);
}

/* Outputs over sums, as bf16, to where each of n columns belongs; stream: past the caches, as whole
 * lines, which would otherwise be read first. */
INLINE void finish(const float *outputs, __m512 sum, int w, bf16 *const at[16], int n, int dim,
                   int stream) {
    __mmask16 none = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_EQ_OQ);
    __m512 share = _mm512_mask_mov_ps(_mm512_div_ps(_mm512_set1_ps(1), sum), none, sum);
    for (int d = 0; d < dim; d += 32) {
        __m512i lo[16], hi[16];
        const float *o = outputs + d * 32 + w * 512;
        for (int i = 0; i < 16; i++) {
            lo[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(o + i * 16), share);
            hi[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(o + 256 + i * 16), share);
        }
        transpose(lo), transpose(hi);
        for (int i = 0; i < n; i++) {
            __m512i out = (__m512i)_mm512_cvtne2ps_pbh((__m512)hi[i], (__m512)lo[i]);
            if (stream) _mm512_stream_si512((__m512i *)(at[i] + d), out);
            else _mm512_storeu_si512(at[i] + d, out);
        }
    }
}

/* Where columns first..end of a row have their queries and outputs; what tokens they see. */
struct unit { const bf16 *q[COLS]; bf16 *out[COLS]; int n; struct sight see; };

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
        to[i] = (int32_t)(row->start + token > 0 ? row->start + token : 0);
        from[i] = c->window && to[i] >= c->window ? to[i] - c->window + 1 : 0;
    }
    u->see.low = from[0], u->see.high = to[COLS - 1];
    u->see.all_low = from[COLS - 1], u->see.all_high = to[0];
    for (int w = 0; w < 2; w++) {
        u->see.from[w] = _mm512_loadu_si512(from + w * 16);
        u->see.to[w] = _mm512_loadu_si512(to + w * 16);
    }
}

/* Columns first..end of a row and key head, a chunk of packed keys after another: what is between
 * chunks is kept for every unit of columns. */
INLINE void task(const struct call *c, const struct row *row, int k, int64_t first, int64_t end,
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
            struct weighing state = {.scale = _mm512_set1_ps(c->scale)};
            for (int w = 0; w < 2; w++) {
                state.top[w] = fresh ? _mm512_set1_ps(-3e38f) : _mm512_load_ps(kept + w * 16);
                state.sum[w] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(kept + 32 + w * 16);
            }
            pack_queries(u.q, dim, s->query);
            if (two) pack_queries(u.q + 16, dim, s->query + dim * 16);
            if (two) attend(s, &u.see, begin, stop, &state, outputs, dim, 1, fresh);
            else attend(s, &u.see, begin, stop, &state, outputs, dim, 0, fresh);
            if (u.see.high < stop) {
                finish(outputs, state.sum[0], 0, u.out, two ? 16 : u.n, dim, c->stream);
                if (two) finish(outputs, state.sum[1], 1, u.out + 16, u.n - 16, dim, c->stream);
            } else
                for (int w = 0; w < 2; w++) {
                    _mm512_store_ps(kept + w * 16, state.top[w]);
                    _mm512_store_ps(kept + 32 + w * 16, state.sum[w]);
                }
        }
    }
}

/* This thread's scratch for tasks of `columns` columns; 0 where there is no memory. */
static int take(struct scratch *s, int dim, int64_t columns) {
    static __thread char *piece;
    static __thread size_t held;
    int64_t span = PACKED / dim / KEYS * KEYS;
    size_t packed = (size_t)span * dim * sizeof(bf16), query = (size_t)COLS * dim * sizeof(bf16);
    size_t scores = COLS * KEYS * sizeof(float);
    size_t state = (size_t)((columns + COLS - 1) / COLS) * (dim * COLS + 64) * sizeof(float);
    size_t want = 2 * packed + query + 2 * scores + state;
    if (want > held) {
        free(piece);
        held = (want + 0x1fffff) & ~(size_t)0x1fffff;
        piece = aligned_alloc(0x200000, held);
        if (!piece) return held = 0;
        madvise(piece, held, MADV_HUGEPAGE);
    }
    s->keys = (bf16 *)piece, s->values = (bf16 *)(piece + packed);
    s->query = (bf16 *)(piece + 2 * packed), s->scores = (float *)(piece + 2 * packed + query);
    s->weights = (bf16 *)(s->scores + COLS * KEYS);
    s->state = s->scores + COLS * KEYS * 2;
    return 1;
}

int extend_ready(void) { return tiles_permitted(); }

/* rows: of n sequences, the address of the page table, the first token in q and out, tokens before
 * it and tokens of it. q: [tokens, ...] of heads x dim every q_stride elements; out: [tokens, heads,
 * dim]; dim a multiple of 32. A row's work goes out in parts, the last and largest first. */
void paged_extend(const bf16 *q, int64_t q_stride, const bf16 *pages, const int64_t *rows, int64_t n,
                  bf16 *out, int heads, int kv_heads, int dim, int page_bits, int window,
                  float scale, int threads) {
    struct call c = {q, pages, out, q_stride, heads, kv_heads, dim, page_bits, window,
                     0, scale * 1.44269504f};
    const struct row *row = (const struct row *)rows;
    int64_t most = 0, pairs = n * kv_heads, total = 0, tokens = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t columns = row[i].count * (heads / kv_heads);
        most = columns > most ? columns : most, total += row[i].start + row[i].count;
        tokens += row[i].count;
    }
    c.stream = tokens * heads * dim >= STREAM_FROM && (uintptr_t)out % 64 == 0;
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
            if (dim == 128) task(&c, r, k, first, end, &s, 128);
            else if (dim == 64) task(&c, r, k, first, end, &s, 64);
            else task(&c, r, k, first, end, &s, dim);
        }
        tiles_release();
    }
}
#else
int extend_ready(void) { return 0; }

void paged_extend(const bf16 *q, int64_t q_stride, const bf16 *pages, const int64_t *rows, int64_t n,
                  bf16 *out, int heads, int kv_heads, int dim, int page_bits, int window,
                  float scale, int threads) {}
#endif
