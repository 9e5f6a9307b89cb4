/* device.c: the device table: `cpu`, `cpu:0` to `cpu:N-1`, `meta`, then `cuda:0` to `cuda:M-1`.
 *
 * Invariant: the table is made once from the environment, by the controller; indices never
 * change while it is open. CUDA devices join it when somebody first asks for what may be one.
 * Closing drains and joins; buffers still held then stay valid until freed.
 * To add a kind of device: its rows behind the last ones, as cudas_open does.
 */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "cpu_onednn.h"
#include "machine.h"
#include "plugin.h"

enum {
  MOST_BY_DEFAULT = ORR_MAX_WORKERS - ORR_MAX_CUDA_DEVICES, /* CPUs, where nobody says */
  NOT_ASKED = -1
};

static orr_device devices[ORR_MAX_WORKERS + 2];
static int n_devices, n_cpus; /* 0 while closed */
static int n_cudas = NOT_ASKED;
static orr_device_info *cuda_info; /* [n_cudas] */

int orr_cores(void) {
  static int cores;
  if (cores) return cores;
  cpu_set_t set;
  cores = sched_getaffinity(0, sizeof set, &set) ? (int)sysconf(_SC_NPROCESSORS_ONLN)
                                                 : CPU_COUNT(&set);
  if (cores < 1) cores = 1;
  return cores;
}

/* ---- the environment ---- */

/* A whole number and nothing else. */
static bool parse_number(const char *text, uint64_t *out) {
  char *end;
  if (!isdigit((unsigned char)text[0])) return false;
  errno = 0;
  *out = strtoull(text, &end, 10);
  return *end == '\0' && errno == 0;
}

static orr_status read_count(int *out) {
  const char *text = getenv("ORRERY_CPU_DEVICES");
  uint64_t n;
  *out = orr_cores() > 2 ? orr_cores() : 2;
  if (*out > MOST_BY_DEFAULT) *out = MOST_BY_DEFAULT;
  if (!text || !*text) return ORR_OK;
  if (!parse_number(text, &n) || n < 1 || n > ORR_MAX_CPU_DEVICES) {
    return orr_fail(ORR_EARG, "ORRERY_CPU_DEVICES='%.40s': expected a number from 1 to %d",
                    text, ORR_MAX_CPU_DEVICES);
  }
  *out = (int)n;
  return ORR_OK;
}

static orr_status read_engine(orr_engine_kind *kind, uint64_t *seed) {
  const char *text = getenv("ORRERY_ENGINE");
  *kind = ORR_ENGINE_THREAD;
  if (!text || !*text || strcmp(text, "thread") == 0) return ORR_OK;
  if (strcmp(text, "inline") == 0) {
    *kind = ORR_ENGINE_INLINE;
    return ORR_OK;
  }
  if (strncmp(text, "shuffle:", 8) == 0 && parse_number(text + 8, seed)) {
    *kind = ORR_ENGINE_SHUFFLE;
    return ORR_OK;
  }
  return orr_fail(ORR_EARG,
                  "ORRERY_ENGINE='%.40s': expected thread, inline or shuffle:SEED, as in "
                  "shuffle:7",
                  text);
}

/* Spreads the bits of a seed; never 0, which the generator would keep. */
static uint64_t mix(uint64_t seed) {
  seed = (seed + 0x9E3779B97F4A7C15ull) * 0xBF58476D1CE4E5B9ull;
  seed ^= seed >> 31;
  return seed ? seed : 1;
}

/* ---- opening and closing ---- */

/* In a plan the kind that a bare number means goes without its name. */
static const char *device_label(int device, bool in_plan) {
  if (device < 0 || device >= n_devices) return NULL;
  const orr_device *d = &devices[device];
  orr_device_kind bare = n_cudas > 0 ? ORR_DEVICE_CUDA : ORR_DEVICE_CPU;
  return in_plan && d->id >= 0 && d->kind == bare ? strchr(d->name, ':') + 1 : d->name;
}

/* Keeps what buffers of an earlier opening still count. */
static orr_device *device_fill(int index, int id, orr_device_kind kind) {
  orr_device *d = &devices[index];
  d->index = index;
  d->id = id;
  d->kind = kind;
  d->is_inline = kind == ORR_DEVICE_CPU && id < 0;
  d->backend = kind == ORR_DEVICE_META ? &orr_backend_meta : &orr_backend_cpu;
  d->threads = 1;
  d->limit = 0;
  if (kind == ORR_DEVICE_META) {
    snprintf(d->name, sizeof d->name, "meta");
    snprintf(d->model, sizeof d->model, "shapes only");
    return d;
  }
  if (kind == ORR_DEVICE_CUDA) {
    d->backend = orr_plugin_now()->backend;
    snprintf(d->name, sizeof d->name, "cuda:%d", id);
    return d;
  }
  snprintf(d->name, sizeof d->name, id < 0 ? "cpu" : "cpu:%d", id);
  if (index == 0) orr_cpu_model(d->model, sizeof d->model);
  else snprintf(d->model, sizeof d->model, "%s", devices[0].model);
  return d;
}

static orr_status queues_new(orr_device *d, int k) {
  orr_worker *worker = NULL;
  orr_queue *compute = NULL, *comm = NULL;
  orr_status status = orr_worker_new(d, k, &worker);
  if (!status) status = orr_queue_new(d, "compute", worker, &compute);
  if (!status) status = orr_queue_new(d, "comm", worker, &comm);
  if (status) {
    orr_queue_free(compute);
    orr_worker_free(worker);
    return status;
  }
  orr_engine.queue[2 * k] = d->compute = compute;
  orr_engine.queue[2 * k + 1] = d->comm = comm;
  orr_engine.n_queues = 2 * k + 2;
  return ORR_OK;
}

static void queues_free(void) {
  for (int k = 0; k < orr_engine.n_queues; k += 2) orr_worker_stop(orr_engine.queue[k]->worker);
  for (int k = 0; k < orr_engine.n_queues; k += 2) orr_worker_free(orr_engine.queue[k]->worker);
  for (int k = 0; k < orr_engine.n_queues; k++) orr_queue_free(orr_engine.queue[k]);
  for (int k = 0; k < n_devices; k++) devices[k].compute = devices[k].comm = NULL;
  memset(&orr_engine, 0, sizeof orr_engine);
}

orr_status orr_devices_open(void) {
  static bool at_exit;
  orr_engine_kind kind;
  uint64_t seed = 0;
  int n;
  if (n_devices) return ORR_OK;
  ORR_TRY(read_count(&n));
  ORR_TRY(read_engine(&kind, &seed));
  setenv("OMP_WAIT_POLICY", "passive", 0);
  memset(&orr_engine, 0, sizeof orr_engine);
  orr_engine.kind = kind;
  orr_engine.random = mix(seed);
  orr_engine.n_devices = n;
  device_fill(0, -1, ORR_DEVICE_CPU)->threads = orr_cores();
  for (int k = 0; k < n; k++) {
    orr_device *d = device_fill(1 + k, k, ORR_DEVICE_CPU);
    d->threads = orr_cores() > n ? orr_cores() / n : 1;
    orr_status status = queues_new(d, k);
    if (status) {
      n_devices = 1 + k;
      queues_free();
      n_devices = 0;
      return status;
    }
  }
  device_fill(1 + n, -1, ORR_DEVICE_META);
  n_cpus = n;
  n_devices = n + 2;
  orr_device_label_hook = device_label;
  if (!at_exit) at_exit = atexit(orr_devices_close) == 0;
  return ORR_OK;
}

static orr_status cuda_fill(int k) {
  orr_device *d = device_fill(n_devices, k, ORR_DEVICE_CUDA);
  orr_device_info *info = &cuda_info[k];
  ORR_TRY(orr_plugin_now()->describe(k, info));
  snprintf(d->model, sizeof d->model, "%s", info->model);
  d->gpu = info->gpu;
  d->total = (size_t)info->total;
  ORR_TRY(queues_new(d, n_cpus + k));
  n_devices++;
  return ORR_OK;
}

/* Opens the plug-in and gives its devices their rows; what is wrong with one ends the list. */
static void cudas_open(void) {
  int n = orr_plugin_open();
  if (n > ORR_MAX_WORKERS - n_cpus) n = ORR_MAX_WORKERS - n_cpus;
  n_cudas = 0;
  cuda_info = n > 0 ? calloc((size_t)n, sizeof *cuda_info) : NULL;
  while (n_cudas < n) {
    if (!cuda_info || cuda_fill(n_cudas)) {
      orr_plugin_explain(cuda_info ? orr_last_error() : "out of host memory");
      return;
    }
    n_cudas++;
  }
}

static void cudas_close(void) {
  free(cuda_info);
  cuda_info = NULL;
  n_cudas = NOT_ASKED;
  orr_plugin_close();
}

/* What cannot run any more is dropped: the last words of a script never hang it. */
void orr_devices_close(void) {
  if (!n_devices) return;
  orr_drain(NULL, false);
  queues_free();
  for (int k = 0; k < n_devices; k++) orr_pool_close(&devices[k]);
  orr_work_error_raise();
  cudas_close();
  n_devices = n_cpus = 0;
}

/* ---- looking up ---- */

int orr_device_count(void) { return n_devices; }

int orr_device_cpus(void) { return n_cpus; }

int orr_device_cudas(void) {
  if (n_devices && n_cudas == NOT_ASKED) cudas_open();
  return n_cudas > 0 ? n_cudas : 0;
}

int orr_device_visible(void) { return orr_device_cudas() ? n_cudas : n_cpus; }

const char *orr_cuda_why(void) {
  orr_device_cudas();
  return orr_plugin_why();
}

const orr_device_info *orr_cuda_info(int k) { return &cuda_info[k]; }

int64_t orr_cuda_free(const orr_device *d) {
  orr_device_info now;
  bool told = !orr_plugin_now()->describe(d->id, &now) && now.free > 0;
  return told ? now.free + (int64_t)d->cached : cuda_info[d->id].total - (int64_t)d->live;
}

orr_device *orr_device_at(int index) { return &devices[index]; }

int orr_cuda_find(const void *data, const char *id) {
  int found = -1;
  (void)data;
  for (int k = 0; k < orr_device_cudas(); k++) {
    const orr_device_info *info = &cuda_info[k];
    bool same = strcasecmp(info->bus_id, id) == 0 || strncmp(info->uuid, id, strlen(id)) == 0;
    if (same) found = found == -1 ? k : -2;
  }
  return found;
}

/* "2 CPU devices are visible, cpu:0 to cpu:1" */
static char *visible_text(bool cuda, char *buf, size_t size) {
  int n = cuda ? orr_device_cudas() : n_cpus;
  const char *kind = cuda ? "cuda" : "cpu";
  const char *why = cuda ? orr_cuda_why() : "", *none = *why ? "; no other: " : "";
  if (n == 0) snprintf(buf, size, "no CUDA device is visible: %s", why);
  else if (n == 1)
    snprintf(buf, size, "1 %s device is visible, %s:0%s%s", cuda ? "CUDA" : "CPU", kind, none,
             why);
  else
    snprintf(buf, size, "%d %s devices are visible, %s:0 to %s:%d%s%s", n,
             cuda ? "CUDA" : "CPU", kind, kind, n - 1, none, why);
  return buf;
}

static orr_status device_of(bool cuda, int64_t k, orr_device **out) {
  char visible[700];
  int n = cuda ? orr_device_cudas() : n_cpus;
  if (k >= 0 && k < n) {
    *out = &devices[cuda ? n_cpus + 2 + k : 1 + k];
    return ORR_OK;
  }
  visible_text(cuda, visible, sizeof visible);
  if (!cuda && k >= 0 && k < ORR_MAX_CPU_DEVICES) {
    return orr_fail(ORR_EARG,
                    "device %" PRId64 " is not there: %s; ORRERY_CPU_DEVICES=%" PRId64
                    " asks for more",
                    k, visible, k + 1);
  }
  return orr_fail(ORR_EARG, "device %" PRId64 " is not there: %s", k, visible);
}

orr_status orr_device_visible_at(int64_t k, orr_device **out) {
  ORR_TRY(orr_devices_open());
  return device_of(orr_device_cudas() > 0, k, out);
}

orr_status orr_device_find(const char *name, orr_device **out) {
  uint64_t k;
  ORR_TRY(orr_devices_open());
  bool cpu = strncmp(name, "cpu:", 4) == 0, cuda = strncmp(name, "cuda:", 5) == 0;
  if (parse_number(name + (cpu ? 4 : cuda ? 5 : 0), &k)) {
    if (!cpu && !cuda) cuda = orr_device_cudas() > 0;
    return device_of(cuda, k > INT32_MAX ? INT32_MAX : (int64_t)k, out);
  }
  if (strcmp(name, "cpu") == 0 || strcmp(name, "meta") == 0) {
    *out = &devices[name[0] == 'c' ? 0 : n_cpus + 1];
    return ORR_OK;
  }
  if (strcmp(name, "cuda") == 0 && orr_device_cudas()) return device_of(true, 0, out);
  char visible[700];
  return orr_fail(ORR_EARG,
                  "device '%.40s' is unknown; the devices are cpu, cpu:0 to cpu:%d, meta, and "
                  "cuda:0, ...: %s",
                  name, n_cpus - 1, visible_text(true, visible, sizeof visible));
}

orr_status orr_set_threads(int n) {
  ORR_TRY(orr_devices_open());
  if (n < 1 || n > 1024) {
    return orr_fail(ORR_EARG, "set_threads: expected 1 to 1024 threads, not %d", n);
  }
  devices[0].threads = n;
  orr_cpu_team(n);
  orr_onednn_set_threads(n);
  return ORR_OK;
}

orr_status orr_synchronize(orr_device *d) {
  ORR_TRY(orr_devices_open());
  ORR_TRY(orr_drain(d, true));
  if (!orr_work_error_pending()) return ORR_OK;
  ORR_TRY(orr_drain(NULL, true));
  return orr_work_error_raise();
}

orr_status orr_one_error(orr_status status) {
  char words[1500];
  if (status != ORR_EDEVICE || n_cudas <= 0) return status;
  snprintf(words, sizeof words, "%s", orr_last_error());
  orr_status first = orr_synchronize(NULL);
  return first ? first : orr_fail(status, "%s", words);
}
