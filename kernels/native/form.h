/* The operations, compiled for the processor that the including file names by `FORM_*`; FORM is their table. */
#if defined(FORM_TARGET)
#define PRAGMA_OF(words) _Pragma(#words)
#define PRAGMA(words) PRAGMA_OF(words)
#if defined(__clang__)
PRAGMA(clang attribute push(__attribute__((target(FORM_TARGET))), apply_to = function))
#else
PRAGMA(GCC target(FORM_TARGET))
#endif
#endif

#include <float.h>
#include <math.h>
#include <string.h>

#if defined(FORM_AVX2) || defined(FORM_AVX512)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "native.h"
#include "vectors.h"
/* In this order: each uses those before it. */
#include "quantized.h"
#include "tiles.h"
#include "quantized_tiles.h"
#include "integer_products.h"
#if defined(FORM_AMX)
#include "amx_tiles.h"
#endif
#include "products.h"
#include "kv_entries.h"
#include "adapters.h"
#include "seen_keys.h"
#if defined(FORM_AMX)
#include "amx_attention.h"
#endif
#include "attention.h"
#include "layers.h"
#include "target.h"
#include "sampling.h"
#include "noise.h"
#include "filters.h"
#include "walks.h"
#include "search.h"
#include "drafting.h"
#include "edges.h"
#include "block.h"

#if defined(FORM_PAIRS)
enum { HAS_PAIRS = 1 };
#else
enum { HAS_PAIRS = 0 };
#endif

const form FORM = {
    .name = FORM_NAME, .has_pairs = HAS_PAIRS, .product = run_product_beside, .rows = read_rows, .run_layer = run_layer, .attend = attend,
    .norm = norm_as_given, .run_pass = run_pass, .noise = noise, .filter = filter, .run_walks = run_walks,
    .run_drafting = run_drafting, .run_block_drafting = run_block_drafting,
};

#if defined(FORM_TARGET) && defined(__clang__)
#pragma clang attribute pop
#endif
