/* norm.h: layer, RMS, batch and group normalisation, in the pieces that sharded statistics
 * need.
 *
 * Invariant: weights w and b may be NULL (1 and 0). Sums over rows are made in double. Row
 * statistics (mean, rstd) have x's rank with a last size of 1, or lack the last dimension.
 * Batch statistics and sums are one-dimensional, over channels (dimension 2 of x, counting from
 * 1).
 * To add a norm: express it by these where it can be (group norm is batch norm of slices).
 * Formulas: Ba et al. 2016 (layer); Zhang and Sennrich 2019 (RMS); Ioffe and Szegedy 2015
 * (batch); Wu and He 2018 (group).
 */
#ifndef ORR_K_NORM_H
#define ORR_K_NORM_H

#include "chunk.h"

/* Over the last dimension: y = (x - mean) rstd w + b, rstd = 1 / sqrt(var + eps), var
 * biased. */
void orr_k_layer_norm(const orr_view *x, const orr_view *w, const orr_view *b, double eps,
                      const orr_view *y, const orr_view *mean, const orr_view *rstd);
void orr_k_layer_norm_back(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                           const orr_view *w, const orr_view *g, const orr_view *gx);
/* gw = sum of g xhat, gb = sum of g, over rows; either may be NULL. Shards add. */
void orr_k_layer_norm_back_w(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                             const orr_view *g, const orr_view *gw, const orr_view *gb);
/* y = x rstd w, rstd = 1 / sqrt(mean(x^2) + eps). */
void orr_k_rms_norm(const orr_view *x, const orr_view *w, double eps, const orr_view *y,
                    const orr_view *rstd);
void orr_k_rms_norm_back(const orr_view *x, const orr_view *rstd, const orr_view *w,
                         const orr_view *g, const orr_view *gx);
void orr_k_rms_norm_back_w(const orr_view *x, const orr_view *rstd, const orr_view *g,
                           const orr_view *gw);

/* x (N, C, ...) by any strides; sums are not divided, so shards add. */
void orr_k_bn_sum(const orr_view *x, const orr_view *sum);
void orr_k_bn_centered_sumsq(const orr_view *x, const orr_view *mean, const orr_view *sumsq);
/* rstd = 1 / sqrt(sumsq / n + eps), n the one element of count, or n where that is NULL; of
 * nothing 1 / sqrt(eps). */
void orr_k_bn_rstd(const orr_view *sumsq, const orr_view *count, double n, double eps,
                   const orr_view *rstd);
/* Running mean and variance move by `momentum` towards those of all rows together: mean, sumsq
 * (D, C), counts (D) or NULL (n each). Rows merge by Chan, Golub and LeVeque, "Algorithms for
 * computing the sample variance", 1983. */
void orr_k_bn_running(const orr_view *running_mean, const orr_view *running_var,
                      const orr_view *mean, const orr_view *sumsq, const orr_view *counts,
                      double n, double momentum);
/* y = (x - mean) rstd w + b. */
void orr_k_bn_apply(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                    const orr_view *w, const orr_view *b, const orr_view *y);
/* sum_g = sum of g (the gradient of b); sum_gxhat = sum of g (x - mean) rstd (that of w). */
void orr_k_bn_grad_sums(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                        const orr_view *g, const orr_view *sum_g, const orr_view *sum_gxhat);
/* gx = w rstd (g - sum_g / n - xhat sum_gxhat / n), n the count over all shards; the sums NULL
 * where the statistics are constants (evaluation): gx = w rstd g. */
void orr_k_bn_grad_apply(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                         const orr_view *w, const orr_view *g, const orr_view *sum_g,
                         const orr_view *sum_gxhat, double global_count, const orr_view *gx);

/* x (N, C, ...), mean and rstd (N, groups), C a multiple of groups, w and b (C). */
void orr_k_group_norm(const orr_view *x, int64_t groups, const orr_view *w, const orr_view *b,
                      double eps, const orr_view *y, const orr_view *mean,
                      const orr_view *rstd);
/* sum_g, sum_gxhat (N, C): their sums over N are the gradients of b and w. */
void orr_k_group_norm_grad_sums(const orr_view *x, int64_t groups, const orr_view *mean,
                                const orr_view *rstd, const orr_view *g, const orr_view *sum_g,
                                const orr_view *sum_gxhat);
void orr_k_group_norm_grad_apply(const orr_view *x, int64_t groups, const orr_view *mean,
                                 const orr_view *rstd, const orr_view *w, const orr_view *g,
                                 const orr_view *sum_g, const orr_view *sum_gxhat,
                                 const orr_view *gx);

#endif
