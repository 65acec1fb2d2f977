/* Attention of chunks of tokens over paged keys and values: online softmax over blocks of keys
 * (FlashAttention, arXiv 2205.14135, 2307.08691) on AMX tiles.
 *
 * Scores are computed transposed, S^T = K Q^T, so that a row of a tile is one key and its 16 lanes
 * are 16 queries: maximum, exponential and sum need nothing across lanes. A query is a column: one
 * token with one of the query heads that share a key head. Two rows of P^T side by side are what
 * O^T = V^T P^T wants for its right operand. */
#include "common.h"
#ifdef __AMX_BF16__
#include "amx.h"
#include <stdlib.h>
#define TILE_STREAM(t, at, stride) \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t \
                     : : "r"((const void *)(at)), "r"((long)(stride)) : "memory")
#include <sys/mman.h>

#define COLS 32                   /* queries per round: two tiles */
#define KEYS 128                  /* keys per round of the online softmax */
#define PACKED (1 << 18)          /* elements of the keys packed at once: with the values, 1 MB */
#define MAX_COLUMNS 4096          /* of a task: bounds its sums and outputs to some megabytes */
#define TILE 512                  /* elements of a bf16 tile */
#define SLACK 8.0f                /* how far, in bits, scores may pass the maximum subtracted */

struct row { int64_t table, first, start, count; };

struct call {
    const bf16 *q, *pages;
    bf16 *out;
    int64_t q_stride;
    int heads, kv_heads, dim, page_bits, window;
    float scale; /* of scores, in bits */
};

/* What a thread works on; all in one aligned piece that grows and stays. */
struct scratch {
    bf16 *keys, *values, *query, *weights;
    float *scores, *state;
};

static const bf16 zeros[MAX_DIM] __attribute__((aligned(64)));

/* 16 x 16 elements of 32 bits. */
INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 4) {
        __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]);
        __m512i d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
        t[i] = _mm512_unpacklo_epi64(a, c), t[i + 1] = _mm512_unpackhi_epi64(a, c);
        t[i + 2] = _mm512_unpacklo_epi64(b, d), t[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
        __m512i b = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        __m512i d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
        r[i] = _mm512_shuffle_i32x4(a, c, 0x88), r[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

/* Keys and values of 32 tokens of one head into tiles: keys [dim / 32][2][16 keys][32], values
 * [dim / 32] x `step` elements, each [2][16 dims][32 keys]. */
INLINE void pack_tokens(const bf16 *const at[32], int apart, int dim, bf16 *keys, bf16 *values,
                        int64_t step) {
    for (int d = 0; d < dim; d += 32) {
        for (int i = 0; i < 32; i++)
            _mm512_store_si512(keys + (d * 2 + (i >> 4) * 32) * 16 + (i & 15) * 32,
                               _mm512_loadu_si512(at[i] + d));
        __m512i lo[16], hi[16];
        for (int i = 0; i < 16; i++) {
            const bf16 *a = at[2 * i], *b = at[2 * i + 1];
            __m512i x = _mm512_loadu_si512((a == zeros ? a : a + apart) + d);
            __m512i y = _mm512_loadu_si512((b == zeros ? b : b + apart) + d);
            lo[i] = _mm512_unpacklo_epi16(x, y), hi[i] = _mm512_unpackhi_epi16(x, y);
        }
        transpose(lo), transpose(hi);
        bf16 *tile = values + d / 32 * step;
        for (int i = 0; i < 16; i++) {
            int place = (i >> 2) * 8 + (i & 3);
            _mm512_store_si512(tile + place * 32, lo[i]);
            _mm512_store_si512(tile + (place + 4) * 32, hi[i]);
        }
    }
}

/* Packs tokens begin..end; those before `low`, and those up to a whole number of tiles after `end`,
 * as zeros: what lies in their places is not read. */
static void pack(const struct call *c, const struct row *row, int k, int64_t begin, int64_t end,
                 int64_t low, struct scratch *s) {
    int64_t stride = (int64_t)2 * c->kv_heads * c->dim, inside = (1 << c->page_bits) - 1;
    const int32_t *table = (const int32_t *)row->table;
    for (int64_t j = begin; j < end; j += 32) {
        const bf16 *at[32];
        for (int i = 0; i < 32; i++) {
            int64_t p = j + i;
            at[i] = p < low || p >= end ? zeros
                : c->pages + (((int64_t)table[p >> c->page_bits] << c->page_bits) + (p & inside))
                    * stride + k * c->dim;
        }
        int64_t in = j - begin, block = in / KEYS, part = in % KEYS / 32;
        pack_tokens(at, c->kv_heads * c->dim, c->dim, s->keys + in * c->dim,
                    s->values + block * KEYS * c->dim + part * 2 * TILE, KEYS * 32);
    }
}

/* Queries of 16 columns into tiles [dim / 32][16 pairs of dims][16 columns]. */
INLINE void pack_queries(const bf16 *const at[16], int dim, bf16 *query) {
    for (int d = 0; d < dim; d += 32) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(at[i] + d);
        transpose(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512(query + d * 16 + i * 32, r[i]);
    }
}

/* Scores, as they become weights: the columns' scale, the maximum subtracted, the sum so far. */
struct weighing { __m512 scale, top[2], sum[2]; };

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

/* Scores of 32 keys and 16 or 32 columns: [2][KEYS][16]. With `to`, the scores that were there
 * become weights meanwhile: tiles and vectors are different units of the processor. */
INLINE void score(const bf16 *keys, const bf16 *query, float *scores, bf16 *weights, int dim,
                  int two, struct weighing *to) {
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
        if (to)
            for (int w = 0; w <= two; w++)
                weigh(scores, weights, 16 * d / dim, 16 * (d + 32) / dim, to, w);
    }
    TILE_STORE(0, scores, 64); TILE_STORE(1, scores + 256, 64);
    if (two) { TILE_STORE(2, scores + KEYS * 16, 64); TILE_STORE(3, scores + KEYS * 16 + 256, 64); }
}

/* Outputs += values x weights of n keys. outputs: [dim / 32][2][2][16 dims][16]. */
INLINE void gather(const bf16 *values, const bf16 *weights, float *outputs, int n, int dim, int two,
                   int fresh) {
    for (int d = 0; d < dim; d += 32) {
        float *o = outputs + d * 32;
        const bf16 *v = values + d * KEYS;
        if (fresh) {
            TILE_ZERO(0); TILE_ZERO(1);
            if (two) { TILE_ZERO(2); TILE_ZERO(3); }
        } else {
            TILE_LOAD(0, o, 64); TILE_LOAD(1, o + 256, 64);
            if (two) { TILE_LOAD(2, o + 512, 64); TILE_LOAD(3, o + 768, 64); }
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
        }
        TILE_STORE(0, o, 64); TILE_STORE(1, o + 256, 64);
        if (two) { TILE_STORE(2, o + 512, 64); TILE_STORE(3, o + 768, 64); }
    }
}

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

/* Lets the maximum subtracted from a column's scores follow them, once they pass it by far: sums
 * and outputs so far are scaled to the new one. */
INLINE void follow(__m512 best, struct weighing *to, int w, float *outputs, int dim, int fresh) {
    __m512 far = _mm512_add_ps(to->top[w], _mm512_set1_ps(SLACK));
    if (!_mm512_cmp_ps_mask(best, far, _CMP_GT_OQ)) return;
    __m512 top = _mm512_max_ps(best, to->top[w]);
    __m512 fade = exp2_16(_mm512_sub_ps(to->top[w], top));
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

/* Keys of a packed chunk begin..end into a unit's outputs. The scores of a round are computed while
 * those of the round before become weights. */
INLINE void attend(const struct scratch *s, const struct sight *see, int64_t begin, int64_t end,
                   struct weighing *to, float *outputs, int dim, int two, int fresh) {
    int64_t at = begin + ((see->low > begin ? see->low : begin) - begin) / KEYS * KEYS;
    int64_t high = see->high + 1 < end ? see->high + 1 : end;
    int n = keys_of(at, high);
    for (int j = 0; j < n; j += 32)
        score(s->keys + (at - begin + j) * dim, s->query, s->scores + j * 16, 0, dim, two, 0);
    for (; n > 0; fresh = 0) {
        int edge = at < see->all_low || at + n - 1 > see->all_high;
        for (int w = 0; w <= two; w++) {
            float *scores = s->scores + w * KEYS * 16;
            __m512 best = edge ? largest(scores, n, 1, see->from[w], see->to[w], (int)at)
                               : largest(scores, n, 0, see->from[w], see->to[w], (int)at);
            follow(_mm512_mul_ps(best, to->scale), to, w, outputs, dim, fresh);
        }
        int64_t next = at + KEYS;
        int more = keys_of(next, high), j = 0;
        for (; j < more; j += 32)
            score(s->keys + (next - begin + j) * dim, s->query, s->scores + j * 16,
                  s->weights + j * 16, dim, two, to);
        for (; j < n; j += 32)
            for (int w = 0; w <= two; w++)
                weigh(s->scores + j * 16, s->weights + j * 16, 0, 16, to, w);
        const bf16 *values = s->values + (at - begin) * dim;
        if (fresh) gather(values, s->weights, outputs, n, dim, two, 1);
        else gather(values, s->weights, outputs, n, dim, two, 0);
        at = next, n = more;
    }
}

/* Outputs over sums, as bf16, to where each of n columns belongs. */
INLINE void finish(const float *outputs, __m512 sum, int w, bf16 *const at[16], int n, int dim) {
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
        for (int i = 0; i < n; i++)
            _mm512_storeu_si512(at[i] + d, (__m512i)_mm512_cvtne2ps_pbh((__m512)hi[i], (__m512)lo[i]));
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
            /* Lines of outputs are on their way while the columns attend. */
            for (int i = 0; i < u.n; i++)
                for (int d = 0; d < dim; d += 32) __builtin_prefetch(u.out[i] + d, 1);
            if (two) attend(s, &u.see, begin, stop, &state, outputs, dim, 1, fresh);
            else attend(s, &u.see, begin, stop, &state, outputs, dim, 0, fresh);
            if (u.see.high < stop) {
                finish(outputs, state.sum[0], 0, u.out, two ? 16 : u.n, dim);
                if (two) finish(outputs, state.sum[1], 1, u.out + 16, u.n - 16, dim);
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
    size_t want = 2 * packed + query + scores + scores / 2 + state;
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
    s->state = s->scores + COLS * KEYS * 3 / 2;
    return 1;
}

int extend_ready(void) { return amx_permitted(); }

/* rows: of n sequences, the address of the page table, the first token in q and out, tokens before
 * it and tokens of it. q: [tokens, ...] of heads x dim every q_stride elements; out: [tokens, heads,
 * dim]; dim a multiple of 32. A row's work goes out in parts, the last and largest first. */
void paged_extend(const bf16 *q, int64_t q_stride, const bf16 *pages, const int64_t *rows, int64_t n,
                  bf16 *out, int heads, int kv_heads, int dim, int page_bits, int window,
                  float scale, int threads) {
    struct call c = {q, pages, out, q_stride, heads, kv_heads, dim, page_bits, window,
                     scale * 1.44269504f};
    const struct row *row = (const struct row *)rows;
    int64_t most = 0, pairs = n * kv_heads, total = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t columns = row[i].count * (heads / kv_heads);
        most = columns > most ? columns : most, total += row[i].start + row[i].count;
    }
    int64_t parts = (most + MAX_COLUMNS - 1) / MAX_COLUMNS;
    if (pairs % threads && pairs < 4 * threads && most > 2 * COLS) parts *= 2 * threads;
    int64_t width = ((most + parts - 1) / parts + COLS - 1) / COLS * COLS;
#pragma omp parallel num_threads(threads) if (pairs * parts > 1 && total * most > 256)
    {
        struct scratch s;
        int ready = take(&s, dim, width);
        amx_full();
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
        amx_release();
    }
}
#else
int extend_ready(void) { return 0; }

void paged_extend(const bf16 *q, int64_t q_stride, const bf16 *pages, const int64_t *rows, int64_t n,
                  bf16 *out, int heads, int kv_heads, int dim, int page_bits, int window,
                  float scale, int threads) {}
#endif
