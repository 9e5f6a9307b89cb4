/* plugin.h: what the core and a plug-in for a kind of device (`orrery/cuda.so`) hand each
 * other.
 *
 * Invariant: a plug-in is opened at run time and is not linked against the core: everything it
 * calls there stands in orr_host, everything the core calls in it in orr_plugin and its
 * orr_backend. Both sides are built from one tree; `version` says so.
 * To add to it: a member at the end of one of the structs, and ORR_PLUGIN_VERSION one higher.
 */
#ifndef ORR_PLUGIN_H
#define ORR_PLUGIN_H

#include "orrery_int.h"

#define ORR_PLUGIN_VERSION 2

/* The core, as a plug-in sees it. */
typedef struct orr_host {
  int version;
  orr_status (*fail)(orr_status status, const char *format, ...);
  const char *(*last_error)(void);
  /* worker: an error of work that was issued and failed on the device */
  void (*work_error)(orr_status status, const char *message);
  unsigned (*poison_epoch)(void); /* moves when the controller has raised what went wrong */
  const struct orr_kernels *cpu;  /* for views of host memory */
} orr_host;

/* One logical device. */
typedef struct orr_device_info {
  char model[96];
  char bus_id[16];     /* "0000:3b:00.0" */
  char uuid[48];       /* "GPU-..." */
  int smi_index;       /* what nvidia-smi calls it; -1: not known */
  int gpu;             /* devices of one number are one physical GPU */
  int capability;      /* 10 major + minor */
  int64_t total, free; /* bytes; 0 where asking would cost a context on an unused device */
} orr_device_info;

typedef enum orr_link_kind {
  ORR_LINK_SAME,   /* one GPU */
  ORR_LINK_NVLINK, /* directly or through NVSwitch */
  ORR_LINK_PCIE,   /* peers over PCIe */
  ORR_LINK_HOST    /* no peer access: staged through the host */
} orr_link_kind;

/* How device a reaches device b's memory. Tested by a write and its read-back. */
typedef struct orr_link {
  orr_link_kind kind;
  int links;             /* NVLinks; 0: none, or not known */
  double bytes_a_second; /* measured; 0: not measured */
} orr_link;

typedef struct orr_plugin {
  int version;
  /* Counts the logical devices: ORRERY_CUDA_DEVICES if set, else one for each visible GPU. On
   * failure the message says why no device is there, as the end of a sentence. */
  orr_status (*open)(int *n_devices);
  void (*close)(void);
  orr_status (*describe)(int k, orr_device_info *out);
  /* measure: transfers some data to fill in bytes_a_second; makes contexts on both. */
  orr_status (*link)(int a, int b, bool measure, orr_link *out);
  void (*deterministic)(bool on);
  void (*allow_tf32)(bool on);
  const orr_backend *backend;
  /* Which way attention of f16 and bf16 runs on cuda:k, of what has run and is waited for. */
  void (*attention)(int k, char *text, size_t room);
} orr_plugin;

/* The one exported symbol, "orrery_cuda_plugin". `host` lives for ever. NULL: host->version is
 * not the plug-in's. */
typedef const orr_plugin *orr_plugin_entry(const orr_host *host);

/* device.c: of cuda:k, k below orr_device_cudas(). */
const orr_device_info *orr_cuda_info(int k);
/* Bytes that can be allocated: what the driver says, and what is cached; where it does not say,
 * because the GPU is not in use or is lost, all but what is live. */
int64_t orr_cuda_free(const orr_device *d);

/* plugin.c */
int orr_plugin_open(void); /* how many devices came; 0: orr_plugin_why */
void orr_plugin_close(void);
const orr_plugin *orr_plugin_now(void); /* NULL: none is open */
const char *orr_plugin_why(void);       /* there are no devices, or no more */
void orr_plugin_explain(const char *words);
/* What the user lets kernels do. Kept while no plug-in is open. Gives what was. */
typedef enum orr_choice { ORR_DETERMINISTIC, ORR_ALLOW_TF32 } orr_choice;
bool orr_plugin_choose(orr_choice c, bool on);
bool orr_plugin_choice(orr_choice c);

#endif
