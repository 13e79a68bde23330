/* A call of the drafter with a block head: context rows of the tokens read, one pass over a block of rows under each
   root, the best candidates of its slots, and trees of those by a low-rank score of which token follows which. */

typedef struct {
    context *c;
    const block_head *h;
    const drafting *d;
    search *q;
    const int64_t *roots; /* [trees] */
    const char *states; /* [trees][depth][hidden], of the slots */
    int64_t kept, room, stride; /* candidates of a slot; floats of their scores and of all scores */
    float *scores, *values, *rest; /* [trees][depth][stride]; [..][room], with noise; [..], of the other tokens */
    int64_t *places; /* [trees][depth][kept], columns of the output */
    float *gates; /* [trees][depth][all_gates], what the slots' states add to them */
} block_job;

/* Keys and values of a token in all layers, from its row of the context's product. */
typedef struct {
    context *c;
    const block_head *h;
    const drafting *d;
    float *rows; /* [count][columns] */
    const int64_t *slots, *positions;
} context_job;

static void context_work(void *argument, int thread, int64_t begin, int64_t end) {
    const context_job *j = argument;
    const block_head *h = j->h;
    const int dtype = j->c->dtype;
    const int64_t dim = h->layer[0]->head_dim, kv_heads = h->layer[0]->kv_heads;
    const size_t size = size_of(dtype);
    float *cos = j->c->own[thread].memory, *sin = cos + dim;
    for (int64_t row = begin; row < end; row++) {
        const char *rotary = (const char *)j->d->rotary + j->positions[row] * 2 * dim * size;
        to_floats(cos, rotary, dim, dtype);
        to_floats(sin, rotary + dim * size, dim, dtype);
        for (int64_t l = 0; l < h->layers; l++) {
            float *x = j->rows + (row * h->layers + l) * 2 * kv_heads * dim;
            for (int64_t head = 0; head < kv_heads; head++) {
                if (h->key_norms)
                    norm_row(x + head * dim, h->key_norms + l * dim, h->eps, dim, x + head * dim);
                rotate_head(x + head * dim, cos, sin, dim);
            }
            const drafting *d = j->d;
            for (int64_t head = 0; head < 2 * kv_heads; head++)
                store_head((char *)d->kv + l * d->kv_bytes, (int)d->kv_kind, d->slot_bytes, NULL, j->slots[row], head,
                           kv_heads, dim, x + head * dim);
        }
    }
}

/* Write the context rows of the tokens read: entry i is of the token before. */
static int write_context(context *c, const block_head *h, const drafting *d) {
    int64_t count = 0;
    for (int64_t row = 0; row < d->rows; row++)
        count += d->ends[row] - d->starts[row];
    const size_t row_bytes = h->hidden * size_of(c->dtype);
    char *features = reserve(&c->buffers[READ], count * row_bytes);
    float *rows = reserve(&c->buffers[PAIRS], count * h->context.columns * 4);
    int64_t *slots = reserve(&c->buffers[READ_NUMBERS], count * 2 * 8);
    if (!features || !rows || !slots)
        return -1;
    int64_t *positions = slots + count, at = 0;
    for (int64_t row = 0; row < d->rows; row++)
        for (int64_t entry = d->starts[row]; entry < d->ends[row]; entry++, at++) {
            memcpy(features + at * row_bytes, (const char *)d->features + slot_of(d, row, entry - d->first) * row_bytes,
                   row_bytes);
            slots[at] = slot_of(d, row, entry);
            positions[at] = entry - d->first;
        }
    step s = {.rows = count, .layer = h->layers};
    if (norm(c, count, h->hidden, features, h->hidden_norm, h->eps, features) ||
        adapt_rows(c, d, d->rows, 0, &s) ||
        run_product_into(c, &h->context, &s, count, features, rows, h->context.columns) ||
        reserve_own(c, 2 * h->layer[0]->head_dim))
        return -1;
    context_job j = {.c = c, .h = h, .d = d, .rows = rows, .slots = slots, .positions = positions};
    pool_each(c->threads, count, 1, context_work, &j);
    return 0;
}

/* Whether no row of a block depends on those behind it, so that a pass may end with the last one needed. */
static int is_causal(const block_head *h) {
    for (int64_t l = 0; l < h->layers; l++)
        if (!h->causal[l])
            return 0;
    return 1;
}

/* The normed states of the slots under each root, `[trees][depth][hidden]`; NULL without memory. */
static char *run_block(context *c, const block_head *h, const drafting *d, const int64_t *roots, int64_t depth) {
    const int64_t first = h->rows - h->slots, rows = is_causal(h) ? first + depth : h->rows;
    const int64_t most = d->trees * rows, words = (rows + 63) / 64;
    const size_t size = size_of(c->dtype), row_bytes = h->hidden * size, rotary_bytes = h->layer[0]->head_dim * size;
    char *states = reserve(&c->buffers[FRONTIER], 2 * most * row_bytes), *spare = states + most * row_bytes;
    char *cos = reserve(&c->buffers[ROTARY], 2 * most * rotary_bytes), *sin = cos + most * rotary_bytes;
    uint64_t *bits = reserve(&c->buffers[BITS], 2 * most * words * 8), *causal = bits + most * words;
    int64_t *slots = reserve(&c->buffers[NUMBERS], (3 * most + d->trees) * 8);
    if (!states || !cos || !bits || !slots)
        return NULL;
    int64_t *request = slots + most, *visible = request + most, *lengths = visible + most;
    memset(bits, 0, 2 * most * words * 8);
    for (int64_t tree = 0, at = 0; tree < d->trees; tree++) {
        const int64_t base = d->ends[tree];
        lengths[tree] = base + rows;
        for (int64_t row = 0; row < rows; row++, at++) {
            const int64_t token = row ? h->mask : roots[tree];
            const char *rotary = (const char *)d->rotary + (base - d->first + row) * 2 * rotary_bytes;
            embed(h->embedding, h->packed_embedding, h->hidden, token, states + at * row_bytes, c->dtype);
            memcpy(cos + at * rotary_bytes, rotary, rotary_bytes);
            memcpy(sin + at * rotary_bytes, rotary + rotary_bytes, rotary_bytes);
            slots[at] = slot_of(d, tree, base + row);
            request[at] = tree;
            visible[at] = base;
            for (int64_t other = 0; other < rows; other++) {
                bits[at * words + other / 64] |= (uint64_t)1 << other % 64;
                if (other <= row)
                    causal[at * words + other / 64] |= (uint64_t)1 << other % 64;
            }
        }
    }
    step s = {
        .rows = most, .words = words, .table_blocks = d->table_blocks, .block_size = d->block_size, .first = d->first,
        .kv_kind = d->kv_kind, .slot_bytes = d->slot_bytes, .slots = slots, .request = request, .tables = d->tables,
        .visible = visible, .tree_starts = d->ends, .lengths = lengths, .cos = cos, .sin = sin,
    };
    if (adapt_rows(c, d, d->trees, rows, &s))
        return NULL;
    for (int64_t l = 0; l < h->layers; l++) {
        s.kv = (char *)d->kv + l * d->kv_bytes;
        s.layer = l;
        s.ancestors = (const int64_t *)(h->causal[l] ? causal : bits);
        if (run_layer(c, h->layer[l], &s, NULL, states, spare))
            return NULL;
        char *swapped = states;
        states = spare;
        spare = swapped;
    }
    for (int64_t tree = 0; tree < d->trees; tree++)
        memcpy(spare + tree * depth * row_bytes, states + (tree * rows + first) * row_bytes, depth * row_bytes);
    return norm(c, d->trees * depth, h->hidden, spare, h->norm, h->eps, spare) ? NULL : spare;
}

/* Find the `k` largest of a row of scores, in any order; impossible ones have no place among them. The row ends with
   LANES numbers of -infinity. Returns how many there are. */
static int64_t largest_of_row(const float *scores, int64_t size, int64_t k, float *values, int64_t *places) {
    uint64_t ranks[2 * LARGEST_WIDTH + LANES];
    int64_t count = 0;
    float least = -INFINITY;
    for (int64_t i = 0; i < size; i += LANES) {
        for (uint32_t more = lanes_set(load(scores + i) > splat(least)); more; more &= more - 1) {
            const int64_t place = i + __builtin_ctz(more);
            ranks[count++] = rank_of(scores[place], place);
        }
        if (count > 2 * LARGEST_WIDTH) {
            select_ranks(ranks, count, k);
            count = k;
            least = score_of(ranks[k - 1]);
        }
    }
    if (count > k) {
        select_ranks(ranks, count, k);
        count = k;
    }
    for (int64_t i = 0; i < count; i++) {
        values[i] = score_of(ranks[i]);
        places[i] = token_of(ranks[i]);
    }
    return count;
}

/* The best candidates of slots, by their scores with the noise of their position. */
static void slot_work(void *argument, int thread, int64_t begin, int64_t end) {
    const block_job *j = argument;
    const drafting *d = j->d;
    const int64_t size = j->h->output.columns, depth = j->q->depth, kept = j->kept;
    for (int64_t item = begin; item < end; item++) {
        const int64_t tree = item / depth, slot = item % depth;
        if (slot >= j->q->depths[tree])
            continue;
        float *scores = j->scores + item * j->stride, *values = j->values + item * j->room;
        const float *noise = d->noise ? d->noise[item] : NULL;
        process_scores(scores, size, d->temperatures ? d->temperatures + tree : NULL,
                       d->limits ? d->limits + 3 * tree : NULL, noise, j->h->tokens, j->c->own[thread].memory);
        const int64_t found = largest_of_row(scores, size, kept, values, j->places + item * kept);
        const int64_t is_whole = found < kept || kept == size;
        for (int64_t i = found; i < j->room; i++)
            values[i] = -INFINITY;
        for (int64_t i = found; i < kept; i++) /* none is possible, so it does not matter which */
            j->places[item * kept + i] = 0;
        j->rest[item] = -INFINITY;
        if (is_whole) /* rounding must not make others where there are none */
            continue;
        const float all = log_sum_of(scores, size), share = expf(log_sum_of(values, kept) - all);
        if (share < 1)
            j->rest[item] = all + log1pf(-share);
    }
}

/* What the states of slots add to gates, some slots at a time. */
static void gates_work(void *argument, int thread, int64_t begin, int64_t end) {
    const block_job *j = argument;
    const size_t state_bytes = j->h->hidden * size_of(j->c->dtype);
    for (int64_t slot = begin; slot < end; slot += PATHS)
        begin_slots(j->h, end - slot < PATHS ? end - slot : PATHS, j->states + slot * state_bytes, j->c->dtype,
                    j->c->own[thread].memory, j->gates + slot * all_gates(j->h));
}

/* Search trees level by level among the slots' candidates. */
static void tree_work(void *argument, int thread, int64_t begin, int64_t end) {
    const block_job *j = argument;
    const block_head *h = j->h;
    const drafting *d = j->d;
    search *q = j->q;
    const int64_t width = d->width, kept = j->kept, rank = h->rank, stride = (rank + LANES - 1) / LANES * LANES;
    const size_t rank_bytes = rank * size_of(j->c->dtype);
    float *rows = j->c->own[thread].memory, *vectors = rows + j->room * stride, *before = vectors + width * stride;
    float *after = before + width * stride, *gates = after + width * stride;
    memset(rows, 0, (j->room + width) * stride * 4);
    for (int64_t tree = begin; tree < end; tree++) {
        int64_t frontier[LARGEST_WIDTH] = {j->roots[tree]};
        float reached[LARGEST_WIDTH] = {0}, scores[LARGEST_WIDTH + LANES + SUMMED];
        const float temperature = d->temperatures ? d->temperatures[tree] : 1;
        memset(before, 0, width * stride * 4);
        for (int64_t level = 0; level < q->depths[tree]; level++) {
            const int64_t item = tree * q->depth + level, nodes = level ? width : 1, *places = j->places + item * kept;
            int64_t at = q->starts[level] + tree * nodes * width, *best = q->best + (level * d->trees + tree) * width;
            float *values = q->values + at, chosen[LARGEST_WIDTH];
            int64_t *tokens = q->tokens + at, found = 0;
            for (int64_t i = 0; i < kept && rank; i++) {
                const int64_t token = h->tokens ? h->tokens[places[i]] : places[i];
                const int64_t row = h->scorer_rows ? h->scorer_rows[token] : token;
                to_floats(rows + i * stride, (const char *)h->successors + row * rank_bytes, rank, j->c->dtype);
            }
            for (int64_t node = 0; node < nodes && rank; node++)
                to_floats(vectors + node * stride, (const char *)h->predecessors + frontier[node] * rank_bytes, rank,
                          j->c->dtype);
            turn_into_vectors(h, nodes, stride, j->gates + item * all_gates(h), gates, vectors, before, after);
            for (int64_t node = 0; node < nodes; node++) {
                float *own = values + node * width;
                int64_t *children = tokens + node * width, count = 0;
                memcpy(scores, j->values + item * j->room, j->room * 4);
                if (rank)
                    add_edges(scores, kept, vectors + node * stride, rows, stride, temperature);
                for (int64_t i = 0; i < kept; i++)
                    count = insert(scores[i], i, width, count, own, children);
                /* The others of the slot are one more candidate. */
                scores[kept] = j->rest[item];
                for (int64_t i = kept + 1; i < j->room; i++)
                    scores[i] = -INFINITY;
                const float all = log_sum_of(scores, kept + 1);
                for (int64_t i = 0; i < width; i++) {
                    /* In this order no value rises along a path. */
                    own[i] = own[i] - all + reached[node];
                    if (!(own[i] >= -INFINITY))
                        own[i] = -INFINITY;
                    children[i] = h->tokens ? h->tokens[places[children[i]]] : places[children[i]];
                    found = insert(own[i], node * width + i, width, found, chosen, best);
                }
            }
            float sum = 0;
            for (int64_t i = 0; i < width; i++) {
                reached[i] = chosen[i];
                sum += expf(chosen[i]);
                frontier[i] = tokens[best[i]];
                memcpy(before + i * stride, after + best[i] / width * stride, stride * 4);
            }
            if (sum < d->least_reach && q->depths[tree] > level + 1)
                q->depths[tree] = level + 1;
        }
    }
}

static int run_block_drafting(context *c, const block_head *h, const drafting *d) {
    if (write_context(c, h, d))
        return -1;
    if (!d->trees)
        return 0;
    int64_t depth = 0, budget = 0, at = 0;
    for (int64_t row = 0; row < d->trees; row++) {
        depth = d->depths[row] > depth ? d->depths[row] : depth;
        budget = d->budgets[row] > budget ? d->budgets[row] : budget;
    }
    const int64_t kept = h->output.columns < LARGEST_WIDTH ? h->output.columns : LARGEST_WIDTH;
    /* Up to the end of the vectors and of the sums that include the last, and one more. */
    const int64_t room = (kept + SUMMED) / SUMMED * SUMMED + LANES;
    const int64_t stride = (h->output.columns + 2 * LANES - 1) / LANES * LANES;
    const size_t trees = d->trees, width = d->width, own = width + (depth - 1) * width * width, slots = trees * depth;
    int64_t *numbers = reserve(&c->buffers[CANDIDATES], (depth + 1 + 2 * trees + trees * (own + depth * width)
                                                         + slots * kept + 2 * own + 2 * budget) * 8);
    float *values = reserve(&c->buffers[VALUES], (trees * own + slots * (room + 1 + all_gates(h))) * 4);
    float *scores = reserve(&c->buffers[SCORES], slots * stride * 4);
    if (!numbers || !values || !scores)
        return -1;
    search q = {
        .d = d, .depth = depth, .levels = depth, .starts = numbers, .depths = numbers + depth + 1, .values = values,
    };
    int64_t *roots = q.depths + trees, *places = roots + trees;
    q.tokens = places + slots * kept;
    q.best = q.tokens + trees * own;
    memcpy(q.depths, d->depths, trees * 8);
    q.starts[0] = 0;
    for (int64_t level = 0; level < depth; level++)
        q.starts[level + 1] = q.starts[level] + trees * (level ? width : 1) * width;
    for (size_t tree = 0; tree < trees; tree++) {
        at += d->ends[tree] - d->starts[tree];
        roots[tree] = d->tokens[at - 1];
    }
    const char *states = run_block(c, h, d, roots, depth);
    if (!states || run_product_into(c, &h->output, NULL, slots, states, scores, stride))
        return -1;
    block_job j = {
        .c = c, .h = h, .d = d, .q = &q, .roots = roots, .states = states, .kept = kept, .room = room,
        .stride = stride, .scores = scores, .values = values + trees * own,
        .rest = values + trees * own + slots * room, .places = places,
        .gates = values + trees * own + slots * (room + 1),
    };
    if (d->limits && reserve_ranks(c, h->output.columns))
        return -1;
    pool_each(c->threads, slots, 1, slot_work, &j);
    if (reserve_own(c, (room + 3 * width) * (h->rank + LANES) + width * all_gates(h)) ||
        reserve_own(c, PATHS * h->hidden))
        return -1;
    if (all_gates(h))
        pool_each(c->threads, slots, PATHS, gates_work, &j);
    pool_each(c->threads, trees, 1, tree_work, &j);
    for (size_t row = 0; row < trees; row++)
        choose_nodes(&q, row, q.best + trees * depth * width);
    return 0;
}
