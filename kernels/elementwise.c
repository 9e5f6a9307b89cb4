/* elementwise.c: elementwise kernels that are not one formula of one or two numbers.
 *
 * Invariant: as elementwise.h says. Values are computed in the compute type (loop.h).
 * To add one: a row function and one call of orr_loop_run.
 */
#include "vector.h"

#include "elementwise.h"

#include <string.h>

#include "loop.h"
#include "parallel.h"
#include "scalar.h"

/* ---- where: moves bits ------------------------------------------------------------------- */

#define WHERE(U)                                                                          \
  {                                                                                       \
    const U *a = (const U *)(const void *)data[2], *b = (const U *)(const void *)data[3]; \
    U *y = (U *)(void *)data[0];                                                          \
    if (stride[0] == 1 && stride[1] == 1 && stride[2] == 1 && stride[3] == 1) {           \
      ORR_SIMD                                                                            \
      for (int64_t i = 0; i < n; i++) {                                                   \
        U yes = a[i], no = b[i];                                                          \
        y[i] = c[i] ? yes : no;                                                           \
      }                                                                                   \
    } else {                                                                              \
      for (int64_t i = 0; i < n; i++) {                                                   \
        U yes = a[i * stride[2]], no = b[i * stride[3]];                                  \
        y[i * stride[0]] = c[i * stride[1]] ? yes : no;                                   \
      }                                                                                   \
    }                                                                                     \
  }                                                                                       \
  break;

/* Views: y, c, a, b. */
static void where_row(const void *context, int64_t n, char *const *data,
                      const int64_t *stride) {
  const uint8_t *c = (const uint8_t *)data[1];
  switch (*(const size_t *)context) {
    case 8: WHERE(uint64_t)
    case 4: WHERE(uint32_t)
    case 2: WHERE(uint16_t)
    default: WHERE(uint8_t)
  }
}

void orr_k_where(const orr_view *c, const orr_view *a, const orr_view *b, orr_view *y) {
  size_t size = orr_element_size(y->dtype);
  const orr_view *views[4] = {y, c, a, b};
  orr_loop_run(4, views, ORR_GRAIN_LIGHT, where_row, &size);
}

/* ---- fill -------------------------------------------------------------------------------- */

typedef struct filler {
  uint64_t bits;
  size_t size;
} filler;

#define FILL(U)                                                 \
  {                                                             \
    U *y = (U *)(void *)data[0], value = (U)f->bits;            \
    if (stride[0] == 1) {                                       \
      for (int64_t i = 0; i < n; i++) y[i] = value;             \
    } else {                                                    \
      for (int64_t i = 0; i < n; i++) y[i * stride[0]] = value; \
    }                                                           \
  }                                                             \
  break;

static void fill_row(const void *context, int64_t n, char *const *data, const int64_t *stride) {
  const filler *f = context;
  switch (f->size) {
    case 8: FILL(uint64_t)
    case 4: FILL(uint32_t)
    case 2: FILL(uint16_t)
    default: FILL(uint8_t)
  }
}

static void fill_bits(orr_view *y, uint64_t bits) {
  filler f = {.bits = bits, .size = orr_element_size(y->dtype)};
  const orr_view *views[1] = {y};
  orr_loop_run(1, views, 4 * ORR_GRAIN_LIGHT, fill_row, &f);
}

void orr_k_fill(orr_view *y, double value) {
  uint64_t bits = 0;
  switch (y->dtype) {
    case ORR_F64: memcpy(&bits, &value, sizeof value); break;
    case ORR_F32: bits = orr_bits_of_f32((float)value); break;
    case ORR_F16: bits = orr_f16_of_f32((float)value); break;
    case ORR_BF16: bits = orr_bf16_of_f32((float)value); break;
    case ORR_BOOL: bits = value != 0; break;
    default: bits = (uint64_t)(int64_t)value; break;
  }
  fill_bits(y, bits);
}

void orr_k_fill_i64(orr_view *y, int64_t value) {
  bool integer = y->dtype == ORR_I64 || y->dtype == ORR_I32 || y->dtype == ORR_U8;
  if (integer) {
    fill_bits(y, (uint64_t)value);
  } else {
    orr_k_fill(y, (double)value);
  }
}

/* ---- staged rows: a function over chunks in the compute type ----------------------------- */

typedef void chunk_fn(const void *numbers, int64_t n, const void *const *in, void *out);

/* `numbers` are the function's constants. Views: out, then inputs, all of one dtype. */
typedef struct staged {
  chunk_fn *run;
  const void *numbers;
  orr_dtype dtype;
  int n_in;
} staged;

static void staged_row(const void *context, int64_t n, char *const *data,
                       const int64_t *stride) {
  const staged *s = context;
  int64_t size = (int64_t)orr_element_size(s->dtype);
  orr_chunk buffer[3];
  for (int64_t i = 0; i < n; i += ORR_CHUNK) {
    int64_t m = n - i < ORR_CHUNK ? n - i : ORR_CHUNK;
    const void *in[2];
    for (int v = 0; v < s->n_in; v++) {
      const char *x = data[v + 1] + i * stride[v + 1] * size;
      in[v] = orr_load_row(s->dtype, x, stride[v + 1], m, &buffer[v]);
    }
    char *to = data[0] + i * stride[0] * size;
    void *out = orr_open_row(s->dtype, to, stride[0], &buffer[2]);
    s->run(s->numbers, m, in, out);
    orr_store_row(s->dtype, out, to, stride[0], m);
  }
}

/* A chunk function `name_S` of T: x and z are the inputs, p and q the constants. */
#define CHUNK(T, S, name, two, formula)                                                      \
  static void name##_##S(const void *numbers, int64_t n, const void *const *in, void *out) { \
    const T p = (T)((const double *)numbers)[0], q = (T)((const double *)numbers)[1];        \
    const T *xs = in[0], *zs = in[two];                                                      \
    T *ys = out;                                                                             \
    ORR_SIMD                                                                                 \
    for (int64_t i = 0; i < n; i++) {                                                        \
      T x = xs[i], z = zs[i];                                                                \
      (void)z, (void)q;                                                                      \
      ys[i] = (T)(formula);                                                                  \
    }                                                                                        \
  }
#define CHUNKS(T, S)                                         \
  CHUNK(T, S, clamp, 0, x<p ? p : x> q ? q : x)              \
  CHUNK(T, S, clamp_grad, 1, (x >= p) & (x <= q) ? z : (T)0) \
  CHUNK(T, S, scale, 0, p *x)                                \
  CHUNK(T, S, axpby, 1, p *x + q * z)

CHUNKS(double, f64)
CHUNKS(float, f32)
CHUNKS(int64_t, i64)
CHUNKS(int32_t, i32)
CHUNKS(uint8_t, u8)

#define BY_DTYPE(name)                                                                 \
  {                                                                                    \
    name##_f64, name##_f32, name##_f32, name##_f32, name##_i64, name##_i32, name##_u8, \
        name##_u8                                                                      \
  }

static void run_staged(chunk_fn *const *by_dtype, const double *numbers, int n_in,
                       const orr_view *x, const orr_view *z, orr_view *out) {
  staged s = {
      .run = by_dtype[out->dtype], .numbers = numbers, .dtype = out->dtype, .n_in = n_in};
  const orr_view *views[3] = {out, x, z};
  orr_loop_run(n_in + 1, views, ORR_GRAIN_LIGHT, staged_row, &s);
}

/* Bounds that an integer type cannot hold are moved to its ends. */
static void integer_bounds(orr_dtype dtype, double *bounds) {
  double lo, hi;
  switch (dtype) {
    case ORR_I64: lo = -0x1p63, hi = 0x1.fffffffffffffp62; break;
    case ORR_I32: lo = -2147483648.0, hi = 2147483647.0; break;
    case ORR_U8: lo = 0, hi = 255; break;
    case ORR_BOOL: lo = 0, hi = 1; break;
    default: return;
  }
  bounds[0] = bounds[0] > lo ? (bounds[0] < hi ? ceil(bounds[0]) : hi) : lo;
  bounds[1] = bounds[1] < hi ? (bounds[1] > lo ? floor(bounds[1]) : lo) : hi;
}

void orr_k_clamp(const orr_view *x, double lo, double hi, orr_view *y) {
  static chunk_fn *const by_dtype[ORR_N_DTYPES] = BY_DTYPE(clamp);
  double bounds[2] = {lo, hi};
  integer_bounds(y->dtype, bounds);
  run_staged(by_dtype, bounds, 1, x, x, y);
}

void orr_k_clamp_grad(const orr_view *x, double lo, double hi, const orr_view *g,
                      orr_view *gx) {
  static chunk_fn *const by_dtype[ORR_N_DTYPES] = BY_DTYPE(clamp_grad);
  double bounds[2] = {lo, hi};
  run_staged(by_dtype, bounds, 2, x, g, gx);
}

void orr_k_axpby(double alpha, const orr_view *x, double beta, orr_view *y) {
  static chunk_fn *const scale[ORR_N_DTYPES] = BY_DTYPE(scale);
  static chunk_fn *const axpby[ORR_N_DTYPES] = BY_DTYPE(axpby);
  double numbers[2] = {alpha, beta};
  if (beta == 0) {
    run_staged(scale, numbers, 1, x, x, y);
  } else {
    run_staged(axpby, numbers, 2, x, y, y);
  }
}

/* ---- arange, eye, triangles -------------------------------------------------------------- */

void orr_k_arange(orr_view *y, double start, double step, int64_t first) {
  int64_t n = orr_view_numel(y), stride = y->ndim > 0 ? y->stride[0] : 1;
  int64_t size = (int64_t)orr_element_size(y->dtype);
  orr_dtype compute = orr_compute_dtype(y->dtype);
  for (int64_t i = 0; i < n; i += ORR_CHUNK) {
    int64_t m = n - i < ORR_CHUNK ? n - i : ORR_CHUNK;
    orr_chunk row;
    for (int64_t j = 0; j < m; j++) {
      double value = start + step * (double)(first + i + j);
      switch (compute) {
        case ORR_F64: ((double *)(void *)row.bytes)[j] = value; break;
        case ORR_F32: ((float *)(void *)row.bytes)[j] = (float)value; break;
        case ORR_I64: ((int64_t *)(void *)row.bytes)[j] = (int64_t)value; break;
        case ORR_I32: ((int32_t *)(void *)row.bytes)[j] = (int32_t)(int64_t)value; break;
        default: ((uint8_t *)row.bytes)[j] = (uint8_t)(int64_t)value; break;
      }
    }
    orr_store_row(y->dtype, row.bytes, (char *)y->data + i * stride * size, stride, m);
  }
}

void orr_k_eye(orr_view *y, int64_t row0, int64_t col0) {
  orr_k_fill(y, 0);
  int64_t size = (int64_t)orr_element_size(y->dtype);
  for (int64_t i = 0; i < y->shape[0]; i++) {
    int64_t j = i + row0 - col0;
    if (j < 0 || j >= y->shape[1]) continue;
    orr_view one = {.data = (char *)y->data + (i * y->stride[0] + j * y->stride[1]) * size,
                    .dtype = y->dtype};
    orr_k_fill(&one, 1);
  }
}

typedef struct triangle {
  size_t size;
  int64_t rows, cols, x_stride[2], y_stride[2];
  int64_t offset; /* column - row of the diagonal, in the shard's own numbers */
  bool lower;
} triangle;

static void zero_or_copy(const triangle *t, const char *x, char *y, int64_t from, int64_t to,
                         bool keep) {
  for (int64_t j = from; j < to; j++) {
    char *at = y + j * t->y_stride[1] * (int64_t)t->size;
    if (keep) {
      memcpy(at, x + j * t->x_stride[1] * (int64_t)t->size, t->size);
    } else {
      memset(at, 0, t->size);
    }
  }
}

static void triangle_row(const void *context, int64_t n, char *const *data,
                         const int64_t *stride) {
  const triangle *t = context;
  int64_t size = (int64_t)t->size;
  for (int64_t b = 0; b < n; b++) {
    for (int64_t i = 0; i < t->rows; i++) {
      const char *x = data[1] + (b * stride[1] + i * t->x_stride[0]) * size;
      char *y = data[0] + (b * stride[0] + i * t->y_stride[0]) * size;
      int64_t cut = i + t->offset + (t->lower ? 1 : 0);
      cut = cut < 0 ? 0 : cut > t->cols ? t->cols : cut;
      if (x == y) {
        zero_or_copy(t, x, y, t->lower ? cut : 0, t->lower ? t->cols : cut, false);
      } else {
        zero_or_copy(t, x, y, 0, cut, t->lower);
        zero_or_copy(t, x, y, cut, t->cols, !t->lower);
      }
    }
  }
}

static void run_triangle(const orr_view *x, orr_view *y, int64_t offset, bool lower) {
  int r = y->ndim - 2, c = y->ndim - 1;
  triangle t = {.size = orr_element_size(y->dtype),
                .rows = y->shape[r],
                .cols = y->shape[c],
                .x_stride = {x->stride[r], x->stride[c]},
                .y_stride = {y->stride[r], y->stride[c]},
                .offset = offset,
                .lower = lower};
  orr_view y_batch = *y, x_batch = *x;
  y_batch.ndim -= 2;
  x_batch.ndim -= 2;
  const orr_view *views[2] = {&y_batch, &x_batch};
  int64_t grain = ORR_GRAIN_LIGHT / (t.rows * t.cols + 1) + 1;
  orr_loop_run(2, views, grain, triangle_row, &t);
}

void orr_k_tril(const orr_view *x, orr_view *y, int64_t diagonal, int64_t row0, int64_t col0) {
  run_triangle(x, y, diagonal + row0 - col0, true);
}

void orr_k_triu(const orr_view *x, orr_view *y, int64_t diagonal, int64_t row0, int64_t col0) {
  run_triangle(x, y, diagonal + row0 - col0, false);
}
