/* What the ways to go through many tokens of a GatedDeltaNet layer share. */
#pragma once
#include "delta.h"

/* A sequence: its first row of p, its tokens, its row of the state pool. */
typedef struct {
    int64_t start, count, slot;
} Run;

INLINE int channels_of(const Delta *d) {
    return 2 * d->keys * d->key_dim + d->values * d->value_dim;
}

/* What the convolution sees as token t of a run: a row of p, or a column kept from before. */
INLINE const bf16 *input(const Delta *d, const Run *run, int64_t t) {
    return t >= 0 ? d->p + (run->start + t) * d->stride
                  : d->columns + (run->slot * (d->width - 1) + d->width - 1 + t) * channels_of(d);
}

/* `delta_tiles.c`: a key head and its value heads by tiles. */
struct tiles;
struct tiles *tiles_open(const Delta *d); /* for one thread; NULL: not these sizes */
void tiles_close(struct tiles *b);
void tiles_load(const Delta *d, struct tiles *b, int64_t slot, int first);
void tiles_keep(const Delta *d, const struct tiles *b, int64_t slot, int first);
/* `tokens` of a run from `at` on, at most 32. */
void tiles_block(const Delta *d, const Run *run, int64_t at, int tokens, int head, struct tiles *b);
