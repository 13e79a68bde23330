/* A tile of a product: a few rows, and blocks of a weight side by side, as many as there are registers for. All sizes are
   constants where these functions are inlined. */

enum {
    PARTS = BLOCK / LANES, /* vectors of a block */
    MOST_BLOCKS = 4, /* side by side */
    CHUNK = 4, /* that are finished before the next are begun */
    AHEAD = 4096, /* bytes of a weight that are prefetched: what the processor prefetches by itself is too little once
                     several rows keep it busy */
#if defined(FORM_AVX512)
    MOST_ROWS = 9,
#elif defined(FORM_AVX2)
    MOST_ROWS = 6,
#else
    MOST_ROWS = 3,
#endif
};

/* Have the compiler keep an array in memory, on processors with too few registers for it. */
#if defined(FORM_AVX512)
#define IN_MEMORY(array) (void)array
#else
#define IN_MEMORY(array) __asm__ volatile("" : : "r"(array) : "memory")
#endif

/* Where a product's rows come from and go to. */
typedef struct {
    const matrix *weight;
    const char *x; /* rows of floats, or of bfloat16 for pairs */
    size_t x_stride; /* bytes */
    float *out;
    int64_t out_stride; /* floats */
    int64_t first_column; /* the weight's column that `out` begins with */
    const float *residual; /* added to the result, where not NULL: rows of `residual_stride` floats, all columns */
    int64_t residual_stride;
    int64_t rows;
    int64_t rows_before, rows_behind; /* others that meet the same blocks of the weight */
    int is_fetched; /* whether these blocks were prefetched while those before them were multiplied */
} product;

/* Whether a weight's numbers meet rows as pairs of bfloat16, which the processor multiplies, or as floats. Numbers of 8
   bits and less are exact in both. */
INLINE int as_pairs(int64_t kind) {
#if defined(FORM_PAIRS)
    return kind != FLOAT32 && kind != FLOAT16;
#else
    (void)kind;
    return 0;
#endif
}

/* What the rows that meet a weight are made of. */
INLINE int input_kind(const matrix *weight) {
    return as_pairs(weight->kind) ? BFLOAT16 : FLOAT32;
}

/* Bytes of a block of a weight. */
INLINE size_t block_bytes_of(const matrix *m, int kind) {
    if (is_quantized(m))
        return quantized_block_bytes(m);
    return (size_t)m->depth * BLOCK * size_of(kind);
}

/* Where the sums begin in a row of inputs. */
INLINE size_t sums_at(const matrix *weight) { return weight->depth * size_of(input_kind(weight)); }

/* Rows of a tile, as an inner loop goes along them. A processor adds a stride to a pointer, or twice the stride, within a
   load, but has too few registers for a pointer to each row; left to themselves, compilers compute every address. */
typedef struct {
    const char *third[3]; /* rows 0, 3 and 6 */
    size_t stride;
} tile_rows;

/* `rows` rows from `row` on, at input `k` of `size` bytes. */
INLINE tile_rows rows_from(const product *p, int64_t row, int rows, int64_t k, size_t size) {
    const char *x = p->x + row * p->x_stride + k * size;
    return (tile_rows){{x, x + (rows > 3 ? 3 * p->x_stride : 0), x + (rows > 6 ? 6 * p->x_stride : 0)}, p->x_stride};
}

INLINE const char *row_at(const tile_rows *x, int r) { return x->third[r / 3] + r % 3 * x->stride; }

INLINE float x_at(const tile_rows *x, int r, int k) { return ((const float *)row_at(x, r))[k]; }

INLINE void advance(tile_rows *x, size_t bytes) {
    UNROLLED
    for (int i = 0; i < 3; i++) {
        x->third[i] += bytes;
#if defined(FORM_AVX512)
        __asm__("" : "+r"(x->third[i])); /* has the compiler keep this pointer; AVX2's fewer rows gain nothing */
#endif
    }
}

/* Add the products of a block's weights with an input of each row to its vectors from `first` on. */
INLINE void add_products(const tile_rows *x, int half, int rows, int first, const vf w[PARTS],
                         vf sum[MOST_ROWS][MOST_BLOCKS * PARTS]) {
    UNROLLED
    for (int r = 0; r < rows; r++) {
        UNROLLED
        for (int v = 0; v < PARTS; v++)
            sum[r][first + v] = fma_(w[v], splat(x_at(x, r, half)), sum[r][first + v]);
#if defined(FORM_AVX2)
        /* Row by row. Left to themselves, compilers mix rows and halves, and keep sums in memory. */
        UNROLLED
        for (int v = 0; v < PARTS; v++)
            __asm__ volatile("" : "+x"(sum[r][first + v]));
#endif
    }
}

#if defined(FORM_PAIRS)
/* sum + w * x, for a pair of x. */
INLINE vf multiply_pairs(vf sum, __m512bh w, const void *x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (vf)_mm512_dpbf16_ps((__m512)sum, w, (__m512bh)_mm512_set1_epi32(pair));
}
#endif

/* Multiply rows with weights in float32 or float16. */
INLINE void multiply_floats(const product *p, int kind, int rows, int blocks, int64_t row, const char *weight,
                            size_t block_bytes, vf sum[MOST_ROWS][MOST_BLOCKS * PARTS]) {
    const size_t size = size_of(kind);
    tile_rows x = rows_from(p, row, rows, 0, 4);
    for (int64_t k = 0; k < p->weight->depth; k += 2, advance(&x, 8))
        UNROLLED
        for (int half = 0; half < 2; half++)
            UNROLLED
            for (int b = 0; b < blocks; b++) {
                vf w[PARTS];
                UNROLLED
                for (int v = 0; v < PARTS; v++)
                    w[v] = load_as(weight + b * block_bytes + ((k + half) * BLOCK + v * LANES) * size, kind);
                add_products(&x, half, rows, b * PARTS, w, sum);
            }
}

/* Multiply rows with weights in bfloat16: as pairs where the processor multiplies those, else as floats. */
INLINE void multiply_bfloat16(const product *p, int rows, int blocks, int64_t row, const char *weight, size_t block_bytes,
                              vf sum[MOST_ROWS][MOST_BLOCKS * PARTS]) {
    const int64_t depth = p->weight->depth;
    const size_t input_bytes = size_of(input_kind(p->weight));
    tile_rows x = rows_from(p, row, rows, 0, input_bytes);
    /* Near the end of these blocks, prefetch the beginning of the next ones. */
    const int64_t near_end = depth * 32 > AHEAD ? depth - AHEAD / 32 : 0;
    size_t ahead = AHEAD;
    for (int64_t k = 0, stop = near_end; k < depth; stop = depth, ahead += (blocks - 1) * block_bytes)
        for (; k < stop; k += 2, advance(&x, 2 * input_bytes)) {
            UNROLLED
            for (int b = 0; b < blocks; b++)
                __builtin_prefetch(weight + b * block_bytes + k * 32 + ahead);
#if defined(FORM_PAIRS)
            UNROLLED
            for (int b = 0; b < blocks; b++) {
                __m512bh w = (__m512bh)_mm512_loadu_si512(weight + b * block_bytes + k * 32);
                UNROLLED
                for (int r = 0; r < rows; r++)
                    sum[r][b] = multiply_pairs(sum[r][b], w, row_at(&x, r));
            }
#else
            UNROLLED
            for (int half = 0; half < 2; half++)
                UNROLLED
                for (int b = 0; b < blocks; b++) {
                    vf w[PARTS];
                    UNROLLED
                    for (int v = 0; v < PARTS; v++) {
                        vu pairs = load_bits(weight + b * block_bytes + k * 32 + v * 4 * LANES);
                        w[v] = (vf)(half ? pairs & 0xffff0000u : pairs << 16);
                    }
                    add_products(&x, half, rows, b * PARTS, w, sum);
                }
#endif
        }
}

/* Add bias and residual to the sums of a tile, and write them. */
INLINE void write_tile(const product *p, int rows, int blocks, int64_t row, int64_t block,
                       vf sum[MOST_ROWS][MOST_BLOCKS * PARTS]) {
    const matrix *m = p->weight;
    /* Read before anything is stored: a compiler must assume that a store changes the product. */
    const int64_t column = block * BLOCK, out_stride = p->out_stride, residual_stride = p->residual_stride;
    float *out = p->out + row * out_stride + column - p->first_column;
    if (m->bias)
        UNROLLED
        for (int v = 0; v < blocks * PARTS; v++)
            UNROLLED
            for (int r = 0; r < rows; r++)
                sum[r][v] += load(m->bias + column + v * LANES);
    if (p->residual)
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
            for (int v = 0; v < blocks * PARTS; v++)
                sum[r][v] += load(p->residual + (row + r) * residual_stride + column + v * LANES);
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int v = 0; v < blocks * PARTS; v++)
            store(out + r * out_stride + v * LANES, sum[r][v]);
}
