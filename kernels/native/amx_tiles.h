/* Products of bfloat16 by a processor's tile registers (AMX): 16 columns of 32 inputs at a time, for up to 16 rows. The
   processor adds up even and odd inputs apart, and each row by itself: a row's result is the same among any others. */

enum {
    TILE_ROWS = 16,
    TILE_DEPTH = 32,
    TILE_BYTES = 1024,
    FEW_ROWS = 2, /* that vectors multiply faster, and of whole numbers: */
    FEW_INTEGER_ROWS = 6,
};

/* Have memory hold what was written: compilers do not know that a tile reads it. */
#define WRITTEN() __asm__ volatile("" : : : "memory")

enum { REGISTERS = 8 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* Give each tile register its rows; `input_bytes` of inputs are in a row of `inputs` registers (a bit each). */
static void shape_tiles(const int rows[REGISTERS], int inputs, int input_bytes) {
    tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < REGISTERS; t++) {
        shapes.rows[t] = rows[t];
        shapes.row_bytes[t] = inputs >> t & 1 ? input_bytes : 64;
    }
    WRITTEN();
    _tile_loadconfig(&shapes);
}

/* What is left of inputs and weights behind whole tiles, zeros behind it. */
typedef struct {
    char inputs[2][TILE_ROWS * 64], weights[MOST_BLOCKS][TILE_BYTES];
} tile_rest;

static void fill_rest(const product *p, int rows, int more, int blocks, const char *x, const char *weight,
                      size_t block_bytes, tile_rest *rest) {
    const int64_t whole = p->weight->depth / TILE_DEPTH * TILE_DEPTH, left = p->weight->depth - whole;
    memset(rest, 0, sizeof *rest);
    for (int r = 0; r < rows; r++)
        memcpy(rest->inputs[0] + r * 64, x + r * p->x_stride + whole * 2, left * 2);
    for (int r = 0; r < more; r++)
        memcpy(rest->inputs[1] + r * 64, x + (rows + r) * p->x_stride + whole * 2, left * 2);
    for (int b = 0; b < blocks; b++)
        memcpy(rest->weights[b], weight + b * block_bytes + whole * 32, left * 32);
    WRITTEN();
}

/* Prefetch what is `ahead` bytes behind a tile of weights; nothing for 0. */
INLINE void prefetch_tile(const char *weights, size_t ahead) {
    if (ahead)
        UNROLLED
        for (int line = 0; line < TILE_BYTES / 64; line++)
            __builtin_prefetch(weights + ahead + 64 * line);
}

/* Write the sums of a row's 16 columns. Of sums that underflow, tiles and vectors know different signs. */
INLINE void write_tile_sums(const product *p, int64_t row, int64_t block, vf sum) {
    write_sums(p, row, block * BLOCK, sum + splat(0));
}

/* How far behind weights at input `k` is prefetched: near the end of some blocks, the beginning of the next ones. */
INLINE size_t ahead_at(int64_t k, int64_t depth, int blocks) {
    return k * 32 + AHEAD < depth * 32 ? AHEAD : AHEAD + (size_t)(blocks - 1) * depth * BLOCK * 2;
}

/* At most 16 rows with four blocks side by side: sums in registers 0 to 3, inputs in 4, weights in 5 and 6 in turn. Tiles are
   prefetched one by one: more at once would wait for each other. */
#define MULTIPLY_BLOCK(b, tile, weights, ahead)                                                                        \
    if (blocks > b) {                                                                                                  \
        prefetch_tile(weights, ahead);                                                                                 \
        _tile_loadd(tile, weights, 64);                                                                                \
        _tile_dpbf16ps(b, 4, tile);                                                                                    \
    }

INLINE void multiply_four(const product *p, int blocks, int64_t block) {
    const int64_t depth = p->weight->depth;
    const size_t block_bytes = (size_t)depth * BLOCK * 2;
    const char *weight = (const char *)p->weight->weight + block * block_bytes;
    const int rows = (int)p->rows;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t k = 0;
    for (; k + TILE_DEPTH <= depth; k += TILE_DEPTH) {
        const char *w = weight + k * 32;
        const size_t ahead = ahead_at(k, depth, blocks);
        _tile_loadd(4, p->x + k * 2, p->x_stride);
        MULTIPLY_BLOCK(0, 5, w, ahead)
        MULTIPLY_BLOCK(1, 6, w + block_bytes, ahead)
        MULTIPLY_BLOCK(2, 5, w + 2 * block_bytes, ahead)
        MULTIPLY_BLOCK(3, 6, w + 3 * block_bytes, ahead)
    }
    if (k < depth) {
        tile_rest rest;
        fill_rest(p, rows, 0, blocks, p->x, weight, block_bytes, &rest);
        _tile_loadd(4, rest.inputs[0], 64);
        MULTIPLY_BLOCK(0, 5, rest.weights[0], 0)
        MULTIPLY_BLOCK(1, 6, rest.weights[1], 0)
        MULTIPLY_BLOCK(2, 5, rest.weights[2], 0)
        MULTIPLY_BLOCK(3, 6, rest.weights[3], 0)
    }
    float sums[MOST_BLOCKS][TILE_ROWS * BLOCK] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    if (blocks > 1)
        _tile_stored(1, sums[1], 64);
    if (blocks > 2)
        _tile_stored(2, sums[2], 64);
    if (blocks > 3)
        _tile_stored(3, sums[3], 64);
    for (int b = 0; b < blocks; b++)
        for (int r = 0; r < rows; r++)
            write_tile_sums(p, r, block + b, load(sums[b] + r * BLOCK));
}

enum {
    SQUARE_ROWS = 2 * TILE_ROWS,
    SQUARES = 4, /* that meet the same weights together */
    DEPTH_KEPT = 640, /* inputs at a time, whose weights stay in the nearest cache meanwhile */
};

/* All rows that meet the weights one after another. */
INLINE int64_t all_rows_of(const product *p) { return p->rows_before + p->rows + p->rows_behind; }

/* A square: two tiles of rows, `rows` from `row` on and `more` behind them. With each tile of weights `lines` lines of the
   cache are prefetched, from `ahead` bytes behind the first tile on. */
typedef struct {
    int64_t row;
    int rows, more, lines;
    size_t ahead;
} square_rows;

/* Square `number` of `squares` of about as many rows each. The first of all rows prefetch the weights that they meet, unless
   the blocks before have had them fetched; others a share of the next MOST_BLOCKS, side by side in memory. */
INLINE square_rows rows_of_square(const product *p, int64_t number, int64_t squares, int is_first, int is_last) {
    const int64_t fewest = squares > 1 ? p->rows / squares : p->rows, larger = p->rows - fewest * squares;
    const int rows = (int)(fewest + (number < larger));
    square_rows s = {
        .row = fewest * number + (number < larger ? number : larger), .rows = (rows + 1) / 2, .more = rows / 2,
    };
    const int64_t lines = TILE_BYTES / 64, before = p->rows_before + s.row, all = all_rows_of(p);
    if (all <= SQUARE_ROWS)
        return s;
    if (is_first && !before) {
        s.lines = (int)lines;
        s.ahead = AHEAD;
    } else if (!is_last) {
        const int64_t line = lines * before / all;
        s.lines = (int)(lines * (before + rows) / all - line);
        s.ahead = (MOST_BLOCKS * BLOCK + line) * 2 * p->weight->depth;
    }
    return s;
}

/* How many squares meet the weights: one, which prefetches them, two, or so many that inputs are read past the nearest cache,
   in which the weights stay. */
enum { ONE_SQUARE, TWO_SQUARES, MANY_SQUARES };

#define LOAD_INPUTS(tile, inputs)                                                                                      \
    if (met_by == MANY_SQUARES)                                                                                        \
        _tile_stream_loadd(tile, inputs, p->x_stride);                                                                 \
    else                                                                                                               \
        _tile_loadd(tile, inputs, p->x_stride);

#define MULTIPLY_FIRST(b, tile, weights)                                                                               \
    if (blocks > b) {                                                                                                  \
        if (met_by == ONE_SQUARE)                                                                                      \
            prefetch_tile(weights, ahead_at(k, depth, blocks));                                                        \
        for (int i = 0; met_by != ONE_SQUARE && i < s->lines; i++)                                                     \
            __builtin_prefetch(next + b * block_bytes + 64 * i);                                                       \
        _tile_loadd(tile, weights, 64);                                                                                \
        _tile_dpbf16ps(b, 4, tile);                                                                                    \
    }

#define MULTIPLY_SECOND(b, sum, tile)                                                                                  \
    if (blocks > b)                                                                                                    \
        _tile_dpbf16ps(sum, 5, tile);

/* Multiply a square with at most two blocks, which are read half as often as by one tile of rows: sums in registers 0 to 3,
   inputs in 4 and 5, weights in 6 and 7. Inputs `k` to `end` are multiplied; the first ones begin the sums, rows of
   `stride`. */
INLINE void multiply_square(const product *p, const square_rows *s, int blocks, int met_by, int64_t block, int64_t k,
                            int64_t end, float *sums, int64_t stride) {
    const int rows = s->rows;
    const int64_t depth = p->weight->depth;
    const size_t block_bytes = (size_t)depth * BLOCK * 2, bytes = stride * 4, fetched = 64 * (size_t)s->lines;
    const char *weight = (const char *)p->weight->weight + block * block_bytes;
    const char *x = p->x + s->row * p->x_stride, *second = x + rows * p->x_stride;
    float *second_sums = sums + rows * stride;
    if (k) {
        _tile_loadd(0, sums, bytes);
        _tile_loadd(2, second_sums, bytes);
        if (blocks > 1) {
            _tile_loadd(1, sums + BLOCK, bytes);
            _tile_loadd(3, second_sums + BLOCK, bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const char *next = weight + s->ahead + k / TILE_DEPTH * fetched;
    for (; k + TILE_DEPTH <= end; k += TILE_DEPTH, next += fetched) {
        const char *w = weight + k * 32;
        LOAD_INPUTS(4, x + k * 2)
        MULTIPLY_FIRST(0, 6, w)
        MULTIPLY_FIRST(1, 7, w + block_bytes)
        LOAD_INPUTS(5, second + k * 2)
        MULTIPLY_SECOND(0, 2, 6)
        MULTIPLY_SECOND(1, 3, 7)
    }
    if (k < end) {
        tile_rest rest;
        fill_rest(p, rows, s->more, blocks, x, weight, block_bytes, &rest);
        _tile_loadd(4, rest.inputs[0], 64);
        MULTIPLY_BLOCK(0, 6, rest.weights[0], 0)
        MULTIPLY_BLOCK(1, 7, rest.weights[1], 0)
        _tile_loadd(5, rest.inputs[1], 64);
        MULTIPLY_SECOND(0, 2, 6)
        MULTIPLY_SECOND(1, 3, 7)
    }
    _tile_stored(0, sums, bytes);
    _tile_stored(2, second_sums, bytes);
    if (blocks > 1) {
        _tile_stored(1, sums + BLOCK, bytes);
        _tile_stored(3, second_sums + BLOCK, bytes);
    }
}

/* Multiply few rows as the tiles do, by vectors, which read weights from memory faster. The even inputs of 32 are added up,
   then the odd ones, and the two sums to those before. */
INLINE void multiply_few(const product *p, int rows, int blocks, int64_t block) {
    const int64_t depth = p->weight->depth;
    const size_t block_bytes = (size_t)depth * BLOCK * 2, stride = p->x_stride;
    const char *weight = (const char *)p->weight->weight + block * block_bytes, *x = p->x;
    vf sum[FEW_ROWS][MOST_BLOCKS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int b = 0; b < blocks; b++)
            sum[r][b] = splat(0);
    for (int64_t k = 0; k < depth;) {
        const int64_t end = k + TILE_DEPTH < depth ? k + TILE_DEPTH : depth;
        const size_t ahead = ahead_at(k, depth, blocks);
        vf even[FEW_ROWS][MOST_BLOCKS], odd[FEW_ROWS][MOST_BLOCKS];
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
            for (int b = 0; b < blocks; b++)
                even[r][b] = odd[r][b] = splat(0);
        for (; k < end; k += 2, x += 4)
            UNROLLED
            for (int b = 0; b < blocks; b++) {
                const char *here = weight + b * block_bytes + k * 32;
                __builtin_prefetch(here + ahead);
                const vu pairs = load_bits(here);
                UNROLLED
                for (int r = 0; r < rows; r++) {
                    uint32_t pair;
                    memcpy(&pair, x + r * stride, 4);
                    even[r][b] = fma_((vf)(pairs << 16), splat(float_of(pair << 16)), even[r][b]);
                    odd[r][b] = fma_((vf)(pairs & 0xffff0000u), splat(float_of(pair & 0xffff0000u)), odd[r][b]);
                }
            }
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
            for (int b = 0; b < blocks; b++)
                sum[r][b] += even[r][b] + odd[r][b];
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int b = 0; b < blocks; b++)
            write_tile_sums(p, r, block + b, sum[r][b]);
}

INLINE void multiply_few_of(const product *p, int rows, int blocks, int64_t begin, int64_t end) {
    for (; begin + blocks <= end; begin += blocks)
        multiply_few(p, rows, blocks, begin);
    for (; begin < end; begin++)
        multiply_few(p, rows, 1, begin);
}

/* Multiply at most FEW_ROWS rows with the blocks `begin` to `end`. */
static void multiply_few_as_tiles(const product *p, int64_t begin, int64_t end) {
    /* Tiles take subnormal numbers for zero, and make none. */
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    if (p->rows == 1)
        multiply_few_of(p, 1, 4, begin, end);
    else
        multiply_few_of(p, 2, 2, begin, end);
    _mm_setcsr(control);
}

/* Multiply at most 16 rows with the blocks `begin` to `end`. */
static void multiply_rows_in_tiles(const product *p, int64_t begin, int64_t end) {
    const int rows = (int)p->rows;
    shape_tiles((int[]){rows, rows, rows, rows, rows, TILE_ROWS, TILE_ROWS, TILE_ROWS}, 1 << 4, 64);
    for (; begin < end; begin += MOST_BLOCKS)
        switch (end - begin) {
        case 1: multiply_four(p, 1, begin); break;
        case 2: multiply_four(p, 2, begin); break;
        case 3: multiply_four(p, 3, begin); break;
        default: multiply_four(p, 4, begin);
        }
}

/* Write the sums of a square with its bias and residual. */
static void write_square(const product *p, const square_rows *s, int64_t block, int blocks, const float *sums) {
    /* Read before anything is stored: a compiler must assume that a store changes the product. */
    const int64_t column = block * BLOCK, out_stride = p->out_stride, residual_stride = p->residual_stride;
    const float *bias = p->weight->bias, *residual = p->residual;
    float *out = p->out + s->row * out_stride + column - p->first_column;
    if (residual)
        residual += s->row * residual_stride + column;
    for (int r = 0; r < s->rows + s->more; r++)
        for (int b = 0; b < blocks; b++) {
            vf sum = load(sums + (r * 2 + b) * BLOCK);
            if (bias)
                sum += load(bias + column + b * BLOCK);
            if (residual)
                sum += load(residual + r * residual_stride + b * BLOCK);
            store(out + r * out_stride + b * BLOCK, sum);
        }
}

/* Multiply more rows with the blocks `begin` to `end`, in squares. Sums to which nothing is added are made where they go. */
static void multiply_some_squares(const product *p, const square_rows *some, int count, int64_t block, int blocks,
                                  int shape[2]) {
    const int64_t depth = p->weight->depth, steps = (depth + TILE_DEPTH - 1) / TILE_DEPTH;
    const int64_t all = all_rows_of(p);
    const int met_by = all > 2 * SQUARE_ROWS ? MANY_SQUARES : all > SQUARE_ROWS ? TWO_SQUARES : ONE_SQUARE;
    const int adds = p->weight->bias || p->residual;
    const int64_t parts = met_by == ONE_SQUARE ? 1 : (steps * TILE_DEPTH + DEPTH_KEPT - 1) / DEPTH_KEPT;
    const int64_t stride = adds ? 2 * BLOCK : p->out_stride;
    float own[SQUARES][SQUARE_ROWS * 2 * BLOCK] __attribute__((aligned(64)));
    for (int64_t part = 0, k = 0, end; part < parts; part++, k = end) {
        end = part + 1 < parts ? steps * (part + 1) / parts * TILE_DEPTH : depth;
        for (int i = 0; i < count; i++) {
            const square_rows *s = &some[i];
            float *sums = adds ? own[i] : p->out + s->row * stride + block * BLOCK - p->first_column;
            if (s->rows != shape[0] || s->more != shape[1]) {
                const int rows = shape[0] = s->rows, more = shape[1] = s->more;
                shape_tiles((int[]){rows, rows, more, more, rows, more, TILE_ROWS, TILE_ROWS}, 3 << 4, 64);
            }
            switch (2 * met_by + blocks) {
            case 2 * ONE_SQUARE + 1: multiply_square(p, s, 1, ONE_SQUARE, block, k, end, sums, stride); break;
            case 2 * ONE_SQUARE + 2: multiply_square(p, s, 2, ONE_SQUARE, block, k, end, sums, stride); break;
            case 2 * TWO_SQUARES + 1: multiply_square(p, s, 1, TWO_SQUARES, block, k, end, sums, stride); break;
            case 2 * TWO_SQUARES + 2: multiply_square(p, s, 2, TWO_SQUARES, block, k, end, sums, stride); break;
            case 2 * MANY_SQUARES + 1: multiply_square(p, s, 1, MANY_SQUARES, block, k, end, sums, stride); break;
            default: multiply_square(p, s, 2, MANY_SQUARES, block, k, end, sums, stride);
            }
            if (adds && end == depth)
                write_square(p, s, block, blocks, sums);
        }
    }
}

static void multiply_squares(const product *p, int64_t begin, int64_t end) {
    const int64_t squares = (p->rows + SQUARE_ROWS - 1) / SQUARE_ROWS;
    int shape[2] = {0};
    for (int64_t chunk = begin; chunk < end; chunk += MOST_BLOCKS)
        for (int64_t first = 0; first < squares; first += SQUARES) {
            const int is_first = chunk == begin && !p->is_fetched, is_last = chunk + MOST_BLOCKS >= p->weight->blocks;
            const int count = squares - first < SQUARES ? (int)(squares - first) : SQUARES;
            square_rows some[SQUARES];
            for (int i = 0; i < count; i++)
                some[i] = rows_of_square(p, first + i, squares, is_first, is_last);
            for (int64_t block = chunk; block < chunk + MOST_BLOCKS && block < end; block += 2)
                multiply_some_squares(p, some, count, block, end - block > 1 ? 2 : 1, shape);
        }
}

static void multiply_pairs_in_tiles(const product *p, int64_t begin, int64_t end) {
    if (!p->rows)
        return;
    WRITTEN();
    (p->rows <= TILE_ROWS ? multiply_rows_in_tiles : multiply_squares)(p, begin, end);
    /* Threads change faster while the registers are empty. */
    _tile_release();
}

/* Weights of 4 and 8 bits, in whole numbers: see `integer_products.h`. Tiles of signed and unsigned bytes are made in
   memory. A tile's rows are the high bytes of a row of inputs, then its low bytes, and so on. */

enum {
    BYTES_ROWS = TILE_ROWS / 2,
    GROUPS_AT_ONCE = 4, /* whose sums are in a register each */
    MOST_TILES = 4, /* of a group */
};

/* Groups of a block: their numbers as tiles, and their scales. */
typedef struct {
    int64_t first;
    int count, num_tiles[GROUPS_AT_ONCE];
    vf scale[GROUPS_AT_ONCE], minimum[GROUPS_AT_ONCE];
    char tiles[GROUPS_AT_ONCE][MOST_TILES][INPUTS_TOGETHER * BLOCK] __attribute__((aligned(64)));
} tile_groups;

/* Unpack the groups of a block from `first` on. */
INLINE void unpack_groups(const matrix *m, int kind, const char *weight, int64_t first, tile_groups *to) {
    const int64_t left = groups_of(m) - first, nested = nested_end(m), bytes_of_group = group_bytes(m);
    to->first = first;
    to->count = left < GROUPS_AT_ONCE ? (int)left : GROUPS_AT_ONCE;
    for (int g = 0; g < to->count; g++) {
        const int64_t k = (first + g) * m->group, inputs = m->depth - k < m->group ? m->depth - k : m->group;
        const char *group = weight + nested + (first + g) * bytes_of_group, *numbers = group + group_head(m);
        scales_of_vector(m, weight + k / NESTED_INPUTS * nested_bytes(m), group, 0, 0, &to->scale[g], &to->minimum[g]);
        __builtin_prefetch(group + AHEAD);
        to->num_tiles[g] = (int)(inputs / INPUTS_TOGETHER);
        for (int t = 0; t < to->num_tiles[g]; t++, numbers += word_bytes(kind))
            UNROLLED
            for (int i = 0; i < INPUTS_TOGETHER / 8; i++) {
                const char *here = numbers + i * word_bytes(kind) / 4;
                __m512i bytes[2];
                __builtin_prefetch(here + AHEAD);
                if (kind == INT8)
                    __builtin_prefetch(here + AHEAD + 64);
                unpack_bytes(kind, here, bytes);
                _mm512_store_si512(to->tiles[g][t] + 128 * i, bytes[0]);
                _mm512_store_si512(to->tiles[g][t] + 128 * i + 64, bytes[1]);
            }
    }
}

/* Multiply a tile of inputs with one of group `g`, if it has as many. */
#define MULTIPLY_GROUP(g)                                                                                              \
    if (g < groups->count && t < groups->num_tiles[g]) {                                                               \
        _tile_loadd(4, bytes + g * group + t * INPUTS_TOGETHER, at->half);                                             \
        _tile_loadd(5, groups->tiles[g][t], 64);                                                                       \
        if (kind == UINT4)                                                                                             \
            _tile_dpbsud(g, 4, 5);                                                                                     \
        else                                                                                                           \
            _tile_dpbssd(g, 4, 5);                                                                                     \
    }

/* Multiply groups with `rows` rows from `row` on, and add the products of those from `begin` on to their sums, which the
   first groups begin. */
INLINE void add_tile_groups(const product *p, const row_places *at, int kind, const tile_groups *groups, int64_t row,
                            int begin, int rows, float *sums) {
    const int64_t group = p->weight->group;
    const size_t stride = p->x_stride;
    const char *x = p->x + row * stride, *bytes = x + at->high + groups->first * group;
    int32_t parts[GROUPS_AT_ONCE][TILE_ROWS][BLOCK] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int t = 0; t < groups->num_tiles[0]; t++) {
        MULTIPLY_GROUP(0)
        MULTIPLY_GROUP(1)
        MULTIPLY_GROUP(2)
        MULTIPLY_GROUP(3)
    }
    _tile_stored(0, parts[0], 64);
    _tile_stored(1, parts[1], 64);
    _tile_stored(2, parts[2], 64);
    _tile_stored(3, parts[3], 64);
    for (int r = begin; r < rows; r++) {
        vf sum = groups->first ? load(sums + r * BLOCK) : splat(0);
        for (int g = 0; g < groups->count; g++)
            sum = add_group(at, x + r * stride, groups->first + g, _mm512_load_si512(parts[g][2 * r]),
                            _mm512_load_si512(parts[g][2 * r + 1]), groups->scale[g], groups->minimum[g], sum);
        store(sums + r * BLOCK, sum);
    }
}

/* Multiply rows from `from` on, at most ROWS_OF_SUMS, with the blocks `begin` to `end`. */
enum { ROWS_OF_SUMS = 256 };

INLINE void multiply_bytes_in_tiles(const product *p, int kind, int64_t from, int64_t count, int64_t begin, int64_t end) {
    const matrix *m = p->weight;
    /* About as many rows in each tile. */
    const int64_t tiles = (count + BYTES_ROWS - 1) / BYTES_ROWS, most = (count + tiles - 1) / tiles;
    const int64_t num_groups = groups_of(m);
    const row_places at = places_of(m);
    float sums[ROWS_OF_SUMS * BLOCK] __attribute__((aligned(64)));
    tile_groups groups;
    const int both = 2 * (int)most, weights = INPUTS_TOGETHER / 4;
    shape_tiles((int[]){both, both, both, both, both, weights, 1, 1}, 1 << 4, INPUTS_TOGETHER);
    for (int64_t block = begin; block < end; block++) {
        const char *weight = (const char *)m->weight + block * quantized_block_bytes(m);
        for (int64_t first = 0; first < num_groups; first += GROUPS_AT_ONCE) {
            unpack_groups(m, kind, weight, first, &groups);
            WRITTEN();
            for (int64_t row = 0; row < count; row += most) {
                /* A last tile with fewer rows of its own takes some of the one before again: giving tiles another shape
                   takes longer than multiplying them. */
                const int64_t start = row + most < count ? row : count - most;
                add_tile_groups(p, &at, kind, &groups, from + start, (int)(row - start), (int)most, sums + start * BLOCK);
            }
        }
        for (int64_t row = 0; row < count; row++)
            write_sums(p, from + row, block * BLOCK, load(sums + row * BLOCK));
    }
    _tile_release();
}

#define FOR_TILES(kind)                                                                                                \
    static void multiply_##kind##_in_tiles(const product *p, int64_t from, int64_t count, int64_t begin, int64_t end) { \
        multiply_bytes_in_tiles(p, kind, from, count, begin, end);                                                     \
    }
FOR_TILES(UINT4)
FOR_TILES(INT8)
#undef FOR_TILES

/* Multiply all rows with the blocks `begin` to `end`. */
static void multiply_integers_in_tiles(const product *p, int64_t begin, int64_t end) {
    if (p->rows <= FEW_INTEGER_ROWS || p->weight->group > MOST_TILES * INPUTS_TOGETHER) {
        multiply_integers(p, begin, end);
        return;
    }
    for (int64_t from = 0; from < p->rows; from += ROWS_OF_SUMS) {
        const int64_t left = p->rows - from, count = left < ROWS_OF_SUMS ? left : ROWS_OF_SUMS;
        (p->weight->kind == UINT4 ? multiply_UINT4_in_tiles : multiply_INT8_in_tiles)(p, from, count, begin, end);
    }
}
