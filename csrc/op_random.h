/* op_random.h: the creators of random tensors, for the binding.
 *
 * Invariant: args.i[0..3] is the key (random_state.h); numbers depend on it and on the global
 * index alone. To add a distribution: its kernel, its op here.
 */
#ifndef ORR_OP_RANDOM_H
#define ORR_OP_RANDOM_H

#include "../kernels/random.h"
#include "op.h"

/* uniform: args.f: lo, hi. normal: args.f: mean, deviation. randint: args.i[4..5]: both ends.
 * bernoulli: args.f: the probability of 1. */
extern const orr_op orr_op_uniform, orr_op_normal, orr_op_randint, orr_op_bernoulli;

orr_random_key orr_random_key_of(const orr_args *args);
/* A permutation of 1..n as an i64 host tensor. */
orr_status orr_random_permutation(const orr_random_key *key, int64_t n, orr_tensor **out);

#endif
