/* cuda_transfer.c: the same elements elsewhere: between the host and a GPU, and between GPUs
 * that do not reach each other.
 *
 * Invariant: the GPU's side of a copy is one dense range: the view itself where both sides have
 * one order, else the queue's room, packed or unpacked by the copy kernel. The host's side goes
 * through pinned blocks, piece by piece. What is issued on an entered queue stays in its order;
 * without one, and always towards the host, a transfer is complete at return.
 * To add a kind of memory: its case in orr_cuda_transfer.
 */
#include <string.h>

#include "cuda.h"

/* ---- views ---- */

orr_view orr_cuda_packed(const orr_view *v, void *data) {
  orr_view p = *v;
  int64_t stride = 1;
  p.data = data;
  for (int d = v->ndim - 1; d >= 0; d--) {
    p.stride[d] = stride;
    stride *= v->shape[d];
  }
  return p;
}

bool orr_cuda_is_packed(const orr_view *v) {
  int64_t stride = 1;
  for (int d = v->ndim - 1; d >= 0; d--) {
    if (v->shape[d] > 1 && v->stride[d] != stride) return false;
    stride *= v->shape[d];
  }
  return true;
}

/* No holes, no repeats: n elements over a span of n, each dim stepping over the ones inside. */
static bool is_dense(const orr_view *v) {
  int64_t stride = 1;
  bool taken[ORR_MAX_DIM] = {false};
  for (int left = v->ndim; left > 0; left--) {
    int at = -1;
    for (int d = 0; d < v->ndim; d++)
      if (!taken[d] && (v->shape[d] == 1 || v->stride[d] == stride)) at = d;
    if (at < 0) return false;
    taken[at] = true;
    stride *= v->shape[at];
  }
  return true;
}

bool orr_cuda_alike(const orr_view *a, const orr_view *b) {
  for (int d = 0; d < a->ndim; d++)
    if (a->shape[d] != b->shape[d] || (a->shape[d] > 1 && a->stride[d] != b->stride[d]))
      return false;
  return is_dense(a);
}

static orr_view flat(const orr_view *v) {
  return (orr_view){.data = v->data,
                    .dtype = v->dtype,
                    .ndim = 1,
                    .shape = {orr_cuda_numel(v)},
                    .stride = {1}};
}

/* ---- pieces of a host view that fit a block ---- */

typedef struct pieces {
  const orr_view *v;
  int dim;                 /* the one that is cut; those before it go one by one */
  int64_t step;            /* of dim, at most */
  int64_t inner;           /* elements of one step */
  int64_t at[ORR_MAX_DIM]; /* of dims up to dim */
  int64_t done;            /* elements given out, in row-major order */
} pieces;

static pieces pieces_of(const orr_view *v) {
  pieces p = {.v = v, .inner = 1, .step = 1};
  int64_t most = (int64_t)ORR_CUDA_BLOCK_BYTES / orr_cuda_size_of(v->dtype);
  for (p.dim = v->ndim - 1; p.dim > 0; p.dim--) {
    if (p.inner * v->shape[p.dim] > most) break;
    p.inner *= v->shape[p.dim];
  }
  if (most / p.inner > 1) p.step = most / p.inner;
  return p;
}

/* The next piece, of dims from p->dim on; false at the end. */
static bool next_piece(pieces *p, orr_view *out) {
  const orr_view *v = p->v;
  if (p->done == orr_cuda_numel(v)) return false;
  char *data = v->data;
  for (int d = 0; d <= p->dim && d < v->ndim; d++)
    data += p->at[d] * v->stride[d] * orr_cuda_size_of(v->dtype);
  *out = (orr_view){.data = data, .dtype = v->dtype, .ndim = v->ndim ? v->ndim - p->dim : 0};
  for (int d = 0; d < out->ndim; d++) {
    out->shape[d] = v->shape[p->dim + d];
    out->stride[d] = v->stride[p->dim + d];
  }
  if (v->ndim) {
    int64_t left = v->shape[p->dim] - p->at[p->dim];
    out->shape[0] = left < p->step ? left : p->step;
    p->at[p->dim] += out->shape[0];
  }
  for (int d = p->dim; d > 0 && p->at[d] == v->shape[d]; d--) {
    p->at[d] = 0;
    p->at[d - 1]++;
  }
  p->done += orr_cuda_numel(out);
  return true;
}

static void pack(const orr_view *from, void *to) {
  orr_view y = orr_cuda_packed(from, to);
  if (orr_cuda_is_packed(from)) memcpy(to, from->data, (size_t)orr_cuda_bytes(from));
  else orr_cuda_host->cpu->copy(from, &y);
}

static void unpack(const void *from, orr_view *to) {
  orr_view x = orr_cuda_packed(to, (void *)from);
  if (orr_cuda_is_packed(to)) memcpy(to->data, from, (size_t)orr_cuda_bytes(to));
  else orr_cuda_host->cpu->copy(&x, to);
}

/* ---- host and GPU ---- */

static orr_status send_all(orr_cuda_queue *s, const orr_view *host, char *device) {
  pieces p = pieces_of(host);
  orr_view piece;
  while (next_piece(&p, &piece)) {
    orr_cuda_block *b = NULL;
    size_t bytes = (size_t)orr_cuda_bytes(&piece);
    ORR_TRY(orr_cuda_block_take(s, bytes, &b));
    pack(&piece, b->data);
    ORR_TRY(
        orr_cuda_try(s->device->gpu,
                     cudaMemcpyAsync(device, b->data, bytes, cudaMemcpyHostToDevice, s->stream),
                     "copying to a GPU"));
    ORR_TRY(orr_cuda_block_used(s, b));
    device += bytes;
  }
  return ORR_OK;
}

static orr_status take_out(orr_cuda_queue *s, orr_cuda_block *b, orr_view *piece) {
  b->is_held = false;
  ORR_TRY(orr_cuda_try(s->device->gpu, cudaEventSynchronize(b->event), "waiting for a copy"));
  b->is_busy = false;
  unpack(b->data, piece);
  return ORR_OK;
}

static orr_status fetch(orr_cuda_queue *s, const char *device, const orr_view *piece,
                        orr_cuda_block **out) {
  size_t bytes = (size_t)orr_cuda_bytes(piece);
  orr_cuda_block *b;
  ORR_TRY(orr_cuda_block_take(s, bytes, &b));
  ORR_TRY(
      orr_cuda_try(s->device->gpu,
                   cudaMemcpyAsync(b->data, device, bytes, cudaMemcpyDeviceToHost, s->stream),
                   "copying from a GPU"));
  ORR_TRY(orr_cuda_block_used(s, b));
  b->is_held = true;
  *out = b;
  return ORR_OK;
}

/* While a piece is taken out of its block the next one comes. */
static orr_status fetch_all(orr_cuda_queue *s, const char *device, const orr_view *host) {
  pieces p = pieces_of(host);
  orr_view piece, last_piece;
  orr_cuda_block *last = NULL;
  orr_status status = ORR_OK;
  while (!status && next_piece(&p, &piece)) {
    orr_cuda_block *b = NULL;
    status = fetch(s, device, &piece, &b);
    if (last) {
      orr_status taken = take_out(s, last, &last_piece);
      if (!status) status = taken;
    }
    last = b;
    last_piece = piece;
    device += orr_cuda_bytes(&piece);
  }
  if (!last) return status;
  orr_status taken = take_out(s, last, &last_piece);
  return status ? status : taken;
}

static void *room_for(const orr_view *v) { return orr_cuda_room((size_t)orr_cuda_bytes(v)); }

static orr_status upload(orr_cuda_queue *s, const orr_view *from, orr_view *to) {
  if (orr_cuda_alike(from, to)) {
    orr_view line = flat(from);
    return send_all(s, &line, to->data);
  }
  if (orr_cuda_is_packed(to)) return send_all(s, from, to->data);
  void *room = room_for(to);
  if (!room) return orr_cuda_recorded(s);
  orr_view packed = orr_cuda_packed(to, room);
  ORR_TRY(send_all(s, from, room));
  orr_cuda_copy(&packed, to);
  return ORR_OK;
}

static orr_status download(orr_cuda_queue *s, const orr_view *from, orr_view *to) {
  if (orr_cuda_alike(from, to)) {
    orr_view line = flat(to);
    return fetch_all(s, from->data, &line);
  }
  if (orr_cuda_is_packed(from)) return fetch_all(s, from->data, to);
  void *room = room_for(from);
  if (!room) return orr_cuda_recorded(s);
  orr_view packed = orr_cuda_packed(from, room);
  orr_cuda_copy(from, &packed);
  return fetch_all(s, room, to);
}

/* ---- two GPUs ---- */

static orr_status across(orr_cuda_queue *s, const orr_cuda_device *a, const void *from,
                         const orr_cuda_device *b, void *to, int64_t bytes) {
  return orr_cuda_try(
      s->device->gpu,
      cudaMemcpyPeerAsync(to, b->gpu->ordinal, from, a->gpu->ordinal, (size_t)bytes, s->stream),
      "copying between GPUs");
}

/* s is of b: dense memory of a to `to`. */
static orr_status bring(orr_cuda_queue *s, const orr_cuda_device *a, const orr_view *from,
                        orr_view *to) {
  if (orr_cuda_alike(from, to) || orr_cuda_is_packed(to))
    return across(s, a, from->data, s->device, to->data, orr_cuda_bytes(to));
  void *room = room_for(to);
  if (!room) return orr_cuda_recorded(s);
  orr_view packed = orr_cuda_packed(to, room);
  ORR_TRY(across(s, a, from->data, s->device, room, orr_cuda_bytes(to)));
  orr_cuda_copy(&packed, to);
  return ORR_OK;
}

/* Packed by a, in the room of its copy queue, which s must have read when it is used again. */
static orr_status pack_and_bring(orr_cuda_queue *s, orr_cuda_device *a, const orr_view *from,
                                 orr_view *to) {
  orr_cuda_queue *before;
  orr_view packed = *from;
  ORR_TRY(orr_cuda_borrow(a, &before));
  void *room = room_for(from);
  if (room) {
    packed = orr_cuda_packed(from, room);
    orr_cuda_copy(from, &packed);
  }
  orr_status status = orr_cuda_recorded(a->copy);
  orr_cuda_switch(s);
  if (!status) status = orr_cuda_follow(s, a->copy);
  if (!status) status = bring(s, a, &packed, to);
  if (!status) status = orr_cuda_follow(a->copy, s);
  orr_cuda_switch(a->copy);
  orr_status released = orr_cuda_release(a, before);
  return status ? status : released;
}

static orr_status between(orr_cuda_queue *s, orr_cuda_device *a, const orr_view *from,
                          orr_view *to) {
  if (orr_cuda_gpu_reaches(s->device, a)) {
    orr_cuda_copy(from, to);
    return ORR_OK;
  }
  bool plain = orr_cuda_alike(from, to) || orr_cuda_is_packed(from);
  return plain ? bring(s, a, from, to) : pack_and_bring(s, a, from, to);
}

/* ---- all ---- */

static orr_status on_queue(orr_cuda_queue *s, orr_device *a, const orr_view *from,
                           orr_device *b, orr_view *to) {
  ORR_TRY(orr_cuda_ready(s));
  if (a->kind != ORR_DEVICE_CUDA) return upload(s, from, to);
  if (b->kind != ORR_DEVICE_CUDA) return download(s, from, to);
  orr_cuda_device *source = orr_cuda_device_of(a);
  if (orr_cuda_is_lost(source->gpu)) return orr_cuda_lost(source->gpu);
  return between(s, source, from, to);
}

orr_status orr_cuda_transfer(orr_device *a, const orr_view *from, orr_device *b, orr_view *to) {
  orr_cuda_device *home = orr_cuda_device_of(b->kind == ORR_DEVICE_CUDA ? b : a);
  orr_cuda_queue *s = orr_cuda_current(), *before;
  if (orr_cuda_numel(from) == 0) return ORR_OK;
  if (s && s->device == home) return on_queue(s, a, from, b, to);
  ORR_TRY(orr_cuda_fail_on(home, orr_cuda_borrow(home, &before)));
  orr_status status = on_queue(home->copy, a, from, b, to);
  orr_status released = orr_cuda_release(home, before);
  return orr_cuda_fail_on(home, status ? status : released);
}
