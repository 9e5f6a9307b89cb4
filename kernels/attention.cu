/* attention.cu: scaled dot-product attention on CUDA, forward and backward, tile by tile: no
 * matrix of queries by keys is kept.
 *
 * Invariant: a warp works on one query (forward, gq) or one key (gk, gv) and walks the other
 * side in tiles of at most a warp's lanes, in order, so that results do not depend on the
 * launch. Sums are in f32 for the halves. Backward makes weights again from lse.
 * Method: T. Dao et al., "FlashAttention", 2022, algorithms 1 and 4; the saved logarithm as in
 * T. Dao, "FlashAttention-2", 2023.
 * To add an input (a bias, say): where scores are made, in `score` of both kernels.
 */
#include "row.cuh"

extern "C" {
#include "attention.h"
}

enum {
  WARPS = 4,
  ITEMS = 8,                  /* numbers a lane holds of a row of results */
  PASS = ITEMS * ORR_WARP,    /* columns of a pass; wider results take several */
  MOST_SHARED = 48 * 1024
};

/* Heads of a (N, H, rows, columns) tensor. */
template <typename E> struct heads {
  E *data;
  int64_t n, h, row, column;
  __device__ E *at(uint32_t head, uint32_t n_heads, int64_t r) const {
    return data + head / n_heads * n + head % n_heads * h + r * row;
  }
};
template <typename E> static heads<E> heads_of(const orr_view *v) {
  return v ? heads<E>{orr_at<E>(v, 0), v->stride[0], v->stride[1], v->stride[2], v->stride[3]}
           : heads<E>{};
}

template <typename E> struct attention {
  typedef orr_compute<E> C;
  heads<E> q, k, v, o, g, gq, gk, gv;
  C *lse;
  int64_t lse_n, lse_h, lse_row;
  C *delta; /* (heads, T): sum of g o */
  uint32_t n_heads, all_heads, queries, keys, d, e, tile;
  bool causal;
  C scale;
  __device__ C *lse_at(uint32_t head) const {
    return lse + head / n_heads * lse_n + head % n_heads * lse_h;
  }
  __device__ bool sees(uint32_t query, uint32_t key) const {
    return query < queries && key < keys && (!causal || key <= query);
  }
};

/* `count` rows of `width` from first, below `limit`, as numbers with a step of width + 1. */
template <typename E>
static __device__ inline void load_tile(const heads<E> &t, uint32_t head, uint32_t n_heads,
                                        uint32_t first, uint32_t limit, uint32_t count,
                                        uint32_t width, orr_compute<E> *to) {
  for (uint32_t i = threadIdx.x; i < count * width; i += blockDim.x) {
    uint32_t r = i / width, c = i % width;
    bool there = first + r < limit;
    to[r * (width + 1) + c] =
        there ? orr_get(t.at(head, n_heads, first + r) + c * t.column) : (orr_compute<E>)0;
  }
}

template <typename C>
static __device__ inline C dot(const C *a, const C *b, uint32_t n) {
  C sum = 0;
  for (uint32_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

/* acc += sum over the tile's rows of weight (a lane's own) times the row's columns. */
template <typename C>
static __device__ inline void add_rows(C (&acc)[ITEMS], C weight, const C *tile, uint32_t rows,
                                       uint32_t width, uint32_t first) {
  const uint32_t lane = threadIdx.x % ORR_WARP;
  for (uint32_t j = 0; j < rows; j++) {
    C w = __shfl_sync(ORR_ALL_LANES, weight, (int)j);
    ORR_UNROLL
    for (int i = 0; i < ITEMS; i++) {
      uint32_t c = first + lane + i * ORR_WARP;
      if (c < width) acc[i] += w * tile[j * (width + 1) + c];
    }
  }
}

template <typename E>
static __device__ inline void store(const heads<E> &t, uint32_t head, uint32_t n_heads,
                                    uint32_t row, uint32_t width, uint32_t first,
                                    const orr_compute<E> (&acc)[ITEMS], orr_compute<E> factor) {
  const uint32_t lane = threadIdx.x % ORR_WARP;
  for (int i = 0; i < ITEMS; i++) {
    uint32_t c = first + lane + i * ORR_WARP;
    if (c < width) orr_put(t.at(head, n_heads, row) + c * t.column, acc[i] * factor);
  }
}

/* Room of a block: two tiles, and two rows a warp. */
template <typename C> static size_t shared_of(uint32_t tile, uint32_t d, uint32_t e) {
  return ((size_t)tile * (d + e + 2) + WARPS * (size_t)(d + e)) * sizeof(C);
}

/* ---- forward ---- */

template <typename E>
static __global__ void __launch_bounds__(WARPS *ORR_WARP) forward_kernel(attention<E> a) {
  typedef orr_compute<E> C;
  ORR_SHARED_DYNAMIC(C, room);
  C *ks = room, *vs = ks + a.tile * (a.d + 1), *qs = vs + a.tile * (a.e + 1);
  const uint32_t lane = threadIdx.x % ORR_WARP, warp = threadIdx.x / ORR_WARP;
  const uint32_t first = blockIdx.x * WARPS, query = first + warp;
  uint32_t end = a.keys;
  if (a.causal && first + WARPS < end) end = first + WARPS;
  for (uint32_t head = blockIdx.y; head < a.all_heads; head += gridDim.y) {
    for (uint32_t c0 = 0; c0 < a.e; c0 += PASS) {
      C acc[ITEMS] = {}, most = -(C)INFINITY, sum = 0;
      __syncthreads();
      load_tile(a.q, head, a.n_heads, first, a.queries, WARPS, a.d, qs);
      for (uint32_t j0 = 0; j0 < end; j0 += a.tile) {
        load_tile(a.k, head, a.n_heads, j0, a.keys, a.tile, a.d, ks);
        load_tile(a.v, head, a.n_heads, j0, a.keys, a.tile, a.e, vs);
        __syncthreads();
        bool seen = lane < a.tile && a.sees(query, j0 + lane);
        C score = seen ? a.scale * dot(qs + warp * (a.d + 1), ks + lane * (a.d + 1), a.d)
                       : -(C)INFINITY;
        C now = orr_warp_join(score, orr_larger());
        if (now < most) now = most;
        C keep = most == -(C)INFINITY ? (C)0 : orr_m_exp(most - now);
        C p = seen ? orr_m_exp(score - now) : (C)0;
        sum = sum * keep + orr_warp_join(p, orr_plus());
        ORR_UNROLL
        for (int i = 0; i < ITEMS; i++) acc[i] *= keep;
        add_rows(acc, p, vs, a.tile, a.e, c0);
        most = now;
        __syncthreads();
      }
      if (query < a.queries) {
        store(a.o, head, a.n_heads, query, a.e, c0, acc, sum != 0 ? (C)1 / sum : (C)0);
        if (lane == 0) a.lse_at(head)[query * a.lse_row] = most + orr_m_log(sum);
      }
    }
  }
}

/* ---- backward: delta, then the queries' side, then the keys' ---- */

template <typename E>
static __global__ void __launch_bounds__(ORR_BLOCK) delta_kernel(attention<E> a) {
  typedef orr_compute<E> C;
  const uint32_t lane = threadIdx.x % ORR_WARP, per_block = blockDim.x / ORR_WARP;
  const uint32_t rows = a.all_heads * a.queries;
  for (uint32_t r = blockIdx.x * per_block + threadIdx.x / ORR_WARP; r < rows;
       r += gridDim.x * per_block) {
    uint32_t head = r / a.queries, query = r % a.queries;
    C sum = 0;
    for (uint32_t c = lane; c < a.e; c += ORR_WARP)
      sum += orr_get(a.g.at(head, a.n_heads, query) + c * a.g.column) *
             orr_get(a.o.at(head, a.n_heads, query) + c * a.o.column);
    sum = orr_warp_join(sum, orr_plus());
    if (lane == 0) a.delta[r] = sum;
  }
}

template <typename E>
static __global__ void __launch_bounds__(WARPS *ORR_WARP) queries_kernel(attention<E> a) {
  typedef orr_compute<E> C;
  ORR_SHARED_DYNAMIC(C, room);
  C *ks = room, *vs = ks + a.tile * (a.d + 1), *qs = vs + a.tile * (a.e + 1);
  C *gs = qs + WARPS * (a.d + 1);
  const uint32_t lane = threadIdx.x % ORR_WARP, warp = threadIdx.x / ORR_WARP;
  const uint32_t first = blockIdx.x * WARPS, query = first + warp;
  uint32_t end = a.keys;
  if (a.causal && first + WARPS < end) end = first + WARPS;
  for (uint32_t head = blockIdx.y; head < a.all_heads; head += gridDim.y) {
    for (uint32_t c0 = 0; c0 < a.d; c0 += PASS) {
      C acc[ITEMS] = {}, lse = 0, delta = 0;
      __syncthreads();
      load_tile(a.q, head, a.n_heads, first, a.queries, WARPS, a.d, qs);
      load_tile(a.g, head, a.n_heads, first, a.queries, WARPS, a.e, gs);
      if (query < a.queries) {
        lse = a.lse_at(head)[query * a.lse_row];
        delta = a.delta[head * a.queries + query];
      }
      for (uint32_t j0 = 0; j0 < end; j0 += a.tile) {
        load_tile(a.k, head, a.n_heads, j0, a.keys, a.tile, a.d, ks);
        load_tile(a.v, head, a.n_heads, j0, a.keys, a.tile, a.e, vs);
        __syncthreads();
        C ds = 0;
        if (lane < a.tile && a.sees(query, j0 + lane)) {
          C score = a.scale * dot(qs + warp * (a.d + 1), ks + lane * (a.d + 1), a.d);
          C dp = dot(gs + warp * (a.e + 1), vs + lane * (a.e + 1), a.e);
          ds = orr_m_exp(score - lse) * (dp - delta);
        }
        add_rows(acc, ds, ks, a.tile, a.d, c0);
        __syncthreads();
      }
      if (query < a.queries) store(a.gq, head, a.n_heads, query, a.d, c0, acc, a.scale);
    }
  }
}

/* values: gv, else gk. */
template <typename E>
static __global__ void __launch_bounds__(WARPS *ORR_WARP)
    keys_kernel(attention<E> a, bool values) {
  typedef orr_compute<E> C;
  ORR_SHARED_DYNAMIC(C, room);
  C *qs = room, *gs = qs + a.tile * (a.d + 1), *ks = gs + a.tile * (a.e + 1);
  C *vs = ks + WARPS * (a.d + 1);
  const uint32_t lane = threadIdx.x % ORR_WARP, warp = threadIdx.x / ORR_WARP;
  const uint32_t first = blockIdx.x * WARPS, key = first + warp, width = values ? a.e : a.d;
  uint32_t begin = a.causal ? first / a.tile * a.tile : 0;
  for (uint32_t head = blockIdx.y; head < a.all_heads; head += gridDim.y) {
    for (uint32_t c0 = 0; c0 < width; c0 += PASS) {
      C acc[ITEMS] = {};
      __syncthreads();
      load_tile(a.k, head, a.n_heads, first, a.keys, WARPS, a.d, ks);
      load_tile(a.v, head, a.n_heads, first, a.keys, WARPS, a.e, vs);
      for (uint32_t i0 = begin; i0 < a.queries; i0 += a.tile) {
        load_tile(a.q, head, a.n_heads, i0, a.queries, a.tile, a.d, qs);
        load_tile(a.g, head, a.n_heads, i0, a.queries, a.tile, a.e, gs);
        __syncthreads();
        C weight = 0;
        uint32_t query = i0 + lane;
        if (lane < a.tile && a.sees(query, key)) {
          C score = a.scale * dot(qs + lane * (a.d + 1), ks + warp * (a.d + 1), a.d);
          weight = orr_m_exp(score - a.lse_at(head)[query * a.lse_row]);
          if (!values) {
            C dp = dot(gs + lane * (a.e + 1), vs + warp * (a.e + 1), a.e);
            weight *= dp - a.delta[head * a.queries + query];
          }
        }
        add_rows(acc, weight, values ? gs : qs, a.tile, width, c0);
        __syncthreads();
      }
      if (key < a.keys)
        store(values ? a.gv : a.gk, head, a.n_heads, key, width, c0, acc,
              values ? (C)1 : a.scale);
    }
  }
}

/* ---- launching ---- */

template <typename E> static attention<E> attention_of(const orr_k_attention_args *given) {
  typedef orr_compute<E> C;
  attention<E> a = {};
  a.q = heads_of<E>(given->q), a.k = heads_of<E>(given->k), a.v = heads_of<E>(given->v);
  a.o = heads_of<E>(given->o), a.g = heads_of<E>(given->g);
  a.gq = heads_of<E>(given->gq), a.gk = heads_of<E>(given->gk), a.gv = heads_of<E>(given->gv);
  a.lse = orr_at<C>(given->lse, 0);
  a.lse_n = given->lse->stride[0], a.lse_h = given->lse->stride[1];
  a.lse_row = given->lse->stride[2];
  a.n_heads = (uint32_t)given->q->shape[1];
  a.all_heads = (uint32_t)(given->q->shape[0] * given->q->shape[1]);
  a.queries = (uint32_t)given->q->shape[2], a.keys = (uint32_t)given->k->shape[2];
  a.d = (uint32_t)given->q->shape[3], a.e = (uint32_t)given->v->shape[3];
  a.causal = given->causal;
  a.scale = (C)given->scale;
  a.tile = ORR_WARP;
  while (a.tile > 1 && shared_of<C>(a.tile, a.d + 1, a.e + 1) > MOST_SHARED) a.tile /= 2;
  return a;
}

static dim3 grid_of(uint32_t rows, uint32_t heads) {
  return dim3((rows + WARPS - 1) / WARPS, heads < 65535 ? heads : 65535);
}

ORR_EXPORT int orr_cuda_tiled_attention(const orr_k_attention_args *given) {
  if (orr_numel(given->o) == 0 && orr_numel(given->lse) == 0) return 0;
  orr_by_float(given->q->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    attention<E> a = attention_of<E>(given);
    ORR_LAUNCH(forward_kernel<E>, grid_of(a.queries, a.all_heads), WARPS * ORR_WARP,
               shared_of<orr_compute<E>>(a.tile, a.d + 1, a.e + 1), a);
  });
  return 0;
}

ORR_EXPORT int orr_cuda_tiled_attention_back(const orr_k_attention_args *given) {
  orr_by_float(given->q->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    typedef orr_compute<E> C;
    attention<E> a = attention_of<E>(given);
    size_t shared = shared_of<C>(a.tile, a.d + 1, a.e + 1);
    uint32_t rows = a.all_heads * a.queries;
    const dim3 keys = grid_of(a.keys, a.all_heads);
    a.delta = (C *)orr_cuda_room((size_t)rows * sizeof(C) + 1);
    if (!a.delta) return;
    ORR_LAUNCH(delta_kernel<E>, orr_grid(rows, ORR_BLOCK / ORR_WARP), ORR_BLOCK, 0, a);
    ORR_LAUNCH(queries_kernel<E>, grid_of(a.queries, a.all_heads), WARPS * ORR_WARP, shared, a);
    ORR_LAUNCH(keys_kernel<E>, keys, WARPS * ORR_WARP, shared, a, true);
    ORR_LAUNCH(keys_kernel<E>, keys, WARPS * ORR_WARP, shared, a, false);
  });
  return 0;
}
