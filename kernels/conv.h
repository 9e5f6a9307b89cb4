/* conv.h: direct 2-d convolution, for every float type and stride: the reference, and the f64
 * path.
 *
 * Invariant: x (N, C, H, W), w (K, C / groups, KH, KW), y (N, K, OH, OW), by any strides; w's
 * kernel sizes are window->kernel. Each element is written by one thread in a fixed order of
 * sums. It is cross-correlation, as nets use it. A one-dimensional convolution has H = KH = 1.
 * To add a pass: blocks of channels by lanes of width, as in conv_body.h.
 */
#ifndef ORR_K_CONV_H
#define ORR_K_CONV_H

#include "chunk.h"
#include "window.h"

/* b (K) may be NULL. */
void orr_k_conv2d(const orr_view *x, const orr_view *w, const orr_view *b,
                  const orr_window *window, int64_t groups, const orr_view *y);
void orr_k_conv2d_back_data(const orr_view *g, const orr_view *w, const orr_window *window,
                            int64_t groups, const orr_view *gx);
void orr_k_conv2d_back_weight(const orr_view *x, const orr_view *g, const orr_window *window,
                              int64_t groups, const orr_view *gw);
void orr_k_conv2d_back_bias(const orr_view *g, const orr_view *gb);

#endif
