/* alloc.c: the caching allocator: every block of device memory comes from and returns to here.
 *
 * Invariant: live is what buffers hold, cached what free lists hold, both in bytes of capacity.
 * A freed block keeps its events, so nobody waits at a free: the next owner's first writer
 * does, and on the same queue that costs nothing. A block is given back to the system only when
 * its events are complete. The controller alone calls this file.
 *
 * Sizes are rounded up to classes: steps of a quarter of the power of two below, from 4 MiB on
 * an eighth, in whole 2 MiB. One free list a class, last in, first out.
 * To add a retry before "out of memory": a step in acquire.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

#define SMALLEST ((size_t)64)
#define BIG ((size_t)4 << 20)
#define BIG_STEP ((size_t)2 << 20)
/* Bytes between two collections: few, so that garbage stays in the processor's caches. */
#define BUDGET ((size_t)8 << 20)
#define LEAST_HINT ((size_t)1 << 20)
#define HEAP_SHARE 8
#define HEADERS ((size_t)256) /* of a tensor, beside its block */
#define MOST_BUDGET ((size_t)256 << 20)
#define LARGEST ((size_t)1 << 56)
#define EIGHTHS 8
#define N_BINS (57 * EIGHTHS)

/* A device's own pool, and one of each set (orr_pools) that got memory of it. */
typedef struct orr_block_pool {
  orr_buffer *bin[N_BINS]; /* free blocks of a class */
  uint32_t held[N_BINS];   /* the device's own: blocks of a class in use, of any pool */
  orr_buffer *bare;        /* the device's own: structs without a block */
  uint32_t out;            /* a set's: buffers in use that will come back */
  bool retired;            /* its set is gone: it goes with the last of them */
} pool;

struct orr_pools {
  struct orr_pools *next;
  pool *of[ORR_MAX_DEVICES];
};

size_t (*orr_collect_hook)(bool full) = NULL;
const char *(*orr_alloc_context_hook)(void) = NULL;

static int64_t fail_after = -1;
static size_t since_collection, budget = BUDGET; /* bytes over all devices but meta */
static size_t heap;                              /* of the script, at the last collection */
static bool collecting;
static orr_pools *sets; /* all there are */
static orr_pools *used; /* whose pools new buffers come from; NULL: the devices' own */
uint64_t orr_buffer_made = 0;

/* ---- size classes ---- */

static int log2_of(size_t n) { return 63 - __builtin_clzll((unsigned long long)n); }

static size_t round_up(size_t bytes) {
  if (bytes <= SMALLEST) return SMALLEST;
  size_t power = (size_t)1 << log2_of(bytes - 1); /* the largest one below bytes */
  size_t step = bytes > BIG ? power / 8 : power / 4;
  if (bytes > BIG && step < BIG_STEP) step = BIG_STEP;
  if (step < SMALLEST) step = SMALLEST;
  return (bytes + step - 1) & ~(step - 1);
}

static int bin_of(size_t capacity) {
  int k = log2_of(capacity);
  return k * EIGHTHS + (int)((capacity - ((size_t)1 << k)) >> (k - 3));
}

static size_t bin_capacity(int bin) {
  return ((size_t)1 << bin / EIGHTHS) / EIGHTHS * (size_t)(EIGHTHS + bin % EIGHTHS);
}

/* ---- blocks ---- */

static bool is_idle(const orr_buffer *b) {
  if (!orr_event_done(b->writer)) return false;
  for (int k = 0; k < b->n_readers; k++) {
    if (!orr_event_done(b->readers[k])) return false;
  }
  return true;
}

/* In the test build a block that nobody owns reads as NaN, and as -1 in integers. */
static void spoil(orr_buffer *b) {
#ifdef ORR_TEST
  bool host = !orr_backend_is_async(b->device->backend);
  if (b->data && host && is_idle(b)) memset(b->data, 0xFF, b->capacity);
#else
  (void)b;
#endif
}

static orr_status pool_new(const orr_device *d, pool **out) {
  *out = calloc(1, sizeof(pool));
  return *out ? ORR_OK
              : orr_fail(ORR_EMEM, "out of host memory for the allocator of %s", d->name);
}

static void buffer_delete(orr_buffer *b) {
  free(b->readers);
  free(b);
}

/* Gives the idle blocks of d's cache back to the system. */
static size_t trim(orr_device *d) {
  pool *p = d->pool;
  size_t freed = 0;
  for (int k = 0; p && d->cached > 0 && k < N_BINS; k++) {
    for (orr_buffer **link = &p->bin[k]; *link;) {
      orr_buffer *b = *link;
      if (!is_idle(b)) {
        link = &b->next;
        continue;
      }
      *link = b->next;
      d->cached -= b->capacity;
      freed += b->capacity;
      d->backend->memory_free(d, b->data, b->capacity);
      buffer_delete(b);
    }
  }
  return freed;
}

static size_t live_bytes(void) {
  size_t live = 0;
  for (int k = 0; k < orr_device_count(); k++) {
    const orr_device *d = orr_device_at(k);
    if (d->kind != ORR_DEVICE_META) live += d->live;
  }
  return live;
}

/* Collecting costs what the script's heap holds: the larger it is, the rarer. */
static void collect(bool full) {
  if (!orr_collect_hook || collecting) return;
  collecting = true;
  since_collection = 0;
  heap = orr_collect_hook(full);
  collecting = false;
  size_t live = live_bytes();
  budget = HEAP_SHARE * heap < MOST_BUDGET ? HEAP_SHARE * heap : MOST_BUDGET;
  if (budget < BUDGET) budget = BUDGET;
  if (budget < live) budget = live;
}

void orr_collect_hint(void) {
  size_t least = heap > LEAST_HINT ? heap : LEAST_HINT;
  if (since_collection > least && since_collection > live_bytes() / 4) collect(false);
}

/* ---- out of memory ---- */

static const char *bytes_text(double bytes, char *buf, size_t size) {
  static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int k = 0;
  for (; bytes >= 1024 && k < 4; k++) bytes /= 1024;
  snprintf(buf, size, k ? "%.1f %s" : "%.0f %s", bytes, unit[k]);
  return buf;
}

/* "; largest: 3 x 1.0 MiB, 2 x 512.0 KiB". */
static void largest_text(const pool *p, char *buf, size_t size) {
  bool told[N_BINS] = {false};
  size_t at = 0;
  buf[0] = '\0';
  for (int n = 0; n < 3; n++) {
    int best = -1;
    double most = 0;
    for (int k = 0; k < N_BINS; k++) {
      double bytes = (double)p->held[k] * (double)bin_capacity(k);
      if (told[k] || bytes <= most) continue;
      most = bytes;
      best = k;
    }
    if (best < 0) return;
    char each[32];
    told[best] = true;
    at += (size_t)snprintf(buf + at, size - at, "%s%u x %s",
                           n ? ", " : "; largest: ", p->held[best],
                           bytes_text((double)bin_capacity(best), each, 32));
    if (at >= size) return;
  }
}

static orr_status out_of_memory(const orr_device *d, size_t bytes, size_t capacity) {
  char asked[32], live[32], cached[32], room[32], need[32], largest[160];
  bool cuda = d->kind == ORR_DEVICE_CUDA, whole = d->limit || cuda;
  double there = d->limit ? (double)d->limit
                 : cuda   ? (double)d->total
                          : (double)orr_host_memory(true);
  double missing = (double)capacity - there + (whole ? (double)(d->live + d->cached) : 0);
  const char *where = orr_alloc_context_hook ? orr_alloc_context_hook() : NULL;
  largest_text(d->pool, largest, sizeof largest);
  bytes_text(missing > 0 ? missing : (double)capacity, need, sizeof need);
  return orr_fail(
      ORR_EMEM,
      "%s is out of memory: asked for %s%s%s; %s in use, %s cached, %s %s%s. Free %s, %suse "
      "a smaller batch, or spread over more devices with a plan",
      d->name, bytes_text((double)bytes, asked, sizeof asked), where && *where ? " in " : "",
      where ? where : "", bytes_text((double)d->live, live, sizeof live),
      bytes_text((double)d->cached, cached, sizeof cached),
      d->limit ? "limit"
      : cuda   ? "on the device"
               : "free on the host",
      bytes_text(there, room, sizeof room), largest, need, d->limit ? "raise the limit, " : "");
}

/* ---- taking a block ---- */

/* A cached block of the pool, else of the device; NULL: none. */
static orr_buffer *cached_block(orr_device *d, pool *p, int bin) {
  if (!p->bin[bin]) p = d->pool;
  orr_buffer *b = p->bin[bin];
  if (!b) return NULL;
  p->bin[bin] = b->next;
  d->cached -= b->capacity;
  return b;
}

/* One try: a cached block, else a new one. NULL *out: no room. */
static orr_status try_block(orr_device *d, pool *p, size_t capacity, int bin,
                            orr_buffer **out) {
  orr_buffer *b = *out = cached_block(d, p, bin);
  if (b) return ORR_OK;
  if (d->limit && d->live + d->cached + capacity > d->limit) return ORR_OK;
  b = calloc(1, sizeof *b);
  if (!b) return orr_fail(ORR_EMEM, "out of host memory for a buffer");
  b->device = d;
  b->capacity = capacity;
  orr_status status = d->backend->memory_new(d, capacity, &b->data);
  if (status) {
    free(b);
    return status == ORR_EMEM ? ORR_OK : status;
  }
  spoil(b);
  *out = b;
  return ORR_OK;
}

/* The tries, each after making room in a costlier way. */
static orr_status acquire(orr_device *d, pool *p, size_t capacity, int bin, bool refuse,
                          orr_buffer **out) {
  enum { PLAIN, TRIMMED, COLLECTED, COLLECTED_AGAIN, DRAINED, N_TRIES };
  *out = NULL;
  for (int k = PLAIN; k < N_TRIES; k++) {
    if (k == COLLECTED || k == COLLECTED_AGAIN) collect(true);
    if (k == DRAINED) ORR_TRY(orr_drain(NULL, true));
    if (k != PLAIN && (refuse || !d->pool->bin[bin])) trim(d);
    if (!refuse) ORR_TRY(try_block(d, p, capacity, bin, out));
    if (*out) break;
  }
  return ORR_OK;
}

/* An idle block starts clean; what pends on another goes with it to the new owner. */
static void take(orr_device *d, pool *p, orr_buffer *b, size_t bytes, int bin) {
  b->bytes = bytes;
  b->next = NULL;
  b->home = p == d->pool ? NULL : p;
  b->in_use = true;
  b->made = orr_buffer_made;
  if (b->home) p->out++;
  if ((b->writer.queue || b->n_readers) && is_idle(b)) {
    b->writer = (orr_event){NULL, 0};
    b->n_readers = 0;
    spoil(b);
  }
  if (!b->writer.queue) atomic_store_explicit(&b->poison, 0, memory_order_relaxed);
  d->pool->held[bin]++;
  d->live += b->capacity;
  if (d->live > d->peak) d->peak = d->live;
}

/* A buffer without memory: of 0 bytes, or on meta. */
static orr_status bare_buffer(orr_device *d, size_t bytes, orr_buffer **out) {
  pool *p = d->pool;
  orr_buffer *b = p->bare;
  if (b) p->bare = b->next;
  else b = calloc(1, sizeof *b);
  if (!b) return orr_fail(ORR_EMEM, "out of host memory for a buffer");
  b->device = d;
  b->bytes = bytes;
  b->capacity = bytes ? round_up(bytes) : 0;
  b->next = NULL;
  b->in_use = true;
  b->made = orr_buffer_made;
  if (is_idle(b)) {
    orr_buffer_set_writer(b, (orr_event){NULL, 0});
    atomic_store_explicit(&b->poison, 0, memory_order_relaxed);
  }
  d->live += b->capacity;
  if (d->live > d->peak) d->peak = d->live;
  *out = b;
  return ORR_OK;
}

/* True when this allocation is the one that the test asked to fail. */
static bool is_refused(void) {
  if (fail_after < 0) return false;
  return --fail_after <= 0 ? (fail_after = -1, true) : false;
}

/* Where new buffers of d come from. */
static orr_status pool_in_use(orr_device *d, pool **out) {
  if (!d->pool) ORR_TRY(pool_new(d, &d->pool));
  *out = d->pool;
  if (!used || d->kind == ORR_DEVICE_META) return ORR_OK;
  pool **own = &used->of[d->index];
  if (!*own) ORR_TRY(pool_new(d, own));
  *out = *own;
  return ORR_OK;
}

orr_status orr_buffer_new(orr_device *d, size_t bytes, orr_buffer **out) {
  pool *p;
  bool refuse = is_refused();
  ORR_TRY(pool_in_use(d, &p));
  if (bytes > LARGEST) return out_of_memory(d, bytes, bytes);
  if (!refuse && (bytes == 0 || d->kind == ORR_DEVICE_META)) return bare_buffer(d, bytes, out);
  size_t capacity = round_up(bytes);
  int bin = bin_of(capacity);
  since_collection += capacity + HEADERS;
  if (since_collection > budget) collect(false);
  orr_buffer *b = refuse ? NULL : cached_block(d, p, bin);
  if (!b) ORR_TRY(acquire(d, p, capacity, bin, refuse, &b));
  if (!b) return out_of_memory(d, bytes, capacity);
  take(d, p, b, bytes, bin);
  *out = b;
  return ORR_OK;
}

/* ---- giving it back ---- */

static bool is_bare(const orr_buffer *b) { return !b->data; }

/* Takes b out of what is live. */
static void forget(orr_buffer *b) {
  pool *p = b->device->pool, *home = b->home;
  b->device->live -= b->capacity;
  b->in_use = false;
  if (home && --home->out == 0 && home->retired) free(home);
  uint32_t *held = p && !is_bare(b) ? &p->held[bin_of(b->capacity)] : NULL;
  if (held && *held) (*held)--; /* 0: taken before the devices were opened again */
}

/* The pool that b goes back to. */
static pool *home_of(const orr_buffer *b) {
  return b->home && !b->home->retired ? b->home : b->device->pool;
}

void orr_buffer_free(orr_buffer *take_b) {
  if (!take_b) return;
  orr_device *d = take_b->device;
  pool *p = d->pool, *home = home_of(take_b);
  if (take_b->pins) {
    take_b->in_use = false;
    return;
  }
  forget(take_b);
  if (!p) { /* the devices are closed */
    d->backend->memory_free(d, take_b->data, take_b->capacity);
    buffer_delete(take_b);
    return;
  }
  orr_buffer **list = &p->bare;
  if (!is_bare(take_b)) {
    spoil(take_b);
    d->cached += take_b->capacity;
    list = &home->bin[bin_of(take_b->capacity)];
  }
  take_b->next = *list;
  *list = take_b;
}

void orr_buffer_release_now(orr_buffer *take_b) {
  if (!take_b) return;
  orr_device *d = take_b->device;
  bool kept = take_b->pins || home_of(take_b) != d->pool;
  if (!d->pool || kept || is_bare(take_b) || orr_buffer_wait_write(take_b)) {
    orr_buffer_free(take_b); /* nothing to give back, or not now: it stays in the cache */
    return;
  }
  forget(take_b);
  d->backend->memory_free(d, take_b->data, take_b->capacity);
  buffer_delete(take_b);
}

size_t orr_empty_cache(orr_device *d) {
  size_t freed = 0;
  orr_drain(d, true); /* an interrupt only leaves more in the cache */
  for (int k = 0; k < orr_device_count(); k++) {
    if (!d || d == orr_device_at(k)) freed += trim(orr_device_at(k));
  }
  return freed;
}

void orr_buffer_pin(orr_buffer *b) { b->pins++; }

void orr_buffer_unpin(orr_buffer *b) {
  if (--b->pins == 0 && !b->in_use) orr_buffer_free(b);
}

/* ---- sets of pools ---- */

orr_status orr_pools_new(orr_pools **out) {
  orr_pools *s = calloc(1, sizeof *s);
  if (!s) return orr_fail(ORR_EMEM, "out of host memory for a set of pools");
  s->next = sets;
  *out = sets = s;
  return ORR_OK;
}

void orr_pools_use(orr_pools *p) { used = p; }

/* All that p holds goes to d's own pool. */
static void empty_into(pool *p, orr_device *d) {
  for (int k = 0; k < N_BINS; k++) {
    while (p->bin[k]) {
      orr_buffer *b = p->bin[k];
      p->bin[k] = b->next;
      b->next = d->pool->bin[k];
      d->pool->bin[k] = b;
    }
  }
}

static void retire(pool **of, orr_device *d) {
  pool *p = *of;
  *of = NULL;
  if (!p) return;
  empty_into(p, d);
  p->retired = true;
  if (p->out == 0) free(p);
}

void orr_pools_free(orr_pools *take_p) {
  if (!take_p) return;
  if (used == take_p) used = NULL;
  for (int k = 0; k < orr_device_count(); k++) retire(&take_p->of[k], orr_device_at(k));
  orr_pools **at = &sets;
  while (*at != take_p) at = &(*at)->next;
  *at = take_p->next;
  free(take_p);
}

void orr_pool_close(orr_device *d) {
  pool *p = d->pool;
  if (!p) return;
  for (orr_pools *s = sets; s; s = s->next) retire(&s->of[d->index], d);
  trim(d); /* the queues are gone, and with them all that pended */
  while (p->bare) {
    orr_buffer *b = p->bare;
    p->bare = b->next;
    buffer_delete(b);
  }
  free(p);
  d->pool = NULL;
}

void orr_set_memory_limit(orr_device *d, size_t bytes) { d->limit = bytes; }

void orr_reset_peak(orr_device *d) { d->peak = d->live; }

void orr_alloc_fail_after(int64_t n) { fail_after = n; }
