/* op_loss.c: cross entropy and negative log likelihood over classes in dim 2 (in the only dim
 * of a single row), labels from 1.
 *
 * Invariant: classes that are split over devices stay there: rows of numbers are reduced, never
 * the logits. Rows are added over all devices and divided once, by the global count of labels
 * that are not ignored; where there are none the mean is 0 with zero gradients. Losses of f16
 * and bf16 come out in f32.
 * To add a loss of rows: an op (rows) with its gradient op, and `compose_loss` on top.
 */
#include "../kernels/elementwise.h"
#include "../kernels/loss.h"
#include "op_capture.h"
#include "op_index.h"

enum { NONE, MEAN, SUM };

/* ---- rows: in: x (..., C), target (...); args.i[0]: ignored label, f[0]: smoothing ---- */

static orr_status infer_rows(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  int rows = x->ndim - 1;
  orr_dtype dtype = c->in[1]->meta.dtype;
  ORR_TRY(orr_need_float(c, 0));
  if (dtype != ORR_I64 && dtype != ORR_I32)
    return orr_fail(ORR_EARG, "labels must be i64 or i32 and are %s", orr_dtype_name(dtype));
  ORR_TRY(orr_check_index(c, 1, x->shape[rows], c->args.i[0], true));
  for (int k = 0; k < c->n_out; k++) {
    c->out_meta[k] = *x;
    c->out_meta[k].ndim = rows;
    c->out_meta[k].dtype = orr_sum_dtype(x->dtype);
  }
  return ORR_OK;
}

static void label_row_dims(int rows, uint8_t *label) {
  for (int d = 0; d < rows; d++) label[d] = (uint8_t)(d + 1);
}

/* Every tensor of a call starts with the rows' dims; classes, where it has them, are whole. */
static void label_rows(orr_call *c) {
  int rows = c->in[1]->meta.ndim;
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k]) label_row_dims(rows, c->in_label[k]);
  for (int k = 0; k < c->n_out; k++) label_row_dims(rows, c->out_label[k]);
}

/* The same, classes split where they are. */
static void label_classes(orr_call *c) {
  int rows = c->in[1]->meta.ndim;
  label_rows(c);
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k] && c->in[k]->meta.ndim > rows) c->in_label[k][rows] = (uint8_t)(rows + 1);
  for (int k = 0; k < c->n_out; k++)
    if (c->out_meta[k].ndim > rows) c->out_label[k][rows] = (uint8_t)(rows + 1);
}

static orr_status finish(const orr_work *w, const orr_fault *fault, const orr_view *x) {
  if (!fault->index) return ORR_OK;
  return orr_index_fault(fault->value, fault->index, x->shape[x->ndim - 1], true,
                         w->n_shards > 1);
}

static orr_status run_cross_entropy(const orr_work *w, int shard) {
  orr_fault fault = {0};
  const orr_view *x = orr_work_in(w, shard, 0);
  w->k->cross_entropy(x, orr_work_in(w, shard, 1), w->args.i[0], w->args.f[0],
                      orr_work_out(w, shard, 0), orr_work_out(w, shard, 1), &fault);
  return finish(w, &fault, x);
}

/* in: x, target, lse, g (a number a row). */
static orr_status run_cross_entropy_grad(const orr_work *w, int shard) {
  const orr_view *x = orr_work_in(w, shard, 0);
  int classes = x->ndim - 1;
  w->k->cross_entropy_back(x, orr_work_in(w, shard, 2), orr_work_in(w, shard, 1), w->args.i[0],
                           w->args.f[0], w->origin[shard][classes], w->global.shape[classes],
                           orr_work_in(w, shard, 3), orr_work_out(w, shard, 0));
  return ORR_OK;
}

static const orr_op cross_entropy_grad = {.name = "cross_entropy_grad",
                                          .flags = ORR_OP_ORIGIN,
                                          .n_in = 4,
                                          .n_out = 1,
                                          .infer = orr_infer_same,
                                          .label = label_classes,
                                          .run = run_cross_entropy_grad};

static orr_tensor *binary(orr_grad *g, int code, orr_tensor *x, double s) {
  orr_args args = {.f = {s}};
  return orr_g(g, orr_op_binary(code)->scalar, &args, 1, x);
}

/* g (softmax(x) - (1 - s) one-hot - s / C) in rows whose label counts, differentiably. */
static orr_tensor *composed(orr_grad *g) {
  orr_tensor *x = g->x[0], *target = g->x[1];
  const orr_meta *m = &g->x_meta[0];
  int last = m->ndim - 1;
  double smooth = g->args->f[0];
  orr_dtype dtype = g->gy[0]->meta.dtype;
  orr_args along = {.i = {last}}, classes = {.i = {m->shape[last]}};
  orr_tensor *counts = binary(g, ORR_BIN_ne, target, (double)g->args->i[0]);
  orr_tensor *from0 = binary(g, ORR_BIN_add, target, -1);
  orr_tensor *label = orr_g_shift(g, orr_g_mul(g, from0, orr_g_cast(g, counts, ORR_I64)), 1);
  orr_tensor *hot = orr_g_cast(g, orr_g(g, &orr_op_one_hot, &classes, 1, label), dtype);
  hot = orr_g_shift(g, orr_g_scale(g, hot, 1 - smooth), smooth / (double)m->shape[last]);
  orr_tensor *p = orr_g_unary(
      g, ORR_UN_exp, orr_g(g, &orr_op_log_softmax, &along, 1, orr_g_cast(g, x, dtype)));
  orr_tensor *rows = orr_g_mul(g, g->gy[0], orr_g_cast(g, counts, dtype));
  rows = orr_g(g, &orr_op_unsqueeze, &along, 1, rows);
  return orr_g_mul(g, orr_g_sub(g, p, hot), rows);
}

static orr_status grad_cross_entropy(orr_grad *g) {
  if (!g->gy[0]) return ORR_OK;
  g->gx[0] = g->create_graph ? composed(g)
                             : orr_g(g, &cross_entropy_grad, g->args, 4, g->x[0], g->x[1],
                                     g->y[1], g->gy[0]);
  return g->status;
}

static const orr_op cross_entropy_rows = {
    .name = "cross_entropy",
    .flags = ORR_OP_WIDE,
    .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1) | ORR_SAVE_OUT(1),
    .n_in = 2,
    .n_out = 2,
    .infer = infer_rows,
    .label = label_rows,
    .run = run_cross_entropy,
    .grad = grad_cross_entropy};

/* ---- split classes: the largest logit of a row, sums over its classes, the loss ---- */

/* Rows of numbers; args.i[1]: classes. */
static orr_status infer_pieces(orr_call *c) {
  ORR_TRY(infer_rows(c));
  c->has_args = true;
  c->args.i[1] = c->in[0]->meta.shape[c->in[0]->meta.ndim - 1];
  return ORR_OK;
}

static orr_status run_class_max(const orr_work *w, int shard) {
  w->k->cross_entropy_max(orr_work_in(w, shard, 0), orr_work_out(w, shard, 0));
  return ORR_OK;
}

/* in: x, target. */
static const orr_op class_max = {.name = "cross_entropy_max",
                                 .flags = ORR_OP_NO_GRAD | ORR_OP_WIDE,
                                 .partial = ORR_MAX,
                                 .n_in = 2,
                                 .n_out = 1,
                                 .infer = infer_pieces,
                                 .label = label_classes,
                                 .run = run_class_max};

static orr_status run_class_sums(const orr_work *w, int shard) {
  orr_fault fault = {0};
  int64_t classes = w->args.i[1];
  const orr_view *x = orr_work_in(w, shard, 0);
  w->k->cross_entropy_parts(x, orr_work_in(w, shard, 2), orr_work_in(w, shard, 1), w->args.i[0],
                            w->origin[shard][x->ndim - 1], classes, orr_work_out(w, shard, 0),
                            orr_work_out(w, shard, 1), orr_work_out(w, shard, 2), &fault);
  if (!fault.index) return ORR_OK;
  return orr_index_fault(fault.value, fault.index, classes, true, w->n_shards > 1);
}

/* in: x, target, max; out: sum of exp(x - max), the label's logit, sum of x. */
static const orr_op class_sums = {.name = "cross_entropy_sums",
                                  .flags = ORR_OP_NO_GRAD | ORR_OP_ORIGIN | ORR_OP_ORIGIN_IN,
                                  .partial = ORR_SUM,
                                  .n_in = 3,
                                  .n_out = 3,
                                  .infer = infer_pieces,
                                  .label = label_classes,
                                  .run = run_class_sums};

static orr_status run_class_loss(const orr_work *w, int shard) {
  const orr_view *sum_x = orr_work_has(w, shard, 5) ? orr_work_in(w, shard, 5) : NULL;
  w->k->cross_entropy_finish(orr_work_in(w, shard, 2), orr_work_in(w, shard, 3),
                             orr_work_in(w, shard, 4), sum_x, orr_work_in(w, shard, 1),
                             w->args.i[0], w->args.f[0], w->args.i[1],
                             orr_work_out(w, shard, 0), orr_work_out(w, shard, 1));
  return ORR_OK;
}

/* in: x, target, max, then the sums reduced (the last absent where nothing is smoothed). Rows
 * are whole on every device, wherever x's classes are. */
static int rule_class_loss(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  const orr_layout *layout = c->in[0]->layout;
  int classes = c->in[0]->meta.ndim - 1;
  *only = false;
  if (max < 1 || axis >= layout->mesh->n_axes) return 0;
  if (layout->axis[axis].kind != ORR_SHARD || layout->axis[axis].dim != classes) return 0;
  for (int k = 0; k < c->n_in; k++) rows[0].in[k] = (orr_place){.kind = ORR_REPLICATE};
  rows[0].in[0] = layout->axis[axis];
  for (int k = 0; k < c->n_out; k++) rows[0].out[k] = (orr_place){.kind = ORR_REPLICATE};
  return 1;
}

static const orr_op class_loss = {.name = "cross_entropy_split",
                                  .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1) | ORR_SAVE_OUT(1),
                                  .n_in = 5,
                                  .n_out = 2,
                                  .infer = infer_pieces,
                                  .label = label_rows,
                                  .rule = rule_class_loss,
                                  .run = run_class_loss,
                                  .grad = grad_cross_entropy};

static bool has_split_classes(const orr_tensor *x) {
  for (int a = 0; a < x->layout->mesh->n_axes; a++)
    if (x->layout->axis[a].kind == ORR_SHARD && x->layout->axis[a].dim == x->meta.ndim - 1)
      return true;
  return false;
}

/* in: x, target, then room for max and the sums (owned by the caller). */
static orr_status class_numbers(orr_tensor **in, const orr_args *args) {
  orr_tensor *sums[ORR_MAX_OUT];
  ORR_TRY(orr_dispatch(&class_max, in, 2, args, false, &in[2]));
  ORR_TRY(orr_reduce_partial(&in[2]));
  ORR_TRY(orr_dispatch(&class_sums, in, 3, args, false, sums));
  for (int k = 0; k < 3; k++) in[3 + k] = sums[k];
  if (args->f[0] == 0) {
    orr_tensor_free(in[5]);
    in[5] = NULL;
  }
  for (int k = 3; k < 6; k++)
    if (in[k]) ORR_TRY(orr_reduce_partial(&in[k]));
  return ORR_OK;
}

static orr_status split_cross_entropy(orr_tensor *x, orr_tensor *target, const orr_args *args,
                                      orr_tensor **out) {
  orr_tensor *in[6] = {x, target, NULL, NULL, NULL, NULL};
  bool was = orr_set_grad_mode(false);
  orr_status status = class_numbers(in, args);
  orr_set_grad_mode(was);
  if (!status) status = orr_dispatch(&class_loss, in, 6, args, false, out);
  for (int k = 2; k < 6; k++)
    if (in[k]) orr_tensor_free(in[k]);
  return status;
}

static orr_status run_nll(const orr_work *w, int shard) {
  orr_fault fault = {0};
  const orr_view *x = orr_work_in(w, shard, 0);
  w->k->nll_loss(x, orr_work_in(w, shard, 1), w->args.i[0], 0, x->shape[x->ndim - 1],
                 orr_work_out(w, shard, 0), &fault);
  return finish(w, &fault, x);
}

/* in: g (a number a row), target; args.i[1]: classes. */
static orr_status infer_nll_grad(orr_call *c) {
  c->out_meta[0] = c->in[0]->meta;
  c->out_meta[0].shape[c->out_meta[0].ndim++] = c->args.i[1];
  return ORR_OK;
}

static orr_status run_nll_grad(const orr_work *w, int shard) {
  w->k->nll_loss_back(orr_work_in(w, shard, 0), orr_work_in(w, shard, 1), w->args.i[0], 0,
                      w->args.i[1], orr_work_out(w, shard, 0));
  return ORR_OK;
}

static const orr_op nll_rows;

static orr_status grad_nll_grad(orr_grad *g) {
  if (g->needs[0]) g->gx[0] = orr_g(g, &nll_rows, g->args, 2, g->gy[0], g->x[1]);
  return g->status;
}

static const orr_op nll_grad = {.name = "nll_loss_grad",
                                .save = ORR_SAVE_IN(1),
                                .n_in = 2,
                                .n_out = 1,
                                .infer = infer_nll_grad,
                                .label = label_rows,
                                .run = run_nll_grad,
                                .grad = grad_nll_grad};

static orr_status grad_nll(orr_grad *g) {
  orr_args args = *g->args;
  args.i[1] = g->x_meta[0].shape[g->x_meta[0].ndim - 1];
  g->gx[0] = orr_g(g, &nll_grad, &args, 2, g->gy[0], g->x[1]);
  return g->status;
}

static const orr_op nll_rows = {.name = "nll_loss",
                                .flags = ORR_OP_WIDE,
                                .save = ORR_SAVE_IN(1),
                                .n_in = 2,
                                .n_out = 1,
                                .infer = infer_rows,
                                .label = label_rows,
                                .run = run_nll,
                                .grad = grad_nll};

/* ---- how many labels count: in: target; args.i: ignored label, dtype of the number ---- */

static orr_status infer_count(orr_call *c) {
  c->out_meta[0] = (orr_meta){.dtype = (orr_dtype)c->args.i[1]};
  return ORR_OK;
}

static void label_count(orr_call *c) { label_row_dims(c->in[0]->meta.ndim, c->in_label[0]); }

static orr_status run_count(const orr_work *w, int shard) {
  w->k->count_targets(orr_work_in(w, shard, 0), w->args.i[0], orr_work_out(w, shard, 0));
  return ORR_OK;
}

static const orr_op count_labels = {.name = "count_labels",
                                    .flags = ORR_OP_NO_GRAD,
                                    .n_in = 1,
                                    .n_out = 1,
                                    .partial = ORR_SUM,
                                    .infer = infer_count,
                                    .label = label_count,
                                    .run = run_count};

/* ---- Lua ---- */

/* Divides the summed loss by the count: a number where none can be ignored or the labels are on
 * the host, once and for all, else a tensor, so that nothing waits. */
static orr_status divide_by_count(orr_tensor **loss, orr_tensor *target, int64_t ignore) {
  bool held = target->layout->mesh == orr_mesh_single(0) && !orr_capturing();
  if (held || ignore == ORR_NO_IGNORE) {
    int64_t n = orr_tensor_numel(target);
    if (ignore != ORR_NO_IGNORE) {
      orr_view v;
      ORR_TRY(orr_buffer_wait_read(orr_tensor_buffer(target, 0)));
      orr_tensor_view(target, 0, &v);
      n = orr_k_count_targets(&v, ignore);
    }
    return orr_then_scale(loss, 1 / (double)(n > 0 ? n : 1));
  }
  orr_args args = {.i = {ignore, (*loss)->meta.dtype}}, one = {.f = {1}};
  orr_tensor *count, *mean;
  ORR_TRY(orr_call1(&count_labels, target, &args, &count));
  ORR_TRY(orr_then(&count, orr_op_binary(ORR_BIN_maximum)->scalar, &one));
  ORR_TRY(orr_then(&count, orr_op_unary(ORR_UN_reciprocal), NULL)); /* as the number above */
  orr_status status = orr_call2(orr_op_binary(ORR_BIN_mul), *loss, count, NULL, &mean);
  orr_tensor_free(count);
  if (status) return status;
  orr_tensor_free(*loss);
  *loss = mean;
  return ORR_OK;
}

/* x with classes last: (N, C, d...) to (N, d..., C). Owned. */
static orr_status classes_last(const char *name, orr_tensor *x, const orr_tensor *target,
                               orr_tensor **out) {
  int ndim = x->meta.ndim, at = ndim > 1 ? 1 : 0;
  bool fits = ndim >= 1 && target->meta.ndim == ndim - 1;
  for (int d = 0, from = 0; fits && d < ndim; d++)
    fits = d == at || x->meta.shape[d] == target->meta.shape[from++];
  if (!fits) {
    char a[128], b[128];
    return orr_fail(ORR_EARG,
                    "%s: input %s and target %s do not fit; they must be (N, C, ...) and "
                    "(N, ...)",
                    name, orr_shape_text(ndim, x->meta.shape, a, sizeof a),
                    orr_shape_text(target->meta.ndim, target->meta.shape, b, sizeof b));
  }
  *out = orr_tensor_ref(x);
  if (ndim < 3) return ORR_OK;
  orr_args order = {.i = {ndim, 0}};
  for (int d = 2; d < ndim; d++) order.i[d] = d;
  order.i[ndim] = at;
  return orr_then(out, &orr_op_permute, &order);
}

/* args.i: ignored label, reduction; args.f[0]: smoothing. code 1: of log-probabilities. */
static orr_status compose_loss(const orr_op *op, orr_tensor *const *in, int n_in,
                               const orr_args *args, orr_tensor **out) {
  double smooth = op->code ? 0 : args->f[0];
  orr_args rows = {.i = {args->i[0]}, .f = {smooth}};
  orr_tensor *x, *made[ORR_MAX_OUT] = {NULL};
  (void)n_in;
  if (!(smooth >= 0 && smooth <= 1))
    return orr_fail(ORR_EARG, "%s: label smoothing is %g and must be from 0 to 1", op->name,
                    smooth);
  ORR_TRY(classes_last(op->name, in[0], in[1], &x));
  orr_status status;
  if (!op->code && has_split_classes(x)) status = split_cross_entropy(x, in[1], &rows, made);
  else status = orr_call2(op->code ? &nll_rows : &cross_entropy_rows, x, in[1], &rows, made);
  orr_tensor_free(x);
  if (status) return status;
  if (made[1]) orr_tensor_free(made[1]);
  *out = made[0];
  if (args->i[1] == NONE) return ORR_OK;
  orr_args all = {.i = {(1u << made[0]->meta.ndim) - 1}};
  ORR_TRY(orr_then(out, &orr_op_sum_dims, &all));
  if (args->i[1] == SUM) return ORR_OK;
  status = divide_by_count(out, in[1], args->i[0]);
  if (status && *out) orr_tensor_free(*out);
  return status;
}

static const orr_op cross_entropy = {.name = "cross_entropy",
                                     .args = "t t i=-100 f=0 r=1",
                                     .n_in = 2,
                                     .n_out = 1,
                                     .compose = compose_loss};
static const orr_op nll_loss = {.name = "nll_loss",
                                .args = "t t i=-100 r=1",
                                .code = 1,
                                .n_in = 2,
                                .n_out = 1,
                                .compose = compose_loss};

const orr_op *const orr_ops_loss[] = {
    &cross_entropy, &nll_loss,  &cross_entropy_rows, &cross_entropy_grad, &nll_rows, &nll_grad,
    &count_labels,  &class_max, &class_sums,         &class_loss,         NULL};
