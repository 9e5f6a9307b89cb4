/* cuda_nccl.c: collectives that NCCL runs: all-reduce of dense tensors, all-gather and reduce-
 * scatter of equal contiguous pieces, where every part is a GPU of its own.
 *
 * Invariant: the part that comes first issues the collective for all parts, as one group, under
 * one lock: all GPUs get all collectives in one order, so no two of different communicators
 * wait for each other. The parts have all arrived then, and go on when all have been here.
 * Beside the data goes the word of cuda_poison.c. An error, or a stream that stands still in a
 * collective for ORRERY_NCCL_TIMEOUT seconds, aborts all communicators, and the next collective
 * makes new ones.
 * To add a collective: its shape in `fits`, its call in `issue_tensor`.
 */
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

enum { MOST_GROUPS = 64 };

typedef struct group {
  int n, gpu[ORR_MAX_GPUS]; /* ordinals, in the order of the ranks */
  bool use_comm;            /* of the communication queues */
  bool failed;              /* could not be made */
  bool aborted;
  ncclComm_t comm[ORR_MAX_GPUS];
} group;

static struct nccl {
  pthread_mutex_t mutex; /* of everything here, and of every call of NCCL */
  double timeout;
  int n_groups;
  group *group[MOST_GROUPS]; /* aborted ones stay: a collective may name one */
} nccl = {.mutex = PTHREAD_MUTEX_INITIALIZER};

void orr_cuda_nccl_open(void) {
  const char *text = getenv("ORRERY_NCCL_TIMEOUT");
  char *end = NULL;
  double seconds = text ? strtod(text, &end) : 0;
  nccl.timeout = text && end != text && *end == '\0' && seconds > 0 ? seconds : 600;
}

static void end_all(ncclResult_t (*end)(ncclComm_t)) {
  bool grouped = ncclGroupStart() == ncclSuccess;
  for (int k = 0; k < nccl.n_groups; k++) {
    group *g = nccl.group[k];
    for (int r = 0; r < g->n && !g->failed && !g->aborted; r++) (void)end(g->comm[r]);
    g->aborted = true;
  }
  if (grouped) (void)ncclGroupEnd();
}

void orr_cuda_nccl_close(void) {
  pthread_mutex_lock(&nccl.mutex);
  if (nccl.n_groups) end_all(ncclCommDestroy);
  for (int k = 0; k < nccl.n_groups; k++) free(nccl.group[k]);
  nccl.n_groups = 0;
  pthread_mutex_unlock(&nccl.mutex);
}

/* ---- communicators ---- */

static bool is_for(const group *g, const orr_collective *c) {
  if (g->n != c->n || g->use_comm != c->use_comm || g->aborted) return false;
  for (int r = 0; r < c->n; r++)
    if (g->gpu[r] != orr_cuda_device_of(c->part[r].device)->gpu->ordinal) return false;
  return true;
}

/* One that cannot be made is remembered: the core's own collectives do. */
static group *new_group(const orr_collective *c) {
  if (nccl.n_groups == MOST_GROUPS) return NULL;
  group *g = calloc(1, sizeof *g);
  if (!g) return NULL;
  g->n = c->n;
  g->use_comm = c->use_comm;
  for (int r = 0; r < c->n; r++)
    g->gpu[r] = orr_cuda_device_of(c->part[r].device)->gpu->ordinal;
  g->failed = ncclCommInitAll(g->comm, g->n, g->gpu) != ncclSuccess;
  cudaGetLastError();
  nccl.group[nccl.n_groups++] = g;
  return g;
}

static group *group_of(const orr_collective *c) {
  group *g = NULL;
  orr_cuda_queue *before = orr_cuda_switch(NULL);
  pthread_mutex_lock(&nccl.mutex);
  for (int k = 0; k < nccl.n_groups && !g; k++)
    if (is_for(nccl.group[k], c)) g = nccl.group[k];
  if (!g) g = new_group(c);
  pthread_mutex_unlock(&nccl.mutex);
  orr_cuda_switch(before);
  return g && !g->failed ? g : NULL;
}

/* ---- which collectives ---- */

static bool on_own_gpus(const orr_collective *c) {
  if (c->n < 2 || c->n > ORR_MAX_GPUS) return false;
  for (int r = 0; r < c->n; r++) {
    if (c->part[r].device->kind != ORR_DEVICE_CUDA) return false;
    for (int k = 0; k < r; k++)
      if (c->part[r].device->gpu == c->part[k].device->gpu) return false;
  }
  return true;
}

static bool type_of(orr_dtype dtype, ncclDataType_t *out) {
  static const ncclDataType_t type[ORR_N_DTYPES] = {
      [ORR_F64] = ncclFloat64,   [ORR_F32] = ncclFloat32, [ORR_F16] = ncclFloat16,
      [ORR_BF16] = ncclBfloat16, [ORR_I64] = ncclInt64,   [ORR_I32] = ncclInt32,
      [ORR_U8] = ncclUint8,      [ORR_BOOL] = ncclUint8};
  *out = type[dtype];
  return dtype != ORR_BOOL;
}

static bool all_reach(const orr_collective *c) {
  for (int k = 0; k < c->n * c->n; k++)
    if (!orr_cuda_reaches(c->part[k / c->n].device, c->part[k % c->n].device)) return false;
  return true;
}

/* NCCL's maximum of floats keeps no NaN; the core's does, where GPUs reach each other. */
static bool reduces(const orr_collective *c, orr_dtype dtype) {
  ncclDataType_t type;
  bool is_float = dtype <= ORR_BF16;
  if (!type_of(dtype, &type)) return false;
  return c->op == ORR_SUM || !is_float || !all_reach(c);
}

static bool fits_all_reduce(const orr_collective *c, const orr_piece *src,
                            const orr_piece *dst) {
  for (int r = 0; r < c->n; r++)
    if (!orr_cuda_alike(&src[0].view, &src[r].view) ||
        !orr_cuda_alike(&src[0].view, &dst[r].view))
      return false;
  return reduces(c, src[0].view.dtype);
}

/* Whether `part` lies in `whole` as its contiguous n-th part of equal ones. */
static bool is_nth(const orr_piece *whole, const orr_piece *part, int n) {
  orr_view region = part->view;
  int64_t offset = 0;
  for (int d = 0; d < region.ndim; d++) {
    region.stride[d] = whole->view.stride[d];
    offset += (part->lo[d] - whole->lo[d]) * whole->view.stride[d];
  }
  return orr_cuda_is_packed(&region) && offset == n * orr_cuda_numel(&region);
}

static bool fits_pieces(const orr_collective *c, const orr_piece *whole,
                        const orr_piece *part) {
  int64_t count = orr_cuda_numel(&part[0].view);
  for (int r = 0; r < c->n; r++) {
    if (!orr_cuda_is_packed(&part[r].view) || orr_cuda_numel(&part[r].view) != count ||
        orr_cuda_numel(&whole[r].view) != c->n * count)
      return false;
    for (int k = 0; k < c->n; k++)
      if (!is_nth(&whole[r], &part[k], k)) return false;
  }
  return true;
}

static bool fits(const orr_collective *c, int t) {
  const orr_piece *src = &c->src[t * c->n], *dst = &c->dst[t * c->n];
  switch (c->kind) {
    case ORR_ALL_REDUCE: return c->in_place && fits_all_reduce(c, src, dst);
    case ORR_ALL_GATHER: return c->width == 1 && fits_pieces(c, dst, src);
    case ORR_REDUCE_SCATTER:
      return c->width == c->n && reduces(c, src[0].view.dtype) && fits_pieces(c, src, dst);
    default: return false;
  }
}

bool orr_cuda_collective_new(orr_collective *c) {
  if (!on_own_gpus(c) || c->n_src != c->n_dst || c->n_src % c->n) return false;
  for (int t = 0; t < c->n_src / c->n; t++)
    if (!fits(c, t)) return false;
  c->communicator = group_of(c);
  return c->communicator != NULL;
}

/* ---- issuing ---- */

static ncclRedOp_t op_of(const orr_collective *c) {
  return c->op == ORR_SUM ? ncclSum : c->op == ORR_MAX ? ncclMax : ncclMin;
}

static ncclResult_t issue_tensor(const orr_collective *c, int t, int part, ncclComm_t comm,
                                 cudaStream_t stream) {
  const orr_view *src = &c->src[t * c->n + part].view, *dst = &c->dst[t * c->n + part].view;
  size_t n_src = (size_t)orr_cuda_numel(src), n_dst = (size_t)orr_cuda_numel(dst);
  ncclDataType_t type;
  (void)type_of(src->dtype, &type);
  if (n_src == 0) return ncclSuccess;
  switch (c->kind) {
    case ORR_ALL_REDUCE:
      return ncclAllReduce(src->data, dst->data, n_src, type, op_of(c), comm, stream);
    case ORR_ALL_GATHER: return ncclAllGather(src->data, dst->data, n_src, type, comm, stream);
    default:
      return ncclReduceScatter(src->data, dst->data, n_dst, type, op_of(c), comm, stream);
  }
}

static orr_cuda_queue *queue_of(const orr_collective *c, int part) {
  return c->part[part].queue->stream;
}

static ncclResult_t issue_part(const orr_collective *c, const group *g, int part) {
  orr_cuda_queue *s = queue_of(c, part);
  ncclResult_t result = ncclSuccess;
  for (int t = 0; t < c->n_src / c->n && !result; t++)
    result = issue_tensor(c, t, part, g->comm[part], s->stream);
  if (result) return result;
  return ncclAllReduce(s->poison, s->mail, 1, ncclInt32, ncclMax, g->comm[part], s->stream);
}

static ncclResult_t issue_group(const orr_collective *c, const group *g) {
  ncclResult_t result = ncclGroupStart();
  if (result) return result;
  for (int r = 0; r < c->n && !result; r++) result = issue_part(c, g, r);
  ncclResult_t ended = ncclGroupEnd();
  return result ? result : ended;
}

static void abort_all(void) {
  orr_cuda_poison_all();
  end_all(ncclCommAbort);
}

static orr_status issue(const orr_collective *c, const group *g) {
  for (int r = 0; r < c->n; r++) {
    orr_cuda_gpu *gpu = queue_of(c, r)->device->gpu;
    if (orr_cuda_is_lost(gpu)) return orr_cuda_lost(gpu);
    ORR_TRY(orr_cuda_clear_poison(queue_of(c, r)));
  }
  if (g->aborted) return orr_fail(ORR_EDEVICE, "NCCL's communicators were aborted");
  ncclResult_t result = issue_group(c, g);
  if (!result) return ORR_OK;
  abort_all();
  return orr_cuda_library(orr_cuda_current()->device->gpu, "NCCL", ncclGetErrorString(result));
}

orr_status orr_cuda_collective_run(orr_collective *c, int part) {
  group *g = c->communicator;
  orr_cuda_queue *s = queue_of(c, part);
  pthread_mutex_lock(&nccl.mutex);
  orr_status status = orr_cuda_ready(s);
  if (!status && !atomic_exchange(&c->taken, 1)) status = issue(c, g);
  if (!g->aborted) {
    s->communicator = g->comm[part];
    s->collective_mark = s->n_marked + 1;
    s->alive = orr_cuda_now();
  }
  pthread_mutex_unlock(&nccl.mutex);
  ORR_TRY(status);
  orr_cuda_spread(s->mail, s->poison);
  return orr_cuda_recorded(s);
}

/* ---- watching ---- */

void orr_cuda_nccl_lost(const orr_cuda_gpu *gpu) {
  bool joined = false;
  pthread_mutex_lock(&nccl.mutex);
  for (int k = 0; k < nccl.n_groups; k++) {
    const group *g = nccl.group[k];
    for (int r = 0; r < g->n && !g->failed && !g->aborted; r++)
      if (g->gpu[r] == gpu->ordinal) joined = true;
  }
  if (joined) abort_all();
  pthread_mutex_unlock(&nccl.mutex);
}

static bool is_ours(const orr_cuda_queue *s) {
  for (int k = 0; k < nccl.n_groups; k++) {
    const group *g = nccl.group[k];
    for (int r = 0; r < g->n && !g->failed && !g->aborted; r++)
      if (g->comm[r] == s->communicator) return true;
  }
  return false;
}

/* NULL: all is well. */
static const char *what_is_wrong(const orr_cuda_queue *s, double now, char *buf, size_t size) {
  ncclResult_t error = ncclSuccess;
  if (now - s->alive > nccl.timeout) {
    snprintf(buf, size, "a collective on %s did not come to its end in %g seconds",
             s->device->name, nccl.timeout);
    return buf;
  }
  if (ncclCommGetAsyncError(s->communicator, &error) || error == ncclSuccess ||
      error == ncclInProgress)
    return NULL;
  snprintf(buf, size, "a collective on %s failed: %s", s->device->name,
           ncclGetErrorString(error));
  return buf;
}

void orr_cuda_nccl_watch(orr_cuda_queue *s) {
  const double period = 0.1;
  char message[300];
  const char *wrong = NULL;
  if (!s->communicator) return;
  double now = orr_cuda_now();
  bool ended = s->n_complete >= s->collective_mark;
  if (!ended && now - s->asked < period) return;
  if (pthread_mutex_trylock(&nccl.mutex)) return;
  s->asked = now;
  if (!ended && is_ours(s)) wrong = what_is_wrong(s, now, message, sizeof message);
  if (ended || wrong) s->communicator = NULL;
  if (wrong) abort_all();
  pthread_mutex_unlock(&nccl.mutex);
  if (wrong) orr_cuda_host->work_error(ORR_EDEVICE, wrong);
}
