/* Drafts from the text itself (kernels/reference/text_drafts.py, which says what is done). */
#include "common.h"

enum { BINS = 16, PLACES = 32 };

typedef struct {
    int32_t shortest, longest, most, votes;
    float per_match, share;
} Rules;

typedef struct {
    int32_t *matched, *at, *count, *tokens; /* the guesses of each slot; tokens: [slots, most] */
    int32_t *hits, *tests;                  /* [slots + 1, BINS]; the last row: of all slots */
} Guesses;

static void learn(int32_t *hits, int32_t *tests, int hit, int32_t limit) {
    *tests += 1;
    *hits += hit;
    if (*tests >= limit) {
        *tests /= 2;
        *hits /= 2;
    }
}

/* Of chances, by how long the match is that a token follows on. */
static int bin_of(const Rules *r, int length) {
    length = length < r->longest ? length : r->longest;
    return (length < BINS ? length : BINS) - 1;
}

/* Compares a slot's guesses with what came. */
static void settle(const Rules *r, const Guesses *g, int64_t slots, int64_t slot,
                   const int32_t *text, int32_t len) {
    const int32_t *guess = g->tokens + slot * r->most, at = g->at[slot];
    for (int i = 0; i < g->count[slot] && at + i < len; i++) {
        const int bin = bin_of(r, g->matched[slot] + i);
        const int hit = text[at + i] == guess[i];
        learn(g->hits + slot * BINS + bin, g->tests + slot * BINS + bin, hit, 32);
        learn(g->hits + slots * BINS + bin, g->tests + slots * BINS + bin, hit, 1024);
        if (!hit) break;
    }
    g->count[slot] = 0;
}

static double chance_of(const Guesses *g, int64_t slots, int64_t slot, int bin) {
    const double prior = (bin + 2.0) / (bin + 4.0);
    const double all = (g->hits[slots * BINS + bin] + 8 * prior)
                       / (g->tests[slots * BINS + bin] + 8.0);
    return (g->hits[slot * BINS + bin] + 4 * all) / (g->tests[slot * BINS + bin] + 4.0);
}

/* Bit i: the text has its last token at place begin + i, of `count`, and before it the last but one
 * where that must match as well. */
INLINE uint32_t ends_at(const int32_t *text, int32_t len, int32_t begin, int count, int pairs) {
    const int32_t last = text[len - 1], before = pairs ? text[len - 2] : 0;
    uint32_t bits = 0;
    if (pairs)
        for (int i = 0; i < count; i++)
            bits |= (uint32_t)((text[begin + i] == last) & (text[begin + i - 1] == before)) << i;
    else
        for (int i = 0; i < count; i++) bits |= (uint32_t)(text[begin + i] == last) << i;
    return bits;
}

/* Where the text's last tokens occurred before, the latest first: `places` of the token behind each
 * longest match, of which there are *found. Returns how long they are, 0 if shorter than allowed. */
static int32_t matches(const Rules *r, const int32_t *text, int32_t len, int32_t *places,
                       int32_t *found) {
    const int pairs = r->shortest > 1, limit = r->votes ? PLACES : 1;
    int32_t best = 0;
    *found = 0;
    for (int32_t end = len - 1; end > pairs; end -= 32) { /* 32 places at once */
        const int32_t begin = end - 32 > pairs ? end - 32 : pairs;
        uint32_t bits = end - begin == 32 ? ends_at(text, len, begin, 32, pairs)
                                          : ends_at(text, len, begin, end - begin, pairs);
        while (bits) {
            const int top = 31 - __builtin_clz(bits);
            const int32_t p = begin + top;
            int32_t m = 1 + pairs;
            bits ^= 1u << top;
            while (m < r->longest && m <= p && text[p - m] == text[len - 1 - m]) m++;
            if (m > best) *found = 0;
            if (m < best || m < r->shortest || *found >= limit) continue;
            best = m;
            places[(*found)++] = p + 1;
            if (m == r->longest && *found == limit) return best;
        }
    }
    return best;
}

/* What stands at a place of the text and of what was written behind it. */
INLINE int32_t token_at(const int32_t *text, int32_t len, const int32_t *out, int32_t at) {
    return at < len ? text[at] : out[at - len];
}

/* Writes what follows on the places, as most of them have it, to `out`. Returns how many tokens. */
static int follow(const Rules *r, const int32_t *text, int32_t len, int32_t matched,
                  int32_t *places, int found, int32_t *out) {
    const float fewest = r->share * (float)found, limit = r->per_match * (float)matched;
    int n = 0;
    while (n < r->most && (float)n < limit) {
        int most = 0;
        int32_t token = 0;
        for (int i = 0; i < found && 2 * most <= found; i++) {
            const int32_t own = token_at(text, len, out, places[i] + n);
            int votes = 0;
            for (int j = 0; j < found; j++) votes += own == token_at(text, len, out, places[j] + n);
            if (votes > most) most = votes, token = own;
        }
        if (token < 0 || (float)most < fewest) break;
        int kept = 0;
        for (int i = 0; i < found; i++)
            if (token == token_at(text, len, out, places[i] + n)) places[kept++] = places[i];
        found = kept;
        out[n++] = token;
    }
    return n;
}

/* Notes what follows on a slot's matches in `text`, i32[size], as its guesses, and their chances:
 * f64[most]. len: of the slot's own text; matched: how long the matches are. */
static void guess(const Rules *r, const Guesses *g, int64_t slots, int64_t slot,
                  const int32_t *text, int32_t size, int32_t len, int32_t matched, int32_t *places,
                  int found, double *chances) {
    double right = 1;
    if (matched) g->at[slot] = len, g->matched[slot] = matched;
    const int count = follow(r, text, size, matched, places, found, g->tokens + slot * r->most);
    for (int k = 0; k < r->most; k++) {
        right = k < count ? right * chance_of(g, slots, slot, bin_of(r, matched + k)) : 0;
        chances[k] = right;
    }
    g->count[slot] = count;
}

/* text: i32[slots, width]; lens: i32[slots]; rows: i32[n], slots; chances: f64[n, most]; the rest:
 * fields of TextGuesses and TextRules. */
void text_drafts(const int32_t *text, int64_t width, int64_t slots, const int32_t *lens,
                 const int32_t *rows, int64_t n, double *chances, int32_t *matched, int32_t *at,
                 int32_t *count, int32_t *tokens, int32_t *hits, int32_t *tests, int shortest,
                 int longest, int most, int votes, double per_match, double share, int threads) {
    const Rules r = {shortest, longest, most, votes, (float)per_match, (float)share};
    const Guesses g = {matched, at, count, tokens, hits, tests};
    for (int64_t i = 0; i < n; i++)
        settle(&r, &g, slots, rows[i], text + rows[i] * width, lens[rows[i]]);
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (n >= 16)
    for (int64_t i = 0; i < n; i++) {
        const int64_t slot = rows[i];
        const int32_t *own = text + slot * width, len = lens[slot];
        int32_t places[PLACES], found;
        const int32_t m = matches(&r, own, len, places, &found);
        guess(&r, &g, slots, slot, own, len, len, m, places, found, chances + i * most);
    }
}

/* --- of answers that have ended (kernels/reference/earlier_answers.py) --- */

enum { ANCHOR = 3, WALK = 32 };

typedef struct {
    int32_t *text, *before, *newest;
    int64_t *owner, size, mask;
} Answers;

/* Where the newest place is noted that ends in these tokens, of which `last` is the last. */
static int64_t note_of(const Answers *a, int64_t owner, const int32_t *last) {
    uint64_t mixed = (uint64_t)owner;
    for (int i = 0; i < ANCHOR; i++) {
        mixed = (mixed ^ (uint32_t)last[-i]) * 0x9E3779B97F4A7C15u;
        mixed ^= mixed >> 32;
    }
    return mixed & a->mask;
}

void add_answer(int32_t *text, int64_t *owner, int32_t *before, int32_t *newest, int64_t mask,
                int64_t at, const int32_t *tokens, int64_t n, int64_t whose) {
    const Answers a = {text, before, newest, owner, 0, mask};
    for (int64_t i = 0; i < n; i++) {
        text[at + i] = tokens[i], owner[at + i] = whose;
        if (i < ANCHOR - 1) continue;
        int32_t *note = newest + note_of(&a, whose, tokens + i);
        before[at + i] = *note, *note = at + i + 1;
    }
    text[at + n] = -1, owner[at + n] = 0;
}

/* As `matches`, in the answers of this owner; they are as long as the anchor at least. */
static int32_t earlier_matches(const Rules *r, const Answers *a, int64_t end, int64_t whose,
                               const int32_t *text, int32_t len, int32_t *places, int32_t *found) {
    const int32_t longest = r->longest > ANCHOR ? r->longest : ANCHOR;
    int32_t best = ANCHOR, next = a->newest[note_of(a, whose, text + len - 1)];
    int64_t age = 0;
    *found = 0;
    for (int i = 0; next && i < WALK; i++) {
        const int32_t p = next - 1;
        const int64_t older = p < end ? end - p : end - p + a->size;
        int32_t m = 0;
        if (older <= age) break; /* written over since */
        age = older, next = a->before[p];
        if (a->owner[p] != whose) continue;
        while (m < longest && m <= p && m < len && a->text[p - m] == text[len - 1 - m]) m++;
        if (m > best) *found = 0;
        if (m >= best) best = m, places[(*found)++] = p + 1;
    }
    return *found ? best : 0;
}

/* Puts guesses from earlier answers in the place of those of shorter matches. end: where the next
 * answer goes; whose: i64[slots], 0 = nobody's; the rest as for `text_drafts`. */
void earlier_drafts(int32_t *answers, int64_t *owner, int32_t *before, int32_t *newest,
                    int64_t size, int64_t mask, int64_t end, const int64_t *whose,
                    const int32_t *text, int64_t width, int64_t slots, const int32_t *lens,
                    const int32_t *rows, int64_t n, double *chances, int32_t *matched, int32_t *at,
                    int32_t *count, int32_t *tokens, int32_t *hits, int32_t *tests, int shortest,
                    int longest, int most, int votes, double per_match, double share,
                    int threads) {
    const Rules r = {shortest, longest, most, votes, (float)per_match, (float)share};
    const Guesses g = {matched, at, count, tokens, hits, tests};
    const Answers a = {answers, before, newest, owner, size, mask};
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (n >= 16)
    for (int64_t i = 0; i < n; i++) {
        const int64_t slot = rows[i];
        const int32_t len = lens[slot], had = count[slot] ? matched[slot] : 0;
        int32_t places[WALK], found;
        if (!whose[slot] || len < ANCHOR || had >= longest) continue;
        const int32_t m =
            earlier_matches(&r, &a, end, whose[slot], text + slot * width, len, places, &found);
        if (m <= had) continue;
        guess(&r, &g, slots, slot, answers, size, len, m, places, found, chances + i * most);
    }
}
