/* Products with weights of 4 and 8 bits in whole numbers. The inputs of a group are rounded to 14 bits and a sign of its
   largest, which is finer than bfloat16; numbers times such inputs add up without any rounding, so that all instructions
   that do so make the same bits. A group's sum, times its scales, is then added to those before, as in
   `quantized_tiles.h`. An input is split in two signed bytes, `256 * high + low`, as processors multiply bytes. */

enum { INPUTS_TOGETHER = 32, MOST_INTEGER_GROUP = 512, MOST_INTEGER_ROWS = 8 };
/* Exponent of bfloat16 from which on a group's sum may not be finite. */
enum { LEAST_INFINITE = 240 };

/* Whether a weight is multiplied so; MOST_INTEGER_GROUP keeps a group's sum within 32 bits. */
INLINE int in_integers(const matrix *m) {
#if defined(FORM_PAIRS)
    return (m->kind == UINT4 || m->kind == INT8) && m->group % INPUTS_TOGETHER == 0 && m->group <= MOST_INTEGER_GROUP &&
           m->depth % INPUTS_TOGETHER == 0;
#else
    (void)m;
    return 0;
#endif
}

INLINE size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* A row of inputs has two halves of equal size. The first has what other products have, and then the high bytes; a scale
   of each group; the sum of its inputs. The second has the low bytes where the first has the high ones, and before them
   the inputs as they are multiplied, in bfloat16. */
INLINE size_t high_bytes_at(const matrix *m) {
    return whole_lines(sums_at(m) + (has_offsets(m) ? (groups_of(m) + SUMMED) * sizeof(float) : 0));
}

INLINE size_t input_scales_at(const matrix *m) { return high_bytes_at(m) + whole_lines(m->depth); }

INLINE size_t half_stride(const matrix *m) {
    return whole_lines(input_scales_at(m) + groups_of(m) * (sizeof(float) + sizeof(int32_t)));
}

#if defined(FORM_PAIRS)
/* The order of bytes within eight inputs of UINT4 is that of the low halves of a word's bytes, then of the high ones. */
INLINE void store_in_order(char *to, __m512i numbers, int kind) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m128i bytes = _mm512_cvtepi32_epi8(numbers);
    _mm_storeu_si128((__m128i *)to, kind == UINT4 ? _mm_shuffle_epi8(bytes, order) : bytes);
}

/* Split the inputs of a row, which are written in bfloat16. */
static void split_inputs(const matrix *m, char *row) {
    char *high = row + high_bytes_at(m), *low = high + half_stride(m);
    float *scales = (float *)(row + input_scales_at(m));
    int32_t *totals = (int32_t *)(scales + groups_of(m));
    for (int64_t k = 0, g = 0; k < m->depth; k += m->group, g++) {
        const int64_t end = k + m->group < m->depth ? k + m->group : m->depth;
        vu most = {0};
        for (int64_t i = k; i < end; i += LANES)
            most = (vu)_mm512_max_epu32((__m512i)most, (__m512i)((vu)load_as(row + 2 * i, BFLOAT16) & 0x7fffffff));
        /* The largest has 14 bits before the point. Where there is infinity or NaN, the product is NaN, as where a sum of
           inputs would not be finite; where all are very small, they count nothing. */
        const uint32_t exponent = _mm512_reduce_max_epu32((__m512i)most) >> 23;
        const int power = exponent < 30 ? 30 : (int)exponent;
        const vf factor = splat(float_of((uint32_t)(267 - power) << 23));
        const int is_finite = exponent < LEAST_INFINITE;
        scales[g] = is_finite ? float_of((uint32_t)(power - 13) << 23) : float_of(0x7fc00000);
        __m512i total = _mm512_setzero_si512();
        for (int64_t i = k; i < end; i += LANES) {
            const __m512i x = _mm512_cvtps_epi32((__m512)(load_as(row + 2 * i, BFLOAT16) * factor));
            const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
            store_in_order(high + i, upper, (int)m->kind);
            store_in_order(low + i, _mm512_sub_epi32(x, _mm512_slli_epi32(upper, 8)), (int)m->kind);
            total = _mm512_add_epi32(total, x);
#if defined(FORM_AMX)
            /* Exact: these floats have 8 significant bits at most. */
            const vu counted = (vu)((vf)_mm512_cvtepi32_ps(x) * splat(scales[g]));
            _mm256_storeu_si256((__m256i *)(row + half_stride(m) + 2 * i), _mm512_cvtepi32_epi16((__m512i)(counted >> 16)));
#endif
        }
        totals[g] = is_finite ? _mm512_reduce_add_epi32(total) : 0;
    }
}

/* Bytes of a group's 32 inputs. */
INLINE size_t word_bytes(int kind) { return INPUTS_TOGETHER * BLOCK / (kind == UINT4 ? 2 : 1); }

/* The numbers of eight inputs of UINT4, or of 8 of INT8: 16 columns of four inputs each, twice. Those of INT8 are signed. */
INLINE void unpack_bytes(int kind, const char *numbers, __m512i *out) {
    if (kind == UINT4) {
        const __m512i words = _mm512_loadu_si512(numbers), low = _mm512_set1_epi8(15);
        out[0] = _mm512_and_si512(words, low);
        out[1] = _mm512_and_si512(_mm512_srli_epi16(words, 4), low);
        return;
    }
    const __m512i columns = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int half = 0; half < 2; half++)
        out[half] = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(columns, _mm512_loadu_si512(numbers + half * 64)), bytes);
}

INLINE __m512i four_inputs(const char *x) {
    int32_t bytes;
    memcpy(&bytes, x, 4);
    return _mm512_set1_epi32(bytes);
}

/* Where the parts of a row of inputs lie. Found once: a compiler must assume that each store changes the weight. */
typedef struct {
    size_t sums, high, scales, totals, half;
    int has_offsets;
} row_places;

INLINE row_places places_of(const matrix *m) {
    return (row_places){
        .sums = sums_at(m), .high = high_bytes_at(m), .scales = input_scales_at(m),
        .totals = input_scales_at(m) + groups_of(m) * sizeof(float), .half = half_stride(m), .has_offsets = has_offsets(m),
    };
}

/* Add a group's sum to a row's: numbers times inputs, of which the high bytes and the low ones were summed apart. */
INLINE vf add_group(const row_places *at, const char *x, int64_t group, __m512i high, __m512i low, vf scale, vf minimum,
                    vf sum) {
    if (at->has_offsets)
        sum = fma_(splat(((const float *)(x + at->sums))[group]), minimum, sum);
    const float input_scale = ((const float *)(x + at->scales))[group];
    const __m512 total = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    return fma_((vf)total * splat(input_scale), scale, sum);
}

/* Write the sums of a row's 16 columns, with bias and residual. */
INLINE void write_sums(const product *p, int64_t row, int64_t column, vf sum) {
    if (p->weight->bias)
        sum += load(p->weight->bias + column);
    if (p->residual)
        sum += load(p->residual + row * p->residual_stride + column);
    store(p->out + row * p->out_stride + column - p->first_column, sum);
}

/* Multiply `rows` rows from `row` on with `blocks` blocks from `block` on. */
INLINE void multiply_bytes(const product *p, int kind, int rows, int blocks, int64_t row, int64_t block) {
    const matrix *m = p->weight;
    const size_t block_bytes = quantized_block_bytes(m), head = group_head(m), bytes = group_bytes(m);
    const row_places at = places_of(m);
    const char *weight = (const char *)m->weight + block * block_bytes, *group = weight + nested_end(m);
    const char *x = p->x + row * p->x_stride;
    const size_t ahead = block_bytes < 4 * AHEAD ? blocks * block_bytes : AHEAD;
    vf sum[MOST_INTEGER_ROWS][MOST_BLOCKS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int b = 0; b < blocks; b++)
            sum[r][b] = splat(0);
    for (int64_t k = 0, g = 0; k < m->depth; k += m->group, g++, group += bytes) {
        const int64_t left = m->depth - k, count = left < m->group ? left : m->group;
        __m512i high[MOST_INTEGER_ROWS][MOST_BLOCKS], low[MOST_INTEGER_ROWS][MOST_BLOCKS];
        UNROLLED
        for (int r = 0; r < rows; r++) {
            /* Numbers of INT8 are multiplied as bytes without a sign, 128 more than they are. */
            int32_t total = 0;
            if (kind == INT8)
                memcpy(&total, x + r * p->x_stride + at.totals + g * 4, 4);
            UNROLLED
            for (int b = 0; b < blocks; b++) {
                high[r][b] = _mm512_setzero_si512();
                low[r][b] = _mm512_set1_epi32(-128 * total);
            }
        }
        UNROLLED
        for (int b = 0; b < blocks; b++)
            __builtin_prefetch(group + b * block_bytes + ahead);
        for (int64_t i = 0; i < count; i += 8) {
            const char *here = group + head + i * (kind == UINT4 ? BLOCK / 2 : BLOCK);
            __m512i numbers[MOST_BLOCKS][2];
            UNROLLED
            for (int b = 0; b < blocks; b++) {
                __builtin_prefetch(here + b * block_bytes + ahead);
                if (kind == INT8)
                    __builtin_prefetch(here + b * block_bytes + ahead + 64);
                unpack_bytes(kind, here + b * block_bytes, numbers[b]);
                if (kind == INT8)
                    for (int four = 0; four < 2; four++)
                        numbers[b][four] = _mm512_xor_si512(numbers[b][four], _mm512_set1_epi8((char)0x80));
            }
            UNROLLED
            for (int four = 0; four < 2; four++)
                UNROLLED
                for (int r = 0; r < rows; r++) {
                    const char *bytes_of = x + r * p->x_stride + at.high + k + i + 4 * four;
                    UNROLLED
                    for (int b = 0; b < blocks; b++) {
                        high[r][b] = _mm512_dpbusd_epi32(high[r][b], numbers[b][four], four_inputs(bytes_of));
                        low[r][b] = _mm512_dpbusd_epi32(low[r][b], numbers[b][four], four_inputs(bytes_of + at.half));
                    }
                }
        }
        const char *nested = weight + k / NESTED_INPUTS * nested_bytes(m);
        vf scale[MOST_BLOCKS], minimum[MOST_BLOCKS];
        UNROLLED
        for (int b = 0; b < blocks; b++)
            scales_of_vector(m, nested, group, block_bytes, b, scale, minimum);
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
            for (int b = 0; b < blocks; b++)
                sum[r][b] = add_group(&at, x + r * p->x_stride, g, high[r][b], low[r][b], scale[b], minimum[b], sum[r][b]);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int b = 0; b < blocks; b++)
            write_sums(p, row + r, (block + b) * BLOCK, sum[r][b]);
}

INLINE void multiply_bytes_of(const product *p, int kind, int rows, int blocks, int64_t row, int64_t begin, int64_t end) {
    for (; begin + blocks <= end; begin += blocks)
        multiply_bytes(p, kind, rows, blocks, row, begin);
    for (; begin < end; begin++)
        multiply_bytes(p, kind, rows, 1, row, begin);
}

#define FOR_BYTES(kind)                                                                                                \
    static void multiply_bytes_##kind(const product *p, int rows, int64_t row, int64_t begin, int64_t end) {           \
        switch (rows) {                                                                                                \
        case 1: multiply_bytes_of(p, kind, 1, 4, row, begin, end); break;                                              \
        case 2: multiply_bytes_of(p, kind, 2, 4, row, begin, end); break;                                              \
        case 3: multiply_bytes_of(p, kind, 3, 2, row, begin, end); break;                                              \
        case 4: multiply_bytes_of(p, kind, 4, 2, row, begin, end); break;                                              \
        case 5: multiply_bytes_of(p, kind, 5, 1, row, begin, end); break;                                              \
        case 6: multiply_bytes_of(p, kind, 6, 1, row, begin, end); break;                                              \
        case 7: multiply_bytes_of(p, kind, 7, 1, row, begin, end); break;                                              \
        default: multiply_bytes_of(p, kind, 8, 1, row, begin, end);                                                    \
        }                                                                                                              \
    }
FOR_BYTES(UINT4)
FOR_BYTES(INT8)
#undef FOR_BYTES

/* Multiply all rows with the blocks `begin` to `end`; few blocks at a time, so that those stay in the cache. */
static void multiply_integers(const product *p, int64_t begin, int64_t end) {
    const int64_t tiles = (p->rows + MOST_INTEGER_ROWS - 1) / MOST_INTEGER_ROWS;
    const int64_t step = tiles == 1 ? end - begin : 4;
    for (int64_t block = begin; block < end; block += step) {
        const int64_t last = block + step < end ? block + step : end;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = p->rows * tile / tiles;
            const int rows = (int)(p->rows * (tile + 1) / tiles - row);
            (p->weight->kind == UINT4 ? multiply_bytes_UINT4 : multiply_bytes_INT8)(p, rows, row, block, last);
        }
    }
}
#endif
