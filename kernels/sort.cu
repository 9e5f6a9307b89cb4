/* sort.cu: sort and topk along one dimension on CUDA.
 *
 * Invariant: keys are the CPU's (sort.c): unsigned integers in the order of the numbers, NaN
 * last. Rows that fit into a tile are sorted there by one launch; topk keeps the first of each
 * tile, launch after launch, until a row is one tile; other rows are sorted in the room, as
 * many at once as it takes.
 * To add an element type: key_of.
 */
#include "pairs.cuh"

extern "C" {
#include "sort.h"
}

#ifdef ORR_FAKE /* so that checks see several rounds */
enum : int64_t { MOST_PAIRS = 20000 };
#else
enum : int64_t { MOST_PAIRS = (int64_t)4 << 20 }; /* in the room, but for one row */
#endif
enum : int64_t { MOST_LENGTH = (int64_t)1 << 31 };
enum { TILE = ORR_PAIRS_TILE, MOST_KEPT = TILE / 4 };

template <typename E>
static __device__ inline uint64_t key_of(const E *x, bool falling) {
  const uint64_t top = (uint64_t)1 << 63;
  uint64_t key;
  if constexpr (orr_types<E>::is_float) {
    double v = (double)orr_get(x) + 0.0;
    if (v != v) return falling ? 0 : UINT64_MAX;
    memcpy(&key, &v, sizeof key);
    key = key & top ? ~key : key | top;
  } else {
    key = (uint64_t)(int64_t)orr_get(x) ^ top;
  }
  return falling ? ~key : key;
}

/* Rows of x, and where the first k of each go, in order. */
template <typename E>
struct sorting {
  const E *x;
  E *values; /* may be NULL */
  void *indices;
  orr_dtype index_dtype;
  bool falling;
  uint32_t len, k;
  int64_t x_stride, value_stride, index_stride;
  orr_walk<3> rows; /* x, values, indices */
  __device__ orr_pair pair(uint32_t row, uint32_t i) const {
    int64_t off[3];
    rows.at(row, off);
    return orr_pair{key_of(x + off[0] + i * x_stride, falling), (int64_t)i};
  }
  __device__ void put(uint32_t row, uint32_t i, int64_t index) const {
    int64_t off[3];
    rows.at(row, off);
    if (values) values[off[1] + i * value_stride] = x[off[0] + index * x_stride];
    orr_write_number(indices, index_dtype, off[2] + i * index_stride, index + 1);
  }
};

/* One launch over tiles of rows: rows first .. first + count - 1, of `len` pairs (from `from`,
 * or of x), `tiles` a row, `padded` pairs a tile; the first `keep` of each go to `to`, or (one
 * tile a row) to the results. */
struct tiling {
  const orr_pair *from; /* NULL: x */
  orr_pair *to;         /* NULL: the results */
  uint32_t first, count, len, tiles, padded, keep;
};

template <typename E>
static __global__ void __launch_bounds__(ORR_BLOCK) tile_kernel(sorting<E> s, tiling t) {
  ORR_SHARED(orr_pair, part, TILE);
  const uint32_t per = TILE / t.padded;
  const uint64_t units = (uint64_t)t.count * t.tiles;
  for (uint64_t u = blockIdx.x * (uint64_t)per; u < units; u += gridDim.x * (uint64_t)per) {
    const uint32_t here = units - u < per ? (uint32_t)(units - u) : per;
    for (uint32_t i = threadIdx.x; i < here * t.padded; i += blockDim.x) {
      const uint64_t unit = u + i / t.padded;
      const uint32_t row = (uint32_t)(unit / t.tiles);
      const uint32_t at = (uint32_t)(unit % t.tiles) * t.padded + i % t.padded;
      part[i] = at >= t.len ? ORR_NO_PAIR
                : t.from    ? t.from[(uint64_t)row * t.len + at]
                            : s.pair(t.first + row, at);
    }
    __syncthreads();
    orr_sort_tile(part, here * t.padded, t.padded);
    for (uint32_t i = threadIdx.x; i < here * t.keep; i += blockDim.x) {
      const uint64_t unit = u + i / t.keep;
      const uint32_t place = i % t.keep;
      const orr_pair p = part[i / t.keep * t.padded + place];
      if (t.to) t.to[unit * t.keep + place] = p;
      else s.put(t.first + (uint32_t)unit, place, p.index);
    }
    __syncthreads();
  }
}

template <typename E>
static void by_tiles(const sorting<E> &s, const tiling &t) {
  int64_t units = (int64_t)t.count * t.tiles;
  ORR_LAUNCH(tile_kernel<E>, orr_grid(units, TILE / t.padded), ORR_BLOCK, 0, s, t);
}

/* ---- a row is a tile ---- */

template <typename E>
static void short_rows(const sorting<E> &s) {
  tiling t = {};
  t.count = s.rows.n;
  t.len = s.len;
  t.tiles = 1;
  t.padded = orr_power_above(s.len);
  t.keep = s.k;
  by_tiles(s, t);
}

/* ---- the first few of a row of many tiles ---- */

static inline uint32_t tiles_of(uint32_t len) { return len / TILE + (len % TILE != 0); }

/* Rows at once, where a row takes `pairs` of room. */
static inline uint32_t rows_at_once(uint32_t rows, int64_t pairs) {
  int64_t most = MOST_PAIRS / pairs > 0 ? MOST_PAIRS / pairs : 1;
  return most < rows ? (uint32_t)most : rows;
}

template <typename E>
static void first_few(const sorting<E> &s) {
  const uint32_t kept = tiles_of(s.len) * s.k, again = tiles_of(kept) * s.k;
  const uint32_t most = rows_at_once(s.rows.n, (int64_t)kept + again);
  orr_pair *room = (orr_pair *)orr_cuda_room((size_t)most * (kept + again) * sizeof *room);
  if (!room) return;
  for (uint32_t first = 0; first < s.rows.n; first += most) {
    tiling t = {};
    orr_pair *other = room + (size_t)most * kept;
    t.to = room;
    t.first = first;
    t.count = s.rows.n - first < most ? s.rows.n - first : most;
    t.len = s.len;
    t.padded = TILE;
    t.keep = s.k;
    for (; (t.tiles = tiles_of(t.len)) > 1; t.len = t.tiles * s.k) {
      by_tiles(s, t);
      t.from = t.to;
      t.to = other;
      other = const_cast<orr_pair *>(t.from);
    }
    t.padded = orr_power_above(t.len);
    t.to = NULL;
    by_tiles(s, t);
  }
}

/* ---- whole rows in the room ---- */

template <typename E>
static __global__ void __launch_bounds__(ORR_BLOCK)
    pairs_kernel(sorting<E> s, orr_pair *pairs, uint32_t first, uint32_t count, uint32_t row) {
  const uint64_t n = (uint64_t)count * row;
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n;
       i += (uint64_t)gridDim.x * blockDim.x) {
    const uint32_t place = (uint32_t)i & (row - 1);
    pairs[i] = place < s.len ? s.pair(first + (uint32_t)(i / row), place) : ORR_NO_PAIR;
  }
}

template <typename E>
static __global__ void __launch_bounds__(ORR_BLOCK)
    results_kernel(sorting<E> s, const orr_pair *pairs, uint32_t first, uint32_t count,
                   uint32_t row) {
  const uint64_t n = (uint64_t)count * s.k;
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n;
       i += (uint64_t)gridDim.x * blockDim.x) {
    const uint32_t r = (uint32_t)(i / s.k), place = (uint32_t)(i % s.k);
    s.put(first + r, place, pairs[(uint64_t)r * row + place].index);
  }
}

template <typename E>
static void long_rows(const sorting<E> &s) {
  const uint32_t row = orr_power_above(s.len), most = rows_at_once(s.rows.n, row);
  orr_pair *room = (orr_pair *)orr_cuda_room((size_t)most * row * sizeof *room);
  if (!room) return;
  for (uint32_t first = 0; first < s.rows.n; first += most) {
    const uint32_t count = s.rows.n - first < most ? s.rows.n - first : most;
    ORR_LAUNCH(pairs_kernel<E>, orr_grid((int64_t)count * row, ORR_BLOCK), ORR_BLOCK, 0, s,
               room, first, count, row);
    orr_sort_pairs(room, count, row);
    ORR_LAUNCH(results_kernel<E>, orr_grid((int64_t)count * s.k, ORR_BLOCK), ORR_BLOCK, 0, s,
               room, first, count, row);
  }
}

static int run(const orr_view *x, int dim, bool falling, const orr_view *values,
               const orr_view *indices) {
  const int64_t len = x->shape[dim], k = indices->shape[dim];
  const orr_view *views[3] = {x, values, indices};
  if (orr_numel(x) == 0 || k == 0) return 0;
  if (len > MOST_LENGTH) {
    orr_cuda_check(cudaErrorInvalidValue, "sorting: a row of more than 2^31 elements");
    return 0;
  }
  orr_by_dtype(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_pieces(
        orr_axes_of(views, 1u << dim), [&](const orr_axes<3> &rows, const int64_t(&at)[3]) {
          sorting<E> s = {};
          s.x = orr_at<E>(x, at[0]);
          if (values) s.values = orr_at<E>(values, at[1]);
          s.indices = (char *)indices->data + at[2] * (int64_t)orr_size_of(indices->dtype);
          s.index_dtype = indices->dtype;
          s.falling = falling;
          s.len = (uint32_t)len;
          s.k = (uint32_t)k;
          s.x_stride = x->stride[dim];
          s.value_stride = values ? values->stride[dim] : 0;
          s.index_stride = indices->stride[dim];
          s.rows = orr_walk_of(rows);
          if (len <= TILE) short_rows(s);
          else if (k <= MOST_KEPT) first_few(s);
          else long_rows(s);
        });
  });
  return 0;
}

ORR_EXPORT int orr_cuda_sort(const orr_view *x, int dim, bool descending,
                             const orr_view *values, const orr_view *indices) {
  return run(x, dim, descending, values, indices);
}

ORR_EXPORT int orr_cuda_topk(const orr_view *x, int dim, bool largest, const orr_view *values,
                             const orr_view *indices) {
  return run(x, dim, largest, values, indices);
}
