/* A call of the drafter: the head reads tokens that the target has passed, searches under the roots, and the best
   candidates become the trees. */

/* The head's states of the tokens read; those of the roots go to `roots`, `[trees][hidden]`. */
static int read_tokens(context *c, const draft_head *h, const drafting *d, char *roots) {
    int64_t count = 0;
    for (int64_t row = 0; row < d->rows; row++)
        count += d->ends[row] - d->starts[row];
    const size_t size = size_of(c->dtype), row_bytes = h->hidden * size, rotary_bytes = h->layer[0]->head_dim * size;
    char *features = reserve(&c->buffers[READ], count * 2 * (row_bytes + rotary_bytes));
    int64_t *numbers = reserve(&c->buffers[READ_NUMBERS], count * 4 * 8);
    if (!features || !numbers)
        return -1;
    char *states = features + count * row_bytes, *cos = states + count * row_bytes, *sin = cos + count * rotary_bytes;
    int64_t *slots = numbers, *request = numbers + count, *visible = request + count, *nothing = visible + count;
    memset(nothing, 0, count * 8);
    int64_t at = 0;
    for (int64_t row = 0; row < d->rows; row++)
        for (int64_t entry = d->starts[row]; entry < d->ends[row]; entry++, at++) {
            const char *rotary = (const char *)d->rotary + (entry - d->first) * 2 * rotary_bytes;
            memcpy(cos + at * rotary_bytes, rotary, rotary_bytes);
            memcpy(sin + at * rotary_bytes, rotary + rotary_bytes, rotary_bytes);
            if (d->features)
                memcpy(features + at * row_bytes,
                       (const char *)d->features + slot_of(d, row, entry - d->first) * row_bytes, row_bytes);
            slots[at] = slot_of(d, row, entry);
            request[at] = row;
            visible[at] = entry + 1;
        }
    step s = {
        .rows = count, .words = 1, .table_blocks = d->table_blocks, .block_size = d->block_size, .first = d->first,
        .kv_kind = d->kv_kind, .slot_bytes = d->slot_bytes, .slots = slots, .request = request, .tables = d->tables,
        .visible = visible, .ancestors = nothing, .tree_starts = d->ends, .lengths = d->ends, .cos = cos, .sin = sin,
        .firsts = d->firsts,
    };
    if (adapt_rows(c, d, d->rows, 0, &s) || run_head(c, h, &s, d->kv, d->kv_bytes, d->tokens, features, states))
        return -1;
    at = 0;
    for (int64_t row = 0; row < d->trees; row++) {
        at += d->ends[row] - d->starts[row];
        memcpy(roots + row * row_bytes, states + (at - 1) * row_bytes, row_bytes);
    }
    return 0;
}

/* Where the candidates of a level lie that are a row's own, and how many they are. */
INLINE int64_t candidates_of(const search *q, int64_t row, int64_t level, int64_t *count) {
    *count = (q->starts[level + 1] - q->starts[level]) / q->d->trees;
    return q->starts[level] + row * *count;
}

/* Keep a row's best candidates as its tree, in order of depth. `room` is for as many numbers as there are candidates
   of a row, twice, and the budget. */
static void choose_nodes(const search *q, int64_t row, int64_t *room) {
    const drafting *d = q->d;
    const int64_t levels = q->depths[row] < q->levels ? q->depths[row] : q->levels, budget = d->budgets[row];
    int64_t total = 0, found = 0, count;
    int64_t *best = room;
    float *values = (float *)(room + budget);
    /* Of equal values the shallower comes first, so that no node is kept without its parent. Impossible ones are left
       out. */
    for (int64_t level = 0; level < levels; level++) {
        const float *own = q->values + candidates_of(q, row, level, &count);
        for (int64_t i = 0; i < count; i++, total++)
            found = own[i] > -INFINITY ? insert(own[i], total, budget, found, values, best) : found;
    }
    int64_t *ranks = room + 2 * budget, *places = ranks + total, kept = 0;
    for (int64_t i = 0; i < total; i++)
        ranks[i] = -1;
    for (int64_t i = 0; i < found; i++)
        ranks[best[i]] = i;
    int64_t *nodes = d->nodes + row * d->most, *parents = d->parents + row * d->most, *order = d->ranks + row * d->most;
    float *chances = d->values + row * d->most;
    for (int64_t level = 0, before = 0, at = 0; level < levels; level++) {
        const int64_t first = candidates_of(q, row, level, &count), *tokens = q->tokens + first;
        const float *own = q->values + first;
        /* The candidates expanded for this level. */
        const int64_t *expanded = level ? q->best + ((level - 1) * d->trees + row) * d->width : NULL;
        for (int64_t i = 0; i < count; i++) {
            if (ranks[at + i] < 0)
                continue;
            nodes[kept] = tokens[i];
            parents[kept] = expanded ? places[before + expanded[i / d->width]] : -1;
            order[kept] = ranks[at + i];
            chances[kept] = own[i];
            places[at + i] = kept++;
        }
        before = at;
        at += count;
    }
    d->sizes[row] = kept;
}

static int run_drafting(context *c, const draft_head *h, const drafting *d) {
    if (!d->trees)
        return read_tokens(c, h, d, NULL);
    int64_t depth = 0, budget = 0;
    for (int64_t row = 0; row < d->trees; row++) {
        depth = d->depths[row] > depth ? d->depths[row] : depth;
        budget = d->budgets[row] > budget ? d->budgets[row] : budget;
    }
    const size_t trees = d->trees, width = d->width, own = width + (depth - 1) * width * width;
    const int64_t words = ((depth - 1) * width + 63) / 64;
    int64_t *numbers = reserve(&c->buffers[CANDIDATES], (depth + 1 + trees + trees * (own + depth * width)
                                                         + 2 * own + 2 * budget) * 8);
    float *values = reserve(&c->buffers[VALUES], trees * own * 4);
    if (!numbers || !values)
        return -1;
    search q = {
        .d = d, .depth = depth, .words = words ? words : 1, .starts = numbers, .depths = numbers + depth + 1,
        .values = values,
    };
    q.tokens = q.depths + trees;
    q.best = q.tokens + trees * own;
    memcpy(q.depths, d->depths, trees * 8);
    frontier f;
    if (reserve_frontier(c, h, &q, &f) || read_tokens(c, h, d, f.states))
        return -1;
    if (run_search(c, h, &q, &f))
        return -1;
    for (size_t row = 0; row < trees; row++)
        choose_nodes(&q, row, q.best + trees * depth * width);
    return 0;
}
