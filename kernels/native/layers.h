/* A decoder layer in one call, and its parts by themselves. Activations between the parts are floats; they are rounded
   where a layer ends, where keys and values are stored, and where bfloat16 pairs are multiplied. */

/* Items of a job that go to one thread together: heads that are rotated, blocks of a product. Rows are normed one by
   one. */
enum { HEADS_AT_ONCE = 8, BLOCKS_AT_ONCE = 2 };

/* About the rows whose states stay in a processor's cache. */
enum { ROWS_NEAR = 256 };

/* Rows of a panel: whole tiles. */
#if defined(FORM_AMX)
enum { PANEL_ROWS = SQUARES * SQUARE_ROWS, QUANTIZED_PANEL_ROWS = ROWS_OF_SUMS };
#else
enum { PANEL_ROWS = 4 * MOST_ROWS, QUANTIZED_PANEL_ROWS = 32 * MOST_ROWS };
#endif

/* `weight * x / sqrt(mean(x^2) + eps)` (Zhang & Sennrich 2019); `out` may be `x`. */
static void norm_row(const float *x, const float *weight, double eps, int64_t size, float *out) {
    vf squares = splat(0);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        squares = fma_(load(x + i), load(x + i), squares);
    float sum = sum_lanes(squares);
    for (; i < size; i++)
        sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)size + (float)eps);
    for (i = 0; i + LANES <= size; i += LANES)
        store(out + i, load(x + i) * splat(scale) * load(weight + i));
    for (; i < size; i++)
        out[i] = x[i] * scale * weight[i];
}

/* Rotate a head in place, halves convention (Su et al. 2021); the sines' first half carries its minus sign. */
static void rotate_head(float *x, const float *cos, const float *sin, int64_t dim) {
    for (int64_t i = 0, half = dim / 2; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* Products in chunks of the thread's share and in panels of rows, each handed on as floats `[rows][CHUNK * BLOCK]` in the
   thread's memory. */
typedef struct {
    context *c;
    const matrix *weight;
    const char *x;
    const float *residual;
    int64_t rows, residual_stride;
    float *own;
    const step *adapted; /* where the rows' adapters are beside the weight, or NULL */
    size_t adapter;
} chunks;

/* The rows `[row, beyond)` of a job. */
INLINE chunks some_rows(const chunks *job, int64_t row, int64_t beyond) {
    chunks part = *job;
    part.x += row * input_stride(job->weight);
    part.rows = beyond - row;
    if (job->residual)
        part.residual += row * job->residual_stride;
    return part;
}

/* Number of parts into which rows are divided: equal ones of at most `most`. Adapters take all rows at once. */
INLINE int64_t parts_of(const chunks *job, int64_t most) {
    return job->adapted && job->adapted->spans ? 1 : (job->rows + most - 1) / most;
}

/* Rows whose products stay in the nearest cache; of weights in few bits more, since they are unpacked for each panel. */
INLINE int64_t rows_of_panel(const matrix *weight) { return is_quantized(weight) ? QUANTIZED_PANEL_ROWS : PANEL_ROWS; }

/* Multiply a panel of a job's rows, from `row` on, with a chunk of blocks. */
INLINE void multiply_chunk(const chunks *job, const chunks *panel, int64_t row, int64_t begin, int64_t end,
                           int is_fetched) {
    product p = {
        .weight = panel->weight, .x = panel->x, .x_stride = input_stride(panel->weight), .out = panel->own,
        .out_stride = CHUNK * BLOCK, .first_column = begin * BLOCK, .residual = panel->residual,
        .residual_stride = panel->residual_stride, .rows = panel->rows, .rows_before = row,
        .rows_behind = job->rows - row - panel->rows, .is_fetched = is_fetched,
    };
    multiply(&p, begin, end);
    if (panel->adapted)
        add_adapters(panel->c, panel->adapted, panel->adapter, panel->own, CHUNK * BLOCK, begin * BLOCK, begin, end);
}

/* Return the block behind the chunk that begins at one. */
INLINE int64_t chunk_end(int64_t begin, int64_t end) { return begin + CHUNK < end ? begin + CHUNK : end; }

/* A product that threads share: its items are the weight's blocks of columns, for one stretch of rows after another. So
   few threads have rows of their own, whose states stay near them, and many have columns. */
typedef struct {
    int64_t rows, stretches, blocks, width; /* width: `blocks`, in whole groups */
} grid;

/* What a share has of one stretch: the rows `[row, beyond)` with the blocks `[begin, end)`; `next` is the item behind. */
typedef struct {
    int64_t row, beyond, begin, end, next;
} grid_part;

/* Adapters take all rows at once. */
INLINE grid grid_of(const matrix *weight, int64_t rows, const step *adapted, int64_t group) {
    const int64_t near = adapted && adapted->spans ? 0 : (rows + ROWS_NEAR / 2) / ROWS_NEAR;
    return (grid){rows, near > 1 ? near : 1, weight->blocks, (weight->blocks + group - 1) / group * group};
}

/* Do a product's items, shares of whole groups of `group` on each thread. */
static void share_grid(context *c, grid g, int64_t group, pool_work work, void *argument) {
    pool_each(c->threads, g.stretches * g.width, group, work, argument);
}

/* The part of the items from `item` to `end` that lies in one stretch. */
INLINE grid_part part_at(const grid *g, int64_t item, int64_t end) {
    const int64_t number = item / g->width, begin = item % g->width, left = end - item;
    const int64_t next = begin + left < g->width ? begin + left : g->width;
    return (grid_part){
        .row = g->rows * number / g->stretches, .beyond = g->rows * (number + 1) / g->stretches, .begin = begin,
        .end = next < g->blocks ? next : g->blocks, .next = item + next - begin,
    };
}

/* Multiply some blocks of columns and write them as rows of `stride` numbers of a kind. */
static void multiply_part(const chunks *job, int64_t begin, int64_t end, int dtype, void *out, int64_t stride) {
    const int64_t panels = parts_of(job, rows_of_panel(job->weight)), columns = job->weight->columns;
    for (int64_t last, first = begin; begin < end; begin = last) {
        last = chunk_end(begin, end);
        const int64_t column = begin * BLOCK, count = (last * BLOCK < columns ? last * BLOCK : columns) - column;
        for (int64_t i = 0, row = 0; i < panels; i++) {
            const chunks panel = some_rows(job, row, job->rows * (i + 1) / panels);
            multiply_chunk(job, &panel, row, begin, last, begin > first);
            for (int64_t r = 0; r < panel.rows; r++, row++)
                from_floats((char *)out + (row * stride + column) * size_of(dtype), job->own + r * CHUNK * BLOCK, count,
                            dtype);
        }
    }
}

/* x / (1 + e^-x) */
INLINE vf silu(vf x) {
    const vf divisor = splat(1) + exp_(-x);
#if defined(FORM_PAIRS)
    /* A division by Newton's method and the remainder (Markstein 1990): the same numbers in less time. */
    const vf near = (vf)_mm512_rcp14_ps((__m512)divisor), reciprocal = fma_(near, fma_(-divisor, near, splat(1)), near);
    const vf quotient = x * reciprocal;
    return fma_(fma_(-divisor, quotient, x), reciprocal, quotient);
#else
    return x / divisor;
#endif
}

/* Multiply gate and up, of which each chunk has two blocks, and write `silu(gate) * up` as inputs to `down`. */
static void multiply_gated(const chunks *job, int64_t begin, int64_t end, const matrix *down, char *out) {
    const int kind = input_kind(down);
    const int64_t panels = parts_of(job, rows_of_panel(job->weight)), stride = input_stride(down);
    for (int64_t last, first = begin; begin < end; begin = last) {
        last = chunk_end(begin, end);
        for (int64_t i = 0, row = 0; i < panels; i++) {
            const chunks panel = some_rows(job, row, job->rows * (i + 1) / panels);
            multiply_chunk(job, &panel, row, begin, last, begin > first);
            for (int64_t r = 0; r < panel.rows; r++, row++)
                for (int n = 0; n < CHUNK / 2 * BLOCK; n += LANES) {
                    const float *gate = job->own + r * CHUNK * BLOCK + n;
                    char *to = out + row * stride + (begin / 2 * BLOCK + n) * size_of(kind);
                    store_as(to, silu(load(gate)) * load(gate + CHUNK / 2 * BLOCK), kind);
                }
        }
    }
}

typedef struct {
    context *c;
    const layer *l;
    const step *s;
    const char *x, *residual;
    char *out;
    tiling tiles;
} layer_job;

static void put_states(const layer_job *j, int64_t row, float *own) {
    const layer *l = j->l;
    const int dtype = j->c->dtype;
    const int64_t width = l->output.blocks * BLOCK;
    float *state = (float *)j->c->buffers[STATES].memory + row * width;
    to_floats(state, j->residual + row * l->hidden * size_of(dtype), l->hidden, dtype);
    memset(state + l->hidden, 0, (width - l->hidden) * 4);
    char *input = (char *)j->c->buffers[INPUTS].memory + row * input_stride(&l->qkv);
    if (j->x)
        to_floats(own, j->x + row * l->qkv.inputs * size_of(dtype), l->qkv.inputs, dtype);
    else if (l->input_norm)
        norm_row(state, l->input_norm, l->eps, l->hidden, own);
    else
        memcpy(own, state, l->hidden * 4);
    put_inputs(&l->qkv, input, own, l->qkv.inputs);
}

/* Norm and rotate a head of queries or keys, and store one of keys or values. */
static void finish_head(const layer_job *j, int64_t row, int64_t head, float *own) {
    const layer *l = j->l;
    const step *s = j->s;
    const int dtype = j->c->dtype;
    const int64_t dim = l->head_dim;
    float *x = (float *)j->c->buffers[QKV].memory + row * l->qkv.blocks * BLOCK + head * dim;
    if (head < l->heads + l->kv_heads) {
        const float *norm = head < l->heads ? l->query_norm : l->key_norm;
        if (norm)
            norm_row(x, norm, l->eps, dim, x);
        to_floats(own, (const char *)s->cos + row * dim * size_of(dtype), dim, dtype);
        to_floats(own + dim, (const char *)s->sin + row * dim * size_of(dtype), dim, dtype);
        rotate_head(x, own, own + dim, dim);
    }
    if (head >= l->heads)
        store_head(s->kv, (int)s->kv_kind, s->slot_bytes, s->kv_scales, s->slots[row], head - l->heads, l->kv_heads, dim,
                   x);
}

/* The parts of a layer, one after another. */

static void states_work(void *argument, int thread, int64_t begin, int64_t end) {
    const layer_job *j = argument;
    for (int64_t row = begin; row < end; row++)
        put_states(j, row, j->c->own[thread].memory);
}

static void qkv_work(void *argument, int thread, int64_t begin, int64_t end) {
    (void)thread;
    const layer_job *j = argument;
    const matrix *m = &j->l->qkv;
    const grid g = grid_of(m, j->s->rows, j->s, BLOCKS_AT_ONCE);
    const int64_t stride = m->blocks * BLOCK;
    for (grid_part part; begin < end; begin = part.next) {
        part = part_at(&g, begin, end);
        product p = {
            .weight = m, .x = (char *)j->c->buffers[INPUTS].memory + part.row * input_stride(m),
            .x_stride = input_stride(m), .out = (float *)j->c->buffers[QKV].memory + part.row * stride, .out_stride = stride,
            .rows = part.beyond - part.row,
        };
        multiply(&p, part.begin, part.end);
        add_adapters(j->c, j->s, offsetof(layer_adapter, qkv), p.out, p.out_stride, 0, part.begin, part.end);
    }
}

static void heads_work(void *argument, int thread, int64_t begin, int64_t end) {
    const layer_job *j = argument;
    const int64_t heads = j->l->heads + 2 * j->l->kv_heads;
    for (int64_t item = begin; item < end; item++)
        finish_head(j, item / heads, item % heads, j->c->own[thread].memory);
}

static void mix_work(void *argument, int thread, int64_t begin, int64_t end) {
    const layer_job *j = argument;
    const layer *l = j->l;
    const int kind = input_kind(&l->output);
    const int64_t group = l->heads / l->kv_heads, numbers = group * l->head_dim, width = l->qkv.blocks * BLOCK;
    const size_t stride = input_stride(&l->output);
    float *own = j->c->own[thread].memory;
    for (int64_t item = begin; item < end; item++) {
        const int64_t *rows = j->tiles.first + tile_in_turn(item / l->kv_heads, j->tiles.tiles), head = item % l->kv_heads;
        tile t = {
            .s = j->s, .begin = rows[0], .end = rows[1], .heads = l->heads, .kv_heads = l->kv_heads, .kv_head = head,
            .dim = l->head_dim, .kind = (int)j->s->kv_kind, .scale = 1.0f / sqrtf((float)l->head_dim),
            .window = l->window, .slopes = l->slopes,
        };
        float *queries = (float *)j->c->buffers[QKV].memory + t.begin * width + head * numbers;
        float *out = own + j->tiles.before;
        attend_tile(&t, queries, width, own, out);
        for (int64_t row = t.begin; row < t.end; row++)
            from_floats((char *)j->c->buffers[MIXED].memory + row * stride + head * numbers * size_of(kind),
                        out + (row - t.begin) * numbers, numbers, kind);
    }
}

static void output_work(void *argument, int thread, int64_t begin, int64_t end) {
    (void)thread;
    const layer_job *j = argument;
    const matrix *m = &j->l->output;
    const grid g = grid_of(m, j->s->rows, j->s, BLOCKS_AT_ONCE);
    const int64_t width = m->blocks * BLOCK;
    for (grid_part part; begin < end; begin = part.next) {
        part = part_at(&g, begin, end);
        product p = {
            .weight = m, .x = (char *)j->c->buffers[MIXED].memory + part.row * input_stride(m), .x_stride = input_stride(m),
            .out = (float *)j->c->buffers[SUMS].memory + part.row * width, .out_stride = width,
            .residual = (float *)j->c->buffers[STATES].memory + part.row * width, .residual_stride = width,
            .rows = part.beyond - part.row,
        };
        multiply(&p, part.begin, part.end);
        add_adapters(j->c, j->s, offsetof(layer_adapter, output), p.out, width, 0, part.begin, part.end);
    }
}

static void norms_work(void *argument, int thread, int64_t begin, int64_t end) {
    const layer_job *j = argument;
    const layer *l = j->l;
    float *own = j->c->own[thread].memory, *sums = j->c->buffers[SUMS].memory;
    char *inputs = j->c->buffers[INPUTS].memory;
    for (int64_t row = begin; row < end; row++) {
        norm_row(sums + row * l->output.blocks * BLOCK, l->post_norm, l->eps, l->hidden, own);
        put_inputs(&l->gate_up, inputs + row * input_stride(&l->gate_up), own, l->hidden);
    }
}

static void gate_work(void *argument, int thread, int64_t begin, int64_t end) {
    const layer_job *j = argument;
    context *c = j->c;
    chunks job = {
        .c = c, .weight = &j->l->gate_up, .x = c->buffers[INPUTS].memory, .rows = j->s->rows,
        .own = c->own[thread].memory, .adapted = j->s, .adapter = offsetof(layer_adapter, gate_up),
    };
    const grid g = grid_of(&j->l->gate_up, j->s->rows, j->s, CHUNK);
    for (grid_part part; begin < end; begin = part.next) {
        part = part_at(&g, begin, end);
        const chunks some = some_rows(&job, part.row, part.beyond);
        multiply_gated(&some, part.begin, part.end, &j->l->down,
                       (char *)c->buffers[ACTIVATED].memory + part.row * input_stride(&j->l->down));
    }
}

static void down_work(void *argument, int thread, int64_t begin, int64_t end) {
    const layer_job *j = argument;
    context *c = j->c;
    chunks job = {
        .c = c, .weight = &j->l->down, .x = c->buffers[ACTIVATED].memory, .residual = c->buffers[SUMS].memory,
        .rows = j->s->rows, .residual_stride = j->l->output.blocks * BLOCK, .own = c->own[thread].memory,
        .adapted = j->s, .adapter = offsetof(layer_adapter, down),
    };
    const grid g = grid_of(&j->l->down, j->s->rows, j->s, BLOCKS_AT_ONCE);
    for (grid_part part; begin < end; begin = part.next) {
        part = part_at(&g, begin, end);
        const chunks some = some_rows(&job, part.row, part.beyond);
        multiply_part(&some, part.begin, part.end, c->dtype,
                      j->out + part.row * j->l->down.columns * size_of(c->dtype), j->l->down.columns);
    }
}

typedef struct {
    const matrix *weight;
    char *rows;
    int64_t count;
} finish_job;

static void finish_work(void *argument, int thread, int64_t begin, int64_t end) {
    (void)thread;
    const finish_job *j = argument;
    for (int64_t row = begin; row < end; row++)
        finish_inputs(j->weight, j->rows + row * input_stride(j->weight), j->count);
}

/* Complete rows in a buffer that several jobs have each written a part of, `count` inputs together. */
static void finish_rows(context *c, const matrix *weight, int buffer, int64_t rows, int64_t count) {
    finish_job j = {.weight = weight, .rows = c->buffers[buffer].memory, .count = count};
    if (has_offsets(weight) || bytes_of_input(weight) || count < weight->depth)
        pool_each(c->threads, rows, 1, finish_work, &j);
}

INLINE size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* Give each thread memory for that many floats. */
static int reserve_own(context *c, size_t floats) {
    for (int t = 0; t < pool_threads(c->threads); t++)
        if (!reserve(&c->own[t], (floats + LANES) * 4))
            return -1;
    return 0;
}

/* Run the first products of the rows' adapters beside a weight, whose inputs lie in a buffer. */
static void run_low_beside(const layer_job *j, const matrix *m, size_t adapter, int inputs) {
    if (j->s->spans)
        run_low(j->c, j->s, adapter, j->c->buffers[inputs].memory, input_stride(m));
}

/* Rows from which on a layer's other form takes less time: more than one tile has. */
enum { MANY_ROWS = 17 };

static int run_layer(context *c, const layer *l, const step *s, const void *x, const void *residual, void *out) {
    if (l->for_many && s->rows >= MANY_ROWS)
        l = l->for_many;
    const size_t rows = s->rows, width = l->output.blocks * BLOCK;
    int64_t *first = reserve(&c->buffers[TILES], (rows + 1) * sizeof(int64_t));
    if (!first)
        return -1;
    const tiling tiles = tile_rows_of(s, l->heads, l->kv_heads, l->head_dim, pool_threads(c->threads), first);
    size_t own = larger(rows * CHUNK * BLOCK, tiles.floats);
    own = larger(own, larger(2 * l->head_dim, larger(l->qkv.depth, l->hidden)));
    int lacks = reserve_own(c, own);
    lacks |= !reserve(&c->buffers[STATES], rows * width * 4);
    lacks |= !reserve(&c->buffers[SUMS], rows * width * 4);
    lacks |= !reserve(&c->buffers[INPUTS], rows * larger(input_stride(&l->qkv), input_stride(&l->gate_up)));
    lacks |= !reserve(&c->buffers[QKV], rows * l->qkv.blocks * BLOCK * 4);
    lacks |= !reserve(&c->buffers[MIXED], rows * input_stride(&l->output));
    lacks |= !reserve(&c->buffers[ACTIVATED], rows * input_stride(&l->down));
    lacks |= s->spans && reserve_low(c, s);
    if (lacks)
        return -1;
    layer_job j = {.c = c, .l = l, .s = s, .x = x, .residual = residual, .out = out, .tiles = tiles};
    pool_each(c->threads, rows, 1, states_work, &j);
    run_low_beside(&j, &l->qkv, offsetof(layer_adapter, qkv), INPUTS);
    share_grid(c, grid_of(&l->qkv, rows, s, BLOCKS_AT_ONCE), BLOCKS_AT_ONCE, qkv_work, &j);
    pool_each(c->threads, rows * (l->heads + 2 * l->kv_heads), HEADS_AT_ONCE, heads_work, &j);
    pool_each(c->threads, tiles.tiles * l->kv_heads, 1, mix_work, &j);
    finish_rows(c, &l->output, MIXED, rows, l->output.inputs);
    run_low_beside(&j, &l->output, offsetof(layer_adapter, output), MIXED);
    share_grid(c, grid_of(&l->output, rows, s, BLOCKS_AT_ONCE), BLOCKS_AT_ONCE, output_work, &j);
    pool_each(c->threads, rows, 1, norms_work, &j);
    run_low_beside(&j, &l->gate_up, offsetof(layer_adapter, gate_up), INPUTS);
    share_grid(c, grid_of(&l->gate_up, rows, s, CHUNK), CHUNK, gate_work, &j);
    finish_rows(c, &l->down, ACTIVATED, rows, l->down.depth);
    run_low_beside(&j, &l->down, offsetof(layer_adapter, down), ACTIVATED);
    share_grid(c, grid_of(&l->down, rows, s, BLOCKS_AT_ONCE), BLOCKS_AT_ONCE, down_work, &j);
    return 0;
}

typedef struct {
    context *c;
    const matrix *weight;
    int64_t rows;
    const char *x;
    void *out;
    int kind;
    int64_t stride;
    const step *adapted; /* adapters of the rows, or NULL */
} product_job;

static void inputs_work(void *argument, int thread, int64_t begin, int64_t end) {
    const product_job *j = argument;
    const int dtype = j->c->dtype;
    const matrix *m = j->weight;
    float *own = j->c->own[thread].memory;
    char *inputs = j->c->buffers[INPUTS].memory;
    for (int64_t row = begin; row < end; row++) {
        to_floats(own, j->x + row * m->inputs * size_of(dtype), m->inputs, dtype);
        put_inputs(m, inputs + row * input_stride(m), own, m->inputs);
    }
}

static void product_work(void *argument, int thread, int64_t begin, int64_t end) {
    const product_job *j = argument;
    chunks job = {
        .c = j->c, .weight = j->weight, .x = j->c->buffers[INPUTS].memory, .rows = j->rows,
        .own = j->c->own[thread].memory, .adapted = j->adapted, .adapter = offsetof(layer_adapter, qkv),
    };
    const grid g = grid_of(j->weight, j->rows, j->adapted, CHUNK);
    for (grid_part part; begin < end; begin = part.next) {
        part = part_at(&g, begin, end);
        const chunks some = some_rows(&job, part.row, part.beyond);
        multiply_part(&some, part.begin, part.end, j->kind, (char *)j->out + part.row * j->stride * size_of(j->kind),
                      j->stride);
    }
}

static int do_product(context *c, const product_job *j) {
    const matrix *m = j->weight;
    const int is_adapted = j->adapted && j->adapted->spans;
    if (reserve_own(c, larger(j->rows * CHUNK * BLOCK, m->depth)) ||
        !reserve(&c->buffers[INPUTS], j->rows * input_stride(m)) ||
        (is_adapted && reserve_low(c, j->adapted)))
        return -1;
    pool_each(c->threads, j->rows, 1, inputs_work, (void *)j);
    if (is_adapted)
        run_low(c, j->adapted, offsetof(layer_adapter, qkv), c->buffers[INPUTS].memory, input_stride(m));
    share_grid(c, grid_of(m, j->rows, j->adapted, CHUNK), CHUNK, product_work, (void *)j);
    return 0;
}

static int run_product_beside(context *c, const matrix *m, const step *s, int64_t rows, const void *x, void *out) {
    product_job j = {
        .c = c, .weight = m, .rows = rows, .x = x, .out = out, .kind = (int)c->dtype, .stride = m->columns,
        .adapted = s,
    };
    return do_product(c, &j);
}

static int run_product(context *c, const matrix *m, int64_t rows, const void *x, void *out) {
    return run_product_beside(c, m, NULL, rows, x, out);
}

/* Rows of the matrix that was packed, in the context's type. */
static int read_rows(context *c, const matrix *m, int64_t count, const int64_t *rows, void *out) {
    for (int64_t i = 0; i < count; i++)
        read_column(m, rows[i], (char *)out + i * m->inputs * size_of(c->dtype), (int)c->dtype);
    return 0;
}

/* The product as floats, in rows of `stride`; `s` has the adapters of the rows, or is NULL. */
static int run_product_into(context *c, const matrix *m, const step *s, int64_t rows, const void *x, float *out,
                            int64_t stride) {
    product_job j = {
        .c = c, .weight = m, .rows = rows, .x = x, .out = out, .kind = FLOAT32, .stride = stride, .adapted = s,
    };
    return do_product(c, &j);
}

typedef struct {
    context *c;
    int64_t heads, kv_heads, head_dim, window;
    const float *slopes;
    double scale;
    const step *s;
    const char *query;
    char *out;
    tiling tiles;
} attend_job;

static void attend_work(void *argument, int thread, int64_t begin, int64_t end) {
    const attend_job *j = argument;
    const int dtype = j->c->dtype;
    const int64_t group = j->heads / j->kv_heads, numbers = group * j->head_dim;
    float *own = j->c->own[thread].memory, *out = own + j->tiles.before, *queries = own + j->tiles.floats;
    for (int64_t item = begin; item < end; item++) {
        const int64_t *rows = j->tiles.first + tile_in_turn(item / j->kv_heads, j->tiles.tiles), head = item % j->kv_heads;
        tile t = {
            .s = j->s, .begin = rows[0], .end = rows[1], .heads = j->heads, .kv_heads = j->kv_heads, .kv_head = head,
            .dim = j->head_dim, .kind = (int)j->s->kv_kind, .scale = (float)j->scale, .window = j->window,
            .slopes = j->slopes,
        };
        for (int64_t row = t.begin; row < t.end; row++)
            to_floats(queries + (row - t.begin) * numbers,
                      j->query + (row * j->kv_heads + head) * numbers * size_of(dtype), numbers, dtype);
        attend_tile(&t, queries, numbers, own, out);
        for (int64_t row = t.begin; row < t.end; row++)
            from_floats(j->out + (row * j->kv_heads + head) * numbers * size_of(dtype),
                        out + (row - t.begin) * numbers, numbers, dtype);
    }
}

static int attend(context *c, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window, const float *slopes,
                  double scale, const step *s, const void *query, void *out) {
    int64_t *first = reserve(&c->buffers[TILES], (s->rows + 1) * sizeof(int64_t));
    if (!first)
        return -1;
    const tiling tiles = tile_rows_of(s, heads, kv_heads, head_dim, pool_threads(c->threads), first);
    if (reserve_own(c, 2 * tiles.floats - tiles.before))
        return -1;
    attend_job j = {
        .c = c, .heads = heads, .kv_heads = kv_heads, .head_dim = head_dim, .window = window, .slopes = slopes,
        .scale = scale, .s = s, .query = query, .out = out, .tiles = tiles,
    };
    pool_each(c->threads, tiles.tiles * kv_heads, 1, attend_work, &j);
    return 0;
}

static int norm(context *c, int64_t rows, int64_t size, const void *x, const float *weight, double eps, void *out) {
    if (reserve_own(c, size))
        return -1;
    float *own = c->own[0].memory;
    for (int64_t row = 0; row < rows; row++) {
        size_t at = row * size * size_of(c->dtype);
        to_floats(own, (const char *)x + at, size, c->dtype);
        norm_row(own, weight, eps, size, own);
        from_floats((char *)out + at, own, size, c->dtype);
    }
    return 0;
}

/* The same with the weight in the context's type. */
static int norm_as_given(context *c, int64_t rows, int64_t size, const void *x, const void *weight, double eps,
                         void *out) {
    float *factors = reserve(&c->buffers[SUMS], size * 4);
    if (!factors)
        return -1;
    to_floats(factors, weight, size, c->dtype);
    return norm(c, rows, size, x, factors, eps, out);
}
