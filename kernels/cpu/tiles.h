/* Products by tiles: on AMX, and on AVX512-BF16 where there is no AMX, behind the same macros.
 *
 * Eight tiles of up to 16 rows of 64 bytes. `TILE_DOT(c, a, b)` is c[m][n] += sum over pairs p of
 * a[m][2p] * b[p][2n] + a[m][2p + 1] * b[p][2n + 1], a and b bf16, c fp32: b holds pairs of
 * consecutive k side by side. Sums are brought by `TILE_SUMS`, operands by `TILE_LOAD`; memory an
 * operand came from stays as it is until the products with it are done.
 *
 * `TILES` is defined where there are any. -DVECTOR_TILES prefers vectors to AMX, -DSLOW_PAIRS floats
 * to AVX512-BF16 (`pair_rate.c`); -DEMULATED_TILES has AMX's tiles in memory. */
#pragma once
#include <stdint.h>

#define TILE_BYTES 1024

#if defined(__AMX_BF16__) && !defined(VECTOR_TILES)
#define TILES
#include "tiles_amx.h"
#elif defined(__AVX512BF16__) && !defined(SLOW_PAIRS)
#define TILES
#define TILES_OF_VECTORS
#include "tiles_vector.h"
#endif

/* Where there are no products of bf16, numbers are widened to f32. `PRODUCTS`: with packed weights, either way. */
#if defined(FLOATS16) && !defined(TILES)
#define FLOATS
#endif
#if defined(TILES) || defined(FLOATS)
#define PRODUCTS
#endif

#ifdef TILES
/* Eight tiles of 16 rows. */
static inline void tiles_full(void) {
    tiles_shape((const uint8_t[8]){16, 16, 16, 16, 16, 16, 16, 16});
}
#endif
