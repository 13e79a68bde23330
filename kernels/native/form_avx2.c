/* For x86 processors with AVX2, FMA and F16C. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define FORM_AVX2
#define FORM avx2_form
#define FORM_NAME "avx2"
#include "form.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
