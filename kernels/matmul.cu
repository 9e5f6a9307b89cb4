/* matmul.cu: a tiled matrix product on CUDA for every dtype, stride and batch: the reference,
 * and the path of what cuBLASLt does not take.
 *
 * Invariant: c (.., M, N) = a (.., M, K) b (.., K, N) + bias (N) + c; each element is summed by
 * one lane along K in order, in f32 for the halves, modulo 2^64 for integers (which are then
 * cut to their size, as on the CPU).
 * To make it faster for a type: a kernel of its own; this one stays.
 */
#include "device.cuh"

/* A block of SIDE x SIDE lanes makes a tile of PER x PER elements a lane. */
enum { SIDE = 16, DEPTH = 16 };

template <typename E>
struct product {
  const E *a, *b, *bias; /* bias may be NULL */
  E *c;
  int64_t m, n, k;
  int64_t am, ak, bk, bn, cm, cn, bias_stride;
  bool accumulate;
  orr_walk<3> batch; /* c, a, b */
};

template <typename E>
using sum_of =
    typename std::conditional<orr_types<E>::is_float, orr_compute<E>, uint64_t>::type;

template <typename E>
static __device__ inline sum_of<E> number_at(const E *p) {
  if constexpr (orr_types<E>::is_float) return orr_get(p);
  else return (uint64_t)(int64_t)orr_get(p);
}

template <typename E>
static __device__ inline void put_sum(E *to, sum_of<E> sum) {
  if constexpr (orr_same<E, orr_bool>::value) to->byte = sum != 0;
  else orr_put(to, (orr_compute<E>)sum);
}

/* Rows first .. first + DEPTH - 1 of K of both tiles, zeros outside: neighbouring lanes load
 * neighbours in memory where one of the strides is 1. */
template <typename E, int TILE>
static __device__ inline void load_tiles(const product<E> &p, const E *a, const E *b,
                                         int64_t row, int64_t column, int64_t first,
                                         sum_of<E> (*as)[TILE + 1], sum_of<E> (*bs)[TILE + 1]) {
  for (int i = (int)threadIdx.x; i < TILE * DEPTH; i += SIDE * SIDE) {
    int x = p.am == 1 ? i % TILE : i / DEPTH, k = p.am == 1 ? i / TILE : i % DEPTH;
    bool in = row + x < p.m && first + k < p.k;
    as[k][x] = in ? number_at(a + (row + x) * p.am + (first + k) * p.ak) : (sum_of<E>)0;
    x = p.bk == 1 ? i / DEPTH : i % TILE, k = p.bk == 1 ? i % DEPTH : i / TILE;
    in = column + x < p.n && first + k < p.k;
    bs[k][x] = in ? number_at(b + (first + k) * p.bk + (column + x) * p.bn) : (sum_of<E>)0;
  }
}

template <typename E, int PER>
static __global__ void __launch_bounds__(SIDE *SIDE) product_kernel(product<E> p) {
  constexpr int TILE = SIDE * PER;
  typedef sum_of<E> W;
  ORR_SHARED_2D(W, as, DEPTH, TILE + 1);
  ORR_SHARED_2D(W, bs, DEPTH, TILE + 1);
  const int x = (int)threadIdx.x % SIDE, y = (int)threadIdx.x / SIDE;
  const int64_t across = (p.n + TILE - 1) / TILE, down = (p.m + TILE - 1) / TILE;
  for (int64_t t = blockIdx.x; t < across * down * p.batch.n; t += gridDim.x) {
    const int64_t column = t % across * TILE, row = t / across % down * TILE;
    int64_t off[3];
    W sum[PER][PER];
    p.batch.at((uint32_t)(t / across / down), off);
    ORR_UNROLL
    for (int i = 0; i < PER * PER; i++) sum[i / PER][i % PER] = 0;
    for (int64_t first = 0; first < p.k; first += DEPTH) {
      load_tiles<E, TILE>(p, p.a + off[1], p.b + off[2], row, column, first, as, bs);
      __syncthreads();
      for (int k = 0; k < DEPTH; k++) {
        W v[PER];
        ORR_UNROLL
        for (int j = 0; j < PER; j++) v[j] = bs[k][x + SIDE * j];
        ORR_UNROLL
        for (int i = 0; i < PER; i++) {
          const W u = as[k][y + SIDE * i];
          ORR_UNROLL
          for (int j = 0; j < PER; j++) sum[i][j] += u * v[j];
        }
      }
      __syncthreads();
    }
    ORR_UNROLL
    for (int i = 0; i < PER * PER; i++) {
      const int64_t r = row + y + SIDE * (i / PER), c = column + x + SIDE * (i % PER);
      if (r >= p.m || c >= p.n) continue;
      E *to = p.c + off[0] + r * p.cm + c * p.cn;
      W made = sum[i / PER][i % PER];
      if (p.bias) made += number_at(p.bias + c * p.bias_stride);
      if (p.accumulate) made += number_at(to);
      put_sum(to, made);
    }
  }
}

template <int PER, typename E>
static void launch(const product<E> &p) {
  const int64_t tile = SIDE * PER;
  int64_t tiles = (p.n + tile - 1) / tile * ((p.m + tile - 1) / tile) * p.batch.n;
  const unsigned most = 1u << 20; /* blocks */
  ORR_LAUNCH((product_kernel<E, PER>), tiles < most ? (unsigned)tiles : most, SIDE * SIDE, 0,
             p);
}

ORR_EXPORT int orr_cuda_tiled_product(const orr_view *a, const orr_view *b,
                                      const orr_view *bias, const orr_view *c,
                                      bool accumulate) {
  const int r = c->ndim - 2;
  orr_view heads[3] = {*c, *a, *b};
  const orr_view *views[3] = {&heads[0], &heads[1], &heads[2]};
  if (orr_numel(c) == 0) return 0;
  for (int v = 0; v < 3; v++) heads[v].ndim = r;
  orr_by_dtype(c->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_pieces(orr_axes_of(views), [&](const orr_axes<3> &batch, const int64_t(&at)[3]) {
      product<E> p = {};
      p.c = orr_at<E>(c, at[0]), p.a = orr_at<E>(a, at[1]), p.b = orr_at<E>(b, at[2]);
      p.m = c->shape[r], p.n = c->shape[r + 1], p.k = a->shape[r + 1];
      p.am = a->stride[r], p.ak = a->stride[r + 1];
      p.bk = b->stride[r], p.bn = b->stride[r + 1];
      p.cm = c->stride[r], p.cn = c->stride[r + 1];
      if (bias) p.bias = orr_at<E>(bias, 0), p.bias_stride = bias->stride[0];
      p.accumulate = accumulate;
      p.batch = orr_walk_of(batch);
      if (p.m > 2 * SIDE && p.n > 2 * SIDE) launch<4>(p);
      else launch<1>(p);
    });
  });
  return 0;
}
