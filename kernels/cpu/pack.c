/* Packing weights: see packed.h. */
#include "packed.h"

#ifdef PRODUCTS

/* Row of the weight that panel column n holds; -1: none. half: 0, or the number of rows of each of
 * two stacked matrices, whose rows then alternate by 16. */
INLINE int64_t source_row(int64_t n, int64_t outs, int64_t half) {
    if (n >= outs) return -1;
    return half ? (n & 16 ? half : 0) + n / 32 * 16 + n % 16 : n;
}

/* How often each high byte occurs among some of the weights: every `stride`-th run of 64. */
void linear_histogram(const bf16 *w, int64_t count, int64_t stride, int64_t *histogram) {
    uint32_t parts[4][256] = {{0}};
    for (int64_t at = 0; at < count; at += 64 * stride)
        for (int i = 0; i < 64 && at + i < count; i++) parts[i & 3][w[at + i] >> 8]++;
    for (int b = 0; b < 256; b++)
        histogram[b] = (int64_t)parts[0][b] + parts[1][b] + parts[2][b] + parts[3][b];
}

#ifdef TILES
/* 16 columns x 32 k to a tile: a transpose of 16 x 16 pairs. */
INLINE void load_tile(const bf16 *w, int64_t outs, int64_t ins, int64_t half, int64_t n, int64_t k,
                      __m512i t[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) {
        int64_t row = source_row(n + i, outs, half);
        a[i] = row < 0 ? _mm512_setzero_si512() : _mm512_loadu_si512(w + row * ins + k);
    }
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
        }
    for (int j = 0; j < 4; j++) {
        __m512i p = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
        __m512i q = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        __m512i r = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        __m512i s = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        t[j] = _mm512_shuffle_i32x4(p, r, 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(p, r, 0xdd);
        t[4 + j] = _mm512_shuffle_i32x4(q, s, 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(q, s, 0xdd);
    }
}

/* Codes of 64 high bytes; codes: 256 bytes, NO_CODE where there is none. */
INLINE __m512i encode(const __m512i codes[4], __m512i high) {
    __m512i positive = _mm512_permutex2var_epi8(codes[0], high, codes[1]);
    __m512i negative = _mm512_permutex2var_epi8(codes[2], high, codes[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(high), positive, negative);
}

INLINE void load_codes(const uint8_t *codes, __m512i to[4]) {
    for (int i = 0; i < 4; i++) to[i] = _mm512_loadu_si512(codes + 64 * i);
}

/* counts[p]: the weights of panel p without a code. ins: a multiple of 32. */
void linear_count(const bf16 *w, int64_t outs, int64_t ins, int64_t half, const uint8_t *codes,
                  int64_t *counts, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < (outs + PANEL - 1) / PANEL; p++) {
        __m512i map[4];
        load_codes(codes, map);
        int64_t count = 0;
        for (int64_t n = p * PANEL; n < (p + 1) * PANEL; n++) {
            int64_t row = source_row(n, outs, half);
            for (int64_t k = 0; row >= 0 && k < ins; k += 32) {
                __m512i high = _mm512_srli_epi16(_mm512_loadu_si512(w + row * ins + k), 8);
                __mmask64 none = _mm512_cmpeq_epi8_mask(encode(map, high), _mm512_set1_epi8(NO_CODE));
                count += __builtin_popcountll(none & 0x5555555555555555);
            }
        }
        counts[p] = count;
    }
}

/* Lists the weights of two tile rows (pair: their low bytes, high bytes) that have no code, and
 * takes them out of both. at: place of the first row. */
static struct exception *list(struct exception *out, uint64_t none, __m512i *low, __m512i *codes,
                              __m512i high, uint32_t at) {
    uint8_t lows[64], highs[64];
    _mm512_storeu_si512(lows, *low);
    _mm512_storeu_si512(highs, high);
    *low = _mm512_maskz_mov_epi8(~none, *low);
    *codes = _mm512_mask_mov_epi8(*codes, none, _mm512_set1_epi8(NO_CODE - 1));
    for (; none; none &= none - 1) {
        int i = __builtin_ctzll(none);
        uint32_t place = at + i / 8 % 2 * 32 + i / 16 * 8 + i % 8; /* packus: by 128-bit lanes */
        *out++ = (struct exception){place, (bf16)(highs[i] << 8 | lows[i]), 0};
    }
    return out;
}

INLINE struct exception *encode_group(const __m512i rows[4], const __m512i map[4], uint8_t *to,
                                      struct exception *out, uint32_t at) {
    const __m512i byte = _mm512_set1_epi16(255);
    __m512i codes[2];
    for (int i = 0; i < 2; i++) {
        __m512i a = rows[2 * i], b = rows[2 * i + 1];
        __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
        __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
        codes[i] = encode(map, high);
        uint64_t none = _mm512_cmpeq_epi8_mask(codes[i], _mm512_set1_epi8(NO_CODE));
        if (none) out = list(out, none, &low, &codes[i], high, at + 64 * i);
        _mm512_storeu_si512(to + 64 + 64 * i, low);
    }
    _mm512_storeu_si512(to, _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4)));
    return out;
}

/* Packs w [outs, ins] into blocks; codes: as for `linear_count`, 0 for plain tiles; starts: where
 * each panel's exceptions go. */
void linear_pack(const bf16 *w, int64_t outs, int64_t ins, int64_t half, const uint8_t *codes,
                 const int64_t *starts, struct exception *exceptions, uint8_t *blocks, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < (outs + PANEL - 1) / PANEL; p++) {
        __m512i map[4], rows[16];
        if (codes) load_codes(codes, map);
        struct exception *out = codes ? exceptions + starts[p] : 0;
        uint8_t *to = blocks + p * (ins / STEP) * (codes ? CODED_BYTES : PLAIN_BYTES);
        for (int64_t k = 0; k < ins; k += STEP)
            for (int tile = 0; tile < 2; tile++) {
                load_tile(w, outs, ins, half, p * PANEL + 16 * tile, k, rows);
                uint32_t at = (uint32_t)(k / STEP * BLOCK + 512 * tile);
                for (int g = 0; g < 4; g++)
                    if (codes) {
                        out = encode_group(rows + 4 * g, map, to, out, at + 128 * g);
                        to += 192;
                    } else {
                        for (int i = 0; i < 4; i++, to += 64)
                            _mm512_storeu_si512(to, rows[4 * g + i]);
                    }
            }
    }
}

/* Groups of four tile rows; exceptions are the caller's. */
INLINE void decoded_groups(const struct packed *w, const uint8_t *from, int groups, bf16 *to) {
    for (int g = 0; g < groups; g++) {
        __m512i v[4];
        decode_group(from + 192 * g, code_table(w), v);
        for (int i = 0; i < 4; i++) _mm512_storeu_si512(to + 128 * g + 32 * i, v[i]);
    }
}
#else
/* Weights [outs, ins] with their rows in the order of the layout. */
struct source { const bf16 *w; int64_t outs, ins, half; };

/* The weight at a place of panel p; 0 beyond the end. */
INLINE bf16 weight_at(const struct source *s, int64_t p, uint32_t at) {
    int64_t row = source_row(p * PANEL + place_column(at), s->outs, s->half);
    return row < 0 ? 0 : s->w[row * s->ins + place_k(at)];
}

/* counts[p]: the weights of panel p without a code. ins: a multiple of 32. */
void linear_count(const bf16 *w, int64_t outs, int64_t ins, int64_t half, const uint8_t *codes,
                  int64_t *counts, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < (outs + PANEL - 1) / PANEL; p++) {
        int64_t count = 0;
        for (int64_t n = p * PANEL; n < (p + 1) * PANEL; n++) {
            int64_t row = source_row(n, outs, half);
            for (int64_t k = 0; row >= 0 && k < ins; k++)
                count += codes[w[row * ins + k] >> 8] == NO_CODE;
        }
        counts[p] = count;
    }
}

/* Two tile rows, at a place: their codes to the nibbles from bit `shift` on, their low bytes. */
static struct exception *encode_rows(const struct source *s, int64_t p, const uint8_t *codes,
                                     uint32_t at, int shift, uint8_t *nibbles, uint8_t *low,
                                     struct exception *out) {
    uint8_t code[64];
    for (int i = 0; i < 64; i++) {
        bf16 x = weight_at(s, p, at + place_of_byte(i));
        code[place_of_byte(i)] = codes[x >> 8];
        low[i] = codes[x >> 8] == NO_CODE ? 0 : (uint8_t)x;
    }
    for (int i = 0; i < 64; i++) {
        int c = code[place_of_byte(i)];
        nibbles[i] |= (uint8_t)((c == NO_CODE ? NO_CODE - 1 : c) << shift);
    }
    for (int i = 0; i < 64; i++) /* in the order of their places */
        if (code[i] == NO_CODE) *out++ = (struct exception){at + i, weight_at(s, p, at + i), 0};
    return out;
}

/* Packs w [outs, ins] into blocks; codes: as for `linear_count`, 0 for plain tiles; starts: where
 * each panel's exceptions go. */
void linear_pack(const bf16 *w, int64_t outs, int64_t ins, int64_t half, const uint8_t *codes,
                 const int64_t *starts, struct exception *exceptions, uint8_t *blocks, int threads) {
    struct source s = {w, outs, ins, half};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < (outs + PANEL - 1) / PANEL; p++) {
        struct exception *out = codes ? exceptions + starts[p] : 0;
        uint8_t *to = blocks + p * (ins / STEP) * (codes ? CODED_BYTES : PLAIN_BYTES);
        for (uint32_t at = 0; at < ins * PANEL && !codes; at++, to += 2) {
            bf16 x = weight_at(&s, p, at);
            memcpy(to, &x, 2);
        }
        for (uint32_t at = 0; at < ins * PANEL && codes; at += 128, to += 192) {
            memset(to, 0, 64);
            out = encode_rows(&s, p, codes, at, 0, to, to + 64, out);
            out = encode_rows(&s, p, codes, at + 64, 4, to, to + 128, out);
        }
    }
}

/* Groups of four tile rows; exceptions are the caller's. */
INLINE void decoded_groups(const struct packed *w, const uint8_t *from, int groups, bf16 *to) {
    for (int g = 0; g < groups; g++, from += 192, to += 128)
        for (int i = 0; i < 128; i++) {
            int code = from[i % 64] >> i / 64 * 4 & 15;
            to[i / 64 * 64 + place_of_byte(i % 64)] = (bf16)(w->table[code] << 8 | from[64 + i]);
        }
}
#endif

/* The weight again: w [outs, ins]. */
void linear_unpack(const struct packed *w, int64_t half, bf16 *to) {
    for (int64_t p = 0; p < (w->outs + PANEL - 1) / PANEL; p++) {
        bf16 tiles[BLOCK] __attribute__((aligned(64)));
        const struct exception *e = w->coded ? w->exceptions + w->starts[p] : 0;
        const struct exception *end = w->coded ? w->exceptions + w->starts[p + 1] : 0;
        for (int64_t b = 0; b < w->ins / STEP; b++) {
            int64_t at = p * (w->ins / STEP) + b;
            if (w->coded) {
                decoded_groups(w, w->blocks + at * CODED_BYTES, 8, tiles);
                for (; e < end && e->at < (b + 1) * BLOCK; e++) tiles[e->at % BLOCK] = e->value;
            } else {
                memcpy(tiles, w->blocks + at * PLAIN_BYTES, PLAIN_BYTES);
            }
            for (uint32_t i = 0; i < BLOCK; i++) {
                int64_t row = source_row(p * PANEL + place_column(i), w->outs, half);
                if (row >= 0) to[row * w->ins + b * STEP + place_k(i)] = tiles[i];
            }
        }
    }
}

/* Rows of the weight: y [count, ins]. ids: below outs. */
void linear_rows(const struct packed *w, const int64_t *ids, int64_t count, bf16 *y, int threads) {
    int64_t blocks = w->ins / STEP;
#pragma omp parallel for schedule(static) num_threads(threads) if (count > 1)
    for (int64_t i = 0; i < count; i++) {
        int64_t p = ids[i] / PANEL, tile = ids[i] % PANEL / 16, column = ids[i] % 16;
        bf16 own[BLOCK / 2] __attribute__((aligned(64))), *to = y + i * w->ins;
        for (int64_t b = p * blocks; b < (p + 1) * blocks; b++, to += STEP) {
            const bf16 *from = own;
            if (w->coded)
                decoded_groups(w, w->blocks + b * CODED_BYTES + 192 * 4 * tile, 4, own);
            else
                from = (const bf16 *)(w->blocks + b * PLAIN_BYTES) + 512 * tile;
            for (int r = 0; r < 16; r++) memcpy(to + 2 * r, from + 32 * r + 2 * column, 4);
        }
        if (!w->coded) continue;
        for (int64_t e = w->starts[p]; e < w->starts[p + 1]; e++) {
            struct exception one = w->exceptions[e];
            if (place_column(one.at) == ids[i] % PANEL) y[i * w->ins + place_k(one.at)] = one.value;
        }
    }
}
#endif

#ifdef TILES
/* Whether this processor and kernel let us use tiles. */
int tiles_ready(void) { return tiles_permitted(); }
#else
int tiles_ready(void) { return 0; }
#endif

/* Whether tiles multiply faster than vectors used as anybody would: attention gains by them in any
 * case, GatedDeltaNet blocks where they are AMX's. */
int tiles_fast(void) {
#ifdef TILES_OF_VECTORS
    return 0;
#else
    return tiles_ready();
#endif
}

#ifdef PRODUCTS
/* Whether products with packed weights are ready: by tiles, or in vectors. */
int linear_ready(void) {
#ifdef TILES
    return tiles_permitted();
#else
    return 1;
#endif
}
#else
int linear_ready(void) { return 0; }
void linear_histogram(void) {}
void linear_count(void) {}
void linear_pack(void) {}
void linear_unpack(void) {}
void linear_rows(void) {}
#endif
