/* op_scan.c: running sums and products along one dim.
 *
 * Invariant: the dim is whole; integers are summed and multiplied as i64.
 * To add a scan: its kernel in kernels/reduce.h, an op here.
 */
#include "../kernels/reduce.h"
#include "op_reduce.h"

static orr_status infer_scan(orr_call *c) {
  ORR_TRY(orr_infer_along(c));
  if (!orr_dtype_is_float(c->out_meta[0].dtype)) c->out_meta[0].dtype = ORR_I64;
  return ORR_OK;
}

/* code 1: from the end. */
static orr_status run_cumsum(const orr_work *w, int shard) {
  w->k->cumsum(orr_work_in(w, shard, 0), (int)w->args.i[0], w->op->code != 0,
               orr_work_out(w, shard, 0));
  return ORR_OK;
}

static orr_status grad_cumsum(orr_grad *g);

static const orr_op cumsum = {.name = "cumsum",
                              .args = "t d",
                              .flags = ORR_OP_LINEAR,
                              .n_in = 1,
                              .n_out = 1,
                              .infer = infer_scan,
                              .label = orr_label_along,
                              .run = run_cumsum,
                              .grad = grad_cumsum};
static const orr_op cumsum_reverse = {.name = "cumsum_reverse",
                                      .code = 1,
                                      .flags = ORR_OP_LINEAR,
                                      .n_in = 1,
                                      .n_out = 1,
                                      .infer = infer_scan,
                                      .label = orr_label_along,
                                      .run = run_cumsum,
                                      .grad = grad_cumsum};

static orr_status grad_cumsum(orr_grad *g) {
  g->gx[0] = orr_g(g, g->op->code ? &cumsum : &cumsum_reverse, g->args, 1, g->gy[0]);
  return g->status;
}

static orr_status run_cumprod(const orr_work *w, int shard) {
  w->k->cumprod(orr_work_in(w, shard, 0), (int)w->args.i[0], orr_work_out(w, shard, 0));
  return ORR_OK;
}

/* in: x, y, g. */
static orr_status run_cumprod_grad(const orr_work *w, int shard) {
  w->k->cumprod_back(orr_work_in(w, shard, 0), orr_work_in(w, shard, 1),
                     orr_work_in(w, shard, 2), (int)w->args.i[0], orr_work_out(w, shard, 0));
  return ORR_OK;
}

static const orr_op cumprod_grad = {.name = "cumprod_grad",
                                    .n_in = 3,
                                    .n_out = 1,
                                    .infer = orr_infer_along,
                                    .label = orr_label_along,
                                    .run = run_cumprod_grad};

static orr_status grad_cumprod(orr_grad *g) {
  g->gx[0] = orr_g(g, &cumprod_grad, g->args, 3, g->x[0], g->y[0], g->gy[0]);
  return g->status;
}

const orr_op orr_op_cumprod = {.name = "cumprod",
                               .args = "t d",
                               .flags = ORR_OP_FUSED_GRAD,
                               .save = ORR_SAVE_IN(0) | ORR_SAVE_OUT(0),
                               .n_in = 1,
                               .n_out = 1,
                               .infer = infer_scan,
                               .label = orr_label_along,
                               .run = run_cumprod,
                               .grad = grad_cumprod};

const orr_op *const orr_ops_scan[] = {&cumsum, &cumsum_reverse, &orr_op_cumprod, &cumprod_grad,
                                      NULL};
