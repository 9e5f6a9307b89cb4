/* check.h: CUDA kernels against the CPU's without a device: random views, the same call on
 * both, and the difference of what they wrote.
 *
 * Invariant: a check fails where a number is off by more than its tolerance, where a byte
 * beside a view has changed, or where a launch goes wrong. Arrays are blocks of their own, so
 * that AddressSanitizer sees what leaves them.
 * To add a check: a function of (Random &) and a line in the `checks` of a file of this folder.
 */
#ifndef ORR_FAKE_CHECK_H
#define ORR_FAKE_CHECK_H

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

extern "C" {
#include "../../../kernels/half.h"
#include "../../../kernels/kernel.h"
}
#include "../../../kernels/device.h"

struct Random {
  uint64_t state;
  uint64_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state * 0x2545F4914F6CDD1Dull >> 11;
  }
  int64_t below(int64_t n) { return (int64_t)(next() % (uint64_t)n); }
  int64_t from(int64_t lo, int64_t hi) { return lo + below(hi - lo + 1); }
  double real(double lo, double hi) { return lo + (hi - lo) * (double)below(1000003) / 1e6; }
  bool once_in(int64_t n) { return below(n) == 0; }
};

typedef std::vector<int64_t> Shape;

/* A view in a block of its own. */
struct Array {
  orr_view view;
  std::shared_ptr<char> block;
  size_t bytes;
  operator const orr_view *() const { return &view; }
  operator orr_view *() { return &view; }
};

static inline size_t size_of(orr_dtype dtype) {
  static const size_t sizes[ORR_N_DTYPES] = {8, 4, 2, 2, 8, 4, 1, 1};
  return sizes[dtype];
}
static inline bool is_float(orr_dtype dtype) { return dtype <= ORR_BF16; }
static inline int64_t count(const orr_view *v) {
  int64_t n = 1;
  for (int d = 0; d < v->ndim; d++) n *= v->shape[d];
  return n;
}

static inline Shape random_shape(Random &r, int ndim, int64_t most) {
  static const int64_t nice[] = {1, 1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 100, 256, 513};
  Shape s((size_t)ndim);
  int64_t total = 1;
  for (int64_t &n : s) {
    n = r.once_in(60) ? 0 : nice[r.below(15)];
    while (n > 1 && total * n > most) n /= 2;
    total *= n > 0 ? n : 1;
  }
  return s;
}

static inline Array allocate(orr_view v, int64_t elements, int64_t offset) {
  Array a;
  a.bytes = (size_t)(elements + offset) * size_of(v.dtype);
  a.block = std::shared_ptr<char>((char *)malloc(a.bytes + (a.bytes == 0)), free);
  memset(a.block.get(), 0x5a, a.bytes);
  v.data = a.block.get() + (size_t)offset * size_of(v.dtype);
  a.view = v;
  return a;
}

enum Lie { ROW_MAJOR, PERMUTED, GAPS, ANY_LIE };

/* repeats: some dimensions may have stride 0. */
static inline Array make(Random &r, orr_dtype dtype, const Shape &shape, Lie lie = ANY_LIE,
                         bool repeats = false) {
  orr_view v = {};
  v.dtype = dtype, v.ndim = (int)shape.size();
  if (lie == ANY_LIE) lie = (Lie)r.below(3);
  std::vector<int> order;
  for (int d = v.ndim - 1; d >= 0; d--) {
    size_t at = lie == ROW_MAJOR ? order.size() : (size_t)r.below((int64_t)order.size() + 1);
    order.insert(order.begin() + (long)at, d);
  }
  int64_t step = lie == GAPS ? r.from(1, 3) : 1, last = 0, total = 1;
  for (int d : order) {
    v.shape[d] = shape[(size_t)d];
    v.stride[d] = step;
    if (repeats && r.once_in(3)) v.stride[d] = 0;
    else step *= shape[(size_t)d] > 0 ? shape[(size_t)d] : 1;
    if (lie == GAPS) step += r.below(3);
    last += (shape[(size_t)d] - 1) * v.stride[d];
    total *= shape[(size_t)d];
  }
  return allocate(v, total > 0 ? last + 1 : 0, lie == GAPS ? r.below(4) : 0);
}

static inline int64_t offset_at(const orr_view *v, int64_t i) {
  int64_t off = 0;
  for (int d = v->ndim - 1; d >= 0; d--) {
    off += i % v->shape[d] * v->stride[d];
    i /= v->shape[d];
  }
  return off;
}

static inline double get(const orr_view *v, int64_t i) {
  const char *p = (const char *)v->data + offset_at(v, i) * (int64_t)size_of(v->dtype);
  switch (v->dtype) {
    case ORR_F64: return *(const double *)p;
    case ORR_F32: return *(const float *)p;
    case ORR_F16: return orr_f32_of_f16(*(const uint16_t *)p);
    case ORR_BF16: return orr_f32_of_bf16(*(const uint16_t *)p);
    case ORR_I64: return (double)*(const int64_t *)p;
    case ORR_I32: return *(const int32_t *)p;
    default: return *(const uint8_t *)p;
  }
}

static inline void put(const orr_view *v, int64_t i, double x) {
  char *p = (char *)v->data + offset_at(v, i) * (int64_t)size_of(v->dtype);
  switch (v->dtype) {
    case ORR_F64: *(double *)p = x; break;
    case ORR_F32: *(float *)p = (float)x; break;
    case ORR_F16: *(uint16_t *)p = orr_f16_of_f32((float)x); break;
    case ORR_BF16: *(uint16_t *)p = orr_bf16_of_f32((float)x); break;
    case ORR_I64: *(int64_t *)p = (int64_t)x; break;
    case ORR_I32: *(int32_t *)p = (int32_t)x; break;
    case ORR_U8: *(uint8_t *)p = (uint8_t)x; break;
    default: *(uint8_t *)p = x != 0; break;
  }
}

/* Numbers in [lo, hi]; integers of a type that has no sign, of their size. A float is now and
 * then 0, and one in `odd` (0: none) is infinite or NaN. */
static inline void fill(Random &r, const Array &a, double lo, double hi, int odd = 0) {
  static const double odds[] = {INFINITY, -INFINITY, NAN};
  for (int64_t i = 0, n = count(a); i < n; i++) {
    double x = r.once_in(20) ? 0 : r.real(lo, hi);
    if (!is_float(a.view.dtype)) x = std::floor(x);
    if (a.view.dtype >= ORR_U8) x = std::fabs(x);
    if (a.view.dtype == ORR_BOOL) x = (double)r.below(2);
    if (odd && is_float(a.view.dtype) && r.once_in(odd)) x = odds[r.below(3)];
    put(a, i, x);
  }
}

static inline Array copy_of(const Array &a) {
  Array b = a;
  b.block = std::shared_ptr<char>((char *)malloc(a.bytes + (a.bytes == 0)), free);
  memcpy(b.block.get(), a.block.get(), a.bytes);
  b.view.data = b.block.get() + ((char *)a.view.data - a.block.get());
  return b;
}

/* What a number of a dtype may be off, relative to the larger of itself and 1. */
static inline double tolerance_of(orr_dtype dtype) {
  switch (dtype) {
    case ORR_F64: return 1e-12;
    case ORR_F32: return 4e-6;
    case ORR_F16: return 2e-3;
    case ORR_BF16: return 1.6e-2;
    default: return 0;
  }
}

extern std::string check_now;          /* what is being checked, for the report */
extern orr_cuda_fault_slot check_slot; /* the last that was asked for */
[[noreturn]] void check_fail(const std::string &why);

static inline std::string text_of(const orr_view *v) {
  static const char *const names[] = {"f64", "f32", "f16", "bf16", "i64", "i32", "u8", "bool"};
  std::string s = names[v->dtype];
  for (int d = 0; d < v->ndim; d++) {
    s += (d ? ", " : " (") + std::to_string(v->shape[d]) + ":" + std::to_string(v->stride[d]);
  }
  return s + (v->ndim ? ")" : "");
}

/* tolerance < 0: the dtype's; scale: the size of the numbers that a sum was made of. */
static inline void same(const Array &cpu, const Array &cuda, double tolerance = -1,
                        double scale = 1) {
  const orr_view *v = cpu;
  size_t size = size_of(v->dtype);
  if (tolerance < 0) tolerance = tolerance_of(v->dtype);
  Array a = copy_of(cpu), b = copy_of(cuda);
  for (int64_t i = 0, n = count(v); i < n; i++) {
    double x = get(a, i), y = get(b, i);
    bool fits = x == y || (x != x && y != y) ||
                std::fabs(x - y) <= tolerance * std::fmax(scale, std::fabs(x));
    if (!fits) {
      char numbers[120];
      snprintf(numbers, sizeof numbers, "element %ld: CPU %.17g, CUDA %.17g", (long)i, x, y);
      check_fail(numbers + (" of " + text_of(v)));
    }
  }
  for (int64_t i = 0, n = count(v); i < n; i++) {
    int64_t at = offset_at(v, i) * (int64_t)size;
    memset((char *)a.view.data + at, 0, size), memset((char *)b.view.data + at, 0, size);
  }
  if (memcmp(a.block.get(), b.block.get(), a.bytes) != 0) {
    check_fail("bytes beside " + text_of(v) + " have changed");
  }
}

struct Check {
  const char *name;
  int times;
  void (*run)(Random &);
};
extern const std::vector<Check> checks;

#endif
