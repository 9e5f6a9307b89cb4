/* reduce.h: reductions over any dimensions, arg reductions, moments, and scans along one
 * dimension.
 *
 * Invariant: floats are summed in double over chunks whose bounds depend on shapes alone, so a
 * result does not change with the number of threads. y has the rank of x with the reduced
 * dimensions of size 1. Integers are reduced as int64 and stored saturated. NaN wins max and
 * min.
 * To add a reduction: a kind here, and its case in each switch of reduce_body.h.
 */
#ifndef ORR_K_REDUCE_H
#define ORR_K_REDUCE_H

#include "chunk.h"

typedef enum orr_reduce_kind {
  ORR_REDUCE_SUM,    /* of nothing: 0 */
  ORR_REDUCE_PROD,   /* 1 */
  ORR_REDUCE_MAX,    /* -inf, or the least integer */
  ORR_REDUCE_MIN,    /* +inf, or the greatest integer */
  ORR_REDUCE_ANY,    /* false */
  ORR_REDUCE_ALL,    /* true */
  ORR_REDUCE_SUMSQ,  /* sum of x^2 */
  ORR_REDUCE_SUMABS, /* sum of |x| */
  ORR_REDUCE_MAXABS, /* max of |x|; of nothing 0 */
  ORR_REDUCE_COUNT   /* how many are not 0 */
} orr_reduce_kind;

void orr_k_reduce(orr_reduce_kind kind, const orr_view *x, unsigned mask, const orr_view *y);
/* y = sum of |x|^p over mask, without the root, so that shards add. */
void orr_k_sum_pow(const orr_view *x, unsigned mask, double p, const orr_view *y);
/* y = (sum of |x|^p)^(1/p); p may be 0 (count), inf or -inf. */
void orr_k_norm_p(const orr_view *x, unsigned mask, double p, const orr_view *y);
/* y = sum of (x - mean)^2; mean has the shape of y. Floats. */
void orr_k_centered_sumsq(const orr_view *x, unsigned mask, const orr_view *mean,
                          const orr_view *y);
/* Mean of x over mask, and the sum of squared deviations from it; the count is the shapes'.
 * Shards merge by Chan, Golub and LeVeque, "Algorithms for computing the sample variance",
 * 1983. */
void orr_k_moments(const orr_view *x, unsigned mask, const orr_view *mean, const orr_view *m2);

/* Greatest (kind MAX) or least (MIN) along dim: the value (values may be NULL), and its index
 * from 1 plus offset, first of ties, first NaN before all. Both keep dim as size 1. An empty
 * dim gives index 0 and the value of nothing. */
void orr_k_arg_reduce(orr_reduce_kind kind, const orr_view *x, int dim, const orr_view *values,
                      const orr_view *indices, int64_t offset);

/* Running sum along dim, from the end when reverse (the gradient of the other). */
void orr_k_cumsum(const orr_view *x, int dim, bool reverse, const orr_view *y);
void orr_k_cumprod(const orr_view *x, int dim, const orr_view *y);
/* gx from x, y = cumprod(x) and g; right where x holds zeros, too. Floats. */
void orr_k_cumprod_back(const orr_view *x, const orr_view *y, const orr_view *g, int dim,
                        const orr_view *gx);

#endif
