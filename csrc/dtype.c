/* dtype.c: the element types: names, sizes, and which type two types meet in.
 *
 * Invariant: promotion is commutative, associative over one kind (bool < integer < float), and
 * never loses the kind; f16 with bf16 meets in f32, since neither holds the other.
 * To add a type: a row in orr_dtype (kernels/kernel.h) and in `types`.
 */
#include <string.h>

#include "orrery_int.h"

typedef enum kind { KIND_BOOL, KIND_INT, KIND_FLOAT } kind;

static const struct {
  const char *name;
  size_t size;
  kind kind;
} types[ORR_N_DTYPES] = {
    [ORR_F64] = {"f64", 8, KIND_FLOAT}, [ORR_F32] = {"f32", 4, KIND_FLOAT},
    [ORR_F16] = {"f16", 2, KIND_FLOAT}, [ORR_BF16] = {"bf16", 2, KIND_FLOAT},
    [ORR_I64] = {"i64", 8, KIND_INT},   [ORR_I32] = {"i32", 4, KIND_INT},
    [ORR_U8] = {"u8", 1, KIND_INT},     [ORR_BOOL] = {"bool", 1, KIND_BOOL},
};

size_t orr_dtype_size(orr_dtype dtype) { return types[dtype].size; }

const char *orr_dtype_name(orr_dtype dtype) { return types[dtype].name; }

bool orr_dtype_is_float(orr_dtype dtype) { return types[dtype].kind == KIND_FLOAT; }

orr_status orr_dtype_parse(const char *name, orr_dtype *out) {
  for (int k = 0; k < ORR_N_DTYPES; k++) {
    if (strcmp(name, types[k].name) == 0) {
      *out = (orr_dtype)k;
      return ORR_OK;
    }
  }
  return orr_fail(ORR_EARG,
                  "dtype '%.40s' is unknown; the dtypes are f64, f32, f16, bf16, i64, "
                  "i32, u8 and bool",
                  name);
}

orr_dtype orr_dtype_promote(orr_dtype a, orr_dtype b) {
  if (a == b) return a;
  if (types[a].kind != types[b].kind) return types[a].kind > types[b].kind ? a : b;
  if (types[a].size != types[b].size) return types[a].size > types[b].size ? a : b;
  return ORR_F32; /* the only two of one kind and size: f16 and bf16 */
}
