/* Products of rows with a weight. Every output is one chain of additions over the depth, in order, whatever tile the
   row is in: so a row's result is the same bits alone and among others. Of a weight in few bits each group of the depth
   is such a chain, and the groups' sums, times their scales, are another. */

enum {
    PARTS = BLOCK / LANES, /* vectors of a block */
    MOST_BLOCKS = 4, /* side by side */
    CHUNK = 4, /* that are finished before the next are begun */
    AHEAD = 4096, /* bytes of a weight that are asked for before they are used: what the processor asks for by itself
                     is too little once several rows keep it busy */
#if defined(FORM_AVX512)
    MOST_ROWS = 9,
#elif defined(FORM_AVX2)
    MOST_ROWS = 5,
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

/* The sum of a group's inputs. */
INLINE float group_sum(const product *p, int64_t row, int64_t group) {
    return ((const float *)(p->x + row * p->x_stride + sums_at(p->weight)))[group];
}

#if defined(FORM_PAIRS)
/* sum + w * x, for a pair of x. */
INLINE vf multiply_pairs(vf sum, __m512bh w, const void *x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (vf)_mm512_dpbf16_ps((__m512)sum, w, (__m512bh)_mm512_set1_epi32(pair));
}
#endif

/* Multiply rows with the numbers of a group, without their scales: that from input `k` on, of `blocks` blocks. Two inputs
   at a time, also of words that hold eight: code for all of those would be four times as much. */
INLINE void multiply_group(const product *p, int kind, int rows, int blocks, int64_t row, const char *numbers,
                           size_t block_bytes, size_t ahead, int64_t k, vf part[MOST_ROWS][MOST_BLOCKS * PARTS]) {
    const int64_t left = p->weight->depth - k, count = left < p->weight->group ? left : p->weight->group;
    const int together = kind == UINT4 ? 8 : 2;
    const size_t input_bytes = size_of(input_kind(p->weight));
    tile_rows x = rows_from(p, row, rows, k, input_bytes);
    for (int64_t i = 0; i < count; i += together) {
        const char *here = numbers + i * (kind == UINT4 ? BLOCK / 2 : BLOCK);
        UNROLLED
        for (int b = 0; b < blocks; b++)
            __builtin_prefetch(here + b * block_bytes + ahead);
        vu words[MOST_BLOCKS * PARTS];
        if (kind == UINT4)
            UNROLLED
            for (int v = 0; v < blocks * PARTS; v++)
                words[v] = load_bits(here + v / PARTS * block_bytes + v % PARTS * 4 * LANES);
        for (int j = 0; j < together; j += 2, advance(&x, 2 * input_bytes)) {
#if defined(FORM_PAIRS)
            UNROLLED
            for (int b = 0; b < blocks; b++) {
                __m512bh w = kind == UINT4 ? nibble_pairs(words[b]) : pairs_of_8bits(here + b * block_bytes, kind);
                UNROLLED
                for (int r = 0; r < rows; r++)
                    part[r][b] = multiply_pairs(part[r][b], w, row_at(&x, r));
            }
#else
            UNROLLED
            for (int half = 0; half < 2; half++) {
                vf w[MOST_BLOCKS * PARTS];
                UNROLLED
                for (int v = 0; v < blocks * PARTS; v++) {
                    const char *bytes = here + v / PARTS * block_bytes + half * BLOCK + v % PARTS * LANES;
                    w[v] = kind == UINT4 ? nibbles_of(words[v], 16 * half) : load_8bits(bytes, kind);
                }
                UNROLLED
                for (int r = 0; r < rows; r++)
                    UNROLLED
                    for (int v = 0; v < blocks * PARTS; v++)
                        part[r][v] = fma_(w[v], splat(x_at(&x, r, half)), part[r][v]);
            }
#endif
            if (kind == UINT4)
                UNROLLED
                for (int v = 0; v < blocks * PARTS; v++)
                    words[v] >>= 4;
        }
    }
}

/* What a group's numbers are multiplied with, and what the sum of its inputs is: scales and minima of a vector of those
   that are side by side. A zero gives a minimum, too. */
INLINE void scales_of_vector(const matrix *m, const char *nested, const char *group, size_t block_bytes, int v, vf *scale,
                             vf *minimum) {
    const size_t place = v / PARTS * block_bytes;
    const int lane = v % PARTS * LANES;
    scale[v] = scales_at(m, nested + place, group + place, 0, lane);
    if (m->offsets == MINIMA)
        minimum[v] = scales_at(m, nested + place, group + place, 1, lane);
    else if (m->offsets == ZEROS)
        minimum[v] = -load_bytes(group + place + scale_bytes(m) + lane) * scale[v];
    else
        minimum[v] = splat(0);
}

/* The same for all vectors. Not inlined: in each size of tile this would be most of the code. */
NOT_INLINE void scales_of_group(const matrix *m, const char *nested, const char *group, size_t block_bytes, int vectors,
                                vf *scale, vf *minimum) {
    for (int v = 0; v < vectors; v++)
        scales_of_vector(m, nested, group, block_bytes, v, scale, minimum);
}

/* Multiply `rows` rows from `row` on with `blocks` blocks of the weight from `block` on. All sizes are constants where
   this is inlined. */
INLINE void multiply_tile(const product *p, int kind, int rows, int blocks, int64_t row, int64_t block) {
    const matrix *m = p->weight;
    const int64_t depth = m->depth;
    const size_t block_bytes = block_bytes_of(m, kind);
    const char *weight = (const char *)m->weight + block * block_bytes;
    vf sum[MOST_ROWS][MOST_BLOCKS * PARTS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int v = 0; v < blocks * PARTS; v++)
            sum[r][v] = splat(0);
    if (kind == BFLOAT16) {
        const size_t input_bytes = size_of(input_kind(m));
        tile_rows x = rows_from(p, row, rows, 0, input_bytes);
        /* Towards the end of these blocks, the beginning of those after them is asked for. */
        const int64_t asked = depth * 32 > AHEAD ? depth - AHEAD / 32 : 0;
        size_t ahead = AHEAD;
        for (int64_t k = 0, stop = asked; k < depth; stop = depth, ahead += (blocks - 1) * block_bytes)
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
                    for (int v = 0; v < blocks * PARTS; v++) {
                        vu pairs = load_bits(weight + v / PARTS * block_bytes + k * 32 + v % PARTS * 4 * LANES);
                        vf w = (vf)(half ? pairs & 0xffff0000u : pairs << 16);
                        UNROLLED
                        for (int r = 0; r < rows; r++)
                            sum[r][v] = fma_(w, splat(x_at(&x, r, half)), sum[r][v]);
                    }
#endif
            }
    } else if (kind >= INT8) {
        const size_t head = group_head(m), bytes = group_bytes(m);
        const char *group = weight + nested_end(m);
        /* Small blocks end before what is asked for is used; then it is asked for where the next ones begin. */
        const size_t ahead = block_bytes < 4 * AHEAD ? blocks * block_bytes : AHEAD;
        /* Needed once a group: the registers are for the group's own sums. */
        vf total[MOST_ROWS][MOST_BLOCKS * PARTS];
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
            for (int v = 0; v < blocks * PARTS; v++)
                total[r][v] = splat(0);
        IN_MEMORY(total);
        for (int64_t k = 0, g = 0; k < depth; k += m->group, g++, group += bytes) {
            const char *nested = weight + k / NESTED_INPUTS * nested_bytes(m);
            vf scale[MOST_BLOCKS * PARTS], minimum[MOST_BLOCKS * PARTS], part[MOST_ROWS][MOST_BLOCKS * PARTS];
            /* First, while no register holds a sum. For one row, so little is done that a call would be seen. */
            if (rows == 1)
                UNROLLED
                for (int v = 0; v < blocks * PARTS; v++)
                    scales_of_vector(m, nested, group, block_bytes, v, scale, minimum);
            else
                scales_of_group(m, nested, group, block_bytes, blocks * PARTS, scale, minimum);
            IN_MEMORY(scale);
            IN_MEMORY(minimum);
            UNROLLED
            for (int r = 0; r < rows; r++)
                UNROLLED
                for (int v = 0; v < blocks * PARTS; v++)
                    part[r][v] = splat(0);
            UNROLLED
            for (int b = 0; b < blocks; b++)
                __builtin_prefetch(group + b * block_bytes + ahead);
            multiply_group(p, kind, rows, blocks, row, group + head, block_bytes, ahead, k, part);
            if (has_offsets(m))
                UNROLLED
                for (int r = 0; r < rows; r++)
                    UNROLLED
                    for (int v = 0; v < blocks * PARTS; v++)
                        total[r][v] = fma_(splat(group_sum(p, row + r, g)), minimum[v], total[r][v]);
            UNROLLED
            for (int r = 0; r < rows; r++)
                UNROLLED
                for (int v = 0; v < blocks * PARTS; v++)
                    total[r][v] = fma_(part[r][v], scale[v], total[r][v]);
            IN_MEMORY(total);
        }
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
            for (int v = 0; v < blocks * PARTS; v++)
                sum[r][v] = total[r][v];
    } else {
        const size_t size = size_of(kind);
        tile_rows x = rows_from(p, row, rows, 0, 4);
        for (int64_t k = 0; k < depth; k += 2, advance(&x, 8))
            UNROLLED
            for (int half = 0; half < 2; half++)
                UNROLLED
                for (int v = 0; v < blocks * PARTS; v++) {
                    vf w = load_as(weight + v / PARTS * block_bytes + ((k + half) * BLOCK + v % PARTS * LANES) * size, kind);
                    UNROLLED
                    for (int r = 0; r < rows; r++)
                        sum[r][v] = fma_(w, splat(x_at(&x, r, half)), sum[r][v]);
                }
    }
    /* Read before anything is stored: a compiler must take it that stores change the product. */
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

/* Blocks that few rows leave registers for. */
INLINE int blocks_of_tile(int kind, int rows) {
    const int most_in_avx2 = kind >= INT8 ? 1 : 3;
    return LANES == 4 ? 1 : LANES == 8 ? (rows > most_in_avx2 ? 1 : 2) : (rows > 4 ? 2 : 4);
}

/* Multiply one tile of rows with the whole tiles of a range of blocks. Return the first block that is left. */
INLINE int64_t multiply_rows(const product *p, int kind, int rows, int64_t row, int64_t begin, int64_t end) {
    const int blocks = blocks_of_tile(kind, rows);
    for (; begin + blocks <= end; begin += blocks)
        multiply_tile(p, kind, rows, blocks, row, begin);
    return begin;
}

/* Multiply rows with the blocks that are left: the end of a weight that does not divide into tiles, or all of an
   adapter's, which is not quantised. Few sizes of tile do for that. */
INLINE void multiply_left(const product *p, int kind, int rows, int64_t row, int64_t begin, int64_t end) {
    for (; LANES > 4 && begin < end; begin++) {
        int r = 0;
        if (LANES == 16 && kind < INT8)
            for (; r + 4 <= rows; r += 4)
                multiply_tile(p, kind, 4, 1, row + r, begin);
        for (; r < rows; r++)
            multiply_tile(p, kind, 1, 1, row + r, begin);
    }
}

/* The blocks that are left have a function of their own: beside their tiles, GCC 12 keeps sums of others in memory. */
#define FOR_ROWS(kind)                                                                                                 \
    NOT_INLINE void multiply_left_##kind(const product *p, int rows, int64_t row, int64_t begin, int64_t end) {        \
        multiply_left(p, kind, rows, row, begin, end);                                                                 \
    }                                                                                                                  \
    static void multiply_##kind(const product *p, int rows, int64_t row, int64_t begin, int64_t end) {                 \
        int64_t left = begin;                                                                                          \
        switch (rows) {                                                                                                \
        case 1: left = multiply_rows(p, kind, 1, row, begin, end); break;                                              \
        case 2: left = multiply_rows(p, kind, 2, row, begin, end); break;                                              \
        case 3: left = multiply_rows(p, kind, 3, row, begin, end); break;                                              \
        case 4: if (MOST_ROWS >= 4) left = multiply_rows(p, kind, 4, row, begin, end); break;                          \
        case 5: if (MOST_ROWS >= 5) left = multiply_rows(p, kind, 5, row, begin, end); break;                          \
        case 6: if (MOST_ROWS >= 6) left = multiply_rows(p, kind, 6, row, begin, end); break;                          \
        case 7: if (MOST_ROWS >= 7) left = multiply_rows(p, kind, 7, row, begin, end); break;                          \
        case 8: if (MOST_ROWS >= 8) left = multiply_rows(p, kind, 8, row, begin, end); break;                          \
        default: left = multiply_rows(p, kind, MOST_ROWS, row, begin, end);                                            \
        }                                                                                                              \
        multiply_left_##kind(p, rows, row, left, end);                                                                 \
    }
FOR_ROWS(FLOAT32)
FOR_ROWS(BFLOAT16)
FOR_ROWS(FLOAT16)
FOR_ROWS(INT8)
FOR_ROWS(UINT4)
FOR_ROWS(FLOAT8)
#undef FOR_ROWS

/* Multiply all rows with the blocks `begin` to `end`; few blocks at a time, so that those stay in the cache. */
static void multiply(const product *p, int64_t begin, int64_t end) {
    const int64_t tiles = (p->rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t step = tiles == 1 ? end - begin : 4;
    for (int64_t block = begin; block < end; block += step) {
        int64_t last = block + step < end ? block + step : end;
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t row = p->rows * tile / tiles;
            int rows = (int)(p->rows * (tile + 1) / tiles - row);
            switch (p->weight->kind) {
            case FLOAT32: multiply_FLOAT32(p, rows, row, block, last); break;
            case BFLOAT16: multiply_BFLOAT16(p, rows, row, block, last); break;
            case FLOAT16: multiply_FLOAT16(p, rows, row, block, last); break;
            case INT8: multiply_INT8(p, rows, row, block, last); break;
            case UINT4: multiply_UINT4(p, rows, row, block, last); break;
            case FLOAT8: multiply_FLOAT8(p, rows, row, block, last); break;
            }
        }
    }
}

/* Bytes of a row of inputs to a weight: the inputs, and the sums of their groups where the weight has offsets. */
INLINE size_t input_stride(const matrix *weight) {
    return sums_at(weight) + (has_offsets(weight) ? (groups_of(weight) + SUMMED) * sizeof(float) : 0);
}

/* Complete a row of which `count` inputs are written. */
INLINE void finish_inputs(const matrix *weight, void *row, int64_t count) {
    const int kind = input_kind(weight);
    if (weight->depth > count)
        memset((char *)row + count * size_of(kind), 0, (weight->depth - count) * size_of(kind));
    if (has_offsets(weight))
        sum_groups(weight, row, kind, (float *)((char *)row + sums_at(weight)));
}

/* Write a row of floats as inputs to a weight. */
INLINE void put_inputs(const matrix *weight, void *to, const float *from, int64_t count) {
    from_floats(to, from, count, input_kind(weight));
    finish_inputs(weight, to, count);
}
