/* Arguments of the operations. `library.py` declares the same structures; every number is a 64-bit integer, so
   that no padding can differ. Rows are packed as in `RaggedRows`; its docstring says what each row sees. */
#ifndef SPECDEC_NATIVE_H
#define SPECDEC_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#include "pool.h"

enum { FLOAT32, BFLOAT16, FLOAT16 }; /* numbers in memory */

enum { KV_INT8 = 16, KV_E4M3, KV_E5M2 }; /* numbers of keys and values in 8 bits, scaled by heads */

/* Numbers of a weight in few bits; FLOAT8 has 4 bits of exponent and 3 of mantissa. */
enum { INT8 = 3, UINT4, FLOAT8 };

/* Scales that are 8-bit multiples of a float16 that 256 inputs share; others are numbers in memory. */
enum { NESTED = 3 };

/* What makes a weight of a number: scale * number, + minimum, or scale * (number - zero). */
enum { NO_OFFSETS, MINIMA, ZEROS };

enum { BLOCK = 16 }; /* columns of a weight that lie side by side */

/* A weight `[columns, depth]` as blocks of 16 columns: `[blocks][depth][16]`, and for bfloat16
   `[blocks][depth / 2][16][2]`, whose pairs are a 32-bit number each. `depth` is even and at least the `inputs` that a
   row has; what is missing is zero.

   In few bits, each column has a scale for every `group` inputs. A block is then, for NESTED scales, `[depth / 256]` of
   16 float16 for scales and 16 for minima, if there are any; and `[groups]` of 16 scales; 16 minima alike, or 16 zeros
   as signed bytes; and the numbers. Those are `[group][16]` bytes, and for UINT4, where `depth` is a multiple of 8,
   `[group / 8][16]` words, with input i of eight from bit 16 * (i % 2) + 4 * (i / 2) on. FLOAT8's scales are multiplied
   by 2^8. */
typedef struct {
    int64_t kind, columns, inputs, depth, blocks;
    int64_t group, scales, offsets; /* of weights in few bits */
    int64_t rounds_inputs; /* whether they may be rounded to 8 bits: not in float32 */
    const void *weight;
    const float *bias; /* [blocks * 16] or NULL */
} matrix;

typedef struct layer {
    int64_t heads, kv_heads, head_dim, hidden, window; /* window: tokens that a row sees, itself included; 0 for all */
    double eps;
    const float *input_norm, *query_norm, *key_norm, *post_norm; /* all but the last may be NULL */
    const float *slopes; /* [heads] of ALiBi, or NULL */
    matrix qkv, output, gate_up, down; /* gate_up: two blocks of gate, two of up, in turn */
    const struct layer *for_many; /* the same with weights that many rows take less time with, or NULL */
} layer;

/* Columns of an adapted product: `up` reads `low[column:]` of each row and adds to the weight's blocks from `first` on;
   where parts lie in turn, to two blocks in each chunk of four. */
typedef struct {
    int64_t first, in_turn, column;
    matrix up;
} lora_part;

enum { MOST_PARTS = 3 };

/* What an adapter adds beside a weight: `low` of the weight's inputs, and of that each part's `up`. Both matrices have
   numbers of the kind that activations have, or such as hold the same. */
typedef struct {
    int64_t parts; /* 0 for nothing */
    matrix low;
    lora_part part[MOST_PARTS];
} lora;

/* Of a product that belongs to no layer, `qkv` alone. */
typedef struct {
    lora qkv, output, gate_up, down;
} layer_adapter;

/* Rows `[begin, end)` of a step whose layers have an adapter. */
typedef struct {
    int64_t begin, end;
    const layer_adapter *layers;
} adapter_rows;

/* The rows of a step, and one layer's cache: slots of `slot_bytes` that begin with `[2 * kv_heads, head_dim]` numbers
   of `kv_kind`. */
typedef struct {
    int64_t rows, words, table_blocks, block_size, first, kv_kind, slot_bytes;
    const int64_t *slots, *request, *tables, *visible, *ancestors, *tree_starts, *lengths;
    const void *cos, *sin; /* [rows, head_dim] */
    void *kv;
    const float *kv_scales; /* [2 * kv_heads] of the checkpoint, or NULL */
    int64_t layer, spans; /* number of the layer; of adapted rows, 0 for none */
    const adapter_rows *adapted;
    const int64_t *firsts; /* [requests]: first entry that a request's rows see; NULL where it is `first` for all */
} step;

/* Kinds of heads, by the input of their first layer. */
enum { WITHOUT_FEATURES, WITH_INPUT_PRODUCT, WITH_NORMS };

/* A draft head. WITHOUT_FEATURES: layers over the embedding. WITH_INPUT_PRODUCT: `input` of embedding and feature side
   by side. WITH_NORMS: both normed, side by side, beside the feature as residual. */
typedef struct {
    int64_t kind, hidden, layers, residual_is_normed, states_are_normed;
    double eps;
    const void *embedding; /* of all tokens; or */
    const matrix *packed_embedding;
    const float *embed_norm, *state_norm, *norm; /* norm: before the output, or of the states; or NULL */
    const layer *const *layer;
    const int64_t *tokens; /* the output's, or NULL for all in order */
    matrix input, output;
} draft_head;

enum { LARGEST_WIDTH = 64 };

/* A target, and what a head reads of it: nothing, its states behind the last norm, or a product of the inputs of `taps`
   layers side by side (`tap[i]` is `layers` for the stream behind the last). */
enum { NO_FEATURES, STATES_AS_FEATURES, TAPS_AS_FEATURES };

typedef struct {
    int64_t hidden, layers, features, taps;
    double eps;
    const void *embedding; /* of all tokens; or */
    const matrix *packed_embedding;
    const float *norm;
    const layer *const *layer;
    const int64_t *tap;
    matrix output, feature;
} target;

/* A pass of the target over `requests` chains of `known` tokens behind `cached` ones, each with a tree of `nodes` behind
   it, of which `scored` tokens of the chain and all nodes get logits. */
typedef struct {
    int64_t requests, table_blocks, block_size, kv_bytes, kv_kind, slot_bytes;
    const int64_t *tokens; /* of each request in turn: its chain's, then its nodes' */
    const int64_t *cached, *known, *nodes, *scored, *tables; /* [requests]; [requests][table_blocks] */
    const int64_t *parents; /* of all nodes: a node of the same tree, -1 for the root */
    const void *rotary;     /* [positions][2][head_dim] */
    void *kv;               /* [layers] of `kv_bytes` */
    const float *kv_scales; /* [layers][2 * kv_heads] of the checkpoint, or NULL */
    void *feature_cache;    /* [slots][hidden] of the feature, or NULL */
    void *logits;           /* [scored tokens and nodes][vocabulary] */
    int64_t spans;
    const adapter_rows *adapted; /* [spans] */
} pass;

/* A call of the drafter: of `rows` requests the head reads the tokens `[starts, ends)`, whose rows see entries from
   `firsts` on, and under the last ones of the first `trees` it drafts trees: `width` children of a node, `width` nodes
   expanded a level. */
typedef struct {
    int64_t rows, trees, width, table_blocks, block_size, first, kv_bytes, kv_kind, slot_bytes;
    int64_t most; /* nodes of the largest tree */
    double least_reach; /* probability of a frontier below which a row's search ends */
    const int64_t *tokens, *starts, *ends; /* of all rows in turn; [rows]; [rows] */
    const int64_t *firsts, *tables; /* [rows]; [rows][table_blocks] */
    const int64_t *budgets, *depths; /* [trees]: most nodes and levels, at least 1 */
    const void *features, *rotary; /* [slots][hidden] or NULL; [positions][2][head_dim] */
    void *kv; /* [layers] of `kv_bytes` */
    const float *temperatures; /* [trees] or NULL */
    const float *limits; /* [trees][3] of min_p, top_k and top_p, or NULL */
    const float *const *noise; /* [trees][largest depth] of all tokens each, or NULL; NULL for a row without */
    int64_t *sizes, *nodes, *parents, *ranks; /* [trees]; [trees][most]: tokens, parents (-1 the root), ranks by value */
    float *values; /* [trees][most]: log-probabilities of the nodes' paths */
    const layer_adapter *const *adapters; /* [rows]: layers of each row's adapter, NULL for none; or NULL */
} drafting;

/* A block head: its layers run over `rows` rows under each root, the last token and mask tokens, of which the last
   `slots` predict. `context` makes keys and values of all layers from a feature; its adapters come behind the layers'.
   With a `rank`, `predecessors` of the token before times `successors` of a candidate is added to its score; what
   `markov` gates read is in `joint`. */
enum { VANILLA, GATED, RNN };

typedef struct {
    int64_t hidden, layers, rows, slots, mask, rank, markov;
    double eps;
    const void *embedding; /* of all tokens; or */
    const matrix *packed_embedding;
    const float *hidden_norm, *norm, *key_norms; /* key_norms: [layers][head_dim], or NULL */
    const int64_t *causal; /* [layers]: whether a row sees only the rows before it, besides itself */
    const layer *const *layer;
    const int64_t *tokens, *scorer_rows; /* the output's; the row of `successors` of each token; or NULL for all in order */
    const void *predecessors, *successors; /* [tokens][rank] */
    const float *joint, *joint_bias; /* [hidden, rank, rank][gates]: of a slot's state, a token, a path's state; [gates] */
    matrix context, output;
} block_head;

/* Key of random numbers, as `NoiseKey`, and their streams. */
typedef struct {
    int64_t seed, sample_index, position;
} noise_key;

enum { TARGET_STREAM, DRAFT_STREAM, COIN_STREAM, RESIDUAL_STREAM };

/* Rules of a walk: recursive rejection sampling, coupled sampling. */
enum { REJECTION, COUPLED };

/* Walks down each row's tree. Scores are `[rows + nodes][size]`: per row its root's, then its nodes'. */
typedef struct {
    int64_t rule, rows, size, kind, levels;
    const void *scores;
    const int64_t *nodes, *sampled; /* [rows]: of each tree; whether it samples, else it follows the argmax */
    const int64_t *tokens, *parents; /* of all nodes: a node of the same tree, -1 for the root */
    const noise_key *keys; /* [rows] */
    const float *const *noise; /* COUPLED: [rows][levels] of [size], that of each depth; 0 where a row has none, or NULL */
    const float *const *draft_probs; /* [rows] of [1 + nodes][size], or NULL */
    int64_t *lengths, *next_tokens, *paths; /* [rows]; [rows]; accepted nodes, where the row's nodes begin */
} walks;

/* Memory of one call: each part is made as large as a call first needs it. */
typedef struct {
    void *memory;
    size_t bytes;
} buffer;

enum {
    STATES, INPUTS, QKV, TILES, MIXED, SUMS, ACTIVATED, LOW, /* of a layer */
    PAIRS, SPARE, FRONTIER, ROTARY, BITS, NUMBERS, SCORES, CANDIDATES, VALUES, /* of a search */
    READ, READ_NUMBERS, /* of the tokens read before it */
    SPANS, /* adapted rows of a drafter's step */
    STREAM, PASS_ROTARY, PASS_NUMBERS, WANTED, TAPPED, /* of a pass of the target */
    BUFFERS
};

typedef struct form form;

typedef struct {
    pool *threads;
    const form *form;
    int64_t dtype; /* of activations */
    buffer buffers[BUFFERS];
    buffer *own; /* of each thread */
    size_t low_bytes; /* a row of LOW */
} context;

/* The operations as compiled for one kind of processor. Each returns 0, or -1 without memory. */
struct form {
    const char *name;
    int has_pairs; /* products of pairs of bfloat16 */
    int (*product)(context *, const matrix *, const step *, int64_t rows, const void *x, void *out);
    int (*rows)(context *, const matrix *, int64_t count, const int64_t *rows, void *out);
    int (*run_layer)(context *, const layer *, const step *, const void *x, const void *residual, void *out);
    int (*attend)(context *, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window,
                  const float *slopes, double scale, const step *, const void *query, void *out);
    int (*norm)(context *, int64_t rows, int64_t size, const void *x, const void *weight, double eps, void *out);
    int (*run_pass)(context *, const target *, const pass *);
    int (*noise)(context *, int64_t count, int64_t size, const noise_key *, int64_t stream, int64_t lane,
                 float *const *out);
    int (*filter)(context *, int64_t rows, int64_t size, float *scores, const float *limits);
    int (*run_walks)(context *, const walks *);
    int (*run_drafting)(context *, const draft_head *, const drafting *);
    int (*run_block_drafting)(context *, const block_head *, const drafting *);
};

extern const form portable_form, avx2_form, avx512_form, avx512_bf16_form;

/* Where the compiler knows the instructions. */
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAS_AMX_FORM
extern const form amx_form;
int amx_runs(void);
#endif

/* The buffer's memory, of at least `bytes`, or NULL. */
void *reserve(buffer *, size_t bytes);

#endif
