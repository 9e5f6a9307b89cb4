/* queue.c: a queue of items: pushed by the controller, run in order by one thread.
 *
 * Invariant: a queue is a chain of chunks of ORR_CHUNK_ITEMS. Item seq stands in slot (seq - 1)
 * % ORR_CHUNK_ITEMS; the controller writes slot and link before it moves `pushed`, the runner
 * reads them after it saw `pushed` move. So no lock is taken, and an item has one home.
 * Of an asynchronous device (a GPU) an item has run when it is issued to the queue's stream,
 * and `done` follows when the device says so: `ran` counts the one, `done` the other.
 * To add to it: what decides whether an item may start belongs in `startable`; how idle threads
 * wait is in worker.c, orders other than the threads' in engine.c.
 */
#include <stdlib.h>

#include "machine.h"

struct orr_engine orr_engine;

static orr_chunk *chunk_new(void) {
  orr_chunk *c = malloc(sizeof *c);
  if (c) atomic_init(&c->next, NULL);
  return c;
}

orr_status orr_queue_new(orr_device *d, const char *label, orr_worker *worker,
                         orr_queue **out) {
  void *memory = NULL;
  orr_chunk *chunk = chunk_new();
  if (!chunk || posix_memalign(&memory, ORR_CACHE_LINE, sizeof(orr_queue))) {
    free(chunk);
    return orr_fail(ORR_EMEM, "out of host memory for the queues of %s", d->name);
  }
  orr_queue *q = memory;
  *q = (orr_queue){.device = d,
                   .label = label,
                   .worker = worker,
                   .is_async = orr_backend_is_async(d->backend),
                   .tail = chunk,
                   .head = chunk};
  *out = q;
  return ORR_OK;
}

/* The struct itself is kept, all its events complete: a buffer that outlives the queue may
 * still name it. */
void orr_queue_free(orr_queue *take_q) {
  static orr_queue *retired;
  if (!take_q) return;
  if (take_q->stream) take_q->device->backend->queue_close(take_q);
  take_q->stream = NULL;
  for (orr_chunk *c = take_q->head; c;) {
    orr_chunk *next = atomic_load(&c->next);
    free(c);
    c = next;
  }
  free(atomic_exchange(&take_q->spare, NULL));
  take_q->head = take_q->tail = NULL;
  atomic_store(&take_q->done, UINT64_MAX);
  atomic_store(&take_q->ran, UINT64_MAX);
  take_q->next_retired = retired;
  retired = take_q;
}

/* The slot after the last item; grows the chain where the last chunk is full. */
static orr_item *next_slot(orr_queue *q, uint64_t pushed) {
  size_t slot = pushed % ORR_CHUNK_ITEMS;
  if (slot == 0 && pushed > 0) {
    orr_chunk *c = atomic_exchange(&q->spare, NULL);
    if (c) atomic_store_explicit(&c->next, NULL, memory_order_relaxed);
    else c = chunk_new();
    if (!c) return NULL;
    atomic_store_explicit(&q->tail->next, c, memory_order_release);
    q->tail = c;
  }
  return &q->tail->item[slot];
}

orr_status orr_queue_push(orr_queue *q, const orr_item *item, orr_event *done) {
  uint64_t pushed = atomic_load_explicit(&q->pushed, memory_order_relaxed);
  if (q->is_async && !q->stream) ORR_TRY(q->device->backend->queue_open(q));
  if (orr_engine.kind == ORR_ENGINE_THREAD && !q->worker->started) {
    ORR_TRY(orr_worker_start(q->worker));
  }
  orr_item *slot = next_slot(q, pushed);
  if (!slot)
    return orr_fail(ORR_EMEM, "out of host memory for the queue of %s", q->device->name);
  *slot = *item;
  atomic_store(&q->pushed, pushed + 1);
  *done = (orr_event){q, pushed + 1};
  if (orr_engine.kind == ORR_ENGINE_THREAD) {
    orr_worker_wake(q->worker);
  } else {
    orr_engine.pending++;
    orr_engine_pushed(q);
  }
  return ORR_OK;
}

orr_event orr_queue_last(orr_queue *q) { return (orr_event){q, atomic_load(&q->pushed)}; }

bool orr_event_done(orr_event e) { return !e.queue || atomic_load(&e.queue->done) >= e.seq; }

orr_status orr_event_wait(orr_event e) {
  if (orr_event_done(e)) return ORR_OK;
  return orr_engine.kind == ORR_ENGINE_THREAD ? orr_thread_wait(e, true)
                                              : orr_engine_wait(e, true);
}

/* Items that the runner is through with: issued, where the device is asynchronous. */
static atomic_ullong *position(orr_queue *q) { return q->is_async ? &q->ran : &q->done; }

bool orr_queue_is_empty(orr_queue *q) {
  return atomic_load(position(q)) == atomic_load(&q->pushed);
}

/* The head of a queue that is not empty. Goes on to the next chunk only when there is one: an
 * emptied chunk may still be the controller's tail. */
static const orr_item *head_item(orr_queue *q, uint64_t done) {
  if (q->head_used) {
    orr_chunk *empty = q->head;
    q->head = atomic_load_explicit(&empty->next, memory_order_acquire);
    q->head_used = false;
    free(atomic_exchange(&q->spare, empty));
  }
  return &q->head->item[done % ORR_CHUNK_ITEMS];
}

orr_status orr_queue_wait(orr_queue *q, orr_queue *other) {
  return q->is_async && other->is_async ? q->device->backend->wait(q, other) : ORR_OK;
}

/* Between two streams it is enough that the event's work is issued: q's stream then waits.
 * That carries poison too, so complete work is waited for as well while an error pends. */
static bool met(orr_queue *q, orr_event e) {
  bool streams = q->is_async && e.queue && e.queue->is_async, done = orr_event_done(e);
  if (done && !(streams && orr_work_error_pending())) return true;
  if (!streams || atomic_load(&e.queue->ran) < e.seq) return done;
  q->device->backend->enter(q);
  orr_status status = q->device->backend->wait(q, e.queue);
  if (status) orr_work_error(status, orr_last_error());
  q->device->backend->enter(NULL);
  return true;
}

static bool startable(orr_queue *q, const orr_item *item) {
  while (q->deps_met < item->n_deps) {
    if (!met(q, item->deps[q->deps_met])) return false;
    q->deps_met++;
  }
  return !item->ready || item->ready(item->arg, item->part);
}

bool orr_queue_blocker(orr_queue *q, orr_event *out) {
  const orr_item *item = head_item(q, atomic_load(position(q)));
  if (q->deps_met >= item->n_deps) return false;
  *out = item->deps[q->deps_met];
  return true;
}

static void run_item(orr_queue *q, const orr_item *item) {
  if (!q->is_async) {
    item->run(item->arg, item->part);
    return;
  }
  q->device->backend->enter(q);
  item->run(item->arg, item->part);
  q->device->backend->enter(NULL);
}

bool orr_queue_step(orr_queue *q) {
  atomic_ullong *at = position(q);
  uint64_t before = atomic_load_explicit(at, memory_order_relaxed);
  if (before == atomic_load(&q->pushed)) return false;
  const orr_item *item = head_item(q, before);
  if (!startable(q, item)) return false;
  run_item(q, item);
  q->deps_met = 0;
  q->head_used = (before + 1) % ORR_CHUNK_ITEMS == 0;
  atomic_store(at, before + 1);
  if (orr_engine.kind == ORR_ENGINE_THREAD) orr_wake_for(q, before + 1);
  else orr_engine.pending--;
  return true;
}

bool orr_queue_is_pending(orr_queue *q) {
  return q->is_async && atomic_load(&q->done) < atomic_load(&q->ran);
}

bool orr_queue_poll(orr_queue *q) {
  const orr_backend *backend = q->device->backend;
  if (!orr_queue_is_pending(q)) return false;
  uint64_t ran = atomic_load(&q->ran), done = atomic_load(&q->done);
  if (q->marked < ran && backend->mark(q, ran)) q->marked = ran;
  uint64_t now = backend->completed(q);
  if (now <= done) return false;
  atomic_store(&q->done, now < ran ? now : ran);
  if (orr_engine.kind == ORR_ENGINE_THREAD) orr_wake_for(q, now);
  return true;
}
