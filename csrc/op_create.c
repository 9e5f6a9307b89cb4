/* op_create.c: tensors from nothing: full (zeros, ones), arange, linspace, eye; and the
 * triangles, which like them depend on where a shard stands.
 *
 * Invariant: an element's value depends on its global index alone.
 * To add one: run reads work->origin for the shard's first index.
 */
#include "../kernels/elementwise.h"
#include "op.h"

static orr_status run_full(const orr_work *w, int shard) {
  w->k->fill(orr_work_out(w, shard, 0), w->args.f[0]);
  return ORR_OK;
}

/* args.f[0]: the value. */
const orr_op orr_op_full = {.name = "full", .n_out = 1, .run = run_full};

static orr_status run_arange(const orr_work *w, int shard) {
  w->k->arange(orr_work_out(w, shard, 0), w->args.f[0], w->args.f[1], w->origin[shard][0]);
  return ORR_OK;
}

/* args.f: start, step. */
const orr_op orr_op_arange = {
    .name = "arange", .flags = ORR_OP_ORIGIN, .n_out = 1, .run = run_arange};

static orr_status run_eye(const orr_work *w, int shard) {
  w->k->eye(orr_work_out(w, shard, 0), w->origin[shard][0], w->origin[shard][1]);
  return ORR_OK;
}

const orr_op orr_op_eye = {.name = "eye", .flags = ORR_OP_ORIGIN, .n_out = 1, .run = run_eye};

static orr_status infer_triangle(orr_call *c) {
  if (c->in[0]->meta.ndim < 2)
    return orr_fail(ORR_EARG, "needs a matrix, or a batch of them, in the last two dimensions");
  return orr_infer_same(c);
}

static orr_status run_triangle(const orr_work *w, int shard) {
  int n = w->global.ndim;
  (w->op->code ? w->k->triu : w->k->tril)(orr_work_in(w, shard, 0), orr_work_out(w, shard, 0),
                                          w->args.i[0], w->origin[shard][n - 2],
                                          w->origin[shard][n - 1]);
  return ORR_OK;
}

static orr_status grad_triangle(orr_grad *g) {
  g->gx[0] = orr_g(g, g->op, g->args, 1, g->gy[0]);
  return g->status;
}

static const orr_op tril = {.name = "tril",
                            .args = "t i=0",
                            .flags = ORR_OP_ORIGIN | ORR_OP_LINEAR | ORR_OP_LIKE_IN,
                            .n_in = 1,
                            .n_out = 1,
                            .infer = infer_triangle,
                            .label = orr_label_same,
                            .run = run_triangle,
                            .grad = grad_triangle};
static const orr_op triu = {.name = "triu",
                            .args = "t i=0",
                            .code = 1,
                            .flags = ORR_OP_ORIGIN | ORR_OP_LINEAR | ORR_OP_LIKE_IN,
                            .n_in = 1,
                            .n_out = 1,
                            .infer = infer_triangle,
                            .label = orr_label_same,
                            .run = run_triangle,
                            .grad = grad_triangle};

const orr_op *const orr_ops_create[] = {&orr_op_full, &orr_op_arange, &orr_op_eye,
                                        &tril,        &triu,          NULL};
