/* attention.c: dispatch of attention (attention.h) over float types, and its heads over
 * threads.
 *
 * Invariant: f64 is computed in double, all others in float, products and sums included.
 * To add a compute type: one more inclusion of attention_body.h, and a case in size_of and
 * run.
 */
#include "vector.h"

#include "attention.h"

#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "loop.h"
#include "scalar.h"
#include "transpose.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif

/* A tile of ROWS by two vectors, held in registers. */
#ifdef __AVX512F__
#define VEC_BYTES 64
#define ROWS 8
#else
#ifdef __AVX__
#define VEC_BYTES 32
#else
#define VEC_BYTES 16
#endif
#define ROWS 4
#endif
#define SPAN 128 /* both multiples of ROWS and of the lanes of a vector */
#define BLOCK 64
#define ORR_UP(n, unit) (((n) + (unit)-1) / (unit) * (unit))
#define ATTENTION_GRAIN 20000 /* scores that are worth a second thread */

/* exp(x) for x that is not above some 80; below -87 it is 0. Method as in scalar.h. */
static inline float weight_f32(float x) {
  int32_t n;
  float near = x < -87.0f ? -87.0f : x;
  float r = orr_exp_reduce(near, &n);
  float p = ORR_FMA(orr_exp_tail(r), r * r, r) + 1.0f;
  return orr_select_f32(x < -87.0f, 0.0f, p * orr_power_of_2(n));
}

#define T float
#define DTYPE ORR_F32
#define FN(name) name##_f32
#define EXP weight_f32
#include "attention_body.h"
#undef T
#undef DTYPE
#undef FN
#undef EXP

#define T double
#define DTYPE ORR_F64
#define FN(name) name##_f64
#define EXP exp
#include "attention_body.h"
#undef T
#undef DTYPE
#undef FN
#undef EXP

static int64_t heads_of(const orr_view *q) { return q->shape[0] * q->shape[1]; }

int orr_k_attention_threads(const orr_view *q) {
#ifdef _OPENMP
  int64_t heads = heads_of(q), most = omp_in_parallel() ? 1 : omp_get_max_threads();
  return (int)(heads < 1 ? 1 : heads < most ? heads : most);
#else
  (void)q;
  return 1;
#endif
}

static size_t room_of(const orr_k_attention_args *a, bool backward) {
  head_f32 f;
  head_f64 d;
  return a->q->dtype == ORR_F64 ? lay_out_f64(&d, a, backward, NULL)
                                : lay_out_f32(&f, a, backward, NULL);
}

size_t orr_k_attention_room(const orr_k_attention_args *a, bool backward) {
  return (size_t)a->threads * room_of(a, backward);
}

static void run_part(const orr_k_attention_args *a, bool backward, int part, int parts) {
  int64_t heads = heads_of(a->q);
  int64_t begin = heads * part / parts, end = heads * (part + 1) / parts;
  char *room = (char *)a->room + (size_t)part * room_of(a, backward);
  if (a->q->dtype == ORR_F64) heads_f64(a, backward, begin, end, room);
  else heads_f32(a, backward, begin, end, room);
}

static void run(const orr_k_attention_args *a, bool backward) {
  int64_t work = heads_of(a->q) * a->q->shape[2] * a->k->shape[2];
  if (heads_of(a->q) == 0) return;
  int parts = work < 2 * ATTENTION_GRAIN ? 1 : a->threads;
#pragma omp parallel for num_threads(parts) schedule(static, 1) if (parts > 1)
  for (int part = 0; part < parts; part++) run_part(a, backward, part, parts);
}

void orr_k_attention(const orr_k_attention_args *a) { run(a, false); }

void orr_k_attention_back(const orr_k_attention_args *a) { run(a, true); }
