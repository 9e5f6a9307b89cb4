/* cuda_poison.c: the word of each GPU that says that this step's numbers are worthless.
 *
 * Invariant: a kernel that finds bad data raises its GPU's word; what other GPUs compute from
 * there on raises theirs too, since every stream that goes on after another GPU's work looks at
 * that GPU's word first. Optimizers on a GPU whose word is up leave the weights alone. Words
 * come down when the host has raised the error, with nothing in flight.
 * To add a way between GPUs: orr_cuda_spread_from behind it.
 */
#include "cuda.h"

const int *orr_cuda_poison(void) {
  orr_cuda_queue *s = orr_cuda_current();
  return s ? orr_cuda_poison_of(s->device->gpu) : NULL;
}

void orr_cuda_clear_poison(orr_cuda_queue *s) {
  orr_cuda_gpu *gpu = s->device->gpu;
  unsigned epoch = orr_cuda_host->poison_epoch();
  size_t bytes = sizeof(int) * ORR_CUDA_WORDS * ORR_CUDA_WORD_STRIDE;
  if (atomic_load_explicit(&gpu->epoch, memory_order_acquire) == epoch) return;
  pthread_mutex_lock(&gpu->mutex);
  if (atomic_load(&gpu->epoch) != epoch) {
    cudaError_t error = cudaMemsetAsync(gpu->words, 0, bytes, s->stream);
    if (!error) error = cudaStreamSynchronize(s->stream);
    if (orr_cuda_check(error, "clearing a GPU's words")) atomic_store(&gpu->epoch, epoch);
  }
  pthread_mutex_unlock(&gpu->mutex);
}

orr_status orr_cuda_spread_from(orr_cuda_queue *s, orr_cuda_gpu *other) {
  orr_cuda_gpu *gpu = s->device->gpu;
  orr_cuda_device *device = NULL;
  const int *from = orr_cuda_poison_of(other);
  if (gpu == other || !from) return ORR_OK;
  for (int k = 0; k < orr_cuda_machine.n_devices && !device; k++)
    if (orr_cuda_machine.device[k].gpu == other) device = &orr_cuda_machine.device[k];
  if (!orr_cuda_gpu_reaches(s->device, device)) {
    ORR_TRY(orr_cuda_try(gpu,
                         cudaMemcpyPeerAsync(s->word, gpu->ordinal, from, other->ordinal,
                                             sizeof *from, s->stream),
                         "reading another GPU's word"));
    from = s->word;
  }
  orr_cuda_queue *before = orr_cuda_switch(s);
  orr_cuda_spread(from, orr_cuda_poison_of(gpu));
  orr_cuda_switch(before);
  return ORR_OK;
}

void orr_cuda_poison_now(orr_cuda_device *d) {
  orr_cuda_queue *was = orr_cuda_switch(NULL), *none;
  if (atomic_load(&d->gpu->is_open) && !orr_cuda_borrow(d, &none)) {
    orr_cuda_check(cudaMemsetAsync(orr_cuda_poison_of(d->gpu), 1, sizeof(int), d->copy->stream),
                   "poisoning a GPU");
    (void)orr_cuda_release(d, none);
  }
  orr_cuda_switch(was);
}
