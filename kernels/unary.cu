/* unary.cu: functions of one number on CUDA, forward and gradient, from the rows of unary.def.
 *
 * Invariant: one kernel an element type; the row is chosen inside, once a step, by a number
 * that is the same for all lanes.
 * To add a function: a row in unary.def, nothing here.
 */
#include "strip.cuh"

extern "C" {
#include "elementwise.h"
}

#define M(f) orr_m_##f
#define ROW(name, to, formula)    \
  case ORR_UN_##name:             \
    ORR_UNROLL                    \
    for (int i = 0; i < V; i++) { \
      const T x = xs[i];          \
      (void)x;                    \
      to[i] = formula;            \
    }                             \
    break;

static const unsigned short row_flags[ORR_N_UNARY] = {
#define ORR_UNARY(name, formula, derivative, flags) flags,
#include "unary.def"
};

/* ---- forward ----------------------------------------------------------------------------- */

template <int V, typename T>
static __device__ inline void unary_any(int op, const T (&xs)[V], T (&ys)[V]) {
  switch (op) {
#define ORR_UNARY(name, formula, derivative, flags)
#define ORR_UNARY_ANY(name, formula, derivative, flags) ROW(name, ys, formula)
#define ORR_UNARY_TEST(name, formula, derivative, flags)
#include "unary.def"
  }
}

template <int V, typename T>
static __device__ inline void unary_float(int op, const T (&xs)[V], T (&ys)[V]) {
  switch (op) {
#define ORR_UNARY(name, formula, derivative, flags) ROW(name, ys, formula)
#define ORR_UNARY_ANY(name, formula, derivative, flags) ROW(name, ys, formula)
#define ORR_UNARY_TEST(name, formula, derivative, flags)
#include "unary.def"
  }
}

template <int V, typename T>
static __device__ inline void unary_test(int op, const T (&xs)[V], uint8_t (&ys)[V]) {
  switch (op) {
#define ORR_UNARY(name, formula, derivative, flags)
#define ORR_UNARY_ANY(name, formula, derivative, flags)
#define ORR_UNARY_TEST(name, formula, derivative, flags) ROW(name, ys, formula)
#include "unary.def"
  }
}

/* Views: y, x. */
template <typename E>
struct unary_body {
  int op;
  bool test;
  const E *x;
  void *y;
  template <int V>
  __device__ void at(const int64_t (&off)[2], unsigned repeats) const {
    orr_compute<E> xs[V];
    orr_load<V>(x + off[1], repeats & 2, xs);
    if (test) {
      uint8_t ys[V];
      unary_test<V>(op, xs, ys);
      orr_store<V>((uint8_t *)y + off[0], ys);
    } else {
      orr_compute<E> ys[V];
      if constexpr (orr_types<E>::is_float) unary_float<V>(op, xs, ys);
      else unary_any<V>(op, xs, ys);
      orr_store<V>((E *)y + off[0], ys);
    }
  }
};

ORR_EXPORT void orr_cuda_unary(int op, const orr_view *x, orr_view *y) {
  bool test = row_flags[op] & ORR_BOOL_OUT;
  orr_dtype dtype = x->dtype == ORR_BOOL && (test || y->dtype != ORR_BOOL) ? ORR_U8 : x->dtype;
  const orr_view *views[2] = {y, x};
  orr_by_dtype(dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_map<orr_strip_width(sizeof(E))>(views, [&](const int64_t(&at)[2]) {
      char *to = (char *)y->data + at[0] * (int64_t)orr_size_of(y->dtype);
      return unary_body<E>{op, test, orr_at<E>(x, at[1]), to};
    });
  });
}

/* ---- gradient ---------------------------------------------------------------------------- */

/* Views: gx, x, y, g. */
template <typename E>
struct unary_grad_body {
  int op;
  bool reads_x, reads_y;
  const E *in_x, *in_y, *in_g;
  E *gx;
  template <int V>
  __device__ void at(const int64_t (&off)[4], unsigned repeats) const {
    typedef orr_compute<E> T;
    T xs[V] = {}, ys[V] = {}, gs[V], out[V];
    if (reads_x) orr_load<V>(in_x + off[1], repeats & 2, xs);
    if (reads_y) orr_load<V>(in_y + off[2], repeats & 4, ys);
    orr_load<V>(in_g + off[3], repeats & 8, gs);
    switch (op) {
#define ORR_UNARY(name, formula, derivative, flags) \
  case ORR_UN_##name:                               \
    ORR_UNROLL                                      \
    for (int i = 0; i < V; i++) {                   \
      const T x = xs[i], y = ys[i], g = gs[i];      \
      (void)x, (void)y;                             \
      out[i] = derivative;                          \
    }                                               \
    break;
#include "unary.def"
    }
    orr_store<V>(gx + off[0], out);
  }
};

ORR_EXPORT void orr_cuda_unary_grad(int op, const orr_view *x, const orr_view *y,
                                    const orr_view *g, orr_view *gx) {
  bool reads_x = row_flags[op] & ORR_GRAD_X, reads_y = row_flags[op] & ORR_GRAD_Y;
  if (!reads_x) x = g;
  if (!reads_y) y = g;
  const orr_view *views[4] = {gx, x, y, g};
  orr_by_float(g->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_map<orr_strip_width(sizeof(E))>(views, [&](const int64_t(&at)[4]) {
      return unary_grad_body<E>{op,
                                reads_x,
                                reads_y,
                                orr_at<E>(x, at[1]),
                                orr_at<E>(y, at[2]),
                                orr_at<E>(g, at[3]),
                                orr_at<E>(gx, at[0])};
    });
  });
}
