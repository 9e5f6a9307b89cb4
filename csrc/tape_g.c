/* tape_g.c: running one node's gradient formula, and the orr_g* calls that formulas are made
 * of.
 *
 * Invariant: what orr_g* returns is borrowed from the formula's scope, which ends with it; a
 * gradient comes out with the shape and dtype of its input: un-broadcasting happens here, once.
 * To add a short form: orr_g_name, calling orr_g.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/elementwise.h"
#include "op.h"
#include "tape.h"

orr_tensor *orr_g_keep(orr_grad *g, orr_tensor *take_t) {
  if (g->n_scope == g->cap_scope) {
    int cap = 2 * g->cap_scope;
    orr_tensor **scope = malloc((size_t)cap * sizeof *scope);
    if (!scope) {
      orr_tensor_free(take_t);
      g->status = orr_fail(ORR_EMEM, "out of host memory for a gradient formula");
      return NULL;
    }
    memcpy(scope, g->scope, (size_t)g->n_scope * sizeof *scope);
    if (g->cap_scope > ORR_SMALL_SCOPE) free(g->scope);
    g->scope = scope;
    g->cap_scope = cap;
  }
  return g->scope[g->n_scope++] = take_t;
}

static orr_tensor *call(orr_grad *g, const orr_op *op, const orr_args *args, int which, int n,
                        orr_tensor **in) {
  orr_tensor *out[ORR_MAX_OUT];
  if (g->status) return NULL;
  g->status = orr_dispatch(op, in, n, args, false, out);
  if (g->status) return NULL;
  int n_out = op->n_out ? op->n_out : 1;
  for (int k = 0; k < n_out; k++)
    if (k != which) orr_tensor_free(out[k]);
  return orr_g_keep(g, out[which]);
}

orr_tensor *orr_g_list(orr_grad *g, const orr_op *op, const orr_args *args, int which, int n,
                       orr_tensor *const *in) {
  orr_tensor *x[8];
  for (int k = 0; k < n; k++) x[k] = in[k];
  return call(g, op, args, which, n, x);
}

orr_tensor *orr_g(orr_grad *g, const orr_op *op, const orr_args *args, int n_in, ...) {
  orr_tensor *in[8];
  va_list ap;
  va_start(ap, n_in);
  for (int k = 0; k < n_in; k++) in[k] = va_arg(ap, orr_tensor *);
  va_end(ap);
  return call(g, op, args, 0, n_in, in);
}

orr_tensor *orr_g_out(orr_grad *g, const orr_op *op, const orr_args *args, int which, int n_in,
                      ...) {
  orr_tensor *in[8];
  va_list ap;
  va_start(ap, n_in);
  for (int k = 0; k < n_in; k++) in[k] = va_arg(ap, orr_tensor *);
  va_end(ap);
  return call(g, op, args, which, n_in, in);
}

orr_tensor *orr_g_add(orr_grad *g, orr_tensor *a, orr_tensor *b) {
  return orr_g(g, orr_op_binary(ORR_BIN_add), NULL, 2, a, b);
}

orr_tensor *orr_g_sub(orr_grad *g, orr_tensor *a, orr_tensor *b) {
  return orr_g(g, orr_op_binary(ORR_BIN_sub), NULL, 2, a, b);
}

orr_tensor *orr_g_mul(orr_grad *g, orr_tensor *a, orr_tensor *b) {
  return orr_g(g, orr_op_binary(ORR_BIN_mul), NULL, 2, a, b);
}

orr_tensor *orr_g_div(orr_grad *g, orr_tensor *a, orr_tensor *b) {
  return orr_g(g, orr_op_binary(ORR_BIN_div), NULL, 2, a, b);
}

orr_tensor *orr_g_scale(orr_grad *g, orr_tensor *a, double s) {
  orr_args args = {.f = {s}};
  return orr_g(g, orr_op_binary(ORR_BIN_mul)->scalar, &args, 1, a);
}

orr_tensor *orr_g_shift(orr_grad *g, orr_tensor *a, double s) {
  orr_args args = {.f = {s}};
  return orr_g(g, orr_op_binary(ORR_BIN_add)->scalar, &args, 1, a);
}

orr_tensor *orr_g_unary(orr_grad *g, int code, orr_tensor *a) {
  return orr_g(g, orr_op_unary(code), NULL, 1, a);
}

static void list_args(orr_args *args, int n, const int64_t *items) {
  memset(args, 0, sizeof *args);
  args->i[0] = n;
  for (int k = 0; k < n; k++) args->i[1 + k] = items[k];
}

orr_tensor *orr_g_reshape(orr_grad *g, orr_tensor *a, int ndim, const int64_t *shape) {
  orr_args args;
  list_args(&args, ndim, shape);
  return orr_g(g, &orr_op_reshape, &args, 1, a);
}

orr_tensor *orr_g_expand(orr_grad *g, orr_tensor *a, int ndim, const int64_t *shape) {
  orr_args args;
  list_args(&args, ndim, shape);
  return orr_g(g, &orr_op_expand, &args, 1, a);
}

orr_tensor *orr_g_sum(orr_grad *g, orr_tensor *a, unsigned dims, bool keep_dims) {
  orr_args args = {.i = {dims, keep_dims}};
  return orr_g(g, &orr_op_sum_dims, &args, 1, a);
}

orr_tensor *orr_g_transpose(orr_grad *g, orr_tensor *a, int d0, int d1) {
  orr_args args = {.i = {d0, d1}};
  return orr_g(g, &orr_op_transpose, &args, 1, a);
}

orr_tensor *orr_g_zeros(orr_grad *g, const orr_meta *meta, const orr_tensor *like_layout) {
  orr_tensor *out;
  orr_args args = {.f = {0}};
  const orr_mesh *mesh = like_layout->layout->mesh;
  orr_layout *layout =
      mesh->n_axes ? orr_layout_replicate(mesh) : orr_layout_single(mesh->device[0]);
  if (g->status) return NULL;
  g->status = orr_create(&orr_op_full, meta, layout, &args, &out);
  return g->status ? NULL : orr_g_keep(g, out);
}

orr_tensor *orr_g_cast(orr_grad *g, orr_tensor *a, orr_dtype dtype) {
  if (!a || a->meta.dtype == dtype) return a;
  orr_args args = {.i = {dtype}};
  return orr_g(g, &orr_op_to, &args, 1, a);
}

/* Sums g over the dims that broadcasting added or repeated, back to `to`. */
static orr_tensor *unbroadcast(orr_grad *g, orr_tensor *t, const orr_meta *to) {
  const orr_meta *from = &t->meta;
  int lead = from->ndim - to->ndim;
  unsigned dims = 0;
  for (int d = 0; d < from->ndim; d++)
    if (d < lead || (to->shape[d - lead] == 1 && from->shape[d] != 1)) dims |= 1u << d;
  if (dims) t = orr_g_sum(g, t, dims, true);
  if (lead && t) t = orr_g_reshape(g, t, to->ndim, to->shape);
  return t;
}

static orr_status check_saved(const orr_node *node) {
  if (node->spent)
    return orr_fail(ORR_EARG,
                    "backward a second time through %s: what it saved was freed; pass "
                    "retain to the first backward",
                    node->op->name);
  bool stale = false;
  for (int k = 0; k < node->n_in; k++)
    stale = stale || (node->x[k] && orr_saved_version(node->x[k]) != node->x_version[k]);
  for (int k = 0; k < node->n_out; k++)
    stale = stale || (node->y[k] && node->y[k]->storage->version != node->y_version[k]);
  if (stale)
    return orr_fail(ORR_EARG,
                    "backward of %s: a value that it saved was overwritten by an "
                    "in-place operation since; use the form without _",
                    node->op->name);
  return ORR_OK;
}

/* Saved outputs belong to the graph again while a differentiable formula runs. */
static void attach_outputs(orr_node *node, bool on) {
  for (int k = 0; k < node->n_out; k++) {
    orr_tensor *y = node->y[k];
    if (!y || on == (y->node != NULL)) continue;
    y->requires_grad = on;
    y->node = on ? node : NULL;
    y->out_index = k;
    node->rc += on ? 1 : -1;
  }
}

/* The saved inputs with their values: those that were gathered are gathered again. *x is
 * node->x where there are none; a view's formula reads no values. */
static orr_status saved_inputs(orr_node *node, orr_tensor ***x) {
  bool ghosts = false;
  *x = node->x;
  for (int k = 0; k < node->n_in; k++)
    ghosts = ghosts || (node->x[k] && orr_tensor_is_ghost(node->x[k]));
  if (!ghosts || node->op->flags & ORR_OP_VIEW) return ORR_OK;
  orr_tensor **made = calloc((size_t)node->n_in, sizeof *made);
  if (!made) return orr_fail(ORR_EMEM, "out of host memory for a gradient formula");
  orr_status status = ORR_OK;
  for (int k = 0; k < node->n_in && !status; k++) {
    if (!node->x[k]) continue;
    if (orr_tensor_is_ghost(node->x[k])) status = orr_zero_revive(node->x[k], &made[k]);
    else made[k] = orr_tensor_ref(node->x[k]);
  }
  *x = made;
  return status;
}

static void drop_inputs(orr_node *node, orr_tensor **take_x) {
  if (take_x == node->x) return;
  for (int k = 0; k < node->n_in; k++) orr_tensor_free(take_x[k]);
  free(take_x);
}

static orr_status run_formula(orr_node *node, bool create_graph, orr_tensor *const *sum,
                              orr_tensor **gx) {
  if (!node->op->grad)
    return orr_fail(ORR_EARG, "%s has no gradient%s", node->op->name,
                    create_graph ? " of its gradient" : "");
  if (create_graph && node->op->flags & ORR_OP_FUSED_GRAD)
    return orr_fail(ORR_EARG,
                    "%s has a fused gradient, which has no gradient of its own: "
                    "create_graph is not possible through it",
                    node->op->name);
  orr_tensor *small[ORR_SMALL_SCOPE];
  orr_grad g = {.node = node,
                .op = node->op,
                .args = &node->args,
                .n_in = node->n_in,
                .n_out = node->n_out,
                .x_meta = node->x_meta,
                .x_layout = node->x_layout,
                .needs = node->needs,
                .gx = gx,
                .sum = sum,
                .create_graph = create_graph,
                .scope = small,
                .cap_scope = ORR_SMALL_SCOPE};
  orr_status status = saved_inputs(node, &g.x);
  memcpy(g.y, node->y, sizeof g.y);
  memcpy(g.gy, node->gy, sizeof g.gy);
  if (create_graph) attach_outputs(node, true);
  if (!status) status = node->op->grad(&g);
  if (!status) status = g.status;
  for (int k = 0; k < node->n_in; k++) {
    if (!gx[k]) continue;
    if (!node->needs[k]) gx[k] = NULL;
    if (gx[k] && !status) gx[k] = unbroadcast(&g, gx[k], &node->x_meta[k]);
    if (gx[k] && !status) gx[k] = orr_g_cast(&g, gx[k], node->x_meta[k].dtype);
    if (!status) status = g.status;
    if (status) gx[k] = NULL;
    if (gx[k]) orr_tensor_ref(gx[k]);
  }
  if (create_graph) attach_outputs(node, false);
  for (int k = 0; k < g.n_scope; k++) orr_tensor_free(g.scope[k]);
  drop_inputs(node, g.x);
  if (g.cap_scope > ORR_SMALL_SCOPE) free(g.scope);
  return status;
}

orr_status orr_node_run(orr_node *node, bool create_graph, orr_tensor *const *sum,
                        orr_tensor **gx) {
  orr_status status = check_saved(node);
  if (!status && node->custom.backward)
    status = node->custom.backward(node->custom.state, node->n_out, node->gy, node->n_in, gx);
  else if (!status) status = run_formula(node, create_graph, sum, gx);
  if (status && node->source)
    orr_fail_in(status, "recorded at %s:%d", node->source, node->line);
  return status;
}
