/* op_attention.c: fused scaled dot-product attention (kernels/attention.h).
 *
 * Invariant: samples and heads may be sharded, each head is whole on its device; the
 * logarithms of the rows' sums are the only thing that forward leaves for backward beside its
 * inputs and output. Outputs take the stride order of q, so heads that were made by viewing
 * (N, T, H D) go back for nothing. The gradient is fused.
 * To add an input: its letters in `dims` of both ops, and a view in kernels/attention.h.
 */
#include <math.h>

#include "op.h"
#include "op_reduce.h"

/* args.i[0]: causal; args.f[0]: the factor of q k^T, 0 for 1/sqrt(D). */
static double scale_of(const orr_args *args, int64_t d) {
  if (args->f[0] != 0) return args->f[0];
  return d > 0 ? 1 / sqrt((double)d) : 1;
}

static orr_status infer_attention(orr_call *c) {
  orr_dtype dtype = c->in[0]->meta.dtype;
  for (int k = 0; k < 3; k++) {
    ORR_TRY(orr_need_float(c, k));
    dtype = orr_dtype_promote(dtype, c->in[k]->meta.dtype);
  }
  for (int k = 0; k < 3; k++) ORR_TRY(orr_call_cast(c, k, dtype));
  ORR_TRY(orr_infer_dims(c));
  c->out_meta[1].dtype = orr_sum_dtype(dtype);
  return ORR_OK;
}

static orr_status run_attention(const orr_work *w, int shard) {
  orr_k_attention_args a = {.q = orr_work_in(w, shard, 0),
                            .k = orr_work_in(w, shard, 1),
                            .v = orr_work_in(w, shard, 2),
                            .o = orr_work_out(w, shard, 0),
                            .lse = orr_work_out(w, shard, 1),
                            .causal = w->args.i[0] != 0};
  a.scale = scale_of(&w->args, a.q->shape[3]);
  return w->k->attention(&a);
}

/* in: q, k, v, o, lse, the gradient of o. */
static orr_status infer_back(orr_call *c) {
  for (int k = 0; k < 3; k++) c->out_meta[k] = c->in[k]->meta;
  return ORR_OK;
}

static orr_status run_back(const orr_work *w, int shard) {
  orr_k_attention_args a = {.q = orr_work_in(w, shard, 0),
                            .k = orr_work_in(w, shard, 1),
                            .v = orr_work_in(w, shard, 2),
                            .o = orr_work_in(w, shard, 3),
                            .lse = orr_work_in(w, shard, 4),
                            .g = orr_work_in(w, shard, 5),
                            .gq = orr_work_out(w, shard, 0),
                            .gk = orr_work_out(w, shard, 1),
                            .gv = orr_work_out(w, shard, 2),
                            .causal = w->args.i[0] != 0};
  a.scale = scale_of(&w->args, a.q->shape[3]);
  return w->k->attention_back(&a);
}

static const orr_op attention_grad = {.name = "scaled_dot_product_attention_grad",
                                      .dims = "bhTD,bhSD,bhSE,bhTE,bhT,bhTE->bhTD,bhSD,bhSE",
                                      .flags = ORR_OP_LIKE_IN,
                                      .n_in = 6,
                                      .n_out = 3,
                                      .infer = infer_back,
                                      .label = orr_label_dims,
                                      .run = run_back};

static orr_status grad_attention(orr_grad *g) {
  orr_tensor *gy = orr_g_cast(g, g->gy[0], g->y[0]->meta.dtype);
  if (g->status) return g->status;
  orr_tensor *in[6] = {g->x[0], g->x[1], g->x[2], g->y[0], g->y[1], gy}, *out[3];
  ORR_TRY(orr_dispatch(&attention_grad, in, 6, g->args, false, out));
  for (int k = 0; k < 3; k++) {
    orr_tensor *gx = orr_g_keep(g, out[k]);
    if (g->needs[k]) g->gx[k] = gx;
  }
  return g->status;
}

static const orr_op attention_stats = {
    .name = "scaled_dot_product_attention_stats",
    .dims = "bhTD,bhSD,bhSE->bhTE,bhT",
    .flags = ORR_OP_LIKE_IN | ORR_OP_FUSED_GRAD | ORR_OP_NARROW,
    .save =
        ORR_SAVE_IN(0) | ORR_SAVE_IN(1) | ORR_SAVE_IN(2) | ORR_SAVE_OUT(0) | ORR_SAVE_OUT(1),
    .n_in = 3,
    .n_out = 2,
    .infer = infer_attention,
    .label = orr_label_dims,
    .run = run_attention,
    .grad = grad_attention};

static orr_status compose_attention(const orr_op *op, orr_tensor *const *in, int n_in,
                                    const orr_args *args, orr_tensor **out) {
  orr_tensor *all[2];
  orr_status status = orr_dispatch(&attention_stats, in, n_in, args, false, all);
  if (status) return orr_fail_in(status, "%s", op->name);
  orr_tensor_free(all[1]);
  out[0] = all[0];
  return ORR_OK;
}

static const orr_op attention = {.name = "scaled_dot_product_attention",
                                 .args = "t t t b=false f=0",
                                 .n_in = 3,
                                 .n_out = 1,
                                 .compose = compose_attention};

const orr_op *const orr_ops_attention[] = {&attention, &attention_stats, &attention_grad, NULL};
