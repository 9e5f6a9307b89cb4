/* matmul.cpp: matmul.cu against the CPU's product.
 *
 * Invariant: every dtype, ranks up to 8, any strides, repeats; small tiles and large ones; K of
 * none.
 * To add a check: check.h.
 */
#include "check.h"

extern "C" {
#include "../../../kernels/matmul.h"

int orr_cuda_tiled_product(const orr_view *a, const orr_view *b, const orr_view *bias,
                           const orr_view *c, bool accumulate);
}

static orr_dtype any_dtype(Random &r) { return (orr_dtype)r.below(ORR_N_DTYPES); }

static orr_view batch(const orr_view *v, int64_t i) {
  orr_view m = *v;
  int64_t off = 0;
  m.ndim = 2;
  for (int d = v->ndim - 3; d >= 0; d--)
    off += i % v->shape[d] * v->stride[d], i /= v->shape[d];
  for (int d = 0; d < 2; d++) {
    m.shape[d] = v->shape[v->ndim - 2 + d];
    m.stride[d] = v->stride[v->ndim - 2 + d];
  }
  m.data = (char *)v->data + off * (int64_t)size_of(v->dtype);
  return m;
}

/* c's numbers become the bias: what the CPU's table adds the product to. */
static void start(const orr_view *c, const orr_view *bias) {
  int64_t n = c->shape[c->ndim - 1];
  for (int64_t i = 0; i < count(c); i++) put(c, i, bias ? get(bias, i % n) : 0);
}

static void product(Random &r) {
  static const int64_t sizes[] = {1, 2, 5, 16, 17, 31, 33, 40, 64, 65, 70};
  orr_dtype dtype = any_dtype(r);
  Shape heads = random_shape(r, r.once_in(3) ? (int)r.below(7) : 0, 6);
  int64_t m = sizes[r.below(11)], n = sizes[r.below(11)], k = sizes[r.below(11)];
  if (r.once_in(15)) k = 0;
  Shape sa = heads, sb = heads, sc = heads;
  sa.insert(sa.end(), {m, k}), sb.insert(sb.end(), {k, n}), sc.insert(sc.end(), {m, n});
  Array a = make(r, dtype, sa, ANY_LIE, r.once_in(5)),
        b = make(r, dtype, sb, ANY_LIE, r.once_in(5));
  Array c = make(r, dtype, sc), bias = make(r, dtype, {n});
  double most = is_float(dtype) ? 1 : r.once_in(3) ? 1000 : 9;
  const orr_view *with = r.once_in(3) ? &bias.view : NULL;
  bool accumulate = !with && r.once_in(3);
  fill(r, a, -most, most), fill(r, b, -most, most), fill(r, c, -1, 1), fill(r, bias, -2, 2);
  Array d = copy_of(c);
  check_now += " " + text_of(a) + " " + text_of(b) + " to " + text_of(c);
  if (!accumulate) start(c, with);
  int64_t batches = m > 0 && n > 0 ? count(c) / (m * n) : 0;
  for (int64_t i = 0; i < batches && k > 0; i++) {
    orr_view x = batch(a, i), y = batch(b, i), z = batch(c, i);
    orr_k_matmul(&x, &y, &z, true);
  }
  orr_cuda_tiled_product(a, b, with, d, accumulate);
  same(c, d, -1, std::sqrt((double)k + 1));
}

const std::vector<Check> checks = {{"product", 250, product}};
