/* Products of rows with a weight. Every output is one chain of additions over the depth, in order, whatever tile the
   row is in: so a row's result is the same bits alone and among others. Of a weight in few bits each group of the depth
   is such a chain, and the groups' sums, times their scales, are another. */

/* Multiply `rows` rows from `row` on with `blocks` blocks of the weight from `block` on. All sizes are constants where
   this is inlined. */
INLINE void multiply_tile(const product *p, int kind, int rows, int blocks, int64_t row, int64_t block) {
    const size_t block_bytes = block_bytes_of(p->weight, kind);
    const char *weight = (const char *)p->weight->weight + block * block_bytes;
    vf sum[MOST_ROWS][MOST_BLOCKS * PARTS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int v = 0; v < blocks * PARTS; v++)
            sum[r][v] = splat(0);
    if (kind == BFLOAT16)
        multiply_bfloat16(p, rows, blocks, row, weight, block_bytes, sum);
    else if (kind >= INT8)
        multiply_quantized(p, kind, rows, blocks, row, weight, block_bytes, sum);
    else
        multiply_floats(p, kind, rows, blocks, row, weight, block_bytes, sum);
    write_tile(p, rows, blocks, row, block, sum);
}

/* Return how many blocks fit in registers beside so many rows. */
INLINE int blocks_of_tile(int kind, int rows) {
    const int most_in_avx2 = kind >= INT8 ? 1 : 2;
    return LANES == 4 ? 1 : LANES == 8 ? (rows > most_in_avx2 ? 1 : 2) : (rows > 4 ? 2 : 4);
}

/* Return how many rows a tile has at most. Numbers of 4 bits, and of 8 with an exponent, need registers themselves. */
INLINE int most_rows_of(int64_t kind) { return LANES == 8 && (kind == UINT4 || kind == FLOAT8) ? 5 : MOST_ROWS; }

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

/* Return the first row of a tile. Rows are dealt out evenly, but for AVX2's tiles of floats: one of 4 rows has too few sums
   to keep the processor busy, one of 2 has another block's. */
INLINE int64_t first_row_of(const product *p, int64_t tile, int64_t tiles) {
    if (LANES == 8 && p->weight->kind < INT8)
        return tile < tiles ? MOST_ROWS * tile : p->rows;
    return p->rows * tile / tiles;
}

/* Multiply all rows with the blocks `begin` to `end`; few blocks at a time, so that those stay in the cache. */
static void multiply(const product *p, int64_t begin, int64_t end) {
#if defined(FORM_AMX)
    if (p->weight->kind == BFLOAT16) {
        (p->rows <= FEW_ROWS ? multiply_few_as_tiles : multiply_pairs_in_tiles)(p, begin, end);
        return;
    }
#endif
#if defined(FORM_INTEGERS)
    if (bytes_of_input(p->weight)) {
#if defined(FORM_AMX)
        multiply_integers_in_tiles(p, begin, end);
#else
        multiply_integers(p, begin, end);
#endif
        return;
    }
#endif
    const int64_t most = most_rows_of(p->weight->kind), tiles = (p->rows + most - 1) / most;
    const int64_t step = tiles == 1 ? end - begin : 4;
    for (int64_t block = begin; block < end; block += step) {
        int64_t last = block + step < end ? block + step : end;
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t row = first_row_of(p, tile, tiles);
            int rows = (int)(first_row_of(p, tile + 1, tiles) - row);
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

/* Bytes of a row of inputs to a weight: the inputs, the sums of their groups where the weight has offsets, and the inputs'
   bytes where it is multiplied in whole numbers. Tiles read many rows at once: in an odd number of lines, those do not lie
   at the same places of the cache. */
INLINE size_t input_stride(const matrix *weight) {
    const int bytes_each = bytes_of_input(weight);
#if defined(FORM_AMX)
    const int halves = 2;
#else
    const int halves = bytes_each;
#endif
    if (bytes_each)
        return halves * half_stride(weight) + 64;
    const size_t bytes = sums_at(weight) + (has_offsets(weight) ? (groups_of(weight) + SUMMED) * sizeof(float) : 0);
#if defined(FORM_AMX)
    return ((bytes + 63) / 64 | 1) * 64;
#else
    return bytes;
#endif
}

/* Complete a row of which `count` inputs are written. */
INLINE void finish_inputs(const matrix *weight, void *row, int64_t count) {
    const int kind = input_kind(weight);
    if (weight->depth > count)
        memset((char *)row + count * size_of(kind), 0, (weight->depth - count) * size_of(kind));
    if (has_offsets(weight) && bytes_of_input(weight) != 1)
        sum_groups(weight, row, kind, (float *)((char *)row + sums_at(weight)));
#if defined(FORM_INTEGERS)
    if (bytes_of_input(weight))
        write_bytes(weight, row);
#endif
}

/* Write a row of floats as inputs to a weight. */
INLINE void put_inputs(const matrix *weight, void *to, const float *from, int64_t count) {
    from_floats(to, from, count, input_kind(weight));
    finish_inputs(weight, to, count);
}
