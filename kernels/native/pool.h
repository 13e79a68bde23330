/* Threads that run one function together, with barriers in it. */
#ifndef SPECDEC_POOL_H
#define SPECDEC_POOL_H

typedef struct pool pool;
typedef void (*pool_job)(pool *, int thread, void *argument);

/* Start `threads - 1` threads that sleep until work comes; NULL without memory or threads. */
pool *pool_open(int threads);
void pool_close(pool *);
int pool_threads(const pool *);

/* Run `job` on every thread, the caller's as thread 0, and return when all have finished. */
void pool_run(pool *, pool_job job, void *argument);

/* Wait, inside a job, until every thread has come here. */
void pool_barrier(pool *);

#endif
