/* norm_batch.cu: batch norm and group norm in pieces on CUDA (norm.h).
 *
 * Invariant: sums of a channel are columns (columns.cuh), what is applied is element by element
 * with the channel's numbers as vectors that repeat. A group is a channel of the view
 * (N, groups, C / groups, ...), its statistics are numbers of (N, groups).
 * To add a norm over channels: its sums as a columns body, its formula in apply_body.
 */
#include "columns.cuh"
#include "each.cuh"
#include "strip.cuh"

extern "C" {
#include "elementwise.h"
#include "norm.h"
#include "reduce.h"
void orr_cuda_reduce(orr_reduce_kind kind, const orr_view *x, unsigned mask, const orr_view *y);
}

/* A vector of numbers. */
struct numbers {
  void *data;
  orr_dtype dtype;
  int64_t stride;
  template <typename C> __device__ C at(int64_t i) const {
    return orr_number_at<C>(data, dtype, i * stride);
  }
  template <typename C> __device__ void put(int64_t i, C x) const {
    orr_write_number(data, dtype, i * stride, x);
  }
};
static numbers numbers_of(const orr_view *v) {
  return v ? numbers{v->data, v->dtype, v->stride[0]} : numbers{NULL, ORR_F32, 0};
}

/* ---- sums of channels; views: x, g ---- */

enum sums { PLAIN, CENTERED, GRADIENT };

template <typename E> struct sums_body {
  typedef orr_compute<E> C;
  sums what;
  const E *x, *g;
  numbers mean, rstd, first, second;
  __device__ void add(C (&sum)[2], uint32_t c, const int64_t (&off)[2]) const {
    C v = orr_get(x + off[0]);
    if (what == PLAIN) {
      sum[0] += v;
      return;
    }
    v -= mean.at<C>(c);
    if (what == CENTERED) {
      sum[0] += v * v;
      return;
    }
    C gi = orr_get(g + off[1]);
    sum[0] += gi;
    sum[1] += gi * v;
  }
  __device__ void put(uint32_t c, const C (&sum)[2]) const {
    first.put(c, sum[0]);
    if (what == GRADIENT) second.put(c, sum[1] * rstd.at<C>(c));
  }
};

static void run_sums(sums what, const orr_view *x, const orr_view *g, const orr_view *mean,
                     const orr_view *rstd, const orr_view *first, const orr_view *second) {
  const orr_view *views[2] = {x, g ? g : x};
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    sums_body<E> body = {what,
                         orr_at<E>(x, 0),
                         orr_at<E>(views[1], 0),
                         numbers_of(mean),
                         numbers_of(rstd),
                         numbers_of(first),
                         numbers_of(second)};
    orr_columns_run<orr_compute<E>, 2>(views, 1, body);
  });
}

ORR_EXPORT void orr_cuda_bn_sum(const orr_view *x, const orr_view *sum) {
  run_sums(PLAIN, x, NULL, NULL, NULL, sum, NULL);
}

ORR_EXPORT void orr_cuda_bn_centered_sumsq(const orr_view *x, const orr_view *mean,
                                           const orr_view *sumsq) {
  run_sums(CENTERED, x, NULL, mean, NULL, sumsq, NULL);
}

ORR_EXPORT void orr_cuda_bn_grad_sums(const orr_view *x, const orr_view *mean,
                                      const orr_view *rstd, const orr_view *g,
                                      const orr_view *sum_g, const orr_view *sum_gxhat) {
  run_sums(GRADIENT, x, g, mean, rstd, sum_g, sum_gxhat);
}

/* ---- element by element; views: y, x, g, then the numbers that repeat ---- */

enum { Y, X, G, MEAN, RSTD, W, B, SUM_G, SUM_GXHAT, N_VIEWS };

template <typename E> struct apply_body {
  typedef orr_compute<E> C;
  E *y;
  const E *x, *g; /* g: backward */
  struct {
    const void *data;
    orr_dtype dtype;
  } number[N_VIEWS];
  C count; /* 0: no sums */
  __device__ C get(int k, const int64_t (&off)[N_VIEWS], C otherwise) const {
    return number[k].data ? orr_number_at<C>(number[k].data, number[k].dtype, off[k])
                          : otherwise;
  }
  template <int V>
  __device__ void at(const int64_t (&off)[N_VIEWS], unsigned) const {
    C s = get(RSTD, off, 1), w = get(W, off, 1);
    C xhat = (orr_get(x + off[X]) - get(MEAN, off, 0)) * s;
    if (!g) {
      orr_put(y + off[Y], xhat * w + get(B, off, 0));
      return;
    }
    C gi = orr_get(g + off[G]);
    if (count > 0) gi -= (get(SUM_G, off, 0) + xhat * get(SUM_GXHAT, off, 0)) / count;
    orr_put(y + off[Y], w * s * gi);
  }
};

static void apply(const orr_view *const (&given)[N_VIEWS], double count) {
  const orr_view *views[N_VIEWS];
  for (int k = 0; k < N_VIEWS; k++) views[k] = given[k] ? given[k] : given[X];
  orr_by_float(given[X]->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_map<1>(views, [&](const int64_t (&at)[N_VIEWS]) {
      apply_body<E> body = {};
      body.y = orr_at<E>(views[Y], at[Y]);
      body.x = orr_at<E>(views[X], at[X]);
      body.g = given[G] ? orr_at<E>(given[G], at[G]) : NULL;
      for (int k = MEAN; k < N_VIEWS; k++) {
        if (!given[k]) continue;
        body.number[k].data = (char *)given[k]->data + at[k] * (int64_t)orr_size_of(given[k]->dtype);
        body.number[k].dtype = given[k]->dtype;
      }
      body.count = (orr_compute<E>)count;
      return body;
    });
  });
}

/* Numbers a channel, over x's shape. */
static void apply_channels(const orr_view *x, const orr_view *g, const orr_view *mean,
                           const orr_view *rstd, const orr_view *w, const orr_view *b,
                           const orr_view *sum_g, const orr_view *sum_gxhat, double count,
                           const orr_view *y) {
  const orr_view *vector[N_VIEWS] = {y, x, g, mean, rstd, w, b, sum_g, sum_gxhat};
  orr_view kept[N_VIEWS];
  for (int k = MEAN; k < N_VIEWS; k++) {
    if (!vector[k]) continue;
    kept[k] = orr_vector_along(vector[k], 1, x);
    vector[k] = &kept[k];
  }
  apply(vector, count);
}

ORR_EXPORT void orr_cuda_bn_apply(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                                  const orr_view *w, const orr_view *b, const orr_view *y) {
  apply_channels(x, NULL, mean, rstd, w, b, NULL, NULL, 0, y);
}

ORR_EXPORT void orr_cuda_bn_grad_apply(const orr_view *x, const orr_view *mean,
                                       const orr_view *rstd, const orr_view *w,
                                       const orr_view *g, const orr_view *sum_g,
                                       const orr_view *sum_gxhat, double global_count,
                                       const orr_view *gx) {
  apply_channels(x, g, mean, rstd, w, NULL, sum_g, sum_gxhat, sum_g ? global_count : 0, gx);
}

/* ---- statistics ---- */

static __global__ void rstd_kernel(numbers sumsq, numbers count, double n, double eps,
                                   numbers rstd, uint32_t channels) {
  if (count.data) n = count.at<double>(0);
  for (uint32_t c = orr_first(); c < channels; c += orr_step())
    rstd.put(c, 1 / sqrt((n > 0 ? sumsq.at<double>(c) / n : 0) + eps));
}

ORR_EXPORT void orr_cuda_bn_rstd(const orr_view *sumsq, const orr_view *count, double n,
                                 double eps, const orr_view *rstd) {
  uint32_t channels = (uint32_t)sumsq->shape[0];
  ORR_LAUNCH(rstd_kernel, orr_grid(channels, ORR_BLOCK), ORR_BLOCK, 0, numbers_of(sumsq),
             numbers_of(count), n, eps, numbers_of(rstd), channels);
}

struct running {
  numbers mean, var, counts;
  const void *of_mean, *of_sumsq;
  orr_dtype dtype_mean, dtype_sumsq;
  int64_t mean_row, mean_step, sumsq_row, sumsq_step;
  uint32_t channels, rows;
  double n, momentum;
};

static __global__ void running_kernel(running r) {
  for (uint32_t c = orr_first(); c < r.channels; c += orr_step()) {
    double all = 0, middle = 0, squares = 0;
    for (uint32_t d = 0; d < r.rows; d++) {
      double more = r.counts.data ? r.counts.at<double>(d) : r.n;
      if (more == 0) continue;
      double m = orr_read_number(r.of_mean, r.dtype_mean, d * r.mean_row + c * r.mean_step);
      double delta = m - middle;
      squares += orr_read_number(r.of_sumsq, r.dtype_sumsq, d * r.sumsq_row + c * r.sumsq_step) +
                 delta * delta * all * more / (all + more);
      all += more;
      middle += delta * more / all;
    }
    double keep = 1 - r.momentum, var = squares / (all - 1);
    r.mean.put(c, keep * r.mean.at<double>(c) + r.momentum * middle);
    r.var.put(c, keep * r.var.at<double>(c) + r.momentum * var);
  }
}

ORR_EXPORT void orr_cuda_bn_running(const orr_view *running_mean, const orr_view *running_var,
                                    const orr_view *mean, const orr_view *sumsq,
                                    const orr_view *counts, double n, double momentum) {
  running r = {};
  r.mean = numbers_of(running_mean), r.var = numbers_of(running_var);
  r.counts = numbers_of(counts);
  r.of_mean = mean->data, r.dtype_mean = mean->dtype;
  r.of_sumsq = sumsq->data, r.dtype_sumsq = sumsq->dtype;
  r.mean_row = mean->stride[0], r.mean_step = mean->stride[1];
  r.sumsq_row = sumsq->stride[0], r.sumsq_step = sumsq->stride[1];
  r.channels = (uint32_t)running_mean->shape[0], r.rows = (uint32_t)mean->shape[0];
  r.n = n, r.momentum = momentum;
  ORR_LAUNCH(running_kernel, orr_grid(r.channels, ORR_BLOCK), ORR_BLOCK, 0, r);
}

/* ---- group norm ---- */

/* x (N, C, ...) as (N, groups, C / groups, the rest as it is). */
static orr_view grouped(const orr_view *x, int64_t groups) {
  orr_view r = *x;
  int64_t size = x->shape[1] / groups;
  r.ndim = x->ndim + 1;
  r.shape[1] = groups;
  r.stride[1] = size * x->stride[1];
  r.shape[2] = size;
  r.stride[2] = x->stride[1];
  for (int d = 2; d < x->ndim; d++) {
    r.shape[d + 1] = x->shape[d];
    r.stride[d + 1] = x->stride[d];
  }
  return r;
}

/* (N, groups), (N, C) or (C) over the grouped shape. */
static orr_view spread(const orr_view *v, const orr_view *like) {
  orr_view r = *like;
  int64_t size = like->shape[2], step = v->stride[v->ndim - 1];
  bool a_channel = v->ndim == 1 || v->shape[1] != like->shape[1] || size == 1;
  r.data = v->data;
  r.dtype = v->dtype;
  for (int d = 0; d < r.ndim; d++) r.stride[d] = 0;
  if (v->ndim == 2) r.stride[0] = v->stride[0];
  r.stride[1] = a_channel ? size * step : step;
  if (a_channel) r.stride[2] = step;
  return r;
}

/* The elements of one (n, group), or (n, channel), as the row of a team: their walk. */
template <typename E> struct group_body {
  typedef orr_compute<E> C;
  orr_walk<2> inside; /* x, g */
  const E *x, *g;     /* g: gradient sums */
  numbers a, b;       /* out: mean and rstd, or the two sums */
  const void *mean, *rstd;
  orr_dtype mean_dtype, rstd_dtype;
  C eps;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[6]) const {
    int64_t at[2];
    C sum = 0, second = 0, m = 0;
    if (!g) {
      for (uint32_t i = team.lane; i < inside.n; i += team.size) {
        inside.at(i, at);
        sum += orr_get(x + off[0] + at[0]);
      }
      m = team.sum(sum) / (C)inside.n;
    } else {
      m = orr_number_at<C>(mean, mean_dtype, off[2]);
      sum = 0;
    }
    for (uint32_t i = team.lane; i < inside.n; i += team.size) {
      inside.at(i, at);
      C v = orr_get(x + off[0] + at[0]) - m;
      C gi = g ? orr_get(g + off[1] + at[1]) : v;
      if (g) sum += gi;
      second += gi * v;
    }
    second = team.sum(second);
    if (g) sum = team.sum(sum);
    if (team.lane != 0) return;
    if (!g) {
      orr_write_number(a.data, a.dtype, off[4], m);
      orr_write_number(b.data, b.dtype, off[5],
                       (C)1 / orr_m_sqrt(second / (C)inside.n + eps));
    } else {
      orr_write_number(a.data, a.dtype, off[4], sum);
      orr_write_number(b.data, b.dtype, off[5],
                       second * orr_number_at<C>(rstd, rstd_dtype, off[3]));
    }
  }
};

/* Dims from `kept` on are inside; a last dim of 32 asks for a warp each. */
static void run_groups(const orr_view *x, const orr_view *g, const orr_view *mean,
                       const orr_view *rstd, const orr_view *a, const orr_view *b, int kept,
                       double eps) {
  const orr_view *given[6] = {x, g ? g : x, mean, rstd, a, b}, *inside[2];
  orr_view outer[6], inner[2];
  const orr_view *views[6];
  for (int k = 0; k < 2; k++) {
    inner[k] = *given[k];
    inner[k].ndim = x->ndim - kept;
    for (int d = kept; d < x->ndim; d++) {
      inner[k].shape[d - kept] = given[k]->shape[d];
      inner[k].stride[d - kept] = given[k]->stride[d];
    }
    inside[k] = &inner[k];
  }
  for (int k = 0; k < 6; k++) {
    outer[k] = *given[k];
    outer[k].ndim = kept + 1;
    outer[k].shape[kept] = orr_numel(&inner[0]) > 1024 ? 2048 : 32;
    outer[k].stride[kept] = 0;
    views[k] = &outer[k];
  }
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    group_body<E> body = {};
    body.inside = orr_walk_of(orr_axes_of(inside));
    body.x = orr_at<E>(x, 0);
    body.g = g ? orr_at<E>(g, 0) : NULL;
    body.a = numbers{a->data, a->dtype, 1}, body.b = numbers{b->data, b->dtype, 1};
    body.mean = mean->data, body.mean_dtype = mean->dtype;
    body.rstd = rstd->data, body.rstd_dtype = rstd->dtype;
    body.eps = (orr_compute<E>)eps;
    orr_rows(views, kept, [&](const int64_t (&)[6]) { return body; });
  });
}

ORR_EXPORT void orr_cuda_group_norm(const orr_view *x, int64_t groups, const orr_view *w,
                                    const orr_view *b, double eps, const orr_view *y,
                                    const orr_view *mean, const orr_view *rstd) {
  if (orr_numel(x) == 0) return;
  orr_view from = grouped(x, groups), to = grouped(y, groups);
  run_groups(&from, NULL, mean, rstd, mean, rstd, 2, eps);
  orr_view m = spread(mean, &from), s = spread(rstd, &from), ws, bs;
  m.stride[2] = s.stride[2] = 0;
  m.stride[1] = mean->stride[1], s.stride[1] = rstd->stride[1];
  if (w) ws = spread(w, &from);
  if (b) bs = spread(b, &from);
  const orr_view *views[N_VIEWS] = {&to, &from, NULL, &m, &s, w ? &ws : NULL, b ? &bs : NULL,
                                    NULL, NULL};
  apply(views, 0);
}

ORR_EXPORT void orr_cuda_group_norm_grad_sums(const orr_view *x, int64_t groups,
                                              const orr_view *mean, const orr_view *rstd,
                                              const orr_view *g, const orr_view *sum_g,
                                              const orr_view *sum_gxhat) {
  if (orr_numel(x) == 0) return;
  orr_view from = grouped(x, groups), gs = grouped(g, groups);
  orr_view head = from;
  head.ndim = 3;
  orr_view m = spread(mean, &head), s = spread(rstd, &head);
  m.stride[1] = mean->stride[1], s.stride[1] = rstd->stride[1];
  m.stride[2] = s.stride[2] = 0;
  orr_view a = grouped(sum_g, groups), b = grouped(sum_gxhat, groups);
  run_groups(&from, &gs, &m, &s, &a, &b, 3, 0);
}

/* Of each (n, group): the means over its elements of w sum_g and w sum_gxhat. */
struct means_body {
  const void *w, *a, *b; /* w NULL: 1 */
  orr_dtype w_dtype, a_dtype, b_dtype;
  int64_t w_step, a_step, b_step;
  double *out; /* (N, groups, 2) */
  uint32_t size;
  double count;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[4]) const {
    double first = 0, second = 0;
    for (uint32_t c = team.lane; c < size; c += team.size) {
      double wc = w ? orr_read_number(w, w_dtype, off[2] + c * w_step) : 1;
      first += wc * orr_read_number(a, a_dtype, off[0] + c * a_step);
      second += wc * orr_read_number(b, b_dtype, off[1] + c * b_step);
    }
    first = team.sum(first);
    second = team.sum(second);
    if (team.lane != 0) return;
    out[2 * off[3]] = first / count;
    out[2 * off[3] + 1] = second / count;
  }
};

/* gx = rstd (w g - first - xhat second); views as apply's, SUM_G and SUM_GXHAT being those. */
template <typename E> struct group_back_body {
  typedef orr_compute<E> C;
  E *gx;
  const E *x, *g;
  const void *mean, *rstd, *w;
  orr_dtype mean_dtype, rstd_dtype, w_dtype;
  const double *first;
  template <int V>
  __device__ void at(const int64_t (&off)[7], unsigned) const {
    C s = orr_number_at<C>(rstd, rstd_dtype, off[4]);
    C xhat = (orr_get(x + off[1]) - orr_number_at<C>(mean, mean_dtype, off[3])) * s;
    C gw = orr_get(g + off[2]) * (w ? orr_number_at<C>(w, w_dtype, off[5]) : (C)1);
    orr_put(gx + off[0], s * (gw - (C)first[2 * off[6]] - xhat * (C)first[2 * off[6] + 1]));
  }
};

ORR_EXPORT void orr_cuda_group_norm_grad_apply(const orr_view *x, int64_t groups,
                                               const orr_view *mean, const orr_view *rstd,
                                               const orr_view *w, const orr_view *g,
                                               const orr_view *sum_g,
                                               const orr_view *sum_gxhat, const orr_view *gx) {
  if (orr_numel(x) == 0) return;
  orr_view from = grouped(x, groups), gs = grouped(g, groups), to = grouped(gx, groups);
  orr_view a = grouped(sum_g, groups), b = grouped(sum_gxhat, groups), ws = a;
  double *out = (double *)orr_cuda_room((size_t)(x->shape[0] * groups) * 2 * sizeof(double));
  if (!out) return;
  orr_view place = orr_row_numbers(&a, 2);
  if (w) ws = spread(w, &a);
  const orr_view *rows[4] = {&a, &b, &ws, &place};
  means_body means = {w ? w->data : NULL, a.data, b.data, ws.dtype, a.dtype, b.dtype,
                      ws.stride[2], a.stride[2], b.stride[2], out, (uint32_t)a.shape[2],
                      (double)(orr_numel(x) / (x->shape[0] * groups))};
  orr_rows(rows, 2, [&](const int64_t (&)[4]) { return means; });
  orr_view m = spread(mean, &from), s = spread(rstd, &from), of_w = from, group = from;
  m.stride[1] = mean->stride[1], s.stride[1] = rstd->stride[1];
  m.stride[2] = s.stride[2] = 0;
  if (w) of_w = spread(w, &from);
  for (int d = 0; d < group.ndim; d++) group.stride[d] = d == 0 ? groups : d == 1;
  const orr_view *views[7] = {&to, &from, &gs, &m, &s, &of_w, &group};
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_map<1>(views, [&](const int64_t (&at)[7]) {
      group_back_body<E> body = {};
      body.gx = orr_at<E>(&to, at[0]), body.x = orr_at<E>(&from, at[1]);
      body.g = orr_at<E>(&gs, at[2]);
      body.mean = mean->data, body.mean_dtype = mean->dtype;
      body.rstd = rstd->data, body.rstd_dtype = rstd->dtype;
      body.w = w ? w->data : NULL, body.w_dtype = w ? w->dtype : ORR_F32;
      body.first = out;
      return body;
    });
  });
}
