/* index.cu: selection and scattering by index, embedding, one-hot, flip and roll on CUDA.
 *
 * Invariant: adding is in the order of the indices: updates are sorted by where they go, and
 * those of one place are added by one lane, one after another. What is added to f16 and bf16 is
 * rounded at each addition, as on the CPU.
 * To add a kernel that moves: a body over orr_each. One that adds: its keys, and ordered_add.
 */
#include "pairs.cuh"

extern "C" {
#include "copy.h"
#include "index.h"
void orr_cuda_copy(const orr_view *x, orr_view *y);
}

/* ---- moving ---- */

/* Views: y, x without the indexed dim, indices, the index' place. */
template <typename U> struct take_body {
  U *y;
  const U *x;
  const void *index;
  orr_dtype dtype;
  int64_t stride, size, row0, limit;
  orr_cuda_fault_slot *slot;
  __device__ void at(const int64_t (&off)[4]) const {
    int64_t k = orr_index_at(index, dtype, off[2]);
    if (k < 1 || k > limit) {
      orr_report(slot, off[3] + 1, k);
      y[off[0]] = 0;
      return;
    }
    k -= 1 + row0; /* of another shard: zero */
    y[off[0]] = k >= 0 && k < size ? x[off[1] + k * stride] : (U)0;
  }
};

static void take(const orr_view *x, int64_t stride, int64_t size, int64_t row0, int64_t limit,
                 const orr_view *const (&views)[4]) {
  orr_cuda_fault_slot *slot = orr_cuda_fault(limit);
  orr_by_size(orr_size_of(x->dtype), [&](auto tag) {
    typedef typename decltype(tag)::type U;
    orr_each(views, [&](const int64_t (&at)[4]) {
      char *index = (char *)views[2]->data + at[2] * (int64_t)orr_size_of(views[2]->dtype);
      return take_body<U>{orr_at<U>(views[0], at[0]), orr_at<U>(views[1], at[1]), index,
                          views[2]->dtype, stride, size, row0, limit, slot};
    });
  });
}

ORR_EXPORT void orr_cuda_index_select(const orr_view *x, int dim, const orr_view *idx,
                                      const orr_view *y, orr_fault *) {
  orr_view from = orr_only(x, ~(1u << dim), y), index = orr_vector_along(idx, dim, y);
  orr_view place = orr_coordinate(y, dim);
  const orr_view *views[4] = {y, &from, &index, &place};
  take(x, x->stride[dim], x->shape[dim], 0, x->shape[dim], views);
}

ORR_EXPORT void orr_cuda_gather(const orr_view *x, int dim, const orr_view *idx,
                                const orr_view *y, orr_fault *) {
  orr_view from = orr_only(x, ~(1u << dim), y), place = orr_places(idx, idx->ndim);
  const orr_view *views[4] = {y, &from, idx, &place};
  take(x, x->stride[dim], x->shape[dim], 0, x->shape[dim], views);
}

/* idx over y's shape, which has a last dimension more. */
static orr_view over_rows(const orr_view *idx, const orr_view *y) {
  orr_view r = *y;
  r.data = idx->data;
  r.dtype = idx->dtype;
  for (int d = 0; d < y->ndim; d++) r.stride[d] = d < idx->ndim ? idx->stride[d] : 0;
  return r;
}

ORR_EXPORT void orr_cuda_embedding(const orr_view *w, const orr_view *idx, int64_t row0,
                                   const orr_view *y, orr_fault *, int64_t vocabulary) {
  int last = y->ndim - 1;
  orr_view index = over_rows(idx, y), place = orr_places(y, last);
  orr_view from = orr_vector_along(w, last, y);
  const orr_view *views[4] = {y, &from, &index, &place};
  take(w, w->stride[0], w->shape[0], row0, vocabulary, views);
}

/* Views: y, indices, the class, the index' place. */
struct hot_body {
  void *y;
  orr_dtype y_dtype;
  const void *index;
  orr_dtype dtype;
  int64_t class0, classes, off_y, off_index;
  orr_cuda_fault_slot *slot;
  __device__ void at(const int64_t (&off)[4]) const {
    int64_t k = orr_index_at(index, dtype, off_index + off[1]);
    bool good = k >= 1 && k <= classes;
    if (!good) orr_report(slot, off[3] + 1, k);
    orr_write_number(y, y_dtype, off_y + off[0], (int64_t)(good && k - 1 - class0 == off[2]));
  }
};

ORR_EXPORT void orr_cuda_one_hot(const orr_view *idx, int64_t class0, int64_t classes,
                                 const orr_view *y, orr_fault *) {
  int last = y->ndim - 1;
  orr_view index = over_rows(idx, y), place = orr_places(y, last);
  orr_view column = orr_coordinate(y, last);
  const orr_view *views[4] = {y, &index, &column, &place};
  orr_cuda_fault_slot *slot = orr_cuda_fault(classes);
  orr_each(views, [&](const int64_t (&at)[4]) {
    return hot_body{y->data, y->dtype, idx->data, idx->dtype, class0,
                    classes, at[0],    at[1],     slot};
  });
}

ORR_EXPORT void orr_cuda_flip(const orr_view *x, unsigned mask, const orr_view *y) {
  orr_view back = *x, to = *y;
  int64_t off = 0;
  if (orr_numel(x) == 0) return;
  for (int d = 0; d < x->ndim; d++) {
    if (!(mask >> d & 1)) continue;
    off += (x->shape[d] - 1) * x->stride[d];
    back.stride[d] = -x->stride[d];
  }
  back.data = (char *)x->data + off * (int64_t)orr_size_of(x->dtype);
  orr_cuda_copy(&back, &to);
}

ORR_EXPORT void orr_cuda_roll(const orr_view *x, int dim, int64_t shift, const orr_view *y) {
  int64_t n = x->shape[dim], size = (int64_t)orr_size_of(x->dtype);
  if (orr_numel(x) == 0) return;
  int64_t s = (shift % n + n) % n;
  orr_view from = *x, to = *y;
  from.shape[dim] = to.shape[dim] = n - s;
  to.data = (char *)y->data + s * y->stride[dim] * size;
  orr_cuda_copy(&from, &to);
  from.data = (char *)x->data + (n - s) * x->stride[dim] * size;
  to.data = y->data;
  from.shape[dim] = to.shape[dim] = s;
  orr_cuda_copy(&from, &to);
}

/* ---- adding ---- */

/* Update p goes to place `key` of the target: views: indices, the update's number, the row that
 * it stays in (0 where there is one). */
struct keys_body {
  orr_pair *pairs;
  const void *index;
  orr_dtype dtype;
  int64_t size, row0, limit;
  orr_cuda_fault_slot *slot;
  __device__ void at(const int64_t (&off)[3]) const {
    int64_t k = orr_index_at(index, dtype, off[0]);
    bool good = k >= 1 && k <= limit;
    if (!good) orr_report(slot, off[1] + 1, k);
    k -= 1 + row0;
    uint64_t key = (uint64_t)(off[2] * size + k);
    pairs[off[1]] = orr_pair{good && k >= 0 && k < size ? key : UINT64_MAX, off[1]};
  }
};

static __global__ void __launch_bounds__(ORR_BLOCK) pad_kernel(orr_pair *pairs, uint32_t n,
                                                               uint32_t padded) {
  for (uint32_t i = n + orr_first(); i < padded; i += orr_step()) pairs[i] = ORR_NO_PAIR;
}

static orr_pair *sorted_keys(const orr_view *const (&views)[3], int64_t size, int64_t row0,
                             int64_t limit, uint32_t *n) {
  *n = (uint32_t)orr_numel(views[0]);
  uint32_t padded = orr_power_above(*n);
  orr_pair *pairs = (orr_pair *)orr_cuda_room((size_t)padded * sizeof *pairs);
  if (!pairs) return NULL;
  orr_cuda_fault_slot *slot = orr_cuda_fault(limit);
  orr_each(views, [&](const int64_t (&)[3]) {
    return keys_body{pairs, views[0]->data, views[0]->dtype, size, row0, limit, slot};
  });
  if (padded > *n)
    ORR_LAUNCH(pad_kernel, orr_grid(padded - *n, ORR_BLOCK), ORR_BLOCK, 0, pairs, *n, padded);
  orr_sort_pairs(pairs, 1, padded);
  return pairs;
}

/* Where an update comes from and goes to, beside what they share (`shared`: y, g): places are
 * divided into key / size and key % size, numbers along `source`. */
template <typename E> struct ordered_add {
  E *y;
  const E *g;
  const orr_pair *pairs;
  uint32_t n;
  int64_t size, stride;
  orr_walk<2> source; /* by the update's number: g; y but for its indexed dim */
  orr_walk<2> shared;
};

template <typename E>
static __global__ void __launch_bounds__(ORR_BLOCK) add_kernel(ordered_add<E> a) {
  typedef typename std::conditional<orr_types<E>::is_float, orr_compute<E>, int64_t>::type C;
  const uint64_t total = (uint64_t)a.n * a.shared.n;
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < total;
       i += (uint64_t)gridDim.x * blockDim.x) {
    uint32_t p = (uint32_t)(i / a.shared.n);
    const uint64_t key = a.pairs[p].key;
    if (key == UINT64_MAX || (p > 0 && a.pairs[p - 1].key == key)) continue;
    int64_t at[2], off[2];
    a.shared.at((uint32_t)(i % a.shared.n), at);
    a.source.at((uint32_t)a.pairs[p].index, off);
    E *to = a.y + at[0] + off[0] + (int64_t)(key % (uint64_t)a.size) * a.stride;
    for (; p < a.n && a.pairs[p].key == key; p++) {
      a.source.at((uint32_t)a.pairs[p].index, off);
      orr_put(to, (orr_compute<E>)((C)orr_get(to) + (C)orr_get(a.g + at[1] + off[1])));
    }
  }
}

/* A walk by row-major numbers: the dims as they are, in their order. */
static orr_walk<2> in_order(const orr_view *a, const orr_view *b) {
  orr_axes<2> x = {};
  x.n = 1;
  for (int d = 0; d < a->ndim; d++) {
    x.shape[x.ndim] = a->shape[d];
    x.stride[0][x.ndim] = a->stride[d];
    x.stride[1][x.ndim++] = b->stride[d];
    x.n *= a->shape[d];
  }
  return orr_walk_of(x);
}

static void add(const orr_view *y, int64_t size, int64_t stride, const orr_view *g,
                const orr_pair *pairs, uint32_t n, const orr_walk<2> &source,
                const orr_walk<2> &shared) {
  if (n == 0 || shared.n == 0) return;
  orr_by_dtype(y->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    ordered_add<E> a = {orr_at<E>(y, 0), orr_at<E>(g, 0), pairs, n, size, stride, source, shared};
    ORR_LAUNCH(add_kernel<E>, orr_grid((int64_t)n * shared.n, ORR_BLOCK), ORR_BLOCK, 0, a);
  });
}

static const orr_view nowhere = {};

ORR_EXPORT void orr_cuda_index_add(const orr_view *gx, int dim, const orr_view *idx,
                                   const orr_view *g, orr_fault *) {
  uint32_t n;
  orr_view number = orr_coordinate(idx, 0), row = orr_only(&nowhere, 0, idx);
  const orr_view *views[3] = {idx, &number, &row}, *rest[2] = {gx, g};
  if (orr_numel(idx) == 0) return;
  orr_pair *pairs = sorted_keys(views, gx->shape[dim], 0, gx->shape[dim], &n);
  if (!pairs) return;
  orr_view still = *idx, moves = *idx;
  still.stride[0] = 0;
  moves.stride[0] = g->stride[dim];
  add(gx, gx->shape[dim], gx->stride[dim], g, pairs, n, in_order(&still, &moves),
      orr_walk_of(orr_axes_of(rest, 1u << dim)));
}

ORR_EXPORT void orr_cuda_scatter_add(const orr_view *gx, int dim, const orr_view *idx,
                                     const orr_view *g, orr_fault *) {
  uint32_t n;
  orr_view number = orr_places(idx, idx->ndim), row = orr_row_numbers(idx, dim);
  const orr_view *views[3] = {idx, &number, &row};
  if (orr_numel(idx) == 0) return;
  orr_pair *pairs = sorted_keys(views, gx->shape[dim], 0, gx->shape[dim], &n);
  if (!pairs) return;
  orr_view still = orr_only(gx, ~(1u << dim), idx), moves = orr_only(g, ~0u, idx);
  orr_axes<2> one = {};
  one.n = 1;
  add(gx, gx->shape[dim], gx->stride[dim], g, pairs, n, in_order(&still, &moves),
      orr_walk_of(one));
}

ORR_EXPORT void orr_cuda_embedding_back(const orr_view *gw, const orr_view *idx, int64_t row0,
                                        const orr_view *g, int64_t vocabulary) {
  uint32_t n;
  int last = g->ndim - 1;
  orr_view number = orr_places(idx, idx->ndim), row = orr_only(&nowhere, 0, idx);
  const orr_view *views[3] = {idx, &number, &row};
  if (orr_numel(idx) == 0 || orr_numel(gw) == 0) return;
  orr_pair *pairs = sorted_keys(views, gw->shape[0], row0, vocabulary, &n);
  if (!pairs) return;
  orr_view still = orr_only(&nowhere, 0, idx), moves = *idx;
  for (int d = 0; d < idx->ndim; d++) moves.stride[d] = g->stride[d];
  orr_axes<2> columns = {};
  columns.ndim = 1;
  columns.n = columns.shape[0] = gw->shape[1];
  columns.stride[0][0] = gw->stride[1];
  columns.stride[1][0] = g->stride[last];
  add(gw, gw->shape[0], gw->stride[0], g, pairs, n, in_order(&still, &moves),
      orr_walk_of(columns));
}
