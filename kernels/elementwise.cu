/* elementwise.cu: elementwise kernels on CUDA that are not one formula of one or two numbers.
 *
 * Invariant: as elementwise.h says. What only moves elements moves bits.
 * To add one: a body (strip.cuh) and its launch function.
 */
#include "strip.cuh"

extern "C" {
#include "elementwise.h"
#include "index.h"
}

/* ---- where, masked_fill, fill ------------------------------------------------------------ */

/* Views: y, c, a, b. */
template <typename U>
struct where_body {
  const uint8_t *c;
  const U *a, *b;
  U *y;
  template <int V>
  __device__ void at(const int64_t (&off)[4], unsigned repeats) const {
    uint8_t cs[V];
    U as[V], bs[V];
    orr_load<V>(c + off[1], repeats & 2, cs);
    orr_load<V>(a + off[2], repeats & 4, as);
    orr_load<V>(b + off[3], repeats & 8, bs);
    ORR_UNROLL
    for (int i = 0; i < V; i++) as[i] = cs[i] ? as[i] : bs[i];
    orr_store<V>(y + off[0], as);
  }
};

ORR_EXPORT void orr_cuda_where(const orr_view *c, const orr_view *a, const orr_view *b,
                               orr_view *y) {
  const orr_view *views[4] = {y, c, a, b};
  orr_by_size(orr_size_of(y->dtype), [&](auto tag) {
    typedef typename decltype(tag)::type U;
    orr_map<orr_strip_width(sizeof(U))>(views, [&](const int64_t(&at)[4]) {
      return where_body<U>{orr_at<uint8_t>(c, at[1]), orr_at<U>(a, at[2]), orr_at<U>(b, at[3]),
                           orr_at<U>(y, at[0])};
    });
  });
}

/* Views: y, x, mask. */
template <typename U>
struct masked_fill_body {
  const U *x;
  const uint8_t *mask;
  U value, *y;
  template <int V>
  __device__ void at(const int64_t (&off)[3], unsigned repeats) const {
    uint8_t ms[V];
    U xs[V];
    orr_load<V>(x + off[1], repeats & 2, xs);
    orr_load<V>(mask + off[2], repeats & 4, ms);
    ORR_UNROLL
    for (int i = 0; i < V; i++) xs[i] = ms[i] ? value : xs[i];
    orr_store<V>(y + off[0], xs);
  }
};

/* The bits of a number as an element; integers by truncation, within the type's range. */
static uint64_t bits_of(orr_dtype dtype, double value) {
  uint64_t bits = 0;
  double lo = 0, hi = 255;
  switch (dtype) {
    case ORR_F64: memcpy(&bits, &value, sizeof value); return bits;
    case ORR_F32: return orr_bits_of_f32((float)value);
    case ORR_F16: return orr_f16_of_f32((float)value);
    case ORR_BF16: return orr_bf16_of_f32((float)value);
    case ORR_BOOL: return value != 0;
    case ORR_I64:
      if (value >= 0x1p63) return INT64_MAX;
      lo = -0x1p63, hi = 0x1p63;
      break;
    case ORR_I32: lo = INT32_MIN, hi = INT32_MAX; break;
    default: break;
  }
  if (value != value) return 0;
  return (uint64_t)(int64_t)(value < lo ? lo : value > hi ? hi : value);
}

ORR_EXPORT void orr_cuda_masked_fill(const orr_view *x, const orr_view *mask, double value,
                                     const orr_view *y) {
  const orr_view *views[3] = {y, x, mask};
  uint64_t bits = bits_of(y->dtype, value);
  orr_by_size(orr_size_of(y->dtype), [&](auto tag) {
    typedef typename decltype(tag)::type U;
    orr_map<orr_strip_width(sizeof(U))>(views, [&](const int64_t(&at)[3]) {
      return masked_fill_body<U>{orr_at<U>(x, at[1]), orr_at<uint8_t>(mask, at[2]), (U)bits,
                                 orr_at<U>(y, at[0])};
    });
  });
}

template <typename U>
struct fill_body {
  U value, *y;
  template <int V>
  __device__ void at(const int64_t (&off)[1], unsigned) const {
    U ys[V];
    ORR_UNROLL
    for (int i = 0; i < V; i++) ys[i] = value;
    orr_store<V>(y + off[0], ys);
  }
};

ORR_EXPORT void orr_cuda_fill(orr_view *y, double value) {
  const orr_view *views[1] = {y};
  uint64_t bits = bits_of(y->dtype, value);
  orr_by_size(orr_size_of(y->dtype), [&](auto tag) {
    typedef typename decltype(tag)::type U;
    orr_map<orr_strip_width(sizeof(U))>(views, [&](const int64_t(&at)[1]) {
      return fill_body<U>{(U)bits, orr_at<U>(y, at[0])};
    });
  });
}

/* ---- clamp ------------------------------------------------------------------------------- */

/* Views: y, x. */
template <typename E>
struct clamp_body {
  typedef orr_compute<E> T;
  T lo, hi;
  const E *x;
  E *y;
  template <int V>
  __device__ void at(const int64_t (&off)[2], unsigned repeats) const {
    T xs[V];
    orr_load<V>(x + off[1], repeats & 2, xs);
    ORR_UNROLL
    for (int i = 0; i < V; i++) xs[i] = xs[i] < lo ? lo : xs[i] > hi ? hi : xs[i];
    orr_store<V>(y + off[0], xs);
  }
};

/* Bounds that an integer type cannot hold are moved to its ends. */
static void integer_bounds(orr_dtype dtype, double *from, double *to) {
  double lo, hi;
  switch (dtype) {
    case ORR_I64: lo = -0x1p63, hi = 0x1.fffffffffffffp62; break;
    case ORR_I32: lo = INT32_MIN, hi = INT32_MAX; break;
    case ORR_U8: lo = 0, hi = 255; break;
    case ORR_BOOL: lo = 0, hi = 1; break;
    default: return;
  }
  *from = *from > lo ? (*from < hi ? ceil(*from) : hi) : lo;
  *to = *to < hi ? (*to > lo ? floor(*to) : lo) : hi;
}

ORR_EXPORT void orr_cuda_clamp(const orr_view *x, double lo, double hi, orr_view *y) {
  const orr_view *views[2] = {y, x};
  integer_bounds(y->dtype, &lo, &hi);
  orr_by_dtype(y->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    typedef orr_compute<E> T;
    orr_map<orr_strip_width(sizeof(E))>(views, [&](const int64_t(&at)[2]) {
      return clamp_body<E>{(T)lo, (T)hi, orr_at<E>(x, at[1]), orr_at<E>(y, at[0])};
    });
  });
}

/* ---- arange ------------------------------------------------------------------------------ */

template <typename E>
static __global__ void arange_kernel(uint32_t n, double start, double step, int64_t first,
                                     int64_t stride, E *y) {
  for (uint32_t i = orr_first(); i < n; i += orr_step()) {
    double value = start + step * (double)(first + i);
    orr_compute<E> as;
    if constexpr (orr_types<E>::is_float) as = (orr_compute<E>)value;
    else as = (orr_compute<E>)(int64_t)value;
    orr_put(y + (int64_t)i * stride, as);
  }
}

ORR_EXPORT void orr_cuda_arange(orr_view *y, double start, double step, int64_t first) {
  const orr_view *views[1] = {y};
  orr_axes<1> axes = orr_axes_of(views);
  int64_t stride = axes.ndim > 0 ? axes.stride[0][0] : 1, done = 0;
  orr_pieces(axes, [&](const orr_axes<1> &part, const int64_t(&at)[1]) {
    orr_by_dtype(y->dtype, [&](auto tag) {
      typedef typename decltype(tag)::type E;
      ORR_LAUNCH(arange_kernel<E>, orr_grid(part.n, ORR_BLOCK), ORR_BLOCK, 0, (uint32_t)part.n,
                 start, step, first + done, stride, orr_at<E>(y, at[0]));
    });
    done += part.n;
  });
}

/* ---- eye, triangles ---------------------------------------------------------------------- */

enum { LOWER, UPPER, EYE };

/* `cut` is column - row of the diagonal, in the piece's own numbers. */
typedef struct triangle {
  orr_walk<2> batch; /* y, x */
  orr_divider rows, cols;
  int64_t row_stride[2], col_stride[2], cut;
  uint32_t n;
  int kind;
} triangle;

/* x where it is kept, else 0; `one` for EYE, which has no x. */
template <typename U>
static __global__ void triangle_kernel(triangle t, const U *x, U one, U *y) {
  for (uint32_t i = orr_first(); i < t.n; i += orr_step()) {
    uint32_t rest = t.cols.over(i), col = i - rest * t.cols.d;
    uint32_t b = t.rows.over(rest), row = rest - b * t.rows.d;
    int64_t off[2], at = (int64_t)col - (int64_t)row;
    t.batch.at(b, off);
    bool keep = t.kind == LOWER ? at <= t.cut : t.kind == UPPER ? at >= t.cut : at == t.cut;
    U value = 0;
    if (keep && t.kind == EYE) value = one;
    else if (keep) value = x[off[1] + row * t.row_stride[1] + col * t.col_stride[1]];
    y[off[0] + row * t.row_stride[0] + col * t.col_stride[0]] = value;
  }
}

/* `rows` from `row` and `cols` from `col` of all matrices, by halves where they are many. */
template <typename U>
static void triangle_piece(triangle t, const orr_view *x, const orr_view *y, int64_t row,
                           int64_t rows, int64_t col, int64_t cols, U one) {
  if (rows * cols >= ORR_PIECE) {
    bool by_rows = rows > cols;
    int64_t half = (by_rows ? rows : cols) / 2;
    triangle_piece(t, x, y, row, by_rows ? half : rows, col, by_rows ? cols : half, one);
    if (by_rows) triangle_piece(t, x, y, row + half, rows - half, col, cols, one);
    else triangle_piece(t, x, y, row, rows, col + half, cols - half, one);
    return;
  }
  const orr_view *views[2] = {y, x};
  int64_t to = row * t.row_stride[0] + col * t.col_stride[0];
  int64_t from = row * t.row_stride[1] + col * t.col_stride[1];
  t.rows = orr_divider_of(rows), t.cols = orr_divider_of(cols);
  t.cut += row - col;
  auto launch = [&](const orr_axes<2> &part, const int64_t(&at)[2]) {
    t.batch = orr_walk_of(part);
    t.n = (uint32_t)(part.n * rows * cols);
    ORR_LAUNCH(triangle_kernel<U>, orr_grid(t.n, ORR_BLOCK), ORR_BLOCK, 0, t,
               orr_at<U>(x, at[1] + from), one, orr_at<U>(y, at[0] + to));
  };
  orr_pieces(orr_axes_of(views, 3u << (y->ndim - 2)), launch, ORR_PIECE / (rows * cols) + 1);
}

static void run_triangle(int kind, const orr_view *x, const orr_view *y, int64_t cut) {
  int r = y->ndim - 2, c = y->ndim - 1;
  triangle t = {};
  t.kind = kind, t.cut = cut;
  t.row_stride[0] = y->stride[r], t.col_stride[0] = y->stride[c];
  t.row_stride[1] = x->stride[r], t.col_stride[1] = x->stride[c];
  if (orr_numel(y) == 0) return;
  uint64_t one = bits_of(y->dtype, 1);
  orr_by_size(orr_size_of(y->dtype), [&](auto tag) {
    typedef typename decltype(tag)::type U;
    triangle_piece<U>(t, x, y, 0, y->shape[r], 0, y->shape[c], (U)one);
  });
}

ORR_EXPORT void orr_cuda_eye(orr_view *y, int64_t row0, int64_t col0) {
  run_triangle(EYE, y, y, row0 - col0);
}

ORR_EXPORT void orr_cuda_tril(const orr_view *x, orr_view *y, int64_t diagonal, int64_t row0,
                              int64_t col0) {
  run_triangle(LOWER, x, y, diagonal + row0 - col0);
}

ORR_EXPORT void orr_cuda_triu(const orr_view *x, orr_view *y, int64_t diagonal, int64_t row0,
                              int64_t col0) {
  run_triangle(UPPER, x, y, diagonal + row0 - col0);
}
