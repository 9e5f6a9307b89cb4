/* op_softmax.c: softmax, log_softmax and logsumexp along one dim.
 *
 * Invariant: the dim is whole on each device, all others may be sharded. Gradients are fused,
 * and composed where they must have gradients themselves.
 * To add one: its kernel in kernels/softmax.h, its op and gradient op here.
 */
#include "../kernels/elementwise.h"
#include "../kernels/softmax.h"
#include "op_reduce.h"

static orr_status infer_softmax(orr_call *c) {
  ORR_TRY(orr_need_float(c, 0));
  return orr_infer_along(c);
}

/* code 1: the logarithm. */
static orr_status run_softmax(const orr_work *w, int shard) {
  (w->op->code ? w->k->log_softmax : w->k->softmax)(orr_work_in(w, shard, 0), (int)w->args.i[0],
                                                    orr_work_out(w, shard, 0));
  return ORR_OK;
}

/* in: y, g. */
static orr_status run_softmax_grad(const orr_work *w, int shard) {
  (w->op->code ? w->k->log_softmax_back : w->k->softmax_back)(
      orr_work_in(w, shard, 0), orr_work_in(w, shard, 1), (int)w->args.i[0],
      orr_work_out(w, shard, 0));
  return ORR_OK;
}

static const orr_op softmax_grad = {.name = "softmax_grad",
                                    .flags = ORR_OP_LIKE_IN,
                                    .n_in = 2,
                                    .n_out = 1,
                                    .infer = orr_infer_along,
                                    .label = orr_label_along,
                                    .run = run_softmax_grad};
static const orr_op log_softmax_grad = {.name = "log_softmax_grad",
                                        .code = 1,
                                        .flags = ORR_OP_LIKE_IN,
                                        .n_in = 2,
                                        .n_out = 1,
                                        .infer = orr_infer_along,
                                        .label = orr_label_along,
                                        .run = run_softmax_grad};

/* y (g - sum(g y)), or for the logarithm g - exp(y) sum(g). */
static orr_tensor *composed(orr_grad *g) {
  orr_tensor *y = g->y[0], *gy = g->gy[0];
  unsigned mask = 1u << g->args->i[0];
  if (g->op->code)
    return orr_g_sub(g, gy,
                     orr_g_mul(g, orr_g_unary(g, ORR_UN_exp, y), orr_g_sum(g, gy, mask, true)));
  orr_tensor *along = orr_g_sum(g, orr_g_mul(g, gy, y), mask, true);
  return orr_g_mul(g, y, orr_g_sub(g, gy, along));
}

static orr_status grad_softmax(orr_grad *g) {
  const orr_op *fused = g->op->code ? &log_softmax_grad : &softmax_grad;
  g->gx[0] = g->create_graph ? composed(g) : orr_g(g, fused, g->args, 2, g->y[0], g->gy[0]);
  return g->status;
}

static const orr_op softmax = {.name = "softmax",
                               .args = "t d=-1",
                               .flags = ORR_OP_LIKE_IN | ORR_OP_WIDE,
                               .save = ORR_SAVE_OUT(0),
                               .n_in = 1,
                               .n_out = 1,
                               .infer = infer_softmax,
                               .label = orr_label_along,
                               .run = run_softmax,
                               .grad = grad_softmax};
const orr_op orr_op_log_softmax = {.name = "log_softmax",
                                   .args = "t d=-1",
                                   .code = 1,
                                   .flags = ORR_OP_LIKE_IN | ORR_OP_WIDE,
                                   .save = ORR_SAVE_OUT(0),
                                   .n_in = 1,
                                   .n_out = 1,
                                   .infer = infer_softmax,
                                   .label = orr_label_along,
                                   .run = run_softmax,
                                   .grad = grad_softmax};

/* ---- logsumexp: args.i: d, keep ---- */

static orr_status infer_logsumexp(orr_call *c) {
  ORR_TRY(orr_need_float(c, 0));
  ORR_TRY(orr_need_dim(c->in[0], c->args.i[0]));
  orr_infer_reduced(&c->in[0]->meta, 1u << c->args.i[0], c->args.i[1] != 0, &c->out_meta[0]);
  return ORR_OK;
}

static void label_logsumexp(orr_call *c) {
  orr_label_reduced(c, 1u << c->args.i[0], c->args.i[1] != 0, true);
}

static orr_status run_logsumexp(const orr_work *w, int shard) {
  w->k->logsumexp(orr_work_in(w, shard, 0), (int)w->args.i[0], orr_work_out(w, shard, 0));
  return ORR_OK;
}

/* g softmax(x). */
static orr_status grad_logsumexp(orr_grad *g) {
  unsigned mask = 1u << g->args->i[0];
  orr_tensor *gy = orr_g_kept(g, g->gy[0], &g->x_meta[0], mask, g->args->i[1] != 0);
  g->gx[0] = orr_g_mul(g, orr_g(g, &softmax, g->args, 1, g->x[0]), gy);
  return g->status;
}

static const orr_op logsumexp = {.name = "logsumexp",
                                 .args = "t d b=false",
                                 .flags = ORR_OP_WIDE,
                                 .save = ORR_SAVE_IN(0),
                                 .n_in = 1,
                                 .n_out = 1,
                                 .infer = infer_logsumexp,
                                 .label = label_logsumexp,
                                 .run = run_logsumexp,
                                 .grad = grad_logsumexp};

const orr_op *const orr_ops_softmax[] = {&softmax,          &orr_op_log_softmax, &softmax_grad,
                                         &log_softmax_grad, &logsumexp,          NULL};
