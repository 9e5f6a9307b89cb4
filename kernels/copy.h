/* copy.h: kernels that move elements: copies, casts, sums into place.
 *
 * Invariant: views of one call have one shape. Output and input either are the same elements or
 * do not overlap.
 * To add a dtype: a row in CONVERSIONS (copy.c) and what half.h and loop.c ask.
 */
#ifndef ORR_COPY_H
#define ORR_COPY_H

#include "kernel.h"

/* y = x, cast: a float becomes an integer by truncation, a bool by != 0. */
void orr_k_copy(const orr_view *x, orr_view *y);
/* y += x, of one dtype. */
void orr_k_accumulate(const orr_view *x, orr_view *y);

typedef enum orr_many_kind { ORR_MANY_SUM, ORR_MANY_MAX, ORR_MANY_MIN } orr_many_kind;

/* y = xs[0] op xs[1] op ..., of one dtype, in that order; f16 and bf16 are rounded once. y may
 * be one of xs. n >= 1. More than 17 views that are not contiguous are rounded every 17, and
 * the one that is y may come first. */
void orr_k_reduce_many(int kind, const orr_view *const *xs, int n, orr_view *y);

#endif
