/* op_batch_norm.c: batch norm (Ioffe and Szegedy 2015), composed of pieces that place
 * themselves.
 *
 * Invariant: statistics are (D, C). D = 1: of the global batch, whatever the placement of x, by
 * the global count. D > 1: of each device's own samples (sync = false), row d on device d of
 * the axis that shards the samples. bn_apply is the one piece on the tape; its gradient is
 * fused.
 * To add a piece: name in .code which of its tensors are like x and which are statistics.
 */
#include "op_batch_norm.h"

#include <math.h>

#include "../kernels/elementwise.h"
#include "../kernels/norm.h"
#include "op_reduce.h"

/* Every piece: args.i: D, the axis of D; args.f[0]: the global count, 0 for constant
 * statistics. */
enum { D = 0, AXIS = 1, COUNT = 0 };
/* Bits of .code: inputs and outputs like x (samples first), and statistics (D first). */
#define X_IN(k) (1 << (k))
#define S_IN(k) (1 << (8 + (k)))
#define X_OUT(k) (1 << (16 + (k)))
#define S_OUT(k) (1 << (20 + (k)))

enum { LABEL_N = 1, LABEL_C = 2 };

static bool own_rows(const orr_call *c) { return c->args.i[D] > 1; }

static void label_one(const orr_meta *m, bool like_x, bool statistic, bool own,
                      uint8_t *label) {
  if (!like_x) {
    label[statistic ? m->ndim - 1 : 0] = LABEL_C;
    return;
  }
  label[1] = LABEL_C;
  for (int d = 0; d < m->ndim && !own; d++) label[d] = (uint8_t)(d + 1);
}

static void label_piece(orr_call *c) {
  int code = c->op->code;
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k])
      label_one(&c->in[k]->meta, code & X_IN(k), code & S_IN(k), own_rows(c), c->in_label[k]);
  for (int k = 0; k < c->n_out; k++)
    label_one(&c->out_meta[k], code & X_OUT(k), code & S_OUT(k), own_rows(c), c->out_label[k]);
}

/* Statistics of its own on every device: a row each. */
static int rule_piece(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  const orr_place whole = {.kind = ORR_REPLICATE}, row = {.kind = ORR_SHARD, .dim = 0};
  const orr_layout *layout = c->in[0]->layout;
  int code = c->op->code;
  *only = false;
  if (!own_rows(c) || axis != c->args.i[AXIS] || max < 1) return 0;
  orr_place samples = row;
  if (code & X_IN(0) && axis < layout->mesh->n_axes && layout->axis[axis].kind == ORR_SHARD &&
      layout->axis[axis].dim == 0)
    samples = layout->axis[axis];
  for (int k = 0; k < c->n_in; k++)
    rows[0].in[k] = code & X_IN(k) ? samples : code & S_IN(k) ? row : whole;
  for (int k = 0; k < c->n_out; k++) rows[0].out[k] = code & X_OUT(k) ? samples : row;
  *only = true;
  return 1;
}

/* (C) of a device's (1, C). */
static orr_view row_of(const orr_view *v) {
  orr_view r = *v;
  r.ndim = 1;
  r.shape[0] = v->shape[v->ndim - 1];
  r.stride[0] = v->stride[v->ndim - 1];
  return r;
}

/* Elements a channel that a device holds. */
static int64_t local_count(const orr_view *x) {
  int64_t n = x->shape[0];
  for (int d = 2; d < x->ndim; d++) n *= x->shape[d];
  return n;
}

static const orr_view *given(const orr_work *w, int shard, int k) {
  return k < w->n_in && orr_work_has(w, shard, k) ? orr_work_in(w, shard, k) : NULL;
}

static orr_meta statistics_of(const orr_call *c, int k) {
  const orr_meta *x = &c->in[k]->meta;
  return (orr_meta){
      .dtype = orr_sum_dtype(x->dtype), .ndim = 2, .shape = {c->args.i[D], x->shape[1]}};
}

/* ---- bn_stats: x to mean, sum of squares about it, count (D), of what each device holds -- */

static orr_status infer_stats(orr_call *c) {
  c->out_meta[0] = c->out_meta[1] = statistics_of(c, 0);
  c->out_meta[2] =
      (orr_meta){.dtype = c->out_meta[0].dtype, .ndim = 1, .shape = {c->args.i[D]}};
  return ORR_OK;
}

static void label_stats(orr_call *c) {
  label_piece(c);
  c->in_label[0][0] = c->out_label[2][0] = ORR_WHOLE;
  for (int d = 2; d < c->in[0]->meta.ndim; d++) c->in_label[0][d] = ORR_WHOLE;
}

static orr_status run_stats(const orr_work *w, int shard) {
  const orr_view *x = orr_work_in(w, shard, 0);
  orr_view mean = row_of(orr_work_out(w, shard, 0)), sumsq = row_of(orr_work_out(w, shard, 1));
  int64_t count = local_count(x);
  w->k->bn_sum(x, &mean);
  w->k->binary_scalar(ORR_BIN_mul, &mean, count ? 1 / (double)count : 0, false, &mean);
  w->k->bn_centered_sumsq(x, &mean, &sumsq);
  w->k->fill(orr_work_out(w, shard, 2), (double)count);
  return ORR_OK;
}

const orr_op orr_op_bn_stats = {.name = "bn_stats",
                                .flags = ORR_OP_NO_GRAD,
                                .code = X_IN(0) | S_OUT(0) | S_OUT(1) | S_OUT(2),
                                .n_in = 1,
                                .n_out = 3,
                                .infer = infer_stats,
                                .label = label_stats,
                                .rule = rule_piece,
                                .run = run_stats};

/* ---- the same in two steps for samples that lie apart: shards add ---- */

static orr_status infer_sum(orr_call *c) {
  c->out_meta[0] = statistics_of(c, 0);
  return ORR_OK;
}

static orr_status run_sum(const orr_work *w, int shard) {
  orr_view sum = row_of(orr_work_out(w, shard, 0));
  w->k->bn_sum(orr_work_in(w, shard, 0), &sum);
  return ORR_OK;
}

const orr_op orr_op_bn_sum = {.name = "bn_sum",
                              .flags = ORR_OP_NO_GRAD,
                              .code = X_IN(0) | S_OUT(0),
                              .partial = ORR_SUM,
                              .n_in = 1,
                              .n_out = 1,
                              .infer = infer_sum,
                              .label = label_piece,
                              .run = run_sum};

static orr_status run_sumsq(const orr_work *w, int shard) {
  orr_view mean = row_of(orr_work_in(w, shard, 1)), sumsq = row_of(orr_work_out(w, shard, 0));
  w->k->bn_centered_sumsq(orr_work_in(w, shard, 0), &mean, &sumsq);
  return ORR_OK;
}

/* in: x, mean. */
const orr_op orr_op_bn_sumsq = {.name = "bn_sumsq",
                                .flags = ORR_OP_NO_GRAD,
                                .code = X_IN(0) | S_IN(1) | S_OUT(0),
                                .partial = ORR_SUM,
                                .n_in = 2,
                                .n_out = 1,
                                .infer = infer_sum,
                                .label = label_piece,
                                .run = run_sumsq};

/* ---- bn_rstd: sums of squares (D, C) or variances (C), counts (D) or absent; f[1]: eps --- */

static orr_status infer_rstd(orr_call *c) {
  const orr_meta *m = &c->in[0]->meta;
  c->out_meta[0] =
      (orr_meta){.dtype = m->dtype, .ndim = 2, .shape = {c->args.i[D], m->shape[m->ndim - 1]}};
  return ORR_OK;
}

static void label_rstd(orr_call *c) {
  label_piece(c);
  if (c->n_in > 1 && c->in[1]) c->in_label[1][0] = ORR_WHOLE;
}

static orr_status run_rstd(const orr_work *w, int shard) {
  orr_view sumsq = row_of(orr_work_in(w, shard, 0)), rstd = row_of(orr_work_out(w, shard, 0));
  w->k->bn_rstd(&sumsq, given(w, shard, 1), w->args.f[COUNT], w->args.f[1], &rstd);
  return ORR_OK;
}

const orr_op orr_op_bn_rstd = {.name = "bn_rstd",
                               .flags = ORR_OP_NO_GRAD,
                               .code = S_IN(0) | S_IN(1) | S_OUT(0),
                               .n_in = 1,
                               .n_out = 1,
                               .infer = infer_rstd,
                               .label = label_rstd,
                               .rule = rule_piece,
                               .run = run_rstd};

/* ---- bn_running_: running mean and variance (C) move towards those of all rows together.
 * in: both, then mean, sum of squares, counts (D) or absent; args.f[1]: momentum. ---- */

static orr_status infer_running(orr_call *c) {
  for (int k = 0; k < 2; k++) {
    const orr_meta *m = &c->in[k]->meta, *mean = &c->in[2]->meta;
    ORR_TRY(orr_need_float(c, k));
    if (m->ndim != 1 || m->shape[0] != mean->shape[1])
      return orr_fail(ORR_EARG, "running statistics must be (%lld)", (long long)mean->shape[1]);
  }
  if (!orr_layout_equal(c->in[0]->layout, c->in[1]->layout))
    return orr_fail(ORR_EARG, "running mean and variance must be placed alike");
  c->n_written = 2;
  return ORR_OK;
}

static int rule_running(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  const orr_place *now = &c->in[0]->layout->axis[axis];
  *only = true;
  if (max < 1) return 0;
  for (int k = 0; k < c->n_in; k++) rows[0].in[k] = (orr_place){.kind = ORR_REPLICATE};
  rows[0].in[0] = rows[0].in[1] = *now;
  if (now->kind == ORR_SHARD)
    rows[0].in[2] = rows[0].in[3] =
        (orr_place){.kind = ORR_SHARD, .dim = 1, .bounds = now->bounds};
  return 1;
}

static orr_status run_running(const orr_work *w, int shard) {
  w->k->bn_running(orr_work_in(w, shard, 0), orr_work_in(w, shard, 1), orr_work_in(w, shard, 2),
                   orr_work_in(w, shard, 3), given(w, shard, 4), w->args.f[COUNT],
                   w->args.f[1]);
  return ORR_OK;
}

const orr_op orr_op_bn_running_ = {.name = "bn_running_",
                                   .flags = ORR_OP_ALWAYS_IN_PLACE | ORR_OP_NO_GRAD,
                                   .n_in = 4,
                                   .infer = infer_running,
                                   .rule = rule_running,
                                   .run = run_running};

/* ---- bn_apply: x, w, b, mean, rstd ---- */

static orr_status infer_apply(orr_call *c) {
  int64_t channels = c->in[0]->meta.shape[1];
  for (int k = 1; k < 5; k++) {
    const orr_tensor *t = c->in[k];
    if (t && t->meta.shape[t->meta.ndim - 1] != channels)
      return orr_fail(ORR_EARG, "weights and statistics must be (%lld)", (long long)channels);
    if (t) ORR_TRY(orr_need_float(c, k));
  }
  return orr_infer_same(c);
}

static orr_status run_apply(const orr_work *w, int shard) {
  orr_view mean = row_of(orr_work_in(w, shard, 3)), rstd = row_of(orr_work_in(w, shard, 4));
  w->k->bn_apply(orr_work_in(w, shard, 0), &mean, &rstd, given(w, shard, 1), given(w, shard, 2),
                 orr_work_out(w, shard, 0));
  return ORR_OK;
}

/* in: x, mean, rstd, g; out (D, 2, C): sum of g, sum of g xhat. */
static orr_status infer_grad_sums(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  c->out_meta[0] = (orr_meta){
      .dtype = orr_sum_dtype(x->dtype), .ndim = 3, .shape = {c->args.i[D], 2, x->shape[1]}};
  return ORR_OK;
}

/* (C) of a device's (1, 2, C). */
static orr_view sum_row(const orr_view *sums, int k) {
  orr_view r = row_of(sums);
  if (r.data) r.data = (char *)r.data + k * sums->stride[1] * (int64_t)orr_dtype_size(r.dtype);
  return r;
}

static orr_status run_grad_sums(const orr_work *w, int shard) {
  const orr_view *sums = orr_work_out(w, shard, 0);
  orr_view mean = row_of(orr_work_in(w, shard, 1)), rstd = row_of(orr_work_in(w, shard, 2));
  orr_view sum_g = sum_row(sums, 0), sum_gxhat = sum_row(sums, 1);
  w->k->bn_grad_sums(orr_work_in(w, shard, 0), &mean, &rstd, orr_work_in(w, shard, 3), &sum_g,
                     &sum_gxhat);
  return ORR_OK;
}

const orr_op orr_op_bn_grad_sums = {.name = "bn_grad_sums",
                                    .code = X_IN(0) | S_IN(1) | S_IN(2) | X_IN(3) | S_OUT(0),
                                    .partial = ORR_SUM,
                                    .n_in = 4,
                                    .n_out = 1,
                                    .infer = infer_grad_sums,
                                    .label = label_piece,
                                    .rule = rule_piece,
                                    .run = run_grad_sums};

/* in: x, mean, rstd, g, w or NULL, sums or NULL. */
static orr_status run_grad_apply(const orr_work *w, int shard) {
  const orr_view *x = orr_work_in(w, shard, 0), *sums = given(w, shard, 5);
  orr_view mean = row_of(orr_work_in(w, shard, 1)), rstd = row_of(orr_work_in(w, shard, 2));
  orr_view sum_g = {0}, sum_gxhat = {0};
  if (sums) {
    sum_g = sum_row(sums, 0);
    sum_gxhat = sum_row(sums, 1);
  }
  double count = w->args.i[D] > 1 ? (double)local_count(x) : w->args.f[COUNT];
  w->k->bn_grad_apply(x, &mean, &rstd, given(w, shard, 4), orr_work_in(w, shard, 3),
                      sums ? &sum_g : NULL, sums ? &sum_gxhat : NULL, count,
                      orr_work_out(w, shard, 0));
  return ORR_OK;
}

const orr_op orr_op_bn_grad_apply = {
    .name = "bn_grad_apply",
    .flags = ORR_OP_LIKE_IN,
    .code = X_IN(0) | S_IN(1) | S_IN(2) | X_IN(3) | S_IN(5) | X_OUT(0),
    .n_in = 4,
    .n_out = 1,
    .infer = orr_infer_same,
    .label = label_piece,
    .rule = rule_piece,
    .run = run_grad_apply};

static orr_tensor *weight_grad(orr_grad *g, orr_tensor *sums, int which) {
  orr_args row = {.i = {1, which + 1, 1}};
  return orr_g_sum(g, orr_g(g, &orr_op_narrow, &row, 1, sums), 1u | 2u, false);
}

static orr_status grad_apply(orr_grad *g) {
  orr_tensor *x = g->x[0], *mean = g->x[3], *rstd = g->x[4], *gy = g->gy[0], *sums = NULL;
  bool constant = g->args->f[COUNT] == 0, own = g->args->i[D] > 1;
  if (!constant || g->needs[1] || g->needs[2]) {
    orr_tensor *in[4] = {x, mean, rstd, gy};
    ORR_TRY(orr_dispatch(&orr_op_bn_grad_sums, in, 4, g->args, false, &sums));
    orr_status status = g->needs[0] && !constant && !own ? orr_reduce_partial(&sums) : ORR_OK;
    if (!orr_g_keep(g, sums)) return g->status;
    if (status) return status;
  }
  if (g->needs[0])
    g->gx[0] = orr_g(g, &orr_op_bn_grad_apply, g->args, 6, x, mean, rstd, gy, g->x[1],
                     constant ? NULL : sums);
  if (g->needs[1]) g->gx[1] = weight_grad(g, sums, 1);
  if (g->needs[2]) g->gx[2] = weight_grad(g, sums, 0);
  return g->status;
}

const orr_op orr_op_bn_apply = {
    .name = "bn_apply",
    .flags = ORR_OP_LIKE_IN | ORR_OP_FUSED_GRAD,
    .code = X_IN(0) | S_IN(3) | S_IN(4) | X_OUT(0),
    .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1) | ORR_SAVE_IN(3) | ORR_SAVE_IN(4),
    .n_in = 5,
    .n_out = 1,
    .infer = infer_apply,
    .label = label_piece,
    .rule = rule_piece,
    .run = run_apply,
    .grad = grad_apply};

/* ---- batch_norm: x, w, b, running mean, running variance; args.i: training, sync; args.f:
 * momentum, eps ---- */

typedef struct statistics {
  orr_tensor *mean, *sumsq, *counts, *rstd; /* owned; counts NULL: args.f[COUNT] */
  orr_args args;
  double momentum, eps;
} statistics;

static void release(statistics *s) {
  orr_tensor *all[] = {s->mean, s->sumsq, s->counts, s->rstd};
  for (int k = 0; k < 4; k++)
    if (all[k]) orr_tensor_free(all[k]);
}

/* Whether dims that a channel's statistics run over lie apart; which axis cuts samples. */
static bool lies_apart(const orr_tensor *x, int *axis) {
  bool apart = false;
  *axis = -1;
  for (int a = x->layout->mesh->n_axes - 1; a >= 0; a--) {
    const orr_place *p = &x->layout->axis[a];
    if (p->kind != ORR_SHARD || p->dim == 1) continue;
    apart = true;
    if (p->dim == 0) *axis = a;
  }
  return apart;
}

static orr_status batch_statistics(orr_tensor *x, bool sync, statistics *s) {
  int axis;
  bool apart = lies_apart(x, &axis);
  if (!apart || (!sync && axis >= 0)) {
    orr_tensor *out[3];
    if (apart) {
      s->args.i[D] = x->layout->mesh->size[axis];
      s->args.i[AXIS] = axis;
    }
    ORR_TRY(orr_dispatch(&orr_op_bn_stats, &x, 1, &s->args, false, out));
    s->mean = out[0];
    s->sumsq = out[1];
    if (s->args.i[D] > 1) s->counts = out[2];
    else orr_tensor_free(out[2]);
    return ORR_OK;
  }
  ORR_TRY(orr_call1(&orr_op_bn_sum, x, &s->args, &s->mean));
  ORR_TRY(orr_reduce_partial(&s->mean));
  ORR_TRY(orr_then_scale(&s->mean, 1 / s->args.f[COUNT]));
  ORR_TRY(orr_call2(&orr_op_bn_sumsq, x, s->mean, &s->args, &s->sumsq));
  return orr_reduce_partial(&s->sumsq);
}

/* t on the mesh of `where`. */
static orr_status on_mesh_of(const orr_tensor *where, orr_tensor *t, orr_tensor **out) {
  if (!t || t->layout->mesh == where->layout->mesh) {
    *out = t ? orr_tensor_ref(t) : NULL;
    return ORR_OK;
  }
  return orr_redistribute(t, orr_layout_replicate(where->layout->mesh), out);
}

static bool held = false;

void orr_bn_hold(bool on) { held = on; }

/* The count of a row of statistics as a tensor (1) beside them. */
static orr_status counts_of(const orr_tensor *where, const statistics *s, orr_tensor **out) {
  orr_meta one = {.dtype = where->meta.dtype, .ndim = 1, .shape = {1}};
  orr_args args = {.f = {s->args.f[COUNT]}};
  const orr_mesh *mesh = where->layout->mesh;
  return orr_create(
      &orr_op_full, &one,
      mesh->n_axes ? orr_layout_replicate(mesh) : orr_layout_single(mesh->device[0]), &args,
      out);
}

static orr_status move_running(orr_tensor *mean, orr_tensor *var, const statistics *s) {
  orr_tensor *in[5] = {mean, var, NULL, NULL, NULL}, *from[3] = {s->mean, s->sumsq, s->counts};
  orr_args args = s->args;
  args.f[1] = s->momentum;
  orr_status status = ORR_OK;
  for (int k = 0; k < 3 && !status; k++) status = on_mesh_of(mean, from[k], &in[2 + k]);
  if (!status && orr_bn_deferring()) {
    if (!in[4]) status = counts_of(mean, s, &in[4]);
    if (!status) status = orr_bn_defer(mean, var, s->momentum, in[2], in[3], in[4]);
    in[4] = NULL;
  } else if (!status) status = orr_dispatch(&orr_op_bn_running_, in, 5, &args, false, NULL);
  for (int k = 2; k < 5; k++)
    if (in[k]) orr_tensor_free(in[k]);
  return status;
}

static orr_status find_statistics(orr_tensor *x, orr_tensor *const *in, const orr_args *args,
                                  statistics *s) {
  orr_args of_rstd;
  if (args->i[0]) {
    ORR_TRY(batch_statistics(x, args->i[1] != 0, s));
    if (in[3] && in[4] && !held) ORR_TRY(move_running(in[3], in[4], s));
    of_rstd = s->args;
  } else {
    s->args.f[COUNT] = 0;
    s->mean = orr_tensor_ref(in[3]);
    s->sumsq = orr_tensor_ref(in[4]);
    of_rstd = s->args;
    of_rstd.f[COUNT] = 1; /* a variance as it is */
  }
  of_rstd.f[1] = s->eps;
  return orr_call2(&orr_op_bn_rstd, s->sumsq, s->counts, &of_rstd, &s->rstd);
}

static orr_status check(orr_tensor *const *in, const orr_args *args) {
  const orr_meta *x = &in[0]->meta;
  if (!orr_dtype_is_float(x->dtype) || x->ndim < 2)
    return orr_fail(ORR_EARG, "needs a floating-point x (N, C, ...)");
  if (!args->i[0] && (!in[3] || !in[4]))
    return orr_fail(ORR_EARG, "evaluation needs running statistics");
  for (int k = 3; k < 5; k++)
    if (in[k] && (in[k]->meta.ndim != 1 || in[k]->meta.shape[0] != x->shape[1]))
      return orr_fail(ORR_EARG, "running statistics must be (%lld)", (long long)x->shape[1]);
  if (args->i[0] && x->shape[1] > 0 && orr_numel(x->ndim, x->shape) / x->shape[1] < 2)
    return orr_fail(ORR_EARG, "training needs more than one value a channel");
  return ORR_OK;
}

static orr_status compose_batch_norm(const orr_op *op, orr_tensor *const *in, int n_in,
                                     const orr_args *args, orr_tensor **out) {
  (void)n_in;
  orr_status status = check(in, args);
  if (status) return orr_fail_in(status, "%s", op->name);
  orr_tensor *x = orr_tensor_ref(in[0]);
  statistics s = {.momentum = args->f[0], .eps = args->f[1]};
  int64_t channels = x->meta.shape[1];
  int64_t samples = channels ? orr_tensor_numel(x) / channels : 1;
  s.args = (orr_args){.i = {1, -1}};
  s.args.f[COUNT] = (double)samples;
  status = orr_reduce_partial(&x);
  bool was = orr_set_grad_mode(false);
  if (!status) status = find_statistics(x, in, args, &s);
  orr_set_grad_mode(was);
  if (!status) {
    orr_tensor *all[5] = {x, in[1], in[2], s.mean, s.rstd};
    status = orr_dispatch(&orr_op_bn_apply, all, 5, &s.args, false, out);
  }
  release(&s);
  orr_tensor_free(x);
  return status ? orr_fail_in(status, "%s", op->name) : ORR_OK;
}

const orr_op orr_op_batch_norm = {.name = "batch_norm",
                                  .args = "t t? t? t? t? b=false f=0.1 f=1e-5 b=true",
                                  .n_in = 5,
                                  .n_out = 1,
                                  .compose = compose_batch_norm};
