/* device_reduce.cuh: joining the values of the lanes of a warp and of a block.
 *
 * Invariant: all lanes of the warp (of the block) call together. Values are joined in a tree
 * whose form depends on blockDim alone. A value is any plain struct of whole 32-bit words.
 * To add a way of joining: a struct with `T operator()(T a, T b) const`.
 */
#ifndef ORR_DEVICE_REDUCE_CUH
#define ORR_DEVICE_REDUCE_CUH

#define ORR_ALL_LANES 0xffffffffu

template <typename T>
static __device__ inline T orr_shuffle_xor(T x, int lanes) {
  static_assert(sizeof(T) % 4 == 0, "whole words");
  unsigned words[sizeof(T) / 4];
  memcpy(words, &x, sizeof x);
  ORR_UNROLL
  for (unsigned i = 0; i < sizeof(T) / 4; i++) {
    words[i] = __shfl_xor_sync(ORR_ALL_LANES, words[i], lanes);
  }
  memcpy(&x, words, sizeof x);
  return x;
}

/* From `lanes` below; lanes without one keep their own. */
template <typename T>
static __device__ inline T orr_shuffle_up(T x, unsigned lanes) {
  static_assert(sizeof(T) % 4 == 0, "whole words");
  unsigned words[sizeof(T) / 4];
  memcpy(words, &x, sizeof x);
  ORR_UNROLL
  for (unsigned i = 0; i < sizeof(T) / 4; i++) {
    words[i] = __shfl_up_sync(ORR_ALL_LANES, words[i], lanes);
  }
  memcpy(&x, words, sizeof x);
  return x;
}

struct orr_plus {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct orr_times {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a * b;
  }
};
/* NaN wins both. */
struct orr_larger {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return b > a || b != b ? b : a;
  }
};
struct orr_smaller {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return b < a || b != b ? b : a;
  }
};

/* The joint value of the warp, in every lane. */
template <typename T, typename J>
static __device__ inline T orr_warp_join(T x, J join) {
  ORR_UNROLL
  for (int lanes = ORR_WARP / 2; lanes > 0; lanes /= 2) x = join(x, orr_shuffle_xor(x, lanes));
  return x;
}

/* The joint value of the block (whole warps, along threadIdx.x), in every lane. `nothing` joins
 * without effect. May be called again at once. */
template <typename T, typename J>
static __device__ inline T orr_block_join(T x, T nothing, J join) {
  ORR_SHARED(T, parts, ORR_WARP);
  const unsigned warps = blockDim.x / ORR_WARP, lane = threadIdx.x % ORR_WARP;
  x = orr_warp_join(x, join);
  if (lane == 0) parts[threadIdx.x / ORR_WARP] = x;
  __syncthreads();
  x = lane < warps ? parts[lane] : nothing;
  x = orr_warp_join(x, join);
  __syncthreads();
  return x;
}

#endif
