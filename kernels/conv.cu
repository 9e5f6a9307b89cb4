/* conv.cu: direct 2-d convolution on CUDA, for every float type and stride: the reference, and
 * the path of what cuDNN does not take.
 *
 * Invariant: each element is summed by one lane (one warp, for weights) in a fixed order.
 * To add a pass: a body over the elements of its result.
 */
#include "window.cuh"

extern "C" {
#include "conv.h"
#include "reduce.h"
void orr_cuda_reduce(orr_reduce_kind kind, const orr_view *x, unsigned mask, const orr_view *y);
}

/* x (N, C, H, W), w (O, C / groups, KH, KW), y (N, O, OH, OW). */
template <typename E>
struct convolution {
  typedef orr_compute<E> C;
  orr_windows window;
  orr_tensor4<E> x, w, y;
  int64_t samples;
  int32_t in_channels, out_channels; /* of one group */
  orr_divider by_in, by_out;
  /* The first channel of x that output channel o reads. */
  __device__ inline int64_t first_in(int64_t o) const {
    return (int64_t)by_out.over((uint32_t)o) * in_channels;
  }
};

static inline int64_t at_least_one(int64_t n) { return n > 0 ? n : 1; }

/* Calls f(convolution); nothing where it is too large. */
template <typename F>
static void convolve(const orr_view *x, const orr_view *w, const orr_view *y,
                     const orr_window *window, int64_t groups, F f) {
  orr_windows windows;
  if (!orr_windows_of(window, x, y, &windows)) return;
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    const int64_t in = x->shape[1] / groups, out = y->shape[1] / groups;
    f(convolution<E>{windows, orr_tensor4_of<E>(x), orr_tensor4_of<E>(w), orr_tensor4_of<E>(y),
                     x->shape[0], (int32_t)in, (int32_t)out, orr_divider_of(at_least_one(in)),
                     orr_divider_of(at_least_one(out))});
  });
}

template <typename E>
struct conv_forward {
  convolution<E> c;
  const E *b; /* may be NULL */
  int64_t b_stride;
  __device__ void at(const int64_t (&off)[5]) const {
    const orr_axis &height = c.window.axis[0], &width = c.window.axis[1];
    const int32_t h = (int32_t)off[3], k = (int32_t)off[4];
    const E *from = c.x.at(off[1], c.first_in(off[2]), 0, 0), *by = c.w.at(off[2], 0, 0, 0);
    orr_compute<E> sum = b ? orr_get(b + off[2] * b_stride) : (orr_compute<E>)0;
    for (int32_t q = 0; q < c.in_channels; q++, from += c.x.s[1], by += c.w.s[1])
      for (int32_t i = 0; i < height.kernel; i++) {
        const int32_t row = height.input(h, i);
        for (int32_t j = 0; row >= 0 && j < width.kernel; j++) {
          const int32_t column = width.input(k, j);
          if (column < 0) continue;
          sum += orr_get(from + row * c.x.s[2] + column * c.x.s[3]) *
                 orr_get(by + i * c.w.s[2] + j * c.w.s[3]);
        }
      }
    orr_put(c.y.data + off[0], sum);
  }
};

ORR_EXPORT int orr_cuda_direct_conv2d(const orr_view *x, const orr_view *w, const orr_view *b,
                                      const orr_window *window, int64_t groups,
                                      const orr_view *y) {
  orr_coordinates at(y);
  convolve(x, w, y, window, groups, [&](const auto &c) {
    typedef typename std::remove_pointer<decltype(c.x.data)>::type E;
    orr_each(at.views, conv_forward<E>{c, b ? orr_at<E>(b, 0) : NULL, b ? b->stride[0] : 0});
  });
  return 0;
}

template <typename E>
struct conv_back_data {
  convolution<E> c;
  __device__ void at(const int64_t (&off)[5]) const {
    const orr_axis &height = c.window.axis[0], &width = c.window.axis[1];
    const uint32_t group = c.by_in.over((uint32_t)off[2]);
    const int64_t first = (int64_t)group * c.out_channels;
    const int64_t channel = off[2] - (int64_t)group * c.in_channels;
    const E *from = c.y.at(off[1], first, 0, 0), *by = c.w.at(first, channel, 0, 0);
    orr_compute<E> sum = 0;
    for (int32_t i = 0; i < height.kernel; i++) {
      const int32_t row = height.output((int32_t)off[3], i);
      for (int32_t j = 0; row >= 0 && j < width.kernel; j++) {
        const int32_t column = width.output((int32_t)off[4], j);
        if (column < 0) continue;
        const E *g = from + row * c.y.s[2] + column * c.y.s[3];
        const E *w = by + i * c.w.s[2] + j * c.w.s[3];
        for (int32_t o = 0; o < c.out_channels; o++, g += c.y.s[1], w += c.w.s[0])
          sum += orr_get(g) * orr_get(w);
      }
    }
    orr_put(c.x.data + off[0], sum);
  }
};

ORR_EXPORT int orr_cuda_direct_conv2d_back_data(const orr_view *g, const orr_view *w,
                                                const orr_window *window, int64_t groups,
                                                const orr_view *gx) {
  orr_coordinates at(gx);
  convolve(gx, w, g, window, groups, [&](const auto &c) {
    typedef typename std::remove_pointer<decltype(c.x.data)>::type E;
    orr_each(at.views, conv_back_data<E>{c});
  });
  return 0;
}

enum { TERMS = 64 };

/* A warp a weight: lanes go along the samples' output planes, and sum runs of TERMS, so that
 * long sums in f32 stay exact to many digits. */
template <typename E>
static __global__ void __launch_bounds__(ORR_BLOCK)
    back_weight_kernel(convolution<E> c, orr_part<5> weights) {
  typedef orr_compute<E> C;
  const orr_axis &height = c.window.axis[0], &width = c.window.axis[1];
  const int32_t lane = (int32_t)threadIdx.x % ORR_WARP;
  const uint32_t per_block = ORR_BLOCK / ORR_WARP;
  for (uint32_t i = blockIdx.x * per_block + threadIdx.x / ORR_WARP; i < weights.walk.n;
       i += gridDim.x * per_block) {
    int64_t off[5];
    weights.at(i, off);
    const E *from = c.x.at(0, c.first_in(off[1]) + off[2], 0, 0), *by = c.y.at(0, off[1], 0, 0);
    int32_t h = 0, k = lane, left = TERMS;
    C sum = 0, run = 0;
    for (int64_t n = 0; n < c.samples; k += ORR_WARP) {
      for (; k >= width.out && h < height.out; h++) k -= width.out;
      if (h >= height.out) { /* the next sample; its first row takes k places more */
        h = 0, n++;
        from += c.x.s[0], by += c.y.s[0];
        k -= ORR_WARP;
        continue;
      }
      const int32_t row = height.input(h, (int32_t)off[3]);
      const int32_t column = width.input(k, (int32_t)off[4]);
      if (row >= 0 && column >= 0)
        run += orr_get(from + row * c.x.s[2] + column * c.x.s[3]) *
               orr_get(by + h * c.y.s[2] + k * c.y.s[3]);
      if (--left > 0) continue;
      sum += run;
      run = 0;
      left = TERMS;
    }
    sum = orr_warp_join(sum + run, orr_plus());
    if (lane == 0) orr_put(c.w.data + off[0], sum);
  }
}

ORR_EXPORT int orr_cuda_direct_conv2d_back_weight(const orr_view *x, const orr_view *g,
                                                  const orr_window *window, int64_t groups,
                                                  const orr_view *gw, const orr_view *gb) {
  orr_coordinates at(gw);
  convolve(x, gw, g, window, groups, [&](const auto &c) {
    typedef typename std::remove_pointer<decltype(c.x.data)>::type E;
    orr_pieces(orr_axes_of(at.views), [&](const orr_axes<5> &piece, const int64_t(&from)[5]) {
      ORR_LAUNCH(back_weight_kernel<E>, orr_grid(piece.n, ORR_BLOCK / ORR_WARP), ORR_BLOCK, 0,
                 c, orr_part_of(piece, from));
    });
  });
  if (!gb) return 0;
  orr_view sums = *gb;
  sums.ndim = 4;
  for (int d = 0; d < 4; d++) {
    sums.shape[d] = d == 1 ? gb->shape[0] : 1;
    sums.stride[d] = d == 1 ? gb->stride[0] : 0;
  }
  orr_cuda_reduce(ORR_REDUCE_SUM, g, 1u | 4u | 8u, &sums);
  return 0;
}
