/* op_reduce.h: what ops share that reduce dims, or work along one: shapes, labels and views
 * with dims kept or dropped, and short steps for composed ops.
 *
 * Invariant: a mask has bit d for dim d; "kept" means that reduced dims stay with size 1.
 * To add a reducing op: infer by orr_infer_reduced, label by orr_label_reduced, run on
 * orr_keep_view of the output.
 */
#ifndef ORR_OP_REDUCE_H
#define ORR_OP_REDUCE_H

#include "op.h"

/* Shape of x reduced over mask; the dtype is x's. */
void orr_infer_reduced(const orr_meta *x, unsigned mask, bool keep, orr_meta *y);
/* Labels of in[0] and of every output that has its dims but for the mask's. whole: the mask's
 * dims may not be sharded; else a sharded one leaves Partial(op->partial). */
void orr_label_reduced(orr_call *c, unsigned mask, bool keep, bool whole);
/* y with the mask's dims as size 1, whether it has them or not. */
orr_view orr_keep_view(const orr_view *y, unsigned mask, int ndim);
/* infer and label of ops on one dim, args.i[0], that must be whole; out is like in[0]. */
orr_status orr_infer_along(orr_call *c);
void orr_label_along(orr_call *c);
/* ORR_EARG unless x has dim d (from 0). */
orr_status orr_need_dim(const orr_tensor *x, int64_t d);
/* The mask of dim d, or of all where d is ORR_NIL. */
orr_status orr_mask_of(const char *op, const orr_tensor *x, int64_t d, unsigned *mask);
/* How many elements of a tensor of x's global shape one result is made of. */
int64_t orr_mask_count(const orr_meta *x, unsigned mask);
/* The dtype to add in: f32 for f16 and bf16, f32 for integers, else x's. */
orr_dtype orr_sum_dtype(orr_dtype dtype);
/* A row for ops linear in in[0]: in[0] Partial(sum), the rest replicated, out Partial(sum). */
int orr_rule_linear_first(const orr_call *c, int axis, orr_row *rows, int max, bool *only);

/* In a formula: t, of x reduced over mask, with the reduced dims as size 1. */
orr_tensor *orr_g_kept(orr_grad *g, orr_tensor *t, const orr_meta *x, unsigned mask, bool keep);

/* args.i: mask, keep, 0 or 1 + the output's dtype. */
extern const orr_op orr_op_max_dims, orr_op_min_dims;
extern const orr_op orr_op_cumprod, orr_op_flip, orr_op_one_hot, orr_op_log_softmax;
/* args.i: the dim, then the sizes of the output: g scattered by indices into zeros. */
extern const orr_op orr_op_gather_grad;

/* Composed ops: *t becomes op(*t); what it was is released, also on failure. */
static inline orr_status orr_then(orr_tensor **t, const orr_op *op, const orr_args *args) {
  orr_tensor *next = NULL;
  orr_status status = orr_call1(op, *t, args, &next);
  orr_tensor_free(*t);
  *t = next;
  return status;
}

orr_status orr_then_scale(orr_tensor **t, double s);
orr_status orr_then_cast(orr_tensor **t, orr_dtype dtype);

#endif
