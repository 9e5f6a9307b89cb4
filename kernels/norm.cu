/* norm.cu: layer norm and RMS norm over the last dimension on CUDA.
 *
 * Invariant: rows are joined in f32 (f64 for f64); the variance is of deviations from the mean,
 * never a difference of squares. mean NULL is RMS.
 * To add a norm of rows: a body, as these.
 */
#include "columns.cuh"

extern "C" {
#include "norm.h"
}

/* A vector of weights, or none (`otherwise`). */
struct weights {
  const void *data;
  orr_dtype dtype;
  int64_t stride;
  template <typename C> __device__ C at(int64_t i, C otherwise) const {
    return data ? orr_number_at<C>(data, dtype, i * stride) : otherwise;
  }
};

static weights weights_of(const orr_view *w) {
  if (!w) return weights{NULL, ORR_F32, 0};
  return weights{w->data, w->dtype, w->stride[0]};
}

/* A number a row. */
struct numbers {
  void *data;
  orr_dtype dtype;
};

static numbers numbers_of(const orr_view *v, int64_t at) {
  if (!v) return numbers{NULL, ORR_F32};
  return numbers{(char *)v->data + at * (int64_t)orr_size_of(v->dtype), v->dtype};
}

/* ---- forward: views y, x, mean, rstd ---- */

template <typename E> struct norm_body {
  typedef orr_compute<E> C;
  const E *x;
  E *y;
  int64_t x_stride, y_stride;
  uint32_t len;
  weights w, b;
  numbers mean, rstd;
  C eps;
  bool centred;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[4]) const {
    const E *from = x + off[1];
    C m = 0, squares = 0;
    if (centred) {
      C sum = 0;
      for (uint32_t i = team.lane; i < len; i += team.size) sum += orr_get(from + i * x_stride);
      m = team.sum(sum) / (C)len;
    }
    for (uint32_t i = team.lane; i < len; i += team.size) {
      C d = orr_get(from + i * x_stride) - m;
      squares += d * d;
    }
    C s = (C)1 / orr_m_sqrt(team.sum(squares) / (C)len + eps);
    for (uint32_t i = team.lane; i < len; i += team.size) {
      C d = (orr_get(from + i * x_stride) - m) * s;
      orr_put(y + off[0] + i * y_stride, d * w.at<C>(i, 1) + b.at<C>(i, 0));
    }
    if (team.lane != 0) return;
    if (mean.data) orr_write_number(mean.data, mean.dtype, off[2], m);
    orr_write_number(rstd.data, rstd.dtype, off[3], s);
  }
};

static void forward(const orr_view *x, const orr_view *w, const orr_view *b, double eps,
                    const orr_view *y, const orr_view *mean, const orr_view *rstd) {
  int last = x->ndim - 1;
  orr_view m = orr_with_dim(mean ? mean : rstd, last, x->ndim);
  orr_view s = orr_with_dim(rstd, last, x->ndim);
  const orr_view *views[4] = {y, x, &m, &s};
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_rows(views, last, [&](const int64_t (&at)[4]) {
      return norm_body<E>{orr_at<E>(x, at[1]),     orr_at<E>(y, at[0]),
                          x->stride[last],         y->stride[last],
                          (uint32_t)x->shape[last], weights_of(w),
                          weights_of(b),           numbers_of(mean, at[2]),
                          numbers_of(rstd, at[3]), (orr_compute<E>)eps,
                          mean != NULL};
    });
  });
}

ORR_EXPORT void orr_cuda_layer_norm(const orr_view *x, const orr_view *w, const orr_view *b,
                                    double eps, const orr_view *y, const orr_view *mean,
                                    const orr_view *rstd) {
  forward(x, w, b, eps, y, mean, rstd);
}

ORR_EXPORT void orr_cuda_rms_norm(const orr_view *x, const orr_view *w, double eps,
                                  const orr_view *y, const orr_view *rstd) {
  forward(x, w, NULL, eps, y, NULL, rstd);
}

/* ---- the gradient of x: rstd (gw - mean(gw) - xhat mean(gw xhat)), without the second term in
 * RMS; views gx, x, g, mean, rstd ---- */

template <typename E> struct norm_back_body {
  typedef orr_compute<E> C;
  const E *x, *g;
  E *gx;
  int64_t x_stride, g_stride, gx_stride;
  uint32_t len;
  weights w;
  numbers mean, rstd;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[5]) const {
    const E *xs = x + off[1], *gs = g + off[2];
    C m = mean.data ? orr_number_at<C>(mean.data, mean.dtype, off[3]) : (C)0;
    C s = orr_number_at<C>(rstd.data, rstd.dtype, off[4]), sum = 0, dot = 0;
    for (uint32_t i = team.lane; i < len; i += team.size) {
      C gw = orr_get(gs + i * g_stride) * w.at<C>(i, 1);
      sum += gw;
      dot += gw * ((orr_get(xs + i * x_stride) - m) * s);
    }
    C first = team.sum(sum) / (C)len, second = team.sum(dot) / (C)len;
    if (!mean.data) first = 0;
    for (uint32_t i = team.lane; i < len; i += team.size) {
      C gw = orr_get(gs + i * g_stride) * w.at<C>(i, 1);
      C xhat = (orr_get(xs + i * x_stride) - m) * s;
      orr_put(gx + off[0] + i * gx_stride, s * (gw - first - xhat * second));
    }
  }
};

static void backward(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                     const orr_view *w, const orr_view *g, const orr_view *gx) {
  int last = x->ndim - 1;
  orr_view m = orr_with_dim(mean ? mean : rstd, last, x->ndim);
  orr_view s = orr_with_dim(rstd, last, x->ndim);
  const orr_view *views[5] = {gx, x, g, &m, &s};
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_rows(views, last, [&](const int64_t (&at)[5]) {
      return norm_back_body<E>{orr_at<E>(x, at[1]),      orr_at<E>(g, at[2]),
                               orr_at<E>(gx, at[0]),     x->stride[last],
                               g->stride[last],          gx->stride[last],
                               (uint32_t)x->shape[last], weights_of(w),
                               numbers_of(mean, at[3]),  numbers_of(rstd, at[4])};
    });
  });
}

ORR_EXPORT void orr_cuda_layer_norm_back(const orr_view *x, const orr_view *mean,
                                         const orr_view *rstd, const orr_view *w,
                                         const orr_view *g, const orr_view *gx) {
  backward(x, mean, rstd, w, g, gx);
}

ORR_EXPORT void orr_cuda_rms_norm_back(const orr_view *x, const orr_view *rstd,
                                       const orr_view *w, const orr_view *g,
                                       const orr_view *gx) {
  backward(x, NULL, rstd, w, g, gx);
}

/* ---- the gradients of w and b: sums over rows; views x, g, mean, rstd ---- */

template <typename E> struct norm_back_w_body {
  typedef orr_compute<E> C;
  const E *x, *g;
  numbers mean, rstd;
  void *gw, *gb;
  orr_dtype gw_dtype, gb_dtype;
  int64_t gw_stride, gb_stride;
  __device__ void add(C (&sum)[2], uint32_t, const int64_t (&off)[4]) const {
    C m = mean.data ? orr_number_at<C>(mean.data, mean.dtype, off[2]) : (C)0;
    C s = orr_number_at<C>(rstd.data, rstd.dtype, off[3]), gi = orr_get(g + off[1]);
    sum[0] += gi * ((orr_get(x + off[0]) - m) * s);
    sum[1] += gi;
  }
  __device__ void put(uint32_t column, const C (&sum)[2]) const {
    if (gw) orr_write_number(gw, gw_dtype, column * gw_stride, sum[0]);
    if (gb) orr_write_number(gb, gb_dtype, column * gb_stride, sum[1]);
  }
};

static void backward_w(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                       const orr_view *g, const orr_view *gw, const orr_view *gb) {
  int last = x->ndim - 1;
  orr_view m = orr_with_dim(mean ? mean : rstd, last, x->ndim);
  orr_view s = orr_with_dim(rstd, last, x->ndim);
  const orr_view *views[4] = {x, g, &m, &s};
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    norm_back_w_body<E> body = {};
    body.x = orr_at<E>(x, 0);
    body.g = orr_at<E>(g, 0);
    body.mean = numbers_of(mean, 0);
    body.rstd = numbers_of(rstd, 0);
    if (gw) body.gw = gw->data, body.gw_dtype = gw->dtype, body.gw_stride = gw->stride[0];
    if (gb) body.gb = gb->data, body.gb_dtype = gb->dtype, body.gb_stride = gb->stride[0];
    orr_columns_run<orr_compute<E>, 2>(views, last, body);
  });
}

ORR_EXPORT void orr_cuda_layer_norm_back_w(const orr_view *x, const orr_view *mean,
                                           const orr_view *rstd, const orr_view *g,
                                           const orr_view *gw, const orr_view *gb) {
  backward_w(x, mean, rstd, g, gw, gb);
}

ORR_EXPORT void orr_cuda_rms_norm_back_w(const orr_view *x, const orr_view *rstd,
                                         const orr_view *g, const orr_view *gw) {
  backward_w(x, NULL, rstd, g, gw, NULL);
}
