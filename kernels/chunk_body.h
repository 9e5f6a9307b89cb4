/* chunk_body.h: reading and writing chunks as REAL; chunk.c includes it once a number type.
 *
 * Invariant: REAL, NATIVE (its orr_dtype) and FN(name) are defined by the includer. Integers
 * are stored saturated; what is not zero is stored in a bool as true.
 * To add an element type: one row in each of the two tables.
 */

/* One row: an element type and how it becomes a number. */
#define READ(tag, type, get)                                             \
  case tag: {                                                            \
    const type *p = (const type *)v->data + off;                         \
    if (stride == 1)                                                     \
      for (int64_t i = 0; i < n; i++) buf[i] = (REAL)get(p[i]);          \
    else                                                                 \
      for (int64_t i = 0; i < n; i++) buf[i] = (REAL)get(p[i * stride]); \
    break;                                                               \
  }

/* One row: an element type and how a number becomes it. */
#define WRITE(tag, type, put)                                      \
  case tag: {                                                      \
    type *p = (type *)v->data + off;                               \
    if (stride == 1)                                               \
      for (int64_t i = 0; i < n; i++) p[i] = put(src[i]);          \
    else                                                           \
      for (int64_t i = 0; i < n; i++) p[i * stride] = put(src[i]); \
    break;                                                         \
  }

REAL *FN(orr_k_target)(const orr_view *v, int64_t off, int64_t stride, REAL *buf) {
  return v->dtype == NATIVE && stride == 1 ? (REAL *)v->data + off : buf;
}

const REAL *FN(orr_k_read)(const orr_view *v, int64_t off, int64_t stride, int64_t n,
                           REAL *buf) {
  if (v->dtype == NATIVE && stride == 1) return (const REAL *)v->data + off;
  switch (v->dtype) {
    READ(ORR_F64, double, )
    READ(ORR_F32, float, )
    READ(ORR_F16, uint16_t, orr_f32_of_f16)
    READ(ORR_BF16, uint16_t, orr_f32_of_bf16)
    READ(ORR_I64, int64_t, )
    READ(ORR_I32, int32_t, )
    READ(ORR_U8, uint8_t, )
    READ(ORR_BOOL, uint8_t, )
    default: break;
  }
  return buf;
}

void FN(orr_k_write)(const orr_view *v, int64_t off, int64_t stride, int64_t n,
                     const REAL *src) {
  if (v->dtype == NATIVE && stride == 1 && (const REAL *)v->data + off == src) return;
  switch (v->dtype) {
    WRITE(ORR_F64, double, (double))
    WRITE(ORR_F32, float, (float))
    WRITE(ORR_F16, uint16_t, to_f16)
    WRITE(ORR_BF16, uint16_t, to_bf16)
    WRITE(ORR_I64, int64_t, FN(to_i64))
    WRITE(ORR_I32, int32_t, FN(to_i32))
    WRITE(ORR_U8, uint8_t, FN(to_u8))
    WRITE(ORR_BOOL, uint8_t, 0 !=)
    default: break;
  }
}

#undef READ
#undef WRITE
