/* comm_bucket.c: gradients on their way: the entries of a reducer, and the collectives that
 * carry a bucket of them over the communication queues. Who adds them to the parameters is
 * reducer.c.
 *
 * Invariant: an entry owns references to its parameter and to its gradient. A gradient in a
 * bucket is dense and nobody else's, unless it is the parameter's own (replaces). Once
 * reduced it stands under its new layout, so launching twice reduces once.
 * To add what travels in buckets: orr_bucket_is_partial says what waits for a launch.
 */
#include <stdlib.h>
#include <string.h>

#include "comm.h"

orr_status orr_reducer_new(int64_t bucket_bytes, orr_reducer **out) {
  enum { BUCKET_BYTES = 25 << 20 };
  orr_reducer *r = calloc(1, sizeof *r);
  if (!r) return orr_fail(ORR_EMEM, "out of host memory for a reducer of gradients");
  r->rc = 1;
  r->bucket_bytes = bucket_bytes > 0 ? bucket_bytes : BUCKET_BYTES;
  *out = r;
  return ORR_OK;
}

orr_reducer *orr_reducer_ref(orr_reducer *r) {
  r->rc++;
  return r;
}

void orr_reducer_free(orr_reducer *take_r) {
  if (!take_r || --take_r->rc) return;
  orr_bucket_clear(take_r);
  free(take_r->entry);
  free(take_r->held);
  free(take_r);
}

void orr_bucket_clear(orr_reducer *r) {
  int n = r->n;
  r->n = r->launched = 0;
  r->bytes = 0;
  for (int k = 0; k < n; k++) {
    orr_tensor_free(r->entry[k].g);
    orr_tensor_free(r->entry[k].old);
    orr_tensor_free(r->entry[k].p);
  }
}

bool orr_bucket_is_partial(const orr_tensor *g, int axis) {
  const orr_place *p = &g->layout->axis[axis];
  return p->kind == ORR_PARTIAL && p->op == ORR_SUM;
}

orr_status orr_bucket_add(orr_reducer *r, orr_tensor *p, orr_tensor *take_g, bool replaces) {
  if (r->n == r->cap) {
    int cap = r->cap ? 2 * r->cap : 32;
    orr_bucket_entry *grown = realloc(r->entry, (size_t)cap * sizeof *grown);
    if (!grown) {
      orr_tensor_free(take_g);
      return orr_fail(ORR_EMEM, "out of host memory for the gradients of %d parameters", r->n);
    }
    r->entry = grown;
    r->cap = cap;
  }
  r->entry[r->n++] = (orr_bucket_entry){orr_tensor_ref(p), take_g, NULL, replaces};
  if (orr_layout_is_partial(take_g->layout))
    r->bytes += orr_numel(take_g->meta.ndim, take_g->shard[0].shape) *
                (int64_t)orr_dtype_size(take_g->meta.dtype);
  return ORR_OK;
}

/* Whether the gradient ends sharded along the axis. */
static bool scatters(const orr_bucket_entry *e, int axis) {
  const orr_layout *end = orr_state_layout(e->p);
  return end->mesh == e->g->layout->mesh && end->axis[axis].kind == ORR_SHARD;
}

/* What g will be: its own memory, replicated along the axis, or a shard in new memory. */
static orr_status room_for(const orr_bucket_entry *e, int axis, bool scatter,
                           orr_tensor **out) {
  static const orr_place whole = {.kind = ORR_REPLICATE};
  const orr_tensor *g = e->g;
  orr_layout *layout;
  const orr_place *place = scatter ? &orr_state_layout(e->p)->axis[axis] : &whole;
  ORR_TRY(orr_layout_with(g, axis, place, &layout));
  orr_status status = scatter ? orr_tensor_new(&g->meta, layout, NULL, out)
                              : orr_tensor_alias_as(g, &g->meta, layout, out);
  orr_layout_free(layout);
  if (!status) (*out)->is_view = false;
  return status;
}

static void take_reduced(orr_bucket_entry *e, orr_tensor *take_g) {
  orr_tensor_free(e->g);
  e->g = take_g;
  if (!e->replaces) return;
  orr_tensor_free(e->p->grad);
  e->p->grad = orr_tensor_ref(take_g);
}

/* One collective for all waiting entries on one mesh that are Partial along the axis and end
 * sharded there, or end whole. list: room for 2 * n tensors and n numbers. */
static orr_status reduce_axis(orr_reducer *r, const orr_mesh *mesh, int axis, bool scatter,
                              orr_tensor **list, int *at) {
  orr_tensor **fresh = list + r->n;
  orr_status status = ORR_OK;
  int n = 0, made = 0;
  for (int k = r->launched; k < r->n; k++) {
    orr_tensor *g = r->entry[k].g;
    if (g->layout->mesh != mesh || !orr_bucket_is_partial(g, axis)) continue;
    if (scatters(&r->entry[k], axis) != scatter) continue;
    at[n] = k;
    list[n++] = g;
  }
  for (; made < n && !status; made++) {
    status = room_for(&r->entry[at[made]], axis, scatter, &fresh[made]);
    if (status) break;
  }
  if (!status)
    status = scatter ? orr_comm_exchange(ORR_REDUCE_SCATTER, list, fresh, n, axis, true)
                     : orr_comm_all_reduce(list, n, axis, ORR_SUM, true);
  for (int k = 0; k < made; k++) {
    if (status) orr_tensor_free(fresh[k]);
    else take_reduced(&r->entry[at[k]], fresh[k]);
  }
  return status;
}

orr_status orr_bucket_launch(orr_reducer *r) {
  size_t n = (size_t)r->n + 1;
  orr_tensor **list = malloc(n * (2 * sizeof(orr_tensor *) + sizeof(int)));
  if (!list) return orr_fail(ORR_EMEM, "out of host memory for a bucket of gradients");
  orr_status status = ORR_OK;
  for (int k = r->launched; k < r->n && !status; k++) {
    for (int a = ORR_MAX_AXES - 1; a >= 0 && !status; a--) {
      orr_tensor *g =
          r->entry[k].g; /* reduced by an earlier turn, it is not partial any more */
      if (a < g->layout->mesh->n_axes && orr_bucket_is_partial(g, a))
        status = reduce_axis(r, g->layout->mesh, a, scatters(&r->entry[k], a), list,
                             (int *)(list + 2 * n));
    }
  }
  free(list);
  if (status) return status;
  r->launched = r->n;
  r->bytes = 0;
  return ORR_OK;
}
