/* Many tokens a sequence through a GatedDeltaNet layer by tiles, a block of 32 at a time (the
 * chunked form of arXiv 2412.06464): with the state S as [key, value],
 *
 *     change = (1 + L)^-1 beta (v - reach k S),  L[t, j] = beta[t] from[t, j] k[t] k[j] for j < t
 *     y = reach q S + A change,                  A[t, j] = from[t, j] q[t] k[j] for j <= t
 *     S = reach[end] S + sum over t of from[end, t] k[t] change[t]^T
 *
 * from: decay from after one token up to another; reach: from the block's start. What is multiplied
 * is split in bf16 (see delta_tiles.h): in three where it reaches the state, in two where y alone
 * sees it. Sums and the forward substitution are fp32. Blocks are filled up with tokens that change
 * nothing. 32 values of a head at a time go all the way, out of L1; what the next block reads of p,
 * whose rows lie far apart, is fetched ahead. */
#include "delta_run.h"
#include <stdlib.h>
#ifdef TILES
#include "delta_tiles.h"

#define TOKENS 32
#define WIDTH 32 /* values at a time, two tiles */
#define ALIGNED __attribute__((aligned(64)))

/* n, m: key_dim and value_dim. */
struct tiles {
    float dots[8 * FLOATS];           /* tiles [4, 2]: products of keys and of queries with keys */
    float system[TOKENS * TOKENS];    /* L */
    bf16 attend[4 * TILE];            /* A in two parts */
    float v[TOKENS * WIDTH], change[TOKENS * WIDTH];
    float seen[4 * FLOATS];           /* tiles [2, 2]: what keys read of the state */
    bf16 new[4 * TILE], kept[6 * TILE]; /* 2 and 3 parts: pairs of changes, as they are and decayed
                                           to the block's end */
    float decay[TOKENS], beta[TOKENS], reach[TOKENS], to_end[TOKENS];
    unsigned control; /* what was in MXCSR */
    float *kq;      /* [2, TOKENS, n]: keys, queries */
    float *queried; /* tiles [m / WIDTH, 2, 2]: what queries read of the state */
    float *y;       /* tiles [m / WIDTH, 2, 2]: what they find of the changes */
    float *states;  /* tiles [m / WIDTH, n / 16, 2] of each value head */
    /* In parts: */
    bf16 *keys, *queries; /* 3, 2 x tiles [2, n / 32]: their rows */
    bf16 *turned;   /* 3 x tiles [n / 16, 1]: columns of keys */
    bf16 *paired;   /* 3 x tiles [2, n / 32]: pairs of columns of keys */
    bf16 *state;    /* 3 x tiles [2, n / 32]: pairs of rows of WIDTH values of the state */
};

INLINE int shared_of(const Delta *d) { return d->values / d->keys; }

struct tiles *tiles_open(const Delta *d) {
    int64_t n = d->key_dim, m = d->value_dim;
    if (n % 32 || m % 32) return NULL;
    int64_t head = (sizeof(struct tiles) + 63) / 64 * 64;
    int64_t floats = 2 * TOKENS * n + 2 * TOKENS * m + n * m * shared_of(d);
    int64_t halves = 11 * TOKENS * n + 3 * n * WIDTH;
    struct tiles *b = aligned_alloc(64, head + 4 * floats + 2 * halves);
    if (!b) return NULL;
    float *f = (float *)((char *)b + head);
    b->kq = f, f += 2 * TOKENS * n;
    b->queried = f, f += TOKENS * m;
    b->y = f, f += TOKENS * m;
    b->states = f, f += n * m * shared_of(d);
    bf16 *h = (bf16 *)f;
    b->keys = h, h += 3 * TOKENS * n;
    b->queries = h, h += 2 * TOKENS * n;
    b->turned = h, h += 3 * TOKENS * n;
    b->paired = h, h += 3 * TOKENS * n;
    b->state = h;
    tiles_full();
    b->control = _mm_getcsr();
    _mm_setcsr(b->control | 0x8040); /* what is too small is 0, as in tiles: it would be slow */
    return b;
}

void tiles_close(struct tiles *b) {
    _mm_setcsr(b->control);
    tiles_release();
    free(b);
}

/* A square of 16 values x 16 keys in the pool, of states [value, key]; square: its number in the
 * block's order. */
INLINE int64_t place(const Delta *d, int square) {
    int n = d->key_dim, panel = square / (n / 8), i = square % (n / 8) / 2, j = square % 2;
    return (int64_t)(panel * WIDTH + j * 16) * n + i * 16;
}

void tiles_load(const Delta *d, struct tiles *b, int64_t slot, int first) {
    int n = d->key_dim, squares = n / 16 * (d->value_dim / 16);
    float *to = b->states;
    for (int h = 0; h < shared_of(d); h++) {
        const char *from = state_at(d, slot, first + h);
        for (int s = 0; s < squares; s++, to += FLOATS) {
            __m512 r[16];
            for (int k = 0; k < 16; k++) {
                int64_t at = place(d, s) + k * n;
                r[k] = d->narrow_states ? wide_at((const bf16 *)from + at)
                                        : _mm512_loadu_ps((const float *)from + at);
            }
            turn_square(r);
            for (int k = 0; k < 16; k++) _mm512_store_ps(to + 16 * k, r[k]);
        }
    }
}

void tiles_keep(const Delta *d, const struct tiles *b, int64_t slot, int first) {
    int n = d->key_dim, squares = n / 16 * (d->value_dim / 16);
    const float *from = b->states;
    for (int h = 0; h < shared_of(d); h++) {
        char *to = state_at(d, slot, first + h);
        for (int s = 0; s < squares; s++, from += FLOATS) {
            __m512 r[16];
            for (int k = 0; k < 16; k++) r[k] = _mm512_load_ps(from + 16 * k);
            turn_square(r);
            for (int k = 0; k < 16; k++) {
                int64_t at = place(d, s) + k * n;
                if (d->narrow_states)
                    _mm256_storeu_si256((__m256i *)((bf16 *)to + at),
                                        (__m256i)_mm512_cvtneps_pbh(r[k]));
                else _mm512_storeu_ps((float *)to + at, r[k]);
            }
        }
    }
}

/* Convolution and SiLU of `count` channels from `first` on: y [TOKENS, count], 0 beyond `tokens`.
 * x: the rows it sees, the oldest first. */
INLINE void convolve(const Delta *d, const bf16 *const *x, int tokens, int first, int count,
                     float *y, const int width) {
    int64_t channels = channels_of(d);
    for (int i = 0; i < count; i += 16) {
        __m512 taps[MAX_WIDTH], in[MAX_WIDTH];
#pragma GCC unroll 8
        for (int j = 0; j < width; j++) {
            taps[j] = _mm512_loadu_ps(d->conv + j * channels + first + i);
            if (j + 1 < width) in[j] = wide_at(x[j] + first + i);
        }
        for (int t = 0; t < tokens; t++) {
            const bf16 *own = x[t + width - 1] + first + i;
            in[width - 1] = wide_at(own);
            _mm_prefetch((const char *)(own + TOKENS * d->stride), _MM_HINT_T0);
            __m512 sum = _mm512_mul_ps(in[0], taps[0]);
#pragma GCC unroll 8
            for (int j = 1; j < width; j++) sum = _mm512_fmadd_ps(in[j], taps[j], sum);
            _mm512_store_ps(y + t * count + i, _mm512_mul_ps(sum, sigmoid16(sum)));
#pragma GCC unroll 8
            for (int j = 0; j + 1 < width; j++) in[j] = in[j + 1];
        }
    }
    memset(y + tokens * count, 0, sizeof(float) * (TOKENS - tokens) * count);
}

static void convolved(const Delta *d, const bf16 *const *x, int tokens, int first, int count,
                      float *y) {
    if (d->width == 4) convolve(d, x, tokens, first, count, y, 4);
    else if (d->width == 3) convolve(d, x, tokens, first, count, y, 3);
    else if (d->width == 2) convolve(d, x, tokens, first, count, y, 2);
    else convolve(d, x, tokens, first, count, y, d->width);
}

/* Rows of keys or queries brought to a length, in place, and split. */
INLINE void split_rows(float *x, int n, float length, bf16 *rows, const int parts) {
    for (int t = 0; t < TOKENS; t++, x += n) {
        __m512 sum = _mm512_setzero_ps();
        for (int i = 0; i < n; i += 16) {
            __m512 v = _mm512_load_ps(x + i);
            sum = _mm512_fmadd_ps(v, v, sum);
        }
        __m512 scale = _mm512_set1_ps(length / sqrtf(_mm512_reduce_add_ps(sum) + 1e-6f));
        bf16 *to = rows + t / 16 * (n / 32) * TILE + t % 16 * 32;
        for (int i = 0; i < n; i += 32, to += TILE) {
            __m512 a = _mm512_mul_ps(_mm512_load_ps(x + i), scale);
            __m512 b = _mm512_mul_ps(_mm512_load_ps(x + i + 16), scale);
            _mm512_store_ps(x + i, a);
            _mm512_store_ps(x + i + 16, b);
            split_row(a, b, to, TOKENS * n, parts);
        }
    }
}

/* Columns of keys, for what the state gains, and pairs of them, for products of keys. */
static void turn_keys(struct tiles *b, int n) {
    int64_t next = TOKENS * n;
    for (int i = 0; i < n; i += 16) {
        __m512 left[16], right[16];
        for (int t = 0; t < 16; t++) left[t] = _mm512_load_ps(b->kq + t * n + i);
        turn_square(left);
        for (int t = 0; t < 16; t++) right[t] = _mm512_load_ps(b->kq + (16 + t) * n + i);
        turn_square(right);
        bf16 *to = b->turned + i / 16 * TILE;
        for (int k = 0; k < 16; k++) split_row(left[k], right[k], to + 32 * k, next, 3);
        bf16 *pairs = b->paired + i / 32 * TILE + i % 32 * 16, *later = pairs + n / 32 * TILE;
        for (int k = 0; k < 16; k += 2) {
            split_pair(left[k], left[k + 1], pairs + 16 * k, next, 3);
            split_pair(right[k], right[k + 1], later + 16 * k, next, 3);
        }
    }
}

/* Gates of a head's tokens, x: their b; those that fill up decay nothing and change nothing. */
static void gate_block(const Delta *d, struct tiles *b, const bf16 *x, int tokens, int head) {
    float as[TOKENS] ALIGNED = {0}, bs[TOKENS] ALIGNED = {0};
    for (int t = 0; t < tokens; t++, x += d->stride) {
        bs[t] = wide(x[head]);
        as[t] = wide(x[d->values + head]);
    }
    for (int t = 0; t < TOKENS; t += 16) {
        __mmask16 real = tokens >= t + 16 ? 0xffff : tokens <= t ? 0 : (1 << (tokens - t)) - 1;
        __m512 rate = softplus16(_mm512_add_ps(_mm512_load_ps(as + t),
                                               _mm512_set1_ps(d->bias[head])));
        __m512 log = _mm512_mul_ps(rate, _mm512_set1_ps(-1.44269504f * d->decay[head]));
        _mm512_store_ps(b->decay + t,
                        _mm512_mask_mov_ps(_mm512_set1_ps(1), real, two_to(log)));
        _mm512_store_ps(b->beta + t, _mm512_maskz_mov_ps(real, sigmoid16(_mm512_load_ps(bs + t))));
    }
}

/* L, A, reach and to_end of a head. */
static void decays(struct tiles *b) {
    const float *kk = b->dots, *qk = b->dots + 4 * FLOATS;
    __m512 f[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    float reach = 1;
    for (int t = 0; t < TOKENS; t++) {
        __m512 decay = _mm512_set1_ps(b->decay[t]), beta = _mm512_set1_ps(b->beta[t]), a[2];
        int64_t at = t / 16 * 2 * FLOATS + t % 16 * 16;
        for (int h = 0; h < 2; h++) {
            f[h] = _mm512_mul_ps(f[h], decay);
            _mm512_store_ps(b->system + t * TOKENS + 16 * h, _mm512_mul_ps(
                _mm512_mul_ps(f[h], beta), _mm512_load_ps(kk + at + h * FLOATS)));
            __mmask16 own = t / 16 == h ? (__mmask16)(1 << t % 16) : 0;
            f[h] = _mm512_mask_mov_ps(f[h], own, _mm512_set1_ps(1));
            a[h] = _mm512_mul_ps(f[h], _mm512_load_ps(qk + at + h * FLOATS));
        }
        bf16 *to = b->attend + t / 16 * TILE + t % 16 * 32;
        split_row(a[0], a[1], to, 2 * TILE, 2);
        b->reach[t] = reach *= b->decay[t];
    }
    _mm512_store_ps(b->to_end, f[0]);
    _mm512_store_ps(b->to_end + 16, f[1]);
}

/* WIDTH values of the state, tiles [n / 16, 2], to pairs of rows, and decayed over the block. */
static void split_state(struct tiles *b, float *s, int n) {
    __m512 decay = _mm512_set1_ps(b->reach[TOKENS - 1]);
    for (int i = 0; i < n; i += 16)
        for (int j = 0; j < 2; j++, s += FLOATS) {
            bf16 *to = b->state + (j * (n / 32) + i / 32) * TILE + i % 32 * 16;
            for (int k = 0; k < 16; k += 2) {
                __m512 x = _mm512_load_ps(s + 16 * k), y = _mm512_load_ps(s + 16 * k + 16);
                split_pair(x, y, to + 16 * k, n * WIDTH, 3);
                _mm512_store_ps(s + 16 * k, _mm512_mul_ps(x, decay));
                _mm512_store_ps(s + 16 * k + 16, _mm512_mul_ps(y, decay));
            }
        }
}

/* Four tokens' changes from what they are and what those before them do to them. */
INLINE void solve_four(struct tiles *b, int t, __m512 a[4][2]) {
    const float *own = b->system + t * TOKENS, *before = b->change;
    for (int j = 0; j < t; j++, before += WIDTH) {
        __m512 x = _mm512_load_ps(before), y = _mm512_load_ps(before + 16);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            __m512 factor = _mm512_set1_ps(own[r * TOKENS + j]);
            a[r][0] = _mm512_fnmadd_ps(x, factor, a[r][0]);
            a[r][1] = _mm512_fnmadd_ps(y, factor, a[r][1]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 2
        for (int w = 0; w < 2; w++) {
#pragma GCC unroll 4
            for (int j = 0; j < r; j++)
                a[r][w] = _mm512_fnmadd_ps(a[j][w], _mm512_set1_ps(own[r * TOKENS + t + j]),
                                           a[r][w]);
            _mm512_store_ps(b->change + (t + r) * WIDTH + 16 * w, a[r][w]);
        }
}

/* Forward substitution for WIDTH values. */
static void solve(struct tiles *b) {
    for (int t = 0; t < TOKENS; t += 4) {
        const float *seen = b->seen + t / 16 * 2 * FLOATS + t % 16 * 16;
        __m512 a[4][2];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++)
#pragma GCC unroll 2
            for (int w = 0; w < 2; w++) {
                __m512 x = _mm512_load_ps(b->v + (t + r) * WIDTH + 16 * w);
                __m512 old = _mm512_load_ps(seen + w * FLOATS + r * 16);
                x = _mm512_fnmadd_ps(old, _mm512_set1_ps(b->reach[t + r]), x);
                a[r][w] = _mm512_mul_ps(x, _mm512_set1_ps(b->beta[t + r]));
            }
        solve_four(b, t, a);
#pragma GCC unroll 2
        for (int r = 0; r < 4; r += 2)
#pragma GCC unroll 2
            for (int w = 0; w < 2; w++) {
                int at = w * TILE + (t + r) * 16;
                split_pair(a[r][w], a[r + 1][w], b->new + at, 2 * TILE, 2);
                split_pair(_mm512_mul_ps(a[r][w], _mm512_set1_ps(b->to_end[t + r])),
                           _mm512_mul_ps(a[r + 1][w], _mm512_set1_ps(b->to_end[t + r + 1])),
                           b->kept + at, 2 * TILE, 3);
            }
    }
}

/* Norm and output gate of a token. z, out: of this head. */
INLINE void finish(const Delta *d, const struct tiles *b, int t, const bf16 *z, bf16 *out,
                   const int wide) {
    int at = t / 16 * 2 * FLOATS + t % 16 * 16;
    __m512 reach = _mm512_set1_ps(b->reach[t]), sum = _mm512_setzero_ps(), v[MAX_DIM / 16];
#pragma GCC unroll 8
    for (int w = 0; w < wide; w++) {
        int own = at + w / 2 * 4 * FLOATS + w % 2 * FLOATS;
        v[w] = _mm512_fmadd_ps(_mm512_load_ps(b->queried + own), reach,
                               _mm512_load_ps(b->y + own));
        sum = _mm512_fmadd_ps(v[w], v[w], sum);
    }
    float mean = _mm512_reduce_add_ps(sum) / (16 * wide);
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(mean + d->eps));
#pragma GCC unroll 8
    for (int w = 0; w < wide; w++) {
        __m512 gate = wide_at(z + 16 * w);
        _mm_prefetch((const char *)(z + 16 * w + TOKENS * d->stride), _MM_HINT_T0);
        gate = _mm512_mul_ps(silu_coarse(gate), _mm512_loadu_ps(d->norm + 16 * w));
        _mm256_storeu_si256((__m256i *)(out + 16 * w), (__m256i)_mm512_cvtneps_pbh(
            _mm512_mul_ps(_mm512_mul_ps(v[w], scale), gate)));
    }
}

static void finish_all(const Delta *d, const struct tiles *b, int tokens, const bf16 *z,
                       bf16 *out) {
    int64_t next = (int64_t)d->values * d->value_dim;
    for (int t = 0; t < tokens; t++, z += d->stride, out += next)
        if (d->value_dim == 64) finish(d, b, t, z, out, 4);
        else if (d->value_dim == 128) finish(d, b, t, z, out, 8);
        else finish(d, b, t, z, out, d->value_dim / 16);
}

/* WIDTH values of a head, whose state is tiles [n / 16, 2]. */
static void values(struct tiles *b, float *state, float *queried, float *y, int n) {
    Split s = {b->state, n * WIDTH};
    split_state(b, state, n);
    multiply((Split){b->keys, TOKENS * n}, s, b->seen, 2, 2, n / 32, 3, 0);
    multiply((Split){b->queries, TOKENS * n}, s, queried, 2, 2, n / 32, 2, 0);
    solve(b);
    multiply((Split){b->attend, 2 * TILE}, (Split){b->new, 2 * TILE}, y, 2, 2, 1, 2, 0);
    multiply((Split){b->turned, TOKENS * n}, (Split){b->kept, 2 * TILE}, state, n / 16, 2, 1, 3, 1);
}

void tiles_block(const Delta *d, const Run *run, int64_t at, int tokens, int head,
                 struct tiles *b) {
    int n = d->key_dim, m = d->value_dim, shared = shared_of(d), edge = 2 * d->keys * n;
    const bf16 *x[TOKENS + MAX_WIDTH];
    for (int t = 1 - d->width; t < tokens; t++) x[t + d->width - 1] = input(d, run, at + t);
    float *q = b->kq + TOKENS * n;
    const bf16 *p = x[d->width - 1];
    Split keys = {b->keys, TOKENS * n}, pairs = {b->paired, TOKENS * n};
    convolved(d, x, tokens, (d->keys + head) * n, n, b->kq);
    convolved(d, x, tokens, head * n, n, q);
    split_rows(b->kq, n, 1.0f, b->keys, 3);
    split_rows(q, n, 1.0f / sqrtf(n), b->queries, 2);
    turn_keys(b, n);
    multiply(keys, pairs, b->dots, 2, 2, n / 32, 3, 0);
    multiply((Split){b->queries, TOKENS * n}, pairs, b->dots + 4 * FLOATS, 2, 2, n / 32, 2, 0);
    float *state = b->states;
    for (int h = head * shared; h < (head + 1) * shared; h++) {
        gate_block(d, b, p + edge + 2 * d->values * m, tokens, h);
        decays(b);
        for (int i = 0; i < m; i += WIDTH, state += n * WIDTH) {
            convolved(d, x, tokens, edge + h * m + i, WIDTH, b->v);
            values(b, state, b->queried + TOKENS * i, b->y + TOKENS * i, n);
        }
        finish_all(d, b, tokens, p + edge + d->values * m + h * m,
                   d->out + ((run->start + at) * d->values + h) * m);
    }
}
#else
struct tiles *tiles_open(const Delta *d) { return NULL; }
void tiles_close(struct tiles *b) {}
void tiles_load(const Delta *d, struct tiles *b, int64_t slot, int first) {}
void tiles_keep(const Delta *d, const struct tiles *b, int64_t slot, int first) {}
void tiles_block(const Delta *d, const Run *run, int64_t at, int tokens, int head,
                 struct tiles *b) {}
#endif
