/* softmax.cu: softmax, log_softmax and logsumexp along one dimension on CUDA.
 *
 * Invariant: exponentials are of x - max(x); the maximum and the sum are found in one pass and
 * joined as pairs (M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax",
 * 2018, algorithm 3).
 * To add a function of rows: a body, as these.
 */
#include "row.cuh"

extern "C" {
#include "softmax.h"
}

/* The greatest number so far, and the sum of exp(x - greatest). */
template <typename C> struct peak {
  C max, sum;
  __device__ void add(C x) {
    if (x > max) {
      sum = sum * orr_m_exp(max - x) + (C)1;
      max = x;
    } else {
      sum += x == max ? (C)1 : orr_m_exp(x - max);
    }
  }
};

struct join_peaks {
  template <typename C> __device__ peak<C> operator()(peak<C> a, peak<C> b) const {
    C max = a.max > b.max ? a.max : b.max;
    C x = a.max == max ? a.sum : a.sum * orr_m_exp(a.max - max);
    C y = b.max == max ? b.sum : b.sum * orr_m_exp(b.max - max);
    return peak<C>{max, x + y};
  }
};

template <typename C, typename Team, typename E>
static __device__ inline peak<C> peak_of(const Team &team, const E *x, int64_t stride,
                                         uint32_t len) {
  peak<C> p = {(C)-INFINITY, (C)0};
  for (uint32_t i = team.lane; i < len; i += team.size) p.add(orr_get(x + i * stride));
  return team.join(p, peak<C>{(C)-INFINITY, (C)0}, join_peaks());
}

/* Views: y, x. */
template <typename E> struct softmax_body {
  typedef orr_compute<E> C;
  const E *x;
  E *y;
  int64_t x_stride, y_stride;
  uint32_t len;
  bool log;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[2]) const {
    const E *from = x + off[1];
    E *to = y + off[0];
    peak<C> p = peak_of<C>(team, from, x_stride, len);
    C scale = (C)1 / p.sum, rest = orr_m_log(p.sum);
    for (uint32_t i = team.lane; i < len; i += team.size) {
      C v = orr_get(from + i * x_stride) - p.max;
      orr_put(to + i * y_stride, log ? v - rest : orr_m_exp(v) * scale);
    }
  }
};

static void forward(const orr_view *x, int dim, const orr_view *y, bool log) {
  const orr_view *views[2] = {y, x};
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_rows(views, dim, [&](const int64_t (&at)[2]) {
      return softmax_body<E>{orr_at<E>(x, at[1]), orr_at<E>(y, at[0]), x->stride[dim],
                             y->stride[dim],      (uint32_t)x->shape[dim], log};
    });
  });
}

ORR_EXPORT void orr_cuda_softmax(const orr_view *x, int dim, const orr_view *y) {
  forward(x, dim, y, false);
}

ORR_EXPORT void orr_cuda_log_softmax(const orr_view *x, int dim, const orr_view *y) {
  forward(x, dim, y, true);
}

/* Views: gx, y, g. */
template <typename E> struct back_body {
  typedef orr_compute<E> C;
  const E *y, *g;
  E *gx;
  int64_t y_stride, g_stride, gx_stride;
  uint32_t len;
  bool log;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[3]) const {
    const E *ys = y + off[1], *gs = g + off[2];
    C part = 0;
    for (uint32_t i = team.lane; i < len; i += team.size) {
      C gi = orr_get(gs + i * g_stride);
      part += log ? gi : gi * orr_get(ys + i * y_stride);
    }
    C all = team.sum(part);
    for (uint32_t i = team.lane; i < len; i += team.size) {
      C gi = orr_get(gs + i * g_stride), yi = orr_get(ys + i * y_stride);
      orr_put(gx + off[0] + i * gx_stride, log ? gi - orr_m_exp(yi) * all : yi * (gi - all));
    }
  }
};

static void backward(const orr_view *y, const orr_view *g, int dim, const orr_view *gx,
                     bool log) {
  const orr_view *views[3] = {gx, y, g};
  orr_by_float(y->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_rows(views, dim, [&](const int64_t (&at)[3]) {
      return back_body<E>{orr_at<E>(y, at[1]), orr_at<E>(g, at[2]),      orr_at<E>(gx, at[0]),
                          y->stride[dim],      g->stride[dim],           gx->stride[dim],
                          (uint32_t)y->shape[dim], log};
    });
  });
}

ORR_EXPORT void orr_cuda_softmax_back(const orr_view *y, const orr_view *g, int dim,
                                      const orr_view *gx) {
  backward(y, g, dim, gx, false);
}

ORR_EXPORT void orr_cuda_log_softmax_back(const orr_view *y, const orr_view *g, int dim,
                                          const orr_view *gx) {
  backward(y, g, dim, gx, true);
}

/* Views: x, y. */
template <typename E> struct logsumexp_body {
  typedef orr_compute<E> C;
  const E *x;
  void *y;
  orr_dtype dtype;
  int64_t stride;
  uint32_t len;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[2]) const {
    peak<C> p = peak_of<C>(team, x + off[0], stride, len);
    C value = p.max == (C)INFINITY ? p.max : orr_m_log(p.sum) + p.max;
    if (team.lane == 0) orr_write_number(y, dtype, off[1], value);
  }
};

ORR_EXPORT void orr_cuda_logsumexp(const orr_view *x, int dim, const orr_view *y) {
  orr_view kept = orr_with_dim(y, dim, x->ndim);
  const orr_view *views[2] = {x, &kept};
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_rows(views, dim, [&](const int64_t (&at)[2]) {
      char *to = (char *)y->data + at[1] * (int64_t)orr_size_of(y->dtype);
      return logsumexp_body<E>{orr_at<E>(x, at[0]), to, y->dtype, x->stride[dim],
                               (uint32_t)x->shape[dim]};
    });
  });
}
