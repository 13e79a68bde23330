/* Where processes of one machine wait for each other, by counters in memory that they share. */
#include "waiting.h"

#include <sched.h>
#include <stdatomic.h>

/* Nanoseconds of waiting after which a process sleeps between its looks, and of such a sleep. */
enum { AWAKE = 2000000, SLEEP = 100000 };

/* Say that this process has come for the time `number`, and wait for the others: 1 once all have come, 0 if some have not
   within `patience` nanoseconds. It may then be called again. */
int specdec_barrier_wait(_Atomic uint64_t *own, _Atomic uint64_t *const *others, int64_t count, uint64_t number,
                         int64_t patience) {
    atomic_store_explicit(own, number, memory_order_release);
    int64_t rounds = 0, since = 0;
    for (int64_t i = 0; i < count; i++)
        while (atomic_load_explicit(others[i], memory_order_acquire) < number) {
            if (rounds++ < ROUNDS_BUSY) {
                pause_briefly();
                continue;
            }
            const int64_t now = nanoseconds();
            since = since ? since : now;
            if (now - since > patience)
                return 0;
            if (now - since < AWAKE)
                sched_yield();
            else
                nanosleep(&(struct timespec){0, SLEEP}, NULL);
        }
    return 1;
}
