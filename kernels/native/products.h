/* Products of rows with a weight. Every output is one chain of additions over the depth, in order, whatever tile the
   row is in: so a row's result is the same bits alone and among others. Of a weight in few bits each group of the depth
   is such a chain, and the groups' sums, times their scales, are another. */

/* How a weight's numbers meet the rows: as floats, or as pairs of bfloat16 that the processor multiplies; bytes are
   and what has fewer bits are exact in both. */
enum { AS_FLOAT32, AS_BFLOAT16, AS_FLOAT16, AS_INT8, AS_UINT4, AS_FLOAT8, AS_PAIRS, AS_INT8_PAIRS, AS_UINT4_PAIRS, AS_FLOAT8_PAIRS };

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
    size_t sums_at; /* bytes of a row before its sums */
} product;

INLINE int way_of(const matrix *weight, int dtype) {
#if defined(FORM_PAIRS)
    if (dtype == BFLOAT16 && weight->kind == BFLOAT16)
        return AS_PAIRS;
    if (dtype == BFLOAT16 && is_quantized(weight))
        return AS_INT8_PAIRS + (int)weight->kind - INT8;
#else
    (void)dtype;
#endif
    return weight->kind;
}

INLINE int is_quantized_way(int way) { return (way >= AS_INT8 && way <= AS_FLOAT8) || way >= AS_INT8_PAIRS; }

/* What the rows that meet a weight are made of. */
INLINE int input_kind(const matrix *weight, int dtype) {
    return way_of(weight, dtype) >= AS_PAIRS ? BFLOAT16 : FLOAT32;
}

/* Bytes of a block of a weight. */
INLINE size_t block_bytes_of(const matrix *m, int way) {
    if (is_quantized(m))
        return quantized_block_bytes(m);
    return (size_t)m->depth * BLOCK * (way == AS_FLOAT32 ? 4 : 2);
}

/* Where the sums begin in a row of inputs. */
INLINE size_t sums_at(const matrix *weight, int dtype) { return weight->depth * size_of(input_kind(weight, dtype)); }

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
    return ((const float *)(p->x + row * p->x_stride + p->sums_at))[group];
}

#if defined(FORM_PAIRS)
/* sum + w * x, for a pair of x. */
INLINE vf multiply_pairs(vf sum, __m512bh w, const void *x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (vf)_mm512_dpbf16_ps((__m512)sum, w, (__m512bh)_mm512_set1_epi32(pair));
}
#endif

/* Multiply rows with the numbers of a group, without their scales: that from input `k` on, of `blocks` blocks. */
INLINE void multiply_group(const product *p, int way, int rows, int blocks, int64_t row, const char *numbers,
                           size_t block_bytes, size_t ahead, int64_t k, vf part[MOST_ROWS][MOST_BLOCKS * PARTS]) {
    const int64_t left = p->weight->depth - k, count = left < p->weight->group ? left : p->weight->group;
    const int is_nibbles = way == AS_UINT4 || way == AS_UINT4_PAIRS, step = is_nibbles ? 8 : 2;
    const int kind = way == AS_FLOAT8 || way == AS_FLOAT8_PAIRS ? FLOAT8 : INT8;
    tile_rows x = rows_from(p, row, rows, k, way >= AS_PAIRS ? 2 : 4);
    for (int64_t i = 0; i < count; i += step, advance(&x, step * (way >= AS_PAIRS ? 2 : 4))) {
        const char *here = numbers + i * (is_nibbles ? BLOCK / 2 : BLOCK);
        UNROLLED
        for (int b = 0; b < blocks; b++)
            __builtin_prefetch(here + b * block_bytes + ahead);
        vu words[MOST_BLOCKS * PARTS];
        if (is_nibbles)
            UNROLLED
            for (int v = 0; v < blocks * PARTS; v++)
                words[v] = load_bits(here + v / PARTS * block_bytes + v % PARTS * 4 * LANES);
        if (way >= AS_PAIRS) {
#if defined(FORM_PAIRS)
            UNROLLED
            for (int pair = 0; pair < step / 2; pair++)
                UNROLLED
                for (int b = 0; b < blocks; b++) {
                    __m512bh w = is_nibbles ? nibble_pairs(words[b], 4 * pair) : pairs_of_8bits(here + b * block_bytes, kind);
                    UNROLLED
                    for (int r = 0; r < rows; r++)
                        part[r][b] = multiply_pairs(part[r][b], w, row_at(&x, r) + 4 * pair);
                }
#endif
            continue;
        }
        UNROLLED
        for (int j = 0; j < step; j++) {
            vf w[MOST_BLOCKS * PARTS];
            UNROLLED
            for (int v = 0; v < blocks * PARTS; v++) {
                const char *bytes = here + v / PARTS * block_bytes + j * BLOCK + v % PARTS * LANES;
                w[v] = is_nibbles ? nibbles_of(words[v], nibble_at(j)) : load_8bits(bytes, kind);
            }
            UNROLLED
            for (int r = 0; r < rows; r++)
                UNROLLED
                for (int v = 0; v < blocks * PARTS; v++)
                    part[r][v] = fma_(w[v], splat(x_at(&x, r, j)), part[r][v]);
        }
    }
}

/* Multiply `rows` rows from `row` on with `blocks` blocks of the weight from `block` on. All sizes are constants where
   this is inlined. */
INLINE void multiply_tile(const product *p, int way, int rows, int blocks, int64_t row, int64_t block) {
    const matrix *m = p->weight;
    const int64_t depth = m->depth;
    const size_t block_bytes = block_bytes_of(m, way);
    const char *weight = (const char *)m->weight + block * block_bytes;
    vf sum[MOST_ROWS][MOST_BLOCKS * PARTS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int v = 0; v < blocks * PARTS; v++)
            sum[r][v] = splat(0);
    if (way == AS_PAIRS) {
#if defined(FORM_PAIRS)
        tile_rows x = rows_from(p, row, rows, 0, 2);
        for (int64_t k = 0; k < depth; k += 2, advance(&x, 4))
            UNROLLED
            for (int b = 0; b < blocks; b++) {
                __m512bh w = (__m512bh)_mm512_loadu_si512(weight + b * block_bytes + k * 32);
                __builtin_prefetch(weight + b * block_bytes + k * 32 + AHEAD);
                UNROLLED
                for (int r = 0; r < rows; r++)
                    sum[r][b] = multiply_pairs(sum[r][b], w, row_at(&x, r));
            }
#endif
    } else if (way == AS_BFLOAT16) {
        tile_rows x = rows_from(p, row, rows, 0, 4);
        for (int64_t k = 0; k < depth; k += 2, advance(&x, 8)) {
            UNROLLED
            for (int b = 0; b < blocks; b++)
                __builtin_prefetch(weight + b * block_bytes + k * 32 + AHEAD);
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
        }
    } else if (is_quantized_way(way)) {
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
            vf part[MOST_ROWS][MOST_BLOCKS * PARTS];
            UNROLLED
            for (int r = 0; r < rows; r++)
                UNROLLED
                for (int v = 0; v < blocks * PARTS; v++)
                    part[r][v] = splat(0);
            UNROLLED
            for (int b = 0; b < blocks; b++)
                __builtin_prefetch(group + b * block_bytes + ahead);
            multiply_group(p, way, rows, blocks, row, group + head, block_bytes, ahead, k, part);
            UNROLLED
            for (int v = 0; v < blocks * PARTS; v++) {
                const size_t place = v / PARTS * block_bytes;
                const int lane = v % PARTS * LANES;
                const vf scale = scales_at(m, nested + place, group + place, 0, lane);
                if (m->offsets == ZEROS) {
                    const vf zero = load_bytes(group + place + scale_bytes(m) + lane);
                    UNROLLED
                    for (int r = 0; r < rows; r++)
                        part[r][v] = fma_(splat(-group_sum(p, row + r, g)), zero, part[r][v]);
                }
                UNROLLED
                for (int r = 0; r < rows; r++)
                    total[r][v] = fma_(part[r][v], scale, total[r][v]);
                if (m->offsets == MINIMA) {
                    const vf minimum = scales_at(m, nested + place, group + place, 1, lane);
                    UNROLLED
                    for (int r = 0; r < rows; r++)
                        total[r][v] = fma_(splat(group_sum(p, row + r, g)), minimum, total[r][v]);
                }
            }
            IN_MEMORY(total);
        }
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
            for (int v = 0; v < blocks * PARTS; v++)
                sum[r][v] = total[r][v];
    } else {
        const size_t size = way == AS_FLOAT32 ? 4 : 2;
        tile_rows x = rows_from(p, row, rows, 0, 4);
        for (int64_t k = 0; k < depth; k += 2, advance(&x, 8))
            UNROLLED
            for (int half = 0; half < 2; half++)
                UNROLLED
                for (int v = 0; v < blocks * PARTS; v++) {
                    vf w = load_as(weight + v / PARTS * block_bytes + ((k + half) * BLOCK + v % PARTS * LANES) * size, way);
                    UNROLLED
                    for (int r = 0; r < rows; r++)
                        sum[r][v] = fma_(w, splat(x_at(&x, r, half)), sum[r][v]);
                }
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int v = 0; v < blocks * PARTS; v++) {
            int64_t column = block * BLOCK + v * LANES;
            vf value = sum[r][v];
            if (m->bias)
                value += load(m->bias + column);
            if (p->residual)
                value += load(p->residual + (row + r) * p->residual_stride + column);
            store(p->out + (row + r) * p->out_stride + column - p->first_column, value);
        }
}

/* One row tile by all blocks of a range, several side by side where few rows leave registers for them. */
INLINE void multiply_rows(const product *p, int way, int rows, int64_t row, int64_t begin, int64_t end) {
    const int most_in_avx2 = is_quantized_way(way) ? 1 : 3;
    const int side_by_side = LANES == 4 ? 1 : LANES == 8 ? (rows > most_in_avx2 ? 1 : 2) : (rows > 4 ? 2 : 4);
    int64_t block = begin;
    for (; block + side_by_side <= end; block += side_by_side)
        multiply_tile(p, way, rows, side_by_side, row, block);
    if (side_by_side == 4 && block + 2 <= end) {
        multiply_tile(p, way, rows, 2, row, block);
        block += 2;
    }
    for (; block < end; block++)
        multiply_tile(p, way, rows, 1, row, block);
}

#define FOR_ROWS(way)                                                                                                  \
    static void multiply_##way(const product *p, int rows, int64_t row, int64_t begin, int64_t end) {                  \
        switch (rows) {                                                                                                \
        case 1: multiply_rows(p, way, 1, row, begin, end); break;                                                      \
        case 2: multiply_rows(p, way, 2, row, begin, end); break;                                                      \
        case 3: multiply_rows(p, way, 3, row, begin, end); break;                                                      \
        case 4: multiply_rows(p, way, MOST_ROWS < 4 ? 1 : 4, row, begin, end); break;                                  \
        case 5: multiply_rows(p, way, MOST_ROWS < 5 ? 1 : 5, row, begin, end); break;                                  \
        case 6: multiply_rows(p, way, MOST_ROWS < 6 ? 1 : 6, row, begin, end); break;                                  \
        case 7: multiply_rows(p, way, MOST_ROWS < 7 ? 1 : 7, row, begin, end); break;                                  \
        case 8: multiply_rows(p, way, MOST_ROWS < 8 ? 1 : 8, row, begin, end); break;                                  \
        default: multiply_rows(p, way, MOST_ROWS, row, begin, end);                                                    \
        }                                                                                                              \
    }
FOR_ROWS(AS_FLOAT32)
FOR_ROWS(AS_BFLOAT16)
FOR_ROWS(AS_FLOAT16)
FOR_ROWS(AS_INT8)
FOR_ROWS(AS_UINT4)
FOR_ROWS(AS_FLOAT8)
#if defined(FORM_PAIRS)
FOR_ROWS(AS_PAIRS)
FOR_ROWS(AS_INT8_PAIRS)
FOR_ROWS(AS_UINT4_PAIRS)
FOR_ROWS(AS_FLOAT8_PAIRS)
#endif
#undef FOR_ROWS

/* Multiply all rows with the blocks `begin` to `end`; few blocks at a time, so that those stay in the cache. */
static void multiply(const product *p, int way, int64_t begin, int64_t end) {
    const int64_t tiles = (p->rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t step = tiles == 1 ? end - begin : 4;
    for (int64_t block = begin; block < end; block += step) {
        int64_t last = block + step < end ? block + step : end;
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t row = p->rows * tile / tiles;
            int rows = (int)(p->rows * (tile + 1) / tiles - row);
            switch (way) {
            case AS_FLOAT32: multiply_AS_FLOAT32(p, rows, row, block, last); break;
            case AS_BFLOAT16: multiply_AS_BFLOAT16(p, rows, row, block, last); break;
            case AS_FLOAT16: multiply_AS_FLOAT16(p, rows, row, block, last); break;
            case AS_INT8: multiply_AS_INT8(p, rows, row, block, last); break;
            case AS_UINT4: multiply_AS_UINT4(p, rows, row, block, last); break;
            case AS_FLOAT8: multiply_AS_FLOAT8(p, rows, row, block, last); break;
#if defined(FORM_PAIRS)
            case AS_PAIRS: multiply_AS_PAIRS(p, rows, row, block, last); break;
            case AS_INT8_PAIRS: multiply_AS_INT8_PAIRS(p, rows, row, block, last); break;
            case AS_UINT4_PAIRS: multiply_AS_UINT4_PAIRS(p, rows, row, block, last); break;
            case AS_FLOAT8_PAIRS: multiply_AS_FLOAT8_PAIRS(p, rows, row, block, last); break;
#endif
            }
        }
    }
}

/* Bytes of a row of inputs to a weight: the inputs, and the sums of their groups where the weight has offsets. */
INLINE size_t input_stride(const matrix *weight, int dtype) {
    return sums_at(weight, dtype) + (has_offsets(weight) ? (groups_of(weight) + SUMMED) * sizeof(float) : 0);
}

/* Complete a row of which `count` inputs are written. */
INLINE void finish_inputs(const matrix *weight, int dtype, void *row, int64_t count) {
    const int kind = input_kind(weight, dtype);
    if (weight->depth > count)
        memset((char *)row + count * size_of(kind), 0, (weight->depth - count) * size_of(kind));
    if (has_offsets(weight))
        sum_groups(weight, row, kind, (float *)((char *)row + sums_at(weight, dtype)));
}

/* Write a row of floats as inputs to a weight. */
INLINE void put_inputs(const matrix *weight, int dtype, void *to, const float *from, int64_t count) {
    from_floats(to, from, count, input_kind(weight, dtype));
    finish_inputs(weight, dtype, to, count);
}
