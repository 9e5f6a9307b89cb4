/* loop.c: the walk over views, and the buffers between a view's rows and the type they are
 * computed in.
 *
 * Invariant: see loop.h. A range of the walk may start and end inside a row.
 * To add a dtype: its size, its compute dtype, and a case in load and store.
 */
#include "vector.h"

#include "loop.h"

#include <string.h>

#include "half.h"
#include "parallel.h"

size_t orr_element_size(orr_dtype dtype) {
  static const unsigned char size[ORR_N_DTYPES] = {8, 4, 2, 2, 8, 4, 1, 1};
  return size[dtype];
}

int64_t orr_view_numel(const orr_view *view) {
  int64_t n = 1;
  for (int d = 0; d < view->ndim; d++) n *= view->shape[d];
  return n;
}

bool orr_view_contiguous(const orr_view *view) {
  int64_t expected = 1;
  for (int d = view->ndim - 1; d >= 0; d--) {
    if (view->shape[d] != 1 && view->stride[d] != expected) return false;
    expected *= view->shape[d];
  }
  return true;
}

/* ---- the walk ---------------------------------------------------------------------------- */

/* Dimension 0 is the outermost; strides are in elements. */
typedef struct walk {
  int n_views, ndim;
  int64_t shape[ORR_MAX_DIM];
  int64_t stride[ORR_MAX_DIM][ORR_LOOP_VIEWS];
  char *data[ORR_LOOP_VIEWS];
  size_t size[ORR_LOOP_VIEWS];
  orr_row_fn *row;
  const void *context;
} walk;

static int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

/* Dimensions longer than one, by falling stride of the output, then of the first input. */
static void order(int n_views, const orr_view *const *views, int *dims, int *n_dims) {
  const orr_view *y = views[0], *x = views[n_views > 1];
  *n_dims = 0;
  for (int d = 0; d < y->ndim; d++) {
    if (y->shape[d] == 1) continue;
    int at = (*n_dims)++;
    for (; at > 0; at--) {
      int before = dims[at - 1];
      int64_t mine = magnitude(y->stride[d]), its = magnitude(y->stride[before]);
      if (mine < its) break;
      if (mine == its && magnitude(x->stride[d]) <= magnitude(x->stride[before])) break;
      dims[at] = before;
    }
    dims[at] = d;
  }
}

static bool joins(const walk *w, const orr_view *const *views, int d) {
  const int64_t *outer = w->stride[w->ndim - 1];
  for (int v = 0; v < w->n_views; v++) {
    if (outer[v] != views[v]->stride[d] * views[v]->shape[d]) return false;
  }
  return true;
}

static void plan_walk(walk *w, int n_views, const orr_view *const *views) {
  int dims[ORR_MAX_DIM], n_dims;
  w->n_views = n_views;
  w->ndim = 0;
  order(n_views, views, dims, &n_dims);
  for (int i = 0; i < n_dims; i++) {
    int d = dims[i];
    int64_t length = views[0]->shape[d];
    if (w->ndim > 0 && joins(w, views, d)) {
      length *= w->shape[w->ndim - 1];
    } else {
      w->ndim++;
    }
    w->shape[w->ndim - 1] = length;
    for (int v = 0; v < n_views; v++) w->stride[w->ndim - 1][v] = views[v]->stride[d];
  }
  if (w->ndim == 0) {
    w->ndim = 1;
    w->shape[0] = 1;
    for (int v = 0; v < n_views; v++) w->stride[0][v] = 1;
  }
  for (int v = 0; v < n_views; v++) {
    w->data[v] = views[v]->data;
    w->size[v] = orr_element_size(views[v]->dtype);
  }
}

static void walk_range(const void *context, int64_t begin, int64_t end) {
  const walk *w = context;
  int inner = w->ndim - 1;
  int64_t index[ORR_MAX_DIM], rest = begin;
  char *data[ORR_LOOP_VIEWS];
  for (int v = 0; v < w->n_views; v++) data[v] = w->data[v];
  for (int d = inner; d >= 0; d--) {
    index[d] = rest % w->shape[d];
    rest /= w->shape[d];
    for (int v = 0; v < w->n_views; v++) {
      data[v] += index[d] * w->stride[d][v] * (int64_t)w->size[v];
    }
  }
  while (begin < end) {
    int64_t n = w->shape[inner] - index[inner];
    if (n > end - begin) n = end - begin;
    w->row(w->context, n, data, w->stride[inner]);
    begin += n;
    if (begin >= end) return;
    int64_t back = index[inner];
    index[inner] = 0;
    int d = inner - 1;
    while (d > 0 && index[d] + 1 == w->shape[d]) d--;
    for (int v = 0; v < w->n_views; v++) {
      int64_t step = w->stride[d][v] - back * w->stride[inner][v];
      for (int e = d + 1; e < inner; e++) step -= index[e] * w->stride[e][v];
      data[v] += step * (int64_t)w->size[v];
    }
    index[d]++;
    for (int e = d + 1; e < inner; e++) index[e] = 0;
  }
}

static bool all_contiguous(int n_views, const orr_view *const *views) {
  for (int v = 0; v < n_views; v++) {
    if (!orr_view_contiguous(views[v])) return false;
  }
  return true;
}

void orr_loop_run(int n_views, const orr_view *const *views, int64_t grain, orr_row_fn *row,
                  const void *context) {
  int64_t n = orr_view_numel(views[0]);
  if (n == 0) return;
  if (n <= grain && all_contiguous(n_views, views)) {
    static const int64_t ones[ORR_LOOP_VIEWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                 1, 1, 1, 1, 1, 1, 1, 1, 1};
    char *data[ORR_LOOP_VIEWS];
    for (int v = 0; v < n_views; v++) data[v] = views[v]->data;
    row(context, n, data, ones);
    return;
  }
  walk w;
  plan_walk(&w, n_views, views);
  w.row = row;
  w.context = context;
  orr_parallel(n, grain, walk_range, &w);
}

/* ---- rows in their compute type ---------------------------------------------------------- */

orr_dtype orr_compute_dtype(orr_dtype dtype) {
  if (dtype == ORR_F16 || dtype == ORR_BF16) return ORR_F32;
  return dtype == ORR_BOOL ? ORR_U8 : dtype;
}

#define GATHER(T)                                                     \
  {                                                                   \
    const T *x = from;                                                \
    T *y = to;                                                        \
    for (int64_t i = 0; i < n; i++) y[i * to_stride] = x[i * stride]; \
  }                                                                   \
  break;

static void move_row(size_t size, const void *from, int64_t stride, void *to, int64_t to_stride,
                     int64_t n) {
  switch (size) {
    case 8: GATHER(uint64_t)
    case 4: GATHER(uint32_t)
    case 2: GATHER(uint16_t)
    default: GATHER(uint8_t)
  }
}

const void *orr_load_row(orr_dtype dtype, const void *data, int64_t stride, int64_t n,
                         orr_chunk *buffer) {
  bool half = dtype == ORR_F16 || dtype == ORR_BF16;
  if (!half && stride == 1) return data;
  if (!half) {
    move_row(orr_element_size(dtype), data, stride, buffer->bytes, 1, n);
    return buffer->bytes;
  }
  uint16_t tight[ORR_CHUNK];
  const uint16_t *x = data;
  if (stride != 1) {
    move_row(2, data, stride, tight, 1, n);
    x = tight;
  }
  if (dtype == ORR_F16) orr_f32_from_f16_row(n, x, (float *)(void *)buffer->bytes);
  if (dtype == ORR_BF16) orr_f32_from_bf16_row(n, x, (float *)(void *)buffer->bytes);
  return buffer->bytes;
}

void *orr_open_row(orr_dtype dtype, void *data, int64_t stride, orr_chunk *buffer) {
  bool half = dtype == ORR_F16 || dtype == ORR_BF16;
  return !half && stride == 1 ? data : buffer->bytes;
}

void orr_store_row(orr_dtype dtype, const void *from, void *data, int64_t stride, int64_t n) {
  if (dtype == ORR_F16 || dtype == ORR_BF16) {
    uint16_t tight[ORR_CHUNK], *y = stride == 1 ? data : tight;
    if (dtype == ORR_F16) orr_f16_from_f32_row(n, from, y);
    if (dtype == ORR_BF16) orr_bf16_from_f32_row(n, from, y);
    if (stride != 1) move_row(2, tight, 1, data, stride, n);
    return;
  }
  if (dtype == ORR_BOOL) {
    uint8_t *y = data;
    const uint8_t *x = from;
    for (int64_t i = 0; i < n; i++) y[i * stride] = x[i] != 0;
    return;
  }
  if (from != data) move_row(orr_element_size(dtype), from, 1, data, stride, n);
}
