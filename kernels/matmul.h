/* matmul.h: the library's own matrix product: the reference, the f64 product, and small f32
 * ones.
 *
 * Invariant: any strides; the output overlaps neither input. f16 and bf16 are summed in f32 and
 * rounded once; integers are summed in 64 bits.
 */
#ifndef ORR_MATMUL_H
#define ORR_MATMUL_H

#include "kernel.h"

/* c (m, n) = a (m, k) b (k, n), or with a batch dimension before in all three (stride 0
 * repeats); added to c where `accumulate`. One dtype. */
void orr_k_matmul(const orr_view *a, const orr_view *b, orr_view *c, bool accumulate);

/* Whether the tiles do this product best (oneDNN the other): f32, a's columns contiguous and
 * few, as in the gradient of a weight from one batch. */
bool orr_k_matmul_excels(const orr_view *a, const orr_view *b, const orr_view *c);

#endif
