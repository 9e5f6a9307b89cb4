/* index.h: selection and scattering by index, embedding, masks, one-hot, flip, roll.
 *
 * Invariant: indices are i64 or i32 and count from 1. One out of range reads as zero, adds
 * nothing, and is reported in *fault (the first by position; fault may be NULL; zero it
 * before). Data is moved without conversion: x and y have one dtype. Adding is in the order of
 * the indices, by one thread an element, so it does not change from run to run.
 * To add a kernel: say which dimension is indexed, and walk the rest with a loop that skips it.
 */
#ifndef ORR_K_INDEX_H
#define ORR_K_INDEX_H

#include "chunk.h"

/* y = x with dim replaced by x's rows idx[i]; idx has one dimension. */
void orr_k_index_select(const orr_view *x, int dim, const orr_view *idx, const orr_view *y,
                        orr_fault *fault);
/* gx[.., idx[i], ..] += g[.., i, ..]. */
void orr_k_index_add(const orr_view *gx, int dim, const orr_view *idx, const orr_view *g,
                     orr_fault *fault);
/* y[p] = x[p, with p[dim] replaced by idx[p]]; idx and y have one shape, x may be larger. */
void orr_k_gather(const orr_view *x, int dim, const orr_view *idx, const orr_view *y,
                  orr_fault *fault);
/* gx[p, with p[dim] replaced by idx[p]] += g[p]; idx and g have one shape, gx may be larger. */
void orr_k_scatter_add(const orr_view *gx, int dim, const orr_view *idx, const orr_view *g,
                       orr_fault *fault);

/* y (idx's shape, D) = rows of w (V, D), the rows row0 .. row0 + V - 1 (from 0) of a
 * vocabulary: an index in the vocabulary but of another shard reads as zero, so that shards
 * add. */
void orr_k_embedding(const orr_view *w, const orr_view *idx, int64_t row0, const orr_view *y,
                     orr_fault *fault, int64_t vocabulary);
/* gw += the rows of g; zero gw before. */
void orr_k_embedding_back(const orr_view *gw, const orr_view *idx, int64_t row0,
                          const orr_view *g, int64_t vocabulary);

/* y = value where mask (bool, broadcast to x) is true, else x. */
void orr_k_masked_fill(const orr_view *x, const orr_view *mask, double value,
                       const orr_view *y);
/* y (idx's shape, C) of any dtype: 1 at class idx - class0, class0 the shard's first (from
 * 0). */
void orr_k_one_hot(const orr_view *idx, int64_t class0, int64_t classes, const orr_view *y,
                   orr_fault *fault);
/* y = x with the dimensions in mask reversed. */
void orr_k_flip(const orr_view *x, unsigned mask, const orr_view *y);
/* y[(i + shift) mod n] = x[i] along dim. */
void orr_k_roll(const orr_view *x, int dim, int64_t shift, const orr_view *y);

#endif
