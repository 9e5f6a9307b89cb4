/* elementwise.h: kernels that compute each element from the elements in its place.
 *
 * Invariant: all views of one call have the output's shape (stride 0 repeats). Operands have
 * one dtype; tests and comparisons write bool. An output may be exactly one of the inputs.
 * To add a function of one or two numbers: a row in unary.def or binary.def. Anything else: a
 * prototype here, a body in elementwise.c.
 */
#ifndef ORR_ELEMENTWISE_H
#define ORR_ELEMENTWISE_H

#include "kernel.h"

enum {
  ORR_FLOAT_ONLY = 1,
  ORR_INT_OK = 2,
  ORR_BOOL_OUT = 4,
  ORR_LINEAR = 8,
  ORR_COMMUTES = 16,
  ORR_GRAD_NONE = 32,
  ORR_GRAD_X = 64,
  ORR_GRAD_A = 64,
  ORR_GRAD_B = 128,
  ORR_GRAD_Y = 256
};

/* ORR_UN_exp, ORR_BIN_add, ...: the names of the tables. */
typedef enum orr_unary_op {
#define ORR_UNARY(name, formula, derivative, flags) ORR_UN_##name,
#include "unary.def"
  ORR_N_UNARY
} orr_unary_op;

typedef enum orr_binary_op {
#define ORR_BINARY(name, formula, da, db, flags) ORR_BIN_##name,
#include "binary.def"
  ORR_N_BINARY
} orr_binary_op;

extern const char *const orr_unary_name[ORR_N_UNARY];
extern const unsigned short orr_unary_flags[ORR_N_UNARY];
extern const char *const orr_binary_name[ORR_N_BINARY];
extern const unsigned short orr_binary_flags[ORR_N_BINARY];

/* y = f(x). Float-only rows take f64, f32, f16, bf16. */
void orr_k_unary(int op, const orr_view *x, orr_view *y);
/* gx = f'(x) g. x or y may be NULL where the flags say that it is not read. */
void orr_k_unary_grad(int op, const orr_view *x, const orr_view *y, const orr_view *g,
                      orr_view *gx);

/* y = f(a, b). */
void orr_k_binary(int op, const orr_view *a, const orr_view *b, orr_view *y);
/* y = f(a, s), or f(s, a). */
void orr_k_binary_scalar(int op, const orr_view *a, double s, bool scalar_first, orr_view *y);
/* out = the gradient of operand `which` (0: a, 1: b), not summed over broadcast dimensions. */
void orr_k_binary_grad(int op, int which, const orr_view *a, const orr_view *b,
                       const orr_view *y, const orr_view *g, orr_view *out);

/* y = c ? a : b, c bool or u8. */
void orr_k_where(const orr_view *c, const orr_view *a, const orr_view *b, orr_view *y);
void orr_k_fill(orr_view *y, double value);
void orr_k_fill_i64(orr_view *y, int64_t value);
/* NaN passes. The gradient passes where lo <= x <= hi. */
void orr_k_clamp(const orr_view *x, double lo, double hi, orr_view *y);
void orr_k_clamp_grad(const orr_view *x, double lo, double hi, const orr_view *g, orr_view *gx);
/* y[i] = start + step (first + i), y of one dimension: `first` is where a shard begins. */
void orr_k_arange(orr_view *y, double start, double step, int64_t first);
/* Ones where global row equals global column; (row0, col0) is where the shard begins. */
void orr_k_eye(orr_view *y, int64_t row0, int64_t col0);
/* y = alpha x + beta y; beta 0 does not read y. */
void orr_k_axpby(double alpha, const orr_view *x, double beta, orr_view *y);
/* Keeps column - row <= diagonal (tril) or >= (triu) of the last two dimensions, else zero. */
void orr_k_tril(const orr_view *x, orr_view *y, int64_t diagonal, int64_t row0, int64_t col0);
void orr_k_triu(const orr_view *x, orr_view *y, int64_t diagonal, int64_t row0, int64_t col0);

#endif
