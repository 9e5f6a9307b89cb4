/* loop.h: walking several views of one shape together, row by row.
 *
 * Invariant: the first view is the output. Dimensions are ordered by its strides and joined
 * where every view allows, so that views which lie alike in memory, in whatever order, are one
 * row. Rows are shared among threads past `grain` elements; a row function sees each element
 * once.
 * To write a kernel with it: a row function, and one call of orr_loop_run.
 */
#ifndef ORR_LOOP_H
#define ORR_LOOP_H

#include <stddef.h>

#include "kernel.h"

#define ORR_LOOP_VIEWS 18

#define ORR_GRAIN_LIGHT 262144 /* elements of copies and sums that are worth a second thread */
#define ORR_GRAIN_HEAVY 16384  /* of transcendental functions */

/* `n` elements: data[i] is the first of view i, stride[i] the step in elements. */
typedef void orr_row_fn(const void *context, int64_t n, char *const *data,
                        const int64_t *stride);

void orr_loop_run(int n_views, const orr_view *const *views, int64_t grain, orr_row_fn *row,
                  const void *context);

size_t orr_element_size(orr_dtype dtype);
int64_t orr_view_numel(const orr_view *view);
bool orr_view_contiguous(const orr_view *view);

/* Rows are computed in the compute type of a dtype: f32 for f16 and bf16, u8 for bool, else
 * itself. A row that is not contiguous or not of its compute type passes through a buffer, by
 * chunks. */
#define ORR_CHUNK 512
typedef struct orr_chunk {
  _Alignas(64) char bytes[ORR_CHUNK * 8];
} orr_chunk;

orr_dtype orr_compute_dtype(orr_dtype dtype);

/* `n` <= ORR_CHUNK elements of `data`, contiguous in the compute type: in place, or in
 * `buffer`. */
const void *orr_load_row(orr_dtype dtype, const void *data, int64_t stride, int64_t n,
                         orr_chunk *buffer);
/* Where to compute n elements that go to `data`; orr_store_row then takes them there. */
void *orr_open_row(orr_dtype dtype, void *data, int64_t stride, orr_chunk *buffer);
void orr_store_row(orr_dtype dtype, const void *from, void *data, int64_t stride, int64_t n);

#endif
