/* Weights in few bits: how scales and numbers in memory become floats; `matrix` in native.h describes them. A group's
   numbers are multiplied first, and their sums times the group's scales are added up. What a minimum or a zero adds is
   the same for all inputs of the group, so it is multiplied with their sum. */

enum { NESTED_INPUTS = 256, SUMMED_AT_ONCE = SUMMED };

INLINE int is_quantized(const matrix *m) { return m->kind >= INT8; }

INLINE int has_offsets(const matrix *m) { return is_quantized(m) && m->offsets != NO_OFFSETS; }

INLINE int64_t groups_of(const matrix *m) { return (m->depth + m->group - 1) / m->group; }

/* Bytes of 16 scales, or of 16 minima. */
INLINE size_t scale_bytes(const matrix *m) {
    return m->scales == FLOAT32 ? 4 * BLOCK : m->scales == NESTED ? BLOCK : 2 * BLOCK;
}

/* Bytes of a group before its numbers. */
INLINE size_t group_head(const matrix *m) {
    return scale_bytes(m) + (m->offsets == MINIMA ? scale_bytes(m) : m->offsets == ZEROS ? BLOCK : 0);
}

INLINE size_t group_bytes(const matrix *m) {
    return group_head(m) + (size_t)m->group * (m->kind == UINT4 ? BLOCK / 2 : BLOCK);
}

/* Bytes of what 256 inputs of a block share. */
INLINE size_t nested_bytes(const matrix *m) {
    return m->scales != NESTED ? 0 : m->offsets == MINIMA ? 4 * BLOCK : 2 * BLOCK;
}

INLINE size_t nested_end(const matrix *m) {
    return (size_t)((m->depth + NESTED_INPUTS - 1) / NESTED_INPUTS) * nested_bytes(m);
}

INLINE size_t quantized_block_bytes(const matrix *m) {
    return nested_end(m) + (size_t)groups_of(m) * group_bytes(m);
}

/* LANES scales of a group, or minima (`which` 1), of the columns from `lane` on. `nested` is what its 256 inputs share. */
INLINE vf scales_at(const matrix *m, const char *nested, const char *group, int which, int lane) {
    if (m->scales == NESTED)
        return load_as(nested + (which * BLOCK + lane) * 2, FLOAT16) * load_bytes(group + which * BLOCK + lane);
    if (m->scales == FLOAT32)
        return load((const float *)group + which * BLOCK + lane);
    if (m->scales == FLOAT16)
        return load_as(group + (which * BLOCK + lane) * 2, FLOAT16);
    return load_as(group + (which * BLOCK + lane) * 2, BFLOAT16);
}

/* LANES numbers of 8 bits: signed bytes, or those of 4 exponent bits divided by 2^8. */
INLINE vf load_8bits(const void *p, int kind) {
    if (kind == INT8)
        return load_bytes(p);
#if defined(FORM_AVX512)
    __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7);
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16((int16_t)0xbfff)));
#elif defined(FORM_AVX2)
    __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p)), 7);
    return (vf)_mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16((int16_t)0xbfff)));
#else
    const uint8_t *bytes = p;
    vu each = {bytes[0], bytes[1], bytes[2], bytes[3]};
    return floats_of_halves((each & 0x80) << 8 | (each & 0x7f) << 7);
#endif
}

/* Bits of input i of eight in a word of UINT4. Two that follow each other are those of a pair. */
INLINE int nibble_at(int i) { return i % 2 * 16 + i / 2 * 4; }

/* LANES numbers of 4 bits that begin at `bit`. */
INLINE vf nibbles_of(vu words, int bit) {
#if defined(FORM_AVX512)
    /* The table is looked up by the four lowest bits. */
    const vf table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vf)_mm512_permutexvar_ps((__m512i)(words >> bit), (__m512)table);
#else
    return __builtin_convertvector((vi)(words >> bit & 15), vf);
#endif
}

#if defined(FORM_PAIRS)
/* The lowest 4 bits of each half of a word as bfloat16. The table is looked up by five bits; the fifth is the next
   number's, so its two halves are equal. */
INLINE __m512bh nibble_pairs(vu words) {
    static const uint16_t table[32] __attribute__((aligned(64))) = {
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    return (__m512bh)_mm512_permutexvar_epi16((__m512i)words, _mm512_load_si512(table));
}

/* Pairs of 8-bit numbers as bfloat16: they have no more bits than that, so the floats' other halves are zero. */
INLINE __m512bh pairs_of_8bits(const char *p, int kind) {
    vu first = (vu)load_8bits(p, kind), second = (vu)load_8bits(p + BLOCK, kind);
    return (__m512bh)(first >> 16 | second);
}
#endif

/* A number of a group, as `load_8bits` and `nibbles_of` give it. */
INLINE float number_at(const matrix *m, const char *numbers, int64_t input, int64_t lane) {
    if (m->kind == UINT4) {
        uint32_t word;
        memcpy(&word, numbers + (input / 8 * BLOCK + lane) * 4, 4);
        return (float)(word >> nibble_at(input % 8) & 15);
    }
    const uint8_t byte = ((const uint8_t *)numbers)[input * BLOCK + lane];
    if (m->kind == INT8)
        return (float)(int8_t)byte;
    const uint16_t half = (byte & 0x80) << 8 | (byte & 0x7f) << 7;
    return load_one(&half, FLOAT16);
}

/* Write the weights of a column as numbers of a kind: a row of the matrix that was packed, such as a token's embedding. */
static void read_column(const matrix *m, int64_t column, void *out, int kind) {
    const char *block = (const char *)m->weight + column / BLOCK * quantized_block_bytes(m);
    const int64_t lane = column % BLOCK, first = lane / LANES * LANES;
    for (int64_t k = 0; k < m->inputs; k += m->group) {
        const char *group = block + nested_end(m) + k / m->group * group_bytes(m);
        const char *nested = block + k / NESTED_INPUTS * nested_bytes(m);
        const float scale = scales_at(m, nested, group, 0, first)[lane - first];
        float zero = 0, minimum = 0;
        if (m->offsets == MINIMA)
            minimum = scales_at(m, nested, group, 1, first)[lane - first];
        else if (m->offsets == ZEROS)
            zero = ((const int8_t *)group)[scale_bytes(m) + lane];
        for (int64_t i = 0; i < m->group && k + i < m->inputs; i++) {
            const float number = number_at(m, group + group_head(m), i, lane);
            store_one((char *)out + (k + i) * size_of(kind), (number - zero) * scale + minimum, kind);
        }
    }
}

/* A row of an embedding: of a table of numbers, or of a packed matrix where there is one. */
INLINE void embed(const void *table, const matrix *packed, int64_t hidden, int64_t token, void *out, int dtype) {
    if (packed)
        read_column(packed, token, out, dtype);
    else
        memcpy(out, (const char *)table + token * hidden * size_of(dtype), hidden * size_of(dtype));
}

/* Write the sums of each group's inputs of a row, which are numbers of a kind, as `groups` floats and up to 7 more. The
   additions are the same for every row. */
static void sum_groups(const matrix *m, const char *row, int kind, float *sums) {
    const int64_t groups = groups_of(m), whole = m->group / LANES * LANES;
    for (int64_t g = 0; g < groups; g += SUMMED_AT_ONCE) {
        vf parts[SUMMED_AT_ONCE];
        float rest[SUMMED_AT_ONCE] = {0};
        for (int n = 0; n < SUMMED_AT_ONCE; n++) {
            const int64_t begin = (g + n) * m->group, left = m->depth - begin;
            const int64_t count = left < 0 ? 0 : left < m->group ? left : m->group;
            const int64_t end = begin + (count < whole ? count / LANES * LANES : whole);
            int64_t k = begin;
            parts[n] = splat(0);
            for (; k < end; k += LANES)
                parts[n] += load_as(row + k * size_of(kind), kind);
            for (; k < begin + count; k++)
                rest[n] += load_one(row + k * size_of(kind), kind);
        }
        sum_each(parts, sums + g);
        for (int n = 0; n < SUMMED_AT_ONCE; n++)
            sums[g + n] += rest[n];
    }
}
