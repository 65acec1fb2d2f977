/* A round of a decode over pages in bf16. */
#pragma once
#include "program.h"

#define ROUND 32 /* tokens */
typedef bf16 element;

/* Where a round's tokens lie; places beyond `count` repeat the last. */
struct round { const bf16 *at[ROUND]; int count; };

INLINE void place(struct round *r, int s, const struct paged_decode *d, int64_t token,
                  int64_t stride) {
    r->at[s] = (const bf16 *)d->pages + token * stride;
}

/* Pages in bf16 have no scales. */
INLINE void fetch_scales(const struct paged_decode *d, int64_t token, int head) {
    (void)d, (void)token, (void)head;
}
INLINE void take_scales(struct round *r, int head, int kv_heads) {
    (void)r, (void)head, (void)kv_heads;
}
INLINE void cut_scales(const struct round *r, struct round *cut) { (void)r, (void)cut; }

/* Queries as they come: rows `stride` elements apart. */
struct queries { const bf16 *at; int64_t stride; float scale; };
struct query { const bf16 *at; float scale; };

INLINE void ready_queries(struct queries *to, const bf16 *q, int64_t stride, int n, int width,
                          int dim, float scale) {
    (void)n, (void)width, (void)dim;
    *to = (struct queries){q, stride, scale};
}

INLINE struct query query_of(const struct queries *q, int row, int column, int width, int dim) {
    (void)width;
    return (struct query){q->at + row * q->stride + (int64_t)column * dim, q->scale};
}
