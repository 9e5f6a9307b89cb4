/* op_conv.c: conv2d, its two gradients, and conv_transpose2d, which is one of them with a bias.
 *
 * Invariant: results are channels-last by their strides where oneDNN may run. A cut of
 * the channels between groups leaves whole groups on each device; any other cut of several
 * groups is gathered first. All gradients have gradients, being each other.
 * To add an option: its word in `geometry`.
 */
#include "op.h"

enum { LABEL_N = 1, LABEL_O = 2, LABEL_C = 3 };

/* args.i: strides, paddings, dilations, groups; then, for a gradient, the two sizes it
 * restores. */
typedef struct geometry {
  orr_window window;
  int64_t groups;
} geometry;

enum { GROUPS = 6, SIZES = 7 };

/* w as a shard has it; groups: as many of them as the shard's x holds. */
static geometry geometry_of(const orr_args *args, const orr_view *x, const orr_view *w) {
  const int64_t *kernel = w->shape + 2;
  geometry g;
  for (int k = 0; k < 2; k++) {
    g.window.kernel[k] = kernel[k];
    g.window.stride[k] = args->i[k];
    g.window.padding[k] = args->i[2 + k];
    g.window.dilation[k] = args->i[4 + k];
  }
  bool several = args->i[GROUPS] > 1 && w->shape[1] > 0 && x->shape[1] > 0;
  g.groups = several ? x->shape[1] / w->shape[1] : 1;
  return g;
}

static int64_t out_size(const orr_args *args, int k, int64_t in, int64_t kernel) {
  int64_t span = in + 2 * args->i[2 + k] - args->i[4 + k] * (kernel - 1) - 1;
  return span < 0 ? 0 : span / args->i[k] + 1;
}

static orr_status check_geometry(const orr_call *c) {
  const int64_t *i = c->args.i;
  for (int k = 0; k < 2; k++)
    if (i[k] < 1 || i[2 + k] < 0 || i[4 + k] < 1)
      return orr_fail(ORR_EARG,
                      "strides and dilations must be at least 1, paddings at least 0");
  if (i[GROUPS] < 1) return orr_fail(ORR_EARG, "groups must be at least 1");
  return ORR_OK;
}

static orr_status check_inputs(orr_call *c) {
  ORR_TRY(orr_need_float(c, 0));
  orr_dtype dtype = c->in[0]->meta.dtype;
  for (int k = 1; k < c->n_in; k++)
    if (k == 1 || c->in[k]) dtype = orr_dtype_promote(dtype, c->in[k]->meta.dtype);
  for (int k = 0; k < c->n_in; k++)
    if (k < 2 || c->in[k]) ORR_TRY(orr_call_cast(c, k, dtype));
  if (c->in[0]->meta.ndim != 4 || c->in[1]->meta.ndim != 4)
    return orr_fail(ORR_EARG, "needs x (N, C, H, W) and a weight (O, C/groups, KH, KW)");
  return check_geometry(c);
}

static bool has(const orr_call *c, int k) { return c->n_in > k && c->in[k]; }

static bool one_group(const orr_call *c) { return c->args.i[GROUPS] == 1; }

static bool is_empty(const orr_view *v) { return orr_numel(v->ndim, v->shape) == 0; }

/* ---- several groups: a cut between groups ---- */

/* The ops by .code, and the dimension of each tensor along which its groups lie. */
enum { FORWARD, GRAD_X, GRAD_W, GRAD_WB };
static const int group_dim_in[][3] = {{1, 0, 0}, {1, 0, 0}, {1, 1, 0}, {1, 1, 0}};
static const int group_dim_out[] = {1, 1, 0, 0};

/* Where input k is cut now, in groups; false where it is not, or within one. */
static bool cut_of_groups(const orr_call *c, int k, int axis, int64_t *cut) {
  const orr_tensor *t = c->in[k];
  const orr_layout *layout = t->layout;
  int dim = group_dim_in[c->op->code][k];
  if (axis >= layout->mesh->n_axes || layout->axis[axis].kind != ORR_SHARD ||
      layout->axis[axis].dim != dim)
    return false;
  int64_t unit = t->meta.shape[dim] / c->args.i[GROUPS];
  for (int b = 0; b <= layout->mesh->size[axis]; b++) {
    if (unit == 0 || layout->axis[axis].bounds[b] % unit) return false;
    cut[b] = layout->axis[axis].bounds[b] / unit;
  }
  return true;
}

static orr_place cut_place(const orr_call *c, const orr_meta *m, int dim, int parts,
                           const int64_t *cut, int64_t *bounds) {
  int64_t unit = m->shape[dim] / c->args.i[GROUPS];
  for (int b = 0; b <= parts; b++) bounds[b] = cut[b] * unit;
  return (orr_place){.kind = ORR_SHARD, .dim = dim, .bounds = bounds};
}

/* The cut that x, g or w has now, on all. The second axis leaves groups alone that the first
 * cuts. */
static int rule_groups(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  static int64_t bounds[ORR_MAX_AXES][5][ORR_MAX_DEVICES + 1];
  const int *dim = group_dim_in[c->op->code];
  *only = false;
  if (one_group(c) || max < 1) return 0;
  int64_t cut[ORR_MAX_DEVICES + 1] = {0};
  for (int k = 0; k < 2 && axis > 0; k++)
    if (cut_of_groups(c, k, 0, cut)) return 0;
  int from = cut_of_groups(c, 0, axis, cut) ? 0 : cut_of_groups(c, 1, axis, cut) ? 1 : -1;
  if (from < 0) return 0;
  int parts = c->in[from]->layout->mesh->size[axis];
  for (int k = 0; k < c->n_in && k < 3; k++)
    if (c->in[k])
      rows[0].in[k] = cut_place(c, &c->in[k]->meta, dim[k], parts, cut, bounds[axis][k]);
  for (int k = 0; k < c->n_out; k++)
    rows[0].out[k] = cut_place(c, &c->out_meta[k], group_dim_out[c->op->code], parts, cut,
                               bounds[axis][3 + k]);
  return 1;
}

/* ---- one group, its input channels split: what labels leave out, because of a bias ---- */

static const orr_place *split_of(const orr_call *c, int k, int dim, int axis) {
  const orr_layout *layout = c->in[k]->layout;
  if (axis >= layout->mesh->n_axes) return NULL;
  const orr_place *now = &layout->axis[axis], *outer = &layout->axis[0];
  if (now->kind != ORR_SHARD || now->dim != dim) return NULL;
  return axis > 0 && outer->kind == ORR_SHARD && outer->dim == dim ? NULL : now;
}

/* y = x w + b comes out Partial with b, made Partial, added once; w's gradient is split as x
 * is, and every device has all of b's. */
static int rule_channels(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  bool forward = c->op->code == FORWARD;
  const orr_place *from = forward ? split_of(c, 1, 1, axis) : NULL;
  if (!one_group(c)) return rule_groups(c, axis, rows, max, only);
  *only = false;
  if (!from) from = split_of(c, 0, 1, axis);
  if (!from || max < 1 || (forward && !has(c, 2))) return 0;
  orr_place channels = {.kind = ORR_SHARD, .dim = 1, .bounds = from->bounds};
  orr_place sum = {.kind = ORR_PARTIAL, .op = ORR_SUM}, whole = {.kind = ORR_REPLICATE};
  rows[0].in[0] = channels;
  rows[0].in[1] = forward ? channels : whole;
  if (forward) rows[0].in[2] = sum;
  rows[0].out[0] = forward ? sum : channels;
  if (!forward) rows[0].out[1] = whole;
  return 1;
}

/* ---- forward: x (N, C, H, W), w (O, C/groups, KH, KW), b (O) or absent ---- */

static orr_status infer_conv(orr_call *c) {
  ORR_TRY(check_inputs(c));
  const orr_meta *x = &c->in[0]->meta, *w = &c->in[1]->meta;
  int64_t groups = c->args.i[GROUPS];
  if (w->shape[1] * groups != x->shape[1] || w->shape[0] % groups)
    return orr_fail(ORR_EARG,
                    "x has %lld channels, the weight takes %lld and gives %lld in %lld group%s",
                    (long long)x->shape[1], (long long)(w->shape[1] * groups),
                    (long long)w->shape[0], (long long)groups, groups == 1 ? "" : "s");
  if (has(c, 2) && (c->in[2]->meta.ndim != 1 || c->in[2]->meta.shape[0] != w->shape[0]))
    return orr_fail(ORR_EARG, "the bias must be (%lld)", (long long)w->shape[0]);
  orr_meta *y = &c->out_meta[0];
  *y = *x;
  y->shape[1] = w->shape[0];
  for (int k = 0; k < 2; k++) {
    y->shape[2 + k] = out_size(&c->args, k, x->shape[2 + k], w->shape[2 + k]);
    if (y->shape[2 + k] < 1)
      return orr_fail(ORR_EARG, "the kernel does not fit into x and its padding");
  }
  return ORR_OK;
}

static void label_conv(orr_call *c) {
  c->in_label[0][0] = c->out_label[0][0] = LABEL_N;
  if (!one_group(c)) return;
  c->in_label[1][0] = c->out_label[0][1] = LABEL_O;
  if (has(c, 2)) c->in_label[2][0] = LABEL_O;
  else c->in_label[0][1] = c->in_label[1][1] = LABEL_C;
}

static orr_status run_conv(const orr_work *work, int shard) {
  const orr_view *x = orr_work_in(work, shard, 0), *w = orr_work_in(work, shard, 1);
  bool biased = work->n_in > 2 && orr_work_has(work, shard, 2);
  const orr_view *b = biased ? orr_work_in(work, shard, 2) : NULL;
  const orr_view *y = orr_work_out(work, shard, 0);
  geometry g = geometry_of(&work->args, x, w);
  if (is_empty(y)) return ORR_OK;
  return work->k->conv2d(x, w, b, &g.window, g.groups, y);
}

static const orr_op conv2d, conv2d_grad_x, conv2d_grad_w, conv2d_grad_wb;

static orr_args with_sizes(const orr_args *args, const orr_meta *m) {
  orr_args out = *args;
  out.i[SIZES] = m->shape[2];
  out.i[SIZES + 1] = m->shape[3];
  return out;
}

static orr_status grad_conv(orr_grad *g) {
  orr_tensor *x = g->x[0], *w = g->x[1], *gy = g->gy[0];
  bool wants_b = g->n_in > 2 && g->needs[2];
  orr_args of_x = with_sizes(g->args, &g->x_meta[0]), of_w = with_sizes(g->args, &g->x_meta[1]);
  if (g->needs[0]) g->gx[0] = orr_g(g, &conv2d_grad_x, &of_x, 2, gy, w);
  if (g->needs[1] && wants_b && !g->create_graph) {
    orr_tensor *in[2] = {x, gy}, *out[2];
    if (g->status) return g->status;
    ORR_TRY(orr_dispatch(&conv2d_grad_wb, in, 2, &of_w, false, out));
    g->gx[1] = orr_g_keep(g, out[0]);
    g->gx[2] = orr_g_keep(g, out[1]);
    return g->status;
  }
  if (g->needs[1]) g->gx[1] = orr_g(g, &conv2d_grad_w, &of_w, 2, x, gy);
  if (wants_b) g->gx[2] = orr_g_sum(g, gy, 1u | 4u | 8u, false);
  return g->status;
}

static const orr_op conv2d = {.name = "conv2d",
                              .args = "t t t? i=1 i=1 i=0 i=0 i=1 i=1 i=1",
                              .flags = ORR_OP_CHANNELS_LAST | ORR_OP_LAYER | ORR_OP_NARROW,
                              .partial = ORR_SUM,
                              .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1),
                              .n_in = 2,
                              .n_out = 1,
                              .infer = infer_conv,
                              .label = label_conv,
                              .rule = rule_channels,
                              .run = run_conv,
                              .grad = grad_conv};

/* ---- the gradient of x: g (N, O, OH, OW), w; linear in both ---- */

static orr_status infer_grad_x(orr_call *c) {
  ORR_TRY(check_inputs(c));
  const orr_meta *g = &c->in[0]->meta, *w = &c->in[1]->meta;
  orr_meta *x = &c->out_meta[0];
  if (g->shape[1] != w->shape[0] || w->shape[0] % c->args.i[GROUPS])
    return orr_fail(ORR_EARG, "x has %lld channels and the weight takes %lld in %lld group(s)",
                    (long long)g->shape[1], (long long)w->shape[0],
                    (long long)c->args.i[GROUPS]);
  *x = *g;
  x->shape[1] = w->shape[1] * c->args.i[GROUPS];
  x->shape[2] = c->args.i[SIZES];
  x->shape[3] = c->args.i[SIZES + 1];
  return ORR_OK;
}

static void label_grad_x(orr_call *c) {
  c->in_label[0][0] = c->out_label[0][0] = LABEL_N;
  if (!one_group(c)) return;
  c->in_label[0][1] = c->in_label[1][0] = LABEL_O;
  c->in_label[1][1] = c->out_label[0][1] = LABEL_C;
}

static orr_status run_grad_x(const orr_work *work, int shard) {
  const orr_view *gy = orr_work_in(work, shard, 0), *w = orr_work_in(work, shard, 1);
  const orr_view *gx = orr_work_out(work, shard, 0);
  geometry g = geometry_of(&work->args, gx, w);
  if (is_empty(gx)) return ORR_OK;
  return work->k->conv2d_back_data(gy, w, &g.window, g.groups, gx);
}

static orr_status grad_grad_x(orr_grad *g) {
  orr_args of_w = with_sizes(g->args, &g->x_meta[1]);
  if (g->needs[0]) g->gx[0] = orr_g(g, &conv2d, g->args, 2, g->gy[0], g->x[1]);
  if (g->needs[1]) g->gx[1] = orr_g(g, &conv2d_grad_w, &of_w, 2, g->gy[0], g->x[0]);
  return g->status;
}

static const orr_op conv2d_grad_x = {.name = "conv2d_grad_x",
                                     .code = GRAD_X,
                                     .flags = ORR_OP_CHANNELS_LAST | ORR_OP_MULTILINEAR,
                                     .partial = ORR_SUM,
                                     .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1),
                                     .n_in = 2,
                                     .n_out = 1,
                                     .infer = infer_grad_x,
                                     .label = label_grad_x,
                                     .rule = rule_groups,
                                     .run = run_grad_x,
                                     .grad = grad_grad_x};

/* ---- the gradients of w, and with code GRAD_WB of b: x, g ---- */

static orr_status infer_grad_w(orr_call *c) {
  ORR_TRY(check_inputs(c));
  const orr_meta *x = &c->in[0]->meta, *g = &c->in[1]->meta;
  orr_meta *w = &c->out_meta[0];
  *w = *x;
  w->shape[0] = g->shape[1];
  w->shape[1] = x->shape[1] / c->args.i[GROUPS];
  w->shape[2] = c->args.i[SIZES];
  w->shape[3] = c->args.i[SIZES + 1];
  c->out_meta[1] = (orr_meta){.dtype = x->dtype, .ndim = 1, .shape = {g->shape[1]}};
  return ORR_OK;
}

static void label_grad_w(orr_call *c) {
  c->in_label[0][0] = c->in_label[1][0] = LABEL_N;
  if (!one_group(c)) return;
  c->in_label[1][1] = c->out_label[0][0] = LABEL_O;
  if (c->op->code == GRAD_WB) c->out_label[1][0] = LABEL_O;
  else c->in_label[0][1] = c->out_label[0][1] = LABEL_C;
}

static orr_status run_grad_w(const orr_work *work, int shard) {
  const orr_view *x = orr_work_in(work, shard, 0), *gy = orr_work_in(work, shard, 1);
  const orr_view *gw = orr_work_out(work, shard, 0);
  const orr_view *gb = work->op->code == GRAD_WB ? orr_work_out(work, shard, 1) : NULL;
  geometry g = geometry_of(&work->args, x, gw);
  return work->k->conv2d_back_weight(x, gy, &g.window, g.groups, gw, gb);
}

static orr_status grad_grad_w(orr_grad *g) {
  orr_args of_x = with_sizes(g->args, &g->x_meta[0]);
  if (g->needs[0]) g->gx[0] = orr_g(g, &conv2d_grad_x, &of_x, 2, g->x[1], g->gy[0]);
  if (g->needs[1]) g->gx[1] = orr_g(g, &conv2d, g->args, 2, g->x[0], g->gy[0]);
  return g->status;
}

static const orr_op conv2d_grad_w = {.name = "conv2d_grad_w",
                                     .code = GRAD_W,
                                     .flags = ORR_OP_MULTILINEAR,
                                     .partial = ORR_SUM,
                                     .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1),
                                     .n_in = 2,
                                     .n_out = 1,
                                     .infer = infer_grad_w,
                                     .label = label_grad_w,
                                     .rule = rule_groups,
                                     .run = run_grad_w,
                                     .grad = grad_grad_w};
static const orr_op conv2d_grad_wb = {.name = "conv2d_grad_wb",
                                      .code = GRAD_WB,
                                      .partial = ORR_SUM,
                                      .n_in = 2,
                                      .n_out = 2,
                                      .infer = infer_grad_w,
                                      .label = label_grad_w,
                                      .rule = rule_channels,
                                      .run = run_grad_w};

/* ---- conv_transpose2d: args.i: strides, paddings, output paddings, dilations, groups ---- */

static orr_status transposed_args(const orr_tensor *x, const orr_tensor *w,
                                  const orr_args *given, orr_args *out) {
  const int64_t *i = given->i;
  if (x->meta.ndim != 4 || w->meta.ndim != 4)
    return orr_fail(ORR_EARG, "needs x (N, C, H, W) and a weight (C, O/groups, KH, KW)");
  for (int k = 0; k < 2; k++) {
    int64_t stride = i[k], padding = i[2 + k], extra = i[4 + k], dilation = i[6 + k];
    out->i[k] = stride;
    out->i[2 + k] = padding;
    out->i[4 + k] = dilation;
    if (extra < 0 || (extra >= stride && extra >= dilation))
      return orr_fail(ORR_EARG, "the output padding must be below the stride or the dilation");
    out->i[SIZES + k] = (x->meta.shape[2 + k] - 1) * stride - 2 * padding +
                        dilation * (w->meta.shape[2 + k] - 1) + extra + 1;
    if (out->i[SIZES + k] < 1) return orr_fail(ORR_EARG, "the result would be empty");
  }
  out->i[GROUPS] = i[8];
  return ORR_OK;
}

/* *y += b (O) along dim 2. */
static orr_status add_bias(orr_tensor *b, orr_tensor **y) {
  orr_args shape = {.i = {3, (*y)->meta.shape[1], 1, 1}};
  orr_tensor *column, *sum;
  if (b->meta.ndim != 1 || b->meta.shape[0] != (*y)->meta.shape[1])
    return orr_fail(ORR_EARG, "the bias must be (%lld)", (long long)(*y)->meta.shape[1]);
  ORR_TRY(orr_call1(&orr_op_reshape, b, &shape, &column));
  orr_status status = orr_call2(orr_op_binary(ORR_BIN_add), *y, column, NULL, &sum);
  orr_tensor_free(column);
  if (status) return status;
  orr_tensor_free(*y);
  *y = sum;
  return ORR_OK;
}

static orr_status compose_transpose(const orr_op *op, orr_tensor *const *in, int n_in,
                                    const orr_args *args, orr_tensor **out) {
  orr_args inner = {.i = {0}};
  orr_tensor *y;
  orr_status status = transposed_args(in[0], in[1], args, &inner);
  if (status) return orr_fail_in(status, "%s", op->name);
  status = orr_call2(&conv2d_grad_x, in[0], in[1], &inner, &y);
  if (status) return orr_fail_in(status, "%s", op->name);
  if (n_in > 2 && in[2]) status = add_bias(in[2], &y);
  if (status) {
    orr_tensor_free(y);
    return orr_fail_in(status, "%s", op->name);
  }
  *out = y;
  return ORR_OK;
}

static const orr_op conv_transpose2d = {.name = "conv_transpose2d",
                                        .args = "t t t? i=1 i=1 i=0 i=0 i=0 i=0 i=1 i=1 i=1",
                                        .n_in = 2,
                                        .n_out = 1,
                                        .compose = compose_transpose};

const orr_op *const orr_ops_conv[] = {&conv2d,         &conv2d_grad_x,    &conv2d_grad_w,
                                      &conv2d_grad_wb, &conv_transpose2d, NULL};
