/* loss.h: cross entropy and negative log likelihood over classes in the last dimension.
 *
 * Invariant: x (..., C); target (i64 or i32, from 1), loss, lse and the other row numbers have
 * x's shape without the last dimension. target equal to `ignore` (ORR_NO_IGNORE: none) gives 0
 * loss and gradient; a target outside [1, classes] does, too, and is reported in *fault (first
 * by position; may be NULL; zero it before). Classes may be sharded: x then holds classes
 * class0 + 1 .. class0 + C of `classes`, and rows are whole after a max and three sums over the
 * shards. With smoothing s, loss = (1 - s)(lse - x_t) + s (lse - mean(x)) (Szegedy et al. 2016,
 * "Rethinking the Inception architecture", section 7).
 * To add a loss of rows: a row function in loss_body.h, dispatched in loss.c.
 */
#ifndef ORR_K_LOSS_H
#define ORR_K_LOSS_H

#include "chunk.h"

#define ORR_NO_IGNORE INT64_MIN

/* How many targets are not ignored. */
int64_t orr_k_count_targets(const orr_view *target, int64_t ignore);

/* All classes here: row losses, and the logsumexp that backward wants. */
void orr_k_cross_entropy(const orr_view *x, const orr_view *target, int64_t ignore,
                         double smooth, const orr_view *loss, const orr_view *lse,
                         orr_fault *fault);
/* gx = g (softmax(x) - (1 - s) onehot - s / classes), for whole and sharded classes. g holds a
 * number a row (stride 0 for one number). */
void orr_k_cross_entropy_back(const orr_view *x, const orr_view *lse, const orr_view *target,
                              int64_t ignore, double smooth, int64_t class0, int64_t classes,
                              const orr_view *g, const orr_view *gx);

/* Sharded classes: 1. max of each row; reduce by max. */
void orr_k_cross_entropy_max(const orr_view *x, const orr_view *max);
/* 2. sum of exp(x - max), the target's logit where it is here (else 0), and the sum of x (NULL
 * where nothing is smoothed); reduce each by sum. Shards report the same faults. */
void orr_k_cross_entropy_parts(const orr_view *x, const orr_view *max, const orr_view *target,
                               int64_t ignore, int64_t class0, int64_t classes,
                               const orr_view *sum_exp, const orr_view *picked,
                               const orr_view *sum_x, orr_fault *fault);
/* 3. row losses and lse from the reduced numbers. */
void orr_k_cross_entropy_finish(const orr_view *max, const orr_view *sum_exp,
                                const orr_view *picked, const orr_view *sum_x,
                                const orr_view *target, int64_t ignore, double smooth,
                                int64_t classes, const orr_view *loss, const orr_view *lse);

/* loss = -x_t, 0 where the class is of another shard. */
void orr_k_nll_loss(const orr_view *x, const orr_view *target, int64_t ignore, int64_t class0,
                    int64_t classes, const orr_view *loss, orr_fault *fault);
/* gx = -g at the target, else 0. */
void orr_k_nll_loss_back(const orr_view *g, const orr_view *target, int64_t ignore,
                         int64_t class0, int64_t classes, const orr_view *gx);

#endif
