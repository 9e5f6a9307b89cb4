/* copy.cu: copies and casts on CUDA, and sums of many.
 *
 * Invariant: a copy of one dtype moves bits and is exact. A cast goes through the compute types
 * of both ends, so f64 becomes f16 by way of f32.
 * To add a dtype: its element type in device.cuh.
 */
#include "strip.cuh"

extern "C" {
#include "copy.h"
}

/* ---- casts ------------------------------------------------------------------------------- */

template <typename Y>
struct cast_to {
  template <typename T>
  static __device__ orr_compute<Y> from(T x) {
    return (orr_compute<Y>)x;
  }
};
template <>
struct cast_to<uint8_t> {
  template <typename T>
  static __device__ uint8_t from(T x) {
    return (uint8_t)(int64_t)x;
  }
};
template <>
struct cast_to<orr_bool> {
  template <typename T>
  static __device__ uint8_t from(T x) {
    return x != 0;
  }
};

/* Views: y, x. */
template <typename X, typename Y>
struct cast_body {
  const X *x;
  Y *y;
  template <int V>
  __device__ void at(const int64_t (&off)[2], unsigned repeats) const {
    orr_compute<X> xs[V];
    orr_compute<Y> ys[V];
    orr_load<V>(x + off[1], repeats & 2, xs);
    ORR_UNROLL
    for (int i = 0; i < V; i++) ys[i] = cast_to<Y>::from(xs[i]);
    orr_store<V>(y + off[0], ys);
  }
};

/* Elements of a step. Casts of and to integers are rare, and not worth the code, but of masks. */
template <typename X, typename Y>
static constexpr int width_of() {
  bool wide = orr_same<X, Y>::value || sizeof(X) == 1 || orr_types<X>::is_float;
  wide = wide && (orr_same<X, Y>::value || orr_types<Y>::is_float);
  return wide ? orr_strip_width(sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y)) : 1;
}

template <typename X, typename Y>
static void copy_as(const orr_view *x, const orr_view *y) {
  const orr_view *views[2] = {y, x};
  orr_map<width_of<X, Y>()>(views, [&](const int64_t(&at)[2]) {
    return cast_body<X, Y>{orr_at<X>(x, at[1]), orr_at<Y>(y, at[0])};
  });
}

/* ---- transposes: x runs along one dimension, y along another ------------------------------ */

enum { TILE = 32, TILE_ROWS = 8 };

typedef struct transpose {
  orr_walk<2> batch; /* y, x */
  uint32_t rows, cols, tiles;
  orr_divider high, wide;     /* tiles of one matrix */
  int64_t y_stride, x_stride; /* y: from row to row; x: from column to column */
} transpose;

/* A tile is read along x's rows and written along y's columns. */
template <typename U>
static __global__ void transpose_kernel(transpose t, const U *x, U *y) {
  ORR_SHARED_2D(U, tile, TILE, TILE + 1);
  const uint32_t tx = threadIdx.x, ty = threadIdx.y;
  for (uint32_t i = blockIdx.x; i < t.tiles; i += gridDim.x) {
    uint32_t rest = t.wide.over(i), c0 = (i - rest * t.wide.d) * TILE;
    uint32_t b = t.high.over(rest), r0 = (rest - b * t.high.d) * TILE;
    int64_t off[2];
    t.batch.at(b, off);
    for (uint32_t j = ty; j < TILE; j += TILE_ROWS) {
      if (r0 + tx < t.rows && c0 + j < t.cols) {
        tile[j][tx] = x[off[1] + (c0 + j) * t.x_stride + (r0 + tx)];
      }
    }
    __syncthreads();
    for (uint32_t j = ty; j < TILE; j += TILE_ROWS) {
      if (r0 + j < t.rows && c0 + tx < t.cols) {
        y[off[0] + (r0 + j) * t.y_stride + (c0 + tx)] = tile[tx][j];
      }
    }
    __syncthreads();
  }
}

/* The dimension along which x is contiguous while y, contiguous along the last, is not; -1:
 * there is none that is worth it. */
static int transposed_dim(const orr_axes<2> &a) {
  int inner = a.ndim - 1;
  if (a.ndim < 2 || a.stride[0][inner] != 1 || a.stride[1][inner] <= 1) return -1;
  if (a.shape[inner] < TILE / 4) return -1;
  for (int d = 0; d < inner; d++) {
    if (a.stride[1][d] == 1 && a.shape[d] >= TILE / 4) return d;
  }
  return -1;
}

template <typename U>
static void copy_transposed(const orr_view *x, const orr_view *y) {
  const orr_view *views[2] = {y, x};
  orr_axes<2> all = orr_axes_of(views);
  if (transposed_dim(all) < 0) {
    copy_as<U, U>(x, y);
    return;
  }
  orr_pieces(all, [&](orr_axes<2> a, const int64_t(&at)[2]) {
    int inner = a.ndim - 1, row = transposed_dim(a);
    transpose t = {};
    int64_t rows = row < 0 ? 1 : a.shape[row], cols = a.shape[inner];
    t.rows = (uint32_t)rows, t.cols = (uint32_t)cols;
    t.x_stride = a.stride[1][inner], t.y_stride = row < 0 ? 0 : a.stride[0][row];
    t.high = orr_divider_of((rows + TILE - 1) / TILE);
    t.wide = orr_divider_of((cols + TILE - 1) / TILE);
    int64_t stride[2];
    orr_axes_pop(&a, stride);
    if (row >= 0) orr_axes_drop(&a, row);
    t.batch = orr_walk_of(a);
    t.tiles = (uint32_t)(a.n * t.high.d * t.wide.d);
    ORR_LAUNCH(transpose_kernel<U>, orr_grid(t.tiles, 1), dim3(TILE, TILE_ROWS), 0, t,
               orr_at<U>(x, at[1]), orr_at<U>(y, at[0]));
  });
}

ORR_EXPORT void orr_cuda_copy(const orr_view *x, orr_view *y) {
  if (x->dtype == y->dtype) {
    if (x->data == y->data) return;
    orr_by_size(orr_size_of(x->dtype),
                [&](auto tag) { copy_transposed<typename decltype(tag)::type>(x, y); });
    return;
  }
  orr_by_dtype(x->dtype, [&](auto from) {
    orr_by_dtype(y->dtype, [&](auto to) {
      typedef typename decltype(from)::type X;
      typedef typename decltype(to)::type Y;
      if constexpr (!orr_same<X, Y>::value) copy_as<X, Y>(x, y);
    });
  });
}

/* ---- sums of many ------------------------------------------------------------------------ */

enum { TERMS = 16 }; /* of one launch */

/* Views: y, xs. */
template <typename E>
struct many_body {
  typedef orr_compute<E> T;
  int kind, n;
  const E *x[TERMS];
  E *y;
  template <int V>
  __device__ void join(T (&sum)[V], const T (&xs)[V]) const {
    ORR_UNROLL
    for (int i = 0; i < V; i++) {
      const T a = sum[i], b = xs[i];
      if (kind == ORR_MANY_SUM) sum[i] = (T)(a + b);
      else if (kind == ORR_MANY_MAX) sum[i] = orr_larger()(a, b);
      else sum[i] = orr_smaller()(a, b);
    }
  }
  template <int V>
  __device__ void at(const int64_t (&off)[TERMS + 1], unsigned repeats) const {
    T sum[V], xs[V];
    orr_load<V>(x[0] + off[1], repeats & 2, sum);
    ORR_UNROLL
    for (int k = 1; k < TERMS; k++) {
      if (k >= n) continue;
      orr_load<V>(x[k] + off[k + 1], repeats >> (k + 1) & 1, xs);
      join<V>(sum, xs);
    }
    orr_store<V>(y + off[0], sum);
  }
};

static void join_many(int kind, const orr_view *const *xs, int n, const orr_view *y) {
  const orr_view *views[TERMS + 1] = {y};
  for (int k = 0; k < n; k++) views[k + 1] = xs[k];
  orr_by_dtype(y->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_map<orr_strip_width(sizeof(E))>(views, [&](const int64_t(&at)[TERMS + 1]) {
      many_body<E> body = {};
      body.kind = kind, body.n = n, body.y = orr_at<E>(y, at[0]);
      for (int k = 0; k < n; k++) body.x[k] = orr_at<E>(xs[k], at[k + 1]);
      return body;
    });
  });
}

/* Groups of as many terms as a launch takes. A term that is y is read before y is written. */
ORR_EXPORT void orr_cuda_reduce_many(int kind, const orr_view *const *xs, int n, orr_view *y) {
  const orr_view *terms[TERMS];
  int early = -1, taken = 0;
  for (int k = TERMS; k < n; k++) {
    if (xs[k]->data == y->data) early = k;
  }
  for (bool written = false; taken < n; written = true) {
    int count = 0;
    if (written) terms[count++] = y;
    else if (early >= 0) terms[count++] = xs[early];
    for (; taken < n && count < TERMS; taken++) {
      if (taken != early) terms[count++] = xs[taken];
    }
    join_many(kind, terms, count, y);
  }
}
