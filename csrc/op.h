/* op.h: what the op families share: their lists, and short ways to call an op from C.
 *
 * Invariant: every helper goes through orr_dispatch.
 * To add a family: its list here and in `families` of op.c.
 */
#ifndef ORR_OP_H
#define ORR_OP_H

#include "kernel_table.h"
#include "orrery_int.h"

extern const orr_op *const orr_ops_unary[];
extern const orr_op *const orr_ops_binary[];
extern const orr_op *const orr_ops_copy[];
extern const orr_op *const orr_ops_create[];
extern const orr_op *const orr_ops_shape[];
extern const orr_op *const orr_ops_reduce[];
extern const orr_op *const orr_ops_matmul[];
extern const orr_op *const orr_ops_softmax[];
extern const orr_op *const orr_ops_index[];
extern const orr_op *const orr_ops_conv[];
extern const orr_op *const orr_ops_pool[];
extern const orr_op *const orr_ops_norm[];
extern const orr_op *const orr_ops_loss[];
extern const orr_op *const orr_ops_optim[];
extern const orr_op *const orr_ops_random[];
extern const orr_op *const orr_ops_moments[];
extern const orr_op *const orr_ops_scan[];
extern const orr_op *const orr_ops_sort[];
extern const orr_op *const orr_ops_move[];
extern const orr_op *const orr_ops_attention[];

/* op_dims.c: infer and label for ops whose shapes are their `dims`. */
orr_status orr_infer_dims(orr_call *c);
void orr_label_dims(orr_call *c);

/* "cpu:1" or "data<0,1>" into buf; returns buf. */
char *orr_mesh_text(const orr_mesh *mesh, char *buf, size_t size);

/* op_copy.c */
extern const orr_op orr_op_to, orr_op_contiguous, orr_op_redistribute;
orr_status orr_cast(orr_tensor *t, orr_dtype dtype, orr_tensor **out);
/* As orr_redistribute, recorded on the tape. */
orr_status orr_redistribute_op(orr_tensor *t, orr_layout *layout, orr_tensor **out);
/* *t without Partial, recorded: reduced once for all who read it. Owned before and after. */
orr_status orr_reduce_partial(orr_tensor **t);

/* Infer helpers. */
orr_status orr_infer_same(orr_call *c); /* out[0] is like in[0] */
void orr_label_same(orr_call *c);       /* all dims of all tensors of in[0]'s rank pair up */
orr_status orr_need_float(const orr_call *c, int k);
orr_status orr_need_index(const orr_call *c, int k); /* i64 or i32 */

/* Ops that formulas of other families use. */
extern const orr_op orr_op_sum_dims, orr_op_reshape, orr_op_view, orr_op_expand,
    orr_op_transpose, orr_op_permute, orr_op_matmul, orr_op_where, orr_op_narrow, orr_op_copy_,
    orr_op_unsqueeze, orr_op_squeeze /* squeeze_dim */, orr_op_clone, orr_op_full, orr_op_cat,
    orr_op_narrow_grad, orr_op_flatten, orr_op_squeeze_all, orr_op_pack, orr_op_arange,
    orr_op_eye;
const orr_op *orr_op_unary(int code);  /* ORR_UN_... */
const orr_op *orr_op_binary(int code); /* ORR_BIN_... */

static inline orr_status orr_call1(const orr_op *op, orr_tensor *x, const orr_args *args,
                                   orr_tensor **out) {
  return orr_dispatch(op, &x, 1, args, false, out);
}
static inline orr_status orr_call2(const orr_op *op, orr_tensor *x, orr_tensor *y,
                                   const orr_args *args, orr_tensor **out) {
  orr_tensor *in[2] = {x, y};
  return orr_dispatch(op, in, 2, args, false, out);
}

#endif
