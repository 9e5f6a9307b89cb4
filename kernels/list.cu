/* list.cu: one number over a list of tensors, and their scaling, on CUDA.
 *
 * Invariant: tensors are cut in chunks, a block each; what the blocks found is joined by a last
 * launch, in the order of the chunks. Sums are made in f64, so that squares of f32 fit. A
 * tensor that fills its memory in any order is walked as one row.
 * To add a number: a body with `chunk` and its last launch.
 */
#include "device_number.cuh"
#include "strip.cuh"

enum {
  CHUNK = 16384, /* elements of a block */
  LISTED = 64,   /* tensors of one launch */
  WIDE = 8       /* elements of a load, at most */
};

typedef struct item {
  void *x;
  int64_t n;
  orr_dtype dtype;
  uint32_t first; /* block */
} item;

/* Blocks [item[i].first, item[i + 1].first) have tensor i. */
typedef struct list {
  int n, number; /* number: of the first tensor in the whole list */
  uint32_t blocks;
  int64_t part; /* number of the first block in the whole list */
  bool strided; /* one tensor, by walk */
  orr_walk<1> walk;
  item items[LISTED];
} list;

static __device__ inline int item_of(const list &l, uint32_t block) {
  int low = 0, high = l.n - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (l.items[middle].first <= block) low = middle;
    else high = middle - 1;
  }
  return low;
}

/* Calls f.take<1>(address of one element) or f.take<width>(address of the first of as many) for
 * the lane's share of the chunk. */
template <typename E, typename F>
static __device__ inline void each(const list &l, const item &t, uint32_t chunk, F f) {
  int64_t begin = (int64_t)chunk * CHUNK, end = begin + CHUNK < t.n ? begin + CHUNK : t.n;
  E *x = (E *)t.x;
  if (l.strided) {
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
      int64_t off[1];
      l.walk.at((uint32_t)i, off);
      f.template take<1>(x + off[0]);
    }
    return;
  }
  const int width = F::width;
  if (width > 1 && (uintptr_t)x % (sizeof(E) * width < 16 ? sizeof(E) * width : 16) == 0) {
    int64_t whole = begin + (end - begin) / width * width;
    for (int64_t i = begin + threadIdx.x * width; i < whole; i += blockDim.x * width) {
      f.template take<width>(x + i);
    }
    begin = whole;
  }
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) f.template take<1>(x + i);
}

template <typename F>
static __device__ inline void each_of_block(const list &l, int i, F f) {
  const item &t = l.items[i];
  uint32_t chunk = blockIdx.x - t.first;
  switch (t.dtype) {
    case ORR_F64: each<double>(l, t, chunk, f); break;
    case ORR_F32: each<float>(l, t, chunk, f); break;
    case ORR_F16: each<orr_f16>(l, t, chunk, f); break;
    default: each<orr_bf16>(l, t, chunk, f); break;
  }
}

/* Calls launch(list) for groups of tensors; each that cannot be walked as a row goes alone, by
 * pieces below 2^31. Gives the number of blocks. */
template <typename F>
static int64_t by_groups(const orr_view *const *xs, int n, F launch) {
  list l = {};
  int64_t parts = 0;
  auto flush = [&]() {
    if (l.n > 0 && l.blocks > 0) launch(l);
    parts += l.blocks;
    l.n = 0, l.blocks = 0, l.part = parts, l.strided = false;
  };
  auto add = [&](int k, void *x, int64_t count) {
    if (l.n == 0) l.number = k;
    item t = {x, count, xs[k]->dtype, l.blocks};
    l.items[l.n++] = t;
    l.blocks += (uint32_t)((count + CHUNK - 1) / CHUNK);
  };
  for (int k = 0; k < n; k++) {
    const orr_view *views[1] = {xs[k]};
    orr_axes<1> axes = orr_axes_of(views);
    if (axes.n == 0 || axes.dense(0)) {
      add(k, xs[k]->data, axes.n);
      if (l.n == LISTED) flush();
      continue;
    }
    flush();
    orr_pieces(axes, [&](const orr_axes<1> &part, const int64_t(&at)[1]) {
      l.strided = true;
      l.walk = orr_walk_of(part);
      add(k, (char *)xs[k]->data + at[0] * (int64_t)orr_size_of(xs[k]->dtype), part.n);
      flush();
    });
  }
  flush();
  return parts;
}

/* ---- norm --------------------------------------------------------------------------------- */

enum { SQUARES, MAXIMUM, POWERS };

template <int KIND>
struct norm_taker {
  static const int width = KIND == POWERS ? 1 : WIDE;
  double p, *sum;
  template <int V, typename E>
  __device__ void take(const E *x) const {
    orr_compute<E> xs[V];
    orr_load<V>(x, false, xs);
    ORR_UNROLL
    for (int i = 0; i < V; i++) {
      const double a = fabs((double)xs[i]);
      if (KIND == SQUARES) *sum += a * a;
      else if (KIND == MAXIMUM) *sum = orr_larger()(*sum, a);
      else *sum += pow(a, p);
    }
  }
};

static __device__ inline double join_block(int kind, double x) {
  if (kind == MAXIMUM) return orr_block_join(x, 0.0, orr_larger());
  return orr_block_join(x, 0.0, orr_plus());
}

template <int KIND>
static __global__ void __launch_bounds__(ORR_BLOCK)
    norm_kernel(list l, double p, double *parts) {
  double sum = 0;
  const norm_taker<KIND> taker = {p, &sum};
  each_of_block(l, item_of(l, blockIdx.x), taker);
  sum = join_block(KIND, sum);
  if (threadIdx.x == 0) parts[l.part + blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(ORR_BLOCK)
    norm_finish_kernel(int kind, const double *parts, int64_t n, void *out, orr_dtype dtype) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    sum = kind == MAXIMUM ? orr_larger()(sum, parts[i]) : sum + parts[i];
  }
  sum = join_block(kind, sum);
  if (threadIdx.x == 0) orr_write_number(out, dtype, 0, sum);
}

ORR_EXPORT void orr_cuda_list_norm(const orr_view *const *xs, int n, double p,
                                   const orr_view *out) {
  int kind = p == 2 ? SQUARES : isinf(p) ? MAXIMUM : POWERS;
  int64_t blocks = by_groups(xs, n, [](const list &) {});
  double *parts = (double *)orr_cuda_room(((size_t)blocks + 1) * sizeof *parts);
  if (parts == NULL) return;
  by_groups(xs, n, [&](const list &l) {
    if (kind == SQUARES) {
      ORR_LAUNCH(norm_kernel<SQUARES>, l.blocks, ORR_BLOCK, 0, l, p, parts);
    } else if (kind == MAXIMUM) {
      ORR_LAUNCH(norm_kernel<MAXIMUM>, l.blocks, ORR_BLOCK, 0, l, p, parts);
    } else {
      ORR_LAUNCH(norm_kernel<POWERS>, l.blocks, ORR_BLOCK, 0, l, p, parts);
    }
  });
  ORR_LAUNCH(norm_finish_kernel, 1, ORR_BLOCK, 0, kind, parts, blocks, out->data, out->dtype);
}

/* ---- infinities and NaN ------------------------------------------------------------------- */

struct bad_taker {
  static const int width = WIDE;
  int *bad;
  template <int V, typename E>
  __device__ void take(const E *x) const {
    orr_compute<E> xs[V];
    orr_load<V>(x, false, xs);
    ORR_UNROLL
    for (int i = 0; i < V; i++) *bad |= xs[i] - xs[i] != 0;
  }
};

static __global__ void __launch_bounds__(ORR_BLOCK) clear_kernel(int *flags, int n) {
  for (int i = (int)orr_first(); i < n; i += (int)orr_step()) flags[i] = 0;
}

/* Every block that finds one writes the same 1. */
static __global__ void __launch_bounds__(ORR_BLOCK) bad_kernel(list l, int *flags) {
  int bad = 0, i = item_of(l, blockIdx.x);
  const bad_taker taker = {&bad};
  each_of_block(l, i, taker);
  if (bad) *(volatile int *)&flags[l.number + i] = 1;
}

static __global__ void __launch_bounds__(ORR_BLOCK)
    bad_finish_kernel(const int *flags, int n, void *out, orr_dtype dtype) {
  int64_t sum = 0;
  for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) sum += flags[i];
  sum = orr_block_join(sum, (int64_t)0, orr_plus());
  if (threadIdx.x == 0) orr_write_number(out, dtype, 0, sum);
}

ORR_EXPORT void orr_cuda_list_bad(const orr_view *const *xs, int n, const orr_view *out) {
  int *flags = (int *)orr_cuda_room(((size_t)n + 1) * sizeof *flags);
  if (flags == NULL) return;
  ORR_LAUNCH(clear_kernel, orr_grid(n, ORR_BLOCK), ORR_BLOCK, 0, flags, n);
  by_groups(xs, n,
            [&](const list &l) { ORR_LAUNCH(bad_kernel, l.blocks, ORR_BLOCK, 0, l, flags); });
  ORR_LAUNCH(bad_finish_kernel, 1, ORR_BLOCK, 0, flags, n, out->data, out->dtype);
}

/* ---- scaling ------------------------------------------------------------------------------ */

struct scale_taker {
  static const int width = WIDE;
  double factor;
  template <int V, typename E>
  __device__ void take(E *x) const {
    orr_compute<E> xs[V];
    orr_load<V>(x, false, xs);
    ORR_UNROLL
    for (int i = 0; i < V; i++) xs[i] *= (orr_compute<E>)factor;
    orr_store<V>(x, xs);
  }
};

static __global__ void __launch_bounds__(ORR_BLOCK)
    scale_kernel(list l, const void *by, orr_dtype dtype, double factor) {
  const scale_taker taker = {by ? orr_read_number(by, dtype, 0) : factor};
  each_of_block(l, item_of(l, blockIdx.x), taker);
}

ORR_EXPORT void orr_cuda_list_scale(const orr_view *const *xs, int n, const orr_view *by,
                                    double factor) {
  const void *from = by ? by->data : NULL;
  orr_dtype dtype = by ? by->dtype : ORR_F64;
  by_groups(xs, n, [&](const list &l) {
    ORR_LAUNCH(scale_kernel, l.blocks, ORR_BLOCK, 0, l, from, dtype, factor);
  });
}
