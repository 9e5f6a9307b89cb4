/* op_optim.h: optimiser steps, norms, scaling and the finite check over lists of tensors.
 *
 * Invariant: tensors of a list may stand on several meshes; each mesh gets one queued call.
 * Lists are borrowed and may hold no NULL. Parameters and states are written in place, in no
 * graph.
 * To add an optimiser: its options and op as in op_optim.c, its Lua function in lua_optim.c.
 */
#ifndef ORR_OP_OPTIM_H
#define ORR_OP_OPTIM_H

#include "../kernels/optim.h"
#include "op.h"

/* n parameters, their gradients, and n_states lists of n states each (order: kernels/optim.h),
 * of which the last, where has_master says so, are the masters of f16 or bf16 parameters. */
typedef struct orr_optim_lists {
  int n, n_states;
  bool has_master;
  orr_tensor *const *param, *const *grad;
  orr_tensor *const *state[4];
} orr_optim_lists;

orr_status orr_sgd_step(const orr_optim_lists *lists, const orr_sgd *options);
orr_status orr_adam_step(const orr_optim_lists *lists, const orr_adam *options);
orr_status orr_rmsprop_step(const orr_optim_lists *lists, const orr_rmsprop *options);

/* (sum of |x|^p)^(1/p) over all tensors as one vector; p may be infinite. Each logical element
 * counts once. Waits for it. */
orr_status orr_list_norm(orr_tensor *const *list, int n, double p, double *norm);
/* Whether no element of any is infinite or NaN, over all devices. Waits. */
orr_status orr_list_finite(orr_tensor *const *list, int n, bool *finite);
/* Every tensor times `by`, a number in a tensor, or where that is NULL times `factor`. */
orr_status orr_list_scale(orr_tensor *const *list, int n, orr_tensor *by, double factor);

#endif
