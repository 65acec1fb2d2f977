/* Products of many rows: blocked so that tiles are loaded from L1 and L2 alone.
 *
 * A block of rows is copied into tile order once (L2); a panel's weights are decoded for
 * K_BLOCK k at a time (L1) and used for all of these rows, 32 rows x 32 columns in four tiles. */
#include "job.h"

#ifdef __AMX_BF16__
#include "amx.h"

#ifndef K_STEPS
#define K_STEPS 8               /* blocks of 32 k decoded at a time */
#endif
#define X_BYTES (5 << 18)       /* of x in tile order: most of L2 */
#define MAX_ROWS 512
#define SUM_BYTES (MAX_ROWS * PANEL * 4)
#define PAIR (2 * TILE_BYTES)   /* two tiles of x: 32 rows x 32 k */

int64_t many_scratch(void) { return X_BYTES + SUM_BYTES; }

/* x rows to tiles: [k blocks][pairs of 16 rows][steps][2 tiles], rows beyond the end zero. */
static void arrange(const struct job *j, int64_t row0, int64_t rows, uint8_t *to) {
    int64_t ins = j->w->ins, pairs = (rows + 31) / 32, steps = ins / STEP;
    for (int64_t r = 0; r < pairs * 32; r++) {
        const bf16 *from = j->x + (row0 + r) * ins;
        uint8_t *tile = to + r % 32 * 64;
        for (int64_t s = 0; s < steps; s++) {
            int64_t first = s / K_STEPS * K_STEPS;
            int64_t width = steps - first < K_STEPS ? steps - first : K_STEPS;
            int64_t at = first * pairs + r / 32 * width + s - first;
            __m512i v = r < rows ? _mm512_loadu_si512(from + s * STEP) : _mm512_setzero_si512();
            _mm512_store_si512(tile + at * PAIR, v);
        }
    }
}

/* A k block of a panel to plain tiles; the exceptions still to come. */
static const struct exception *weights(const struct packed *w, int64_t panel, int64_t s0, int64_t s1,
                                       const struct exception *e, bf16 *to) {
    const uint8_t *from = w->blocks + (panel * (w->ins / STEP) + s0) * CODED_BYTES;
    __m512i table = code_table(w);
    for (int64_t s = s0; s < s1; s++, from += CODED_BYTES) {
        for (int i = 0; i < CODED_BYTES; i += 64)
            _mm_prefetch((const char *)from + K_STEPS * CODED_BYTES + i, _MM_HINT_T1);
        decode_block(from, table, to + (s - s0) * BLOCK);
    }
    const struct exception *end = w->exceptions + w->starts[panel + 1];
    for (; e < end && e->at < s1 * BLOCK; e++) to[e->at - s0 * BLOCK] = e->value;
    return e;
}

/* 32 rows x 32 columns over a k block; sums: four tiles. */
INLINE void pair_block(const uint8_t *x, const bf16 *b, int64_t steps, float *sums, int first) {
    if (first) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    } else {
        TILE_LOAD(0, sums, 64);
        TILE_LOAD(1, sums + 256, 64);
        TILE_LOAD(2, sums + 512, 64);
        TILE_LOAD(3, sums + 768, 64);
    }
    for (int64_t s = 0; s < steps; s++, x += PAIR, b += BLOCK) {
        TILE_LOAD(6, b, 64);
        TILE_LOAD(4, x, 64);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, b + 512, 64);
        TILE_DOT(1, 4, 7);
        TILE_LOAD(5, x + TILE_BYTES, 64);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
    }
    TILE_STORE(0, sums, 64);
    TILE_STORE(1, sums + 256, 64);
    TILE_STORE(2, sums + 512, 64);
    TILE_STORE(3, sums + 768, 64);
}

INLINE void finish_pair(const struct job *j, const float *sums, int64_t row, int64_t rows,
                        int64_t panel) {
    for (int64_t r = 0; r < rows; r++) {
        const float *at = sums + r / 16 * 512 + r % 16 * 16;
        finish_row(j, _mm512_load_ps(at), _mm512_load_ps(at + 256), row + r, panel);
    }
}

static void panel_rows(const struct job *j, int64_t panel, int64_t row0, int64_t rows,
                       const uint8_t *x, float *sums) {
    bf16 tiles[K_STEPS * BLOCK] __attribute__((aligned(64)));
    const struct packed *w = j->w;
    int64_t pairs = (rows + 31) / 32, steps = w->ins / STEP;
    const struct exception *e = w->coded ? w->exceptions + w->starts[panel] : 0;
    for (int64_t s0 = 0; s0 < steps; s0 += K_STEPS) {
        int64_t s1 = s0 + K_STEPS < steps ? s0 + K_STEPS : steps;
        const bf16 *b = (const bf16 *)(w->blocks + (panel * steps + s0) * PLAIN_BYTES);
        if (w->coded) {
            e = weights(w, panel, s0, s1, e, tiles);
            b = tiles;
        }
        for (int64_t i = 0; i < pairs; i++) {
            float *at = sums + i * 1024;
            pair_block(x + (s0 * pairs + i * (s1 - s0)) * PAIR, b, s1 - s0, at, s0 == 0);
            int64_t left = rows - 32 * i;
            if (s1 == steps) finish_pair(j, at, row0 + 32 * i, left < 32 ? left : 32, panel);
        }
    }
}

void product_many(const struct job *j, int64_t row0, int64_t row1, int64_t from, int64_t to,
                  uint8_t *scratch) {
    int64_t most = X_BYTES / (j->w->ins * 2) / 32 * 32;
    if (most > MAX_ROWS) most = MAX_ROWS;
    amx_full();
    while (row0 < row1) {
        int64_t parts = (row1 - row0 + most - 1) / most;
        int64_t rows = ((row1 - row0 + parts - 1) / parts + 31) / 32 * 32;
        if (rows > row1 - row0) rows = row1 - row0;
        arrange(j, row0, rows, scratch);
        for (int64_t p = from; p < to; p++)
            panel_rows(j, p, row0, rows, scratch, (float *)(scratch + X_BYTES));
        row0 += rows;
    }
    amx_release();
}
#endif
