/* Adapters of rows beside a product (LoRA, Hu et al. 2021). The two products of an adapter are chains of additions over
   the inputs and over the rank, each in order, and the second is added to the weight's product: so a row's result is the
   same bits whatever adapters other rows have. */

/* Make room for the numbers between the two products, whichever of a layer's products they belong to. */
static int reserve_low(context *c, const step *s) {
    int64_t blocks = 0;
    for (int64_t i = 0; i < s->spans; i++) {
        const layer_adapter *a = s->adapted[i].layers + s->layer;
        const lora *each[] = {&a->qkv, &a->output, &a->gate_up, &a->down};
        for (int k = 0; k < 4; k++)
            blocks = each[k]->parts && each[k]->low.blocks > blocks ? each[k]->low.blocks : blocks;
    }
    c->low_bytes = blocks * BLOCK * 4;
    return reserve(&c->buffers[LOW], s->rows * c->low_bytes + 1) ? 0 : -1;
}

/* One of the four products of an adapter's layer, by its offset. */
INLINE const lora *lora_at(const step *s, int64_t span, size_t offset) {
    return (const lora *)((const char *)(s->adapted[span].layers + s->layer) + offset);
}

typedef struct {
    context *c;
    const step *s;
    size_t offset, x_stride;
    const char *x; /* inputs of the weight, of all rows */
} low_job;

/* Multiply the blocks `[begin, end)` of `low`, counted through all spans of rows, and write them as inputs of `up`. */
static void low_work(void *argument, int thread, int64_t begin, int64_t end) {
    const low_job *j = argument;
    float *own = j->c->own[thread].memory;
    for (int64_t span = 0, start = 0; span < j->s->spans && start < end; span++) {
        const adapter_rows *rows = j->s->adapted + span;
        const lora *a = lora_at(j->s, span, j->offset);
        const int64_t blocks = a->parts ? a->low.blocks : 0, from = start;
        start += blocks;
        if (start <= begin)
            continue;
        int64_t first = begin > from ? begin - from : 0, beyond = end < start ? end - from : blocks;
        const int64_t count = rows->end - rows->begin;
        const int kind = input_kind(&a->part[0].up);
        for (int64_t last; first < beyond; first = last) {
            last = first + CHUNK < beyond ? first + CHUNK : beyond;
            product p = {
                .weight = &a->low, .x = j->x + rows->begin * j->x_stride, .x_stride = j->x_stride, .out = own,
                .out_stride = CHUNK * BLOCK, .first_column = first * BLOCK, .rows = count,
            };
            multiply(&p, first, last);
            for (int64_t row = 0; row < count; row++)
                from_floats((char *)j->c->buffers[LOW].memory + (rows->begin + row) * j->c->low_bytes +
                                first * BLOCK * size_of(kind),
                            own + row * CHUNK * BLOCK, (last - first) * BLOCK, kind);
        }
    }
}

/* Multiply the inputs of a weight with the first matrix of each row's adapter. */
static void run_low(context *c, const step *s, size_t offset, const void *x, size_t x_stride) {
    int64_t blocks = 0;
    for (int64_t span = 0; span < s->spans; span++) {
        const lora *a = lora_at(s, span, offset);
        blocks += a->parts ? a->low.blocks : 0;
    }
    low_job j = {.c = c, .s = s, .offset = offset, .x_stride = x_stride, .x = x};
    pool_each(c->threads, blocks, 1, low_work, &j);
}

/* Add what adapters make of the blocks `[begin, end)` of a weight to its product, rows of `out_stride` floats that begin
   with the weight's column `first_column`. */
static void add_adapters(const context *c, const step *s, size_t offset, float *out, int64_t out_stride,
                         int64_t first_column, int64_t begin, int64_t end) {
    const size_t stride = c->low_bytes;
    for (int64_t span = 0; span < s->spans; span++) {
        const adapter_rows *rows = s->adapted + span;
        const lora *a = lora_at(s, span, offset);
        for (int64_t i = 0; i < a->parts; i++) {
            const lora_part *part = &a->part[i];
            const matrix *up = &part->up;
            const int kind = input_kind(up);
            const char *low =
                (const char *)c->buffers[LOW].memory + rows->begin * stride + part->column * size_of(kind);
            /* Its blocks that lie in the range, and where in the weight the first of them does. */
            int64_t block = begin > part->first ? begin - part->first : 0, last = end - part->first;
            int64_t place = part->first + block;
            if (part->in_turn)
                block = begin / 2, last = end / 2, place = begin + part->first;
            last = up->blocks < last ? up->blocks : last;
            if (block >= last)
                continue;
            float *to = out + rows->begin * out_stride + place * BLOCK - first_column;
            product p = {
                .weight = up, .x = low, .x_stride = stride, .out = to, .out_stride = out_stride,
                .first_column = block * BLOCK, .residual = to - block * BLOCK, .residual_stride = out_stride,
                .rows = rows->end - rows->begin,
            };
            multiply(&p, block, last);
        }
    }
}
