/* Products of bfloat16 by a processor's tile registers (AMX): 16 columns of 32 inputs at a time, for up to 16 rows. The
   processor adds up even and odd inputs apart, and each row by itself: a row's result is the same among any others. */

enum {
    TILE_ROWS = 16,
    TILE_DEPTH = 32,
    TILE_BYTES = 1024,
    FEW_ROWS = 2, /* that vectors multiply faster, and of whole numbers: */
    FEW_INTEGER_ROWS = 8,
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

/* Weights of 4 and 8 bits: see `integer_products.h`. Tiles of bfloat16 make the same sums of a group: products are whole
   multiples of one power of two, and add up to at most 2^24 of them, so that float32 rounds nothing. Therefore a group of
   8 bits has two sums, of the numbers' lower and upper four bits, and one of 4 bits with more than 64 inputs has two as
   well, of its halves. Otherwise two groups are summed together. */

enum {
    SUMMED_IN_ONE = 64, /* inputs of 4 bits whose sum is not rounded */
    MOST_TILES = 4, /* of a sum */
    ROWS_OF_SUMS = 128,
};

/* Groups `first` on of two blocks: their numbers as tiles, two sums of each block, and their scales. */
typedef struct {
    int64_t first, inputs[2]; /* where the inputs of a sum begin */
    int count, tiles[2];
    vf scale[2][2], minimum[2][2]; /* [block][group] */
    char numbers[MOST_TILES][2][2][TILE_BYTES] __attribute__((aligned(64))); /* [block][sum] of each */
} unpacked;

/* How a block lies in memory. Found once: a compiler must assume that each store changes the weight. */
typedef struct {
    int64_t depth, group, groups;
    size_t bytes, nested, nested_end, head, of_group, ahead;
} block_layout;

INLINE block_layout layout_of(const matrix *m, int blocks) {
    const size_t bytes = quantized_block_bytes(m);
    return (block_layout){
        .depth = m->depth, .group = m->group, .groups = groups_of(m), .bytes = bytes, .nested = nested_bytes(m),
        .nested_end = nested_end(m), .head = group_head(m), .of_group = group_bytes(m),
        /* Blocks that are small are prefetched before their turn. */
        .ahead = bytes < 4 * AHEAD ? blocks * bytes : AHEAD,
    };
}

/* Say which groups from `first` on are summed together. */
INLINE void choose_groups(const block_layout *l, int kind, int64_t first, unpacked *to) {
    const int64_t begin = first * l->group, left = l->depth - begin, inputs = left < l->group ? left : l->group;
    const int is_wide = l->group > SUMMED_IN_ONE;
    to->first = first;
    to->count = kind == UINT4 && !is_wide && left > inputs ? 2 : 1;
    to->inputs[0] = to->inputs[1] = begin;
    to->tiles[0] = to->tiles[1] = (int)(inputs / TILE_DEPTH);
    if (kind == UINT4 && is_wide) {
        const int half = SUMMED_IN_ONE / TILE_DEPTH, tiles = to->tiles[0];
        to->inputs[1] += SUMMED_IN_ONE;
        to->tiles[0] = tiles < half ? tiles : half;
        to->tiles[1] = tiles - to->tiles[0];
    } else if (kind == UINT4) {
        const int64_t second = left - inputs < l->group ? left - inputs : l->group;
        to->inputs[1] += inputs;
        to->tiles[1] = (int)(second / TILE_DEPTH);
    }
}

/* Write the numbers of 32 inputs as a tile. */
INLINE void unpack_nibbles(const char *words, size_t ahead, char *tile) {
    UNROLLED
    for (int eight = 0; eight < 4; eight++) {
        const vu word = load_bits(words + eight * 64);
        __builtin_prefetch(words + eight * 64 + ahead);
        UNROLLED
        for (int pair = 0; pair < 4; pair++)
            _mm512_store_si512(tile + (eight * 4 + pair) * 64, (__m512i)nibble_pairs(word >> 4 * pair));
    }
}

/* Write the lower and the upper four bits of 32 inputs as tiles. Both have a sign: a number is 16 times one plus the other. */
INLINE void unpack_halves(const char *bytes, size_t ahead, char *lower, char *upper) {
    static const uint16_t numbers[2][32] __attribute__((aligned(64))) = {
        {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
         0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80},
        {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0, 0, 0, 0, 0, 0, 0,
         0, 0, 0, 0, 0, 0, 0, 0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80},
    };
    const __m512i low = _mm512_load_si512(numbers[0]), high = _mm512_load_si512(numbers[1]);
    UNROLLED
    for (int pair = 0; pair < TILE_DEPTH / 2; pair++) {
        const __m128i first = _mm_loadu_si128((const __m128i *)(bytes + pair * 32));
        const __m128i second = _mm_loadu_si128((const __m128i *)(bytes + pair * 32 + 16));
        const __m256i both = _mm256_set_m128i(_mm_unpackhi_epi8(first, second), _mm_unpacklo_epi8(first, second));
        const __m512i words = _mm512_cvtepi8_epi16(both);
        if (pair % 2 == 0)
            __builtin_prefetch(bytes + pair * 32 + ahead);
        _mm512_store_si512(lower + pair * 64, _mm512_permutexvar_epi16(words, low));
        const __m512i rounded = _mm512_srai_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(8)), 4);
        _mm512_store_si512(upper + pair * 64, _mm512_permutexvar_epi16(rounded, high));
    }
}

/* Unpack a block of the chosen groups. */
INLINE void unpack_groups(const matrix *m, const block_layout *l, int kind, const char *weight, int b, unpacked *to) {
    const char *group = weight + l->nested_end + to->first * l->of_group;
    UNROLLED
    for (int g = 0; g < 2; g++)
        if (g < to->count) {
            const char *nested = weight + (to->first + g) * l->group / NESTED_INPUTS * l->nested;
            __builtin_prefetch(group + g * l->of_group + l->ahead);
            scales_of_vector(m, nested, group + g * l->of_group, 0, 0, &to->scale[b][g], &to->minimum[b][g]);
        }
    const char *numbers = group + l->head;
    if (kind == INT8) {
        for (int t = 0; t < to->tiles[0]; t++, numbers += word_bytes(INT8))
            unpack_halves(numbers, l->ahead, to->numbers[t][b][0], to->numbers[t][b][1]);
        return;
    }
    const char *second = to->count == 2 ? numbers + l->of_group : numbers + to->tiles[0] * word_bytes(UINT4);
    for (int t = 0; t < to->tiles[0]; t++, numbers += word_bytes(UINT4))
        unpack_nibbles(numbers, l->ahead, to->numbers[t][b][0]);
    for (int t = 0; t < to->tiles[1]; t++, second += word_bytes(UINT4))
        unpack_nibbles(second, l->ahead, to->numbers[t][b][1]);
}

/* Sums that tiles have made of groups, with a square of rows from `row` on. Those of its first `begin` rows were added
   with the square before. */
typedef struct {
    const unpacked *groups;
    int64_t row;
    int begin;
    float of[2][2][2 * TILE_ROWS * BLOCK] __attribute__((aligned(64))); /* [sum][block][row] */
} group_sums;

/* Make a sum of both blocks with a square: a tile of `rows` rows, and one of `more` behind it if there are any. Sums are in
   registers 0 to 3, inputs in 4 and 5, numbers in 6 and 7. */
INLINE void multiply_sum(const unpacked *groups, int s, int blocks, int rows, int more, const char *inputs, size_t stride) {
    const char *x = inputs + groups->inputs[s] * 2, *second = x + rows * stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int t = 0; t < groups->tiles[s]; t++) {
        _tile_loadd(4, x + t * TILE_DEPTH * 2, stride);
        _tile_loadd(6, groups->numbers[t][0][s], 64);
        _tile_dpbf16ps(0, 4, 6);
        if (blocks > 1) {
            _tile_loadd(7, groups->numbers[t][1][s], 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (more) {
            _tile_loadd(5, second + t * TILE_DEPTH * 2, stride);
            _tile_dpbf16ps(2, 5, 6);
            if (blocks > 1)
                _tile_dpbf16ps(3, 5, 7);
        }
    }
}

INLINE void store_sum(float of[2][2 * TILE_ROWS * BLOCK], int blocks, int rows, int more) {
    _tile_stored(0, of[0], 64);
    if (more)
        _tile_stored(2, of[0] + rows * BLOCK, 64);
    if (blocks > 1) {
        _tile_stored(1, of[1], 64);
        if (more)
            _tile_stored(3, of[1] + rows * BLOCK, 64);
    }
}

/* Add the sums of `count` groups to those of their rows, `[row][2][BLOCK]`, which the first groups begin. */
INLINE void add_these(const product *p, const row_places *at, int kind, int blocks, int count, int has_offsets,
                      int is_first, const group_sums *made, int rows, int64_t from, float *sums) {
    /* Read before anything is stored: a compiler must assume that a store changes them. */
    const size_t stride = p->x_stride;
    const char *totals = p->x + (from + made->row) * stride + at->sums + made->groups->first * sizeof(float);
    const size_t scales_behind = at->scales - at->sums;
    vf scale[2][2], minimum[2][2];
    UNROLLED
    for (int b = 0; b < blocks; b++)
        UNROLLED
        for (int g = 0; g < count; g++) {
            scale[b][g] = made->groups->scale[b][g];
            minimum[b][g] = made->groups->minimum[b][g];
        }
    sums += made->row * 2 * BLOCK;
    for (int r = made->begin; r < rows; r++) {
        const float *total = (const float *)(totals + r * stride);
        const float *input_scale = (const float *)(totals + r * stride + scales_behind);
        UNROLLED
        for (int b = 0; b < blocks; b++) {
            vf sum = is_first ? splat(0) : load(sums + (r * 2 + b) * BLOCK);
            vf part[2] = {load(made->of[0][b] + r * BLOCK), load(made->of[1][b] + r * BLOCK)};
            if (count == 1)
                part[0] = kind == UINT4 ? part[0] + part[1] : fma_(splat(16), part[1], part[0]);
            UNROLLED
            for (int g = 0; g < count; g++) {
                if (has_offsets)
                    sum = fma_(splat(total[g]), minimum[b][g], sum);
                sum = fma_(part[g] * splat(input_scale[g]), scale[b][g], sum);
            }
            store(sums + (r * 2 + b) * BLOCK, sum);
        }
    }
}

INLINE void add_groups(const product *p, const row_places *at, int kind, int blocks, const group_sums *made, int rows,
                       int64_t from, float *sums) {
    const int count = made->groups->count, is_first = !made->groups->first;
    if (count == 2 && at->has_offsets)
        add_these(p, at, kind, blocks, 2, 1, is_first, made, rows, from, sums);
    else if (count == 2)
        add_these(p, at, kind, blocks, 2, 0, is_first, made, rows, from, sums);
    else
        add_these(p, at, kind, blocks, 1, at->has_offsets, is_first, made, rows, from, sums);
}

/* Multiply `count` rows from `from` on, at most ROWS_OF_SUMS, with one or two blocks, in squares of `most` rows, of which
   `rows` are in the first tile. What tiles have made is added while they make what comes next. */
INLINE void multiply_unpacked(const product *p, int kind, int64_t from, int64_t count, int most, int rows, int blocks,
                              int64_t block) {
    const matrix *m = p->weight;
    const int more = most - rows;
    const size_t stride = p->x_stride;
    const block_layout l = layout_of(m, blocks);
    const row_places at = places_of(m);
    const char *weight = (const char *)m->weight + block * l.bytes, *inputs = p->x + from * stride + at.half;
    float sums[ROWS_OF_SUMS * 2 * BLOCK] __attribute__((aligned(64)));
    unpacked both[2];
    group_sums made[2];
    int next = 0, is_behind = 0, turn = 0;
    for (int64_t first = 0; first < l.groups; turn ^= 1) {
        unpacked *groups = &both[turn];
        choose_groups(&l, kind, first, groups);
        for (int b = 0; b < blocks; b++)
            unpack_groups(m, &l, kind, weight + b * l.bytes, b, groups);
        WRITTEN();
        for (int64_t row = 0; row < count; row += most) {
            /* A last square with fewer rows of its own takes some of the one before again: giving tiles another shape
               takes longer than multiplying them. */
            const int64_t start = row + most < count ? row : count - most;
            group_sums *now = &made[next];
            now->groups = groups;
            now->row = start;
            now->begin = (int)(row - start);
            multiply_sum(groups, 0, blocks, rows, more, inputs + start * stride, stride);
            if (is_behind)
                add_groups(p, &at, kind, blocks, &made[next ^ 1], most, from, sums);
            store_sum(now->of[0], blocks, rows, more);
            multiply_sum(groups, 1, blocks, rows, more, inputs + start * stride, stride);
            store_sum(now->of[1], blocks, rows, more);
            next ^= 1;
            is_behind = 1;
        }
        first += groups->count;
    }
    add_groups(p, &at, kind, blocks, &made[next ^ 1], most, from, sums);
    for (int64_t row = 0; row < count; row++)
        for (int b = 0; b < blocks; b++)
            write_sums(p, from + row, (block + b) * BLOCK, load(sums + (row * 2 + b) * BLOCK));
}

#define FOR_TILES(kind)                                                                                                \
    static void multiply_##kind##_in_tiles(const product *p, int64_t from, int64_t count, int64_t begin, int64_t end) { \
        /* About as many rows in each square. */                                                                       \
        const int64_t squares = (count + SQUARE_ROWS - 1) / SQUARE_ROWS;                                               \
        const int most = (int)((count + squares - 1) / squares), rows = most > TILE_ROWS ? (most + 1) / 2 : most;      \
        const int more = most - rows;                                                                                  \
        const int second = more ? more : rows;                                                                         \
        shape_tiles((int[]){rows, rows, second, second, rows, second, TILE_ROWS, TILE_ROWS}, 0, 64);                   \
        for (; begin + 2 <= end; begin += 2)                                                                           \
            multiply_unpacked(p, kind, from, count, most, rows, 2, begin);                                             \
        if (begin < end)                                                                                               \
            multiply_unpacked(p, kind, from, count, most, rows, 1, begin);                                             \
        _tile_release();                                                                                               \
    }
FOR_TILES(UINT4)
FOR_TILES(INT8)
#undef FOR_TILES

/* Multiply all rows with the blocks `begin` to `end`. */
static void multiply_integers_in_tiles(const product *p, int64_t begin, int64_t end) {
    if (p->rows <= FEW_INTEGER_ROWS || p->weight->group > MOST_TILES * TILE_DEPTH) {
        multiply_integers(p, begin, end);
        return;
    }
    for (int64_t from = 0; from < p->rows; from += ROWS_OF_SUMS) {
        const int64_t left = p->rows - from, count = left < ROWS_OF_SUMS ? left : ROWS_OF_SUMS;
        (p->weight->kind == UINT4 ? multiply_UINT4_in_tiles : multiply_INT8_in_tiles)(p, from, count, begin, end);
    }
}
