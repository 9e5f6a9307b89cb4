/* softmax.h: softmax, log_softmax and logsumexp along one dimension, forward and backward.
 *
 * Invariant: each row is worked by one thread; exponentials are of x - max(x), so none
 * overflows; a row of -inf gives NaN (softmax) and -inf (logsumexp), as its limit does.
 * To add a function of rows: a row function in softmax_body.h, dispatched at the end of
 * softmax.c.
 */
#ifndef ORR_K_SOFTMAX_H
#define ORR_K_SOFTMAX_H

#include "chunk.h"

/* x and y have one shape, any float types. */
void orr_k_softmax(const orr_view *x, int dim, const orr_view *y);
void orr_k_log_softmax(const orr_view *x, int dim, const orr_view *y);
/* gx = y (g - sum(g y)). */
void orr_k_softmax_back(const orr_view *y, const orr_view *g, int dim, const orr_view *gx);
/* gx = g - exp(y) sum(g), y the log_softmax. */
void orr_k_log_softmax_back(const orr_view *y, const orr_view *g, int dim, const orr_view *gx);
/* y has dim as size 1, or lacks it. */
void orr_k_logsumexp(const orr_view *x, int dim, const orr_view *y);

#endif
