/* cuda_poison.c: the word of each stream that says that what it computes is worthless.
 *
 * Invariant: a kernel that finds bad data raises its stream's word. A stream that goes on after
 * another one's work raises its own where that one's is up: poison goes the way of the data, in
 * the order of the streams, and what was issued before it is left alone. Optimizers of a stream
 * whose word is up leave the weights as they are. Words come down when the host has raised the
 * error, with nothing in flight.
 * To add a way between streams: orr_cuda_spread_from behind it.
 */
#include "cuda.h"

const int *orr_cuda_poison(void) {
  orr_cuda_queue *s = orr_cuda_current();
  return s ? s->poison : NULL;
}

static orr_status clear(orr_cuda_queue *s) {
  orr_cuda_gpu *gpu = s->device->gpu;
  size_t bytes = sizeof(int) * ORR_CUDA_WORDS * ORR_CUDA_WORD_STRIDE;
  ORR_TRY(orr_cuda_try(gpu, cudaSetDevice(gpu->ordinal), "making a GPU current"));
  cudaError_t error = cudaMemsetAsync(gpu->words, 0, bytes, s->stream);
  if (!error) error = cudaStreamSynchronize(s->stream);
  return orr_cuda_try(gpu, error, "clearing a GPU's words");
}

/* Any thread: nothing is in flight where the epoch is an old one. */
orr_status orr_cuda_clear_poison(orr_cuda_queue *s) {
  orr_cuda_queue *current = orr_cuda_current();
  orr_cuda_gpu *gpu = s->device->gpu;
  unsigned epoch = orr_cuda_host->poison_epoch();
  orr_status status = ORR_OK;
  if (atomic_load_explicit(&gpu->epoch, memory_order_acquire) == epoch) return ORR_OK;
  pthread_mutex_lock(&gpu->mutex);
  if (atomic_load(&gpu->epoch) != epoch) {
    status = clear(s);
    if (!status) atomic_store(&gpu->epoch, epoch);
  }
  pthread_mutex_unlock(&gpu->mutex);
  if (!current || current->device->gpu == gpu) return status;
  orr_status back = orr_cuda_use(current->device->gpu);
  return status ? status : back;
}

orr_status orr_cuda_spread_from(orr_cuda_queue *s, orr_cuda_queue *other) {
  orr_cuda_gpu *gpu = s->device->gpu, *source = other->device->gpu;
  const int *from = other->poison;
  ORR_TRY(orr_cuda_clear_poison(other));
  if (!orr_cuda_gpu_reaches(s->device, other->device)) {
    ORR_TRY(orr_cuda_try(gpu,
                         cudaMemcpyPeerAsync(s->mail, gpu->ordinal, from, source->ordinal,
                                             sizeof *from, s->stream),
                         "reading another GPU's word"));
    from = s->mail;
  }
  orr_cuda_queue *before = orr_cuda_switch(s);
  orr_cuda_spread(from, s->poison);
  orr_cuda_switch(before);
  return ORR_OK;
}

static void poison_now(orr_cuda_device *d) {
  size_t bytes = sizeof(int) * ORR_CUDA_WORDS * ORR_CUDA_WORD_STRIDE;
  orr_cuda_queue *none;
  if (!atomic_load(&d->gpu->is_open) || orr_cuda_is_lost(d->gpu)) return;
  if (orr_cuda_borrow(d, &none)) return;
  orr_cuda_check(cudaMemsetAsync(d->gpu->words, 1, bytes, d->copy->stream), "poisoning a GPU");
  (void)orr_cuda_release(d, none);
}

/* Entered streams may stand still: nothing of them is waited for. */
void orr_cuda_poison_all(void) {
  orr_cuda_queue *was = orr_cuda_switch(NULL);
  for (int k = 0; k < orr_cuda_machine.n_devices; k++) poison_now(&orr_cuda_machine.device[k]);
  orr_cuda_switch(was);
}
