/* norm_batch.c: batch norm and group norm in pieces (norm.h).
 *
 * Invariant: every pass is y = a formula of x, g and four numbers a channel (centre, factor,
 * constant, slope), or two sums a channel; channels-last and channels-first are two orders of
 * one loop.
 * To add a norm over channels: give it a param function.
 */
#include "norm.h"

#include "reduce.h"

#include <math.h>

enum {
  CHANNELS = 256, /* channels that one pass holds numbers for */
  PIECES = 4      /* pieces of a sum, a number that does not follow the threads */
};

typedef struct channels channels;
struct channels {
  const orr_view *x, *g, *y; /* (N, C, ...) */
  const orr_view *mean, *rstd, *w, *b, *sum_g, *sum_gxhat;
  double count;         /* elements a channel over all shards */
  double first, second; /* of a group: the means of g w and of g w xhat */
  void (*param)(const channels *k, int64_t c, double *p);
  bool inner; /* channels lie closest */
  int64_t channels, total, fold;
  int64_t cs[3]; /* strides of channels in x, g, y */
  orr_loop outer;
  orr_run in, over;
};

static inline double at(const orr_view *v, int64_t c, double otherwise) {
  return v != NULL ? orr_k_get(v, c * v->stride[0]) : otherwise;
}

#define REAL float
#define FN(name) name##_f32
#define READ orr_k_read_f32
#define TARGET orr_k_target_f32
#define WRITE orr_k_write_f32
#include "norm_batch_body.h"
#undef REAL
#undef FN
#undef READ
#undef TARGET
#undef WRITE

#define REAL double
#define FN(name) name##_f64
#define READ orr_k_read_f64
#define TARGET orr_k_target_f64
#define WRITE orr_k_write_f64
#include "norm_batch_body.h"
#undef REAL
#undef FN
#undef READ
#undef TARGET
#undef WRITE

static void plan(channels *k) {
  const orr_view *views[3] = {k->x, k->g, k->y};
  k->channels = k->x->shape[1];
  k->total = orr_k_count(k->x);
  bool dense = true;
  for (int v = 0; v < 3; v++) k->cs[v] = views[v] != NULL ? views[v]->stride[1] : 0;
  orr_loop_init(&k->outer, k->x, views, 3, 1u << 1);
  orr_run last = orr_loop_pop(&k->outer);
  k->inner = last.len == 1 || (k->cs[0] <= last.stride[0] && k->channels > 1);
  k->in = last;
  k->fold = 1;
  if (!k->inner) return;
  k->over = last;
  for (int v = 0; v < 3; v++) {
    k->in.stride[v] = k->cs[v];
    if (views[v] != NULL)
      dense = dense && k->cs[v] == 1 && (last.len == 1 || last.stride[v] == k->channels);
  }
  if (dense && k->channels > 0 && k->channels <= CHANNELS) k->fold = ORR_CHUNK / k->channels;
}

static void run(channels *k) {
  plan(k);
  if (k->total == 0) return;
  (k->x->dtype == ORR_F64 ? apply_f64 : apply_f32)(k);
}

static void sums(channels *k) {
  plan(k);
  (k->x->dtype == ORR_F64 ? grad_sums_f64 : grad_sums_f32)(k);
}

static void forward_param(const channels *k, int64_t c, double *p) {
  p[0] = at(k->mean, c, 0);
  p[1] = at(k->rstd, c, 1) * at(k->w, c, 1);
  p[2] = at(k->b, c, 0);
  p[3] = 0;
}

static void batch_back_param(const channels *k, int64_t c, double *p) {
  double rstd = at(k->rstd, c, 1);
  p[0] = at(k->mean, c, 0);
  p[1] = rstd * at(k->w, c, 1);
  p[2] = k->sum_g != NULL ? p[1] * at(k->sum_g, c, 0) / k->count : 0;
  p[3] = k->sum_g != NULL ? p[1] * rstd * at(k->sum_gxhat, c, 0) / k->count : 0;
}

static void group_back_param(const channels *k, int64_t c, double *p) {
  double rstd = at(k->rstd, c, 1);
  p[0] = at(k->mean, c, 0);
  p[1] = rstd * at(k->w, c, 1);
  p[2] = rstd * k->first;
  p[3] = rstd * rstd * k->second;
}

/* A channel vector as a view of x's rank. */
static orr_view across(const orr_view *v, const orr_view *x) {
  orr_view k = {.data = v->data, .dtype = v->dtype, .ndim = x->ndim};
  for (int d = 0; d < x->ndim; d++) k.shape[d] = d == 1 ? v->shape[0] : 1;
  k.stride[1] = v->stride[0];
  return k;
}

void orr_k_bn_sum(const orr_view *x, const orr_view *sum) {
  orr_view y = across(sum, x);
  orr_k_reduce(ORR_REDUCE_SUM, x, ~2u, &y);
}

void orr_k_bn_centered_sumsq(const orr_view *x, const orr_view *mean, const orr_view *sumsq) {
  orr_view y = across(sumsq, x), m = across(mean, x);
  orr_k_centered_sumsq(x, ~2u, &m, &y);
}

void orr_k_bn_apply(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                    const orr_view *w, const orr_view *b, const orr_view *y) {
  channels k = {.x = x, .y = y, .mean = mean, .rstd = rstd, .w = w, .b = b};
  k.param = forward_param;
  run(&k);
}

void orr_k_bn_grad_sums(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                        const orr_view *g, const orr_view *sum_g, const orr_view *sum_gxhat) {
  channels k = {.x = x, .g = g, .mean = mean, .rstd = rstd};
  k.sum_g = sum_g;
  k.sum_gxhat = sum_gxhat;
  sums(&k);
}

void orr_k_bn_grad_apply(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                         const orr_view *w, const orr_view *g, const orr_view *sum_g,
                         const orr_view *sum_gxhat, double global_count, const orr_view *gx) {
  channels k = {.x = x, .g = g, .y = gx, .mean = mean, .rstd = rstd, .w = w};
  k.sum_g = sum_g;
  k.sum_gxhat = sum_gxhat;
  k.count = global_count;
  k.param = batch_back_param;
  run(&k);
}

/* ---- group norm: sample n, group j of `groups`, as a batch of one of C / groups channels - */

static orr_view slice(const orr_view *x, int64_t groups, int64_t n, int64_t j) {
  orr_view s = *x;
  int64_t size = x->shape[1] / groups;
  int64_t off = n * x->stride[0] + j * size * x->stride[1];
  s.data = (char *)x->data + off * (int64_t)orr_k_size(x->dtype);
  s.shape[0] = 1;
  s.shape[1] = size;
  return s;
}

/* Element (n, j) of a statistic, as a vector that repeats it. */
static orr_view repeat(const orr_view *v, int64_t n, int64_t j, int64_t size) {
  int64_t off = n * v->stride[0] + j * v->stride[1];
  orr_view s = {.dtype = v->dtype, .ndim = 1, .shape = {size}};
  s.data = (char *)v->data + off * (int64_t)orr_k_size(v->dtype);
  return s;
}

/* The channels of group j in a vector (C), or in row n of a matrix (N, C). */
static orr_view part(const orr_view *v, int64_t n, int64_t j, int64_t size) {
  int64_t cs = v->stride[v->ndim - 1], off = j * size * cs;
  orr_view s = {.dtype = v->dtype, .ndim = 1, .shape = {size}, .stride = {cs}};
  if (v->ndim == 2) off += n * v->stride[0];
  s.data = (char *)v->data + off * (int64_t)orr_k_size(v->dtype);
  return s;
}

void orr_k_group_norm(const orr_view *x, int64_t groups, const orr_view *w, const orr_view *b,
                      double eps, const orr_view *y, const orr_view *mean,
                      const orr_view *rstd) {
  int64_t size = x->shape[1] / groups;
  for (int64_t i = 0; i < x->shape[0] * groups; i++) {
    int64_t n = i / groups, j = i % groups;
    orr_view xs = slice(x, groups, n, j), ys = slice(y, groups, n, j), ws, bs;
    double m = 0, sum = 0, s;
    orr_view one = {.data = &sum, .dtype = ORR_F64, .ndim = x->ndim}, centre = one;
    for (int d = 0; d < x->ndim; d++) one.shape[d] = centre.shape[d] = 1;
    centre.data = &m;
    orr_k_moments(&xs, ~0u, &centre, &one);
    s = 1 / sqrt(sum / (double)orr_k_count(&xs) + eps);
    orr_k_set(mean, n * mean->stride[0] + j * mean->stride[1], m);
    orr_k_set(rstd, n * rstd->stride[0] + j * rstd->stride[1], s);
    orr_view ms = {.data = &m, .dtype = ORR_F64, .ndim = 1, .shape = {size}}, ss = ms;
    ss.data = &s;
    if (w != NULL) ws = part(w, n, j, size);
    if (b != NULL) bs = part(b, n, j, size);
    orr_k_bn_apply(&xs, &ms, &ss, w != NULL ? &ws : NULL, b != NULL ? &bs : NULL, &ys);
  }
}

void orr_k_group_norm_grad_sums(const orr_view *x, int64_t groups, const orr_view *mean,
                                const orr_view *rstd, const orr_view *g, const orr_view *sum_g,
                                const orr_view *sum_gxhat) {
  int64_t size = x->shape[1] / groups;
  for (int64_t i = 0; i < x->shape[0] * groups; i++) {
    int64_t n = i / groups, j = i % groups;
    orr_view xs = slice(x, groups, n, j), gs = slice(g, groups, n, j);
    orr_view m = repeat(mean, n, j, size), s = repeat(rstd, n, j, size);
    orr_view a = part(sum_g, n, j, size), b = part(sum_gxhat, n, j, size);
    orr_k_bn_grad_sums(&xs, &m, &s, &gs, &a, &b);
  }
}

void orr_k_group_norm_grad_apply(const orr_view *x, int64_t groups, const orr_view *mean,
                                 const orr_view *rstd, const orr_view *w, const orr_view *g,
                                 const orr_view *sum_g, const orr_view *sum_gxhat,
                                 const orr_view *gx) {
  int64_t size = x->shape[1] / groups;
  for (int64_t i = 0; i < x->shape[0] * groups; i++) {
    int64_t n = i / groups, j = i % groups;
    orr_view xs = slice(x, groups, n, j), gs = slice(g, groups, n, j);
    orr_view ys = slice(gx, groups, n, j), ws;
    orr_view m = repeat(mean, n, j, size), s = repeat(rstd, n, j, size);
    orr_view a = part(sum_g, n, j, size), b = part(sum_gxhat, n, j, size);
    channels k = {.x = &xs, .g = &gs, .y = &ys, .mean = &m, .rstd = &s};
    if (w != NULL) {
      ws = part(w, n, j, size);
      k.w = &ws;
    }
    for (int64_t c = 0; c < size; c++) {
      k.first += at(k.w, c, 1) * at(&a, c, 0) / (double)orr_k_count(&xs);
      k.second += at(k.w, c, 1) * at(&b, c, 0) / (double)orr_k_count(&xs);
    }
    k.param = group_back_param;
    run(&k);
  }
}

/* ---- statistics ---- */

void orr_k_bn_rstd(const orr_view *sumsq, const orr_view *count, double n, double eps,
                   const orr_view *rstd) {
  if (count) n = orr_k_get(count, 0);
  for (int64_t k = 0; k < sumsq->shape[0]; k++) {
    double var = n > 0 ? orr_k_get(sumsq, k * sumsq->stride[0]) / n : 0;
    orr_k_set(rstd, k * rstd->stride[0], 1 / sqrt(var + eps));
  }
}

static void towards(const orr_view *running, int64_t k, double momentum, double value) {
  int64_t at = k * running->stride[0];
  orr_k_set(running, at, (1 - momentum) * orr_k_get(running, at) + momentum * value);
}

void orr_k_bn_running(const orr_view *running_mean, const orr_view *running_var,
                      const orr_view *mean, const orr_view *sumsq, const orr_view *counts,
                      double n, double momentum) {
  for (int64_t k = 0; k < running_mean->shape[0]; k++) {
    double all = 0, middle = 0, squares = 0;
    for (int64_t d = 0; d < mean->shape[0]; d++) {
      double more = counts ? orr_k_get(counts, d * counts->stride[0]) : n;
      if (more == 0) continue;
      double delta = orr_k_get(mean, d * mean->stride[0] + k * mean->stride[1]) - middle;
      squares += orr_k_get(sumsq, d * sumsq->stride[0] + k * sumsq->stride[1]) +
                 delta * delta * all * more / (all + more);
      all += more;
      middle += delta * more / all;
    }
    towards(running_mean, k, momentum, middle);
    towards(running_var, k, momentum, squares / (all - 1));
  }
}
