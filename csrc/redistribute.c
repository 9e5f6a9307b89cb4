/* redistribute.c: the same global value under another layout.
 *
 * On one mesh the layout changes an axis at a time, each change being one collective a group
 * (or none). Between meshes (host, single devices, stages of a pipeline) every target pulls
 * what it lacks from the sources that hold it, once their events allow. Two axes that are
 * Partial have one reduction. Traced bytes of a transfer between meshes: the global tensor;
 * its "axis" is "host" where the host is an end of it, else "device".
 *
 * Invariant: t is not changed. A step is legal when the other axis cuts alike before and
 * after it: while axis 1 cuts the dim that axis 0 cuts, or is about to, axis 0 stays.
 * To add a placement: its rows in `step` and in orr_redistribute_cost.
 */
#include <string.h>

#include "comm.h"

orr_status orr_layout_with(const orr_tensor *t, int axis, const orr_place *place,
                           orr_layout **out) {
  orr_place all[ORR_MAX_AXES];
  memcpy(all, t->layout->axis, sizeof all);
  all[axis] = *place;
  return orr_layout_new(t->layout->mesh, all, t->meta.ndim, t->meta.shape, out);
}

/* ---- copies on one device ---- */

/* dst's shard r becomes src's (NULL: 0), on its own compute queue. */
static orr_status fill_shard(const orr_tensor *src, const orr_tensor *dst, int r) {
  orr_collective *c;
  ORR_TRY(orr_collective_new(1, src ? 1 : 0, 1, &c));
  c->part[0].device = orr_tensor_device(dst, r);
  if (src) orr_piece_fill(&c->src[0], src, r);
  orr_piece_fill(&c->dst[0], dst, r);
  c->run = orr_run_pull;
  return orr_collective_issue(c);
}

static orr_status finish(orr_status status, const orr_tensor *t, orr_tensor *take_y,
                         orr_tensor **out) {
  if (status) {
    orr_tensor_free(take_y);
    return status;
  }
  take_y->is_batch = t->is_batch;
  *out = take_y;
  return ORR_OK;
}

orr_status orr_tensor_copy_local(const orr_tensor *t, orr_tensor **out) {
  orr_tensor *y;
  orr_status status = ORR_OK;
  ORR_TRY(orr_tensor_new(&t->meta, t->layout, NULL, &y));
  for (int r = 0; r < t->n && !status; r++) {
    status = fill_shard(t, y, r);
  }
  return finish(status, t, y, out);
}

/* ---- steps along one axis ---- */

/* Replicate to shard: every rank looks at its part of what it holds. */
static orr_status narrow(const orr_tensor *t, orr_layout *next, orr_tensor **out) {
  int64_t local[ORR_MAX_DIM], was[ORR_MAX_DIM], now[ORR_MAX_DIM];
  ORR_TRY(orr_tensor_alias_as(t, &t->meta, next, out));
  for (int r = 0; r < t->n; r++) {
    orr_shard *s = &(*out)->shard[r];
    orr_layout_local(t->layout, r, t->meta.ndim, t->meta.shape, local, was);
    orr_layout_local(next, r, t->meta.ndim, t->meta.shape, local, now);
    bool empty = orr_numel(t->meta.ndim, local) == 0;
    for (int d = 0; d < t->meta.ndim; d++) {
      if (!empty) s->offset += (now[d] - was[d]) * s->stride[d];
      s->shape[d] = local[d];
    }
  }
  return ORR_OK;
}

/* Replicate to Partial(sum): the first of every group keeps the value, the others hold 0. */
static orr_status keep_first(const orr_tensor *t, int axis, orr_layout *next,
                             orr_tensor **out) {
  orr_tensor *y;
  orr_status status = ORR_OK;
  ORR_TRY(orr_tensor_new(&t->meta, next, t, &y));
  for (int r = 0; r < t->n && !status; r++) {
    status = fill_shard(orr_mesh_coordinate(next->mesh, r, axis) ? NULL : t, y, r);
  }
  return finish(status, t, y, out);
}

static orr_status exchange(orr_collective_kind kind, orr_tensor *t, int axis, orr_layout *next,
                           orr_tensor **out) {
  orr_tensor *y;
  orr_status status;
  ORR_TRY(orr_tensor_new(&t->meta, next, t, &y));
  if (kind == ORR_ALL_REDUCE)
    status = orr_comm_reduce_into(&t, &y, 1, axis, t->layout->axis[axis].op, false);
  else status = orr_comm_exchange(kind, &t, &y, 1, axis, false);
  return finish(status, t, y, out);
}

/* One change of one axis' placement; S->P and P(op)->P(other) are two (advance). */
static orr_status step(orr_tensor *t, int axis, orr_layout *next, orr_tensor **out) {
  orr_place_kind from = t->layout->axis[axis].kind, to = next->axis[axis].kind;
  if (next->mesh->size[axis] == 1) return orr_tensor_alias_as(t, &t->meta, next, out);
  if (from == ORR_REPLICATE && to == ORR_SHARD) return narrow(t, next, out);
  if (from == ORR_REPLICATE)
    return next->axis[axis].op == ORR_SUM ? keep_first(t, axis, next, out)
                                          : orr_tensor_alias_as(t, &t->meta, next, out);
  if (from == ORR_SHARD)
    return exchange(to == ORR_SHARD ? ORR_ALL_TO_ALL : ORR_ALL_GATHER, t, axis, next, out);
  return exchange(to == ORR_SHARD ? ORR_REDUCE_SCATTER : ORR_ALL_REDUCE, t, axis, next, out);
}

/* *t becomes itself with `place` on the axis. */
static orr_status advance(orr_tensor **t, int axis, const orr_place *place) {
  static const orr_place whole = {.kind = ORR_REPLICATE};
  const orr_place *now = &(*t)->layout->axis[axis];
  orr_layout *next;
  orr_tensor *y;
  if (place->kind == ORR_PARTIAL && now->kind != ORR_REPLICATE)
    ORR_TRY(advance(t, axis, &whole));
  ORR_TRY(orr_layout_with(*t, axis, place, &next));
  orr_status status = step(*t, axis, next, &y);
  orr_layout_free(next);
  if (status) return status;
  orr_tensor_free(*t);
  *t = y;
  return ORR_OK;
}

/* Whether p cuts a dim that axis 0 cuts in a or b. */
static bool clashes(const orr_place *p, const orr_layout *a, const orr_layout *b) {
  const orr_place *x = &a->axis[0], *y = &b->axis[0];
  return p->kind == ORR_SHARD && ((x->kind == ORR_SHARD && x->dim == p->dim) ||
                                  (y->kind == ORR_SHARD && y->dim == p->dim));
}

/* -1: what a device holds shrinks, 1: it grows. */
static int growth(const orr_place *from, const orr_place *to) {
  return (from->kind == ORR_SHARD) - (to->kind == ORR_SHARD);
}

static orr_status change_two(orr_tensor **t, const orr_layout *to) {
  static const orr_place whole = {.kind = ORR_REPLICATE};
  const orr_layout *from = (*t)->layout;
  const orr_place *now = &from->axis[1], *then = &to->axis[1];
  if (!orr_place_equal(to->mesh, 0, from, to)) {
    bool must = clashes(now, from, to), may = !clashes(then, from, to);
    bool better = growth(now, then) < growth(&from->axis[0], &to->axis[0]);
    if (may && (must || (better && !orr_place_equal(to->mesh, 1, from, to))))
      ORR_TRY(advance(t, 1, then));
    else if (must) ORR_TRY(advance(t, 1, &whole));
    ORR_TRY(advance(t, 0, &to->axis[0]));
  }
  return orr_place_equal(to->mesh, 1, (*t)->layout, to) ? ORR_OK : advance(t, 1, then);
}

static bool mixes(const orr_layout *l) {
  return l->mesh->n_axes == 2 && l->axis[0].kind == ORR_PARTIAL &&
         l->axis[1].kind == ORR_PARTIAL && l->axis[0].op != l->axis[1].op;
}

static orr_status on_mesh(orr_tensor *t, orr_layout *to, orr_tensor **out) {
  orr_tensor *y;
  orr_status status = ORR_OK;
  if (orr_layout_equal(t->layout, to)) return orr_tensor_alias(t, out);
  if (mixes(t->layout) || mixes(to))
    return orr_fail(ORR_EARG,
                    "redistribute: partial over two axes needs one reduction on both");
  y = orr_tensor_ref(t);
  status = to->mesh->n_axes == 1 ? advance(&y, 0, &to->axis[0]) : change_two(&y, to);
  if (status) {
    orr_tensor_free(y);
    return status;
  }
  *out = y;
  return ORR_OK;
}

/* ---- between meshes ---- */

static orr_status without_partial(const orr_layout *l, const orr_meta *meta, orr_layout **out) {
  orr_place place[ORR_MAX_AXES];
  for (int a = 0; a < l->mesh->n_axes; a++) {
    place[a] = l->axis[a];
    if (place[a].kind == ORR_PARTIAL) place[a] = (orr_place){.kind = ORR_REPLICATE};
  }
  return orr_layout_new(l->mesh, place, meta->ndim, meta->shape, out);
}

/* The rank of t's mesh on the device, or 0. */
static int home_rank(const orr_mesh *mesh, int device) {
  for (int r = 0; r < mesh->n; r++)
    if (mesh->device[r] == device) return r;
  return 0;
}

/* Ranks that hold the value once, the members of a Partial one after another. Returns how many;
 * *width: how many hold terms of one box. */
static int find_sources(const orr_layout *l, int home, int *ranks, int *width) {
  const orr_mesh *m = l->mesh;
  int n = 0, at[ORR_MAX_AXES] = {0};
  int step[ORR_MAX_AXES] = {m->n_axes == 2 ? m->size[1] : 1, 1};
  int order[ORR_MAX_AXES] = {0, 1}; /* Partial axes vary fastest */
  *width = 1;
  for (int a = 0; a < m->n_axes; a++)
    if (l->axis[a].kind == ORR_PARTIAL) *width *= m->size[a];
  if (m->n_axes == 2 && l->axis[0].kind == ORR_PARTIAL && l->axis[1].kind != ORR_PARTIAL) {
    order[0] = 1;
    order[1] = 0;
  }
  int from[ORR_MAX_AXES], to[ORR_MAX_AXES];
  for (int k = 0; k < ORR_MAX_AXES; k++) {
    int a = order[k];
    bool whole = a >= m->n_axes || l->axis[a].kind == ORR_REPLICATE;
    from[k] = a < m->n_axes && whole ? orr_mesh_coordinate(m, home, a) : 0;
    to[k] = whole ? from[k] + 1 : m->size[a];
  }
  for (at[0] = from[0]; at[0] < to[0]; at[0]++)
    for (at[1] = from[1]; at[1] < to[1]; at[1]++)
      ranks[n++] = at[0] * step[order[0]] + at[1] * step[order[1]];
  return n;
}

/* What the transfer is to the trace and the timeline. */
static const char *trace_transfer(const orr_tensor *t, const orr_layout *to) {
  bool host = t->layout->mesh->device[0] == 0 || to->mesh->device[0] == 0;
  bool copies = to->mesh->n > 1 && orr_layout_is_replicate(to);
  orr_collective_kind kind = copies ? ORR_BROADCAST : ORR_SEND_RECV;
  orr_trace_add(kind, host ? "host" : "device", to->mesh->n,
                orr_tensor_numel(t) * (int64_t)orr_dtype_size(t->meta.dtype));
  return orr_collective_name(kind);
}

/* y's ranks pull from t's; y is not Partial, and single where t is Partial. */
static orr_status transfer(const orr_tensor *t, const orr_tensor *y) {
  int ranks[ORR_MAX_DEVICES], width;
  int home = home_rank(t->layout->mesh, y->layout->mesh->device[0]);
  int n = find_sources(t->layout, home, ranks, &width);
  orr_collective *c;
  ORR_TRY(orr_collective_new(y->n, n, y->n, &c));
  for (int k = 0; k < n; k++) orr_piece_fill(&c->src[k], t, ranks[k]);
  for (int r = 0; r < y->n; r++) {
    c->part[r].device = orr_tensor_device(y, r);
    orr_piece_fill(&c->dst[r], y, r);
  }
  c->run = orr_run_pull;
  c->use_comm = !orr_tensor_device(t, 0)->is_inline; /* between the ops of a busy device */
  c->width = width;
  for (int a = 0; a < t->layout->mesh->n_axes; a++)
    if (t->layout->axis[a].kind == ORR_PARTIAL) c->op = t->layout->axis[a].op;
  c->name = trace_transfer(t, y->layout);
  return orr_collective_issue(c);
}

static orr_status across(orr_tensor *t, orr_layout *to, orr_tensor **out) {
  orr_layout *plain = NULL;
  orr_tensor *x = NULL, *y = NULL;
  orr_device *device = orr_device_at(to->mesh->device[0]);
  if (orr_tensor_device(t, 0)->kind == ORR_DEVICE_META && device->kind != ORR_DEVICE_META)
    return orr_fail(ORR_EARG, "a tensor on the meta device has a shape and no values");
  if (mixes(t->layout) || mixes(to))
    return orr_fail(ORR_EARG,
                    "redistribute: partial over two axes needs one reduction on both");
  orr_status status = ORR_OK;
  if (orr_layout_is_partial(t->layout) && to->mesh->n > 1) {
    status = without_partial(t->layout, &t->meta, &plain);
    if (!status) status = on_mesh(t, plain, &x);
    orr_layout_free(plain);
    plain = NULL;
  } else {
    x = orr_tensor_ref(t);
  }
  if (!status) status = without_partial(to, &t->meta, &plain);
  if (!status) status = orr_tensor_new(&t->meta, plain, x, &y);
  if (!status && device->kind != ORR_DEVICE_META) status = transfer(x, y);
  if (!status) y->is_batch = t->is_batch;
  if (!status && orr_layout_equal(plain, to)) *out = orr_tensor_ref(y);
  else if (!status) status = on_mesh(y, to, out);
  orr_layout_free(plain);
  orr_tensor_free(x);
  orr_tensor_free(y);
  return status;
}

orr_status orr_redistribute(orr_tensor *t, orr_layout *layout, orr_tensor **out) {
  return t->layout->mesh == layout->mesh ? on_mesh(t, layout, out) : across(t, layout, out);
}

/* ---- costs ---- */

/* Whether `to` cuts as t's layout does now. */
static bool same_cut(const orr_tensor *t, int axis, const orr_place *to) {
  const orr_place *now = &t->layout->axis[axis], *outer = &t->layout->axis[0];
  bool nested = axis == 1 && outer->kind == ORR_SHARD && outer->dim == now->dim;
  int parts = t->layout->mesh->size[axis], rows = nested ? t->layout->mesh->size[0] : 1;
  if (now->dim != to->dim) return false;
  if (to->bounds == now->bounds) return true;
  if (to->bounds)
    return !nested &&
           memcmp(to->bounds, now->bounds, (size_t)(parts + 1) * sizeof *now->bounds) == 0;
  for (int r = 0; r < rows; r++) {
    const int64_t *row = now->bounds + (size_t)r * (size_t)(parts + 1);
    int64_t each = (row[parts] - row[0]) / parts, more = (row[parts] - row[0]) % parts;
    for (int k = 0; k < parts; k++)
      if (row[k + 1] - row[k] != each + (k < more)) return false;
  }
  return true;
}

double orr_redistribute_cost(const orr_tensor *t, int axis, const orr_place *to) {
  const orr_place *now = &t->layout->axis[axis];
  double n = t->layout->mesh->size[axis];
  double size = (double)orr_tensor_numel(t) * (double)orr_dtype_size(t->meta.dtype);
  for (int a = 0; a < t->layout->mesh->n_axes; a++)
    if (a != axis && t->layout->axis[a].kind == ORR_SHARD) size /= t->layout->mesh->size[a];
  double ring = size * (n - 1) / n;
  if (now->kind == ORR_REPLICATE) return 0;
  if (now->kind == ORR_PARTIAL) {
    if (to->kind == ORR_PARTIAL && to->op == now->op) return 0;
    return to->kind == ORR_SHARD ? ring : 2 * ring;
  }
  if (to->kind != ORR_SHARD) return ring;
  return same_cut(t, axis, to) ? 0 : ring / n;
}
