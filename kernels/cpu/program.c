/* A recorded run of kernels, all in one call (program.py): the CPU's counterpart of a CUDA graph.
 *
 * Threads enter once. An operation is cut in tasks, taken by whoever is free; who finishes the last
 * task of one goes on to the next, and does operations of a single task on the way, without telling
 * anybody. Nobody is waited for who has not taken a task: a thread that the scheduler pushes aside
 * between two of them holds up nothing. */
#include <omp.h>
#include <sched.h>

#include "common.h"
#include "program.h"

#define PATIENCE 4096 /* pauses before a waiting thread lets others have its core */
#define FEW_ROWS 4    /* of which no thread takes a share, element by element */
#define MANY_NUMBERS 8192 /* of which threads take a share */

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() (void)0
#endif

union slot { int64_t i; double f; };

/* A call: a kernel, and its arguments in order. */
struct op {
    int64_t kind;
    union slot a[21];
};

#define P(n) ((void *)(intptr_t)a[n].i)
#define L(n) (a[n].i)
#define I(n) ((int)a[n].i)
#define F(n) ((float)a[n].f)

/* Rows [from, to) of so many that a task has. */
struct rows { int64_t from, count; };

static struct rows rows_of(int64_t rows, int64_t task, int64_t tasks) {
    int64_t from = rows * task / tasks;
    return (struct rows){from, rows * (task + 1) / tasks - from};
}

static int64_t by_rows(int64_t rows, int threads) {
    return rows <= FEW_ROWS ? 1 : rows / 2 < 2 * threads ? rows / 2 : 2 * threads;
}

/* --- small operations ------------------------------------------------------------------------- */

/* y = x * sigmoid(gate), rounded once. */
void sigmoid_mul(const bf16 *x, const bf16 *gate, bf16 *y, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float g = wide(gate[i]), e = exp_neg(-fabsf(g)), s = (g < 0 ? e : 1.0f) / (1.0f + e);
        y[i] = narrow(wide(x[i]) * s);
    }
}

/* --- kernels ---------------------------------------------------------------------------------- */

static int64_t one_task(const union slot *a, int phase) {
    (void)a, (void)phase;
    return 1;
}

static int64_t norm_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(3), I(6));
}

static void run_norm(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(3), task, tasks);
    int64_t at = r.from * I(4);
    (void)phase;
    rms_norm((bf16 *)P(0) + at, P(1), (bf16 *)P(2) + at, r.count, I(4), F(5), 1);
}

static int64_t layer_norm_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(5), I(9));
}

static void run_layer_norm(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(5), task, tasks);
    (void)phase;
    layer_norm((bf16 *)P(0) + r.from * L(1), L(1), P(2), (bf16 *)P(3) + r.from * L(4), L(4), r.count,
               I(6), I(7), F(8), 1);
}

static int64_t map_tasks(const union slot *a, int phase) {
    (void)phase;
    return L(3) <= MANY_NUMBERS ? 1 : 2 * I(4);
}

static void run_map(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(3), task, tasks);
    (void)phase;
    map_numbers((bf16 *)P(0) + r.from, P(1), (bf16 *)P(2) + r.from, r.count, 1);
}

static int64_t norm_int8_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(5), I(9));
}

static void run_norm_int8(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(5), task, tasks);
    int64_t at = r.from * I(6);
    (void)phase;
    rms_norm_int8((bf16 *)P(0) + at, P(1), P(2) ? (bf16 *)P(2) + at : 0, (int8_t *)P(3) + at,
                  (float *)P(4) + at / I(7), r.count, I(6), I(7), F(8), 1);
}

static int64_t gate_int8_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(3), I(7));
}

static void run_gate_int8(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(3), task, tasks);
    int64_t at = r.from * I(4);
    (void)phase;
    gate_mul_int8((bf16 *)P(0) + 2 * at, (int8_t *)P(1) + at, (float *)P(2) + at / I(5), r.count,
                  I(4), I(5), I(6), 1);
}

static int64_t gate_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(2), I(4));
}

static void run_silu(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(2), task, tasks);
    (void)phase;
    silu_mul((bf16 *)P(0) + 2 * r.from * I(3), (bf16 *)P(1) + r.from * I(3), r.count, I(3), 1);
}

static void run_gelu(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(2), task, tasks);
    (void)phase;
    gelu_mul((bf16 *)P(0) + 2 * r.from * I(3), (bf16 *)P(1) + r.from * I(3), r.count, I(3), 1);
}

static int64_t rotate_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(6), I(11));
}

static void run_rotate(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(6), task, tasks);
    int heads = I(7), kv_heads = I(8), dim = I(9);
    (void)phase;
    rotate_write((bf16 *)P(0) + r.from * (heads + 2 * kv_heads) * dim, P(1),
                 (bf16 *)P(2) + r.from * 2 * dim, P(3), P(4), (int64_t *)P(5) + r.from, r.count,
                 heads, kv_heads, dim, F(10), 1);
}

static struct paged_decode decode_of(const union slot *a) {
    return (struct paged_decode){P(0), L(1), P(2), P(3), P(4), L(5), P(6), P(7), L(8), I(9), I(10),
                                 I(11), I(12), I(13), I(14), F(15), I(16), I(17), P(18), F(19),
                                 P(20)};
}

static int64_t decode_tasks(const union slot *a, int phase) {
    struct paged_decode d = decode_of(a);
    (void)phase;
    return paged_decode_tasks(&d);
}

static void run_decode(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct paged_decode d = decode_of(a);
    (void)phase, (void)tasks;
    paged_decode_task(&d, task);
}

static int64_t packed_tasks(const union slot *a, int phase) {
    (void)phase;
    return linear_packed_tasks(P(0), L(5), I(7));
}

static void run_packed(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase;
    linear_packed_task(P(0), P(1), P(2), P(3), P(4), L(5), I(6), task, tasks);
}

static int64_t leaves_tasks(const union slot *a, int phase) {
    (void)phase;
    return linear_leaves_tasks(P(0), L(6), I(9));
}

static void run_leaves(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase;
    linear_leaves_task(P(0), P(1), P(2), P(3), P(4), P(5), L(6), I(7), L(8), task, tasks);
}

static struct grouped_call grouped_of(const union slot *a) {
    return (struct grouped_call){P(0), P(1), P(2), P(3), P(4), L(5), I(6), P(7), L(8), I(9), 0, 0};
}

static struct grouped_call quantised_of(const union slot *a) {
    return (struct grouped_call){P(0), 0, P(3), P(4), P(5), L(6), I(7), P(8), L(9), I(10),
                                 P(1), P(2)};
}

static int64_t quantised_tasks(const union slot *a, int phase) {
    struct grouped_call c = quantised_of(a);
    return grouped_linear_tasks(&c, phase);
}

static void run_quantised(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct grouped_call c = quantised_of(a);
    (void)tasks;
    grouped_linear_task(&c, phase, task);
}

static int64_t grouped_tasks(const union slot *a, int phase) {
    struct grouped_call c = grouped_of(a);
    return grouped_linear_tasks(&c, phase);
}

static void run_grouped(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct grouped_call c = grouped_of(a);
    (void)tasks;
    grouped_linear_task(&c, phase, task);
}

static struct strided strided_of(const union slot *a) {
    return (struct strided){L(0), P(1), P(2), P(3), {L(4), L(5), L(6), L(7)},
                            {L(8), L(9), L(10), L(11)}, {L(12), L(13), L(14), L(15)},
                            {L(16), L(17), L(18), L(19)}, F(20)};
}

static int64_t strided_tasks(const union slot *a, int phase) {
    int64_t rows = L(4) * L(5) * L(6), tasks = rows * L(7) / MANY_NUMBERS;
    (void)phase;
    return tasks < 1 ? 1 : tasks > rows ? rows : tasks;
}

static void run_strided(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct strided s = strided_of(a);
    struct rows r = rows_of(L(4) * L(5) * L(6), task, tasks);
    (void)phase;
    strided_rows(&s, r.from, r.from + r.count);
}

static void run_sigmoid(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)task, (void)tasks;
    sigmoid_mul(P(0), P(1), P(2), L(3));
}

static void run_move(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)task, (void)tasks;
    move_rows(P(0), L(1), P(2), P(3), L(4), L(5), L(6), I(7));
}

static void run_gather(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)task, (void)tasks;
    gather_columns(P(0), L(1), P(2), P(3), L(4), L(5));
}

static int64_t delta_tasks(const union slot *a, int phase) {
    (void)phase;
    return delta_window_tasks(L(2), P(11));
}

static void run_delta_step(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)tasks;
    delta_window_task(P(0), L(1), P(3), P(4), P(5), P(6), P(7), P(8), P(9), P(10), P(11), 0, 0, 1, 0,
                      F(12), task);
}

static void run_delta_window(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)tasks;
    delta_window_task(P(0), L(1), P(3), P(4), P(5), P(6), P(7), P(8), P(9), P(10), P(11), P(12),
                      P(13), I(14), I(15), F(16), task);
}

static int64_t choice_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(3), I(17));
}

static void run_choice(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct choice c = {P(0), L(1), I(2), I(4), I(5), I(6), I(7), I(8), I(9), I(10), P(11), F(12), F(13),
                       F(14), P(15), P(16)};
    struct rows r = rows_of(L(3), task, tasks);
    (void)phase;
    choose_rows(&c, r.from, r.from + r.count);
}

static void run_group(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)task, (void)tasks;
    group_rows(P(0), L(1), L(2), L(3), P(4), P(5), P(6), P(7));
}

static void run_plan(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)task, (void)tasks;
    expert_plan(P(0), L(1), P(2), P(3), P(4), I(5));
}

static struct packed_experts expert_of(const union slot *a) {
    return (struct packed_experts){P(0), L(1), P(2), P(3), P(4), P(5), P(6), I(7), I(8)};
}

static int64_t packed_experts(const union slot *a, int phase) {
    struct packed_experts c = expert_of(a);
    (void)phase;
    return packed_experts_tasks(&c);
}

static void run_packed_experts(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct packed_experts c = expert_of(a);
    (void)phase, (void)tasks;
    packed_experts_task(&c, task);
}

static struct grouped_experts codes_of(const union slot *a) {
    return (struct grouped_experts){P(0), L(1), P(2), P(3), P(4), P(5), P(6), I(7), I(11), P(8)};
}

static int64_t grouped_experts(const union slot *a, int phase) {
    struct grouped_experts c = codes_of(a);
    return grouped_experts_tasks(&c, P(10), phase);
}

static void run_grouped_experts(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct grouped_experts c = codes_of(a);
    (void)tasks;
    grouped_experts_task(&c, P(10), phase, task);
}

static int64_t combine_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(4), I(7));
}

static void run_combine(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(4), task, tasks);
    (void)phase;
    for (int64_t t = r.from; t < r.from + r.count; t++)
        combine_row(P(0), P(1), P(2), P(3), t, I(5), I(6));
}

static int64_t clamped_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(2), I(6));
}

static void run_clamped(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(2), task, tasks);
    (void)phase;
    for (int64_t t = r.from; t < r.from + r.count; t++)
        clamped_row((bf16 *)P(0) + t * 2 * I(3), (bf16 *)P(1) + t * I(3), I(3), F(4), F(5));
}

static int64_t gate_row_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(5), I(7));
}

static void run_gate_rows(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(5), task, tasks);
    (void)phase;
    for (int64_t t = r.from; t < r.from + r.count; t++)
        gated_row((bf16 *)P(0) + t * I(6), (bf16 *)P(1) + t * L(2), P(3) ? (bf16 *)P(3) + t * I(6) : 0,
                  (bf16 *)P(4) + t * I(6), I(6));
}

static struct latent_decode latents_of(const union slot *a) {
    return (struct latent_decode){P(0), L(1), P(2), P(3), P(4), L(5), P(6), P(7), L(8), I(9), I(10),
                                  I(11), I(12), I(13), F(14), I(15)};
}

static int64_t latent_tasks(const union slot *a, int phase) {
    struct latent_decode d = latents_of(a);
    (void)phase;
    return latent_decode_tasks(&d);
}

static void run_latents(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct latent_decode d = latents_of(a);
    (void)phase, (void)tasks;
    latent_decode_task(&d, task);
}

static int64_t head_tasks(const union slot *a, int phase) {
    (void)phase;
    return L(4);
}

static void run_heads(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)tasks;
    linear_heads_task(P(0), P(1), P(2), L(3), L(4), task);
}

static void run_chunks(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)task, (void)tasks;
    chunk_tables(P(0), L(1), L(2), P(3), L(4), L(5), L(6), L(7), P(8), L(9), P(10));
}

static void run_cut(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(2), task, tasks);
    (void)phase;
    for (int64_t t = r.from; t < r.from + r.count; t++)
        cut_row((bf16 *)P(0) + t * 2 * I(3), (bf16 *)P(1) + t * I(3), I(3), F(4), F(5));
}

static int64_t large_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(3), I(5));
}

static void run_large(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(3), task, tasks);
    (void)phase;
    for (int64_t t = r.from; t < r.from + r.count; t++)
        as_large_row((bf16 *)P(0) + t * I(4), (bf16 *)P(1) + t * I(4), (bf16 *)P(2) + t * I(4), I(4));
}

static int64_t mamba_tasks(const union slot *a, int phase) {
    return L(2) * (phase ? ((const int *)P(17))[1] : 1); /* sequences, or all their heads */
}

static void run_mamba(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)tasks;
    mamba_task(P(0), L(1), L(2), L(3), P(4), P(5), P(6), P(7), P(8), P(9), P(10), P(11), P(12), P(13),
               P(14), P(15), P(16), P(17), F(18), F(19), phase, task);
}

static int64_t conv_tasks(const union slot *a, int phase) {
    (void)phase;
    return L(2);
}

static void run_conv(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)tasks;
    conv_task(P(0), L(1), P(5), P(6), P(7), P(8), P(9), P(10), P(11), L(12), I(13), I(14), task);
}

static int64_t gated_tasks(const union slot *a, int phase) {
    (void)phase;
    return by_rows(L(5), I(9));
}

static void run_gated(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct rows r = rows_of(L(5) * I(7), task, tasks);
    (void)phase;
    for (int64_t part = r.from; part < r.from + r.count; part++)
        norm_gated_part(P(0), P(1), P(2), L(3), P(4), I(6), I(7), F(8), part);
}

static int64_t all_scans(const union slot *a, int phase) {
    (void)phase;
    return scan_tasks(L(4), L(13));
}

static void run_scan(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)tasks;
    scan_task(P(0), P(1), P(2), P(3), L(4), P(5), P(6), P(7), P(8), P(9), P(10), P(11), P(12), L(13),
              I(14), I(15), task);
}

static int64_t kda_tasks(const union slot *a, int phase) {
    (void)phase;
    return L(3) * I(11);
}

static void run_kda(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)tasks;
    kda_task(P(0), P(1), P(2), P(4), P(5), P(6), P(7), P(8), P(9), P(10), I(11), I(12), I(13), task);
}

static struct adapt_call adapt_of(const union slot *a) {
    return (struct adapt_call){P(0), L(1), P(2), L(3), I(4), P(5), P(6), L(7), P(8), P(9), P(10),
                               P(11), P(12), P(13), L(14), L(15), L(16), L(17), I(18)};
}

static int64_t all_adapted(const union slot *a, int phase) {
    struct adapt_call c = adapt_of(a);
    return adapt_tasks(&c, phase);
}

static void run_adapt(const union slot *a, int phase, int64_t task, int64_t tasks) {
    struct adapt_call c = adapt_of(a);
    adapt_task(&c, phase, task, tasks);
}

/* One thread meets the other ranks, and the rest of this one's wait for it. */
static void run_all_reduce(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)task, (void)tasks;
    rank_all_reduce(P(0), P(1), L(2), I(3));
}

static void run_reduce_add(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)task, (void)tasks;
    rank_reduce_add_norm(P(0), P(1), I(2), P(3), P(4), P(5), F(6), P(7), L(8), I(9));
}

/* It shares its work out itself. */
static void run_linear(const union slot *a, int phase, int64_t task, int64_t tasks) {
    (void)phase, (void)task, (void)tasks;
    linear(P(0), P(1), P(2), P(3), P(4), L(5), I(6), I(7), I(8));
}

struct kind {
    const char *name;
    int phases;
    int64_t (*tasks)(const union slot *a, int phase); /* 0: called by one thread, alone */
    void (*run)(const union slot *a, int phase, int64_t task, int64_t tasks);
};

static const struct kind kinds[] = {
    {"rms_norm", 1, norm_tasks, run_norm},
    {"layer_norm", 1, layer_norm_tasks, run_layer_norm},
    {"map_numbers", 1, map_tasks, run_map},
    {"silu_mul", 1, gate_tasks, run_silu},
    {"gelu_mul", 1, gate_tasks, run_gelu},
    {"rotate_write", 1, rotate_tasks, run_rotate},
    {"paged_decode", 1, decode_tasks, run_decode},
    {"linear_packed", 1, packed_tasks, run_packed},
    {"linear_leaves", 1, leaves_tasks, run_leaves},
    {"grouped_linear", 2, grouped_tasks, run_grouped},
    {"grouped_linear_int8", 2, quantised_tasks, run_quantised},
    {"rms_norm_int8", 1, norm_int8_tasks, run_norm_int8},
    {"gate_mul_int8", 1, gate_int8_tasks, run_gate_int8},
    {"strided", 1, strided_tasks, run_strided},
    {"move_rows", 1, one_task, run_move},
    {"sigmoid_mul", 1, one_task, run_sigmoid},
    {"gather_columns", 1, one_task, run_gather},
    {"linear", 1, 0, run_linear},
    {"delta_step", 1, delta_tasks, run_delta_step},
    {"delta_window", 1, delta_tasks, run_delta_window},
    {"choose_experts", 1, choice_tasks, run_choice},
    {"group_rows", 1, one_task, run_group},
    {"expert_plan", 1, one_task, run_plan},
    {"expert_packed", 1, packed_experts, run_packed_experts},
    {"expert_grouped", 2, grouped_experts, run_grouped_experts},
    {"expert_combine", 1, combine_tasks, run_combine},
    {"clamped_swiglu", 1, clamped_tasks, run_clamped},
    {"gate_rows", 1, gate_row_tasks, run_gate_rows},
    {"latent_decode", 1, latent_tasks, run_latents},
    {"linear_heads", 1, head_tasks, run_heads},
    {"chunk_tables", 1, one_task, run_chunks},
    {"cut_gelu_mul", 1, clamped_tasks, run_cut},
    {"as_large", 1, large_tasks, run_large},
    {"mamba_steps", 2, mamba_tasks, run_mamba},
    {"conv_steps", 1, conv_tasks, run_conv},
    {"scan_steps", 1, all_scans, run_scan},
    {"kda_steps", 1, kda_tasks, run_kda},
    {"norm_gated", 1, gated_tasks, run_gated},
    {"adapt_rows", 2, all_adapted, run_adapt},
    {"rank_all_reduce", 1, one_task, run_all_reduce},
    {"rank_reduce_add_norm", 1, one_task, run_reduce_add},
};

/* The number of a kernel; -1: no program can have it. */
int program_kind(const char *name) {
    for (int i = 0; i < (int)(sizeof kinds / sizeof *kinds); i++)
        if (!strcmp(kinds[i].name, name)) return i;
    return -1;
}

/* Whether kernels that this thread calls have more than one thread. */
void share_work(int yes) { omp_set_max_active_levels(yes); }

/* --- running ---------------------------------------------------------------------------------- */

#define TASK_BITS 24

/* Where a program is: which operation and phase of it, and how many of its tasks nobody has taken yet.
 * The number of tasks may depend on what earlier operations wrote, in memory that later ones write
 * again: it is asked for only while some task of the phase is not done. */
struct team {
    uint64_t word __attribute__((aligned(64)));
    int64_t done __attribute__((aligned(64))); /* tasks of this phase */
};

INLINE const struct kind *kind_of(const struct op *op) { return kinds + op->kind; }

/* From phase `at` on (2 * operation + phase), all that is a single task; returns the first phase that
 * is more, or the end. */
static int64_t run_singles(const struct op *ops, int64_t at, int64_t end) {
    while (at < end) {
        const struct op *op = ops + at / 2;
        const struct kind *kind = kind_of(op);
        int phase = (int)(at % 2);
        int64_t tasks = kind->tasks(op->a, phase);
        if (tasks > 1) return at;
        if (tasks) kind->run(op->a, phase, 0, 1);
        at = phase + 1 < kind->phases ? at + 1 : (at / 2 + 1) * 2;
    }
    return at;
}

/* The word of a phase that begins. */
static uint64_t begun(const struct op *ops, int64_t at, int64_t end) {
    uint64_t left = at < end ? (uint64_t)kind_of(ops + at / 2)->tasks(ops[at / 2].a, (int)(at % 2)) : 0;
    return (uint64_t)at << TASK_BITS | left;
}

static void work(const struct op *ops, int64_t end, struct team *team) {
    for (int waited = 0;;) {
        uint64_t word = __atomic_load_n(&team->word, __ATOMIC_ACQUIRE);
        int64_t at = (int64_t)(word >> TASK_BITS), left = word & ((1 << TASK_BITS) - 1);
        if (at >= end) return;
        if (!left) {
            PAUSE();
            if (++waited > PATIENCE) sched_yield();
            continue;
        }
        if (!__atomic_compare_exchange_n(&team->word, &word, word - 1, 0, __ATOMIC_ACQ_REL,
                                         __ATOMIC_RELAXED))
            continue;
        waited = 0;
        const struct op *op = ops + at / 2;
        const struct kind *kind = kind_of(op);
        int phase = (int)(at % 2);
        int64_t tasks = kind->tasks(op->a, phase);
        kind->run(op->a, phase, tasks - left, tasks);
        if (__atomic_add_fetch(&team->done, 1, __ATOMIC_ACQ_REL) < tasks) continue;
        at = phase + 1 < kind->phases ? at + 1 : (at / 2 + 1) * 2;
        at = run_singles(ops, at, end);
        team->done = 0;
        __atomic_store_n(&team->word, begun(ops, at, end), __ATOMIC_RELEASE);
    }
}

/* Operations [from, to) that threads share. */
static void run_shared(const struct op *ops, int64_t from, int64_t to, int threads) {
    struct team team = {0, 0};
    int64_t end = 2 * to, at = run_singles(ops, 2 * from, end);
    if (at >= end) return;
    team.word = begun(ops, at, end);
#pragma omp parallel num_threads(threads) if (threads > 1)
    work(ops, end, &team);
}

/* All operations, in order. */
void run_program(const struct op *ops, int64_t count, int threads) {
    for (int64_t i = 0; i < count;) {
        int64_t from = i;
        while (i < count && kind_of(ops + i)->tasks) i++;
        if (i > from) run_shared(ops, from, i, threads);
        for (; i < count && !kind_of(ops + i)->tasks; i++)
            kind_of(ops + i)->run(ops[i].a, 0, 0, 1);
    }
}
