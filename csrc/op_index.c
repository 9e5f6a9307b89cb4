/* op_index.c: select and scatter by index: index_select, index_add, gather, scatter_add,
 * one_hot; and the check of indices on the host.
 *
 * Invariant: the indexed dim is whole. Dims of the indices and of the result are sharded
 * together; gradients of sharded indices are Partial(sum). An index out of range raises, at the
 * call where it can.
 * To add one: its kernel in kernels/index.h reports the fault; run hands it to `finish`.
 */
#include "op_index.h"

#include "../kernels/copy.h"
#include "../kernels/elementwise.h"
#include "../kernels/index.h"

/* ---- checking ---- */

orr_status orr_index_fault(int64_t value, int64_t position, int64_t size, bool labels,
                           bool part) {
  const char *where = part ? " of this device's part" : "";
  if (labels)
    return orr_fail(ORR_EARG,
                    "label %lld of row %lld%s is out of range: there are %lld classes "
                    "(labels count from 1)",
                    (long long)value, (long long)position, where, (long long)size);
  return orr_fail(ORR_EARG,
                  "index %lld at position %lld%s is out of range: the dimension has %lld "
                  "(indices count from 1)",
                  (long long)value, (long long)position, where, (long long)size);
}

static bool runs_elsewhere(const orr_call *c, const orr_mesh *host) {
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k] && c->in[k]->layout->mesh != host) return true;
  return false;
}

static bool is_bad(int64_t value, int64_t size, int64_t ignore) {
  return (value < 1 || value > size) && value != ignore;
}

/* The p-th index of a view, in row-major order. */
static int64_t index_at(const orr_view *v, int64_t p) {
  int64_t off = 0;
  for (int d = v->ndim - 1; d >= 0; d--) {
    off += p % v->shape[d] * v->stride[d];
    p /= v->shape[d];
  }
  return orr_k_get_int(v, off);
}

orr_status orr_check_index(const orr_call *c, int k, int64_t size, int64_t ignore,
                           bool labels) {
  const orr_mesh *host = orr_mesh_single(0);
  int64_t buf[ORR_CHUNK];
  orr_view v;
  ORR_TRY(orr_need_index(c, k));
  if (c->in[k]->layout->mesh != host || !runs_elsewhere(c, host)) return ORR_OK;
  ORR_TRY(orr_buffer_wait_read(orr_tensor_buffer(c->in[k], 0)));
  orr_tensor_view(c->in[k], 0, &v);
  int64_t n = orr_k_count(&v);
  bool dense = orr_is_contiguous(v.ndim, v.shape, v.stride);
  for (int64_t i = 0; i < n; i += ORR_CHUNK) {
    int64_t m = n - i < ORR_CHUNK ? n - i : ORR_CHUNK;
    const int64_t *p = dense ? orr_k_read_i64(&v, i, 1, m, buf) : buf;
    for (int64_t j = 0; j < m && !dense; j++) buf[j] = index_at(&v, i + j);
    for (int64_t j = 0; j < m; j++)
      if (is_bad(p[j], size, ignore))
        return orr_index_fault(p[j], i + j + 1, size, labels, false);
  }
  return ORR_OK;
}

static orr_status finish(const orr_work *w, const orr_fault *fault, int64_t size) {
  if (!fault->index) return ORR_OK;
  return orr_index_fault(fault->value, fault->index, size, false, w->n_shards > 1);
}

/* ---- index_select: in: x, indices (one dim); args.i[0]: d ---- */

static orr_status need_one_dim(const orr_call *c, int k) {
  if (c->in[k]->meta.ndim == 1) return ORR_OK;
  return orr_fail(ORR_EARG, "the indices must have one dimension and have %d",
                  c->in[k]->meta.ndim);
}

static orr_status infer_index_select(orr_call *c) {
  int64_t d = c->args.i[0];
  ORR_TRY(orr_need_dim(c->in[0], d));
  ORR_TRY(need_one_dim(c, 1));
  ORR_TRY(orr_check_index(c, 1, c->in[0]->meta.shape[d], INT64_MIN, false));
  c->out_meta[0] = c->in[0]->meta;
  c->out_meta[0].shape[d] = c->in[1]->meta.shape[0];
  return ORR_OK;
}

/* The label of d stands for the position in the indices. */
static void label_index_select(orr_call *c) {
  int d = (int)c->args.i[0];
  orr_label_same(c);
  c->in_label[0][d] = ORR_WHOLE;
  c->in_label[1][0] = c->out_label[0][d] = (uint8_t)(d + 1);
}

static orr_status run_index_select(const orr_work *w, int shard) {
  int d = (int)w->args.i[0];
  orr_fault fault = {0};
  const orr_view *x = orr_work_in(w, shard, 0);
  w->k->index_select(x, d, orr_work_in(w, shard, 1), orr_work_out(w, shard, 0), &fault);
  return finish(w, &fault, x->shape[d]);
}

/* in: g, indices; args.i: d, size of d: zeros with g's slices added in their places. */
static orr_status infer_index_select_grad(orr_call *c) {
  c->out_meta[0] = c->in[0]->meta;
  c->out_meta[0].shape[c->args.i[0]] = c->args.i[1];
  return ORR_OK;
}

static void label_index_select_grad(orr_call *c) {
  int d = (int)c->args.i[0];
  orr_label_same(c);
  c->out_label[0][d] = ORR_WHOLE;
  c->in_label[0][d] = c->in_label[1][0] = (uint8_t)(d + 1);
}

static orr_status run_index_select_grad(const orr_work *w, int shard) {
  orr_view *gx = orr_work_out(w, shard, 0);
  w->k->fill(gx, 0);
  w->k->index_add(gx, (int)w->args.i[0], orr_work_in(w, shard, 1), orr_work_in(w, shard, 0),
                  NULL);
  return ORR_OK;
}

static const orr_op index_select;

static orr_status grad_index_select_grad(orr_grad *g) {
  if (g->needs[0]) g->gx[0] = orr_g(g, &index_select, g->args, 2, g->gy[0], g->x[1]);
  return g->status;
}

static const orr_op index_select_grad = {.name = "index_select_grad",
                                         .save = ORR_SAVE_IN(1),
                                         .n_in = 2,
                                         .n_out = 1,
                                         .partial = ORR_SUM,
                                         .infer = infer_index_select_grad,
                                         .label = label_index_select_grad,
                                         .rule = orr_rule_linear_first,
                                         .run = run_index_select_grad,
                                         .grad = grad_index_select_grad};

static orr_status grad_index_select(orr_grad *g) {
  orr_args args = *g->args;
  args.i[1] = g->x_meta[0].shape[args.i[0]];
  g->gx[0] = orr_g(g, &index_select_grad, &args, 2, g->gy[0], g->x[1]);
  return g->status;
}

static const orr_op index_select = {.name = "index_select",
                                    .args = "t d t",
                                    .save = ORR_SAVE_IN(1),
                                    .n_in = 2,
                                    .n_out = 1,
                                    .infer = infer_index_select,
                                    .label = label_index_select,
                                    .rule = orr_rule_linear_first,
                                    .run = run_index_select,
                                    .grad = grad_index_select};

/* ---- index_add: in: x, indices (one dim), source; args.i[0]: d ---- */

static orr_status infer_index_add(orr_call *c) {
  int64_t d = c->args.i[0];
  const orr_meta *x = &c->in[0]->meta, *s = &c->in[2]->meta;
  ORR_TRY(orr_need_dim(c->in[0], d));
  ORR_TRY(need_one_dim(c, 1));
  ORR_TRY(orr_check_index(c, 1, x->shape[d], INT64_MIN, false));
  bool fits = s->ndim == x->ndim && s->shape[d] == c->in[1]->meta.shape[0];
  for (int e = 0; fits && e < x->ndim; e++) fits = e == d || s->shape[e] == x->shape[e];
  if (!fits)
    return orr_fail(ORR_EARG,
                    "the source must have the target's shape, with one slice an index "
                    "along dimension %lld",
                    (long long)d + 1);
  ORR_TRY(orr_call_cast(c, 2, x->dtype));
  return orr_infer_same(c);
}

static void label_index_add(orr_call *c) {
  int d = (int)c->args.i[0];
  orr_label_same(c);
  c->in_label[0][d] = c->in_label[2][d] = c->in_label[1][0] = c->out_label[0][d] = ORR_WHOLE;
}

static orr_view *target_with_values(const orr_work *w, int shard) {
  orr_view *y = orr_work_out(w, shard, 0);
  if (!w->in_place) w->k->copy(orr_work_in(w, shard, 0), y);
  return y;
}

static orr_status run_index_add(const orr_work *w, int shard) {
  int d = (int)w->args.i[0];
  orr_fault fault = {0};
  orr_view *y = target_with_values(w, shard);
  w->k->index_add(y, d, orr_work_in(w, shard, 1), orr_work_in(w, shard, 2), &fault);
  return finish(w, &fault, y->shape[d]);
}

static orr_status grad_index_add(orr_grad *g) {
  g->gx[0] = g->gy[0];
  if (g->needs[2]) g->gx[2] = orr_g(g, &index_select, g->args, 2, g->gy[0], g->x[1]);
  return g->status;
}

static const orr_op index_add = {.name = "index_add",
                                 .args = "t d t t",
                                 .flags = ORR_OP_IN_PLACE | ORR_OP_LIKE_IN,
                                 .save = ORR_SAVE_IN(1),
                                 .n_in = 3,
                                 .n_out = 1,
                                 .infer = infer_index_add,
                                 .label = label_index_add,
                                 .run = run_index_add,
                                 .grad = grad_index_add};

/* ---- gather: in: x, indices (x's rank); args.i[0]: d ---- */

/* Dims other than d must be no larger than x's. */
static orr_status check_gather(const orr_call *c) {
  int64_t d = c->args.i[0];
  const orr_meta *x = &c->in[0]->meta, *idx = &c->in[1]->meta;
  ORR_TRY(orr_need_dim(c->in[0], d));
  if (idx->ndim != x->ndim)
    return orr_fail(ORR_EARG, "the indices have %d dimensions and the tensor %d", idx->ndim,
                    x->ndim);
  for (int e = 0; e < x->ndim; e++)
    if (e != d && idx->shape[e] > x->shape[e])
      return orr_fail(ORR_EARG,
                      "the indices have size %lld in dimension %d and the tensor %lld",
                      (long long)idx->shape[e], e + 1, (long long)x->shape[e]);
  return orr_check_index(c, 1, x->shape[d], INT64_MIN, false);
}

static orr_status infer_gather(orr_call *c) {
  ORR_TRY(check_gather(c));
  c->out_meta[0] = c->in[1]->meta;
  c->out_meta[0].dtype = c->in[0]->meta.dtype;
  return ORR_OK;
}

/* big: the tensor that is indexed; small: with the shape of the indices, in[1]. A dim in which
 * they differ stays whole. */
static void label_gather_dims(orr_call *c, const orr_meta *big, uint8_t *big_label,
                              uint8_t *small_label) {
  int d = (int)c->args.i[0];
  const orr_meta *idx = &c->in[1]->meta;
  for (int e = 0; e < idx->ndim; e++) {
    uint8_t label = e == d || big->shape[e] == idx->shape[e] ? (uint8_t)(e + 1) : ORR_WHOLE;
    c->in_label[1][e] = small_label[e] = label;
    big_label[e] = e == d ? ORR_WHOLE : label;
  }
}

static void label_gather(orr_call *c) {
  label_gather_dims(c, &c->in[0]->meta, c->in_label[0], c->out_label[0]);
}

static orr_status run_gather(const orr_work *w, int shard) {
  int d = (int)w->args.i[0];
  orr_fault fault = {0};
  const orr_view *x = orr_work_in(w, shard, 0);
  w->k->gather(x, d, orr_work_in(w, shard, 1), orr_work_out(w, shard, 0), &fault);
  return finish(w, &fault, x->shape[d]);
}

static orr_status infer_gather_grad(orr_call *c) {
  c->out_meta[0] = c->in[0]->meta;
  for (int d = 0; d < c->out_meta[0].ndim; d++) c->out_meta[0].shape[d] = c->args.i[1 + d];
  return ORR_OK;
}

static void label_gather_grad(orr_call *c) {
  label_gather_dims(c, &c->out_meta[0], c->out_label[0], c->in_label[0]);
}

static orr_status run_gather_grad(const orr_work *w, int shard) {
  orr_view *gx = orr_work_out(w, shard, 0);
  w->k->fill(gx, 0);
  w->k->scatter_add(gx, (int)w->args.i[0], orr_work_in(w, shard, 1), orr_work_in(w, shard, 0),
                    NULL);
  return ORR_OK;
}

static const orr_op gather;

static orr_status grad_gather_grad(orr_grad *g) {
  if (g->needs[0]) g->gx[0] = orr_g(g, &gather, g->args, 2, g->gy[0], g->x[1]);
  return g->status;
}

const orr_op orr_op_gather_grad = {.name = "gather_grad",
                                   .save = ORR_SAVE_IN(1),
                                   .n_in = 2,
                                   .n_out = 1,
                                   .partial = ORR_SUM,
                                   .infer = infer_gather_grad,
                                   .label = label_gather_grad,
                                   .rule = orr_rule_linear_first,
                                   .run = run_gather_grad,
                                   .grad = grad_gather_grad};

static orr_status grad_gather(orr_grad *g) {
  orr_args args = {.i = {g->args->i[0]}};
  for (int d = 0; d < g->x_meta[0].ndim; d++) args.i[1 + d] = g->x_meta[0].shape[d];
  g->gx[0] = orr_g(g, &orr_op_gather_grad, &args, 2, g->gy[0], g->x[1]);
  return g->status;
}

static const orr_op gather = {.name = "gather",
                              .args = "t d t",
                              .save = ORR_SAVE_IN(1),
                              .n_in = 2,
                              .n_out = 1,
                              .infer = infer_gather,
                              .label = label_gather,
                              .rule = orr_rule_linear_first,
                              .run = run_gather,
                              .grad = grad_gather};

/* ---- scatter_add: in: x, indices, source of their shape; args.i[0]: d ---- */

static orr_status infer_scatter_add(orr_call *c) {
  const orr_meta *idx = &c->in[1]->meta, *s = &c->in[2]->meta;
  ORR_TRY(check_gather(c));
  bool fits = s->ndim == idx->ndim;
  for (int e = 0; fits && e < idx->ndim; e++) fits = s->shape[e] == idx->shape[e];
  if (!fits) return orr_fail(ORR_EARG, "the source and the indices must have one shape");
  ORR_TRY(orr_call_cast(c, 2, c->in[0]->meta.dtype));
  return orr_infer_same(c);
}

static void label_scatter_add(orr_call *c) {
  int d = (int)c->args.i[0];
  label_gather_dims(c, &c->in[0]->meta, c->in_label[0], c->in_label[2]);
  c->in_label[1][d] = c->in_label[2][d] = ORR_WHOLE;
  for (int e = 0; e < c->in[0]->meta.ndim; e++) c->out_label[0][e] = c->in_label[0][e];
}

static orr_status run_scatter_add(const orr_work *w, int shard) {
  int d = (int)w->args.i[0];
  orr_fault fault = {0};
  orr_view *y = target_with_values(w, shard);
  w->k->scatter_add(y, d, orr_work_in(w, shard, 1), orr_work_in(w, shard, 2), &fault);
  return finish(w, &fault, y->shape[d]);
}

static orr_status grad_scatter_add(orr_grad *g) {
  g->gx[0] = g->gy[0];
  if (g->needs[2]) g->gx[2] = orr_g(g, &gather, g->args, 2, g->gy[0], g->x[1]);
  return g->status;
}

static const orr_op scatter_add = {.name = "scatter_add",
                                   .args = "t d t t",
                                   .flags = ORR_OP_IN_PLACE | ORR_OP_LIKE_IN,
                                   .save = ORR_SAVE_IN(1),
                                   .n_in = 3,
                                   .n_out = 1,
                                   .infer = infer_scatter_add,
                                   .label = label_scatter_add,
                                   .run = run_scatter_add,
                                   .grad = grad_scatter_add};

/* ---- one_hot: args.i[0]: classes; f32 ---- */

static orr_status infer_one_hot(orr_call *c) {
  orr_meta *y = &c->out_meta[0];
  int64_t classes = c->args.i[0];
  if (classes < 0)
    return orr_fail(ORR_EARG, "the number of classes is %lld", (long long)classes);
  if (c->in[0]->meta.ndim == ORR_MAX_DIM)
    return orr_fail(ORR_EARG, "no dimension can be added to %d", ORR_MAX_DIM);
  ORR_TRY(orr_need_index(c, 0));
  *y = c->in[0]->meta;
  y->dtype = ORR_F32;
  y->shape[y->ndim++] = classes;
  return ORR_OK;
}

static void label_one_hot(orr_call *c) {
  for (int d = 0; d < c->in[0]->meta.ndim; d++)
    c->in_label[0][d] = c->out_label[0][d] = (uint8_t)(d + 1);
}

static orr_status run_one_hot(const orr_work *w, int shard) {
  orr_fault fault = {0};
  w->k->one_hot(orr_work_in(w, shard, 0), 0, w->args.i[0], orr_work_out(w, shard, 0), &fault);
  return finish(w, &fault, w->args.i[0]);
}

const orr_op orr_op_one_hot = {.name = "one_hot",
                               .args = "t i",
                               .flags = ORR_OP_NO_GRAD,
                               .n_in = 1,
                               .n_out = 1,
                               .infer = infer_one_hot,
                               .label = label_one_hot,
                               .run = run_one_hot};

const orr_op *const orr_ops_index[] = {
    &index_select,       &index_select_grad, &index_add,      &gather,
    &orr_op_gather_grad, &scatter_add,       &orr_op_one_hot, NULL};
