/* cuda_stream.c: streams of the queues: what runs on them comes in the order of its issue;
 * marks tell how far the device has come; events make one stream wait for another.
 *
 * Invariant: one thread at a time drives a queue's stream; another thread records an event
 * there and nothing else. A mark is an event behind an item; marks complete in order. On a lost
 * GPU everything counts as complete.
 * To add what must be looked at while work is on its way: completed().
 */
#include <stdlib.h>
#include <time.h>

#include "cuda.h"

static _Thread_local orr_cuda_queue *current;

double orr_cuda_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- the current stream ---- */

orr_cuda_queue *orr_cuda_current(void) { return current; }

cudaStream_t orr_cuda_stream(void) {
  if (!current) orr_cuda_record(ORR_EDEVICE, "a kernel was launched outside of a queue");
  return current ? current->issue : NULL;
}

orr_cuda_queue *orr_cuda_switch(orr_cuda_queue *s) {
  orr_cuda_queue *before = current;
  current = s;
  if (s && s != before)
    orr_cuda_check(cudaSetDevice(s->device->gpu->ordinal), "making a GPU current");
  return before;
}

static void enter(orr_queue *q) {
  orr_cuda_queue *s = q ? q->stream : NULL;
  current = s;
  if (!s) return;
  s->failure.status = ORR_OK;
  if (orr_cuda_is_lost(s->device->gpu)) return;
  if (!orr_cuda_check(cudaSetDevice(s->device->gpu->ordinal), "making a GPU current")) return;
  orr_status status = orr_cuda_clear_poison(s);
  if (status) orr_cuda_record(status, orr_cuda_host->last_error());
}

static orr_status check(orr_queue *q) { return orr_cuda_recorded(q->stream); }

/* ---- opening and closing ---- */

static orr_status new_event(orr_cuda_gpu *gpu, cudaEvent_t *out) {
  return orr_cuda_try(gpu, cudaEventCreateWithFlags(out, cudaEventDisableTiming),
                      "a new event");
}

static orr_status fill_queue(orr_cuda_queue *s) {
  orr_cuda_gpu *gpu = s->device->gpu;
  pthread_mutex_lock(&gpu->mutex);
  int word = gpu->n_words;
  gpu->n_words += 2;
  pthread_mutex_unlock(&gpu->mutex);
  if (word + 2 > ORR_CUDA_WORDS) return orr_fail(ORR_EDEVICE, "too many queues on one GPU");
  s->poison = gpu->words + word * ORR_CUDA_WORD_STRIDE;
  s->mail = s->poison + ORR_CUDA_WORD_STRIDE;
  ORR_TRY(orr_cuda_try(
      gpu, cudaStreamCreateWithPriority(&s->stream, cudaStreamNonBlocking, -s->is_comm),
      "a new stream"));
  s->issue = s->stream;
  for (int k = 0; k < ORR_CUDA_MARKS; k++) ORR_TRY(new_event(gpu, &s->mark[k]));
  return orr_cuda_clear_poison(s);
}

orr_status orr_cuda_queue_new(orr_cuda_device *d, bool is_comm, orr_cuda_queue **out) {
  ORR_TRY(orr_cuda_use(d->gpu));
  orr_cuda_queue *s = calloc(1, sizeof *s);
  if (!s) return orr_fail(ORR_EMEM, "out of host memory for the queues of %s", d->name);
  s->device = d;
  s->is_comm = is_comm;
  orr_status status = fill_queue(s);
  if (status) orr_cuda_queue_free(s);
  else *out = s;
  return status;
}

/* What fails here belongs to a GPU that was lost and said so. */
void orr_cuda_queue_free(orr_cuda_queue *take_s) {
  orr_cuda_queue *s = take_s;
  if (!s) return;
  cudaSetDevice(s->device->gpu->ordinal);
  if (s->stream) cudaStreamSynchronize(s->stream);
  orr_cuda_graphs_close(s);
  orr_cuda_faults_close(s);
  orr_cuda_memory_close(s);
  for (int k = 0; k < ORR_CUDA_MARKS; k++)
    if (s->mark[k]) cudaEventDestroy(s->mark[k]);
  for (int k = 0; k < ORR_MAX_GPUS; k++)
    if (s->peer[k]) cudaEventDestroy(s->peer[k]);
  if (s->stream) cudaStreamDestroy(s->stream);
  cudaGetLastError();
  if (current == s) current = NULL;
  free(s);
}

static orr_status queue_open(orr_queue *q) {
  orr_cuda_device *d = orr_cuda_device_of(q->device);
  orr_cuda_queue *s = NULL;
  orr_status status = orr_cuda_queue_new(d, q == q->device->comm, &s);
  if (!status) q->stream = s;
  return orr_cuda_fail_on(d, status);
}

static void queue_close(orr_queue *q) { orr_cuda_queue_free(q->stream); }

/* ---- order between streams ---- */

static orr_status peer_event(orr_cuda_queue *s, orr_cuda_gpu *gpu, cudaEvent_t *out) {
  cudaEvent_t *event = &s->peer[gpu->index];
  if (!*event) {
    ORR_TRY(orr_cuda_use(gpu));
    orr_status status = new_event(gpu, event);
    ORR_TRY(orr_cuda_use(s->device->gpu));
    ORR_TRY(status);
  }
  *out = *event;
  return ORR_OK;
}

static orr_status follow(orr_cuda_queue *s, orr_cuda_queue *other) {
  cudaEvent_t event;
  orr_cuda_gpu *gpu = other->device->gpu;
  ORR_TRY(peer_event(s, gpu, &event));
  ORR_TRY(orr_cuda_try(gpu, cudaEventRecord(event, other->stream), "recording an event"));
  return orr_cuda_try(s->device->gpu, cudaStreamWaitEvent(s->stream, event, 0),
                      "making a stream wait");
}

/* Where the stream cannot be made to wait, the thread does: later work must not run early. */
orr_status orr_cuda_follow(orr_cuda_queue *s, orr_cuda_queue *other) {
  if (s == other) return ORR_OK;
  if (orr_cuda_is_lost(other->device->gpu)) return orr_cuda_lost(other->device->gpu);
  if (orr_cuda_is_lost(s->device->gpu)) return orr_cuda_lost(s->device->gpu);
  orr_status status = follow(s, other);
  if (status) cudaStreamSynchronize(other->stream);
  return status;
}

static orr_status wait(orr_queue *q, orr_queue *of) {
  orr_cuda_queue *s = q->stream, *other = of->stream;
  if (!s || !other) return ORR_OK;
  orr_status status = orr_cuda_follow(s, other);
  if (!status) return orr_cuda_spread_from(s, other);
  if (!orr_cuda_is_lost(s->device->gpu)) /* what comes may be nonsense */
    cudaMemsetAsync(s->poison, 1, sizeof(int), s->stream);
  return orr_cuda_fail_on(s->device, status);
}

/* ---- how far the device is ---- */

static bool mark(orr_queue *q, uint64_t seq) {
  orr_cuda_queue *s = q->stream;
  orr_cuda_gpu *gpu = s->device->gpu;
  unsigned slot = (unsigned)(s->n_marked % ORR_CUDA_MARKS);
  if (orr_cuda_is_lost(gpu)) return true;
  if (s->n_marked - s->n_complete == ORR_CUDA_MARKS) return false;
  if (orr_cuda_try(gpu, cudaEventRecord(s->mark[slot], s->stream), "recording a mark"))
    return orr_cuda_is_lost(gpu);
  if (s->n_marked == s->n_complete) s->alive = orr_cuda_now();
  s->mark_seq[slot] = seq;
  s->n_marked++;
  return true;
}

/* A query that fails without a reason is told, and tried again; not for ever. */
static bool reached(orr_cuda_queue *s, unsigned slot) {
  enum { TRIES = 3 };
  cudaError_t error = cudaEventQuery(s->mark[slot]);
  if (error == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  orr_status status = orr_cuda_try(s->device->gpu, error, "asking how far a stream is");
  if (!status) {
    s->n_odd = 0;
    return true;
  }
  if (orr_cuda_is_lost(s->device->gpu)) return false;
  status = orr_cuda_fail_on(s->device, status);
  orr_cuda_host->work_error(status, orr_cuda_host->last_error());
  return ++s->n_odd >= TRIES;
}

static uint64_t completed(orr_queue *q) {
  orr_cuda_queue *s = q->stream;
  orr_cuda_gpu *gpu = s->device->gpu;
  uint64_t before = s->n_complete;
  while (s->n_complete < s->n_marked && !orr_cuda_is_lost(gpu)) {
    unsigned slot = (unsigned)(s->n_complete % ORR_CUDA_MARKS);
    if (!reached(s, slot)) break;
    s->complete_seq = s->mark_seq[slot];
    s->n_complete++;
  }
  if (orr_cuda_is_lost(gpu)) {
    orr_cuda_tell_loss(gpu);
    return UINT64_MAX;
  }
  if (s->n_complete != before) s->alive = orr_cuda_now();
  orr_cuda_faults_look(s);
  orr_cuda_graphs_look(s);
  orr_cuda_nccl_watch(s);
  return s->complete_seq;
}

static orr_status finish(orr_queue *q) {
  orr_cuda_queue *s = q->stream;
  orr_cuda_gpu *gpu = s->device->gpu;
  if (orr_cuda_is_lost(gpu)) return orr_cuda_lost(gpu);
  return orr_cuda_try(gpu, cudaStreamSynchronize(s->stream), "waiting for a stream");
}

/* ---- the copy queue ---- */

orr_status orr_cuda_borrow(orr_cuda_device *d, orr_cuda_queue **before) {
  orr_status status = ORR_OK;
  pthread_mutex_lock(&d->copy_mutex);
  if (!d->copy) status = orr_cuda_queue_new(d, true, &d->copy);
  else status = orr_cuda_use(d->gpu);
  if (!status && current) status = orr_cuda_follow(d->copy, current);
  if (status) {
    pthread_mutex_unlock(&d->copy_mutex);
    return status;
  }
  d->copy->failure.status = ORR_OK;
  *before = orr_cuda_switch(d->copy);
  return ORR_OK;
}

orr_status orr_cuda_release(orr_cuda_device *d, orr_cuda_queue *before) {
  orr_cuda_queue *s = d->copy;
  orr_status status = orr_cuda_recorded(s);
  orr_status waited =
      orr_cuda_try(d->gpu, cudaStreamSynchronize(s->stream), "waiting for a copy");
  if (!status) status = waited;
  orr_cuda_switch(before);
  pthread_mutex_unlock(&d->copy_mutex);
  return status;
}

/* ---- the backend ---- */

const orr_backend orr_cuda_backend = {.name = "cuda",
                                      .kernels = &orr_kernels_cuda,
                                      .memory_new = orr_cuda_memory_new,
                                      .memory_free = orr_cuda_memory_free,
                                      .run = orr_cuda_run,
                                      .queue_open = queue_open,
                                      .queue_close = queue_close,
                                      .enter = enter,
                                      .check = check,
                                      .finish = finish,
                                      .wait = wait,
                                      .mark = mark,
                                      .completed = completed,
                                      .transfer = orr_cuda_transfer,
                                      .reaches = orr_cuda_reaches,
                                      .collective_new = orr_cuda_collective_new,
                                      .collective_run = orr_cuda_collective_run,
                                      .graph_run = orr_cuda_graph_run,
                                      .graph_free = orr_cuda_graph_free};
