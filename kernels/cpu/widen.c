/* Pages in 8 bits as pages in bf16, for the kernels that read those. */
#include "common.h"

/* out[i] = page table[i]. numbers: bf16[256], what each byte means. A table of 512 bytes in the first
 * cache serves every format, and NaN and denormals in it, at a byte a cycle. */
void widen_pages(const uint8_t *pages, int64_t page_bytes, const int32_t *table, int64_t count,
                 const bf16 *numbers, bf16 *out, int threads) {
#pragma omp parallel for num_threads(threads) if (count * page_bytes > 16384)
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *from = pages + table[i] * page_bytes;
        bf16 *to = out + i * page_bytes;
        for (int64_t at = 0; at < page_bytes; at++) to[at] = numbers[from[at]];
    }
}
