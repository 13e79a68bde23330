/* Products with weights of 4 and 8 bits in whole numbers, which the inputs of a group become as well. Numbers times such
   inputs add up without any rounding, so that all instructions that do so make the same bits. A group's sum, times its
   scales, is then added to those before, as in `quantized_tiles.h`.

   Processors multiply bytes. With weights of 4 bits that have a scale for 32 inputs, an input is one, -127 to 127, as in
   llama.cpp's Q8_0: what that rounds away is little beside what such weights have lost. With other weights it is two where
   the processor has VNNI, `256 * high + low`: 14 bits and a sign of the group's largest, which is finer than bfloat16. */

#if defined(FORM_AVX2) || defined(FORM_AVX512)
#define FORM_INTEGERS
#endif

enum {
    INPUTS_TOGETHER = 32,
    MOST_INTEGER_GROUP = 512, /* keeps a group's sum within 32 bits */
    MOST_INTEGER_ROWS = LANES == 16 ? 8 : 4,
};
/* Exponent of bfloat16 from which on a group's sum may not be finite. */
enum { LEAST_INFINITE = 240 };

/* Bytes of an input to a weight that is multiplied so; 0 for others. */
INLINE int bytes_of_input(const matrix *m) {
#if defined(FORM_INTEGERS)
    const int is_whole = m->kind == UINT4 || m->kind == INT8;
    if (!is_whole || m->group % INPUTS_TOGETHER || m->group > MOST_INTEGER_GROUP || m->depth % INPUTS_TOGETHER)
        return 0;
    if (m->kind == UINT4 && m->group == INPUTS_TOGETHER && m->rounds_inputs)
        return 1;
#if defined(FORM_PAIRS)
    return 2;
#endif
#endif
    (void)m;
    return 0;
}

INLINE size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* A row of inputs begins with what other products have. Behind that are their bytes, the high ones of two; a scale of each
   group; the sum of its inputs. A second half of the same size has the low bytes where the first has the high ones, and
   before them what tiles multiply: the inputs in bfloat16. */
INLINE size_t high_bytes_at(const matrix *m) {
    return whole_lines(sums_at(m) + (has_offsets(m) ? (groups_of(m) + SUMMED) * sizeof(float) : 0));
}

INLINE size_t input_scales_at(const matrix *m) { return high_bytes_at(m) + whole_lines(m->depth); }

INLINE size_t half_stride(const matrix *m) {
    return whole_lines(input_scales_at(m) + groups_of(m) * (sizeof(float) + sizeof(int32_t)));
}

/* Bytes of a group's 32 inputs. */
INLINE size_t word_bytes(int kind) { return INPUTS_TOGETHER * BLOCK / (kind == UINT4 ? 2 : 1); }

#if defined(FORM_INTEGERS)
#if defined(FORM_AVX512)
typedef __m512i byte_vector; /* bytes */
#else
typedef __m256i byte_vector;
#endif

/* Whole numbers as bytes. The order within eight inputs of UINT4 is that of the low halves of a word's bytes, then of the
   high ones. */
INLINE void store_in_order(char *to, vi numbers, int kind) {
#if defined(FORM_AVX512)
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)numbers);
    _mm_storeu_si128((__m128i *)to, kind == UINT4 ? _mm_shuffle_epi8(bytes, order) : bytes);
#else
    const __m128i lowest = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i first = _mm_shuffle_epi8(_mm256_castsi256_si128((__m256i)numbers), lowest);
    const __m128i second = _mm_shuffle_epi8(_mm256_extracti128_si256((__m256i)numbers, 1), lowest);
    (void)kind;
    _mm_storel_epi64((__m128i *)to, _mm_unpacklo_epi8(first, second));
#endif
}

/* The nearest whole numbers, even ones of two. */
INLINE vi nearest_integers(vf x) {
#if defined(FORM_AVX512)
    return (vi)_mm512_cvtps_epi32((__m512)x);
#else
    return (vi)_mm256_cvtps_epi32((__m256)x);
#endif
}

INLINE int32_t largest_integer(vi x) {
#if defined(FORM_AVX512)
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t most = x[0];
    for (int l = 1; l < LANES; l++)
        most = x[l] > most ? x[l] : most;
    return most;
#endif
}

INLINE int32_t sum_integers(vi x) {
#if defined(FORM_AVX512)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int l = 0; l < LANES; l++)
        sum += x[l];
    return sum;
#endif
}

/* Write the inputs of a row, which are written as numbers, as bytes. */
static void write_bytes(const matrix *m, char *row) {
    char *high = row + high_bytes_at(m), *low = high + half_stride(m);
    float *scales = (float *)(row + input_scales_at(m)), *sums = (float *)(row + sums_at(m));
    int32_t *totals = (int32_t *)(scales + groups_of(m));
    const int numbers = input_kind(m), bytes = bytes_of_input(m), sums_inputs = bytes == 1 && has_offsets(m);
    for (int64_t k = 0, g = 0; k < m->depth; k += m->group, g++) {
        const int64_t end = k + m->group < m->depth ? k + m->group : m->depth;
        vi most = {0};
        for (int64_t i = k; i < end; i += LANES) {
            const vi size = (vi)load_as(row + i * size_of(numbers), numbers) & 0x7fffffff, larger = size > most;
            most = (size & larger) | (most & ~larger);
        }
        /* Where there is infinity or NaN, the product is NaN, as where a sum of inputs would not be finite; where all are
           very small, they count little or nothing. */
        const uint32_t largest = largest_integer(most), exponent = largest >> 23, power = exponent < 30 ? 30 : exponent;
        const int is_finite = exponent < LEAST_INFINITE;
        /* The largest of two bytes has 14 bits before the point. */
        float scale = float_of((power - 13) << 23), factor = float_of((267 - power) << 23);
        if (bytes == 1) {
            const float top = float_of(exponent < 30 ? power << 23 : largest);
            scale = top / 127;
            factor = 127 / top;
        }
        scales[g] = is_finite ? scale : float_of(0x7fc00000);
        vu total = {0}; /* without a sign, as what infinity becomes may overflow */
        for (int64_t i = k; i < end; i += LANES) {
            const vi x = nearest_integers(load_as(row + i * size_of(numbers), numbers) * splat(factor));
            if (bytes == 1) {
                store_in_order(high + i, x, (int)m->kind);
            } else {
                const vi upper = (vi)((vu)x + 128) >> 8;
                store_in_order(high + i, upper, (int)m->kind);
                store_in_order(low + i, (vi)((vu)x - ((vu)upper << 8)), (int)m->kind);
            }
            total += (vu)x;
#if defined(FORM_AMX)
            /* Exact: these have 8 significant bits at most. */
            const vu counted = (vu)_mm512_cvtepi32_ps((__m512i)x);
            _mm256_storeu_si256((__m256i *)(row + half_stride(m) + 2 * i), _mm512_cvtepi32_epi16((__m512i)(counted >> 16)));
#endif
        }
        totals[g] = is_finite ? sum_integers((vi)total) : 0;
        /* What a minimum is multiplied with: of inputs as the numbers meet them, so that weights near zero add little. */
        if (sums_inputs)
            sums[g] = (float)totals[g] * scales[g];
    }
}

/* Vector `v` of some blocks: the numbers of eight inputs of UINT4, or of INT8: four of each column, twice. All are without
   a sign; those of INT8 are 128 more than they are. */
INLINE void unpack_bytes(int kind, const char *numbers, byte_vector *out) {
#if defined(FORM_AVX512)
    if (kind == UINT4) {
        const __m512i words = _mm512_loadu_si512(numbers), low = _mm512_set1_epi8(15);
        out[0] = _mm512_and_si512(words, low);
        out[1] = _mm512_and_si512(_mm512_srli_epi16(words, 4), low);
        return;
    }
    const __m512i columns = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int half = 0; half < 2; half++) {
        const __m512i some = _mm512_permutexvar_epi32(columns, _mm512_loadu_si512(numbers + half * 64));
        out[half] = _mm512_xor_si512(_mm512_shuffle_epi8(some, bytes), _mm512_set1_epi8((char)0x80));
    }
#else
    const __m256i words = _mm256_loadu_si256((const __m256i *)numbers), low = _mm256_set1_epi8(15);
    (void)kind;
    out[0] = _mm256_and_si256(words, low);
    out[1] = _mm256_and_si256(_mm256_srli_epi16(words, 4), low);
#endif
}

INLINE byte_vector four_inputs(const char *x) {
    int32_t bytes;
    memcpy(&bytes, x, 4);
#if defined(FORM_AVX512)
    return _mm512_set1_epi32(bytes);
#else
    return _mm256_set1_epi32(bytes);
#endif
}

/* Add products of bytes, the numbers' without a sign, to whole numbers of 32 bits, or without VNNI of 16: those hold the sum
   of 32 inputs of one byte times numbers of 4 bits, two sums for a column. */
INLINE byte_vector add_bytes(byte_vector sum, byte_vector numbers, byte_vector inputs) {
#if defined(FORM_PAIRS)
    return _mm512_dpbusd_epi32(sum, numbers, inputs);
#elif defined(FORM_AVX512)
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(numbers, inputs));
#else
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(numbers, inputs));
#endif
}

INLINE vi sum_of_column(byte_vector sum) {
#if defined(FORM_PAIRS)
    return (vi)sum;
#elif defined(FORM_AVX512)
    return (vi)_mm512_madd_epi16(sum, _mm512_set1_epi16(1));
#else
    return (vi)_mm256_madd_epi16(sum, _mm256_set1_epi16(1));
#endif
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

/* Add a group's sum to a row's: numbers times inputs. */
INLINE vf add_group(const row_places *at, const char *x, int64_t group, vf total, vf scale, vf minimum, vf sum) {
    if (at->has_offsets)
        sum = fma_(splat(((const float *)(x + at->sums))[group]), minimum, sum);
    return fma_(total * splat(((const float *)(x + at->scales))[group]), scale, sum);
}

/* Write a vector of a row's sums, with bias and residual. */
INLINE void write_sums(const product *p, int64_t row, int64_t column, vf sum) {
    if (p->weight->bias)
        sum += load(p->weight->bias + column);
    if (p->residual)
        sum += load(p->residual + row * p->residual_stride + column);
    store(p->out + row * p->out_stride + column - p->first_column, sum);
}

/* Multiply `rows` rows from `row` on, with inputs of so many bytes, with `blocks` blocks from `block` on. */
INLINE void multiply_bytes(const product *p, int kind, int bytes_each, int rows, int blocks, int64_t row, int64_t block) {
    const matrix *m = p->weight;
    const int vectors = blocks * PARTS;
    const size_t block_bytes = quantized_block_bytes(m), head = group_head(m), bytes = group_bytes(m);
    const row_places at = places_of(m);
    const char *weight = (const char *)m->weight + block * block_bytes, *group = weight + nested_end(m);
    const char *x = p->x + row * p->x_stride;
    const size_t ahead = block_bytes < 4 * AHEAD ? blocks * block_bytes : AHEAD;
    vf sum[MOST_INTEGER_ROWS][MOST_BLOCKS * PARTS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int v = 0; v < vectors; v++)
            sum[r][v] = splat(0);
    IN_MEMORY(sum);
    for (int64_t k = 0, g = 0; k < m->depth; k += m->group, g++, group += bytes) {
        const int64_t left = m->depth - k, count = left < m->group ? left : m->group;
        byte_vector high[MOST_INTEGER_ROWS][MOST_BLOCKS * PARTS], low[MOST_INTEGER_ROWS][MOST_BLOCKS * PARTS];
        UNROLLED
        for (int r = 0; r < rows; r++) {
            int32_t total = 0;
            if (kind == INT8)
                memcpy(&total, x + r * p->x_stride + at.totals + g * 4, 4);
            UNROLLED
            for (int v = 0; v < vectors; v++) {
                high[r][v] = (byte_vector)(vi){0};
                low[r][v] = (byte_vector)((vi){0} - 128 * total);
            }
        }
        UNROLLED
        for (int b = 0; b < blocks; b++)
            __builtin_prefetch(group + b * block_bytes + ahead);
        for (int64_t i = 0; i < count; i += 8) {
            const char *here = group + head + i * (kind == UINT4 ? BLOCK / 2 : BLOCK);
            byte_vector numbers[MOST_BLOCKS * PARTS][2];
            UNROLLED
            for (int b = 0; b < blocks; b++) {
                __builtin_prefetch(here + b * block_bytes + ahead);
                if (kind == INT8)
                    __builtin_prefetch(here + b * block_bytes + ahead + 64);
            }
            UNROLLED
            for (int v = 0; v < vectors; v++)
                unpack_bytes(kind, here + v / PARTS * block_bytes + v % PARTS * 4 * LANES, numbers[v]);
            UNROLLED
            for (int four = 0; four < 2; four++)
                UNROLLED
                for (int r = 0; r < rows; r++) {
                    const char *bytes_of = x + r * p->x_stride + at.high + k + i + 4 * four;
                    UNROLLED
                    for (int v = 0; v < vectors; v++) {
                        high[r][v] = add_bytes(high[r][v], numbers[v][four], four_inputs(bytes_of));
                        if (bytes_each == 2)
                            low[r][v] = add_bytes(low[r][v], numbers[v][four], four_inputs(bytes_of + at.half));
                    }
                }
        }
        const char *nested = weight + k / NESTED_INPUTS * nested_bytes(m);
        vf scale[MOST_BLOCKS * PARTS], minimum[MOST_BLOCKS * PARTS];
        UNROLLED
        for (int v = 0; v < vectors; v++)
            scales_of_vector(m, nested, group, block_bytes, v, scale, minimum);
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
            for (int v = 0; v < vectors; v++) {
                vi total = sum_of_column(high[r][v]);
                if (bytes_each == 2)
                    total = (vi)(((vu)total << 8) + (vu)sum_of_column(low[r][v]));
                const vf all = __builtin_convertvector(total, vf);
                sum[r][v] = add_group(&at, x + r * p->x_stride, g, all, scale[v], minimum[v], sum[r][v]);
            }
        IN_MEMORY(sum);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int v = 0; v < vectors; v++)
            write_sums(p, row + r, block * BLOCK + v * LANES, sum[r][v]);
}

/* Return how many blocks fit in registers beside so many rows, whose inputs have so many bytes. */
INLINE int blocks_beside(int bytes_each, int rows) {
    if (LANES == 8)
        return rows == 1 ? 2 : 1;
    return rows <= 2 ? 4 : bytes_each == 2 && rows > 6 ? 1 : 2;
}

INLINE void multiply_bytes_of(const product *p, int kind, int bytes_each, int rows, int64_t row, int64_t begin, int64_t end) {
    const int blocks = blocks_beside(bytes_each, rows);
    for (; begin + blocks <= end; begin += blocks)
        multiply_bytes(p, kind, bytes_each, rows, blocks, row, begin);
    for (; begin < end; begin++)
        multiply_bytes(p, kind, bytes_each, rows, 1, row, begin);
}

#define FOR_BYTES(name, kind, bytes)                                                                                   \
    static void multiply_##name(const product *p, int rows, int64_t row, int64_t begin, int64_t end) {                 \
        switch (rows) {                                                                                                \
        case 1: multiply_bytes_of(p, kind, bytes, 1, row, begin, end); break;                                          \
        case 2: multiply_bytes_of(p, kind, bytes, 2, row, begin, end); break;                                          \
        case 3: multiply_bytes_of(p, kind, bytes, 3, row, begin, end); break;                                          \
        case 5: if (MOST_INTEGER_ROWS >= 5) multiply_bytes_of(p, kind, bytes, 5, row, begin, end); break;              \
        case 6: if (MOST_INTEGER_ROWS >= 6) multiply_bytes_of(p, kind, bytes, 6, row, begin, end); break;              \
        case 7: if (MOST_INTEGER_ROWS >= 7) multiply_bytes_of(p, kind, bytes, 7, row, begin, end); break;              \
        case 8: if (MOST_INTEGER_ROWS >= 8) multiply_bytes_of(p, kind, bytes, 8, row, begin, end); break;              \
        default: multiply_bytes_of(p, kind, bytes, 4, row, begin, end);                                                \
        }                                                                                                              \
    }
FOR_BYTES(nibbles, UINT4, 1)
#if defined(FORM_PAIRS)
FOR_BYTES(nibbles_finely, UINT4, 2)
FOR_BYTES(bytes_finely, INT8, 2)
#endif
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
#if defined(FORM_PAIRS)
            if (p->weight->kind == INT8) {
                multiply_bytes_finely(p, rows, row, block, last);
                continue;
            }
            if (bytes_of_input(p->weight) == 2) {
                multiply_nibbles_finely(p, rows, row, block, last);
                continue;
            }
#endif
            multiply_nibbles(p, rows, row, block, last);
        }
    }
}
#endif
