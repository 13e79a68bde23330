/* The walks of the coupled and of the rejection rule, the latter as `verify/rejection.py` says it.
   Weights e^(score - highest) are float32; sums, quotients and differences float64. */

/* Weights of tokens and their sum. */
typedef struct {
    double *weights, total;
} chances;

enum { SUMMED_TOGETHER = 256, WALKED_AT_ONCE = 1 << 12 };

/* Memory of one row's walk; each is for `size` tokens. */
typedef struct {
    const walks *w;
    const noise_key *key;
    const char *scores;                /* [1 + nodes][size] */
    const float *draft_probs;          /* the same of q, or NULL */
    const int64_t *tokens, *parents;
    int64_t nodes;
    chances p, q;
    double *spare;
} walking;

INLINE double sum_of(const double *x, int64_t count) {
    double sums[8] = {0}, all = 0;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int l = 0; l < 8; l++)
            sums[l] += x[i + l];
    for (; i < count; i++)
        sums[0] += x[i];
    for (int l = 0; l < 8; l++)
        all += sums[l];
    return all;
}

INLINE const char *scores_after(const walking *r, int64_t node) {
    return r->scores + (1 + node) * r->w->size * size_of(r->w->kind);
}

/* p after a node; returns 0 where no token can come. */
static int weigh(walking *r, int64_t node) {
    const char *scores = scores_after(r, node);
    const int64_t size = r->w->size, bytes = size_of(r->w->kind);
    const int kind = r->w->kind;
    const float highest = largest_score(scores, size, kind);
    if (!(fabsf(highest) < INFINITY))
        return 0;
    for (int64_t i = 0; i < size; i += LANES) {
        float x[LANES];
        const int64_t left = size - i < LANES ? size - i : LANES;
        if (left == LANES)
            store(x, load_as(scores + i * bytes, kind));
        else
            for (int l = 0; l < LANES; l++)
                x[l] = l < left ? load_one(scores + (i + l) * bytes, kind) : 0;
        store(x, exp_(load(x) - splat(highest)));
        for (int l = 0; l < left; l++)
            r->p.weights[i + l] = x[l];
    }
    r->p.total = sum_of(r->p.weights, size);
    return 1;
}

/* q of a node's children. */
static void weigh_draft(walking *r, int64_t node) {
    const float *q = r->draft_probs + (1 + node) * r->w->size;
    for (int64_t i = 0; i < r->w->size; i++)
        r->q.weights[i] = q[i];
    r->q.total = 1;
}

/* Whether the coin of (depth, rank) falls below a probability. Cantor's pairing numbers the coins. */
INLINE int accepts(const walking *r, int64_t depth, int64_t rank, double probability) {
    const int64_t place = (depth + rank) * (depth + rank + 1) / 2 + rank;
    return uniform_at(r->key, COIN_STREAM, place) < probability;
}

/* A token drawn from p, for the last position of a step. */
static int64_t draw(const walking *r, int64_t depth) {
    noise_key key = *r->key;
    key.position += depth;
    const double *p = r->p.weights, wanted = uniform_at(&key, RESIDUAL_STREAM, 0) * sum_of(p, r->w->size);
    double before = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < r->w->size; i += SUMMED_TOGETHER) {
        const int64_t count = r->w->size - i < SUMMED_TOGETHER ? r->w->size - i : SUMMED_TOGETHER;
        const double sum = sum_of(p + i, count);
        double reached = before;
        for (int64_t j = i; before + sum > wanted && j < i + count; j++) {
            reached += p[j];
            if (p[j] > 0 && reached > wanted)
                return j;
        }
        before += sum;
    }
    /* By rounding no sum may be above what is wanted. */
    for (int64_t i = 0; i < r->w->size; i++)
        last = p[i] > 0 ? i : last;
    return last;
}

/* p becomes max(p - q, 0), unless nothing is left. */
static void take_residual(walking *r) {
    const double *p = r->p.weights, *q = r->q.weights, of_p = 1 / r->p.total, of_q = 1 / r->q.total;
    double *rest = r->spare;
    for (int64_t i = 0; i < r->w->size; i++) {
        const double left = p[i] * of_p - q[i] * of_q;
        rest[i] = left > 0 ? left : 0;
    }
    const double total = sum_of(rest, r->w->size);
    if (total > 0) {
        r->spare = r->p.weights;
        r->p = (chances){rest, total};
    }
}

/* Take a token out, unless nothing would be left. */
static void take_token(const walking *r, chances *x, int64_t token) {
    const double had = x->weights[token];
    x->weights[token] = 0;
    const double total = sum_of(x->weights, r->w->size);
    if (total > 0)
        x->total = total;
    else
        x->weights[token] = had;
}

/* Recursive rejection sampling; see `walk_rejection`. Returns the length of the path. */
static int64_t walk_tree(walking *r, int64_t *path, int64_t *next) {
    int64_t depth = 0, node = -1;
    for (;;) {
        if (!weigh(r, node)) {
            *next = NO_TOKEN;
            return depth;
        }
        const float *q = r->draft_probs ? r->draft_probs + (1 + node) * r->w->size : NULL;
        int64_t accepted = -1, rank = 0;
        for (int64_t child = node + 1, rejected = 0; child < r->nodes && accepted < 0; child++) {
            if (r->parents[child] != node)
                continue;
            const int64_t token = r->tokens[child];
            const double of_p = r->p.weights[token] / r->p.total;
            if (!q) {
                if (accepts(r, depth, rank, of_p))
                    accepted = child;
                else
                    take_token(r, &r->p, token);
            } else {
                const double of_q = rejected ? r->q.weights[token] / r->q.total : q[token];
                /* A child that q cannot have drawn is no draw from q, so its rejection says nothing. */
                if (of_q > 0 && accepts(r, depth, rank, of_p / of_q)) {
                    accepted = child;
                } else if (of_q > 0) {
                    if (!rejected++)
                        weigh_draft(r, node);
                    take_residual(r);
                    take_token(r, &r->q, token);
                }
            }
            rank++;
        }
        if (accepted < 0) {
            *next = draw(r, depth);
            return depth;
        }
        path[depth++] = node = accepted;
    }
}

/* The argmax of each node, plus the noise of its depth where there is any, followed down the tree. */
static int64_t walk_greedily(const walking *r, const float *const *noise, int64_t *path, int64_t *next) {
    int64_t depth = 0, node = -1;
    for (;;) {
        const int64_t token = argmax_row(scores_after(r, node), noise ? noise[depth] : NULL, r->w->size, (int)r->w->kind);
        int64_t child = node + 1;
        while (child < r->nodes && (r->parents[child] != node || r->tokens[child] != token))
            child++;
        if (token == NO_TOKEN || child == r->nodes) {
            *next = token;
            return depth;
        }
        path[depth++] = node = child;
    }
}

typedef struct {
    context *c;
    const walks *w;
    const int64_t *starts; /* [rows], nodes before each */
} walk_job;

static void walk_work(void *argument, int thread, int64_t begin, int64_t end) {
    const walk_job *j = argument;
    const walks *w = j->w;
    double *own = j->c->own[thread].memory;
    for (int64_t row = begin; row < end; row++) {
        const int64_t start = j->starts[row];
        int64_t *path = w->paths + start, *next = w->next_tokens + row;
        walking r = {
            .w = w, .key = w->keys + row,
            .scores = (const char *)w->scores + (start + row) * w->size * size_of(w->kind),
            .draft_probs = w->draft_probs ? w->draft_probs[row] : NULL, .tokens = w->tokens + start,
            .parents = w->parents + start, .nodes = w->nodes[row], .p = {own, 0}, .q = {own + w->size, 0},
            .spare = own + 2 * w->size,
        };
        const float *const *noise = w->noise ? w->noise + row * w->levels : NULL;
        w->lengths[row] = w->rule == COUPLED || !w->sampled[row] ? walk_greedily(&r, noise, path, next)
                                                                 : walk_tree(&r, path, next);
    }
}

static int run_walks(context *c, const walks *w) {
    int64_t *starts = reserve(&c->buffers[NUMBERS], w->rows * sizeof *starts), count = 0;
    if (!starts)
        return -1;
    for (int64_t row = 0; row < w->rows; row++) {
        starts[row] = count;
        count += w->nodes[row];
    }
    if (reserve_own(c, w->rule == COUPLED ? 0 : 2 * 3 * w->size))
        return -1;
    walk_job j = {.c = c, .w = w, .starts = starts};
    const int64_t together = w->rule == COUPLED ? SCORES_AT_ONCE : WALKED_AT_ONCE;
    pool_each(c->threads, w->rows, 1 + together / w->size, walk_work, &j);
    return 0;
}
