/* From blocks of GGUF files (ggml's ggml-common.h): rows of codes that carry their scales
 * (kernels/grouped_rows.py), the layout of grouped.h, or numbers. What gpu/weights/gguf_reader.py
 * says in torch; all products are of two floats, as there, and none is fused with a sum. */
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>
#include "grouped_panel.h"

/* Numbers of the types, as gguf_reader.py gives them: those of ggml. */
enum {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39
};
#define TRAILER 8
#define STRIP 1024 /* columns unpacked at once, in the nearest cache; whole blocks of all types */

/* What a type's blocks hold. */
struct kind { int64_t numbers, bytes, group, mins, zero; };

static struct kind kind_of(int64_t kind) {
    switch (kind) {
    case Q4_0: return (struct kind){32, 18, 32, 0, 8};
    case Q4_1: return (struct kind){32, 20, 32, 1, 0};
    case Q5_0: return (struct kind){32, 22, 32, 0, 16};
    case Q5_1: return (struct kind){32, 24, 32, 1, 0};
    case Q8_0: return (struct kind){32, 34, 32, 0, 128};
    case Q2_K: return (struct kind){256, 84, 16, 1, 0};
    case Q3_K: return (struct kind){256, 110, 16, 0, 8};
    case IQ4_NL: return (struct kind){32, 18, 32, 0, 128};
    case IQ4_XS: return (struct kind){256, 136, 32, 0, 128};
    case MXFP4: return (struct kind){32, 17, 32, 0, 16};
    case Q4_K: return (struct kind){256, 144, 32, 1, 0};
    case Q5_K: return (struct kind){256, 176, 32, 1, 0};
    default: return (struct kind){256, 210, 16, 0, 32};
    }
}

/* A block's f16 at these bytes. */
INLINE float half_of(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    return from_half(half);
}

INLINE void put(uint8_t *floats, int64_t i, float x) { memcpy(floats + 4 * i, &x, 4); }

/* Four bits each: low halves of n bytes, then their high ones. */
INLINE void nibbles(const uint8_t *from, int n, uint8_t *codes) {
    for (int i = 0; i < n; i++) codes[i] = from[i] & 15;
    for (int i = 0; i < n; i++) codes[n + i] = from[i] >> 4;
}

/* Blocks of 32 codes with a scale, perhaps a min, and perhaps their fifth bits apart. */
INLINE void simple(const uint8_t *at, int64_t blocks, const int mins, const int fifth,
                   uint8_t *codes, uint8_t *scales, uint8_t *low) {
    const int head = 2 + 2 * mins, size = head + 4 * fifth + 16;
    for (int64_t b = 0; b < blocks; b++, at += size, codes += 32) {
        put(scales, b, half_of(at));
        if (mins) put(low, b, half_of(at + 2));
        nibbles(at + head + 4 * fifth, 16, codes);
        if (!fifth) continue;
        uint32_t bits;
        memcpy(&bits, at + head, 4);
        for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((bits >> i & 1) << 4);
    }
}

INLINE void q8(const uint8_t *at, int64_t blocks, uint8_t *codes, uint8_t *scales) {
    for (int64_t b = 0; b < blocks; b++, at += 34, codes += 32) {
        put(scales, b, half_of(at));
        for (int i = 0; i < 32; i++) codes[i] = at[2 + i] ^ 128;
    }
}

/* Of 256 codes: scales and mins of eight groups, six bits each in twelve bytes. */
INLINE void six_bits(const uint8_t *at, uint8_t *scales, uint8_t *low) {
    float scale = half_of(at), min = half_of(at + 2), wide[16];
    uint32_t s[3], six[4];
    memcpy(s, at + 4, 12);
    six[0] = s[0] & 0x3f3f3f3f;
    six[1] = (s[2] & 0x0f0f0f0f) | (s[0] >> 2 & 0x30303030);
    six[2] = s[1] & 0x3f3f3f3f;
    six[3] = (s[2] >> 4 & 0x0f0f0f0f) | (s[1] >> 2 & 0x30303030);
    uint8_t each[16];
    memcpy(each, six, 16);
    for (int g = 0; g < 8; g++) wide[g] = scale * (float)each[g];
    for (int g = 8; g < 16; g++) wide[g] = -(min * (float)each[g]);
    memcpy(scales, wide, 32);
    memcpy(low, wide + 8, 32);
}

INLINE void q45k(const uint8_t *at, int64_t blocks, const int fifth, uint8_t *codes,
                 uint8_t *scales, uint8_t *low) {
    const int size = 144 + 32 * fifth;
    for (int64_t b = 0; b < blocks; b++, at += size, codes += 256, scales += 32, low += 32) {
        six_bits(at, scales, low);
        for (int j = 0; j < 4; j++) nibbles(at + 16 + 32 * fifth + 32 * j, 32, codes + 64 * j);
        if (!fifth) continue;
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 32; i++)
                codes[32 * g + i] |= (uint8_t)((at[16 + i] >> g & 1) << 4);
    }
}

INLINE void q6k(const uint8_t *at, int64_t blocks, uint8_t *codes, uint8_t *scales) {
    for (int64_t b = 0; b < blocks; b++, at += 210, codes += 256, scales += 64) {
        float scale = half_of(at + 208);
        for (int g = 0; g < 16; g++) put(scales, g, scale * (float)(int8_t)at[192 + g]);
        for (int h = 0; h < 2; h++) {
            nibbles(at + 64 * h, 64, codes + 128 * h);
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 32; i++)
                    codes[128 * h + 32 * j + i] |=
                        (uint8_t)((at[128 + 32 * h + i] >> 2 * j & 3) << 4);
        }
    }
}

/* Two bits each: of 32 bytes their lowest, then the next; 128 codes. */
INLINE void pairs_of_bits(const uint8_t *from, uint8_t *codes) {
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++) codes[32 * j + i] = from[i] >> 2 * j & 3;
}

INLINE void q2k(const uint8_t *at, int64_t blocks, uint8_t *codes, uint8_t *scales, uint8_t *low) {
    for (int64_t b = 0; b < blocks; b++, at += 84, codes += 256, scales += 64, low += 64) {
        float scale = half_of(at + 80), min = half_of(at + 82);
        for (int g = 0; g < 16; g++) put(scales, g, scale * (float)(at[g] & 15));
        for (int g = 0; g < 16; g++) put(low, g, -(min * (float)(at[g] >> 4)));
        for (int h = 0; h < 2; h++) pairs_of_bits(at + 16 + 32 * h, codes + 128 * h);
    }
}

INLINE void q3k(const uint8_t *at, int64_t blocks, uint8_t *codes, uint8_t *scales) {
    for (int64_t b = 0; b < blocks; b++, at += 110, codes += 256, scales += 64) {
        float scale = half_of(at + 108);
        for (int g = 0; g < 16; g++) {
            int lower = at[96 + g % 8] >> g / 8 * 4 & 15, upper = at[104 + g % 4] >> g / 4 * 2 & 3;
            put(scales, g, scale * (float)((lower | upper << 4) - 32));
        }
        for (int h = 0; h < 2; h++) pairs_of_bits(at + 32 + 32 * h, codes + 128 * h);
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 32; i++)
                codes[32 * g + i] = (uint8_t)(codes[32 * g + i] + 4 * (at[i] >> g & 1) + 4);
    }
}

/* What codes of four bits stand for: of IQ4 about 128, of MXFP4 about 16 and twice as large. */
static const uint8_t NL_CODES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197,
                                     217, 241};
static const uint8_t E2M1_CODES[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

/* 32 of them. */
INLINE void looked_up(const uint8_t *from, const uint8_t table[16], uint8_t *codes) {
    nibbles(from, 16, codes);
    for (int i = 0; i < 32; i++) codes[i] = table[codes[i]];
}

INLINE void iq4_nl(const uint8_t *at, int64_t blocks, uint8_t *codes, uint8_t *scales) {
    for (int64_t b = 0; b < blocks; b++, at += 18, codes += 32) {
        put(scales, b, half_of(at));
        looked_up(at + 2, NL_CODES, codes);
    }
}

INLINE void iq4_xs(const uint8_t *at, int64_t blocks, uint8_t *codes, uint8_t *scales) {
    for (int64_t b = 0; b < blocks; b++, at += 136, codes += 256, scales += 32) {
        float scale = half_of(at);
        for (int g = 0; g < 8; g++) {
            int lower = at[4 + g / 2] >> g % 2 * 4 & 15, upper = at[2 + g / 4] >> g % 4 * 2 & 3;
            put(scales, g, scale * (float)((lower | upper << 4) - 32));
            looked_up(at + 8 + 16 * g, NL_CODES, codes + 32 * g);
        }
    }
}

INLINE void mxfp4(const uint8_t *at, int64_t blocks, uint8_t *codes, uint8_t *scales) {
    for (int64_t b = 0; b < blocks; b++, at += 17, codes += 32) {
        uint32_t bits = *at < 2 ? (uint32_t)0x200000 << *at : (uint32_t)(*at - 1) << 23;
        memcpy(scales + 4 * b, &bits, 4); /* half of 2**(e - 127) */
        looked_up(at + 1, E2M1_CODES, codes);
    }
}

/* So many columns of a row: their codes, scales and mins (f32). */
static void unpack(int64_t kind, const uint8_t *at, int64_t columns, uint8_t *codes, uint8_t *scales,
                   uint8_t *low) {
    switch (kind) {
    case Q4_0: simple(at, columns / 32, 0, 0, codes, scales, low); break;
    case Q4_1: simple(at, columns / 32, 1, 0, codes, scales, low); break;
    case Q5_0: simple(at, columns / 32, 0, 1, codes, scales, low); break;
    case Q5_1: simple(at, columns / 32, 1, 1, codes, scales, low); break;
    case Q8_0: q8(at, columns / 32, codes, scales); break;
    case Q2_K: q2k(at, columns / 256, codes, scales, low); break;
    case Q3_K: q3k(at, columns / 256, codes, scales); break;
    case IQ4_NL: iq4_nl(at, columns / 32, codes, scales); break;
    case IQ4_XS: iq4_xs(at, columns / 256, codes, scales); break;
    case MXFP4: mxfp4(at, columns / 32, codes, scales); break;
    case Q4_K: q45k(at, columns / 256, 0, codes, scales, low); break;
    case Q5_K: q45k(at, columns / 256, 1, codes, scales, low); break;
    case Q6_K: q6k(at, columns / 256, codes, scales); break;
    }
}

/* count rows of this type, `from_stride` bytes apart, as rows of codes, `to_stride` bytes apart, each
 * with the same trailer. */
void gguf_rows(int kind, const uint8_t *from, int64_t from_stride, int64_t count, int64_t columns,
               const uint8_t *trailer, uint8_t *to, int64_t to_stride, int threads) {
    int64_t each = columns / kind_of(kind).group * 4;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < count; r++) {
        uint8_t *row = to + r * to_stride;
        unpack(kind, from + r * from_stride, columns, row, row + columns, row + columns + each);
        memcpy(row + to_stride - TRAILER, trailer, TRAILER);
    }
}

/* As torch rounds them: what is no number stays none. */
INLINE bf16 rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : narrow(x);
}

/* The numbers of a group. */
INLINE void group_numbers(const uint8_t *codes, int n, float zero, float scale, float min,
                          float *to) {
    for (int i = 0; i < n; i++) to[i] = ((float)codes[i] - zero) * scale + min;
}

/* count rows of this type as numbers: to [count, columns], f32 if `floats`, else bf16. */
void gguf_numbers(int kind, const uint8_t *from, int64_t from_stride, int64_t count,
                  int64_t columns, void *to, int floats, int threads) {
    const struct kind own = kind_of(kind);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < count; r++)
        for (int64_t k = 0; k < columns; k += STRIP) {
            int64_t size = columns - k < STRIP ? columns - k : STRIP;
            uint8_t codes[STRIP];
            float scales[STRIP / 16], low[STRIP / 16], numbers[STRIP];
            unpack(kind, from + r * from_stride + k / own.numbers * own.bytes, size, codes,
                   (uint8_t *)scales, (uint8_t *)low);
            for (int64_t g = 0; g < size / own.group; g++)
                if (own.group == 16)
                    group_numbers(codes + 16 * g, 16, (float)own.zero, scales[g],
                                  own.mins ? low[g] : -0.0f, numbers + 16 * g);
                else
                    group_numbers(codes + 32 * g, 32, (float)own.zero, scales[g],
                                  own.mins ? low[g] : -0.0f, numbers + 32 * g);
            if (floats)
                memcpy((float *)to + r * columns + k, numbers, 4 * size);
            else
                for (int64_t i = 0; i < size; i++)
                    ((bf16 *)to)[r * columns + k + i] = rounded(numbers[i]);
        }
}

/* Rows of a weight that lie in a file; `heads` rows (or 0) belong to a head whose first and second
 * half lie there by turns. Filled by grouped_native.py: seven 64-bit words. */
struct blocks { int64_t fd, kind, start, stride, used, count, heads; };

/* Where row n of the parts, one behind the other, lies: its part, and which row of it. */
INLINE const struct blocks *row_in(const struct blocks *parts, int64_t n, int64_t *row) {
    for (; n >= parts->count; parts++) n -= parts->count;
    int64_t h = parts->heads, i = h ? n % h : 0;
    *row = h ? n - i + (i < h / 2 ? 2 * i : 2 * (i - h / 2) + 1) : n;
    return parts;
}

/* Reads these bytes of a file: 0, or an error's number; -1 where it ends early. */
static int64_t read_whole(int64_t fd, uint8_t *to, int64_t bytes, int64_t at) {
    while (bytes > 0) {
        ssize_t got = pread((int)fd, to, (size_t)bytes, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? errno : -1;
        to += got, at += got, bytes -= got;
    }
    return 0;
}

/* Reads the rows of a panel: from[n] and kinds[n] for each, 0 where there is none. */
static int64_t read_panel(const struct grouped *w, const struct blocks *parts, int64_t half,
                          int64_t panel, uint8_t *buffer, const uint8_t *from[OUTS],
                          int64_t kinds[OUTS], int64_t *failed) {
    const struct blocks *own[OUTS];
    int64_t rows[OUTS], low = INT64_MAX, high = -1, together = 1;
    for (int n = 0; n < OUTS; n++) {
        int64_t row = row_of(w, panel * OUTS + n, half);
        own[n] = row < 0 ? 0 : row_in(parts, row, &rows[n]);
        if (!own[n]) continue;
        together &= own[n] == own[0];
        if (rows[n] < low) low = rows[n];
        if (rows[n] > high) high = rows[n];
    }
    together &= high - low < 2 * OUTS;
    for (int n = 0; n < OUTS; n++) {
        from[n] = 0;
        if (!own[n]) continue;
        int64_t stride = own[n]->stride, first = together ? low : rows[n];
        int64_t count = together ? high - low + 1 : 1, place = together ? 0 : n;
        kinds[n] = own[n]->kind;
        from[n] = buffer + (together ? rows[n] - low : n) * stride;
        if (together && n) continue;
        int64_t fault = read_whole(own[n]->fd, buffer + place * stride,
                                   (count - 1) * stride + own[n]->used,
                                   own[n]->start + first * stride);
        if (fault) {
            *failed = own[n] - parts;
            return fault;
        }
    }
    return 0;
}

/* Codes of a panel; its scales and mins, f32, to `floats` [OUTS][groups * (1 + mins)]. */
static void pack_blocks(const struct grouped *w, const uint8_t *from[OUTS],
                        const int64_t kinds[OUTS], int64_t panel, float *floats) {
    int64_t groups = groups_of(w), each = groups * (1 + w->mins);
    struct place at = place_of(w, panel);
    uint8_t codes[OUTS][STRIP];
    for (int n = 0; n < OUTS; n++)
        if (!from[n]) {
            memset(codes[n], 0, STRIP);
            memset(floats + n * each, 0, 4 * each);
        }
    for (int64_t k = 0; k < w->ins; k += STRIP) {
        int64_t size = w->ins - k < STRIP ? w->ins - k : STRIP;
        for (int n = 0; n < OUTS; n++) {
            if (!from[n]) continue;
            struct kind own = kind_of(kinds[n]);
            float *scales = floats + n * each + k / own.group;
            unpack(kinds[n], from[n] + k / own.numbers * own.bytes, size, codes[n],
                   (uint8_t *)scales, (uint8_t *)(scales + groups));
        }
        const uint8_t *rows[OUTS];
        for (int n = 0; n < OUTS; n++) rows[n] = codes[n];
        for (int64_t c = 0; c < size; c += COLUMNS, at.codes += at.codes_step)
            pack_block(rows, c, w->bits, at.codes);
    }
}

/* Fills the codes, scales and factor of w from files. parts: the rows, one part behind the other;
 * widest: bytes of their longest row; floats: f32[panels * OUTS, groups * (1 + mins)], for the
 * scales meanwhile; fault: what went wrong, 0 for nothing, see `read_whole` (ENOMEM: no memory),
 * and the part. */
void gguf_pack(struct grouped *w, const struct blocks *parts, int64_t widest, int64_t half,
               float *floats, int64_t fault[2], int threads) {
    int64_t panels = panels_of(w), each = groups_of(w) * (1 + w->mins);
    uint32_t top = 0;
    fault[0] = fault[1] = 0;
#pragma omp parallel num_threads(threads) reduction(max : top)
    {
        uint8_t *buffer = malloc((size_t)(2 * OUTS * widest));
#pragma omp for schedule(dynamic, 8)
        for (int64_t p = 0; p < panels; p++) {
            const uint8_t *from[OUTS];
            int64_t kinds[OUTS], part = 0, now, seen;
#pragma omp atomic read
            seen = fault[0];
            if (seen) continue;
            now = buffer ? read_panel(w, parts, half, p, buffer, from, kinds, &part) : ENOMEM;
            if (now) {
#pragma omp critical
                fault[0] = now, fault[1] = part;
                continue;
            }
            pack_blocks(w, from, kinds, p, floats + p * OUTS * each);
            uint32_t own = largest_of(floats + p * OUTS * each, OUTS * each);
            if (own > top) top = own;
        }
        free(buffer);
    }
    if (fault[0]) return;
    w->factor = factor_of(top);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < panels; p++) {
        const uint8_t *from[OUTS];
        for (int n = 0; n < OUTS; n++) from[n] = (uint8_t *)(floats + (p * OUTS + n) * each);
        pack_scales(w, from, p);
    }
}
