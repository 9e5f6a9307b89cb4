/* device_number.cuh: one element of a dtype that the kernel learns at run time, as a number.
 *
 * Invariant: as orr_k_write of chunk.h: integers are stored saturated, NaN as 0; what is not
 * zero is stored in a bool as true.
 * To add a dtype: its case.
 */
#ifndef ORR_DEVICE_NUMBER_CUH
#define ORR_DEVICE_NUMBER_CUH

#include "device.cuh"

static __device__ inline int64_t orr_integer_of(int64_t x) { return x; }
static __device__ inline int64_t orr_integer_of(double x) {
  if (x != x) return 0;
  return x >= 9223372036854775808.0   ? INT64_MAX
         : x < -9223372036854775808.0 ? INT64_MIN
                                      : (int64_t)x;
}
static __device__ inline int64_t orr_integer_of(float x) { return orr_integer_of((double)x); }

static __device__ inline int64_t orr_within(int64_t x, int64_t lo, int64_t hi) {
  return x < lo ? lo : x > hi ? hi : x;
}

/* Stores x (int64_t, float or double) at element `off` of `to`. */
template <typename W>
static __device__ inline void orr_write_number(void *to, orr_dtype dtype, int64_t off, W x) {
  switch (dtype) {
    case ORR_F64: ((double *)to)[off] = (double)x; break;
    case ORR_F32: ((float *)to)[off] = (float)x; break;
    case ORR_F16: ((orr_f16 *)to)[off] = orr_f16_of((float)x); break;
    case ORR_BF16: ((orr_bf16 *)to)[off] = orr_bf16_of((float)x); break;
    case ORR_I64: ((int64_t *)to)[off] = orr_integer_of(x); break;
    case ORR_I32:
      ((int32_t *)to)[off] = (int32_t)orr_within(orr_integer_of(x), INT32_MIN, INT32_MAX);
      break;
    case ORR_U8: ((uint8_t *)to)[off] = (uint8_t)orr_within(orr_integer_of(x), 0, 255); break;
    default: ((uint8_t *)to)[off] = x != 0; break;
  }
}

static __device__ inline double orr_read_number(const void *from, orr_dtype dtype,
                                                int64_t off) {
  switch (dtype) {
    case ORR_F64: return ((const double *)from)[off];
    case ORR_F32: return ((const float *)from)[off];
    case ORR_F16: return orr_f32_of(((const orr_f16 *)from)[off]);
    case ORR_BF16: return orr_f32_of(((const orr_bf16 *)from)[off]);
    case ORR_I64: return (double)((const int64_t *)from)[off];
    case ORR_I32: return ((const int32_t *)from)[off];
    default: return ((const uint8_t *)from)[off];
  }
}

/* The least and the greatest number of a wide type. */
template <typename W>
static __device__ inline W orr_least(void) {
  return (W)-INFINITY;
}
template <typename W>
static __device__ inline W orr_greatest(void) {
  return (W)INFINITY;
}
template <>
__device__ inline int64_t orr_least<int64_t>(void) {
  return INT64_MIN;
}
template <>
__device__ inline int64_t orr_greatest<int64_t>(void) {
  return INT64_MAX;
}

#endif
