/* op_zero.c: parameters whose state is sharded over the data axis (zero=, Rajbhandari et al.
 * 2020). At zero=3 a parameter rests as shards and dispatch gathers it for each call; what the
 * tape would keep of the copy is its header, and backward gathers again. At zero=1 and 2 it
 * rests replicated, the optimizer updates one shard a device, and the shards are gathered into
 * the replicas.
 *
 * Invariant: a gathered copy's storage names its parameter (origin) and is never written;
 * values do not depend on any of this. One copy at most outlives its call: `last`.
 * To add another derived copy of a parameter: a layout beside use_layout, gathered here.
 */
#include <stdlib.h>

#include "comm.h"
#include "op.h"

static struct {
  orr_tensor *p, *whole;
  uint32_t version; /* of p when it was gathered */
} last;

void orr_zero_release(void) {
  orr_tensor *p = last.p, *whole = last.whole;
  last.p = last.whole = NULL;
  orr_tensor_free(whole);
  orr_tensor_free(p);
}

/* The one axis on which `from` shards and `to` replicates, all others being alike; -1: none. */
static int axis_between(const orr_layout *from, const orr_layout *to) {
  int found = -1;
  if (from->mesh != to->mesh) return -1;
  for (int a = 0; a < from->mesh->n_axes; a++) {
    if (orr_place_equal(from->mesh, a, from, to)) continue;
    if (found >= 0 || from->axis[a].kind != ORR_SHARD || to->axis[a].kind != ORR_REPLICATE)
      return -1;
    found = a;
  }
  return found;
}

static orr_status gather(orr_tensor *p, orr_tensor **out) {
  int axis = axis_between(p->layout, p->use_layout);
  orr_tensor *y;
  orr_status status;
  if (axis < 0) {
    status = orr_redistribute(p, p->use_layout, &y);
  } else {
    ORR_TRY(orr_tensor_new(&p->meta, p->use_layout, p, &y));
    status = orr_comm_exchange(ORR_ALL_GATHER, &p, &y, 1, axis, true);
    if (status) orr_tensor_free(y);
  }
  if (status) return status;
  if (y->storage != p->storage) y->storage->origin = orr_tensor_ref(p);
  *out = y;
  return ORR_OK;
}

static bool is_last(const orr_tensor *p) {
  return last.p == p && last.version == p->storage->version &&
         orr_layout_equal(last.whole->layout, p->use_layout);
}

static void set_last(orr_tensor *p, orr_tensor *whole) {
  orr_zero_release();
  last.p = orr_tensor_ref(p);
  last.whole = orr_tensor_ref(whole);
  last.version = p->storage->version;
}

orr_status orr_zero_gather(orr_tensor *p, orr_tensor **out) {
  orr_tensor *whole;
  bool recorded = orr_grad_mode() && p->requires_grad;
  if (is_last(p)) ORR_TRY(orr_tensor_alias(last.whole, &whole));
  else ORR_TRY(gather(p, &whole));
  if (recorded) {
    if (!is_last(p)) {
      set_last(p, whole);
      orr_tensor_free(whole);
      ORR_TRY(orr_tensor_alias(last.whole, &whole));
    }
    orr_call c = {.op = &orr_op_redistribute, .n_in = 1, .n_out = 1, .in = &p, .out = {whole}};
    orr_status status = orr_tape_record(&c, &p);
    if (status) {
      orr_tensor_free(whole);
      return status;
    }
  }
  whole->is_view = false;
  *out = whole;
  return ORR_OK;
}

/* Backward holds one copy at a time: gradients need the room that forward gives to a second. */
orr_status orr_zero_revive(const orr_tensor *ghost, orr_tensor **out) {
  orr_tensor *p = ghost->storage->origin, *whole;
  if (!p->use_layout)
    return orr_fail(ORR_EARG, "backward: a parameter was placed by another plan since forward");
  if (!is_last(p)) {
    orr_zero_release();
    ORR_TRY(gather(p, &whole));
    set_last(p, whole);
    orr_tensor_free(whole);
  }
  return orr_tensor_revive(ghost, last.whole, out);
}

/* ---- the optimizer's shards of replicated parameters ---- */

static orr_status slice_of(orr_tensor *p, orr_tensor **out) {
  orr_tensor *s, *dense;
  if (!p->state_layout) {
    *out = orr_tensor_ref(p);
    return ORR_OK;
  }
  ORR_TRY(orr_redistribute(p, p->state_layout, &s));
  if (orr_tensor_is_contiguous(s)) {
    *out = s;
    return ORR_OK;
  }
  orr_status status = orr_tensor_copy_local(s, &dense);
  orr_tensor_free(s);
  if (!status) *out = dense;
  return status;
}

orr_status orr_zero_slices(orr_tensor *const *param, int n, orr_tensor **slice) {
  for (int k = 0; k < n; k++) {
    orr_status status = slice_of(param[k], &slice[k]);
    if (!status) continue;
    while (k > 0) orr_tensor_free(slice[--k]);
    return status;
  }
  return ORR_OK;
}

static int put_axis(const orr_tensor *p) {
  return p->state_layout ? axis_between(p->state_layout, p->layout) : -1;
}

orr_status orr_zero_put_back(orr_tensor *const *param, orr_tensor *const *slice, int n) {
  size_t room = (size_t)n * 2 * sizeof(orr_tensor *) + (size_t)n;
  orr_tensor **from = malloc(room + 1), **to = from + n;
  if (!from) return orr_fail(ORR_EMEM, "out of host memory for a list of %d parameters", n);
  char *done = (char *)(to + n);
  orr_status status = ORR_OK;
  for (int k = 0; k < n; k++) done[k] = put_axis(param[k]) < 0;
  for (int k = 0; k < n && !status; k++) {
    int axis = put_axis(param[k]), found = 0;
    for (int j = k; j < n; j++) {
      bool alike = param[j]->layout->mesh == param[k]->layout->mesh;
      if (done[j] || !alike || put_axis(param[j]) != axis) continue;
      done[j] = true;
      from[found] = slice[j];
      to[found++] = param[j];
    }
    status = orr_comm_exchange(ORR_ALL_GATHER, from, to, found, axis, true);
    for (int j = 0; j < found && !status; j++) orr_tensor_wrote(to[j]);
  }
  free(from);
  return status;
}
