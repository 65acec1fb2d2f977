/* Pages to and from host slots, with the CRC-32 of each (zlib's). */
#include "common.h"
#include <stddef.h>

/* The polynomial, bits reversed. */
#define POLYNOMIAL 0xedb88320u

static uint32_t tables[8][256];
static int made;

/* tables[k][b]: what byte b gives, k bytes before the end of eight. Whoever makes them at the same
 * time writes the same. */
static void make_tables(void) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int i = 0; i < 8; i++) crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
        tables[0][b] = crc;
    }
    for (uint32_t b = 0; b < 256; b++)
        for (int k = 1; k < 8; k++)
            tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 255];
    __atomic_store_n(&made, 1, __ATOMIC_RELEASE);
}

/* Eight bytes at a time; crc without the inversions at begin and end. */
static uint32_t plain_crc(uint32_t crc, const uint8_t *at, int64_t count) {
    for (; count >= 8; at += 8, count -= 8) {
        uint32_t low, high;
        memcpy(&low, at, 4);
        memcpy(&high, at + 4, 4);
        low ^= crc;
        crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255]
            ^ tables[4][low >> 24] ^ tables[3][high & 255] ^ tables[2][high >> 8 & 255]
            ^ tables[1][high >> 16 & 255] ^ tables[0][high >> 24];
    }
    for (; count > 0; at++, count--) crc = crc >> 8 ^ tables[0][(crc ^ *at) & 255];
    return crc;
}

#if defined(__PCLMUL__) && defined(__SSE4_1__)
/* x times a power of the polynomial's variable, plus what lies there: `by` has the powers for its
 * low and its high half. */
INLINE __m128i folded(__m128i x, __m128i by, __m128i there) {
    __m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

INLINE __m128i line(const uint8_t *at, int i) {
    return _mm_loadu_si128((const __m128i *)at + i);
}

/* Carry-less products fold 64 bytes at a time into one another (Gopal et al., "Fast CRC computation
 * for generic polynomials using PCLMULQDQ", Intel 2009; the constants are those of its bit-reversed
 * form for this polynomial). count: of at least 64 bytes, whole ones of 16. */
static uint32_t folded_crc(uint32_t crc, const uint8_t *at, int64_t count) {
    const __m128i by64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by8 = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i whole = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i words = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i a = _mm_xor_si128(line(at, 0), _mm_cvtsi32_si128((int)crc));
    __m128i b = line(at, 1), c = line(at, 2), d = line(at, 3);
    for (at += 64, count -= 64; count >= 64; at += 64, count -= 64) {
        a = folded(a, by64, line(at, 0));
        b = folded(b, by64, line(at, 1));
        c = folded(c, by64, line(at, 2));
        d = folded(d, by64, line(at, 3));
    }
    a = folded(folded(folded(a, by16, b), by16, c), by16, d);
    for (; count >= 16; at += 16, count -= 16) a = folded(a, by16, line(at, 0));
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by16, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4),
                      _mm_clmulepi64_si128(_mm_and_si128(a, words), by8, 0x00));
    /* Barrett's reduction of what is left. */
    b = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, words), whole, 0x10), words);
    a = _mm_xor_si128(a, _mm_clmulepi64_si128(b, whole, 0x00));
    return (uint32_t)_mm_extract_epi32(a, 1);
}
#endif

static uint32_t crc_on(uint32_t crc, const uint8_t *at, int64_t count) {
#if defined(__PCLMUL__) && defined(__SSE4_1__)
    if (count >= 64) {
        int64_t lines = count & ~(int64_t)15;
        crc = folded_crc(crc, at, lines);
        at += lines;
        count -= lines;
    }
#endif
    return plain_crc(crc, at, count);
}

/* zlib.crc32 of `count` bytes. */
void crc_of(const uint8_t *at, int64_t count, uint32_t *sum) {
    if (!__atomic_load_n(&made, __ATOMIC_ACQUIRE)) make_tables();
    *sum = ~crc_on(~0u, at, count);
}

/* Bytes of one tensor's rows. */
struct piece { uint8_t *rows; int64_t apart, bytes; };

/* rows: i4[count, 3], (unit, number, slot). Unit u has the pieces begins[u] to begins[u + 1], one
 * after the other in a slot of `width` bytes; what is left of it is 0. Out: the pieces of row
 * `number` go into the slot, whose sum is set. Back: the other way, where the sum is right, and
 * otherwise nothing but lost[i] = 1. */
void page_copies(const int32_t *rows, int64_t count, const struct piece *pieces,
                 const int64_t *begins, uint8_t *slots, int64_t width, uint32_t *sums,
                 uint8_t *lost, int back, int threads) {
    if (!__atomic_load_n(&made, __ATOMIC_ACQUIRE)) make_tables();
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (count * width > 65536)
    for (int64_t i = 0; i < count; i++) {
        const int32_t *row = rows + 3 * i;
        uint8_t *slot = slots + row[2] * width, *at = slot;
        uint32_t crc = ~0u;
        if (back && (lost[i] = ~crc_on(crc, slot, width) != sums[row[2]])) continue;
        for (int64_t p = begins[row[0]]; p < begins[row[0] + 1]; p++) {
            const struct piece *own = pieces + p;
            uint8_t *page = own->rows + row[1] * own->apart;
            if (back) memcpy(page, at, own->bytes);
            else {
                memcpy(at, page, own->bytes);
                crc = crc_on(crc, at, own->bytes); /* while it is in the cache */
            }
            at += own->bytes;
        }
        if (!back) {
            memset(at, 0, slot + width - at);
            sums[row[2]] = ~crc_on(crc, at, slot + width - at);
        }
    }
}
