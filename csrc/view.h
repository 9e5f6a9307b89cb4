/* view.h: the same elements of one shard, seen with other dimensions.
 * Invariant: nothing here allocates or moves data.
 */
#ifndef ORR_VIEW_H
#define ORR_VIEW_H

#include "orrery_int.h"

static inline void orr_view_drop(orr_view *v, int d) {
  for (v->ndim--; d < v->ndim; d++) {
    v->shape[d] = v->shape[d + 1];
    v->stride[d] = v->stride[d + 1];
  }
}

/* Whether dims d and d + 1 can be walked as one, and its stride. */
static inline bool orr_view_joins(const orr_view *v, int d, int64_t *stride) {
  *stride = v->shape[d + 1] == 1 ? v->stride[d] : v->stride[d + 1];
  return v->shape[d] == 1 || v->shape[d + 1] == 1 ||
         v->stride[d] == v->shape[d + 1] * v->stride[d + 1];
}

static inline void orr_view_join(orr_view *v, int d, int64_t stride) {
  v->shape[d + 1] *= v->shape[d];
  v->stride[d + 1] = stride;
  orr_view_drop(v, d);
}

/* [first, first + n) of dim d. */
static inline orr_view orr_narrow_view(const orr_view *v, int d, int64_t first, int64_t n) {
  orr_view r = *v;
  if (r.data) r.data = (char *)r.data + first * r.stride[d] * (int64_t)orr_dtype_size(r.dtype);
  r.shape[d] = n;
  return r;
}

/* Leading dims of the product c = a b over which b repeats become rows of a and c. All have
 * one rank. */
static inline void orr_view_merge_rows(orr_view *a, orr_view *b, orr_view *c) {
  while (c->ndim > 2) {
    int d = c->ndim - 3;
    int64_t a_stride, c_stride;
    if ((b->stride[d] != 0 && b->shape[d] != 1) || !orr_view_joins(a, d, &a_stride) ||
        !orr_view_joins(c, d, &c_stride))
      return;
    orr_view_join(a, d, a_stride);
    orr_view_join(c, d, c_stride);
    orr_view_drop(b, d);
  }
}

#endif
