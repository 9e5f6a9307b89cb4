/* pool.h: max and average pooling over height and width, forward and backward.
 *
 * Invariant: x (N, C, H, W) and y (N, C, OH, OW) by any strides; every element of the result is
 * written by one thread, which gathers, so results do not depend on the threads. Padding is
 * never a maximum. indices (i32 or i64, y's shape) hold h W + w of the maximum in its plane,
 * from 0.
 * To add a pooling: a row function each way in pool_body.h.
 */
#ifndef ORR_K_POOL_H
#define ORR_K_POOL_H

#include "chunk.h"
#include "window.h"

void orr_k_max_pool2d(const orr_view *x, const orr_window *w, const orr_view *y,
                      const orr_view *indices);
void orr_k_max_pool2d_back(const orr_view *g, const orr_view *indices, const orr_window *w,
                           const orr_view *gx);
/* Divides by the taps of a window, or only by those inside. */
void orr_k_avg_pool2d(const orr_view *x, const orr_window *w, bool count_include_pad,
                      const orr_view *y);
void orr_k_avg_pool2d_back(const orr_view *g, const orr_window *w, bool count_include_pad,
                           const orr_view *gx);

#endif
