/* cuda_error.c: errors of CUDA and its libraries, in words, and GPUs that are lost.
 *
 * Invariant: an error is returned once, or recorded once in the queue in which it was met,
 * where the first one stays until it is fetched. A sticky error, after which no call on the GPU
 * succeeds in this process, loses the GPU: its words never change again, and all later work on
 * it fails in them.
 * To add an error that CUDA calls sticky: its row in is_sticky.
 */
#include <stdio.h>
#include <string.h>

#include "cuda.h"

static pthread_mutex_t losing = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local orr_cuda_failure stray; /* met while no queue was entered */

static bool is_sticky(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure: return true;
    default: return false;
  }
}

static void lose(orr_cuda_gpu *gpu, cudaError_t error) {
  orr_cuda_queue *s = orr_cuda_current();
  const char *name = s && s->device->gpu == gpu ? s->device->name : gpu->name;
  pthread_mutex_lock(&losing);
  if (!orr_cuda_is_lost(gpu)) {
    snprintf(gpu->why, sizeof gpu->why, "%s is lost: %s; restart the process to use it again",
             name, cudaGetErrorString(error));
    atomic_store_explicit(&gpu->lost, true, memory_order_release);
  }
  pthread_mutex_unlock(&losing);
}

orr_status orr_cuda_lost(const orr_cuda_gpu *gpu) {
  return orr_fail(ORR_EDEVICE, "%s", gpu->why);
}

/* Leaves no error behind for a later launch to find. */
orr_status orr_cuda_try(orr_cuda_gpu *gpu, cudaError_t error, const char *what) {
  if (error == cudaSuccess) return ORR_OK;
  cudaGetLastError();
  if (gpu && is_sticky(error)) lose(gpu, error);
  if (gpu && orr_cuda_is_lost(gpu)) return orr_cuda_lost(gpu);
  orr_status status = error == cudaErrorMemoryAllocation ? ORR_EMEM : ORR_EDEVICE;
  return orr_fail(status, "%s: %s", what, cudaGetErrorString(error));
}

void orr_cuda_ignore(cudaError_t error) {
  if (error) cudaGetLastError();
}

/* A query tells whether the GPU still answers. */
orr_status orr_cuda_library(orr_cuda_gpu *gpu, const char *library, const char *words) {
  orr_cuda_queue *s = orr_cuda_current();
  cudaError_t error = s ? cudaEventQuery(s->mark[0]) : cudaSuccess;
  cudaGetLastError();
  if (is_sticky(error)) lose(gpu, error);
  if (orr_cuda_is_lost(gpu)) return orr_cuda_lost(gpu);
  return orr_fail(ORR_EDEVICE, "%s: %s", library, words);
}

orr_status orr_cuda_fail_on(const orr_cuda_device *d, orr_status status) {
  char words[400];
  if (!status || orr_cuda_is_lost(d->gpu)) return status;
  snprintf(words, sizeof words, "%s", orr_cuda_host->last_error());
  return orr_fail(status, "%s: %s", d->name, words);
}

static orr_cuda_failure *here(orr_cuda_queue *s) { return s ? &s->failure : &stray; }

void orr_cuda_record(orr_status status, const char *words) {
  orr_cuda_failure *f = here(orr_cuda_current());
  if (f->status) return;
  f->status = status;
  snprintf(f->words, sizeof f->words, "%s", words);
}

orr_status orr_cuda_recorded(orr_cuda_queue *s) {
  orr_cuda_failure *f = here(s);
  orr_status status = f->status;
  f->status = ORR_OK;
  return status ? orr_fail(status, "%s", f->words) : ORR_OK;
}

int orr_cuda_check(cudaError_t error, const char *what) {
  orr_cuda_queue *s = orr_cuda_current();
  if (error == cudaSuccess) return 1;
  orr_status status = orr_cuda_try(s ? s->device->gpu : NULL, error, what);
  orr_cuda_record(status, orr_cuda_host->last_error());
  return 0;
}

void orr_cuda_tell_loss(orr_cuda_gpu *gpu) {
  if (atomic_exchange(&gpu->told, true)) return;
  orr_cuda_host->work_error(ORR_EDEVICE, gpu->why);
  orr_cuda_nccl_lost(gpu);
}
