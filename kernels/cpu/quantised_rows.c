/* What quantises its result for the products behind it (grouped_input.h), once for all of them: norms
 * and gates. What they give is rounded to bf16 first, so that the codes are those of both done one
 * after the other. */
#include "grouped_input.h"
#include "program.h"

/* y: the norm itself, for products that take it as it is, or 0. dim: a multiple of `shared`, that of
 * 32. */
void rms_norm_int8(const bf16 *x, const bf16 *w, bf16 *y, int8_t *codes, float *scales, int64_t rows,
                   int dim, int shared, float eps, int threads) {
    const int64_t groups = dim / shared;
#pragma omp parallel for num_threads(threads) if (rows * dim > 32768)
    for (int64_t t = 0; t < rows; t++) {
        bf16 own[y ? 1 : dim], *normed = y ? y + t * dim : own;
        norm_row(x + t * dim, w, normed, dim, eps, t + 1 < rows);
        quantise_row(normed, dim, shared, codes + t * dim, scales + t * groups);
    }
}

/* silu(gate) * up, or with gelu; dim: of the result. */
void gate_mul_int8(const bf16 *gate_up, int8_t *codes, float *scales, int64_t rows, int dim,
                   int shared, int gelu, int threads) {
    const int64_t groups = dim / shared;
#pragma omp parallel for num_threads(threads) if (rows * dim > 16384)
    for (int64_t t = 0; t < rows; t++) {
        bf16 gated[dim];
        gate_row(gate_up + t * 2 * dim, gated, dim, gelu);
        quantise_row(gated, dim, shared, codes + t * dim, scales + t * groups);
    }
}
