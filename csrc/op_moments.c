/* op_moments.c: var, std and norm, composed of sums so that every placement serves.
 *
 * Invariant: counts are global; f16 and bf16 are summed and rooted in f32 and come back in
 * their own dtype. The norm of nothing but zeros has gradient 0, as its least subgradient.
 * To add one: compose it of ops that have gradients.
 */
#include <math.h>

#include "../kernels/elementwise.h"
#include "../kernels/reduce.h"
#include "op_reduce.h"

static orr_status need_float(const char *op, const orr_tensor *x) {
  if (orr_dtype_is_float(x->meta.dtype)) return ORR_OK;
  return orr_fail(ORR_EARG, "%s: needs a floating-point tensor and got %s; use x:to(\"f32\")",
                  op, orr_dtype_name(x->meta.dtype));
}

/* *out = (x - mean)^2 with mean kept. */
static orr_status squares_about_mean(orr_tensor *x, unsigned mask, orr_tensor **out) {
  orr_args over = {.i = {mask, true}};
  orr_tensor *mean;
  ORR_TRY(orr_call1(&orr_op_sum_dims, x, &over, &mean));
  ORR_TRY(orr_then_scale(&mean, 1 / (double)orr_mask_count(&x->meta, mask)));
  orr_status status = orr_call2(orr_op_binary(ORR_BIN_sub), x, mean, NULL, out);
  orr_tensor_free(mean);
  return status ? status : orr_then(out, orr_op_unary(ORR_UN_square), NULL);
}

/* args.i: d, unbiased, keep; code 1: its root. */
static orr_status compose_var(const orr_op *op, orr_tensor *const *in, int n_in,
                              const orr_args *args, orr_tensor **out) {
  unsigned mask;
  (void)n_in;
  ORR_TRY(need_float(op->name, in[0]));
  ORR_TRY(orr_mask_of(op->name, in[0], args->i[0], &mask));
  int64_t count = orr_mask_count(&in[0]->meta, mask) - (args->i[1] ? 1 : 0);
  orr_args over = {.i = {mask, args->i[2]}};
  orr_tensor *x;
  ORR_TRY(orr_cast(in[0], orr_sum_dtype(in[0]->meta.dtype), &x));
  orr_status status = squares_about_mean(x, mask, out);
  orr_tensor_free(x);
  if (status) return status;
  ORR_TRY(orr_then(out, &orr_op_sum_dims, &over));
  ORR_TRY(orr_then_scale(out, count > 0 ? 1 / (double)count : NAN));
  if (op->code) ORR_TRY(orr_then(out, orr_op_unary(ORR_UN_sqrt), NULL));
  return orr_then_cast(out, in[0]->meta.dtype);
}

static const orr_op var = {.name = "var",
                           .args = "t d=nil b=true b=false",
                           .n_in = 1,
                           .n_out = 1,
                           .compose = compose_var};
static const orr_op std_op = {.name = "std",
                              .args = "t d=nil b=true b=false",
                              .code = 1,
                              .n_in = 1,
                              .n_out = 1,
                              .compose = compose_var};

/* ---- sum of |x|^p: args.i: mask, keep; args.f: p ---- */

static orr_status infer_sum_pow(orr_call *c) {
  orr_infer_reduced(&c->in[0]->meta, (unsigned)c->args.i[0], c->args.i[1] != 0,
                    &c->out_meta[0]);
  c->out_meta[0].dtype = orr_sum_dtype(c->in[0]->meta.dtype);
  return ORR_OK;
}

static void label_sum_pow(orr_call *c) {
  orr_label_reduced(c, (unsigned)c->args.i[0], c->args.i[1] != 0, false);
}

static orr_status run_sum_pow(const orr_work *w, int shard) {
  unsigned mask = (unsigned)w->args.i[0];
  double p = w->args.f[0];
  const orr_view *x = orr_work_in(w, shard, 0);
  orr_view y = orr_keep_view(orr_work_out(w, shard, 0), mask, x->ndim);
  if (p == 2) w->k->reduce(ORR_REDUCE_SUMSQ, x, mask, &y);
  else if (p == 1) w->k->reduce(ORR_REDUCE_SUMABS, x, mask, &y);
  else if (p == 0) w->k->reduce(ORR_REDUCE_COUNT, x, mask, &y);
  else w->k->sum_pow(x, mask, p, &y);
  return ORR_OK;
}

/* p |x|^(p - 1) sign(x) g. */
static orr_status grad_sum_pow(orr_grad *g) {
  double p = g->args->f[0];
  orr_args less = {.f = {p - 1}};
  orr_tensor *gy =
      orr_g_kept(g, g->gy[0], &g->x_meta[0], (unsigned)g->args->i[0], g->args->i[1] != 0);
  orr_tensor *slope = g->x[0];
  if (p == 0) slope = orr_g_scale(g, orr_g_unary(g, ORR_UN_sign, slope), 0);
  else if (p != 2) {
    slope = orr_g_unary(g, ORR_UN_sign, g->x[0]);
    if (p != 1)
      slope = orr_g_mul(g, slope,
                        orr_g(g, orr_op_binary(ORR_BIN_pow)->scalar, &less, 1,
                              orr_g_unary(g, ORR_UN_abs, g->x[0])));
  }
  g->gx[0] = orr_g_mul(g, slope, orr_g_scale(g, gy, p));
  return g->status;
}

static const orr_op sum_pow = {.name = "sum_pow",
                               .partial = ORR_SUM,
                               .save = ORR_SAVE_IN(0),
                               .n_in = 1,
                               .n_out = 1,
                               .infer = infer_sum_pow,
                               .label = label_sum_pow,
                               .run = run_sum_pow,
                               .grad = grad_sum_pow};

/* ---- s^(1/p), whose gradient at 0 is 0: args.f: p ---- */

static orr_status run_root(const orr_work *w, int shard) {
  const orr_view *s = orr_work_in(w, shard, 0);
  orr_view *y = orr_work_out(w, shard, 0);
  if (w->args.f[0] == 2) w->k->unary(ORR_UN_sqrt, s, y);
  else w->k->binary_scalar(ORR_BIN_pow, s, 1 / w->args.f[0], false, y);
  return ORR_OK;
}

/* g y / (p s), with s = 1 where it is 0 and y is, too. */
static orr_status grad_root(orr_grad *g) {
  orr_args zero = {.f = {0}};
  orr_tensor *s = g->x[0];
  orr_tensor *none = orr_g(g, orr_op_binary(ORR_BIN_eq)->scalar, &zero, 1, s);
  orr_tensor *safe = orr_g_add(g, s, orr_g_cast(g, none, s->meta.dtype));
  orr_tensor *slope = orr_g_scale(g, orr_g_div(g, g->y[0], safe), 1 / g->args->f[0]);
  g->gx[0] = orr_g_mul(g, g->gy[0], slope);
  return g->status;
}

static const orr_op norm_root = {.name = "norm_root",
                                 .save = ORR_SAVE_IN(0) | ORR_SAVE_OUT(0),
                                 .n_in = 1,
                                 .n_out = 1,
                                 .infer = orr_infer_same,
                                 .label = orr_label_same,
                                 .run = run_root,
                                 .grad = grad_root};

/* norm([p[, d[, keep]]]): (sum of |x|^p)^(1/p); p may be inf, -inf and 0 (counts non-zeros). */
static orr_status compose_norm(const orr_op *op, orr_tensor *const *in, int n_in,
                               const orr_args *args, orr_tensor **out) {
  unsigned mask;
  double p = args->f[0];
  (void)n_in;
  ORR_TRY(need_float(op->name, in[0]));
  ORR_TRY(orr_mask_of(op->name, in[0], args->i[0], &mask));
  if (p != p) return orr_fail(ORR_EARG, "norm: p is not a number");
  orr_args over = {.i = {mask, args->i[1]}, .f = {p}};
  if (isinf(p)) {
    ORR_TRY(orr_call1(orr_op_unary(ORR_UN_abs), in[0], NULL, out));
    return orr_then(out, p > 0 ? &orr_op_max_dims : &orr_op_min_dims, &over);
  }
  ORR_TRY(orr_call1(&sum_pow, in[0], &over, out));
  if (p != 0 && p != 1) ORR_TRY(orr_then(out, &norm_root, &over));
  return orr_then_cast(out, in[0]->meta.dtype);
}

static const orr_op norm = {.name = "norm",
                            .args = "t f=2 d=nil b=false",
                            .n_in = 1,
                            .n_out = 1,
                            .compose = compose_norm};

const orr_op *const orr_ops_moments[] = {&var, &std_op, &sum_pow, &norm_root, &norm, NULL};
