#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Rounds of waiting before a thread lets others run, and before an idle one sleeps. Layers follow each other within
   microseconds; between steps the processor belongs to whatever else computes. */
enum { ROUNDS_BUSY = 2000, ROUNDS_IDLE = 4000 };

struct pool {
    int threads;
    pthread_t *workers;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int sleeping;
    atomic_uint task; /* Counts the jobs given out. */
    atomic_int unfinished;
    atomic_int closing;
    atomic_int arrived;
    atomic_uint barrier; /* Counts the barriers passed. */
    pool_job job;
    void *argument;
};

typedef struct {
    pool *owner;
    int thread;
} worker;

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void wait_round(int *rounds) {
    if (++*rounds < ROUNDS_BUSY)
        pause_briefly();
    else
        sched_yield();
}

static void *work(void *given) {
    worker self = *(worker *)given;
    free(given);
    pool *p = self.owner;
    unsigned done = 0;
    for (;;) {
        for (int rounds = 0; atomic_load_explicit(&p->task, memory_order_acquire) == done; rounds++) {
            if (rounds < ROUNDS_IDLE) {
                pause_briefly();
                continue;
            }
            pthread_mutex_lock(&p->lock);
            atomic_fetch_add(&p->sleeping, 1);
            while (atomic_load(&p->task) == done)
                pthread_cond_wait(&p->wake, &p->lock);
            atomic_fetch_sub(&p->sleeping, 1);
            pthread_mutex_unlock(&p->lock);
        }
        done++;
        if (atomic_load(&p->closing))
            return NULL;
        p->job(p, self.thread, p->argument);
        atomic_fetch_sub_explicit(&p->unfinished, 1, memory_order_release);
    }
}

static void give_out(pool *p) {
    /* A thread that is about to sleep has either been counted, or sees the new task. */
    atomic_fetch_add(&p->task, 1);
    if (atomic_load(&p->sleeping)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
}

pool *pool_open(int threads) {
    pool *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->threads = 1;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->workers = calloc(threads, sizeof *p->workers);
    for (int t = 1; p->workers && t < threads; t++) {
        worker *given = malloc(sizeof *given);
        if (!given)
            break;
        *given = (worker){p, t};
        if (pthread_create(&p->workers[t], NULL, work, given)) {
            free(given);
            break;
        }
        p->threads++;
    }
    if (p->threads == threads)
        return p;
    pool_close(p);
    return NULL;
}

void pool_close(pool *p) {
    atomic_store(&p->closing, 1);
    give_out(p);
    for (int t = 1; t < p->threads; t++)
        pthread_join(p->workers[t], NULL);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->wake);
    free(p->workers);
    free(p);
}

int pool_threads(const pool *p) { return p->threads; }

void pool_run(pool *p, pool_job job, void *argument) {
    p->job = job;
    p->argument = argument;
    atomic_store(&p->unfinished, p->threads - 1);
    if (p->threads > 1)
        give_out(p);
    job(p, 0, argument);
    for (int rounds = 0; atomic_load_explicit(&p->unfinished, memory_order_acquire);)
        wait_round(&rounds);
}

void pool_barrier(pool *p) {
    if (p->threads == 1)
        return;
    unsigned passed = atomic_load_explicit(&p->barrier, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) == p->threads - 1) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&p->barrier, 1, memory_order_release);
        return;
    }
    for (int rounds = 0; atomic_load_explicit(&p->barrier, memory_order_acquire) == passed;)
        wait_round(&rounds);
}
