/* optim.c: SGD, Adam, AdamW, RMSprop; sums of squares.
 *
 * Invariant: as optim.h says. The formulas are those of PyTorch's torch.optim documentation;
 * sources are named at each.
 * To add an optimiser: a chunk function for f32 and f64 by UPDATE, and an entry calling run.
 */
#include "vector.h"

#include "optim.h"

#include <math.h>
#include <string.h>

#include "elementwise.h"
#include "loop.h"
#include "parallel.h"
#include "scalar.h"

typedef void update_fn(const void *options, int64_t n, void *p, const void *g,
                       void *const *state);

typedef struct job {
  update_fn *f32, *f64;
  const void *options;
  const orr_optim_item *item;
} job;

/* Elements of a parameter that somebody else has written, into the master. */
static void follow_param(orr_dtype dtype, int64_t n, const float *p, float *master) {
  orr_chunk rounded, wide;
  orr_store_row(dtype, master, (char *)&rounded, 1, n);
  const float *r = orr_load_row(dtype, (const char *)&rounded, 1, n, &wide);
  for (int64_t i = 0; i < n; i++)
    if (p[i] != r[i]) master[i] = p[i];
}

static void update_range(const void *context, int64_t begin, int64_t end) {
  const job *j = context;
  const orr_optim_item *item = j->item;
  int64_t size = (int64_t)orr_element_size(item->dtype);
  int64_t state_size = item->dtype == ORR_F64 ? 8 : 4;
  update_fn *update = item->dtype == ORR_F64 ? j->f64 : j->f32;
  orr_chunk p_buffer, g_buffer;
  for (int64_t i = begin; i < end; i += ORR_CHUNK) {
    int64_t m = end - i < ORR_CHUNK ? end - i : ORR_CHUNK;
    char *to = (char *)item->param + i * size;
    void *state[3];
    for (int s = 0; s < 3; s++) {
      state[s] = item->state[s] ? (char *)item->state[s] + i * state_size : NULL;
    }
    const char *from = (const char *)item->grad + i * size;
    const void *g = orr_load_row(item->dtype, from, 1, m, &g_buffer);
    const void *now = orr_load_row(item->dtype, to, 1, m, &p_buffer);
    void *p = orr_open_row(item->dtype, to, 1, &p_buffer);
    if (item->master) {
      p = item->master + i;
      follow_param(item->dtype, m, now, p);
    }
    update(j->options, m, p, g, state);
    orr_store_row(item->dtype, p, to, 1, m);
  }
}

static void run(update_fn *f32, update_fn *f64, const void *options,
                const orr_optim_item *items, int n) {
  for (int i = 0; i < n; i++) {
    job j = {.f32 = f32, .f64 = f64, .options = options, .item = &items[i]};
    orr_parallel(items[i].n, ORR_GRAIN_LIGHT, update_range, &j);
  }
}

/* ---- SGD: Sutskever, Martens, Dahl and Hinton, ICML 2013, for momentum and Nesterov's ---- */

#define SGD(T, S)                                                                    \
  static void sgd_##S(const void *options, int64_t n, void *param, const void *grad, \
                      void *const *state) {                                          \
    const orr_sgd *o = options;                                                      \
    const T lr = (T)o->lr, decay = (T)o->weight_decay, scale = (T)o->grad_scale;     \
    const T momentum = (T)o->momentum, fresh = (T)(o->first ? 1 : 1 - o->dampening); \
    T *p = param, *v = state[0];                                                     \
    const T *g = grad;                                                               \
    if (!v) {                                                                        \
      ORR_SIMD                                                                       \
      for (int64_t i = 0; i < n; i++) p[i] -= lr * (scale * g[i] + decay * p[i]);    \
      return;                                                                        \
    }                                                                                \
    const T keep = o->first ? (T)0 : momentum;                                       \
    const T of_g = o->nesterov ? (T)1 : (T)0, of_v = o->nesterov ? momentum : (T)1;  \
    ORR_SIMD                                                                         \
    for (int64_t i = 0; i < n; i++) {                                                \
      T d = scale * g[i] + decay * p[i];                                             \
      v[i] = keep * v[i] + fresh * d;                                                \
      p[i] -= lr * (of_g * d + of_v * v[i]);                                         \
    }                                                                                \
  }
SGD(float, f32)
SGD(double, f64)

void orr_k_sgd(const orr_sgd *o, const orr_optim_item *items, int n) {
  run(sgd_f32, sgd_f64, o, items, n);
}

/* ---- Adam: Kingma and Ba, ICLR 2015, algorithm 1; AdamW: Loshchilov and Hutter, ICLR 2019
 * - */

#define ADAM(T, S)                                                                      \
  static void adam_##S(const void *options, int64_t n, void *param, const void *grad,   \
                       void *const *state) {                                            \
    const orr_adam *o = options;                                                        \
    const T b1 = (T)o->beta1, c1 = (T)(1 - o->beta1), b2 = (T)o->beta2,                 \
            c2 = (T)(1 - o->beta2);                                                     \
    const T step = (T)(o->lr / (1 - pow(o->beta1, o->t)));                              \
    const T root = (T)(1 / sqrt(1 - pow(o->beta2, o->t))), eps = (T)o->eps;             \
    const T decay = o->decoupled ? (T)0 : (T)o->weight_decay, scale = (T)o->grad_scale; \
    const T shrink = o->decoupled ? (T)(1 - o->lr * o->weight_decay) : (T)1;            \
    T *p = param, *m = state[0], *v = state[1];                                         \
    const T *g = grad;                                                                  \
    ORR_SIMD                                                                            \
    for (int64_t i = 0; i < n; i++) {                                                   \
      T d = scale * g[i] + decay * p[i];                                                \
      m[i] = b1 * m[i] + c1 * d;                                                        \
      v[i] = b2 * v[i] + c2 * d * d;                                                    \
      p[i] = shrink * p[i] - step * m[i] / (M(sqrt, S)(v[i]) * root + eps);             \
    }                                                                                   \
  }
#define M(f, S) orr_##f##_##S
ADAM(float, f32)
ADAM(double, f64)

void orr_k_adam(const orr_adam *o, const orr_optim_item *items, int n) {
  run(adam_f32, adam_f64, o, items, n);
}

/* ---- RMSprop: Hinton's lecture 6e, 2012; centered: Graves, arXiv:1308.0850, equations 38-45
 * - */

#define RMSPROP(T, S)                                                                        \
  static void rmsprop_##S(const void *options, int64_t n, void *param, const void *grad,     \
                          void *const *state) {                                              \
    const orr_rmsprop *o = options;                                                          \
    const T keep = (T)o->alpha, fresh = (T)(1 - o->alpha), eps = (T)o->eps, lr = (T)o->lr;   \
    const T decay = (T)o->weight_decay, momentum = (T)o->momentum, scale = (T)o->grad_scale; \
    T *p = param, *v = state[0], *buffer = state[1], *mean = o->centered ? state[2] : NULL;  \
    const T *g = grad;                                                                       \
    for (int64_t i = 0; i < n; i++) {                                                        \
      T d = scale * g[i] + decay * p[i], square;                                             \
      square = v[i] = keep * v[i] + fresh * d * d;                                           \
      if (mean) {                                                                            \
        mean[i] = keep * mean[i] + fresh * d;                                                \
        square -= mean[i] * mean[i];                                                         \
      }                                                                                      \
      T move = d / (M(sqrt, S)(square) + eps);                                               \
      if (buffer) move = buffer[i] = momentum * buffer[i] + move;                            \
      p[i] -= lr * move;                                                                     \
    }                                                                                        \
  }
RMSPROP(float, f32)  /* NOLINT(clang-analyzer-core.NullDereference): state 0 always stands */
RMSPROP(double, f64) /* NOLINT(clang-analyzer-core.NullDereference) */

void orr_k_rmsprop(const orr_rmsprop *o, const orr_optim_item *items, int n) {
  run(rmsprop_f32, rmsprop_f64, o, items, n);
}

/* ---- norms ------------------------------------------------------------------------------- */

#define LANES 16

static double sum_lanes(double *lane) {
  for (int half = LANES / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  }
  return lane[0];
}

#define SQUARES(T, S)                                                                 \
  static double squares_##S(const T *x, int64_t n) {                                  \
    double lane[LANES] = {0};                                                         \
    int64_t i = 0;                                                                    \
    for (; i + LANES <= n; i += LANES) {                                              \
      for (int l = 0; l < LANES; l++) lane[l] += (double)x[i + l] * (double)x[i + l]; \
    }                                                                                 \
    for (int l = 0; i + l < n; l++) lane[l] += (double)x[i + l] * (double)x[i + l];   \
    return sum_lanes(lane);                                                           \
  }
SQUARES(float, f32)
SQUARES(double, f64)

/* The walk of orr_loop_run shares one sum among threads, so strided views are summed by one. */
typedef struct squares {
  orr_dtype dtype;
  double *sum;
} squares;

static void squares_row(const void *context, int64_t n, char *const *data,
                        const int64_t *stride) {
  const squares *s = context;
  int64_t size = (int64_t)orr_element_size(s->dtype);
  for (int64_t i = 0; i < n; i += ORR_CHUNK) {
    int64_t m = n - i < ORR_CHUNK ? n - i : ORR_CHUNK;
    orr_chunk buffer;
    const void *x =
        orr_load_row(s->dtype, data[0] + i * stride[0] * size, stride[0], m, &buffer);
    *s->sum += s->dtype == ORR_F64 ? squares_f64(x, m) : squares_f32(x, m);
  }
}

/* A contiguous view is cut into pieces by its length alone; pieces are added in order. */
#define PIECES 64

typedef struct pieces {
  const orr_view *x;
  int64_t n, length;
  double *sums;
} pieces;

static void piece_range(const void *context, int64_t begin, int64_t end) {
  const pieces *p = context;
  int64_t size = (int64_t)orr_element_size(p->x->dtype), one = 1;
  for (int64_t i = begin; i < end; i++) {
    int64_t first = i * p->length, n = p->n - first < p->length ? p->n - first : p->length;
    double sum = 0;
    squares s = {.dtype = p->x->dtype, .sum = &sum};
    char *data = (char *)p->x->data + first * size;
    if (n > 0) squares_row(&s, n, &data, &one);
    p->sums[i] = sum;
  }
}

double orr_k_sumsq(const orr_view *x) {
  double sum = 0, sums[PIECES];
  int64_t n = orr_view_numel(x);
  if (!orr_view_contiguous(x)) {
    squares s = {.dtype = x->dtype, .sum = &sum};
    orr_loop_run(1, &x, INT64_MAX, squares_row, &s);
    return sum;
  }
  int64_t length = ((n + PIECES - 1) / PIECES + ORR_CHUNK - 1) / ORR_CHUNK * ORR_CHUNK;
  int64_t count = length ? (n + length - 1) / length : 0;
  pieces p = {.x = x, .n = n, .length = length, .sums = sums};
  orr_parallel(count, n < 2 * ORR_GRAIN_LIGHT ? PIECES : PIECES / 4, piece_range, &p);
  for (int64_t i = 0; i < count; i++) sum += sums[i];
  return sum;
}

void orr_k_scale(orr_view *x, double factor) {
  orr_k_binary_scalar(ORR_BIN_mul, x, factor, false, x);
}

/* A sum of squares tells for f32 and halves, whose squares a double holds; f64 is looked at. */
static void finite_row(const void *context, int64_t n, char *const *data,
                       const int64_t *stride) {
  bool *finite = *(bool *const *)context;
  const double *x = (const double *)(const void *)data[0];
  int64_t bad = 0;
  for (int64_t i = 0; i < n; i++) bad += x[i * stride[0]] - x[i * stride[0]] != 0;
  if (bad) *finite = false;
}

bool orr_k_all_finite(const orr_view *x) {
  bool finite = true, *out = &finite;
  if (x->dtype != ORR_F64) return isfinite(orr_k_sumsq(x));
  orr_loop_run(1, &x, INT64_MAX, finite_row, &out);
  return finite;
}
