/* For every processor: vectors of four floats, which compilers make SSE or NEON of. */
#define FORM portable_form
#define FORM_NAME "portable"
#include "form.h"
