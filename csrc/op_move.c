/* op_move.c: embedding, and ops that move or hide elements: flip, roll, masked_fill.
 *
 * Invariant: a vocabulary that is sharded by rows stays where it is: each shard reads its own
 * rows, zeros for the others, and the results are Partial(sum).
 * To add one: its kernel in kernels/index.h, an op here.
 */
#include "../kernels/elementwise.h"
#include "../kernels/index.h"
#include "op_index.h"
#include "op_view.h"

/* ---- embedding: in: weight (V, D), ids; args.i: bits of the axes that shard V, V ---- */

static int64_t axes_on_rows(const orr_tensor *w) {
  int64_t axes = 0;
  for (int a = 0; a < w->layout->mesh->n_axes; a++)
    if (w->layout->axis[a].kind == ORR_SHARD && w->layout->axis[a].dim == 0) axes |= 1 << a;
  return axes;
}

static orr_status infer_embedding(orr_call *c) {
  const orr_meta *w = &c->in[0]->meta, *ids = &c->in[1]->meta;
  if (w->ndim != 2)
    return orr_fail(ORR_EARG, "the weight must be (vocabulary, size) and has %d dimensions",
                    w->ndim);
  if (ids->ndim == ORR_MAX_DIM)
    return orr_fail(ORR_EARG, "no dimension can be added to %d", ORR_MAX_DIM);
  ORR_TRY(orr_check_index(c, 1, w->shape[0], INT64_MIN, false));
  c->has_args = true;
  c->args.i[0] = axes_on_rows(c->in[0]);
  c->args.i[1] = w->shape[0];
  c->out_meta[0] = *ids;
  c->out_meta[0].dtype = w->dtype;
  c->out_meta[0].shape[c->out_meta[0].ndim++] = w->shape[1];
  return ORR_OK;
}

static void label_ids(const orr_meta *ids, uint8_t *id_label, uint8_t *row_label,
                      uint8_t *column_label) {
  for (int d = 0; d < ids->ndim; d++) id_label[d] = row_label[d] = (uint8_t)(d + 1);
  row_label[ids->ndim] = column_label[1] = (uint8_t)(ids->ndim + 1);
}

static void label_embedding(orr_call *c) {
  label_ids(&c->in[1]->meta, c->in_label[1], c->out_label[0], c->in_label[0]);
}

/* Rows of the vocabulary where they are. */
static int rule_embedding(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  const orr_layout *layout = c->in[0]->layout;
  *only = false;
  if (max < 1 || axis >= layout->mesh->n_axes || !(c->args.i[0] >> axis & 1)) return 0;
  rows[0].in[0] = layout->axis[axis];
  rows[0].in[1] = (orr_place){.kind = ORR_REPLICATE};
  rows[0].out[0] = (orr_place){.kind = ORR_PARTIAL, .op = ORR_SUM};
  return 1;
}

static orr_status run_embedding(const orr_work *w, int shard) {
  orr_fault fault = {0};
  int64_t vocabulary = w->args.i[1];
  w->k->embedding(orr_work_in(w, shard, 0), orr_work_in(w, shard, 1), w->origin[shard][0],
                  orr_work_out(w, shard, 0), &fault, vocabulary);
  if (!fault.index) return ORR_OK;
  return orr_index_fault(fault.value, fault.index, vocabulary, false, w->n_shards > 1);
}

/* ---- its gradient: in: g, ids; args.i as above ---- */

static orr_status infer_embedding_grad(orr_call *c) {
  const orr_meta *g = &c->in[0]->meta;
  c->out_meta[0] = (orr_meta){.dtype = g->dtype, .ndim = 2};
  c->out_meta[0].shape[0] = c->args.i[1];
  c->out_meta[0].shape[1] = g->shape[g->ndim - 1];
  return ORR_OK;
}

static void label_embedding_grad(orr_call *c) {
  label_ids(&c->in[1]->meta, c->in_label[1], c->in_label[0], c->out_label[0]);
}

/* Each shard of the vocabulary makes its own rows; then Partial(sum) g passes. */
static int rule_embedding_grad(const orr_call *c, int axis, orr_row *rows, int max,
                               bool *only) {
  *only = false;
  if (max < 2 || !(c->args.i[0] >> axis & 1))
    return orr_rule_linear_first(c, axis, rows, max, only);
  rows[0].in[0] = rows[0].in[1] = (orr_place){.kind = ORR_REPLICATE};
  rows[0].out[0] = (orr_place){.kind = ORR_SHARD, .dim = 0};
  return 1 + orr_rule_linear_first(c, axis, rows + 1, max - 1, only);
}

static orr_status run_embedding_grad(const orr_work *w, int shard) {
  orr_view *gw = orr_work_out(w, shard, 0);
  w->k->fill(gw, 0);
  w->k->embedding_back(gw, orr_work_in(w, shard, 1), w->origin[shard][0],
                       orr_work_in(w, shard, 0), w->args.i[1]);
  return ORR_OK;
}

static const orr_op embedding;

static orr_status grad_embedding_grad(orr_grad *g) {
  if (g->needs[0]) g->gx[0] = orr_g(g, &embedding, NULL, 2, g->gy[0], g->x[1]);
  return g->status;
}

static const orr_op embedding_grad = {.name = "embedding_grad",
                                      .flags = ORR_OP_ORIGIN,
                                      .save = ORR_SAVE_IN(1),
                                      .n_in = 2,
                                      .n_out = 1,
                                      .partial = ORR_SUM,
                                      .infer = infer_embedding_grad,
                                      .label = label_embedding_grad,
                                      .rule = rule_embedding_grad,
                                      .run = run_embedding_grad,
                                      .grad = grad_embedding_grad};

static orr_status grad_embedding(orr_grad *g) {
  if (g->needs[0]) g->gx[0] = orr_g(g, &embedding_grad, g->args, 2, g->gy[0], g->x[1]);
  return g->status;
}

static const orr_op embedding = {.name = "embedding",
                                 .args = "t t",
                                 .flags = ORR_OP_ORIGIN | ORR_OP_ORIGIN_IN | ORR_OP_LAYER,
                                 .save = ORR_SAVE_IN(1),
                                 .n_in = 2,
                                 .n_out = 1,
                                 .infer = infer_embedding,
                                 .label = label_embedding,
                                 .rule = rule_embedding,
                                 .run = run_embedding,
                                 .grad = grad_embedding};

/* ---- masked_fill: in: x, mask; args.f[0]: the value where mask is true ---- */

static orr_status infer_masked_fill(orr_call *c) {
  orr_meta both;
  const orr_meta *x = &c->in[0]->meta;
  if (c->in[1]->meta.dtype != ORR_BOOL)
    return orr_fail(ORR_EARG, "the mask must be bool and is %s",
                    orr_dtype_name(c->in[1]->meta.dtype));
  ORR_TRY(orr_broadcast(c->op->name, x, &c->in[1]->meta, &both));
  if (both.ndim != x->ndim || orr_numel(both.ndim, both.shape) != orr_numel(x->ndim, x->shape))
    return orr_fail(ORR_EARG,
                    "the mask must broadcast to the tensor, not the tensor to the mask");
  return orr_infer_same(c);
}

static orr_status run_masked_fill(const orr_work *w, int shard) {
  orr_view room;
  orr_view *y = orr_work_out(w, shard, 0);
  w->k->masked_fill(orr_work_in(w, shard, 0),
                    orr_expand_view(orr_work_in(w, shard, 1), y, &room), w->args.f[0], y);
  return ORR_OK;
}

static orr_status grad_masked_fill(orr_grad *g) {
  orr_args zero = {.f = {0}};
  if (g->needs[0]) g->gx[0] = orr_g(g, g->op, &zero, 2, g->gy[0], g->x[1]);
  return g->status;
}

static const orr_op masked_fill = {.name = "masked_fill",
                                   .args = "t t f",
                                   .flags = ORR_OP_IN_PLACE | ORR_OP_LIKE_IN,
                                   .save = ORR_SAVE_IN(1),
                                   .n_in = 2,
                                   .n_out = 1,
                                   .infer = infer_masked_fill,
                                   .label = orr_label_broadcast,
                                   .run = run_masked_fill,
                                   .grad = grad_masked_fill};

/* ---- flip: args.i: count, dims ---- */

static unsigned flipped(const orr_args *args) {
  unsigned mask = 0;
  for (int k = 0; k < args->i[0]; k++) mask |= 1u << args->i[1 + k];
  return mask;
}

static orr_status infer_flip(orr_call *c) {
  for (int k = 0; k < c->args.i[0]; k++) ORR_TRY(orr_need_dim(c->in[0], c->args.i[1 + k]));
  return orr_infer_same(c);
}

static void label_flip(orr_call *c) {
  orr_label_same(c);
  for (int k = 0; k < c->args.i[0]; k++)
    c->in_label[0][c->args.i[1 + k]] = c->out_label[0][c->args.i[1 + k]] = ORR_WHOLE;
}

static orr_status run_flip(const orr_work *w, int shard) {
  w->k->flip(orr_work_in(w, shard, 0), flipped(&w->args), orr_work_out(w, shard, 0));
  return ORR_OK;
}

static orr_status grad_flip(orr_grad *g) {
  g->gx[0] = orr_g(g, &orr_op_flip, g->args, 1, g->gy[0]);
  return g->status;
}

const orr_op orr_op_flip = {.name = "flip",
                            .args = "t D",
                            .flags = ORR_OP_LINEAR,
                            .n_in = 1,
                            .n_out = 1,
                            .infer = infer_flip,
                            .label = label_flip,
                            .run = run_flip,
                            .grad = grad_flip};

/* ---- roll: args.i: shift, d ---- */

static orr_status infer_roll(orr_call *c) {
  ORR_TRY(orr_need_dim(c->in[0], c->args.i[1]));
  return orr_infer_same(c);
}

static void label_roll(orr_call *c) {
  orr_label_same(c);
  c->in_label[0][c->args.i[1]] = c->out_label[0][c->args.i[1]] = ORR_WHOLE;
}

static orr_status run_roll(const orr_work *w, int shard) {
  w->k->roll(orr_work_in(w, shard, 0), (int)w->args.i[1], w->args.i[0],
             orr_work_out(w, shard, 0));
  return ORR_OK;
}

static orr_status grad_roll(orr_grad *g) {
  orr_args back = {.i = {-g->args->i[0], g->args->i[1]}};
  g->gx[0] = orr_g(g, g->op, &back, 1, g->gy[0]);
  return g->status;
}

static const orr_op roll = {.name = "roll",
                            .args = "t i d",
                            .flags = ORR_OP_LINEAR,
                            .n_in = 1,
                            .n_out = 1,
                            .infer = infer_roll,
                            .label = label_roll,
                            .run = run_roll,
                            .grad = grad_roll};

const orr_op *const orr_ops_move[] = {&embedding,   &embedding_grad, &masked_fill,
                                      &orr_op_flip, &roll,           NULL};
