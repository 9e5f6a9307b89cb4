/* reduce.cu: reductions over any dimensions on CUDA.
 *
 * Invariant: f32 and the halves are joined in f32, f64 in f64, integers in int64; in trees
 * whose form depends on shapes and strides alone. Long outputs are cut in splits, which a
 * second launch joins. The kinds that are joined alike share kernels.
 * To add a kind: reduce.h, its way of joining in by_kind, and its case in take.
 */
#include "device_number.cuh"
#include "strip.cuh"

extern "C" {
#include "reduce.h"
}

/* The kind that takes a parameter, and so has a function of its own. */
enum { SUM_POW = ORR_REDUCE_COUNT + 1 };
struct plus_powers : orr_plus {};

/* What all launches of one reduction share. Outputs are numbered along `kept`. */
template <typename W>
struct target {
  orr_walk<2> kept; /* x, y */
  int kind;
  double power;
  orr_dtype dtype;
  void *y;
  W *part; /* NULL: outputs are written. Else (splits, outputs): what a launch leaves */
  uint32_t per_split; /* steps of one split, which is blockIdx.y */
  __device__ void put(uint32_t output, int64_t off, W x) const {
    if (part) part[(int64_t)blockIdx.y * kept.n + output] = x;
    else orr_write_number(y, dtype, off, x);
  }
};

template <typename W>
static __device__ inline W nothing_of(int kind) {
  switch (kind) {
    case ORR_REDUCE_PROD:
    case ORR_REDUCE_ALL: return 1;
    case ORR_REDUCE_MAX: return orr_least<W>();
    case ORR_REDUCE_MIN: return orr_greatest<W>();
    default: return 0;
  }
}

static __device__ inline float raise(float x, double p) { return powf(fabsf(x), (float)p); }
static __device__ inline double raise(double x, double p) { return pow(fabs(x), p); }
static __device__ inline int64_t raise(int64_t x, double p) {
  return (int64_t)pow(fabs((double)x), p);
}

template <typename W>
static __device__ inline W abs_of(W x) {
  return x < 0 ? -x : x;
}

#define TAKE(value)                \
  ORR_UNROLL                       \
  for (int i = 0; i < V; i++) {    \
    const W x = (W)xs[i];          \
    a[i] = join(a[i], (W)(value)); \
  }                                \
  break;

/* Joins V elements to V results; the kinds are those that J joins. */
template <typename W, int V, typename T>
static __device__ inline void take(orr_plus join, int kind, double, W (&a)[V],
                                   const T (&xs)[V]) {
  switch (kind) {
    case ORR_REDUCE_SUM: TAKE(x)
    case ORR_REDUCE_SUMSQ: TAKE(x * x)
    case ORR_REDUCE_SUMABS: TAKE(abs_of(x))
    default: TAKE(x != 0)
  }
}
template <typename W, int V, typename T>
static __device__ inline void take(plus_powers join, int, double p, W (&a)[V],
                                   const T (&xs)[V]) {
  do {
    TAKE(raise(x, p))
  } while (0);
}
template <typename W, int V, typename T>
static __device__ inline void take(orr_times join, int, double, W (&a)[V], const T (&xs)[V]) {
  do {
    TAKE(x)
  } while (0);
}
template <typename W, int V, typename T>
static __device__ inline void take(orr_larger join, int kind, double, W (&a)[V],
                                   const T (&xs)[V]) {
  switch (kind) {
    case ORR_REDUCE_MAX: TAKE(x)
    case ORR_REDUCE_MAXABS: TAKE(abs_of(x))
    default: TAKE(x != 0)
  }
}
template <typename W, int V, typename T>
static __device__ inline void take(orr_smaller join, int kind, double, W (&a)[V],
                                   const T (&xs)[V]) {
  switch (kind) {
    case ORR_REDUCE_MIN: TAKE(x)
    default: TAKE(x != 0)
  }
}

template <typename J, typename W, int V>
static __device__ inline W fold(W (&a)[V]) {
  J join;
  ORR_UNROLL
  for (int half = V / 2; half > 0; half /= 2) {
    ORR_UNROLL
    for (int i = 0; i < half; i++) a[i] = join(a[i], a[i + half]);
  }
  return a[0];
}

/* ---- rows: the lanes of an output walk its elements --------------------------------------- */

struct rows {
  orr_walk<1> reduced; /* in steps of V elements */
  uint32_t rest;       /* elements after the last step */
  int64_t rest_at, rest_stride;
  int lanes; /* of an output: 1, a warp or a block */
};

template <typename E, typename J, int V>
static __global__ void __launch_bounds__(ORR_BLOCK)
    rows_kernel(rows r, target<orr_wide<E>> t, const E *x) {
  typedef orr_wide<E> W;
  const uint32_t lane = threadIdx.x % r.lanes, per_block = blockDim.x / r.lanes;
  uint32_t begin = blockIdx.y * t.per_split, end = begin + t.per_split;
  if (end > r.reduced.n) end = r.reduced.n;
  for (uint32_t o = blockIdx.x * per_block + threadIdx.x / r.lanes; o < t.kept.n;
       o += gridDim.x * per_block) {
    int64_t off[2], at[1];
    W a[V];
    ORR_UNROLL
    for (int i = 0; i < V; i++) a[i] = nothing_of<W>(t.kind);
    t.kept.at(o, off);
    for (uint32_t i = begin + lane; i < end; i += r.lanes) {
      orr_compute<E> xs[V];
      r.reduced.at(i, at);
      orr_load<V>(x + off[0] + at[0], false, xs);
      take(J(), t.kind, t.power, a, xs);
    }
    W all[1] = {fold<J>(a)};
    for (uint32_t i = lane; blockIdx.y == 0 && i < r.rest; i += r.lanes) {
      orr_compute<E> one[1] = {orr_get(x + off[0] + r.rest_at + i * r.rest_stride)};
      take(J(), t.kind, t.power, all, one);
    }
    if (r.lanes == ORR_WARP) all[0] = orr_warp_join(all[0], J());
    else if (r.lanes > 1) all[0] = orr_block_join(all[0], nothing_of<W>(t.kind), J());
    if (lane == 0) t.put(o, off[1], all[0]);
  }
}

/* ---- columns: outputs lie side by side, lanes walk down ----------------------------------- */

struct columns {
  orr_walk<1> reduced;
  orr_walk<2> outer;          /* x, y: kept, without the dimension of the columns */
  orr_divider tiles;          /* of blockDim.x steps, of one row of outputs */
  uint32_t steps, units;      /* steps of V columns in one row; rows times tiles */
  int64_t x_stride, y_stride; /* from column to column */
};

template <typename E, typename J, int V>
static __global__ void __launch_bounds__(ORR_BLOCK)
    columns_kernel(columns c, target<orr_wide<E>> t, const E *x) {
  typedef orr_wide<E> W;
  ORR_SHARED(W, sums, ORR_BLOCK * V);
  const uint32_t tx = threadIdx.x, ty = threadIdx.y, lane = ty * blockDim.x + tx;
  uint32_t begin = blockIdx.y * t.per_split, end = begin + t.per_split;
  if (end > c.reduced.n) end = c.reduced.n;
  for (uint32_t u = blockIdx.x; u < c.units; u += gridDim.x) {
    uint32_t row = c.tiles.over(u), step = (u - row * c.tiles.d) * blockDim.x + tx;
    int64_t off[2], at[1];
    W a[V];
    ORR_UNROLL
    for (int v = 0; v < V; v++) a[v] = nothing_of<W>(t.kind);
    c.outer.at(row, off);
    const E *from = x + off[0] + (int64_t)step * V * c.x_stride;
    for (uint32_t i = begin + ty; step < c.steps && i < end; i += blockDim.y) {
      orr_compute<E> xs[V];
      c.reduced.at(i, at);
      orr_load<V>(from + at[0], false, xs);
      take(J(), t.kind, t.power, a, xs);
    }
    for (uint32_t half = blockDim.y / 2; half > 0; half /= 2) {
      if (ty >= half) {
        ORR_UNROLL
        for (int v = 0; v < V; v++) sums[v * ORR_BLOCK + lane] = a[v];
      }
      __syncthreads();
      if (ty < half) {
        ORR_UNROLL
        for (int v = 0; v < V; v++) {
          a[v] = J()(a[v], sums[v * ORR_BLOCK + lane + half * blockDim.x]);
        }
      }
      __syncthreads();
    }
    if (ty > 0 || step >= c.steps) continue;
    ORR_UNROLL
    for (int v = 0; v < V; v++) {
      uint32_t col = step * V + v;
      t.put(row * c.steps * V + col, off[1] + col * c.y_stride, a[v]);
    }
  }
}

/* ---- splits joined ------------------------------------------------------------------------ */

/* part (splits, outputs): a warp an output. */
template <typename W, typename J>
static __global__ void __launch_bounds__(ORR_BLOCK)
    finish_kernel(target<W> t, const W *part, uint32_t splits) {
  const uint32_t lane = threadIdx.x % ORR_WARP, per_block = blockDim.x / ORR_WARP;
  for (uint32_t o = blockIdx.x * per_block + threadIdx.x / ORR_WARP; o < t.kept.n;
       o += gridDim.x * per_block) {
    int64_t off[2];
    W a = nothing_of<W>(t.kind);
    for (uint32_t s = lane; s < splits; s += ORR_WARP) {
      a = J()(a, part[(int64_t)s * t.kept.n + o]);
    }
    a = orr_warp_join(a, J());
    t.kept.at(o, off);
    if (lane == 0) orr_write_number(t.y, t.dtype, off[1], a);
  }
}

/* ---- planning ----------------------------------------------------------------------------- */

enum {
  FEW = 32,       /* elements that one lane takes by itself */
  MANY = 4096,    /* outputs that are enough for one lane each */
  WARPFUL = 1024, /* elements that are enough for a warp */
  BLOCKS = 1024,  /* blocks that splits aim at */
  LEAST_STEPS = 8 /* steps of a lane in a split, at least */
};

struct plan {
  const orr_view *x, *y;
  orr_axes<2> kept;
  orr_axes<1> reduced;
  bool down; /* by columns */
  int width, lanes;
  dim3 block;
  int64_t units; /* blocks of one split */
};

static int64_t inner_stride(const int64_t *stride, int ndim) {
  int64_t s = ndim > 0 ? stride[ndim - 1] : 0;
  return s < 0 ? -s : s;
}

/* Whether loads of `width` elements fit along the innermost dimension of `inner`, with the
 * strides of `inner` and of `other`. A single reduced dimension may leave a rest. */
static bool loads_fit(const void *from, const int64_t *inner, const int64_t *shape, int ndim,
                      const int64_t *other, int n_other, int width, size_t size, bool rest) {
  if (ndim == 0 || inner[ndim - 1] != 1 || shape[ndim - 1] < width) return false;
  if (!rest && shape[ndim - 1] % width != 0) return false;
  if (!orr_aligned(from, size * width < 16 ? size * width : 16)) return false;
  for (int d = 0; d < ndim - 1; d++) {
    if (inner[d] % width != 0) return false;
  }
  for (int d = 0; d < n_other; d++) {
    if (other[d] % width != 0) return false;
  }
  return true;
}

/* Before the kept part is cut; x_from: the address of its first element. */
static void plan_columns(plan *p, const void *from, int width, size_t size) {
  const orr_axes<2> &k = p->kept;
  if (loads_fit(from, k.stride[0], k.shape, k.ndim, p->reduced.stride[0], p->reduced.ndim,
                width, size, false)) {
    p->width = width;
  }
  int64_t cols = k.shape[k.ndim - 1], steps = cols / p->width, across = ORR_WARP;
  while (across > 1 && across / 2 >= steps) across /= 2;
  p->block = dim3((unsigned)across, (unsigned)(ORR_BLOCK / across));
  p->units = k.n / cols * ((steps + across - 1) / across);
  p->lanes = (int)(ORR_BLOCK / across);
}

static void plan_rows(plan *p, const void *from, int width, size_t size) {
  const orr_axes<1> &r = p->reduced;
  if (loads_fit(from, r.stride[0], r.shape, r.ndim, p->kept.stride[0], p->kept.ndim, width,
                size, r.ndim == 1)) {
    p->width = width;
  }
  bool single = r.n <= FEW && p->kept.n >= MANY;
  bool warp = r.n <= WARPFUL || (p->kept.n >= MANY && r.n <= 8 * WARPFUL);
  p->lanes = single ? 1 : warp ? ORR_WARP : ORR_BLOCK;
  p->block = dim3(ORR_BLOCK);
  p->units = (p->kept.n + ORR_BLOCK / p->lanes - 1) / (ORR_BLOCK / p->lanes);
}

static void plan_launch(plan *p, const void *from, int width) {
  int64_t step = inner_stride(p->reduced.stride[0], p->reduced.ndim);
  int64_t across = inner_stride(p->kept.stride[0], p->kept.ndim);
  size_t size = orr_size_of(p->x->dtype);
  bool few = p->reduced.n <= FEW && p->kept.n >= MANY;
  p->width = 1;
  p->down = p->kept.ndim > 0 && p->reduced.ndim > 0 && step > across && !few;
  if (p->down) plan_columns(p, from, width, size);
  else plan_rows(p, from, width, size);
}

/* Splits of `steps` steps, and the steps of one. */
static uint32_t splits_of(const plan *p, int64_t steps, uint32_t *per_split) {
  bool may = p->units < BLOCKS / 2 && (p->down || p->lanes == ORR_BLOCK);
  int64_t least = (int64_t)LEAST_STEPS * p->lanes, n = may ? BLOCKS / p->units : 1;
  if (n > steps / least) n = steps / least;
  if (n < 1) n = 1;
  *per_split = (uint32_t)((steps + n - 1) / n);
  return *per_split > 0 ? (uint32_t)((steps + *per_split - 1) / *per_split) : 1;
}

static int64_t steps_of(const plan *p, const orr_axes<1> &r) {
  if (p->down || p->width == 1) return r.n;
  return r.n / r.shape[r.ndim - 1] * (r.shape[r.ndim - 1] / p->width);
}

/* ---- launching ---------------------------------------------------------------------------- */

/* Elements of a step. Powers cost more than loads; products and integers are rare, and not
 * worth the code. Bytes are masks that are counted. */
template <typename E, typename J>
static constexpr int width_of() {
  if (orr_same<J, plus_powers>::value || orr_same<J, orr_times>::value) return 1;
  return orr_types<E>::is_float || sizeof(E) == 1 ? orr_strip_width(sizeof(E)) : 1;
}

template <typename E, typename J>
static void launch_rows(const plan *p, const orr_axes<1> &reduced, dim3 grid,
                        target<orr_wide<E>> t, const E *x) {
  rows r = {};
  r.lanes = p->lanes;
  if (p->width == 1) {
    r.reduced = orr_walk_of(reduced);
    ORR_LAUNCH((rows_kernel<E, J, 1>), grid, p->block, 0, r, t, x);
    return;
  }
  const int V = width_of<E, J>();
  r.reduced = orr_walk_of(orr_strip_axes(reduced, V));
  if (reduced.ndim == 1) {
    r.rest = (uint32_t)(reduced.n % V);
    r.rest_at = reduced.n - r.rest;
    r.rest_stride = 1;
  }
  ORR_LAUNCH((rows_kernel<E, J, V>), grid, p->block, 0, r, t, x);
}

template <typename E, typename J>
static void launch_columns(const plan *p, const orr_axes<1> &reduced, dim3 grid,
                           target<orr_wide<E>> t, const E *x) {
  columns c = {};
  orr_axes<2> outer = p->kept;
  int64_t stride[2], cols = orr_axes_pop(&outer, stride);
  c.reduced = orr_walk_of(reduced);
  c.outer = orr_walk_of(outer);
  c.steps = (uint32_t)(cols / p->width);
  c.tiles = orr_divider_of((c.steps + p->block.x - 1) / p->block.x);
  c.units = (uint32_t)p->units;
  c.x_stride = stride[0], c.y_stride = stride[1];
  const int V = width_of<E, J>();
  if (p->width == 1) ORR_LAUNCH((columns_kernel<E, J, 1>), grid, p->block, 0, c, t, x);
  else ORR_LAUNCH((columns_kernel<E, J, V>), grid, p->block, 0, c, t, x);
}

/* One part of the outputs (below 2^31), all of their elements, by pieces below 2^31. */
template <typename E, typename J>
static void launch_outputs(plan *p, target<orr_wide<E>> t, const E *x) {
  typedef orr_wide<E> W;
  uint32_t splits = 0;
  plan_launch(p, x, width_of<E, J>());
  t.kept = orr_walk_of(p->kept);
  auto count = [&](const orr_axes<1> &r, const int64_t(&)[1]) {
    splits += splits_of(p, steps_of(p, r), &t.per_split);
  };
  orr_pieces(p->reduced, count);
  W *part = NULL;
  if (splits > 1) {
    part = (W *)orr_cuda_room((size_t)splits * (size_t)p->kept.n * sizeof(W));
    if (part == NULL) return;
  }
  W *to = part;
  auto launch = [&](const orr_axes<1> &r, const int64_t(&at)[1]) {
    dim3 grid(orr_grid(p->units, 1));
    grid.y = splits_of(p, steps_of(p, r), &t.per_split);
    t.part = to;
    if (p->down) launch_columns<E, J>(p, r, grid, t, x + at[0]);
    else launch_rows<E, J>(p, r, grid, t, x + at[0]);
    if (to) to += (int64_t)grid.y * p->kept.n;
  };
  const int64_t start[1] = {0};
  if (p->reduced.n == 0) launch(p->reduced, start);
  else orr_pieces(p->reduced, launch);
  if (splits <= 1) return;
  t.part = NULL;
  ORR_LAUNCH((finish_kernel<W, J>), orr_grid(p->kept.n, ORR_BLOCK / ORR_WARP), ORR_BLOCK, 0, t,
             part, splits);
}

template <typename E, typename J>
static void reduce_as(int kind, double power, const orr_view *x, unsigned mask,
                      const orr_view *y) {
  const orr_view *both[2] = {x, y}, *from[1] = {x};
  plan p = {};
  p.x = x, p.y = y;
  p.reduced = orr_axes_of(from, ~mask);
  orr_pieces(orr_axes_of(both, mask), [&](const orr_axes<2> &kept, const int64_t(&at)[2]) {
    target<orr_wide<E>> t = {};
    t.kind = kind, t.power = power, t.dtype = y->dtype;
    t.y = (char *)y->data + at[1] * (int64_t)orr_size_of(y->dtype);
    p.kept = kept;
    launch_outputs<E, J>(&p, t, orr_at<E>(x, at[0]));
  });
}

static void reduce(int kind, double power, const orr_view *x, unsigned mask,
                   const orr_view *y) {
  orr_dtype dtype = x->dtype == ORR_BOOL ? ORR_U8 : x->dtype;
  orr_by_dtype(dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    if constexpr (!orr_same<E, orr_bool>::value) {
      switch (kind) {
        case ORR_REDUCE_PROD: reduce_as<E, orr_times>(kind, power, x, mask, y); break;
        case ORR_REDUCE_MAX:
        case ORR_REDUCE_MAXABS:
        case ORR_REDUCE_ANY: reduce_as<E, orr_larger>(kind, power, x, mask, y); break;
        case ORR_REDUCE_MIN:
        case ORR_REDUCE_ALL: reduce_as<E, orr_smaller>(kind, power, x, mask, y); break;
        case SUM_POW: reduce_as<E, plus_powers>(kind, power, x, mask, y); break;
        default: reduce_as<E, orr_plus>(kind, power, x, mask, y); break;
      }
    }
  });
}

ORR_EXPORT void orr_cuda_reduce(orr_reduce_kind kind, const orr_view *x, unsigned mask,
                                const orr_view *y) {
  reduce(kind, 0, x, mask, y);
}

ORR_EXPORT void orr_cuda_sum_pow(const orr_view *x, unsigned mask, double p,
                                 const orr_view *y) {
  reduce(SUM_POW, p, x, mask, y);
}
