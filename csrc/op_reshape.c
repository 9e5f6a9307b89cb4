/* op_reshape.c: view, reshape and flatten; cat, and the gradient of narrow (zeros around it).
 *
 * Invariant: a reshape of a sharded tensor is local where the sharded dim leads its group of
 * merged or split dims and its bounds fall on the new dim's; otherwise placing gathers that dim
 * first.
 * To add a reshaping op: compute the shape, call reshape_to.
 */
#include <string.h>

#include "../kernels/copy.h"
#include "../kernels/elementwise.h"
#include "op.h"
#include "op_view.h"

/* ---- view and reshape: args.i[0] n, then sizes; one may be -1 ---- */

static orr_status infer_view(orr_call *c) {
  const orr_meta *x = &c->in[0]->meta;
  orr_meta *y = &c->out_meta[0];
  int64_t known = 1, total = orr_numel(x->ndim, x->shape);
  int open = -1;
  if (c->args.i[0] > ORR_MAX_DIM)
    return orr_fail(ORR_EARG, "at most %d dimensions are possible", ORR_MAX_DIM);
  y->dtype = x->dtype;
  y->ndim = (int)c->args.i[0];
  for (int d = 0; d < y->ndim; d++) {
    y->shape[d] = c->args.i[1 + d];
    if (y->shape[d] == -1 && open < 0) open = d;
    else if (y->shape[d] < 0) return orr_fail(ORR_EARG, "only one size may be -1");
    else known *= y->shape[d];
  }
  if (open >= 0) y->shape[open] = known > 0 ? total / known : 0;
  if (orr_numel(y->ndim, y->shape) != total) {
    char want[128];
    if (open >= 0) y->shape[open] = -1;
    return orr_fail(ORR_EARG, "%lld elements do not fill the shape %s", (long long)total,
                    orr_shape_text(y->ndim, y->shape, want, sizeof want));
  }
  return ORR_OK;
}

/* A run of input dims [i0, i1) that holds the same elements as output dims [j0, j1). */
typedef struct group {
  int i0, i1, j0, j1;
} group;

static int groups_of(const orr_meta *x, const orr_meta *y, group *out) {
  int n = 0, i = 0, j = 0;
  while (i < x->ndim && j < y->ndim) {
    group g = {i, i + 1, j, j + 1};
    int64_t a = x->shape[i], b = y->shape[j];
    while (a != b && (g.i1 < x->ndim || g.j1 < y->ndim)) {
      if (a < b && g.i1 < x->ndim) a *= x->shape[g.i1++];
      else if (g.j1 < y->ndim) b *= y->shape[g.j1++];
      else break;
    }
    if (a != b) break;
    i = g.i1;
    j = g.j1;
    out[n++] = g;
  }
  return n;
}

static int leading(const int64_t *shape, int from, int to) {
  while (from < to - 1 && shape[from] == 1) from++;
  return from;
}

/* Local rows for the dim that is sharded now. */
static int rule_view(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  static int64_t moved[ORR_MAX_AXES][ORR_MAX_DEVICES + 1];
  const orr_meta *x = &c->in[0]->meta, *y = &c->out_meta[0];
  const orr_layout *layout = c->in[0]->layout;
  *only = false;
  if (max < 1 || axis >= layout->mesh->n_axes) return 0;
  const orr_place *p = &layout->axis[axis];
  bool nested = axis == 1 && layout->axis[0].kind == ORR_SHARD && layout->axis[0].dim == p->dim;
  if (p->kind != ORR_SHARD || nested || orr_numel(x->ndim, x->shape) == 0) return 0;
  group g[ORR_MAX_DIM];
  int n = groups_of(x, y, g);
  for (int k = 0; k < n; k++) {
    int in = leading(x->shape, g[k].i0, g[k].i1), out = leading(y->shape, g[k].j0, g[k].j1);
    if (in != p->dim) continue;
    int64_t inner_in = orr_numel(g[k].i1 - in - 1, x->shape + in + 1);
    int64_t inner_out = orr_numel(g[k].j1 - out - 1, y->shape + out + 1);
    for (int b = 0; b <= layout->mesh->size[axis]; b++) {
      int64_t at = p->bounds[b] * inner_in;
      if (at % inner_out) return 0;
      moved[axis][b] = at / inner_out;
    }
    rows[0].in[0] = *p;
    rows[0].out[0] = (orr_place){.kind = ORR_SHARD, .dim = out, .bounds = moved[axis]};
    return 1;
  }
  return 0;
}

static orr_status view_view(const orr_call *c, int shard, orr_shard *out) {
  const orr_shard *s = &c->in[0]->shard[shard];
  out->offset = s->offset;
  if (!orr_view_strides(c->in[0]->meta.ndim, s->shape, s->stride, c->out_meta[0].ndim,
                        out->shape, out->stride))
    return orr_fail(ORR_EARG,
                    "its strides do not allow this shape without a copy; use reshape");
  return ORR_OK;
}

static orr_status grad_view(orr_grad *g) {
  g->gx[0] = orr_g_reshape(g, g->gy[0], g->x_meta[0].ndim, g->x_meta[0].shape);
  return g->status;
}

#define VIEW(NAME, ARGS)                                                                     \
  {                                                                                          \
    .name = NAME, .args = ARGS, .flags = ORR_OP_VIEW | ORR_OP_LINEAR, .n_in = 1, .n_out = 1, \
    .infer = infer_view, .rule = rule_view, .view = view_view, .grad = grad_view             \
  }
const orr_op orr_op_view = VIEW("view", "t L");
static const orr_op view_by_reshape = VIEW("reshape", NULL); /* for its errors */

/* Whether the shards are dense and row-major, and stay so when placing gathers them: the stride
 * of a dim that is 1 on a shard alone then orders the whole. */
static bool is_row_major(const orr_tensor *t) {
  if (!orr_tensor_is_contiguous(t)) return false;
  if (orr_tensor_is_single(t)) return true;
  for (int r = 0; r < t->n; r++) {
    int64_t outer = INT64_MAX;
    for (int d = 0; d < t->meta.ndim; d++) {
      if (t->meta.shape[d] == 1) continue;
      if (t->shard[r].stride[d] > outer) return false;
      outer = t->shard[r].stride[d];
    }
  }
  return true;
}

static orr_status compose_reshape(const orr_op *op, orr_tensor *const *in, int n_in,
                                  const orr_args *args, orr_tensor **out) {
  (void)op;
  (void)n_in;
  if (is_row_major(in[0])) return orr_call1(&view_by_reshape, in[0], args, out);
  orr_tensor *packed;
  ORR_TRY(orr_call1(&orr_op_pack, in[0], NULL, &packed));
  orr_status status = orr_call1(&view_by_reshape, packed, args, out);
  orr_tensor_free(packed);
  return status;
}

const orr_op orr_op_reshape = {
    .name = "reshape", .args = "t L", .n_in = 1, .n_out = 1, .compose = compose_reshape};

/* flatten(first, last): the dims between become one. */
static orr_status compose_flatten(const orr_op *op, orr_tensor *const *in, int n_in,
                                  const orr_args *args, orr_tensor **out) {
  const orr_meta *x = &in[0]->meta;
  int64_t a = args->i[0], b = args->i[1], joined = 1;
  orr_args shape = {.i = {0}};
  if (x->ndim == 0) {
    shape.i[0] = shape.i[1] = 1;
    return compose_reshape(op, in, n_in, &shape, out);
  }
  if (a < 0 || b >= x->ndim || a > b)
    return orr_fail(ORR_EARG, "flatten: dimensions %lld to %lld of a tensor with %d",
                    (long long)a + 1, (long long)b + 1, x->ndim);
  for (int d = 0; d < x->ndim; d++) {
    if (d >= a && d <= b) joined *= x->shape[d];
    if (d < a || d > b) shape.i[++shape.i[0]] = x->shape[d];
    else if (d == b) shape.i[++shape.i[0]] = joined;
  }
  return compose_reshape(op, in, n_in, &shape, out);
}

const orr_op orr_op_flatten = {
    .name = "flatten", .args = "t d=1 d=-1", .n_in = 1, .n_out = 1, .compose = compose_flatten};

/* squeeze([d]): drops dim d if it has size 1, or every such dim. */
static orr_status compose_squeeze(const orr_op *op, orr_tensor *const *in, int n_in,
                                  const orr_args *args, orr_tensor **out) {
  (void)op;
  (void)n_in;
  orr_tensor *t = orr_tensor_ref(in[0]);
  for (int d = t->meta.ndim - 1; d >= 0; d--) {
    if (t->meta.shape[d] != 1 || (args->i[0] != ORR_NIL && args->i[0] != d)) continue;
    orr_args dim = {.i = {d}};
    orr_tensor *next;
    orr_status status = orr_call1(&orr_op_squeeze, t, &dim, &next);
    orr_tensor_free(t);
    if (status) return status;
    t = next;
  }
  *out = t;
  return ORR_OK;
}

const orr_op orr_op_squeeze_all = {
    .name = "squeeze", .args = "t d=nil", .n_in = 1, .n_out = 1, .compose = compose_squeeze};

/* ---- narrow's gradient: args.i = dim, first, n, whole size; zeros around g ---- */

static orr_status infer_narrow_grad(orr_call *c) {
  c->out_meta[0] = c->in[0]->meta;
  c->out_meta[0].shape[c->args.i[0]] = c->args.i[3];
  return ORR_OK;
}

static void label_narrow_grad(orr_call *c) {
  orr_label_same(c);
  c->in_label[0][c->args.i[0]] = c->out_label[0][c->args.i[0]] = ORR_WHOLE;
}

static orr_status run_narrow_grad(const orr_work *w, int shard) {
  orr_view *y = orr_work_out(w, shard, 0);
  orr_view part = orr_narrow_view(y, (int)w->args.i[0], w->args.i[1] - 1, w->args.i[2]);
  w->k->fill(y, 0);
  w->k->copy(orr_work_in(w, shard, 0), &part);
  return ORR_OK;
}

static orr_status grad_narrow_grad(orr_grad *g) {
  g->gx[0] = orr_g(g, &orr_op_narrow, g->args, 1, g->gy[0]);
  return g->status;
}

const orr_op orr_op_narrow_grad = {.name = "narrow_grad",
                                   .flags = ORR_OP_LINEAR,
                                   .n_in = 1,
                                   .n_out = 1,
                                   .infer = infer_narrow_grad,
                                   .label = label_narrow_grad,
                                   .run = run_narrow_grad,
                                   .grad = grad_narrow_grad};

/* ---- cat: args.i[0] the dim ---- */

static orr_status infer_cat(orr_call *c) {
  int64_t d = c->args.i[0];
  if (c->n_in == 0) return orr_fail(ORR_EARG, "needs at least one tensor");
  orr_meta *y = &c->out_meta[0];
  *y = c->in[0]->meta;
  if (d < 0 || d >= y->ndim)
    return orr_fail(ORR_EARG, "dimension %lld does not exist", (long long)d + 1);
  for (int k = 1; k < c->n_in; k++) {
    const orr_meta *x = &c->in[k]->meta;
    bool fits = x->ndim == y->ndim;
    for (int e = 0; fits && e < y->ndim; e++) fits = e == d || x->shape[e] == y->shape[e];
    if (!fits)
      return orr_fail(ORR_EARG, "tensor %d differs from the first in more than dimension %lld",
                      k + 1, (long long)d + 1);
    if (x->dtype != y->dtype)
      return orr_fail(ORR_EARG, "tensor %d is %s and the first %s; cast one with x:to(dtype)",
                      k + 1, orr_dtype_name(x->dtype), orr_dtype_name(y->dtype));
    y->shape[d] += x->shape[d];
  }
  return ORR_OK;
}

static void label_cat(orr_call *c) {
  int d = (int)c->args.i[0];
  orr_label_same(c);
  for (int k = 0; k < c->n_in; k++) c->in_label[k][d] = ORR_WHOLE;
  c->out_label[0][d] = ORR_WHOLE;
}

static orr_status run_cat(const orr_work *w, int shard) {
  int d = (int)w->args.i[0];
  int64_t at = 0;
  for (int k = 0; k < w->n_in; k++) {
    const orr_view *x = orr_work_in(w, shard, k);
    orr_view part = orr_narrow_view(orr_work_out(w, shard, 0), d, at, x->shape[d]);
    w->k->copy(x, &part);
    at += x->shape[d];
  }
  return ORR_OK;
}

static orr_status grad_cat(orr_grad *g) {
  int64_t at = 1, d = g->args->i[0];
  for (int k = 0; k < g->n_in; k++) {
    orr_args args = {.i = {d, at, g->x_meta[k].shape[d]}};
    if (g->needs[k]) g->gx[k] = orr_g(g, &orr_op_narrow, &args, 1, g->gy[0]);
    at += args.i[2];
  }
  return g->status;
}

const orr_op orr_op_cat = {.name = "cat",
                           .args = "T d=1",
                           .flags = ORR_OP_LIST | ORR_OP_LINEAR,
                           .n_out = 1,
                           .infer = infer_cat,
                           .label = label_cat,
                           .run = run_cat,
                           .grad = grad_cat};
