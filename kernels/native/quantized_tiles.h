/* A tile of a product with a weight in few bits: the numbers of each group of inputs are summed first, and the sums, times
   the group's scales, are added up. */

/* The sum of a group's inputs. */
INLINE float group_sum(const product *p, int64_t row, int64_t group) {
    return ((const float *)(p->x + row * p->x_stride + sums_at(p->weight)))[group];
}

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
            for (int half = 0; half < 2; half++)
                UNROLLED
                for (int b = 0; b < blocks; b++) {
                    vf w[PARTS];
                    UNROLLED
                    for (int v = 0; v < PARTS; v++)
                        w[v] = kind == UINT4 ? nibbles_of(words[b * PARTS + v], 16 * half)
                                             : load_8bits(here + b * block_bytes + half * BLOCK + v * LANES, kind);
                    add_products(&x, half, rows, b * PARTS, w, part);
                }
#endif
            if (kind == UINT4)
                UNROLLED
                for (int v = 0; v < blocks * PARTS; v++)
                    words[v] >>= 4;
        }
    }
}

/* Read vector `v` of a group's scales and minima: factors of the numbers' sum, and of the inputs' sum. What a zero
   subtracts is written as a minimum. */
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

/* Read all vectors. Not inlined: in each size of tile this would be most of the code. */
NOT_INLINE void scales_of_group(const matrix *m, const char *nested, const char *group, size_t block_bytes, int vectors,
                                vf *scale, vf *minimum) {
    for (int v = 0; v < vectors; v++)
        scales_of_vector(m, nested, group, block_bytes, v, scale, minimum);
}

/* Multiply rows with weights in few bits. */
INLINE void multiply_quantized(const product *p, int kind, int rows, int blocks, int64_t row, const char *weight,
                               size_t block_bytes, vf sum[MOST_ROWS][MOST_BLOCKS * PARTS]) {
    const matrix *m = p->weight;
    const int64_t depth = m->depth;
    const size_t head = group_head(m), bytes = group_bytes(m);
    const char *group = weight + nested_end(m);
    /* Blocks that are smaller are prefetched one tile ahead. */
    const size_t ahead = block_bytes < 4 * AHEAD ? blocks * block_bytes : AHEAD;
    /* Needed once a group: the registers are for the group's own sums. */
    IN_MEMORY(sum);
    for (int64_t k = 0, g = 0; k < depth; k += m->group, g++, group += bytes) {
        const char *nested = weight + k / NESTED_INPUTS * nested_bytes(m);
        vf scale[MOST_BLOCKS * PARTS], minimum[MOST_BLOCKS * PARTS], part[MOST_ROWS][MOST_BLOCKS * PARTS];
        /* Before the sums, which a call would save and restore. For one row even the call would cost time. */
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
                    sum[r][v] = fma_(splat(group_sum(p, row + r, g)), minimum[v], sum[r][v]);
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
            for (int v = 0; v < blocks * PARTS; v++)
                sum[r][v] = fma_(part[r][v], scale[v], sum[r][v]);
        IN_MEMORY(sum);
    }
}
