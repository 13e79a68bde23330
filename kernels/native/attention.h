/* Attention by vectors. Rows are attended together as far as all of them see the same keys, then each by itself. */

enum {
    TOGETHER = 4, /* vectors of values that are summed side by side */
    KEYS_AHEAD = 16, /* keys that are asked for before they are used */
#if defined(FORM_AVX512)
    MOST_QUERIES = 4, /* in registers */
#else
    MOST_QUERIES = 2,
#endif
};

/* Floats of memory that the attention of `queries` queries takes. */
INLINE size_t vector_floats(const step *s, int64_t queries, int64_t dim) {
    const int64_t keys = most_keys(s) + KEYS_MORE;
    return queries * (dim + keys + 1) + 2 * keys * (sizeof(char *) / sizeof(float));
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

/* How the rows of a step are attended.

   tiles: number of tiles of rows.
   first: row of each, and the number of rows behind the last.
   floats, before: memory of a tile, at whose end is what comes out; floats before that. */
typedef struct {
    int64_t tiles;
    const int64_t *first;
    size_t floats, before;
} tiling;

/* `first` has room for one more than there are rows. */
static tiling tile_rows_of(const step *s, int64_t heads, int64_t kv_heads, int64_t dim, int threads, int64_t *first) {
    const int64_t group = heads / kv_heads, most = rows_together(s, group, kv_heads, dim, threads), queries = most * group;
    size_t before = vector_floats(s, queries, dim);
#if defined(FORM_AMX)
    if (attends_in_tiles(s->kv_kind, dim))
        before = matrix_floats(s, queries, group, dim);
#endif
    return (tiling){cut_tiles(s, most, first), first, before + queries * dim, before};
}

static void attend_together(const tile *t, const float *queries, int64_t query_stride, float *memory, float *out) {
#if defined(FORM_AMX)
    if (attends_in_tiles(t->kind, t->dim)) {
        attend_in_tiles(t, queries, query_stride, memory, out);
        return;
    }
#endif
    attend_rows(t, queries, query_stride, memory, out);
}

/* Attend with a tile's queries: rows of `query_stride` floats. `out` is `[rows][heads of the
   group][dim]`, `memory` holds the floats of a `tiling`. Rows whose windows begin at entries of their own are attended one by one,
   so that a row's keys are summed in their order. */
static void attend_tile(const tile *t, const float *queries, int64_t query_stride, float *memory, float *out) {
    tile part = *t;
    part.first = t->s->firsts ? t->s->firsts[t->s->request[t->begin]] : t->s->first;
    int slides = 0;
    for (int64_t row = t->begin; row < t->end; row++)
        slides |= first_seen(t, row) > part.first;
    if (!slides) {
        attend_together(&part, queries, query_stride, memory, out);
        return;
    }
    for (int64_t row = t->begin; row < t->end; row++) {
        part.begin = row;
        part.end = row + 1;
        part.first = first_seen(t, row);
        attend_together(&part, queries + (row - t->begin) * query_stride, query_stride, memory,
                    out + (row - t->begin) * (t->heads / t->kv_heads) * t->dim);
    }
}
