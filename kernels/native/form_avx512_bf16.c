/* For x86 processors with AVX-512 (F, BW, VL, DQ, BF16). */
#if defined(__x86_64__)
#define FORM_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c"
#define FORM_AVX512
#define FORM_PAIRS /* products of pairs of bfloat16 */
#define FORM avx512_bf16_form
#define FORM_NAME "avx512_bf16"
#include "form.h"
#endif
