/* reducer.c: from gradients that come out of backward to p->grad of parameters placed by a
 * plan.
 *
 * A gradient that is Partial waits in a bucket; a full bucket leaves, on the communication
 * queues while backward goes on, as one all-reduce of the gradients that end replicated and one
 * reduce-scatter of those that end sharded (comm_bucket.c). What has arrived is added to the
 * parameters at the end of backward, all or none. While gradients are held (orrery.accumulate)
 * they are added as they are, Partial, and reduced once when the hold ends.
 *
 * Invariant: p->grad is dense, in memory of its own, under the parameter's state layout, or,
 * while held, under that layout with Partial axes. When anything fails, p->grad is what it was.
 * To add another way for a gradient to travel: where `add` chooses between them.
 */
#include <stdlib.h>

#include "../kernels/elementwise.h"
#include "comm.h"
#include "op.h"

static orr_reducer *reducers; /* those with entries or held parameters; a reference each */
static bool holding;

static void activate(orr_reducer *r) {
  if (r->active) return;
  r->active = true;
  r->next = reducers;
  reducers = orr_reducer_ref(r);
}

/* Takes the idle ones out of the list. */
static void sweep(void) {
  for (orr_reducer **at = &reducers; *at;) {
    orr_reducer *r = *at;
    if (r->n || r->n_held) {
      at = &r->next;
      continue;
    }
    *at = r->next;
    r->active = false;
    orr_reducer_free(r);
  }
}

/* Where the gradient will end, Partial still where g is. A shard that hangs on the other axis
 * (both cut one dim) waits for nothing: only the last axis can. */
static orr_status waiting_layout(const orr_tensor *p, const orr_tensor *g, orr_layout **out) {
  orr_place place[ORR_MAX_AXES];
  const orr_layout *end = orr_state_layout(p);
  const orr_mesh *mesh = end->mesh;
  *out = orr_layout_ref(orr_state_layout(p));
  if (g->layout->mesh != mesh) return ORR_OK;
  bool waits = false;
  for (int a = 0; a < mesh->n_axes; a++) {
    bool outer = a == 0 && mesh->n_axes == 2 && end->axis[0].kind == ORR_SHARD &&
                 end->axis[1].kind == ORR_SHARD && end->axis[0].dim == end->axis[1].dim;
    bool keep = !outer && orr_bucket_is_partial(g, a);
    place[a] = keep ? g->layout->axis[a] : end->axis[a];
    waits = waits || keep;
  }
  if (!waits) return ORR_OK;
  orr_layout_free(*out);
  return orr_layout_new(mesh, place, p->meta.ndim, p->meta.shape, out);
}

/* Adds g to the gradient of p that waits in the bucket being filled; false: there is none. */
static bool find_waiting(orr_reducer *r, const orr_tensor *p, const orr_tensor *g, int *out) {
  for (int k = r->n - 1; k >= r->launched; k--) {
    if (r->entry[k].p != p) continue;
    *out = k;
    return !r->entry[k].replaces && orr_layout_equal(r->entry[k].g->layout, g->layout);
  }
  return false;
}

static orr_status add(orr_reducer *r, orr_tensor *p, orr_tensor *grad) {
  orr_layout *to;
  orr_tensor *g, *own;
  int k;
  ORR_TRY(waiting_layout(p, grad, &to));
  bool same = orr_layout_equal(grad->layout, to);
  orr_status status = same ? ORR_OK : orr_redistribute(grad, to, &g);
  orr_layout_free(to);
  if (status) return status;
  if (same) g = grad;
  if (find_waiting(r, p, g, &k)) {
    status = orr_call2(orr_op_binary(ORR_BIN_add), r->entry[k].g, g, NULL, &own);
    if (!same) orr_tensor_free(g);
    if (status) return status;
    orr_tensor_free(r->entry[k].g);
    r->entry[k].g = own;
    return ORR_OK;
  }
  if (g->rc == 1 && g->storage->rc == 1 && orr_tensor_is_contiguous(g)) own = orr_tensor_ref(g);
  else status = orr_tensor_copy_local(g, &own);
  if (!same) orr_tensor_free(g);
  if (!status) status = orr_bucket_add(r, p, own, false);
  if (!status && !holding && r->bytes >= r->bucket_bytes) status = orr_bucket_launch(r);
  return status;
}

/* The gradient is part of a graph of its own: every step is recorded. */
static orr_status add_recorded(orr_tensor *p, orr_tensor *grad) {
  orr_tensor *g, *total;
  ORR_TRY(orr_redistribute_op(grad, orr_state_layout(p), &g));
  if (!p->grad) {
    p->grad = g;
    return ORR_OK;
  }
  orr_status status = orr_call2(orr_op_binary(ORR_BIN_add), p->grad, g, NULL, &total);
  orr_tensor_free(g);
  if (status) return status;
  orr_tensor_free(p->grad);
  p->grad = total;
  return ORR_OK;
}

orr_status orr_reducer_add(orr_reducer *r, orr_tensor *p, orr_tensor *grad) {
  if (orr_grad_mode()) return add_recorded(p, grad);
  activate(r);
  orr_status status = add(r, p, grad);
  if (status) r->failed = true;
  return status;
}

/* ---- at the end of backward ---- */

static orr_status under(orr_tensor *t, orr_layout *layout, orr_tensor **out) {
  if (!orr_layout_equal(t->layout, layout)) return orr_redistribute(t, layout, out);
  *out = orr_tensor_ref(t);
  return ORR_OK;
}

/* a + b; while held, Partial if one of them is. */
static orr_status combine(const orr_tensor *p, orr_tensor *a, orr_tensor *b, orr_tensor **out) {
  orr_layout *to = orr_state_layout(p);
  orr_tensor *x = NULL, *y = NULL;
  if (holding && orr_layout_is_partial(a->layout)) to = a->layout;
  if (holding && orr_layout_is_partial(b->layout)) to = b->layout;
  orr_status status = under(a, to, &x);
  if (!status) status = under(b, to, &y);
  if (!status) status = orr_call2(orr_op_binary(ORR_BIN_add), x, y, NULL, out);
  orr_tensor_free(x);
  orr_tensor_free(y);
  return status;
}

static orr_status hold_parameter(orr_reducer *r, orr_tensor *p) {
  if (r->n_held == r->cap_held) {
    int cap = r->cap_held ? 2 * r->cap_held : 32;
    orr_tensor **grown = realloc(r->held, (size_t)cap * sizeof(orr_tensor *));
    if (!grown) return orr_fail(ORR_EMEM, "out of host memory for %d held gradients", cap);
    r->held = grown;
    r->cap_held = cap;
  }
  r->held[r->n_held++] = orr_tensor_ref(p);
  return ORR_OK;
}

static orr_status deliver(orr_reducer *r, orr_bucket_entry *e) {
  orr_tensor *p = e->p, *total;
  bool was_held = p->grad && orr_layout_is_partial(p->grad->layout);
  if (p->grad) ORR_TRY(combine(p, p->grad, e->g, &total));
  else total = orr_tensor_ref(e->g);
  if (orr_layout_is_partial(total->layout) && !was_held) {
    orr_status status = hold_parameter(r, p);
    if (status) {
      orr_tensor_free(total);
      return status;
    }
  }
  e->old = p->grad;
  p->grad = total;
  return ORR_OK;
}

static void take_back(orr_bucket_entry *e) {
  orr_tensor_free(e->p->grad);
  e->p->grad = e->old;
  e->old = NULL;
}

static orr_status flush(orr_reducer *r) {
  orr_status status = ORR_OK;
  int k = 0;
  if (!r->failed) {
    if (!holding) status = orr_bucket_launch(r);
    for (; k < r->n && !status; k++) {
      if (!r->entry[k].replaces) status = deliver(r, &r->entry[k]);
    }
    for (int j = k - 2; status && j >= 0; j--) { /* k - 1 failed */
      if (!r->entry[j].replaces) take_back(&r->entry[j]);
    }
  }
  r->failed = false;
  orr_bucket_clear(r);
  return status;
}

orr_status orr_reducers_flush(void) {
  orr_status status = ORR_OK;
  bool was = orr_set_grad_mode(false);
  for (orr_reducer *r = reducers; r; r = r->next) {
    orr_status flushed = flush(r);
    if (!status) status = flushed;
  }
  orr_set_grad_mode(was);
  sweep();
  return status;
}

void orr_reducers_drop(void) {
  for (orr_reducer *r = reducers; r; r = r->next) {
    r->failed = false;
    orr_bucket_clear(r);
  }
  sweep();
}

/* ---- held gradients ---- */

/* Puts p's own Partial gradient into the bucket. */
static orr_status reduce_held(orr_reducer *r, orr_tensor *p) {
  orr_tensor *g = p->grad, *own;
  if (!g || !orr_layout_is_partial(g->layout)) return ORR_OK; /* reset meanwhile */
  if (g->rc == 1 && g->storage->rc == 1 && orr_tensor_is_contiguous(g)) own = orr_tensor_ref(g);
  else ORR_TRY(orr_tensor_copy_local(g, &own));
  ORR_TRY(orr_bucket_add(r, p, own, true));
  return r->bytes >= r->bucket_bytes ? orr_bucket_launch(r) : ORR_OK;
}

static orr_status release_held(orr_reducer *r) {
  orr_status status = ORR_OK;
  for (int k = 0; k < r->n_held && !status; k++) status = reduce_held(r, r->held[k]);
  if (!status) status = orr_bucket_launch(r);
  orr_bucket_clear(r);
  if (status) return status; /* still held: a second call goes on */
  for (int k = 0; k < r->n_held; k++) orr_tensor_free(r->held[k]);
  r->n_held = 0;
  return ORR_OK;
}

orr_status orr_reducers_hold(bool hold) {
  orr_status status = ORR_OK;
  holding = hold;
  if (hold) return ORR_OK;
  for (orr_reducer *r = reducers; r; r = r->next) {
    orr_status released = release_held(r);
    if (!status) status = released;
  }
  sweep();
  return status;
}
