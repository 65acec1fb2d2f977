/* A weight in the order AMX and AVX512-BF16 read it, its high bytes coded in 4 bits.
 *
 * Panels of 32 columns (rows of the [N, K] weight; N is padded with zeros), in each panel blocks of
 * 32 k, in a block two tiles of 16 columns: 16 rows (pairs of k) x 16 columns x 2 bf16.
 *
 * The high byte of a bf16 (sign and 7 bits of exponent) takes few values in a trained weight, so a
 * block is stored without loss in 3/4 of its bytes: per group of 4 tile rows 64 bytes of codes, two
 * to a byte, then 128 low bytes. `table` gives the high byte of each code; the last code is high
 * byte 0. A weight whose high byte has no code is stored as zero and listed, exactly, as an
 * exception. (Entropy of bf16 exponents: DFloat11, arXiv 2504.11651; ZipNN, arXiv 2411.05239.)
 * Low and high bytes of two tile rows are interleaved as packus leaves them and unpack wants them.
 *
 * A weight of unusual values is kept in plain 16-bit tiles (`coded` = 0). */
#pragma once
#include "common.h"

#define PANEL 32
#define STEP 32
#define BLOCK (PANEL * STEP)     /* weights */
#define CODED_BYTES (BLOCK * 3 / 2)
#define PLAIN_BYTES (BLOCK * 2)
#define NO_CODE 16

struct exception {
    uint32_t at; /* place in the panel's plain order: block * BLOCK + tile * 512 + row * 32 + ... */
    bf16 value, unused;
};

/* Filled by kernels/linear.py: eight 64-bit words. */
struct packed {
    const uint8_t *blocks, *table;
    const int64_t *starts; /* [panels + 1]: each panel's exceptions */
    const struct exception *exceptions;
    int64_t outs, ins, coded;
    uint8_t *scratch; /* `linear_scratch` bytes for every thread */
};

/* The k and the column of the panel of a place. */
INLINE int place_k(uint32_t at) { return at / BLOCK * STEP + at % 512 / 32 * 2 + at % 2; }
INLINE int place_column(uint32_t at) { return at / 512 % 2 * 16 + at % 32 / 2; }

#if defined(TILES) || defined(FLOATS16_512)
INLINE __m512i code_table(const struct packed *w) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)w->table));
}

/* 128 weights: four tile rows. */
INLINE void decode_group(const uint8_t *from, __m512i table, __m512i to[4]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i codes = _mm512_loadu_si512(from);
    __m512i low0 = _mm512_loadu_si512(from + 64), low1 = _mm512_loadu_si512(from + 128);
    __m512i high0 = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, nibble));
    __m512i high1 = _mm512_shuffle_epi8(
        table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble));
    to[0] = _mm512_unpacklo_epi8(low0, high0);
    to[1] = _mm512_unpackhi_epi8(low0, high0);
    to[2] = _mm512_unpacklo_epi8(low1, high1);
    to[3] = _mm512_unpackhi_epi8(low1, high1);
}

/* One block to plain tiles; exceptions are the caller's. */
INLINE void decode_block(const uint8_t *from, __m512i table, bf16 *to) {
    for (int g = 0; g < 8; g++) {
        __m512i v[4];
        decode_group(from + 192 * g, table, v);
        for (int i = 0; i < 4; i++) _mm512_store_si512(to + 128 * g + 32 * i, v[i]);
    }
}

/* Blocks [first, first + count) of a panel in plain tiles, where they lie or decoded in `to`; `next`:
 * the panel's exceptions still to come. */
INLINE const bf16 *plain_run(const struct packed *w, int64_t panel, int64_t first, int64_t count,
                             const struct exception **next, bf16 *to) {
    int64_t at = panel * (w->ins / STEP) + first;
    if (!w->coded) return (const bf16 *)w->blocks + at * BLOCK;
    const struct exception *end = w->exceptions + w->starts[panel + 1];
    __m512i table = code_table(w);
    for (int64_t b = 0; b < count; b++)
        decode_block(w->blocks + (at + b) * CODED_BYTES, table, to + b * BLOCK);
    for (; *next < end && (*next)->at < (first + count) * BLOCK; (*next)++)
        to[(int64_t)(*next)->at - first * BLOCK] = (*next)->value;
    return to;
}
#endif

#ifndef TILES
/* The weight of two tile rows that byte i of their bytes is of: packus goes by 128-bit lanes. */
INLINE int place_of_byte(int i) { return i / 8 % 2 * 32 + i / 16 * 8 + i % 8; }
#endif
