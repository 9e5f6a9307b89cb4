/* unary.c: functions of one number, forward and gradient, from the rows of unary.def.
 *
 * Invariant: every row of the table exists for every dtype its flags allow; a NULL entry is
 * never reached, since dispatch casts integers for float-only functions.
 * To add a function: a row in unary.def, nothing here.
 */
#include "vector.h"

#include "elementwise.h"
#include "loop.h"
#include "parallel.h"
#include "scalar.h"

#define ORR_NAME_(a, b) a##b
#define ORR_NAME(a, b) ORR_NAME_(a, b)

typedef void row_fn(int64_t n, const void *x, void *y);
typedef void grad_fn(int64_t n, const void *x, const void *y, const void *g, void *gx);

const char *const orr_unary_name[ORR_N_UNARY] = {
#define ORR_UNARY(name, formula, derivative, flags) #name,
#include "unary.def"
};

const unsigned short orr_unary_flags[ORR_N_UNARY] = {
#define ORR_UNARY(name, formula, derivative, flags) flags,
#include "unary.def"
};

#define T double
#define S f64
#define ROWS_OF_FLOAT 1
#include "unary_rows.h"

#define T float
#define S f32
#define ROWS_OF_FLOAT 1
#include "unary_rows.h"

#define T int64_t
#define S i64
#define ROWS_OF_FLOAT 0
#include "unary_rows.h"

#define T int32_t
#define S i32
#define ROWS_OF_FLOAT 0
#include "unary_rows.h"

#define T uint8_t
#define S u8
#define ROWS_OF_FLOAT 0
#include "unary_rows.h"

static row_fn *find_row(orr_dtype compute, int op) {
  switch (compute) {
    case ORR_F64: return unary_rows_f64[op];
    case ORR_F32: return unary_rows_f32[op];
    case ORR_I64: return unary_rows_i64[op];
    case ORR_I32: return unary_rows_i32[op];
    default: return unary_rows_u8[op];
  }
}

/* ---- sine and cosine of large f32 arguments, which the vector form does not reduce ------- */

static void sin_far(int64_t n, const void *from, void *to) {
  const float *x = from;
  float *y = to;
  for (int64_t i = 0; i < n; i++) y[i] = sinf(x[i]);
}

static void cos_far(int64_t n, const void *from, void *to) {
  const float *x = from;
  float *y = to;
  for (int64_t i = 0; i < n; i++) y[i] = cosf(x[i]);
}

static void sin_grad_far(int64_t n, const void *x, const void *y, const void *g, void *gx) {
  (void)y;
  for (int64_t i = 0; i < n; i++) {
    ((float *)gx)[i] = ((const float *)g)[i] * cosf(((const float *)x)[i]);
  }
}

static void cos_grad_far(int64_t n, const void *x, const void *y, const void *g, void *gx) {
  (void)y;
  for (int64_t i = 0; i < n; i++) {
    ((float *)gx)[i] = -((const float *)g)[i] * sinf(((const float *)x)[i]);
  }
}

static bool some_far(int64_t n, const void *from) {
  const float *x = from;
  uint32_t largest = 0, limit = orr_bits_of_f32(ORR_TRIG_LIMIT);
  for (int64_t i = 0; i < n; i++) {
    uint32_t u = orr_bits_of_f32(x[i]) & 0x7fffffffu;
    largest = u > largest ? u : largest;
  }
  return largest >= limit;
}

/* ---- forward ----------------------------------------------------------------------------- */

typedef struct forward {
  row_fn *row, *far; /* far: NULL, or for rows with some_far */
  orr_dtype x, y;
  bool direct; /* x and y are stored in their compute types */
} forward;

static void forward_row(const void *context, int64_t n, char *const *data,
                        const int64_t *stride) {
  const forward *f = context;
  if (f->direct && !f->far && ((stride[0] == 1 && stride[1] == 1) || n == 1)) {
    f->row(n, data[1], data[0]);
    return;
  }
  orr_chunk x_buffer, y_buffer;
  size_t x_size = orr_element_size(f->x), y_size = orr_element_size(f->y);
  for (int64_t i = 0; i < n; i += ORR_CHUNK) {
    int64_t m = n - i < ORR_CHUNK ? n - i : ORR_CHUNK;
    char *to = data[0] + i * stride[0] * (int64_t)y_size;
    const void *x =
        orr_load_row(f->x, data[1] + i * stride[1] * (int64_t)x_size, stride[1], m, &x_buffer);
    void *y = orr_open_row(f->y, to, stride[0], &y_buffer);
    (f->far && some_far(m, x) ? f->far : f->row)(m, x, y);
    orr_store_row(f->y, y, to, stride[0], m);
  }
}

void orr_k_unary(int op, const orr_view *x, orr_view *y) {
  orr_dtype compute = orr_compute_dtype(x->dtype);
  bool test = orr_unary_flags[op] & ORR_BOOL_OUT;
  forward f = {.row = find_row(compute, op), .x = x->dtype, .y = y->dtype};
  f.direct = compute == x->dtype && (test || compute == y->dtype);
  if (x->dtype == ORR_BOOL) f.direct = test;
  if (compute == ORR_F32 && op == ORR_UN_sin) f.far = sin_far;
  if (compute == ORR_F32 && op == ORR_UN_cos) f.far = cos_far;
  bool light = orr_unary_flags[op] & ORR_INT_OK;
  const orr_view *views[2] = {y, x};
  orr_loop_run(2, views, light ? ORR_GRAIN_LIGHT : ORR_GRAIN_HEAVY, forward_row, &f);
}

/* ---- gradient ---------------------------------------------------------------------------- */

typedef struct backward {
  grad_fn *row, *far;
  orr_dtype dtype;
} backward;

/* Views: gx, x, y, g. */
static void backward_row(const void *context, int64_t n, char *const *data,
                         const int64_t *stride) {
  const backward *b = context;
  int64_t size = (int64_t)orr_element_size(b->dtype);
  bool tight = stride[0] == 1 && stride[1] == 1 && stride[2] == 1 && stride[3] == 1;
  if (!b->far && (tight || n == 1) && orr_compute_dtype(b->dtype) == b->dtype) {
    b->row(n, data[1], data[2], data[3], data[0]);
    return;
  }
  orr_chunk buffer[4];
  for (int64_t i = 0; i < n; i += ORR_CHUNK) {
    int64_t m = n - i < ORR_CHUNK ? n - i : ORR_CHUNK;
    const void *in[4];
    for (int v = 1; v < 4; v++) {
      in[v] = orr_load_row(b->dtype, data[v] + i * stride[v] * size, stride[v], m, &buffer[v]);
    }
    char *to = data[0] + i * stride[0] * size;
    void *gx = orr_open_row(b->dtype, to, stride[0], &buffer[0]);
    (b->far && some_far(m, in[1]) ? b->far : b->row)(m, in[1], in[2], in[3], gx);
    orr_store_row(b->dtype, gx, to, stride[0], m);
  }
}

void orr_k_unary_grad(int op, const orr_view *x, const orr_view *y, const orr_view *g,
                      orr_view *gx) {
  bool f64 = g->dtype == ORR_F64;
  backward b = {.row = f64 ? unary_grads_f64[op] : unary_grads_f32[op], .dtype = g->dtype};
  if (!f64 && op == ORR_UN_sin) b.far = sin_grad_far;
  if (!f64 && op == ORR_UN_cos) b.far = cos_grad_far;
  bool reads_x = orr_unary_flags[op] & ORR_GRAD_X, reads_y = orr_unary_flags[op] & ORR_GRAD_Y;
  const orr_view *views[4] = {gx, reads_x ? x : g, reads_y ? y : g, g};
  orr_loop_run(4, views, ORR_GRAIN_HEAVY, backward_row, &b);
}
