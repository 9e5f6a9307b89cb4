/* optim.h: optimiser steps over lists of parameters, one call a list; norms and scaling.
 *
 * Invariant: arrays are contiguous. State is f64 for f64 parameters, else f32, of n elements
 * each, zero before the first step; f16 and bf16 parameters and gradients are computed in f32.
 * A master is the f32 copy that an f16 or bf16 parameter is the rounded form of (Micikevicius
 * et al. 2018, section 3.1). An element whose master does not round to it was written by
 * somebody else, and the master takes its value first; so a new master may be all zero.
 * To add an optimiser: its options here, its chunk function and entry in optim.c.
 */
#ifndef ORR_OPTIM_H
#define ORR_OPTIM_H

#include "kernel.h"

typedef struct orr_optim_item {
  void *param;
  const void *grad;
  void *state[3]; /* what each optimiser's comment says; NULL where unused */
  float *master;  /* NULL: none, the parameter is updated as it is */
  int64_t n;
  orr_dtype dtype; /* of param and grad */
} orr_optim_item;

/* state[0]: momentum (NULL where momentum is 0). `first`: momentum starts as the gradient. */
typedef struct orr_sgd {
  double lr, momentum, dampening, weight_decay;
  double grad_scale; /* gradients are multiplied by it first */
  bool nesterov, first;
} orr_sgd;
void orr_k_sgd(const orr_sgd *o, const orr_optim_item *items, int n);

/* state[0], state[1]: first and second moment. t counts steps from 1. `decoupled` is AdamW. */
typedef struct orr_adam {
  double lr, beta1, beta2, eps, weight_decay, t, grad_scale;
  bool decoupled;
} orr_adam;
void orr_k_adam(const orr_adam *o, const orr_optim_item *items, int n);

/* state[0]: mean square; state[1]: momentum (NULL: none); state[2]: mean gradient if centered.
 */
typedef struct orr_rmsprop {
  double lr, alpha, eps, weight_decay, momentum, grad_scale;
  bool centered;
} orr_rmsprop;
void orr_k_rmsprop(const orr_rmsprop *o, const orr_optim_item *items, int n);

/* Sum of squares, in double; the same however many threads work. */
double orr_k_sumsq(const orr_view *x);
/* x *= factor. */
void orr_k_scale(orr_view *x, double factor);
/* Whether no element is infinite or NaN. */
bool orr_k_all_finite(const orr_view *x);

#endif
