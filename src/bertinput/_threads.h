/* OpenMP where it was built in, and what a fork changes. */
#ifndef BERTINPUT_THREADS_H
#define BERTINPUT_THREADS_H

#include "_pool.h"

#ifdef _OPENMP
#include <omp.h>
#define BI_OPENMP _OPENMP
#else
#define BI_OPENMP 0
#define omp_get_max_threads() 1
#endif

/* Rounding and flushing modes are each thread's own: a team takes over those of its caller, so
 * that they do not split a result in two. */
#include <fenv.h>
typedef fenv_t bi_float_state;
static void bi_get_float_state(bi_float_state *state) { (void)fegetenv(state); }
static void bi_set_float_state(const bi_float_state *state) { (void)fesetenv(state); }

/* A forked child has none of its parent's threads, and GCC's OpenMP runtime waits for them for
 * ever once the parent (this package, or another library on the same runtime) ever ran a team.
 * So a child stays on one thread. pthread_atfork serves forks made in C too. */
static volatile int bi_forked = 0;

#ifdef _WIN32
static int bi_watch_forks(void) { return 0; }
static int bi_team_can_start(int threads) {
    (void)threads;
    return 1;
}
#else
#include <pthread.h>
/* GCC's OpenMP runtime ends the process if it cannot create a thread. So before the caller's
 * thread has its first team of a size, as many threads are created and ended here. */
static void *bi_wait_for_all(void *gate) {
    pthread_mutex_lock((pthread_mutex_t *)gate);
    pthread_mutex_unlock((pthread_mutex_t *)gate);
    return NULL;
}
static int bi_team_can_start(int threads) {
    static __thread int started = 1;
    enum { MOST = 64 };
    pthread_t others[MOST];
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    int count = 0, wanted = threads - 1;
    if (threads <= started)
        return 1;
    pthread_mutex_lock(&gate);
    while (count < wanted && count < MOST &&
           pthread_create(&others[count], NULL, bi_wait_for_all, &gate) == 0)
        count++;
    pthread_mutex_unlock(&gate);
    for (int k = 0; k < count; k++)
        pthread_join(others[k], NULL);
    pthread_mutex_destroy(&gate);
    if (count < wanted)
        return 0;
    started = threads;
    return 1;
}
static void bi_mark_child(void) {
    bi_forked = 1;
    bi_pool_after_fork();
}
static int bi_watch_forks(void) { return pthread_atfork(NULL, NULL, bi_mark_child); }
#endif

#endif
