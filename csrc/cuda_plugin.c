/* cuda_plugin.c: what the core finds when it opens the plug-in: which devices there are, and
 * what each is.
 *
 * Invariant: no context is made on a GPU before something is queued or allocated there. The
 * table of devices is filled by `open` and outlives `close`: memory that was allocated on a
 * device can be freed after it.
 * To tell more of a device: a member of orr_device_info, filled in `describe`.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "cuda.h"

const orr_host *orr_cuda_host;
struct orr_cuda_machine orr_cuda_machine;

/* ---- which devices ---- */

static void version_text(int version, char *buf, size_t size) {
  snprintf(buf, size, "%d.%d", version / 1000, version % 1000 / 10);
}

static orr_status no_runtime(cudaError_t error) {
  int driver = 0, runtime = 0;
  char has[16], needs[16];
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  cudaGetLastError();
  if (error == cudaErrorNoDevice && visible)
    return orr_fail(ORR_EDEVICE, "CUDA_VISIBLE_DEVICES='%.100s' leaves no GPU visible",
                    visible);
  if (error == cudaErrorNoDevice) return orr_fail(ORR_EDEVICE, "the driver sees no NVIDIA GPU");
  if (error != cudaErrorInsufficientDriver)
    return orr_fail(ORR_EDEVICE, "CUDA does not start: %s", cudaGetErrorString(error));
  if (cudaDriverGetVersion(&driver) || driver == 0)
    return orr_fail(ORR_EDEVICE, "no NVIDIA driver is installed");
  if (cudaRuntimeGetVersion(&runtime)) runtime = CUDART_VERSION;
  version_text(driver, has, sizeof has);
  version_text(runtime, needs, sizeof needs);
  return orr_fail(ORR_EDEVICE,
                  "the NVIDIA driver is too old: it serves CUDA %s, and this build needs %s",
                  has, needs);
}

/* "0,0,1,1" into the GPU of each logical device. */
static orr_status read_list(const char *text, int n_gpus, int *ordinal, int *n) {
  const char *at = text;
  *n = 0;
  while (*at) {
    char *end;
    long k = strtol(at, &end, 10);
    if (end == at || (*end && *end != ',') || (*end == ',' && !end[1]))
      return orr_fail(
          ORR_EARG, "ORRERY_CUDA_DEVICES='%.60s' is no list of numbers such as 0,0,1,1", text);
    if (k < 0 || k >= n_gpus)
      return orr_fail(ORR_EARG, "ORRERY_CUDA_DEVICES='%.60s' names GPU %ld, and %d %s visible",
                      text, k, n_gpus, n_gpus == 1 ? "is" : "are");
    if (*n == ORR_MAX_CUDA_DEVICES)
      return orr_fail(ORR_EARG, "ORRERY_CUDA_DEVICES='%.60s' names more than %d devices", text,
                      ORR_MAX_CUDA_DEVICES);
    ordinal[(*n)++] = (int)k;
    at = *end ? end + 1 : end;
  }
  if (*n == 0) return orr_fail(ORR_EDEVICE, "ORRERY_CUDA_DEVICES is empty");
  return ORR_OK;
}

static orr_cuda_gpu *gpu_of(int ordinal, const char *name) {
  struct orr_cuda_machine *m = &orr_cuda_machine;
  for (int k = 0; k < m->n_gpus; k++)
    if (m->gpu[k].ordinal == ordinal) return &m->gpu[k];
  orr_cuda_gpu *gpu = &m->gpu[m->n_gpus];
  bool lost = orr_cuda_is_lost(gpu); /* opened before: for good */
  gpu->index = m->n_gpus++;
  gpu->ordinal = ordinal;
  if (!lost) snprintf(gpu->name, sizeof gpu->name, "%s", name);
  for (int k = 0; k < ORR_MAX_GPUS; k++) atomic_store(&gpu->reach[k], 0);
  return gpu;
}

static void make_mutexes(void) {
  for (int k = 0; k < ORR_MAX_GPUS; k++) {
    pthread_mutex_init(&orr_cuda_machine.gpu[k].mutex, NULL);
    pthread_mutex_init(&orr_cuda_machine.device[k].copy_mutex, NULL);
  }
}

static orr_status plugin_open(int *n_devices) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  struct orr_cuda_machine *m = &orr_cuda_machine;
  const char *list = getenv("ORRERY_CUDA_DEVICES");
  int n_gpus = 0, n = 0, ordinal[ORR_MAX_CUDA_DEVICES];
  pthread_once(&once, make_mutexes);
  cudaError_t error = cudaGetDeviceCount(&n_gpus);
  if (!error && n_gpus == 0) error = cudaErrorNoDevice;
  if (error) return no_runtime(error);
  if (list) {
    ORR_TRY(read_list(list, n_gpus, ordinal, &n));
  } else {
    for (; n < n_gpus && n < ORR_MAX_CUDA_DEVICES; n++) ordinal[n] = n;
  }
  m->n_gpus = 0;
  for (int k = 0; k < n; k++) {
    orr_cuda_device *d = &m->device[k];
    d->k = k;
    snprintf(d->name, sizeof d->name, "cuda:%d", k);
    d->gpu = gpu_of(ordinal[k], d->name);
  }
  m->n_devices = *n_devices = n;
  orr_cuda_nccl_open();
  return ORR_OK;
}

/* ---- contexts ---- */

static orr_status open_gpu(orr_cuda_gpu *gpu) {
  void *words;
  size_t bytes = sizeof(int) * ORR_CUDA_WORDS * ORR_CUDA_WORD_STRIDE;
  ORR_TRY(orr_cuda_try(gpu, cudaMalloc(&words, bytes), "the first memory of a GPU"));
  gpu->words = words;
  gpu->n_words = 0;
  atomic_store(&gpu->epoch, orr_cuda_host->poison_epoch() - 1); /* not cleared yet */
  atomic_store(&gpu->is_open, true);
  return ORR_OK;
}

orr_status orr_cuda_use(orr_cuda_gpu *gpu) {
  if (orr_cuda_is_lost(gpu)) return orr_cuda_lost(gpu);
  ORR_TRY(orr_cuda_try(gpu, cudaSetDevice(gpu->ordinal), "making a GPU current"));
  if (atomic_load_explicit(&gpu->is_open, memory_order_acquire)) return ORR_OK;
  pthread_mutex_lock(&gpu->mutex);
  orr_status status = atomic_load(&gpu->is_open) ? ORR_OK : open_gpu(gpu);
  pthread_mutex_unlock(&gpu->mutex);
  return status;
}

static void close_gpu(orr_cuda_gpu *gpu) {
  if (!atomic_exchange(&gpu->is_open, false)) return;
  cudaSetDevice(gpu->ordinal);
  cudaFree(gpu->words);
  cudaGetLastError();
  gpu->words = NULL;
}

static void plugin_close(void) {
  struct orr_cuda_machine *m = &orr_cuda_machine;
  orr_cuda_nccl_close();
  for (int k = 0; k < m->n_devices; k++) {
    orr_cuda_device *d = &m->device[k];
    orr_cuda_blas_close(d);
    orr_cuda_dnn_close(d);
    orr_cuda_queue_free(d->copy);
    d->copy = NULL;
  }
  for (int k = 0; k < m->n_gpus; k++) close_gpu(&m->gpu[k]);
}

/* ---- what a device is ---- */

/* "0000:3B:00.0" has a node of its own only where the GPU is given to this container. */
static bool is_there(const char *folder, const char *bus_id) {
  char path[600], line[128];
  int minor = -1;
  snprintf(path, sizeof path, "%s/%s/information", folder, bus_id);
  FILE *file = fopen(path, "re");
  if (!file) return false;
  while (fgets(line, sizeof line, file))
    if (sscanf(line, "Device Minor: %d", &minor) == 1) break;
  fclose(file);
  snprintf(path, sizeof path, "/dev/nvidia%d", minor);
  return minor < 0 || access(path, F_OK) == 0;
}

/* nvidia-smi counts the machine's GPUs by their bus ids, whatever CUDA_VISIBLE_DEVICES hides.
 * -1: not known. */
static int smi_index(const char *bus_id) {
  static const char folder[] = "/proc/driver/nvidia/gpus";
  int before = 0;
  bool found = false;
  DIR *all = opendir(folder);
  if (!all) return -1;
  for (struct dirent *e = readdir(all); e; e = readdir(all)) {
    if (e->d_name[0] == '.' || !is_there(folder, e->d_name)) continue;
    int order = strcasecmp(e->d_name, bus_id);
    before += order < 0;
    found = found || order == 0;
  }
  closedir(all);
  return found ? before : -1;
}

/* Where all GPUs are visible they can be counted here. */
static int smi_index_of_visible(const char *bus_id) {
  int n = 0, before = 0;
  char other[16];
  if (getenv("CUDA_VISIBLE_DEVICES") || cudaGetDeviceCount(&n)) return -1;
  for (int k = 0; k < n; k++) {
    if (cudaDeviceGetPCIBusId(other, sizeof other, k)) return -1;
    before += strcasecmp(other, bus_id) < 0;
  }
  return before;
}

static void uuid_text(const unsigned char *b, char *text, size_t size) {
  snprintf(text, size,
           "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
           b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
           b[14], b[15]);
}

static orr_status describe(int k, orr_device_info *out) {
  orr_cuda_gpu *gpu = orr_cuda_machine.device[k].gpu;
  struct cudaDeviceProp p;
  ORR_TRY(
      orr_cuda_try(gpu, cudaGetDeviceProperties(&p, gpu->ordinal), "reading what a GPU is"));
  ORR_TRY(orr_cuda_try(gpu,
                       cudaDeviceGetPCIBusId(out->bus_id, sizeof out->bus_id, gpu->ordinal),
                       "reading a GPU's bus id"));
  snprintf(out->model, sizeof out->model, "%.95s", p.name);
  uuid_text((const unsigned char *)p.uuid.bytes, out->uuid, sizeof out->uuid);
  out->smi_index = smi_index(out->bus_id);
  if (out->smi_index < 0) out->smi_index = smi_index_of_visible(out->bus_id);
  out->gpu = gpu->ordinal;
  out->capability = 10 * p.major + p.minor;
  out->total = (int64_t)p.totalGlobalMem;
  out->free = 0;
  if (!atomic_load(&gpu->is_open)) return ORR_OK;
  size_t free_bytes = 0, total = 0;
  ORR_TRY(orr_cuda_use(gpu));
  ORR_TRY(
      orr_cuda_try(gpu, cudaMemGetInfo(&free_bytes, &total), "reading a GPU's free memory"));
  out->free = (int64_t)free_bytes;
  return ORR_OK;
}

/* ---- the entry ---- */

static void deterministic(bool on) { atomic_store(&orr_cuda_machine.deterministic, on); }
static void allow_tf32(bool on) { atomic_store(&orr_cuda_machine.tf32, on); }

static const orr_plugin plugin = {.version = ORR_PLUGIN_VERSION,
                                  .open = plugin_open,
                                  .close = plugin_close,
                                  .describe = describe,
                                  .link = orr_cuda_link,
                                  .deterministic = deterministic,
                                  .allow_tf32 = allow_tf32,
                                  .backend = &orr_cuda_backend,
                                  .attention = orr_cuda_attention_words};

#define ORR_CUDA_EXPORT __attribute__((visibility("default")))
ORR_CUDA_EXPORT const orr_plugin *orrery_cuda_plugin(const orr_host *host);

const orr_plugin *orrery_cuda_plugin(const orr_host *host) {
  if (host->version != ORR_PLUGIN_VERSION) return NULL;
  orr_cuda_host = host;
  atomic_store(&orr_cuda_machine.deterministic, true);
  return &plugin;
}
