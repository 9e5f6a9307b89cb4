/* conv.cu: direct 2-d convolution on CUDA, for every float type and stride: the reference, and
 * the path of what cuDNN does not take.
 *
 * Invariant: each element is summed by one lane (one warp, for weights) in a fixed order.
 * To add a pass: a body over the elements of its result.
 */
#include "each.cuh"

extern "C" {
#include "conv.h"
#include "reduce.h"
void orr_cuda_reduce(orr_reduce_kind kind, const orr_view *x, unsigned mask, const orr_view *y);
}

struct geometry {
  int64_t stride[2], padding[2], dilation[2], kernel[2];
  int64_t in[2], out[2]; /* planes of x and y */
  int64_t samples, in_channels, out_channels; /* channels of one group */
};

/* x (N, C, H, W), y (N, O, OH, OW) as the two ends of the convolution. */
static geometry geometry_of(const orr_window *w, int64_t groups, const orr_view *x,
                            const orr_view *y) {
  geometry g = {};
  for (int a = 0; a < 2; a++) {
    g.stride[a] = w->stride[a];
    g.padding[a] = w->padding[a];
    g.dilation[a] = w->dilation[a];
    g.kernel[a] = w->kernel[a];
    g.in[a] = x->shape[2 + a];
    g.out[a] = y->shape[2 + a];
  }
  g.samples = x->shape[0];
  g.in_channels = x->shape[1] / groups;
  g.out_channels = y->shape[1] / groups;
  return g;
}

template <typename E> struct tensor4 {
  const E *data;
  int64_t s[4];
  __device__ orr_compute<E> at(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return orr_get(data + a * s[0] + b * s[1] + c * s[2] + d * s[3]);
  }
};
template <typename E> static tensor4<E> tensor4_of(const orr_view *v) {
  return tensor4<E>{orr_at<E>(v, 0), {v->stride[0], v->stride[1], v->stride[2], v->stride[3]}};
}

/* The coordinates of an element of a 4-d result; off[0] is the element's own. */
struct coordinates {
  orr_view of[4];
  const orr_view *views[5];
  explicit coordinates(const orr_view *y) {
    views[0] = y;
    for (int d = 0; d < 4; d++) {
      of[d] = orr_coordinate(y, d);
      views[1 + d] = &of[d];
    }
  }
};

template <typename E> struct forward_body {
  typedef orr_compute<E> C;
  geometry g;
  tensor4<E> x, w;
  const E *b;
  int64_t b_stride;
  E *y;
  __device__ void at(const int64_t (&off)[5]) const {
    int64_t n = off[1], o = off[2], first = o / g.out_channels * g.in_channels;
    C sum = b ? orr_get(b + o * b_stride) : (C)0;
    for (int64_t c = 0; c < g.in_channels; c++)
      for (int64_t i = 0; i < g.kernel[0]; i++) {
        int64_t h = off[3] * g.stride[0] - g.padding[0] + i * g.dilation[0];
        if (h < 0 || h >= g.in[0]) continue;
        for (int64_t j = 0; j < g.kernel[1]; j++) {
          int64_t k = off[4] * g.stride[1] - g.padding[1] + j * g.dilation[1];
          if (k >= 0 && k < g.in[1]) sum += x.at(n, first + c, h, k) * w.at(o, c, i, j);
        }
      }
    orr_put(y + off[0], sum);
  }
};

ORR_EXPORT int orr_cuda_direct_conv2d(const orr_view *x, const orr_view *w, const orr_view *b,
                                       const orr_window *window, int64_t groups,
                                       const orr_view *y) {
  coordinates at(y);
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    forward_body<E> body = {geometry_of(window, groups, x, y),
                            tensor4_of<E>(x),
                            tensor4_of<E>(w),
                            b ? orr_at<E>(b, 0) : NULL,
                            b ? b->stride[0] : 0,
                            orr_at<E>(y, 0)};
    orr_each(at.views, [&](const int64_t (&)[5]) { return body; });
  });
  return 0;
}

template <typename E> struct back_data_body {
  typedef orr_compute<E> C;
  geometry g;
  tensor4<E> gy, w;
  E *gx;
  /* The output whose tap t reads input i; -1: none. */
  __device__ int64_t output(int axis, int64_t i, int64_t t) const {
    int64_t at = i + g.padding[axis] - t * g.dilation[axis];
    if (at < 0 || at % g.stride[axis]) return -1;
    at /= g.stride[axis];
    return at < g.out[axis] ? at : -1;
  }
  __device__ void at(const int64_t (&off)[5]) const {
    int64_t n = off[1], c = off[2] % g.in_channels;
    int64_t first = off[2] / g.in_channels * g.out_channels;
    C sum = 0;
    for (int64_t i = 0; i < g.kernel[0]; i++) {
      int64_t h = output(0, off[3], i);
      for (int64_t j = 0; h >= 0 && j < g.kernel[1]; j++) {
        int64_t k = output(1, off[4], j);
        for (int64_t o = 0; k >= 0 && o < g.out_channels; o++)
          sum += gy.at(n, first + o, h, k) * w.at(first + o, c, i, j);
      }
    }
    orr_put(gx + off[0], sum);
  }
};

ORR_EXPORT int orr_cuda_direct_conv2d_back_data(const orr_view *gy, const orr_view *w,
                                                 const orr_window *window, int64_t groups,
                                                 const orr_view *gx) {
  coordinates at(gx);
  orr_by_float(gy->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    back_data_body<E> body = {geometry_of(window, groups, gx, gy), tensor4_of<E>(gy),
                              tensor4_of<E>(w), orr_at<E>(gx, 0)};
    orr_each(at.views, [&](const int64_t (&)[5]) { return body; });
  });
  return 0;
}

/* A row is one weight; its elements are the samples' output planes. */
template <typename E> struct back_weight_body {
  typedef orr_compute<E> C;
  geometry g;
  tensor4<E> x, gy;
  E *gw;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[5]) const {
    int64_t o = off[1], c = o / g.out_channels * g.in_channels + off[2];
    int64_t plane = g.out[0] * g.out[1];
    C sum = 0;
    for (int64_t p = team.lane; p < g.samples * plane; p += team.size) {
      int64_t n = p / plane, oh = p % plane / g.out[1], ow = p % g.out[1];
      int64_t h = oh * g.stride[0] - g.padding[0] + off[3] * g.dilation[0];
      int64_t k = ow * g.stride[1] - g.padding[1] + off[4] * g.dilation[1];
      if (h < 0 || h >= g.in[0] || k < 0 || k >= g.in[1]) continue;
      sum += x.at(n, c, h, k) * gy.at(n, o, oh, ow);
    }
    sum = team.sum(sum);
    if (team.lane == 0) orr_put(gw + off[0], sum);
  }
};

ORR_EXPORT int orr_cuda_direct_conv2d_back_weight(const orr_view *x, const orr_view *gy,
                                                   const orr_window *window, int64_t groups,
                                                   const orr_view *gw, const orr_view *gb) {
  orr_view rows = *gw, of[4];
  if (orr_numel(gw) > 0) {
    rows.shape[rows.ndim] = 32; /* a warp a weight */
    rows.stride[rows.ndim++] = 0;
    const orr_view *views[5] = {&rows, &of[0], &of[1], &of[2], &of[3]};
    for (int d = 0; d < 4; d++) of[d] = orr_coordinate(&rows, d);
    orr_by_float(x->dtype, [&](auto tag) {
      typedef typename decltype(tag)::type E;
      back_weight_body<E> body = {geometry_of(window, groups, x, gy), tensor4_of<E>(x),
                                  tensor4_of<E>(gy), orr_at<E>(gw, 0)};
      orr_rows(views, 4, [&](const int64_t (&)[5]) { return body; });
    });
  }
  if (!gb) return 0;
  orr_view sums = *gb;
  sums.ndim = 4;
  for (int d = 0; d < 4; d++) {
    sums.shape[d] = d == 1 ? gb->shape[0] : 1;
    sums.stride[d] = d == 1 ? gb->stride[0] : 0;
  }
  orr_cuda_reduce(ORR_REDUCE_SUM, gy, 1u | 4u | 8u, &sums);
  return 0;
}
