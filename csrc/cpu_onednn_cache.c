/* cpu_onednn_cache.c: a thread's primitives, found again by key, and how one is run.
 *
 * Making a primitive the library already knows costs it 2 to 4 microseconds; finding ours
 * costs tens of nanoseconds. An entry holds the primitive, reorders before and after it, and
 * memory objects, which are only told where this run's data is.
 *
 * Invariant: an entry, its memory objects and the scratch belong to one thread and are
 * touched by no other. A thread holds at most MAX_ENTRIES; one more empties the table first.
 * An entry that the caller got is valid until the thread's next orr_dnn_make.
 */
#include "cpu_onednn_int.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
  MAX_ENTRIES = 1024,
  SLOTS = 2048, /* a power of two, above MAX_ENTRIES */
  MAX_MEMORIES = 16,
  MAX_STEPS = 1 + ORR_DNN_MAX_PORTS,
  MAX_ARGS = ORR_DNN_MAX_PORTS + 1,
  ALIGN = 64
};

/* A memory object: at the caller's pointer `port`, or, if -1, at `offset` in scratch. */
struct memory {
  void *object, *data;
  size_t offset;
  int port;
};

struct step {
  void *primitive;
  int n;
  orr_dnn_arg args[MAX_ARGS];
};

struct orr_dnn_entry {
  orr_dnn_key key;
  uint64_t hash;
  bool refused;
  int n_memories, n_steps;
  size_t scratch_bytes;
  size_t port_bytes[ORR_DNN_MAX_PORTS];
  struct memory memories[MAX_MEMORIES];
  struct step steps[MAX_STEPS];
};

struct thread_state {
  void *stream;
  unsigned char *scratch;
  size_t scratch_bytes;
  int n_entries;
  orr_dnn_entry *slots[SLOTS];
};

static _Thread_local struct thread_state *state;
static _Thread_local int team_size; /* 0: never set */
static pthread_key_t exit_key;
static pthread_once_t exit_once = PTHREAD_ONCE_INIT;
static bool has_exit_key;

/* Making is one at a time: ThreadSanitizer reports a race in 2.6's own table otherwise. */
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

/* -- keys */
void orr_dnn_key_add(orr_dnn_key *key, int64_t word) { key->word[key->n++] = word; }

void orr_dnn_key_add_array(orr_dnn_key *key, int n, const int64_t *words) {
  memcpy(key->word + key->n, words, (size_t)n * sizeof *words);
  key->n += n;
}

/* Four independent chains: a long key costs the multiplier's rate and not its latency. */
static uint64_t hash_of(const orr_dnn_key *key) {
  const uint64_t m = UINT64_C(0x9E3779B97F4A7C15);
  uint64_t h[4] = {1, 2, 3, 4};
  for (int i = 0; i < key->n; i++) {
    uint64_t x = (h[i & 3] ^ (uint64_t)key->word[i]) * m;
    h[i & 3] = x ^ (x >> 29);
  }
  uint64_t all = ((h[0] * m ^ h[1]) * m ^ h[2]) * m ^ h[3];
  all *= m;
  return all ^ (all >> 32);
}

/* -- the thread's state */
static void entry_free(orr_dnn_entry *e) {
  if (!e) return;
  for (int i = 0; i < e->n_steps; i++) orr_dnn_primitive_free(e->steps[i].primitive);
  for (int i = 0; i < e->n_memories; i++) orr_dnn_memory_free(e->memories[i].object);
  free(e);
}

static void clear(struct thread_state *s) {
  for (int i = 0; i < SLOTS && s->n_entries; i++) {
    if (!s->slots[i]) continue;
    entry_free(s->slots[i]);
    s->slots[i] = NULL;
    s->n_entries--;
  }
}

static void state_free(void *p) {
  struct thread_state *s = p;
  if (!s) return;
  clear(s);
  orr_dnn_stream_free(s->stream);
  free(s->scratch);
  free(s);
  state = NULL;
}

static void make_exit_key(void) {
  has_exit_key = pthread_key_create(&exit_key, state_free) == 0;
}

/* This code may be unmapped before its threads end. */
__attribute__((destructor)) static void drop_exit_key(void) {
  if (has_exit_key) pthread_key_delete(exit_key);
}

static struct thread_state *thread_state(void) {
  if (state) return state;
  pthread_once(&exit_once, make_exit_key);
  struct thread_state *s = calloc(1, sizeof *s);
  if (!s) return NULL;
  if (orr_dnn_stream_new(&s->stream) != DNN_SUCCESS) {
    free(s);
    return NULL;
  }
  if (has_exit_key) pthread_setspecific(exit_key, s);
  return state = s;
}

void orr_onednn_thread_free(void) {
  if (!state) return;
  if (has_exit_key) pthread_setspecific(exit_key, NULL);
  state_free(state);
}

void orr_onednn_set_threads(int n) {
  if (n < 1) n = 1;
  if (!orr_dnn_load() || n == team_size) return;
  orr_dnn_team(n);
  team_size = n;
  if (state) clear(state);
}

/* -- finding and storing */
orr_dnn_entry *orr_dnn_find(const orr_dnn_key *key) {
  if (!state) return NULL;
  uint64_t hash = hash_of(key);
  for (size_t i = hash & (SLOTS - 1); state->slots[i]; i = (i + 1) & (SLOTS - 1)) {
    orr_dnn_entry *e = state->slots[i];
    if (e->hash == hash && e->key.n == key->n &&
        !memcmp(e->key.word, key->word, (size_t)key->n * sizeof *key->word))
      return e;
  }
  return NULL;
}

static void store(struct thread_state *s, orr_dnn_entry *e) {
  if (s->n_entries >= MAX_ENTRIES) clear(s);
  size_t i = e->hash & (SLOTS - 1);
  while (s->slots[i]) i = (i + 1) & (SLOTS - 1);
  s->slots[i] = e;
  s->n_entries++;
}

/* -- making */
static int add_memory(orr_dnn_entry *e, const void *md, int port, struct memory **out) {
  struct memory *m = &e->memories[e->n_memories];
  size_t bytes = orr_dnn_md_bytes(md);
  int s = orr_dnn_memory_new(&m->object, md);
  if (s != DNN_SUCCESS) return s;
  e->n_memories++;
  m->port = port;
  if (port < 0) {
    m->offset = e->scratch_bytes;
    e->scratch_bytes += (bytes + ALIGN - 1) / ALIGN * ALIGN;
  } else {
    e->port_bytes[port] = bytes;
  }
  *out = m;
  return DNN_SUCCESS;
}

static void add_arg(struct step *step, int arg, const struct memory *m) {
  step->args[step->n++] = (orr_dnn_arg){arg, m->object};
}

/* Turns `pd` into the step's primitive and gives it its scratchpad. */
static int finish_step(orr_dnn_entry *e, struct step *step, void *pd) {
  int s = orr_dnn_primitive_new(&step->primitive, pd);
  if (s != DNN_SUCCESS) return s;
  const void *md = orr_dnn_pd_md(pd, DNN_QUERY_SCRATCHPAD, 0);
  struct memory *scratch;
  if (!md) return DNN_SUCCESS;
  s = add_memory(e, md, -1, &scratch);
  if (s == DNN_SUCCESS) add_arg(step, DNN_ARG_SCRATCHPAD, scratch);
  return s;
}

static int add_reorder(orr_dnn_entry *e, const void *from_md, const struct memory *from,
                       const void *to_md, const struct memory *to) {
  struct step *step = &e->steps[e->n_steps++];
  void *pd;
  int s = orr_dnn_pd_new_reorder(&pd, from_md, to_md);
  if (s == DNN_SUCCESS) s = finish_step(e, step, pd);
  orr_dnn_pd_free(pd);
  add_arg(step, DNN_ARG_SRC, from);
  add_arg(step, DNN_ARG_DST, to);
  return s;
}

/* Connects one port to the body: straight, or through scratch and a reorder. The reorder of an
 * input is made here, that of an output by the second pass, after the body has its place. */
static int add_port(orr_dnn_entry *e, void *pd, const orr_dnn_port *port, int index,
                    struct step *body, struct memory **inner) {
  const void *wanted = orr_dnn_pd_md(pd, port->query, port->index);
  struct memory *outer;
  *inner = NULL;
  if (!wanted) return port->md ? DNN_UNIMPLEMENTED : DNN_SUCCESS;
  if (!port->md || orr_dnn_md_equal(port->md, wanted)) {
    int s = add_memory(e, wanted, index, &outer);
    if (s == DNN_SUCCESS) add_arg(body, port->arg, outer);
    return s;
  }
  int s = add_memory(e, wanted, -1, inner);
  if (s != DNN_SUCCESS) return s;
  add_arg(body, port->arg, *inner);
  if (port->output) return DNN_SUCCESS;
  s = add_memory(e, port->md, index, &outer);
  if (s == DNN_SUCCESS) s = add_reorder(e, port->md, outer, wanted, *inner);
  return s;
}

static int build(orr_dnn_entry *e, const orr_dnn_op *op, int n_ports,
                 const orr_dnn_port *ports) {
  struct step body = {0};
  struct memory *inner[ORR_DNN_MAX_PORTS];
  void *pd;
  int s = orr_dnn_pd_new(&pd, op);
  for (int i = 0; s == DNN_SUCCESS && i < n_ports; i++)
    s = add_port(e, pd, &ports[i], i, &body, &inner[i]);
  if (s == DNN_SUCCESS) {
    s = finish_step(e, &body, pd);
    e->steps[e->n_steps++] = body;
  }
  for (int i = 0; s == DNN_SUCCESS && i < n_ports; i++) {
    struct memory *outer;
    if (!ports[i].output || !inner[i]) continue;
    s = add_memory(e, ports[i].md, i, &outer);
    if (s == DNN_SUCCESS)
      s = add_reorder(e, orr_dnn_pd_md(pd, ports[i].query, ports[i].index), inner[i],
                      ports[i].md, outer);
  }
  orr_dnn_pd_free(pd);
  return s;
}

orr_dnn_entry *orr_dnn_make(const orr_dnn_key *key, const orr_dnn_op *op, int n_ports,
                            const orr_dnn_port *ports, orr_status *status) {
  struct thread_state *s = thread_state();
  orr_dnn_entry *e = s ? calloc(1, sizeof *e) : NULL;
  if (!e) {
    *status = orr_fail(ORR_EMEM, "oneDNN: out of memory for a cached primitive");
    return NULL;
  }
  pthread_mutex_lock(&making);
  int result = op ? build(e, op, n_ports, ports) : DNN_UNIMPLEMENTED;
  pthread_mutex_unlock(&making);
  if (result == DNN_UNIMPLEMENTED || result == DNN_INVALID_ARGUMENTS) {
    entry_free(e); /* with whatever of it was made */
    e = calloc(1, sizeof *e);
    if (e) e->refused = true;
    result = e ? DNN_SUCCESS : DNN_OUT_OF_MEMORY;
  }
  if (result != DNN_SUCCESS) {
    entry_free(e);
    *status = orr_fail(result == DNN_OUT_OF_MEMORY ? ORR_EMEM : ORR_EDEVICE,
                       "oneDNN: making a primitive: %s", orr_dnn_word(result));
    return NULL;
  }
  e->key = *key;
  e->hash = hash_of(key);
  store(s, e);
  *status = ORR_OK;
  return e;
}

bool orr_dnn_refused(const orr_dnn_entry *entry) { return entry->refused; }

size_t orr_dnn_port_bytes(const orr_dnn_entry *entry, int port) {
  return entry->port_bytes[port];
}

/* -- running */
static orr_status grow_scratch(struct thread_state *s, size_t bytes) {
  bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
  free(s->scratch);
  s->scratch = aligned_alloc(4096, bytes);
  s->scratch_bytes = s->scratch ? bytes : 0;
  if (s->scratch) return ORR_OK;
  return orr_fail(ORR_EMEM, "oneDNN: out of memory for %zu bytes of scratch", bytes);
}

orr_status orr_dnn_run(orr_dnn_entry *e, void *const *data) {
  struct thread_state *s = state;
  int result = DNN_SUCCESS;
  if (s->scratch_bytes < e->scratch_bytes) {
    orr_status status = grow_scratch(s, e->scratch_bytes);
    if (status) return status;
  }
  for (int i = 0; i < e->n_memories && result == DNN_SUCCESS; i++) {
    struct memory *m = &e->memories[i];
    void *where = m->port >= 0 ? data[m->port] : s->scratch + m->offset;
    if (where == m->data) continue;
    result = orr_dnn_memory_set(m->object, where);
    m->data = result == DNN_SUCCESS ? where : NULL;
  }
  for (int i = 0; i < e->n_steps && result == DNN_SUCCESS; i++) {
    const struct step *step = &e->steps[i];
    result = orr_dnn_execute(step->primitive, s->stream, step->n, step->args);
  }
  if (result == DNN_SUCCESS) result = orr_dnn_stream_wait(s->stream);
  if (result == DNN_SUCCESS) return ORR_OK;
  return orr_fail(ORR_EDEVICE, "oneDNN: running a primitive: %s", orr_dnn_word(result));
}
