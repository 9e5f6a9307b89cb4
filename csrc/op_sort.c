/* op_sort.c: ops that give indices along one dim: max and min with a dim, argmax and argmin,
 * sort, argsort, topk.
 *
 * Invariant: the dim is whole on each device; indices are i64 and count from 1; of equal
 * elements the first wins. A gradient goes to the elements that were taken.
 * To add one: outputs (values, indices), and scatter_taken for the gradient.
 */
#include <stdlib.h>

#include "../kernels/reduce.h"
#include "../kernels/sort.h"
#include "op_reduce.h"

/* The values' gradient, scattered by the indices that were given out. args.i[0] is the dim. */
static orr_status scatter_taken(orr_grad *g, int64_t d, bool keep) {
  const orr_meta *x = &g->x_meta[0];
  orr_args args = {.i = {d}};
  if (!g->gy[0]) return ORR_OK;
  for (int e = 0; e < x->ndim; e++) args.i[1 + e] = x->shape[e];
  orr_tensor *gy = orr_g_kept(g, g->gy[0], x, 1u << d, keep);
  orr_tensor *indices = orr_g_kept(g, g->y[1], x, 1u << d, keep);
  g->gx[0] = orr_g(g, &orr_op_gather_grad, &args, 2, gy, indices);
  return g->status;
}

/* ---- max_dim, argmax_dim and the least: args.i: d, keep; of two outputs, values first ---- */

static orr_status infer_arg(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  ORR_TRY(orr_need_dim(c->in[0], c->args.i[0]));
  for (int k = 0; k < c->n_out; k++)
    orr_infer_reduced(x, 1u << c->args.i[0], c->args.i[1] != 0, &c->out_meta[k]);
  if (x->shape[c->args.i[0]] == 0 && orr_numel(c->out_meta[0].ndim, c->out_meta[0].shape) > 0)
    return orr_fail(ORR_EARG, "nothing to compare: dimension %lld holds no elements",
                    (long long)c->args.i[0] + 1);
  c->out_meta[c->n_out - 1].dtype = ORR_I64;
  return ORR_OK;
}

static void label_arg(orr_call *c) {
  orr_label_reduced(c, 1u << c->args.i[0], c->args.i[1] != 0, true);
}

static orr_status run_arg(const orr_work *w, int shard) {
  int d = (int)w->args.i[0], last = w->n_out - 1;
  const orr_view *x = orr_work_in(w, shard, 0);
  orr_view indices = orr_keep_view(orr_work_out(w, shard, last), 1u << d, x->ndim), values;
  if (last) values = orr_keep_view(orr_work_out(w, shard, 0), 1u << d, x->ndim);
  w->k->arg_reduce((orr_reduce_kind)w->op->code, x, d, last ? &values : NULL, &indices, 0);
  return ORR_OK;
}

static orr_status grad_arg(orr_grad *g) {
  return scatter_taken(g, g->args->i[0], g->args->i[1] != 0);
}

#define ARG(NAME, KIND, N_OUT, FLAGS)                                                     \
  {                                                                                       \
    .name = NAME, .code = KIND, .flags = FLAGS, .save = N_OUT == 2 ? ORR_SAVE_OUT(1) : 0, \
    .n_in = 1, .n_out = N_OUT, .infer = infer_arg, .label = label_arg, .run = run_arg,    \
    .grad = grad_arg                                                                      \
  }

static const orr_op max_dim = ARG("max_dim", ORR_REDUCE_MAX, 2, 0);
static const orr_op min_dim = ARG("min_dim", ORR_REDUCE_MIN, 2, 0);
static const orr_op argmax_dim = ARG("argmax_dim", ORR_REDUCE_MAX, 1, ORR_OP_NO_GRAD);
static const orr_op argmin_dim = ARG("argmin_dim", ORR_REDUCE_MIN, 1, ORR_OP_NO_GRAD);

/* max(): the greatest of all; max(d[, keep]): values and indices along d. */
static orr_status compose_extreme(const orr_op *op, orr_tensor *const *in, int n_in,
                                  const orr_args *args, orr_tensor **out) {
  bool max = op->code == ORR_REDUCE_MAX;
  (void)n_in;
  out[1] = NULL;
  if (args->i[0] != ORR_NIL) return orr_call1(max ? &max_dim : &min_dim, in[0], args, out);
  orr_args all = {.i = {(1u << in[0]->meta.ndim) - 1, args->i[1]}};
  return orr_call1(max ? &orr_op_max_dims : &orr_op_min_dims, in[0], &all, out);
}

/* argmax(): the place in the flattened tensor; argmax(d[, keep]). */
static orr_status compose_arg(const orr_op *op, orr_tensor *const *in, int n_in,
                              const orr_args *args, orr_tensor **out) {
  const orr_op *along = op->code == ORR_REDUCE_MAX ? &argmax_dim : &argmin_dim;
  (void)n_in;
  if (args->i[0] != ORR_NIL) return orr_call1(along, in[0], args, out);
  orr_args all = {.i = {0, in[0]->meta.ndim - 1}}, first = {.i = {0, false}};
  ORR_TRY(orr_call1(&orr_op_flatten, in[0], &all, out));
  return orr_then(out, along, &first);
}

#define COMPOSED(NAME, KIND, N_OUT, COMPOSE)                                          \
  {                                                                                   \
    .name = NAME, .args = "t d=nil b=false", .code = KIND, .n_in = 1, .n_out = N_OUT, \
    .compose = COMPOSE                                                                \
  }

static const orr_op max_op = COMPOSED("max", ORR_REDUCE_MAX, 2, compose_extreme);
static const orr_op min_op = COMPOSED("min", ORR_REDUCE_MIN, 2, compose_extreme);
static const orr_op argmax = COMPOSED("argmax", ORR_REDUCE_MAX, 1, compose_arg);
static const orr_op argmin = COMPOSED("argmin", ORR_REDUCE_MIN, 1, compose_arg);

/* ---- sort: args.i: d, descending ---- */

static orr_status infer_sort(orr_call *c) {
  ORR_TRY(orr_infer_along(c));
  c->out_meta[1] = c->out_meta[0];
  c->out_meta[1].dtype = ORR_I64;
  return ORR_OK;
}

static orr_status run_sort(const orr_work *w, int shard) {
  return w->k->sort(orr_work_in(w, shard, 0), (int)w->args.i[0], w->args.i[1] != 0,
                    orr_work_out(w, shard, 0), orr_work_out(w, shard, 1));
}

static orr_status grad_sort(orr_grad *g) { return scatter_taken(g, g->args->i[0], true); }

static const orr_op sort = {.name = "sort",
                            .args = "t d=-1 b=false",
                            .save = ORR_SAVE_OUT(1),
                            .n_in = 1,
                            .n_out = 2,
                            .infer = infer_sort,
                            .label = orr_label_along,
                            .run = run_sort,
                            .grad = grad_sort};

static orr_status compose_argsort(const orr_op *op, orr_tensor *const *in, int n_in,
                                  const orr_args *args, orr_tensor **out) {
  orr_tensor *both[2];
  (void)op;
  (void)n_in;
  ORR_TRY(orr_call1(&sort, in[0], args, both));
  orr_tensor_free(both[0]);
  *out = both[1];
  return ORR_OK;
}

static const orr_op argsort = {.name = "argsort",
                               .args = "t d=-1 b=false",
                               .n_in = 1,
                               .n_out = 1,
                               .compose = compose_argsort};

/* ---- topk: args.i: k, d, largest ---- */

static orr_status infer_topk(orr_call *c) {
  int64_t k = c->args.i[0], d = c->args.i[1];
  const orr_meta *x = &c->in[0]->meta;
  ORR_TRY(orr_need_dim(c->in[0], d));
  if (k < 0 || k > x->shape[d])
    return orr_fail(ORR_EARG, "k is %lld and dimension %lld has %lld", (long long)k,
                    (long long)d + 1, (long long)x->shape[d]);
  for (int j = 0; j < 2; j++) {
    c->out_meta[j] = *x;
    c->out_meta[j].shape[d] = k;
  }
  c->out_meta[1].dtype = ORR_I64;
  return ORR_OK;
}

static void label_topk(orr_call *c) { orr_label_reduced(c, 1u << c->args.i[1], true, true); }

static orr_status run_topk(const orr_work *w, int shard) {
  return w->k->topk(orr_work_in(w, shard, 0), (int)w->args.i[1], w->args.i[2] != 0,
                    orr_work_out(w, shard, 0), orr_work_out(w, shard, 1));
}

static orr_status grad_topk(orr_grad *g) { return scatter_taken(g, g->args->i[1], true); }

static const orr_op topk = {.name = "topk",
                            .args = "t i d=-1 b=true",
                            .save = ORR_SAVE_OUT(1),
                            .n_in = 1,
                            .n_out = 2,
                            .infer = infer_topk,
                            .label = label_topk,
                            .run = run_topk,
                            .grad = grad_topk};

const orr_op *const orr_ops_sort[] = {&max_dim, &min_dim, &argmax_dim, &argmin_dim,
                                      &max_op,  &min_op,  &argmax,     &argmin,
                                      &sort,    &argsort, &topk,       NULL};
