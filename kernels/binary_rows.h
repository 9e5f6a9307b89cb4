/* binary_rows.h: the rows of binary.def as loops over element type T; included once a type.
 *
 * Invariant: as in unary_rows.h. A step of 0 repeats one operand; the three loops are apart so
 * that each becomes vector code.
 * To add a type: include this once more in binary.c, and name the table in find_row.
 */
#define M(f) ORR_NAME(orr_##f##_, S)

#define LOOP(name, formula, R)                                                       \
  static void ORR_NAME(name##_row_, S)(int64_t n, const void *in_a, int64_t step_a,  \
                                       const void *in_b, int64_t step_b, void *to) { \
    const T *as = in_a, *bs = in_b;                                                  \
    R *ys = to;                                                                      \
    if (step_a && step_b) {                                                          \
      ORR_SIMD                                                                       \
      for (int64_t i = 0; i < n; i++) {                                              \
        T a = as[i], b = bs[i];                                                      \
        ys[i] = formula;                                                             \
      }                                                                              \
    } else if (step_a) {                                                             \
      const T b = bs[0];                                                             \
      ORR_SIMD                                                                       \
      for (int64_t i = 0; i < n; i++) {                                              \
        T a = as[i];                                                                 \
        ys[i] = formula;                                                             \
      }                                                                              \
    } else if (step_b) {                                                             \
      const T a = as[0];                                                             \
      ORR_SIMD                                                                       \
      for (int64_t i = 0; i < n; i++) {                                              \
        T b = bs[i];                                                                 \
        ys[i] = formula;                                                             \
      }                                                                              \
    } else {                                                                         \
      const T a = as[0], b = bs[0];                                                  \
      R y = formula;                                                                 \
      for (int64_t i = 0; i < n; i++) ys[i] = y;                                     \
    }                                                                                \
  }
#if ROWS_OF_FLOAT
#define ORR_BINARY(name, formula, da, db, flags) LOOP(name, formula, T)
#else
#define ORR_BINARY(name, formula, da, db, flags)
#endif
#define ORR_BINARY_ANY(name, formula, da, db, flags) LOOP(name, formula, T)
#define ORR_BINARY_TEST(name, formula, da, db, flags) LOOP(name, formula, uint8_t)
#include "binary.def"
#undef LOOP

static row_fn *const ORR_NAME(binary_rows_, S)[ORR_N_BINARY] = {
#define ENTRY(name) [ORR_BIN_##name] = ORR_NAME(name##_row_, S),
#if ROWS_OF_FLOAT
#define ORR_BINARY(name, formula, da, db, flags) ENTRY(name)
#else
#define ORR_BINARY(name, formula, da, db, flags)
#endif
#define ORR_BINARY_ANY(name, formula, da, db, flags) ENTRY(name)
#define ORR_BINARY_TEST(name, formula, da, db, flags) ENTRY(name)
#include "binary.def"
#undef ENTRY
};

#if ROWS_OF_FLOAT
#define GRAD(name, which, formula)                                                  \
  static void ORR_NAME(name##_grad_##which##_, S)(int64_t n, const void *const *in, \
                                                  void *to) {                       \
    const T *as = in[0], *bs = in[1], *ys = in[2], *gs = in[3];                     \
    T *out = to;                                                                    \
    ORR_SIMD                                                                        \
    for (int64_t i = 0; i < n; i++) {                                               \
      T a = as[i], b = bs[i], y = ys[i], g = gs[i];                                 \
      (void)a, (void)b, (void)y, (void)g;                                           \
      out[i] = formula;                                                             \
    }                                                                               \
  }
#define ORR_BINARY(name, formula, da, db, flags) GRAD(name, a, da) GRAD(name, b, db)
#include "binary.def"
#undef GRAD

static grad_fn *const ORR_NAME(binary_grads_, S)[ORR_N_BINARY][2] = {
#define ORR_BINARY(name, formula, da, db, flags) \
  {ORR_NAME(name##_grad_a_, S), ORR_NAME(name##_grad_b_, S)},
#include "binary.def"
};
#endif

#undef M
#undef T
#undef S
#undef ROWS_OF_FLOAT
