/* For x86 processors with AVX2, FMA and F16C. */
#if defined(__x86_64__)
#define FORM_TARGET "avx2,fma,f16c"
#define FORM_AVX2
#define FORM avx2_form
#define FORM_NAME "avx2"
#include "form.h"
#endif
