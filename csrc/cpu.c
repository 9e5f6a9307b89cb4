/* cpu.c: the backends of `cpu`, `cpu:k` and `meta`, and what the host says of itself.
 *
 * Invariant: memory is aligned to 64 bytes, large blocks lie on huge pages where the system has
 * them. `meta` counts memory and has none: its ops are inferred, never run.
 * To add a backend: a const orr_backend beside these in a file of its own, a line in machine.h,
 * and its devices in device.c.
 */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "cpu_onednn.h"
#include "kernel_table.h"
#include "machine.h"

#define MAPPED ((size_t)4 << 20)   /* blocks from here on are mapped by themselves */
#define CHECKED ((size_t)64 << 20) /* the system would promise these without having them */

static orr_status memory_new(orr_device *d, size_t bytes, void **out) {
  int64_t there = bytes >= CHECKED ? orr_host_memory(true) : 0;
  *out = NULL;
  if (there > 0 && bytes > (uint64_t)there) {
    return orr_fail(ORR_EMEM, "%s: the host has %" PRId64 " bytes left", d->name, there);
  }
  if (bytes < MAPPED) {
    if (!posix_memalign(out, 64, bytes)) return ORR_OK;
  } else {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p != MAP_FAILED) {
#ifdef MADV_HUGEPAGE
      madvise(p, bytes, MADV_HUGEPAGE);
#endif
      *out = p;
      return ORR_OK;
    }
  }
  return orr_fail(ORR_EMEM, "%s: the host has no %zu bytes", d->name, bytes);
}

static void memory_free(orr_device *d, void *data, size_t bytes) {
  (void)d;
  if (bytes < MAPPED) free(data);
  else munmap(data, bytes);
}

static orr_status run(const orr_work *work, int shard) { return work->op->run(work, shard); }

void orr_cpu_team(int n) {
#ifdef _OPENMP
  omp_set_num_threads(n);
#else
  orr_onednn_set_threads(n);
#endif
}

/* One core a device, where there are as many. Left alone, the system tends to put a worker
 * beside whoever woke it: 1,000 queued collectives of two devices then cost 4 us each instead
 * of 1. With fewer devices than cores nothing is pinned: other processes and the helpers of a
 * team want room, and a helper would inherit the one core. */
static void pin(const orr_device *d) {
  cpu_set_t allowed, one;
  int k = d->id;
  if (orr_device_cpus() != orr_cores()) return;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
  for (int core = 0; core < CPU_SETSIZE; core++) {
    if (!CPU_ISSET(core, &allowed) || k-- > 0) continue;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
    return;
  }
}

static void thread_start(orr_device *d) {
  pin(d);
  orr_cpu_team(d->threads);
}

const orr_backend orr_backend_cpu = {
    .name = "cpu",
    .kernels = &orr_kernels_cpu,
    .memory_new = memory_new,
    .memory_free = memory_free,
    .run = run,
    .thread_start = thread_start,
};

static orr_status meta_new(orr_device *d, size_t bytes, void **out) {
  (void)d;
  (void)bytes;
  *out = NULL;
  return ORR_OK;
}

static void meta_free(orr_device *d, void *data, size_t bytes) {
  (void)d;
  (void)data;
  (void)bytes;
}

static orr_status meta_run(const orr_work *work, int shard) {
  (void)shard;
  return orr_fail(ORR_EDEVICE, "%s: the device meta has no values", work->op->name);
}

const orr_backend orr_backend_meta = {
    .name = "meta",
    .memory_new = meta_new,
    .memory_free = meta_free,
    .run = meta_run,
};

/* ---- what the host says of itself ---- */

/* What follows "key" and ':' in a file of such lines. */
static bool read_field(const char *path, const char *key, char *buf, size_t size) {
  char line[512];
  bool found = false;
  FILE *f = fopen(path, "re");
  while (f && !found && fgets(line, sizeof line, f)) {
    char *colon = strchr(line, ':');
    if (strncmp(line, key, strlen(key)) != 0 || !colon) continue;
    char *value = colon + 1 + strspn(colon + 1, " \t");
    value[strcspn(value, "\n")] = '\0';
    snprintf(buf, size, "%s", value);
    found = true;
  }
  if (f) fclose(f);
  return found;
}

void orr_cpu_model(char *buf, size_t size) {
  if (!read_field("/proc/cpuinfo", "model name", buf, size) &&
      !read_field("/proc/cpuinfo", "Model", buf, size)) {
    snprintf(buf, size, "CPU");
  }
}

/* A file of one number; -1 where there is none ("max" too). */
static int64_t read_number(const char *path) {
  int64_t value = -1;
  FILE *f = fopen(path, "re");
  if (!f) return -1;
  if (fscanf(f, "%" SCNd64, &value) != 1) value = -1;
  fclose(f);
  return value;
}

int64_t orr_host_memory(bool available) {
  char text[64];
  const char *key = available ? "MemAvailable" : "MemTotal";
  int64_t bytes = 0, bound = read_number("/sys/fs/cgroup/memory.max");
  if (read_field("/proc/meminfo", key, text, sizeof text))
    bytes = strtoll(text, NULL, 10) * 1024;
  int64_t used = available && bound > 0 ? read_number("/sys/fs/cgroup/memory.current") : 0;
  if (bound < 0) {
    bound = read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes");
    if (available && bound > 0)
      used = read_number("/sys/fs/cgroup/memory/memory.usage_in_bytes");
  }
  if (bound > 0 && used >= 0) {
    int64_t left = bound > used ? bound - used : 0;
    if (left < bytes) bytes = left;
  }
  return bytes;
}
