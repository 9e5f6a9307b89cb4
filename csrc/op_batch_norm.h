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

#define ORR_OPS_BATCH_NORM                                                                  \
  &orr_op_bn_stats, &orr_op_bn_sum, &orr_op_bn_sumsq, &orr_op_bn_rstd, &orr_op_bn_running_, \
      &orr_op_bn_apply, &orr_op_bn_grad_sums, &orr_op_bn_grad_apply

/* op_bn_defer.c: between begin and end running statistics are kept aside; end(true) moves each
 * once by all that was kept, end(false) drops it. */
void orr_bn_defer_begin(void);
bool orr_bn_deferring(void);
orr_status orr_bn_defer(orr_tensor *running_mean, orr_tensor *running_var, double momentum,
                        orr_tensor *mean, orr_tensor *sumsq, orr_tensor *take_counts);
orr_status orr_bn_defer_end(bool keep);
/* While on, running statistics do not move: a forward pass that is made again. */
void orr_bn_hold(bool on);

#endif
