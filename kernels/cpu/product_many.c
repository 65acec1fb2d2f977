/* Products of many rows: blocked so that tiles are loaded from L1 and L2 alone.
 *
 * A block of rows is copied into tile order once (L2). A panel's weights are decoded (L2) while
 * its first 48 rows are multiplied and used for the others too; sums of 48 rows x 32 columns stay in
 * six tiles over all of k, which takes 5 KB of L2's bandwidth for six tile products, and are
 * finished while the next 48 rows are multiplied. Splitting k so that weights stay in L1 costs more
 * in loads and stores of sums than it saves. */
#include "job.h"

#ifdef __AMX_BF16__
#include "amx.h"

#define WIDE 3                  /* row tiles multiplied at a time */
#define GROUP (WIDE * 16)
#define MAX_ROWS (10 * GROUP)
#define MAX_STEPS 96            /* blocks of 32 k a panel is decoded for at a time */
#define X_BYTES (5 << 18)       /* of x in tile order: most of L2 */
#define B_BYTES (MAX_STEPS * PLAIN_BYTES)
#define SUMS (WIDE * 2 * 256)   /* floats of a group's sums */
#define AHEAD 2                 /* blocks decoded ahead of their use */

int64_t many_scratch(void) {
    int64_t bytes = X_BYTES + B_BYTES + MAX_ROWS * PANEL * 4 + MAX_ROWS * sizeof(__m256i);
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
};

/* A panel's weights over some blocks of k. */
struct panel {
    const uint8_t *coded; /* next block to decode */
    const struct exception *next, *end;
    const uint8_t *fetch; /* what is decoded next time, and the lines of it to fetch at a step */
    int lines;
    bf16 *tiles;
    int64_t first, steps, done; /* block of the panel tiles begin with; blocks; decoded */
};

/* x rows to tiles: [chunks of k][groups of 3 row tiles, the last may have less][steps][row tiles],
 * rows beyond the end zero. */
static void arrange(const struct job *j, int64_t row0, int64_t rows, int64_t chunk, uint8_t *to) {
    int64_t ins = j->w->ins, tiles = (rows + 15) / 16, steps = ins / STEP;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const bf16 *from = j->x + (row0 + tile * 16) * ins;
        int64_t group = tile / WIDE * WIDE, width = tiles - group < WIDE ? tiles - group : WIDE;
        for (int64_t first = 0; first < steps; first += chunk) {
            int64_t count = steps - first < chunk ? steps - first : chunk;
            uint8_t *at = to + (first * tiles + group * count + tile - group) * TILE_BYTES;
            for (int64_t s = first; s < first + count; s++, at += width * TILE_BYTES)
                for (int64_t r = 0; r < 16; r++) {
                    __m512i v = _mm512_setzero_si512();
                    if (tile * 16 + r < rows) v = _mm512_loadu_si512(from + r * ins + s * STEP);
                    _mm512_store_si512(at + r * 64, v);
                }
        }
    }
}

INLINE void decode_next(struct panel *b, __m512i table) {
    bf16 *to = b->tiles + b->done * BLOCK;
    decode_block(b->coded, table, to);
    b->coded += CODED_BYTES;
    b->done++;
    uint32_t end = (uint32_t)(b->first + b->done) * BLOCK;
    for (; b->next < b->end && b->next->at < end; b->next++)
        to[b->next->at % BLOCK] = b->next->value;
}

INLINE void finish_some(const struct job *j, struct pending *p, int count) {
    for (; count > 0 && p->next < p->rows; count--, p->next++) {
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
        if (more) TILE_LOAD(t, sums + 256 * t, 64); \
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

/* A group of `width` row tiles x 32 columns over b; decode: b is still coded. */
INLINE void group_block(const struct job *j, const int width, const int decode, const uint8_t *x,
                        struct panel *b, float *sums, int more, struct pending *last) {
    __m512i table = decode ? code_table(j->w) : _mm512_setzero_si512();
    int finish = (int)((GROUP + b->steps - 1) / b->steps);
    const bf16 *w = b->tiles;
    if (decode)
        for (int i = 0; i < AHEAD && b->done < b->steps; i++) decode_next(b, table);
    if (last->held_width != width) store_held(last);
    multiply(width, 1, x, w, sums, more, last->held);
    for (int64_t s = 0; s < b->steps; s++, x += width * TILE_BYTES, w += BLOCK) {
        if (s) multiply(width, 0, x, w, 0, 0, 0);
        if (decode && b->done < b->steps) decode_next(b, table);
        if (!decode)
            for (int i = 0; i < b->lines; i++, b->fetch += 64)
                _mm_prefetch((const char *)b->fetch, _MM_HINT_T1);
        finish_some(j, last, finish);
    }
    last->held = sums;
    last->held_width = width;
}

INLINE void group_rows(const struct job *j, int64_t width, const int decode, const uint8_t *x,
                       struct panel *b, float *sums, int more, struct pending *last) {
    if (width == 3) group_block(j, 3, decode, x, b, sums, more, last);
    else if (width == 2) group_block(j, 2, decode, x, b, sums, more, last);
    else group_block(j, 1, decode, x, b, sums, more, last);
}

static void panel_rows(const struct job *j, int64_t panel, int64_t row0, int64_t rows, int64_t chunk,
                       uint8_t *x, struct pending *last) {
    const struct packed *w = j->w;
    bf16 *scratch = (bf16 *)(x + X_BYTES);
    float *sums = (float *)(x + X_BYTES + B_BYTES);
    __m256i *halves = (__m256i *)(sums + MAX_ROWS * PANEL);
    int64_t tiles = (rows + 15) / 16, steps = w->ins / STEP;
    struct panel b = {0};
    if (w->coded) {
        b.coded = w->blocks + panel * steps * CODED_BYTES;
        b.next = w->exceptions + w->starts[panel];
        b.end = w->exceptions + w->starts[panel + 1];
        b.tiles = scratch;
    }
    for (int64_t first = 0; first < steps; first += chunk) {
        b.first = first;
        b.steps = steps - first < chunk ? steps - first : chunk;
        b.done = 0;
        int64_t others = (tiles + WIDE - 1) / WIDE - 1;
        b.fetch = w->blocks + (panel * steps + first + b.steps) * (w->coded ? CODED_BYTES : PLAIN_BYTES);
        b.lines = others ? (int)(((w->coded ? CODED_BYTES : PLAIN_BYTES) / 64 + others - 1) / others) : 0;
        if (!w->coded) b.tiles = (bf16 *)(w->blocks + (panel * steps + first) * PLAIN_BYTES);
        for (int64_t t = 0; t < tiles; t += WIDE) {
            int64_t width = tiles - t < WIDE ? tiles - t : WIDE, left = rows - 16 * t;
            const uint8_t *from = x + (first * tiles + t * b.steps) * TILE_BYTES;
            float *at = sums + (t / WIDE + (chunk >= steps ? panel * ((tiles + 2) / WIDE) : 0))
                        % (chunk >= steps ? 2 : MAX_ROWS / GROUP) * SUMS;
            if (w->coded && t == 0) group_rows(j, width, 1, from, &b, at, first > 0, last);
            else group_rows(j, width, 0, from, &b, at, first > 0, last);
            finish_some(j, last, GROUP);
            if (first + chunk >= steps)
                *last = (struct pending){at, (int)width, at, halves + 16 * t, row0 + 16 * t, panel, 0,
                                         (int)(left < GROUP ? left : GROUP)};
        }
    }
}

void product_many(const struct job *j, int64_t row0, int64_t row1, int64_t from, int64_t to,
                  uint8_t *scratch) {
    int64_t most = X_BYTES / (j->w->ins * 2), steps = j->w->ins / STEP;
    most = most > MAX_ROWS ? MAX_ROWS : most < GROUP ? most / 16 * 16 : most / GROUP * GROUP;
    int64_t chunks = (steps + MAX_STEPS - 1) / MAX_STEPS, chunk = (steps + chunks - 1) / chunks;
    amx_full();
    while (row0 < row1) {
        int64_t parts = (row1 - row0 + most - 1) / most;
        int64_t rows = ((row1 - row0 + parts - 1) / parts + GROUP - 1) / GROUP * GROUP;
        if (rows > most) rows = most;
        if (rows > row1 - row0) rows = row1 - row0;
        struct pending last = {0};
        arrange(j, row0, rows, chunk, scratch);
        for (int64_t p = from; p < to; p++) panel_rows(j, p, row0, rows, chunk, scratch, &last);
        store_held(&last);
        finish_some(j, &last, GROUP);
        row0 += rows;
    }
    amx_release();
}
#endif
