/* pairs.cuh: sorting rows of (key, index) pairs.
 *
 * Invariant: a row has a power of two of pairs, the unused ones greater than all others; pairs
 * are ordered by key, then index, so that the result is that of a stable sort. K. Batcher,
 * "Sorting networks and their applications", 1968: steps within ORR_PAIRS_BLOCK pairs run in
 * shared memory, others a launch each.
 * To sort something: write its pairs, call orr_sort_pairs, read them in order.
 */
#ifndef ORR_PAIRS_CUH
#define ORR_PAIRS_CUH

#include "each.cuh"

struct orr_pair {
  uint64_t key;
  int64_t index;
};

enum { ORR_PAIRS_BLOCK = 1024 };
#define ORR_NO_PAIR (orr_pair{UINT64_MAX, INT64_MAX})

static __device__ inline void orr_pair_order(orr_pair *a, orr_pair *b, bool rising) {
  bool falls = a->key > b->key || (a->key == b->key && a->index > b->index);
  if (falls != rising) return;
  orr_pair kept = *a;
  *a = *b;
  *b = kept;
}

/* Steps of distance `from`, from / 2, ... 1 of the stage of `size`; from 0: all stages up to
 * `size`. Stages are of the pair's place within its row. */
static __global__ void __launch_bounds__(ORR_BLOCK)
    orr_pairs_near(orr_pair *pairs, uint64_t n, uint32_t row, uint32_t size, uint32_t from) {
  ORR_SHARED(orr_pair, part, ORR_PAIRS_BLOCK);
  for (uint64_t first = (uint64_t)blockIdx.x * ORR_PAIRS_BLOCK; first < n;
       first += (uint64_t)gridDim.x * ORR_PAIRS_BLOCK) {
    uint32_t m = ORR_PAIRS_BLOCK;
    if (n - first < m) m = (uint32_t)(n - first);
    for (uint32_t i = threadIdx.x; i < m; i += blockDim.x) part[i] = pairs[first + i];
    __syncthreads();
    for (uint32_t stage = from ? size : 2; stage <= size; stage *= 2) {
      for (uint32_t d = from ? from : stage / 2; d > 0; d /= 2) {
        for (uint32_t i = threadIdx.x; i < m / 2; i += blockDim.x) {
          uint32_t a = 2 * i - (i & (d - 1)), place = (uint32_t)((first + a) % row);
          orr_pair_order(&part[a], &part[a + d], !(place & stage));
        }
        __syncthreads();
      }
    }
    for (uint32_t i = threadIdx.x; i < m; i += blockDim.x) pairs[first + i] = part[i];
    __syncthreads();
  }
}

static __global__ void __launch_bounds__(ORR_BLOCK)
    orr_pairs_far(orr_pair *pairs, uint64_t n, uint32_t row, uint32_t size, uint32_t d) {
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n / 2;
       i += (uint64_t)gridDim.x * blockDim.x) {
    uint64_t a = 2 * i - (i & (d - 1));
    uint32_t place = (uint32_t)(a % row);
    orr_pair_order(&pairs[a], &pairs[a + d], !(place & size));
  }
}

static inline uint32_t orr_power_above(int64_t n) {
  uint32_t p = 1;
  while (p < (uint64_t)n) p *= 2;
  return p;
}

/* rows of `row` pairs each, row a power of two. */
static inline void orr_sort_pairs(orr_pair *pairs, int64_t rows, uint32_t row) {
  uint64_t n = (uint64_t)rows * row;
  if (row < 2) return;
  unsigned blocks = orr_grid((int64_t)n, ORR_PAIRS_BLOCK);
  uint32_t near = row < ORR_PAIRS_BLOCK ? row : (uint32_t)ORR_PAIRS_BLOCK;
  ORR_LAUNCH(orr_pairs_near, blocks, ORR_BLOCK, 0, pairs, n, row, near, 0u);
  for (uint32_t size = 2 * near; size <= row && size > near; size *= 2) {
    for (uint32_t d = size / 2; d >= ORR_PAIRS_BLOCK; d /= 2)
      ORR_LAUNCH(orr_pairs_far, orr_grid((int64_t)n / 2, ORR_BLOCK), ORR_BLOCK, 0, pairs, n, row,
                 size, d);
    ORR_LAUNCH(orr_pairs_near, blocks, ORR_BLOCK, 0, pairs, n, row, size,
               (uint32_t)ORR_PAIRS_BLOCK / 2);
  }
}

#endif
