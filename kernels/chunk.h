/* chunk.h: how row kernels walk views: loops over the dimensions, and chunks of elements as
 * numbers.
 *
 * Invariant: a chunk is read as float (f32, f16, bf16), double (f64) or int64 (the integers)
 * and is at most ORR_CHUNK elements where a buffer may be needed; a view of the native type and
 * of stride one is read and written in place, without a copy. Loops are ordered by the first
 * view's strides and joined where every view allows it, so a contiguous tensor of any rank is
 * one dimension.
 * To add a row kernel: init a loop that skips the row's dimension, and take each row by chunks.
 */
#ifndef ORR_CHUNK_H
#define ORR_CHUNK_H

#include "kernel.h"

#include <stddef.h>

enum {
  ORR_CHUNK = 512,    /* elements of a stack buffer */
  ORR_LOOP_VIEWS = 6, /* views that one loop walks */
  ORR_K_GRAIN =
      262144 /* elements of work below which a second thread costs more than it gives */
};

/* What only the data can tell: the lowest flat position (from 1; 0 for none) of a bad index. */
typedef struct orr_fault {
  int64_t index;
  int64_t value;
} orr_fault;

typedef struct orr_loop {
  int ndim;
  int64_t n; /* product of shape */
  int64_t shape[ORR_MAX_DIM];
  int64_t stride[ORR_LOOP_VIEWS][ORR_MAX_DIM];
} orr_loop;

/* The dimension taken out of a loop: its length, and each view's stride. */
typedef struct orr_run {
  int64_t len;
  int64_t stride[ORR_LOOP_VIEWS];
} orr_run;

/* Loop over the dimensions of `like` that are not in skip. views[i] may be NULL (never read) or
 * have size 1 where `like` has more (broadcast). All have the rank of `like`. */
void orr_loop_init(orr_loop *l, const orr_view *like, const orr_view *const *views, int nviews,
                   unsigned skip);
/* Takes the innermost dimension out of the loop. */
orr_run orr_loop_pop(orr_loop *l);
/* Element offsets of step i, one a view. */
void orr_loop_at(const orr_loop *l, int nviews, int64_t i, int64_t *off);

size_t orr_k_size(orr_dtype t);
int64_t orr_k_count(const orr_view *v);
/* A statistic with the rank of its source, or one less, as a view of rank ndim (dim of size
 * 1). */
orr_view orr_k_keepdim(const orr_view *v, int dim, int ndim);
/* Records position (from 1) and value where they come before what is there. */
void orr_k_blame(orr_fault *fault, int64_t position, int64_t value);

static inline bool orr_k_is_float(orr_dtype t) { return t <= ORR_BF16; }

/* read: n elements from offset off, as numbers: in place, or in buf. target: where to compute
 * what write will store: in place, or buf. write: store src (nothing to do where src is in
 * place). */
const float *orr_k_read_f32(const orr_view *v, int64_t off, int64_t stride, int64_t n,
                            float *buf);
float *orr_k_target_f32(const orr_view *v, int64_t off, int64_t stride, float *buf);
void orr_k_write_f32(const orr_view *v, int64_t off, int64_t stride, int64_t n,
                     const float *src);

const double *orr_k_read_f64(const orr_view *v, int64_t off, int64_t stride, int64_t n,
                             double *buf);
double *orr_k_target_f64(const orr_view *v, int64_t off, int64_t stride, double *buf);
void orr_k_write_f64(const orr_view *v, int64_t off, int64_t stride, int64_t n,
                     const double *src);

const int64_t *orr_k_read_i64(const orr_view *v, int64_t off, int64_t stride, int64_t n,
                              int64_t *buf);
int64_t *orr_k_target_i64(const orr_view *v, int64_t off, int64_t stride, int64_t *buf);
void orr_k_write_i64(const orr_view *v, int64_t off, int64_t stride, int64_t n,
                     const int64_t *src);

static inline double orr_k_get(const orr_view *v, int64_t off) {
  double buf;
  return *orr_k_read_f64(v, off, 1, 1, &buf);
}

static inline int64_t orr_k_get_int(const orr_view *v, int64_t off) {
  int64_t buf;
  return *orr_k_read_i64(v, off, 1, 1, &buf);
}

static inline void orr_k_set(const orr_view *v, int64_t off, double x) {
  orr_k_write_f64(v, off, 1, 1, &x);
}

#endif
