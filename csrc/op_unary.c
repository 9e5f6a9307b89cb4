/* op_unary.c: one op a row of kernels/unary.def, and their gradient.
 *
 * Invariant: every row is an op by the table alone: its dtype rule, placement, gradient and Lua
 * method follow from the row's flags.
 * To add a function: a row in kernels/unary.def; in `composed` its derivative by ops.
 */
#include "../kernels/elementwise.h"
#include "op.h"

static orr_status infer_unary(orr_call *c) {
  unsigned flags = orr_unary_flags[c->op->code];
  if (flags & ORR_FLOAT_ONLY && !orr_dtype_is_float(c->in[0]->meta.dtype))
    ORR_TRY(orr_call_cast(c, 0, ORR_F32));
  c->out_meta[0] = c->in[0]->meta;
  if (flags & ORR_BOOL_OUT) c->out_meta[0].dtype = ORR_BOOL;
  return ORR_OK;
}

static orr_status run_unary(const orr_work *w, int shard) {
  w->k->unary(w->op->code, orr_work_in(w, shard, 0), orr_work_out(w, shard, 0));
  return ORR_OK;
}

/* in: g, x or NULL, y or NULL; args.i[0]: the row. */
static orr_status run_unary_grad(const orr_work *w, int shard) {
  w->k->unary_grad((int)w->args.i[0],
                   orr_work_has(w, shard, 1) ? orr_work_in(w, shard, 1) : NULL,
                   orr_work_has(w, shard, 2) ? orr_work_in(w, shard, 2) : NULL,
                   orr_work_in(w, shard, 0), orr_work_out(w, shard, 0));
  return ORR_OK;
}

static const orr_op unary_grad = {.name = "unary_grad",
                                  .flags = ORR_OP_LIKE_IN,
                                  .n_in = 1,
                                  .n_out = 1,
                                  .infer = orr_infer_same,
                                  .label = orr_label_same,
                                  .run = run_unary_grad};

static orr_tensor *one_minus(orr_grad *g, orr_tensor *t) {
  return orr_g_shift(g, orr_g_scale(g, t, -1), 1);
}

/* s (1 + x u' (1 - s)), the derivative of x s(u), s the sigmoid of u. */
static orr_tensor *gated(orr_grad *g, orr_tensor *x, orr_tensor *u, orr_tensor *du) {
  orr_tensor *s = orr_g_unary(g, ORR_UN_sigmoid, u);
  orr_tensor *inner = orr_g_mul(g, orr_g_mul(g, x, du), one_minus(g, s));
  return orr_g_mul(g, s, orr_g_shift(g, inner, 1));
}

static orr_tensor *gelu_slope(orr_grad *g, orr_tensor *x) {
  orr_tensor *cdf = orr_g_unary(g, ORR_UN_erf, orr_g_scale(g, x, 0.70710678118654752440));
  orr_tensor *pdf =
      orr_g_unary(g, ORR_UN_exp, orr_g_scale(g, orr_g_unary(g, ORR_UN_square, x), -0.5));
  return orr_g_add(g, orr_g_scale(g, orr_g_shift(g, cdf, 1), 0.5),
                   orr_g_scale(g, orr_g_mul(g, x, pdf), 0.39894228040143267794));
}

static orr_tensor *gelu_tanh_slope(orr_grad *g, orr_tensor *x) {
  const double a = 1.59576912160573071176, b = 0.07135481627260025;
  orr_tensor *xx = orr_g_unary(g, ORR_UN_square, x);
  orr_tensor *u = orr_g_mul(g, x, orr_g_shift(g, orr_g_scale(g, xx, b), a));
  return gated(g, x, u, orr_g_shift(g, orr_g_scale(g, xx, 3 * b), a));
}

/* The gradient by ops that have gradients themselves. */
static orr_tensor *composed(orr_grad *g) {
  orr_tensor *x = g->x[0], *y = g->y[0], *gy = g->gy[0];
  switch (g->op->code) {
    case ORR_UN_neg: return orr_g_scale(g, gy, -1);
    case ORR_UN_abs: return orr_g_mul(g, gy, orr_g_unary(g, ORR_UN_sign, x));
    case ORR_UN_square: return orr_g_mul(g, gy, orr_g_scale(g, x, 2));
    case ORR_UN_relu: return orr_g_mul(g, gy, orr_g_unary(g, ORR_UN_sign, y));
    case ORR_UN_exp: return orr_g_mul(g, gy, y);
    case ORR_UN_expm1: return orr_g_mul(g, gy, orr_g_shift(g, y, 1));
    case ORR_UN_log: return orr_g_div(g, gy, x);
    case ORR_UN_log1p: return orr_g_div(g, gy, orr_g_shift(g, x, 1));
    case ORR_UN_sqrt: return orr_g_div(g, gy, orr_g_scale(g, y, 2));
    case ORR_UN_rsqrt:
      return orr_g_mul(g, orr_g_scale(g, gy, -0.5),
                       orr_g_mul(g, y, orr_g_unary(g, ORR_UN_square, y)));
    case ORR_UN_reciprocal:
      return orr_g_mul(g, orr_g_scale(g, gy, -1), orr_g_unary(g, ORR_UN_square, y));
    case ORR_UN_sin: return orr_g_mul(g, gy, orr_g_unary(g, ORR_UN_cos, x));
    case ORR_UN_cos: return orr_g_mul(g, orr_g_scale(g, gy, -1), orr_g_unary(g, ORR_UN_sin, x));
    case ORR_UN_tanh: return orr_g_mul(g, gy, one_minus(g, orr_g_unary(g, ORR_UN_square, y)));
    case ORR_UN_sigmoid: return orr_g_mul(g, gy, orr_g_mul(g, y, one_minus(g, y)));
    case ORR_UN_softplus: return orr_g_mul(g, gy, orr_g_unary(g, ORR_UN_sigmoid, x));
    case ORR_UN_silu: {
      orr_tensor *s = orr_g_unary(g, ORR_UN_sigmoid, x);
      orr_tensor *inner = orr_g_mul(g, x, one_minus(g, s));
      return orr_g_mul(g, gy, orr_g_mul(g, s, orr_g_shift(g, inner, 1)));
    }
    case ORR_UN_gelu: return orr_g_mul(g, gy, gelu_slope(g, x));
    case ORR_UN_gelu_tanh: return orr_g_mul(g, gy, gelu_tanh_slope(g, x));
    case ORR_UN_erf: {
      orr_tensor *xx = orr_g_unary(g, ORR_UN_square, x);
      orr_tensor *e = orr_g_unary(g, ORR_UN_exp, orr_g_scale(g, xx, -1));
      return orr_g_mul(g, gy, orr_g_scale(g, e, 1.12837916709551257390));
    }
    default: return orr_g_scale(g, gy, 0); /* steps: floor, sign, ... */
  }
}

static orr_status grad_unary(orr_grad *g) {
  orr_args row = {.i = {g->op->code}};
  g->gx[0] = g->create_graph ? composed(g)
                             : orr_g(g, &unary_grad, &row, 3, g->gy[0], g->x[0], g->y[0]);
  return g->status;
}

static const orr_op unary[] = {
#define ORR_UNARY(NAME, formula, derivative, f)                                            \
  {.name = #NAME,                                                                          \
   .args = "t",                                                                            \
   .code = ORR_UN_##NAME,                                                                  \
   .flags = ORR_OP_IN_PLACE | ORR_OP_LIKE_IN | ((f)&ORR_LINEAR ? ORR_OP_LINEAR : 0) |      \
            ((f)&ORR_BOOL_OUT ? ORR_OP_NO_GRAD : 0),                                       \
   .save = ((f)&ORR_GRAD_X ? ORR_SAVE_IN(0) : 0) | ((f)&ORR_GRAD_Y ? ORR_SAVE_OUT(0) : 0), \
   .n_in = 1,                                                                              \
   .n_out = 1,                                                                             \
   .infer = infer_unary,                                                                   \
   .label = orr_label_same,                                                                \
   .run = run_unary,                                                                       \
   .grad = grad_unary},
#include "../kernels/unary.def"
};

const orr_op *orr_op_unary(int code) { return &unary[code]; }

const orr_op *const orr_ops_unary[] = {
#define ORR_UNARY(NAME, formula, derivative, f) &unary[ORR_UN_##NAME],
#include "../kernels/unary.def"
    &unary_grad, NULL};
