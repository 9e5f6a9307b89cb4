/* op_sequence.c: sequence parallelism: between the layers that a tensor axis splits, the axis
 * splits activations (N, T, C) along T (Korthikanti et al. 2022, "Reducing Activation
 * Recomputation in Large Transformer Models", section 4.2).
 *
 * Invariant: the end of a layer scatters what it would reduce, the entry of one gathers;
 * gradients go the other way, so no value differs from one device's. What stood whole has a
 * whole gradient: layers that are not split, before the first that is, sum nothing. A tensor
 * that several layers read (queries, keys, values) is gathered once. The copy is kept for the
 * next reader until another is gathered, a reader's node drops what it saved, recording
 * resumes or backward has ended: it never keeps a graph that nobody else holds.
 * To add a layer: ORR_OP_LAYER; its weight is input 1.
 */
#include "op.h"

enum { SEQUENCE = 1 }; /* the dim */

static struct {
  orr_tensor *from, *whole;
  uint32_t version; /* of from when it was gathered */
} last;

void orr_sequence_release(void) {
  orr_tensor *from = last.from, *whole = last.whole;
  last.from = last.whole = NULL;
  orr_tensor_free(whole);
  orr_tensor_free(from);
}

void orr_sequence_forget(const orr_tensor *dropped) {
  if (dropped && dropped == last.whole) orr_sequence_release();
}

static bool is_layer(const orr_call *c) {
  const orr_tensor *w = c->in[1];
  return w && (c->op->flags & ORR_OP_LAYER || (c->op == &orr_op_matmul && w->meta.ndim == 2));
}

/* Whether some axis splits both the sequence of x and the weight; *place: x without that. */
static bool meets_split(const orr_tensor *x, const orr_tensor *w, orr_place *place) {
  const orr_mesh *mesh = x->layout->mesh;
  bool found = false;
  for (int a = 0; a < mesh->n_axes; a++) {
    const orr_place *now = &x->layout->axis[a];
    place[a] = *now;
    if (!orr_splits_sequence(mesh, a, x->meta.ndim)) continue;
    if (now->kind != ORR_SHARD || now->dim != SEQUENCE || w->layout->axis[a].kind != ORR_SHARD)
      continue;
    place[a] = (orr_place){.kind = ORR_REPLICATE};
    found = true;
  }
  return found;
}

static bool is_last(const orr_tensor *x, bool recorded) {
  return last.from == x && last.version == x->storage->version &&
         last.whole->requires_grad == recorded;
}

orr_status orr_sequence_gather(orr_call *c) {
  orr_tensor *x = c->in[0], *w = c->in[1];
  orr_place place[ORR_MAX_AXES];
  orr_layout *layout;
  if (!x || !x->layout->mesh->sequence || !is_layer(c)) return ORR_OK;
  if (w->layout->mesh != x->layout->mesh || !meets_split(x, w, place)) return ORR_OK;
  if (!is_last(x, orr_grad_mode() && x->requires_grad)) {
    orr_tensor *whole;
    orr_sequence_release();
    ORR_TRY(orr_layout_new(x->layout->mesh, place, x->meta.ndim, x->meta.shape, &layout));
    orr_status status = orr_redistribute_op(x, layout, &whole);
    orr_layout_free(layout);
    if (status) return status;
    last.from = orr_tensor_ref(x);
    last.whole = whole;
    last.version = x->storage->version;
  }
  c->in[0] = c->temp[c->n_temp++] = orr_tensor_ref(last.whole);
  return ORR_OK;
}

orr_status orr_sequence_end(orr_tensor **t) {
  const orr_layout *now = (*t)->layout;
  orr_place place[ORR_MAX_AXES];
  orr_layout *layout;
  orr_tensor *y;
  if (!orr_layout_is_partial(now)) return ORR_OK;
  for (int a = 0; a < now->mesh->n_axes; a++) {
    bool ends = now->axis[a].kind == ORR_PARTIAL;
    bool along = ends && orr_splits_sequence(now->mesh, a, (*t)->meta.ndim);
    place[a] = now->axis[a];
    if (ends) place[a] = (orr_place){.kind = ORR_REPLICATE};
    if (along) place[a] = (orr_place){.kind = ORR_SHARD, .dim = SEQUENCE};
  }
  ORR_TRY(orr_layout_new(now->mesh, place, (*t)->meta.ndim, (*t)->meta.shape, &layout));
  orr_status status = orr_redistribute_op(*t, layout, &y);
  orr_layout_free(layout);
  if (status) return status;
  orr_tensor_free(*t);
  *t = y;
  return ORR_OK;
}

orr_status orr_sequence_back(const orr_tensor *gy, const orr_layout *layout, orr_layout **out) {
  const orr_mesh *mesh = layout->mesh;
  orr_place place[ORR_MAX_AXES];
  bool moves = false;
  *out = NULL;
  for (int a = 0; a < mesh->n_axes; a++) {
    const orr_place *now = &gy->layout->axis[a], *then = &layout->axis[a];
    place[a] = *now;
    if (!orr_splits_sequence(mesh, a, gy->meta.ndim)) continue;
    bool scatters = now->kind == ORR_PARTIAL && then->kind == ORR_SHARD;
    bool gathers = now->kind == ORR_SHARD && then->kind == ORR_PARTIAL;
    if (scatters) place[a] = *then;
    if (gathers) place[a] = (orr_place){.kind = ORR_REPLICATE};
    moves = moves || scatters || gathers;
  }
  return moves ? orr_layout_new(mesh, place, gy->meta.ndim, gy->meta.shape, out) : ORR_OK;
}
