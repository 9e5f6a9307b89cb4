/* comm.c: the life of a collective in the queues, all-reduce of lists of tensors, and the
 * trace.
 *
 * A part is two items of its device's queue. The first may start when all parts have arrived
 * (a part arrives when its first item heads the queue with its dependencies complete) and
 * does the part's share; the second may start when all parts have finished, and its event is
 * what the part's buffers wait for: nobody's memory is overwritten or freed under a peer.
 * Nothing waits inside an item.
 * A collective whose parts do not meet (send/recv, copies on one device) is one item a part,
 * which waits for the events of all that it reads.
 *
 * Parts of asynchronous devices issue to their streams: before its share a part's stream waits
 * for what the others hold, at its end for what the others did, unless the devices' library
 * (NCCL) runs the collective (`native`).
 *
 * Invariant: parts enter the queues in the controller's order, so no two collectives cross.
 * Poison of one input becomes the poison of all outputs, and the parts still meet.
 * To add a collective: build its pieces as orr_comm_reduce_into does.
 */
#include "comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "timeline.h"

orr_status (*orr_collective_hook)(const orr_collective *c) = NULL;

/* ---- building ---- */

orr_status orr_collective_new(int n, int n_src, int n_dst, orr_collective **out) {
  size_t pieces = (size_t)n_src + (size_t)n_dst;
  orr_collective *c = malloc(sizeof *c + pieces * sizeof *c->src + (size_t)n * sizeof *c->part);
  if (!c) return orr_fail(ORR_EMEM, "out of host memory for a collective of %d devices", n);
  memset(c, 0, sizeof *c);
  c->n = n;
  c->n_src = n_src;
  c->width = 1;
  c->n_dst = n_dst ? n_dst : n_src;
  c->src = (orr_piece *)(c + 1);
  c->dst = n_dst ? c->src + n_src : c->src;
  c->part = (orr_part *)(c->src + pieces);
  memset(c->part, 0, (size_t)n * sizeof *c->part);
  atomic_init(&c->holders, n);
  *out = c;
  return ORR_OK;
}

orr_status orr_collective_copy(const orr_collective *c, orr_collective **out) {
  int pieces = c->n_src && c->src == c->dst ? 0 : c->n_dst;
  orr_collective *copy;
  ORR_TRY(orr_collective_new(c->n, c->n_src, pieces, &copy));
  orr_piece *src = copy->src, *dst = copy->dst;
  orr_part *part = copy->part;
  memcpy(copy, c, sizeof *c);
  copy->src = memcpy(src, c->src, (size_t)c->n_src * sizeof *src);
  copy->dst = pieces ? memcpy(dst, c->dst, (size_t)pieces * sizeof *dst) : dst;
  copy->part = memcpy(part, c->part, (size_t)c->n * sizeof *part);
  atomic_init(&copy->holders, c->n);
  *out = copy;
  return ORR_OK;
}

void orr_collective_free(orr_collective *take_c) {
  free(take_c->deps);
  free(take_c);
}

void orr_piece_fill(orr_piece *piece, const orr_tensor *t, int rank) {
  int64_t local[ORR_MAX_DIM];
  piece->buffer = orr_tensor_buffer(t, rank);
  piece->lo[0] = 0; /* a tensor without dims may be seen as one with one */
  orr_tensor_view(t, rank, &piece->view);
  orr_layout_local(t->layout, rank, t->meta.ndim, t->meta.shape, local, piece->lo);
}

/* ---- the items: workers ---- */

static bool is_poisoned(const orr_piece *p) {
  return atomic_load_explicit(&p->buffer->poison, memory_order_relaxed) == orr_poison_epoch();
}

/* The sources that a part answers for: its own where parts meet, else all. */
static bool sources_poisoned(const orr_collective *c, int part) {
  int step = c->meets ? c->n : 1;
  for (int k = c->meets ? part : 0; k < c->n_src; k += step)
    if (is_poisoned(&c->src[k])) return true;
  return false;
}

static void mark_targets(const orr_collective *c, int part, bool poisoned) {
  unsigned value = poisoned ? orr_poison_epoch() : 0;
  for (int k = part; k < c->n_dst; k += c->n)
    atomic_store_explicit(&c->dst[k].buffer->poison, value, memory_order_relaxed);
}

static void let_go(orr_collective *c) {
  if (atomic_fetch_sub(&c->holders, 1) == 1) orr_collective_free(c);
}

/* The part's stream goes on after all that the other parts' streams have been given. */
static orr_status wait_for_peers(const orr_collective *c, int part) {
  struct orr_queue *q = c->part[part].queue;
  for (int k = 0; k < c->n; k++)
    if (c->part[k].queue != q) ORR_TRY(orr_queue_wait(q, c->part[k].queue));
  return ORR_OK;
}

static bool is_async(const orr_collective *c, int part) {
  return orr_backend_is_async(c->part[part].device->backend);
}

/* Streams of other parts hold what the part reads, and read what it writes. */
static orr_status run_async(orr_collective *c, int part) {
  const orr_backend *backend = c->part[part].device->backend;
  if (c->native) return backend->collective_run(c, part);
  if (c->meets) ORR_TRY(wait_for_peers(c, part));
  ORR_TRY(c->run(c, part));
  return backend->check(c->part[part].queue);
}

static orr_status work(orr_collective *c, int part) {
  bool queued = !c->now && is_async(c, part);
  orr_status status = queued ? run_async(c, part) : c->run(c, part);
  if (queued && !status && orr_timeline_on())
    status = c->part[part].device->backend->finish(c->part[part].queue);
  return status;
}

static orr_status work_on(orr_collective *c, int part) {
  if (!orr_timeline_on()) return work(c, part);
  orr_timeline_event e = {.name = c->name ? c->name : "copy",
                          .device = c->part[part].device,
                          .use_comm = c->use_comm,
                          .mark = c->mark,
                          .start = orr_seconds()};
  orr_status status = work(c, part);
  e.end = orr_seconds();
  orr_timeline_add(&e);
  return status;
}

/* What fails on one part poisons the targets of all. */
static void try_part(orr_collective *c, int part) {
  char message[1300];
  orr_status status = work_on(c, part);
  if (!status) return;
  snprintf(message, sizeof message, "%s on %s: %.1000s", c->name ? c->name : "copy",
           c->part[part].device->name, orr_last_error());
  orr_work_error(status, message);
  atomic_store(&c->poisoned, true);
}

static bool all_arrived(void *arg, int part) {
  orr_collective *c = arg;
  if (c->part[part].arrived) return atomic_load(&c->arrived) == c->n;
  c->part[part].arrived = true;
  if (sources_poisoned(c, part)) atomic_store(&c->poisoned, true);
  if (atomic_fetch_add(&c->arrived, 1) + 1 < c->n) return false;
  orr_queue_notify();
  return true;
}

static void run_part(void *arg, int part) {
  orr_collective *c = arg;
  int n = c->n;
  if (!atomic_load(&c->poisoned)) try_part(c, part);
  if (atomic_fetch_add(&c->finished, 1) + 1 == n) orr_queue_notify();
}

static bool all_finished(void *arg, int part) {
  orr_collective *c = arg;
  (void)part;
  return atomic_load(&c->finished) == c->n;
}

static void end_part(void *arg, int part) {
  orr_collective *c = arg;
  if (is_async(c, part) && !c->native && wait_for_peers(c, part)) {
    orr_work_error(ORR_EDEVICE, orr_last_error());
    atomic_store(&c->poisoned, true);
  }
  mark_targets(c, part, atomic_load(&c->poisoned));
  let_go(c);
}

static void run_single(void *arg, int part) {
  orr_collective *c = arg;
  bool poisoned = sources_poisoned(c, part);
  if (!poisoned) try_part(c, part);
  mark_targets(c, part, poisoned || atomic_load(&c->poisoned));
  let_go(c);
}

/* ---- issuing: the controller ---- */

static int sources_from(const orr_collective *c, int part) { return c->meets ? part : 0; }
static int sources_step(const orr_collective *c) { return c->meets ? c->n : 1; }

static int part_deps_max(const orr_collective *c, int part) {
  int n = 0;
  for (int k = sources_from(c, part); k < c->n_src; k += sources_step(c))
    n += orr_buffer_deps_max(c->src[k].buffer);
  for (int k = part; k < c->n_dst; k += c->n) n += orr_buffer_deps_max(c->dst[k].buffer);
  return n;
}

static int part_deps(const orr_collective *c, int part, orr_event *deps) {
  struct orr_queue *q = c->part[part].queue;
  int n = 0;
  for (int k = sources_from(c, part); k < c->n_src; k += sources_step(c))
    n = orr_buffer_read_deps(c->src[k].buffer, q, deps, n);
  for (int k = part; k < c->n_dst; k += c->n)
    n = orr_buffer_write_deps(c->dst[k].buffer, q, deps, n);
  return n;
}

/* Pushes one part; *pushed: of its items. */
static orr_status push_part(orr_collective *c, int part, const orr_event *deps, int n_deps,
                            int *pushed) {
  orr_part *p = &c->part[part];
  orr_item item = {.deps = deps, .n_deps = n_deps, .arg = c, .part = part};
  item.ready = c->meets ? all_arrived : NULL;
  item.run = c->meets ? run_part : run_single;
  *pushed = 0;
  ORR_TRY(orr_queue_push(p->queue, &item, &p->done));
  *pushed = 1;
  if (!c->meets) return ORR_OK;
  orr_item end = {.ready = all_finished, .run = end_part, .arg = c, .part = part};
  ORR_TRY(orr_queue_push(p->queue, &end, &p->done));
  *pushed = 2;
  return ORR_OK;
}

/* Parts from `from` on will not come: the others need not wait for them, and are poisoned;
 * the error is queued too, so that raising it clears the poison. */
static void withdraw(orr_collective *c, int from, int pushed, orr_status status) {
  int missing = c->n - from - (pushed > 0);
  orr_work_error(status, orr_last_error());
  atomic_store(&c->poisoned, true);
  if (c->meets) {
    atomic_fetch_add(&c->arrived, missing);
    atomic_fetch_add(&c->finished, missing);
    orr_queue_notify();
  }
  for (int k = from; k < c->n; k++) mark_targets(c, k, true);
}

static orr_status note_events(const orr_collective *c, int part) {
  orr_event done = c->part[part].done;
  if (c->src != c->dst) {
    for (int k = sources_from(c, part); k < c->n_src; k += sources_step(c))
      ORR_TRY(orr_buffer_add_reader(c->src[k].buffer, done));
  }
  for (int k = part; k < c->n_dst; k += c->n) orr_buffer_set_writer(c->dst[k].buffer, done);
  return ORR_OK;
}

/* Only the end of the last part could not be pushed: all parts meet and work, and the
 * controller stands in for that end. */
static orr_status end_here(orr_collective *c) {
  for (int k = 0; k < c->n; k++) ORR_TRY(orr_event_wait(c->part[k].done));
  mark_targets(c, c->n - 1, atomic_load(&c->poisoned));
  return ORR_OK;
}

/* The controller holds c while it pushes, so that c outlives its parts. Events are noted
 * last: noting may wait, and a part can only end when all have come. */
static orr_status push_all(orr_collective *c) {
  int room = 0, pushed = 0, part = 0;
  orr_status status = ORR_OK;
  for (int k = 0; k < c->n; k++) room += part_deps_max(c, k);
  c->deps = malloc((size_t)room * sizeof *c->deps + 1);
  if (!c->deps) {
    int n = c->n;
    orr_collective_free(c);
    return orr_fail(ORR_EMEM, "out of host memory for a collective of %d devices", n);
  }
  atomic_fetch_add(&c->holders, 1);
  for (orr_event *deps = c->deps; part < c->n; part++) {
    int n_deps = part_deps(c, part, deps);
    status = push_part(c, part, deps, n_deps, &pushed);
    if (status) break;
    deps += part_deps_max(c, part);
  }
  bool cut = status && pushed; /* a first item without its second one, which still looks at c */
  if (cut && part == c->n - 1) status = end_here(c);
  else if (status) withdraw(c, part, pushed, status);
  for (int k = 0; k < part + cut; k++) {
    orr_status noted = note_events(c, k);
    if (!status) status = noted;
  }
  if (cut) (void)orr_event_wait(c->part[part].done);
  for (int k = part; k < c->n; k++) let_go(c);
  let_go(c);
  return status;
}

static orr_status run_now(orr_collective *c) {
  orr_status status = ORR_OK;
  c->now = true;
  for (int k = 0; k < c->n_src && !status; k++) status = orr_buffer_wait_read(c->src[k].buffer);
  for (int k = 0; k < c->n_dst && !status; k++)
    status = orr_buffer_wait_write(c->dst[k].buffer);
  for (int k = 0; k < c->n_src && !status; k++) {
    if (!is_poisoned(&c->src[k])) continue;
    status = orr_synchronize(NULL); /* says what failed */
    if (!status)
      status = orr_fail(ORR_EDEVICE, "a tensor's values are lost: work on it failed");
  }
  for (int k = 0; k < c->n && !status; k++) {
    status = work_on(c, k);
    if (!status) mark_targets(c, k, false);
  }
  orr_collective_free(c);
  return status;
}

static bool all_reach(const orr_collective *c, const orr_backend *backend) {
  for (int k = 0; k < c->n * c->n; k++) {
    if (!backend->reaches(c->part[k / c->n].device, c->part[k % c->n].device)) return false;
  }
  return true;
}

/* An all-reduce writes in the others' targets. Devices that cannot use each other's memory have
 * their library for it; where that will not, each pulls all terms, by way of the host. */
static orr_status stage_all_reduce(orr_collective *c, const orr_backend *backend) {
  if (c->native || c->run != orr_run_all_reduce || !orr_backend_is_async(backend) ||
      all_reach(c, backend))
    return ORR_OK;
  if (c->src == c->dst) {
    return orr_fail(ORR_EDEVICE,
                    "%s: %s and the devices beside it cannot use each other's memory, and NCCL "
                    "does not reduce these tensors in place",
                    c->name, c->part[0].device->name);
  }
  c->run = orr_run_exchange;
  c->width = c->n;
  return ORR_OK;
}

orr_status orr_collective_issue(orr_collective *take_c) {
  orr_collective *c = take_c;
  const orr_backend *backend = c->part[0].device->backend;
  bool now = false;
  c->mark = orr_timeline_marked();
  for (int k = 0; k < c->n; k++) {
    orr_part *p = &c->part[k];
    if (p->device->kind == ORR_DEVICE_META) { /* shapes alone */
      orr_collective_free(c);
      return ORR_OK;
    }
    p->queue = c->use_comm ? p->device->comm : p->device->compute;
    if (p->device->is_inline) now = true;
  }
  if (orr_collective_hook) {
    orr_status seen = orr_collective_hook(c);
    if (seen) {
      orr_collective_free(c);
      return seen;
    }
  }
  if (now) return run_now(c);
  c->native = c->meets && orr_backend_is_async(backend) && backend->collective_new(c);
  orr_status status = stage_all_reduce(c, backend);
  if (!status) return push_all(c);
  orr_collective_free(c);
  return status;
}

/* ---- all-reduce ---- */

static int64_t shard_bytes(const orr_tensor *t, int rank) {
  return orr_numel(t->meta.ndim, t->shard[rank].shape) * (int64_t)orr_dtype_size(t->meta.dtype);
}

static orr_status reduce_group(orr_tensor *const *ts, orr_tensor *const *out, int n, int axis,
                               orr_partial_kind op, bool use_comm, int first) {
  enum { SMALL_BYTES = 4096 };
  const orr_mesh *mesh = ts[0]->layout->mesh;
  int members = mesh->size[axis], at, step;
  int64_t bytes = 0;
  orr_collective *c;
  orr_mesh_group(mesh, first, axis, &at, &step);
  ORR_TRY(orr_collective_new(members, n * members, ts == out ? 0 : n * members, &c));
  for (int k = 0; k < members; k++, at += step) {
    c->part[k].device = orr_device_at(mesh->device[at]);
    for (int t = 0; t < n; t++) {
      orr_piece_fill(&c->src[t * members + k], ts[t], at);
      if (ts != out) orr_piece_fill(&c->dst[t * members + k], out[t], at);
    }
  }
  for (int t = 0; t < n; t++) bytes += shard_bytes(ts[t], first);
  c->run = orr_run_all_reduce;
  c->kind = ORR_ALL_REDUCE;
  c->in_place = true;
  c->name = orr_collective_name(ORR_ALL_REDUCE);
  c->op = op;
  c->meets = true;
  c->alone = bytes <= SMALL_BYTES;
  c->use_comm = use_comm;
  orr_flatten_all_reduce(c);
  orr_trace_add(ORR_ALL_REDUCE, mesh->name[axis], members, bytes);
  return orr_collective_issue(c);
}

orr_status orr_comm_reduce_into(orr_tensor *const *ts, orr_tensor *const *out, int n, int axis,
                                orr_partial_kind op, bool use_comm) {
  if (n == 0) return ORR_OK;
  const orr_mesh *mesh = ts[0]->layout->mesh;
  for (int r = 0; r < mesh->n; r++) {
    if (orr_mesh_coordinate(mesh, r, axis)) continue;
    ORR_TRY(reduce_group(ts, out, n, axis, op, use_comm, r));
  }
  return ORR_OK;
}

static bool repeats(const orr_tensor *t) {
  for (int r = 0; r < t->n; r++)
    for (int d = 0; d < t->meta.ndim; d++)
      if (t->shard[r].stride[d] == 0 && t->shard[r].shape[d] > 1) return true;
  return false;
}

orr_status orr_comm_all_reduce(orr_tensor *const *ts, int n, int axis, orr_partial_kind op,
                               bool use_comm) {
  for (int k = 0; k < n; k++) {
    const orr_mesh *mesh = ts[k]->layout->mesh;
    if (mesh != ts[0]->layout->mesh || axis < 0 || axis >= mesh->n_axes)
      return orr_fail(ORR_EARG, "all_reduce: the tensors need one mesh, and one of its axes");
    if (ts[k]->layout->axis[axis].kind == ORR_SHARD)
      return orr_fail(ORR_EARG, "all_reduce: a tensor is sharded along the axis '%s'",
                      mesh->name[axis]);
    if (repeats(ts[k]))
      return orr_fail(ORR_EARG,
                      "all_reduce: cannot write to an expanded tensor, whose elements "
                      "share memory; clone it first");
  }
  if (n == 0 || ts[0]->layout->mesh->size[axis] == 1) return ORR_OK;
  orr_status status = orr_comm_reduce_into(ts, ts, n, axis, op, use_comm);
  for (int k = 0; k < n; k++) orr_tensor_wrote(ts[k]);
  return status;
}

/* ---- the trace ---- */

static struct trace {
  bool on;
  orr_trace_row *row;
  int n, cap;
} trace;

const char *orr_collective_name(orr_collective_kind kind) {
  static const char *const names[] = {
      [ORR_ALL_REDUCE] = "all_reduce",         [ORR_ALL_GATHER] = "all_gather",
      [ORR_REDUCE_SCATTER] = "reduce_scatter", [ORR_ALL_TO_ALL] = "all_to_all",
      [ORR_BROADCAST] = "broadcast",           [ORR_SEND_RECV] = "send_recv"};
  return names[kind];
}

void orr_trace_start(void) {
  trace.on = true;
  trace.n = 0;
}

bool orr_tracing(void) { return trace.on; }

int orr_trace_stop(const orr_trace_row **rows) {
  trace.on = false;
  *rows = trace.row;
  return trace.n;
}

/* Of the payload, what a device sends in a ring of n. */
static double ring_share(orr_collective_kind kind, int n) {
  double rest = (double)(n - 1) / n;
  switch (kind) {
    case ORR_ALL_REDUCE: return 2 * rest;
    case ORR_ALL_GATHER:
    case ORR_REDUCE_SCATTER: return rest;
    case ORR_ALL_TO_ALL: return rest / n;
    default: return 1;
  }
}

void orr_trace_add(orr_collective_kind kind, const char *axis, int n, int64_t bytes) {
  if (!trace.on) return;
  double moved = (double)bytes * ring_share(kind, n);
  for (int k = 0; k < trace.n; k++) {
    orr_trace_row *row = &trace.row[k];
    if (row->kind != kind || strcmp(row->axis, axis) != 0) continue;
    row->bytes += bytes;
    row->moved += moved;
    row->count++;
    return;
  }
  if (trace.n == trace.cap) {
    int cap = trace.cap ? 2 * trace.cap : 16;
    orr_trace_row *grown = realloc(trace.row, (size_t)cap * sizeof *grown);
    if (!grown) return; /* a row less: the trace says nothing false about the others */
    trace.row = grown;
    trace.cap = cap;
  }
  trace.row[trace.n++] = (orr_trace_row){kind, axis, bytes, 1, moved};
}
