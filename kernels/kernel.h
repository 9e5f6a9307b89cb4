/* kernel.h: what every kernel body sees: element types, and the view of one shard.
 *
 * Invariant: a kernel reads and writes memory through views alone. It allocates nothing, knows
 * no device, queue or layout, and never fails: what could be wrong was checked at dispatch, and
 * what only the data can tell (a label out of range) is reported through an `int *fault`.
 * To add a kernel: give it a prototype in kernels.h, a body in the file of its family.
 */
#ifndef ORR_KERNEL_H
#define ORR_KERNEL_H

#include <stdbool.h>
#include <stdint.h>

#define ORR_MAX_DIM 8

typedef enum orr_dtype {
  ORR_F64,
  ORR_F32,
  ORR_F16,
  ORR_BF16,
  ORR_I64,
  ORR_I32,
  ORR_U8,
  ORR_BOOL,
  ORR_N_DTYPES
} orr_dtype;

/* One shard of one tensor. Strides count elements; 0 repeats (broadcast). */
typedef struct orr_view {
  void *data;
  orr_dtype dtype;
  int ndim;
  int64_t shape[ORR_MAX_DIM];
  int64_t stride[ORR_MAX_DIM];
} orr_view;

#endif
