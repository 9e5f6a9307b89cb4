/* comm_exchange.c: all-gather, all-to-all and reduce-scatter of lists of tensors: every part
 * pulls what its targets lack from the group's shards.
 *
 * Invariant: the tensors of one call stand on one mesh, and only the axis' placement differs
 * between a source and its target. A target may be the memory that its source is a part of: a
 * part never copies onto itself.
 * To add a kind: its bytes in `payload`.
 */
#include "comm.h"

/* Bytes of one tensor's value in the group of `first`. */
static int64_t payload(orr_collective_kind kind, const orr_tensor *t, int axis, int first) {
  const orr_mesh *mesh = t->layout->mesh;
  int rank, step;
  int64_t n = 0;
  orr_mesh_group(mesh, first, axis, &rank, &step);
  for (int k = 0; k < mesh->size[axis]; k++, rank += step) {
    int64_t held = orr_numel(t->meta.ndim, t->shard[rank].shape);
    n = kind == ORR_REDUCE_SCATTER ? held : n + held;
  }
  return n * (int64_t)orr_dtype_size(t->meta.dtype);
}

static orr_status exchange_group(orr_collective_kind kind, orr_tensor *const *ts,
                                 orr_tensor *const *ys, int n, int axis, bool use_comm,
                                 int first) {
  const orr_mesh *mesh = ts[0]->layout->mesh;
  int members = mesh->size[axis], rank, step;
  int64_t bytes = 0;
  orr_collective *c;
  ORR_TRY(orr_collective_new(members, n * members, n * members, &c));
  orr_mesh_group(mesh, first, axis, &rank, &step);
  for (int k = 0; k < members; k++, rank += step) {
    c->part[k].device = orr_device_at(mesh->device[rank]);
    for (int t = 0; t < n; t++) {
      orr_piece_fill(&c->src[t * members + k], ts[t], rank);
      orr_piece_fill(&c->dst[t * members + k], ys[t], rank);
    }
  }
  for (int t = 0; t < n; t++) bytes += payload(kind, ts[t], axis, first);
  c->name = orr_collective_name(kind);
  c->run = orr_run_exchange;
  c->kind = kind;
  c->meets = true;
  c->use_comm = use_comm;
  if (kind == ORR_REDUCE_SCATTER) {
    c->width = members;
    c->op = ts[0]->layout->axis[axis].op;
  }
  orr_trace_add(kind, mesh->name[axis], members, bytes);
  return orr_collective_issue(c);
}

orr_status orr_comm_exchange(orr_collective_kind kind, orr_tensor *const *ts,
                             orr_tensor *const *ys, int n, int axis, bool use_comm) {
  if (n == 0) return ORR_OK;
  const orr_mesh *mesh = ts[0]->layout->mesh;
  for (int r = 0; r < mesh->n; r++) {
    if (orr_mesh_coordinate(mesh, r, axis)) continue;
    ORR_TRY(exchange_group(kind, ts, ys, n, axis, use_comm, r));
  }
  return ORR_OK;
}
