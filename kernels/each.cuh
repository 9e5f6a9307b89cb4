/* each.cuh: kernels that work element by element, where an element needs more than the elements
 * in its place: indices, windows, coordinates.
 *
 * Invariant: views[0] is the output; the others have its rank, stride 0 (or size 1) where they
 * do not move. A coordinate is a view of its own: orr_coordinate gives one, whose offset is the
 * element's place along a dimension.
 * To write one: a body with its pointers and
 *   __device__ void at(const int64_t (&off)[N]) const
 * and one call of orr_each.
 */
#ifndef ORR_EACH_CUH
#define ORR_EACH_CUH

#include "row.cuh"

/* A piece of a walk too long for one launch, and where it begins. */
template <int N>
struct orr_part {
  orr_walk<N> walk;
  int64_t base[N];
  __device__ inline void at(uint32_t i, int64_t (&off)[N]) const {
    walk.at(i, off);
    ORR_UNROLL
    for (int v = 0; v < N; v++) off[v] += base[v];
  }
};

template <int N>
static inline orr_part<N> orr_part_of(const orr_axes<N> &x, const int64_t (&base)[N]) {
  orr_part<N> part = {orr_walk_of(x), {}};
  for (int v = 0; v < N; v++) part.base[v] = base[v];
  return part;
}

template <int N, typename B>
static __global__ void __launch_bounds__(ORR_BLOCK) orr_each_kernel(orr_part<N> part, B body) {
  for (uint32_t i = orr_first(); i < part.walk.n; i += orr_step()) {
    int64_t off[N];
    part.at(i, off);
    body.at(off);
  }
}

/* Offsets are from the first elements of the views. */
template <int N, typename B>
static inline void orr_each(const orr_view *const (&views)[N], const B &body) {
  orr_pieces(orr_axes_of(views), [&](const orr_axes<N> &x, const int64_t(&at)[N]) {
    ORR_LAUNCH((orr_each_kernel<N, B>), orr_grid(x.n, ORR_BLOCK), ORR_BLOCK, 0,
               orr_part_of(x, at), body);
  });
}

/* Of `like`'s shape: the place along dim. */
static inline orr_view orr_coordinate(const orr_view *like, int dim) {
  orr_view v = *like;
  v.data = NULL;
  for (int d = 0; d < v.ndim; d++) v.stride[d] = d == dim;
  return v;
}

/* v's strides at the dims in `keep`, 0 at the others, over like's shape. */
static inline orr_view orr_only(const orr_view *v, unsigned keep, const orr_view *like) {
  orr_view r = *like;
  r.data = v->data;
  r.dtype = v->dtype;
  for (int d = 0; d < r.ndim; d++) r.stride[d] = keep >> d & 1 ? v->stride[d] : 0;
  return r;
}

/* A vector along dim of like's shape. */
static inline orr_view orr_vector_along(const orr_view *v, int dim, const orr_view *like) {
  orr_view r = *like;
  r.data = v->data;
  r.dtype = v->dtype;
  for (int d = 0; d < r.ndim; d++) r.stride[d] = d == dim ? v->stride[v->ndim - 1] : 0;
  return r;
}

/* Row-major places in the first `ndim` dims of like's shape. */
static inline orr_view orr_places(const orr_view *like, int ndim) {
  orr_view r = *like;
  int64_t step = 1;
  r.data = NULL;
  for (int d = like->ndim - 1; d >= 0; d--) {
    r.stride[d] = d < ndim ? step : 0;
    if (d < ndim) step *= like->shape[d];
  }
  return r;
}

#endif
