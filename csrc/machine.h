/* machine.h: what the files of layer 1 share: queues, their workers, and the engines.
 *
 * Invariant: the controller alone pushes, one thread alone runs a queue's items (its device's
 * worker, or the controller in the inline and shuffle engines), and `pushed`, `ran` and `done`
 * are all they exchange. Items are numbered from 1; event `seq` is complete when done >= seq.
 *
 * Sleeping. A sleeper writes down what it waits for, raises its bit in `asleep`, looks once
 * more at everything it waits for, and sleeps. Whoever changes something changes it first and
 * reads `asleep` after. Both orders are sequentially consistent, so one of the two sees the
 * other.
 *
 * To add an engine: a row in orr_engine_kind, its name in device.c, its step in engine.c.
 */
#ifndef ORR_MACHINE_H
#define ORR_MACHINE_H

#include <pthread.h>

#include "orrery_int.h"

#define ORR_MAX_WORKERS 64 /* bits of `asleep` */
#define ORR_MAX_CPU_DEVICES ORR_MAX_WORKERS
#define ORR_MAX_CUDA_DEVICES 16
#define ORR_CHUNK_ITEMS 256
#define ORR_CACHE_LINE 64

typedef enum orr_engine_kind {
  ORR_ENGINE_THREAD, /* a worker thread a device */
  ORR_ENGINE_INLINE, /* the controller runs what can run at every push */
  ORR_ENGINE_SHUFFLE /* the controller runs queued items late, in seeded random order */
} orr_engine_kind;

/* Items of a queue, in order; a queue is a chain of these. */
typedef struct orr_chunk {
  _Atomic(struct orr_chunk *) next;
  orr_item item[ORR_CHUNK_ITEMS];
} orr_chunk;

/* Somebody who can sleep. */
typedef struct orr_sleeper {
  atomic_int word;                         /* 1: asleep */
  atomic_bool on_ready;                    /* a head waits for its ready() */
  _Atomic(struct orr_queue *) on_queue[2]; /* what it waits for; NULL: nothing of this kind */
  atomic_ullong on_seq[2];
  pthread_mutex_t mutex;
  pthread_cond_t cond;
} orr_sleeper;

typedef struct orr_worker {
  orr_sleeper sleeper;
  int index; /* bit of `asleep` */
  orr_device *device;
  bool started; /* controller */
  atomic_bool stop;
  pthread_t thread;
} orr_worker;

typedef struct orr_queue {
  orr_device *device;
  const char *label; /* "compute", "comm" */
  orr_worker *worker;
  struct orr_queue *next_retired;
  bool is_async;
  bool is_comm;
  void *stream; /* an asynchronous device's; NULL until the first push */
  /* the controller's side */
  _Alignas(ORR_CACHE_LINE) atomic_ullong pushed;
  orr_chunk *tail;
  _Atomic(orr_chunk *) spare; /* an empty chunk on its way back to the controller */
  /* the runner's side */
  _Alignas(ORR_CACHE_LINE) atomic_ullong done; /* items complete */
  atomic_ullong ran; /* asynchronous: items issued; else not used, `done` tells */
  uint64_t marked;   /* asynchronous: the last item of which completion will be told */
  orr_chunk *head;
  int deps_met;   /* of the head item */
  bool head_used; /* every item of the head chunk has run */
} orr_queue;

extern struct orr_engine {
  orr_engine_kind kind;
  int n_devices, n_queues, n_started; /* n_devices: CPUs, which compete for the cores */
  /* inline, shuffle */
  bool running;    /* an item is being run */
  int64_t pending; /* items not run */
  uint64_t random;
  orr_queue *queue[2 * ORR_MAX_WORKERS];
} orr_engine;

/* queue.c */
orr_status orr_queue_new(orr_device *d, const char *label, orr_worker *worker, orr_queue **out);
void orr_queue_free(orr_queue *take_q);
bool orr_queue_step(orr_queue *q);       /* runner: runs the head item if it can start */
bool orr_queue_is_empty(orr_queue *q);   /* nothing left to run (asynchronous: to issue) */
bool orr_queue_is_pending(orr_queue *q); /* asynchronous: issued work is not complete */
bool orr_queue_poll(orr_queue *q); /* runner: asks the device how far it is; true: further */
/* Runner; q not empty: the event its head waits for; false where that is its ready(). */
bool orr_queue_blocker(orr_queue *q, orr_event *out);

/* worker.c: the thread engine */
orr_status orr_worker_new(orr_device *d, int index, orr_worker **out);
void orr_worker_stop(orr_worker *w);        /* joins; what is queued stays undone */
void orr_worker_free(orr_worker *take_w);   /* stopped, as are all others */
orr_status orr_worker_start(orr_worker *w); /* at the first push */
void orr_worker_wake(orr_worker *w);
void orr_wake_for(const orr_queue *q, uint64_t seq); /* item seq of q is complete */
orr_status orr_thread_wait(orr_event e, bool polls); /* polls: stops for interrupts */

/* engine.c: the other two, and what all three share */
void orr_engine_pushed(orr_queue *q);
orr_status orr_engine_wait(orr_event e, bool polls);
orr_status orr_engine_stuck(orr_event e); /* ORR_EDEVICE: names the queues and their heads */
orr_status orr_drain(orr_device *d, bool polls); /* waits for d's queues; NULL: for all */

/* alloc.c */
void orr_pool_close(orr_device *d);

/* cpu.c */
extern const orr_backend orr_backend_cpu, orr_backend_meta;
void orr_cpu_model(char *buf, size_t size);
void orr_cpu_team(int n); /* of the calling thread */

#endif
