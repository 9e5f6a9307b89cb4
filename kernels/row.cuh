/* row.cuh: kernels that work row by row: a row is all elements along one dimension.
 *
 * Invariant: the lanes of a row (its team: one lane, a warp, or a block) all call join together;
 * what they join does not depend on the grid. Offsets that a body gets are of the row's first
 * element, one a view.
 * To write one: a body with its pointers and
 *   template <typename Team> __device__ void row(const Team &team, const int64_t (&off)[N]) const
 * which walks `for (uint32_t i = team.lane; i < len; i += team.size)`, and one call of orr_rows.
 */
#ifndef ORR_ROW_CUH
#define ORR_ROW_CUH

#include "device_number.cuh"

enum orr_team_kind { ORR_TEAM_ONE, ORR_TEAM_WARP, ORR_TEAM_BLOCK };

template <int Kind> struct orr_team {
  uint32_t lane, size;
  template <typename T, typename J> __device__ T join(T x, T nothing, J j) const {
    if constexpr (Kind == ORR_TEAM_BLOCK) return orr_block_join(x, nothing, j);
    else if constexpr (Kind == ORR_TEAM_WARP) return orr_warp_join(x, j);
    else return x;
  }
  template <typename T> __device__ T sum(T x) const { return join(x, (T)0, orr_plus()); }
};

template <int Kind, int N, typename B>
static __global__ void __launch_bounds__(ORR_BLOCK) orr_row_kernel(orr_walk<N> rows, B body) {
  const uint32_t size = Kind == ORR_TEAM_ONE    ? 1
                        : Kind == ORR_TEAM_WARP ? (uint32_t)ORR_WARP
                                                : blockDim.x;
  const orr_team<Kind> team = {threadIdx.x % size, size};
  const uint32_t per_block = blockDim.x / size;
  for (uint32_t r = blockIdx.x * per_block + threadIdx.x / size; r < rows.n;
       r += gridDim.x * per_block) {
    int64_t off[N];
    rows.at(r, off);
    body.row(team, off);
  }
}

/* One number of a dtype known at run time, in the compute type of the kernel. */
template <typename C>
static __device__ inline C orr_number_at(const void *p, orr_dtype dtype, int64_t off) {
  if (dtype == ORR_F32) return (C)((const float *)p)[off];
  return (C)orr_read_number(p, dtype, off);
}

static __device__ inline int64_t orr_index_at(const void *p, orr_dtype dtype, int64_t off) {
  return dtype == ORR_I64 ? ((const int64_t *)p)[off] : (int64_t)((const int32_t *)p)[off];
}

/* A statistic of rank ndim, or one less, as a view of rank ndim with size 1 at dim. */
static inline orr_view orr_with_dim(const orr_view *v, int dim, int ndim) {
  orr_view r = *v;
  if (v->ndim == ndim) return r;
  r.ndim = ndim;
  for (int d = ndim - 1; d >= 0; d--) {
    r.shape[d] = d == dim ? 1 : v->shape[d > dim ? d - 1 : d];
    r.stride[d] = d == dim ? 0 : v->stride[d > dim ? d - 1 : d];
  }
  return r;
}

/* Row-major strides over v's shape, dim left out: offsets are the row's number. */
static inline orr_view orr_row_numbers(const orr_view *v, int dim) {
  orr_view r = *v;
  r.data = NULL;
  int64_t step = 1;
  for (int d = v->ndim - 1; d >= 0; d--) {
    r.stride[d] = d == dim ? 0 : step;
    if (d != dim) step *= v->shape[d];
    if (d == dim) r.shape[d] = 1;
  }
  return r;
}

/* Runs the body that make(offset of each view's first element) gives over the rows of views[0]
 * along dim. A lane a row where neighbours in memory are of different rows. */
template <int N, typename F>
static inline void orr_rows(const orr_view *const (&views)[N], int dim, F make) {
  int64_t len = views[0]->shape[dim];
  orr_pieces(orr_axes_of(views, 1u << dim), [&](const orr_axes<N> &x, const int64_t (&at)[N]) {
    typedef decltype(make(at)) body;
    orr_walk<N> rows = orr_walk_of(x);
    bool across = views[0]->stride[dim] != 1 && x.ndim > 0 && x.stride[0][x.ndim - 1] == 1;
    if (len <= 2 || (across && x.n >= 4096)) {
      ORR_LAUNCH((orr_row_kernel<ORR_TEAM_ONE, N, body>), orr_grid(x.n, ORR_BLOCK), ORR_BLOCK, 0,
                 rows, make(at));
    } else if (len <= 1024) {
      ORR_LAUNCH((orr_row_kernel<ORR_TEAM_WARP, N, body>), orr_grid(x.n, ORR_BLOCK / ORR_WARP),
                 ORR_BLOCK, 0, rows, make(at));
    } else {
      ORR_LAUNCH((orr_row_kernel<ORR_TEAM_BLOCK, N, body>), orr_grid(x.n, 1), ORR_BLOCK, 0, rows,
                 make(at));
    }
  });
}

#endif
