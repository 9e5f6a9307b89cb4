/* window.cuh: sliding windows over height and width on CUDA, shared by pooling and convolution.
 *
 * Invariant: as window.h: tap t of output o reads input o stride - padding + t dilation, where
 * that is inside. Places are 32-bit, so that their divisions are multiplications; what does not
 * fit is refused before a launch.
 * To add an operation on windows: orr_windows_of on the host, and these functions in its body.
 */
#ifndef ORR_WINDOW_CUH
#define ORR_WINDOW_CUH

#include "each.cuh"

extern "C" {
#include "window.h"
}

/* One axis. */
struct orr_axis {
  int32_t kernel, stride, padding, dilation, in, out;
  orr_divider by_stride, by_dilation;
  /* The input that tap t of output o reads; -1: none. */
  __device__ inline int32_t input(int32_t o, int32_t t) const {
    const int32_t at = o * stride - padding + t * dilation;
    return at < in ? at < 0 ? -1 : at : -1;
  }
  /* The output whose tap t reads input i; -1: none. */
  __device__ inline int32_t output(int32_t i, int32_t t) const {
    const int32_t at = i + padding - t * dilation;
    if (at < 0) return -1;
    const int32_t o = (int32_t)by_stride.over((uint32_t)at);
    return o < out && o * stride == at ? o : -1;
  }
  /* The outputs whose windows may reach input i: [lo, hi). */
  __device__ inline void outputs(int32_t i, int32_t *lo, int32_t *hi) const {
    const int32_t at = i + padding, first = at - dilation * (kernel - 1);
    const int32_t end = (int32_t)by_stride.over((uint32_t)at) + 1;
    *lo = first <= 0 ? 0 : (int32_t)by_stride.over((uint32_t)(first + stride - 1));
    *hi = end < out ? end : out;
  }
  /* Whether some tap of output o, one of outputs(i), reads input i. */
  __device__ inline bool holds(int32_t o, int32_t i) const {
    if (dilation == 1) return true;
    const int32_t d = i + padding - o * stride;
    return (int32_t)by_dilation.over((uint32_t)d) * dilation == d;
  }
  /* Taps of output o that lie inside. */
  __device__ inline int32_t inside(int32_t o) const {
    int32_t n = 0;
    for (int32_t t = 0; t < kernel; t++) n += input(o, t) >= 0;
    return n;
  }
};

struct orr_windows {
  orr_axis axis[2]; /* height, width */
};

/* Planes of `in` and of `out`. False: too large, and recorded. */
static inline bool orr_windows_of(const orr_window *w, const orr_view *in, const orr_view *out,
                                  orr_windows *windows) {
  const int64_t most = (int64_t)1 << 28;
  for (int a = 0; a < 2; a++) {
    const int64_t inputs = in->shape[2 + a], outputs = out->shape[2 + a];
    const int64_t kernel = w->kernel[a], padding = w->padding[a];
    /* One output, or one tap, takes no step. */
    const int64_t stride = outputs > 1 ? w->stride[a] : 1;
    const int64_t dilation = kernel > 1 ? w->dilation[a] : 1;
    if (inputs > most || outputs > most || kernel > most || padding > most || stride > most ||
        dilation > most) {
      orr_cuda_check(cudaErrorInvalidValue, "a window over more than 2^28 places");
      return false;
    }
    windows->axis[a] = orr_axis{
        (int32_t)kernel, (int32_t)stride,  (int32_t)padding,       (int32_t)dilation,
        (int32_t)inputs, (int32_t)outputs, orr_divider_of(stride), orr_divider_of(dilation)};
  }
  return true;
}

/* A 4-d tensor by its strides. */
template <typename E>
struct orr_tensor4 {
  E *data;
  int64_t s[4];
  __device__ inline E *at(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return data + a * s[0] + b * s[1] + c * s[2] + d * s[3];
  }
};
template <typename E>
static inline orr_tensor4<E> orr_tensor4_of(const orr_view *v) {
  return orr_tensor4<E>{orr_at<E>(v, 0),
                        {v->stride[0], v->stride[1], v->stride[2], v->stride[3]}};
}

/* The coordinates of an element of a 4-d result; off[0] is the element's own. */
struct orr_coordinates {
  orr_view of[4];
  const orr_view *views[5];
  explicit orr_coordinates(const orr_view *y) {
    views[0] = y;
    for (int d = 0; d < 4; d++) {
      of[d] = orr_coordinate(y, d);
      views[1 + d] = &of[d];
    }
  }
};

#endif
