/* The search of draft trees (EAGLE-2, Li et al. 2024) level by level: scores of the frontier's states, the best
   children of each, the best of all as the next frontier, and the head's states of those. */

/* The last norms and products write floats for the scores; the head's states stay in the context's type. */
typedef struct {
    context *c;
    const draft_head *head;
    const search *q;
    int64_t level, nodes; /* frontier nodes of a row */
    float *scores; /* [rows * nodes][stride] */
    int64_t stride;
    float *values;
    int64_t *tokens; /* [rows][nodes][width] of this level */
} level_job;

/* Keep the `k` largest of a row of scores, the lower index first where they are equal; the row ends with LANES numbers
   of -infinity. Returns the logarithm of the sum of exponentials. */
static float best_of(const float *scores, int64_t size, int64_t k, float *values, int64_t *places) {
    vf most = splat(-INFINITY);
    for (int64_t i = 0; i < size; i += LANES)
        most = largest_of(load(scores + i), most);
    const float highest = largest_lane(most);
    vf total = splat(0);
    for (int64_t i = 0; i < size; i += LANES)
        total += exp_(load(scores + i) - splat(highest));
    int64_t found = 0;
    for (int64_t i = 0; i < size; i += LANES) {
        const float least = found < k ? -INFINITY : values[k - 1];
        if (largest_lane(largest_of(load(scores + i), splat(-INFINITY))) <= least)
            continue;
        for (int64_t j = i; j < i + LANES && j < size; j++) {
            if (!(scores[j] > (found < k ? -INFINITY : values[k - 1])))
                continue;
            int64_t at = found < k ? found++ : k - 1;
            for (; at > 0 && scores[j] > values[at - 1]; at--) {
                values[at] = values[at - 1];
                places[at] = places[at - 1];
            }
            values[at] = scores[j];
            places[at] = j;
        }
    }
    /* Where fewer are possible, others fill the list. */
    for (int64_t other = 0; found < k; other++) {
        int64_t at = 0;
        while (at < found && places[at] != other)
            at++;
        if (at == found) {
            values[found] = -INFINITY;
            places[found++] = other;
        }
    }
    return highest + logf(sum_lanes(total));
}

static void score_work(pool *threads, int thread, void *argument) {
    const level_job *j = argument;
    const search *q = j->q;
    const int64_t size = j->head->output.columns, k = q->width;
    int64_t begin, end;
    items_of(threads, thread, q->rows * j->nodes, &begin, &end);
    for (int64_t node = begin; node < end; node++) {
        float *scores = j->scores + node * j->stride, *values = j->values + node * k;
        int64_t *tokens = j->tokens + node * k, row = node / j->nodes;
        const float *noise = q->noise ? q->noise[row * q->depth + j->level] : NULL;
        if (q->temperatures && q->temperatures[row] != 1)
            for (int64_t i = 0; i < size; i++)
                scores[i] /= q->temperatures[row];
        if (noise)
            for (int64_t i = 0; i < size; i++)
                scores[i] += noise[j->head->tokens ? j->head->tokens[i] : i];
        for (int i = 0; i < LANES; i++)
            scores[size + i] = -INFINITY;
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

/* The head's states `[count, hidden]` of tokens after `features`; `states` may not be `features`. */
static int run_head(context *c, const draft_head *h, const step *given, char *kv, size_t kv_bytes, const int64_t *tokens,
                    const char *features, char *states) {
    const int64_t count = given->rows, hidden = h->hidden;
    const size_t size = size_of(c->dtype), row_bytes = hidden * size;
    char *pairs = reserve(&c->buffers[PAIRS], count * 2 * row_bytes), *spare = reserve(&c->buffers[SPARE], count * row_bytes);
    if (!pairs || !spare || reserve_own(c, hidden))
        return -1;
    float *own = c->own[0].memory;
    const char *residual = features;
    for (int64_t i = 0; i < count; i++) {
        const char *embedded = (const char *)h->embedding + tokens[i] * row_bytes;
        char *pair = pairs + i * 2 * row_bytes;
        if (h->kind == WITHOUT_FEATURES) {
            memcpy(spare + i * row_bytes, embedded, row_bytes);
        } else if (h->kind == WITH_INPUT_PRODUCT) {
            memcpy(pair, embedded, row_bytes);
            memcpy(pair + row_bytes, features + i * row_bytes, row_bytes);
        } else {
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
static int run_readout(context *c, const draft_head *h, int64_t count, const char *states, float *scores, int64_t stride) {
    const char *inputs = states;
    if (h->norm && !h->states_are_normed) {
        char *normed = reserve(&c->buffers[SPARE], count * h->hidden * size_of(c->dtype));
        if (!normed || norm(c, count, h->hidden, states, h->norm, h->eps, normed))
            return -1;
        inputs = normed;
    }
    return run_product_into(c, &h->output, count, inputs, scores, stride);
}

static int run_search(context *c, const draft_head *h, const search *q) {
    const int64_t width = q->width, rows = q->rows, most = rows * width, dim = h->layer[0]->head_dim;
    const int64_t stride = (h->output.columns + 2 * LANES - 1) / LANES * LANES, words = q->words;
    const size_t size = size_of(c->dtype), row_bytes = h->hidden * size;
    /* Of the frontier: states in two copies, rotary rows, bits in two copies, and numbers. */
    char *states = reserve(&c->buffers[FRONTIER], 2 * most * row_bytes);
    char *rotary = reserve(&c->buffers[ROTARY], 2 * most * dim * size);
    uint64_t *bits = reserve(&c->buffers[BITS], 2 * most * words * 8);
    int64_t *numbers = reserve(&c->buffers[NUMBERS], (5 * most + 2 * rows) * 8);
    float *scores = reserve(&c->buffers[SCORES], most * stride * 4 + 4 * most);
    if (!states || !rotary || !bits || !numbers || !scores)
        return -1;
    char *features = states + most * row_bytes, *cos = rotary, *sin = rotary + most * dim * size;
    uint64_t *own_bits = bits + most * words;
    int64_t *tokens = numbers, *visible = tokens + most, *request = visible + most, *lengths = request + most;
    int64_t *parents = lengths + rows;
    float *reached = scores + most * stride; /* log-probability of each frontier node's path */
    memcpy(states, q->states, rows * row_bytes);
    int64_t nodes = 1, level = 0;
    for (;; level++) {
        const int64_t candidates = nodes * width;
        level_job job = {c, h, q, level, nodes, scores, stride, q->values + q->starts[level], q->tokens + q->starts[level]};
        if (run_readout(c, h, rows * nodes, states, scores, stride))
            return -1;
        pool_run(c->threads, score_work, &job);
        int64_t deepest = 0;
        for (int64_t row = 0; row < rows; row++) {
            float *values = job.values + row * candidates, chosen[LARGEST_WIDTH], sum = 0;
            int64_t *best = q->best + (level * rows + row) * width;
            for (int64_t i = 0; level && i < candidates; i++)
                values[i] += reached[row * width + i / width];
            int64_t found = 0;
            for (int64_t i = 0; i < candidates; i++) {
                if (found == width && !(values[i] > chosen[width - 1]))
                    continue;
                int64_t at = found < width ? found++ : width - 1;
                for (; at > 0 && values[i] > chosen[at - 1]; at--) {
                    chosen[at] = chosen[at - 1];
                    best[at] = best[at - 1];
                }
                chosen[at] = values[i];
                best[at] = i;
            }
            for (int64_t i = 0; i < width; i++) {
                reached[row * width + i] = chosen[i];
                sum += expf(chosen[i]);
                tokens[row * width + i] = job.tokens[row * candidates + best[i]];
                parents[row * width + i] = best[i] / width;
            }
            if (q->depths && sum < q->least_reach && q->depths[row] > level + 1)
                q->depths[row] = level + 1;
            int64_t depth = q->depths ? q->depths[row] : q->depth;
            deepest = depth > deepest ? depth : deepest;
        }
        if (level + 1 >= deepest || level + 1 >= q->depth)
            break;
        for (int64_t row = 0; row < rows; row++) {
            lengths[row] = q->base[row] + (level + 1) * width;
            for (int64_t i = 0; i < width; i++) {
                int64_t node = row * width + i, parent = parents[node], position = q->base[row] - q->first + level;
                memcpy(features + node * row_bytes, states + (row * nodes + parent) * row_bytes, row_bytes);
                const char *table = (const char *)q->rotary + position * 2 * dim * size;
                memcpy(cos + node * dim * size, table, dim * size);
                memcpy(sin + node * dim * size, table + dim * size, dim * size);
                visible[node] = q->base[row];
                request[node] = row;
                for (int64_t w = 0; w < words; w++)
                    own_bits[node * words + w] = level ? bits[(row * width + parent) * words + w] : 0;
                int64_t index = level * width + i;
                own_bits[node * words + index / 64] |= (uint64_t)1 << index % 64;
            }
        }
        memcpy(bits, own_bits, most * words * 8);
        step s = {most, words, q->table_blocks, q->block_size, q->first, q->slots + level * most, request, q->tables,
                  visible, (const int64_t *)bits, q->base, lengths, cos, sin, NULL};
        if (run_head(c, h, &s, q->kv, q->kv_bytes, tokens, features, states))
            return -1;
        nodes = width;
    }
    *q->levels = level + 1;
    return 0;
}
