/* For x86 processors with AVX-512 (F, BW, VL, DQ) and without products of bfloat16. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
#define FORM_AVX512
#define FORM avx512_form
#define FORM_NAME "avx512"
#include "form.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
