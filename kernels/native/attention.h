/* Attention of packed rows over the paged cache, read in place. A row's keys come in the order of positions: the
   cached ones, then its ancestors in the tree, as if those were cached. */

/* Keys of a row that are one after another in the cache. */
typedef struct {
    int64_t slot, count;
} run;

/* The walk over a row's keys, run by run. */
typedef struct {
    const step *s;
    int64_t row, request, entry, word;
    uint64_t bits;
} walk;

INLINE walk walk_keys(const step *s, int64_t row) {
    return (walk){s, row, s->request[row], s->first, 0, s->words ? (uint64_t)s->ancestors[row * s->words] : 0};
}

INLINE int64_t slot_at(const walk *w, int64_t entry) {
    const step *s = w->s;
    return s->tables[w->request * s->table_blocks + entry / s->block_size] * s->block_size + entry % s->block_size;
}

INLINE int next_run(walk *w, run *found) {
    const step *s = w->s;
    int64_t visible = s->visible[w->row];
    if (w->entry < visible) {
        int64_t left = s->block_size - w->entry % s->block_size;
        *found = (run){slot_at(w, w->entry), visible - w->entry < left ? visible - w->entry : left};
        w->entry += found->count;
        return 1;
    }
    while (!w->bits)
        if (++w->word < s->words)
            w->bits = s->ancestors[w->row * s->words + w->word];
        else
            return 0;
    int64_t node = w->word * 64 + __builtin_ctzll(w->bits);
    w->bits &= w->bits - 1;
    *found = (run){slot_at(w, s->tree_starts[w->request] + node), 1};
    return 1;
}

/* Most keys of any row. */
static int64_t most_keys(const step *s) {
    int64_t most = 0;
    for (int64_t row = 0; row < s->rows; row++) {
        int64_t keys = s->lengths[s->request[row]];
        most = keys > most ? keys : most;
    }
    return most;
}

enum { TOGETHER = 4 }; /* vectors of values that are summed side by side */

/* Products of a query with up to eight keys, the rest of which are nowhere. */
INLINE void score_keys(const char *const *keys, int count, int64_t dim, int kind, const float *query, float *scores) {
    const size_t size = size_of(kind);
    vf sum[SUMMED];
    UNROLLED
    for (int i = 0; i < SUMMED; i++)
        sum[i] = splat(0);
    int64_t d = 0;
    if (count == SUMMED)
        for (; d + LANES <= dim; d += LANES) {
            vf q = load(query + d);
            UNROLLED
            for (int i = 0; i < SUMMED; i++)
                sum[i] = fma_(load_as(keys[i] + d * size, kind), q, sum[i]);
        }
    else
        for (; d + LANES <= dim; d += LANES)
            for (int i = 0; i < count; i++)
                sum[i] = fma_(load_as(keys[i] + d * size, kind), load(query + d), sum[i]);
    sum_each(sum, scores);
    for (int i = 0; i < count; i++) {
        float rest = 0;
        for (int64_t r = d; r < dim; r++)
            rest += load_one(keys[i] + r * size, kind) * query[r];
        scores[i] += rest;
    }
}

/* One query `[head_dim]` of floats, already scaled, over the keys and values of a KV head. `scores` holds as many
   numbers as there are keys, and SUMMED + LANES more. */
INLINE void attend_one(const step *s, int64_t row, int64_t kv_heads, int64_t kv_head, int64_t dim, int kind,
                       const float *query, float *scores, float *out) {
    const size_t size = size_of(kind), slot_bytes = 2 * kv_heads * dim * size;
    const char *keys = (const char *)s->kv + kv_head * dim * size, *values = keys + kv_heads * dim * size;
    walk w = walk_keys(s, row);
    run found;
    int64_t count = 0;
    const char *waiting[SUMMED];
    int held = 0;
    while (next_run(&w, &found))
        for (int64_t i = 0; i < found.count; i++) {
            waiting[held++] = keys + (found.slot + i) * slot_bytes;
            if (held == SUMMED) {
                score_keys(waiting, held, dim, kind, query, scores + count);
                count += held;
                held = 0;
            }
        }
    if (held)
        score_keys(waiting, held, dim, kind, query, scores + count);
    count += held;
    for (int i = 0; i < LANES; i++)
        scores[count + i] = -INFINITY;
    vf most = splat(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES)
        most = largest_of(load(scores + i), most);
    const vf highest = splat(largest_lane(most));
    vf total = splat(0);
    for (int64_t i = 0; i < count; i += LANES) {
        vf weight = exp_(load(scores + i) - highest);
        store(scores + i, weight);
        total += weight;
    }
    const vf share = splat(1.0f / sum_lanes(total));
    int64_t d = 0;
    for (; d + LANES <= dim;) {
        int vectors = d + TOGETHER * LANES <= dim ? TOGETHER : 1;
        vf mixed[TOGETHER];
        for (int v = 0; v < TOGETHER; v++)
            mixed[v] = splat(0);
        const float *weight = scores;
        for (walk again = walk_keys(s, row); next_run(&again, &found);)
            for (int64_t i = 0; i < found.count; i++, weight++) {
                const char *value = values + (found.slot + i) * slot_bytes + d * size;
                if (vectors == TOGETHER)
                    for (int v = 0; v < TOGETHER; v++)
                        mixed[v] = fma_(load_as(value + v * LANES * size, kind), splat(*weight), mixed[v]);
                else
                    mixed[0] = fma_(load_as(value, kind), splat(*weight), mixed[0]);
            }
        for (int v = 0; v < vectors; v++, d += LANES)
            store(out + d, mixed[v] * share);
    }
    for (; d < dim; d++) {
        float mixed = 0;
        const float *weight = scores;
        for (walk again = walk_keys(s, row); next_run(&again, &found);)
            for (int64_t i = 0; i < found.count; i++, weight++)
                mixed += load_one(values + (found.slot + i) * slot_bytes + d * size, kind) * *weight;
        out[d] = mixed * share[0];
    }
}

static void attend_float32(const step *s, int64_t row, int64_t kv_heads, int64_t kv_head, int64_t dim,
                           const float *query, float *scores, float *out) {
    attend_one(s, row, kv_heads, kv_head, dim, FLOAT32, query, scores, out);
}
static void attend_bfloat16(const step *s, int64_t row, int64_t kv_heads, int64_t kv_head, int64_t dim,
                            const float *query, float *scores, float *out) {
    attend_one(s, row, kv_heads, kv_head, dim, BFLOAT16, query, scores, out);
}
static void attend_float16(const step *s, int64_t row, int64_t kv_heads, int64_t kv_head, int64_t dim,
                           const float *query, float *scores, float *out) {
    attend_one(s, row, kv_heads, kv_head, dim, FLOAT16, query, scores, out);
}

/* Attend with the queries of one row and KV head, `[group, head_dim]`; they are scaled in place. */
static void attend_group(const step *s, int dtype, int64_t row, int64_t heads, int64_t kv_heads, int64_t kv_head,
                         int64_t dim, float scale, float *queries, float *scores, float *out) {
    int64_t group = heads / kv_heads;
    for (int64_t i = 0; i < group * dim; i++)
        queries[i] *= scale;
    for (int64_t head = 0; head < group; head++) {
        float *query = queries + head * dim, *to = out + head * dim;
        if (dtype == FLOAT32)
            attend_float32(s, row, kv_heads, kv_head, dim, query, scores, to);
        else if (dtype == BFLOAT16)
            attend_bfloat16(s, row, kv_heads, kv_head, dim, query, scores, to);
        else
            attend_float16(s, row, kv_heads, kv_head, dim, query, scores, to);
    }
}
