/* engine.c: the engines without threads: inline, and shuffle, which looks for missing events.
 *
 * Invariant: both run the items that the thread engine would run, on the controller, one at a
 * time. shuffle leaves an item queued until somebody waits (or, now and then, at a push), and
 * takes the heads in a seeded random order: work that relied on luck instead of an event comes
 * out wrong.
 * To add an order: a case in orr_engine_pushed and in orr_engine_wait.
 */
#include <inttypes.h>
#include <stdio.h>

#include "interrupt.h"
#include "machine.h"

enum {
  PUSHES_PER_RUN = 8, /* shuffle: one push in so many runs a few heads */
  MOST_PENDING = 8192 /* shuffle: beyond it a push runs one */
};

static uint64_t next_random(void) {
  uint64_t x = orr_engine.random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  orr_engine.random = x;
  return x * 0x2545F4914F6CDD1Dull >> 32;
}

/* With the device's own team, as its thread would have: libraries cut sums by it. */
static bool step(orr_queue *q) {
  orr_engine.running = true;
  if (!q->is_async) orr_cpu_team(q->device->threads);
  bool ran = orr_queue_step(q);
  if (!q->is_async) orr_cpu_team(orr_device_at(0)->threads);
  orr_engine.running = false;
  return ran;
}

/* Looks at every queue twice before it gives up: the first look at a head may be what another
 * head's ready() waits for. */
static bool run_any(uint64_t first) {
  int n = orr_engine.n_queues;
  for (int k = 0; orr_engine.pending && k < 2 * n; k++) {
    if (step(orr_engine.queue[(first + (uint64_t)k) % (uint64_t)n])) return true;
  }
  return false;
}

static void run_all(void) {
  bool moved = true;
  for (int pass = 0; orr_engine.pending && (moved || pass < 2); pass = moved ? 0 : pass + 1) {
    moved = false;
    for (int k = 0; k < orr_engine.n_queues; k++) {
      if (step(orr_engine.queue[k])) moved = true;
    }
  }
}

/* Asks asynchronous devices how far they are; false: none of them has anything to do. */
static bool poll_all(void) {
  bool pending = false;
  for (int k = 0; k < orr_engine.n_queues; k++) {
    if (!orr_queue_is_pending(orr_engine.queue[k])) continue;
    pending = true;
    orr_queue_poll(orr_engine.queue[k]);
  }
  return pending;
}

void orr_engine_pushed(orr_queue *q) {
  if (orr_engine.running) return;
  if (orr_engine.kind == ORR_ENGINE_INLINE) {
    step(q);
    run_all();
    return;
  }
  if (next_random() % PUSHES_PER_RUN == 0) {
    for (uint64_t n = next_random() % 4; n > 0 && run_any(next_random()); n--) {}
  }
  if (orr_engine.pending > MOST_PENDING) run_any(next_random());
}

orr_status orr_engine_wait(orr_event e, bool polls) {
  while (!orr_event_done(e)) {
    if (polls && orr_interrupt_pending()) return orr_fail(ORR_EINTERRUPT, "interrupted");
    uint64_t first = orr_engine.kind == ORR_ENGINE_INLINE ? 0 : next_random();
    if (!run_any(first) && !poll_all() && !orr_event_done(e)) return orr_engine_stuck(e);
  }
  return ORR_OK;
}

orr_status orr_engine_stuck(orr_event e) {
  char heads[1200];
  size_t at = 0;
  heads[0] = '\0';
  for (int k = 0; k < orr_engine.n_queues && at < sizeof heads - 120; k++) {
    orr_queue *q = orr_engine.queue[k];
    orr_event on;
    if (orr_queue_is_empty(q)) continue;
    uint64_t ran = atomic_load(q->is_async ? &q->ran : &q->done);
    int wrote = snprintf(heads + at, sizeof heads - at, "; %s %s: item %" PRIu64 " waits for ",
                         q->device->name, q->label, ran + 1);
    at += (size_t)wrote;
    if (orr_queue_blocker(q, &on)) {
      wrote = snprintf(heads + at, sizeof heads - at, "item %" PRIu64 " of %s %s", on.seq,
                       on.queue->device->name, on.queue->label);
    } else {
      wrote = snprintf(heads + at, sizeof heads - at, "its other parts");
    }
    at += (size_t)wrote;
  }
  return orr_fail(ORR_EDEVICE, "nothing can run, and item %" PRIu64 " of %s %s is waited for%s",
                  e.seq, e.queue->device->name, e.queue->label, heads);
}

orr_status orr_drain(orr_device *d, bool polls) {
  for (int k = 0; k < orr_engine.n_queues; k++) {
    orr_queue *q = orr_engine.queue[k];
    orr_event last = {q, atomic_load(&q->pushed)};
    if ((d && q->device != d) || orr_event_done(last)) continue;
    ORR_TRY(orr_engine.kind == ORR_ENGINE_THREAD ? orr_thread_wait(last, polls)
                                                 : orr_engine_wait(last, polls));
  }
  return ORR_OK;
}
