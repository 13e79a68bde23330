/* Rows that are attended together, and the keys that a row sees, in place in the paged cache. They come in the order of
   positions: the cached ones, then its ancestors in the tree, as if those were cached.

   Rows of one request and the query heads of a KV head are attended together as far as they see the same keys, so that
   a key is read once for all of them. Each query's sums are its own and in the order of its keys: which queries are
   attended together changes no bit. */

enum {
    FEWEST_QUERIES = 8, /* queries that are attended together, or one row's if it has more */
    MOST_TOGETHER = 128,
    MOST_SCORES = 1 << 18, /* floats */
    TILES_OF_THREAD = 3, /* that make up for tiles of different sizes */
    KEYS_MORE = 96 + LANES, /* numbers behind the last key that may be read or written */
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

/* Whether bfloat16 is attended by tile registers. */
INLINE int attends_in_tiles(int64_t kind, int64_t dim) {
#if defined(FORM_AMX)
    return kind == BFLOAT16 && dim % TILE_DEPTH == 0;
#else
    (void)kind;
    (void)dim;
    return 0;
#endif
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

INLINE int64_t rows_of(int64_t queries, int64_t group) { return group < queries ? queries / group : 1; }

/* Most rows that are attended together. Tile registers take more queries, as long as these keep each thread busy and their
   scores stay in its cache. */
static int64_t rows_together(const step *s, int64_t group, int64_t kv_heads, int64_t dim, int threads) {
    int64_t queries = FEWEST_QUERIES;
    if (attends_in_tiles(s->kv_kind, dim)) {
        const int64_t rows = s->rows * kv_heads / (TILES_OF_THREAD * threads), keys = most_keys(s);
        while (queries < MOST_TOGETHER && rows_of(2 * queries, group) <= rows && 2 * queries * keys <= MOST_SCORES)
            queries *= 2;
    }
    return rows_of(queries, group);
}

/* Cut the rows of a step into tiles of at most `most`: write the first row of each, and the number of rows behind the
   last. Return their number. */
static int64_t cut_tiles(const step *s, int64_t most, int64_t *first) {
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

/* The tile that is done in turn `item`: from both ends, so that each thread has about as much to do though later rows see
   more keys. */
INLINE int64_t tile_in_turn(int64_t item, int64_t tiles) { return item % 2 ? tiles - 1 - item / 2 : item / 2; }

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

/* List a row's keys behind the first `shared` entries. */
INLINE int64_t list_rest(const tile *t, int64_t row, int64_t shared, const char **keys) {
    int64_t count = list_entries(t, shared, t->s->visible[row], keys);
    count += list_ancestors(t, row, keys + count);
    for (int i = 0; count && i < KEYS_MORE; i++)
        keys[count + i] = keys[count - 1];
    return count;
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

/* Add ALiBi's bias (Press et al. 2021) to scores, still to be scaled: `slope` for each position that a key lies before
   the last one, which is the row's own. Cached keys and ancestors are in the order of positions. */
INLINE void add_distances(float *scores, int64_t count, float slope) {
    float lane[LANES];
    for (int i = 0; i < LANES; i++)
        lane[i] = (float)i;
    for (int64_t i = 0; i < count; i += LANES)
        store(scores + i, fma_(load(lane) + splat((float)(i - count + 1)), splat(slope), load(scores + i)));
}

