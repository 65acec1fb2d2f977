/* The weighted sum of a mixture. */
#include "common.h"

/* What a row's experts gave, weighted: one expert after the other, whatever the number of rows. */
void grouped_combine(const bf16 *weights, const bf16 *outs, bf16 *y, int64_t rows, int chosen,
                     int dim, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * chosen * dim > 32768)
    for (int64_t t = 0; t < rows; t++) {
        const bf16 *w = weights + t * chosen, *in = outs + t * chosen * dim;
#ifdef FLOATS16
        for (int i = 0; i < dim; i += 16) {
            floats16 sum = no_lanes();
            for (int e = 0; e < chosen; e++)
                sum = fma_lanes(all_lanes(wide(w[e])),
                                wide_some(in + (int64_t)e * dim + i, dim - i), sum);
            narrow_some(y + t * dim + i, sum, dim - i);
        }
#else
        for (int i = 0; i < dim; i++) {
            float sum = 0;
            for (int e = 0; e < chosen; e++) sum += wide(w[e]) * wide(in[(int64_t)e * dim + i]);
            y[t * dim + i] = narrow(sum);
        }
#endif
    }
}
