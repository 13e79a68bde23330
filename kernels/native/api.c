/* What Python calls. A context belongs to one engine; calls on it do not overlap. */
#include "native.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Bytes. Rows of a long prompt lie in so many small pages that a processor does not remember where all of them are. */
enum { PAGE = 4096, HUGE_PAGE = 2 << 20 };

void *reserve(buffer *b, size_t bytes) {
    if (bytes > b->bytes) {
        const size_t page = bytes > HUGE_PAGE / 4 ? HUGE_PAGE : PAGE;
        free(b->memory);
        b->bytes = (bytes + page - 1) / page * page;
        b->memory = aligned_alloc(page, b->bytes);
        if (!b->memory)
            b->bytes = 0;
#if defined(MADV_HUGEPAGE)
        /* A kernel without such pages refuses, and a buffer of small pages remains. */
        if (b->memory && page == HUGE_PAGE)
            madvise(b->memory, b->bytes, MADV_HUGEPAGE);
#endif
    }
    return b->memory;
}

/* The form of a name if this processor has it; of "" the fastest. Those with products of bfloat16 are for activations
   in bfloat16: with others they would do what `avx512` does. */
static const form *form_named(const char *name, int64_t dtype) {
    const form *found[5];
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
#if defined(HAS_AMX_FORM)
            if (amx_runs())
                found[count++] = &amx_form;
#endif
            found[count++] = &avx512_bf16_form;
        }
        found[count++] = &avx512_form;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        found[count++] = &avx2_form;
#endif
    found[count++] = &portable_form;
    for (int i = 0; i < count; i++)
        if (!*name || !strcmp(name, found[i]->name))
            return found[i]->has_pairs && dtype != BFLOAT16 ? &avx512_form : found[i];
    return NULL;
}

void specdec_close(context *c) {
    if (c->threads) {
        for (int t = 0; c->own && t < pool_threads(c->threads); t++)
            free(c->own[t].memory);
        pool_close(c->threads);
    }
    free(c->own);
    for (int i = 0; i < BUFFERS; i++)
        free(c->buffers[i].memory);
    free(c);
}

/* Version of this interface, the sizes of its structs in the order of `STRUCTURES` of library.py, and 0. Python compares
   them before it makes any other call. The version grows when anything else that both sides must know changes: numbers
   of an enum, a call's arguments, or what a field means. */
const int64_t *specdec_interface(void) {
    enum { VERSION = 5 };
    static const int64_t found[] = {
        VERSION, sizeof(matrix), sizeof(layer), sizeof(lora_part), sizeof(lora), sizeof(layer_adapter), sizeof(step),
        sizeof(draft_head), sizeof(block_head), sizeof(target), sizeof(pass), sizeof(drafting), sizeof(walks), 0,
    };
    return found;
}

/* NULL if the processor lacks the form, or without memory or threads. */
context *specdec_open(const char *form_name, int64_t threads, int64_t dtype) {
    const form *chosen = form_named(form_name, dtype);
    context *c = chosen ? calloc(1, sizeof *c) : NULL;
    if (!c)
        return NULL;
    c->form = chosen;
    c->dtype = dtype;
    c->threads = pool_open((int)threads);
    c->own = calloc(threads, sizeof *c->own);
    if (c->threads && c->own)
        return c;
    specdec_close(c);
    return NULL;
}

const char *specdec_form(const context *c) { return c->form->name; }

/* `s`: adapters of the rows beside a product of no layer, or NULL. */
int specdec_product(context *c, const matrix *m, const step *s, int64_t rows, const void *x, void *out) {
    return c->form->product(c, m, s, rows, x, out);
}

int specdec_rows(context *c, const matrix *m, int64_t count, const int64_t *rows, void *out) {
    return c->form->rows(c, m, count, rows, out);
}

int specdec_layer(context *c, const layer *l, const step *s, const void *x, const void *residual, void *out) {
    return c->form->run_layer(c, l, s, x, residual, out);
}

int specdec_attend(context *c, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window,
                   const float *slopes, double scale, const step *s, const void *query, void *out) {
    return c->form->attend(c, heads, kv_heads, head_dim, window, slopes, scale, s, query, out);
}

int specdec_norm(context *c, int64_t rows, int64_t size, const void *x, const void *weight, double eps, void *out) {
    return c->form->norm(c, rows, size, x, weight, eps, out);
}

int specdec_pass(context *c, const target *t, const pass *p) { return c->form->run_pass(c, t, p); }

int specdec_noise(context *c, int64_t count, int64_t size, const noise_key *keys, int64_t stream, int64_t lane,
                  float *const *out) {
    return c->form->noise(c, count, size, keys, stream, lane, out);
}

int specdec_filter(context *c, int64_t rows, int64_t size, float *scores, const float *limits) {
    return c->form->filter(c, rows, size, scores, limits);
}

int specdec_walk(context *c, const walks *w) { return c->form->run_walks(c, w); }

/* Copy entries of `slot_bytes` between slots of every layer; all are read before any is written. */
int specdec_move(context *c, char *kv, int64_t layers, int64_t layer_bytes, int64_t slot_bytes, int64_t count,
                 const int64_t *source, const int64_t *target) {
    char *kept = reserve(&c->buffers[STREAM], count * slot_bytes);
    if (!kept)
        return -1;
    for (int64_t l = 0; l < layers; l++, kv += layer_bytes) {
        for (int64_t i = 0; i < count; i++)
            memcpy(kept + i * slot_bytes, kv + source[i] * slot_bytes, slot_bytes);
        for (int64_t i = 0; i < count; i++)
            memcpy(kv + target[i] * slot_bytes, kept + i * slot_bytes, slot_bytes);
    }
    return 0;
}

int specdec_draft(context *c, const draft_head *h, const drafting *d) { return c->form->run_drafting(c, h, d); }

int specdec_draft_block(context *c, const block_head *h, const drafting *d) {
    return c->form->run_block_drafting(c, h, d);
}
