/* Products of many rows: blocked so that tiles are loaded from L1 and L2 alone.
 *
 * A block of rows is copied into tile order once (L2). Weights are decoded, a panel or half of one
 * ahead, between the products with those before (L2): beside tiles a little decoding at every step
 * costs less than much of it at some. Sums of 48 rows x 32 columns stay in six tiles over up to
 * 1,536 k, which takes 5 KB of L2's bandwidth for six tile products, and are finished while the next
 * 48 rows are multiplied. Splitting k so that weights stay in L1 costs more in loads and stores of
 * sums than it saves. Beyond 1.1 MB of x and weights, tiles were seen to come slower, from a L2 of
 * 2 MB: by a fifth at 1.4 MB, by half at 2. */
#include "job.h"

#if defined(TILES) && !defined(TILES_OF_VECTORS)

#define WIDE 3                  /* row tiles multiplied at a time */
#define GROUP (WIDE * 16)
#define MAX_ROWS (11 * GROUP)
#define MAX_STEPS 48            /* blocks of 32 k a panel is decoded for at a time */
#define L2_BYTES (1056 << 10)   /* of x in tile order and decoded weights */
#define B_BYTES (MAX_STEPS * PLAIN_BYTES)
#define SUMS (WIDE * 2 * 256)   /* floats of a group's sums */
#define ALL (1 << 30)

int64_t many_scratch(void) {
    int64_t bytes = L2_BYTES + 2 * B_BYTES + MAX_ROWS * PANEL * 4 + MAX_ROWS * sizeof(__m256i);
    return (bytes + 4095) & ~4095;
}

/* Sums that still have to be written; held: where those still in tiles belong, 0 for none. */
struct pending {
    float *held;
    int held_width;
    const float *sums;
    __m256i *halves; /* of the rows: see `finish_row` */
    int64_t row, panel;
    int next, rows;
    const bf16 *soon; /* what is added to the first row of the sums after these; 0: nothing */
};

/* Decodes a weight's blocks in their order; `left` parts of the run in hand, 8 to a block. */
struct decoder {
    const uint8_t *from;
    const struct exception *next, *end;
    bf16 *to;
    int64_t left, block; /* block: of the panel */
};

/* x rows to tiles: [chunks of k][groups of 3 row tiles, the last may have less][steps][row tiles],
 * rows beyond the end zero. */
static void arrange(const struct job *j, int64_t row0, int64_t rows, int64_t chunk, uint8_t *to) {
    int64_t apart = j->apart, tiles = (rows + 15) / 16, steps = j->w->ins / STEP;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const bf16 *from = j->x + (row0 + tile * 16) * apart;
        int64_t group = tile / WIDE * WIDE, width = tiles - group < WIDE ? tiles - group : WIDE;
        for (int64_t first = 0; first < steps; first += chunk) {
            int64_t count = steps - first < chunk ? steps - first : chunk;
            uint8_t *at = to + (first * tiles + group * count + tile - group) * TILE_BYTES;
            for (int64_t s = first; s < first + count; s++, at += width * TILE_BYTES)
                for (int64_t r = 0; r < 16; r++) {
                    __m512i v = _mm512_setzero_si512();
                    if (tile * 16 + r < rows) v = _mm512_loadu_si512(from + r * apart + s * STEP);
                    _mm512_store_si512(at + r * 64, v);
                }
        }
    }
}

/* Up to `parts` parts; weights without a code are put right at the end of their block. */
INLINE void decode_some(struct decoder *d, __m512i table, int parts) {
    for (; parts > 0 && d->left > 0; parts--) {
        __m512i v[4];
        decode_group(d->from, table, v);
        for (int i = 0; i < 4; i++) _mm512_store_si512(d->to + 32 * i, v[i]);
        d->from += 192, d->to += 128, d->left--;
        if (d->left % 8) continue;
        uint32_t end = (uint32_t)++d->block * BLOCK;
        for (; d->next < d->end && d->next->at < end; d->next++)
            d->to[(int64_t)d->next->at - end] = d->next->value;
    }
}

/* What is added is fetched a group ahead: its lines lie a row apart, where the processor foresees
 * nothing. The weights, which it reads in order, it fetches best by itself. */
INLINE void finish_some(const struct job *j, struct pending *p, int count) {
    for (; count > 0 && p->next < p->rows; count--, p->next++) {
        if (p->soon) _mm_prefetch((const char *)(p->soon + p->next * j->w->outs), _MM_HINT_T0);
        const float *at = p->sums + p->next / 16 * 512 + p->next % 16 * 16;
        finish_row(j, _mm512_load_ps(at), _mm512_load_ps(at + 256), p->row + p->next, p->panel,
                   p->halves + p->next);
    }
}

/* Stores the sums still in tiles. */
static void store_held(struct pending *p) {
    if (!p->held) return;
    TILE_STORE(0, p->held, 64);
    TILE_STORE(1, p->held + 256, 64);
    if (p->held_width > 1) {
        TILE_STORE(2, p->held + 512, 64);
        TILE_STORE(3, p->held + 768, 64);
    }
    if (p->held_width > 2) {
        TILE_STORE(4, p->held + 1024, 64);
        TILE_STORE(5, p->held + 1280, 64);
    }
    p->held = 0;
}

/* Sums of row tile r: tiles 2r and 2r + 1; 6: weights; 7: x. A group begins tile by tile: the sums
 * of the one before go, its own come, the first product follows; six stores at a time would take
 * as long as eight products. */
#define DOT(t) \
    if (first) { \
        if (held) TILE_STORE(t, held + 256 * t, 64); \
        if (more) TILE_SUMS(t, sums + 256 * t, 64); \
        else TILE_ZERO(t); \
    } \
    TILE_DOT(t, 7, 6);

INLINE void multiply(const int width, const int first, const uint8_t *x, const bf16 *w,
                     const float *sums, int more, float *held) {
    TILE_LOAD(6, w, 64);
    TILE_LOAD(7, x, 64);
    DOT(0)
    if (width > 1) {
        TILE_LOAD(7, x + TILE_BYTES, 64);
        DOT(2)
    }
    if (width > 2) {
        TILE_LOAD(7, x + 2 * TILE_BYTES, 64);
        DOT(4)
    }
    TILE_LOAD(6, w + 512, 64);
    if (width > 2) {
        DOT(5)
        TILE_LOAD(7, x + TILE_BYTES, 64);
    }
    if (width > 1) {
        DOT(3)
        TILE_LOAD(7, x, 64);
    }
    DOT(1)
}

/* A group of `width` row tiles x 32 columns over b; `parts` of what comes next are decoded at every
 * step. */
INLINE void group_block(const struct job *j, const int width, const uint8_t *x, const bf16 *w,
                        int64_t steps, struct decoder *d, int parts, float *sums, int more,
                        struct pending *last) {
    __m512i table = parts ? code_table(j->w) : _mm512_setzero_si512();
    int finish = (int)((GROUP + steps - 1) / steps);
    if (last->held_width != width) store_held(last);
    multiply(width, 1, x, w, sums, more, last->held);
    for (int64_t s = 0; s < steps; s++, x += width * TILE_BYTES, w += BLOCK) {
        if (s) multiply(width, 0, x, w, 0, 0, 0);
        decode_some(d, table, parts);
        finish_some(j, last, finish);
    }
    last->held = sums;
    last->held_width = width;
}

static void group_rows(const struct job *j, int64_t width, const uint8_t *x, const bf16 *w,
                       int64_t steps, struct decoder *d, int parts, float *sums, int more,
                       struct pending *last) {
    if (width == 3) group_block(j, 3, x, w, steps, d, parts, sums, more, last);
    else if (width == 2) group_block(j, 2, x, w, steps, d, parts, sums, more, last);
    else group_block(j, 1, x, w, steps, d, parts, sums, more, last);
}

/* Readies the decoder for `steps` blocks of a panel from `first` on. */
static void aim(const struct packed *w, struct decoder *d, int64_t panel, int64_t first,
                int64_t steps, bf16 *to) {
    d->from = w->blocks + (panel * (w->ins / STEP) + first) * CODED_BYTES;
    if (first == 0) {
        d->next = w->exceptions + w->starts[panel];
        d->end = w->exceptions + w->starts[panel + 1];
    }
    d->to = to, d->left = 8 * steps, d->block = first;
}

/* What is added to the sums of a row tile and panel. */
INLINE const bf16 *added(const struct job *j, int64_t row0, int64_t tile, int64_t panel) {
    return j->add ? j->add + (row0 + 16 * tile) * j->w->outs + panel * PANEL : 0;
}

/* A block of rows, in tile order at the start of scratch, by panels from..to. */
static void block_rows(const struct job *j, int64_t row0, int64_t rows, int64_t from, int64_t to,
                       int64_t chunk, uint8_t *x) {
    const struct packed *w = j->w;
    bf16 *weights = (bf16 *)(x + L2_BYTES);
    float *sums = (float *)(x + L2_BYTES + 2 * B_BYTES);
    __m256i *halves = (__m256i *)(sums + MAX_ROWS * PANEL);
    int64_t tiles = (rows + 15) / 16, steps = w->ins / STEP, groups = (tiles + WIDE - 1) / WIDE;
    int64_t turn = 0, slot = 0;
    int parts = w->coded ? (int)((8 + groups - 1) / groups) : 0;
    __m512i table = w->coded ? code_table(w) : _mm512_setzero_si512();
    struct decoder d = {0};
    struct pending last = {0};
    if (w->coded) aim(w, &d, from, 0, chunk, weights);
    decode_some(&d, table, ALL);
    for (int64_t panel = from; panel < to; panel++)
        for (int64_t first = 0; first < steps; first += chunk, turn ^= 1) {
            int64_t count = steps - first < chunk ? steps - first : chunk;
            int64_t then = first + chunk < steps ? first + chunk : 0; /* 0: the next panel */
            const bf16 *b = weights + turn * (B_BYTES / 2);
            if (!w->coded) b = (const bf16 *)w->blocks + (panel * steps + first) * BLOCK;
            else if (then || panel + 1 < to)
                aim(w, &d, panel + !then, then, steps - then < chunk ? steps - then : chunk,
                    weights + (turn ^ 1) * (B_BYTES / 2));
            for (int64_t t = 0; t < tiles; t += WIDE) {
                int64_t width = tiles - t < WIDE ? tiles - t : WIDE, left = rows - 16 * t;
                float *own = sums + (chunk >= steps ? slot++ % 2 : t / WIDE) * SUMS;
                group_rows(j, width, x + (first * tiles + t * count) * TILE_BYTES, b, count, &d,
                           parts, own, first > 0, &last);
                finish_some(j, &last, GROUP);
                if (!then)
                    last = (struct pending){own, (int)width, own, halves + 16 * t, row0 + 16 * t,
                                            panel, 0, (int)(left < GROUP ? left : GROUP),
                                            added(j, row0, t + WIDE < tiles ? t + WIDE : 0,
                                                  panel + (t + WIDE >= tiles))};
            }
            decode_some(&d, table, ALL);
        }
    store_held(&last);
    finish_some(j, &last, GROUP);
}

/* Blocks of k that a panel is decoded for at a time. */
INLINE int64_t chunk_of(const struct job *j) {
    int64_t steps = j->w->ins / STEP, chunks = (steps + MAX_STEPS - 1) / MAX_STEPS;
    return (steps + chunks - 1) / chunks;
}

int64_t many_rows(const struct job *j) {
    int64_t most = (L2_BYTES - 2 * chunk_of(j) * PLAIN_BYTES) / (j->w->ins * (int64_t)sizeof(bf16));
    most = most > MAX_ROWS ? MAX_ROWS : most < GROUP ? most / 16 * 16 : most / GROUP * GROUP;
    int64_t groups = (j->rows + GROUP - 1) / GROUP, parts = (j->rows + most - 1) / most;
    int64_t rows = (groups + parts - 1) / parts * GROUP;
    return rows < most ? rows : most;
}

void many_arrange(const struct job *j, int64_t row0, int64_t rows, uint8_t *scratch) {
    arrange(j, row0, rows, chunk_of(j), scratch);
}

void product_many(const struct job *j, int64_t row0, int64_t rows, int64_t from, int64_t to,
                  uint8_t *scratch) {
    tiles_full();
    block_rows(j, row0, rows, from, to, chunk_of(j), scratch);
    tiles_release();
}
#endif
