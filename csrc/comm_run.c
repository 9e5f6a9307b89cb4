/* comm_run.c: what the parts of a collective do when all have arrived. Workers run this.
 *
 * Invariant: a part writes its own target, or, in an all-reduce, its own slice of every target;
 * reductions run over the ranks in their order, so that all devices hold the same bits.
 * To add a collective: a function of (collective, part).
 */
#include <stdlib.h>

#include "../kernels/copy.h"
#include "comm.h"
#include "kernel_table.h"

enum { CHUNK_BYTES = 128 * 1024, SMALL_BYTES = 4096 };

static const orr_many_kind many_kind[] = {
    [ORR_SUM] = ORR_MANY_SUM, [ORR_MAX] = ORR_MANY_MAX, [ORR_MIN] = ORR_MANY_MIN};

static int64_t view_numel(const orr_view *v) { return orr_numel(v->ndim, v->shape); }

static void advance(orr_view *v, int dim, int64_t steps) {
  if (v->data)
    v->data = (char *)v->data + steps * v->stride[dim] * (int64_t)orr_dtype_size(v->dtype);
}

/* ---- pulls ---- */

/* The box that two pieces share; false where it is empty. */
static bool overlap(const orr_piece *a, const orr_piece *b, int64_t *lo, int64_t *shape) {
  for (int d = 0; d < a->view.ndim; d++) {
    int64_t a_end = a->lo[d] + a->view.shape[d], b_end = b->lo[d] + b->view.shape[d];
    lo[d] = a->lo[d] > b->lo[d] ? a->lo[d] : b->lo[d];
    shape[d] = (a_end < b_end ? a_end : b_end) - lo[d];
    if (shape[d] <= 0) return false;
  }
  return true;
}

static void cut_out(const orr_piece *p, const int64_t *lo, const int64_t *shape,
                    orr_view *out) {
  *out = p->view;
  for (int d = 0; d < out->ndim; d++) {
    advance(out, d, lo[d] - p->lo[d]);
    out->shape[d] = shape[d];
  }
}

static const orr_kernels *kernels_of(const orr_piece *p) {
  return p->buffer->device->backend->kernels;
}

/* Whether a's kernels may read b's memory. */
static bool reaches(const orr_device *a, const orr_device *b) {
  bool a_async = orr_backend_is_async(a->backend), b_async = orr_backend_is_async(b->backend);
  if (!a_async && !b_async) return true;
  return a_async && b_async && a->backend->reaches(a, b);
}

static orr_status move(orr_device *a, const orr_view *from, orr_device *b, orr_view *to) {
  const orr_backend *backend = orr_backend_is_async(b->backend) ? b->backend : a->backend;
  if (!reaches(b, a)) return backend->transfer(a, from, b, to);
  b->backend->kernels->copy(from, to);
  return ORR_OK;
}

static orr_view packed(const orr_view *v, char *data) {
  orr_view out = *v;
  out.data = data;
  orr_strides(out.ndim, out.shape, out.stride);
  return out;
}

/* Terms that the target's device does not reach come to the host one by one, are reduced there,
 * and the sum goes where it belongs. */
static orr_status reduce_on_host(const orr_collective *c, const orr_piece *src, orr_view *from,
                                 const orr_piece *dst, orr_view *to) {
  const orr_view *list[ORR_MAX_DEVICES];
  orr_device *host = orr_device_at(0);
  orr_status status = ORR_OK;
  size_t bytes = (size_t)view_numel(to) * orr_dtype_size(to->dtype);
  char *room = malloc(((size_t)c->width + 1) * bytes + 1);
  if (!room)
    return orr_fail(ORR_EMEM, "out of host memory: %d terms of %zu bytes", c->width, bytes);
  for (int k = 0; k < c->width && !status; k++) {
    orr_view term = packed(&from[k], room + (size_t)k * bytes);
    status = move(src[k].buffer->device, &from[k], host, &term);
    from[k] = term;
    list[k] = &from[k];
  }
  if (!status) {
    orr_view sum = packed(to, room + (size_t)c->width * bytes);
    orr_kernels_cpu.reduce_many(many_kind[c->op], list, c->width, &sum);
    status = move(host, &sum, dst->buffer->device, to);
  }
  free(room);
  return status;
}

static orr_status pull_group(const orr_collective *c, const orr_piece *src,
                             const orr_piece *dst) {
  orr_view from[ORR_MAX_DEVICES], to;
  const orr_view *list[ORR_MAX_DEVICES];
  int64_t lo[ORR_MAX_DIM] = {0}, shape[ORR_MAX_DIM] = {0};
  bool all = true;
  if (c->width == 1 && src->buffer == dst->buffer)
    return ORR_OK; /* its own part stands in place */
  if (!overlap(src, dst, lo, shape)) return ORR_OK;
  cut_out(dst, lo, shape, &to);
  for (int k = 0; k < c->width; k++) {
    cut_out(&src[k], lo, shape, &from[k]);
    list[k] = &from[k];
    if (!reaches(dst->buffer->device, src[k].buffer->device)) all = false;
  }
  if (c->width == 1) return move(src->buffer->device, &from[0], dst->buffer->device, &to);
  if (!all) return reduce_on_host(c, src, from, dst, &to);
  kernels_of(dst)->reduce_many(many_kind[c->op], list, c->width, &to);
  return ORR_OK;
}

static orr_status pull_all(const orr_collective *c, const orr_piece *src, int n_src, int part,
                           const orr_piece *dst) {
  int n_groups = n_src / c->width; /* every part begins at another source */
  for (int k = 0; k < n_groups; k++)
    ORR_TRY(pull_group(c, &src[(part + k) % n_groups * c->width], dst));
  return ORR_OK;
}

orr_status orr_run_exchange(orr_collective *c, int part) {
  for (int t = 0; t < c->n_dst / c->n; t++)
    ORR_TRY(pull_all(c, &c->src[t * c->n], c->n, part, &c->dst[t * c->n + part]));
  return ORR_OK;
}

orr_status orr_run_pull(orr_collective *c, int part) {
  orr_piece *dst = &c->dst[part];
  if (c->n_src == 0) {
    kernels_of(dst)->fill(&dst->view, 0);
    return ORR_OK;
  }
  return pull_all(c, c->src, c->n_src, part, dst);
}

/* ---- all-reduce ---- */

/* Dense without holes or repeats, in any order of dims. */
static bool is_dense(const orr_view *v) {
  int64_t span = 1;
  for (int d = 0; d < v->ndim; d++) {
    if (v->shape[d] > 1 && v->stride[d] <= 0) return false;
    span += (v->shape[d] - 1) * v->stride[d];
  }
  return span == view_numel(v);
}

static bool alike(const orr_view *a, const orr_view *b) {
  for (int d = 0; d < a->ndim; d++)
    if (a->shape[d] > 1 && a->stride[d] != b->stride[d]) return false;
  return true;
}

static void flatten(orr_view *v) {
  int64_t n = view_numel(v);
  v->ndim = 1;
  v->shape[0] = n;
  v->stride[0] = 1;
}

void orr_flatten_all_reduce(orr_collective *c) {
  for (int t = 0; t < c->n_src / c->n; t++) {
    orr_piece *src = &c->src[t * c->n], *dst = &c->dst[t * c->n];
    bool flat = view_numel(&src->view) <= 1 || is_dense(&src->view);
    for (int k = 0; k < c->n && flat; k++)
      flat = alike(&src->view, &src[k].view) && alike(&src->view, &dst[k].view);
    for (int k = 0; k < c->n && flat; k++) {
      flatten(&src[k].view);
      if (src != dst) flatten(&dst[k].view);
    }
  }
}

/* Slice `part` of the longest dim. Small tensors are one part's whole. */
static void slice(const orr_collective *c, int t, int part, int *dim, int64_t *lo,
                  int64_t *hi) {
  const orr_view *v = &c->src[t * c->n].view;
  int64_t n = c->n, unit;
  *dim = 0;
  for (int d = 1; d < v->ndim; d++)
    if (v->shape[d] > v->shape[*dim]) *dim = d;
  int64_t len = v->shape[*dim];
  if (view_numel(v) * (int64_t)orr_dtype_size(v->dtype) <= SMALL_BYTES) {
    *lo = 0;
    *hi = t % c->n == part ? len : 0;
    return;
  }
  unit = len >= 64 * n ? 64 : 1; /* elements; keeps two parts off one cache line */
  int64_t units = (len + unit - 1) / unit;
  *lo = units * part / n * unit;
  *hi = units * (part + 1) / n * unit;
  if (*lo > len) *lo = len;
  if (*hi > len) *hi = len;
}

/* Reduces [lo, hi) of dim into the part's own target, then copies that to the others', by
 * chunks that stay in the cache between the two. */
static void reduce_slice(const orr_collective *c, int t, int part, int dim, int64_t lo,
                         int64_t hi) {
  orr_view from[ORR_MAX_DEVICES], to[ORR_MAX_DEVICES];
  const orr_view *list[ORR_MAX_DEVICES];
  const orr_piece *src = &c->src[t * c->n], *dst = &c->dst[t * c->n];
  int64_t step =
      view_numel(&src->view) / src->view.shape[dim] * (int64_t)orr_dtype_size(src->view.dtype);
  int64_t each = CHUNK_BYTES * (int64_t)c->part[part].device->threads / step;
  const orr_kernels *kernels = kernels_of(&dst[part]);
  if (orr_backend_is_async(c->part[part].device->backend)) each = hi - lo;
  if (each < 1) each = 1;
  if (each > 64) each -= each % 64;
  for (int k = 0; k < c->n; k++) {
    from[k] = src[k].view;
    to[k] = dst[k].view;
    list[k] = &from[k];
    advance(&from[k], dim, lo);
    advance(&to[k], dim, lo);
  }
  for (int64_t at = lo; at < hi; at += each) {
    int64_t len = hi - at < each ? hi - at : each;
    for (int k = 0; k < c->n; k++) from[k].shape[dim] = to[k].shape[dim] = len;
    kernels->reduce_many(many_kind[c->op], list, c->n, &to[part]);
    for (int k = 0; k < c->n; k++) {
      if (k != part) kernels->copy(&to[part], &to[k]);
    }
    for (int k = 0; k < c->n; k++) {
      advance(&from[k], dim, len);
      advance(&to[k], dim, len);
    }
  }
}

static void all_reduce_part(const orr_collective *c, int part) {
  for (int t = 0; t < c->n_src / c->n; t++) {
    int dim;
    int64_t lo, hi;
    if (view_numel(&c->src[t * c->n].view) == 0) continue;
    slice(c, t, part, &dim, &lo, &hi);
    if (lo < hi) reduce_slice(c, t, part, dim, lo, hi);
  }
}

orr_status orr_run_all_reduce(orr_collective *c, int part) {
  if (!c->alone) {
    all_reduce_part(c, part);
  } else if (!atomic_exchange(&c->taken, 1)) {
    for (int k = 0; k < c->n; k++) all_reduce_part(c, k);
  }
  return ORR_OK;
}
