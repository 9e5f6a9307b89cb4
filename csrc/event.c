/* event.c: which events a buffer's next reader or writer waits for, and errors of queued work.
 *
 * Invariant: a buffer's events are written by the controller as it pushes, so what an item must
 * wait for is known at the push. Items of one queue run in order, so a queue waits only for
 * other queues. An error of queued work is kept until the controller raises it; raising moves
 * the poison epoch, which makes every buffer clean at once.
 * To add to it: a rule of ordering between items belongs here, not at the pushes.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "machine.h"

/* ---- events of buffers ---- */

/* Complete, and known to be well: while an error pends, what a device has computed may be
 * poisoned without the host's knowing, and the poison goes the way of the events. */
static bool is_past(orr_event e) {
  return orr_event_done(e) && !(e.queue && e.queue->is_async && orr_work_error_pending());
}

static int add(orr_event e, const struct orr_queue *q, orr_event *deps, int n) {
  if (e.queue == q || is_past(e)) return n;
  for (int k = 0; k < n; k++) {
    if (deps[k].queue != e.queue) continue;
    if (deps[k].seq < e.seq) deps[k].seq = e.seq;
    return n;
  }
  deps[n] = e;
  return n + 1;
}

int orr_buffer_read_deps(const orr_buffer *b, struct orr_queue *q, orr_event *deps, int n) {
  return add(b->writer, q, deps, n);
}

int orr_buffer_write_deps(const orr_buffer *b, struct orr_queue *q, orr_event *deps, int n) {
  n = add(b->writer, q, deps, n);
  for (int k = 0; k < b->n_readers; k++) n = add(b->readers[k], q, deps, n);
  return n;
}

int orr_buffer_deps_max(const orr_buffer *b) { return 1 + b->n_readers; }

/* Forgets readers that are complete. */
static void prune(orr_buffer *b) {
  int kept = 0;
  for (int k = 0; k < b->n_readers; k++) {
    if (!orr_event_done(b->readers[k])) b->readers[kept++] = b->readers[k];
  }
  b->n_readers = kept;
}

orr_status orr_buffer_add_reader(orr_buffer *b, orr_event e) {
  if (!e.queue) return ORR_OK;
  for (int k = 0; k < b->n_readers; k++) {
    if (b->readers[k].queue != e.queue) continue;
    b->readers[k] = e;
    return ORR_OK;
  }
  if (b->n_readers == b->cap_readers) prune(b);
  if (b->n_readers == b->cap_readers) {
    int cap = b->cap_readers ? 2 * b->cap_readers : 2;
    orr_event *grown = realloc(b->readers, (size_t)cap * sizeof *grown);
    if (!grown) return orr_event_wait(e); /* no room to remember it: see it done */
    b->readers = grown;
    b->cap_readers = cap;
  }
  b->readers[b->n_readers++] = e;
  return ORR_OK;
}

void orr_buffer_set_writer(orr_buffer *b, orr_event e) {
  b->writer = e;
  b->n_readers = 0;
}

orr_status orr_buffer_wait_read(const orr_buffer *b) {
  return orr_event_done(b->writer) ? ORR_OK : orr_event_wait(b->writer);
}

orr_status orr_buffer_wait_write(const orr_buffer *b) {
  if (!orr_event_done(b->writer)) ORR_TRY(orr_event_wait(b->writer));
  for (int k = 0; k < b->n_readers; k++) {
    if (!orr_event_done(b->readers[k])) ORR_TRY(orr_event_wait(b->readers[k]));
  }
  return ORR_OK;
}

/* ---- errors of queued work ---- */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static orr_status first = ORR_OK;
static char text[2048];
static atomic_bool pending;
static atomic_uint epoch = 1;

void orr_work_error(orr_status status, const char *message) {
  pthread_mutex_lock(&mutex);
  if (!first && status) {
    first = status;
    snprintf(text, sizeof text, "%s", message);
    atomic_store(&pending, true);
  }
  pthread_mutex_unlock(&mutex);
}

bool orr_work_error_pending(void) {
  return atomic_load_explicit(&pending, memory_order_acquire);
}

unsigned orr_poison_epoch(void) { return atomic_load_explicit(&epoch, memory_order_relaxed); }

orr_status orr_work_error_raise(void) {
  if (!orr_work_error_pending()) return ORR_OK;
  pthread_mutex_lock(&mutex);
  orr_status status = orr_fail(first, "%s", text);
  first = ORR_OK;
  atomic_store(&pending, false);
  if (atomic_fetch_add(&epoch, 1) + 1 == 0) atomic_fetch_add(&epoch, 1); /* 0 is never poison */
  pthread_mutex_unlock(&mutex);
  return status;
}
