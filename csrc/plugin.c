/* plugin.c: opens the plug-in for CUDA devices when somebody first asks for a device that may
 * be one, and says in words why there are none.
 *
 * Invariant: tried once while the devices are open; a machine without an NVIDIA driver pays one
 * failed look for it. The plug-in lies beside this library.
 * To add a kind of device: its plug-in's name and driver beside these, its rows in device.c.
 */
#include "plugin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel_table.h"
#include "machine.h"

/* Without this library no CUDA program runs, and the plug-in need not be opened. */
#ifndef ORR_CUDA_DRIVER
#define ORR_CUDA_DRIVER "libcuda.so.1"
#endif

static const orr_plugin *plugin;
static char why[600];
static bool choice[] = {[ORR_DETERMINISTIC] = true, [ORR_ALLOW_TF32] = false};

static const orr_host host = {.version = ORR_PLUGIN_VERSION,
                              .fail = orr_fail,
                              .last_error = orr_last_error,
                              .work_error = orr_work_error,
                              .poison_epoch = orr_poison_epoch,
                              .cpu = &orr_kernels_cpu};

static bool has_driver(void) {
  if (!ORR_CUDA_DRIVER[0]) return true;
  void *driver = dlopen(ORR_CUDA_DRIVER, RTLD_LAZY | RTLD_LOCAL);
  if (!driver) snprintf(why, sizeof why, "no NVIDIA driver is installed");
  else dlclose(driver);
  return driver != NULL;
}

/* "/usr/lib/lua/5.1/orrery/cuda.so": beside this library. */
static bool plugin_path(const char *folder, char *path, size_t size) {
  Dl_info info;
  if (!dladdr((const void *)&host, &info) || !info.dli_fname) return false;
  const char *slash = strrchr(info.dli_fname, '/');
  int length = slash ? (int)(slash - info.dli_fname) : 1;
  int n = snprintf(path, size, "%.*s/%scuda.so", length, slash ? info.dli_fname : ".", folder);
  return n > 0 && (size_t)n < size;
}

static void *open_library(void) {
  static const char *const folder[] = {"", "orrery/"};
  char path[4096];
  for (size_t k = 0; k < sizeof folder / sizeof *folder; k++) {
    if (!plugin_path(folder[k], path, sizeof path)) continue;
    FILE *file = fopen(path, "re");
    if (!file) continue;
    fclose(file);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) snprintf(why, sizeof why, "the CUDA plug-in does not load: %s", dlerror());
    return library;
  }
  snprintf(why, sizeof why, "this Orrery was built without CUDA (no orrery/cuda.so)");
  return NULL;
}

/* As many devices as there is room for among the workers. */
int orr_plugin_open(void) {
  int n = 0;
  why[0] = '\0';
  void *library = has_driver() ? open_library() : NULL;
  if (!library) return 0;
  orr_plugin_entry *entry;
  *(void **)&entry = dlsym(library, "orrery_cuda_plugin");
  const orr_plugin *p = entry ? entry(&host) : NULL;
  if (!p || p->version != ORR_PLUGIN_VERSION) {
    snprintf(why, sizeof why, "orrery/cuda.so belongs to another version of Orrery");
  } else if (p->open(&n)) {
    snprintf(why, sizeof why, "%s", orr_last_error());
    n = 0;
  } else {
    plugin = p;
    for (int k = 0; k < (int)(sizeof choice / sizeof *choice); k++)
      orr_plugin_choose(k, choice[k]);
    if (n > ORR_MAX_CUDA_DEVICES) n = ORR_MAX_CUDA_DEVICES;
  }
  return n;
}

void orr_plugin_close(void) {
  if (plugin) plugin->close();
  plugin = NULL;
}

bool orr_plugin_choose(orr_choice c, bool on) {
  bool was = choice[c];
  choice[c] = on;
  if (plugin && c == ORR_DETERMINISTIC) plugin->deterministic(on);
  if (plugin && c == ORR_ALLOW_TF32) plugin->allow_tf32(on);
  return was;
}

bool orr_plugin_choice(orr_choice c) { return choice[c]; }

const orr_plugin *orr_plugin_now(void) { return plugin; }

const char *orr_plugin_why(void) { return why; }

void orr_plugin_explain(const char *words) { snprintf(why, sizeof why, "%s", words); }
