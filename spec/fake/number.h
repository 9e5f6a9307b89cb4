/* number.h: elements of device memory as numbers, for the fakes of libraries.
 * To add a type: its case in each.
 */
#ifndef ORR_FAKE_NUMBER_H
#define ORR_FAKE_NUMBER_H

#include <cstdint>
#include <cstring>

#include "../../kernels/half.h"

enum orr_fake_type { FAKE_F64, FAKE_F32, FAKE_F16, FAKE_BF16, FAKE_I64, FAKE_I32, FAKE_U8 };

static inline size_t orr_fake_size(orr_fake_type t) {
  static const size_t size[] = {8, 4, 2, 2, 8, 4, 1};
  return size[t];
}

static inline bool orr_fake_is_float(orr_fake_type t) { return t <= FAKE_BF16; }

/* As tf32 sees it: 10 bits behind the point, rounded to even. */
static inline double orr_fake_tf32(double x) {
  float f = (float)x;
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  if ((bits & 0x7F800000u) != 0x7F800000u) bits += 0xFFFu + (bits >> 13 & 1);
  bits &= ~0x1FFFu;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static inline double orr_fake_get(const void *p, orr_fake_type t, int64_t i) {
  switch (t) {
    case FAKE_F64: return ((const double *)p)[i];
    case FAKE_F32: return ((const float *)p)[i];
    case FAKE_F16: return orr_f32_of_f16(((const uint16_t *)p)[i]);
    case FAKE_BF16: return orr_f32_of_bf16(((const uint16_t *)p)[i]);
    case FAKE_I64: return (double)((const int64_t *)p)[i];
    case FAKE_I32: return ((const int32_t *)p)[i];
    default: return ((const uint8_t *)p)[i];
  }
}

static inline void orr_fake_put(void *p, orr_fake_type t, int64_t i, double x) {
  switch (t) {
    case FAKE_F64: ((double *)p)[i] = x; break;
    case FAKE_F32: ((float *)p)[i] = (float)x; break;
    case FAKE_F16: ((uint16_t *)p)[i] = orr_f16_of_f32((float)x); break;
    case FAKE_BF16: ((uint16_t *)p)[i] = orr_bf16_of_f32((float)x); break;
    case FAKE_I64: ((int64_t *)p)[i] = (int64_t)x; break;
    case FAKE_I32: ((int32_t *)p)[i] = (int32_t)x; break;
    default: ((uint8_t *)p)[i] = (uint8_t)x; break;
  }
}

static inline int64_t orr_fake_get_int(const void *p, orr_fake_type t, int64_t i) {
  return t == FAKE_I64   ? ((const int64_t *)p)[i]
         : t == FAKE_I32 ? ((const int32_t *)p)[i]
                         : ((const uint8_t *)p)[i];
}

static inline void orr_fake_put_int(void *p, orr_fake_type t, int64_t i, int64_t x) {
  if (t == FAKE_I64) ((int64_t *)p)[i] = x;
  else if (t == FAKE_I32) ((int32_t *)p)[i] = (int32_t)x;
  else ((uint8_t *)p)[i] = (uint8_t)x;
}

#endif
