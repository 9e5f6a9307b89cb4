/* device_walk.cuh: walking several strided views of one shape by a flat index.
 *
 * Invariant: the host orders the dimensions by the first view's strides (the output's) and
 * joins what every view allows, so that views that lie alike in memory are one dimension. The
 * device divides 32-bit indices by multiplication; offsets are 64-bit elements.
 * To use: orr_axes_of on the host, orr_pieces to cut it where it has 2^31 elements or more, and
 * walk.at(i, off) in the kernel.
 */
#ifndef ORR_DEVICE_WALK_CUH
#define ORR_DEVICE_WALK_CUH

/* Division by d of n < 2^31 (T. Granlund and P. L. Montgomery, "Division by invariant integers
 * using multiplication", 1994). */
struct orr_divider {
  uint32_t d, magic, shift;
  __host__ __device__ uint32_t over(uint32_t n) const {
    uint32_t high = (uint32_t)(((uint64_t)n * magic) >> 32);
    return (high + n) >> shift;
  }
};

static inline orr_divider orr_divider_of(int64_t d) {
  orr_divider v = {(uint32_t)d, 0, 0};
  while (((uint64_t)1 << v.shift) < (uint64_t)d) v.shift++;
  v.magic = (uint32_t)(((((uint64_t)1 << v.shift) - (uint64_t)d) << 32) / (uint64_t)d + 1);
  return v;
}

/* Joined dimensions, outermost first; n = product of shape; ndim may be 0 (one element). */
template <int N>
struct orr_axes {
  int ndim;
  int64_t n;
  int64_t shape[ORR_MAX_DIM];
  int64_t stride[N][ORR_MAX_DIM];
  /* One dimension, along which view v moves by one (or there is one element). */
  bool dense(int v) const { return ndim == 0 || (ndim == 1 && stride[v][0] == 1); }
  /* One dimension, along which view v does not move. */
  bool repeats(int v) const { return ndim == 0 || (ndim == 1 && stride[v][0] == 0); }
};

/* The same for the device; a dimension's size is found by division. */
template <int N>
struct orr_walk {
  int ndim;
  uint32_t n;
  orr_divider shape[ORR_MAX_DIM];
  int64_t stride[N][ORR_MAX_DIM];
  /* Offsets of element i, in elements, one a view. */
  __device__ inline void at(uint32_t i, int64_t (&off)[N]) const {
    if (ndim <= 1) {
      ORR_UNROLL
      for (int v = 0; v < N; v++) off[v] = (int64_t)i * stride[v][0];
      return;
    }
    ORR_UNROLL
    for (int v = 0; v < N; v++) off[v] = 0;
    ORR_UNROLL
    for (int d = ORR_MAX_DIM - 1; d >= 0; d--) {
      if (d >= ndim) continue;
      uint32_t next = d > 0 ? shape[d].over(i) : 0, at = i - next * shape[d].d;
      i = next;
      ORR_UNROLL
      for (int v = 0; v < N; v++) off[v] += (int64_t)at * stride[v][d];
    }
  }
};

/* Whether dimension a lies outside of b: by the stride of the first view that tells. */
template <int N>
static inline bool orr_axes_outer(const orr_axes<N> &x, int a, int b) {
  for (int v = 0; v < N; v++) {
    int64_t p = x.stride[v][a], q = x.stride[v][b];
    p = p < 0 ? -p : p, q = q < 0 ? -q : q;
    if (p != q) return p > q;
  }
  return a < b;
}

template <int N>
static inline void orr_axes_swap(orr_axes<N> *x, int a, int b) {
  int64_t s = x->shape[a];
  x->shape[a] = x->shape[b], x->shape[b] = s;
  for (int v = 0; v < N; v++) {
    s = x->stride[v][a];
    x->stride[v][a] = x->stride[v][b], x->stride[v][b] = s;
  }
}

/* Over the dimensions of views[0] that are not in the bits of `skip`. views[i] may be NULL
 * (never read) or of size 1 where views[0] has more (repeats). All have the rank of views[0]. */
template <int N>
static inline orr_axes<N> orr_axes_of(const orr_view *const (&views)[N], unsigned skip = 0) {
  orr_axes<N> x = {};
  x.n = 1;
  for (int d = 0; d < views[0]->ndim; d++) {
    int64_t size = views[0]->shape[d];
    if (skip >> d & 1) continue;
    x.n *= size;
    if (size == 1) continue;
    x.shape[x.ndim] = size;
    for (int v = 0; v < N; v++) {
      bool moves = views[v] != NULL && views[v]->shape[d] != 1;
      x.stride[v][x.ndim] = moves ? views[v]->stride[d] : 0;
    }
    int at = x.ndim++;
    for (; at > 0 && orr_axes_outer(x, at, at - 1); at--) orr_axes_swap(&x, at, at - 1);
  }
  int top = 0; /* dimensions kept; joins d into top - 1 where all views allow */
  for (int d = 0; d < x.ndim; d++) {
    bool join = top > 0;
    for (int v = 0; join && v < N; v++) {
      join = x.stride[v][top - 1] == x.stride[v][d] * x.shape[d];
    }
    int to = join ? top - 1 : top;
    x.shape[to] = join ? x.shape[to] * x.shape[d] : x.shape[d];
    for (int v = 0; v < N; v++) x.stride[v][to] = x.stride[v][d];
    top += !join;
  }
  x.ndim = top;
  return x;
}

/* Takes the innermost dimension out: its size (1 where there is none) and strides. */
template <int N>
static inline int64_t orr_axes_pop(orr_axes<N> *x, int64_t (&stride)[N]) {
  for (int v = 0; v < N; v++) stride[v] = 0;
  if (x->ndim == 0) return 1;
  int d = --x->ndim;
  for (int v = 0; v < N; v++) stride[v] = x->stride[v][d];
  int64_t size = x->shape[d];
  x->n = 1;
  for (int e = 0; e < d; e++) x->n *= x->shape[e];
  return size;
}

/* Takes dimension d out. */
template <int N>
static inline void orr_axes_drop(orr_axes<N> *x, int d) {
  x->n /= x->shape[d];
  x->ndim--;
  for (int e = d; e < x->ndim; e++) {
    x->shape[e] = x->shape[e + 1];
    for (int v = 0; v < N; v++) x->stride[v][e] = x->stride[v][e + 1];
  }
}

/* The device's form; x.n below 2^31. */
template <int N>
static inline orr_walk<N> orr_walk_of(const orr_axes<N> &x) {
  orr_walk<N> w = {};
  w.ndim = x.ndim;
  w.n = (uint32_t)x.n;
  for (int d = 0; d < x.ndim; d++) {
    w.shape[d] = orr_divider_of(x.shape[d] > 0 ? x.shape[d] : 1);
    for (int v = 0; v < N; v++) w.stride[v][d] = x.stride[v][d];
  }
  return w;
}

/* Calls f(axes of a piece, its offsets in elements, one a view) for pieces of less than `limit`
 * elements that make up x; none where x is empty. */
enum : int64_t { ORR_PIECE = (int64_t)1 << 31 };

template <int N, typename F>
static inline void orr_pieces_from(orr_axes<N> x, const int64_t (&base)[N], int64_t limit,
                                   F f) {
  if (x.n == 0) return;
  if (x.n < limit || x.ndim == 0) {
    f(x, base);
    return;
  }
  int64_t inner = x.n / x.shape[0], most = limit / 2 / inner;
  if (most < 1) most = 1;
  for (int64_t i = 0; i < x.shape[0]; i += most) {
    orr_axes<N> part = x;
    int64_t at[N];
    part.shape[0] = x.shape[0] - i < most ? x.shape[0] - i : most;
    part.n = part.shape[0] * inner;
    for (int v = 0; v < N; v++) at[v] = base[v] + i * x.stride[v][0];
    if (part.shape[0] == 1) {
      for (int d = 1; d < part.ndim; d++) {
        part.shape[d - 1] = part.shape[d];
        for (int v = 0; v < N; v++) part.stride[v][d - 1] = part.stride[v][d];
      }
      part.ndim--;
    }
    orr_pieces_from(part, at, limit, f);
  }
}
template <int N, typename F>
static inline void orr_pieces(const orr_axes<N> &x, F f, int64_t limit = ORR_PIECE) {
  int64_t base[N] = {};
  orr_pieces_from(x, base, limit, f);
}

/* The address of element `off` of a view, as T. */
template <typename T>
static inline T *orr_at(const orr_view *v, int64_t off) {
  return static_cast<T *>(v->data) + off;
}

#endif
