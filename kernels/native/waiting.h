/* Busy waiting, for other threads and for other processes. */
#ifndef SPECDEC_WAITING_H
#define SPECDEC_WAITING_H

#include <stdint.h>
#include <time.h>

/* Rounds of waiting before a thread lets others run. What it waits for mostly comes within microseconds. */
enum { ROUNDS_BUSY = 2000 };

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

#endif
