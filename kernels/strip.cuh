/* strip.cuh: kernels that compute each element from the elements in its place.
 *
 * Invariant: the first view is the output. A step computes one element, or V that lie side by
 * side in every view that does not repeat, read and written by accesses of 16 bytes. An output
 * may be exactly one of the inputs: a step reads before it writes.
 * To write one: a body with its pointers and
 *   template <int V> __device__ void at(const int64_t (&off)[N], unsigned repeats) const
 * which orr_loads V elements, computes, and orr_stores; and one call of orr_map.
 */
#ifndef ORR_STRIP_CUH
#define ORR_STRIP_CUH

#include "device.cuh"

/* The steps of one launch; bit v of repeats: view v does not move within a step. */
template <int N>
struct orr_strip {
  orr_walk<N> walk;
  unsigned repeats;
};

/* Elements of one step, of elements of a size: 32 bytes, or 8 elements. */
static constexpr int orr_strip_width(size_t size) { return size == 8 ? 4 : 8; }

template <int V, typename T>
static __device__ inline void orr_load(const T *p, bool repeats, orr_compute<T> (&x)[V]) {
  if constexpr (V == 1) {
    x[0] = orr_get(p);
  } else if (repeats) {
    const orr_compute<T> one = orr_get(p);
    ORR_UNROLL
    for (int i = 0; i < V; i++) x[i] = one;
  } else {
    const orr_pack<T, V> pack = *reinterpret_cast<const orr_pack<T, V> *>(p);
    ORR_UNROLL
    for (int i = 0; i < V; i++) x[i] = orr_get(&pack.at[i]);
  }
}

template <int V, typename T>
static __device__ inline void orr_store(T *p, const orr_compute<T> (&x)[V]) {
  orr_pack<T, V> pack;
  ORR_UNROLL
  for (int i = 0; i < V; i++) orr_put(&pack.at[i], x[i]);
  *reinterpret_cast<orr_pack<T, V> *>(p) = pack;
}

template <int V, int N, typename B>
static __global__ void __launch_bounds__(ORR_BLOCK) orr_strip_kernel(orr_strip<N> s, B body) {
  for (uint32_t i = orr_first(); i < s.walk.n; i += orr_step()) {
    int64_t off[N];
    s.walk.at(i, off);
    body.template at<V>(off, s.repeats);
  }
}

/* Whether x, whose views begin `at` their data, is made of steps of `width` (a single dimension
 * may leave a rest). Sets the views that repeat. */
template <int N>
static inline bool orr_strip_fits(const orr_axes<N> &x, const orr_view *const (&views)[N],
                                  const int64_t (&at)[N], int width, unsigned *repeats) {
  int inner = x.ndim - 1;
  if (x.ndim == 0 || x.shape[inner] < width) return false;
  if (x.ndim > 1 && x.shape[inner] % width != 0) return false;
  *repeats = 0;
  for (int v = 0; v < N; v++) {
    if (x.stride[v][inner] == 0) {
      *repeats |= 1u << v;
      continue;
    }
    size_t size = orr_size_of(views[v]->dtype), bytes = size * (size_t)width;
    const char *from = (const char *)views[v]->data + at[v] * (int64_t)size;
    if (x.stride[v][inner] != 1 || !orr_aligned(from, bytes < 16 ? bytes : 16)) return false;
    for (int d = 0; d < inner; d++) {
      if (x.stride[v][d] % width != 0) return false;
    }
  }
  return true;
}

/* Steps of `width` elements. */
template <int N>
static inline orr_axes<N> orr_strip_axes(orr_axes<N> x, int width) {
  int inner = x.ndim - 1;
  x.shape[inner] /= width;
  x.n = x.shape[inner];
  for (int d = 0; d < inner; d++) x.n *= x.shape[d];
  for (int v = 0; v < N; v++) x.stride[v][inner] *= width;
  return x;
}

/* Runs the body that make(offset of each view's first element) gives over all elements; V: the
 * width of a step where the views allow it. */
template <int V, int N, typename F>
static inline void orr_map(const orr_view *const (&views)[N], F make) {
  orr_pieces(orr_axes_of(views), [&](const orr_axes<N> &all, const int64_t(&at)[N]) {
    typedef decltype(make(at)) body;
    orr_axes<N> rest = all;
    int64_t from[N];
    unsigned repeats = 0;
    for (int v = 0; v < N; v++) from[v] = at[v];
    if (V > 1 && orr_strip_fits(all, views, at, V, &repeats)) {
      orr_strip<N> s = {orr_walk_of(orr_strip_axes(all, V)), repeats};
      ORR_LAUNCH((orr_strip_kernel<V, N, body>), orr_grid(s.walk.n, ORR_BLOCK), ORR_BLOCK, 0, s,
                 make(at));
      if (all.ndim > 1 || all.n % V == 0) return;
      rest.n = rest.shape[0] = all.n % V;
      for (int v = 0; v < N; v++) from[v] += (all.n - rest.n) * all.stride[v][0];
    }
    orr_strip<N> s = {orr_walk_of(rest), 0};
    ORR_LAUNCH((orr_strip_kernel<1, N, body>), orr_grid(s.walk.n, ORR_BLOCK), ORR_BLOCK, 0, s,
               make(from));
  });
}

#endif
