/* pool.cu: max and average pooling on CUDA, forward and backward.
 *
 * Invariant: an element is written by one lane, which gathers, in the order of taps, so results
 * do not depend on the launch; padding is never a maximum; of equal ones the first is it, and
 * of several NaN the last.
 * To add a pooling: a body each way.
 */
#include "window.cuh"

extern "C" {
#include "pool.h"
}

enum { SAMPLES_AND_CHANNELS = 3 };

/* A plane of a tensor: rows and columns by strides. */
template <typename E>
struct pool_plane {
  E *data;
  int64_t h, w;
  __device__ inline E *at(int64_t off, int32_t y, int32_t x) const {
    return data + off + y * h + x * w;
  }
};
template <typename E>
static pool_plane<E> plane_of(const orr_view *v) {
  return pool_plane<E>{orr_at<E>(v, 0), v->stride[2], v->stride[3]};
}

/* What an average divides by. */
static __device__ inline int64_t divisor(const orr_windows &w, int32_t h, int32_t k,
                                         bool padded) {
  if (padded) return (int64_t)w.axis[0].kernel * w.axis[1].kernel;
  const int64_t n = (int64_t)w.axis[0].inside(h) * w.axis[1].inside(k);
  return n > 0 ? n : 1;
}

/* Views: y, x by sample and channel, the indices, row, column of y. */
template <typename E>
struct pool_forward {
  typedef orr_compute<E> C;
  orr_windows w;
  pool_plane<E> x;
  E *y;
  void *indices; /* NULL: average */
  orr_dtype dtype;
  bool padded;
  __device__ void maximum(const int64_t (&off)[5]) const {
    const int32_t row = (int32_t)off[3], column = (int32_t)off[4];
    C best = -(C)INFINITY;
    int64_t at = -1;
    for (int32_t i = 0; i < w.axis[0].kernel; i++) {
      const int32_t h = w.axis[0].input(row, i);
      for (int32_t j = 0; h >= 0 && j < w.axis[1].kernel; j++) {
        const int32_t k = w.axis[1].input(column, j);
        if (k < 0) continue;
        const C v = orr_get(x.at(off[1], h, k));
        if (at >= 0 && !(v > best || v != v)) continue;
        best = v;
        at = (int64_t)h * w.axis[1].in + k;
      }
    }
    orr_put(y + off[0], best);
    orr_write_number(indices, dtype, off[2], at);
  }
  __device__ void mean(const int64_t (&off)[5]) const {
    const int32_t row = (int32_t)off[3], column = (int32_t)off[4];
    C sum = 0;
    for (int32_t i = 0; i < w.axis[0].kernel; i++) {
      const int32_t h = w.axis[0].input(row, i);
      for (int32_t j = 0; h >= 0 && j < w.axis[1].kernel; j++) {
        const int32_t k = w.axis[1].input(column, j);
        if (k >= 0) sum += orr_get(x.at(off[1], h, k));
      }
    }
    orr_put(y + off[0], sum / (C)divisor(w, row, column, padded));
  }
  __device__ void at(const int64_t (&off)[5]) const {
    if (indices) maximum(off);
    else mean(off);
  }
};

static void forward(const orr_view *x, const orr_window *w, const orr_view *y,
                    const orr_view *indices, bool padded) {
  orr_view from = orr_only(x, SAMPLES_AND_CHANNELS, y);
  orr_view row = orr_coordinate(y, 2), column = orr_coordinate(y, 3);
  const orr_view *views[5] = {y, &from, indices ? indices : y, &row, &column};
  orr_windows windows;
  if (!orr_windows_of(w, x, y, &windows)) return;
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_each(views, pool_forward<E>{windows, plane_of<E>(x), orr_at<E>(y, 0),
                                    indices ? indices->data : NULL,
                                    indices ? indices->dtype : ORR_I64, padded});
  });
}

/* Views: gx, g by sample and channel, indices the same, row, column of gx. */
template <typename E>
struct pool_back {
  typedef orr_compute<E> C;
  orr_windows w;
  pool_plane<E> g;
  E *gx;
  const void *indices; /* NULL: average */
  orr_dtype dtype;
  int64_t index_h, index_w;
  bool padded;
  __device__ void at(const int64_t (&off)[5]) const {
    const int32_t h = (int32_t)off[3], k = (int32_t)off[4];
    const int64_t place = (int64_t)h * w.axis[1].in + k;
    int32_t top, bottom, left, right;
    C sum = 0;
    w.axis[0].outputs(h, &top, &bottom);
    w.axis[1].outputs(k, &left, &right);
    for (int32_t i = top; i < bottom; i++) {
      if (!w.axis[0].holds(i, h)) continue;
      for (int32_t j = left; j < right; j++) {
        if (!w.axis[1].holds(j, k)) continue;
        const C v = orr_get(g.at(off[1], i, j));
        if (!indices) sum += v / (C)divisor(w, i, j, padded);
        else if (orr_index_at(indices, dtype, off[2] + i * index_h + j * index_w) == place)
          sum += v;
      }
    }
    orr_put(gx + off[0], sum);
  }
};

static void backward(const orr_view *g, const orr_view *indices, const orr_window *w,
                     const orr_view *gx, bool padded) {
  orr_view from = orr_only(g, SAMPLES_AND_CHANNELS, gx);
  orr_view places = orr_only(indices ? indices : g, SAMPLES_AND_CHANNELS, gx);
  orr_view row = orr_coordinate(gx, 2), column = orr_coordinate(gx, 3);
  const orr_view *views[5] = {gx, &from, &places, &row, &column};
  orr_windows windows;
  if (!orr_windows_of(w, gx, g, &windows)) return;
  orr_by_float(g->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_each(
        views,
        pool_back<E>{windows, plane_of<E>(g), orr_at<E>(gx, 0), indices ? indices->data : NULL,
                     indices ? indices->dtype : ORR_I64, indices ? indices->stride[2] : 0,
                     indices ? indices->stride[3] : 0, padded});
  });
}

ORR_EXPORT void orr_cuda_max_pool2d(const orr_view *x, const orr_window *w, const orr_view *y,
                                    const orr_view *indices) {
  forward(x, w, y, indices, false);
}

ORR_EXPORT void orr_cuda_max_pool2d_back(const orr_view *g, const orr_view *indices,
                                         const orr_window *w, const orr_view *gx) {
  backward(g, indices, w, gx, false);
}

ORR_EXPORT int orr_cuda_avg_pool2d(const orr_view *x, const orr_window *w,
                                   bool count_include_pad, const orr_view *y) {
  forward(x, w, y, NULL, count_include_pad);
  return 0;
}

ORR_EXPORT int orr_cuda_avg_pool2d_back(const orr_view *g, const orr_window *w,
                                        bool count_include_pad, const orr_view *gx) {
  backward(g, NULL, w, gx, count_include_pad);
  return 0;
}
