/* Which token follows which in a block (a DSpark head's Markov head): the vector of a path, whose product with a
   candidate's row is added to its score. */

/* Gates of a path's vector, and floats of each, a multiple of all forms' lanes. */
static int64_t num_gates(const block_head *h) { return h->markov == RNN ? 3 : h->markov == GATED ? 1 : 0; }
static int64_t gate_floats(const block_head *h) { return (h->rank + 15) / 16 * 16; }

/* Floats in which a thread works out vectors. */
static size_t edge_floats(const block_head *h) { return 2 * num_gates(h) * gate_floats(h) + h->hidden; }

/* Add products of `count` numbers with their rows of `joint`. */
static void add_gates(const block_head *h, const float *x, int64_t count, const float *rows, float *gates) {
    const int64_t size = num_gates(h) * gate_floats(h);
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < size; k += LANES)
            store(gates + k, fma_(splat(x[i]), load(rows + i * size + k), load(gates + k)));
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

static float sigmoid(float x) { return 1 / (1 + expf(-x)); }

/* Turn the embedding of a path's last token into the path's vector.

   before, after: a path's state without and with that token, of kind RNN. */
static void turn_into_vector(const block_head *h, float *own, float *vector, const float *before, float *after) {
    const int64_t rank = h->rank, gate = gate_floats(h), size = num_gates(h) * gate;
    if (!size)
        return;
    float *gates = own + size;
    memcpy(gates, own, size * 4);
    add_gates(h, vector, rank, h->joint + h->hidden * size, gates);
    if (h->markov == GATED) {
        for (int64_t i = 0; i < rank; i++)
            vector[i] *= sigmoid(gates[i]);
        return;
    }
    add_gates(h, before, rank, h->joint + (h->hidden + rank) * size, gates);
    for (int64_t i = 0; i < rank; i++) {
        const float kept = sigmoid(gates[i]);
        after[i] = kept * before[i] + (1 - kept) * tanhf(gates[gate + i]);
        vector[i] = tanhf(gates[2 * gate + i]);
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
