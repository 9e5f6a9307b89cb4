/* check.h: CUDA kernels against the CPU's, on the CPU: random views, the same call on both
 * tables, and the difference of what they wrote.
 *
 * Invariant: a check fails where a number is off by more than the tolerance of its dtype, where
 * a byte beside a view has changed, or where a launch reports an error.
 * To add a check: a function of (Random &) in a check_*.cpp, named in its `checks` list.
 */
#ifndef ORR_FAKE_CHECK_H
#define ORR_FAKE_CHECK_H

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

extern "C" {
#include "kernel_table.h"
}

extern "C" const orr_kernels orr_kernels_cuda;

struct Random {
  uint64_t state;
  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545F4914F6CDD1Dull >> 11;
  }
  int64_t below(int64_t n) { return (int64_t)(next() % (uint64_t)n); }
  double real(double lo, double hi) { return lo + (hi - lo) * (double)(next() % 100000) / 1e5; }
};

/* A view in memory of its own, with room around it. */
struct Array {
  orr_view view;
  std::vector<char> bytes;
};

std::vector<int64_t> random_shape(Random &r, int ndim, int64_t most);
/* order: 0 row-major, 1 a random order of dims, 2 with gaps, too. */
Array make(Random &r, orr_dtype dtype, const std::vector<int64_t> &shape, int order = 0);
void fill(Random &r, Array &a, double lo, double hi);
void fill_ints(Random &r, Array &a, int64_t lo, int64_t hi);
Array copy_of(const Array &a); /* same strides, same bytes */
/* Runs what was launched, and compares. */
void same(const char *what, const Array &cpu, const Array &cuda, double tolerance = 0);
void drain(const char *what);
double tolerance_of(orr_dtype dtype);

struct Check {
  const char *name;
  void (*run)(Random &);
};
extern const std::vector<Check> checks_elementwise, checks_reduce, checks_rows, checks_index,
    checks_layers;

#endif
