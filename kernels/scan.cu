/* scan.cu: running sums and products along one dimension on CUDA.
 *
 * Invariant: f32 and the halves run in f32, f64 in f64, integers in int64; in trees whose form
 * depends on shapes and strides alone. A line is walked forward; reverse turns its stride. Long
 * lines are cut in splits: what comes before each is found by two launches more.
 * To add a scan: its way of joining, and a launch function.
 */
#include "device_number.cuh"

extern "C" {
#include "reduce.h"
}

enum {
  ITEMS = 8,    /* elements of a lane in one round of a block */
  SHORT = 16,   /* elements that one lane takes by itself */
  MANY = 2048,  /* lines that are enough for one lane each */
  BLOCKS = 512, /* blocks that splits aim at */
  LEAST_SPLIT = 4 * ORR_BLOCK * ITEMS
};

template <typename W, typename J>
struct scan_of {
  orr_walk<2> lines; /* x, y */
  W nothing;
  int64_t len, per_split; /* a split is blockIdx.y */
  int64_t x_stride, y_stride;
  orr_dtype dtype;
  void *y;
  W *part; /* (lines, splits): what is joined before a split; NULL: one split */
};

/* What comes before the lane's x in its block, and (total) what the whole block has. */
template <typename W, typename J>
static __device__ inline W block_before(W x, W nothing, J join, W *total) {
  ORR_SHARED(W, warps, ORR_WARP);
  const unsigned lane = threadIdx.x % ORR_WARP, warp = threadIdx.x / ORR_WARP;
  W sum = x;
  ORR_UNROLL
  for (unsigned step = 1; step < ORR_WARP; step *= 2) {
    W other = orr_shuffle_up(sum, step);
    if (lane >= step) sum = join(other, sum);
  }
  if (lane == ORR_WARP - 1) warps[warp] = sum;
  __syncthreads();
  W before = nothing, all = nothing;
  for (unsigned w = 0; w < blockDim.x / ORR_WARP; w++) {
    if (w < warp) before = join(before, warps[w]);
    all = join(all, warps[w]);
  }
  W other = orr_shuffle_up(sum, 1);
  if (lane > 0) before = join(before, other);
  *total = all;
  __syncthreads();
  return before;
}

/* ---- a lane a line ------------------------------------------------------------------------ */

template <typename E, typename J>
static __global__ void lines_kernel(scan_of<orr_wide<E>, J> s, const E *x) {
  for (uint32_t o = orr_first(); o < s.lines.n; o += orr_step()) {
    int64_t off[2];
    orr_wide<E> sum = s.nothing;
    s.lines.at(o, off);
    for (int64_t i = 0; i < s.len; i++) {
      sum = J()(sum, (orr_wide<E>)orr_get(x + off[0] + i * s.x_stride));
      orr_write_number(s.y, s.dtype, off[1] + i * s.y_stride, sum);
    }
  }
}

/* ---- a block a split of a line ------------------------------------------------------------ */

template <typename E, typename J>
static __global__ void __launch_bounds__(ORR_BLOCK)
    scan_kernel(scan_of<orr_wide<E>, J> s, const E *x) {
  typedef orr_wide<E> W;
  const J join = {};
  int64_t begin = blockIdx.y * s.per_split, end = begin + s.per_split;
  if (end > s.len) end = s.len;
  for (uint32_t o = blockIdx.x; o < s.lines.n; o += gridDim.x) {
    int64_t off[2];
    s.lines.at(o, off);
    W carry = s.part ? s.part[(int64_t)o * gridDim.y + blockIdx.y] : s.nothing;
    for (int64_t round = begin; round < end; round += blockDim.x * ITEMS) {
      int64_t i0 = round + threadIdx.x * ITEMS;
      W a[ITEMS], total;
      ORR_UNROLL
      for (int k = 0; k < ITEMS; k++) {
        a[k] = i0 + k < end ? (W)orr_get(x + off[0] + (i0 + k) * s.x_stride) : s.nothing;
        if (k > 0) a[k] = join(a[k - 1], a[k]);
      }
      W before = join(carry, block_before(a[ITEMS - 1], s.nothing, join, &total));
      ORR_UNROLL
      for (int k = 0; k < ITEMS; k++) {
        if (i0 + k >= end) continue;
        orr_write_number(s.y, s.dtype, off[1] + (i0 + k) * s.y_stride, join(before, a[k]));
      }
      carry = join(carry, total);
    }
  }
}

/* part: what each split has. */
template <typename E, typename J>
static __global__ void __launch_bounds__(ORR_BLOCK)
    totals_kernel(scan_of<orr_wide<E>, J> s, const E *x) {
  typedef orr_wide<E> W;
  int64_t begin = blockIdx.y * s.per_split, end = begin + s.per_split;
  if (end > s.len) end = s.len;
  for (uint32_t o = blockIdx.x; o < s.lines.n; o += gridDim.x) {
    int64_t off[2];
    s.lines.at(o, off);
    W sum = s.nothing;
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
      sum = J()(sum, (W)orr_get(x + off[0] + i * s.x_stride));
    }
    sum = orr_block_join(sum, s.nothing, J());
    if (threadIdx.x == 0) s.part[(int64_t)o * gridDim.y + blockIdx.y] = sum;
  }
}

/* part: from what each split has to what comes before it; splits are few. */
template <typename W, typename J>
static __global__ void before_kernel(W *part, uint32_t lines, uint32_t splits, W nothing) {
  for (uint32_t o = orr_first(); o < lines; o += orr_step()) {
    W sum = nothing;
    for (uint32_t i = 0; i < splits; i++) {
      W own = part[(int64_t)o * splits + i];
      part[(int64_t)o * splits + i] = sum;
      sum = J()(sum, own);
    }
  }
}

template <typename E, typename J>
static void scan_lines(scan_of<orr_wide<E>, J> s, const orr_axes<2> &lines, const E *x) {
  typedef orr_wide<E> W;
  int64_t across = lines.ndim > 0 ? lines.stride[0][lines.ndim - 1] : 0;
  bool beside = lines.ndim > 0 && (s.x_stride < 0 ? -s.x_stride : s.x_stride) > across;
  s.lines = orr_walk_of(lines);
  if (s.len <= SHORT || (beside && lines.n >= MANY)) {
    ORR_LAUNCH((lines_kernel<E, J>), orr_grid(lines.n, ORR_BLOCK), ORR_BLOCK, 0, s, x);
    return;
  }
  int64_t splits = BLOCKS / lines.n, block = (s.len + ITEMS - 1) / ITEMS;
  if (splits > s.len / LEAST_SPLIT) splits = s.len / LEAST_SPLIT;
  if (splits < 1) splits = 1;
  s.per_split = (s.len + splits - 1) / splits;
  block = (block + ORR_WARP - 1) / ORR_WARP * ORR_WARP;
  if (block > ORR_BLOCK) block = ORR_BLOCK;
  dim3 grid(orr_grid(lines.n, 1), (unsigned)splits);
  if (splits > 1) {
    s.part = (W *)orr_cuda_room((size_t)(lines.n * splits) * sizeof(W));
    if (s.part == NULL) return;
    ORR_LAUNCH((totals_kernel<E, J>), grid, ORR_BLOCK, 0, s, x);
    ORR_LAUNCH((before_kernel<W, J>), orr_grid(lines.n, ORR_WARP), ORR_WARP, 0, s.part,
               (uint32_t)lines.n, (uint32_t)splits, s.nothing);
  }
  ORR_LAUNCH((scan_kernel<E, J>), grid, (unsigned)block, 0, s, x);
}

template <typename J>
static void scan(int nothing, const orr_view *x, int dim, bool reverse, const orr_view *y) {
  const orr_view *views[2] = {x, y};
  int64_t last = reverse ? x->shape[dim] - 1 : 0, sign = reverse ? -1 : 1;
  if (x->shape[dim] == 0) return;
  orr_by_dtype(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_pieces(orr_axes_of(views, 1u << dim),
               [&](const orr_axes<2> &lines, const int64_t(&at)[2]) {
                 scan_of<orr_wide<E>, J> s = {};
                 int64_t to = at[1] + last * y->stride[dim];
                 s.nothing = (orr_wide<E>)nothing;
                 s.len = x->shape[dim];
                 s.x_stride = sign * x->stride[dim], s.y_stride = sign * y->stride[dim];
                 s.dtype = y->dtype;
                 s.y = (char *)y->data + to * (int64_t)orr_size_of(y->dtype);
                 scan_lines<E, J>(s, lines, orr_at<E>(x, at[0] + last * x->stride[dim]));
               });
  });
}

ORR_EXPORT void orr_cuda_cumsum(const orr_view *x, int dim, bool reverse, const orr_view *y) {
  scan<orr_plus>(0, x, dim, reverse, y);
}

ORR_EXPORT void orr_cuda_cumprod(const orr_view *x, int dim, const orr_view *y) {
  scan<orr_times>(1, x, dim, false, y);
}

/* ---- the gradient of cumprod -------------------------------------------------------------- */

template <typename E>
struct cumprod_grad {
  orr_walk<4> lines; /* x, y, g, gx */
  int64_t len, stride[4];
  const E *x, *y, *g;
  E *gx;
};

struct least_of {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a < b ? a : b; }
};

/* A block a line. Before the first zero z, gx_i = sum_{i <= j < z} g_j y_j / x_i; at it, the
 * products leave x_z out; after it every product holds that zero. */
template <typename E>
static __global__ void __launch_bounds__(ORR_BLOCK) cumprod_back_kernel(cumprod_grad<E> c) {
  typedef orr_wide<E> W;
  for (uint32_t o = blockIdx.x; o < c.lines.n; o += gridDim.x) {
    int64_t off[4], z = c.len;
    c.lines.at(o, off);
    const E *x = c.x + off[0], *y = c.y + off[1], *g = c.g + off[2];
    E *gx = c.gx + off[3];
    for (int64_t i = threadIdx.x; i < z; i += blockDim.x) {
      if (orr_get(x + i * c.stride[0]) == 0) z = i;
    }
    z = orr_block_join(z, c.len, least_of());
    W carry = 0, total;
    for (int64_t end = z; end > 0; end -= blockDim.x) {
      int64_t i = end - 1 - threadIdx.x;
      W own = 0;
      if (i >= 0) own = (W)orr_get(g + i * c.stride[2]) * (W)orr_get(y + i * c.stride[1]);
      W after = carry + block_before(own, (W)0, orr_plus(), &total);
      if (i >= 0) orr_put(gx + i * c.stride[3], (after + own) / orr_get(x + i * c.stride[0]));
      carry += total;
    }
    for (int64_t i = z + 1 + threadIdx.x; i < c.len; i += blockDim.x) {
      orr_put(gx + i * c.stride[3], (W)0);
    }
    W product = z > 0 ? (W)orr_get(y + (z - 1) * c.stride[1]) : (W)1, sum = 0;
    for (int64_t begin = z; begin < c.len; begin += blockDim.x) {
      int64_t j = begin + threadIdx.x;
      W own = j > z && j < c.len ? (W)orr_get(x + j * c.stride[0]) : (W)1;
      W before = product * block_before(own, (W)1, orr_times(), &total);
      if (j < c.len) sum += (W)orr_get(g + j * c.stride[2]) * (before * own);
      product *= total;
    }
    sum = orr_block_join(sum, (W)0, orr_plus());
    if (threadIdx.x == 0 && z < c.len) orr_put(gx + z * c.stride[3], sum);
  }
}

ORR_EXPORT void orr_cuda_cumprod_back(const orr_view *x, const orr_view *y, const orr_view *g,
                                      int dim, const orr_view *gx) {
  const orr_view *views[4] = {x, y, g, gx};
  int64_t block = (x->shape[dim] + ORR_WARP - 1) / ORR_WARP * ORR_WARP;
  if (block == 0) return;
  if (block > ORR_BLOCK) block = ORR_BLOCK;
  orr_by_float(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_pieces(
        orr_axes_of(views, 1u << dim), [&](const orr_axes<4> &lines, const int64_t(&at)[4]) {
          cumprod_grad<E> c = {};
          c.lines = orr_walk_of(lines);
          c.len = x->shape[dim];
          for (int v = 0; v < 4; v++) c.stride[v] = views[v]->stride[dim];
          c.x = orr_at<E>(x, at[0]), c.y = orr_at<E>(y, at[1]), c.g = orr_at<E>(g, at[2]);
          c.gx = orr_at<E>(gx, at[3]);
          ORR_LAUNCH(cumprod_back_kernel<E>, orr_grid(lines.n, 1), (unsigned)block, 0, c);
        });
  });
}
