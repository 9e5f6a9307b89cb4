/* scalar.h: the functions of one number that formulas call as M(name)(x), for CPU element type
 * T.
 *
 * Invariant: f32 functions are branch-free, so that a loop over them vectorises, and are within
 * about 4e-7 of the true value, relative; infinities and NaN give what C's math library gives.
 * f64 calls the C library. Integer functions are those that make sense without a fraction.
 * Method: argument reduction as in W. J. Cody and W. Waite, "Software Manual for the Elementary
 * Functions", 1980; each polynomial was interpolated at Chebyshev nodes of the reduced
 * interval.
 * To add one: orr_NAME_f32 here, and a line for f64 below; device_math.cuh maps M(name).
 */
#ifndef ORR_SCALAR_H
#define ORR_SCALAR_H

#include "vector.h"

#include <math.h>
#include <stdint.h>

#include "half.h"

#ifdef __FP_FAST_FMAF
#define ORR_FMA(a, b, c) fmaf(a, b, c)
#else
#define ORR_FMA(a, b, c) ((a) * (b) + (c))
#endif

/* Added and taken off again, it rounds to the nearest integer, which is then in the low bits.
 */
#define ORR_ROUNDER 12582912.0f /* 1.5 * 2^23 */

ORR_SCALAR float orr_select_f32(int32_t c, float a, float b) { return c ? a : b; }

/* ---- exponentials ------------------------------------------------------------------------ */

/* exp(r) - 1 - r over r^2, for |r| <= ln(2) / 2. */
ORR_SCALAR float orr_exp_tail(float r) {
  float p = 1.392617750e-3f;
  p = ORR_FMA(p, r, 8.363174180e-3f);
  p = ORR_FMA(p, r, 4.166655465e-2f);
  p = ORR_FMA(p, r, 1.666657702e-1f);
  return ORR_FMA(p, r, 0.5f);
}

/* x = n ln 2 + r. */
ORR_SCALAR float orr_exp_reduce(float x, int32_t *n) {
  float t = ORR_FMA(x, 1.44269504f, ORR_ROUNDER);
  float whole = t - ORR_ROUNDER;
  *n = (int32_t)(orr_bits_of_f32(t) - orr_bits_of_f32(ORR_ROUNDER));
  float r = ORR_FMA(whole, -0.693359375f, x);
  return ORR_FMA(whole, 2.12194440e-4f, r);
}

ORR_SCALAR float orr_power_of_2(int32_t n) {
  return orr_f32_of_bits((uint32_t)(n + 127) << 23);
}

/* Scaling in two steps reaches the subnormals and infinity. */
ORR_SCALAR float orr_exp_f32(float x) {
  int32_t n;
  x = x > 89.0f ? 89.0f : x;
  x = x < -105.0f ? -105.0f : x;
  float r = orr_exp_reduce(x, &n);
  float p = ORR_FMA(orr_exp_tail(r), r * r, r) + 1.0f;
  int32_t half = n >> 1;
  return p * orr_power_of_2(half) * orr_power_of_2(n - half);
}

ORR_SCALAR float orr_expm1_f32(float x) {
  int32_t n;
  float near = x > 89.0f ? 89.0f : x;
  near = near < -25.0f ? -25.0f : near;
  float r = orr_exp_reduce(near, &n);
  float p = ORR_FMA(orr_exp_tail(r), r * r, r);
  float s = orr_power_of_2(n - 1);
  float y = 2.0f * ORR_FMA(s, p, s - 0.5f);
  return x == 0.0f ? x : y;
}

ORR_SCALAR float orr_sigmoid_f32(float x) { return 1.0f / (1.0f + orr_exp_f32(-x)); }

ORR_SCALAR float orr_tanh_f32(float x) {
  float a = fabsf(x);
  a = a > 9.1f ? 9.1f : a;
  float e = orr_expm1_f32(2.0f * a);
  return copysignf(e / (e + 2.0f), x);
}

/* ---- logarithms -------------------------------------------------------------------------- */

/* log(x), 0 < x < inf: x = 2^e (1 + f), 1 + f within [sqrt(1/2), sqrt(2)). */
ORR_SCALAR float orr_log_positive(float x) {
  int32_t tiny = x < 1.17549435e-38f;
  uint32_t u = orr_bits_of_f32(orr_select_f32(tiny, x * 8388608.0f, x));
  int32_t e = ((int32_t)u - 0x3f3504f3) >> 23;
  float f = orr_f32_of_bits(u - ((uint32_t)e << 23)) - 1.0f;
  float scale = (float)(e - (tiny ? 23 : 0));
  float p = 6.971681252e-2f;
  p = ORR_FMA(p, f, -1.147983685e-1f);
  p = ORR_FMA(p, f, 1.168544314e-1f);
  p = ORR_FMA(p, f, -1.242567579e-1f);
  p = ORR_FMA(p, f, 1.424905432e-1f);
  p = ORR_FMA(p, f, -1.666780266e-1f);
  p = ORR_FMA(p, f, 2.000071585e-1f);
  p = ORR_FMA(p, f, -2.499999696e-1f);
  p = ORR_FMA(p, f, 3.333333118e-1f);
  float f2 = f * f;
  float low = ORR_FMA(p * f, f2, scale * -2.12194440e-4f);
  low = ORR_FMA(-0.5f, f2, low);
  return ORR_FMA(scale, 0.693359375f, f + low);
}

ORR_SCALAR float orr_log_f32(float x) {
  float y = orr_log_positive(x);
  y = x > 0.0f ? y : NAN;
  y = x == 0.0f ? -INFINITY : y;
  return x == INFINITY ? x : y;
}

/* log(1 + x) as log(u) plus what rounding u = 1 + x lost. */
ORR_SCALAR float orr_log1p_f32(float x) {
  float u = 1.0f + x;
  float y = orr_log_f32(u) + (x - (u - 1.0f)) / u;
  y = x == -1.0f ? -INFINITY : y;
  y = x == INFINITY ? x : y;
  return x == 0.0f ? x : y;
}

ORR_SCALAR float orr_softplus_f32(float x) {
  return (x > 0.0f ? x : 0.0f) + orr_log1p_f32(orr_exp_f32(-fabsf(x))) + (x != x ? x : 0.0f);
}

/* ---- erf --------------------------------------------------------------------------------- */

/* An odd polynomial up to 1; beyond it 1 - exp(-q(x)), q a polynomial for -log(erfc(x)). */
ORR_SCALAR float orr_erf_f32(float x) {
  float a = fabsf(x), z = x * x;
  float s = 7.875875043e-5f;
  s = ORR_FMA(s, z, -8.016864281e-4f);
  s = ORR_FMA(s, z, 5.189087423e-3f);
  s = ORR_FMA(s, z, -2.685421201e-2f);
  s = ORR_FMA(s, z, 1.128359472e-1f);
  s = ORR_FMA(s, z, -3.761262667e-1f);
  s = ORR_FMA(s, z, 1.283791658e-1f);
  float small = ORR_FMA(s, x, x);
  float t = a > 4.0f ? 4.0f : a;
  float q = -1.637151416e-6f;
  q = ORR_FMA(q, t, 4.605804271e-5f);
  q = ORR_FMA(q, t, -5.968056258e-4f);
  q = ORR_FMA(q, t, 4.759596294e-3f);
  q = ORR_FMA(q, t, -2.642113601e-2f);
  q = ORR_FMA(q, t, 1.100800830e-1f);
  q = ORR_FMA(q, t, 6.318260516e-1f);
  q = ORR_FMA(q, t, 1.130233435f);
  q = ORR_FMA(q, t, -3.201380501e-4f);
  float large = copysignf(1.0f - orr_exp_f32(-q), x);
  return a > 1.0f ? large : small;
}

/* ---- sine, cosine ------------------------------------------------------------------------ */

/* |x| below this may be reduced with two terms of pi/2 in double; past it, use the C library.
 */
#define ORR_TRIG_LIMIT 1e6f

/* sin(x + quarter pi/2). */
ORR_SCALAR float orr_sin_shifted(float x, int32_t quarter) {
  double t = (double)x * 0.63661977236758134308 + 6755399441055744.0;
  double whole = t - 6755399441055744.0;
  double wide = (double)x - whole * 1.57079632673412561417;
  float r = (float)(wide - whole * 6.07710050650619224932e-11);
  int32_t n = (int32_t)whole + quarter;
  float z = r * r;
  float s = ORR_FMA(2.724985158e-6f, z, -1.984008616e-4f);
  s = ORR_FMA(s, z, 8.333331874e-3f);
  s = ORR_FMA(s, z, -1.666666666e-1f);
  s = ORR_FMA(s * z, r, r);
  float c = ORR_FMA(-2.730089725e-7f, z, 2.480059990e-5f);
  c = ORR_FMA(c, z, -1.388888767e-3f);
  c = ORR_FMA(c, z, 4.166666666e-2f);
  c = ORR_FMA(c * z, z, ORR_FMA(-0.5f, z, 1.0f));
  float y = (n & 1) ? c : s;
  return (n & 2) ? -y : y;
}

ORR_SCALAR float orr_sin_f32(float x) { return orr_sin_shifted(x, 0); }
ORR_SCALAR float orr_cos_f32(float x) { return orr_sin_shifted(x, 1); }

/* ---- the rest of f32 --------------------------------------------------------------------- */

ORR_SCALAR float orr_abs_f32(float x) { return fabsf(x); }
ORR_SCALAR float orr_sign_f32(float x) {
  float y = x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f;
  return x != x ? x : y;
}
/* errno aside, a square root depends on its argument alone: so declared, it is one instruction.
 */
#if defined(__GNUC__) && !defined(__cplusplus)
__attribute__((const)) float sqrtf(float x);
__attribute__((const)) double sqrt(double x);
#endif
ORR_SCALAR float orr_sqrt_f32(float x) { return sqrtf(x); }
ORR_SCALAR float orr_floor_f32(float x) { return floorf(x); }
ORR_SCALAR float orr_ceil_f32(float x) { return ceilf(x); }
ORR_SCALAR float orr_trunc_f32(float x) { return truncf(x); }
ORR_SCALAR float orr_round_f32(float x) { return rintf(x); }
ORR_SCALAR float orr_pow_f32(float x, float y) { return powf(x, y); }
ORR_SCALAR float orr_atan2_f32(float x, float y) { return atan2f(x, y); }
ORR_SCALAR float orr_fmod_f32(float x, float y) { return fmodf(x, y); }
ORR_SCALAR float orr_remainder_f32(float x, float y) {
  float r = fmodf(x, y);
  return r != 0.0f && (r < 0.0f) != (y < 0.0f) ? r + y : r;
}

/* ---- f64 --------------------------------------------------------------------------------- */

ORR_SCALAR double orr_exp_f64(double x) { return exp(x); }
ORR_SCALAR double orr_expm1_f64(double x) { return expm1(x); }
ORR_SCALAR double orr_sigmoid_f64(double x) { return 1.0 / (1.0 + exp(-x)); }
ORR_SCALAR double orr_tanh_f64(double x) { return tanh(x); }
ORR_SCALAR double orr_log_f64(double x) { return log(x); }
ORR_SCALAR double orr_log1p_f64(double x) { return log1p(x); }
ORR_SCALAR double orr_softplus_f64(double x) {
  return (x > 0.0 ? x : 0.0) + log1p(exp(-fabs(x))) + (x != x ? x : 0.0);
}
ORR_SCALAR double orr_erf_f64(double x) { return erf(x); }
ORR_SCALAR double orr_sin_f64(double x) { return sin(x); }
ORR_SCALAR double orr_cos_f64(double x) { return cos(x); }
ORR_SCALAR double orr_abs_f64(double x) { return fabs(x); }
ORR_SCALAR double orr_sign_f64(double x) {
  double y = x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : 0.0;
  return x != x ? x : y;
}
ORR_SCALAR double orr_sqrt_f64(double x) { return sqrt(x); }
ORR_SCALAR double orr_floor_f64(double x) { return floor(x); }
ORR_SCALAR double orr_ceil_f64(double x) { return ceil(x); }
ORR_SCALAR double orr_trunc_f64(double x) { return trunc(x); }
ORR_SCALAR double orr_round_f64(double x) { return rint(x); }
ORR_SCALAR double orr_pow_f64(double x, double y) { return pow(x, y); }
ORR_SCALAR double orr_atan2_f64(double x, double y) { return atan2(x, y); }
ORR_SCALAR double orr_fmod_f64(double x, double y) { return fmod(x, y); }
ORR_SCALAR double orr_remainder_f64(double x, double y) {
  double r = fmod(x, y);
  return r != 0.0 && (r < 0.0) != (y < 0.0) ? r + y : r;
}

/* ---- integers: overflow wraps, division by zero gives zero ------------------------------- */

#define ORR_SIGNED_FUNCTIONS(T, U, S)                                                \
  ORR_SCALAR T orr_abs_##S(T x) { return x < 0 ? (T)(0 - (U)x) : x; }                \
  ORR_SCALAR T orr_sign_##S(T x) { return (T)((x > 0) - (x < 0)); }                  \
  ORR_SCALAR T orr_fmod_##S(T x, T y) { return y == 0 || y == -1 ? 0 : (T)(x % y); } \
  ORR_SCALAR T orr_remainder_##S(T x, T y) {                                         \
    T r = orr_fmod_##S(x, y);                                                        \
    return (T)(r != 0 && (r < 0) != (y < 0) ? r + y : r);                            \
  }                                                                                  \
  ORR_SCALAR T orr_pow_##S(T x, T y) {                                               \
    U base = (U)x, result = 1;                                                       \
    if (y < 0) return (T)(x == 1 ? 1 : x == -1 ? (y % 2 ? -1 : 1) : 0);              \
    for (; y > 0; y /= 2, base *= base) result *= y % 2 ? base : 1;                  \
    return (T)result;                                                                \
  }

ORR_SIGNED_FUNCTIONS(int64_t, uint64_t, i64)
ORR_SIGNED_FUNCTIONS(int32_t, uint32_t, i32)

ORR_SCALAR uint8_t orr_abs_u8(uint8_t x) { return x; }
ORR_SCALAR uint8_t orr_sign_u8(uint8_t x) { return x > 0; }
ORR_SCALAR uint8_t orr_fmod_u8(uint8_t x, uint8_t y) { return y ? (uint8_t)(x % y) : 0; }
ORR_SCALAR uint8_t orr_remainder_u8(uint8_t x, uint8_t y) { return orr_fmod_u8(x, y); }
ORR_SCALAR uint8_t orr_pow_u8(uint8_t x, uint8_t y) {
  uint32_t base = x, result = 1;
  for (; y > 0; y = (uint8_t)(y / 2), base *= base) result *= y % 2 ? base : 1;
  return (uint8_t)result;
}

#endif
