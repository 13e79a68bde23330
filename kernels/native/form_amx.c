/* For x86 processors with AVX-512 (F, BW, VL, DQ, BF16) and tile registers for bfloat16. */
#include "native.h"

#if defined(HAS_AMX_FORM)
#include <sys/syscall.h>
#include <unistd.h>

#include <cpuid.h>

/* Whether the processor has the tiles, and the system lets this process use them. */
int amx_runs(void) {
    /* Tiles, and their products of bfloat16; arch_prctl's request for their registers. */
    enum { TILES = 1 << 24 | 1 << 22, REQUEST = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES) != TILES)
        return 0;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

#define FORM_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c,amx-tile,amx-bf16"
#define FORM_AVX512
#define FORM_PAIRS
#define FORM_AMX /* products of tiles of bfloat16 */
#define FORM amx_form
#define FORM_NAME "amx"
#include "form.h"
#endif
