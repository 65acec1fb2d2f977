/* Decodes over pages of codes in int8: a source of its own, as it takes long to compile. */
#include "common.h"
#ifdef FLOATS16
#include "decode_codes.h"
#include "decode_rows.h"

void decode_codes_task(const struct paged_decode *d, const struct cut *c, int64_t task) {
    decode_task(d, c, task);
}
#endif
