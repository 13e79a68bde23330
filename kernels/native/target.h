/* A pass of the target over chains of known tokens with their draft trees: packing, embedding, layers, last norm,
   features for the head, logits. */

/* The rows of a pass: of each request its chain, then the nodes of its tree. */
typedef struct {
    step s;
    int64_t wanted; /* rows that get logits */
    int64_t *rows_wanted;
} packed;

/* Fill in what row `row` of the pass is: an entry of a request's cache at a position. */
INLINE void put_row(const pass *p, packed *to, int64_t row, int64_t request, int64_t entry, int64_t position,
                    int64_t visible, size_t rotary_bytes) {
    int64_t *slots = (int64_t *)to->s.slots, *requests = (int64_t *)to->s.request, *seen = (int64_t *)to->s.visible;
    const char *rotary = (const char *)p->rotary + position * 2 * rotary_bytes;
    memcpy((char *)to->s.cos + row * rotary_bytes, rotary, rotary_bytes);
    memcpy((char *)to->s.sin + row * rotary_bytes, rotary + rotary_bytes, rotary_bytes);
    slots[row] = p->tables[request * p->table_blocks + entry / p->block_size] * p->block_size + entry % p->block_size;
    requests[row] = request;
    seen[row] = visible;
}

static int pack(context *c, const target *t, const pass *p, packed *to) {
    int64_t rows = 0, most_nodes = 0;
    for (int64_t r = 0; r < p->requests; r++) {
        rows += p->known[r] + p->nodes[r];
        most_nodes = p->nodes[r] > most_nodes ? p->nodes[r] : most_nodes;
    }
    const size_t rotary_bytes = t->layer[0]->head_dim * size_of(c->dtype);
    const int64_t words = most_nodes > 64 ? (most_nodes + 63) / 64 : 1;
    char *rotary = reserve(&c->buffers[PASS_ROTARY], 2 * rows * rotary_bytes);
    int64_t *numbers = reserve(&c->buffers[PASS_NUMBERS], ((4 + words) * rows + 2 * p->requests + most_nodes) * 8);
    if (!rotary || !numbers)
        return -1;
    int64_t *visible = numbers + 2 * rows, *wanted = visible + rows, *ancestors = wanted + rows;
    int64_t *tree_starts = ancestors + words * rows, *lengths = tree_starts + p->requests;
    int64_t *depths = lengths + p->requests; /* of one tree */
    memset(ancestors, 0, words * rows * 8);
    *to = (packed){{rows, words, p->table_blocks, p->block_size, 0, p->kv_kind, p->slot_bytes, numbers, numbers + rows,
                    p->tables, visible, ancestors, tree_starts, lengths, rotary, rotary + rows * rotary_bytes, NULL,
                    NULL, 0, p->spans, p->adapted}, 0, wanted};
    const int64_t *parents = p->parents;
    for (int64_t r = 0, row = 0; r < p->requests; r++) {
        const int64_t end = p->cached[r] + p->known[r];
        tree_starts[r] = end;
        lengths[r] = end + p->nodes[r];
        for (int64_t i = 0; i < p->known[r]; i++, row++) {
            put_row(p, to, row, r, p->cached[r] + i, p->cached[r] + i, p->cached[r] + i + 1, rotary_bytes);
            if (i >= p->known[r] - p->scored[r])
                wanted[to->wanted++] = row;
        }
        for (int64_t i = 0, first = row; i < p->nodes[r]; i++, row++, parents++) {
            uint64_t *own = (uint64_t *)ancestors + row * words;
            depths[i] = *parents < 0 ? 1 : depths[*parents] + 1;
            if (*parents >= 0)
                memcpy(own, ancestors + (first + *parents) * words, words * 8);
            own[i / 64] |= (uint64_t)1 << i % 64;
            put_row(p, to, row, r, end + i, end - 1 + depths[i], end, rotary_bytes);
            wanted[to->wanted++] = row;
        }
    }
    return 0;
}

/* Keep a layer's inputs, `[count, hidden]`, beside those of the other layers that the head reads. */
static void keep_taps(const target *t, int64_t layer, int64_t count, size_t row_bytes, const char *inputs, char *taps) {
    for (int64_t tap = 0; tap < t->taps; tap++)
        if (t->tap[tap] == layer)
            for (int64_t row = 0; row < count; row++)
                memcpy(taps + (row * t->taps + tap) * row_bytes, inputs + row * row_bytes, row_bytes);
}

/* Store what the head reads of each token: of its states, or of its taps, behind which there is room for them. */
static int store_features(context *c, const target *t, const pass *p, const packed *rows, const char *states,
                          char *taps) {
    const int64_t count = rows->s.rows;
    const size_t size = size_of(c->dtype), row_bytes = t->hidden * size;
    const int is_product = t->features == TAPS_AS_FEATURES;
    const size_t feature_bytes = is_product ? t->feature.columns * size : row_bytes;
    char *product = taps + count * t->taps * row_bytes;
    if (is_product && run_product(c, &t->feature, count, taps, product))
        return -1;
    const char *features = is_product ? product : states;
    for (int64_t row = 0; row < count; row++)
        memcpy((char *)p->feature_cache + rows->s.slots[row] * feature_bytes, features + row * feature_bytes,
               feature_bytes);
    return 0;
}

static int run_pass(context *c, const target *t, const pass *p) {
    packed rows;
    if (pack(c, t, p, &rows))
        return -1;
    const int64_t count = rows.s.rows;
    const size_t row_bytes = t->hidden * size_of(c->dtype), part = count * row_bytes;
    /* Two turns of the stream between layers, the states behind them. */
    char *stream = reserve(&c->buffers[STREAM], 3 * part), *spare = stream + part, *states = stream + 2 * part;
    char *wanted = reserve(&c->buffers[WANTED], rows.wanted * row_bytes + 1);
    char *taps = reserve(&c->buffers[TAPPED], t->taps * part + count * t->feature.columns * size_of(c->dtype) + 1);
    if (!stream || !wanted || !taps)
        return -1;
    for (int64_t row = 0; row < count; row++)
        embed(t->embedding, t->packed_embedding, t->hidden, p->tokens[row], stream + row * row_bytes, c->dtype);
    for (int64_t l = 0; l <= t->layers; l++) {
        keep_taps(t, l, count, row_bytes, stream, taps);
        if (l == t->layers)
            break;
        rows.s.kv = (char *)p->kv + l * p->kv_bytes;
        rows.s.kv_scales = p->kv_scales ? p->kv_scales + l * 2 * t->layer[l]->kv_heads : NULL;
        rows.s.layer = l;
        if (run_layer(c, t->layer[l], &rows.s, NULL, stream, spare))
            return -1;
        char *swapped = stream;
        stream = spare;
        spare = swapped;
    }
    if (norm(c, count, t->hidden, stream, t->norm, t->eps, states))
        return -1;
    if (t->features != NO_FEATURES && store_features(c, t, p, &rows, states, taps))
        return -1;
    if (!rows.wanted)
        return 0;
    const char *inputs = states;
    if (rows.wanted < count) {
        for (int64_t i = 0; i < rows.wanted; i++)
            memcpy(wanted + i * row_bytes, states + rows.rows_wanted[i] * row_bytes, row_bytes);
        inputs = wanted;
    }
    return run_product(c, &t->output, rows.wanted, inputs, p->logits);
}
