/* op_shape.c: views: transpose, permute, expand, narrow, select, squeeze and unsqueeze.
 *
 * Invariant: a view shares its input's memory shard by shard; a sharded dim stays sharded under
 * its new number. Where a view cannot be local, placing gathers first.
 * To add a view: infer gives the global shape, `view` the strides of one shard, grad the
 * inverse.
 */
#include <string.h>

#include "op.h"

static const orr_shard *source(const orr_call *c, int shard) { return &c->in[0]->shard[shard]; }

static orr_status check_dim(const orr_call *c, int64_t d) {
  if (d >= 0 && d < c->in[0]->meta.ndim) return ORR_OK;
  return orr_fail(ORR_EARG, "dimension %lld does not exist", (long long)d + 1);
}

/* ---- permute; transpose is one: args.i[0] n, then which input dim each output dim is ---- */

static orr_status infer_permute(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  unsigned seen = 0;
  if (c->args.i[0] != x->ndim)
    return orr_fail(ORR_EARG, "needs every one of the %d dimensions once", x->ndim);
  c->out_meta[0] = *x;
  for (int d = 0; d < x->ndim; d++) {
    int64_t from = c->args.i[1 + d];
    ORR_TRY(check_dim(c, from));
    if (seen >> from & 1)
      return orr_fail(ORR_EARG, "dimension %d is named twice", (int)from + 1);
    seen |= 1u << from;
    c->out_meta[0].shape[d] = x->shape[from];
  }
  return ORR_OK;
}

static void label_permute(orr_call *c) {
  orr_label_same(c);
  for (int d = 0; d < c->in[0]->meta.ndim; d++)
    c->out_label[0][d] = c->in_label[0][c->args.i[1 + d]];
}

static orr_status view_permute(const orr_call *c, int shard, orr_shard *out) {
  const orr_shard *s = source(c, shard);
  out->offset = s->offset;
  for (int d = 0; d < c->in[0]->meta.ndim; d++) {
    out->shape[d] = s->shape[c->args.i[1 + d]];
    out->stride[d] = s->stride[c->args.i[1 + d]];
  }
  return ORR_OK;
}

static orr_status grad_permute(orr_grad *g) {
  orr_args back = {.i = {g->args->i[0]}};
  for (int d = 0; d < back.i[0]; d++) back.i[1 + g->args->i[1 + d]] = d;
  g->gx[0] = orr_g(g, &orr_op_permute, &back, 1, g->gy[0]);
  return g->status;
}

const orr_op orr_op_permute = {.name = "permute",
                               .args = "t D",
                               .flags = ORR_OP_VIEW | ORR_OP_LINEAR,
                               .n_in = 1,
                               .n_out = 1,
                               .infer = infer_permute,
                               .label = label_permute,
                               .view = view_permute,
                               .grad = grad_permute};

static orr_status compose_transpose(const orr_op *op, orr_tensor *const *in, int n_in,
                                    const orr_args *args, orr_tensor **out) {
  (void)n_in;
  int ndim = in[0]->meta.ndim;
  int64_t a = args->i[0], b = args->i[1];
  if (a < 0 || b < 0 || a >= ndim || b >= ndim)
    return orr_fail(ORR_EARG, "%s: dimensions %lld and %lld of a tensor with %d", op->name,
                    (long long)a + 1, (long long)b + 1, ndim);
  orr_args order = {.i = {ndim}};
  for (int d = 0; d < ndim; d++) order.i[1 + d] = d;
  order.i[1 + a] = b;
  order.i[1 + b] = a;
  return orr_call1(&orr_op_permute, in[0], &order, out);
}

const orr_op orr_op_transpose = {
    .name = "transpose", .args = "t d d", .n_in = 1, .n_out = 1, .compose = compose_transpose};

static orr_status compose_t(const orr_op *op, orr_tensor *const *in, int n_in,
                            const orr_args *args, orr_tensor **out) {
  orr_args dims = {.i = {0, 1}};
  (void)args;
  if (in[0]->meta.ndim != 2)
    return orr_fail(ORR_EARG, "t: needs a matrix and got %d dimensions; use transpose(a, b)",
                    in[0]->meta.ndim);
  return compose_transpose(op, in, n_in, &dims, out);
}

static const orr_op t_op = {
    .name = "t", .args = "t", .n_in = 1, .n_out = 1, .compose = compose_t};

/* ---- expand: args.i[0] n, then sizes; -1 keeps ---- */

static orr_status infer_expand(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  orr_meta *y = &c->out_meta[0];
  int lead = (int)c->args.i[0] - x->ndim;
  if (lead < 0 || c->args.i[0] > ORR_MAX_DIM)
    return orr_fail(ORR_EARG, "%lld sizes for a tensor of %d dimensions",
                    (long long)c->args.i[0], x->ndim);
  y->dtype = x->dtype;
  y->ndim = (int)c->args.i[0];
  for (int d = 0; d < y->ndim; d++) {
    int64_t want = c->args.i[1 + d], have = d < lead ? 1 : x->shape[d - lead];
    if (want == -1 && d >= lead) want = have;
    if (want < 0 || (have != 1 && have != want))
      return orr_fail(ORR_EARG, "size %lld of dimension %d cannot become %lld", (long long)have,
                      d + 1, (long long)want);
    y->shape[d] = want;
  }
  return ORR_OK;
}

static orr_status view_expand(const orr_call *c, int shard, orr_shard *out) {
  const orr_shard *s = source(c, shard);
  int lead = c->out_meta[0].ndim - c->in[0]->meta.ndim;
  out->offset = s->offset;
  for (int d = 0; d < c->out_meta[0].ndim; d++) {
    int from = d - lead;
    bool own = from >= 0 && c->in[0]->meta.shape[from] == c->out_meta[0].shape[d];
    out->shape[d] = own ? s->shape[from] : c->out_meta[0].shape[d];
    out->stride[d] = own ? s->stride[from] : 0;
  }
  return ORR_OK;
}

static orr_status grad_expand(orr_grad *g) {
  g->gx[0] = g->gy[0]; /* the tape sums it back */
  return ORR_OK;
}

const orr_op orr_op_expand = {.name = "expand",
                              .args = "t L",
                              .flags = ORR_OP_VIEW | ORR_OP_LINEAR,
                              .n_in = 1,
                              .n_out = 1,
                              .infer = infer_expand,
                              .label = orr_label_broadcast,
                              .view = view_expand,
                              .grad = grad_expand};

/* ---- narrow: args.i = dim, first (from 1), n ---- */

static orr_status infer_narrow(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  int64_t d = c->args.i[0], first = c->args.i[1], n = c->args.i[2];
  ORR_TRY(check_dim(c, d));
  if (first < 1 || n < 0 || first + n - 1 > x->shape[d])
    return orr_fail(ORR_EARG, "%lld from %lld on of dimension %lld, which has %lld",
                    (long long)n, (long long)first, (long long)d + 1, (long long)x->shape[d]);
  c->out_meta[0] = *x;
  c->out_meta[0].shape[d] = n;
  return ORR_OK;
}

static void label_narrow(orr_call *c) {
  orr_label_same(c);
  c->in_label[0][c->args.i[0]] = c->out_label[0][c->args.i[0]] = ORR_WHOLE;
}

/* A shard keeps what it holds of the range: the bounds are cut to it. */
static int rule_narrow(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  static int64_t cut[ORR_MAX_AXES][ORR_MAX_DEVICES + 1];
  int d = (int)c->args.i[0];
  int64_t first = c->args.i[1] - 1, n = c->args.i[2];
  const orr_layout *layout = c->in[0]->layout;
  const orr_place *p = &layout->axis[axis];
  *only = false;
  bool nested = axis == 1 && layout->axis[0].kind == ORR_SHARD && layout->axis[0].dim == d;
  if (max < 1 || axis >= layout->mesh->n_axes || p->kind != ORR_SHARD || p->dim != d || nested)
    return 0;
  for (int k = 0; k <= layout->mesh->size[axis]; k++) {
    int64_t b = p->bounds[k] - first;
    cut[axis][k] = b < 0 ? 0 : b > n ? n : b;
  }
  rows[0].in[0] = *p;
  rows[0].out[0] = (orr_place){.kind = ORR_SHARD, .dim = d, .bounds = cut[axis]};
  return 1;
}

static orr_status view_narrow(const orr_call *c, int shard, orr_shard *out) {
  int d = (int)c->args.i[0];
  int64_t first = c->args.i[1] - 1, end = first + c->args.i[2], lo = 0;
  *out = *source(c, shard);
  int64_t hi = out->shape[d];
  if (!orr_tensor_is_single(c->in[0]))
    orr_layout_range(c->in[0]->layout, shard, d, c->in[0]->meta.shape[d], &lo, &hi);
  int64_t from = first > lo ? first : lo, to = end < hi ? end : hi;
  out->shape[d] = to > from ? to - from : 0;
  if (to > from) out->offset += (from - lo) * out->stride[d];
  return ORR_OK;
}

static orr_status grad_narrow(orr_grad *g) {
  orr_args args = *g->args;
  args.i[3] = g->x_meta[0].shape[args.i[0]];
  g->gx[0] = orr_g(g, &orr_op_narrow_grad, &args, 1, g->gy[0]);
  return g->status;
}

const orr_op orr_op_narrow = {.name = "narrow",
                              .args = "t d i i",
                              .flags = ORR_OP_VIEW | ORR_OP_LINEAR,
                              .n_in = 1,
                              .n_out = 1,
                              .infer = infer_narrow,
                              .label = label_narrow,
                              .rule = rule_narrow,
                              .view = view_narrow,
                              .grad = grad_narrow};

/* ---- squeeze(d), unsqueeze(d) ---- */

static orr_status infer_unsqueeze(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  orr_meta *y = &c->out_meta[0];
  int64_t d = c->args.i[0];
  if (d < 0 || d > x->ndim || x->ndim == ORR_MAX_DIM)
    return orr_fail(ORR_EARG, "no dimension %lld can be added to %d", (long long)d + 1,
                    x->ndim);
  y->dtype = x->dtype;
  y->ndim = x->ndim + 1;
  for (int k = 0, from = 0; k < y->ndim; k++) y->shape[k] = k == d ? 1 : x->shape[from++];
  return ORR_OK;
}

static void label_unsqueeze(orr_call *c) {
  for (int k = 0, to = 0; k < c->in[0]->meta.ndim; k++, to++) {
    if (to == c->args.i[0]) to++;
    c->in_label[0][k] = c->out_label[0][to] = (uint8_t)(k + 1);
  }
}

static orr_status view_unsqueeze(const orr_call *c, int shard, orr_shard *out) {
  const orr_shard *s = source(c, shard);
  out->offset = s->offset;
  for (int k = 0, from = 0; k < c->out_meta[0].ndim; k++) {
    bool added = k == c->args.i[0];
    out->shape[k] = added ? 1 : s->shape[from];
    out->stride[k] = added ? 0 : s->stride[from];
    from += !added;
  }
  return ORR_OK;
}

static orr_status grad_unsqueeze(orr_grad *g) {
  g->gx[0] = orr_g(g, &orr_op_squeeze, g->args, 1, g->gy[0]);
  return g->status;
}

const orr_op orr_op_unsqueeze = {.name = "unsqueeze",
                                 .args = "t e",
                                 .flags = ORR_OP_VIEW | ORR_OP_LINEAR,
                                 .n_in = 1,
                                 .n_out = 1,
                                 .infer = infer_unsqueeze,
                                 .label = label_unsqueeze,
                                 .view = view_unsqueeze,
                                 .grad = grad_unsqueeze};

static orr_status infer_squeeze(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  orr_meta *y = &c->out_meta[0];
  int64_t d = c->args.i[0];
  ORR_TRY(check_dim(c, d));
  if (x->shape[d] != 1)
    return orr_fail(ORR_EARG, "dimension %lld has size %lld, not 1", (long long)d + 1,
                    (long long)x->shape[d]);
  y->dtype = x->dtype;
  y->ndim = x->ndim - 1;
  for (int k = 0, to = 0; k < x->ndim; k++)
    if (k != d) y->shape[to++] = x->shape[k];
  return ORR_OK;
}

static void label_squeeze(orr_call *c) {
  for (int k = 0, to = 0; k < c->in[0]->meta.ndim; k++)
    if (k != c->args.i[0]) c->in_label[0][k] = c->out_label[0][to++] = (uint8_t)(k + 1);
}

static orr_status view_squeeze(const orr_call *c, int shard, orr_shard *out) {
  const orr_shard *s = source(c, shard);
  out->offset = s->offset;
  for (int k = 0, to = 0; k < c->in[0]->meta.ndim; k++) {
    if (k == c->args.i[0]) continue;
    out->shape[to] = s->shape[k];
    out->stride[to++] = s->stride[k];
  }
  return ORR_OK;
}

static orr_status grad_squeeze(orr_grad *g) {
  g->gx[0] = orr_g(g, &orr_op_unsqueeze, g->args, 1, g->gy[0]);
  return g->status;
}

const orr_op orr_op_squeeze = {.name = "squeeze_dim",
                               .args = "t d",
                               .flags = ORR_OP_VIEW | ORR_OP_LINEAR,
                               .n_in = 1,
                               .n_out = 1,
                               .infer = infer_squeeze,
                               .label = label_squeeze,
                               .view = view_squeeze,
                               .grad = grad_squeeze};

/* select(d, i): one index of a dim, which goes. */
static orr_status compose_select(const orr_op *op, orr_tensor *const *in, int n_in,
                                 const orr_args *args, orr_tensor **out) {
  (void)op;
  (void)n_in;
  orr_tensor *one;
  int64_t d = args->i[0], i = args->i[1];
  if (i < 0 && d >= 0 && d < in[0]->meta.ndim) i += in[0]->meta.shape[d] + 1;
  orr_args range = {.i = {d, i, 1}}, dim = {.i = {d}};
  ORR_TRY(orr_call1(&orr_op_narrow, in[0], &range, &one));
  orr_status status = orr_call1(&orr_op_squeeze, one, &dim, out);
  orr_tensor_free(one);
  return status;
}

static const orr_op select_op = {
    .name = "select", .args = "t d i", .n_in = 1, .n_out = 1, .compose = compose_select};

const orr_op *const orr_ops_shape[] = {
    &orr_op_permute,     &orr_op_transpose, &t_op,
    &orr_op_expand,      &orr_op_narrow,    &orr_op_squeeze,
    &orr_op_unsqueeze,   &select_op,        &orr_op_narrow_grad,
    &orr_op_view,        &orr_op_reshape,   &orr_op_flatten,
    &orr_op_squeeze_all, &orr_op_cat,       NULL};
