/* binary.c: functions of two numbers, forward and gradient, from the rows of binary.def.
 *
 * Invariant: as in unary.c. A scalar operand is a view that repeats one element of the compute
 * type.
 * To add a function: a row in binary.def, nothing here.
 */
#include "vector.h"

#include <string.h>

#include "elementwise.h"
#include "loop.h"
#include "parallel.h"
#include "scalar.h"

#define ORR_NAME_(a, b) a##b
#define ORR_NAME(a, b) ORR_NAME_(a, b)

typedef void row_fn(int64_t n, const void *a, int64_t step_a, const void *b, int64_t step_b,
                    void *y);
typedef void grad_fn(int64_t n, const void *const *a_b_y_g, void *out);

const char *const orr_binary_name[ORR_N_BINARY] = {
#define ORR_BINARY(name, formula, da, db, flags) #name,
#include "binary.def"
};

const unsigned short orr_binary_flags[ORR_N_BINARY] = {
#define ORR_BINARY(name, formula, da, db, flags) flags,
#include "binary.def"
};

#define T double
#define S f64
#define ROWS_OF_FLOAT 1
#include "binary_rows.h"

#define T float
#define S f32
#define ROWS_OF_FLOAT 1
#include "binary_rows.h"

#define T int64_t
#define S i64
#define ROWS_OF_FLOAT 0
#include "binary_rows.h"

#define T int32_t
#define S i32
#define ROWS_OF_FLOAT 0
#include "binary_rows.h"

#define T uint8_t
#define S u8
#define ROWS_OF_FLOAT 0
#include "binary_rows.h"

static row_fn *find_row(orr_dtype compute, int op) {
  switch (compute) {
    case ORR_F64: return binary_rows_f64[op];
    case ORR_F32: return binary_rows_f32[op];
    case ORR_I64: return binary_rows_i64[op];
    case ORR_I32: return binary_rows_i32[op];
    default: return binary_rows_u8[op];
  }
}

static int64_t grain_of(int op) {
  bool slow = op == ORR_BIN_pow || op == ORR_BIN_atan2 || op == ORR_BIN_fmod;
  return slow || op == ORR_BIN_remainder ? ORR_GRAIN_HEAVY : ORR_GRAIN_LIGHT;
}

/* ---- forward ----------------------------------------------------------------------------- */

typedef struct forward {
  row_fn *row;
  orr_dtype a, b, y;
  bool direct; /* all three are stored in their compute types */
} forward;

static const void *load_operand(orr_dtype dtype, const char *data, int64_t stride, int64_t i,
                                int64_t n, orr_chunk *buffer) {
  data += i * stride * (int64_t)orr_element_size(dtype);
  return orr_load_row(dtype, data, stride, stride == 0 ? 1 : n, buffer);
}

static void forward_row(const void *context, int64_t n, char *const *data,
                        const int64_t *stride) {
  const forward *f = context;
  if (f->direct && (stride[0] == 1 || n == 1) && (uint64_t)stride[1] <= 1 &&
      (uint64_t)stride[2] <= 1) {
    f->row(n, data[1], stride[1], data[2], stride[2], data[0]);
    return;
  }
  orr_chunk a_buffer, b_buffer, y_buffer;
  for (int64_t i = 0; i < n; i += ORR_CHUNK) {
    int64_t m = n - i < ORR_CHUNK ? n - i : ORR_CHUNK;
    const void *a = load_operand(f->a, data[1], stride[1], i, m, &a_buffer);
    const void *b = load_operand(f->b, data[2], stride[2], i, m, &b_buffer);
    char *to = data[0] + i * stride[0] * (int64_t)orr_element_size(f->y);
    void *y = orr_open_row(f->y, to, stride[0], &y_buffer);
    f->row(m, a, stride[1] != 0, b, stride[2] != 0, y);
    orr_store_row(f->y, y, to, stride[0], m);
  }
}

static void run_forward(int op, orr_dtype compute, const orr_view *a, const orr_view *b,
                        orr_view *y) {
  bool test = orr_binary_flags[op] & ORR_BOOL_OUT;
  forward f = {.row = find_row(compute, op), .a = a->dtype, .b = b->dtype, .y = y->dtype};
  f.direct = orr_element_size(a->dtype) == orr_element_size(compute) &&
             orr_element_size(b->dtype) == orr_element_size(compute) &&
             (test || y->dtype == compute);
  const orr_view *views[3] = {y, a, b};
  orr_loop_run(3, views, grain_of(op), forward_row, &f);
}

void orr_k_binary(int op, const orr_view *a, const orr_view *b, orr_view *y) {
  run_forward(op, orr_compute_dtype(a->dtype), a, b, y);
}

void orr_k_binary_scalar(int op, const orr_view *a, double s, bool scalar_first, orr_view *y) {
  orr_dtype compute = orr_compute_dtype(a->dtype);
  union {
    double f64;
    float f32;
    int64_t i64;
    int32_t i32;
    uint8_t u8;
  } value = {.f64 = s};
  if (compute == ORR_F32) value.f32 = (float)s;
  if (compute == ORR_I64) value.i64 = (int64_t)s;
  if (compute == ORR_I32) value.i32 = (int32_t)(int64_t)s;
  if (compute == ORR_U8) value.u8 = (uint8_t)(int64_t)s;
  if (a->dtype == ORR_BOOL) value.u8 = s != 0;
  orr_view repeated = *a;
  repeated.data = &value;
  repeated.dtype = compute;
  memset(repeated.stride, 0, sizeof repeated.stride);
  if (scalar_first) {
    run_forward(op, compute, &repeated, a, y);
  } else {
    run_forward(op, compute, a, &repeated, y);
  }
}

/* ---- gradient ---------------------------------------------------------------------------- */

typedef struct backward {
  grad_fn *row;
  orr_dtype dtype;
} backward;

/* Views: out, a, b, y, g. */
static void backward_row(const void *context, int64_t n, char *const *data,
                         const int64_t *stride) {
  const backward *b = context;
  int64_t size = (int64_t)orr_element_size(b->dtype);
  orr_chunk buffer[5];
  for (int64_t i = 0; i < n; i += ORR_CHUNK) {
    int64_t m = n - i < ORR_CHUNK ? n - i : ORR_CHUNK;
    const void *in[4];
    for (int v = 0; v < 4; v++) {
      int64_t step = stride[v + 1];
      in[v] = orr_load_row(b->dtype, data[v + 1] + i * step * size, step, m, &buffer[v]);
    }
    char *to = data[0] + i * stride[0] * size;
    void *out = orr_open_row(b->dtype, to, stride[0], &buffer[4]);
    b->row(m, in, out);
    orr_store_row(b->dtype, out, to, stride[0], m);
  }
}

void orr_k_binary_grad(int op, int which, const orr_view *a, const orr_view *b,
                       const orr_view *y, const orr_view *g, orr_view *out) {
  int flags = orr_binary_flags[op];
  backward c = {.dtype = g->dtype};
  c.row = g->dtype == ORR_F64 ? binary_grads_f64[op][which] : binary_grads_f32[op][which];
  const orr_view *views[5] = {out, flags & ORR_GRAD_A ? a : g, flags & ORR_GRAD_B ? b : g,
                              flags & ORR_GRAD_Y ? y : g, g};
  orr_loop_run(5, views, grain_of(op), backward_row, &c);
}
