/* Operations a second that a processor's tile registers reach without memory: sums of four products at a time, whose
   inputs stay in registers. Prints the sum over all threads, in 10^12 a second.

       gcc -O2 -mamx-tile -mamx-bf16 tile_peak.c -o tile_peak -lpthread && ./tile_peak 2 */
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 256, ROUNDS = 4000000 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void *multiply(void *speed) {
    tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.rows[t] = 16;
        shapes.row_bytes[t] = 64;
    }
    _tile_loadconfig(&shapes);
    const double start = seconds();
    for (int i = 0; i < ROUNDS; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    *(double *)speed = 4.0 * ROUNDS * 2 * 16 * 16 * 32 / (seconds() - start) * 1e-12;
    _tile_release();
    return NULL;
}

int main(int count, char **words) {
    const int threads = count > 1 ? atoi(words[1]) : 1;
    pthread_t each[MOST_THREADS];
    double speed[MOST_THREADS], total = 0;
    if (threads < 1 || threads > MOST_THREADS || syscall(SYS_arch_prctl, 0x1023, 18))
        return 1;
    for (int t = 0; t < threads; t++)
        pthread_create(&each[t], NULL, multiply, &speed[t]);
    for (int t = 0; t < threads; t++) {
        pthread_join(each[t], NULL);
        total += speed[t];
    }
    printf("%.3f\n", total);
    return 0;
}
