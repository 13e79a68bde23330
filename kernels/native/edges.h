/* Which token follows which in a block (a DSpark head's Markov head): the vector of a path, whose product with a
   candidate's row is added to its score. */

/* Gates of a path's vector, and floats of each, a multiple of all forms' lanes. */
static int64_t num_gates(const block_head *h) { return h->markov == RNN ? 3 : h->markov == GATED ? 1 : 0; }
static int64_t gate_floats(const block_head *h) { return (h->rank + 15) / 16 * 16; }

/* Floats in which a thread works out vectors. */
static size_t edge_floats(const block_head *h) { return 2 * num_gates(h) * gate_floats(h) + h->hidden; }

/* Gates whose sums stay in registers. */
enum { GATES = 4 };

/* Add products of `count` numbers with their rows of `joint`, to each gate in the order of the numbers. */
static void add_gates(const block_head *h, const float *x, int64_t count, const float *rows, float *gates) {
    const int64_t size = num_gates(h) * gate_floats(h);
    int64_t k = 0;
    for (; k + GATES * LANES <= size; k += GATES * LANES) {
        vf sums[GATES];
        for (int n = 0; n < GATES; n++)
            sums[n] = load(gates + k + n * LANES);
        for (int64_t i = 0; i < count; i++)
            for (int n = 0; n < GATES; n++)
                sums[n] = fma_(splat(x[i]), load(rows + i * size + k + n * LANES), sums[n]);
        for (int n = 0; n < GATES; n++)
            store(gates + k + n * LANES, sums[n]);
    }
    for (; k < size; k += LANES) {
        vf sum = load(gates + k);
        for (int64_t i = 0; i < count; i++)
            sum = fma_(splat(x[i]), load(rows + i * size + k), sum);
        store(gates + k, sum);
    }
}

/* What the state of a slot adds to the gates of all paths before it. */
static void begin_slot(const block_head *h, const char *state, int dtype, float *own) {
    const int64_t size = num_gates(h) * gate_floats(h);
    if (!size)
        return;
    float *hidden = own + 2 * size;
    to_floats(hidden, state, h->hidden, dtype);
    memcpy(own, h->joint_bias, size * 4);
    add_gates(h, hidden, h->hidden, h->joint, own);
}

INLINE vf sigmoid(vf x) { return splat(1) / (splat(1) + exp_(-x)); }
INLINE vf tanh_(vf x) { return splat(2) * sigmoid(splat(2) * x) - splat(1); }

/* Turn the embedding of a path's last token into the path's vector. Vectors and states have zeros behind their rank, up
   to a multiple of LANES.

   before, after: a path's state without and with that token, of kind RNN. */
static void turn_into_vector(const block_head *h, float *own, float *vector, const float *before, float *after) {
    const int64_t rank = h->rank, gate = gate_floats(h), size = num_gates(h) * gate;
    if (!size)
        return;
    float *gates = own + size;
    memcpy(gates, own, size * 4);
    add_gates(h, vector, rank, h->joint + h->hidden * size, gates);
    if (h->markov == GATED) {
        for (int64_t i = 0; i < rank; i += LANES)
            store(vector + i, load(vector + i) * sigmoid(load(gates + i)));
        return;
    }
    add_gates(h, before, rank, h->joint + (h->hidden + rank) * size, gates);
    for (int64_t i = 0; i < rank; i += LANES) {
        const vf kept = sigmoid(load(gates + i)), state = load(before + i);
        store(after + i, kept * state + (splat(1) - kept) * tanh_(load(gates + gate + i)));
        store(vector + i, tanh_(load(gates + 2 * gate + i)));
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
