/* window.h: sliding windows over height and width, shared by pooling and convolution.
 *
 * Invariant: tap t of output o reads input o stride - padding + t dilation, where that is
 * inside. A row of lanes is worked at once: neighbours in width, or (with one lane) one place.
 * To add an operation on windows: walk taps, and take each tap's lanes from these two
 * functions.
 */
#ifndef ORR_K_WINDOW_H
#define ORR_K_WINDOW_H

#include <stdint.h>

/* [0] is height, [1] is width. */
typedef struct orr_window {
  int64_t kernel[2], stride[2], padding[2], dilation[2];
} orr_window;

/* Lanes first, first + step, ... (count of them) meet places from, from + 1 or + stride, ... */
typedef struct orr_lanes {
  int64_t first, count, from;
} orr_lanes;

static inline int64_t orr_ceil_div(int64_t a, int64_t b) {
  return a >= 0 ? (a + b - 1) / b : -(-a / b);
}

/* Outputs out0 .. out0 + lanes - 1 that tap t feeds from an input of `size`; lanes step by one
 * and inputs by stride. */
static inline orr_lanes orr_window_inputs(const orr_window *w, int axis, int64_t t,
                                          int64_t out0, int64_t lanes, int64_t size) {
  int64_t s = w->stride[axis], shift = t * w->dilation[axis] - w->padding[axis];
  int64_t lo = orr_ceil_div(-shift, s), hi = orr_ceil_div(size - shift, s);
  if (lo < out0) lo = out0;
  if (hi > out0 + lanes) hi = out0 + lanes;
  return (orr_lanes){lo - out0, hi > lo ? hi - lo : 0, lo * s + shift};
}

/* Inputs in0 .. in0 + lanes - 1 that tap t feeds to some of `size` outputs; lanes step by
 * stride and outputs by one. */
static inline orr_lanes orr_window_outputs(const orr_window *w, int axis, int64_t t,
                                           int64_t in0, int64_t lanes, int64_t size) {
  int64_t s = w->stride[axis], shift = t * w->dilation[axis] - w->padding[axis];
  int64_t lo = orr_ceil_div(in0 - shift, s), hi = orr_ceil_div(in0 + lanes - shift, s);
  if (lo < 0) lo = 0;
  if (hi > size) hi = size;
  return (orr_lanes){lo * s + shift - in0, hi > lo ? hi - lo : 0, lo};
}

#endif
