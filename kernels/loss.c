/* loss.c: cross entropy and negative log likelihood (loss.h).
 *
 * Invariant: a row is one thread's; what a row adds to a loss is made in double.
 * To add a loss: loss_body.h.
 */
#include "scalar.h"

#include "loss.h"

/* v: views that the rows' loop walks; v[0] is x (or gx), of which the loop leaves the last
 * dim. */
typedef struct loss {
  const orr_view *x, *v[5], *target;
  orr_view kept[5];
  orr_loop loop;
  int64_t len, xs, gs, class0, classes, ignore;
  double smooth;
  orr_fault *fault;
} loss;

static inline int64_t left(int64_t len, int64_t i) {
  return len - i < ORR_CHUNK ? len - i : ORR_CHUNK;
}

#define REAL float
#define FN(name) name##_f32
#define READ orr_k_read_f32
#define TARGET orr_k_target_f32
#define WRITE orr_k_write_f32
#define EXP orr_exp_f32
#include "loss_body.h"
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
#include "loss_body.h"
#undef REAL
#undef FN
#undef READ
#undef TARGET
#undef WRITE
#undef EXP

/* Fills in what follows from the views; v[1..] are of rows or of x's rank, and may be NULL. */
static void begin(loss *k) {
  int last = k->v[0]->ndim - 1;
  k->x = k->v[0];
  k->len = k->x->shape[last];
  k->xs = k->x->stride[last];
  for (int i = 1; i < 5; i++)
    if (k->v[i] != NULL) {
      k->kept[i] = orr_k_keepdim(k->v[i], last, k->x->ndim);
      k->v[i] = &k->kept[i];
    }
  orr_loop_init(&k->loop, k->x, k->v, 5, 1u << last);
}

/* The target of a row (in row-major order): from 1, or -1 where the row counts for nothing. */
static int64_t target_of(const loss *k, int64_t row) {
  int64_t off = 0, p = row;
  for (int d = k->target->ndim - 1; d >= 0; d--) {
    off += p % k->target->shape[d] * k->target->stride[d];
    p /= k->target->shape[d];
  }
  int64_t t = orr_k_get_int(k->target, off);
  if (t == k->ignore) return -1;
  if (t >= 1 && t <= k->classes) return t;
  orr_k_blame(k->fault, row + 1, t);
  return -1;
}

/* Offsets of row (in row-major order) in the five views. */
static void row_at(const loss *k, int64_t row, int64_t *off) {
  for (int v = 0; v < 5; v++) off[v] = 0;
  for (int d = k->x->ndim - 2; d >= 0; d--) {
    int64_t i = row % k->x->shape[d];
    row /= k->x->shape[d];
    for (int v = 0; v < 5; v++)
      if (k->v[v] != NULL && k->v[v]->shape[d] != 1) off[v] += i * k->v[v]->stride[d];
  }
}

static void put(const loss *k, int view, const int64_t *off, double value) {
  if (k->v[view] != NULL) orr_k_set(k->v[view], off[view], value);
}

static double row_loss(const loss *k, int64_t t, double lse, double picked, double sum_x) {
  if (t < 0) return 0;
  double y = (1 - k->smooth) * (lse - picked);
  return k->smooth == 0 ? y : y + k->smooth * (lse - sum_x / (double)k->classes);
}

int64_t orr_k_count_targets(const orr_view *target, int64_t ignore) {
  const orr_view *views[1] = {target};
  int64_t count = 0, off;
  orr_loop l;
  orr_loop_init(&l, target, views, 1, 0);
  for (int64_t i = 0; i < l.n; i++) {
    orr_loop_at(&l, 1, i, &off);
    count += orr_k_get_int(target, off) != ignore;
  }
  return count;
}

static double row_max(const loss *k, int64_t off) {
  return k->x->dtype == ORR_F64 ? max_of_f64(k, off) : max_of_f32(k, off);
}

static double row_sums(const loss *k, int64_t off, double m, double *sum_x) {
  return k->x->dtype == ORR_F64 ? sums_of_f64(k, off, m, sum_x)
                                : sums_of_f32(k, off, (float)m, sum_x);
}

/* The logit of class t (from 1) where this shard has it, else 0. */
static double picked_of(const loss *k, int64_t off, int64_t t) {
  int64_t here = t - 1 - k->class0;
  return t > 0 && here >= 0 && here < k->len ? orr_k_get(k->x, off + here * k->xs) : 0;
}

void orr_k_cross_entropy(const orr_view *x, const orr_view *target, int64_t ignore,
                         double smooth, const orr_view *loss_rows, const orr_view *lse,
                         orr_fault *fault) {
  loss k = {.v = {x, loss_rows, lse}, .target = target, .ignore = ignore, .smooth = smooth};
  k.fault = fault;
  begin(&k);
  k.classes = k.len;
#pragma omp parallel for schedule(static) if (k.loop.n * k.len >= ORR_K_GRAIN / 4)
  for (int64_t r = 0; r < k.loop.n; r++) {
    int64_t off[5], t = target_of(&k, r);
    double sum_x;
    row_at(&k, r, off);
    double m = row_max(&k, off[0]), whole = log(row_sums(&k, off[0], m, &sum_x)) + m;
    put(&k, 1, off, row_loss(&k, t, whole, picked_of(&k, off[0], t), sum_x));
    put(&k, 2, off, whole);
  }
}

void orr_k_cross_entropy_back(const orr_view *x, const orr_view *lse, const orr_view *target,
                              int64_t ignore, double smooth, int64_t class0, int64_t classes,
                              const orr_view *g, const orr_view *gx) {
  loss k = {.v = {x, lse, g, gx}, .target = target, .ignore = ignore, .smooth = smooth};
  k.class0 = class0;
  k.classes = classes;
  k.gs = gx->stride[gx->ndim - 1];
  begin(&k);
#pragma omp parallel for schedule(static) if (k.loop.n * k.len >= ORR_K_GRAIN / 4)
  for (int64_t r = 0; r < k.loop.n; r++) {
    int64_t off[5], t = target_of(&k, r);
    row_at(&k, r, off);
    (x->dtype == ORR_F64 ? back_row_f64 : back_row_f32)(&k, off, t);
  }
}

void orr_k_cross_entropy_max(const orr_view *x, const orr_view *max) {
  loss k = {.v = {x, max}};
  begin(&k);
#pragma omp parallel for schedule(static) if (k.loop.n * k.len >= ORR_K_GRAIN)
  for (int64_t r = 0; r < k.loop.n; r++) {
    int64_t off[5];
    row_at(&k, r, off);
    put(&k, 1, off, row_max(&k, off[0]));
  }
}

void orr_k_cross_entropy_parts(const orr_view *x, const orr_view *max, const orr_view *target,
                               int64_t ignore, int64_t class0, int64_t classes,
                               const orr_view *sum_exp, const orr_view *picked,
                               const orr_view *sum_x, orr_fault *fault) {
  loss k = {.v = {x, max, sum_exp, picked, sum_x}, .target = target, .ignore = ignore};
  k.class0 = class0;
  k.classes = classes;
  k.fault = fault;
  begin(&k);
#pragma omp parallel for schedule(static) if (k.loop.n * k.len >= ORR_K_GRAIN / 4)
  for (int64_t r = 0; r < k.loop.n; r++) {
    int64_t off[5], t = target_of(&k, r);
    double all;
    row_at(&k, r, off);
    put(&k, 2, off, row_sums(&k, off[0], orr_k_get(k.v[1], off[1]), &all));
    put(&k, 3, off, picked_of(&k, off[0], t));
    put(&k, 4, off, all);
  }
}

void orr_k_cross_entropy_finish(const orr_view *max, const orr_view *sum_exp,
                                const orr_view *picked, const orr_view *sum_x,
                                const orr_view *target, int64_t ignore, double smooth,
                                int64_t classes, const orr_view *loss_rows,
                                const orr_view *lse) {
  const orr_view *a[4] = {max, sum_exp, picked, loss_rows};
  const orr_view *b[2] = {sum_x, lse};
  loss k = {.target = target, .ignore = ignore, .smooth = smooth, .classes = classes};
  orr_loop la, lb;
  orr_view flat = *target;
  for (int64_t s = 1, d = flat.ndim - 1; d >= 0; d--) {
    flat.stride[d] = s;
    s *= flat.shape[d];
  }
  const orr_view *va[5] = {&flat, a[0], a[1], a[2], a[3]}, *vb[3] = {&flat, b[0], b[1]};
  orr_loop_init(&la, target, va, 5, 0);
  orr_loop_init(&lb, target, vb, 3, 0);
  for (int64_t r = 0; r < la.n; r++) {
    int64_t off[5], more[3], t = target_of(&k, r);
    orr_loop_at(&la, 5, r, off);
    orr_loop_at(&lb, 3, r, more);
    double whole = log(orr_k_get(sum_exp, off[2])) + orr_k_get(max, off[1]);
    double all = sum_x != NULL ? orr_k_get(sum_x, more[1]) : 0;
    orr_k_set(loss_rows, off[4], row_loss(&k, t, whole, orr_k_get(picked, off[3]), all));
    if (lse != NULL) orr_k_set(lse, more[2], whole);
  }
}

void orr_k_nll_loss(const orr_view *x, const orr_view *target, int64_t ignore, int64_t class0,
                    int64_t classes, const orr_view *loss_rows, orr_fault *fault) {
  loss k = {.v = {x, loss_rows}, .target = target, .ignore = ignore, .classes = classes};
  k.class0 = class0;
  k.fault = fault;
  begin(&k);
  for (int64_t r = 0; r < k.loop.n; r++) {
    int64_t off[5], t = target_of(&k, r);
    row_at(&k, r, off);
    put(&k, 1, off, -picked_of(&k, off[0], t));
  }
}

void orr_k_nll_loss_back(const orr_view *g, const orr_view *target, int64_t ignore,
                         int64_t class0, int64_t classes, const orr_view *gx) {
  loss k = {.v = {gx, g}, .target = target, .ignore = ignore, .classes = classes};
  begin(&k);
#pragma omp parallel for schedule(static) if (k.loop.n * k.len >= ORR_K_GRAIN)
  for (int64_t r = 0; r < k.loop.n; r++) {
    int64_t off[5], here = target_of(&k, r) - 1 - class0;
    row_at(&k, r, off);
    for (int64_t j = 0; j < k.len; j++)
      orr_k_set(gx, off[0] + j * k.xs, j == here ? -orr_k_get(k.v[1], off[1]) : 0);
  }
}
