/* Products of bfloat16 by a processor's tile registers (AMX): 16 columns of 32 inputs at a time, for up to 16 rows. The
   processor adds up even and odd inputs apart, and each row by itself: a row's result is the same among any others. */

enum { TILE_ROWS = 16, TILE_DEPTH = 32, TILE_BYTES = 1024 };

/* Tile registers: the first four have the sums of blocks side by side, the next inputs, and two more weights in turn.
   Compilers put these names into instructions. */
#define INPUT_TILE 4
#define WEIGHT_TILE 5
#define OTHER_WEIGHT_TILE 6
enum { REGISTERS = 8 };

/* Have memory hold what was written: compilers do not know that a tile reads it. */
#define WRITTEN() __asm__ volatile("" : : : "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* Have the tiles of sums and inputs hold so many rows. */
static void shape_tiles(int rows) {
    tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < REGISTERS; t++) {
        shapes.rows[t] = t <= INPUT_TILE ? rows : TILE_ROWS;
        shapes.row_bytes[t] = 64;
    }
    WRITTEN();
    _tile_loadconfig(&shapes);
}

/* What is left of inputs and weights behind whole tiles, zeros behind it. */
typedef struct {
    char inputs[TILE_ROWS * 64], weights[MOST_BLOCKS][TILE_BYTES];
} tile_rest;

static void fill_rest(const product *p, int rows, int blocks, const char *x, const char *weight, size_t block_bytes,
                      tile_rest *rest) {
    const int64_t whole = p->weight->depth / TILE_DEPTH * TILE_DEPTH, left = p->weight->depth - whole;
    memset(rest, 0, sizeof *rest);
    for (int r = 0; r < rows; r++)
        memcpy(rest->inputs + r * 64, x + r * p->x_stride + whole * 2, left * 2);
    for (int b = 0; b < blocks; b++)
        memcpy(rest->weights[b], weight + b * block_bytes + whole * 32, left * 32);
}

INLINE void prefetch_tile(const char *weights) {
    UNROLLED
    for (int line = 0; line < TILE_BYTES / 64; line++)
        __builtin_prefetch(weights + 64 * line);
}

/* Add the products of 32 inputs to the sums of block `b`, by one weight tile or the other. */
#define MULTIPLY_TILE(b, tile, weights)                                                                                \
    if (blocks > b) {                                                                                                  \
        _tile_loadd(tile, weights, 64);                                                                                \
        _tile_dpbf16ps(b, INPUT_TILE, tile);                                                                           \
    }

/* Write the sums of a row's 16 columns, with bias and residual. */
INLINE void add_beside(const product *p, int64_t row, int64_t column, float *out, vf sum) {
    /* Of sums that underflow, tiles and vectors know different signs. */
    sum += splat(0);
    if (p->weight->bias)
        sum += load(p->weight->bias + column);
    if (p->residual)
        sum += load(p->residual + row * p->residual_stride + column);
    store(out, sum);
}

/* Multiply `rows` rows, as the tiles are shaped for, with `blocks` blocks of the weight from `block` on. */
INLINE void multiply_in_tiles(const product *p, int rows, int blocks, int64_t row, int64_t block) {
    const int64_t depth = p->weight->depth;
    const size_t block_bytes = (size_t)depth * BLOCK * 2;
    const char *weight = (const char *)p->weight->weight + block * block_bytes, *x = p->x + row * p->x_stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    /* Near the end of these blocks, the beginning of the next ones is prefetched. */
    const int64_t near_end = depth * 32 > AHEAD ? depth - AHEAD / 32 : 0;
    int64_t k = 0;
    for (; k + TILE_DEPTH <= depth; k += TILE_DEPTH) {
        const char *w = weight + k * 32;
        const size_t ahead = k < near_end ? AHEAD : AHEAD + (blocks - 1) * block_bytes;
        UNROLLED
        for (int b = 0; b < blocks; b++)
            prefetch_tile(w + b * block_bytes + ahead);
        _tile_loadd(INPUT_TILE, x + k * 2, p->x_stride);
        MULTIPLY_TILE(0, WEIGHT_TILE, w)
        MULTIPLY_TILE(1, OTHER_WEIGHT_TILE, w + block_bytes)
        MULTIPLY_TILE(2, WEIGHT_TILE, w + 2 * block_bytes)
        MULTIPLY_TILE(3, OTHER_WEIGHT_TILE, w + 3 * block_bytes)
    }
    if (k < depth) {
        tile_rest rest;
        fill_rest(p, rows, blocks, x, weight, block_bytes, &rest);
        WRITTEN();
        _tile_loadd(INPUT_TILE, rest.inputs, 64);
        MULTIPLY_TILE(0, WEIGHT_TILE, rest.weights[0])
        MULTIPLY_TILE(1, OTHER_WEIGHT_TILE, rest.weights[1])
        MULTIPLY_TILE(2, WEIGHT_TILE, rest.weights[2])
        MULTIPLY_TILE(3, OTHER_WEIGHT_TILE, rest.weights[3])
    }
    float sums[MOST_BLOCKS][TILE_ROWS * BLOCK] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    if (blocks > 1)
        _tile_stored(1, sums[1], 64);
    if (blocks > 2)
        _tile_stored(2, sums[2], 64);
    if (blocks > 3)
        _tile_stored(3, sums[3], 64);
    for (int b = 0; b < blocks; b++) {
        const int64_t column = (block + b) * BLOCK;
        float *out = p->out + row * p->out_stride + column - p->first_column;
        for (int r = 0; r < rows; r++)
            add_beside(p, row + r, column, out + r * p->out_stride, load(sums[b] + r * BLOCK));
    }
}

/* Multiply one row as the tiles do, by vectors, which read weights faster: what tiles have ahead of them is that they
   multiply many rows. The even inputs of 32 are added up, then the odd ones, and the two sums to those before. */
INLINE void multiply_row(const product *p, int blocks, int64_t block) {
    const int64_t depth = p->weight->depth, near_end = depth * 32 > AHEAD ? depth - AHEAD / 32 : 0;
    const size_t block_bytes = (size_t)depth * BLOCK * 2;
    const char *weight = (const char *)p->weight->weight + block * block_bytes;
    vf sum[MOST_BLOCKS];
    UNROLLED
    for (int b = 0; b < blocks; b++)
        sum[b] = splat(0);
    for (int64_t k = 0; k < depth;) {
        const int64_t end = k + TILE_DEPTH < depth ? k + TILE_DEPTH : depth;
        const size_t ahead = k < near_end ? AHEAD : AHEAD + (blocks - 1) * block_bytes;
        vf even[MOST_BLOCKS], odd[MOST_BLOCKS];
        UNROLLED
        for (int b = 0; b < blocks; b++)
            even[b] = odd[b] = splat(0);
        for (; k < end; k += 2) {
            uint32_t pair;
            memcpy(&pair, p->x + k * 2, 4);
            const vf first = (vf)_mm512_set1_epi32((int32_t)(pair << 16));
            const vf second = (vf)_mm512_set1_epi32((int32_t)(pair & 0xffff0000u));
            UNROLLED
            for (int b = 0; b < blocks; b++) {
                const char *here = weight + b * block_bytes + k * 32;
                __builtin_prefetch(here + ahead);
                const vu pairs = load_bits(here);
                even[b] = fma_((vf)(pairs << 16), first, even[b]);
                odd[b] = fma_((vf)(pairs & 0xffff0000u), second, odd[b]);
            }
        }
        UNROLLED
        for (int b = 0; b < blocks; b++)
            sum[b] += even[b] + odd[b];
    }
    UNROLLED
    for (int b = 0; b < blocks; b++) {
        const int64_t column = (block + b) * BLOCK;
        add_beside(p, 0, column, p->out + column - p->first_column, sum[b]);
    }
}

/* Multiply one row with the blocks `begin` to `end`. */
static void multiply_row_as_tiles(const product *p, int64_t begin, int64_t end) {
    /* Tiles take subnormal numbers for zero, and make none. */
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    for (; begin + MOST_BLOCKS <= end; begin += MOST_BLOCKS)
        multiply_row(p, MOST_BLOCKS, begin);
    for (; begin < end; begin++)
        multiply_row(p, 1, begin);
    _mm_setcsr(control);
}

/* Return how many rows each tile has, the last one as many or fewer. */
INLINE int64_t rows_of_tiles(int64_t rows) {
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    return tiles ? (rows + tiles - 1) / tiles : 1;
}

/* Multiply all rows with the blocks `begin` to `end`; few blocks at a time, so that those stay in the cache. */
static void multiply_pairs_in_tiles(const product *p, int64_t begin, int64_t end) {
    const int64_t most = rows_of_tiles(p->rows);
    int shaped = 0;
    WRITTEN();
    for (int64_t block = begin; block < end; block += MOST_BLOCKS)
        for (int64_t row = 0; row < p->rows; row += most) {
            const int rows = (int)(p->rows - row < most ? p->rows - row : most);
            if (rows != shaped)
                shape_tiles(shaped = rows);
            switch (end - block) {
            case 1: multiply_in_tiles(p, rows, 1, row, block); break;
            case 2: multiply_in_tiles(p, rows, 2, row, block); break;
            case 3: multiply_in_tiles(p, rows, 3, row, block); break;
            default: multiply_in_tiles(p, rows, 4, row, block);
            }
        }
    /* Threads change faster while the registers are empty. */
    _tile_release();
}
