/* reduce.c: planning a reduction from its strides (reduce.h says what is computed).
 *
 * Invariant: the plan is a function of shapes and strides. Where the innermost dimension is
 * reduced, an output is a sum over rows; where it is kept, rows are added to a pile of outputs
 * side by side.
 * To add a kind: reduce.h.
 */
#include "reduce.h"

#include <math.h>

/* Kinds that take a parameter, and so have functions of their own. */
enum { SUM_POW = ORR_REDUCE_COUNT + 1, CENTERED_SUMSQ };

enum {
  SPLIT = 64,  /* pieces of one long output */
  PILES = 8,   /* pieces of a few wide outputs */
  PILE = 256,  /* outputs side by side */
  NARROW = 16, /* a row too short to be worth a call, where there are many */
  MANY = 64
};

typedef struct reduction {
  int kind;
  double power;
  const orr_view *x, *y, *mean;
  orr_loop kept, reduced; /* kept: x, y, mean; reduced: x */
  orr_run in;             /* the innermost: of reduced for rows, of kept for columns */
  orr_run over;           /* columns: the dimension that is piled */
  int64_t per_row;        /* rows: chunks of a row; columns: steps of over */
  int64_t fold;           /* columns: rows that lie in one piece and are added in one step */
  int64_t total;          /* elements of one output */
} reduction;

#define T float
#define ACC double
#define ABS fabs
#define ISNAN(x) ((x) != (x))
#define LEAST (-INFINITY)
#define GREATEST INFINITY
#define READ orr_k_read_f32
#define READ_ACC orr_k_read_f64
#define WRITE_ACC orr_k_write_f64
#define FN(name) name##_f32
#include "reduce_body.h"
#undef T
#undef READ
#undef FN

#define T double
#define READ orr_k_read_f64
#define FN(name) name##_f64
#include "reduce_body.h"
#undef T
#undef ACC
#undef ABS
#undef ISNAN
#undef LEAST
#undef GREATEST
#undef READ
#undef READ_ACC
#undef WRITE_ACC
#undef FN

static inline int64_t abs_i64(int64_t x) { return x < 0 ? -x : x; }

#define T int64_t
#define ACC int64_t
#define ABS abs_i64
#define ISNAN(x) 0
#define LEAST INT64_MIN
#define GREATEST INT64_MAX
#define READ orr_k_read_i64
#define READ_ACC orr_k_read_i64
#define WRITE_ACC orr_k_write_i64
#define FN(name) name##_i64
#include "reduce_body.h"
#undef T
#undef ACC
#undef ABS
#undef ISNAN
#undef LEAST
#undef GREATEST
#undef READ
#undef READ_ACC
#undef WRITE_ACC
#undef FN

static bool rows_are_inner(const reduction *r) {
  const orr_loop *k = &r->kept, *d = &r->reduced;
  if (k->ndim == 0 || d->ndim == 0) return k->ndim == 0;
  int64_t step = abs_i64(d->stride[0][d->ndim - 1]),
          across = abs_i64(k->stride[0][k->ndim - 1]);
  if (d->ndim == 1 && d->n < NARROW && k->shape[k->ndim - 1] >= MANY) return false;
  return step <= across;
}

static bool plan_rows(reduction *r) {
  bool rows = rows_are_inner(r);
  r->fold = 1;
  if (rows) {
    r->in = orr_loop_pop(&r->reduced);
    r->per_row = (r->in.len + ORR_CHUNK - 1) / ORR_CHUNK;
    return true;
  }
  r->in = orr_loop_pop(&r->kept);
  r->over = orr_loop_pop(&r->reduced);
  if (r->in.stride[0] == 1 && r->over.stride[0] == r->in.len && r->in.len <= PILE / 2)
    r->fold = r->in.len > 0 ? PILE / r->in.len : 1;
  r->per_row = (r->over.len + r->fold - 1) / r->fold;
  return false;
}

static void reduce(reduction *r, unsigned mask) {
  const orr_view *views[3] = {r->x, r->y, r->mean};
  orr_loop_init(&r->kept, r->x, views, 3, mask);
  orr_loop_init(&r->reduced, r->x, views, 1, ~mask);
  r->total = r->reduced.n;
  bool rows = plan_rows(r);
  if (r->x->dtype == ORR_F64) (rows ? reduce_rows_f64 : reduce_columns_f64)(r);
  else if (orr_k_is_float(r->x->dtype)) (rows ? reduce_rows_f32 : reduce_columns_f32)(r);
  else (rows ? reduce_rows_i64 : reduce_columns_i64)(r);
}

void orr_k_reduce(orr_reduce_kind kind, const orr_view *x, unsigned mask, const orr_view *y) {
  reduction r = {.kind = kind, .x = x, .y = y};
  reduce(&r, mask);
}

void orr_k_sum_pow(const orr_view *x, unsigned mask, double p, const orr_view *y) {
  reduction r = {.kind = SUM_POW, .power = p, .x = x, .y = y};
  reduce(&r, mask);
}

/* Replaces every element of y. */
static void change(const orr_view *y, double (*to)(double, double), double p) {
  orr_loop l;
  orr_loop_init(&l, y, &y, 1, 0);
  for (int64_t i = 0; i < l.n; i++) {
    int64_t off;
    orr_loop_at(&l, 1, i, &off);
    orr_k_set(y, off, to(orr_k_get(y, off), p));
  }
}

static double scaled(double x, double by) { return x * by; }
static double rooted(double x, double p) { return p == 2 ? sqrt(x) : pow(x, 1 / p); }

/* The norm of p = -inf. */
static void least_abs(const orr_view *x, unsigned mask, const orr_view *y) {
  const orr_view *views[2] = {x, y};
  orr_loop kept, reduced;
  orr_loop_init(&kept, x, views, 2, mask);
  orr_loop_init(&reduced, x, views, 1, ~mask);
  for (int64_t o = 0; o < kept.n; o++) {
    int64_t off[2], in;
    double least = INFINITY;
    orr_loop_at(&kept, 2, o, off);
    for (int64_t i = 0; i < reduced.n; i++) {
      orr_loop_at(&reduced, 1, i, &in);
      least = less_f64(least, fabs(orr_k_get(x, off[0] + in)));
    }
    orr_k_set(y, off[1], least);
  }
}

void orr_k_norm_p(const orr_view *x, unsigned mask, double p, const orr_view *y) {
  if (p == INFINITY) {
    orr_k_reduce(ORR_REDUCE_MAXABS, x, mask, y);
  } else if (p == -INFINITY) {
    least_abs(x, mask, y);
  } else if (p == 0 || p == 1) {
    orr_k_reduce(p == 0 ? ORR_REDUCE_COUNT : ORR_REDUCE_SUMABS, x, mask, y);
  } else {
    if (p == 2) orr_k_reduce(ORR_REDUCE_SUMSQ, x, mask, y);
    else orr_k_sum_pow(x, mask, p, y);
    change(y, rooted, p);
  }
}

void orr_k_centered_sumsq(const orr_view *x, unsigned mask, const orr_view *mean,
                          const orr_view *y) {
  reduction r = {.kind = CENTERED_SUMSQ, .x = x, .y = y, .mean = mean};
  reduce(&r, mask);
}

void orr_k_moments(const orr_view *x, unsigned mask, const orr_view *mean, const orr_view *m2) {
  int64_t count = 1;
  for (int d = 0; d < x->ndim; d++)
    if (mask >> d & 1) count *= x->shape[d];
  orr_k_reduce(ORR_REDUCE_SUM, x, mask, mean);
  change(mean, scaled, count > 0 ? 1 / (double)count : 0);
  orr_k_centered_sumsq(x, mask, mean, m2);
}

void orr_k_arg_reduce(orr_reduce_kind kind, const orr_view *x, int dim, const orr_view *values,
                      const orr_view *indices, int64_t offset) {
  bool max = kind == ORR_REDUCE_MAX;
  if (x->dtype == ORR_F64) arg_reduce_f64(max, x, dim, values, indices, offset);
  else if (orr_k_is_float(x->dtype)) arg_reduce_f32(max, x, dim, values, indices, offset);
  else arg_reduce_i64(max, x, dim, values, indices, offset);
}

static void scan(bool product, const orr_view *x, int dim, bool reverse, const orr_view *y) {
  if (x->dtype == ORR_F64) scan_f64(product, x, dim, reverse, y);
  else if (orr_k_is_float(x->dtype)) scan_f32(product, x, dim, reverse, y);
  else scan_i64(product, x, dim, reverse, y);
}

void orr_k_cumsum(const orr_view *x, int dim, bool reverse, const orr_view *y) {
  scan(false, x, dim, reverse, y);
}

void orr_k_cumprod(const orr_view *x, int dim, const orr_view *y) {
  scan(true, x, dim, false, y);
}

/* One row of the gradient of cumprod. Before the first zero z, gx_i = sum_{j>=i} g_j y_j / x_i;
 * at it, the products leave x_z out; after it every product holds that zero. */
static void cumprod_back_row(const orr_view *const *v, const int64_t *off, const int64_t *step,
                             int64_t len) {
  const orr_view *x = v[0], *y = v[1], *g = v[2], *gx = v[3];
  int64_t z = 0;
  double sum = 0, product = 1, at_zero = 0;
  while (z < len && orr_k_get(x, off[0] + z * step[0]) != 0) z++;
  if (z > 0) product = orr_k_get(y, off[1] + (z - 1) * step[1]);
  for (int64_t j = z; j < len && product != 0; j++) {
    if (j > z) product *= orr_k_get(x, off[0] + j * step[0]);
    at_zero += orr_k_get(g, off[2] + j * step[2]) * product;
  }
  for (int64_t i = z + 1; i < len; i++) orr_k_set(gx, off[3] + i * step[3], 0);
  if (z < len) orr_k_set(gx, off[3] + z * step[3], at_zero);
  for (int64_t i = z - 1; i >= 0; i--) {
    sum += orr_k_get(g, off[2] + i * step[2]) * orr_k_get(y, off[1] + i * step[1]);
    orr_k_set(gx, off[3] + i * step[3], sum / orr_k_get(x, off[0] + i * step[0]));
  }
}

void orr_k_cumprod_back(const orr_view *x, const orr_view *y, const orr_view *g, int dim,
                        const orr_view *gx) {
  const orr_view *views[4] = {x, y, g, gx};
  int64_t step[4];
  orr_loop l;
  orr_loop_init(&l, x, views, 4, 1u << dim);
  for (int i = 0; i < 4; i++) step[i] = views[i]->stride[dim];
#pragma omp parallel for schedule(static) if (l.n * x->shape[dim] >= ORR_K_GRAIN)
  for (int64_t o = 0; o < l.n; o++) {
    int64_t off[4];
    orr_loop_at(&l, 4, o, off);
    cumprod_back_row(views, off, step, x->shape[dim]);
  }
}
