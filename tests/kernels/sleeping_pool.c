/* Runs the pool of threads with pauses where a thread that goes to sleep and a caller that wakes it can meet. Exits with
   1 if the thread no longer takes part afterwards. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

enum { THREADS = 2, JOBS = 40, MEETINGS = 60 };

static void rest(long nanoseconds) {
    const struct timespec time = {0, nanoseconds};
    nanosleep(&time, NULL);
}

static _Thread_local int is_caller;

static int late_lock(pthread_mutex_t *lock) {
    if (!is_caller)
        rest(1000000);
    return pthread_mutex_lock(lock);
}

static int late_exchange(atomic_int *value, int wanted) {
    /* Longer than a thread waits before it sleeps. */
    rest(4000000);
    return atomic_exchange(value, wanted);
}

#define pthread_mutex_lock late_lock
#undef atomic_exchange
#define atomic_exchange late_exchange
#include "pool.c"

static atomic_int shares[THREADS];

static void work(void *argument, int thread, int64_t begin, int64_t end) {
    (void)argument, (void)begin, (void)end;
    rest(1000000);
    atomic_fetch_add(&shares[thread], 1);
}

static void nothing(void *argument, int thread, int64_t begin, int64_t end) {
    (void)argument, (void)thread, (void)begin, (void)end;
}

int main(void) {
    is_caller = 1;
    pool *threads = pool_open(THREADS);
    if (!threads)
        return 2;
    for (int meeting = 0; meeting < MEETINGS; meeting++) {
        pool_each(threads, THREADS, 1, nothing, NULL);
        /* The thread has waited as long as it does, and is about to sleep. */
        rest(600000);
        pool_each(threads, THREADS, 1, nothing, NULL);
        /* It has said that it sleeps, and found this job. */
        rest(500000 * (1 + meeting % 3));
        pool_each(threads, THREADS, 1, nothing, NULL);
    }
    for (int job = 0; job < JOBS; job++)
        pool_each(threads, THREADS, 1, work, NULL);
    pool_close(threads);
    return atomic_load(&shares[1]) < JOBS / 4;
}
