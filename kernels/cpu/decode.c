/* Attention of the last token, or few, of sequences over paged keys and values.
 *
 * Each token is a row of its own, and what lies behind it is not read: it comes out as it would
 * without those behind it, to the bit, whatever their pages hold. */
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

#ifdef __AVX512BF16__
#define ROUND 32   /* tokens per round of the online softmax, where whole registers are used */
#define STATE 8192 /* elements of the outputs that a task keeps */

/* Where a round's tokens lie; places beyond `count` repeat the last. */
struct round { const bf16 *at[ROUND]; int count; };

INLINE __m512bh load(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }

/* Sums of 16 registers, one a lane. */
INLINE __m512 sums(__m512 r[16]) {
    for (int i = 0; i < 8; i++)
        r[i] = _mm512_add_ps(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]),
                             _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(r[2 * i]), y = _mm512_castps_pd(r[2 * i + 1]);
        r[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int n = 2; n; n /= 2)
        for (int i = 0; i < n; i++)
            r[i] = _mm512_add_ps(_mm512_shuffle_f32x4(r[2 * i], r[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(r[2 * i], r[2 * i + 1], 0xdd));
    return r[0];
}

/* Scores of a query with 16 tokens, times scale. */
INLINE __m512 score(const bf16 *q, const bf16 *const at[16], int64_t head, int dim, float scale) {
    __m512 r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 32) {
        __m512bh query = load(q + d);
        for (int i = 0; i < 16; i++) r[i] = _mm512_dpbf16_ps(r[i], query, load(at[i] + head + d));
    }
    return _mm512_mul_ps(sums(r), _mm512_set1_ps(scale));
}

/* outputs += weights x values, of `heads` queries. outputs: [heads][dim / 32][2][16], dims in the
 * order in which unpacking leaves them; weights: [heads][2][ROUND] bf16, a first part and the rest:
 * memory is what takes time here, and the weights stay as good as in fp32. */
INLINE void gather(const struct round *r, int64_t values, const int32_t weights[][2][ROUND / 2],
                   float *outputs, int dim, int heads) {
    for (int d = 0; d < dim; d += 128) {
        int parts = dim - d < 128 ? (dim - d) / 32 : 4;
        __m512 sum[2][4][2];
        for (int h = 0; h < heads; h++)
            for (int p = 0; p < parts; p++)
                for (int j = 0; j < 2; j++)
                    sum[h][p][j] = _mm512_loadu_ps(outputs + h * dim + d + p * 32 + j * 16);
        for (int i = 0; i < ROUND / 2; i++)
            for (int p = 0; p < parts; p++) {
                __m512i x = (__m512i)load(r->at[2 * i] + values + d + p * 32);
                __m512i y = (__m512i)load(r->at[2 * i + 1] + values + d + p * 32);
                __m512bh lo = (__m512bh)_mm512_unpacklo_epi16(x, y);
                __m512bh hi = (__m512bh)_mm512_unpackhi_epi16(x, y);
                for (int h = 0; h < heads; h++)
                    for (int part = 0; part < 2; part++) {
                        __m512bh weight = (__m512bh)_mm512_set1_epi32(weights[h][part][i]);
                        sum[h][p][0] = _mm512_dpbf16_ps(sum[h][p][0], lo, weight);
                        sum[h][p][1] = _mm512_dpbf16_ps(sum[h][p][1], hi, weight);
                    }
            }
        for (int h = 0; h < heads; h++)
            for (int p = 0; p < parts; p++)
                for (int j = 0; j < 2; j++)
                    _mm512_storeu_ps(outputs + h * dim + d + p * 32 + j * 16, sum[h][p][j]);
    }
}

/* A round of `heads` queries that share a key head. */
INLINE void attend_round(const bf16 *q, const struct round *r, int64_t head, int64_t values,
                         float *outputs, float *top, float *sum, int dim, int heads, float scale) {
    int32_t weights[2][2][ROUND / 2] __attribute__((aligned(64)));
    for (int h = 0; h < heads; h++) {
        __m512 none = _mm512_set1_ps(-INFINITY);
        uint32_t valid = r->count < 32 ? (1u << r->count) - 1 : ~0u;
        __m512 x = _mm512_mask_mov_ps(none, (__mmask16)valid,
                                      score(q + h * dim, r->at, head, dim, scale));
        __m512 y = none;
        if (valid >> 16)
            y = _mm512_mask_mov_ps(none, (__mmask16)(valid >> 16),
                                   score(q + h * dim, r->at + 16, head, dim, scale));
        float best = _mm512_reduce_max_ps(_mm512_max_ps(x, y));
        if (!(best <= top[h])) {
            float fade = exp_neg((top[h] - best) * 0.693147181f);
            for (int d = 0; d < dim; d += 16) {
                float *o = outputs + h * dim + d;
                _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), _mm512_set1_ps(fade)));
            }
            sum[h] *= fade, top[h] = best;
        }
        x = exp2_16(_mm512_sub_ps(x, _mm512_set1_ps(top[h])));
        y = exp2_16(_mm512_sub_ps(y, _mm512_set1_ps(top[h])));
        sum[h] += _mm512_reduce_add_ps(_mm512_add_ps(x, y));
        __m512i upper = _mm512_set1_epi32(0xffff0000);
        __m512 u = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), upper));
        __m512 v = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(y), upper));
        _mm512_store_si512(weights[h][0], (__m512i)_mm512_cvtne2ps_pbh(v, u));
        _mm512_store_si512(weights[h][1], (__m512i)_mm512_cvtne2ps_pbh(
            _mm512_sub_ps(y, v), _mm512_sub_ps(x, u)));
    }
    gather(r, head + values, (const int32_t (*)[2][ROUND / 2])weights, outputs, dim, heads);
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
        for (int k = first_head; k < end_head; k++)
            for (int row = 0; row < n; row++) {
                int last = len - n + 1 + row, behind = begin + r.count - (last > 1 ? last : 1);
                if (behind >= r.count) continue;
                const struct round *own = cut_round(&r, behind, &cut);
                const bf16 *query = q + row * q_stride + (int64_t)k * group * dim;
                int h = row * width + (k - first_head) * group;
#define GO(N) attend_round(query + g * dim, own, (int64_t)k * dim, kv, outputs + (h + g) * dim, \
                           top + h + g, sum + h + g, dim, N, scale)
                for (int g = 0; g < group; g += 2)
                    if (group - g > 1) GO(2);
                    else GO(1);
            }
    }
    __m512i order = _mm512_set_epi16(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8,
                                     23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    for (int h = 0; h < n * width; h++)
        for (int d = 0; d < dim; d += 32) {
            __m512 share = _mm512_set1_ps(1 / sum[h]);
            __m512 lo = _mm512_mul_ps(_mm512_loadu_ps(outputs + h * dim + d), share);
            __m512 hi = _mm512_mul_ps(_mm512_loadu_ps(outputs + h * dim + d + 16), share);
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(hi, lo);
            bf16 *to = out + h / width * out_stride
                + ((int64_t)first_head * group + h % width) * dim + d;
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
        }
}

static void decode_rows(const bf16 *q, int64_t q_stride, const bf16 *pages, const int32_t *tables,
                        int64_t table_stride, const int32_t *lens, bf16 *out, int64_t rows,
                        int q_len, int heads, int kv_heads, int dim, int page_bits, int window,
                        float scale, int threads) {
    /* Rows behind a window do not begin with the same token. */
    int group = heads / kv_heads, most = window ? 1 : STATE / (group * dim);
    int each = q_len < most ? q_len : most, pieces = (q_len + each - 1) / each;
    int64_t jobs = rows / q_len * pieces, parts = (2 * threads + jobs - 1) / jobs;
    while (parts < kv_heads && (kv_heads + parts - 1) / parts * group * each * dim > STATE) parts++;
    int share = (int)(parts < kv_heads ? (kv_heads + parts - 1) / parts : 1);
    parts = (kv_heads + share - 1) / share;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (rows > q_len || lens[0] > 64)
    for (int64_t task = 0; task < jobs * parts; task++) {
        int64_t job = task / parts, own = job / pieces;
        int first = (int)(task % parts) * share, row = (int)(job % pieces) * each;
        int end = first + share < kv_heads ? first + share : kv_heads;
        int n = q_len - row < each ? q_len - row : each, last = lens[own] - q_len + row + n;
        int len = last > 1 ? last : 1; /* padding may be shorter than its rows */
        int from = window && len > window ? len - window : 0;
        int64_t b = own * q_len + row;
#define ROWS(D) attend_rows(q + b * q_stride, q_stride, n, pages, tables + own * table_stride, \
                            page_bits, from, len, first, end, group, kv_heads * D, D, \
                            scale * 1.44269504f, out + b * heads * D, (int64_t)heads * D)
        if (dim == 128) ROWS(128);
        else if (dim == 64) ROWS(64);
        else ROWS(dim);
    }
}
#endif

/* rows: q_len tokens of each sequence; tables and lens, with those tokens, are of the sequences. */
void paged_decode(const bf16 *q, int64_t q_stride, const bf16 *pages, const int32_t *tables,
                  int64_t table_stride, const int32_t *lens, bf16 *out, int64_t rows, int q_len,
                  int heads, int kv_heads, int dim, int page_bits, int window, float scale,
                  int threads) {
    int group = heads / kv_heads, kv = kv_heads * dim;
#ifdef __AVX512BF16__
    if (dim % 32 == 0 && group * dim <= STATE)
        return decode_rows(q, q_stride, pages, tables, table_stride, lens, out, rows, q_len, heads,
                           kv_heads, dim, page_bits, window, scale, threads);
#endif
    int64_t tasks = rows * kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (rows > q_len || lens[0] > 64)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t b = task / kv_heads, own = b / q_len;
        int k = (int)(task % kv_heads), last = lens[own] - q_len + 1 + (int)(b % q_len);
        int len = last > 1 ? last : 1; /* padding may be shorter than its rows */
        int first = window && len > window ? len - window : 0;
        for (int g = 0; g < group; g += GROUP) {
            int n = group - g < GROUP ? group - g : GROUP;
            int64_t h = (int64_t)k * group + g;
#define CALL(N, D) attend(q + b * q_stride + h * dim, pages + k * dim, tables + own * table_stride, \
                          page_bits, first, len, N, 2 * kv, kv, D, scale, out + (b * heads + h) * dim)
            if (dim == 128) CALL(n, 128);
            else if (dim == 64) CALL(n, 64);
            else CALL(n, dim);
        }
    }
}
