/* op_view.h: small views of views, for run functions.
 * Invariant: nothing here allocates or moves data.
 */
#ifndef ORR_OP_VIEW_H
#define ORR_OP_VIEW_H

#include "view.h"

static inline bool orr_same_shape(const orr_view *a, const orr_view *b) {
  if (a->ndim != b->ndim) return false;
  for (int d = 0; d < a->ndim; d++)
    if (a->shape[d] != b->shape[d]) return false;
  return true;
}

/* v as if it had the shape of `to`, by broadcasting; returns v itself where it has. */
static inline const orr_view *orr_expand_view(const orr_view *v, const orr_view *to,
                                              orr_view *room) {
  if (orr_same_shape(v, to)) return v;
  int lead = to->ndim - v->ndim;
  room->data = v->data;
  room->dtype = v->dtype;
  room->ndim = to->ndim;
  for (int d = 0; d < to->ndim; d++) {
    bool own = d >= lead && v->shape[d - lead] == to->shape[d];
    room->shape[d] = to->shape[d];
    room->stride[d] = own ? v->stride[d - lead] : 0;
  }
  return room;
}

#endif
