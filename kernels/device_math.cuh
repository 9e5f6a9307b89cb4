/* device_math.cuh: the functions of one number that formulas call as M(name)(x), on a CUDA
 * device.
 *
 * Invariant: f32 and f64 are CUDA's own functions (never the fast, inexact ones), overloaded by
 * type; integers are those of scalar.h.
 * To add one: a line in both tables, after scalar.h has it.
 */
#ifndef ORR_DEVICE_MATH_CUH
#define ORR_DEVICE_MATH_CUH

#include "scalar.h"

#include <math.h>

#define ORR_DEVICE_FN static __device__ inline

#define ORR_MATH_1(name, f32, f64)                          \
  ORR_DEVICE_FN float orr_m_##name(float x) { return f32; } \
  ORR_DEVICE_FN double orr_m_##name(double x) { return f64; }
#define ORR_MATH_2(name, f32, f64)                                   \
  ORR_DEVICE_FN float orr_m_##name(float x, float y) { return f32; } \
  ORR_DEVICE_FN double orr_m_##name(double x, double y) { return f64; }

ORR_MATH_1(exp, expf(x), exp(x))
ORR_MATH_1(expm1, expm1f(x), expm1(x))
ORR_MATH_1(sigmoid, 1.0f / (1.0f + expf(-x)), 1.0 / (1.0 + exp(-x)))
ORR_MATH_1(tanh, tanhf(x), tanh(x))
ORR_MATH_1(log, logf(x), log(x))
ORR_MATH_1(log1p, log1pf(x), log1p(x))
ORR_MATH_1(softplus, (x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x))) + (x != x ? x : 0.0f),
           (x > 0.0 ? x : 0.0) + log1p(exp(-fabs(x))) + (x != x ? x : 0.0))
ORR_MATH_1(erf, erff(x), erf(x))
ORR_MATH_1(sin, sinf(x), sin(x))
ORR_MATH_1(cos, cosf(x), cos(x))
ORR_MATH_1(abs, fabsf(x), fabs(x))
ORR_MATH_1(sign,
           x != x     ? x
           : x > 0.0f ? 1.0f
           : x < 0.0f ? -1.0f
                      : 0.0f,
           x != x    ? x
           : x > 0.0 ? 1.0
           : x < 0.0 ? -1.0
                     : 0.0)
ORR_MATH_1(sqrt, sqrtf(x), sqrt(x))
ORR_MATH_1(floor, floorf(x), floor(x))
ORR_MATH_1(ceil, ceilf(x), ceil(x))
ORR_MATH_1(trunc, truncf(x), trunc(x))
ORR_MATH_1(round, rintf(x), rint(x))
ORR_MATH_2(pow, powf(x, y), pow(x, y))
ORR_MATH_2(atan2, atan2f(x, y), atan2(x, y))
ORR_MATH_2(fmod, fmodf(x, y), fmod(x, y))

#define ORR_MATH_REMAINDER(T)                        \
  ORR_DEVICE_FN T orr_m_remainder(T x, T y) {        \
    T r = orr_m_fmod(x, y);                          \
    return r != 0 && (r < 0) != (y < 0) ? r + y : r; \
  }
ORR_MATH_REMAINDER(float)
ORR_MATH_REMAINDER(double)

#define ORR_MATH_INTEGER(T, S)                                        \
  ORR_DEVICE_FN T orr_m_abs(T x) { return orr_abs_##S(x); }           \
  ORR_DEVICE_FN T orr_m_sign(T x) { return orr_sign_##S(x); }         \
  ORR_DEVICE_FN T orr_m_pow(T x, T y) { return orr_pow_##S(x, y); }   \
  ORR_DEVICE_FN T orr_m_fmod(T x, T y) { return orr_fmod_##S(x, y); } \
  ORR_DEVICE_FN T orr_m_remainder(T x, T y) { return orr_remainder_##S(x, y); }
ORR_MATH_INTEGER(int64_t, i64)
ORR_MATH_INTEGER(int32_t, i32)
ORR_MATH_INTEGER(uint8_t, u8)

#undef ORR_MATH_1
#undef ORR_MATH_2
#undef ORR_MATH_REMAINDER
#undef ORR_MATH_INTEGER

#endif
