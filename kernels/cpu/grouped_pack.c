/* From rows that carry their scales (kernels/grouped_rows.py) to the layout of grouped.h, and single
 * rows of it as numbers. */
#include "grouped_panel.h"

INLINE float read_float(const uint8_t *at) {
    float x;
    memcpy(&x, at, 4);
    return x;
}

static void pack_panel(const struct grouped *w, const uint8_t *rows, int64_t stride, int64_t half,
                       int64_t panel, const uint8_t *zeros) {
    const uint8_t *from[OUTS];
    struct place at = place_of(w, panel);
    for (int n = 0; n < OUTS; n++) {
        int64_t row = row_of(w, panel * OUTS + n, half);
        from[n] = row < 0 ? zeros : rows + row * stride;
    }
    for (int64_t k = 0; k < w->ins; k += COLUMNS, at.codes += at.codes_step)
        pack_block(from, k, w->bits, at.codes);
    for (int n = 0; n < OUTS; n++) from[n] += w->ins;
    pack_scales(w, from, panel);
}

/* Fills the codes, scales and factor of w. rows: `stride` bytes apart; zeros: of a row. */
void grouped_pack(struct grouped *w, const uint8_t *rows, int64_t stride, int64_t half,
                  const uint8_t *zeros, int threads) {
    uint32_t top = 0;
    int64_t count = w->group && !w->fp4 ? w->outs : 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(max : top)
    for (int64_t n = 0; n < count; n++) {
        uint32_t own = largest_of(rows + n * stride + w->ins, groups_of(w) * (1 + w->mins));
        if (own > top) top = own;
    }
    if (count) w->factor = factor_of(top);
    else if (w->fp4) w->factor = 0.5; /* codes are twice the numbers */
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < panels_of(w); p++) pack_panel(w, rows, stride, half, p, zeros);
}

/* Columns [k, k + COLUMNS) of row n. */
static void block_numbers(const struct grouped *w, int64_t n, int64_t k, float *to) {
    struct place at = place_of(w, n / OUTS);
    const uint8_t *block = at.codes + k / COLUMNS * at.codes_step;
    int64_t each = columns_each(w), o = n % OUTS;
    for (int i = 0; i < COLUMNS; i++) {
        const uint8_t *own = at.scales + (k + i) / each * at.scales_step;
        float numbers[2] = {0, 0};
        for (int m = 0; m <= w->mins; m++)
            if (w->fp4) {
                numbers[0] = from_power(own[o]) * (float)w->factor;
            } else if (w->group) {
                uint16_t half;
                memcpy(&half, own + 2 * (m * OUTS + o), 2);
                numbers[m] = from_half(half) * (float)w->factor;
            } else {
                numbers[m] = read_float(own + 4 * (m * OUTS + o));
            }
        int code = code_at(block, reading_of(w), i / 4, (int)(4 * o + i % 4));
        to[i] = (float)(code - (int)w->zero) * numbers[0] + numbers[1];
    }
}

/* Rows of the weight: y [count, ins], f32 if `floats`, else bf16. ids: below outs. */
void grouped_rows(const struct grouped *w, const int64_t *ids, int64_t count, void *y, int floats,
                  int threads) {
#pragma omp parallel for num_threads(threads) if (count > 1)
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < w->ins; k += COLUMNS) {
            float numbers[COLUMNS];
            block_numbers(w, ids[i], k, numbers);
            if (floats) memcpy((float *)y + i * w->ins + k, numbers, sizeof numbers);
            else
                for (int c = 0; c < COLUMNS; c++)
                    ((bf16 *)y)[i * w->ins + k + c] = narrow(numbers[c]);
        }
}
