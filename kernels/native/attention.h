/* Attention of packed rows over the paged cache, read in place. A row's keys come in the order of positions: the
   cached ones, then its ancestors in the tree, as if those were cached.

   Rows of one request and the query heads of a KV head are attended together as far as they see the same keys, so that
   a key is read and widened once for all of them. Each query's sums are its own and in the order of its keys: which
   queries are attended together changes no bit. */

enum {
    TILE_QUERIES = 8, /* queries that are attended together, or one row's if it has more */
    TOGETHER = 4, /* vectors of values that are summed side by side */
    KEYS_AHEAD = 16, /* keys that are asked for before they are used */
    KEYS_MORE = KEYS_AHEAD + SUMMED + LANES, /* numbers behind the last key that may be read or written */
#if defined(FORM_AVX512)
    MOST_QUERIES = 4, /* in registers */
#else
    MOST_QUERIES = 2,
#endif
};

/* Rows of one request, `[begin, end)`, and one KV head. */
typedef struct {
    const step *s;
    int64_t begin, end, heads, kv_heads, kv_head, dim;
    int kind; /* of keys and values */
    float scale;
    int64_t window, first; /* tokens that a row sees, 0 for all; first entry that any row sees */
    const float *slopes; /* [heads] of ALiBi, or NULL */
} tile;

INLINE int64_t rows_together(int64_t group) { return group < TILE_QUERIES ? TILE_QUERIES / group : 1; }

/* Cut the rows of a step into tiles: write the first row of each, and the number of rows behind the last. Return their
   number. */
static int64_t cut_tiles(const step *s, int64_t group, int64_t *first) {
    const int64_t most = rows_together(group);
    int64_t tiles = 0;
    for (int64_t begin = 0, end; begin < s->rows; begin = end) {
        for (end = begin + 1; end < s->rows && s->request[end] == s->request[begin];)
            end++;
        int64_t parts = (end - begin + most - 1) / most;
        for (int64_t part = 0; part < parts; part++)
            first[tiles++] = begin + (end - begin) * part / parts;
    }
    first[tiles] = s->rows;
    return tiles;
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

/* Floats of memory that a tile needs. */
INLINE size_t tile_floats(const step *s, int64_t group, int64_t dim) {
    const int64_t queries = rows_together(group) * group, keys = most_keys(s) + KEYS_MORE;
    return queries * (2 * dim + keys + 1) + 2 * keys * (sizeof(char *) / sizeof(float));
}

/* Numbers of one query as the keys meet them: pairs of bfloat16 where the processor multiplies those, else floats. */
INLINE int query_kind(int kind) {
#if defined(FORM_PAIRS)
    return is_coded(kind) ? FLOAT32 : kind;
#else
    (void)kind;
    return FLOAT32;
#endif
}

INLINE const char *address(const tile *t, int64_t entry) {
    const step *s = t->s;
    const int64_t slot = s->tables[s->request[t->begin] * s->table_blocks + entry / s->block_size] * s->block_size +
                         entry % s->block_size;
    return (const char *)s->kv + slot * s->slot_bytes + t->kv_head * t->dim * kv_size(t->kind);
}

/* List the keys of cache entries. */
INLINE int64_t list_entries(const tile *t, int64_t begin, int64_t end, const char **keys) {
    const size_t slot_bytes = t->s->slot_bytes;
    int64_t count = 0;
    while (begin < end) {
        int64_t left = t->s->block_size - begin % t->s->block_size;
        left = end - begin < left ? end - begin : left;
        const char *key = address(t, begin);
        for (int64_t i = 0; i < left; i++)
            keys[count++] = key + i * slot_bytes;
        begin += left;
    }
    return count;
}

/* List the keys of a row's ancestors. */
INLINE int64_t list_ancestors(const tile *t, int64_t row, const char **keys) {
    const step *s = t->s;
    int64_t count = 0;
    for (int64_t word = 0; word < s->words; word++)
        for (uint64_t bits = s->ancestors[row * s->words + word]; bits; bits &= bits - 1)
            keys[count++] = address(t, s->tree_starts[s->request[row]] + word * 64 + __builtin_ctzll(bits));
    return count;
}

INLINE void ask_for(const char *line, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(line + i);
}

/* Products of all keys with some queries of `dim` numbers. The number of queries and the kind are constants where
   this is inlined. */
INLINE void score_keys(const char *const *keys, int64_t count, int64_t dim, int kind, int queries, const char *query,
                       float *scores, int64_t stride) {
    const size_t size = kv_size(kind), query_bytes = dim * size_of(query_kind(kind));
    const int side_by_side = SUMMED / queries;
    for (int64_t i = 0; i < count; i += side_by_side) {
        vf sum[SUMMED];
        float sums[SUMMED];
        int64_t d = 0;
        UNROLLED
        for (int n = 0; n < SUMMED; n++)
            sum[n] = splat(0);
        UNROLLED
        for (int k = 0; k < side_by_side; k++)
            ask_for(keys[i + k + KEYS_AHEAD], dim * size);
#if defined(FORM_PAIRS)
        if (kind == BFLOAT16)
            for (; d < dim; d += 2 * LANES) {
                const __mmask32 there = dim - d < 2 * LANES ? (1u << (dim - d)) - 1 : ~0u;
                UNROLLED
                for (int k = 0; k < side_by_side; k++) {
                    __m512bh key = (__m512bh)_mm512_maskz_loadu_epi16(there, keys[i + k] + d * 2);
                    UNROLLED
                    for (int q = 0; q < queries; q++)
                        sum[q * side_by_side + k] = (vf)_mm512_dpbf16_ps(
                            (__m512)sum[q * side_by_side + k], key,
                            (__m512bh)_mm512_maskz_loadu_epi16(there, query + q * query_bytes + d * 2));
                }
            }
#endif
        for (; d + LANES <= dim; d += LANES)
            UNROLLED
            for (int k = 0; k < side_by_side; k++) {
                vf key = load_kv(keys[i + k] + d * size, kind);
                UNROLLED
                for (int q = 0; q < queries; q++)
                    sum[q * side_by_side + k] =
                        fma_(key, load_as(query + q * query_bytes + d * size_of(query_kind(kind)), query_kind(kind)),
                             sum[q * side_by_side + k]);
            }
        sum_each(sum, sums);
        for (; d < dim; d++)
            for (int n = 0; n < SUMMED; n++)
                sums[n] += load_kv_one(keys[i + n % side_by_side] + d * size, kind) *
                           load_one(query + n / side_by_side * query_bytes + d * size_of(query_kind(kind)),
                                    query_kind(kind));
        UNROLLED
        for (int q = 0; q < queries; q++)
            memcpy(scores + q * stride + i, sums + q * side_by_side, side_by_side * sizeof *sums);
    }
}

/* Add ALiBi's bias (Press et al. 2021) to scores, still to be scaled: `slope` for each position that a key lies before
   the last one, which is the row's own. Cached keys and ancestors are in the order of positions. */
INLINE void add_distances(float *scores, int64_t count, float slope) {
    float lane[LANES];
    for (int i = 0; i < LANES; i++)
        lane[i] = (float)i;
    for (int64_t i = 0; i < count; i += LANES)
        store(scores + i, fma_(load(lane) + splat((float)(i - count + 1)), splat(slope), load(scores + i)));
}

/* Turn scores, still to be scaled, into weights, up to a factor, which is returned. */
INLINE float exp_scores(float *scores, int64_t count, float scale) {
    for (int i = 0; i < LANES; i++)
        scores[count + i] = -INFINITY;
    vf most = splat(-INFINITY), total = splat(0);
    for (int64_t i = 0; i < count; i += LANES)
        most = largest_of(load(scores + i), most);
    const vf highest = splat(largest_lane(most));
    for (int64_t i = 0; i < count; i += LANES) {
        vf weight = exp_((load(scores + i) - highest) * splat(scale));
        store(scores + i, weight);
        total += weight;
    }
    return 1.0f / sum_lanes(total);
}

/* Add values times weights to what some queries have: `vectors` of their numbers from `d` on. */
INLINE void mix_part(const char *const *values, int64_t offset, int64_t count, int64_t d, int64_t dim, int kind,
                     int queries, int vectors, const float *weights, int64_t stride, float *out) {
    vf mixed[MOST_QUERIES][TOGETHER];
    UNROLLED
    for (int q = 0; q < queries; q++)
        UNROLLED
        for (int v = 0; v < vectors; v++)
            mixed[q][v] = load(out + q * dim + d + v * LANES);
    for (int64_t i = 0; i < count; i++) {
        const char *value = values[i] + offset + d * kv_size(kind);
        ask_for(values[i + KEYS_AHEAD] + offset + d * kv_size(kind), vectors * LANES * kv_size(kind));
        UNROLLED
        for (int v = 0; v < vectors; v++) {
            vf numbers = load_kv(value + v * LANES * kv_size(kind), kind);
            UNROLLED
            for (int q = 0; q < queries; q++)
                mixed[q][v] = fma_(numbers, splat(weights[q * stride + i]), mixed[q][v]);
        }
    }
    UNROLLED
    for (int q = 0; q < queries; q++)
        UNROLLED
        for (int v = 0; v < vectors; v++)
            store(out + q * dim + d + v * LANES, mixed[q][v]);
}

INLINE void mix_values(const char *const *values, int64_t offset, int64_t count, int64_t dim, int kind, int queries,
                       const float *weights, int64_t stride, float *out) {
    int64_t d = 0;
    for (; d + TOGETHER * LANES <= dim; d += TOGETHER * LANES)
        mix_part(values, offset, count, d, dim, kind, queries, TOGETHER, weights, stride, out);
    for (; d + LANES <= dim; d += LANES)
        mix_part(values, offset, count, d, dim, kind, queries, 1, weights, stride, out);
    for (; d < dim; d++)
        for (int q = 0; q < queries; q++) {
            float mixed = out[q * dim + d];
            for (int64_t i = 0; i < count; i++)
                mixed += load_kv_one(values[i] + offset + d * kv_size(kind), kind) * weights[q * stride + i];
            out[q * dim + d] = mixed;
        }
}

/* Multiply the numbers of some queries by the scales that slots store of their keys or values, `offset` bytes behind
   the keys. */
INLINE void scale_each(const char *const *keys, int64_t offset, int64_t count, int64_t queries, float *numbers,
                       int64_t stride) {
    for (int64_t i = 0; i < count; i++) {
        const float scale = load_kv_scale(keys[i] + offset);
        for (int64_t q = 0; q < queries; q++)
            numbers[q * stride + i] *= scale;
    }
}

/* Call something for `queries` queries, as many at a time as there are registers for. */
#define FOR_QUERIES(kind, call)                                                                                        \
    do {                                                                                                               \
        int64_t q = 0;                                                                                                 \
        if (MOST_QUERIES == 4)                                                                                         \
            for (; q + 4 <= queries; q += 4)                                                                           \
                call(kind, 4);                                                                                         \
        for (; q + 2 <= queries; q += 2)                                                                               \
            call(kind, 2);                                                                                             \
        for (; q < queries; q++)                                                                                       \
            call(kind, 1);                                                                                             \
    } while (0)

/* The same, with a kind that is a constant. */
#define FOR_KINDS(kind, call)                                                                                          \
    switch (kind) {                                                                                                    \
    case FLOAT32: FOR_QUERIES(FLOAT32, call); break;                                                                   \
    case BFLOAT16: FOR_QUERIES(BFLOAT16, call); break;                                                                 \
    case FLOAT16: FOR_QUERIES(FLOAT16, call); break;                                                                   \
    case KV_INT8: FOR_QUERIES(KV_INT8, call); break;                                                                   \
    case KV_E4M3: FOR_QUERIES(KV_E4M3, call); break;                                                                   \
    case KV_E5M2: FOR_QUERIES(KV_E5M2, call); break;                                                                   \
    }

/* Write the products of all keys with `queries` queries. */
static void score_queries(const char *const *keys, int64_t count, int64_t dim, int kind, int64_t queries,
                          const char *query, float *scores, int64_t stride) {
    const size_t query_bytes = dim * size_of(query_kind(kind));
#define SCORE(kind, n) score_keys(keys, count, dim, kind, n, query + q * query_bytes, scores + q * stride, stride)
    FOR_KINDS(kind, SCORE)
#undef SCORE
}

/* Add all values times weights to what `queries` queries have. */
static void mix_queries(const char *const *values, int64_t offset, int64_t count, int64_t dim, int kind, int64_t queries,
                        const float *weights, int64_t stride, float *out) {
#define MIX(kind, n) mix_values(values, offset, count, dim, kind, n, weights + q * stride, stride, out + q * dim)
    FOR_KINDS(kind, MIX)
#undef MIX
}

/* List a row's keys behind the first `shared` entries. */
INLINE int64_t list_rest(const tile *t, int64_t row, int64_t shared, const char **keys) {
    int64_t count = list_entries(t, shared, t->s->visible[row], keys);
    count += list_ancestors(t, row, keys + count);
    for (int i = 0; count && i < KEYS_MORE; i++)
        keys[count + i] = keys[count - 1];
    return count;
}

static void attend_rows(const tile *t, const float *queries, int64_t query_stride, float *memory, float *out) {
    const int kind = t->kind;
    const int64_t group = t->heads / t->kv_heads, dim = t->dim, all = (t->end - t->begin) * group;
    const int64_t offset = t->kv_heads * dim * kv_size(kind), stride = most_keys(t->s) + KEYS_MORE;
    const size_t query_bytes = dim * size_of(query_kind(kind));
    const float *given = t->s->kv_scales;
    const int scaled = stores_scales(kind, given);
    const int64_t key_scale = scale_offset(t->kv_heads, dim, t->kv_head), value_scale = key_scale + 2 * t->kv_heads;
    const float scale = t->scale * shared_scale(kind, given, t->kv_head);
    const float mixed_scale = shared_scale(kind, given, t->kv_heads + t->kv_head);
    const char **keys = (const char **)memory, **rest = keys + stride;
    float *scores = (float *)(rest + stride), *share = scores + all * stride;
    char *query = (char *)(share + all);
    int64_t shared = t->s->visible[t->begin];
    for (int64_t row = t->begin; row < t->end; row++) {
        from_floats(query + (row - t->begin) * group * query_bytes, queries + (row - t->begin) * query_stride,
                    group * dim, query_kind(kind));
        shared = t->s->visible[row] < shared ? t->s->visible[row] : shared;
    }
    shared = shared < t->first ? t->first : shared;
    const int64_t before = list_entries(t, t->first, shared, keys);
    for (int i = 0; before && i < KEYS_MORE; i++)
        keys[before + i] = keys[before - 1];
    score_queries(keys, before, dim, kind, all, query, scores, stride);
    if (scaled)
        scale_each(keys, key_scale, before, all, scores, stride);
    for (int64_t row = t->begin; row < t->end; row++) {
        const int64_t begin = (row - t->begin) * group, count = list_rest(t, row, shared, rest);
        score_queries(rest, count, dim, kind, group, query + begin * query_bytes, scores + begin * stride + before,
                      stride);
        if (scaled)
            scale_each(rest, key_scale, count, group, scores + begin * stride + before, stride);
        for (int64_t q = begin; t->slopes && q < begin + group; q++)
            add_distances(scores + q * stride, before + count, t->slopes[t->kv_head * group + q - begin] / scale);
        for (int64_t q = begin; q < begin + group; q++)
            share[q] = exp_scores(scores + q * stride, before + count, scale) * mixed_scale;
    }
    memset(out, 0, all * dim * sizeof *out);
    if (scaled)
        scale_each(keys, value_scale, before, all, scores, stride);
    mix_queries(keys, offset, before, dim, kind, all, scores, stride, out);
    for (int64_t row = t->begin; row < t->end; row++) {
        const int64_t begin = (row - t->begin) * group, count = list_rest(t, row, shared, rest);
        if (scaled)
            scale_each(rest, value_scale, count, group, scores + begin * stride + before, stride);
        mix_queries(rest, offset, count, dim, kind, group, scores + begin * stride + before, stride, out + begin * dim);
        for (int64_t i = begin * dim; i < (begin + group) * dim; i++)
            out[i] *= share[i / dim];
    }
}

/* First entry that a row sees: of a node, as many before it as tokens of its path leave of the window. */
static int64_t first_seen(const tile *t, int64_t row) {
    const step *s = t->s;
    const int64_t least = s->firsts ? s->firsts[s->request[row]] : s->first;
    if (!t->window)
        return least;
    int64_t first = s->visible[row] - t->window;
    for (int64_t word = 0; word < s->words; word++)
        first += __builtin_popcountll(s->ancestors[row * s->words + word]);
    return first > least ? first : least;
}

/* Attend with a tile's queries: rows of `query_stride` floats. `out` is `[rows][heads of the
   group][dim]`, `memory` holds `tile_floats`. Rows whose windows begin at entries of their own are attended one by one,
   so that a row's keys are summed in their order. */
static void attend_tile(const tile *t, const float *queries, int64_t query_stride, float *memory, float *out) {
    tile part = *t;
    part.first = t->s->firsts ? t->s->firsts[t->s->request[t->begin]] : t->s->first;
    int slides = 0;
    for (int64_t row = t->begin; row < t->end; row++)
        slides |= first_seen(t, row) > part.first;
    if (!slides) {
        attend_rows(&part, queries, query_stride, memory, out);
        return;
    }
    for (int64_t row = t->begin; row < t->end; row++) {
        part.begin = row;
        part.end = row + 1;
        part.first = first_seen(t, row);
        attend_rows(&part, queries + (row - t->begin) * query_stride, query_stride, memory,
                    out + (row - t->begin) * (t->heads / t->kv_heads) * t->dim);
    }
}
