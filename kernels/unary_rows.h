/* unary_rows.h: the rows of unary.def as loops over element type T; included once a type.
 *
 * Invariant: before inclusion T is the type, S its suffix, and ROWS_OF_FLOAT is 1 where the
 * float rows and the gradients exist. Leaves the tables unary_rows_S and, for floats,
 * unary_grads_S.
 * To add a type: include this once more in unary.c, and name the tables in rows_of and
 * grads_of.
 */
#define M(f) ORR_NAME(orr_##f##_, S)

#define LOOP(name, formula, R)                                                  \
  static void ORR_NAME(name##_row_, S)(int64_t n, const void *from, void *to) { \
    const T *xs = from;                                                         \
    R *ys = to;                                                                 \
    ORR_SIMD                                                                    \
    for (int64_t i = 0; i < n; i++) {                                           \
      T x = xs[i];                                                              \
      ys[i] = formula;                                                          \
    }                                                                           \
  }
#if ROWS_OF_FLOAT
#define ORR_UNARY(name, formula, derivative, flags) LOOP(name, formula, T)
#else
#define ORR_UNARY(name, formula, derivative, flags)
#endif
#define ORR_UNARY_ANY(name, formula, derivative, flags) LOOP(name, formula, T)
#define ORR_UNARY_TEST(name, formula, derivative, flags) LOOP(name, formula, uint8_t)
#include "unary.def"
#undef LOOP

static row_fn *const ORR_NAME(unary_rows_, S)[ORR_N_UNARY] = {
#define ENTRY(name) [ORR_UN_##name] = ORR_NAME(name##_row_, S),
#if ROWS_OF_FLOAT
#define ORR_UNARY(name, formula, derivative, flags) ENTRY(name)
#else
#define ORR_UNARY(name, formula, derivative, flags)
#endif
#define ORR_UNARY_ANY(name, formula, derivative, flags) ENTRY(name)
#define ORR_UNARY_TEST(name, formula, derivative, flags) ENTRY(name)
#include "unary.def"
#undef ENTRY
};

#if ROWS_OF_FLOAT
#define ORR_UNARY(name, formula, derivative, flags)                                    \
  static void ORR_NAME(name##_grad_, S)(int64_t n, const void *in_x, const void *in_y, \
                                        const void *in_g, void *to) {                  \
    const T *xs = in_x, *ys = in_y, *gs = in_g;                                        \
    T *out = to;                                                                       \
    ORR_SIMD                                                                           \
    for (int64_t i = 0; i < n; i++) {                                                  \
      T x = xs[i], y = ys[i], g = gs[i];                                               \
      (void)x, (void)y;                                                                \
      out[i] = derivative;                                                             \
    }                                                                                  \
  }
#include "unary.def"

static grad_fn *const ORR_NAME(unary_grads_, S)[ORR_N_UNARY] = {
#define ORR_UNARY(name, formula, derivative, flags) ORR_NAME(name##_grad_, S),
#include "unary.def"
};
#endif

#undef M
#undef T
#undef S
#undef ROWS_OF_FLOAT
