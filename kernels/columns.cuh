/* columns.cuh: sums over all dimensions but one, the columns: gradients of weights, batch
 * statistics.
 *
 * Invariant: K numbers a column are summed at once. A column's elements are walked by the lanes
 * of a block, or, where columns lie side by side in memory, by 8 lanes a column with 32 columns
 * a block; long columns are cut in splits that a second launch adds, in their order.
 * To write one: a body with its pointers,
 *   __device__ void add(C (&sum)[K], uint32_t column, const int64_t (&off)[N]) const
 * where off is of the column's element, and
 *   __device__ void put(uint32_t column, const C (&sum)[K]) const.
 */
#ifndef ORR_COLUMNS_CUH
#define ORR_COLUMNS_CUH

#include "row.cuh"

enum { ORR_TILE = 32, ORR_TILE_LANES = 8 };

template <typename C, int K, int N, typename B> struct orr_columns {
  orr_walk<N> rest; /* of one column */
  int64_t step[N];  /* from a column to the next */
  uint32_t columns, per_split;
  C *part; /* (splits, columns, K); NULL: one split, which puts */
  B body;
  __device__ void leave(uint32_t column, const C (&sum)[K]) const {
    if (!part) {
      body.put(column, sum);
      return;
    }
    C *to = part + ((int64_t)blockIdx.y * columns + column) * K;
    ORR_UNROLL
    for (int k = 0; k < K; k++) to[k] = sum[k];
  }
  __device__ void walk(uint32_t column, uint32_t lane, uint32_t lanes, C (&sum)[K]) const {
    uint32_t begin = blockIdx.y * per_split, end = begin + per_split;
    if (end > rest.n) end = rest.n;
    ORR_UNROLL
    for (int k = 0; k < K; k++) sum[k] = 0;
    for (uint32_t i = begin + lane; i < end; i += lanes) {
      int64_t off[N];
      rest.at(i, off);
      ORR_UNROLL
      for (int v = 0; v < N; v++) off[v] += column * step[v];
      body.add(sum, column, off);
    }
  }
};

template <typename C, int K, int N, typename B>
static __global__ void __launch_bounds__(ORR_BLOCK)
    orr_columns_apart(orr_columns<C, K, N, B> c) {
  for (uint32_t column = blockIdx.x; column < c.columns; column += gridDim.x) {
    C sum[K];
    c.walk(column, threadIdx.x, blockDim.x, sum);
    ORR_UNROLL
    for (int k = 0; k < K; k++) sum[k] = orr_block_join(sum[k], (C)0, orr_plus());
    if (threadIdx.x == 0) c.leave(column, sum);
  }
}

template <typename C, int K, int N, typename B>
static __global__ void __launch_bounds__(ORR_BLOCK)
    orr_columns_tiled(orr_columns<C, K, N, B> c) {
  ORR_SHARED(C, parts, ORR_TILE_LANES * ORR_TILE * K);
  const uint32_t x = threadIdx.x % ORR_TILE, lane = threadIdx.x / ORR_TILE;
  for (uint32_t first = blockIdx.x * ORR_TILE; first < c.columns; first += gridDim.x * ORR_TILE) {
    C sum[K] = {};
    if (first + x < c.columns) c.walk(first + x, lane, ORR_TILE_LANES, sum);
    ORR_UNROLL
    for (int k = 0; k < K; k++) parts[(lane * ORR_TILE + x) * K + k] = sum[k];
    __syncthreads();
    if (lane == 0 && first + x < c.columns) {
      for (int other = 1; other < ORR_TILE_LANES; other++)
        for (int k = 0; k < K; k++) sum[k] += parts[(other * ORR_TILE + x) * K + k];
      c.leave(first + x, sum);
    }
    __syncthreads();
  }
}

template <typename C, int K, typename B>
static __global__ void orr_columns_add(const C *part, uint32_t columns, uint32_t splits, B body) {
  for (uint32_t column = orr_first(); column < columns; column += orr_step()) {
    C sum[K];
    for (int k = 0; k < K; k++) sum[k] = 0;
    for (uint32_t s = 0; s < splits; s++)
      for (int k = 0; k < K; k++) sum[k] += part[((int64_t)s * columns + column) * K + k];
    body.put(column, sum);
  }
}

/* views[0] is the one whose strides decide; all have its rank (size 1 repeats). dim: the
 * columns. */
template <typename C, int K, int N, typename B>
static inline void orr_columns_run(const orr_view *const (&views)[N], int dim, B body) {
  orr_columns<C, K, N, B> c = {};
  orr_axes<N> rest = orr_axes_of(views, 1u << dim);
  c.columns = (uint32_t)views[0]->shape[dim];
  if (c.columns == 0) return;
  c.rest = orr_walk_of(rest);
  c.body = body;
  for (int v = 0; v < N; v++)
    c.step[v] = views[v] && views[v]->shape[dim] != 1 ? views[v]->stride[dim] : 0;
  bool tiled = c.columns >= 8 && (views[0]->stride[dim] == 1 || rest.n < 64);
  uint32_t blocks = tiled ? (c.columns + ORR_TILE - 1) / ORR_TILE : c.columns;
  uint32_t least = tiled ? 256 : 4096, splits = (uint32_t)(rest.n / least);
  uint32_t wanted = blocks < 1024 ? 1024 / blocks : 1;
  if (splits > wanted) splits = wanted;
  if (splits < 1) splits = 1;
  c.per_split = (c.rest.n + splits - 1) / splits;
  if (splits > 1) {
    c.part = (C *)orr_cuda_room((size_t)splits * c.columns * K * sizeof(C));
    if (!c.part) return;
  }
  const dim3 grid(blocks < ORR_MOST_BLOCKS ? blocks : (unsigned)ORR_MOST_BLOCKS, splits);
  if (tiled) ORR_LAUNCH((orr_columns_tiled<C, K, N, B>), grid, ORR_BLOCK, 0, c);
  else ORR_LAUNCH((orr_columns_apart<C, K, N, B>), grid, ORR_BLOCK, 0, c);
  if (splits > 1)
    ORR_LAUNCH((orr_columns_add<C, K, B>), orr_grid(c.columns, ORR_BLOCK), ORR_BLOCK, 0,
               (const C *)c.part, c.columns, splits, body);
}

#endif
