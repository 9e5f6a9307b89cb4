/* index.cu: selection and scattering by index, embedding, one-hot, flip and roll on CUDA.
 *
 * Invariant: adding is in the order of the indices: updates are sorted by where they go, and
 * those of one place are added by one lane, one after another. Each addition is rounded (f16,
 * bf16) or kept within its type (integers), as on the CPU. Moving is by size, 16 bytes at once
 * where that can be.
 * To add a kernel that moves: a body over orr_each. One that adds: its keys, and add_sorted.
 */
#include "pairs.cuh"

extern "C" {
#include "copy.h"
#include "index.h"
void orr_cuda_copy(const orr_view *x, orr_view *y);
}

/* ---- moving ---- */

struct sixteen {
  uint64_t at[2];
};

/* Views: y, x without the indexed dim, indices, the index' place. */
template <typename U>
struct take_body {
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
      y[off[0]] = U{};
      return;
    }
    k -= 1 + row0; /* of another shard: zero */
    y[off[0]] = k >= 0 && k < size ? x[off[1] + k * stride] : U{};
  }
};

struct taking {
  orr_view y, x, index, place;
  int64_t stride, size, row0, limit;
  orr_cuda_fault_slot *slot;
};

/* Makes elements of `by` neighbours, where all that moves allows it. */
static bool widen(taking *t, int64_t by) {
  orr_view *moved[2] = {&t->y, &t->x};
  int along = -1;
  const size_t bytes = (size_t)by * orr_size_of(t->y.dtype);
  for (int d = 0; d < t->y.ndim; d++) {
    bool still = t->index.stride[d] == 0 && t->place.stride[d] == 0;
    if (t->y.stride[d] == 1 && t->x.stride[d] == 1 && still && t->y.shape[d] > 1) along = d;
  }
  if (along < 0 || t->y.shape[along] % by || t->stride % by) return false;
  for (int v = 0; v < 2; v++) {
    if (!orr_aligned(moved[v]->data, bytes)) return false;
    for (int d = 0; d < t->y.ndim; d++)
      if (d != along && t->y.shape[d] > 1 && moved[v]->stride[d] % by) return false;
  }
  t->stride /= by;
  for (int v = 0; v < 2; v++)
    for (int d = 0; d < t->y.ndim; d++)
      if (d != along) moved[v]->stride[d] /= by;
  t->y.shape[along] /= by;
  t->x.shape[along] = t->index.shape[along] = t->place.shape[along] = t->y.shape[along];
  return true;
}

template <typename U>
static void take_as(const taking &t) {
  const orr_view *views[4] = {&t.y, &t.x, &t.index, &t.place};
  orr_each(views, take_body<U>{orr_at<U>(&t.y, 0), orr_at<U>(&t.x, 0), t.index.data,
                               t.index.dtype, t.stride, t.size, t.row0, t.limit, t.slot});
}

static void take(taking t) {
  const int64_t size = (int64_t)orr_size_of(t.y.dtype);
  t.slot = orr_cuda_fault(t.limit);
  if (widen(&t, 16 / size)) {
    take_as<sixteen>(t);
    return;
  }
  orr_by_size((size_t)size, [&](auto tag) { take_as<typename decltype(tag)::type>(t); });
}

ORR_EXPORT void orr_cuda_index_select(const orr_view *x, int dim, const orr_view *idx,
                                      const orr_view *y, orr_fault *) {
  take(taking{*y, orr_only(x, ~(1u << dim), y), orr_vector_along(idx, dim, y),
              orr_coordinate(y, dim), x->stride[dim], x->shape[dim], 0, x->shape[dim], NULL});
}

ORR_EXPORT void orr_cuda_gather(const orr_view *x, int dim, const orr_view *idx,
                                const orr_view *y, orr_fault *) {
  take(taking{*y, orr_only(x, ~(1u << dim), y), *idx, orr_places(idx, idx->ndim),
              x->stride[dim], x->shape[dim], 0, x->shape[dim], NULL});
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
  take(taking{*y, orr_vector_along(w, last, y), over_rows(idx, y), orr_places(y, last),
              w->stride[0], w->shape[0], row0, vocabulary, NULL});
}

/* Views: y, indices, the class, the index' place. */
struct hot_body {
  void *y;
  orr_dtype y_dtype;
  const void *index;
  orr_dtype dtype;
  int64_t class0, classes;
  orr_cuda_fault_slot *slot;
  __device__ void at(const int64_t (&off)[4]) const {
    int64_t k = orr_index_at(index, dtype, off[1]);
    bool good = k >= 1 && k <= classes;
    if (!good) orr_report(slot, off[3] + 1, k);
    orr_write_number(y, y_dtype, off[0], (int64_t)(good && k - 1 - class0 == off[2]));
  }
};

ORR_EXPORT void orr_cuda_one_hot(const orr_view *idx, int64_t class0, int64_t classes,
                                 const orr_view *y, orr_fault *) {
  int last = y->ndim - 1;
  orr_view index = over_rows(idx, y), place = orr_places(y, last);
  orr_view column = orr_coordinate(y, last);
  const orr_view *views[4] = {y, &index, &column, &place};
  orr_cuda_fault_slot *slot = orr_cuda_fault(classes);
  orr_each(views, hot_body{y->data, y->dtype, idx->data, idx->dtype, class0, classes, slot});
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

/* What a sum is made in, and how each addition is kept: as the CPU stores it. */
template <typename E>
using sum_of = typename std::conditional<orr_types<E>::is_float, orr_compute<E>, int64_t>::type;

static __device__ inline double kept(double x, double) { return x; }
static __device__ inline float kept(float x, float) { return x; }
static __device__ inline float kept(float x, orr_f16) { return orr_f32_of(orr_f16_of(x)); }
static __device__ inline float kept(float x, orr_bf16) { return orr_f32_of(orr_bf16_of(x)); }
static __device__ inline int64_t kept(int64_t x, int64_t) { return x; }
static __device__ inline int64_t kept(int64_t x, int32_t) {
  return orr_within(x, INT32_MIN, INT32_MAX);
}
static __device__ inline int64_t kept(int64_t x, uint8_t) { return orr_within(x, 0, 255); }
static __device__ inline int64_t kept(int64_t x, orr_bool) { return x != 0; }

static __device__ inline double plus(double a, double b) { return a + b; }
static __device__ inline float plus(float a, float b) { return a + b; }
static __device__ inline int64_t plus(int64_t a, int64_t b) {
  return (int64_t)((uint64_t)a + (uint64_t)b);
}

template <typename E>
static __device__ inline sum_of<E> added(sum_of<E> sum, sum_of<E> x) {
  return kept(plus(sum, x), E{});
}

/* Update p goes to place `key` of the target. Views: indices, the update's number, the row that
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

static __global__ void __launch_bounds__(ORR_BLOCK)
    pad_kernel(orr_pair *pairs, uint32_t n, uint32_t padded) {
  for (uint32_t i = n + orr_first(); i < padded; i += orr_step()) pairs[i] = ORR_NO_PAIR;
}

enum : int64_t { MOST_UPDATES = (int64_t)1 << 30 };

/* The updates of all indices, by place, then number. */
static orr_pair *sorted_keys(const orr_view *const (&views)[3], int64_t size, int64_t row0,
                             int64_t limit, orr_cuda_fault_slot *slot) {
  int64_t n = orr_numel(views[0]);
  if (n > MOST_UPDATES) {
    orr_cuda_check(cudaErrorInvalidValue, "adding by more than 2^30 indices");
    return NULL;
  }
  uint32_t padded = orr_power_above(n);
  orr_pair *pairs = (orr_pair *)orr_cuda_room((size_t)padded * sizeof *pairs);
  if (!pairs) return NULL;
  orr_each(views, keys_body{pairs, views[0]->data, views[0]->dtype, size, row0, limit, slot});
  if (padded > n)
    ORR_LAUNCH(pad_kernel, orr_grid(padded - n, ORR_BLOCK), ORR_BLOCK, 0, pairs, (uint32_t)n,
               padded);
  orr_sort_pairs(pairs, 1, padded);
  return pairs;
}

/* Where an update goes and comes from, beside what they share (`shared`: y, g): its place is
 * key % size along the indexed dim, its number says the rest. */
template <typename E>
struct ordered_add {
  E *y;
  const E *g;
  const orr_pair *pairs;
  uint32_t n;
  int64_t size, stride;
  orr_walk<2> source; /* by the update's number: y but for its indexed dim; g */
  orr_walk<2> shared;
};

enum { AT_ONCE = 4 }; /* loads in flight */

template <typename E>
static __global__ void __launch_bounds__(ORR_BLOCK) add_kernel(ordered_add<E> a) {
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
    sum_of<E> sum = orr_get(to);
    for (; p + AT_ONCE <= a.n && a.pairs[p + AT_ONCE - 1].key == key; p += AT_ONCE) {
      sum_of<E> x[AT_ONCE];
      ORR_UNROLL
      for (int k = 0; k < AT_ONCE; k++) {
        a.source.at((uint32_t)a.pairs[p + k].index, off);
        x[k] = orr_get(a.g + at[1] + off[1]);
      }
      ORR_UNROLL
      for (int k = 0; k < AT_ONCE; k++) sum = added<E>(sum, x[k]);
    }
    for (; p < a.n && a.pairs[p].key == key; p++) {
      a.source.at((uint32_t)a.pairs[p].index, off);
      sum = added<E>(sum, orr_get(a.g + at[1] + off[1]));
    }
    orr_put(to, (orr_compute<E>)sum);
  }
}

/* A walk by row-major numbers: the dims as they are, in their order. */
static orr_walk<2> in_order(const orr_view *a, const orr_view *b) {
  orr_axes<2> x = {};
  x.n = orr_numel(a);
  x.ndim = a->ndim;
  for (int d = 0; d < a->ndim; d++) {
    x.shape[d] = a->shape[d];
    x.stride[0][d] = a->stride[d];
    x.stride[1][d] = b->stride[d];
  }
  return orr_walk_of(x);
}

static void add_sorted(const orr_view *y, int64_t size, int64_t stride, const orr_view *g,
                       const orr_pair *pairs, uint32_t n, const orr_walk<2> &source,
                       const orr_axes<2> &shared) {
  orr_by_dtype(y->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_pieces(shared, [&](const orr_axes<2> &piece, const int64_t(&at)[2]) {
      ordered_add<E> a = {
          orr_at<E>(y, at[0]), orr_at<E>(g, at[1]), pairs, n, size, stride, source,
          orr_walk_of(piece)};
      ORR_LAUNCH(add_kernel<E>, orr_grid((int64_t)n * a.shared.n, ORR_BLOCK), ORR_BLOCK, 0, a);
    });
  });
}

static const orr_view nowhere = {};

ORR_EXPORT void orr_cuda_index_add(const orr_view *gx, int dim, const orr_view *idx,
                                   const orr_view *g, orr_fault *) {
  orr_view number = orr_coordinate(idx, 0), row = orr_only(&nowhere, 0, idx);
  const orr_view *views[3] = {idx, &number, &row}, *rest[2] = {gx, g};
  const int64_t size = gx->shape[dim];
  if (orr_numel(idx) == 0) return;
  orr_pair *pairs = sorted_keys(views, size, 0, size, orr_cuda_fault(size));
  if (!pairs) return;
  orr_view still = *idx, moves = *idx;
  still.stride[0] = 0;
  moves.stride[0] = g->stride[dim];
  add_sorted(gx, size, gx->stride[dim], g, pairs, (uint32_t)idx->shape[0],
             in_order(&still, &moves), orr_axes_of(rest, 1u << dim));
}

/* gw += rows of g: bad indices were reported by the way forward. */
ORR_EXPORT void orr_cuda_embedding_back(const orr_view *gw, const orr_view *idx, int64_t row0,
                                        const orr_view *g, int64_t vocabulary) {
  int last = g->ndim - 1;
  orr_view number = orr_places(idx, idx->ndim), row = orr_only(&nowhere, 0, idx);
  const orr_view *views[3] = {idx, &number, &row};
  if (orr_numel(idx) == 0 || orr_numel(gw) == 0) return;
  orr_pair *pairs = sorted_keys(views, gw->shape[0], row0, vocabulary, NULL);
  if (!pairs) return;
  orr_view moves = *idx;
  for (int d = 0; d < idx->ndim; d++) moves.stride[d] = g->stride[d];
  orr_axes<2> columns = {};
  columns.ndim = 1;
  columns.n = columns.shape[0] = gw->shape[1];
  columns.stride[0][0] = gw->stride[1];
  columns.stride[1][0] = g->stride[last];
  add_sorted(gw, gw->shape[0], gw->stride[0], g, pairs, (uint32_t)orr_numel(idx),
             in_order(&row, &moves), columns);
}

/* ---- scatter_add: rows along dim, which do not meet ---- */

template <typename E>
struct scattering {
  E *gx;
  const E *g;
  const void *index;
  orr_dtype dtype;
  uint32_t len;
  int64_t size, gx_stride, g_stride, index_stride, place_stride;
  orr_cuda_fault_slot *slot;
  orr_part<4> rows; /* indices, gx, g, the place */
  /* From 0; -1: bad, and reported. */
  __device__ int64_t target(const int64_t (&off)[4], uint32_t i) const {
    int64_t k = orr_index_at(index, dtype, off[0] + i * index_stride);
    if (k >= 1 && k <= size) return k - 1;
    orr_report(slot, off[3] + i * place_stride + 1, k);
    return -1;
  }
};

/* A lane a row. */
template <typename E>
static __global__ void __launch_bounds__(ORR_BLOCK) scatter_rows(scattering<E> s) {
  for (uint32_t r = orr_first(); r < s.rows.walk.n; r += orr_step()) {
    int64_t off[4];
    s.rows.at(r, off);
    for (uint32_t i = 0; i < s.len; i++) {
      int64_t k = s.target(off, i);
      if (k < 0) continue;
      E *to = s.gx + off[1] + k * s.gx_stride;
      sum_of<E> sum = added<E>(orr_get(to), orr_get(s.g + off[2] + i * s.g_stride));
      orr_put(to, (orr_compute<E>)sum);
    }
  }
}

/* Rows of up to ORR_PAIRS_TILE, sorted by the block. */
template <typename E>
static __global__ void __launch_bounds__(ORR_BLOCK)
    scatter_tiles(scattering<E> s, uint32_t padded) {
  ORR_SHARED(orr_pair, part, ORR_PAIRS_TILE);
  const uint32_t per = ORR_PAIRS_TILE / padded;
  for (uint64_t first = blockIdx.x * (uint64_t)per; first < s.rows.walk.n;
       first += gridDim.x * (uint64_t)per) {
    const uint32_t m =
        (s.rows.walk.n - first < per ? (uint32_t)(s.rows.walk.n - first) : per) * padded;
    int64_t off[4];
    for (uint32_t p = threadIdx.x; p < m; p += blockDim.x) {
      const uint32_t i = p % padded;
      part[p] = ORR_NO_PAIR;
      if (i >= s.len) continue;
      s.rows.at((uint32_t)first + p / padded, off);
      part[p] = orr_pair{(uint64_t)s.target(off, i), (int64_t)i}; /* bad: the last */
    }
    __syncthreads();
    orr_sort_tile(part, m, padded);
    for (uint32_t p = threadIdx.x; p < m; p += blockDim.x) {
      const uint64_t key = part[p].key;
      const uint32_t end = (p / padded + 1) * padded;
      if (key == UINT64_MAX || (p % padded > 0 && part[p - 1].key == key)) continue;
      s.rows.at((uint32_t)first + p / padded, off);
      E *to = s.gx + off[1] + (int64_t)key * s.gx_stride;
      sum_of<E> sum = orr_get(to);
      for (uint32_t q = p; q < end && part[q].key == key; q++)
        sum = added<E>(sum, orr_get(s.g + off[2] + part[q].index * s.g_stride));
      orr_put(to, (orr_compute<E>)sum);
    }
    __syncthreads();
  }
}

static void scatter_short(const orr_view *gx, int dim, const orr_view *idx, const orr_view *g,
                          orr_cuda_fault_slot *slot) {
  const uint32_t few = 8, len = (uint32_t)idx->shape[dim];
  orr_view place = orr_places(idx, idx->ndim), to = orr_only(gx, ~0u, idx);
  const orr_view *views[4] = {idx, &to, g, &place};
  orr_by_dtype(gx->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_pieces(orr_axes_of(views, 1u << dim),
               [&](const orr_axes<4> &rows, const int64_t(&at)[4]) {
                 scattering<E> s = {};
                 s.gx = orr_at<E>(gx, 0);
                 s.g = orr_at<E>(g, 0);
                 s.index = idx->data;
                 s.dtype = idx->dtype;
                 s.len = len;
                 s.size = gx->shape[dim];
                 s.gx_stride = gx->stride[dim], s.g_stride = g->stride[dim];
                 s.index_stride = idx->stride[dim], s.place_stride = place.stride[dim];
                 s.slot = slot;
                 s.rows = orr_part_of(rows, at);
                 const uint32_t padded = orr_power_above(len);
                 if (len <= few)
                   ORR_LAUNCH(scatter_rows<E>, orr_grid(rows.n, ORR_BLOCK), ORR_BLOCK, 0, s);
                 else
                   ORR_LAUNCH(scatter_tiles<E>, orr_grid(rows.n, ORR_PAIRS_TILE / padded),
                              ORR_BLOCK, 0, s, padded);
               });
  });
}

ORR_EXPORT void orr_cuda_scatter_add(const orr_view *gx, int dim, const orr_view *idx,
                                     const orr_view *g, orr_fault *) {
  const int64_t size = gx->shape[dim];
  if (orr_numel(idx) == 0) return;
  orr_cuda_fault_slot *slot = orr_cuda_fault(size);
  if (idx->shape[dim] <= ORR_PAIRS_TILE) {
    scatter_short(gx, dim, idx, g, slot);
    return;
  }
  orr_view number = orr_places(idx, idx->ndim), row = orr_row_numbers(idx, dim);
  const orr_view *views[3] = {idx, &number, &row};
  orr_pair *pairs = sorted_keys(views, size, 0, size, slot);
  if (!pairs) return;
  orr_view still = orr_only(gx, ~(1u << dim), idx);
  orr_axes<2> one = {};
  one.n = 1;
  add_sorted(gx, size, gx->stride[dim], g, pairs, (uint32_t)orr_numel(idx), in_order(&still, g),
             one);
}
