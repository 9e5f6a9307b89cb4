/* reduce.cpp: reduce.cu, arg_reduce.cu, list.cu and scan.cu against the CPU's.
 *
 * Invariant: shapes come that make each way of reducing: one lane, a warp, a block, columns,
 * splits; steps of one element and of several, with a rest.
 * To add a check: check.h.
 */
#include "check.h"

extern "C" {
#include "../../../kernels/optim.h"
#include "../../../kernels/reduce.h"

void orr_cuda_reduce(orr_reduce_kind kind, const orr_view *x, unsigned mask, const orr_view *y);
void orr_cuda_sum_pow(const orr_view *x, unsigned mask, double p, const orr_view *y);
void orr_cuda_arg_reduce(orr_reduce_kind kind, const orr_view *x, int dim,
                         const orr_view *values, const orr_view *indices, int64_t offset);
void orr_cuda_cumsum(const orr_view *x, int dim, bool reverse, const orr_view *y);
void orr_cuda_cumprod(const orr_view *x, int dim, const orr_view *y);
void orr_cuda_cumprod_back(const orr_view *x, const orr_view *y, const orr_view *g, int dim,
                           const orr_view *gx);
void orr_cuda_list_norm(const orr_view *const *xs, int n, double p, const orr_view *out);
void orr_cuda_list_bad(const orr_view *const *xs, int n, const orr_view *out);
void orr_cuda_list_scale(const orr_view *const *xs, int n, const orr_view *by, double factor);
}

static orr_dtype any_dtype(Random &r) { return (orr_dtype)r.below(ORR_N_DTYPES); }

/* Shapes for each way of reducing, and plain random ones. */
static Shape any_shape(Random &r, unsigned *mask) {
  int way = (int)r.below(9);
  int64_t odd = r.below(9);
  *mask = 1u << (way & 1);
  switch (way) {
    case 0: return {1 + odd, 5000 + odd * odd};        /* columns, few: splits down */
    case 1: return {1 + odd, 4096 * odd + 3000 + odd}; /* long rows, splits */
    case 2: return {700 + odd, 40 + odd};              /* columns in splits */
    case 3: return {4200 + odd, 1 + odd};              /* a lane a row */
    case 4: return {5 + odd, 4100 + odd};              /* a lane a column */
    case 5: return {60 + odd, 64 * (1 + odd)};         /* a warp a row */
    case 6: *mask = 5; return {6, 30 + odd, 40};       /* as batch norm */
    default: {
      int ndim = (int)r.below(5);
      *mask = (unsigned)r.below(1 << ndim);
      return random_shape(r, ndim, 20000);
    }
  }
}

static Shape reduced(Shape s, unsigned mask) {
  for (size_t d = 0; d < s.size(); d++) {
    if (mask >> d & 1) s[d] = 1;
  }
  return s;
}

static double numbers_in_one(const Shape &s, unsigned mask) {
  double n = 1;
  for (size_t d = 0; d < s.size(); d++) {
    if (mask >> d & 1) n *= (double)s[d];
  }
  return n;
}

static void reduce(Random &r) {
  unsigned mask;
  Shape shape = any_shape(r, &mask);
  orr_dtype dtype = any_dtype(r);
  int kind = (int)r.below(ORR_REDUCE_COUNT + 2); /* one more: a power */
  bool counts = kind == ORR_REDUCE_ANY || kind == ORR_REDUCE_ALL;
  Array x = make(r, dtype, shape, r.once_in(3) ? ANY_LIE : ROW_MAJOR, r.once_in(5));
  orr_dtype out = counts ? ORR_BOOL : dtype;
  if (!counts && dtype == ORR_BOOL) out = ORR_I64;
  if (!counts && r.once_in(4)) out = is_float(dtype) ? (orr_dtype)r.below(2) : ORR_I64;
  Array y = make(r, out, reduced(shape, mask)), z = copy_of(y);
  double n = numbers_in_one(shape, mask);
  bool product = kind == ORR_REDUCE_PROD;
  if (product) fill(r, x, 0.97, 1.03);
  else fill(r, x, -2, 3, r.once_in(3) ? 2000 : 0);
  check_now += " kind " + std::to_string(kind) + " mask " + std::to_string(mask) + " " +
               text_of(x) + " to " + text_of(y);
  if (kind > ORR_REDUCE_COUNT) {
    double p = is_float(dtype) ? r.real(0.5, 3.5) : 3;
    orr_k_sum_pow(x, mask, p, y);
    orr_cuda_sum_pow(x, mask, p, z);
  } else {
    orr_k_reduce((orr_reduce_kind)kind, x, mask, y);
    orr_cuda_reduce((orr_reduce_kind)kind, x, mask, z);
  }
  double tolerance = tolerance_of(out);
  if (dtype != ORR_F64 && is_float(dtype) && tolerance < 4e-6) tolerance = 4e-6;
  if (product) tolerance *= 1 + std::sqrt(n) / 4;
  same(y, z, tolerance, product ? 1 : std::sqrt(n) + 1);
}

static void arg_reduce(Random &r) {
  unsigned mask;
  Shape shape = any_shape(r, &mask);
  if (shape.empty()) return;
  int dim = (int)r.below((int64_t)shape.size());
  orr_dtype dtype = any_dtype(r);
  orr_reduce_kind kind = r.once_in(2) ? ORR_REDUCE_MAX : ORR_REDUCE_MIN;
  int64_t offset = r.below(5);
  Array x = make(r, dtype, shape, r.once_in(3) ? ANY_LIE : ROW_MAJOR, r.once_in(5));
  Shape out = reduced(shape, 1u << dim);
  Array i = make(r, ORR_I64, out), j = copy_of(i), v = make(r, dtype, out), w = copy_of(v);
  fill(r, x, -20, 20, r.once_in(2) ? 3000 : 0);
  bool values = !r.once_in(3);
  check_now += " dim " + std::to_string(dim) + " " + text_of(x);
  orr_k_arg_reduce(kind, x, dim, values ? &v.view : NULL, i, offset);
  orr_cuda_arg_reduce(kind, x, dim, values ? &w.view : NULL, j, offset);
  same(i, j, 0);
  same(v, w, 0);
}

static void scan(Random &r) {
  unsigned mask;
  Shape shape = any_shape(r, &mask);
  if (r.once_in(6)) shape = {r.from(1, 3), r.from(20000, 40000)};
  if (shape.empty()) return;
  int dim = (int)r.below((int64_t)shape.size());
  orr_dtype dtype = any_dtype(r), out = is_float(dtype) ? dtype : ORR_I64;
  Array x = make(r, dtype, shape, r.once_in(3) ? ANY_LIE : ROW_MAJOR, r.once_in(5));
  Array y = make(r, out, shape, r.once_in(3) ? ANY_LIE : ROW_MAJOR), z = copy_of(y);
  bool product = r.once_in(3), reverse = r.once_in(2);
  double n = (double)shape[(size_t)dim];
  if (product) fill(r, x, 0.97, 1.03);
  else fill(r, x, -2, 2);
  check_now += " dim " + std::to_string(dim) + " " + text_of(x) + " to " + text_of(y);
  if (product) {
    orr_k_cumprod(x, dim, y);
    orr_cuda_cumprod(x, dim, z);
  } else {
    orr_k_cumsum(x, dim, reverse, y);
    orr_cuda_cumsum(x, dim, reverse, z);
  }
  same(y, z, product ? tolerance_of(out) * (1 + std::sqrt(n) / 4) : -1,
       product ? 1 : std::sqrt(n) + 1);
}

static void cumprod_back(Random &r) {
  unsigned mask;
  Shape shape = any_shape(r, &mask);
  if (shape.empty()) return;
  int dim = (int)r.below((int64_t)shape.size());
  orr_dtype dtype = r.once_in(2) ? ORR_F64 : ORR_F32;
  double n = (double)shape[(size_t)dim];
  Array x = make(r, dtype, shape, ANY_LIE, r.once_in(6)), y = make(r, dtype, shape);
  Array g = make(r, dtype, shape, ANY_LIE, r.once_in(4)), a = make(r, dtype, shape);
  Array b = copy_of(a);
  fill(r, g, -1, 1);
  int zeros = (int)r.below(4);
  for (int64_t i = 0; i < count(x); i++) {
    bool zero = zeros > 0 && r.once_in(zeros == 1 ? 5 : zeros == 2 ? 300 : 5000);
    put(x, i, zero ? 0 : 1 + r.real(-0.02, 0.02));
  }
  check_now += " dim " + std::to_string(dim) + " " + text_of(x);
  orr_k_cumprod(x, dim, y);
  orr_k_cumprod_back(x, y, g, dim, a);
  orr_cuda_cumprod_back(x, y, g, dim, b);
  double most = 1; /* terms of both signs may be far larger than their sum */
  for (int64_t i = 0; i < count(y); i++) most = std::fmax(most, std::fabs(get(y, i)));
  same(a, b, tolerance_of(dtype) * (1 + std::sqrt(n) / 4), most * (std::sqrt(n) + 1));
}

/* ---- lists ---- */

struct List {
  std::vector<Array> arrays;
  std::vector<const orr_view *> views;
};

static List any_list(Random &r, int n) {
  List l;
  for (int k = 0; k < n; k++) {
    int64_t most = r.once_in(9) ? 60000 : 500;
    Shape shape = random_shape(r, (int)r.from(0, 4), most);
    if (most > 500) shape = {r.from(1, 3), 16384 + r.below(20)};
    l.arrays.push_back(make(r, (orr_dtype)r.below(4), shape));
    fill(r, l.arrays.back(), -2, 2);
  }
  for (Array &a : l.arrays) l.views.push_back(a);
  return l;
}

static void list_norm(Random &r) {
  int n = r.once_in(4) ? (int)r.from(60, 200) : (int)r.below(8);
  List l = any_list(r, n);
  double p = r.once_in(3) ? 2 : r.once_in(2) ? INFINITY : r.real(0.5, 3), total = 0;
  if (n > 0 && r.once_in(4)) {
    Array &a = l.arrays[(size_t)r.below(n)];
    if (count(a) > 0) put(a, r.below(count(a)), NAN);
  }
  for (const orr_view *x : l.views) {
    for (int64_t i = 0; i < count(x); i++) {
      double a = std::fabs(get(x, i));
      if (!std::isinf(p)) total += std::pow(a, p);
      else if (a > total || a != a) total = a;
    }
  }
  Array out = make(r, r.once_in(2) ? ORR_F64 : ORR_F32, {}), mine = copy_of(out);
  put(out, 0, total);
  orr_cuda_list_norm(l.views.data(), n, p, mine);
  same(out, mine, out.view.dtype == ORR_F64 ? 1e-10 : 1e-6);
}

static void list_bad(Random &r) {
  int n = r.once_in(4) ? (int)r.from(60, 200) : (int)r.below(8), bad = 0;
  List l = any_list(r, n);
  for (Array &a : l.arrays) {
    if (count(a) == 0 || r.once_in(2)) continue;
    int64_t times = r.from(1, 3);
    while (times-- > 0) put(a, r.below(count(a)), r.once_in(2) ? NAN : -INFINITY);
    bad++;
  }
  Array out = make(r, ORR_F64, {}), mine = copy_of(out);
  put(out, 0, bad);
  orr_cuda_list_bad(l.views.data(), n, mine);
  same(out, mine, 0);
}

static void list_scale(Random &r) {
  int n = r.once_in(4) ? (int)r.from(60, 200) : (int)r.below(8);
  List l = any_list(r, n), m;
  for (Array &a : l.arrays) m.arrays.push_back(copy_of(a));
  for (Array &a : m.arrays) m.views.push_back(a);
  Array by = make(r, r.once_in(2) ? ORR_F64 : ORR_F32, {});
  put(by, 0, r.real(-2, 2));
  double factor = r.real(-2, 2);
  bool given = r.once_in(2);
  orr_cuda_list_scale(m.views.data(), n, given ? &by.view : NULL, factor);
  for (Array &a : l.arrays) orr_k_scale(a, given ? get(by, 0) : factor);
  for (int k = 0; k < n; k++) same(l.arrays[(size_t)k], m.arrays[(size_t)k], 0);
}

const std::vector<Check> checks = {{"reduce", 150, reduce},
                                   {"arg_reduce", 60, arg_reduce},
                                   {"scan", 60, scan},
                                   {"cumprod_back", 40, cumprod_back},
                                   {"list_norm", 30, list_norm},
                                   {"list_bad", 30, list_bad},
                                   {"list_scale", 30, list_scale}};
