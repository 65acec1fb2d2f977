/* Collectives of the ranks of one model, processes (or threads) of one machine, through a file that
 * all of them have mapped.
 *
 * A collective is one phase or two. In a phase each rank writes its part to its own slot and then
 * the phase's number to its own line; when all lines have reached that number, it reads the others'
 * slots. A rank has two slots, used in turn: who writes phase p has seen all lines at p - 1, so that
 * nobody reads p - 2 any more.
 *
 * Sums are made in f32 in a binary tree of neighbouring ranks, on every rank alike, or once for all:
 * all ranks have the same bits, and each number has the same whatever is summed beside it. A rank that waits spins for a while and then sleeps on a futex; now and then
 * it looks whether the one it waits for still holds its lock on the file, which ends with its
 * process.
 *
 * A group fails once: behind a collective that failed, all others return at once. So a program
 * (program.c) with many of them comes to its end, and whoever ran it then reads what failed. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "common.h"

#define MAX_RANKS 16
#define SLICE 20000000LL /* ns of a sleep, after which it is looked who is still there */
#define ONE_SHOT (128 << 10) /* bytes up to which every rank makes every sum */
#define BLOCK 1024           /* numbers that are summed at once */
#define MANY (1 << 17)       /* numbers from which on several threads sum */

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { OK, LATE, GONE, FENCED, DIFFERS };

struct line {
    _Atomic uint32_t phase, sleepers;
    int64_t what[2]; /* of the last two phases: which collective, of how many bytes */
    char rest[40];
};

struct shared {
    _Atomic uint32_t fence; /* 1 + the rank that is missing */
    char rest[60];
    struct line lines[MAX_RANKS];
};

/* The same numbers as in gpu/parallel/shared_group.py. */
struct group {
    uint8_t *base;
    int64_t slot; /* bytes */
    int64_t rank, size, fd;
    int64_t spin, timeout; /* ns */
    int64_t phase;
    int64_t outcome, missing;
    int64_t threads;
};

_Static_assert(sizeof(struct shared) <= 4096, "slots begin at a page");

INLINE struct shared *shared_of(const struct group *g) { return (struct shared *)g->base; }

INLINE uint8_t *slot_of(const struct group *g, int64_t rank) {
    return g->base + 4096 + (2 * rank + (g->phase & 1)) * g->slot;
}

INLINE int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

INLINE void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
}

static int fail(struct group *g, int outcome, int64_t missing) {
    g->outcome = outcome;
    g->missing = missing;
    return 0;
}

/* Whether a rank holds its lock, which the kernel takes from a process that ends. */
static int there(const struct group *g, int64_t rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl((int)g->fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

INLINE int reached(const struct line *line, uint32_t phase) {
    return (int32_t)(atomic_load_explicit(&line->phase, memory_order_acquire) - phase) >= 0;
}

static int await(struct group *g, int64_t rank, int64_t start) {
    struct line *line = &shared_of(g)->lines[rank];
    uint32_t phase = (uint32_t)g->phase, fence;
    for (int64_t i = 1; !reached(line, phase); i++) {
        pause_briefly();
        if (i % 64 == 0 && now() - start > g->spin) break;
    }
    while (!reached(line, phase)) {
        if ((fence = atomic_load(&shared_of(g)->fence))) return fail(g, FENCED, fence - 1);
        if (!there(g, rank) && !reached(line, phase)) return fail(g, GONE, rank);
        int64_t left = start + g->timeout - now();
        if (left <= 0) return fail(g, LATE, rank);
        if (left > SLICE) left = SLICE;
        struct timespec slice = {left / 1000000000, left % 1000000000};
        atomic_fetch_add(&line->sleepers, 1);
        uint32_t seen = atomic_load(&line->phase);
        if ((int32_t)(seen - phase) < 0)
            syscall(SYS_futex, &line->phase, FUTEX_WAIT, seen, &slice, 0, 0);
        atomic_fetch_sub(&line->sleepers, 1);
    }
    return 1;
}

/* Publishes this rank's slot, and waits for those of all others. */
static int meet(struct group *g, int64_t kind, int64_t bytes) {
    struct line *lines = shared_of(g)->lines, *own = &lines[g->rank];
    int64_t what = kind << 56 | bytes, odd = g->phase & 1, start = now();
    own->what[odd] = what;
    atomic_store(&own->phase, (uint32_t)g->phase);
    if (atomic_load(&own->sleepers)) wake(&own->phase);
    for (int64_t r = 0; r < g->size; r++) {
        if (r == g->rank) continue;
        if (!await(g, r, start)) return 0;
        if (lines[r].what[odd] != what) return fail(g, DIFFERS, r);
    }
    /* One that comes too late, when the others have given up: it must not go on alone. */
    uint32_t fence = atomic_load(&shared_of(g)->fence);
    return fence ? fail(g, FENCED, fence - 1) : 1;
}

/* Sums ------------------------------------------------------------------------------------------*/

INLINE int64_t size_of(int type) { return type == FLOAT32 ? 4 : 2; }

INLINE void widen_block(float *to, const void *from, int type, int64_t at, int64_t n) {
    if (type == FLOAT32) memcpy(to, (const float *)from + at, n * 4);
    else if (type == BFLOAT16)
        for (int64_t i = 0; i < n; i++) to[i] = wide(((const bf16 *)from)[at + i]);
    else
        for (int64_t i = 0; i < n; i++) to[i] = (float)((const _Float16 *)from)[at + i];
}

INLINE void add_block(float *to, const void *from, int type, int64_t at, int64_t n) {
    if (type == FLOAT32)
        for (int64_t i = 0; i < n; i++) to[i] += ((const float *)from)[at + i];
    else if (type == BFLOAT16)
        for (int64_t i = 0; i < n; i++) to[i] += wide(((const bf16 *)from)[at + i]);
    else
        for (int64_t i = 0; i < n; i++) to[i] += (float)((const _Float16 *)from)[at + i];
}

INLINE void narrow_block(void *to, const float *from, int type, int64_t at, int64_t n) {
    if (type == FLOAT32) memcpy((float *)to + at, from, n * 4);
    else if (type == BFLOAT16)
        for (int64_t i = 0; i < n; i++) ((bf16 *)to)[at + i] = narrow(from[i]);
    else
        for (int64_t i = 0; i < n; i++) ((_Float16 *)to)[at + i] = (_Float16)from[i];
}

/* Keeps the compiler from adding what comes next before what has come. */
INLINE void settle(float *sums) { __asm__ volatile("" : : "r"(sums) : "memory"); }

/* The sum of ranks from..to at `at`: their two halves, the first the larger power of two. */
static void sum_tree(float *sums, const void *const *parts, int64_t from, int64_t to, int type,
                     int64_t at, int64_t n) {
    int64_t half = 1;
    if (to - from == 1) {
        widen_block(sums, parts[from], type, at, n);
        return;
    }
    while (2 * half < to - from) half *= 2;
    sum_tree(sums, parts, from, from + half, type, at, n);
    settle(sums);
    if (to - from - half == 1) {
        add_block(sums, parts[from + half], type, at, n);
        return;
    }
    float others[BLOCK];
    sum_tree(others, parts, from + half, to, type, at, n);
    settle(others);
    for (int64_t i = 0; i < n; i++) sums[i] += others[i];
}

/* y[0, n) = (add +) the sum over the ranks of parts[0, n). parts: of `type`; y, add: of `out`. */
static void sum_ranks(const void *const *parts, int64_t ranks, int type, const void *add, void *y,
                      int out, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (n >= MANY && threads > 1)
    for (int64_t at = 0; at < n; at += BLOCK) {
        float sums[BLOCK];
        int64_t count = n - at < BLOCK ? n - at : BLOCK;
        sum_tree(sums, parts, 0, ranks, type, at, count);
        settle(sums);
        if (add) add_block(sums, add, out, at, count);
        narrow_block(y, sums, out, at, count);
    }
}

static void slots_at(const struct group *g, int64_t offset, const void **parts) {
    for (int64_t r = 0; r < g->size; r++) parts[r] = slot_of(g, r) + offset;
}

/* Where a rank's share of n numbers begins: whole cache lines of them. */
INLINE int64_t share(const struct group *g, int64_t rank, int64_t n) {
    int64_t lines = (n + 31) / 32, at = lines * rank / g->size * 32;
    return at < n ? at : n;
}

/* Each rank sums its share, and takes the others' sums. All of x fits a slot. */
static int reduce_shares(struct group *g, const uint8_t *x, int type, const uint8_t *add,
                         uint8_t *y, int out, int64_t n) {
    int64_t each = size_of(type), wide = size_of(out);
    int64_t from = share(g, g->rank, n), to = share(g, g->rank + 1, n);
    const void *parts[MAX_RANKS];
    uint8_t *own = slot_of(g, g->rank);
    memcpy(own, x, from * each);
    memcpy(own + to * each, x + to * each, (n - to) * each);
    if (!meet(g, 1, n * each)) return 0;
    slots_at(g, from * each, parts);
    parts[g->rank] = x + from * each;
    g->phase++;
    own = slot_of(g, g->rank) + from * wide;
    sum_ranks(parts, g->size, type, add ? add + from * wide : 0, own, out, to - from,
              (int)g->threads);
    if (!meet(g, 2, n * each)) return 0;
    for (int64_t r = 0; r < g->size; r++) {
        int64_t at = share(g, r, n) * wide, end = share(g, r + 1, n) * wide;
        memcpy(y + at, slot_of(g, r) + at, end - at);
    }
    return 1;
}

/* y = (add +) the sum of x over all ranks. x: [n] of `type`; add, y: of `out`, which is no wider. */
static int reduce(struct group *g, const uint8_t *x, int type, const uint8_t *add, uint8_t *y,
                  int out, int64_t n) {
    const void *parts[MAX_RANKS];
    int64_t each = size_of(type), wide = size_of(out), most = g->slot / each;
    if (g->outcome) return 0;
    for (int64_t at = 0; at < n || (at == 0 && n == 0); at += most) {
        int64_t count = n - at < most ? n - at : most;
        const uint8_t *from = x + at * each, *more = add ? add + at * wide : 0;
        g->phase++;
        if (count * each > ONE_SHOT) {
            if (!reduce_shares(g, from, type, more, y + at * wide, out, count)) return 0;
            continue;
        }
        memcpy(slot_of(g, g->rank), from, count * each);
        if (!meet(g, 3, count * each)) return 0;
        slots_at(g, 0, parts);
        sum_ranks(parts, g->size, type, more, y + at * wide, out, count, (int)g->threads);
        if (n == 0) break;
    }
    return 1;
}

/* x: [n] of `type`, becomes the sum over all ranks. */
void rank_all_reduce(struct group *g, uint8_t *x, int64_t n, int type) {
    reduce(g, x, type, 0, x, type, n);
}

void rms_norm(const bf16 *x, const bf16 *w, bf16 *y, int64_t rows, int dim, float eps, int threads);

/* total = residual + the sum of x over all ranks, rounded once, and normed = RMSNorm(total).
 * x: [rows, dim] of `type`; residual, total, normed: bf16[rows, dim]; residual: or 0: nothing is
 * added; weight: bf16[dim], or 0: nothing is normed. */
void rank_reduce_add_norm(struct group *g, const uint8_t *x, int type, const bf16 *residual,
                          bf16 *total, const bf16 *weight, float eps, bf16 *normed, int64_t rows,
                          int dim) {
    if (reduce(g, x, type, (const uint8_t *)residual, (uint8_t *)total, BFLOAT16, rows * dim)
        && weight)
        rms_norm(total, weight, normed, rows, dim, eps, (int)g->threads);
}

/* Copies ----------------------------------------------------------------------------------------*/

/* y: [rows, width], of each row the first bytes of [ranks, bytes]; each rank's x: [rows, bytes] at
 * its place. */
void rank_all_gather(struct group *g, const uint8_t *x, uint8_t *y, int64_t rows, int64_t bytes,
                     int64_t width) {
    int64_t wide = bytes < g->slot ? bytes : g->slot, deep = wide ? g->slot / wide : 1;
    if (g->outcome) return;
    for (int64_t row = 0; row < rows; row += deep)
        for (int64_t at = 0; at < bytes; at += wide) {
            int64_t count = bytes - at < wide ? bytes - at : wide;
            int64_t last = row + deep < rows ? row + deep : rows;
            g->phase++;
            uint8_t *own = slot_of(g, g->rank);
            for (int64_t r = row; r < last; r++)
                memcpy(own + (r - row) * count, x + r * bytes + at, count);
            if (!meet(g, 5, (last - row) * count)) return;
            for (int64_t from = 0; from < g->size; from++) {
                int64_t left = width - from * bytes - at, part = left < count ? left : count;
                for (int64_t r = row; r < last && part > 0; r++)
                    memcpy(y + r * width + from * bytes + at,
                           slot_of(g, from) + (r - row) * count, part);
            }
        }
}

/* x: [bytes], becomes that of `source`. */
void rank_broadcast(struct group *g, uint8_t *x, int64_t bytes, int64_t source) {
    if (g->outcome) return;
    for (int64_t at = 0; at < bytes; at += g->slot) {
        int64_t count = bytes - at < g->slot ? bytes - at : g->slot;
        g->phase++;
        if (g->rank == source) memcpy(slot_of(g, source), x + at, count);
        if (!meet(g, 6, count)) return;
        if (g->rank != source) memcpy(x + at, slot_of(g, source), count);
    }
}

void rank_barrier(struct group *g) {
    if (g->outcome) return;
    g->phase++;
    meet(g, 7, 0);
}

/* All who wait, and all who will, learn that a rank is missing; the first to say so is heard. */
void rank_fence(struct group *g, int64_t missing) {
    struct shared *s = shared_of(g);
    uint32_t none = 0;
    atomic_compare_exchange_strong(&s->fence, &none, (uint32_t)missing + 1);
    for (int64_t r = 0; r < g->size; r++) wake(&s->lines[r].phase);
}
