/* op_run.c: runs a placed call. On the caller's thread at once where the device is inline, else
 * as one record that every device's queue holds an item of. Profile, anomaly mode and the
 * poison of failed items live here, once for all ops.
 *
 * Invariant: a record is immutable once pushed, and freed by whoever finishes its last shard;
 * the buffers' events are updated before the next call is looked at. A captured step keeps
 * copies of records and runs them again (orr_work_again) without the call that made them.
 * To add what every op must do when it runs: run_shard (workers) or orr_run_call (controller).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op.h"
#include "op_capture.h"
#include "op_profile.h"
#include "timeline.h"

static int views_of(const orr_work *w) { return w->n_in + w->n_out; }

static orr_buffer **buffers_of(const orr_work *w, int shard) {
  return w->buffer + shard * views_of(w);
}

static void fill_buffers(const orr_call *c, int shard, orr_buffer **b) {
  for (int k = 0; k < c->n_in; k++) *b++ = c->in[k] ? orr_tensor_buffer(c->in[k], shard) : NULL;
  for (int k = 0; k < c->n_out; k++) *b++ = orr_tensor_buffer(c->out[k], shard);
}

static void fill_views(const orr_call *c, int shard, orr_view *v) {
  for (int k = 0; k < c->n_in; k++, v++)
    if (c->in[k]) orr_tensor_view(c->in[k], shard, v);
  for (int k = 0; k < c->n_out; k++, v++) orr_tensor_view(c->out[k], shard, v);
}

static void fill_header(const orr_call *c, orr_work *w) {
  const orr_tensor *t = c->n_out ? c->out[0] : c->in[0];
  w->op = c->op;
  w->k = orr_device_at(t->layout->mesh->device[0])->backend->kernels;
  w->has_args = c->has_args;
  if (c->has_args) w->args = c->args;
  w->n_in = c->n_in;
  w->n_out = c->n_out;
  w->n_shards = t->n;
  w->mesh = t->layout->mesh;
  w->global = t->meta;
  w->in_place = c->in_place;
  w->n_written = c->n_written;
  w->source = NULL;
  w->line = 0;
  w->mark = orr_timeline_marked();
}

static void fill_origin(const orr_call *c, orr_work *w) {
  bool of_input = !c->n_out || c->op->flags & ORR_OP_ORIGIN_IN;
  const orr_tensor *t = of_input ? c->in[0] : c->out[0];
  int64_t local[ORR_MAX_DIM];
  for (int r = 0; r < w->n_shards; r++) {
    memset(w->origin[r], 0, sizeof w->origin[r]);
    if (!orr_tensor_is_single(t))
      orr_layout_local(t->layout, r, t->meta.ndim, t->meta.shape, local, w->origin[r]);
  }
}

/* On an asynchronous device the time of an op is known when its stream is waited for: while it
 * is measured nothing overlaps. */
static orr_status run_to_end(const orr_device *d, const orr_work *w, int shard) {
  orr_status status = d->backend->run(w, shard);
  if (status || !orr_backend_is_async(d->backend)) return status;
  return d->backend->finish(d->compute);
}

static orr_status run_timed(const orr_work *w, int shard) {
  const orr_device *d = orr_device_at(w->mesh->device[shard]);
  bool profiling = orr_profiling(), timeline = orr_timeline_on();
  if (!profiling && !timeline) return d->backend->run(w, shard);
  orr_timeline_event e = {
      .name = w->op->name, .device = d, .mark = w->mark, .start = orr_seconds()};
  orr_status status = run_to_end(d, w, shard);
  e.end = orr_seconds();
  if (profiling) orr_profile_add(w, shard, e.end - e.start);
  if (timeline) orr_timeline_add(&e);
  return status;
}

/* ---- inline ---- */

static orr_status wait_inline(const orr_work *w) {
  for (int k = 0; k < views_of(w); k++) {
    if (!w->buffer[k]) continue;
    bool writes = k < w->n_written || k >= w->n_in;
    ORR_TRY(writes ? orr_buffer_wait_write(w->buffer[k]) : orr_buffer_wait_read(w->buffer[k]));
  }
  return ORR_OK;
}

static orr_status run_inline(const orr_work *w) {
  ORR_TRY(wait_inline(w));
  return run_timed(w, 0);
}

static orr_status call_inline(orr_call *c) {
  enum { SMALL = 8 };
  orr_view small_view[SMALL];
  orr_buffer *small_buffer[SMALL];
  int64_t origin[1][ORR_MAX_DIM];
  int n = c->n_in + c->n_out;
  orr_work w;
  w.view = small_view;
  w.buffer = small_buffer;
  w.origin = origin;
  if (n > SMALL) {
    w.view = malloc((size_t)n * (sizeof *w.view + sizeof *w.buffer));
    if (!w.view) return orr_fail(ORR_EMEM, "out of host memory for a call of %d tensors", n);
    w.buffer = (orr_buffer **)(w.view + n);
  }
  fill_header(c, &w);
  fill_buffers(c, 0, w.buffer);
  fill_views(c, 0, w.view);
  if (c->op->flags & ORR_OP_ORIGIN) memset(origin, 0, sizeof origin);
  orr_status status = orr_capturing() ? orr_capture_work(&w) : ORR_OK;
  if (!status) status = run_inline(&w);
  if (w.view != small_view) free(w.view);
  return status;
}

/* ---- queued ---- */

static bool poisoned(const orr_work *w, int shard) {
  unsigned epoch = orr_poison_epoch();
  orr_buffer **b = buffers_of(w, shard);
  for (int k = 0; k < w->n_in; k++) {
    if (b[k] && atomic_load_explicit(&b[k]->poison, memory_order_relaxed) == epoch) return true;
  }
  return false;
}

static void set_poison(const orr_work *w, int shard, unsigned value) {
  orr_buffer **out = buffers_of(w, shard) + w->n_in;
  for (int k = w->in_place ? 1 : 0; k < w->n_out; k++)
    atomic_store_explicit(&out[k]->poison, value, memory_order_relaxed);
}

static void report(const orr_work *w, int shard, orr_status status) {
  char message[1600];
  const orr_device *d = orr_device_at(w->mesh->device[shard]);
  int used = snprintf(message, sizeof message, "%s on %s: %.1000s", w->op->name, d->name,
                      orr_last_error());
  if (w->source && used < (int)sizeof message)
    snprintf(message + used, sizeof message - (size_t)used, " (queued at %.300s:%d)", w->source,
             w->line);
  orr_work_error(status, message);
}

void orr_work_free(orr_work *take_w) {
  if (atomic_fetch_sub(&take_w->left, 1) == 1) free(take_w);
}

orr_status orr_work_issue(const orr_work *w, int shard) {
  bool skip = poisoned(w, shard);
  orr_status status = skip ? ORR_OK : run_timed(w, shard);
  if (status) report(w, shard, status);
  set_poison(w, shard, skip || status ? orr_poison_epoch() : 0);
  return status;
}

static void run_shard(void *arg, int shard) {
  (void)orr_work_issue(arg, shard);
  orr_work_free(arg);
}

static int deps_max(orr_buffer *const *b, int n) {
  int most = 0;
  for (int k = 0; k < n; k++)
    if (b[k]) most += orr_buffer_deps_max(b[k]);
  return most;
}

/* Room for n views over n_shards shards and for n_deps events; held by the caller. */
static orr_status work_new(int n, int n_shards, int n_deps, orr_work **out, orr_event **deps) {
  size_t views = (size_t)n * (size_t)n_shards, shards = (size_t)n_shards;
  orr_work *w = malloc(sizeof *w + views * sizeof *w->view + shards * sizeof *w->origin +
                       (size_t)n_deps * sizeof **deps + views * sizeof *w->buffer);
  if (!w) return orr_fail(ORR_EMEM, "out of host memory for a call record");
  w->view = (orr_view *)(w + 1);
  w->origin = (void *)(w->view + views);
  *deps = (orr_event *)(w->origin + shards);
  w->buffer = (orr_buffer **)(*deps + n_deps);
  atomic_init(&w->left, 1);
  *out = w;
  return ORR_OK;
}

static orr_status copy_work(const orr_work *from, int n_deps, orr_work **out,
                            orr_event **deps) {
  orr_work *w;
  size_t views = (size_t)views_of(from) * (size_t)from->n_shards;
  ORR_TRY(work_new(views_of(from), from->n_shards, n_deps, &w, deps));
  orr_view *view = w->view;
  orr_buffer **buffer = w->buffer;
  int64_t(*origin)[ORR_MAX_DIM] = w->origin;
  memcpy(w, from, sizeof *w);
  w->view = memcpy(view, from->view, views * sizeof *view);
  w->buffer = memcpy(buffer, from->buffer, views * sizeof *buffer);
  w->origin = origin;
  if (w->op->flags & ORR_OP_ORIGIN)
    memcpy(origin, from->origin, (size_t)w->n_shards * sizeof *origin);
  atomic_init(&w->left, 1);
  *out = w;
  return ORR_OK;
}

orr_status orr_work_copy(const orr_work *w, orr_work **out) {
  orr_event *deps;
  return copy_work(w, 0, out, &deps);
}

/* Tells the buffers of a shard who will read and write them. */
static orr_status update_events(const orr_work *w, int shard, orr_event e) {
  orr_buffer **b = buffers_of(w, shard);
  for (int k = w->n_written; k < w->n_in; k++)
    if (b[k]) ORR_TRY(orr_buffer_add_reader(b[k], e));
  for (int k = 0; k < views_of(w); k++)
    if (b[k] && (k < w->n_written || k >= w->n_in)) orr_buffer_set_writer(b[k], e);
  return ORR_OK;
}

/* The shard holds the record from the push on. */
static orr_status push_shard(orr_work *w, int shard, orr_event *deps) {
  orr_device *d = orr_device_at(w->mesh->device[shard]);
  orr_buffer **b = buffers_of(w, shard);
  orr_item item = {.deps = deps, .run = run_shard, .arg = w, .part = shard};
  for (int k = 0; k < views_of(w); k++) {
    if (!b[k]) continue;
    bool writes = k < w->n_written || k >= w->n_in;
    item.n_deps = writes ? orr_buffer_write_deps(b[k], d->compute, deps, item.n_deps)
                         : orr_buffer_read_deps(b[k], d->compute, deps, item.n_deps);
  }
  orr_event done;
  atomic_fetch_add(&w->left, 1);
  orr_status status = orr_queue_push(d->compute, &item, &done);
  if (!status) return update_events(w, shard, done);
  atomic_fetch_sub(&w->left, 1);
  return status;
}

static orr_status push(orr_work *take_w, orr_event *deps) {
  int n = views_of(take_w), n_shards = take_w->n_shards;
  orr_status status = ORR_OK;
  for (int r = 0; r < n_shards && !status; r++) {
    int room = deps_max(buffers_of(take_w, r), n);
    status = push_shard(take_w, r, deps);
    deps += room;
  }
  orr_work_free(take_w);
  return status;
}

static orr_status call_queued(orr_call *c, int n_shards) {
  enum { SMALL = 32 };
  orr_buffer *small[SMALL], **b = small;
  int n = c->n_in + c->n_out, all = n * n_shards;
  orr_work *w = NULL;
  orr_event *deps;
  if (all > SMALL && !(b = malloc((size_t)all * sizeof *b)))
    return orr_fail(ORR_EMEM, "out of host memory for a call of %d tensors", n);
  for (int r = 0; r < n_shards; r++) fill_buffers(c, r, b + r * n);
  orr_status status = work_new(n, n_shards, deps_max(b, all), &w, &deps);
  if (!status) memcpy(w->buffer, b, (size_t)all * sizeof *b);
  if (b != small) free(b);
  if (status) return status;
  fill_header(c, w);
  if (orr_where_hook) orr_where_hook(&w->source, &w->line);
  for (int r = 0; r < n_shards; r++) fill_views(c, r, w->view + r * n);
  if (c->op->flags & ORR_OP_ORIGIN) fill_origin(c, w);
  if (orr_capturing()) status = orr_capture_work(w);
  if (!status) return push(w, deps);
  orr_work_free(w);
  return status;
}

orr_status orr_work_again(const orr_work *w) {
  orr_work *copy;
  orr_event *deps;
  if (orr_device_at(w->mesh->device[0])->is_inline) return run_inline(w);
  ORR_TRY(copy_work(w, deps_max(w->buffer, views_of(w) * w->n_shards), &copy, &deps));
  return push(copy, deps);
}

orr_status orr_run_call(orr_call *c) {
  const orr_tensor *t = c->n_out ? c->out[0] : c->in[0];
  const orr_device *d = orr_device_at(t->layout->mesh->device[0]);
  orr_status status = ORR_OK;
  if (d->kind == ORR_DEVICE_META) orr_profile_count(c);
  else status = d->is_inline ? call_inline(c) : call_queued(c, t->n);
  for (int k = 0; k < c->n_written && !status; k++)
    if (c->in[k]) orr_tensor_wrote(c->in[k]);
  if (!status && orr_anomaly_watching()) status = orr_anomaly_check(c);
  return status;
}
