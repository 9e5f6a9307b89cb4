/* op_binary.c: two ops a row of kernels/binary.def, of two tensors and of a tensor and a
 * number.
 *
 * Invariant: operands are promoted to one dtype and broadcast; gradients come out in the shape
 * of the result and the tape sums them back. A number never changes a floating dtype.
 * To add a function: a row in kernels/binary.def; in `composed` and `composed_scalar` its
 * derivative by ops where it must have a second one.
 */
#include <math.h>

#include "../kernels/elementwise.h"
#include "op.h"
#include "op_view.h"

static orr_dtype computing(orr_dtype dtype, unsigned flags) {
  if (flags & ORR_FLOAT_ONLY && !orr_dtype_is_float(dtype)) return ORR_F32;
  if (dtype == ORR_BOOL && !(flags & ORR_BOOL_OUT)) return ORR_I64;
  return dtype;
}

static orr_status infer_binary(orr_call *c) {
  unsigned flags = orr_binary_flags[c->op->code];
  const orr_meta *a = &c->in[0]->meta, *b = &c->in[1]->meta;
  /* A number in a tensor yields to a tensor with dimensions of the same kind. */
  orr_dtype dtype = orr_dtype_promote(a->dtype, b->dtype);
  bool same_kind = orr_dtype_is_float(a->dtype) == orr_dtype_is_float(b->dtype);
  if (same_kind && a->ndim == 0 && b->ndim > 0) dtype = b->dtype;
  if (same_kind && b->ndim == 0 && a->ndim > 0) dtype = a->dtype;
  if (c->in_place && (same_kind || orr_dtype_is_float(a->dtype))) dtype = a->dtype;
  dtype = computing(dtype, flags);
  ORR_TRY(orr_call_cast(c, 0, dtype));
  ORR_TRY(orr_call_cast(c, 1, dtype));
  ORR_TRY(orr_broadcast(c->op->name, &c->in[0]->meta, &c->in[1]->meta, &c->out_meta[0]));
  c->out_meta[0].dtype = flags & ORR_BOOL_OUT ? ORR_BOOL : dtype;
  return ORR_OK;
}

static orr_status run_binary(const orr_work *w, int shard) {
  orr_view room[2];
  orr_view *y = orr_work_out(w, shard, 0);
  w->k->binary(w->op->code, orr_expand_view(orr_work_in(w, shard, 0), y, &room[0]),
               orr_expand_view(orr_work_in(w, shard, 1), y, &room[1]), y);
  return ORR_OK;
}

/* in: g, a, b, y or NULL; args.i: the row, which operand. */
static orr_status run_binary_grad(const orr_work *w, int shard) {
  orr_view room[2];
  orr_view *out = orr_work_out(w, shard, 0);
  const orr_view *g = orr_work_in(w, shard, 0);
  w->k->binary_grad((int)w->args.i[0], (int)w->args.i[1],
                    orr_expand_view(orr_work_in(w, shard, 1), g, &room[0]),
                    orr_expand_view(orr_work_in(w, shard, 2), g, &room[1]),
                    orr_work_has(w, shard, 3) ? orr_work_in(w, shard, 3) : NULL, g, out);
  return ORR_OK;
}

static const orr_op binary_grad = {.name = "binary_grad",
                                   .flags = ORR_OP_LIKE_IN,
                                   .n_in = 3,
                                   .n_out = 1,
                                   .infer = orr_infer_same,
                                   .label = orr_label_broadcast,
                                   .run = run_binary_grad};

static orr_tensor *compare(orr_grad *g, int code, orr_tensor *a, orr_tensor *b) {
  return orr_g_cast(g, orr_g(g, orr_op_binary(code), NULL, 2, a, b), g->gy[0]->meta.dtype);
}

/* 1 where the operand wins, a half where they tie. */
static orr_tensor *wins(orr_grad *g, int code, int which) {
  orr_tensor *a = g->x[which], *b = g->x[1 - which];
  return orr_g_add(g, compare(g, code == ORR_BIN_maximum ? ORR_BIN_gt : ORR_BIN_lt, a, b),
                   orr_g_scale(g, compare(g, ORR_BIN_eq, a, b), 0.5));
}

/* By ops that have gradients themselves; NULL where there is no such form. */
static orr_tensor *composed(orr_grad *g, int which) {
  orr_tensor *a = g->x[0], *b = g->x[1], *y = g->y[0], *gy = g->gy[0];
  switch (g->op->code) {
    case ORR_BIN_add: return gy;
    case ORR_BIN_sub: return which ? orr_g_scale(g, gy, -1) : gy;
    case ORR_BIN_mul: return orr_g_mul(g, gy, which ? a : b);
    case ORR_BIN_div:
      return which ? orr_g_scale(g, orr_g_div(g, orr_g_mul(g, gy, y), b), -1)
                   : orr_g_div(g, gy, b);
    case ORR_BIN_pow: {
      if (which) return orr_g_mul(g, orr_g_mul(g, gy, y), orr_g_unary(g, ORR_UN_log, a));
      orr_tensor *less =
          orr_g(g, orr_op_binary(ORR_BIN_pow), NULL, 2, a, orr_g_shift(g, b, -1));
      return orr_g_mul(g, orr_g_mul(g, gy, b), less);
    }
    case ORR_BIN_maximum:
    case ORR_BIN_minimum: return orr_g_mul(g, gy, wins(g, g->op->code, which));
    case ORR_BIN_fmod:
    case ORR_BIN_remainder: {
      int whole = g->op->code == ORR_BIN_fmod ? ORR_UN_trunc : ORR_UN_floor;
      if (!which) return gy;
      return orr_g_scale(g, orr_g_mul(g, gy, orr_g_unary(g, whole, orr_g_div(g, a, b))), -1);
    }
    case ORR_BIN_atan2: {
      orr_tensor *norm =
          orr_g_add(g, orr_g_unary(g, ORR_UN_square, a), orr_g_unary(g, ORR_UN_square, b));
      orr_tensor *slope = orr_g_div(g, orr_g_mul(g, gy, which ? a : b), norm);
      return which ? orr_g_scale(g, slope, -1) : slope;
    }
    default: return NULL;
  }
}

static bool is_plain(int code) { return code <= ORR_BIN_div; }

static orr_status grad_binary(orr_grad *g) {
  for (int which = 0; which < 2; which++) {
    if (!g->needs[which]) continue;
    if (is_plain(g->op->code) || g->create_graph) {
      g->gx[which] = composed(g, which);
      if (!g->gx[which] && !g->status)
        return orr_fail(ORR_EARG, "%s has no second derivative", g->op->name);
    } else {
      orr_args args = {.i = {g->op->code, which}};
      g->gx[which] = orr_g(g, &binary_grad, &args, 4, g->gy[0], g->x[0], g->x[1], g->y[0]);
    }
  }
  return g->status;
}

/* ---- a tensor and a number: args.f[0], args.i[0] whether the number comes first ---- */

static orr_status infer_scalar(orr_call *c) {
  unsigned flags = orr_binary_flags[c->op->code];
  double s = c->args.f[0];
  orr_dtype dtype = computing(c->in[0]->meta.dtype, flags);
  if (!orr_dtype_is_float(dtype) && s != floor(s)) dtype = ORR_F32;
  ORR_TRY(orr_call_cast(c, 0, dtype));
  c->out_meta[0] = c->in[0]->meta;
  if (flags & ORR_BOOL_OUT) c->out_meta[0].dtype = ORR_BOOL;
  return ORR_OK;
}

static orr_status run_scalar(const orr_work *w, int shard) {
  w->k->binary_scalar(w->op->code, orr_work_in(w, shard, 0), w->args.f[0], w->args.i[0] != 0,
                      orr_work_out(w, shard, 0));
  return ORR_OK;
}

static orr_tensor *scalar_op(orr_grad *g, int code, orr_tensor *x, double s, bool first) {
  orr_args args = {.f = {s}, .i = {first}};
  return orr_g(g, orr_op_binary(code)->scalar, &args, 1, x);
}

static orr_tensor *scalar_wins(orr_grad *g, double s) {
  bool max = g->op->code == ORR_BIN_maximum;
  orr_dtype dtype = g->gy[0]->meta.dtype;
  orr_tensor *x = g->x[0];
  orr_tensor *beats =
      orr_g_cast(g, scalar_op(g, max ? ORR_BIN_gt : ORR_BIN_lt, x, s, false), dtype);
  orr_tensor *ties = orr_g_cast(g, scalar_op(g, ORR_BIN_eq, x, s, false), dtype);
  return orr_g_add(g, beats, orr_g_scale(g, ties, 0.5));
}

static orr_status grad_scalar(orr_grad *g) {
  orr_tensor *x = g->x[0], *y = g->y[0], *gy = g->gy[0];
  double s = g->args->f[0];
  bool first = g->args->i[0] != 0;
  switch (g->op->code) {
    case ORR_BIN_add: g->gx[0] = gy; break;
    case ORR_BIN_sub: g->gx[0] = first ? orr_g_scale(g, gy, -1) : gy; break;
    case ORR_BIN_mul: g->gx[0] = orr_g_scale(g, gy, s); break;
    case ORR_BIN_div:
      g->gx[0] = first ? orr_g_scale(g, orr_g_div(g, orr_g_mul(g, gy, y), x), -1)
                       : scalar_op(g, ORR_BIN_div, gy, s, false);
      break;
    case ORR_BIN_pow:
      if (first) g->gx[0] = orr_g_scale(g, orr_g_mul(g, gy, y), log(s));
      else if (s == 0) g->gx[0] = orr_g_scale(g, gy, 0);
      else
        g->gx[0] =
            orr_g_mul(g, gy, orr_g_scale(g, scalar_op(g, ORR_BIN_pow, x, s - 1, false), s));
      break;
    case ORR_BIN_maximum:
    case ORR_BIN_minimum: g->gx[0] = orr_g_mul(g, gy, scalar_wins(g, s)); break;
    case ORR_BIN_fmod:
    case ORR_BIN_remainder:
      if (!first) {
        g->gx[0] = gy;
        break;
      }
      return orr_fail(ORR_EARG, "%s of a number by a tensor has no gradient", g->op->name);
    case ORR_BIN_atan2: {
      orr_tensor *norm = orr_g_shift(g, orr_g_unary(g, ORR_UN_square, x), s * s);
      g->gx[0] = orr_g_div(g, orr_g_scale(g, gy, first ? -s : s), norm);
      break;
    }
    default: return orr_fail(ORR_EARG, "%s with a number has no gradient", g->op->name);
  }
  return g->status;
}

#define ALL_FLAGS(f) \
  (ORR_OP_IN_PLACE | ORR_OP_LIKE_IN | ((f)&ORR_BOOL_OUT ? ORR_OP_NO_GRAD : 0))
/* A product with, and a quotient by, a number pass partial sums. */
#define SCALAR_LINEAR(code) ((code) == ORR_BIN_mul ? ORR_OP_LINEAR : 0)

static const orr_op scalar[] = {
#define ORR_BINARY(NAME, formula, da, db, f)                                                  \
  {.name = #NAME,                                                                             \
   .code = ORR_BIN_##NAME,                                                                    \
   .flags = ALL_FLAGS(f) | SCALAR_LINEAR(ORR_BIN_##NAME),                                     \
   .save = ((f) & (ORR_GRAD_A | ORR_GRAD_B) && ORR_BIN_##NAME != ORR_BIN_mul ? ORR_SAVE_IN(0) \
                                                                             : 0) |           \
           ((f)&ORR_GRAD_Y ? ORR_SAVE_OUT(0) : 0),                                            \
   .n_in = 1,                                                                                 \
   .n_out = 1,                                                                                \
   .infer = infer_scalar,                                                                     \
   .label = orr_label_same,                                                                   \
   .run = run_scalar,                                                                         \
   .grad = grad_scalar},
#include "../kernels/binary.def"
};

static const orr_op binary[] = {
#define ORR_BINARY(NAME, formula, da, db, f)                                     \
  {.name = #NAME,                                                                \
   .args = "ts ts",                                                              \
   .code = ORR_BIN_##NAME,                                                       \
   .flags = ALL_FLAGS(f) | ((f)&ORR_LINEAR ? ORR_OP_LINEAR : 0) |                \
            (ORR_BIN_##NAME == ORR_BIN_mul ? ORR_OP_MULTILINEAR : 0),            \
   .save = ((f) & (ORR_GRAD_A | ORR_GRAD_B)                                      \
                ? (is_div(ORR_BIN_##NAME) ? 0 : ORR_SAVE_IN(0)) | ORR_SAVE_IN(1) \
                : 0) |                                                           \
           ((f)&ORR_GRAD_Y ? ORR_SAVE_OUT(0) : 0),                               \
   .n_in = 2,                                                                    \
   .n_out = 1,                                                                   \
   .scalar = &scalar[ORR_BIN_##NAME],                                            \
   .infer = infer_binary,                                                        \
   .label = orr_label_broadcast,                                                 \
   .run = run_binary,                                                            \
   .grad = grad_binary},
#define is_div(code) ((code) == ORR_BIN_div)
#include "../kernels/binary.def"
};

const orr_op *orr_op_binary(int code) { return &binary[code]; }

const orr_op *const orr_ops_binary[] = {
#define ORR_BINARY(NAME, formula, da, db, f) &binary[ORR_BIN_##NAME],
#include "../kernels/binary.def"
    &binary_grad, NULL};
