/* op_norm.c: layer, RMS and group normalisation. Batch norm is in op_batch_norm.c.
 *
 * Invariant: what is normalised over is whole on each device; every other dimension may be
 * sharded, and the weights' gradients then come out Partial(sum). Gradients are fused.
 * To add a norm: an op that also gives its statistics, composed to hide them.
 */
#include "../kernels/norm.h"

#include "op_batch_norm.h"
#include "op_reduce.h"

static const orr_view *given(const orr_work *w, int shard, int k) {
  return k < w->n_in && orr_work_has(w, shard, k) ? orr_work_in(w, shard, k) : NULL;
}

static orr_status check_weight(const orr_call *c, int k, int64_t size) {
  if (k >= c->n_in || !c->in[k]) return ORR_OK;
  const orr_meta *m = &c->in[k]->meta;
  if (m->ndim != 1 || m->shape[0] != size)
    return orr_fail(ORR_EARG, "weights must be (%lld)", (long long)size);
  return orr_need_float(c, k);
}

static const orr_op layer_norm_stats, rms_norm_stats, group_norm_stats;

/* Calls the op that also gives statistics, and keeps y alone. */
static orr_status compose_first(const orr_op *op, orr_tensor *const *in, int n_in,
                                const orr_args *args, orr_tensor **out) {
  static const orr_op *const full[] = {&layer_norm_stats, &rms_norm_stats, &group_norm_stats};
  orr_tensor *all[ORR_MAX_OUT];
  orr_status status = orr_dispatch(full[op->code], in, n_in, args, false, all);
  if (status) return orr_fail_in(status, "%s", op->name);
  for (int k = 1; k < full[op->code]->n_out; k++) orr_tensor_free(all[k]);
  out[0] = all[0];
  return ORR_OK;
}

/* ---- layer and RMS norm, over the last dim. Code 1: RMS, without b and mean ---- */

static orr_status infer_rows(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  ORR_TRY(orr_need_float(c, 0));
  if (x->ndim < 1) return orr_fail(ORR_EARG, "needs at least one dimension");
  for (int k = 1; k < 3; k++) ORR_TRY(check_weight(c, k, x->shape[x->ndim - 1]));
  c->out_meta[0] = *x;
  orr_infer_reduced(x, 1u << (x->ndim - 1), false, &c->out_meta[1]);
  c->out_meta[1].dtype = orr_sum_dtype(x->dtype);
  c->out_meta[2] = c->out_meta[1];
  return ORR_OK;
}

/* Leading dims of every tensor that has them; in[0] has the most. */
static void label_rows(orr_call *c) {
  int rows = c->in[0]->meta.ndim - 1;
  for (int k = 0; k < c->n_in; k++)
    for (int d = 0; c->in[k] && c->in[k]->meta.ndim >= rows && d < rows; d++)
      c->in_label[k][d] = (uint8_t)(d + 1);
  for (int k = 0; k < c->n_out; k++)
    for (int d = 0; c->out_meta[k].ndim >= rows && d < rows; d++)
      c->out_label[k][d] = (uint8_t)(d + 1);
}

/* The weights (one dim each) are not rows. */
static void label_forward(orr_call *c) {
  label_rows(c);
  for (int k = 1; k < c->n_in; k++)
    if (c->in[k]) c->in_label[k][0] = ORR_WHOLE;
}

static orr_status run_layer_norm(const orr_work *w, int shard) {
  w->k->layer_norm(orr_work_in(w, shard, 0), given(w, shard, 1), given(w, shard, 2),
                   w->args.f[0], orr_work_out(w, shard, 0), orr_work_out(w, shard, 1),
                   orr_work_out(w, shard, 2));
  return ORR_OK;
}

static orr_status run_rms_norm(const orr_work *w, int shard) {
  w->k->rms_norm(orr_work_in(w, shard, 0), given(w, shard, 1), w->args.f[0],
                 orr_work_out(w, shard, 0), orr_work_out(w, shard, 1));
  return ORR_OK;
}

/* in: x, g, rstd, mean or NULL (RMS), w or NULL. */
static orr_status run_grad_x(const orr_work *w, int shard) {
  const orr_view *x = orr_work_in(w, shard, 0), *g = orr_work_in(w, shard, 1),
                 *rstd = orr_work_in(w, shard, 2), *mean = given(w, shard, 3),
                 *weight = given(w, shard, 4), *gx = orr_work_out(w, shard, 0);
  if (mean) w->k->layer_norm_back(x, mean, rstd, weight, g, gx);
  else w->k->rms_norm_back(x, rstd, weight, g, gx);
  return ORR_OK;
}

static void label_grad_x(orr_call *c) {
  label_rows(c);
  if (c->n_in > 4 && c->in[4]) c->in_label[4][0] = ORR_WHOLE;
}

static const orr_op norm_grad_x = {.name = "norm_grad_x",
                                   .flags = ORR_OP_LIKE_IN,
                                   .n_in = 3,
                                   .n_out = 1,
                                   .infer = orr_infer_same,
                                   .label = label_grad_x,
                                   .run = run_grad_x};

static orr_status infer_grad_w(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  for (int k = 0; k < 2; k++)
    c->out_meta[k] = (orr_meta){
        .dtype = orr_sum_dtype(x->dtype), .ndim = 1, .shape = {x->shape[x->ndim - 1]}};
  return ORR_OK;
}

static void label_grad_w(orr_call *c) {
  int rows = c->in[0]->meta.ndim - 1;
  for (int k = 0; k < c->n_in; k++)
    for (int d = 0; c->in[k] && d < rows; d++) c->in_label[k][d] = (uint8_t)(d + 1);
}

/* in: x, g, rstd, mean or NULL; out: gw, gb (of layer norm alone). */
static orr_status run_grad_w(const orr_work *w, int shard) {
  const orr_view *x = orr_work_in(w, shard, 0), *g = orr_work_in(w, shard, 1),
                 *rstd = orr_work_in(w, shard, 2), *mean = given(w, shard, 3),
                 *gw = orr_work_out(w, shard, 0);
  if (mean) w->k->layer_norm_back_w(x, mean, rstd, g, gw, orr_work_out(w, shard, 1));
  else w->k->rms_norm_back_w(x, rstd, g, gw);
  return ORR_OK;
}

static const orr_op layer_norm_grad_w = {.name = "layer_norm_grad_w",
                                         .partial = ORR_SUM,
                                         .n_in = 3,
                                         .n_out = 2,
                                         .infer = infer_grad_w,
                                         .label = label_grad_w,
                                         .run = run_grad_w};
static const orr_op rms_norm_grad_w = {.name = "rms_norm_grad_w",
                                       .partial = ORR_SUM,
                                       .n_in = 3,
                                       .n_out = 1,
                                       .infer = infer_grad_w,
                                       .label = label_grad_w,
                                       .run = run_grad_w};

static orr_status grad_rows(orr_grad *g) {
  bool rms = g->op->code != 0;
  orr_tensor *x = g->x[0], *gy = g->gy[0], *w = g->n_in > 1 ? g->x[1] : NULL;
  orr_tensor *mean = rms ? NULL : g->y[1], *rstd = g->y[rms ? 1 : 2];
  bool needs_w = g->n_in > 1 && g->needs[1], needs_b = g->n_in > 2 && g->needs[2];
  if (g->needs[0]) g->gx[0] = orr_g(g, &norm_grad_x, NULL, 5, x, gy, rstd, mean, w);
  if (g->status || (!needs_w && !needs_b)) return g->status;
  orr_tensor *in[4] = {x, gy, rstd, mean}, *out[2] = {NULL, NULL};
  ORR_TRY(orr_dispatch(rms ? &rms_norm_grad_w : &layer_norm_grad_w, in, 4, NULL, false, out));
  g->gx[1] = orr_g_keep(g, out[0]);
  if (!rms) {
    orr_tensor *gb = orr_g_keep(g, out[1]);
    if (g->n_in > 2) g->gx[2] = gb;
  }
  return g->status;
}

static const orr_op layer_norm_stats = {
    .name = "layer_norm_stats",
    .flags = ORR_OP_LIKE_IN | ORR_OP_FUSED_GRAD | ORR_OP_WIDE,
    .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1) | ORR_SAVE_OUT(1) | ORR_SAVE_OUT(2),
    .n_in = 1,
    .n_out = 3,
    .infer = infer_rows,
    .label = label_forward,
    .run = run_layer_norm,
    .grad = grad_rows};
static const orr_op rms_norm_stats = {.name = "rms_norm_stats",
                                      .flags = ORR_OP_LIKE_IN | ORR_OP_FUSED_GRAD | ORR_OP_WIDE,
                                      .code = 1,
                                      .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1) | ORR_SAVE_OUT(1),
                                      .n_in = 1,
                                      .n_out = 2,
                                      .infer = infer_rows,
                                      .label = label_forward,
                                      .run = run_rms_norm,
                                      .grad = grad_rows};

static const orr_op layer_norm = {.name = "layer_norm",
                                  .args = "t t? t? f=1e-5",
                                  .n_in = 1,
                                  .n_out = 1,
                                  .compose = compose_first};
static const orr_op rms_norm = {.name = "rms_norm",
                                .args = "t t? f=1e-6",
                                .n_in = 1,
                                .n_out = 1,
                                .code = 1,
                                .compose = compose_first};

/* ---- group norm: x (N, C, ...), statistics (N, groups); args.i[0]: groups ---- */

static orr_status infer_group(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  int64_t groups = c->args.i[0];
  ORR_TRY(orr_need_float(c, 0));
  if (x->ndim < 2 || groups < 1 || x->shape[1] % groups)
    return orr_fail(ORR_EARG, "needs x (N, C, ...) with C a multiple of the %lld group(s)",
                    (long long)groups);
  for (int k = 1; k < 3; k++) ORR_TRY(check_weight(c, k, x->shape[1]));
  c->out_meta[0] = *x;
  c->out_meta[1] =
      (orr_meta){.dtype = orr_sum_dtype(x->dtype), .ndim = 2, .shape = {x->shape[0], groups}};
  c->out_meta[2] = c->out_meta[1];
  return ORR_OK;
}

/* Samples may be sharded: dim 1 of every tensor with two or more. */
static void label_group(orr_call *c) {
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k] && c->in[k]->meta.ndim > 1) c->in_label[k][0] = 1;
  for (int k = 0; k < c->n_out; k++) c->out_label[k][0] = 1;
}

static orr_status run_group(const orr_work *w, int shard) {
  w->k->group_norm(orr_work_in(w, shard, 0), w->args.i[0], given(w, shard, 1),
                   given(w, shard, 2), w->args.f[0], orr_work_out(w, shard, 0),
                   orr_work_out(w, shard, 1), orr_work_out(w, shard, 2));
  return ORR_OK;
}

static orr_status infer_group_sums(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  for (int k = 0; k < 2; k++)
    c->out_meta[k] = (orr_meta){
        .dtype = orr_sum_dtype(x->dtype), .ndim = 2, .shape = {x->shape[0], x->shape[1]}};
  return ORR_OK;
}

static orr_status run_group_sums(const orr_work *w, int shard) {
  w->k->group_norm_grad_sums(orr_work_in(w, shard, 0), w->args.i[0], orr_work_in(w, shard, 1),
                             orr_work_in(w, shard, 2), orr_work_in(w, shard, 3),
                             orr_work_out(w, shard, 0), orr_work_out(w, shard, 1));
  return ORR_OK;
}

/* in: x, mean, rstd, g; out (N, C): sum of g, sum of g xhat. */
static const orr_op group_norm_sums = {.name = "group_norm_sums",
                                       .n_in = 4,
                                       .n_out = 2,
                                       .infer = infer_group_sums,
                                       .label = label_group,
                                       .run = run_group_sums};

static orr_status run_group_grad_x(const orr_work *w, int shard) {
  w->k->group_norm_grad_apply(orr_work_in(w, shard, 0), w->args.i[0], orr_work_in(w, shard, 1),
                              orr_work_in(w, shard, 2), given(w, shard, 6),
                              orr_work_in(w, shard, 3), orr_work_in(w, shard, 4),
                              orr_work_in(w, shard, 5), orr_work_out(w, shard, 0));
  return ORR_OK;
}

/* in: x, mean, rstd, g, the sums, w or NULL. */
static const orr_op group_norm_grad_x = {.name = "group_norm_grad_x",
                                         .flags = ORR_OP_LIKE_IN,
                                         .n_in = 6,
                                         .n_out = 1,
                                         .infer = orr_infer_same,
                                         .label = label_group,
                                         .run = run_group_grad_x};

static orr_status grad_group(orr_grad *g) {
  orr_tensor *in[4] = {g->x[0], g->y[1], g->y[2], g->gy[0]}, *sums[2];
  orr_tensor *w = g->n_in > 1 ? g->x[1] : NULL;
  ORR_TRY(orr_dispatch(&group_norm_sums, in, 4, g->args, false, sums));
  orr_tensor *sum_g = orr_g_keep(g, sums[0]), *sum_gxhat = orr_g_keep(g, sums[1]);
  if (g->needs[0])
    g->gx[0] = orr_g(g, &group_norm_grad_x, g->args, 7, in[0], in[1], in[2], in[3], sum_g,
                     sum_gxhat, w);
  if (g->n_in > 1 && g->needs[1]) g->gx[1] = orr_g_sum(g, sum_gxhat, 1, false);
  if (g->n_in > 2 && g->needs[2]) g->gx[2] = orr_g_sum(g, sum_g, 1, false);
  return g->status;
}

static const orr_op group_norm_stats = {
    .name = "group_norm_stats",
    .flags = ORR_OP_LIKE_IN | ORR_OP_FUSED_GRAD | ORR_OP_WIDE,
    .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1) | ORR_SAVE_OUT(1) | ORR_SAVE_OUT(2),
    .n_in = 1,
    .n_out = 3,
    .infer = infer_group,
    .label = label_group,
    .run = run_group,
    .grad = grad_group};

static const orr_op group_norm = {.name = "group_norm",
                                  .args = "t i t? t? f=1e-5",
                                  .n_in = 1,
                                  .n_out = 1,
                                  .code = 2,
                                  .compose = compose_first};

const orr_op *const orr_ops_norm[] = {&layer_norm,        &layer_norm_stats,
                                      &rms_norm,          &rms_norm_stats,
                                      &norm_grad_x,       &layer_norm_grad_w,
                                      &rms_norm_grad_w,   &group_norm,
                                      &group_norm_stats,  &group_norm_sums,
                                      &group_norm_grad_x, &orr_op_batch_norm,
                                      ORR_OPS_BATCH_NORM, NULL};
