/* timeline.c: the events of a timeline, in one buffer that grows.
 *
 * Invariant: workers add under one lock, which is only taken while a timeline runs. The mark is
 * the controller's; records carry a copy to the workers.
 * To add a kind of event: whoever runs it calls orr_timeline_add where orr_timeline_on().
 */
#include "timeline.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

static atomic_bool on = false;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static orr_timeline_event *event;
static int64_t n, cap, lost;
static orr_mark current;

double orr_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

bool orr_timeline_on(void) { return atomic_load_explicit(&on, memory_order_relaxed); }

void orr_timeline_start(void) {
  pthread_mutex_lock(&lock);
  n = lost = 0;
  pthread_mutex_unlock(&lock);
  atomic_store(&on, true);
}

int64_t orr_timeline_stop(const orr_timeline_event **events, int64_t *lost_out) {
  atomic_store(&on, false);
  pthread_mutex_lock(&lock);
  *events = event;
  *lost_out = lost;
  int64_t count = n;
  pthread_mutex_unlock(&lock);
  return count;
}

static bool grow(void) {
  int64_t more = cap ? 2 * cap : 4096;
  orr_timeline_event *grown = realloc(event, (size_t)more * sizeof *grown);
  if (!grown) return false;
  event = grown;
  cap = more;
  return true;
}

void orr_timeline_add(const orr_timeline_event *e) {
  pthread_mutex_lock(&lock);
  if (n < cap || grow()) event[n++] = *e;
  else lost++;
  pthread_mutex_unlock(&lock);
}

void orr_timeline_mark(const orr_mark *mark) { current = *mark; }

orr_mark orr_timeline_marked(void) { return current; }
