/* Kernels as a program (program.c) calls them: whole, or the tasks they are cut in. */
#pragma once
#include "common.h"

struct grouped;
struct packed;
struct leaves;

/* A row; more: another one lies behind it, and is fetched meanwhile. */
void norm_row(const bf16 *in, const bf16 *w, bf16 *out, int dim, float eps, int more);
void gate_row(const bf16 *gate_up, bf16 *y, int dim, int gelu);
void rms_norm(const bf16 *x, const bf16 *w, bf16 *y, int64_t rows, int dim, float eps, int threads);
void layer_norm(const bf16 *x, int64_t x_stride, const bf16 *w, bf16 *y, int64_t y_stride,
                int64_t rows, int parts, int dim, float eps, int threads);
void map_numbers(const bf16 *x, const bf16 *numbers, bf16 *y, int64_t count, int threads);
void silu_mul(const bf16 *gate_up, bf16 *out, int64_t rows, int dim, int threads);
void gelu_mul(const bf16 *gate_up, bf16 *out, int64_t rows, int dim, int threads);
void rms_norm_int8(const bf16 *x, const bf16 *w, bf16 *y, int8_t *codes, float *scales, int64_t rows,
                   int dim, int shared, float eps, int threads);
void gate_mul_int8(const bf16 *gate_up, int8_t *codes, float *scales, int64_t rows, int dim,
                   int shared, int gelu, int threads);
void rotate_write(bf16 *qkv, const bf16 *w, const bf16 *turns, void *pages, bf16 *scales,
                  const int64_t *index, int64_t rows, int heads, int kv_heads, int dim, float eps,
                  int threads);
void chunk_tables(const int32_t *tables, int64_t stride, int64_t width, const int32_t *lens,
                  int64_t rows, int64_t q_len, int64_t chunk, int64_t page, int32_t *own_tables,
                  int64_t own_width, int32_t *own_lens);
void cut_row(const bf16 *gate_up, bf16 *y, int dim, float deviations, float width);
void as_large_row(const bf16 *x, const bf16 *as_of, bf16 *y, int dim);
void gather_columns(const bf16 *x, int64_t x_stride, const int64_t *order, bf16 *y, int64_t rows,
                    int64_t columns);
void move_rows(const uint8_t *x, int64_t x_stride, const int64_t *index, uint8_t *y, int64_t y_stride,
               int64_t rows, int64_t bytes, int back);

/* Arguments of `strided`. */
struct strided {
    int64_t kind;
    const uint8_t *x, *by; /* 0: `number` */
    uint8_t *y;
    int64_t dims[4], x_strides[4], by_strides[4], y_strides[4];
    float number;
};

void strided_rows(const struct strided *s, int64_t first, int64_t end);
void linear(const bf16 *x, const bf16 *w, const bf16 *bias, const bf16 *add, bf16 *y, int64_t rows,
            int outs, int ins, int threads);

/* Arguments of `paged_decode`. */
struct paged_decode {
    const bf16 *q;
    int64_t q_stride;
    const void *pages;  /* bf16, or codes in int8 where there are scales */
    const bf16 *scales; /* [tokens, 2 * kv_heads], or 0 */
    const int32_t *tables;
    int64_t table_stride;
    const int32_t *lens;
    bf16 *out;
    int64_t rows;
    int q_len, heads, kv_heads, dim, page_bits, window;
    float scale;
    int threads;
    int exact; /* as `paged_extend` would have it, to the bit: decode_exact.c */
    const float *sinks; /* [heads], or 0: scores beside those of the keys, without a value */
    float cap;          /* scores are cap * tanh(score / cap); 0: as they are */
    const float *slopes; /* [heads], or 0: of ALiBi, by which scores fall with a key's distance */
};

/* What a query's online softmax begins with, in bits: its sink, which counts 1, or nothing. */
INLINE float first_top(const float *sinks, int64_t head) {
    return !sinks || sinks[head] < -1e38f ? -3e38f : sinks[head] * 1.44269504f;
}

/* The token at a place of a sequence, in pages. */
INLINE int64_t token_of(const struct paged_decode *d, const int32_t *table, int place) {
    return ((int64_t)table[place >> d->page_bits] << d->page_bits)
           + (place & ((1 << d->page_bits) - 1));
}

int64_t paged_decode_tasks(const struct paged_decode *d);
void paged_decode_task(const struct paged_decode *d, int64_t task);
int64_t decode_exact_tasks(const struct paged_decode *d);
void decode_exact_task(const struct paged_decode *d, int64_t task);

/* Arguments of `latent_decode`. */
struct latent_decode {
    const bf16 *q;
    int64_t q_stride;
    const void *pages;
    const bf16 *scales;
    const int32_t *tables;
    int64_t table_stride;
    const int32_t *lens;
    bf16 *out;
    int64_t rows;
    int q_len, heads, row, page_bits, window;
    float scale;
    int threads;
};

int64_t latent_decode_tasks(const struct latent_decode *d);
void latent_decode_task(const struct latent_decode *d, int64_t task);

/* `linear_heads` of one head. */
void linear_heads_task(const struct packed *w, const bf16 *x, bf16 *y, int64_t rows, int64_t heads,
                       int64_t head);

/* `linear_packed` in tasks, as many as this says, whatever the threads. */
int64_t linear_packed_tasks(const struct packed *w, int64_t rows, int threads);
void linear_packed_task(const struct packed *w, const bf16 *x, const bf16 *bias, const bf16 *add,
                        void *y, int64_t rows, int kind, int64_t task, int64_t tasks);

/* `linear_leaves` likewise. */
int64_t linear_leaves_tasks(const struct leaves *l, int64_t rows, int threads);
void linear_leaves_task(const struct leaves *l, const bf16 *x, const bf16 *bias, const bf16 *add,
                        void *y, float *parts, int64_t rows, int kind, int64_t chunk, int64_t task,
                        int64_t tasks);

/* Arguments of `adapt_rows`: see kernels/adapter_rows.py. */
struct adapt_call {
    const bf16 *x;
    int64_t x_apart; /* numbers from one row to the next */
    void *y;
    int64_t y_apart;
    int is_wide; /* y is of f32, not bf16 */
    const int32_t *numbers, *blocks;
    int64_t most; /* blocks, of which those without rows are the last */
    const bf16 *a, *b;
    const float *scales;
    const int32_t *ranks, *ends;
    float *low; /* f32[rows with adapters, modules * rank], scratch */
    int64_t modules, rank, ins, outs;
    int threads;
};

int64_t adapt_tasks(const struct adapt_call *c, int phase);
void adapt_task(const struct adapt_call *c, int phase, int64_t task, int64_t tasks);

/* Arguments of `grouped_linear`, or of `grouped_linear_int8`. */
struct grouped_call {
    const struct grouped *w;
    const bf16 *x, *bias, *add;
    void *y;
    int64_t rows;
    int kind;
    uint8_t *scratch;
    int64_t scratch_bytes;
    int threads;
    const int8_t *codes; /* in place of x, or 0 */
    const float *scales;
};

/* Phase 0 quantises the input, phase 1 multiplies. All rows have room in scratch. */
int64_t grouped_linear_tasks(const struct grouped_call *c, int phase);
void grouped_linear_task(const struct grouped_call *c, int phase, int64_t task);

/* Arguments of `choose_experts`, without the threads. */
struct choice {
    const void *logits;
    int64_t stride;
    int floats, experts, chosen, groups, chosen_groups, best, softmax, normalised;
    const float *bias; /* or 0: on the scores, when experts are chosen */
    float added, least, factor;
    bf16 *weights;
    int64_t *places;
};

void choose_rows(const struct choice *c, int64_t first, int64_t end);
void group_rows(const int64_t *chosen, int64_t rows, int64_t each, int64_t experts, int64_t *sources,
                int64_t *back, int64_t *starts, int64_t *active);

/* Arguments of `expert_packed`. */
struct packed_experts {
    const struct packed *const *w;
    int64_t experts;
    const int64_t *starts, *active;
    const bf16 *x;
    const bf16 *const *biases;
    bf16 *y;
    int kind, threads;
};

int64_t packed_experts_tasks(const struct packed_experts *c);
void packed_experts_task(const struct packed_experts *c, int64_t task);

/* Arguments of `expert_grouped`. */
struct grouped_experts {
    const struct grouped *const *w;
    int64_t experts;
    const int64_t *starts, *active;
    const bf16 *x;
    const bf16 *const *biases;
    bf16 *y;
    int kind, threads;
    uint8_t *scratch;
};

void expert_plan(const struct grouped *const *w, int64_t experts, const int64_t *starts,
                 const int64_t *active, int64_t *plan, int threads);
int64_t grouped_experts_tasks(const struct grouped_experts *c, const int64_t *plan, int phase);
void grouped_experts_task(const struct grouped_experts *c, const int64_t *plan, int phase, int64_t task);

void combine_row(const bf16 *weights, const bf16 *outs, const int64_t *back, bf16 *y, int64_t t,
                 int chosen, int dim);
void clamped_row(const bf16 *gate_up, bf16 *y, int dim, float alpha, float limit);
void gated_row(const bf16 *x, const bf16 *gate, const bf16 *add, bf16 *y, int dim);

int64_t delta_window_tasks(int64_t rows, const int *sizes);
void delta_window_task(const bf16 *p, int64_t stride, const int64_t *slots, bf16 *columns,
                       const float *conv, void *states, const float *decay, const float *bias,
                       const float *norm, bf16 *out, const int *sizes, bf16 *pending,
                       const int64_t *accepted, int count, int held, float eps, int64_t task);

void mamba_task(const bf16 *p, int64_t stride, int64_t count, int64_t tokens, const int64_t *owners,
                const int64_t *runs, const int64_t *saves, const int64_t *save_starts,
                bf16 *columns, const float *conv, const float *conv_bias, void *states,
                const float *a, const float *skip, const float *bias, float *mixed, float *y,
                const int *sizes, float low, float high, int phase, int64_t task);
void conv_task(const bf16 *p, int64_t stride, const int64_t *runs, const int64_t *saves,
               const int64_t *save_starts, bf16 *columns, const float *weight, const float *bias,
               float *out, int64_t channels, int width, int activate, int64_t task);
void norm_gated_part(const float *y, const float *weight, const bf16 *z, int64_t stride, bf16 *out,
                     int dim, int groups, float eps, int64_t part);
int64_t scan_tasks(int64_t count, int64_t channels);
void scan_task(const bf16 *x, const bf16 *dt, const bf16 *b, const bf16 *c, int64_t count,
               const int64_t *runs, const int64_t *saves, const int64_t *save_starts, void *states,
               const float *a, const float *skip, const float *bias, float *y, int64_t channels,
               int state_dim, int narrow_states, int64_t task);
void kda_task(const float *qkv, const bf16 *f, const bf16 *b, const int64_t *runs, const int64_t *saves,
              const int64_t *save_starts, void *states, const float *decay, const float *bias, float *y,
              int heads, int dim, int narrow_states, int64_t task);

struct group;

/* Between ranks (all_reduce.c). Behind a failure they return at once: see there. */
void rank_all_reduce(struct group *g, uint8_t *x, int64_t n, int type);
void rank_reduce_add_norm(struct group *g, const uint8_t *x, int type, const bf16 *residual,
                          bf16 *total, const bf16 *weight, float eps, bf16 *normed, int64_t rows,
                          int dim);
