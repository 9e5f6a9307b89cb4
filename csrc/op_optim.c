/* op_optim.c: the multi-tensor ops that optimisers and clipping are made of (op_optim.h).
 *
 * Invariant: a call holds tensors of one mesh; parameters keep their placement, states have it
 * and gradients take it. Sums over a list count a replicated element once, a sharded one where
 * it lies, and a Partial one after its reduction.
 * To add an optimiser: unpack its options from args.f in a run function; an op; a step
 * function.
 */
#include "op_optim.h"

#include <math.h>
#include <stdlib.h>

#include "../kernels/reduce.h"
#include "comm.h"
#include "op_capture.h"
#include "op_reduce.h"

/* ---- steps: in: n parameters, n of each state, n gradients; i: n, states a parameter, the
 * optimiser's own, and whether the last state is the master ---- */

enum { HAS_MASTER = 4 };

static orr_status check_item(const orr_call *c, int k, int n, int states) {
  const orr_tensor *p = c->in[k], *g = c->in[n * (1 + states) + k];
  orr_dtype of_state = orr_sum_dtype(p->meta.dtype);
  char text[300];
  for (int s = 0; s <= states + 1; s++) {
    const orr_tensor *t = c->in[s * n + k];
    bool fits = t->meta.ndim == p->meta.ndim;
    for (int d = 0; fits && d < p->meta.ndim; d++) fits = t->meta.shape[d] == p->meta.shape[d];
    if (!fits || !orr_tensor_is_contiguous(t))
      return orr_fail(ORR_EARG, "%s of parameter %d, %s, must be contiguous and of its shape",
                      s == 0   ? "memory"
                      : t == g ? "the gradient"
                               : "a state",
                      k + 1, orr_tensor_text(p, text, sizeof text));
    if (s && t != g && !orr_layout_equal(t->layout, p->layout))
      return orr_fail(ORR_EARG, "a state of parameter %d stands elsewhere than it, %s", k + 1,
                      orr_tensor_text(p, text, sizeof text));
    if (s && t != g && t->meta.dtype != of_state)
      return orr_fail(ORR_EARG, "the states of an %s parameter are %s, not %s",
                      orr_dtype_name(p->meta.dtype), orr_dtype_name(of_state),
                      orr_dtype_name(t->meta.dtype));
  }
  if (c->args.i[HAS_MASTER] && p->meta.dtype != ORR_F16 && p->meta.dtype != ORR_BF16)
    return orr_fail(ORR_EARG, "parameter %d is %s; only f16 and bf16 ones have a master", k + 1,
                    orr_dtype_name(p->meta.dtype));
  if (!orr_dtype_is_float(p->meta.dtype) || g->meta.dtype != p->meta.dtype)
    return orr_fail(ORR_EARG, "parameter %d is %s and its gradient %s", k + 1,
                    orr_dtype_name(p->meta.dtype), orr_dtype_name(g->meta.dtype));
  return ORR_OK;
}

static orr_status infer_step(orr_call *c) {
  int n = (int)c->args.i[0], states = (int)c->args.i[1];
  for (int k = 0; k < n; k++) ORR_TRY(check_item(c, k, n, states));
  c->n_written = n * (1 + states);
  return ORR_OK;
}

/* Parameters stay; the rest stands where they do. */
static int rule_step(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  int n = (int)c->args.i[0];
  *only = true;
  if (max < 1) return 0;
  for (int k = 0; k < c->n_in; k++) rows[0].in[k] = c->in[k % n]->layout->axis[axis];
  return 1;
}

static orr_status items_of(const orr_work *w, int shard, orr_optim_item **out) {
  int n = (int)w->args.i[0], states = (int)w->args.i[1];
  int own = states - (w->args.i[HAS_MASTER] != 0);
  orr_optim_item *item = calloc((size_t)n, sizeof *item);
  if (!item) return orr_fail(ORR_EMEM, "out of host memory for a step of %d parameters", n);
  for (int k = 0; k < n; k++) {
    const orr_view *p = orr_work_in(w, shard, k);
    item[k].param = p->data;
    item[k].dtype = p->dtype;
    item[k].n = orr_numel(p->ndim, p->shape);
    item[k].grad = orr_work_in(w, shard, n * (1 + states) + k)->data;
    for (int s = 0; s < own; s++)
      item[k].state[s] = orr_work_in(w, shard, n * (1 + s) + k)->data;
    if (own < states) item[k].master = orr_work_in(w, shard, n * states + k)->data;
  }
  *out = item;
  return ORR_OK;
}

static orr_status run_sgd(const orr_work *w, int shard) {
  const double *f = w->args.f;
  orr_sgd o = {.lr = f[0],
               .momentum = f[1],
               .dampening = f[2],
               .weight_decay = f[3],
               .grad_scale = f[4],
               .nesterov = w->args.i[2] != 0,
               .first = w->args.i[3] != 0};
  orr_optim_item *item;
  ORR_TRY(items_of(w, shard, &item));
  w->k->sgd(&o, item, (int)w->args.i[0]);
  free(item);
  return ORR_OK;
}

static orr_status run_adam(const orr_work *w, int shard) {
  const double *f = w->args.f;
  orr_adam o = {.lr = f[0],
                .beta1 = f[1],
                .beta2 = f[2],
                .eps = f[3],
                .weight_decay = f[4],
                .t = f[5],
                .grad_scale = f[6],
                .decoupled = w->args.i[2] != 0};
  orr_optim_item *item;
  ORR_TRY(items_of(w, shard, &item));
  w->k->adam(&o, item, (int)w->args.i[0]);
  free(item);
  return ORR_OK;
}

static orr_status run_rmsprop(const orr_work *w, int shard) {
  const double *f = w->args.f;
  orr_rmsprop o = {.lr = f[0],
                   .alpha = f[1],
                   .eps = f[2],
                   .weight_decay = f[3],
                   .momentum = f[4],
                   .grad_scale = f[5],
                   .centered = w->args.i[2] != 0};
  orr_optim_item *item;
  ORR_TRY(items_of(w, shard, &item));
  w->k->rmsprop(&o, item, (int)w->args.i[0]);
  free(item);
  return ORR_OK;
}

#define STEP_FLAGS (ORR_OP_LIST | ORR_OP_ALWAYS_IN_PLACE | ORR_OP_NO_GRAD)

static const orr_op sgd_step = {.name = "sgd_step",
                                .flags = STEP_FLAGS,
                                .infer = infer_step,
                                .rule = rule_step,
                                .run = run_sgd};
static const orr_op adam_step = {.name = "adam_step",
                                 .flags = STEP_FLAGS,
                                 .infer = infer_step,
                                 .rule = rule_step,
                                 .run = run_adam};
static const orr_op rmsprop_step = {.name = "rmsprop_step",
                                    .flags = STEP_FLAGS,
                                    .infer = infer_step,
                                    .rule = rule_step,
                                    .run = run_rmsprop};

/* ---- lists in groups ---- */

/* Tensors that one call may hold together stand together; from[k]: where in the list. */
typedef struct group {
  int n;
  int *from;
} group;

static bool same_axes(const orr_tensor *a, const orr_tensor *b) {
  for (int k = 0; k < a->layout->mesh->n_axes; k++)
    if ((a->layout->axis[k].kind == ORR_SHARD) != (b->layout->axis[k].kind == ORR_SHARD))
      return false;
  return true;
}

/* Fills g->from with the tensors like list[first] that no group before it took. */
static void take_group(orr_tensor *const *list, int n, int first, bool by_axes, bool *taken,
                       group *g) {
  g->n = 0;
  for (int k = first; k < n; k++) {
    if (taken[k] || list[k]->layout->mesh != list[first]->layout->mesh) continue;
    if (by_axes && !same_axes(list[k], list[first])) continue;
    taken[k] = true;
    g->from[g->n++] = k;
  }
}

typedef orr_status group_fn(void *arg, orr_tensor *const *list, const group *g);

static orr_status each_group(orr_tensor *const *list, int n, bool by_axes, group_fn *fn,
                             void *arg) {
  int *from = malloc((size_t)(n + 1) * (sizeof *from + sizeof(bool)));
  if (!from) return orr_fail(ORR_EMEM, "out of host memory for a list of %d tensors", n);
  bool *taken = (bool *)(from + n + 1);
  orr_status status = ORR_OK;
  for (int k = 0; k < n; k++) taken[k] = false;
  for (int k = 0; k < n && !status; k++) {
    group g = {.from = from};
    if (taken[k]) continue;
    take_group(list, n, k, by_axes, taken, &g);
    status = fn(arg, list, &g);
  }
  free(from);
  return status;
}

typedef struct step {
  const orr_op *op;
  const orr_optim_lists *lists;
  orr_args args;
} step;

/* The gradient as the step reads it: placed as its parameter and dense. *owned: NULL where it
 * already is. */
static orr_status settle_grad(const orr_tensor *param, orr_tensor *grad, orr_tensor **owned) {
  orr_tensor *moved = NULL;
  *owned = NULL;
  if (!orr_layout_equal(grad->layout, param->layout)) {
    ORR_TRY(orr_redistribute(grad, param->layout, &moved));
    grad = moved;
  }
  if (orr_tensor_is_contiguous(grad)) {
    *owned = moved;
    return ORR_OK;
  }
  orr_status status = orr_tensor_copy_local(grad, owned);
  if (moved) orr_tensor_free(moved);
  return status;
}

/* in: the group's tensors; gradients that had to be moved or packed stand, owned, at its
 * end. */
static orr_status dispatch_step(const step *s, const group *g, orr_tensor **in) {
  int n = g->n, states = s->lists->n_states, made = 0;
  orr_status status = ORR_OK;
  orr_args args = s->args;
  args.i[0] = n;
  args.i[1] = states;
  args.i[HAS_MASTER] = s->lists->has_master;
  orr_tensor **owned = in + n * (2 + states);
  for (int k = 0; k < n && !status; k++) {
    orr_tensor *grad = s->lists->grad[g->from[k]];
    in[k] = s->lists->param[g->from[k]];
    for (int j = 0; j < states; j++) in[n * (1 + j) + k] = s->lists->state[j][g->from[k]];
    status = settle_grad(in[k], grad, &owned[made]);
    if (!status && owned[made]) grad = owned[made++];
    in[n * (1 + states) + k] = grad;
  }
  if (!status) status = orr_dispatch(s->op, in, n * (2 + states), &args, false, NULL);
  while (made) orr_tensor_free(owned[--made]);
  return status;
}

static orr_status step_group(void *arg, orr_tensor *const *list, const group *g) {
  const step *s = arg;
  (void)list;
  size_t room = (size_t)g->n * (size_t)(3 + s->lists->n_states);
  orr_tensor **in = malloc(room * sizeof *in);
  if (!in) return orr_fail(ORR_EMEM, "out of host memory for a step of %d parameters", g->n);
  orr_status status = dispatch_step(s, g, in);
  free(in);
  return status;
}

/* Where state is sharded, a device updates its slices of the parameters and gets the
 * others'. */
static orr_status step_slices(step *s) {
  const orr_optim_lists *lists = s->lists;
  orr_optim_lists sliced = *lists;
  orr_tensor **slice = malloc((size_t)lists->n * sizeof *slice);
  if (!slice)
    return orr_fail(ORR_EMEM, "out of host memory for a step of %d parameters", lists->n);
  orr_status status = orr_zero_slices(lists->param, lists->n, slice);
  if (status) {
    free(slice);
    return status;
  }
  sliced.param = slice;
  s->lists = &sliced;
  status = each_group(slice, lists->n, false, step_group, s);
  if (!status) status = orr_zero_put_back(lists->param, slice, lists->n);
  for (int k = 0; k < lists->n; k++) orr_tensor_free(slice[k]);
  free(slice);
  return status;
}

static orr_status run_step(const orr_op *op, const orr_optim_lists *lists,
                           const orr_args *args) {
  step s = {.op = op, .lists = lists, .args = *args};
  orr_status status;
  if (orr_capture_feed(op, lists, args, &status)) return status;
  ORR_TRY(orr_capture_optim(op, lists, args));
  bool was = orr_set_grad_mode(false), sliced = false;
  for (int k = 0; k < lists->n; k++) sliced = sliced || lists->param[k]->state_layout;
  status = sliced ? step_slices(&s) : each_group(lists->param, lists->n, false, step_group, &s);
  orr_set_grad_mode(was);
  orr_capture_optim_end();
  return status;
}

orr_status orr_sgd_step(const orr_optim_lists *lists, const orr_sgd *o) {
  orr_args args = {.i = {0, 0, o->nesterov, o->first},
                   .f = {o->lr, o->momentum, o->dampening, o->weight_decay, o->grad_scale}};
  return run_step(&sgd_step, lists, &args);
}

orr_status orr_adam_step(const orr_optim_lists *lists, const orr_adam *o) {
  orr_args args = {
      .i = {0, 0, o->decoupled},
      .f = {o->lr, o->beta1, o->beta2, o->eps, o->weight_decay, o->t, o->grad_scale}};
  return run_step(&adam_step, lists, &args);
}

orr_status orr_rmsprop_step(const orr_optim_lists *lists, const orr_rmsprop *o) {
  orr_args args = {.i = {0, 0, o->centered},
                   .f = {o->lr, o->alpha, o->eps, o->weight_decay, o->momentum, o->grad_scale}};
  return run_step(&rmsprop_step, lists, &args);
}

/* ---- one number of a list ---- */

static orr_status infer_number(orr_call *c) {
  for (int k = 0; k < c->n_in; k++) ORR_TRY(orr_need_float(c, k));
  c->out_meta[0] = (orr_meta){.dtype = ORR_F64};
  return ORR_OK;
}

/* Shards stay, each giving its own part; all else is whole. */
static int rule_number(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  const orr_place whole = {.kind = ORR_REPLICATE};
  *only = true;
  if (max < 1) return 0;
  rows[0].out[0] = whole;
  for (int k = 0; k < c->n_in; k++) {
    const orr_place *now = &c->in[k]->layout->axis[axis];
    rows[0].in[k] = now->kind == ORR_SHARD ? *now : whole;
    if (now->kind == ORR_SHARD)
      rows[0].out[0] = (orr_place){.kind = ORR_PARTIAL, .op = c->op->partial};
  }
  return 1;
}

/* NaN wins. */
static double larger(double a, double b) { return a != a || a > b ? a : b; }

/* The first n inputs, as a list. Owned. */
static orr_status views_of(const orr_work *w, int shard, int n, const orr_view ***out) {
  *out = malloc((size_t)n * sizeof **out + 1);
  if (!*out) return orr_fail(ORR_EMEM, "out of host memory for a list of %d tensors", n);
  for (int k = 0; k < n; k++) (*out)[k] = orr_work_in(w, shard, k);
  return ORR_OK;
}

/* args.f[0]: p. */
static orr_status run_number(const orr_work *w, int shard) {
  const orr_view **xs;
  ORR_TRY(views_of(w, shard, w->n_in, &xs));
  if (w->op->code) w->k->list_bad(xs, w->n_in, orr_work_out(w, shard, 0));
  else w->k->list_norm(xs, w->n_in, w->args.f[0], orr_work_out(w, shard, 0));
  free(xs);
  return ORR_OK;
}

#define NUMBER_FLAGS (ORR_OP_LIST | ORR_OP_NO_GRAD)

static const orr_op list_sum = {.name = "list_norm",
                                .flags = NUMBER_FLAGS,
                                .partial = ORR_SUM,
                                .n_out = 1,
                                .infer = infer_number,
                                .rule = rule_number,
                                .run = run_number};
static const orr_op list_max = {.name = "list_norm_max",
                                .flags = NUMBER_FLAGS,
                                .partial = ORR_MAX,
                                .n_out = 1,
                                .infer = infer_number,
                                .rule = rule_number,
                                .run = run_number};
static const orr_op list_bad = {.name = "list_finite",
                                .code = 1,
                                .flags = NUMBER_FLAGS,
                                .partial = ORR_SUM,
                                .n_out = 1,
                                .infer = infer_number,
                                .rule = rule_number,
                                .run = run_number};

typedef struct number {
  const orr_op *op;
  double p, total;
  orr_tensor **part; /* one a group, so that all devices work before the first is waited for */
  int n;
} number;

static orr_status number_group(void *arg, orr_tensor *const *list, const group *g) {
  number *s = arg;
  orr_args args = {.f = {s->p}};
  orr_tensor **in = malloc((size_t)g->n * sizeof *in);
  if (!in) return orr_fail(ORR_EMEM, "out of host memory for a list of %d tensors", g->n);
  for (int k = 0; k < g->n; k++) in[k] = list[g->from[k]];
  orr_status status = orr_dispatch(s->op, in, g->n, &args, false, &s->part[s->n]);
  free(in);
  if (!status) s->n++;
  return status;
}

static orr_status add_part(number *s, orr_tensor *part) {
  orr_tensor *host;
  orr_view v;
  ORR_TRY(orr_tensor_full(part, &host));
  orr_tensor_view(host, 0, &v);
  double value = orr_k_get(&v, 0);
  orr_tensor_free(host);
  s->total = isinf(s->p) ? larger(s->total, value) : s->total + value;
  return ORR_OK;
}

static orr_status number_of(orr_tensor *const *list, int n, number *s) {
  s->part = calloc((size_t)n + 1, sizeof(orr_tensor *));
  if (!s->part) return orr_fail(ORR_EMEM, "out of host memory for a list of %d tensors", n);
  orr_status status = each_group(list, n, true, number_group, s);
  for (int k = 0; k < s->n; k++) {
    if (!status) status = add_part(s, s->part[k]);
    orr_tensor_free(s->part[k]);
  }
  free(s->part);
  return status;
}

orr_status orr_list_norm(orr_tensor *const *list, int n, double p, double *norm) {
  number s = {.op = isinf(p) ? &list_max : &list_sum, .p = p};
  if (!(p > 0)) return orr_fail(ORR_EARG, "grad_norm: p must be above 0, and is %g", p);
  ORR_TRY(number_of(list, n, &s));
  *norm = isinf(p) ? s.total : p == 2 ? sqrt(s.total) : pow(s.total, 1 / p);
  return ORR_OK;
}

orr_status orr_list_finite(orr_tensor *const *list, int n, bool *finite) {
  number s = {.op = &list_bad};
  ORR_TRY(number_of(list, n, &s));
  *finite = s.total == 0;
  return ORR_OK;
}

/* ---- scaling: in: the tensors, then (args.i[0]) the factor ---- */

static orr_status infer_scale(orr_call *c) {
  c->n_written = c->n_in - (int)c->args.i[0];
  for (int k = 0; k < c->n_in; k++) ORR_TRY(orr_need_float(c, k));
  if (c->args.i[0] && orr_tensor_numel(c->in[c->n_in - 1]) != 1)
    return orr_fail(ORR_EARG, "the factor must be one number");
  return ORR_OK;
}

static int rule_scale(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  int n = c->n_in - (int)c->args.i[0];
  *only = true;
  if (max < 1) return 0;
  for (int k = 0; k < n; k++) rows[0].in[k] = c->in[k]->layout->axis[axis];
  if (n < c->n_in) rows[0].in[n] = (orr_place){.kind = ORR_REPLICATE};
  return 1;
}

static orr_status run_scale(const orr_work *w, int shard) {
  int n = w->n_in - (int)w->args.i[0];
  const orr_view **xs;
  ORR_TRY(views_of(w, shard, n, &xs));
  w->k->list_scale(xs, n, n < w->n_in ? orr_work_in(w, shard, n) : NULL, w->args.f[0]);
  free(xs);
  return ORR_OK;
}

static const orr_op list_scale = {.name = "list_scale",
                                  .flags = STEP_FLAGS,
                                  .infer = infer_scale,
                                  .rule = rule_scale,
                                  .run = run_scale};

typedef struct scaling {
  orr_tensor *by;
  double factor;
} scaling;

static orr_status scale_group(void *arg, orr_tensor *const *list, const group *g) {
  const scaling *s = arg;
  orr_args args = {.i = {s->by != NULL}, .f = {s->factor}};
  const orr_mesh *mesh = list[g->from[0]]->layout->mesh;
  orr_tensor *by = NULL;
  orr_tensor **in = malloc((size_t)(g->n + 1) * sizeof *in);
  if (!in) return orr_fail(ORR_EMEM, "out of host memory for a list of %d tensors", g->n);
  for (int k = 0; k < g->n; k++) in[k] = list[g->from[k]];
  orr_status status = ORR_OK;
  if (s->by) status = orr_redistribute(s->by, orr_layout_replicate(mesh), &by);
  in[g->n] = by;
  if (!status) status = orr_dispatch(&list_scale, in, g->n + (by != NULL), &args, false, NULL);
  if (by) orr_tensor_free(by);
  free(in);
  return status;
}

orr_status orr_list_scale(orr_tensor *const *list, int n, orr_tensor *by, double factor) {
  scaling s = {.by = by, .factor = factor};
  return each_group(list, n, false, scale_group, &s);
}

const orr_op *const orr_ops_optim[] = {&sgd_step, &adam_step, &rmsprop_step, &list_sum,
                                       &list_max, &list_bad,  &list_scale,   NULL};
