/* Attention over bfloat16 by a processor's tile registers (AMX). Sixteen keys, read in place, times sixteen queries are
   scores; weights, rounded to bfloat16, times values are what comes out. Values are added up 32 keys at a time, counted
   from the first key that a query sees: so sums are the same whichever queries are attended together, and whether keys
   are cached or a row's ancestors. Weights of keys that a query does not see are zeros. */

enum {
    KEYS_TOGETHER = 2 * TILE_ROWS,
    FETCHED = 64, /* keys ahead of those that are used */
    KEYS_KEPT = 256, /* whose values stay in the processor's cache */
    TILE_NUMBERS = TILE_BYTES / 4,
};

/* Memory of one call. A tile may begin at any query, so there are rows behind the last one. */
typedef struct {
    const char **keys, **rest; /* that rows share; that one row sees besides */
    char *queries, *own; /* as tiles: of all rows, of one */
    float *scores; /* [queries + 16][stride], and in their place weights */
    int64_t stride;
    char *copied; /* keys that do not lie side by side, and a query that is rounded */
    char *values; /* of KEYS_KEPT keys, as tiles */
    float *sums; /* of four tiles */
    float *mixed, *mixed_own; /* [queries + 16][dim] of all rows, of one */
    float *share; /* [queries]: what mixed values are multiplied by */
} attended;

INLINE int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

/* Give a part of memory from byte `at` on, beginning at a line of the cache. */
INLINE void *take(char *memory, size_t *at, size_t bytes) {
    void *part = memory ? memory + *at : NULL;
    *at += (bytes + 63) / 64 * 64;
    return part;
}

/* Divide memory, or none to count; return the bytes that are needed. */
static size_t place_attended(attended *a, char *memory, int64_t keys, int64_t queries, int64_t group, int64_t dim) {
    size_t at = 0;
    const int64_t all = round_up(queries, TILE_ROWS), one = round_up(group, TILE_ROWS);
    /* An odd number of lines, so that rows do not lie at the same places of the cache. */
    a->stride = (keys + KEYS_MORE) / 32 * 32 + 16;
    a->keys = take(memory, &at, (keys + KEYS_MORE) * sizeof(char *));
    a->rest = take(memory, &at, (keys + KEYS_MORE) * sizeof(char *));
    a->queries = take(memory, &at, all * dim * 2);
    a->own = take(memory, &at, one * dim * 2);
    a->scores = take(memory, &at, (queries + TILE_ROWS) * a->stride * 4);
    a->copied = take(memory, &at, KEYS_TOGETHER * dim * 2);
    a->values = take(memory, &at, KEYS_KEPT * dim * 2);
    a->sums = take(memory, &at, 4 * TILE_BYTES);
    a->mixed = take(memory, &at, (queries + TILE_ROWS) * dim * 4);
    a->mixed_own = take(memory, &at, one * dim * 4);
    a->share = take(memory, &at, queries * 4);
    return at;
}

INLINE size_t matrix_floats(const step *s, int64_t queries, int64_t group, int64_t dim) {
    attended a;
    return place_attended(&a, NULL, most_keys(s), queries, group, dim) / 4 + 16;
}

/* Write query `q`, a row of floats, into tiles of sixteen queries: as a column of pairs. */
static void put_query(char *tiles, int64_t q, int64_t dim, const float *numbers, char *rounded) {
    uint32_t *to = (uint32_t *)(tiles + q / TILE_ROWS * TILE_ROWS * dim * 2) + q % TILE_ROWS;
    from_floats(rounded, numbers, dim, BFLOAT16);
    for (int64_t pair = 0; pair < dim / 2; pair++)
        memcpy(to + pair * TILE_ROWS, rounded + 4 * pair, 4);
}

/* Where sixteen keys lie as a tile: in place if they are side by side, else copied. */
INLINE const char *keys_as_tile(const char *const *keys, int64_t dim, size_t slot_bytes, char *copy, size_t *stride) {
    int apart = 0;
    for (int k = 1; k < TILE_ROWS; k++)
        apart |= keys[k] != keys[0] + k * slot_bytes;
    *stride = slot_bytes;
    if (!apart)
        return keys[0];
    for (int k = 0; k < TILE_ROWS; k++)
        memcpy(copy + k * dim * 2, keys[k], dim * 2);
    WRITTEN();
    *stride = dim * 2;
    return copy;
}

/* Write the columns of a tile as rows of scores. */
INLINE void put_scores(const float *sums, int64_t queries, float *scores, int64_t stride) {
    for (int64_t q = 0; q < queries; q += 4) {
        __m512 keys[4]; /* of each four keys one, with four queries */
        UNROLLED
        for (int k = 0; k < 4; k++) {
            keys[k] = _mm512_castps128_ps512(_mm_load_ps(sums + k * TILE_ROWS + q));
            keys[k] = _mm512_insertf32x4(keys[k], _mm_load_ps(sums + (4 + k) * TILE_ROWS + q), 1);
            keys[k] = _mm512_insertf32x4(keys[k], _mm_load_ps(sums + (8 + k) * TILE_ROWS + q), 2);
            keys[k] = _mm512_insertf32x4(keys[k], _mm_load_ps(sums + (12 + k) * TILE_ROWS + q), 3);
        }
        const __m512d low = (__m512d)_mm512_unpacklo_ps(keys[0], keys[1]);
        const __m512d high = (__m512d)_mm512_unpackhi_ps(keys[0], keys[1]);
        const __m512d low_2 = (__m512d)_mm512_unpacklo_ps(keys[2], keys[3]);
        const __m512d high_2 = (__m512d)_mm512_unpackhi_ps(keys[2], keys[3]);
        const vf rows[4] = {(vf)_mm512_unpacklo_pd(low, low_2), (vf)_mm512_unpackhi_pd(low, low_2),
                            (vf)_mm512_unpacklo_pd(high, high_2), (vf)_mm512_unpackhi_pd(high, high_2)};
        for (int64_t i = 0; i < 4 && q + i < queries; i++)
            store(scores + (q + i) * stride, rows[i]);
    }
}

/* Write the products of keys with queries in tiles, and more behind the last key. */
static void score_in_tiles(const attended *a, const char *const *keys, int64_t count, int64_t dim, size_t slot_bytes,
                           const char *tiles, int64_t queries, float *scores) {
    const size_t tile_bytes = TILE_ROWS * dim * 2;
    for (int64_t i = 0; i < count; i += KEYS_TOGETHER) {
        const int more = i + TILE_ROWS < count;
        size_t stride, stride_2 = 0;
        const char *some = keys_as_tile(keys + i, dim, slot_bytes, a->copied, &stride), *others = NULL;
        if (more)
            others = keys_as_tile(keys + i + TILE_ROWS, dim, slot_bytes, a->copied + tile_bytes, &stride_2);
        for (int k = 0; k < KEYS_TOGETHER; k++)
            for (int64_t line = 0; line < dim * 2; line += 64)
                __builtin_prefetch(keys[i + FETCHED + k] + line);
        for (int64_t q = 0; q < queries; q += 2 * TILE_ROWS) {
            const char *query = tiles + q / TILE_ROWS * tile_bytes;
            const int64_t left = queries - q;
            const int both = left > TILE_ROWS;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
                _tile_loadd(4, some + d * 2, stride);
                _tile_loadd(6, query + d * 32, 64);
                _tile_dpbf16ps(0, 4, 6);
                if (both) {
                    _tile_loadd(7, query + tile_bytes + d * 32, 64);
                    _tile_dpbf16ps(1, 4, 7);
                }
                if (more) {
                    _tile_loadd(5, others + d * 2, stride_2);
                    _tile_dpbf16ps(2, 5, 6);
                    if (both)
                        _tile_dpbf16ps(3, 5, 7);
                }
            }
            float *to = scores + q * a->stride + i;
            _tile_stored(0, a->sums, 64);
            _tile_stored(1, a->sums + TILE_NUMBERS, 64);
            _tile_stored(2, a->sums + 2 * TILE_NUMBERS, 64);
            _tile_stored(3, a->sums + 3 * TILE_NUMBERS, 64);
            put_scores(a->sums, both ? TILE_ROWS : left, to, a->stride);
            if (more)
                put_scores(a->sums + 2 * TILE_NUMBERS, both ? TILE_ROWS : left, to + TILE_ROWS, a->stride);
            if (both) {
                const int64_t second = left < 2 * TILE_ROWS ? left - TILE_ROWS : TILE_ROWS;
                to += TILE_ROWS * a->stride;
                put_scores(a->sums + TILE_NUMBERS, second, to, a->stride);
                if (more)
                    put_scores(a->sums + 3 * TILE_NUMBERS, second, to + TILE_ROWS, a->stride);
            }
        }
    }
}

/* 2^x for x up to 0, whose error is a hundredth of what rounding to bfloat16 makes; 0 below -126. */
INLINE vf power_of_two(vf x) {
    const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vf f = x - (vf)whole;
    vf y = splat(9.582848e-3f);
    y = fma_(y, f, splat(5.5906433e-2f));
    y = fma_(y, f, splat(2.4024099e-1f));
    y = fma_(y, f, splat(6.9312419e-1f));
    y = fma_(y, f, splat(1.0f));
    const __mmask16 there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(there, (__m512)y, whole);
}

/* Turn scores, still to be scaled, into weights in their place, up to a factor, which is returned; zeros behind them up to
   key `end`. */
static float put_weights(float *scores, int64_t count, int64_t end, float scale) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    char *weights = (char *)scores;
    store(scores + count, splat(-INFINITY));
    store(scores + count + LANES, splat(-INFINITY));
    vf most[2] = {splat(-INFINITY), splat(-INFINITY)}, total = splat(0);
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        most[0] = largest_of(load(scores + i), most[0]);
        most[1] = largest_of(load(scores + i + LANES), most[1]);
    }
    const vf highest = splat(largest_lane(largest_of(most[0], most[1]))), binary = splat(scale * 1.44269504f);
    int64_t i = 0;
    for (; i < count; i += 2 * LANES) {
        const vf some = power_of_two((load(scores + i) - highest) * binary);
        const vf others = power_of_two((load(scores + i + LANES) - highest) * binary);
        const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)others, (__m512)some);
        total = (vf)_mm512_dpbf16_ps((__m512)total, rounded, ones);
        _mm512_storeu_si512(weights + 2 * i, (__m512i)rounded);
    }
    memset(weights + 2 * i, 0, i < end ? 2 * (end - i) : 0);
    return 1.0f / sum_lanes(total);
}

/* Write the values of keys as tiles: pairs of keys side by side. A pair of tiles has the numbers of 32 in the order in
   which they are interleaved. */
INLINE void put_values(const char *const *keys, int64_t offset, int64_t dim, char *tiles) {
    for (int64_t pair = 0; pair < TILE_ROWS; pair++)
        for (int64_t d = 0; d < dim; d += 32) {
            __builtin_prefetch(keys[2 * pair + FETCHED] + offset + 2 * d);
            __builtin_prefetch(keys[2 * pair + FETCHED + 1] + offset + 2 * d);
            const __m512i even = _mm512_loadu_si512(keys[2 * pair] + offset + 2 * d);
            const __m512i odd = _mm512_loadu_si512(keys[2 * pair + 1] + offset + 2 * d);
            char *to = tiles + d / 16 * TILE_BYTES + pair * 64;
            _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(to + TILE_BYTES, _mm512_unpackhi_epi16(even, odd));
        }
}

/* Add the values of keys times weights to what queries have, `[queries][dim]`, as `put_values` orders numbers. */
static void mix_in_tiles(const attended *a, const char *const *keys, int64_t offset, int64_t count, int64_t dim,
                         int64_t queries, const char *weights, float *mixed) {
    const size_t weight_stride = a->stride * 4, row_bytes = dim * 4;
    for (int64_t i = 0; i < count; i += KEYS_KEPT) {
        const int64_t end = count - i < KEYS_KEPT ? count - i : KEYS_KEPT;
        for (int64_t k = 0; k < end; k += KEYS_TOGETHER) {
            put_values(keys + i + k, offset, dim, a->values + k * dim * 2);
        }
        WRITTEN();
        for (int64_t q = 0; q < queries; q += 2 * TILE_ROWS) {
            const int both = queries - q > TILE_ROWS;
            for (int64_t d = 0; d < dim; d += 32) {
                const char *weight = weights + q * weight_stride + i * 2, *value = a->values + d / 16 * TILE_BYTES;
                float *to = mixed + q * dim + d, *second = to + TILE_ROWS * dim;
                _tile_loadd(0, to, row_bytes);
                _tile_loadd(1, to + 16, row_bytes);
                if (both) {
                    _tile_loadd(2, second, row_bytes);
                    _tile_loadd(3, second + 16, row_bytes);
                }
                for (int64_t k = 0; k < end; k += KEYS_TOGETHER, weight += 64, value += KEYS_TOGETHER * dim * 2) {
                    _tile_loadd(4, weight, weight_stride);
                    _tile_loadd(6, value, 64);
                    _tile_loadd(7, value + TILE_BYTES, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    if (both) {
                        _tile_loadd(5, weight + TILE_ROWS * weight_stride, weight_stride);
                        _tile_dpbf16ps(2, 5, 6);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }
                _tile_stored(0, to, row_bytes);
                _tile_stored(1, to + 16, row_bytes);
                if (both) {
                    _tile_stored(2, second, row_bytes);
                    _tile_stored(3, second + 16, row_bytes);
                }
            }
        }
    }
}

/* Write what a query has in order, times a factor. Of sums that underflow, signs differ. */
INLINE void put_mixed(const float *mixed, int64_t dim, float factor, float *out) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t d = 0; d < dim; d += 32) {
        const __m512 some = (__m512)load(mixed + d), others = (__m512)load(mixed + d + 16);
        store(out + d, (vf)_mm512_permutex2var_ps(some, low, others) * splat(factor) + splat(0));
        store(out + d + 16, (vf)_mm512_permutex2var_ps(some, high, others) * splat(factor) + splat(0));
    }
}

/* Entries, the first included, up to which keys are listed for all rows: those that every row with ancestors sees. Rows
   without see the first of them. */
INLINE int64_t end_of_shared(const tile *t) {
    const step *s = t->s;
    int64_t most = t->first, least = INT64_MAX;
    for (int64_t row = t->begin; row < t->end; row++) {
        uint64_t bits = 0;
        for (int64_t word = 0; word < s->words; word++)
            bits |= s->ancestors[row * s->words + word];
        most = s->visible[row] > most ? s->visible[row] : most;
        if (bits && s->visible[row] < least)
            least = s->visible[row];
    }
    const int64_t end = least < most ? least : most;
    return end < t->first ? t->first : end;
}

/* Of the shared keys, `before`, those that a row sees. */
INLINE int64_t seen_by(const tile *t, int64_t row, int64_t before) {
    const int64_t seen = t->s->visible[row] - t->first;
    return seen < 0 ? 0 : seen < before ? seen : before;
}

static void attend_in_tiles(const tile *t, const float *queries, int64_t query_stride, float *memory, float *out) {
    const step *s = t->s;
    const int64_t group = t->heads / t->kv_heads, dim = t->dim, all = (t->end - t->begin) * group;
    const int64_t offset = t->kv_heads * dim * 2, shared = end_of_shared(t);
    const size_t slot_bytes = s->slot_bytes;
    attended a;
    place_attended(&a, (char *)(((uintptr_t)memory + 63) / 64 * 64), most_keys(s), all, group, dim);
    const int64_t before = list_entries(t, t->first, shared, a.keys);
    for (int i = 0; before && i < KEYS_MORE; i++)
        a.keys[before + i] = a.keys[before - 1];
    memset(a.queries, 0, round_up(all, TILE_ROWS) * dim * 2);
    memset(a.own, 0, round_up(group, TILE_ROWS) * dim * 2);
    memset(a.mixed, 0, (all + TILE_ROWS) * dim * 4);
    for (int64_t q = 0; q < all; q++)
        put_query(a.queries, q, dim, queries + q / group * query_stride + q % group * dim, a.copied);
    shape_tiles((int[]){16, 16, 16, 16, 16, 16, 16, 16}, 0, 64);
    score_in_tiles(&a, a.keys, before, dim, slot_bytes, a.queries, all, a.scores);
    int has_rest = 0;
    for (int64_t row = t->begin; row < t->end; row++)
        has_rest |= list_rest(t, row, shared, a.rest) > 0;
    /* Keys whose values meet all queries at once. */
    const int64_t together = has_rest ? before / KEYS_TOGETHER * KEYS_TOGETHER : round_up(before, KEYS_TOGETHER);
    for (int64_t row = t->begin; row < t->end; row++) {
        const int64_t begin = (row - t->begin) * group, seen = seen_by(t, row, before);
        const int64_t more = list_rest(t, row, shared, a.rest);
        float *scores = a.scores + begin * a.stride;
        if (more) {
            for (int64_t q = 0; q < group; q++)
                put_query(a.own, q, dim, queries + (row - t->begin) * query_stride + q * dim, a.copied);
            score_in_tiles(&a, a.rest, more, dim, slot_bytes, a.own, group, scores + seen);
        }
        const int64_t count = seen + more, whole = round_up(count, KEYS_TOGETHER);
        for (int64_t q = 0; q < group; q++) {
            if (t->slopes)
                add_distances(scores + q * a.stride, count, t->slopes[t->kv_head * group + q] / t->scale);
            a.share[begin + q] =
                put_weights(scores + q * a.stride, count, whole > together ? whole : together, t->scale);
        }
    }
    WRITTEN();
    mix_in_tiles(&a, a.keys, offset, together, dim, all, (const char *)a.scores, a.mixed);
    for (int64_t row = t->begin; has_rest && row < t->end; row++) {
        const int64_t begin = (row - t->begin) * group, seen = seen_by(t, row, before);
        /* Keys behind those, of shared ones too. */
        int64_t count = 0;
        for (int64_t i = together; i < seen; i++)
            a.rest[count++] = a.keys[i];
        count += list_rest(t, row, shared, a.rest + count);
        for (int i = 0; count && i < KEYS_MORE; i++)
            a.rest[count + i] = a.rest[count - 1];
        memcpy(a.mixed_own, a.mixed + begin * dim, group * dim * 4);
        mix_in_tiles(&a, a.rest, offset, round_up(count, KEYS_TOGETHER), dim, group,
                     (const char *)(a.scores + begin * a.stride) + together * 2, a.mixed_own);
        memcpy(a.mixed + begin * dim, a.mixed_own, group * dim * 4);
    }
    _tile_release();
    for (int64_t q = 0; q < all; q++)
        put_mixed(a.mixed + q * dim, dim, a.share[q], out + q * dim);
}
