/* shape.c: shapes and strides, as pure functions.
 *
 * Invariant: dimensions count from 0 here and from 1 in every message. A shape with a 0 in it
 * is an ordinary shape of no elements. Strides count elements.
 * To add to it: a pure function over (ndim, shape, stride).
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "orrery_int.h"

int64_t orr_numel(int ndim, const int64_t *shape) {
  int64_t n = 1;
  for (int d = 0; d < ndim; d++) n *= shape[d];
  return n;
}

void orr_strides(int ndim, const int64_t *shape, int64_t *stride) {
  int64_t step = 1;
  for (int d = ndim - 1; d >= 0; d--) {
    stride[d] = step;
    step *= shape[d] > 1 ? shape[d] : 1;
  }
}

bool orr_is_contiguous(int ndim, const int64_t *shape, const int64_t *stride) {
  int64_t step = 1;
  if (orr_numel(ndim, shape) == 0) return true;
  for (int d = ndim - 1; d >= 0; d--) {
    if (shape[d] == 1) continue;
    if (stride[d] != step) return false;
    step *= shape[d];
  }
  return true;
}

char *orr_shape_text(int ndim, const int64_t *shape, char *buf, size_t size) {
  size_t at = 0;
  int wrote = snprintf(buf, size, "(");
  for (int d = 0; d <= ndim; d++) {
    at += wrote > 0 ? (size_t)wrote : 0;
    if (at >= size) return buf; /* cut short, still terminated */
    if (d == ndim) break;
    wrote = snprintf(buf + at, size - at, d ? ", %" PRId64 : "%" PRId64, shape[d]);
  }
  snprintf(buf + at, size - at, ")");
  return buf;
}

orr_status orr_broadcast(const char *op, const orr_meta *a, const orr_meta *b, orr_meta *out) {
  orr_meta r = {.dtype = orr_dtype_promote(a->dtype, b->dtype),
                .ndim = a->ndim > b->ndim ? a->ndim : b->ndim};
  for (int d = 0; d < r.ndim; d++) {
    int da = d - (r.ndim - a->ndim), db = d - (r.ndim - b->ndim);
    int64_t na = da < 0 ? 1 : a->shape[da], nb = db < 0 ? 1 : b->shape[db];
    if (na != nb && na != 1 && nb != 1) {
      char ta[200], tb[200];
      return orr_fail(ORR_EARG,
                      "%s: shapes %s and %s do not broadcast: counted from the last, "
                      "dimension %d is %" PRId64 " in one and %" PRId64 " in the other",
                      op, orr_shape_text(a->ndim, a->shape, ta, sizeof ta),
                      orr_shape_text(b->ndim, b->shape, tb, sizeof tb), r.ndim - d, na, nb);
    }
    r.shape[d] = na == 1 ? nb : na;
  }
  *out = r;
  return ORR_OK;
}

/* Groups old dims into runs that step evenly through memory; new dims must tile each run. */
bool orr_view_strides(int ndim, const int64_t *shape, const int64_t *stride, int new_ndim,
                      const int64_t *new_shape, int64_t *new_stride) {
  int64_t total = orr_numel(ndim, shape);
  if (total != orr_numel(new_ndim, new_shape)) return false;
  if (total <= 1) {
    orr_strides(new_ndim, new_shape, new_stride);
    return true;
  }
  int to = new_ndim - 1;
  int64_t run = 1, base = 0; /* elements of the run, stride of its last dim */
  for (int d = ndim - 1; d >= 0; d--) {
    if (shape[d] == 1) continue;
    if (run == 1) base = stride[d];
    run *= shape[d];
    int up = d - 1;
    while (up >= 0 && shape[up] == 1) up--;
    if (up >= 0 && stride[up] == run * base) continue; /* the run goes on */
    int64_t tiled = 1;
    while (to >= 0 && (tiled < run || new_shape[to] == 1)) {
      new_stride[to] = tiled * base;
      tiled *= new_shape[to--];
    }
    if (tiled != run) return false;
    run = 1;
  }
  return true;
}
