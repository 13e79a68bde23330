/* The search of draft trees (EAGLE-2, Li et al. 2024) level by level: scores of the frontier's states, the best
   children of each, the best of all as the next frontier, and the head's states of those. */

/* A search under the first `trees` rows of a drafting. Candidates of a level begin at `starts[level]` in `tokens` and
   `values`, log-probabilities of their paths: `width` of each row in the first level, the children of each expanded
   node in turn in the others. `best` is `[depth][trees][width]`, the candidates expanded. */
typedef struct {
    const drafting *d;
    int64_t depth, words, levels; /* `levels` are found, of `depth` */
    int64_t *starts, *depths; /* [depth + 1]; [trees], lowered where `least_reach` is not reached */
    int64_t *tokens, *best;
    float *values;
} search;

/* The cache slot of a row's entry. */
INLINE int64_t slot_of(const drafting *d, int64_t row, int64_t entry) {
    return d->tables[row * d->table_blocks + entry / d->block_size] * d->block_size + entry % d->block_size;
}

/* The last norms and products write floats for the scores; the head's states stay in the context's type. */
typedef struct {
    context *c;
    const draft_head *head;
    const search *q;
    int64_t level, nodes, width; /* frontier nodes of a row, now and in the next level */
    float *scores; /* [rows * nodes][stride] */
    int64_t stride;
    float *values;
    int64_t *tokens; /* [rows][nodes][width] of this level */
} level_job;

/* Insert a value into the `found` largest so far, at most `k`, in falling order; an earlier one stays before an equal
   one. Returns how many there are now. */
INLINE int64_t insert(float value, int64_t place, int64_t k, int64_t found, float *values, int64_t *places) {
    if (found == k && !(value > values[k - 1]))
        return found;
    int64_t at = found < k ? found : k - 1;
    for (; at > 0 && value > values[at - 1]; at--) {
        values[at] = values[at - 1];
        places[at] = places[at - 1];
    }
    values[at] = value;
    places[at] = place;
    return found < k ? found + 1 : k;
}

/* The logarithm of the sum of exponentials of a row of scores, which ends with LANES numbers of -infinity. */
static float log_sum_of(const float *scores, int64_t size) {
    vf most = splat(-INFINITY);
    for (int64_t i = 0; i < size; i += LANES)
        most = largest_of(load(scores + i), most);
    const float highest = largest_lane(most);
    vf total = splat(0);
    for (int64_t i = 0; i < size; i += LANES)
        total += exp_(load(scores + i) - splat(highest));
    return highest + logf(sum_lanes(total));
}

/* Find the `k` largest of such a row, the lower index first where they are equal. Returns the logarithm of the sum of
   exponentials. */
static float best_of(const float *scores, int64_t size, int64_t k, float *values, int64_t *places) {
    int64_t found = 0;
    for (int64_t i = 0; i < size; i += LANES) {
        const float least = found < k ? -INFINITY : values[k - 1];
        if (largest_lane(largest_of(load(scores + i), splat(-INFINITY))) <= least)
            continue;
        for (int64_t j = i; j < i + LANES && j < size; j++)
            if (scores[j] > -INFINITY)
                found = insert(scores[j], j, k, found, values, places);
    }
    /* Where fewer are possible, the first impossible ones fill the list. */
    for (int64_t other = 0; found < k; other++) {
        int64_t at = 0;
        while (at < found && places[at] != other)
            at++;
        if (at == found) {
            values[found] = -INFINITY;
            places[found++] = other;
        }
    }
    return log_sum_of(scores, size);
}

/* Divide a row of scores by its temperature, filter it, add its noise, and end it with LANES numbers of -infinity. Each
   part is left out where its pointer is NULL. `tokens`: of the scores, NULL for all in order. */
static void process_scores(float *scores, int64_t size, const float *temperature, const float *limits,
                           const float *noise, const int64_t *tokens, uint64_t *own) {
    if (temperature && *temperature != 1)
        for (int64_t i = 0; i < size; i++)
            scores[i] /= *temperature;
    if (limits)
        filter_row(scores, size, limits, own);
    if (noise)
        for (int64_t i = 0; i < size; i++)
            scores[i] += noise[tokens ? tokens[i] : i];
    for (int i = 0; i < LANES; i++)
        scores[size + i] = -INFINITY;
}

static void score_work(void *argument, int thread, int64_t begin, int64_t end) {
    const level_job *j = argument;
    const drafting *d = j->q->d;
    const int64_t size = j->head->output.columns, k = j->width;
    for (int64_t node = begin; node < end; node++) {
        float *scores = j->scores + node * j->stride, *values = j->values + node * k;
        int64_t *tokens = j->tokens + node * k, row = node / j->nodes;
        const float *noise = d->noise ? d->noise[row * j->q->depth + j->level] : NULL;
        process_scores(scores, size, d->temperatures ? d->temperatures + row : NULL,
                       d->limits ? d->limits + 3 * row : NULL, noise, j->head->tokens, j->c->own[thread].memory);
        float all = best_of(scores, size, k, values, tokens);
        for (int64_t i = 0; i < k; i++) {
            values[i] -= all;
            if (!(values[i] >= -INFINITY))
                values[i] = -INFINITY;
            if (j->head->tokens)
                tokens[i] = j->head->tokens[tokens[i]];
        }
    }
}

/* Have a step's rows adapted: `each` of every one of the first `requests`, or with 0 the tokens read of them. */
static int adapt_rows(context *c, const drafting *d, int64_t requests, int64_t each, step *s) {
    if (!d->adapters)
        return 0;
    adapter_rows *spans = reserve(&c->buffers[SPANS], requests * sizeof *spans);
    if (!spans)
        return -1;
    s->spans = 0;
    s->adapted = spans;
    for (int64_t row = 0, begin = 0, end; row < requests; row++, begin = end) {
        const layer_adapter *own = d->adapters[row];
        const int64_t last = s->spans - 1;
        end = begin + (each ? each : d->ends[row] - d->starts[row]);
        if (own && last >= 0 && spans[last].end == begin && spans[last].layers == own)
            spans[last].end = end;
        else if (own)
            spans[s->spans++] = (adapter_rows){begin, end, own};
    }
    return 0;
}

/* The head's states `[count, hidden]` of tokens after `features`; `states` may not be `features`. */
static int run_head(context *c, const draft_head *h, const step *given, char *kv, size_t kv_bytes,
                    const int64_t *tokens, const char *features, char *states) {
    const int64_t count = given->rows, hidden = h->hidden;
    const size_t size = size_of(c->dtype), row_bytes = hidden * size;
    char *pairs = reserve(&c->buffers[PAIRS], count * 2 * row_bytes);
    char *spare = reserve(&c->buffers[SPARE], count * row_bytes);
    if (!pairs || !spare || reserve_own(c, hidden))
        return -1;
    float *own = c->own[0].memory;
    const char *residual = features;
    for (int64_t i = 0; i < count; i++) {
        char *pair = pairs + i * 2 * row_bytes;
        char *embedded = h->kind == WITHOUT_FEATURES ? spare + i * row_bytes : pair;
        embed(h->embedding, h->packed_embedding, hidden, tokens[i], embedded, c->dtype);
        if (h->kind == WITH_INPUT_PRODUCT) {
            memcpy(pair + row_bytes, features + i * row_bytes, row_bytes);
        } else if (h->kind == WITH_NORMS) {
            to_floats(own, embedded, hidden, c->dtype);
            norm_row(own, h->embed_norm, h->eps, hidden, own);
            from_floats(pair, own, hidden, c->dtype);
            to_floats(own, features + i * row_bytes, hidden, c->dtype);
            norm_row(own, h->state_norm, h->eps, hidden, own);
            from_floats(pair + row_bytes, own, hidden, c->dtype);
            if (h->residual_is_normed)
                memcpy(spare + i * row_bytes, pair + row_bytes, row_bytes);
        }
    }
    if (h->kind == WITH_INPUT_PRODUCT && run_product(c, &h->input, count, pairs, spare))
        return -1;
    if (h->kind != WITH_NORMS || h->residual_is_normed)
        residual = spare;
    step s = *given;
    for (int64_t l = 0; l < h->layers; l++) {
        s.kv = kv + l * kv_bytes;
        s.layer = l;
        if (run_layer(c, h->layer[l], &s, l == 0 && h->kind == WITH_NORMS ? pairs : NULL, residual, states))
            return -1;
        if (l + 1 < h->layers) {
            memcpy(spare, states, count * row_bytes);
            residual = spare;
        }
    }
    return h->states_are_normed ? norm(c, count, hidden, states, h->norm, h->eps, states) : 0;
}

/* Scores of the children of all states. */
static int run_readout(context *c, const draft_head *h, int64_t count, const char *states, float *scores,
                       int64_t stride) {
    const char *inputs = states;
    if (h->norm && !h->states_are_normed) {
        char *normed = reserve(&c->buffers[SPARE], count * h->hidden * size_of(c->dtype));
        if (!normed || norm(c, count, h->hidden, states, h->norm, h->eps, normed))
            return -1;
        inputs = normed;
    }
    return run_product_into(c, &h->output, NULL, count, inputs, scores, stride);
}

/* The frontier: the nodes to expand next, `width` of each row. */
typedef struct {
    char *states, *features; /* of the nodes, and of their parents: [trees * width][hidden] */
    char *cos, *sin;
    uint64_t *bits, *parent_bits; /* ancestors of the nodes and of their parents: [trees * width][words] */
    int64_t *tokens, *slots, *visible, *request, *parents, *lengths;
    float *reached; /* log-probability of each node's path */
} frontier;

static int reserve_frontier(context *c, const draft_head *h, const search *q, frontier *f) {
    const size_t most = q->d->trees * q->d->width, size = size_of(c->dtype);
    const size_t row_bytes = h->hidden * size, rotary_bytes = h->layer[0]->head_dim * size;
    char *states = reserve(&c->buffers[FRONTIER], 2 * most * row_bytes);
    char *rotary = reserve(&c->buffers[ROTARY], 2 * most * rotary_bytes);
    uint64_t *bits = reserve(&c->buffers[BITS], 2 * most * q->words * 8);
    int64_t *numbers = reserve(&c->buffers[NUMBERS], (6 * most + q->d->trees) * 8);
    if (!states || !rotary || !bits || !numbers)
        return -1;
    *f = (frontier){states, states + most * row_bytes, rotary, rotary + most * rotary_bytes, bits,
                    bits + most * q->words, numbers, numbers + most, numbers + 2 * most, numbers + 3 * most,
                    numbers + 4 * most, numbers + 6 * most, (float *)(numbers + 5 * most)};
    return 0;
}

/* Take a row's best candidates as its next frontier. Returns the levels that the row is to have. */
static int64_t choose_frontier(const level_job *job, int64_t row, frontier *f) {
    const search *q = job->q;
    const int64_t width = job->width, candidates = job->nodes * width;
    float *values = job->values + row * candidates, chosen[LARGEST_WIDTH], sum = 0;
    float *reached = f->reached + row * width;
    int64_t *best = q->best + (job->level * q->d->trees + row) * width, found = 0;
    for (int64_t i = 0; i < candidates; i++) {
        if (job->level)
            values[i] += reached[i / width];
        found = insert(values[i], i, width, found, chosen, best);
    }
    for (int64_t i = 0; i < width; i++) {
        reached[i] = chosen[i];
        sum += expf(chosen[i]);
        f->tokens[row * width + i] = job->tokens[row * candidates + best[i]];
        f->parents[row * width + i] = best[i] / width;
    }
    if (sum < q->d->least_reach && q->depths[row] > job->level + 1)
        q->depths[row] = job->level + 1;
    return q->depths[row];
}

/* Write what the head needs to know of a row's frontier, besides its tokens. */
static void place_frontier(const level_job *job, int64_t row, frontier *f) {
    const search *q = job->q;
    const drafting *d = q->d;
    const int64_t width = job->width, words = q->words, level = job->level, base = d->ends[row];
    const size_t size = size_of(job->c->dtype), row_bytes = job->head->hidden * size;
    const size_t rotary_bytes = job->head->layer[0]->head_dim * size;
    const char *rotary = (const char *)d->rotary + (base - d->first + level) * 2 * rotary_bytes;
    f->lengths[row] = base + (level + 1) * width;
    for (int64_t i = 0; i < width; i++) {
        const int64_t node = row * width + i, index = level * width + i, parent = f->parents[node];
        memcpy(f->features + node * row_bytes, f->states + (row * job->nodes + parent) * row_bytes, row_bytes);
        memcpy(f->cos + node * rotary_bytes, rotary, rotary_bytes);
        memcpy(f->sin + node * rotary_bytes, rotary + rotary_bytes, rotary_bytes);
        f->slots[node] = slot_of(d, row, base + index);
        f->visible[node] = base;
        f->request[node] = row;
        for (int64_t w = 0; w < words; w++)
            f->bits[node * words + w] = level ? f->parent_bits[(row * width + parent) * words + w] : 0;
        f->bits[node * words + index / 64] |= (uint64_t)1 << index % 64;
    }
}

/* Search from the roots' states in `f->states`. */
static int run_search(context *c, const draft_head *h, search *q, frontier *f) {
    const drafting *d = q->d;
    const int64_t trees = d->trees, most = trees * d->width;
    const int64_t stride = (h->output.columns + 2 * LANES - 1) / LANES * LANES;
    float *scores = reserve(&c->buffers[SCORES], most * stride * 4);
    if (!scores || (d->limits && reserve_ranks(c, h->output.columns)))
        return -1;
    q->starts[0] = 0;
    for (int64_t level = 0;; level++) {
        const int64_t nodes = level ? d->width : 1, start = q->starts[level];
        level_job job = {
            .c = c, .head = h, .q = q, .level = level, .nodes = nodes, .width = d->width, .scores = scores,
            .stride = stride, .values = q->values + start, .tokens = q->tokens + start,
        };
        q->starts[level + 1] = start + trees * nodes * d->width;
        if (run_readout(c, h, trees * nodes, f->states, scores, stride))
            return -1;
        pool_each(c->threads, trees * nodes, 1, score_work, &job);
        int64_t deepest = 0;
        for (int64_t row = 0; row < trees; row++) {
            int64_t depth = choose_frontier(&job, row, f);
            deepest = depth > deepest ? depth : deepest;
        }
        q->levels = level + 1;
        if (q->levels >= deepest)
            return 0;
        for (int64_t row = 0; row < trees; row++)
            place_frontier(&job, row, f);
        step s = {
            .rows = most, .words = q->words, .table_blocks = d->table_blocks, .block_size = d->block_size,
            .first = d->first, .kv_kind = d->kv_kind, .slot_bytes = d->slot_bytes, .slots = f->slots,
            .request = f->request, .tables = d->tables, .visible = f->visible, .ancestors = (const int64_t *)f->bits,
            .tree_starts = d->ends, .lengths = f->lengths, .cos = f->cos, .sin = f->sin,
        };
        if (adapt_rows(c, d, trees, d->width, &s) ||
            run_head(c, h, &s, d->kv, d->kv_bytes, f->tokens, f->features, f->states))
            return -1;
        uint64_t *spare = f->parent_bits;
        f->parent_bits = f->bits;
        f->bits = spare;
    }
}
