/* half.h: rows of f16 and bf16 to f32 and back, round to nearest, ties to even.
 *
 * Invariant: every f16 and bf16 value survives the way to f32 and back; NaN stays NaN; what is
 * too large becomes infinity. Formats: IEEE 754-2008 binary16; bfloat16 is the upper half of
 * binary32.
 * To add a 16-bit format: one function each way, one row function each way.
 */
#ifndef ORR_HALF_H
#define ORR_HALF_H

#include "vector.h"

#include <stdint.h>
#include <string.h>
#if defined(__F16C__) && defined(__AVX__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif

ORR_SCALAR uint32_t orr_bits_of_f32(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

ORR_SCALAR float orr_f32_of_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

ORR_SCALAR float orr_f32_of_bf16(uint16_t h) { return orr_f32_of_bits((uint32_t)h << 16); }

ORR_SCALAR uint16_t orr_bf16_of_f32(float x) {
  uint32_t u = orr_bits_of_f32(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  uint32_t quiet = (u >> 16) | 0x40u;
  return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

/* Subnormals come from the exact product of the mantissa and 2^-24. */
ORR_SCALAR float orr_f32_of_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
  uint32_t normal = (rest << 13) + (112u << 23);
  uint32_t special = (rest << 13) | 0x7f800000u;
  uint32_t small = orr_bits_of_f32((float)(int32_t)rest * 0x1p-24f);
  uint32_t u = rest < 0x0400u ? small : rest < 0x7c00u ? normal : special;
  return orr_f32_of_bits(sign | u);
}

/* Subnormal results: adding 0.5 leaves the wanted bits, rounded, at the foot of the mantissa.
 */
ORR_SCALAR uint16_t orr_f16_of_f32(float x) {
  uint32_t u = orr_bits_of_f32(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  uint32_t normal = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  uint32_t small = orr_bits_of_f32(orr_f32_of_bits(rest) + 0.5f) - 0x3f000000u;
  uint32_t special = rest > 0x7f800000u ? 0x7e00u | ((rest >> 13) & 0x3ffu) : 0x7c00u;
  uint32_t h = rest >= 0x477ff000u ? special : rest < 0x38800000u ? small : normal;
  return (uint16_t)(sign | h);
}

static inline void orr_f32_from_bf16_row(int64_t n, const uint16_t *x, float *y) {
  for (int64_t i = 0; i < n; i++) y[i] = orr_f32_of_bf16(x[i]);
}

static inline void orr_bf16_from_f32_row(int64_t n, const float *x, uint16_t *y) {
  for (int64_t i = 0; i < n; i++) y[i] = orr_bf16_of_f32(x[i]);
}

static inline void orr_f32_from_f16_row(int64_t n, const uint16_t *x, float *y) {
  int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__) && !defined(__CUDACC__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
  }
#endif
  for (; i < n; i++) y[i] = orr_f32_of_f16(x[i]);
}

static inline void orr_f16_from_f32_row(int64_t n, const float *x, uint16_t *y) {
  int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__) && !defined(__CUDACC__)
  for (; i + 8 <= n; i += 8) {
    __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)(y + i), h);
  }
#endif
  for (; i < n; i++) y[i] = orr_f16_of_f32(x[i]);
}

#endif
