/* op_run.c: runs a placed call. On the caller's thread at once where the device is inline, else
 * as one record that every device's queue holds an item of. Profile, anomaly mode and the
 * poison of failed items live here, once for all ops.
 *
 * Invariant: a record is immutable once pushed, and freed by whoever finishes its last shard;
 * the buffers' events are updated before the next call is looked at.
 * To add what every op must do when it runs: run_shard (workers) or orr_run_call (controller).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op.h"
#include "op_profile.h"
#include "timeline.h"

static int views_of(const orr_call *c) { return c->n_in + c->n_out; }

static void fill_shard(const orr_call *c, orr_work *w, int shard) {
  int at = shard * views_of(c);
  for (int k = 0; k < c->n_in; k++, at++) {
    const orr_tensor *t = c->in[k];
    w->buffer[at] = t ? orr_tensor_buffer(t, shard) : NULL;
    if (t) orr_tensor_view(t, shard, &w->view[at]);
  }
  for (int k = 0; k < c->n_out; k++, at++) {
    w->buffer[at] = orr_tensor_buffer(c->out[k], shard);
    orr_tensor_view(c->out[k], shard, &w->view[at]);
  }
}

static void fill_header(const orr_call *c, orr_work *w) {
  const orr_tensor *t = c->n_out ? c->out[0] : c->in[0];
  w->op = c->op;
  w->k = orr_device_at(t->layout->mesh->device[0])->backend->kernels;
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

static orr_status wait_inline(const orr_call *c) {
  for (int k = 0; k < c->n_in; k++) {
    if (!c->in[k]) continue;
    const orr_buffer *b = orr_tensor_buffer(c->in[k], 0);
    ORR_TRY(k < c->n_written ? orr_buffer_wait_write(b) : orr_buffer_wait_read(b));
  }
  for (int k = 0; k < c->n_out; k++)
    ORR_TRY(orr_buffer_wait_write(orr_tensor_buffer(c->out[k], 0)));
  return ORR_OK;
}

static orr_status run_inline(orr_call *c) {
  enum { SMALL = 8 };
  orr_view small_view[SMALL];
  orr_buffer *small_buffer[SMALL];
  int64_t origin[1][ORR_MAX_DIM];
  int n = views_of(c);
  orr_work w;
  w.view = small_view;
  w.buffer = small_buffer;
  w.origin = origin;
  ORR_TRY(wait_inline(c));
  if (n > SMALL) {
    w.view = malloc((size_t)n * (sizeof *w.view + sizeof *w.buffer));
    if (!w.view) return orr_fail(ORR_EMEM, "out of host memory for a call of %d tensors", n);
    w.buffer = (orr_buffer **)(w.view + n);
  }
  fill_header(c, &w);
  fill_shard(c, &w, 0);
  if (c->op->flags & ORR_OP_ORIGIN) memset(origin, 0, sizeof origin);
  orr_status status = run_timed(&w, 0);
  if (w.view != small_view) free(w.view);
  return status;
}

/* ---- queued ---- */

static bool poisoned(const orr_work *w, int shard) {
  unsigned epoch = orr_poison_epoch();
  int base = shard * (w->n_in + w->n_out);
  for (int k = 0; k < w->n_in; k++) {
    const orr_buffer *b = w->buffer[base + k];
    if (b && atomic_load_explicit(&b->poison, memory_order_relaxed) == epoch) return true;
  }
  return false;
}

static void set_poison(const orr_work *w, int shard, unsigned value) {
  int base = shard * (w->n_in + w->n_out) + w->n_in;
  for (int k = w->in_place ? 1 : 0; k < w->n_out; k++)
    atomic_store_explicit(&w->buffer[base + k]->poison, value, memory_order_relaxed);
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

static void run_shard(void *arg, int shard) {
  orr_work *w = arg;
  if (poisoned(w, shard)) {
    set_poison(w, shard, orr_poison_epoch());
  } else {
    orr_status status = run_timed(w, shard);
    if (status) report(w, shard, status);
    set_poison(w, shard, status ? orr_poison_epoch() : 0);
  }
  if (atomic_fetch_sub(&w->left, 1) == 1) free(w);
}

static int deps_max(const orr_call *c, int shard) {
  int n = 0;
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k]) n += orr_buffer_deps_max(orr_tensor_buffer(c->in[k], shard));
  for (int k = 0; k < c->n_out; k++)
    n += orr_buffer_deps_max(orr_tensor_buffer(c->out[k], shard));
  return n;
}

static orr_status work_new(const orr_call *c, int n_shards, int n_deps, orr_work **out,
                           orr_event **deps) {
  size_t n = (size_t)views_of(c) * (size_t)n_shards, shards = (size_t)n_shards;
  orr_work *w = malloc(sizeof *w + n * sizeof *w->view + shards * sizeof *w->origin +
                       (size_t)n_deps * sizeof **deps + n * sizeof *w->buffer);
  if (!w) return orr_fail(ORR_EMEM, "out of host memory for a call record");
  w->view = (orr_view *)(w + 1);
  w->origin = (void *)(w->view + n);
  *deps = (orr_event *)(w->origin + shards);
  w->buffer = (orr_buffer **)(*deps + n_deps);
  atomic_init(&w->left, n_shards);
  *out = w;
  return ORR_OK;
}

/* Tells the buffers of a shard who will read and write them. */
static orr_status update_events(const orr_call *c, int shard, orr_event e) {
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k] && k >= c->n_written)
      ORR_TRY(orr_buffer_add_reader(orr_tensor_buffer(c->in[k], shard), e));
  for (int k = 0; k < c->n_written; k++)
    if (c->in[k]) orr_buffer_set_writer(orr_tensor_buffer(c->in[k], shard), e);
  for (int k = 0; k < c->n_out; k++)
    orr_buffer_set_writer(orr_tensor_buffer(c->out[k], shard), e);
  return ORR_OK;
}

static orr_status push_shard(const orr_call *c, orr_work *w, int shard, orr_event *deps) {
  orr_device *d = orr_device_at(w->mesh->device[shard]);
  orr_item item = {.deps = deps, .run = run_shard, .arg = w, .part = shard};
  for (int k = 0; k < c->n_in; k++) {
    if (!c->in[k]) continue;
    const orr_buffer *b = orr_tensor_buffer(c->in[k], shard);
    item.n_deps = k < c->n_written ? orr_buffer_write_deps(b, d->compute, deps, item.n_deps)
                                   : orr_buffer_read_deps(b, d->compute, deps, item.n_deps);
  }
  for (int k = 0; k < c->n_out; k++)
    item.n_deps = orr_buffer_write_deps(orr_tensor_buffer(c->out[k], shard), d->compute, deps,
                                        item.n_deps);
  orr_event done;
  ORR_TRY(orr_queue_push(d->compute, &item, &done));
  return update_events(c, shard, done);
}

static orr_status run_queued(orr_call *c, int n_shards) {
  int n_deps = 0;
  orr_work *w;
  orr_event *deps;
  for (int r = 0; r < n_shards; r++) n_deps += deps_max(c, r);
  ORR_TRY(work_new(c, n_shards, n_deps, &w, &deps));
  fill_header(c, w);
  if (orr_where_hook) orr_where_hook(&w->source, &w->line);
  for (int r = 0; r < n_shards; r++) fill_shard(c, w, r);
  if (c->op->flags & ORR_OP_ORIGIN) fill_origin(c, w);
  for (int r = 0; r < n_shards; r++) {
    int room = deps_max(c, r);
    ORR_TRY(push_shard(c, w, r, deps));
    deps += room;
  }
  return ORR_OK;
}

orr_status orr_run_call(orr_call *c) {
  const orr_tensor *t = c->n_out ? c->out[0] : c->in[0];
  const orr_device *d = orr_device_at(t->layout->mesh->device[0]);
  orr_status status = ORR_OK;
  if (d->kind == ORR_DEVICE_META) orr_profile_count(c);
  else status = d->is_inline ? run_inline(c) : run_queued(c, t->n);
  for (int k = 0; k < c->n_written && !status; k++)
    if (c->in[k]) c->in[k]->storage->version++;
  if (!status && orr_anomaly_watching()) status = orr_anomaly_check(c);
  return status;
}
