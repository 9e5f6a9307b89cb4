/* sort.cpp: sort.cu against the CPU's, values and indices equal to the bit.
 *
 * Invariant: rows come of one tile, of several, and of more than a tile keeps; equal elements,
 * both zeros, infinities and NaN among them.
 * To add a check: check.h.
 */
#include "check.h"

extern "C" {
#include "../../../kernels/sort.h"

int orr_cuda_sort(const orr_view *x, int dim, bool descending, const orr_view *values,
                  const orr_view *indices);
int orr_cuda_topk(const orr_view *x, int dim, bool largest, const orr_view *values,
                  const orr_view *indices);
}

static orr_dtype any_dtype(Random &r) { return (orr_dtype)r.below(ORR_N_DTYPES); }
static Lie any_lie(Random &r) { return r.once_in(2) ? ROW_MAJOR : ANY_LIE; }

static Shape sorted_shape(Random &r, int dim) {
  static const int64_t lengths[] = {1, 2, 3, 31, 64, 100, 513, 1500, 2048, 2049, 4096, 5000};
  Shape s((size_t)r.from(1, 3), 1);
  int64_t left = 30;
  for (int64_t &n : s) n = 1 + r.below(left), left = left / n + 1;
  if (r.once_in(20)) s[0] = 0;
  size_t at = (size_t)dim % s.size();
  s[at] = lengths[r.below(12)];
  if (s[at] > 600)
    for (size_t d = 0; d < s.size(); d++)
      if (d != at && s[d] > 2) s[d] = 2;
  return s;
}

/* Few different numbers, so that the order of equal ones shows. */
static void fill_often_equal(Random &r, const Array &x) {
  fill(r, x, -9, 9, 20);
  if (r.once_in(2)) return;
  for (int64_t i = 0, n = count(x); i < n; i++)
    put(x, i, (double)r.below(5) - (r.once_in(2) ? 0 : 2));
  for (int64_t i = 0, n = count(x); i < n; i++)
    if (get(x, i) == 0 && r.once_in(2)) put(x, i, -0.0);
}

static void run(Random &r, bool all) {
  int dim = (int)r.below(3);
  Shape shape = sorted_shape(r, dim), out = shape;
  dim %= (int)shape.size();
  int64_t len = shape[(size_t)dim], k = len;
  if (!all) {
    static const int64_t most[] = {3, 60, 512, 5000};
    int64_t m = most[r.below(4)];
    k = r.below((m < len ? m : len) + 1);
  }
  out[(size_t)dim] = k;
  Array x = make(r, any_dtype(r), shape, any_lie(r), r.once_in(6));
  Array values = make(r, x.view.dtype, out, any_lie(r)), values_too = copy_of(values);
  Array at = make(r, r.once_in(4) ? ORR_I32 : ORR_I64, out, any_lie(r)), at_too = copy_of(at);
  bool falls = r.once_in(2), with_values = !r.once_in(5);
  const orr_view *v = with_values ? &values.view : NULL,
                 *u = with_values ? &values_too.view : NULL;
  fill_often_equal(r, x);
  check_now += " " + text_of(x) + " dim " + std::to_string(dim) + " k " + std::to_string(k);
  size_t room = all ? orr_k_sort_scratch(x, dim) : orr_k_topk_scratch(x, dim, k);
  std::vector<char> scratch(room + 16);
  if (all) {
    orr_k_sort(x, dim, falls, v, at, scratch.data());
    orr_cuda_sort(x, dim, falls, u, at_too);
  } else {
    orr_k_topk(x, dim, falls, v, at, scratch.data());
    orr_cuda_topk(x, dim, falls, u, at_too);
  }
  same(values, values_too, 0);
  same(at, at_too, 0);
}

static void sort(Random &r) { run(r, true); }
static void topk(Random &r) { run(r, false); }

/* A row of three passes of tiles. */
static void long_topk(Random &r) {
  int64_t len = 150000 + r.below(9000), k = r.from(200, 512);
  Array x = make(r, ORR_F32, {len}), v = make(r, ORR_F32, {k}), u = copy_of(v);
  Array i = make(r, ORR_I64, {k}), j = copy_of(i);
  std::vector<char> scratch(orr_k_topk_scratch(x, 0, k));
  fill_often_equal(r, x);
  orr_k_topk(x, 0, true, v, i, scratch.data());
  orr_cuda_topk(x, 0, true, u, j);
  same(v, u, 0), same(i, j, 0);
}

/* More rows than the room takes at once (which for the fake is little). */
static void rounds(Random &r) {
  int64_t rows = r.from(11, 14), len = r.from(4097, 4300), k = r.once_in(2) ? 512 : 2000;
  Array x = make(r, ORR_F16, {rows, len}), v = make(r, ORR_F16, {rows, k}), u = copy_of(v);
  Array i = make(r, ORR_I64, {rows, k}), j = copy_of(i);
  std::vector<char> scratch(orr_k_topk_scratch(x, 1, k));
  fill_often_equal(r, x);
  orr_k_topk(x, 1, false, v, i, scratch.data());
  orr_cuda_topk(x, 1, false, u, j);
  same(v, u, 0), same(i, j, 0);
}

const std::vector<Check> checks = {{"sort", 120, sort},
                                   {"topk", 120, topk},
                                   {"long_topk", 1, long_topk},
                                   {"rounds", 4, rounds}};
