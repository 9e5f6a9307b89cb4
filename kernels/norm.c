/* norm.c: layer norm and RMS norm over the last dimension (norm.h).
 *
 * Invariant: a row, or a block of columns, belongs to one thread; no sum depends on their
 * number.
 * To add a norm of rows: norm_body.h.
 */
#include "norm.h"

#include <math.h>

enum { NORM_COLUMNS = 64 };

typedef struct norm_row {
  const orr_view *x, *y, *mean, *rstd, *g, *w, *b;
  int64_t len, xs, ys, gs, ws, bs;
  double eps;
} norm_row;

static inline int64_t left(int64_t len, int64_t i) {
  return len - i < ORR_CHUNK ? len - i : ORR_CHUNK;
}

#define REAL float
#define FN(name) name##_f32
#define READ orr_k_read_f32
#define TARGET orr_k_target_f32
#define WRITE orr_k_write_f32
#include "norm_body.h"
#undef REAL
#undef FN
#undef READ
#undef TARGET
#undef WRITE

#define REAL double
#define FN(name) name##_f64
#define READ orr_k_read_f64
#define TARGET orr_k_target_f64
#define WRITE orr_k_write_f64
#include "norm_body.h"
#undef REAL
#undef FN
#undef READ
#undef TARGET
#undef WRITE

/* The loop over rows; y is gx where backward, mean and rstd get their last dimension back. */
static void begin(norm_row *r, orr_loop *l, orr_view *mean, orr_view *rstd) {
  int last = r->x->ndim - 1;
  if (r->mean != NULL) *mean = orr_k_keepdim(r->mean, last, r->x->ndim);
  *rstd = orr_k_keepdim(r->rstd, last, r->x->ndim);
  r->mean = r->mean != NULL ? mean : NULL;
  r->rstd = rstd;
  r->len = r->x->shape[last];
  r->xs = r->x->stride[last];
  r->ys = r->y != NULL ? r->y->stride[last] : 0;
  r->gs = r->g != NULL ? r->g->stride[last] : 0;
  r->ws = r->w != NULL ? r->w->stride[0] : 0;
  r->bs = r->b != NULL ? r->b->stride[0] : 0;
  const orr_view *views[5] = {r->x, r->y, r->mean, r->rstd, r->g};
  orr_loop_init(l, r->x, views, 5, 1u << last);
}

static void forward(norm_row *r) {
  orr_view mean, rstd;
  orr_loop l;
  begin(r, &l, &mean, &rstd);
#pragma omp parallel for schedule(static) if (l.n * r->len >= ORR_K_GRAIN)
  for (int64_t i = 0; i < l.n; i++) {
    int64_t off[5];
    orr_loop_at(&l, 5, i, off);
    (r->x->dtype == ORR_F64 ? norm_row_f64 : norm_row_f32)(r, off);
  }
}

static void backward(norm_row *r) {
  orr_view mean, rstd;
  orr_loop l;
  begin(r, &l, &mean, &rstd);
#pragma omp parallel for schedule(static) if (l.n * r->len >= ORR_K_GRAIN)
  for (int64_t i = 0; i < l.n; i++) {
    int64_t off[5];
    orr_loop_at(&l, 5, i, off);
    (r->x->dtype == ORR_F64 ? norm_back_row_f64 : norm_back_row_f32)(r, off);
  }
}

static void backward_w(norm_row *r, const orr_view *gw, const orr_view *gb) {
  orr_view mean, rstd;
  orr_loop l;
  begin(r, &l, &mean, &rstd);
#pragma omp parallel for schedule(static) if (l.n * r->len >= ORR_K_GRAIN)
  for (int64_t c = 0; c < r->len; c += NORM_COLUMNS) {
    double w[NORM_COLUMNS], b[NORM_COLUMNS];
    int64_t n = r->len - c < NORM_COLUMNS ? r->len - c : NORM_COLUMNS;
    (r->x->dtype == ORR_F64 ? norm_back_columns_f64 : norm_back_columns_f32)(r, &l, c, n, w, b);
    if (gw != NULL) orr_k_write_f64(gw, c * gw->stride[0], gw->stride[0], n, w);
    if (gb != NULL) orr_k_write_f64(gb, c * gb->stride[0], gb->stride[0], n, b);
  }
}

void orr_k_layer_norm(const orr_view *x, const orr_view *w, const orr_view *b, double eps,
                      const orr_view *y, const orr_view *mean, const orr_view *rstd) {
  norm_row r = {.x = x, .y = y, .mean = mean, .rstd = rstd, .w = w, .b = b, .eps = eps};
  forward(&r);
}

void orr_k_layer_norm_back(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                           const orr_view *w, const orr_view *g, const orr_view *gx) {
  norm_row r = {.x = x, .y = gx, .mean = mean, .rstd = rstd, .w = w, .g = g};
  backward(&r);
}

void orr_k_layer_norm_back_w(const orr_view *x, const orr_view *mean, const orr_view *rstd,
                             const orr_view *g, const orr_view *gw, const orr_view *gb) {
  norm_row r = {.x = x, .mean = mean, .rstd = rstd, .g = g};
  backward_w(&r, gw, gb);
}

void orr_k_rms_norm(const orr_view *x, const orr_view *w, double eps, const orr_view *y,
                    const orr_view *rstd) {
  norm_row r = {.x = x, .y = y, .rstd = rstd, .w = w, .eps = eps};
  forward(&r);
}

void orr_k_rms_norm_back(const orr_view *x, const orr_view *rstd, const orr_view *w,
                         const orr_view *g, const orr_view *gx) {
  norm_row r = {.x = x, .y = gx, .rstd = rstd, .w = w, .g = g};
  backward(&r);
}

void orr_k_rms_norm_back_w(const orr_view *x, const orr_view *rstd, const orr_view *g,
                           const orr_view *gw) {
  norm_row r = {.x = x, .rstd = rstd, .g = g};
  backward_w(&r, gw, NULL);
}
