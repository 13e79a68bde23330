/* Vectors of LANES floats, and how numbers in memory become them. */

#if defined(FORM_AVX512)
#define LANES 16
#elif defined(FORM_AVX2)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))
/* For work beside which a call costs nothing: each inlined copy takes time to compile. */
#define NOT_INLINE static __attribute__((noinline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef vf vf_unaligned __attribute__((aligned(4), may_alias));
typedef vu vu_unaligned __attribute__((aligned(4), may_alias));
typedef vh vh_unaligned __attribute__((aligned(2), may_alias));

INLINE vf load(const float *p) { return *(const vf_unaligned *)p; }
INLINE void store(float *p, vf x) { *(vf_unaligned *)p = x; }
INLINE vu load_bits(const void *p) { return *(const vu_unaligned *)p; }

INLINE vf splat(float x) {
#if defined(FORM_AVX512)
    return (vf)_mm512_set1_ps(x);
#elif defined(FORM_AVX2)
    return (vf)_mm256_set1_ps(x);
#else
    return (vf){x, x, x, x};
#endif
}

/* a * b + c: rounded once where the processor can; always the same on one form. */
INLINE vf fma_(vf a, vf b, vf c) {
#if defined(FORM_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(FORM_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* a where it is larger, else b. */
INLINE vf largest_of(vf a, vf b) {
#if defined(FORM_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(FORM_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi first = a > b;
    return (vf)(((vi)a & first) | ((vi)b & ~first));
#endif
}

/* a where it is smaller, else b. */
INLINE vf smallest_of(vf a, vf b) {
#if defined(FORM_AVX512)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(FORM_AVX2)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    vi first = a < b;
    return (vf)(((vi)a & first) | ((vi)b & ~first));
#endif
}

/* Bit l is set where lane l of a comparison's outcome is. */
INLINE uint32_t lanes_set(vi mask) {
#if defined(FORM_AVX512)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(FORM_AVX2)
    return _mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
    return _mm_movemask_ps((__m128)mask);
#else
    uint32_t set = 0;
    for (int l = 0; l < LANES; l++)
        set |= (uint32_t)(mask[l] & 1) << l;
    return set;
#endif
}

/* The lanes' sum, halves first: one order for every row. */
INLINE float sum_lanes(vf x) {
#if defined(FORM_AVX512)
    return _mm512_reduce_add_ps((__m512)x); /* in the order of below */
#else
    float lanes[LANES];
    store(lanes, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

enum { SUMMED = 8 }; /* vectors whose lanes are summed together */

/* The sum of each vector's lanes; the same additions for each of the eight. */
INLINE void sum_each(const vf x[SUMMED], float *sums) {
#if defined(FORM_AVX512) || defined(FORM_AVX2)
    __m256 y[SUMMED];
    UNROLLED
    for (int i = 0; i < SUMMED; i++)
#if defined(FORM_AVX512)
        y[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)x[i]), _mm512_extractf32x8_ps((__m512)x[i], 1));
#else
        y[i] = (__m256)x[i];
#endif
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(y[4], y[5]), _mm256_hadd_ps(y[6], y[7]));
    _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
#else
    for (int i = 0; i < SUMMED; i++)
        sums[i] = sum_lanes(x[i]);
#endif
}

INLINE float largest_lane(vf x) {
#if defined(FORM_AVX512)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lanes[LANES], most;
    store(lanes, x);
    most = lanes[0];
    for (int i = 1; i < LANES; i++)
        most = lanes[i] > most ? lanes[i] : most;
    return most;
#endif
}

/* e^x by Cephes' reduction: x = n ln 2 + r, and a polynomial in r; within 2 units in the last place, 0 below -87. */
INLINE vf exp_(vf x) {
    const vf rounder = splat(12582912.0f);
    vi tiny = x < splat(-87.0f);
    x = largest_of(splat(-87.0f), x);
    x = smallest_of(splat(88.0f), x);
    vf n = fma_(x, splat(1.44269504f), rounder);
    vu exponent = (vu)n << 23;
    n -= rounder;
    vf r = fma_(n, splat(-0.693359375f), x);
    r = fma_(n, splat(2.12194440e-4f), r);
    vf y = splat(1.9875691500e-4f);
    y = fma_(y, r, splat(1.3981999507e-3f));
    y = fma_(y, r, splat(8.3334519073e-3f));
    y = fma_(y, r, splat(4.1665795894e-2f));
    y = fma_(y, r, splat(1.6666665459e-1f));
    y = fma_(y, r, splat(5.0000001201e-1f));
    y = fma_(y, r * r, r + splat(1.0f));
    return (vf)((vi)((vu)y + exponent) & ~tiny);
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Numbers of float16 as floats. */
INLINE vf floats_of_halves(vu bits) {
    /* 2^112 moves the exponent's zero, of subnormal numbers too; infinity and NaN keep the largest exponent. */
    vf size = (vf)((bits & 0x7fff) << 13) * splat(0x1p112f);
    vu special = (vu)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (vf)((vu)size | special | (bits & 0x8000) << 16);
}

/* LANES numbers of a kind from memory. */
INLINE vf load_as(const void *p, int kind) {
    if (kind == FLOAT32)
        return load(p);
#if defined(FORM_AVX512)
    if (kind == FLOAT16)
        return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16);
#elif defined(FORM_AVX2)
    if (kind == FLOAT16)
        return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16);
#else
    vu bits = __builtin_convertvector(*(const vh_unaligned *)p, vu);
    if (kind == BFLOAT16)
        return (vf)(bits << 16);
    return floats_of_halves(bits);
#endif
}

/* LANES signed bytes from memory. */
INLINE vf load_bytes(const void *p) {
#if defined(FORM_AVX512)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
#elif defined(FORM_AVX2)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
#else
    int32_t bytes;
    memcpy(&bytes, p, 4);
#if defined(__SSE2__)
    /* Compilers convert vectors of four bytes one by one. */
    __m128i x = _mm_cvtsi32_si128(bytes);
    x = _mm_unpacklo_epi8(x, x);
    return (vf)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(x, x), 24));
#elif defined(__aarch64__)
    return (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes))))));
#else
    int8_t each[4];
    memcpy(each, &bytes, 4);
    return (vf){each[0], each[1], each[2], each[3]};
#endif
#endif
}

INLINE uint16_t half_of(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000)
        return sign | 0x7e00;
    if (size >= 0x477ff000)
        return sign | 0x7c00;
    if (size < 0x38800000) /* Adding a half rounds to the step of subnormal numbers. */
        return sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000);
    return sign | (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
}

/* Write LANES numbers, rounded to nearest, ties to even. */
INLINE void store_as(void *p, vf x, int kind) {
    if (kind == FLOAT32) {
        store(p, x);
#if defined(FORM_PAIRS)
    } else if (kind == BFLOAT16) {
        _mm256_storeu_si256(p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#endif
    } else if (kind == BFLOAT16) {
        vu bits = (vu)x, nan = (vu)(x != x);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        bits = (bits & ~nan) | (nan & 0x7fc0);
        *(vh_unaligned *)p = __builtin_convertvector(bits, vh);
    } else {
#if defined(FORM_AVX512)
        _mm256_storeu_si256(p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(FORM_AVX2)
        _mm_storeu_si128(p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
        for (int i = 0; i < LANES; i++)
            ((uint16_t *)p)[i] = half_of(x[i]);
#endif
    }
}

INLINE size_t size_of(int kind) { return kind == FLOAT32 ? 4 : 2; }

/* One number, by the way of vectors, so that the rounding is the same. */
INLINE float load_one(const void *p, int kind) {
    char lanes[4 * LANES] __attribute__((aligned(64))) = {0};
    memcpy(lanes, p, size_of(kind));
    return load_as(lanes, kind)[0];
}

INLINE void store_one(void *p, float x, int kind) {
    char lanes[4 * LANES] __attribute__((aligned(64)));
    store_as(lanes, splat(x), kind);
    memcpy(p, lanes, size_of(kind));
}

NOT_INLINE void to_floats(float *out, const void *in, int64_t count, int kind) {
    const char *from = in;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(out + i, load_as(from + i * size_of(kind), kind));
    for (; i < count; i++)
        out[i] = load_one(from + i * size_of(kind), kind);
}

NOT_INLINE void from_floats(void *out, const float *in, int64_t count, int kind) {
    char *to = out;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store_as(to + i * size_of(kind), load(in + i), kind);
    for (; i < count; i++)
        store_one(to + i * size_of(kind), in[i], kind);
}
