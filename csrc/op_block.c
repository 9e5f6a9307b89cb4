/* op_block.c: calls in a row as one item a device (op_block.h).
 *
 * Invariant: a part lists what its device does, in order, and every buffer that this touches,
 * once. An item waits for all that any of its calls would wait for, and is what later calls
 * wait for.
 * To add to what an item does beside its calls: run_part.
 */
#include "op_block.h"

#include <stdlib.h>
#include <string.h>

#include "op.h"
#include "op_profile.h"
#include "timeline.h"

typedef struct orr_touch {
  orr_buffer *buffer;
  bool writes;
} orr_touch;

typedef struct orr_block_part {
  orr_device *device;
  struct orr_block_call {
    const orr_work *work;
    int shard;
  } * call;
  int n;
  orr_touch *touch;
  int n_touched;
  void *graph; /* worker: the backend's, of the same calls; NULL: none yet */
} orr_block_part;

struct orr_block {
  int n;
  orr_block_part part[];
};

/* One push of a part: its events live as long as the item. */
typedef struct orr_block_item {
  orr_block_part *part;
  orr_event deps[];
} orr_block_item;

bool orr_block_takes(const orr_work *w) {
  return !orr_device_at(w->mesh->device[0])->is_inline && !(w->op->flags & ORR_OP_KEYED);
}

/* ---- workers ---- */

/* For a graph: what fails is nobody's error, the calls are then issued one by one. */
static orr_status issue(void *arg) {
  const orr_block_part *p = arg;
  for (int k = 0; k < p->n; k++)
    ORR_TRY(p->device->backend->run(p->call[k].work, p->call[k].shard));
  return ORR_OK;
}

static bool is_clean(const orr_block_part *p) {
  unsigned epoch = orr_poison_epoch();
  for (int k = 0; k < p->n_touched; k++)
    if (atomic_load_explicit(&p->touch[k].buffer->poison, memory_order_relaxed) == epoch)
      return false;
  return true;
}

/* A poisoned buffer makes some calls skip, and who measures wants to see each. */
static void run_part(void *arg, int unused) {
  orr_block_item *item = arg;
  orr_block_part *p = item->part;
  const orr_backend *backend = p->device->backend;
  (void)unused;
  bool whole = backend->graph_run && is_clean(p) && !orr_profiling() && !orr_timeline_on();
  if (!whole || !backend->graph_run(p->device->compute, &p->graph, issue, p)) {
    for (int k = 0; k < p->n; k++) (void)orr_work_issue(p->call[k].work, p->call[k].shard);
  }
  free(item);
}

/* ---- building ---- */

static orr_block_part *part_of(orr_block *b, orr_device *d) {
  for (int k = 0; k < b->n; k++)
    if (b->part[k].device == d) return &b->part[k];
  b->part[b->n].device = d;
  return &b->part[b->n++];
}

static void touch(orr_block_part *p, orr_buffer *b, bool writes) {
  for (int k = p->n_touched - 1; k >= 0; k--) {
    if (p->touch[k].buffer != b) continue;
    p->touch[k].writes = p->touch[k].writes || writes;
    return;
  }
  p->touch[p->n_touched++] = (orr_touch){b, writes};
}

static void add_shard(orr_block_part *p, const orr_work *w, int shard) {
  int views = w->n_in + w->n_out;
  p->call[p->n++] = (struct orr_block_call){w, shard};
  for (int k = 0; k < views; k++) {
    orr_buffer *b = w->buffer[shard * views + k];
    if (b) touch(p, b, k < w->n_written || k >= w->n_in);
  }
}

static orr_status make_room(orr_block_part *p, size_t calls, size_t buffers) {
  p->call = malloc(calls * sizeof *p->call);
  p->touch = malloc(buffers * sizeof *p->touch);
  return p->call && p->touch ? ORR_OK
                             : orr_fail(ORR_EMEM, "out of host memory for a captured step");
}

orr_status orr_block_new(orr_work *const *work, int n, orr_block **out) {
  size_t devices = 0, buffers = 0;
  for (int k = 0; k < n; k++) {
    devices += (size_t)work[k]->n_shards;
    buffers += (size_t)(work[k]->n_in + work[k]->n_out);
  }
  orr_block *b = calloc(1, sizeof *b + devices * sizeof b->part[0]);
  if (!b) return orr_fail(ORR_EMEM, "out of host memory for a captured step");
  for (int k = 0; k < n; k++) {
    for (int r = 0; r < work[k]->n_shards; r++) {
      orr_block_part *p = part_of(b, orr_device_at(work[k]->mesh->device[r]));
      orr_status status = p->call ? ORR_OK : make_room(p, (size_t)n, buffers);
      if (status) {
        orr_block_free(b);
        return status;
      }
      add_shard(p, work[k], r);
    }
  }
  *out = b;
  return ORR_OK;
}

void orr_block_free(orr_block *take_b) {
  if (!take_b) return;
  for (int k = 0; k < take_b->n; k++) {
    orr_block_part *p = &take_b->part[k];
    if (p->graph) p->device->backend->graph_free(p->graph);
    free(p->call);
    free(p->touch);
  }
  free(take_b);
}

/* ---- the controller ---- */

static orr_status push_part(orr_block_part *p) {
  struct orr_queue *q = p->device->compute;
  size_t most = 0;
  for (int k = 0; k < p->n_touched; k++)
    most += (size_t)orr_buffer_deps_max(p->touch[k].buffer);
  orr_block_item *arg = malloc(sizeof *arg + most * sizeof arg->deps[0]);
  if (!arg) return orr_fail(ORR_EMEM, "out of host memory for a captured step");
  arg->part = p;
  orr_item item = {.deps = arg->deps, .run = run_part, .arg = arg};
  for (int k = 0; k < p->n_touched; k++) {
    const orr_touch *t = &p->touch[k];
    item.n_deps = t->writes ? orr_buffer_write_deps(t->buffer, q, arg->deps, item.n_deps)
                            : orr_buffer_read_deps(t->buffer, q, arg->deps, item.n_deps);
  }
  orr_event done;
  orr_status status = orr_queue_push(q, &item, &done);
  if (status) {
    free(arg);
    return status;
  }
  for (int k = 0; k < p->n_touched; k++) {
    const orr_touch *t = &p->touch[k];
    if (t->writes) orr_buffer_set_writer(t->buffer, done);
    else ORR_TRY(orr_buffer_add_reader(t->buffer, done));
  }
  return ORR_OK;
}

orr_status orr_block_push(orr_block *b) {
  for (int k = 0; k < b->n; k++) ORR_TRY(push_part(&b->part[k]));
  return ORR_OK;
}
