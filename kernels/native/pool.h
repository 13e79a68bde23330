/* Threads that share a job. */
#ifndef SPECDEC_POOL_H
#define SPECDEC_POOL_H

#include <stdint.h>

typedef struct pool pool;
/* Do the items `begin .. end - 1` of a job, on a thread of this number. */
typedef void (*pool_work)(void *argument, int thread, int64_t begin, int64_t end);

/* Start `threads - 1` threads that sleep until work comes; NULL without memory or threads. */
pool *pool_open(int threads);
void pool_close(pool *);
int pool_threads(const pool *);

/* Do `items` items, a share of whole groups of `group` on each thread. The caller also does the shares of threads that
   have not begun when it is done with its own: nobody waits for a thread whose processor does something else. */
void pool_each(pool *, int64_t items, int64_t group, pool_work, void *argument);

#endif
