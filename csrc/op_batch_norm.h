/* op_batch_norm.h: the ops of batch norm, for the list of the norms in op_norm.c.
 *
 * Invariant: orr_op_batch_norm is the one that others call; the rest are its pieces.
 * To add a piece: here, and in ORR_OPS_BATCH_NORM.
 */
#ifndef ORR_OP_BATCH_NORM_H
#define ORR_OP_BATCH_NORM_H

#include "op.h"

extern const orr_op orr_op_batch_norm, orr_op_bn_stats, orr_op_bn_sum, orr_op_bn_sumsq,
    orr_op_bn_rstd, orr_op_bn_running_, orr_op_bn_apply, orr_op_bn_grad_sums,
    orr_op_bn_grad_apply;

#define ORR_OPS_BATCH_NORM                                                             \
  &orr_op_bn_stats, &orr_op_bn_sum, &orr_op_bn_sumsq, &orr_op_bn_rstd, &orr_op_bn_running_, \
      &orr_op_bn_apply, &orr_op_bn_grad_sums, &orr_op_bn_grad_apply

#endif
