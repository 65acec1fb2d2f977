/* Products of few rows: the weight is read once, as fast as memory gives it.
 *
 * One row too is faster through tiles than through vectors: decoding runs blocks ahead of the
 * products, so that neither waits for the other. */
#include "job.h"

#if defined(TILES) && !defined(TILES_OF_VECTORS)

#define AHEAD 6144 /* bytes of the weight fetched ahead */

INLINE void fetch(const uint8_t *at, int bytes) {
    for (int i = 0; i < bytes; i += 64) _mm_prefetch((const char *)at + AHEAD + i, _MM_HINT_T0);
}

/* Decodes blocks ahead of the tiles that read them: rows just stored are slow to load. */
struct stream {
    const struct exception *next, *end; /* of the panel being decoded */
    const uint8_t *from;
    int64_t block, blocks, panel;
};

#define RING 4

INLINE void decode_next(const struct packed *w, struct stream *s, __m512i table,
                        bf16 ring[RING][BLOCK], int slot) {
    fetch(s->from, CODED_BYTES);
    decode_block(s->from, table, ring[slot]);
    s->from += CODED_BYTES;
    uint32_t end = (uint32_t)(s->block + 1) * BLOCK;
    for (; s->next < s->end && s->next->at < end; s->next++)
        ring[slot][s->next->at % BLOCK] = s->next->value;
    if (++s->block == s->blocks) {
        s->block = 0;
        s->panel++;
        s->end = w->exceptions + w->starts[s->panel + 1];
    }
}

/* Tiles: 0, 1 sums of rows 0-15; 2, 3 of rows 16-31; 4, 5 x; 6, 7 weights. */
INLINE void tile_step(const struct job *j, const int two, const bf16 *b, int64_t k) {
    long stride = j->apart * 2;
    TILE_LOAD(6, b, 64);
    TILE_LOAD(4, j->x + k, stride);
    TILE_DOT(0, 4, 6);
    TILE_LOAD(7, b + 512, 64);
    TILE_DOT(1, 4, 7);
    if (two) {
        TILE_LOAD(5, j->x + 16 * j->apart + k, stride);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
    }
}

INLINE void finish_tiles(const struct job *j, const int two, int64_t p) {
    float sums[4][16][16] __attribute__((aligned(64)));
    TILE_STORE(0, sums[0], 64);
    TILE_STORE(1, sums[1], 64);
    if (two) {
        TILE_STORE(2, sums[2], 64);
        TILE_STORE(3, sums[3], 64);
    }
    for (int t = 0; t < j->rows; t++)
        finish_row(j, load_lanes(sums[t / 16 * 2][t % 16]),
                   load_lanes(sums[t / 16 * 2 + 1][t % 16]), t, p, 0);
}

INLINE void tiles(const struct job *j, const int two, const int coded, int64_t p0, int64_t p1) {
    const struct packed *w = j->w;
    bf16 ring[RING][BLOCK] __attribute__((aligned(64)));
    int64_t blocks = w->ins / STEP, left = (p1 - p0) * blocks, done = 0;
    const uint8_t *plain = w->blocks + p0 * blocks * PLAIN_BYTES;
    struct stream s = {0};
    __m512i table = _mm512_setzero_si512();
    if (coded) {
        s = (struct stream){w->exceptions + w->starts[p0], w->exceptions + w->starts[p0 + 1],
                            w->blocks + p0 * blocks * CODED_BYTES, 0, blocks, p0};
        table = code_table(w);
        for (int i = 0; i < RING - 1 && i < left; i++) decode_next(w, &s, table, ring, i);
    }
    for (int64_t p = p0; p < p1; p++) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (int64_t k = 0; k < w->ins; k += STEP, done++) {
            if (coded) {
                if (done + RING - 1 < left)
                    decode_next(w, &s, table, ring, (int)((done + RING - 1) % RING));
                tile_step(j, two, ring[done % RING], k);
            } else {
                fetch(plain, PLAIN_BYTES);
                tile_step(j, two, (const bf16 *)plain, k);
                plain += PLAIN_BYTES;
            }
        }
        finish_tiles(j, two, p);
    }
}

#define CASES(f, n) (j->w->coded ? f(j, n, 1, from, to) : f(j, n, 0, from, to))

void product_few(const struct job *j, int64_t from, int64_t to) {
    if (from >= to) return;
    uint8_t high = (uint8_t)(j->rows < 16 ? j->rows : 16), low = (uint8_t)(j->rows - high);
    uint8_t rest = low ? low : 1;
    tiles_shape((const uint8_t[8]){high, high, rest, rest, high, rest, 16, 16});
    if (low) CASES(tiles, 1);
    else CASES(tiles, 0);
    tiles_release();
}
#endif
