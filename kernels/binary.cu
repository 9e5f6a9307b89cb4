/* binary.cu: functions of two numbers on CUDA, forward and gradient, from the rows of
 * binary.def.
 *
 * Invariant: as in unary.cu. A scalar operand is a kernel parameter of the compute type, its
 * view is never read.
 * To add a function: a row in binary.def, nothing here.
 */
#include "strip.cuh"

extern "C" {
#include "elementwise.h"
}

#define M(f) orr_m_##f
#define ROW(name, to, formula)      \
  case ORR_BIN_##name:              \
    ORR_UNROLL                      \
    for (int i = 0; i < V; i++) {   \
      const T a = as[i], b = bs[i]; \
      to[i] = formula;              \
    }                               \
    break;

static const unsigned short row_flags[ORR_N_BINARY] = {
#define ORR_BINARY(name, formula, da, db, flags) flags,
#include "binary.def"
};

/* ---- forward ----------------------------------------------------------------------------- */

template <int V, typename T>
static __device__ inline void binary_any(int op, const T (&as)[V], const T (&bs)[V],
                                         T (&ys)[V]) {
  switch (op) {
#define ORR_BINARY(name, formula, da, db, flags)
#define ORR_BINARY_ANY(name, formula, da, db, flags) ROW(name, ys, formula)
#define ORR_BINARY_TEST(name, formula, da, db, flags)
#include "binary.def"
  }
}

template <int V, typename T>
static __device__ inline void binary_float(int op, const T (&as)[V], const T (&bs)[V],
                                           T (&ys)[V]) {
  switch (op) {
#define ORR_BINARY(name, formula, da, db, flags) ROW(name, ys, formula)
#define ORR_BINARY_ANY(name, formula, da, db, flags) ROW(name, ys, formula)
#define ORR_BINARY_TEST(name, formula, da, db, flags)
#include "binary.def"
  }
}

template <int V, typename T>
static __device__ inline void binary_test(int op, const T (&as)[V], const T (&bs)[V],
                                          uint8_t (&ys)[V]) {
  switch (op) {
#define ORR_BINARY(name, formula, da, db, flags)
#define ORR_BINARY_ANY(name, formula, da, db, flags)
#define ORR_BINARY_TEST(name, formula, da, db, flags) ROW(name, ys, formula)
#include "binary.def"
  }
}

enum { NO_SCALAR = 0, SCALAR_A = 1, SCALAR_B = 2 };

/* Views: y, a, b. */
template <typename E>
struct binary_body {
  typedef orr_compute<E> T;
  int op, given;
  bool test;
  T scalar;
  const E *a, *b;
  void *y;
  template <int V>
  __device__ void operand(bool is_scalar, const E *p, bool repeats, T (&xs)[V]) const {
    if (is_scalar) {
      ORR_UNROLL
      for (int i = 0; i < V; i++) xs[i] = scalar;
    } else {
      orr_load<V>(p, repeats, xs);
    }
  }
  template <int V>
  __device__ void at(const int64_t (&off)[3], unsigned repeats) const {
    T as[V], bs[V];
    operand<V>(given == SCALAR_A, a + off[1], repeats & 2, as);
    operand<V>(given == SCALAR_B, b + off[2], repeats & 4, bs);
    if (test) {
      uint8_t ys[V];
      binary_test<V>(op, as, bs, ys);
      orr_store<V>((uint8_t *)y + off[0], ys);
    } else {
      T ys[V];
      if constexpr (orr_types<E>::is_float) binary_float<V>(op, as, bs, ys);
      else binary_any<V>(op, as, bs, ys);
      orr_store<V>((E *)y + off[0], ys);
    }
  }
};

/* A double as the compute type: integers by truncation, as int64 first. */
template <typename E>
static inline orr_compute<E> scalar_as(double s) {
  if constexpr (orr_types<E>::is_float) return (orr_compute<E>)s;
  else return (orr_compute<E>)(int64_t)s;
}

static void run_forward(int op, int given, double s, const orr_view *a, const orr_view *b,
                        orr_view *y) {
  bool test = row_flags[op] & ORR_BOOL_OUT;
  orr_dtype dtype = a->dtype;
  if (dtype == ORR_BOOL) s = s != 0;
  if (dtype == ORR_BOOL && (test || y->dtype != ORR_BOOL)) dtype = ORR_U8;
  const orr_view *views[3] = {y, a, b};
  orr_by_dtype(dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_map<orr_strip_width(sizeof(E))>(views, [&](const int64_t(&at)[3]) {
      char *to = (char *)y->data + at[0] * (int64_t)orr_size_of(y->dtype);
      return binary_body<E>{
          op, given, test, scalar_as<E>(s), orr_at<E>(a, at[1]), orr_at<E>(b, at[2]), to};
    });
  });
}

ORR_EXPORT void orr_cuda_binary(int op, const orr_view *a, const orr_view *b, orr_view *y) {
  run_forward(op, NO_SCALAR, 0, a, b, y);
}

ORR_EXPORT void orr_cuda_binary_scalar(int op, const orr_view *a, double s, bool scalar_first,
                                       orr_view *y) {
  run_forward(op, scalar_first ? SCALAR_A : SCALAR_B, s, a, a, y);
}

/* ---- gradient ---------------------------------------------------------------------------- */

/* Views: out, a, b, y, g. */
template <typename E>
struct binary_grad_body {
  int row; /* 2 op + which operand */
  unsigned reads;
  const E *in_a, *in_b, *in_y, *in_g;
  E *to;
  template <int V>
  __device__ void at(const int64_t (&off)[5], unsigned repeats) const {
    typedef orr_compute<E> T;
    T as[V] = {}, bs[V] = {}, ys[V] = {}, gs[V], out[V];
    if (reads & ORR_GRAD_A) orr_load<V>(in_a + off[1], repeats & 2, as);
    if (reads & ORR_GRAD_B) orr_load<V>(in_b + off[2], repeats & 4, bs);
    if (reads & ORR_GRAD_Y) orr_load<V>(in_y + off[3], repeats & 8, ys);
    orr_load<V>(in_g + off[4], repeats & 16, gs);
    switch (row) {
#define GRAD(name, which, formula)                        \
  case 2 * ORR_BIN_##name + which:                        \
    ORR_UNROLL                                            \
    for (int i = 0; i < V; i++) {                         \
      const T a = as[i], b = bs[i], y = ys[i], g = gs[i]; \
      (void)a, (void)b, (void)y, (void)g;                 \
      out[i] = formula;                                   \
    }                                                     \
    break;
#define ORR_BINARY(name, formula, da, db, flags) GRAD(name, 0, da) GRAD(name, 1, db)
#include "binary.def"
    }
    orr_store<V>(to + off[0], out);
  }
};

ORR_EXPORT void orr_cuda_binary_grad(int op, int which, const orr_view *a, const orr_view *b,
                                     const orr_view *y, const orr_view *g, orr_view *out) {
  unsigned reads = row_flags[op] & (ORR_GRAD_A | ORR_GRAD_B | ORR_GRAD_Y);
  if (!(reads & ORR_GRAD_A)) a = g;
  if (!(reads & ORR_GRAD_B)) b = g;
  if (!(reads & ORR_GRAD_Y)) y = g;
  const orr_view *views[5] = {out, a, b, y, g};
  orr_by_float(g->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_map<orr_strip_width(sizeof(E))>(views, [&](const int64_t(&at)[5]) {
      return binary_grad_body<E>{2 * op + which,       reads,
                                 orr_at<E>(a, at[1]),  orr_at<E>(b, at[2]),
                                 orr_at<E>(y, at[3]),  orr_at<E>(g, at[4]),
                                 orr_at<E>(out, at[0])};
    });
  });
}
