/* Temperature, truncation and the draw of a row, in a few passes over it (sampling_cpu.py).
 *
 * The threshold of top-k and top-p is found without ordering the row: tokens are counted, and their
 * weights summed, in bins of how far below the likeliest they are; only the bin in which the
 * threshold lies is put in order. Most rows are decided near their top, so what is far below it is
 * binned only where that was not enough. Rows are independent of each other and of the threads. */
#include <omp.h>
#include <stdlib.h>

#include "common.h"

#define BINS 1024
#define BINS_EACH 32.0f /* for a difference of 1: the last bin begins 32 below the likeliest */
#define NEAR 4.0f       /* what is binned at first; then twice as much, ... */
#define CHUNKS 256      /* whose sums are searched before a chunk is */

struct row {
    float *scaled, *weight; /* [vocab] */
    int64_t vocab;
    float top; /* the largest scaled logit */
};

static float top_of(const float *x, int64_t count) {
    float top = -INFINITY;
    int64_t i = 0;
#ifdef FLOATS16
    floats16 a = all_lanes(top), b = a; /* where a number is nan, that of the chain stays */
    for (; i + 32 <= count; i += 32) {
        a = max_lanes(load_lanes(x + i), a);
        b = max_lanes(load_lanes(x + i + 16), b);
    }
    top = top_lanes(max_lanes(a, b));
#endif
    for (; i < count; i++) top = x[i] > top ? x[i] : top;
    return top;
}

static int64_t likeliest(const float *x, int64_t vocab) {
    float top = top_of(x, vocab);
    for (int64_t from = 0; from < vocab; from += 256) {
        int64_t to = from + 256 < vocab ? from + 256 : vocab;
        int found = 0;
        for (int64_t i = from; i < to; i++) found |= x[i] == top;
        for (int64_t i = from; found && i < to; i++)
            if (x[i] == top) return i;
    }
    return 0; /* nothing but nan */
}

static void weigh(struct row *r, const float *x, float temperature) {
    r->top = top_of(x, r->vocab) / temperature;
    float top = r->top, *scaled = r->scaled, *weight = r->weight;
#pragma omp simd
    for (int64_t i = 0; i < r->vocab; i++) {
        float s = x[i] / temperature, below = s - top, w = exp_neg(below);
        scaled[i] = s;
        weight[i] = below > -87.0f ? w : 0.0f;
    }
}

/* Whether any of 16 scaled logits may be above this. */
INLINE int some_above(const float *scaled, float least) {
#ifdef FLOATS16
    return any_above(load_lanes(scaled), all_lanes(least));
#else
    (void)scaled, (void)least;
    return 1;
#endif
}

/* The bin of a scaled logit: 0 is that of the likeliest. */
static int bin_of(const struct row *r, float scaled) {
    float at = (r->top - scaled) * BINS_EACH;
    return at < BINS - 1 ? (int)at : BINS - 1;
}

struct bins { int64_t count[BINS]; double mass[BINS]; };

/* Fills the bins of what is less than `near` below the likeliest. */
static void fill_bins(const struct row *r, float near, struct bins *b) {
    float least = r->top - near; /* itself in a bin that is not whole, or -inf and in none */
    memset(b, 0, sizeof *b);
    for (int64_t from = 0; from < r->vocab; from += 16) {
        int64_t to = from + 16 < r->vocab ? from + 16 : r->vocab;
        if (to - from == 16 && !some_above(r->scaled + from, least)) continue;
        for (int64_t i = from; i < to; i++)
            if (r->scaled[i] > least) {
                int at = bin_of(r, r->scaled[i]);
                b->count[at]++;
                b->mass[at] += r->weight[i];
            }
    }
}

static int falling(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The scaled logits of a bin in falling order; how many there are. Those of -inf are left out. */
static int64_t ordered_bin(const struct row *r, int bin, float *out) {
    int64_t n = 0;
    float from = r->top - (bin + 2) / BINS_EACH;
    if (bin == BINS - 1) from = -INFINITY;
    for (int64_t block = 0; block < r->vocab; block += 16) {
        int64_t to = block + 16 < r->vocab ? block + 16 : r->vocab;
        if (to - block == 16 && !some_above(r->scaled + block, from)) continue;
        for (int64_t i = block; i < to; i++) {
            float s = r->scaled[i];
            if (s > from && bin_of(r, s) == bin) out[n++] = s;
        }
    }
    qsort(out, (size_t)n, sizeof *out, falling);
    return n;
}

static float next_near(float near) { return near < 16 ? 2 * near : INFINITY; }

/* The scaled logit of this rank, from 1; -inf where so many are not there. */
static float of_rank(const struct row *r, int64_t rank, struct bins *b, float *out) {
    for (float near = NEAR;; near = next_near(near)) {
        int64_t before = 0;
        fill_bins(r, near, b);
        for (int bin = 0; bin < BINS; before += b->count[bin++])
            if (before + b->count[bin] >= rank) {
                /* A bin that `near` cuts is not whole. */
                if (bin + 1 >= near * BINS_EACH) break;
                return ordered_bin(r, bin, out) >= rank - before ? out[rank - before - 1] : -INFINITY;
            }
        if (near == INFINITY) return -INFINITY;
    }
}

/* The least scaled logit before which there is less mass than `wanted`. */
static float of_mass(const struct row *r, double wanted, struct bins *b, float *out) {
    for (float near = NEAR;; near = next_near(near)) {
        double before = 0;
        fill_bins(r, near, b);
        for (int bin = 0; bin < BINS; before += b->mass[bin++])
            if (before + b->mass[bin] >= wanted) {
                if (bin + 1 >= near * BINS_EACH) break;
                int64_t n = ordered_bin(r, bin, out);
                for (int64_t i = 0; i < n; i++) {
                    before += exp_neg(out[i] - r->top);
                    if (before >= wanted) return out[i];
                }
                return n ? out[n - 1] : -INFINITY;
            }
        if (near == INFINITY) return -INFINITY;
    }
}

/* Of the tokens whose scaled logit is at least this. (Pointers of their own: loops over those of a
 * struct gather.) */
static double kept_mass(const float *scaled, const float *weight, int64_t count, float least) {
    double mass = 0;
    for (int64_t from = 0; from < count; from += 256) {
        int64_t to = from + 256 < count ? from + 256 : count;
        float own = 0;
        for (int64_t i = from; i < to; i++) own += scaled[i] >= least ? weight[i] : 0.0f;
        mass += own;
    }
    return mass;
}

/* The least scaled logit that is kept; see `sampling_cpu.threshold`. */
static float threshold(const struct row *r, int64_t top_k, float top_p, float min_p, float *out) {
    struct bins bins;
    float least = -INFINITY, floor = min_p > 0 ? r->top + logf(min_p) : -INFINITY;
    if (top_k > 0 && top_k < r->vocab) least = of_rank(r, top_k, &bins, out);
    if (top_p < 1) {
        double mass = kept_mass(r->scaled, r->weight, r->vocab, least);
        float nucleus = of_mass(r, (double)top_p * mass, &bins, out);
        least = nucleus > least ? nucleus : least;
    }
    return least > floor ? least : floor;
}

/* The first token up to which there is more than this part of the mass at or above `least`. */
static int64_t draw(const struct row *r, float least, double uniform) {
    double sums[CHUNKS], total = 0, sum = 0;
    int64_t width = (r->vocab + CHUNKS - 1) / CHUNKS, last = 0;
    for (int64_t c = 0; c < CHUNKS; c++) {
        int64_t from = c * width, to = from + width < r->vocab ? from + width : r->vocab;
        sums[c] = total += kept_mass(r->scaled + from, r->weight + from, to - from, least);
    }
    double target = uniform * total;
    for (int64_t c = 0; c < CHUNKS; sum = sums[c++]) {
        if (sums[c] <= target && c + 1 < CHUNKS) continue;
        int64_t to = (c + 1) * width < r->vocab ? (c + 1) * width : r->vocab;
        for (int64_t i = c * width; i < to; i++) {
            if (!(r->scaled[i] >= least) || r->weight[i] == 0) continue;
            last = i;
            if ((sum += r->weight[i]) > target) return i;
        }
        if (last) return last; /* by how sums are rounded */
    }
    return last;
}

/* A token for each of `rows` rows. temperature: of each row, 0 = the likeliest; 0 for all where the
 * pointer is. uniform: in [0, 1). scratch: 3 * threads * vocab. */
void sample_rows(const float *logits, int64_t rows, int64_t vocab, const float *temperature,
                 const int32_t *top_k, const float *top_p, const float *min_p,
                 const double *uniform, int64_t *out, float *scratch, int threads) {
#pragma omp parallel num_threads(threads) if (rows > 1 && rows * vocab > 32768)
    {
        int own = omp_get_thread_num();
        float *at = scratch + 3 * own * vocab;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < rows; i++) {
            const float *x = logits + i * vocab;
            if (!temperature || temperature[i] <= 0) {
                out[i] = likeliest(x, vocab);
                continue;
            }
            struct row r = {at, at + vocab, vocab, 0};
            weigh(&r, x, temperature[i]);
            out[i] = draw(&r, threshold(&r, top_k[i], top_p[i], min_p[i], at + 2 * vocab), uniform[i]);
        }
    }
}
