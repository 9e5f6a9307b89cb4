/* softmax.c: dispatch of the softmax family (softmax.h) over rows and float types.
 *
 * Invariant: f64 inputs are computed in double, all others in float with sums in double.
 * To add a function: softmax.h.
 */
#include "scalar.h"

#include "softmax.h"

#define REAL float
#define FN(name) name##_f32
#define READ orr_k_read_f32
#define TARGET orr_k_target_f32
#define WRITE orr_k_write_f32
#define EXP orr_exp_f32
#include "softmax_body.h"
#undef REAL
#undef FN
#undef READ
#undef TARGET
#undef WRITE
#undef EXP

#define REAL double
#define FN(name) name##_f64
#define READ orr_k_read_f64
#define TARGET orr_k_target_f64
#define WRITE orr_k_write_f64
#define EXP orr_exp_f64
#include "softmax_body.h"
#undef REAL
#undef FN
#undef READ
#undef TARGET
#undef WRITE
#undef EXP

typedef void row_fn(const orr_view *const *v, const int64_t *off, orr_run run);

/* Calls fn for each row along dim of the views, all of views[0]'s shape but where dim is 1. */
static void rows(const orr_view *const *views, int nviews, int dim, row_fn *f32, row_fn *f64) {
  row_fn *fn = views[0]->dtype == ORR_F64 ? f64 : f32;
  orr_run run = {.len = views[0]->shape[dim]};
  orr_loop l;
  for (int v = 0; v < nviews; v++) run.stride[v] = views[v]->stride[dim];
  orr_loop_init(&l, views[0], views, nviews, 1u << dim);
#pragma omp parallel for schedule(static) if (l.n * run.len >= ORR_K_GRAIN / 4)
  for (int64_t r = 0; r < l.n; r++) {
    int64_t off[ORR_LOOP_VIEWS];
    orr_loop_at(&l, nviews, r, off);
    fn(views, off, run);
  }
}

void orr_k_softmax(const orr_view *x, int dim, const orr_view *y) {
  const orr_view *v[] = {x, y};
  rows(v, 2, dim, softmax_row_f32, softmax_row_f64);
}

void orr_k_log_softmax(const orr_view *x, int dim, const orr_view *y) {
  const orr_view *v[] = {x, y};
  rows(v, 2, dim, log_softmax_row_f32, log_softmax_row_f64);
}

void orr_k_logsumexp(const orr_view *x, int dim, const orr_view *y) {
  orr_view kept = orr_k_keepdim(y, dim, x->ndim);
  const orr_view *v[] = {x, &kept};
  rows(v, 2, dim, logsumexp_row_f32, logsumexp_row_f64);
}

void orr_k_softmax_back(const orr_view *y, const orr_view *g, int dim, const orr_view *gx) {
  const orr_view *v[] = {y, g, gx};
  rows(v, 3, dim, softmax_back_row_f32, softmax_back_row_f64);
}

void orr_k_log_softmax_back(const orr_view *y, const orr_view *g, int dim, const orr_view *gx) {
  const orr_view *v[] = {y, g, gx};
  rows(v, 3, dim, log_softmax_back_row_f32, log_softmax_back_row_f64);
}
