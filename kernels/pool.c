/* pool.c: pooling over rows of lanes (pool.h).
 *
 * Invariant: lanes go along the closer of channels and width of the result.
 * To add a pooling: pool_body.h; pool_tiled.c has the common case of the maximum.
 */
#include "pool_tiled.h"

#include <math.h>

enum { LANES = 256 };

/* One pass: `from` is read and `to` is written; backward, from is g and to is gx. */
typedef struct pool {
  const orr_view *from, *to, *indices;
  const orr_window *w;
  bool along_channels, include_pad;
} pool;

typedef struct place {
  int64_t n, c, h, w;
} place;

static inline int64_t offset(const orr_view *v, const place *at, int64_t h, int64_t w) {
  return at->n * v->stride[0] + at->c * v->stride[1] + h * v->stride[2] + w * v->stride[3];
}

static inline int64_t step(const pool *p, const orr_view *v, int64_t places) {
  return p->along_channels ? v->stride[1] : v->stride[3] * places;
}

/* Along channels every lane shares one place, so the place's answer is all lanes' answer. */
static orr_lanes inputs_of(const pool *p, int64_t tap, int64_t w, int64_t lanes) {
  int64_t size = p->from->shape[3];
  orr_lanes l = orr_window_inputs(p->w, 1, tap, w, p->along_channels ? 1 : lanes, size);
  if (p->along_channels) l.count *= lanes;
  return l;
}

static orr_lanes outputs_of(const pool *p, int64_t tap, int64_t w, int64_t lanes) {
  int64_t size = p->from->shape[3];
  orr_lanes l = orr_window_outputs(p->w, 1, tap, w, p->along_channels ? 1 : lanes, size);
  if (p->along_channels) l.count *= lanes;
  return l;
}

static int64_t taps_inside(const orr_window *w, int axis, int64_t out, int64_t size) {
  int64_t n = 0;
  for (int64_t t = 0; t < w->kernel[axis]; t++)
    n += orr_window_inputs(w, axis, t, out, 1, size).count;
  return n;
}

static int64_t divisor(const pool *p, const orr_view *input, int64_t h, int64_t w) {
  if (p->include_pad) return p->w->kernel[0] * p->w->kernel[1];
  int64_t n =
      taps_inside(p->w, 0, h, input->shape[2]) * taps_inside(p->w, 1, w, input->shape[3]);
  return n > 0 ? n : 1;
}

#define REAL float
#define FN(name) name##_f32
#define READ orr_k_read_f32
#define WRITE orr_k_write_f32
#include "pool_body.h"
#undef REAL
#undef FN
#undef READ
#undef WRITE

#define REAL double
#define FN(name) name##_f64
#define READ orr_k_read_f64
#define WRITE orr_k_write_f64
#include "pool_body.h"
#undef REAL
#undef FN
#undef READ
#undef WRITE

typedef void row_fn(const pool *p, const place *at, int64_t lanes);

static void rows(pool *p, row_fn *f32, row_fn *f64) {
  const orr_view *y = p->to;
  row_fn *fn = y->dtype == ORR_F64 ? f64 : f32;
  p->along_channels = y->shape[1] > 1 && (y->stride[1] < y->stride[3] || y->shape[3] == 1);
  int64_t len = y->shape[p->along_channels ? 1 : 3], per = (len + LANES - 1) / LANES;
  int64_t side = y->shape[p->along_channels ? 3 : 1];
  int64_t units = y->shape[0] * y->shape[2] * side * per;
  int64_t work = orr_k_count(y) * p->w->kernel[0] * p->w->kernel[1];
#pragma omp parallel for schedule(static) if (work >= ORR_K_GRAIN)
  for (int64_t u = 0; u < units; u++) {
    int64_t first = u % per * LANES, r = u / per, a, b;
    int64_t lanes = len - first < LANES ? len - first : LANES;
    place at;
    if (p->along_channels) {
      a = r % side;
      b = r / side % y->shape[2];
      at = (place){r / side / y->shape[2], first, b, a};
    } else {
      a = r % y->shape[2];
      b = r / y->shape[2] % side;
      at = (place){r / y->shape[2] / side, b, a, first};
    }
    fn(p, &at, lanes);
  }
}

void orr_k_max_pool2d(const orr_view *x, const orr_window *w, const orr_view *y,
                      const orr_view *indices) {
  pool p = {.from = x, .to = y, .indices = indices, .w = w};
  if (orr_k_pool_tiles(x, y, indices, w) && (y->shape[1] == 1 || y->stride[1] == 1)) {
    orr_k_max_pool2d_tiled(x, w, y, indices);
    return;
  }
  rows(&p, max_row_f32, max_row_f64);
}

void orr_k_max_pool2d_back(const orr_view *g, const orr_view *indices, const orr_window *w,
                           const orr_view *gx) {
  pool p = {.from = g, .to = gx, .indices = indices, .w = w};
  if (orr_k_count(g) && orr_k_pool_tiles(gx, g, indices, w)) {
    orr_k_max_pool2d_back_tiled(g, indices, w, gx);
    return;
  }
  rows(&p, max_back_row_f32, max_back_row_f64);
}

void orr_k_avg_pool2d(const orr_view *x, const orr_window *w, bool count_include_pad,
                      const orr_view *y) {
  pool p = {.from = x, .to = y, .w = w, .include_pad = count_include_pad};
  rows(&p, avg_row_f32, avg_row_f64);
}

void orr_k_avg_pool2d_back(const orr_view *g, const orr_window *w, bool count_include_pad,
                           const orr_view *gx) {
  pool p = {.from = g, .to = gx, .w = w, .include_pad = count_include_pad};
  rows(&p, avg_back_row_f32, avg_back_row_f64);
}
