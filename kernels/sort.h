/* sort.h: sort and topk along one dimension, with indices.
 *
 * Invariant: stable (of equal elements the first comes first, ascending or descending); NaN is
 * greater than every number; -0 equals 0. indices are i64 (or i32) and count from 1. values may
 * be NULL. The scratch need not be set; its size follows from shapes alone.
 * To add an element type: key_of in sort.c maps it to unsigned integers of the same order.
 */
#ifndef ORR_K_SORT_H
#define ORR_K_SORT_H

#include "chunk.h"

size_t orr_k_sort_scratch(const orr_view *x, int dim);
void orr_k_sort(const orr_view *x, int dim, bool descending, const orr_view *values,
                const orr_view *indices, void *scratch);

/* The first k of the sorted row; k is values' and indices' size along dim. */
size_t orr_k_topk_scratch(const orr_view *x, int dim, int64_t k);
void orr_k_topk(const orr_view *x, int dim, bool largest, const orr_view *values,
                const orr_view *indices, void *scratch);

#endif
