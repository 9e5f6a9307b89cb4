/* loss.cu: cross entropy and negative log likelihood over classes in the last dimension on
 * CUDA.
 *
 * Invariant: as loss.h; the rows' numbers are made in f32 (f64 for f64). A target outside its
 * range counts for nothing and is reported by its row's place.
 * To add a loss of rows: a body over `rows_of` its views.
 */
#include "row.cuh"

extern "C" {
#include "loss.h"
}

/* What rows share: targets, and where their classes stand. */
struct labels {
  const void *data;
  orr_dtype dtype;
  int64_t ignore, class0, classes;
  orr_cuda_fault_slot *slot;
  /* From 1, or -1 where the row counts for nothing. */
  __device__ int64_t of(int64_t off, int64_t row, bool reports) const {
    int64_t t = orr_index_at(data, dtype, off);
    if (t == ignore) return -1;
    if (t >= 1 && t <= classes) return t;
    if (reports) orr_report(slot, row + 1, t);
    return -1;
  }
};

static labels labels_of(const orr_view *target, int64_t ignore, int64_t class0, int64_t classes,
                        bool reports) {
  labels l = {target->data, target->dtype, ignore, class0, classes, NULL};
  if (reports) l.slot = orr_cuda_fault(classes);
  return l;
}

struct place { /* a number a row, of any dtype; data NULL: nobody asks */
  void *data;
  orr_dtype dtype;
  template <typename C> __device__ void put(int64_t off, C x) const {
    if (data) orr_write_number(data, dtype, off, x);
  }
  template <typename C> __device__ C get(int64_t off) const {
    return orr_number_at<C>(data, dtype, off);
  }
};

static place place_of(const orr_view *v) { return v ? place{v->data, v->dtype} : place{NULL, ORR_F32}; }

template <typename C>
static __device__ inline C loss_of(C smooth, C classes, int64_t t, C lse, C picked, C sum_x) {
  if (t < 0) return 0;
  C y = ((C)1 - smooth) * (lse - picked);
  return smooth == 0 ? y : y + smooth * (lse - sum_x / classes);
}

/* Views of one number a row get x's rank, with size 1 in the last dimension. */
enum { ROW_VIEWS = 7 };
struct row_views {
  orr_view kept[ROW_VIEWS];
  const orr_view *at[ROW_VIEWS];
};

/* x, then target, then the rows' numbers, then the row's own number. */
static void views_of(const orr_view *x, const orr_view *const (&v)[ROW_VIEWS - 2],
                     row_views *out) {
  int last = x->ndim - 1;
  out->at[0] = x;
  for (int k = 0; k < ROW_VIEWS - 2; k++) {
    out->at[1 + k] = NULL;
    if (!v[k]) continue;
    out->kept[1 + k] = orr_with_dim(v[k], last, x->ndim);
    out->at[1 + k] = &out->kept[1 + k];
  }
  out->kept[ROW_VIEWS - 1] = orr_row_numbers(x, last);
  out->at[ROW_VIEWS - 1] = &out->kept[ROW_VIEWS - 1];
}

/* ---- forward; views: x, target, loss, lse, -, -, row ---- */

template <typename E> struct forward_body {
  typedef orr_compute<E> C;
  const E *x;
  int64_t stride;
  uint32_t len;
  labels target;
  place loss, lse;
  C smooth;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[ROW_VIEWS]) const {
    const E *from = x + off[0];
    C most = -(C)INFINITY, sum = 0, all = 0;
    for (uint32_t i = team.lane; i < len; i += team.size) {
      C v = orr_get(from + i * stride);
      if (v > most) most = v;
    }
    most = team.join(most, -(C)INFINITY, orr_larger());
    for (uint32_t i = team.lane; i < len; i += team.size) {
      C v = orr_get(from + i * stride);
      sum += orr_m_exp(v - most);
      all += v;
    }
    C whole = orr_m_log(team.sum(sum)) + most;
    all = team.sum(all);
    if (team.lane != 0) return;
    int64_t t = target.of(off[1], off[ROW_VIEWS - 1], true);
    C picked = t > 0 ? orr_get(from + (t - 1) * stride) : (C)0;
    loss.put(off[2], loss_of(smooth, (C)target.classes, t, whole, picked, all));
    lse.put(off[3], whole);
  }
};

ORR_EXPORT void orr_cuda_cross_entropy(const orr_view *x, const orr_view *target,
                                       int64_t ignore, double smooth, const orr_view *loss,
                                       const orr_view *lse, orr_fault *) {
  int last = x->ndim - 1;
  row_views v;
  views_of(x, {target, loss, lse, NULL, NULL}, &v);
  labels l = labels_of(target, ignore, 0, x->shape[last], true);
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    forward_body<E> body = {orr_at<E>(x, 0), x->stride[last], (uint32_t)x->shape[last], l,
                            place_of(loss),  place_of(lse),   (orr_compute<E>)smooth};
    orr_rows(v.at, last, [&](const int64_t (&)[ROW_VIEWS]) { return body; });
  });
}

/* ---- backward; views: gx, target, x, lse, g, -, row ---- */

template <typename E> struct back_body {
  typedef orr_compute<E> C;
  const E *x;
  E *gx;
  int64_t stride, gx_stride;
  uint32_t len;
  labels target;
  place lse, g;
  C spread, hit;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[ROW_VIEWS]) const {
    int64_t t = target.of(off[1], off[ROW_VIEWS - 1], false), here = t - 1 - target.class0;
    C whole = lse.get<C>(off[3]), gi = g.get<C>(off[4]);
    for (uint32_t i = team.lane; i < len; i += team.size) {
      C p = gi * (orr_m_exp(orr_get(x + off[2] + i * stride) - whole) - spread);
      if ((int64_t)i == here) p -= gi * hit;
      orr_put(gx + off[0] + i * gx_stride, t < 0 ? (C)0 : p);
    }
  }
};

ORR_EXPORT void orr_cuda_cross_entropy_back(const orr_view *x, const orr_view *lse,
                                            const orr_view *target, int64_t ignore,
                                            double smooth, int64_t class0, int64_t classes,
                                            const orr_view *g, const orr_view *gx) {
  int last = x->ndim - 1;
  row_views v;
  views_of(gx, {target, NULL, lse, g, NULL}, &v);
  v.at[2] = x;
  labels l = labels_of(target, ignore, class0, classes, false);
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    typedef orr_compute<E> C;
    back_body<E> body = {orr_at<E>(x, 0),  orr_at<E>(gx, 0),
                         x->stride[last],  gx->stride[last],
                         (uint32_t)x->shape[last], l,
                         place_of(lse),    place_of(g),
                         (C)(smooth / (double)classes), (C)(1 - smooth)};
    orr_rows(v.at, last, [&](const int64_t (&)[ROW_VIEWS]) { return body; });
  });
}

/* ---- sharded classes; views: x, target, max, sum_exp, picked, sum_x, row ---- */

template <typename E> struct parts_body {
  typedef orr_compute<E> C;
  const E *x;
  int64_t stride;
  uint32_t len;
  labels target;
  place max, sum_exp, picked, sum_x;
  bool only_max;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[ROW_VIEWS]) const {
    const E *from = x + off[0];
    if (only_max) {
      C most = -(C)INFINITY;
      for (uint32_t i = team.lane; i < len; i += team.size) {
        C v = orr_get(from + i * stride);
        if (v > most) most = v;
      }
      most = team.join(most, -(C)INFINITY, orr_larger());
      if (team.lane == 0) max.put(off[2], most);
      return;
    }
    C most = max.get<C>(off[2]), sum = 0, all = 0;
    for (uint32_t i = team.lane; i < len; i += team.size) {
      C v = orr_get(from + i * stride);
      sum += orr_m_exp(v - most);
      all += v;
    }
    sum = team.sum(sum);
    all = team.sum(all);
    if (team.lane != 0) return;
    int64_t t = target.of(off[1], off[ROW_VIEWS - 1], true), here = t - 1 - target.class0;
    bool mine = t > 0 && here >= 0 && here < (int64_t)len;
    sum_exp.put(off[3], sum);
    picked.put(off[4], mine ? orr_get(from + here * stride) : (C)0);
    sum_x.put(off[5], all);
  }
};

static void run_parts(const orr_view *x, const orr_view *target, const labels &l,
                      const orr_view *max, const orr_view *sum_exp, const orr_view *picked,
                      const orr_view *sum_x) {
  int last = x->ndim - 1;
  row_views v;
  views_of(x, {target, max, sum_exp, picked, sum_x}, &v);
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    parts_body<E> body = {orr_at<E>(x, 0), x->stride[last],   (uint32_t)x->shape[last], l,
                          place_of(max),   place_of(sum_exp), place_of(picked),
                          place_of(sum_x), target == NULL};
    orr_rows(v.at, last, [&](const int64_t (&)[ROW_VIEWS]) { return body; });
  });
}

ORR_EXPORT void orr_cuda_cross_entropy_max(const orr_view *x, const orr_view *max) {
  run_parts(x, NULL, labels{}, max, NULL, NULL, NULL);
}

ORR_EXPORT void orr_cuda_cross_entropy_parts(const orr_view *x, const orr_view *max,
                                             const orr_view *target, int64_t ignore,
                                             int64_t class0, int64_t classes,
                                             const orr_view *sum_exp, const orr_view *picked,
                                             const orr_view *sum_x, orr_fault *) {
  run_parts(x, target, labels_of(target, ignore, class0, classes, true), max, sum_exp, picked,
            sum_x);
}

/* ---- what is one number a row; views: target, then four numbers, two more, row ---- */

struct finish_body {
  labels target;
  place max, sum_exp, picked, loss, sum_x, lse;
  double smooth;
  template <typename Team>
  __device__ void row(const Team &, const int64_t (&off)[ROW_VIEWS]) const {
    int64_t t = target.of(off[0], 0, false);
    double whole = orr_m_log(sum_exp.get<double>(off[2])) + max.get<double>(off[1]);
    double all = sum_x.data ? sum_x.get<double>(off[5]) : 0;
    loss.put(off[4], loss_of(smooth, (double)target.classes, t, whole, picked.get<double>(off[3]), all));
    lse.put(off[6], whole);
  }
};

/* A trailing dimension of size 1, so that elements are rows. */
static orr_view as_row(const orr_view *v) {
  orr_view r = *v;
  r.shape[r.ndim] = 1;
  r.stride[r.ndim++] = 0;
  return r;
}

ORR_EXPORT void orr_cuda_cross_entropy_finish(const orr_view *max, const orr_view *sum_exp,
                                              const orr_view *picked, const orr_view *sum_x,
                                              const orr_view *target, int64_t ignore,
                                              double smooth, int64_t classes,
                                              const orr_view *loss, const orr_view *lse) {
  const orr_view *given[ROW_VIEWS] = {target, max, sum_exp, picked, loss, sum_x, lse};
  orr_view kept[ROW_VIEWS];
  const orr_view *views[ROW_VIEWS];
  for (int k = 0; k < ROW_VIEWS; k++) {
    views[k] = NULL;
    if (!given[k]) continue;
    kept[k] = as_row(given[k]);
    views[k] = &kept[k];
  }
  finish_body body = {labels_of(target, ignore, 0, classes, false),
                      place_of(max),
                      place_of(sum_exp),
                      place_of(picked),
                      place_of(loss),
                      place_of(sum_x),
                      place_of(lse),
                      smooth};
  orr_rows(views, target->ndim, [&](const int64_t (&)[ROW_VIEWS]) { return body; });
}

/* ---- nll; views: x, target, loss, -, -, -, row; backward: gx, target, g ---- */

template <typename E> struct nll_body {
  typedef orr_compute<E> C;
  const E *x;
  E *gx;
  int64_t stride;
  uint32_t len;
  labels target;
  place loss, g;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[ROW_VIEWS]) const {
    int64_t t = target.of(off[1], off[ROW_VIEWS - 1], gx == NULL && team.lane == 0);
    int64_t here = t - 1 - target.class0;
    bool mine = t > 0 && here >= 0 && here < (int64_t)len;
    if (gx == NULL) {
      if (team.lane == 0) loss.put(off[2], mine ? -orr_get(x + off[0] + here * stride) : (C)0);
      return;
    }
    C hit = -g.get<C>(off[2]);
    for (uint32_t i = team.lane; i < len; i += team.size)
      orr_put(gx + off[0] + i * stride, mine && (int64_t)i == here ? hit : (C)0);
  }
};

static void run_nll(const orr_view *x, const orr_view *gx, const labels &l,
                    const orr_view *target, const orr_view *loss, const orr_view *g) {
  const orr_view *first = x ? x : gx;
  int last = first->ndim - 1;
  row_views v;
  views_of(first, {target, loss ? loss : g, NULL, NULL, NULL}, &v);
  orr_by_float(first->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    nll_body<E> body = {x ? orr_at<E>(x, 0) : NULL,
                        gx ? orr_at<E>(gx, 0) : NULL,
                        first->stride[last],
                        (uint32_t)first->shape[last],
                        l,
                        place_of(loss),
                        place_of(g)};
    orr_rows(v.at, last, [&](const int64_t (&)[ROW_VIEWS]) { return body; });
  });
}

ORR_EXPORT void orr_cuda_nll_loss(const orr_view *x, const orr_view *target, int64_t ignore,
                                  int64_t class0, int64_t classes, const orr_view *loss,
                                  orr_fault *) {
  run_nll(x, NULL, labels_of(target, ignore, class0, classes, true), target, loss, NULL);
}

ORR_EXPORT void orr_cuda_nll_loss_back(const orr_view *g, const orr_view *target,
                                       int64_t ignore, int64_t class0, int64_t classes,
                                       const orr_view *gx) {
  run_nll(NULL, gx, labels_of(target, ignore, class0, classes, false), target, NULL, g);
}

/* ---- counting ---- */

static __global__ void __launch_bounds__(ORR_BLOCK)
    count_kernel(orr_walk<1> walk, labels target, void *out, orr_dtype dtype) {
  int64_t n = 0;
  for (uint32_t i = threadIdx.x; i < walk.n; i += blockDim.x) {
    int64_t off[1];
    walk.at(i, off);
    n += orr_index_at(target.data, target.dtype, off[0]) != target.ignore;
  }
  n = orr_block_join(n, (int64_t)0, orr_plus());
  if (threadIdx.x == 0) orr_write_number(out, dtype, 0, n);
}

ORR_EXPORT void orr_cuda_count_targets(const orr_view *target, int64_t ignore,
                                       const orr_view *out) {
  const orr_view *views[1] = {target};
  ORR_LAUNCH(count_kernel, 1, ORR_BLOCK, 0, orr_walk_of(orr_axes_of(views)),
             labels_of(target, ignore, 0, 0, false), out->data, out->dtype);
}
