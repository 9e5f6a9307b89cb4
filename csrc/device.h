/* device.h: devices, their queues, events and memory; orrery_int.h includes it.
 *
 * Invariant: as orrery_int.h says; what is marked "worker" may run on a device's thread.
 * To add a kind of device: an orr_device_kind, its orr_backend, and its rows in device.c.
 */
#ifndef ORR_DEVICE_H
#define ORR_DEVICE_H

/* ==== L1: device.c, queue.c, alloc.c, cpu.c =============================================== */

struct orr_queue;
struct orr_device;

/* Complete once the queue has finished item number `seq`. queue NULL: complete. */
typedef struct orr_event {
  struct orr_queue *queue;
  uint64_t seq;
} orr_event;

/* One block of device memory. Buffers are recycled by the allocator with their events, so that
 * a new owner waits for the old one's foreign readers; the struct outlives every queued
 * item. */
typedef struct orr_buffer {
  struct orr_device *device;
  void *data;       /* NULL on meta and for 0 bytes */
  size_t bytes;     /* asked for */
  size_t capacity;  /* of the block */
  orr_event writer; /* last writer */
  int n_readers, cap_readers;
  orr_event *readers;          /* last reader of each queue since the writer */
  atomic_uint poison;          /* worker: == orr_poison_epoch() when poisoned */
  struct orr_buffer *next;     /* free list */
  struct orr_block_pool *home; /* where it goes back to (alloc.c); NULL: the device's pool */
  bool in_use;                 /* somebody owns it */
  int pins;                    /* records that will use it again: it is freed after them */
  uint64_t made; /* op_capture.c: which write of which recording it holds; 0: none's */
} orr_buffer;

typedef enum orr_device_kind {
  ORR_DEVICE_CPU,
  ORR_DEVICE_META,
  ORR_DEVICE_CUDA
} orr_device_kind;

struct orr_work;

struct orr_kernels;
struct orr_view;
struct orr_collective;

/* What a kind of device must provide. One const struct a kind; "(optional)" may be NULL. A kind
 * with queue_open is asynchronous: its queues own streams, an item of them only issues work
 * there, and `completed` tells how far the device has come. */
typedef struct orr_backend {
  const char *name;
  const struct orr_kernels *kernels;
  orr_status (*memory_new)(struct orr_device *d, size_t bytes, void **out);
  void (*memory_free)(struct orr_device *d, void *data, size_t bytes);
  orr_status (*run)(const struct orr_work *work, int shard); /* worker: one shard of one call */
  void (*thread_start)(struct orr_device *d); /* (optional) worker: before its first item */
  /* ---- (optional), all or none ---- */
  orr_status (*queue_open)(struct orr_queue *q); /* sets q->stream; at the first push */
  void (*queue_close)(struct orr_queue *q);      /* waits for the stream, frees it */
  void (*enter)(struct orr_queue *q); /* worker: q's stream is the thread's; NULL: none is */
  orr_status (*check)(struct orr_queue *q);  /* worker: what failed to be issued since enter */
  orr_status (*finish)(struct orr_queue *q); /* worker: waits for the stream */
  /* worker of q, which is entered: what q issues from now on comes after all that `other`
   * has issued by now. */
  orr_status (*wait)(struct orr_queue *q, struct orr_queue *other);
  /* worker: item `seq` was the last that q issued; false: no room for another mark now. */
  bool (*mark)(struct orr_queue *q, uint64_t seq);
  /* worker: the newest marked item that is complete (0: none yet). Reports what went wrong on
   * the device by work_error; on a lost device everything counts as complete. */
  uint64_t (*completed)(struct orr_queue *q);
  /* The same elements elsewhere: `from` on device a, `to` on device b, one of them of this
   * kind, the other of this kind or on the host; one dtype and shape, any strides. With a
   * queue entered: issued on it, host memory is read at once or when the stream comes there.
   * Else complete at return. */
  orr_status (*transfer)(struct orr_device *a, const struct orr_view *from,
                         struct orr_device *b, struct orr_view *to);
  /* Whether a's kernels may use b's memory. */
  bool (*reaches)(const struct orr_device *a, const struct orr_device *b);
  /* A collective that the vendor's library runs: asked on the controller before the parts are
   * pushed (false: the core's own), then called by each part's worker, its queue entered. */
  bool (*collective_new)(struct orr_collective *c);
  orr_status (*collective_run)(struct orr_collective *c, int part);
  /* Worker of q, which is entered: issues what issue(arg) issues, which is the same each time;
   * from the second time on as one graph that is kept in *graph. False: nothing was issued, the
   * caller has to. */
  bool (*graph_run)(struct orr_queue *q, void **graph, orr_status (*issue)(void *arg),
                    void *arg);
  void (*graph_free)(void *graph); /* none of its launches may be left */
} orr_backend;

static inline bool orr_backend_is_async(const orr_backend *b) { return b->queue_open != NULL; }

typedef struct orr_device {
  int index; /* in the device table */
  int id;    /* k of "cpu:k"; -1 for `cpu` and `meta` */
  orr_device_kind kind;
  char name[16];
  char model[96];
  const orr_backend *backend;
  bool is_inline;                   /* runs on the caller's thread, no queue: `cpu` */
  int threads;                      /* its team */
  int gpu;                          /* CUDA: devices of one number are one physical GPU */
  size_t total;                     /* CUDA: bytes of its memory */
  struct orr_queue *compute, *comm; /* NULL when inline or meta */
  size_t live, peak, cached, limit; /* bytes; limit 0: none but the machine's */
  struct orr_block_pool *pool;      /* alloc.c */
} orr_device;

/* device.c: the table, made at first use from the environment (ORRERY_CPU_DEVICES,
 * ORRERY_ENGINE). Index 0 `cpu`, 1..N `cpu:0`.., then `meta`; after it `cuda:0`.., which come
 * when somebody first asks for a device that may be one (plugin.c). */
orr_status orr_devices_open(void);
void orr_devices_close(void); /* drains, joins the workers, frees all caches */
int orr_device_count(void);   /* of the whole table */
orr_device *orr_device_at(int index);
int orr_device_cpus(void);      /* N of cpu:0..N-1 */
int orr_device_cudas(void);     /* N of cuda:0..N-1; opens the plug-in */
int orr_device_visible(void);   /* what a bare number names: the CUDA devices, else the CPUs */
const char *orr_cuda_why(void); /* why there is no CUDA device, or no other, as a clause; "" */
/* The device that a PCI bus id or a prefix of a UUID names: its k; -1: none, -2: several. */
int orr_cuda_find(const void *data, const char *id);
/* "cpu", "cpu:1", "meta", "1" (the k-th visible). Out of range: says how many, and why. */
orr_status orr_device_find(const char *name, orr_device **out);
orr_status orr_device_visible_at(int64_t k, orr_device **out);
int orr_cores(void);
/* The team of the `cpu` device. */
orr_status orr_set_threads(int n);
/* Bytes of the host's memory, or of what a new process could take of it; a container's bounds
 * count. 0: unknown. */
int64_t orr_host_memory(bool available);
/* Waits for all queues of `d` (NULL: of all devices), then raises the first error of queued
 * work, clearing it and every poison. Polls for interrupts. */
orr_status orr_synchronize(orr_device *d);
/* Where a call ends in ORR_EDEVICE, what was queued may have failed of the same cause: all of
 * it is one error, the first. Gives `status` or that of the first. */
orr_status orr_one_error(orr_status status);

/* queue.c. Items are (deps, ready, run), never a wait; an item starts when it heads its queue,
 * its deps are complete and ready() is NULL or true. Engines: thread, inline, shuffle:SEED. */
typedef struct orr_item {
  const orr_event *deps; /* must live until the item has run */
  int n_deps;
  bool (*ready)(void *arg, int part); /* worker; must be cheap; may become true only */
  void (*run)(void *arg, int part);   /* worker */
  void *arg;
  int part;
} orr_item;
/* Opens what the queue needs to take items; a push does it too. */
orr_status orr_queue_ready(struct orr_queue *q);
orr_status orr_queue_push(struct orr_queue *q, const orr_item *item, orr_event *done);
/* Worker of q, of an asynchronous device: what q issues from now on comes after all that
 * `other` has issued. */
orr_status orr_queue_wait(struct orr_queue *q, struct orr_queue *other);
bool orr_event_done(orr_event e);
orr_event orr_queue_last(struct orr_queue *q); /* of what was pushed last */
/* Controller; polls interrupts; drives non-thread engines. */
orr_status orr_event_wait(orr_event e);
/* Worker: something a ready() may look at has changed (by an atomic read-modify-write or a
 * sequentially consistent store); wakes who sleeps on a ready(). */
void orr_queue_notify(void);

/* Errors of queued work. The first one is kept until raised. */
void orr_work_error(orr_status status, const char *message); /* worker */
bool orr_work_error_pending(void);
unsigned orr_poison_epoch(void);
orr_status orr_work_error_raise(void); /* controller, queues drained: returns it, clears all */

/* alloc.c: the caching allocator. Controller only. */
orr_status orr_buffer_new(orr_device *d, size_t bytes, orr_buffer **out);
void orr_buffer_free(orr_buffer *take_b);        /* back to the cache, queue-ordered */
void orr_buffer_release_now(orr_buffer *take_b); /* waits for its events and unmaps */
size_t orr_empty_cache(orr_device *d); /* NULL: all. Synchronises; returns bytes given back */
void orr_set_memory_limit(orr_device *d, size_t bytes); /* 0: none */
void orr_reset_peak(orr_device *d);
void orr_alloc_fail_after(int64_t n); /* the n-th allocation from now fails once; <0: never */
/* Blocks for one purpose: while a set of pools is used (NULL: none is), new buffers of all
 * devices come from it, and go back to it. It takes the devices' cached blocks before it asks
 * for new ones. What it holds when it is freed goes back to the devices. */
typedef struct orr_pools orr_pools;
orr_status orr_pools_new(orr_pools **out);
void orr_pools_free(orr_pools *take_p);
void orr_pools_use(orr_pools *p);
extern uint64_t orr_buffer_made; /* `made` of new buffers */
/* A pinned buffer is freed when its last pin goes. */
void orr_buffer_pin(orr_buffer *b);
void orr_buffer_unpin(orr_buffer *b);
/* Called when memory is short (full = true) or the budget since the last call is spent:
 * collects the script language's garbage, and gives the bytes of its heap. Set by the
 * binding. */
extern size_t (*orr_collect_hook)(bool full);
/* Much of what was allocated is garbage now: collects where it is more than a quarter of what
 * lives and than the script's heap. */
void orr_collect_hint(void);
/* Says what the out-of-memory message appends: op, layer. Set by op.c. */
extern const char *(*orr_alloc_context_hook)(void);

/* Event bookkeeping on buffers (event.c). Each appends to deps, which holds n events and has
 * room for orr_buffer_deps_max more, the incomplete foreign events that an item on queue q that
 * reads (writes) b must wait for, and returns the new count. q NULL: the caller's thread. */
int orr_buffer_read_deps(const orr_buffer *b, struct orr_queue *q, orr_event *deps, int n);
int orr_buffer_write_deps(const orr_buffer *b, struct orr_queue *q, orr_event *deps, int n);
int orr_buffer_deps_max(const orr_buffer *b); /* the most that either adds */
orr_status orr_buffer_add_reader(orr_buffer *b, orr_event e);
void orr_buffer_set_writer(orr_buffer *b, orr_event e); /* forgets the readers */
/* Inline work: waits until the caller's thread may read (or write) b. Fast when nothing
 * pends. */
orr_status orr_buffer_wait_read(const orr_buffer *b);
orr_status orr_buffer_wait_write(const orr_buffer *b);

#endif
