/* random.h: kernels that draw random numbers, each from its global element index.
 *
 * Invariant: a number depends on the key and the element's row-major index in the global
 * tensor, so no cut into shards changes it. f64 and f32 draws from one key agree to f32's
 * precision.
 * To add a distribution: a drawing function over words in random.c.
 */
#ifndef ORR_RANDOM_H
#define ORR_RANDOM_H

#include "kernel.h"

typedef struct orr_random_key {
  uint64_t seed;
  uint64_t stream;
  uint64_t step;
  uint64_t call;
} orr_random_key;

/* Where a shard stands in its global tensor: element 0 of the shard is element `origin` of it.
 */
typedef struct orr_global {
  int ndim;
  int64_t shape[ORR_MAX_DIM];
  int64_t origin[ORR_MAX_DIM];
} orr_global;

/* `global` may be NULL where y is the whole tensor. Floats within [lo, hi). */
void orr_k_uniform(const orr_random_key *key, const orr_global *global, double lo, double hi,
                   orr_view *y);
void orr_k_normal(const orr_random_key *key, const orr_global *global, double mean, double std,
                  orr_view *y);
/* Both ends are drawn. Any dtype. */
void orr_k_randint(const orr_random_key *key, const orr_global *global, int64_t lo, int64_t hi,
                   orr_view *y);
/* 1 with probability p, else 0. Any dtype. */
void orr_k_bernoulli(const orr_random_key *key, const orr_global *global, double p,
                     orr_view *y);
/* y = x / (1 - p) where kept, else 0; mask (bool or u8, or NULL) tells which were kept. The
 * gradient is the same call on g: the key gives the same mask again. */
void orr_k_dropout(const orr_random_key *key, const orr_global *global, double p,
                   const orr_view *x, orr_view *y, orr_view *mask);
/* A permutation of 1..n in out[0..n). */
void orr_k_randperm(const orr_random_key *key, int64_t n, int64_t *out);

#endif
