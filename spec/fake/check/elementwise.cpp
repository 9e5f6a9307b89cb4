/* elementwise.cpp: unary.cu, binary.cu, elementwise.cu and copy.cu against the CPU's.
 *
 * Invariant: every row of the tables and every dtype comes up in every run.
 * To add a check: check.h.
 */
#include "check.h"

extern "C" {
#include "../../../kernels/copy.h"
#include "../../../kernels/elementwise.h"
#include "../../../kernels/index.h"

void orr_cuda_unary(int op, const orr_view *x, orr_view *y);
void orr_cuda_unary_grad(int op, const orr_view *x, const orr_view *y, const orr_view *g,
                         orr_view *gx);
void orr_cuda_binary(int op, const orr_view *a, const orr_view *b, orr_view *y);
void orr_cuda_binary_scalar(int op, const orr_view *a, double s, bool scalar_first,
                            orr_view *y);
void orr_cuda_binary_grad(int op, int which, const orr_view *a, const orr_view *b,
                          const orr_view *y, const orr_view *g, orr_view *out);
void orr_cuda_where(const orr_view *c, const orr_view *a, const orr_view *b, orr_view *y);
void orr_cuda_fill(orr_view *y, double value);
void orr_cuda_clamp(const orr_view *x, double lo, double hi, orr_view *y);
void orr_cuda_arange(orr_view *y, double start, double step, int64_t first);
void orr_cuda_eye(orr_view *y, int64_t row0, int64_t col0);
void orr_cuda_tril(const orr_view *x, orr_view *y, int64_t diagonal, int64_t row0,
                   int64_t col0);
void orr_cuda_triu(const orr_view *x, orr_view *y, int64_t diagonal, int64_t row0,
                   int64_t col0);
void orr_cuda_masked_fill(const orr_view *x, const orr_view *mask, double value,
                          const orr_view *y);
void orr_cuda_copy(const orr_view *x, orr_view *y);
void orr_cuda_reduce_many(int kind, const orr_view *const *xs, int n, orr_view *y);
}

static orr_dtype any_dtype(Random &r) { return (orr_dtype)r.below(ORR_N_DTYPES); }
static orr_dtype any_float(Random &r) { return (orr_dtype)r.below(4); }

static Shape any_shape(Random &r) { return random_shape(r, (int)r.below(5), 3000); }

/* One layout for some, as ops make them; any other for the rest. */
static Lie any_lie(Random &r) { return r.once_in(2) ? ROW_MAJOR : ANY_LIE; }

static void unary_row(Random &r, int op, orr_dtype dtype) {
  int flags = orr_unary_flags[op];
  if ((flags & ORR_FLOAT_ONLY) && !is_float(dtype)) return;
  Shape shape = any_shape(r);
  Lie lie = any_lie(r);
  Array x = make(r, dtype, shape, lie, r.once_in(4));
  Array y = make(r, flags & ORR_BOOL_OUT ? ORR_BOOL : dtype, shape, lie), z = copy_of(y);
  fill(r, x, -4, 4, 30);
  check_now = std::string("unary ") + orr_unary_name[op] + " " + text_of(x);
  orr_k_unary(op, x, y);
  orr_cuda_unary(op, x, z);
  same(y, z);
  if (!is_float(dtype)) return;
  Array g = make(r, dtype, shape, lie, r.once_in(4)), gx = make(r, dtype, shape, lie);
  Array out = make(r, dtype, shape, lie), gz = copy_of(gx);
  fill(r, x, 0.1, 4), fill(r, g, -2, 2);
  if (flags & ORR_GRAD_Y) fill(r, out, -0.9, 0.9);
  const orr_view *in_x = flags & ORR_GRAD_X ? &x.view : NULL;
  const orr_view *in_y = flags & ORR_GRAD_Y ? &out.view : NULL;
  orr_k_unary_grad(op, in_x, in_y, g, gx);
  orr_cuda_unary_grad(op, in_x, in_y, g, gz);
  same(gx, gz);
}

static void unary(Random &r) {
  for (int op = 0; op < ORR_N_UNARY; op++) {
    for (int t = 0; t < ORR_N_DTYPES; t++) unary_row(r, op, (orr_dtype)t);
  }
}

static void binary_row(Random &r, int op, orr_dtype dtype) {
  int flags = orr_binary_flags[op];
  if ((flags & ORR_FLOAT_ONLY) && !is_float(dtype)) return;
  Shape shape = any_shape(r);
  Lie lie = any_lie(r);
  double hi = op == ORR_BIN_pow && !is_float(dtype) ? 3 : 5;
  orr_dtype out = flags & ORR_BOOL_OUT ? ORR_BOOL : dtype;
  Array a = make(r, dtype, shape, lie, r.once_in(3)),
        b = make(r, dtype, shape, lie, r.once_in(3));
  Array y = make(r, out, shape, lie), z = copy_of(y);
  fill(r, a, -hi, hi, 40), fill(r, b, -hi, hi, 40);
  check_now =
      std::string("binary ") + orr_binary_name[op] + " " + text_of(a) + " " + text_of(b);
  orr_k_binary(op, a, b, y);
  orr_cuda_binary(op, a, b, z);
  same(y, z);
  double s = is_float(dtype) ? r.real(-2, 2) : (double)r.from(0, 3);
  bool first = r.once_in(2);
  check_now += " scalar " + std::to_string(s) + (first ? " first" : "");
  orr_k_binary_scalar(op, a, s, first, y);
  orr_cuda_binary_scalar(op, a, s, first, z);
  same(y, z);
  if (!is_float(dtype)) return;
  Array g = make(r, dtype, shape, lie, r.once_in(4)), ga = make(r, dtype, shape, lie);
  fill(r, g, -2, 2), fill(r, a, 0.1, 3), fill(r, b, 0.1, 3);
  orr_k_binary(op, a, b, y);
  for (int which = 0; which < 2; which++) {
    Array gz = copy_of(ga);
    check_now = std::string("binary_grad ") + orr_binary_name[op] + " " + text_of(a);
    const orr_view *in_y = flags & ORR_GRAD_Y ? &y.view : NULL;
    orr_k_binary_grad(op, which, flags & ORR_GRAD_A ? &a.view : NULL,
                      flags & ORR_GRAD_B ? &b.view : NULL, in_y, g, ga);
    orr_cuda_binary_grad(op, which, flags & ORR_GRAD_A ? &a.view : NULL,
                         flags & ORR_GRAD_B ? &b.view : NULL, in_y, g, gz);
    same(ga, gz, dtype == ORR_F32 ? 1e-5 : -1);
  }
}

static void binary(Random &r) {
  for (int op = 0; op < ORR_N_BINARY; op++) {
    for (int t = 0; t < ORR_N_DTYPES; t++) binary_row(r, op, (orr_dtype)t);
  }
}

/* An output that is one of its inputs. */
static void in_place(Random &r) {
  orr_dtype dtype = any_float(r);
  Shape shape = any_shape(r);
  Array a = make(r, dtype, shape), b = make(r, dtype, shape, ANY_LIE, true);
  fill(r, a, -3, 3), fill(r, b, -3, 3);
  Array z = copy_of(a);
  orr_k_binary(ORR_BIN_add, a, b, a);
  orr_cuda_binary(ORR_BIN_add, z, b, z);
  same(a, z);
  orr_k_unary(ORR_UN_tanh, a, a);
  orr_cuda_unary(ORR_UN_tanh, z, z);
  same(a, z);
}

static void where(Random &r) {
  orr_dtype dtype = any_dtype(r);
  Shape shape = any_shape(r);
  Array c = make(r, ORR_BOOL, shape, any_lie(r), r.once_in(3));
  Array a = make(r, dtype, shape, any_lie(r), r.once_in(3));
  Array b = make(r, dtype, shape, any_lie(r), r.once_in(3));
  Array y = make(r, dtype, shape, any_lie(r)), z = copy_of(y);
  fill(r, c, 0, 1), fill(r, a, -9, 9, 20), fill(r, b, -9, 9, 20);
  orr_k_where(c, a, b, y);
  orr_cuda_where(c, a, b, z);
  same(y, z, 0);
  double value = r.once_in(3) ? -INFINITY : r.real(-3, 300);
  if (!is_float(dtype)) value = (double)r.from(0, 200);
  orr_k_masked_fill(a, c, value, y);
  orr_cuda_masked_fill(a, c, value, z);
  same(y, z, 0);
}

static void fill_and_clamp(Random &r) {
  orr_dtype dtype = any_dtype(r);
  Shape shape = any_shape(r);
  Array x = make(r, dtype, shape, any_lie(r), r.once_in(4));
  Array y = make(r, dtype, shape, any_lie(r)), z = copy_of(y);
  double value = is_float(dtype) ? r.real(-5, 5) : (double)r.from(0, 100);
  orr_k_fill(y, value);
  orr_cuda_fill(z, value);
  same(y, z, 0);
  fill(r, x, -9, 9, 20);
  double lo = r.once_in(4) ? -INFINITY : r.real(-5, 2),
         hi = r.once_in(4) ? 1e300 : r.real(-2, 5);
  orr_k_clamp(x, lo, hi, y);
  orr_cuda_clamp(x, lo, hi, z);
  same(y, z, 0);
}

static void arange_and_eye(Random &r) {
  orr_dtype dtype = any_dtype(r);
  Array y = make(r, dtype, {r.below(700)}), z = copy_of(y);
  double start = (double)r.from(0, 5), step = r.real(0, 0.3);
  int64_t first = r.below(20);
  orr_k_arange(y, start, step, first);
  orr_cuda_arange(z, start, step, first);
  same(y, z);
  Array e = make(r, dtype, random_shape(r, 2, 2000)), f = copy_of(e);
  int64_t row0 = r.below(9), col0 = r.below(9);
  orr_k_eye(e, row0, col0);
  orr_cuda_eye(f, row0, col0);
  same(e, f, 0);
}

static void triangles(Random &r) {
  orr_dtype dtype = any_dtype(r);
  Shape shape = random_shape(r, (int)r.from(2, 4), 3000);
  Array x = make(r, dtype, shape, ANY_LIE, r.once_in(4)), y = make(r, dtype, shape);
  Array z = copy_of(y);
  int64_t diagonal = r.from(-9, 9), row0 = r.below(9), col0 = r.below(9);
  fill(r, x, -9, 9, 30);
  orr_k_tril(x, y, diagonal, row0, col0);
  orr_cuda_tril(x, z, diagonal, row0, col0);
  same(y, z, 0);
  orr_k_triu(x, y, diagonal, row0, col0);
  orr_cuda_triu(x, z, diagonal, row0, col0);
  same(y, z, 0);
  orr_k_tril(y, y, 1, 0, 0);
  orr_cuda_tril(z, z, 1, 0, 0);
  same(y, z, 0);
}

static void copy(Random &r) {
  orr_dtype from = any_dtype(r), to = r.once_in(3) ? from : any_dtype(r);
  Shape shape = random_shape(r, (int)r.below(5), 9000);
  Array x = make(r, from, shape, any_lie(r), r.once_in(4));
  Array y = make(r, to, shape, any_lie(r)), z = copy_of(y);
  fill(r, x, to >= ORR_U8 ? 0 : -100, 100, is_float(to) ? 30 : 0);
  check_now += " " + text_of(x) + " to " + text_of(y);
  orr_k_copy(x, y);
  orr_cuda_copy(x, z);
  same(y, z, 0);
}

static void all_casts(Random &r) {
  for (int a = 0; a < ORR_N_DTYPES; a++) {
    for (int b = 0; b < ORR_N_DTYPES; b++) {
      Array x = make(r, (orr_dtype)a, {37, 5}), y = make(r, (orr_dtype)b, {37, 5});
      Array z = copy_of(y);
      fill(r, x, b >= ORR_U8 ? 0 : -100, 200, is_float((orr_dtype)b) ? 9 : 0);
      check_now = text_of(x) + " to " + text_of(y);
      orr_k_copy(x, y);
      orr_cuda_copy(x, z);
      same(y, z, 0);
    }
  }
}

/* Channels-last from and to channels-first, and plain matrices. */
static void transposes(Random &r) {
  static const orr_dtype dtypes[] = {ORR_F64, ORR_F32, ORR_BF16, ORR_U8};
  orr_dtype dtype = dtypes[r.below(4)];
  int64_t n = r.from(1, 3), c = r.from(1, 70), h = r.from(1, 20), w = r.from(1, 20);
  Array x = make(r, dtype, {n, c, h, w}, ROW_MAJOR),
        y = make(r, dtype, {n, c, h, w}, ROW_MAJOR);
  int64_t strides[4] = {c * h * w, 1, w * c, c};
  memcpy(y.view.stride, strides, sizeof strides);
  fill(r, x, -100, 100, 30);
  Array z = copy_of(y), back = copy_of(x);
  orr_k_copy(x, y);
  orr_cuda_copy(x, z);
  same(y, z, 0);
  orr_cuda_copy(z, back);
  same(x, back, 0);
}

static void many(Random &r) {
  orr_dtype dtype = any_dtype(r);
  int n = (int)r.from(1, 40), kind = (int)r.below(3);
  if (!is_float(dtype) || !r.once_in(5)) n = n % 8 + 1;
  Shape shape = any_shape(r);
  Lie lie = r.once_in(2) ? ROW_MAJOR : ANY_LIE;
  std::vector<Array> xs;
  std::vector<const orr_view *> cpu, cuda;
  for (int k = 0; k < n; k++) {
    xs.push_back(make(r, dtype, shape, lie, k > 0 && r.once_in(6)));
    fill(r, xs.back(), -1, 1, 200);
  }
  int self = r.once_in(2) ? 0 : -1;
  Array y = self < 0 ? make(r, dtype, shape, lie) : copy_of(xs[0]), z = copy_of(y);
  int at = (int)r.below(n);
  for (int k = 0; k < n; k++) {
    Array &x = xs[(size_t)k];
    bool is_y = self == 0 && k == at;
    cpu.push_back(is_y ? &y.view : &x.view), cuda.push_back(is_y ? &z.view : &x.view);
  }
  check_now += " n " + std::to_string(n) + " kind " + std::to_string(kind) + text_of(y);
  orr_k_reduce_many(kind, cpu.data(), n, y);
  orr_cuda_reduce_many(kind, cuda.data(), n, z);
  same(y, z,
       n > 16 && !is_float(dtype) ? 0
       : n > 16                   ? 4 * tolerance_of(dtype)
                                  : -1,
       dtype == ORR_F16 || dtype == ORR_BF16 ? n : 1);
}

const std::vector<Check> checks = {{"unary", 4, unary},
                                   {"binary", 4, binary},
                                   {"in_place", 40, in_place},
                                   {"where", 100, where},
                                   {"fill_and_clamp", 100, fill_and_clamp},
                                   {"arange_and_eye", 60, arange_and_eye},
                                   {"triangles", 80, triangles},
                                   {"copy", 200, copy},
                                   {"all_casts", 1, all_casts},
                                   {"transposes", 60, transposes},
                                   {"many", 100, many}};
