/* Which token follows which in a block (a DSpark head's Markov head): the vector of a path, whose product with a
   candidate's row is added to its score. */

/* Gates of a path's vector, and floats of each, a multiple of all forms' lanes. */
static int64_t num_gates(const block_head *h) { return h->markov == RNN ? 3 : h->markov == GATED ? 1 : 0; }
static int64_t gate_floats(const block_head *h) { return (h->rank + 15) / 16 * 16; }

/* Gates and paths whose sums stay in registers. */
enum { GATES = 4, PATHS = 3 };

/* Floats of all gates of a path. */
static int64_t all_gates(const block_head *h) { return num_gates(h) * gate_floats(h); }

/* Add products of `count` numbers of each path with their rows of `joint` to the path's gates, `gates` vectors of them
   from `k` on. All sizes but the counts are constants where this is inlined. */
INLINE void add_gates_of(int paths, int gates, const float *x, int64_t x_stride, int64_t count, const float *rows,
                         int64_t size, int64_t k, float *to) {
    vf sums[PATHS][GATES];
    UNROLLED
    for (int p = 0; p < paths; p++)
        UNROLLED
        for (int n = 0; n < gates; n++)
            sums[p][n] = load(to + p * size + k + n * LANES);
    for (int64_t i = 0; i < count; i++) {
        vf row[GATES];
        UNROLLED
        for (int n = 0; n < gates; n++)
            row[n] = load(rows + i * size + k + n * LANES);
        UNROLLED
        for (int p = 0; p < paths; p++)
            UNROLLED
            for (int n = 0; n < gates; n++)
                sums[p][n] = fma_(splat(x[p * x_stride + i]), row[n], sums[p][n]);
    }
    UNROLLED
    for (int p = 0; p < paths; p++)
        UNROLLED
        for (int n = 0; n < gates; n++)
            store(to + p * size + k + n * LANES, sums[p][n]);
}

INLINE void add_all_gates(int paths, const float *x, int64_t x_stride, int64_t count, const float *rows, int64_t size,
                          float *to) {
    int64_t k = 0;
    for (; k + GATES * LANES <= size; k += GATES * LANES)
        add_gates_of(paths, GATES, x, x_stride, count, rows, size, k, to);
    for (; k < size; k += LANES)
        add_gates_of(paths, 1, x, x_stride, count, rows, size, k, to);
}

/* Add products of `count` numbers of each path, rows of `x_stride` floats, with their rows of `joint`, to each gate in
   the order of the numbers. */
static void add_gates(const block_head *h, int64_t paths, const float *x, int64_t x_stride, int64_t count,
                      const float *rows, float *gates) {
    const int64_t size = all_gates(h);
    for (int64_t path = 0; path < paths; path += PATHS) {
        const float *from = x + path * x_stride;
        float *to = gates + path * size;
        switch (paths - path) {
        case 1: add_all_gates(1, from, x_stride, count, rows, size, to); break;
        case 2: add_all_gates(2, from, x_stride, count, rows, size, to); break;
        default: add_all_gates(PATHS, from, x_stride, count, rows, size, to);
        }
    }
}

/* What the states of slots add to the gates of all paths before them: `[slots][all_gates]`. `own`: floats of a thread,
   as many as these states have numbers. */
static void begin_slots(const block_head *h, int64_t slots, const char *states, int dtype, float *own, float *gates) {
    const int64_t size = all_gates(h);
    to_floats(own, states, slots * h->hidden, dtype);
    for (int64_t slot = 0; slot < slots; slot++)
        memcpy(gates + slot * size, h->joint_bias, size * 4);
    add_gates(h, slots, own, h->hidden, h->hidden, h->joint, gates);
}

INLINE vf sigmoid(vf x) { return splat(1) / (splat(1) + exp_(-x)); }
INLINE vf tanh_(vf x) { return splat(2) * sigmoid(splat(2) * x) - splat(1); }

/* Turn the embeddings of paths' last tokens into the paths' vectors. Vectors and states are rows of `stride` floats, with
   zeros behind their rank.

   slot: gates of the slot that follows; gates: floats for those of all paths.
   before, after: paths' states without and with that token, of kind RNN. */
static void turn_into_vectors(const block_head *h, int64_t paths, int64_t stride, const float *slot, float *gates,
                              float *vectors, const float *before, float *after) {
    const int64_t rank = h->rank, gate = gate_floats(h), size = all_gates(h);
    if (!size)
        return;
    for (int64_t path = 0; path < paths; path++)
        memcpy(gates + path * size, slot, size * 4);
    add_gates(h, paths, vectors, stride, rank, h->joint + h->hidden * size, gates);
    if (h->markov == RNN)
        add_gates(h, paths, before, stride, rank, h->joint + (h->hidden + rank) * size, gates);
    for (int64_t path = 0; path < paths; path++) {
        const float *own = gates + path * size, *old = before + path * stride;
        float *vector = vectors + path * stride, *new = after + path * stride;
        for (int64_t i = 0; i < rank; i += LANES) {
            const vf first = sigmoid(load(own + i));
            if (h->markov == GATED) {
                store(vector + i, load(vector + i) * first);
                continue;
            }
            store(new + i, first * load(old + i) + (splat(1) - first) * tanh_(load(own + gate + i)));
            store(vector + i, tanh_(load(own + 2 * gate + i)));
        }
    }
}

/* Add the edges of a path to the scores of candidates: products of its vector with their rows, each `stride` floats
   that end with zeros. */
static void add_edges(float *scores, int64_t count, const float *vector, const float *rows, int64_t stride,
                      float temperature) {
    for (int64_t i = 0; i < count; i += SUMMED) {
        vf sums[SUMMED];
        float edges[SUMMED];
        for (int n = 0; n < SUMMED; n++)
            sums[n] = splat(0);
        for (int64_t k = 0; k < stride; k += LANES)
            for (int n = 0; n < SUMMED; n++)
                sums[n] = fma_(load(vector + k), load(rows + (i + n) * stride + k), sums[n]);
        sum_each(sums, edges);
        for (int n = 0; n < SUMMED; n++)
            scores[i + n] += edges[n] / temperature;
    }
}
