/* parallel.h: sharing a range of work among the threads of an OpenMP team.
 *
 * Invariant: work under the grain, and work on a thread whose team is one, runs in the caller
 * with no call into the OpenMP runtime. `fn` must give the same result however its range is
 * cut.
 * To use it: write a function of [begin, end) and a context, and choose a grain of some 10 us
 * of work.
 */
#ifndef ORR_PARALLEL_H
#define ORR_PARALLEL_H

#include "vector.h"

#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef void orr_range_fn(const void *context, int64_t begin, int64_t end);

/* Cuts are multiples of 64 elements, so that two threads do not share a cache line. */
static inline void orr_parallel(int64_t n, int64_t grain, orr_range_fn *fn,
                                const void *context) {
#ifdef _OPENMP
  if (n > grain && !omp_in_parallel() && omp_get_max_threads() > 1) {
    int64_t most = (n + grain - 1) / grain;
    int threads = omp_get_max_threads() < most ? omp_get_max_threads() : (int)most;
#pragma omp parallel num_threads(threads)
    {
      int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
      int64_t unit = n >= 64 * team ? 64 : 1, units = (n + unit - 1) / unit;
      int64_t begin = units * me / team * unit, end = units * (me + 1) / team * unit;
      if (end > n) end = n;
      if (begin < end) fn(context, begin, end);
    }
    return;
  }
#else
  (void)grain;
#endif
  if (n > 0) fn(context, 0, n);
}

#endif
