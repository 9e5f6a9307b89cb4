/* matmul.cu: a tiled matrix product on CUDA for every dtype, stride and batch: the reference,
 * and the path of what cuBLASLt does not take.
 *
 * Invariant: c (.., M, N) = a (.., M, K) b (.., K, N) + bias (N) + c; each element is summed by
 * one lane along K in order, in f32 for the halves, in int64 for integers.
 * To make it faster for a type: a kernel of its own; this one stays.
 */
#include "row.cuh"

enum { TILE = 16 };

template <typename E> struct product {
  const E *a, *b, *bias;
  E *c;
  int64_t m, n, k;
  int64_t am, ak, bk, bn, cm, cn, bias_stride;
  bool accumulate;
  orr_walk<3> batch; /* c, a, b */
};

template <typename E>
static __global__ void __launch_bounds__(TILE *TILE) product_kernel(product<E> p) {
  typedef orr_wide<E> W;
  typedef orr_compute<E> C;
  ORR_SHARED_2D(W, as, TILE, TILE + 1);
  ORR_SHARED_2D(W, bs, TILE, TILE + 1);
  const int x = (int)threadIdx.x % TILE, y = (int)threadIdx.x / TILE;
  const int64_t row = (int64_t)blockIdx.y * TILE + y, column = (int64_t)blockIdx.x * TILE + x;
  for (uint32_t batch = blockIdx.z; batch < p.batch.n; batch += gridDim.z) {
    int64_t off[3];
    p.batch.at(batch, off);
    W sum = 0;
    for (int64_t first = 0; first < p.k; first += TILE) {
      bool a_in = row < p.m && first + x < p.k, b_in = column < p.n && first + y < p.k;
      as[y][x] = a_in ? (W)orr_get(p.a + off[1] + row * p.am + (first + x) * p.ak) : (W)0;
      bs[y][x] = b_in ? (W)orr_get(p.b + off[2] + (first + y) * p.bk + column * p.bn) : (W)0;
      __syncthreads();
      for (int i = 0; i < TILE; i++) sum += as[y][i] * bs[i][x];
      __syncthreads();
    }
    if (row >= p.m || column >= p.n) continue;
    E *to = p.c + off[0] + row * p.cm + column * p.cn;
    if (p.bias) sum += (W)orr_get(p.bias + column * p.bias_stride);
    if (p.accumulate) sum += (W)orr_get(to);
    orr_put(to, (C)sum);
  }
}

ORR_EXPORT int orr_cuda_tiled_product(const orr_view *a, const orr_view *b,
                                       const orr_view *bias, const orr_view *c,
                                       bool accumulate) {
  int r = c->ndim - 2;
  orr_view heads[3] = {*c, *a, *b};
  const orr_view *views[3] = {&heads[0], &heads[1], &heads[2]};
  if (orr_numel(c) == 0) return 0;
  for (int v = 0; v < 3; v++) heads[v].ndim = r;
  orr_by_dtype(c->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    product<E> p = {};
    p.a = orr_at<E>(a, 0), p.b = orr_at<E>(b, 0), p.c = orr_at<E>(c, 0);
    p.m = c->shape[r], p.n = c->shape[r + 1], p.k = a->shape[r + 1];
    p.am = a->stride[r], p.ak = a->stride[r + 1];
    p.bk = b->stride[r], p.bn = b->stride[r + 1];
    p.cm = c->stride[r], p.cn = c->stride[r + 1];
    if (bias) p.bias = orr_at<E>(bias, 0), p.bias_stride = bias->stride[0];
    p.accumulate = accumulate;
    p.batch = orr_walk_of(orr_axes_of(views));
    const dim3 grid((unsigned)((p.n + TILE - 1) / TILE), (unsigned)((p.m + TILE - 1) / TILE),
                    p.batch.n < 65535 ? p.batch.n : 65535);
    ORR_LAUNCH(product_kernel<E>, grid, TILE * TILE, 0, p);
  });
  return 0;
}
