/* OpenMP where it was built in, and what a fork changes. */
#ifndef BERTINPUT_THREADS_H
#define BERTINPUT_THREADS_H

#ifdef _OPENMP
#include <omp.h>
#define BI_OPENMP _OPENMP
#else
#define BI_OPENMP 0
#define omp_get_max_threads() 1
#endif

/* A forked child has none of its parent's threads, and GCC's OpenMP runtime waits for them for
 * ever once the parent (this package, or another library on the same runtime) ever ran a team.
 * So a child stays on one thread. pthread_atfork serves forks made in C too. */
static volatile int bi_forked = 0;

#ifdef _WIN32
static int bi_watch_forks(void) { return 0; }
#else
#include <pthread.h>
static void bi_mark_child(void) { bi_forked = 1; }
static int bi_watch_forks(void) { return pthread_atfork(NULL, NULL, bi_mark_child); }
#endif

#endif
