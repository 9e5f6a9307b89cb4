/* cuda_link.c: which GPUs' kernels reach whose memory, and how fast.
 *
 * Invariant: a GPU reaches another one when the driver says so, access could be enabled, and a
 * test has passed: a kernel writes there and reads it back, and the host finds the numbers.
 * Tried once a pair, at first need; the answer stays.
 * To add a kind of link: a row of orr_link_kind, told in kind_of.
 */
#include <string.h>

#include "cuda.h"

enum { REACH_UNKNOWN, REACH_YES, REACH_NO };
enum { TEST_NUMBERS = 1024 };

static pthread_mutex_t testing = PTHREAD_MUTEX_INITIALIZER;

static orr_view numbers(void *data) {
  return (orr_view){
      .data = data, .dtype = ORR_I32, .ndim = 1, .shape = {TEST_NUMBERS}, .stride = {1}};
}

/* a's kernels write theirs, and copy it home; mine and theirs: device memory. */
static orr_status write_and_read(orr_cuda_device *a, void *mine, void *theirs, int32_t *seen) {
  orr_cuda_queue *before;
  orr_view there = numbers(theirs), here = numbers(mine);
  ORR_TRY(orr_cuda_borrow(a, &before));
  orr_cuda_arange(&there, 1, 3, 0);
  orr_cuda_copy(&there, &here);
  orr_cuda_check(cudaMemcpyAsync(seen, mine, TEST_NUMBERS * sizeof *seen,
                                 cudaMemcpyDeviceToHost, a->copy->stream),
                 "reading a test back");
  return orr_cuda_release(a, before);
}

/* What b itself sees of it. */
static orr_status read_there(orr_cuda_device *b, const void *theirs, int32_t *seen) {
  orr_cuda_queue *before;
  ORR_TRY(orr_cuda_borrow(b, &before));
  orr_cuda_check(cudaMemcpyAsync(seen, theirs, TEST_NUMBERS * sizeof *seen,
                                 cudaMemcpyDeviceToHost, b->copy->stream),
                 "reading a test back");
  return orr_cuda_release(b, before);
}

static bool is_right(const int32_t *seen) {
  for (int k = 0; k < TEST_NUMBERS; k++)
    if (seen[k] != 1 + 3 * k) return false;
  return true;
}

static orr_status new_memory(orr_cuda_gpu *gpu, size_t bytes, void **out) {
  *out = NULL;
  ORR_TRY(orr_cuda_use(gpu));
  return orr_cuda_try(gpu, cudaMalloc(out, bytes), "allocating on a GPU");
}

static void free_memory(orr_cuda_gpu *gpu, void *data) {
  if (!data) return;
  cudaSetDevice(gpu->ordinal);
  cudaFree(data);
  cudaGetLastError();
}

static bool passes_test(orr_cuda_device *a, orr_cuda_device *b) {
  int32_t near[TEST_NUMBERS] = {0}, far[TEST_NUMBERS] = {0};
  void *mine = NULL, *theirs = NULL;
  orr_status status = new_memory(a->gpu, sizeof near, &mine);
  if (!status) status = new_memory(b->gpu, sizeof far, &theirs);
  if (!status) status = write_and_read(a, mine, theirs, near);
  if (!status) status = read_there(b, theirs, far);
  free_memory(a->gpu, mine);
  free_memory(b->gpu, theirs);
  return !status && is_right(near) && is_right(far);
}

static bool enable(orr_cuda_device *a, orr_cuda_device *b) {
  int can = 0;
  if (cudaDeviceCanAccessPeer(&can, a->gpu->ordinal, b->gpu->ordinal) || !can) return false;
  if (orr_cuda_use(b->gpu) || orr_cuda_use(a->gpu)) return false;
  cudaError_t error = cudaDeviceEnablePeerAccess(b->gpu->ordinal, 0);
  return error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled;
}

static char try_reach(orr_cuda_device *a, orr_cuda_device *b) {
  orr_cuda_queue *before = orr_cuda_switch(NULL);
  bool works = enable(a, b);
  cudaGetLastError();
  works = works && passes_test(a, b);
  orr_cuda_switch(before);
  return works ? REACH_YES : REACH_NO;
}

bool orr_cuda_gpu_reaches(orr_cuda_device *a, orr_cuda_device *b) {
  if (a->gpu == b->gpu) return true;
  if (orr_cuda_is_lost(a->gpu) || orr_cuda_is_lost(b->gpu)) return false;
  atomic_char *known = &a->gpu->reach[b->gpu->index];
  char reach = atomic_load_explicit(known, memory_order_acquire);
  if (reach != REACH_UNKNOWN) return reach == REACH_YES;
  pthread_mutex_lock(&testing);
  reach = atomic_load(known);
  if (reach == REACH_UNKNOWN) {
    reach = try_reach(a, b);
    atomic_store_explicit(known, reach, memory_order_release);
  }
  pthread_mutex_unlock(&testing);
  return reach == REACH_YES;
}

bool orr_cuda_reaches(const orr_device *a, const orr_device *b) {
  return orr_cuda_gpu_reaches(orr_cuda_device_of(a), orr_cuda_device_of(b));
}

/* ---- links ---- */

/* Peers over PCIe do no atomics on each other's memory; over NVLink they do. */
static orr_link_kind kind_of(orr_cuda_device *a, orr_cuda_device *b) {
  int atomics = 0;
  if (a->gpu == b->gpu) return ORR_LINK_SAME;
  if (!orr_cuda_gpu_reaches(a, b)) return ORR_LINK_HOST;
  if (cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, a->gpu->ordinal,
                                b->gpu->ordinal)) {
    cudaGetLastError();
    return ORR_LINK_PCIE;
  }
  return atomics ? ORR_LINK_NVLINK : ORR_LINK_PCIE;
}

static orr_status copies(orr_cuda_device *a, void *to, orr_cuda_device *b, const void *from,
                         size_t bytes, int times) {
  orr_cuda_queue *before;
  ORR_TRY(orr_cuda_borrow(a, &before));
  for (int k = 0; k < times; k++)
    orr_cuda_check(
        cudaMemcpyPeerAsync(to, a->gpu->ordinal, from, b->gpu->ordinal, bytes, a->copy->stream),
        "copying between GPUs");
  return orr_cuda_release(a, before);
}

static orr_status time_copies(orr_cuda_device *a, orr_cuda_device *b, double *rate) {
  enum { TIMES = 8 };
  const size_t bytes = (size_t)32 << 20;
  void *mine = NULL, *theirs = NULL;
  orr_status status = new_memory(a->gpu, bytes, &mine);
  if (!status) status = new_memory(b->gpu, bytes, &theirs);
  if (!status) status = copies(a, mine, b, theirs, bytes, 1);
  double start = orr_cuda_now();
  if (!status) status = copies(a, mine, b, theirs, bytes, TIMES);
  if (!status) *rate = (double)bytes * TIMES / (orr_cuda_now() - start);
  free_memory(a->gpu, mine);
  free_memory(b->gpu, theirs);
  return status;
}

orr_status orr_cuda_link(int a, int b, bool measure, orr_link *out) {
  orr_cuda_device *from = &orr_cuda_machine.device[a], *to = &orr_cuda_machine.device[b];
  *out = (orr_link){.kind = kind_of(from, to)};
  return measure ? orr_cuda_fail_on(from, time_copies(from, to, &out->bytes_a_second)) : ORR_OK;
}
