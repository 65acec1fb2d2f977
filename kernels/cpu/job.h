/* A product with a packed weight, and what is done with each row of 32 sums. */
#pragma once
#include "packed.h"

enum { OUT_BF16, OUT_FLOAT, OUT_SILU };

struct job {
    const struct packed *w;
    const bf16 *x, *bias, *add; /* [rows, ins]; [outs] or 0; [rows, outs] or 0 */
    void *y;                    /* [rows, outs]; OUT_SILU: [rows, outs / 2], of gate and up columns
                                   that alternate by 16 */
    int64_t rows;
    int kind;
    int stream; /* not OUT_FLOAT: write whole lines past the caches */
};

#ifdef TILES
INLINE __m512 wide16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/* g * sigmoid(g), 1e-4 off: far below what rounding to bf16 takes. */
INLINE __m512 silu16(__m512 g) {
    __m512 e = exp2_16(_mm512_mul_ps(g, _mm512_set1_ps(-1.44269504f)));
    return _mm512_mul_ps(g, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), e)));
}

/* Bias, residual and rounding of one row of a panel's sums, and the store. half: with OUT_SILU and
 * `stream`, where the half of a line that an even panel gives waits for that of the next. */
INLINE void finish_row(const struct job *j, __m512 a, __m512 b, int64_t row, int64_t panel,
                       __m256i *half) {
    int64_t n = panel * PANEL, outs = j->w->outs, left = outs - n;
    __mmask32 mask = left >= PANEL ? 0xffffffff : (1u << left) - 1;
    if (j->bias) {
        __m512i v = _mm512_maskz_loadu_epi16(mask, j->bias + n);
        a = _mm512_add_ps(a, wide16(_mm512_castsi512_si256(v)));
        b = _mm512_add_ps(b, wide16(_mm512_extracti64x4_epi64(v, 1)));
    }
    if (j->kind == OUT_SILU) {
        __m256i out = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(silu16(a), b));
        bf16 *y = (bf16 *)j->y + row * (outs / 2) + n / 2;
        if (!j->stream) _mm256_storeu_si256((__m256i *)y, out);
        else if (panel % 2 == 0) _mm256_store_si256(half, out);
        else
            _mm512_stream_si512((__m512i *)(y - 16), _mm512_inserti64x4(
                _mm512_castsi256_si512(_mm256_load_si256(half)), out, 1));
        return;
    }
    if (j->add) {
        __m512i v = _mm512_maskz_loadu_epi16(mask, j->add + row * outs + n);
        a = _mm512_add_ps(a, wide16(_mm512_castsi512_si256(v)));
        b = _mm512_add_ps(b, wide16(_mm512_extracti64x4_epi64(v, 1)));
    }
    if (j->kind == OUT_FLOAT) {
        float *y = (float *)j->y + row * outs + n;
        _mm512_mask_storeu_ps(y, (__mmask16)mask, a);
        _mm512_mask_storeu_ps(y + 16, (__mmask16)(mask >> 16), b);
        return;
    }
    __m512i out = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    bf16 *y = (bf16 *)j->y + row * outs + n;
    if (j->stream) _mm512_stream_si512((__m512i *)y, out);
    else _mm512_mask_storeu_epi16(y, mask, out);
}

/* Panels [from, to) for at most MAX_FEW rows. */
#define MAX_FEW 32
void product_few(const struct job *j, int64_t from, int64_t to);

/* Many rows go in blocks of `many_rows`. A block is arranged in a thread's scratch once, and then
 * multiplied by panels [from, to), `from` even, as often as there are any. */
int64_t many_scratch(void);
int64_t many_rows(const struct job *j);
void many_arrange(const struct job *j, int64_t row0, int64_t rows, uint8_t *scratch);
void product_many(const struct job *j, int64_t row0, int64_t rows, int64_t from, int64_t to,
                  uint8_t *scratch);
#endif
