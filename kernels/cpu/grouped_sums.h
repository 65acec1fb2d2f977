/* Products of codes with quantised inputs: TOKENS tokens by PANELS panels at most, in registers. Sums of
 * parts of the input are integers, added up in f32 one part after the other. */
#pragma once
#include "grouped_input.h"

#define AHEAD 8192 /* bytes of the weight fetched ahead: 3 to 6 % over 4096 at one row */

/* AMD's processors read codes of one token faster without: of 8 bits, the largest, by a third. Of
 * several they gain up to a third where what is fetched waits in L2 instead of L1. */
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) \
    || defined(__znver5__)
#define FETCHES(bits, nt) ((bits) < 8 || (nt) > 1)
#define NEARNESS 2
#else
#define FETCHES(bits, nt) 1
#define NEARNESS 3
#endif

INLINE float as_float(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* What is under way of nt tokens by np panels: of a part, of a group, and of all. */
struct sums {
    ints part[TOKENS][PANELS];
    floats group[TOKENS][PANELS], all[TOKENS][PANELS];
};

INLINE void begin_part(struct sums *s, const int np, const int nt, const int32_t *starts,
                       int64_t mins) {
#pragma GCC unroll 4
    for (int t = 0; t < nt; t++)
#pragma GCC unroll 2
        for (int p = 0; p < np; p++) s->part[t][p] = all_ints(mins ? 0 : starts[t]);
}

/* scales: of the inputs; again: another part of the group is in its sums already. */
INLINE void end_part(struct sums *s, const int np, const int nt, const float *scales, int again) {
#pragma GCC unroll 4
    for (int t = 0; t < nt; t++)
#pragma GCC unroll 2
        for (int p = 0; p < np; p++) {
            floats sum = to_floats(s->part[t][p]);
            s->group[t][p] = again ? add_product(s->group[t][p], sum, scales[t])
                                   : scaled(sum, scales[t]);
        }
}

/* from: the scales of this group; starts: what its mins are times. */
INLINE void end_group(struct sums *s, const int bits, const int np, const int nt,
                      const struct grouped *w, const uint8_t *from, const int32_t *starts) {
    const int64_t bytes = scale_bytes(w);
#pragma GCC unroll 2
    for (int p = 0; p < np; p++, from += bytes) {
        /* Codes of 8 bits may be opened ones. */
        const int powers = bits == FP4 || (bits == 8 && w->fp4);
        floats by = powers ? load_powers(from) : w->group ? load_halves(from) : load_floats(from);
#pragma GCC unroll 4
        for (int t = 0; t < nt; t++)
            s->all[t][p] = add_products(s->all[t][p], s->group[t][p], by);
        if (!w->mins) continue;
        floats low = w->group ? load_halves(from + 2 * OUTS) : load_floats(from + 4 * OUTS);
        if (SHIFT(bits)) low = add_product(low, by, SHIFT(bits));
#pragma GCC unroll 4
        for (int t = 0; t < nt; t++)
            s->all[t][p] = add_product(s->all[t][p], low, as_float(starts[t]));
    }
}

/* Fetches an eighth of the lines of a block (of np panels), `ahead` bytes behind it: one or two at a
 * time between products, since many at once would hold up the loads behind them. */
INLINE void fetch_share(const uint8_t *block, const int lines, const int share, int64_t ahead) {
    for (int l = lines * share / 8; l < lines * (share + 1) / 8; l++)
        __builtin_prefetch(block + ahead + l * LINE, 0, NEARNESS);
}

/* 16 columns. ahead: see `fetch_share`; 0: what is read is near. */
INLINE void multiply_half(struct sums *s, const int bits, const int np, const int nt,
                          const uint8_t *block, const int half, const int32_t *fours,
                          int64_t ahead) {
    ints codes[PANELS][4];
#pragma GCC unroll 2
    for (int p = 0; p < np; p++) load_codes(bits, block + p * WIDTH(bits) * LINE, half, codes[p]);
#ifdef HALVES
    if (ahead)
        for (int j = 0; j < 4; j++) fetch_share(block, np * WIDTH(bits), 4 * half + j, ahead);
#pragma GCC unroll 4
    for (int t = 0; t < nt; t++)
        for (int p = 0; p < np; p++)
            s->part[t][p] = dot_half(bits, s->part[t][p], codes[p], fours + t, nt);
#else
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        if (ahead) fetch_share(block, np * WIDTH(bits), 4 * half + j, ahead);
#pragma GCC unroll 4
        for (int t = 0; t < nt; t++)
#pragma GCC unroll 2
            for (int p = 0; p < np; p++)
                s->part[t][p] = dot(bits, s->part[t][p], codes[p][j], fours[j * nt + t]);
    }
#endif
}

#define QUARTERS 4 /* times TOKENS tokens: while so many are multiplied the next panels are fetched */

/* What is fetched meanwhile: `ahead` bytes behind each block, see `fetch_share`, if any; of each step
 * of `next`, if any, so many lines. */
struct fetch {
    int64_t ahead;
    const uint8_t *next;
    int64_t step, lines;
};

/* Where a product is: in the input, in its scales and starts, in the weight's scales, and how much
 * is left of a part, in halves of a block, and of a group, in parts. */
struct cursor {
    const int32_t *fours, *starts;
    const float *scales;
    const uint8_t *from;
    int64_t left, more;
};

/* A block of np panels. */
INLINE struct cursor multiply_block(struct sums *s, const int bits, const int np, const int nt,
                                    const struct grouped *w, const uint8_t *block, int64_t step,
                                    struct cursor c, int64_t ahead) {
    const int64_t halves = columns_shared(w) / 16, parts = parts_each(w), mins = w->mins;
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, c.fours += 4 * nt) {
        multiply_half(s, bits, np, nt, block, half, c.fours, ahead);
        if (--c.left) continue;
        c.left = halves;
        if (c.more == parts) end_part(s, np, nt, c.scales, 0);
        else end_part(s, np, nt, c.scales, 1);
        c.scales += nt;
        if (!--c.more) {
            end_group(s, bits, np, nt, w, c.from, c.starts);
            c.from += step, c.starts += nt, c.more = parts;
        } else if (!mins) c.starts += nt;
        begin_part(s, np, nt, c.starts, mins); /* behind the last: read, not used */
    }
    return c;
}

/* out[t][16 * np]: nt tokens by np panels, from `at` on. Of one token panels are multiplied one behind
 * the other, so that codes are read as they lie, which memory answers sooner. */
INLINE void multiply(const int bits, const int np, const int nt, const struct grouped *w,
                     struct place at, const struct tokens *x, struct fetch fetch, float *out) {
    const int apart = nt == 1 ? np : 1, beside = np / apart;
    const int64_t ahead = FETCHES(WIDTH(bits), nt) ? fetch.ahead : 0;
    struct cursor c = {x->fours, x->starts, x->scales, at.scales, columns_shared(w) / 16,
                       parts_each(w)};
    struct sums s[PANELS];
#pragma GCC unroll 2
    for (int i = 0; i < apart; i++) {
        begin_part(s + i, beside, nt, c.starts, w->mins);
#pragma GCC unroll 4
        for (int t = 0; t < nt; t++)
#pragma GCC unroll 2
            for (int p = 0; p < beside; p++) s[i].all[t][p] = no_floats();
    }
    for (int64_t k = 0; k < w->ins; k += COLUMNS, at.codes += at.codes_step) {
        if (fetch.next) {
            for (int64_t l = 0; l < fetch.lines; l++) __builtin_prefetch(fetch.next + l * LINE);
            fetch.next += fetch.step;
        }
        struct cursor next = c;
#pragma GCC unroll 2
        for (int i = 0; i < apart; i++) {
            next = c;
            next.from += i * scale_bytes(w);
            next = multiply_block(s + i, bits, beside, nt, w, at.codes + i * WIDTH(bits) * LINE,
                                  at.scales_step, next, ahead);
            next.from -= i * scale_bytes(w);
        }
        c = next;
    }
#pragma GCC unroll 4
    for (int t = 0; t < nt; t++)
#pragma GCC unroll 2
        for (int p = 0; p < np; p++)
            store_floats(out + (t * np + p) * OUTS, s[p / beside].all[t][p % beside]);
}

typedef void product(const struct grouped *w, struct place at, const struct tokens *x,
                     struct fetch fetch, float *out);

/* One function for each width of codes, number of panels and of tokens. */
#define PRODUCT(B, P, T) \
    static void product_##B##_##P##_##T(const struct grouped *w, struct place at, \
                                        const struct tokens *x, struct fetch fetch, \
                                        float *out) { \
        multiply(B, P, T, w, at, x, fetch, out); \
    }
#define NAME(B, P, T) product_##B##_##P##_##T
#if TOKENS == 4
#define EACH_TOKEN(DO, B, P) DO(B, P, 1) DO(B, P, 2) DO(B, P, 3) DO(B, P, 4)
#else
#define EACH_TOKEN(DO, B, P) DO(B, P, 1) DO(B, P, 2)
#endif
#if PANELS == 2
#define EACH_PRODUCT(DO, B) EACH_TOKEN(DO, B, 1) EACH_TOKEN(DO, B, 2)
#else
#define EACH_PRODUCT(DO, B) EACH_TOKEN(DO, B, 1)
#endif
EACH_PRODUCT(PRODUCT, 4)
EACH_PRODUCT(PRODUCT, 5)
EACH_PRODUCT(PRODUCT, 6)
EACH_PRODUCT(PRODUCT, 8)
EACH_PRODUCT(PRODUCT, FP4)

#define LISTED(B, P, T) [P - 1][T - 1] = NAME(B, P, T),
static product *const products[5][PANELS][TOKENS] = {
    {EACH_PRODUCT(LISTED, 4)}, {EACH_PRODUCT(LISTED, 5)},
    {EACH_PRODUCT(LISTED, 6)}, {EACH_PRODUCT(LISTED, 8)}, {EACH_PRODUCT(LISTED, FP4)}};

#ifndef WIDENS
#define OPENS(w, rows) 0
INLINE void open_panels(const struct grouped *w, int64_t panel, int64_t np, int64_t ahead,
                        uint8_t *to) {
    (void)w, (void)panel, (void)np, (void)ahead, (void)to;
}
#else
#define OPENS(w, rows) ((w)->bits < 8 && (rows) > 2 * TOKENS && (w)->ins <= OPEN_COLUMNS)
#define OPEN_COLUMNS 12288 /* two panels of as many are 384 KB */

/* The codes of np panels as bytes, block by block: of the first panel, of the second. */
INLINE void open_blocks(const int bits, const struct grouped *w, struct place at, int64_t np,
                        int64_t ahead, uint8_t *to) {
    for (int64_t k = 0; k < w->ins; k += COLUMNS, at.codes += at.codes_step)
        for (const uint8_t *block = at.codes; block < at.codes + np * WIDTH(bits) * LINE;
             block += WIDTH(bits) * LINE)
            for (int half = 0; half < 2; half++, to += 4 * LINE) {
                ints codes[4];
                load_codes(bits, block, half, codes);
                memcpy(to, codes, sizeof codes);
                if (!ahead) continue;
                for (int j = 0; j < 4; j++) fetch_share(block, WIDTH(bits), 4 * half + j, ahead);
            }
}

/* Panels of w as products of 8 bits read them, for many tokens: else their codes would be taken apart
 * for each TOKENS of them again. */
static void open_panels(const struct grouped *w, int64_t panel, int64_t np, int64_t ahead,
                        uint8_t *to) {
    struct place at = place_of(w, panel);
    if (w->fp4) open_blocks(FP4, w, at, np, ahead, to);
    else if (w->bits == 4) open_blocks(4, w, at, np, ahead, to);
    else if (w->bits == 5) open_blocks(5, w, at, np, ahead, to);
    else open_blocks(6, w, at, np, ahead, to);
}
#endif
