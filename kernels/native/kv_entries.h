/* Numbers of the cache, in 8 bits too: codes, whose scales are the checkpoint's, or without them 1 for 8-bit floats,
   and for int8 a bfloat16 for each head behind a slot's codes. See `types/kv_entries.py`. */

typedef uint8_t vb __attribute__((vector_size(LANES)));

INLINE int is_coded(int kind) { return kind >= KV_INT8; }

INLINE size_t kv_size(int kind) { return is_coded(kind) ? 1 : size_of(kind); }

/* LANES codes of 8-bit floats as float16, whose exponents have 5 bits too: 1/256 of the number where the code's have
   4. */
INLINE vf load_fp8(const void *p, int kind) {
#if defined(FORM_AVX512)
    __m256i half = _mm256_cvtepu8_epi16(_mm_loadu_si128(p));
    if (kind == KV_E4M3)
        half = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(half, _mm256_set1_epi16(0x80)), 8),
                               _mm256_slli_epi16(_mm256_and_si256(half, _mm256_set1_epi16(0x7f)), 7));
    else
        half = _mm256_slli_epi16(half, 8);
    return (vf)_mm512_cvtph_ps(half);
#elif defined(FORM_AVX2)
    __m128i half = _mm_cvtepu8_epi16(_mm_loadl_epi64(p));
    if (kind == KV_E4M3)
        half = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(half, _mm_set1_epi16(0x80)), 8),
                            _mm_slli_epi16(_mm_and_si128(half, _mm_set1_epi16(0x7f)), 7));
    else
        half = _mm_slli_epi16(half, 8);
    return (vf)_mm256_cvtph_ps(half);
#else
    vb codes;
    memcpy(&codes, p, sizeof codes);
    vu bits = __builtin_convertvector(codes, vu), size = (bits & 0x7f) << (kind == KV_E4M3 ? 20 : 21);
    /* 2^112 moves the exponent's zero, of subnormal numbers too. */
    return (vf)((vu)((vf)size * splat(0x1p112f)) | (bits & 0x80) << 24);
#endif
}

/* LANES numbers of keys or values from memory; codes without their scale. */
INLINE vf load_kv(const void *p, int kind) {
    if (kind == KV_INT8)
        return load_bytes(p);
    return is_coded(kind) ? load_fp8(p, kind) : load_as(p, kind);
}

INLINE float load_kv_one(const void *p, int kind) {
    char lanes[4 * LANES] __attribute__((aligned(64))) = {0};
    memcpy(lanes, p, kv_size(kind));
    return load_kv(lanes, kind)[0];
}

/* Whether slots store scales beside their codes. `given`: the checkpoint's, or NULL. */
INLINE int stores_scales(int kind, const float *given) { return kind == KV_INT8 && !given; }

/* What numbers of a head, as they are loaded, are to be multiplied by in every slot. `head` counts keys' heads, then
   values'. */
INLINE float shared_scale(int kind, const float *given, int64_t head) {
    return (kind == KV_E4M3 ? 256.0f : 1.0f) * (is_coded(kind) && given ? given[head] : 1.0f);
}

/* A scale that a slot stores. */
INLINE float load_kv_scale(const char *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return float_of((uint32_t)bits << 16);
}

/* Bytes from a head's codes to its scale, where slots store them. */
INLINE int64_t scale_offset(int64_t kv_heads, int64_t dim, int64_t head) {
    return 2 * kv_heads * dim + 2 * head - head * dim;
}

INLINE float largest_code(int kind) { return kind == KV_INT8 ? 127.0f : kind == KV_E4M3 ? 448.0f : 57344.0f; }

/* Codes of numbers that are scaled, in the low bytes: the nearest, ties to even, at most the largest; of NaN, 0. */
INLINE vu codes_of(vf x, int kind) {
    const vf most = splat(largest_code(kind));
    x = (vf)((vu)x & (vu)(x == x));
    x = smallest_of(most, largest_of(-most, x));
    if (kind == KV_INT8) /* The sum's last bits are the whole number. */
        return (vu)(x + splat(12582912.0f)) & 0xff;
    const vu bits = (vu)x, size = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
    /* Of subnormal codes the sum's last bits are their steps. */
    const int drop = kind == KV_E4M3 ? 20 : 21;
    const vf step = splat(kind == KV_E4M3 ? 0x1p14f : 0x1p7f), least = splat(kind == KV_E4M3 ? 0x1p-6f : 0x1p-14f);
    const uint32_t bias = kind == KV_E4M3 ? 120 << 3 : 112 << 2;
    vu small = (vu)((vf)size + step) - (vu)step;
    vu normal = ((size + ((1u << (drop - 1)) - 1) + (size >> drop & 1)) >> drop) - bias;
    vu is_small = (vu)((vf)size < least);
    return (small & is_small) | (normal & ~is_small) | sign;
}

INLINE float bfloat16_of(float x) {
    uint32_t bits = bits_of(x);
    return x != x ? x : float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

NOT_INLINE void encode_numbers(uint8_t *codes, const float *x, int64_t dim, int kind, float scale) {
    float lanes[LANES] = {0};
    const int64_t whole = dim / LANES * LANES;
    memcpy(lanes, x + whole, (dim - whole) * 4);
    for (int64_t i = 0; i < dim; i += LANES) {
        vb some = __builtin_convertvector(codes_of(load(i < whole ? x + i : lanes) / splat(scale), kind), vb);
        memcpy(codes + i, &some, i < whole ? LANES : dim - whole);
    }
}

/* Store a head with a scale of its own: by its largest number. */
static void encode_scaled(uint8_t *codes, char *scale, const float *x, int64_t dim, int kind) {
    vf most = splat(0), check = splat(0);
    float lanes[LANES] = {0};
    const int64_t whole = dim / LANES * LANES;
    memcpy(lanes, x + whole, (dim - whole) * 4);
    for (int64_t i = 0; i < dim; i += LANES) {
        vf numbers = load(i < whole ? x + i : lanes);
        most = largest_of((vf)((vu)numbers & 0x7fffffff), most);
        check += numbers * splat(0);
    }
    /* Zero, or NaN where a number is not finite: so is the scale then, and shows in what reads it. */
    const float bad = sum_lanes(check);
    float stored = bfloat16_of(largest_lane(most) / largest_code(kind));
    if (bad != bad)
        stored = bad;
    else if (stored < 1e-30f) /* `LEAST_SCALE` */
        stored = 0;
    const uint16_t bits = bits_of(stored) >> 16;
    memcpy(scale, &bits, 2);
    if (stored > 0)
        encode_numbers(codes, x, dim, kind, stored);
    else
        memset(codes, 0, dim);
}

/* Store a head of a row's keys or values, `head` of `2 * kv_heads`, in one layer's cache. `scales`: the checkpoint's,
   `[2 * kv_heads]`, or NULL. */
static void store_head(char *kv, int kind, int64_t slot_bytes, const float *scales, int64_t slot, int64_t head,
                       int64_t kv_heads, int64_t dim, const float *x) {
    char *to = kv + slot * slot_bytes + head * dim * kv_size(kind);
    const float scale = scales ? scales[head] : 1.0f;
    if (stores_scales(kind, scales))
        encode_scaled((uint8_t *)to, to + scale_offset(kv_heads, dim, head), x, dim, KV_INT8);
    else if (kind == KV_INT8)
        encode_numbers((uint8_t *)to, x, dim, KV_INT8, scale);
    else if (kind == KV_E4M3)
        encode_numbers((uint8_t *)to, x, dim, KV_E4M3, scale);
    else if (kind == KV_E5M2)
        encode_numbers((uint8_t *)to, x, dim, KV_E5M2, scale);
    else
        from_floats(to, x, dim, kind);
}
