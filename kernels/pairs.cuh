/* pairs.cuh: sorting rows of (key, index) pairs.
 *
 * Invariant: a row has a power of two of pairs, the unused ones greater than all others; pairs
 * are ordered by key, then index, so that the result is that of a stable sort. K. Batcher,
 * "Sorting networks and their applications", 1968: what lies within ORR_PAIRS_TILE pairs is
 * sorted in shared memory, farther steps are launches, two distances each.
 * To sort something: write its pairs, call orr_sort_pairs, read them in order; what fits into a
 * tile calls orr_sort_tile in a kernel of its own.
 */
#ifndef ORR_PAIRS_CUH
#define ORR_PAIRS_CUH

#include "each.cuh"

struct orr_pair {
  uint64_t key;
  int64_t index;
};

enum { ORR_PAIRS_TILE = 2048 };
#define ORR_NO_PAIR (orr_pair{UINT64_MAX, INT64_MAX})

static __device__ inline void orr_pair_order(orr_pair *a, orr_pair *b, bool rising) {
  orr_pair x = *a, y = *b;
  bool falls = x.key > y.key || (x.key == y.key && x.index > y.index);
  if (falls != rising) return;
  *a = y;
  *b = x;
}

/* Steps of distance `from`, from / 2, ... 1 of the stage of `size` over m pairs in shared
 * memory, of which the first is `first` in its array; directions by the place in rows of `row`.
 * All lanes of the block call. */
static __device__ inline void orr_pairs_steps(orr_pair *part, uint32_t m, uint64_t first,
                                              uint32_t row, uint32_t size, uint32_t from) {
  for (uint32_t d = from; d > 0; d /= 2) {
    for (uint32_t i = threadIdx.x; i < m / 2; i += blockDim.x) {
      uint32_t a = 2 * i - (i & (d - 1)), place = (uint32_t)(first + a) & (row - 1);
      orr_pair_order(&part[a], &part[a + d], !(place & size));
    }
    __syncthreads();
  }
}

/* Sorts rows of `row` pairs, m pairs in all (whole rows), that all lanes can see; they see the
 * result. */
static __device__ inline void orr_sort_tile(orr_pair *part, uint32_t m, uint32_t row) {
  for (uint32_t size = 2; size <= row; size *= 2)
    orr_pairs_steps(part, m, 0, row, size, size / 2);
}

/* from 0: all stages up to `size`; else the steps of one stage from that distance on. */
static __global__ void __launch_bounds__(ORR_BLOCK)
    orr_pairs_near(orr_pair *pairs, uint64_t n, uint32_t row, uint32_t size, uint32_t from) {
  ORR_SHARED(orr_pair, part, ORR_PAIRS_TILE);
  for (uint64_t first = (uint64_t)blockIdx.x * ORR_PAIRS_TILE; first < n;
       first += (uint64_t)gridDim.x * ORR_PAIRS_TILE) {
    uint32_t m = ORR_PAIRS_TILE;
    if (n - first < m) m = (uint32_t)(n - first);
    for (uint32_t i = threadIdx.x; i < m; i += blockDim.x) part[i] = pairs[first + i];
    __syncthreads();
    for (uint32_t stage = from ? size : 2; stage <= size; stage *= 2)
      orr_pairs_steps(part, m, first, row, stage, from ? from : stage / 2);
    for (uint32_t i = threadIdx.x; i < m; i += blockDim.x) pairs[first + i] = part[i];
    __syncthreads();
  }
}

static __global__ void __launch_bounds__(ORR_BLOCK)
    orr_pairs_far(orr_pair *pairs, uint64_t n, uint32_t row, uint32_t size, uint32_t d) {
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n / 2;
       i += (uint64_t)gridDim.x * blockDim.x) {
    uint64_t a = 2 * i - (i & (d - 1));
    orr_pair_order(&pairs[a], &pairs[a + d], !((uint32_t)(a & (row - 1)) & size));
  }
}

/* The steps of distance 2 d and d. */
static __global__ void __launch_bounds__(ORR_BLOCK)
    orr_pairs_far_twice(orr_pair *pairs, uint64_t n, uint32_t row, uint32_t size, uint32_t d) {
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n / 4;
       i += (uint64_t)gridDim.x * blockDim.x) {
    uint64_t at = 4 * i - 3 * (i & (d - 1));
    bool rising = !((uint32_t)(at & (row - 1)) & size);
    orr_pair p[4];
    ORR_UNROLL
    for (int k = 0; k < 4; k++) p[k] = pairs[at + (uint64_t)k * d];
    orr_pair_order(&p[0], &p[2], rising);
    orr_pair_order(&p[1], &p[3], rising);
    orr_pair_order(&p[0], &p[1], rising);
    orr_pair_order(&p[2], &p[3], rising);
    ORR_UNROLL
    for (int k = 0; k < 4; k++) pairs[at + (uint64_t)k * d] = p[k];
  }
}

static inline uint32_t orr_power_above(int64_t n) {
  uint32_t p = 1;
  while (p < (uint64_t)n) p *= 2;
  return p;
}

/* rows of `row` pairs each, row a power of two. */
static inline void orr_sort_pairs(orr_pair *pairs, int64_t rows, uint32_t row) {
  const uint64_t n = (uint64_t)rows * row;
  const uint32_t tile = ORR_PAIRS_TILE, first = row < tile ? row : tile;
  if (row < 2) return;
  const unsigned blocks = orr_grid((int64_t)n, tile);
  ORR_LAUNCH(orr_pairs_near, blocks, ORR_BLOCK, 0, pairs, n, row, first, 0u);
  for (uint64_t size = 2 * tile; size <= row; size *= 2) {
    uint32_t d = (uint32_t)(size / 2);
    for (; d >= 2 * tile; d /= 4)
      ORR_LAUNCH(orr_pairs_far_twice, orr_grid((int64_t)n / 4, ORR_BLOCK), ORR_BLOCK, 0, pairs,
                 n, row, (uint32_t)size, d / 2);
    if (d == tile)
      ORR_LAUNCH(orr_pairs_far, orr_grid((int64_t)n / 2, ORR_BLOCK), ORR_BLOCK, 0, pairs, n,
                 row, (uint32_t)size, d);
    ORR_LAUNCH(orr_pairs_near, blocks, ORR_BLOCK, 0, pairs, n, row, (uint32_t)size, tile / 2);
  }
}

#endif
