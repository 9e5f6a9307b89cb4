/* pool_tiled.h: what pool.c calls where windows tile the plane.
 *
 * Invariant: the two functions are called only with what orr_k_pool_tiles accepts.
 */
#ifndef ORR_K_POOL_TILED_H
#define ORR_K_POOL_TILED_H

#include "vector.h"

#include "pool.h"

/* f32, kernel equal to stride, no padding, dense channels in `big` (x or gx) and `indices`. y
 * must have dense channels too; g (`small` when backward) need not. */
bool orr_k_pool_tiles(const orr_view *big, const orr_view *small, const orr_view *indices,
                      const orr_window *w);
void orr_k_max_pool2d_tiled(const orr_view *x, const orr_window *w, const orr_view *y,
                            const orr_view *indices);
void orr_k_max_pool2d_back_tiled(const orr_view *g, const orr_view *indices,
                                 const orr_window *w, const orr_view *gx);

#endif
