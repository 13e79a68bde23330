#include "pool.h"
#include "waiting.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Time without a job after which a thread sleeps. Between two calls the host works for a tenth of a millisecond. To wake
   up takes a thread nearly as long, beside a small model's step a third of it. */
enum { IDLE_NANOSECONDS = 400000 };

/* What a thread's share of a job is: claimed by the thread or by the caller, or done. A share's state is four times the
   job's number, plus this. */
enum { CLAIMED = 1, DONE = 2 };

typedef struct {
    _Alignas(64) _Atomic uint64_t state;
} share;

struct pool {
    int threads;
    pthread_t *workers;
    share *shares; /* of each thread */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int asleep; /* whether a thread has gone to sleep since all were woken */
    atomic_int closing;
    /* The job. A thread reads it and then claims its share: if the share was not done yet, neither was the job whose
       number the thread saw, so that it has read that one. */
    _Alignas(64) _Atomic uint64_t number;
    _Atomic int64_t items, group;
    _Atomic(pool_work) work;
    _Atomic(void *) argument;
};

typedef struct {
    pool *owner;
    int thread;
} worker;

/* Do the share of a thread, on that thread or on the caller's, unless somebody else has claimed it. */
static void do_share(pool *p, int owner, int thread, uint64_t number) {
    pool_work work = atomic_load_explicit(&p->work, memory_order_relaxed);
    void *argument = atomic_load_explicit(&p->argument, memory_order_relaxed);
    const int64_t items = atomic_load_explicit(&p->items, memory_order_relaxed);
    const int64_t group = atomic_load_explicit(&p->group, memory_order_relaxed);
    uint64_t before = 4 * (number - 1) + DONE;
    _Atomic uint64_t *state = &p->shares[owner].state;
    /* Looked at first: a failing exchange too would take the memory from the processor that works on the share. */
    if (atomic_load_explicit(state, memory_order_relaxed) != before ||
        !atomic_compare_exchange_strong_explicit(state, &before, 4 * number + CLAIMED, memory_order_acq_rel,
                                                 memory_order_acquire))
        return;
    const int64_t groups = (items + group - 1) / group;
    const int64_t begin = groups * owner / p->threads * group, end = groups * (owner + 1) / p->threads * group;
    if (begin < end)
        work(argument, thread, begin, end < items ? end : items);
    atomic_store_explicit(state, 4 * number + DONE, memory_order_release);
}

static void *wait_for_work(void *given) {
    worker self = *(worker *)given;
    free(given);
    pool *p = self.owner;
    uint64_t number = 0;
    for (;;) {
        int64_t since = 0;
        for (int rounds = 0; atomic_load_explicit(&p->number, memory_order_acquire) == number; rounds++) {
            if (rounds < ROUNDS_BUSY) {
                pause_briefly();
                continue;
            }
            const int64_t now = nanoseconds();
            since = since ? since : now;
            if (now - since < IDLE_NANOSECONDS) {
                sched_yield();
                continue;
            }
            pthread_mutex_lock(&p->lock);
            /* Set again each time: the caller may have cleared it when it woke this thread for a job already done. */
            while (atomic_store(&p->asleep, 1), atomic_load(&p->number) == number)
                pthread_cond_wait(&p->wake, &p->lock);
            pthread_mutex_unlock(&p->lock);
        }
        number = atomic_load(&p->number);
        /* Read after the number: once the pool closes, its number stays the last one and no later wake-up comes. */
        if (atomic_load(&p->closing))
            return NULL;
        do_share(p, self.thread, self.thread, number);
    }
}

/* Begin the next job, and wake who sleeps. A thread that is about to sleep has said so, or sees the new job. */
static uint64_t publish(pool *p) {
    const uint64_t number = atomic_load_explicit(&p->number, memory_order_relaxed) + 1;
    atomic_store(&p->number, number);
    if (atomic_load(&p->asleep) && atomic_exchange(&p->asleep, 0)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
    return number;
}

pool *pool_open(int threads) {
    pool *p = aligned_alloc(64, sizeof *p);
    if (!p)
        return NULL;
    memset(p, 0, sizeof *p);
    p->threads = 1;
    p->shares = aligned_alloc(64, threads * sizeof *p->shares);
    for (int t = 0; p->shares && t < threads; t++)
        atomic_init(&p->shares[t].state, DONE);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->workers = calloc(threads, sizeof *p->workers);
    for (int t = 1; p->workers && p->shares && t < threads; t++) {
        worker *given = malloc(sizeof *given);
        if (!given)
            break;
        *given = (worker){p, t};
        if (pthread_create(&p->workers[t], NULL, wait_for_work, given)) {
            free(given);
            break;
        }
        p->threads++;
    }
    if (p->shares && p->threads == threads)
        return p;
    pool_close(p);
    return NULL;
}

void pool_close(pool *p) {
    atomic_store(&p->closing, 1);
    publish(p);
    for (int t = 1; t < p->threads; t++)
        pthread_join(p->workers[t], NULL);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->wake);
    free(p->workers);
    free(p->shares);
    free(p);
}

int pool_threads(const pool *p) { return p->threads; }

void pool_each(pool *p, int64_t items, int64_t group, pool_work work, void *argument) {
    if (p->threads == 1 || items <= group) {
        if (items)
            work(argument, 0, 0, items);
        return;
    }
    atomic_store_explicit(&p->items, items, memory_order_relaxed);
    atomic_store_explicit(&p->group, group, memory_order_relaxed);
    atomic_store_explicit(&p->work, work, memory_order_relaxed);
    atomic_store_explicit(&p->argument, argument, memory_order_relaxed);
    const uint64_t number = publish(p);
    /* Its own share first, then those of others. */
    for (int owner = 0; owner < p->threads; owner++)
        do_share(p, owner, 0, number);
    for (int owner = 1; owner < p->threads; owner++)
        for (int rounds = 0; atomic_load_explicit(&p->shares[owner].state, memory_order_acquire) != 4 * number + DONE;) {
            if (++rounds < ROUNDS_BUSY)
                pause_briefly();
            else
                sched_yield();
        }
}
