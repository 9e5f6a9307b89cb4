/* chunk.c: loops over views and chunks as numbers (chunk.h).
 *
 * Invariant: nothing here depends on what is computed; all loops are serial.
 * To add an element type: orr_k_size, and the two tables of chunk_body.h.
 */
#include "chunk.h"

#include "half.h"

static inline uint16_t to_bf16(double x) { return orr_bf16_of_f32((float)x); }
static inline uint16_t to_f16(double x) { return orr_f16_of_f32((float)x); }
static inline int64_t to_i64_i64(int64_t x) { return x; }

static inline int32_t to_i32_i64(int64_t x) {
  return (int32_t)(x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x);
}

static inline uint8_t to_u8_i64(int64_t x) { return (uint8_t)(x > 255 ? 255 : x < 0 ? 0 : x); }

static inline int64_t to_i64_f64(double x) {
  if (x != x) return 0;
  return x >= 9223372036854775808.0   ? INT64_MAX
         : x < -9223372036854775808.0 ? INT64_MIN
                                      : (int64_t)x;
}

static inline int32_t to_i32_f64(double x) { return to_i32_i64(to_i64_f64(x)); }
static inline uint8_t to_u8_f64(double x) { return to_u8_i64(to_i64_f64(x)); }
static inline int64_t to_i64_f32(float x) { return to_i64_f64(x); }
static inline int32_t to_i32_f32(float x) { return to_i32_f64(x); }
static inline uint8_t to_u8_f32(float x) { return to_u8_f64(x); }

#define REAL float
#define NATIVE ORR_F32
#define FN(name) name##_f32
#include "chunk_body.h"
#undef REAL
#undef NATIVE
#undef FN

#define REAL double
#define NATIVE ORR_F64
#define FN(name) name##_f64
#include "chunk_body.h"
#undef REAL
#undef NATIVE
#undef FN

#define REAL int64_t
#define NATIVE ORR_I64
#define FN(name) name##_i64
#include "chunk_body.h"
#undef REAL
#undef NATIVE
#undef FN

size_t orr_k_size(orr_dtype t) {
  static const unsigned char size[ORR_N_DTYPES] = {8, 4, 2, 2, 8, 4, 1, 1};
  return size[t];
}

int64_t orr_k_count(const orr_view *v) {
  int64_t n = 1;
  for (int d = 0; d < v->ndim; d++) n *= v->shape[d];
  return n;
}

orr_view orr_k_keepdim(const orr_view *v, int dim, int ndim) {
  orr_view k = *v;
  if (v->ndim >= ndim) return k;
  for (int d = ndim - 1; d > dim; d--) {
    k.shape[d] = v->shape[d - 1];
    k.stride[d] = v->stride[d - 1];
  }
  k.shape[dim] = 1;
  k.stride[dim] = 0;
  k.ndim = ndim;
  return k;
}

void orr_k_blame(orr_fault *fault, int64_t position, int64_t value) {
  if (fault == NULL) return;
#pragma omp critical(orr_k_blame)
  if (fault->index == 0 || position < fault->index) {
    fault->index = position;
    fault->value = value;
  }
}

static int64_t magnitude(int64_t s) { return s < 0 ? -s : s; }

/* Inserts dimension d of the views so that the first view's strides fall. */
static void insert(orr_loop *l, int64_t size, const int64_t *stride, int nviews) {
  int at = l->ndim++;
  while (at > 0 && magnitude(l->stride[0][at - 1]) < magnitude(stride[0])) {
    l->shape[at] = l->shape[at - 1];
    for (int v = 0; v < nviews; v++) l->stride[v][at] = l->stride[v][at - 1];
    at--;
  }
  l->shape[at] = size;
  for (int v = 0; v < nviews; v++) l->stride[v][at] = stride[v];
}

/* Joins neighbours that every view walks as one. */
static void join_dims(orr_loop *l, int nviews) {
  int last = 0;
  for (int d = 1; d < l->ndim; d++) {
    bool joins = true;
    for (int v = 0; v < nviews; v++)
      joins = joins && l->stride[v][last] == l->stride[v][d] * l->shape[d];
    if (joins) {
      l->shape[last] *= l->shape[d];
    } else {
      last++;
      l->shape[last] = l->shape[d];
    }
    for (int v = 0; v < nviews; v++) l->stride[v][last] = l->stride[v][d];
  }
  if (l->ndim > 0) l->ndim = last + 1;
}

void orr_loop_init(orr_loop *l, const orr_view *like, const orr_view *const *views, int nviews,
                   unsigned skip) {
  *l = (orr_loop){.n = 1};
  for (int d = 0; d < like->ndim; d++) {
    int64_t stride[ORR_LOOP_VIEWS] = {0};
    if (skip >> d & 1) continue;
    l->n *= like->shape[d];
    if (like->shape[d] == 1) continue;
    for (int v = 0; v < nviews; v++)
      if (views[v] != NULL && views[v]->shape[d] != 1) stride[v] = views[v]->stride[d];
    insert(l, like->shape[d], stride, nviews);
  }
  join_dims(l, nviews);
}

orr_run orr_loop_pop(orr_loop *l) {
  orr_run run = {.len = 1};
  if (l->ndim == 0) {
    run.len = l->n;
    return run;
  }
  int d = --l->ndim;
  run.len = l->shape[d];
  for (int v = 0; v < ORR_LOOP_VIEWS; v++) run.stride[v] = l->stride[v][d];
  l->n = 1;
  for (int e = 0; e < l->ndim; e++) l->n *= l->shape[e];
  return run;
}

void orr_loop_at(const orr_loop *l, int nviews, int64_t i, int64_t *off) {
  for (int v = 0; v < nviews; v++) off[v] = 0;
  for (int d = l->ndim - 1; d >= 0; d--) {
    int64_t at = i;
    if (d > 0) {
      int64_t q = i / l->shape[d];
      at = i - q * l->shape[d];
      i = q;
    }
    for (int v = 0; v < nviews; v++) off[v] += at * l->stride[v][d];
  }
}
