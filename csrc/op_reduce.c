/* op_reduce.c: reductions over dims: sum, mean, prod, any, all, and the max and min that need
 * no index.
 *
 * Invariant: a mean is a sum scaled by the global count. A sharded dim that is reduced leaves
 * Partial(sum, max or min); only prod asks for whole dims. Integers are summed as i64.
 * To add a reduction: a kind in kernels/reduce.h, a row of `REDUCTION` here, a composed Lua
 * op.
 */
#include "op_reduce.h"

#include "../kernels/elementwise.h"
#include "../kernels/reduce.h"

/* ---- shared ---- */

void orr_infer_reduced(const orr_meta *x, unsigned mask, bool keep, orr_meta *y) {
  y->dtype = x->dtype;
  y->ndim = 0;
  for (int d = 0; d < x->ndim; d++) {
    bool reduced = mask >> d & 1;
    if (!reduced || keep) y->shape[y->ndim++] = reduced ? 1 : x->shape[d];
  }
}

void orr_label_reduced(orr_call *c, unsigned mask, bool keep, bool whole) {
  int to = 0;
  for (int d = 0; d < c->in[0]->meta.ndim; d++) {
    bool reduced = mask >> d & 1;
    uint8_t label = (uint8_t)(d + 1);
    c->in_label[0][d] = reduced && whole ? ORR_WHOLE : label;
    if (reduced && !keep) continue;
    for (int k = 0; k < c->n_out; k++) c->out_label[k][to] = reduced ? ORR_WHOLE : label;
    to++;
  }
}

orr_view orr_keep_view(const orr_view *y, unsigned mask, int ndim) {
  orr_view kept = *y;
  if (y->ndim == ndim) return kept;
  kept.ndim = ndim;
  for (int d = 0, from = 0; d < ndim; d++) {
    bool reduced = mask >> d & 1;
    kept.shape[d] = reduced ? 1 : y->shape[from];
    kept.stride[d] = reduced ? 0 : y->stride[from++];
  }
  return kept;
}

orr_status orr_need_dim(const orr_tensor *x, int64_t d) {
  if (d >= 0 && d < x->meta.ndim) return ORR_OK;
  return orr_fail(ORR_EARG, "dimension %lld does not exist: the tensor has %d",
                  (long long)d + 1, x->meta.ndim);
}

orr_status orr_infer_along(orr_call *c) {
  ORR_TRY(orr_need_dim(c->in[0], c->args.i[0]));
  return orr_infer_same(c);
}

void orr_label_along(orr_call *c) {
  int d = (int)c->args.i[0];
  orr_label_same(c);
  for (int k = 0; k < c->n_in; k++) c->in_label[k][d] = ORR_WHOLE;
  for (int k = 0; k < c->n_out; k++) c->out_label[k][d] = ORR_WHOLE;
}

orr_status orr_mask_of(const char *op, const orr_tensor *x, int64_t d, unsigned *mask) {
  *mask = d == ORR_NIL ? (1u << x->meta.ndim) - 1 : 1u << (d & 31);
  if (d != ORR_NIL && orr_need_dim(x, d)) return orr_fail_in(ORR_EARG, "%s", op);
  return ORR_OK;
}

int64_t orr_mask_count(const orr_meta *x, unsigned mask) {
  int64_t n = 1;
  for (int d = 0; d < x->ndim; d++)
    if (mask >> d & 1) n *= x->shape[d];
  return n;
}

orr_dtype orr_sum_dtype(orr_dtype dtype) { return dtype == ORR_F64 ? ORR_F64 : ORR_F32; }

int orr_rule_linear_first(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  const orr_layout *layout = c->in[0]->layout;
  *only = false;
  if (max < 1 || axis >= layout->mesh->n_axes) return 0;
  const orr_place *now = &layout->axis[axis];
  if (now->kind != ORR_PARTIAL || now->op != ORR_SUM) return 0;
  for (int k = 0; k < c->n_in; k++) rows[0].in[k] = (orr_place){.kind = ORR_REPLICATE};
  rows[0].in[0] = *now;
  for (int k = 0; k < c->n_out; k++) rows[0].out[k] = *now;
  return 1;
}

orr_tensor *orr_g_kept(orr_grad *g, orr_tensor *t, const orr_meta *x, unsigned mask,
                       bool keep) {
  orr_meta kept;
  if (keep || !mask || !t) return t;
  orr_infer_reduced(x, mask, true, &kept);
  return orr_g_reshape(g, t, kept.ndim, kept.shape);
}

orr_status orr_then_scale(orr_tensor **t, double s) {
  orr_args args = {.f = {s}};
  return orr_then(t, orr_op_binary(ORR_BIN_mul)->scalar, &args);
}

orr_status orr_then_cast(orr_tensor **t, orr_dtype dtype) {
  orr_args args = {.i = {dtype}};
  return (*t)->meta.dtype == dtype ? ORR_OK : orr_then(t, &orr_op_to, &args);
}

/* ---- the reductions: args.i: mask, keep, 0 or 1 + the output's dtype ---- */

static orr_status infer_reduce(orr_call *c) {
  int kind = c->op->code;
  const orr_meta *x = &c->in[0]->meta;
  unsigned mask = (unsigned)c->args.i[0];
  orr_infer_reduced(x, mask, c->args.i[1] != 0, &c->out_meta[0]);
  orr_dtype *dtype = &c->out_meta[0].dtype;
  if (kind == ORR_REDUCE_ANY || kind == ORR_REDUCE_ALL) *dtype = ORR_BOOL;
  if ((kind == ORR_REDUCE_SUM || kind == ORR_REDUCE_PROD) && !orr_dtype_is_float(*dtype))
    *dtype = ORR_I64;
  if (c->args.i[2]) *dtype = (orr_dtype)(c->args.i[2] - 1);
  bool ordered = kind == ORR_REDUCE_MAX || kind == ORR_REDUCE_MIN;
  if (ordered && orr_mask_count(x, mask) == 0 &&
      orr_numel(c->out_meta[0].ndim, c->out_meta[0].shape) > 0)
    return orr_fail(ORR_EARG, "nothing to compare: the reduced dimensions hold no elements");
  return ORR_OK;
}

static void label_reduce(orr_call *c) {
  orr_label_reduced(c, (unsigned)c->args.i[0], c->args.i[1] != 0,
                    c->op->code == ORR_REDUCE_PROD);
}

static orr_status run_reduce(const orr_work *w, int shard) {
  unsigned mask = (unsigned)w->args.i[0];
  const orr_view *x = orr_work_in(w, shard, 0);
  orr_view y = orr_keep_view(orr_work_out(w, shard, 0), mask, x->ndim);
  w->k->reduce((orr_reduce_kind)w->op->code, x, mask, &y);
  return ORR_OK;
}

static orr_status grad_sum(orr_grad *g) {
  const orr_meta *x = &g->x_meta[0];
  orr_tensor *t = orr_g_kept(g, g->gy[0], x, (unsigned)g->args->i[0], g->args->i[1] != 0);
  g->gx[0] = orr_g_expand(g, t, x->ndim, x->shape);
  return g->status;
}

/* Shared evenly by all elements that equal the result. */
static orr_status grad_extreme(orr_grad *g) {
  unsigned mask = (unsigned)g->args->i[0];
  const orr_meta *m = &g->x_meta[0];
  orr_tensor *y = orr_g_kept(g, g->y[0], m, mask, g->args->i[1] != 0);
  orr_tensor *gy = orr_g_kept(g, g->gy[0], m, mask, g->args->i[1] != 0);
  orr_tensor *same = orr_g(g, orr_op_binary(ORR_BIN_eq), NULL, 2, g->x[0], y);
  orr_tensor *hits = orr_g_cast(g, same, g->gy[0]->meta.dtype);
  orr_tensor *share = orr_g_div(g, gy, orr_g_sum(g, hits, mask, true));
  g->gx[0] = orr_g_mul(g, hits, share);
  return g->status;
}

/* The product of the other elements of each row of t (..., n), without dividing, so that zeros
 * are no special case: running products from both ends. */
static orr_tensor *product_of_others(orr_grad *g, orr_tensor *t) {
  orr_meta one = t->meta;
  int last = one.ndim - 1;
  int64_t n = one.shape[last];
  one.shape[last] = 1;
  orr_args along = {.i = {last}}, flip = {.i = {1, last}};
  orr_args head = {.i = {last, 1, n - 1}}, tail = {.i = {last, 2, n - 1}};
  orr_tensor *ones = orr_g_shift(g, orr_g_zeros(g, &one, t), 1);
  orr_tensor *before[2] = {ones, orr_g(g, &orr_op_narrow, &head, 1, t)};
  orr_tensor *after[2] = {orr_g(g, &orr_op_narrow, &tail, 1, t), ones};
  orr_tensor *left = orr_g_list(g, &orr_op_cat, &along, 0, 2, before);
  orr_tensor *right = orr_g_list(g, &orr_op_cat, &along, 0, 2, after);
  left = orr_g(g, &orr_op_cumprod, &along, 1, left);
  right = orr_g(g, &orr_op_cumprod, &along, 1, orr_g(g, &orr_op_flip, &flip, 1, right));
  return orr_g_mul(g, left, orr_g(g, &orr_op_flip, &flip, 1, right));
}

static orr_status grad_prod(orr_grad *g) {
  unsigned mask = (unsigned)g->args->i[0];
  const orr_meta *x = &g->x_meta[0];
  orr_args order = {.i = {x->ndim}}, back = {.i = {x->ndim}};
  int64_t moved[ORR_MAX_DIM], rows[ORR_MAX_DIM];
  int n = 0, kept = 0;
  if (!mask || orr_numel(x->ndim, x->shape) == 0) {
    g->gx[0] = mask ? orr_g_scale(g, g->x[0], 0) : g->gy[0];
    return g->status;
  }
  for (int reduced = 0; reduced < 2; reduced++)
    for (int d = 0; d < x->ndim; d++) {
      if ((int)(mask >> d & 1) != reduced) continue;
      moved[n] = x->shape[d];
      if (!reduced) rows[kept++] = x->shape[d];
      back.i[1 + d] = n;
      order.i[1 + n++] = d;
    }
  rows[kept] = orr_mask_count(x, mask);
  orr_tensor *gy = orr_g_kept(g, g->gy[0], x, mask, g->args->i[1] != 0);
  orr_tensor *t = orr_g(g, &orr_op_permute, &order, 1, g->x[0]);
  t = orr_g_reshape(g, t, kept + 1, rows);
  if (!t) return g->status;
  t = orr_g_reshape(g, product_of_others(g, t), x->ndim, moved);
  g->gx[0] = orr_g_mul(g, orr_g(g, &orr_op_permute, &back, 1, t), gy);
  return g->status;
}

#define REDUCTION(NAME, KIND, FLAGS, PARTIAL, SAVE, GRAD)                                     \
  {                                                                                           \
    .name = NAME, .code = KIND, .flags = FLAGS, .partial = PARTIAL, .save = SAVE, .n_in = 1,  \
    .n_out = 1, .infer = infer_reduce, .label = label_reduce, .run = run_reduce, .grad = GRAD \
  }

const orr_op orr_op_sum_dims =
    REDUCTION("sum_dims", ORR_REDUCE_SUM, ORR_OP_LINEAR | ORR_OP_WIDE, ORR_SUM, 0, grad_sum);
const orr_op orr_op_max_dims = REDUCTION("max_dims", ORR_REDUCE_MAX, 0, ORR_MAX,
                                         ORR_SAVE_IN(0) | ORR_SAVE_OUT(0), grad_extreme);
const orr_op orr_op_min_dims = REDUCTION("min_dims", ORR_REDUCE_MIN, 0, ORR_MIN,
                                         ORR_SAVE_IN(0) | ORR_SAVE_OUT(0), grad_extreme);
static const orr_op prod_dims =
    REDUCTION("prod_dims", ORR_REDUCE_PROD, 0, ORR_SUM, ORR_SAVE_IN(0), grad_prod);
static const orr_op any_dims =
    REDUCTION("any_dims", ORR_REDUCE_ANY, ORR_OP_NO_GRAD, ORR_MAX, 0, NULL);
static const orr_op all_dims =
    REDUCTION("all_dims", ORR_REDUCE_ALL, ORR_OP_NO_GRAD, ORR_MIN, 0, NULL);

/* ---- Lua: x:sum([d[, keep]]) and its like ---- */

static orr_status compose_reduce(const orr_op *op, orr_tensor *const *in, int n_in,
                                 const orr_args *args, orr_tensor **out) {
  static const orr_op *const made_of[] = {[ORR_REDUCE_SUM] = &orr_op_sum_dims,
                                          [ORR_REDUCE_PROD] = &prod_dims,
                                          [ORR_REDUCE_ANY] = &any_dims,
                                          [ORR_REDUCE_ALL] = &all_dims};
  unsigned mask;
  (void)n_in;
  ORR_TRY(orr_mask_of(op->name, in[0], args->i[0], &mask));
  orr_args over = {.i = {mask, args->i[1]}};
  return orr_call1(made_of[op->code], in[0], &over, out);
}

static orr_status compose_mean(const orr_op *op, orr_tensor *const *in, int n_in,
                               const orr_args *args, orr_tensor **out) {
  unsigned mask;
  const orr_meta *x = &in[0]->meta;
  (void)n_in;
  ORR_TRY(orr_mask_of(op->name, in[0], args->i[0], &mask));
  orr_args over = {.i = {mask, args->i[1], 1 + (int64_t)orr_sum_dtype(x->dtype)}};
  ORR_TRY(orr_call1(&orr_op_sum_dims, in[0], &over, out));
  ORR_TRY(orr_then_scale(out, 1 / (double)orr_mask_count(x, mask)));
  return orr_dtype_is_float(x->dtype) ? orr_then_cast(out, x->dtype) : ORR_OK;
}

#define COMPOSED(NAME, KIND, COMPOSE)                                             \
  {                                                                               \
    .name = NAME, .args = "t d=nil b=false", .code = KIND, .n_in = 1, .n_out = 1, \
    .compose = COMPOSE                                                            \
  }

static const orr_op sum = COMPOSED("sum", ORR_REDUCE_SUM, compose_reduce);
static const orr_op prod = COMPOSED("prod", ORR_REDUCE_PROD, compose_reduce);
static const orr_op any = COMPOSED("any", ORR_REDUCE_ANY, compose_reduce);
static const orr_op all = COMPOSED("all", ORR_REDUCE_ALL, compose_reduce);
static const orr_op mean = COMPOSED("mean", ORR_REDUCE_SUM, compose_mean);

const orr_op *const orr_ops_reduce[] = {&orr_op_sum_dims,
                                        &orr_op_max_dims,
                                        &orr_op_min_dims,
                                        &prod_dims,
                                        &any_dims,
                                        &all_dims,
                                        &sum,
                                        &prod,
                                        &any,
                                        &all,
                                        &mean,
                                        NULL};
