/* pool.cu: max and average pooling on CUDA, forward and backward.
 *
 * Invariant: an element is written by one lane, which gathers, in the order of taps, so results
 * do not depend on the launch; padding is never a maximum.
 * To add a pooling: a body each way.
 */
#include "each.cuh"

extern "C" {
#include "pool.h"
}

/* The window of one axis: taps t in [0, kernel) at o stride - padding + t dilation. */
struct window {
  int64_t kernel[2], stride[2], padding[2], dilation[2], size[2], out[2];
  /* The outputs whose windows may hold input i: [lo, hi). */
  __device__ void outputs(int axis, int64_t i, int64_t *lo, int64_t *hi) const {
    int64_t at = i + padding[axis], span = dilation[axis] * (kernel[axis] - 1);
    int64_t first = at - span, s = stride[axis];
    *lo = first <= 0 ? 0 : (first + s - 1) / s;
    *hi = at / s + 1 < out[axis] ? at / s + 1 : out[axis];
  }
  __device__ bool holds(int axis, int64_t o, int64_t i) const {
    int64_t d = i + padding[axis] - o * stride[axis];
    return d >= 0 && d % dilation[axis] == 0 && d / dilation[axis] < kernel[axis];
  }
  /* Elements that an average divides by. */
  __device__ int64_t count(int64_t oh, int64_t ow, bool padded) const {
    int64_t n[2], o[2] = {oh, ow};
    for (int a = 0; a < 2; a++) {
      int64_t begin = o[a] * stride[a] - padding[a], end = begin + kernel[a];
      if (padded) {
        n[a] = kernel[a];
        continue;
      }
      if (begin < 0) begin = 0;
      if (end > size[a]) end = size[a];
      n[a] = end > begin ? end - begin : 0;
    }
    return n[0] * n[1];
  }
};

static window window_of(const orr_window *w, const orr_view *in, const orr_view *out) {
  window v = {};
  for (int a = 0; a < 2; a++) {
    v.kernel[a] = w->kernel[a];
    v.stride[a] = w->stride[a];
    v.padding[a] = w->padding[a];
    v.dilation[a] = w->dilation[a];
    v.size[a] = in->shape[2 + a];
    v.out[a] = out->shape[2 + a];
  }
  return v;
}

/* A plane of a tensor: rows and columns by strides. */
template <typename E> struct plane {
  E *data;
  int64_t h, w;
  __device__ E *at(int64_t off, int64_t y, int64_t x) const { return data + off + y * h + x * w; }
};
template <typename E> static plane<E> plane_of(const orr_view *v) {
  return plane<E>{orr_at<E>(v, 0), v->stride[2], v->stride[3]};
}

enum { SAMPLES_AND_CHANNELS = 3 };

/* Views: y, x by sample and channel, the indices, row, column of y. */
template <typename E> struct forward_body {
  typedef orr_compute<E> C;
  window w;
  plane<E> x;
  E *y;
  void *indices; /* NULL: average */
  orr_dtype dtype;
  bool padded;
  __device__ void maximum(const int64_t (&off)[5]) const {
    C best = -(C)INFINITY;
    int64_t at = -1;
    for (int64_t i = 0; i < w.kernel[0]; i++) {
      int64_t h = off[3] * w.stride[0] - w.padding[0] + i * w.dilation[0];
      if (h < 0 || h >= w.size[0]) continue;
      for (int64_t j = 0; j < w.kernel[1]; j++) {
        int64_t k = off[4] * w.stride[1] - w.padding[1] + j * w.dilation[1];
        if (k < 0 || k >= w.size[1]) continue;
        C v = orr_get(x.at(off[1], h, k));
        if (at >= 0 && !(v > best || (v != v && best == best))) continue;
        best = v;
        at = h * w.size[1] + k;
      }
    }
    orr_put(y + off[0], best);
    orr_write_number(indices, dtype, off[2], at < 0 ? (int64_t)0 : at);
  }
  __device__ void mean(const int64_t (&off)[5]) const {
    C sum = 0;
    for (int64_t i = 0; i < w.kernel[0]; i++) {
      int64_t h = off[3] * w.stride[0] - w.padding[0] + i;
      if (h < 0 || h >= w.size[0]) continue;
      for (int64_t j = 0; j < w.kernel[1]; j++) {
        int64_t k = off[4] * w.stride[1] - w.padding[1] + j;
        if (k >= 0 && k < w.size[1]) sum += orr_get(x.at(off[1], h, k));
      }
    }
    int64_t n = w.count(off[3], off[4], padded);
    orr_put(y + off[0], n ? sum / (C)n : (C)0);
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
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    forward_body<E> body = {window_of(w, x, y),
                            plane_of<E>(x),
                            orr_at<E>(y, 0),
                            indices ? indices->data : NULL,
                            indices ? indices->dtype : ORR_I64,
                            padded};
    orr_each(views, [&](const int64_t (&)[5]) { return body; });
  });
}

/* Views: gx, g by sample and channel, indices the same, row, column of gx. */
template <typename E> struct back_body {
  typedef orr_compute<E> C;
  window w;
  plane<E> g;
  E *gx;
  const void *indices;
  orr_dtype dtype;
  int64_t index_h, index_w;
  bool padded;
  __device__ void at(const int64_t (&off)[5]) const {
    int64_t h = off[3], k = off[4], place = h * w.size[1] + k, lo[2], hi[2];
    C sum = 0;
    w.outputs(0, h, &lo[0], &hi[0]);
    w.outputs(1, k, &lo[1], &hi[1]);
    for (int64_t oh = lo[0]; oh < hi[0]; oh++) {
      if (!w.holds(0, oh, h)) continue;
      for (int64_t ow = lo[1]; ow < hi[1]; ow++) {
        if (!w.holds(1, ow, k)) continue;
        C v = orr_get(g.at(off[1], oh, ow));
        if (!indices) sum += v / (C)w.count(oh, ow, padded);
        else if (orr_index_at(indices, dtype, off[2] + oh * index_h + ow * index_w) == place)
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
  orr_by_float(g->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    back_body<E> body = {window_of(w, gx, g),
                         plane_of<E>(g),
                         orr_at<E>(gx, 0),
                         indices ? indices->data : NULL,
                         indices ? indices->dtype : ORR_I64,
                         indices ? indices->stride[2] : 0,
                         indices ? indices->stride[3] : 0,
                         padded};
    orr_each(views, [&](const int64_t (&)[5]) { return body; });
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
