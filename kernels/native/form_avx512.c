/* For x86 processors with AVX-512 (F, BW, VL, DQ) and without products of bfloat16. */
#if defined(__x86_64__)
#define FORM_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"
#define FORM_AVX512
#define FORM avx512_form
#define FORM_NAME "avx512"
#include "form.h"
#endif
