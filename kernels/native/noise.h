/* Random numbers as functions of their key alone: numpy's Philox 4x64-10 (Salmon et al. 2011), and Gumbel noise. No operation here is fused or ordered by the width of vectors, so every form gives the same bits. */

enum { WORDS = 4, NOISE_AT_ONCE = 1 << 12 };

/* The block of words of counter [block + 1, lane, stream, position]; numpy counts up before it draws. */
INLINE void philox_block(const noise_key *key, int64_t stream, int64_t lane, int64_t block, uint64_t *words) {
    uint64_t a = block + 1, b = lane, c = stream, d = key->position, first = key->seed, second = key->sample_index;
    for (int round = 0; round < 10; round++) {
        const unsigned __int128 even = (unsigned __int128)a * 0xD2E7470EE14C6C93;
        const unsigned __int128 odd = (unsigned __int128)c * 0xCA5A826395121157;
        a = (uint64_t)(odd >> 64) ^ b ^ first;
        b = (uint64_t)odd;
        c = (uint64_t)(even >> 64) ^ d ^ second;
        d = (uint64_t)even;
        first += 0x9E3779B97F4A7C15;
        second += 0xBB67AE8584CAA73B;
    }
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
}

/* The uniform variate in [0, 1) at a place of a stream, on a grid of 2^-53. */
static double uniform_at(const noise_key *key, int64_t stream, int64_t place) {
    uint64_t words[WORDS];
    philox_block(key, stream, 0, place / WORDS, words);
    return (double)(words[place % WORDS] >> 11) * 0x1p-53;
}

/* log(x) of normal x > 0 by Cephes' polynomial around 1, to a unit in the last place of the larger of 1 and the
   logarithm. */
INLINE vf log_(vf x) {
    const vu bits = (vu)x - 0x3f3504f3; /* of the square root of 1/2 */
    const vf n = __builtin_convertvector((vi)bits >> 23, vf);
    const vf f = (vf)((bits & 0x7fffff) + 0x3f3504f3) - splat(1), z = f * f;
    vf y = splat(7.0376836292e-2f) * f - splat(1.1514610310e-1f);
    y = y * f + splat(1.1676998740e-1f);
    y = y * f - splat(1.2420140846e-1f);
    y = y * f + splat(1.4249322787e-1f);
    y = y * f - splat(1.6668057665e-1f);
    y = y * f + splat(2.0000714765e-1f);
    y = y * f - splat(2.4999993993e-1f);
    y = y * f + splat(3.3333331174e-1f);
    y = y * f * z - n * splat(2.12194440e-4f) - splat(0.5f) * z;
    return f + y + n * splat(0.693359375f);
}

/* Gumbel variates of 32-bit words: see `verify.noise.gumbel`, which says why v = 1 - u is drawn. */
INLINE vf gumbel_of(vu words) {
    vf v = (__builtin_convertvector(words, vf) + splat(0.5f)) * splat(0x1p-32f);
    v = -largest_of(splat(-(1 - 0x1p-24f)), -v); /* the largest words round up to 1 */
    const vf u = splat(1) - v;
    /* -log(1 - v), with what rounding has taken from u. */
    return -log_((u - splat(1) + v) / u - log_(u));
}

typedef struct {
    int64_t size, stream, lane;
    const noise_key *keys;
    float *const *out;
} noise_job;

static void noise_work(void *argument, int thread, int64_t begin, int64_t end) {
    (void)thread;
    const noise_job *j = argument;
    enum { HALVES = 64 };
    for (int64_t row = begin; row < end; row++)
        for (int64_t start = 0; start < j->size; start += HALVES) {
            uint64_t words[HALVES / 2];
            uint32_t halves[HALVES];
            float values[HALVES];
            for (int i = 0; i < HALVES / 2; i += WORDS)
                philox_block(&j->keys[row], j->stream, j->lane, (start / 2 + i) / WORDS, words + i);
            for (int i = 0; i < HALVES / 2; i++) {
                halves[2 * i] = (uint32_t)words[i];
                halves[2 * i + 1] = words[i] >> 32;
            }
            for (int i = 0; i < HALVES; i += LANES)
                store(values + i, gumbel_of(load_bits(halves + i)));
            const int64_t left = j->size - start;
            memcpy(j->out[row] + start, values, (left < HALVES ? left : HALVES) * sizeof(float));
        }
}

/* Write standard Gumbel noise of each key, `size` numbers. */
static int noise(context *c, int64_t count, int64_t size, const noise_key *keys, int64_t stream, int64_t lane,
                 float *const *out) {
    noise_job j = {.size = size, .stream = stream, .lane = lane, .keys = keys, .out = out};
    pool_each(c->threads, count, 1 + NOISE_AT_ONCE / size, noise_work, &j);
    return 0;
}
