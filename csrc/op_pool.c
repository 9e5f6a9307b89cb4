/* op_pool.c: max and average pooling of (N, C, H, W).
 *
 * Invariant: samples and channels may be sharded, planes stay whole. The result takes the
 * stride order of x. Max pooling remembers where each maximum stood, and its gradient is fused.
 * To add a pooling: its kernel in kernels/pool.h, its op and the op of its gradient here.
 */
#include "op.h"

/* args.i of both: the kernel, strides, paddings; then dilations (max), or whether padding
 * counts (average); then, for a gradient, the two sizes of x. */
enum { DILATION = 6, INCLUDE_PAD = 6, MAX_SIZES = 8, AVG_SIZES = 7 };

static orr_window window_of(const orr_args *args, bool dilated) {
  orr_window w;
  for (int k = 0; k < 2; k++) {
    w.kernel[k] = args->i[k];
    w.stride[k] = args->i[2 + k];
    w.padding[k] = args->i[4 + k];
    w.dilation[k] = dilated ? args->i[DILATION + k] : 1;
  }
  return w;
}

/* y's planes from x's; ORR_EARG where the window does not fit. */
static orr_status pooled(const orr_call *c, bool dilated) {
  const orr_meta *x = &c->in[0]->meta;
  orr_window w = window_of(&c->args, dilated);
  ORR_TRY(orr_need_float(c, 0));
  if (x->ndim != 4) return orr_fail(ORR_EARG, "needs x (N, C, H, W)");
  for (int k = 0; k < 2; k++) {
    if (w.kernel[k] < 1 || w.stride[k] < 1 || w.dilation[k] < 1 || w.padding[k] < 0 ||
        2 * w.padding[k] > w.kernel[k])
      return orr_fail(ORR_EARG,
                      "the kernel, strides and dilations must be at least 1, paddings "
                      "at most half the kernel");
    if (x->shape[2 + k] + 2 * w.padding[k] - w.dilation[k] * (w.kernel[k] - 1) - 1 < 0)
      return orr_fail(ORR_EARG, "the kernel does not fit into x and its padding");
  }
  return ORR_OK;
}

static void set_planes(orr_call *c, bool dilated) {
  orr_window w = window_of(&c->args, dilated);
  orr_meta *y = &c->out_meta[0];
  *y = c->in[0]->meta;
  for (int k = 0; k < 2; k++)
    y->shape[2 + k] =
        (y->shape[2 + k] + 2 * w.padding[k] - w.dilation[k] * (w.kernel[k] - 1) - 1) /
            w.stride[k] +
        1;
}

static void label_pool(orr_call *c) {
  for (int d = 0; d < 2; d++) {
    for (int k = 0; k < c->n_in; k++) c->in_label[k][d] = (uint8_t)(d + 1);
    for (int k = 0; k < c->n_out; k++) c->out_label[k][d] = (uint8_t)(d + 1);
  }
}

static orr_args with_sizes(const orr_args *args, int at, const orr_meta *x) {
  orr_args out = *args;
  out.i[at] = x->shape[2];
  out.i[at + 1] = x->shape[3];
  return out;
}

static orr_status infer_restored(orr_call *c, int at) {
  c->out_meta[0] = c->in[0]->meta;
  c->out_meta[0].shape[2] = c->args.i[at];
  c->out_meta[0].shape[3] = c->args.i[at + 1];
  return ORR_OK;
}

/* ---- max: out y, and where it was found ---- */

static orr_status infer_max(orr_call *c) {
  ORR_TRY(pooled(c, true));
  set_planes(c, true);
  c->out_meta[1] = c->out_meta[0];
  c->out_meta[1].dtype = ORR_I32;
  return ORR_OK;
}

static orr_status run_max(const orr_work *w, int shard) {
  orr_window window = window_of(&w->args, true);
  w->k->max_pool2d(orr_work_in(w, shard, 0), &window, orr_work_out(w, shard, 0),
                   orr_work_out(w, shard, 1));
  return ORR_OK;
}

static orr_status infer_max_grad(orr_call *c) {
  ORR_TRY(infer_restored(c, MAX_SIZES));
  c->out_meta[0].dtype = c->in[1]->meta.dtype;
  return ORR_OK;
}

static orr_status run_max_grad(const orr_work *w, int shard) {
  orr_window window = window_of(&w->args, true);
  w->k->max_pool2d_back(orr_work_in(w, shard, 1), orr_work_in(w, shard, 0), &window,
                        orr_work_out(w, shard, 0));
  return ORR_OK;
}

/* in: indices, g. The indices have the stride order of x, which g may have lost. */
static const orr_op max_pool2d_grad = {.name = "max_pool2d_grad",
                                       .flags = ORR_OP_LIKE_IN,
                                       .n_in = 2,
                                       .n_out = 1,
                                       .infer = infer_max_grad,
                                       .label = label_pool,
                                       .run = run_max_grad};

static orr_status grad_max(orr_grad *g) {
  orr_args args = with_sizes(g->args, MAX_SIZES, &g->x_meta[0]);
  g->gx[0] = orr_g(g, &max_pool2d_grad, &args, 2, g->y[1], g->gy[0]);
  return g->status;
}

static const orr_op max_pool2d_indexed = {.name = "max_pool2d_indexed",
                                          .flags = ORR_OP_LIKE_IN | ORR_OP_FUSED_GRAD,
                                          .save = ORR_SAVE_OUT(1),
                                          .n_in = 1,
                                          .n_out = 2,
                                          .infer = infer_max,
                                          .label = label_pool,
                                          .run = run_max,
                                          .grad = grad_max};

static orr_status compose_max(const orr_op *op, orr_tensor *const *in, int n_in,
                              const orr_args *args, orr_tensor **out) {
  orr_tensor *both[2];
  orr_status status = orr_dispatch(&max_pool2d_indexed, in, n_in, args, false, both);
  if (status) return orr_fail_in(status, "%s", op->name);
  orr_tensor_free(both[1]);
  out[0] = both[0];
  return ORR_OK;
}

static const orr_op max_pool2d = {.name = "max_pool2d",
                                  .args = "t i i i i i=0 i=0 i=1 i=1",
                                  .n_in = 1,
                                  .n_out = 1,
                                  .compose = compose_max};

/* ---- average ---- */

static orr_status infer_avg(orr_call *c) {
  ORR_TRY(pooled(c, false));
  set_planes(c, false);
  return ORR_OK;
}

static orr_status run_avg(const orr_work *w, int shard) {
  orr_window window = window_of(&w->args, false);
  const orr_view *x = orr_work_in(w, shard, 0), *y = orr_work_out(w, shard, 0);
  return w->k->avg_pool2d(x, &window, w->args.i[INCLUDE_PAD] != 0, y);
}

static orr_status infer_avg_grad(orr_call *c) { return infer_restored(c, AVG_SIZES); }

static orr_status run_avg_grad(const orr_work *w, int shard) {
  orr_window window = window_of(&w->args, false);
  const orr_view *gy = orr_work_in(w, shard, 0), *gx = orr_work_out(w, shard, 0);
  return w->k->avg_pool2d_back(gy, &window, w->args.i[INCLUDE_PAD] != 0, gx);
}

static const orr_op avg_pool2d;

static orr_status grad_avg_grad(orr_grad *g) {
  g->gx[0] = orr_g(g, &avg_pool2d, g->args, 1, g->gy[0]);
  return g->status;
}

static const orr_op avg_pool2d_grad = {.name = "avg_pool2d_grad",
                                       .flags = ORR_OP_LIKE_IN | ORR_OP_LINEAR,
                                       .n_in = 1,
                                       .n_out = 1,
                                       .infer = infer_avg_grad,
                                       .label = label_pool,
                                       .run = run_avg_grad,
                                       .grad = grad_avg_grad};

static orr_status grad_avg(orr_grad *g) {
  orr_args args = with_sizes(g->args, AVG_SIZES, &g->x_meta[0]);
  g->gx[0] = orr_g(g, &avg_pool2d_grad, &args, 1, g->gy[0]);
  return g->status;
}

static const orr_op avg_pool2d = {.name = "avg_pool2d",
                                  .args = "t i i i i i=0 i=0 b=true",
                                  .flags = ORR_OP_LIKE_IN | ORR_OP_LINEAR,
                                  .n_in = 1,
                                  .n_out = 1,
                                  .infer = infer_avg,
                                  .label = label_pool,
                                  .run = run_avg,
                                  .grad = grad_avg};

const orr_op *const orr_ops_pool[] = {&max_pool2d, &max_pool2d_indexed, &max_pool2d_grad,
                                      &avg_pool2d, &avg_pool2d_grad,    NULL};
