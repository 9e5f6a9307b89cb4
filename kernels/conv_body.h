/* conv_body.h: blocks of direct convolution; conv.c includes it once for float, once for
 * double.
 *
 * Invariant: REAL, FN(name), READ and WRITE are defined by the includer. A row of the tensor
 * that is read serves BLOCK channels of the one that is written.
 * To add a pass: accumulate a block of channels by lanes, then store it.
 */

static inline REAL FN(number)(const orr_view *v, int64_t off) {
  REAL buf;
  return *READ(v, off, 1, 1, &buf);
}

/* Output channels k .. k + block - 1 of one group, row h, columns from w on. */
static void FN(forward_block)(const conv *c, int64_t n, int64_t k, int64_t block, int64_t h,
                              int64_t w, int64_t lanes) {
  REAL sum[BLOCK][LANES], buf[LANES];
  int64_t depth = c->w->shape[1], group = k / (c->w->shape[0] / c->groups);
  for (int64_t j = 0; j < block; j++) {
    REAL start = c->b != NULL ? FN(number)(c->b, (k + j) * c->b->stride[0]) : 0;
    for (int64_t i = 0; i < lanes; i++) sum[j][i] = start;
  }
  for (int64_t q = 0; q < depth; q++)
    for (int64_t a = 0; a < c->win->kernel[0]; a++) {
      orr_lanes r = orr_window_inputs(c->win, 0, a, h, 1, c->x->shape[2]);
      for (int64_t b = 0; r.count > 0 && b < c->win->kernel[1]; b++) {
        orr_lanes l = orr_window_inputs(c->win, 1, b, w, lanes, c->x->shape[3]);
        if (l.count == 0) continue;
        int64_t from = offset(c->x, n, group * depth + q, r.from, l.from);
        const REAL *x = READ(c->x, from, c->x->stride[3] * c->win->stride[1], l.count, buf);
        for (int64_t j = 0; j < block; j++) {
          REAL f = FN(number)(c->w, offset(c->w, k + j, q, a, b)), *s = sum[j] + l.first;
#pragma omp simd
          for (int64_t i = 0; i < l.count; i++) s[i] += f * x[i];
        }
      }
    }
  for (int64_t j = 0; j < block; j++)
    WRITE(c->y, offset(c->y, n, k + j, h, w), c->y->stride[3], lanes, sum[j]);
}

/* Input channels k .. k + block - 1 of one group (counted over all groups), row h, from w
 * on. */
static void FN(data_block)(const conv *c, int64_t n, int64_t k, int64_t block, int64_t h,
                           int64_t w, int64_t lanes) {
  REAL sum[BLOCK][LANES], buf[LANES];
  int64_t depth = c->w->shape[0] / c->groups, per = c->w->shape[1], group = k / per;
  int64_t by = c->win->stride[1];
  for (int64_t j = 0; j < block; j++)
    for (int64_t i = 0; i < lanes; i++) sum[j][i] = 0;
  for (int64_t q = group * depth; q < (group + 1) * depth; q++)
    for (int64_t a = 0; a < c->win->kernel[0]; a++) {
      orr_lanes r = orr_window_outputs(c->win, 0, a, h, 1, c->y->shape[2]);
      for (int64_t b = 0; r.count > 0 && b < c->win->kernel[1]; b++) {
        orr_lanes l = orr_window_outputs(c->win, 1, b, w, lanes, c->y->shape[3]);
        if (l.count == 0) continue;
        const REAL *g =
            READ(c->y, offset(c->y, n, q, r.from, l.from), c->y->stride[3], l.count, buf);
        for (int64_t j = 0; j < block; j++) {
          REAL f = FN(number)(c->w, offset(c->w, q, k + j - group * per, a, b));
          REAL *s = sum[j] + l.first;
          if (by == 1) {
#pragma omp simd
            for (int64_t i = 0; i < l.count; i++) s[i] += f * g[i];
          } else {
            for (int64_t i = 0; i < l.count; i++) s[i * by] += f * g[i];
          }
        }
      }
    }
  for (int64_t j = 0; j < block; j++)
    WRITE(c->x, offset(c->x, n, k + j, h, w), c->x->stride[3], lanes, sum[j]);
}

/* Adds row h of sample n, from w on, to the gradients of taps (a, b .. b + taps - 1) of input
 * channel q and output channels k .. k + block - 1. */
static void FN(weight_row)(const conv *c, int64_t n, int64_t k, int64_t block, int64_t q,
                           int64_t from_h, int64_t h, int64_t w, int64_t lanes, int64_t b,
                           int64_t taps, double (*sum)[TAPS]) {
  REAL gbuf[BLOCK][LANES], buf[LANES];
  const REAL *g[BLOCK];
  int64_t group = k / (c->w->shape[0] / c->groups);
  for (int64_t j = 0; j < block; j++)
    g[j] = READ(c->y, offset(c->y, n, k + j, h, w), c->y->stride[3], lanes, gbuf[j]);
  for (int64_t t = 0; t < taps; t++) {
    orr_lanes l = orr_window_inputs(c->win, 1, b + t, w, lanes, c->x->shape[3]);
    if (l.count == 0) continue;
    int64_t from = offset(c->x, n, group * c->w->shape[1] + q, from_h, l.from);
    const REAL *x = READ(c->x, from, c->x->stride[3] * c->win->stride[1], l.count, buf);
    for (int64_t j = 0; j < block; j++) {
      const REAL *y = g[j] + l.first;
      REAL dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < l.count; i++) dot += x[i] * y[i];
      sum[j][t] += dot;
    }
  }
}

static void FN(weight_block)(const conv *c, int64_t k, int64_t block, int64_t q, int64_t a) {
  int64_t kw = c->win->kernel[1], width = c->y->shape[3];
  for (int64_t b = 0; b < kw; b += TAPS) {
    double sum[BLOCK][TAPS] = {{0}};
    int64_t taps = kw - b < TAPS ? kw - b : TAPS;
    for (int64_t n = 0; n < c->y->shape[0]; n++)
      for (int64_t h = 0; h < c->y->shape[2]; h++) {
        orr_lanes r = orr_window_inputs(c->win, 0, a, h, 1, c->x->shape[2]);
        for (int64_t w = 0; r.count > 0 && w < width; w += LANES) {
          int64_t lanes = width - w < LANES ? width - w : LANES;
          FN(weight_row)(c, n, k, block, q, r.from, h, w, lanes, b, taps, sum);
        }
      }
    for (int64_t j = 0; j < block; j++)
      orr_k_write_f64(c->w, offset(c->w, k + j, q, a, b), c->w->stride[3], taps, sum[j]);
  }
}
