/* cuda_memory.c: memory of a GPU for the allocator, and what a queue keeps for itself: a room
 * for its kernels' scratch, and pinned blocks through which host memory passes.
 *
 * Invariant: a room only grows, and its content is good until it is asked for again; a block is
 * taken again when the stream has passed the copy that used it.
 * To add scratch of a kernel: orr_cuda_room in its launch function, once.
 */
#include <stdio.h>

#include "cuda.h"

/* ---- for the allocator ---- */

orr_status orr_cuda_memory_new(orr_device *d, size_t bytes, void **out) {
  orr_cuda_device *device = orr_cuda_device_of(d);
  orr_status status = orr_cuda_use(device->gpu);
  if (!status)
    status = orr_cuda_try(device->gpu, cudaMalloc(out, bytes), "allocating on a GPU");
  return orr_cuda_fail_on(device, status);
}

/* Also after the devices are closed. A lost GPU has lost it already. */
void orr_cuda_memory_free(orr_device *d, void *data, size_t bytes) {
  (void)bytes;
  if (!data) return;
  cudaSetDevice(orr_cuda_device_of(d)->gpu->ordinal);
  cudaFree(data);
  cudaGetLastError();
}

/* ---- the room ---- */

static bool grow_room(orr_cuda_queue *s, size_t bytes) {
  const size_t unit = (size_t)2 << 20;
  size_t capacity = (bytes + unit - 1) / unit * unit;
  char what[80];
  snprintf(what, sizeof what, "%zu bytes of room for a kernel on %s", bytes, s->device->name);
  if (s->room) {
    if (!orr_cuda_check(cudaStreamSynchronize(s->stream), "waiting for a room")) return false;
    orr_cuda_check(cudaFree(s->room), "freeing a room");
  }
  s->room = NULL;
  s->room_bytes = 0;
  if (!orr_cuda_check(cudaMalloc(&s->room, capacity), what)) return false;
  s->room_bytes = capacity;
  return true;
}

void *orr_cuda_room(size_t bytes) {
  orr_cuda_queue *s = orr_cuda_current();
  if (!s) {
    orr_cuda_record(ORR_EDEVICE, "a kernel asked for room outside of a queue");
    return NULL;
  }
  if (bytes > s->room_bytes || !s->room)
    if (!grow_room(s, bytes)) return NULL;
  return s->room;
}

/* ---- pinned blocks ---- */

static bool is_free(orr_cuda_queue *s, orr_cuda_block *b) {
  if (b->is_held) return false;
  if (!b->is_busy) return true;
  cudaError_t error = cudaEventQuery(b->event);
  if (error == cudaErrorNotReady) cudaGetLastError();
  else if (!orr_cuda_try(s->device->gpu, error, "asking for a copy")) b->is_busy = false;
  return !b->is_busy;
}

static orr_status new_block(orr_cuda_queue *s, size_t bytes, orr_cuda_block *b) {
  orr_cuda_gpu *gpu = s->device->gpu;
  const size_t small = (size_t)64 << 10;
  size_t capacity = bytes <= small ? small : ORR_CUDA_BLOCK_BYTES;
  void *data;
  *b = (orr_cuda_block){.bytes = capacity};
  ORR_TRY(orr_cuda_try(gpu, cudaEventCreateWithFlags(&b->event, cudaEventDisableTiming),
                       "a new event"));
  orr_status status = orr_cuda_try(gpu, cudaHostAlloc(&data, capacity, cudaHostAllocPortable),
                                   "allocating pinned memory");
  if (status) {
    cudaEventDestroy(b->event);
    return status;
  }
  b->data = data;
  return ORR_OK;
}

/* All that fit are in use: one of them, when the copies are done. */
static orr_status oldest_block(orr_cuda_queue *s, size_t bytes, orr_cuda_block **out) {
  ORR_TRY(orr_cuda_try(s->device->gpu, cudaStreamSynchronize(s->stream), "waiting for copies"));
  for (int k = 0; k < s->n_blocks; k++) {
    orr_cuda_block *b = &s->block[k];
    b->is_busy = false;
    if (b->bytes >= bytes && !b->is_held) *out = b;
  }
  return *out ? ORR_OK : orr_fail(ORR_EDEVICE, "too little pinned memory to copy through");
}

/* Two of the blocks are kept for large copies. */
orr_status orr_cuda_block_take(orr_cuda_queue *s, size_t bytes, orr_cuda_block **out) {
  int n_large = 0;
  *out = NULL;
  if (s->graph) return orr_fail(ORR_EDEVICE, "a graph cannot copy by way of the host");
  for (int k = 0; k < s->n_blocks; k++) {
    orr_cuda_block *b = &s->block[k];
    n_large += b->bytes == ORR_CUDA_BLOCK_BYTES;
    if (b->bytes < bytes || !is_free(s, b)) continue;
    *out = b;
    return ORR_OK;
  }
  bool is_large = bytes > (size_t)64 << 10;
  int most = is_large ? ORR_CUDA_BLOCKS : ORR_CUDA_BLOCKS - (n_large < 2 ? 2 - n_large : 0);
  if (s->n_blocks >= most) return oldest_block(s, bytes, out);
  ORR_TRY(new_block(s, bytes, &s->block[s->n_blocks]));
  *out = &s->block[s->n_blocks++];
  return ORR_OK;
}

orr_status orr_cuda_block_used(orr_cuda_queue *s, orr_cuda_block *b) {
  orr_status status =
      orr_cuda_try(s->device->gpu, cudaEventRecord(b->event, s->stream), "recording an event");
  if (status) cudaStreamSynchronize(s->stream);
  else b->is_busy = true;
  return status;
}

void orr_cuda_memory_close(orr_cuda_queue *s) {
  if (s->room) cudaFree(s->room);
  for (int k = 0; k < s->n_blocks; k++) {
    cudaEventDestroy(s->block[k].event);
    cudaFreeHost(s->block[k].data);
  }
  s->room = NULL;
  s->n_blocks = 0;
}
