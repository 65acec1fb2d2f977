/* Operations of numbers in up to four dimensions, as torch's: each is made in f32 and rounded once, if
 * at all. Programs (program.c) repeat by them what layers call of torch between kernels. */
#include "program.h"

#define CHUNK 256

enum { COPY, ADD, SUB, MUL, DIV, MOST, LEAST, ROOT }; /* as in gpu/graphs/recorded_torch.py */
enum { BF16, F32, BYTES1, BYTES8 };

/* Numbers `stride` apart, or the scalar. */
INLINE void load_numbers(float *to, const uint8_t *x, int type, int64_t stride, int64_t n) {
    if (type == F32)
        for (int64_t i = 0; i < n; i++) to[i] = ((const float *)x)[i * stride];
    else if (stride == 1)
        for (int64_t i = 0; i < n; i++) to[i] = wide(((const bf16 *)x)[i]);
    else
        for (int64_t i = 0; i < n; i++) to[i] = wide(((const bf16 *)x)[i * stride]);
}

INLINE void store_numbers(const float *from, uint8_t *y, int type, int64_t stride, int64_t n) {
    if (type == F32)
        for (int64_t i = 0; i < n; i++) ((float *)y)[i * stride] = from[i];
    else if (stride == 1)
        for (int64_t i = 0; i < n; i++) ((bf16 *)y)[i] = narrow(from[i]);
    else
        for (int64_t i = 0; i < n; i++) ((bf16 *)y)[i * stride] = narrow(from[i]);
}

#define EACH(expression) for (int64_t i = 0; i < n; i++) a[i] = expression; return

/* Comparisons are such that a NaN stays one. */
INLINE void combine_numbers(int kind, float *restrict a, const float *restrict b, int64_t n) {
    switch (kind) {
        case ADD: EACH(a[i] + b[i]);
        case SUB: EACH(a[i] - b[i]);
        case MUL: EACH(a[i] * b[i]);
        case DIV: EACH(a[i] / b[i]);
        case MOST: EACH(a[i] > b[i] ? b[i] : a[i]);
        case LEAST: EACH(a[i] < b[i] ? b[i] : a[i]);
        case ROOT: EACH(sqrtf(a[i]));
    }
}

/* Elements as they are, of so many bytes. */
static void copy_elements(const uint8_t *x, int64_t x_stride, uint8_t *y, int64_t y_stride, int64_t n,
                          int64_t size) {
    if (x_stride == 1 && y_stride == 1) memcpy(y, x, (size_t)(n * size));
    else
        for (int64_t i = 0; i < n; i++) memcpy(y + i * y_stride * size, x + i * x_stride * size, size);
}

static const int64_t sizes[] = {2, 4, 1, 8};

/* One row of the innermost dimension. */
static void strided_row(const struct strided *s, const uint8_t *x, const uint8_t *by, uint8_t *y) {
    int kind = s->kind & 255, xt = s->kind >> 8 & 15, bt = s->kind >> 12 & 15, yt = s->kind >> 16 & 15;
    int64_t n = s->dims[3], xs = s->x_strides[3], bs = s->by_strides[3], ys = s->y_strides[3];
    if (kind == COPY && x && xt == yt) {
        copy_elements(x, xs, y, ys, n, sizes[xt]);
        return;
    }
    float a[CHUNK], b[CHUNK];
    if (!x) /* as many as are taken at once */
        for (int64_t i = 0; i < CHUNK && i < n; i++) a[i] = s->number;
    if (!by)
        for (int64_t i = 0; i < CHUNK && i < n; i++) b[i] = s->number;
    for (int64_t at = 0; at < n; at += CHUNK) {
        int64_t some = n - at < CHUNK ? n - at : CHUNK;
        if (x) load_numbers(a, x + at * xs * sizes[xt], xt, xs, some);
        if (by) load_numbers(b, by + at * bs * sizes[bt], bt, bs, some);
        combine_numbers(kind, a, b, some);
        store_numbers(a, y + at * ys * sizes[yt], yt, ys, some);
    }
}

/* Rows [first, end) of the three outer dimensions. */
void strided_rows(const struct strided *s, int64_t first, int64_t end) {
    int64_t xt = sizes[s->kind >> 8 & 15], bt = sizes[s->kind >> 12 & 15], yt = sizes[s->kind >> 16 & 15];
    for (int64_t row = first; row < end; row++) {
        int64_t at[3] = {row / s->dims[2] / s->dims[1], row / s->dims[2] % s->dims[1], row % s->dims[2]};
        int64_t x = 0, by = 0, y = 0;
        for (int d = 0; d < 3; d++) {
            x += at[d] * s->x_strides[d];
            by += at[d] * s->by_strides[d];
            y += at[d] * s->y_strides[d];
        }
        strided_row(s, s->x ? s->x + x * xt : 0, s->by ? s->by + by * bt : 0, s->y + y * yt);
    }
}

/* y = x (kind) by; kind: the operation, and the types of x, by and y. An operand without an address is
 * `number`. Strides are in elements, outermost first. */
void strided(int64_t kind, const void *x, const void *by, void *y, int64_t d0, int64_t d1, int64_t d2,
             int64_t d3, int64_t x0, int64_t x1, int64_t x2, int64_t x3, int64_t b0, int64_t b1,
             int64_t b2, int64_t b3, int64_t y0, int64_t y1, int64_t y2, int64_t y3, float number) {
    struct strided s = {kind, x, by, y, {d0, d1, d2, d3}, {x0, x1, x2, x3}, {b0, b1, b2, b3},
                        {y0, y1, y2, y3}, number};
    strided_rows(&s, 0, d0 * d1 * d2);
}

/* y[r] = x[index[r]], or, back: y[index[r]] = x[r], rows of so many bytes; strides in bytes. */
void move_rows(const uint8_t *x, int64_t x_stride, const int64_t *index, uint8_t *y, int64_t y_stride,
               int64_t rows, int64_t bytes, int back) {
    for (int64_t r = 0; r < rows; r++)
        memcpy(y + (back ? index[r] : r) * y_stride, x + (back ? r : index[r]) * x_stride, (size_t)bytes);
}

/* y[r, c] = x[r, order[c]]; strides in elements. */
void gather_columns(const bf16 *x, int64_t x_stride, const int64_t *order, bf16 *y, int64_t rows,
                    int64_t columns) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) y[r * columns + c] = x[r * x_stride + order[c]];
}

/* Page tables and lengths of rows that see no further back than their own chunk of so many tokens, each
 * of the q_len rows of a sequence by itself: see `forward_context.within_chunks`. */
void chunk_tables(const int32_t *tables, int64_t stride, int64_t width, const int32_t *lens,
                  int64_t rows, int64_t q_len, int64_t chunk, int64_t page, int32_t *own_tables,
                  int64_t own_width, int32_t *own_lens) {
    for (int64_t r = 0; r < rows * q_len; r++) {
        int64_t seen = lens[r / q_len] + 1 - q_len + r % q_len, last = seen > 1 ? seen - 1 : 0;
        for (int64_t c = 0; c < own_width; c++) {
            int64_t column = last / chunk * (chunk / page) + c;
            own_tables[r * own_width + c] =
                tables[r / q_len * stride + (column < width ? column : width - 1)];
        }
        own_lens[r] = (int32_t)(last % chunk + 1);
    }
}
