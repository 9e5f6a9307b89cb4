/* copy.c: copies and casts, sums into place, and sums of many.
 *
 * Invariant: a copy of one dtype moves bits and is exact. A cast goes through the compute types
 * of both ends, so f64 becomes f16 by way of f32.
 * To add a dtype: a row in CONVERSIONS if it computes in itself, and what half.h and loop.c
 * ask.
 */
#include "vector.h"

#include "copy.h"

#include <string.h>

#include "loop.h"
#include "parallel.h"
#include "scalar.h"

/* ---- casts ------------------------------------------------------------------------------- */

typedef void convert_fn(int64_t n, const void *x, void *y);

#define CONVERT(TX, X, TY, Y, value)                             \
  static void X##_to_##Y(int64_t n, const void *in, void *out) { \
    const TX *from = in;                                         \
    TY *to = out;                                                \
    for (int64_t i = 0; i < n; i++) {                            \
      TX x = from[i];                                            \
      to[i] = value;                                             \
    }                                                            \
  }
#define CONVERSIONS(TX, X)                         \
  CONVERT(TX, X, double, f64, (double)x)           \
  CONVERT(TX, X, float, f32, (float)x)             \
  CONVERT(TX, X, int64_t, i64, (int64_t)x)         \
  CONVERT(TX, X, int32_t, i32, (int32_t)x)         \
  CONVERT(TX, X, uint8_t, u8, (uint8_t)(int64_t)x) \
  CONVERT(TX, X, uint8_t, bool, x != 0)

CONVERSIONS(double, f64)
CONVERSIONS(float, f32)
CONVERSIONS(int64_t, i64)
CONVERSIONS(int32_t, i32)
CONVERSIONS(uint8_t, u8)

#define TARGETS(X)                                                           \
  {                                                                          \
    [ORR_F64] = X##_to_f64, [ORR_F32] = X##_to_f32, [ORR_F16] = X##_to_f32,  \
    [ORR_BF16] = X##_to_f32, [ORR_I64] = X##_to_i64, [ORR_I32] = X##_to_i32, \
    [ORR_U8] = X##_to_u8, [ORR_BOOL] = X##_to_bool                           \
  }

/* By the dtype of either end. */
static convert_fn *const converters[ORR_N_DTYPES][ORR_N_DTYPES] = {
    [ORR_F64] = TARGETS(f64),  [ORR_F32] = TARGETS(f32), [ORR_F16] = TARGETS(f32),
    [ORR_BF16] = TARGETS(f32), [ORR_I64] = TARGETS(i64), [ORR_I32] = TARGETS(i32),
    [ORR_U8] = TARGETS(u8),    [ORR_BOOL] = TARGETS(u8)};

typedef struct cast {
  convert_fn *convert;
  orr_dtype x, y;
} cast;

/* Views: y, x. */
static void cast_row(const void *context, int64_t n, char *const *data, const int64_t *stride) {
  const cast *c = context;
  int64_t x_size = (int64_t)orr_element_size(c->x), y_size = (int64_t)orr_element_size(c->y);
  orr_chunk x_buffer, y_buffer;
  for (int64_t i = 0; i < n; i += ORR_CHUNK) {
    int64_t m = n - i < ORR_CHUNK ? n - i : ORR_CHUNK;
    char *to = data[0] + i * stride[0] * y_size;
    const void *x =
        orr_load_row(c->x, data[1] + i * stride[1] * x_size, stride[1], m, &x_buffer);
    void *y = orr_open_row(c->y, to, stride[0], &y_buffer);
    c->convert(m, x, y);
    orr_store_row(c->y, y, to, stride[0], m);
  }
}

/* ---- copies of one dtype ----------------------------------------------------------------- */

#define STRIDED(U)                                                         \
  {                                                                        \
    const U *x = (const U *)(const void *)data[1];                         \
    U *y = (U *)(void *)data[0];                                           \
    if (stride[1] == 0 && stride[0] == 1) {                                \
      U value = x[0];                                                      \
      for (int64_t i = 0; i < n; i++) y[i] = value;                        \
    } else {                                                               \
      for (int64_t i = 0; i < n; i++) y[i * stride[0]] = x[i * stride[1]]; \
    }                                                                      \
  }                                                                        \
  break;

static void copy_row(const void *context, int64_t n, char *const *data, const int64_t *stride) {
  size_t size = *(const size_t *)context;
  if (stride[0] == 1 && stride[1] == 1) {
    if (data[0] != data[1]) memcpy(data[0], data[1], (size_t)n * size);
    return;
  }
  switch (size) {
    case 8: STRIDED(uint64_t)
    case 4: STRIDED(uint32_t)
    case 2: STRIDED(uint16_t)
    default: STRIDED(uint8_t)
  }
}

/* A matrix whose rows lie along x and columns along y, copied by tiles that fit the first
 * cache. */
typedef struct transpose {
  const char *x;
  char *y;
  size_t size;
  int64_t rows, cols; /* of y; y's columns are contiguous, x's rows are */
  int64_t x_stride, y_stride;
} transpose;

#define TILE 16

#define TRANSPOSE(U)                                                                   \
  for (int64_t c = 0; c < t->cols; c += TILE) {                                        \
    int64_t n = t->cols - c < TILE ? t->cols - c : TILE;                               \
    const U *x = (const U *)(const void *)t->x + r + c * t->x_stride;                  \
    U *y = (U *)(void *)t->y + r * t->y_stride + c;                                    \
    for (int64_t i = 0; i < m; i++) {                                                  \
      for (int64_t j = 0; j < n; j++) y[i * t->y_stride + j] = x[i + j * t->x_stride]; \
    }                                                                                  \
  }                                                                                    \
  break;

static void transpose_range(const void *context, int64_t begin, int64_t end) {
  const transpose *t = context;
  for (int64_t r = begin; r < end; r += TILE) {
    int64_t m = end - r < TILE ? end - r : TILE;
    switch (t->size) {
      case 8: TRANSPOSE(uint64_t)
      case 4: TRANSPOSE(uint32_t)
      case 2: TRANSPOSE(uint16_t)
      default: TRANSPOSE(uint8_t)
    }
  }
}

/* The dimension along which a view is contiguous, or -1. */
static int dense_dim(const orr_view *v) {
  for (int d = 0; d < v->ndim; d++) {
    if (v->stride[d] == 1 && v->shape[d] > 1) return d;
  }
  return -1;
}

/* Takes dimension d out of a view. */
static orr_view without(const orr_view *v, int d) {
  orr_view rest = *v;
  rest.ndim--;
  for (int e = d; e < rest.ndim; e++) {
    rest.shape[e] = rest.shape[e + 1];
    rest.stride[e] = rest.stride[e + 1];
  }
  return rest;
}

/* Context: the matrix of one step; a row is a run of steps over the other dimensions. */
static void transpose_row(const void *context, int64_t n, char *const *data,
                          const int64_t *stride) {
  transpose t = *(const transpose *)context;
  for (int64_t i = 0; i < n; i++) {
    t.y = data[0] + i * stride[0] * (int64_t)t.size;
    t.x = data[1] + i * stride[1] * (int64_t)t.size;
    int64_t grain = ORR_GRAIN_LIGHT / (t.cols + 1) + TILE;
    orr_parallel(t.rows, grain, transpose_range, &t);
  }
}

static bool copy_transposed(const orr_view *x, orr_view *y, size_t size) {
  int row = dense_dim(x), col = dense_dim(y);
  if (row < 0 || col < 0 || row == col || x->shape[row] < 4 || x->shape[col] < 4) return false;
  if (x->stride[col] == 0) return false;
  transpose t = {.size = size,
                 .rows = x->shape[row],
                 .cols = x->shape[col],
                 .x_stride = x->stride[col],
                 .y_stride = y->stride[row]};
  int high = row > col ? row : col, low = row > col ? col : row;
  orr_view y_most = without(y, high), x_most = without(x, high);
  orr_view y_rest = without(&y_most, low), x_rest = without(&x_most, low);
  const orr_view *views[2] = {&y_rest, &x_rest};
  int64_t grain = ORR_GRAIN_LIGHT / (t.rows * t.cols) + 1;
  orr_loop_run(2, views, grain, transpose_row, &t);
  return true;
}

void orr_k_copy(const orr_view *x, orr_view *y) {
  const orr_view *views[2] = {y, x};
  if (x->dtype != y->dtype) {
    cast c = {.convert = converters[x->dtype][y->dtype], .x = x->dtype, .y = y->dtype};
    orr_loop_run(2, views, ORR_GRAIN_LIGHT, cast_row, &c);
    return;
  }
  size_t size = orr_element_size(x->dtype);
  if (copy_transposed(x, y, size)) return;
  orr_loop_run(2, views, 4 * ORR_GRAIN_LIGHT, copy_row, &size);
}

/* ---- sums of many ------------------------------------------------------------------------ */

typedef void combine_fn(int64_t n, const void *x, void *sum);

#define LARGER(a, b) ((a) != (a) ? (a) : (b) > (a) || (b) != (b) ? (b) : (a))
#define SMALLER(a, b) ((a) != (a) ? (a) : (b) < (a) || (b) != (b) ? (b) : (a))
#define PLUS(a, b) ((a) + (b))

#define COMBINE(T, S, name, formula)                               \
  static void name##_##S(int64_t n, const void *in, void *sum) {   \
    const T *x = in;                                               \
    T *y = sum;                                                    \
    ORR_SIMD                                                       \
    for (int64_t i = 0; i < n; i++) y[i] = (T)formula(y[i], x[i]); \
  }
#define COMBINERS(T, S)         \
  COMBINE(T, S, plus, PLUS)     \
  COMBINE(T, S, larger, LARGER) \
  COMBINE(T, S, smaller, SMALLER)

COMBINERS(double, f64)
COMBINERS(float, f32)
COMBINERS(int64_t, i64)
COMBINERS(int32_t, i32)
COMBINERS(uint8_t, u8)

static combine_fn *find_combine(orr_dtype compute, int kind) {
  static combine_fn *const table[5][3] = {{plus_f64, larger_f64, smaller_f64},
                                          {plus_f32, larger_f32, smaller_f32},
                                          {plus_i64, larger_i64, smaller_i64},
                                          {plus_i32, larger_i32, smaller_i32},
                                          {plus_u8, larger_u8, smaller_u8}};
  switch (compute) {
    case ORR_F64: return table[0][kind];
    case ORR_F32: return table[1][kind];
    case ORR_I64: return table[2][kind];
    case ORR_I32: return table[3][kind];
    default: return table[4][kind];
  }
}

typedef struct many {
  combine_fn *combine;
  orr_dtype dtype;
  int n;
  const orr_view *const *xs; /* for runs of contiguous memory */
  char *y;
} many;

/* A chunk is summed in the first cache and written once, so y may be any of the inputs. */
static void combine_term(const many *c, bool first, const void *x, int64_t stride, int64_t n,
                         orr_chunk *sum) {
  orr_chunk buffer;
  const void *row = orr_load_row(c->dtype, x, stride, n, &buffer);
  if (first) {
    memcpy(sum->bytes, row, (size_t)n * orr_element_size(orr_compute_dtype(c->dtype)));
  } else {
    c->combine(n, row, sum->bytes);
  }
}

/* Two f32 terms need no chunk; the loop is the memory's. */
static bool combine_two(const many *c, int64_t begin, int64_t end) {
  if (c->n != 2 || c->dtype != ORR_F32 || c->combine != plus_f32) return false;
  const float *a = c->xs[0]->data, *b = c->xs[1]->data;
  float *y = (float *)(void *)c->y;
  ORR_SIMD
  for (int64_t i = begin; i < end; i++) y[i] = a[i] + b[i];
  return true;
}

static void combine_range(const void *context, int64_t begin, int64_t end) {
  const many *c = context;
  int64_t size = (int64_t)orr_element_size(c->dtype);
  if (combine_two(c, begin, end)) return;
  orr_chunk sum;
  for (int64_t at = begin; at < end; at += ORR_CHUNK) {
    int64_t n = end - at < ORR_CHUNK ? end - at : ORR_CHUNK;
    for (int i = 0; i < c->n; i++) {
      const char *x = (const char *)c->xs[i]->data + at * size;
      combine_term(c, i == 0, x, 1, n, &sum);
    }
    orr_store_row(c->dtype, sum.bytes, c->y + at * size, 1, n);
  }
}

/* Views: y, xs. */
static void combine_row(const void *context, int64_t n, char *const *data,
                        const int64_t *stride) {
  const many *c = context;
  int64_t size = (int64_t)orr_element_size(c->dtype);
  for (int64_t at = 0; at < n; at += ORR_CHUNK) {
    int64_t m = n - at < ORR_CHUNK ? n - at : ORR_CHUNK;
    orr_chunk sum;
    for (int i = 0; i < c->n; i++) {
      const char *x = data[i + 1] + at * stride[i + 1] * size;
      combine_term(c, i == 0, x, stride[i + 1], m, &sum);
    }
    orr_store_row(c->dtype, sum.bytes, data[0] + at * stride[0] * size, stride[0], m);
  }
}

/* Groups of as many views as a walk takes. An input that is y must be read before y is written.
 */
static void combine_strided(many *c, const orr_view *const *xs, int n, orr_view *y) {
  const orr_view *views[ORR_LOOP_VIEWS] = {y};
  const int most = ORR_LOOP_VIEWS - 1;
  int early = -1;
  for (int i = most; i < n; i++) {
    if (xs[i]->data == y->data) early = i;
  }
  bool written = false;
  for (int taken = 0; taken < n;) {
    c->n = 0;
    if (written) views[++c->n] = y;
    if (!written && early >= 0) views[++c->n] = xs[early];
    for (; taken < n && c->n < most; taken++) {
      if (taken != early) views[++c->n] = xs[taken];
    }
    orr_loop_run(c->n + 1, views, ORR_GRAIN_LIGHT, combine_row, c);
    written = true;
  }
}

void orr_k_reduce_many(int kind, const orr_view *const *xs, int n, orr_view *y) {
  many c = {.combine = find_combine(orr_compute_dtype(y->dtype), kind),
            .dtype = y->dtype,
            .n = n,
            .xs = xs,
            .y = y->data};
  bool contiguous = orr_view_contiguous(y);
  for (int i = 0; i < n; i++) contiguous = contiguous && orr_view_contiguous(xs[i]);
  if (contiguous) {
    orr_parallel(orr_view_numel(y), ORR_GRAIN_LIGHT, combine_range, &c);
  } else {
    combine_strided(&c, xs, n, y);
  }
}

void orr_k_accumulate(const orr_view *x, orr_view *y) {
  const orr_view *xs[2] = {y, x};
  orr_k_reduce_many(ORR_MANY_SUM, xs, 2, y);
}
