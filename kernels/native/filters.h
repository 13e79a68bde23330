/* min_p, top_k and top_p of rows of scores: what `reference/logit_filters.py` keeps. Weights are float32, their sums
   float64 in the order of the row, rounded to float32 where they are compared. */

enum { MOST_GROUPS = 1024, FEW = 16, FILTERED_AT_ONCE = 1 << 13 };

/* A token as a number: of two tokens the one with the higher score has the larger, of equal scores the lower id. */
INLINE uint64_t rank_of(float score, int64_t token) {
    const uint32_t bits = bits_of(score + 0.0f); /* of 0 for -0, which equals it */
    return (uint64_t)(bits >> 31 ? ~bits : bits | 0x80000000) << 32 | (uint32_t)~token;
}

INLINE int64_t token_of(uint64_t rank) { return (uint32_t)~rank; }

INLINE float score_of(uint64_t rank) {
    const uint32_t bits = rank >> 32;
    return float_of(bits >> 31 ? bits & 0x7fffffff : ~bits);
}

/* Move the ranks above the median of three of them to the front. Returns how many they are: at least one, and at least
   two fewer than all. No two ranks are equal. */
static int64_t divide_ranks(uint64_t *ranks, int64_t count) {
    const uint64_t a = ranks[0], b = ranks[count / 2], c = ranks[count - 1];
    const uint64_t low = a < b ? a : b, high = a < b ? b : a, middle = c < low ? low : c < high ? c : high;
    for (int64_t i = 0, j = count - 1;;) {
        while (ranks[i] > middle)
            i++;
        while (ranks[j] <= middle)
            j--;
        if (i > j)
            return i;
        const uint64_t moved = ranks[i];
        ranks[i] = ranks[j];
        ranks[j] = moved;
    }
}

static void sort_ranks(uint64_t *ranks, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        const uint64_t moved = ranks[i];
        int64_t at = i;
        for (; at > 0 && ranks[at - 1] < moved; at--)
            ranks[at] = ranks[at - 1];
        ranks[at] = moved;
    }
}

/* Move the `k` largest ranks to the front, the least of them last; 0 < k <= count. */
static void select_ranks(uint64_t *ranks, int64_t count, int64_t k) {
    int64_t begin = 0, end = count;
    while (end - begin > FEW) {
        const int64_t above = divide_ranks(ranks + begin, end - begin);
        if (k <= begin + above)
            end = begin + above;
        else
            begin += above;
    }
    sort_ranks(ranks + begin, end - begin);
}

/* The sum of e^(score - highest), lane by lane. */
INLINE double sum_of_weights(const uint64_t *ranks, int64_t count, float highest) {
    double sums[LANES] = {0}, all = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        float x[LANES];
        for (int l = 0; l < LANES; l++)
            x[l] = i + l < count ? score_of(ranks[i + l]) : -INFINITY;
        store(x, exp_(load(x) - splat(highest)));
        for (int l = 0; l < LANES; l++)
            sums[l] += x[l];
    }
    for (int l = 0; l < LANES; l++)
        all += sums[l];
    return all;
}

/* Move the largest ranks to the front until the weights before the next one are `wanted`. Returns how many they are, at
   least one. */
static int64_t select_weights(uint64_t *ranks, int64_t count, float highest, float wanted) {
    int64_t begin = 0, end = count;
    double before = 0;
    while (end - begin > FEW) {
        const int64_t above = divide_ranks(ranks + begin, end - begin);
        const double weight = sum_of_weights(ranks + begin, above, highest);
        if (before + weight >= wanted) {
            end = begin + above;
        } else {
            before += weight;
            begin += above;
        }
    }
    sort_ranks(ranks + begin, end - begin);
    for (; begin < end; begin++) {
        const float weight = exp_(splat(score_of(ranks[begin]) - highest))[0];
        if (!((float)(before + weight) - weight < wanted))
            break;
        before += weight;
    }
    return begin ? begin : 1;
}

/* A score that at least `k` tokens reach, found quickly: the k-th largest among the largest of groups of tokens; or
   -infinity. `ranks` is for MOST_GROUPS. */
static float reached_by(const float *scores, int64_t size, int64_t k, uint64_t *ranks) {
    const int64_t vectors = size / LANES, wanted = (4 * k + LANES - 1) / LANES;
    int64_t sets = vectors / 4 < wanted ? vectors / 4 : wanted;
    sets = sets < MOST_GROUPS / LANES ? sets : MOST_GROUPS / LANES;
    if (sets * LANES < k)
        return -INFINITY;
    float largest[MOST_GROUPS];
    for (int64_t set = 0; set < sets; set++) {
        vf most = load(scores + set * LANES);
        for (int64_t v = set + sets; v < vectors; v += sets)
            most = largest_of(load(scores + v * LANES), most);
        store(largest + set * LANES, most);
    }
    for (int64_t i = 0; i < sets * LANES; i++)
        ranks[i] = rank_of(largest[i], i);
    select_ranks(ranks, sets * LANES, k);
    return score_of(ranks[k - 1]);
}

/* The tokens whose score is at least `least` and finite; `least` may be -infinity. Returns how many they are. */
static int64_t collect(const float *scores, int64_t size, float least, uint64_t *ranks) {
    const float bound = least > -FLT_MAX ? least : -FLT_MAX;
    const int64_t whole = size / LANES * LANES;
    int64_t found = 0;
    for (int64_t i = 0; i < whole; i += LANES)
        for (uint32_t set = lanes_set(load(scores + i) >= splat(bound)); set; set &= set - 1) {
            const int64_t token = i + __builtin_ctz(set);
            ranks[found++] = rank_of(scores[token], token);
        }
    for (int64_t i = whole; i < size; i++)
        if (scores[i] >= bound)
            ranks[found++] = rank_of(scores[i], i);
    return found;
}

/* The sum of e^(score - highest) of the scores from `least` on. */
static float total_weight(const float *scores, int64_t size, float least, float highest) {
    double sums[LANES] = {0}, all = 0;
    for (int64_t i = 0; i < size; i += LANES) {
        float x[LANES];
        if (i + LANES <= size)
            store(x, load(scores + i));
        else
            for (int l = 0; l < LANES; l++)
                x[l] = i + l < size ? scores[i + l] : -INFINITY;
        const vi kept = load(x) >= splat(least);
        store(x, (vf)((vi)exp_(load(x) - splat(highest)) & kept));
        for (int l = 0; l < LANES; l++)
            sums[l] += x[l];
    }
    for (int l = 0; l < LANES; l++)
        all += sums[l];
    return (float)all;
}

/* The largest of a row of scores; NaN where one is no number. */
INLINE float largest_score(const char *scores, int64_t size, int kind) {
    const int64_t bytes = size_of(kind);
    vf most = splat(-INFINITY);
    vi odd = most != most;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vf x = load_as(scores + i * bytes, kind);
        most = largest_of(x, most);
        odd |= x != x;
    }
    float largest = lanes_set(odd) ? NAN : largest_lane(most);
    for (; i < size; i++) {
        const float x = load_one(scores + i * bytes, kind);
        largest = x <= largest ? largest : x > largest ? x : NAN;
    }
    return largest;
}

/* Set the scores that are dropped to -infinity. A row without a largest score that is finite stays as it is. `ranks` is
   for `size` of them, at least MOST_GROUPS. */
static void filter_row(float *scores, int64_t size, const float *limits, uint64_t *ranks) {
    const float min_p = limits[0], top_p = limits[2], highest = largest_score((const char *)scores, size, FLOAT32);
    const int64_t top_k = limits[1] < size ? (int64_t)limits[1] : size;
    if (!(fabsf(highest) < INFINITY))
        return;
    float least = min_p > 0 ? highest + logf(min_p) : -INFINITY;
    if (!top_k && !(top_p < 1)) {
        for (int64_t i = 0; min_p > 0 && i < size; i++)
            scores[i] = scores[i] < least ? -INFINITY : scores[i];
        return;
    }
    float total = 0, bound = top_k ? reached_by(scores, size, top_k, ranks) : -INFINITY;
    if (!top_k) {
        /* All that weigh less than this are half of what may be dropped. */
        total = total_weight(scores, size, least, highest);
        bound = highest + logf((1 - top_p) * total / (2 * (float)size));
    }
    if (top_p < 1) /* What weighs nothing is never kept. */
        bound = bound > highest - 87 ? bound : highest - 87;
    int64_t found = collect(scores, size, bound > least ? bound : least, ranks);
    if (top_k && found > top_k) {
        select_ranks(ranks, found, top_k);
        found = top_k;
    }
    if (top_p < 1) {
        if (top_k)
            total = (float)sum_of_weights(ranks, found, highest);
        found = select_weights(ranks, found, highest, top_p * total);
    }
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store(scores + i, splat(-INFINITY));
    for (; i < size; i++)
        scores[i] = -INFINITY;
    for (i = 0; i < found; i++)
        scores[token_of(ranks[i])] = score_of(ranks[i]);
}

/* Memory of each thread for `filter_row`. */
static int reserve_ranks(context *c, int64_t size) {
    for (int t = 0; t < pool_threads(c->threads); t++)
        if (!reserve(&c->own[t], (size > MOST_GROUPS ? size : MOST_GROUPS) * sizeof(uint64_t)))
            return -1;
    return 0;
}

typedef struct {
    context *c;
    int64_t size;
    float *scores;
    const float *limits; /* [rows][3] */
} filter_job;

static void filter_work(void *argument, int thread, int64_t begin, int64_t end) {
    const filter_job *j = argument;
    for (int64_t row = begin; row < end; row++)
        filter_row(j->scores + row * j->size, j->size, j->limits + 3 * row, j->c->own[thread].memory);
}

static int filter(context *c, int64_t rows, int64_t size, float *scores, const float *limits) {
    filter_job j = {.c = c, .size = size, .scores = scores, .limits = limits};
    if (reserve_ranks(c, size))
        return -1;
    pool_each(c->threads, rows, 1 + FILTERED_AT_ONCE / size, filter_work, &j);
    return 0;
}
