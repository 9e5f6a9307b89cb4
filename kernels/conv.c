/* conv.c: direct convolution by blocks of channels and lanes of width (conv.h).
 *
 * Invariant: a block never crosses a group.
 * To add a pass: conv_body.h, and the loop over its blocks here.
 */
#include "conv.h"

#include "reduce.h"

enum { BLOCK = 8, LANES = 64, TAPS = 16 };

/* Backward, x is gx where that is computed, y is g, and w is gw where that is. */
typedef struct conv {
  const orr_view *x, *w, *b, *y;
  const orr_window *win;
  int64_t groups;
} conv;

static inline int64_t offset(const orr_view *v, int64_t a, int64_t b, int64_t c, int64_t d) {
  return a * v->stride[0] + b * v->stride[1] + c * v->stride[2] + d * v->stride[3];
}

#define REAL float
#define FN(name) name##_f32
#define READ orr_k_read_f32
#define WRITE orr_k_write_f32
#include "conv_body.h"
#undef REAL
#undef FN
#undef READ
#undef WRITE

#define REAL double
#define FN(name) name##_f64
#define READ orr_k_read_f64
#define WRITE orr_k_write_f64
#include "conv_body.h"
#undef REAL
#undef FN
#undef READ
#undef WRITE

typedef void block_fn(const conv *c, int64_t n, int64_t k, int64_t block, int64_t h, int64_t w,
                      int64_t lanes);

/* Calls fn for every block of `to`, whose channels are in groups. */
static void blocks(const conv *c, const orr_view *to, block_fn *fn, int64_t work) {
  int64_t per = to->shape[1] / c->groups, in_group = (per + BLOCK - 1) / BLOCK;
  int64_t across = (to->shape[3] + LANES - 1) / LANES;
  int64_t units = to->shape[0] * c->groups * in_group * to->shape[2] * across;
#pragma omp parallel for schedule(static) if (work >= ORR_K_GRAIN)
  for (int64_t u = 0; u < units; u++) {
    int64_t w = u % across * LANES, r = u / across, h = r % to->shape[2];
    r /= to->shape[2];
    int64_t first = r % in_group * BLOCK, group = r / in_group % c->groups;
    int64_t block = per - first < BLOCK ? per - first : BLOCK;
    int64_t lanes = to->shape[3] - w < LANES ? to->shape[3] - w : LANES;
    fn(c, r / in_group / c->groups, group * per + first, block, h, w, lanes);
  }
}

/* Multiplications of one pass. */
static int64_t work_of(const conv *c) {
  int64_t channels = c->w->shape[0] > 0 ? c->w->shape[0] : 1;
  return orr_k_count(c->y) * (orr_k_count(c->w) / channels);
}

void orr_k_conv2d(const orr_view *x, const orr_view *w, const orr_view *b,
                  const orr_window *window, int64_t groups, const orr_view *y) {
  conv c = {.x = x, .w = w, .b = b, .y = y, .win = window, .groups = groups};
  blocks(&c, y, x->dtype == ORR_F64 ? forward_block_f64 : forward_block_f32, work_of(&c));
}

void orr_k_conv2d_back_data(const orr_view *g, const orr_view *w, const orr_window *window,
                            int64_t groups, const orr_view *gx) {
  conv c = {.x = gx, .w = w, .y = g, .win = window, .groups = groups};
  blocks(&c, gx, g->dtype == ORR_F64 ? data_block_f64 : data_block_f32, work_of(&c));
}

void orr_k_conv2d_back_weight(const orr_view *x, const orr_view *g, const orr_window *window,
                              int64_t groups, const orr_view *gw) {
  conv c = {.x = x, .w = gw, .y = g, .win = window, .groups = groups};
  int64_t per = gw->shape[0] / groups, in_group = (per + BLOCK - 1) / BLOCK;
  int64_t rows = window->kernel[0], depth = gw->shape[1];
  int64_t units = groups * in_group * depth * rows;
#pragma omp parallel for schedule(static) if (work_of(&c) >= ORR_K_GRAIN)
  for (int64_t u = 0; u < units; u++) {
    int64_t a = u % rows, q = u / rows % depth, r = u / rows / depth;
    int64_t first = r % in_group * BLOCK, block = per - first < BLOCK ? per - first : BLOCK;
    (x->dtype == ORR_F64 ? weight_block_f64 : weight_block_f32)(&c, r / in_group * per + first,
                                                                block, q, a);
  }
}

void orr_k_conv2d_back_bias(const orr_view *g, const orr_view *gb) {
  orr_view y = {
      .data = gb->data, .dtype = gb->dtype, .ndim = 4, .shape = {1, gb->shape[0], 1, 1}};
  y.stride[1] = gb->stride[0];
  orr_k_reduce(ORR_REDUCE_SUM, g, ~2u, &y);
}
