/* worker.c: the thread engine: one worker a device serves its two queues; how threads wait.
 *
 * Invariant: a worker runs the head of comm where it can start, else the head of compute; it
 * never waits inside an item. Idle threads spin briefly where every thread has a core, and give
 * the core away after that: what may wake them is written down in their orr_sleeper
 * (machine.h). The worker of an asynchronous device looks, between bursts of items and while it
 * is idle, how far the device has come.
 * To add a reason to wait: a field in orr_sleeper, a note in `look`, its waker here.
 */
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "interrupt.h"
#include "machine.h"

enum {
  PAUSE_NS = 1000,   /* spin with pauses for so long, */
  SPIN_NS = 40000,   /* then offering the core to others, then sleep */
  NAP_NS = 20000000, /* the controller looks up from its sleep as often, for interrupts */
  STUCK_NAPS = 100,  /* and after so many naps in which nothing moved, says so */
  BURST = 16,        /* items that a worker issues between two looks at the device */
  POLL_NS = 50000    /* an idle worker looks as often whether its device has finished */
};

static atomic_ullong asleep; /* bit k: worker k sleeps, or is about to */
static atomic_bool controller_asleep;
static orr_sleeper controller;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* ---- sleeping and waking ---- */

static void wake(orr_sleeper *s) {
  if (!atomic_load_explicit(&s->word, memory_order_relaxed)) return;
  if (!atomic_exchange(&s->word, 0)) return;
  pthread_mutex_lock(&s->mutex);
  pthread_cond_signal(&s->cond);
  pthread_mutex_unlock(&s->mutex);
}

static orr_worker *worker_at(int bit) { return orr_engine.queue[2 * bit]->worker; }

static bool waits_for(orr_sleeper *s, const orr_queue *q, uint64_t seq) {
  for (int k = 0; k < 2; k++) {
    if (atomic_load(&s->on_queue[k]) == q && atomic_load(&s->on_seq[k]) <= seq) return true;
  }
  return false;
}

void orr_worker_wake(orr_worker *w) {
  if (atomic_load(&asleep) >> w->index & 1) wake(&w->sleeper);
}

void orr_wake_for(const orr_queue *q, uint64_t seq) {
  for (unsigned long long left = atomic_load(&asleep); left; left &= left - 1) {
    orr_sleeper *s = &worker_at(__builtin_ctzll(left))->sleeper;
    if (waits_for(s, q, seq)) wake(s);
  }
  if (atomic_load(&controller_asleep) && waits_for(&controller, q, seq)) wake(&controller);
}

void orr_queue_notify(void) {
  for (unsigned long long left = atomic_load(&asleep); left; left &= left - 1) {
    orr_sleeper *s = &worker_at(__builtin_ctzll(left))->sleeper;
    if (atomic_load(&s->on_ready)) wake(s);
  }
}

static int n_awake(void) {
  return orr_engine.n_started - __builtin_popcountll(atomic_load(&asleep));
}

/* ---- the worker ---- */

static bool work(orr_worker *w) {
  return orr_queue_step(w->device->comm) || orr_queue_step(w->device->compute);
}

static bool poll(orr_worker *w) {
  bool comm = orr_queue_poll(w->device->comm), compute = orr_queue_poll(w->device->compute);
  return comm || compute;
}

/* Whether the device works on what was issued to it. */
static bool is_pending(orr_worker *w) {
  return orr_queue_is_pending(w->device->comm) || orr_queue_is_pending(w->device->compute);
}

/* What the heads of the two queues wait for. */
typedef struct notes {
  orr_event on[2];
  bool on_ready;
} notes;

static notes look(orr_worker *w) {
  orr_queue *queue[2] = {w->device->comm, w->device->compute};
  notes n = {{{NULL, 0}, {NULL, 0}}, false};
  for (int k = 0; k < 2; k++) {
    if (!orr_queue_is_empty(queue[k]) && !orr_queue_blocker(queue[k], &n.on[k]))
      n.on_ready = true;
  }
  return n;
}

static bool same(const notes *a, const notes *b) {
  for (int k = 0; k < 2; k++) {
    if (a->on[k].queue != b->on[k].queue || a->on[k].seq != b->on[k].seq) return false;
  }
  return a->on_ready == b->on_ready;
}

static void write_down(orr_sleeper *s, const notes *n) {
  for (int k = 0; k < 2; k++) {
    atomic_store(&s->on_seq[k], n->on[k].seq);
    atomic_store(&s->on_queue[k], n->on[k].queue);
  }
  atomic_store(&s->on_ready, n->on_ready);
}

/* `ns` from now, for pthread_cond_timedwait. */
static struct timespec after(long ns) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  t.tv_nsec += ns;
  if (t.tv_nsec >= 1000000000) {
    t.tv_nsec -= 1000000000;
    t.tv_sec++;
  }
  return t;
}

static void wait_word(orr_sleeper *s, const struct timespec *until) {
  int late = 0;
  pthread_mutex_lock(&s->mutex);
  while (atomic_load(&s->word) && !late) {
    if (until) late = pthread_cond_timedwait(&s->cond, &s->mutex, until);
    else pthread_cond_wait(&s->cond, &s->mutex);
  }
  pthread_mutex_unlock(&s->mutex);
}

/* While the device is at work nobody tells when it has finished: a short sleep. */
static void sleep_worker(orr_worker *w) {
  orr_sleeper *s = &w->sleeper;
  notes before = look(w);
  write_down(s, &before);
  atomic_store(&s->word, 1);
  atomic_fetch_or(&asleep, 1ull << w->index);
  /* The look after the bit is up. Where it finds other reasons to wait, they must be written
   * down first, in another round. */
  bool moved = work(w) || poll(w) || atomic_load(&w->stop);
  if (!moved) {
    notes now = look(w);
    moved = !same(&before, &now);
  }
  if (!moved && is_pending(w)) {
    struct timespec until = after(POLL_NS);
    wait_word(s, &until);
  } else if (!moved) {
    wait_word(s, NULL);
  }
  atomic_fetch_and(&asleep, ~(1ull << w->index));
  atomic_store(&s->word, 0);
}

/* Polls for a while; true as soon as something ran. */
static bool spin_worker(orr_worker *w) {
  if (!w->device->compute->is_async && orr_engine.n_devices > orr_cores()) return false;
  for (uint64_t start = now_ns(), now = start; now - start < SPIN_NS; now = now_ns()) {
    for (int k = 0; k < 8; k++) {
      if (work(w) || poll(w)) return true;
      pause_core();
    }
    if (atomic_load(&w->stop)) return false;
    if (now - start > PAUSE_NS) sched_yield();
  }
  return false;
}

static void *worker_main(void *arg) {
  orr_worker *w = arg;
  if (w->device->backend->thread_start) w->device->backend->thread_start(w->device);
  for (unsigned burst = 0; !atomic_load(&w->stop);) {
    if (work(w)) {
      if (++burst % BURST == 0) poll(w);
    } else if (!poll(w) && !spin_worker(w)) {
      sleep_worker(w);
    }
  }
  return NULL;
}

/* ---- the controller ---- */

static uint64_t items_done(void) {
  uint64_t sum = 0;
  for (int k = 0; k < orr_engine.n_queues; k++) {
    const orr_queue *q = orr_engine.queue[k];
    sum += atomic_load(&q->done) + atomic_load(&q->ran);
  }
  return sum;
}

/* Spins only while some core has nobody else to run. */
static bool spin_controller(orr_event e) {
  for (uint64_t start = now_ns(), now = start; now - start < SPIN_NS; now = now_ns()) {
    for (int k = 0; k < 8; k++) {
      if (orr_event_done(e)) return true;
      pause_core();
    }
    if (n_awake() >= orr_cores()) return false;
    if (now - start > PAUSE_NS) sched_yield();
  }
  return false;
}

/* Sleeps until e is complete, but no longer than NAP_NS. */
static void nap(orr_event e) {
  struct timespec until = after(NAP_NS);
  notes n = {{e, {NULL, 0}}, false};
  write_down(&controller, &n);
  atomic_store(&controller.word, 1);
  atomic_store(&controller_asleep, true);
  if (!orr_event_done(e)) wait_word(&controller, &until);
  atomic_store(&controller_asleep, false);
  atomic_store(&controller.word, 0);
}

orr_status orr_thread_wait(orr_event e, bool polls) {
  int still = 0;
  if (spin_controller(e)) return ORR_OK;
  for (uint64_t before = items_done(); !orr_event_done(e);) {
    nap(e);
    if (polls && orr_interrupt_pending()) return orr_fail(ORR_EINTERRUPT, "interrupted");
    uint64_t now = items_done();
    still = now == before && n_awake() == 0 ? still + 1 : 0;
    before = now;
    if (still >= STUCK_NAPS && !orr_event_done(e)) return orr_engine_stuck(e);
  }
  return ORR_OK;
}

/* ---- starting and stopping ---- */

static void sleeper_init(orr_sleeper *s) {
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(&s->cond, &attr);
  pthread_condattr_destroy(&attr);
  pthread_mutex_init(&s->mutex, NULL);
}

static void controller_init(void) { sleeper_init(&controller); }

orr_status orr_worker_new(orr_device *d, int index, orr_worker **out) {
  orr_worker *w = calloc(1, sizeof *w);
  if (!w) return orr_fail(ORR_EMEM, "out of host memory for the worker of %s", d->name);
  w->device = d;
  w->index = index;
  sleeper_init(&w->sleeper);
  *out = w;
  return ORR_OK;
}

/* Signals go to the controller, except those that a thread brings upon itself. */
orr_status orr_worker_start(orr_worker *w) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
  sigset_t blocked, old;
  pthread_once(&once, controller_init);
  sigfillset(&blocked);
  for (size_t k = 0; k < sizeof own / sizeof *own; k++) sigdelset(&blocked, own[k]);
  pthread_sigmask(SIG_SETMASK, &blocked, &old);
  int failed = pthread_create(&w->thread, NULL, worker_main, w);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (failed) {
    return orr_fail(ORR_EDEVICE, "%s: its thread cannot start: %s", w->device->name,
                    strerror(failed));
  }
  w->started = true;
  orr_engine.n_started++;
  return ORR_OK;
}

void orr_worker_stop(orr_worker *w) {
  if (!w->started) return;
  atomic_store(&w->stop, true);
  orr_worker_wake(w);
  pthread_join(w->thread, NULL);
  w->started = false;
}

void orr_worker_free(orr_worker *take_w) {
  if (!take_w) return;
  pthread_cond_destroy(&take_w->sleeper.cond);
  pthread_mutex_destroy(&take_w->sleeper.mutex);
  free(take_w);
}
