/* pool_tiled.c: maximum over windows that tile the plane, in f32 (pool.h).
 *
 * Where windows neither overlap nor leave gaps, an element of x belongs to one window, so
 * backward writes each element once, by its window, and takes nothing from memory twice.
 *
 * Invariant: same results as pool.c, whose place it takes where `tiles` answers true. Lanes go
 * along channels; g may have any strides, and is turned in blocks where its channels lie apart.
 * To add a layout: a condition in `tiles` and a row function.
 */
#include "pool_tiled.h"

#include <math.h>
#include <string.h>

enum { LANES = 64, PLACES = 16 };

typedef struct tiled {
  const float *x, *g; /* one of both */
  float *y, *gx;
  const int32_t *where;
  int32_t *to_where;
  const orr_window *w;
  const orr_view *big, *small, *places, *g_view; /* of x or gx; y or g; indices */
} tiled;

static bool whole_channels(const orr_view *v) { return v->shape[1] == 1 || v->stride[1] == 1; }

bool orr_k_pool_tiles(const orr_view *big, const orr_view *small, const orr_view *indices,
                      const orr_window *w) {
  if (big->dtype != ORR_F32 || small->dtype != ORR_F32 || indices->dtype != ORR_I32)
    return false;
  if (big->shape[1] < 8 || !whole_channels(big) || !whole_channels(indices)) return false;
  for (int k = 0; k < 2; k++)
    if (w->stride[k] != w->kernel[k] || w->padding[k] || w->dilation[k] != 1) return false;
  return true;
}

/* ---- forward ---- */

/* The first of equal values stands, and a NaN, once there, only gives way to another: pool.c's
 * order of taps. */
static void max_place(const tiled *t, const float *x, int64_t first, int32_t lanes, float *y,
                      int32_t *where) {
  const orr_window *w = t->w;
  float best[LANES];
  int32_t at[LANES];
  int64_t width = t->big->shape[3];
  for (int64_t a = 0; a < w->kernel[0]; a++) {
    for (int64_t b = 0; b < w->kernel[1]; b++) {
      const float *from = x + a * t->big->stride[2] + b * t->big->stride[3];
      int32_t pos = (int32_t)(first + a * width + b);
      if (a + b == 0) {
        for (int32_t j = 0; j < lanes; j++) best[j] = from[j], at[j] = pos;
        continue;
      }
      for (int32_t j = 0; j < lanes; j++) {
        bool take = (from[j] > best[j]) | (from[j] != from[j]);
        best[j] = take ? from[j] : best[j];
        at[j] = take ? pos : at[j];
      }
    }
  }
  memcpy(y, best, (size_t)lanes * sizeof *y);
  memcpy(where, at, (size_t)lanes * sizeof *where);
}

static inline int64_t row_of(const orr_view *v, int64_t n, int64_t c, int64_t h) {
  return n * v->stride[0] + c * v->stride[1] + h * v->stride[2];
}

static void max_row(const tiled *t, int64_t n, int64_t h) {
  const orr_view *y = t->small;
  int64_t channels = y->shape[1], top = h * t->w->kernel[0], wide = t->w->kernel[1];
  for (int64_t w = 0; w < y->shape[3]; w++) {
    for (int64_t c = 0; c < channels; c += LANES) {
      int32_t lanes = (int32_t)(channels - c < LANES ? channels - c : LANES);
      const float *x = t->x + row_of(t->big, n, c, top) + w * wide * t->big->stride[3];
      max_place(t, x, top * t->big->shape[3] + w * wide, lanes,
                t->y + row_of(y, n, c, h) + w * y->stride[3],
                t->to_where + row_of(t->places, n, c, h) + w * t->places->stride[3]);
    }
  }
}

/* ---- backward ---- */

static void back_place(const tiled *t, const float *g, const int32_t *where, int64_t first,
                       int32_t lanes, float *gx) {
  const orr_window *w = t->w;
  for (int64_t a = 0; a < w->kernel[0]; a++) {
    for (int64_t b = 0; b < w->kernel[1]; b++) {
      float *to = gx + a * t->big->stride[2] + b * t->big->stride[3];
      int32_t pos = (int32_t)(first + a * t->big->shape[3] + b);
      ORR_SIMD
      for (int32_t j = 0; j < lanes; j++) to[j] = where[j] == pos ? g[j] : 0;
    }
  }
}

/* g of `places` neighbours in width, its channels brought together. */
static const float *turned(const tiled *t, const float *g, int64_t places, int32_t lanes,
                           float *room) {
  int64_t cs = t->small->stride[1], ws = t->small->stride[3];
  for (int32_t j = 0; j < lanes; j++)
    for (int64_t p = 0; p < places; p++) room[p * LANES + j] = g[j * cs + p * ws];
  return room;
}

static void back_row(const tiled *t, int64_t n, int64_t h) {
  const orr_view *g = t->small;
  float room[PLACES * LANES];
  int64_t channels = g->shape[1], top = h * t->w->kernel[0], wide = t->w->kernel[1];
  bool together = whole_channels(g);
  for (int64_t w = 0; w < g->shape[3]; w += PLACES) {
    int64_t places = g->shape[3] - w < PLACES ? g->shape[3] - w : PLACES;
    for (int64_t c = 0; c < channels; c += LANES) {
      int32_t lanes = (int32_t)(channels - c < LANES ? channels - c : LANES);
      const float *from = t->g + row_of(g, n, c, h) + w * g->stride[3];
      int64_t step = together ? g->stride[3] : LANES;
      if (!together) from = turned(t, from, places, lanes, room);
      for (int64_t p = 0; p < places; p++)
        back_place(t, from + p * step,
                   t->where + row_of(t->places, n, c, h) + (w + p) * t->places->stride[3],
                   top * t->big->shape[3] + (w + p) * wide, lanes,
                   t->gx + row_of(t->big, n, c, top) + (w + p) * wide * t->big->stride[3]);
    }
  }
}

static void zero_places(const orr_view *gx, int64_t n, int64_t h, int64_t from_w) {
  float *row = (float *)gx->data + row_of(gx, n, 0, h);
  for (int64_t w = from_w; w < gx->shape[3]; w++)
    memset(row + w * gx->stride[3], 0, (size_t)gx->shape[1] * sizeof *row);
}

/* What no window covers: columns at the right, rows at the bottom. */
static void zero_rest(const tiled *t, int64_t n, int64_t h) {
  int64_t covered_w = t->small->shape[3] * t->w->kernel[1];
  int64_t bottom = t->small->shape[2] * t->w->kernel[0];
  for (int64_t a = 0; a < t->w->kernel[0]; a++)
    zero_places(t->big, n, h * t->w->kernel[0] + a, covered_w);
  if (h + 1 < t->small->shape[2]) return;
  for (int64_t r = bottom; r < t->big->shape[2]; r++) zero_places(t->big, n, r, 0);
}

void orr_k_max_pool2d_tiled(const orr_view *x, const orr_window *w, const orr_view *y,
                            const orr_view *indices) {
  tiled t = {.x = x->data,
             .y = y->data,
             .to_where = indices->data,
             .w = w,
             .big = x,
             .small = y,
             .places = indices};
  int64_t rows = y->shape[0] * y->shape[2], high = y->shape[2];
#pragma omp parallel for schedule(static) if (orr_k_count(x) >= ORR_K_GRAIN)
  for (int64_t r = 0; r < rows; r++) max_row(&t, r / high, r % high);
}

void orr_k_max_pool2d_back_tiled(const orr_view *g, const orr_view *indices,
                                 const orr_window *w, const orr_view *gx) {
  tiled t = {.g = g->data,
             .gx = gx->data,
             .where = indices->data,
             .w = w,
             .big = gx,
             .small = g,
             .places = indices};
  int64_t rows = g->shape[0] * g->shape[2], high = g->shape[2];
#pragma omp parallel for schedule(static) if (orr_k_count(gx) >= ORR_K_GRAIN)
  for (int64_t r = 0; r < rows; r++) {
    back_row(&t, r / high, r % high);
    zero_rest(&t, r / high, r % high);
  }
}
