/* random.cu: distributions over Philox words on CUDA: the numbers of random.c.
 *
 * Invariant: an element is a function of the key and of its index in the global tensor; words
 * are the CPU's bit for bit, normals to rounding.
 * To add a distribution: a case in draw, and a function that calls run.
 */
#include "each.cuh"

extern "C" {
#include "random.h"
}
#include "philox.h"

enum kind { UNIFORM, NORMAL, RANDINT, BERNOULLI, DROPOUT };

struct job {
  kind what;
  uint32_t key[2], upper[2];
  double a, b;
  int64_t lo;
  uint64_t range, cutoff;
};

static job job_of(kind what, const orr_random_key *key) {
  job j = {};
  uint64_t h = orr_mix64(key->seed);
  h = orr_mix64(h ^ key->stream);
  h = orr_mix64(h ^ key->step);
  h = orr_mix64(h ^ key->call);
  uint64_t upper = orr_mix64(h);
  j.what = what;
  j.key[0] = (uint32_t)h, j.key[1] = (uint32_t)(h >> 32);
  j.upper[0] = (uint32_t)upper, j.upper[1] = (uint32_t)(upper >> 32);
  return j;
}

/* The word of an element; `of` 0: its own, 1: of its neighbour in the pair. */
static __device__ inline uint32_t word_of(const job &j, uint32_t plane, uint64_t index) {
  const uint64_t block = index / 4;
  const uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), j.upper[0],
                               j.upper[1] ^ plane};
  uint32_t out[4];
  orr_philox_block(j.key, counter, out);
  return out[index % 4];
}

static __device__ inline double unit(const job &j, uint64_t index) {
  uint64_t word = word_of(j, 0, index), more = word_of(j, 0x80000000u, index);
  return (double)(((word << 32) | more) >> 11) * 0x1p-53;
}

static __device__ inline void uniform(const job &j, uint64_t index, double *y) {
  double u = j.a + (j.b - j.a) * unit(j, index);
  *y = u < j.b ? u : j.a;
}
static __device__ inline void uniform(const job &j, uint64_t index, float *y) {
  float lo = (float)j.a, hi = (float)j.b, width = (float)(j.b - j.a);
  float u = lo + width * ((float)(int32_t)(word_of(j, 0, index) >> 8) * 0x1p-24f);
  *y = u < hi ? u : lo;
}

/* Box and Muller, as in random.c. */
static __device__ inline void normal(const job &j, uint64_t index, double *y) {
  uint64_t first = index - index % 2;
  double radius = sqrt(-2.0 * log(1.0 - unit(j, first))) * j.b;
  double angle = 6.28318530717958647692 * unit(j, first + 1);
  *y = j.a + radius * (index % 2 ? sin(angle) : cos(angle));
}
static __device__ inline void normal(const job &j, uint64_t index, float *y) {
  uint64_t first = index - index % 2;
  float u = (float)(~word_of(j, 0, first)) * 0x1p-32f + 0x1p-33f;
  float radius = sqrtf(-2.0f * orr_log_positive(u < 1.0f ? u : 1.0f)) * (float)j.b;
  float angle = 6.28318531f * ((float)(int32_t)(word_of(j, 0, first + 1) >> 8) * 0x1p-24f);
  *y = (float)j.a + radius * (index % 2 ? orr_sin_f32(angle) : orr_cos_f32(angle));
}

/* Integers have no fractions: uniform and normal numbers are never asked of them. */
static __device__ inline void uniform(const job &, uint64_t, int64_t *y) { *y = 0; }
static __device__ inline void normal(const job &, uint64_t, int64_t *y) { *y = 0; }

template <typename W> static __device__ inline W draw(const job &j, uint64_t index) {
  W y = 0;
  switch (j.what) {
    case UNIFORM: uniform(j, index, &y); break;
    case NORMAL: normal(j, index, &y); break;
    case RANDINT: {
      uint64_t u = ((uint64_t)word_of(j, 0, index) << 32) | word_of(j, 0x80000000u, index);
      uint64_t at = j.range ? orr_mul_high64(u, j.range) : u;
      y = (W)(int64_t)((uint64_t)j.lo + at);
      break;
    }
    default: y = (W)(word_of(j, 0, index) < j.cutoff); break;
  }
  return y;
}

/* Views: y, x, mask, and the elements' indices in the global tensor. */
template <typename E> struct draw_body {
  typedef orr_compute<E> C;
  job j;
  uint64_t origin;
  E *y;
  const E *x;
  uint8_t *mask;
  __device__ void at(const int64_t (&off)[4]) const {
    uint64_t index = origin + (uint64_t)off[3];
    if (!x) {
      typedef typename std::conditional<orr_types<E>::is_float, C, int64_t>::type W;
      orr_put(y + off[0], (C)draw<W>(j, index));
      return;
    }
    bool kept = word_of(j, 0, index) >= j.cutoff;
    C v = orr_get(x + off[1]) * (C)j.a;
    orr_put(y + off[0], kept ? v : (C)0);
    if (mask) mask[off[2]] = kept;
  }
};

static void run(const job &j, const orr_global *global, const orr_view *y, const orr_view *x,
                const orr_view *mask) {
  orr_view index = *y;
  uint64_t origin = 0;
  int64_t step = 1;
  for (int d = y->ndim - 1; d >= 0; d--) {
    index.stride[d] = step;
    if (global) origin += (uint64_t)(global->origin[d] * step);
    step *= global ? global->shape[d] : y->shape[d];
  }
  const orr_view *views[4] = {y, x, mask, &index};
  orr_by_dtype(y->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    draw_body<E> body = {j, origin, orr_at<E>(y, 0), NULL, NULL};
    if (x) body.x = orr_at<E>(x, 0);
    if (mask) body.mask = orr_at<uint8_t>(mask, 0);
    orr_each(views, body);
  });
}

ORR_EXPORT void orr_cuda_uniform(const orr_random_key *key, const orr_global *global, double lo,
                                 double hi, orr_view *y) {
  job j = job_of(UNIFORM, key);
  j.a = lo, j.b = hi;
  run(j, global, y, NULL, NULL);
}

ORR_EXPORT void orr_cuda_normal(const orr_random_key *key, const orr_global *global,
                                double mean, double std, orr_view *y) {
  job j = job_of(NORMAL, key);
  j.a = mean, j.b = std;
  run(j, global, y, NULL, NULL);
}

ORR_EXPORT void orr_cuda_randint(const orr_random_key *key, const orr_global *global, int64_t lo,
                                 int64_t hi, orr_view *y) {
  job j = job_of(RANDINT, key);
  j.lo = lo;
  j.range = (uint64_t)hi - (uint64_t)lo + 1;
  run(j, global, y, NULL, NULL);
}

static uint64_t cutoff_of(double p) {
  return p <= 0 ? 0 : p >= 1 ? (uint64_t)1 << 32 : (uint64_t)(p * 0x1p32);
}

ORR_EXPORT void orr_cuda_bernoulli(const orr_random_key *key, const orr_global *global, double p,
                                   orr_view *y) {
  job j = job_of(BERNOULLI, key);
  j.cutoff = cutoff_of(p);
  run(j, global, y, NULL, NULL);
}

ORR_EXPORT void orr_cuda_dropout(const orr_random_key *key, const orr_global *global, double p,
                                 const orr_view *x, orr_view *y, orr_view *mask) {
  job j = job_of(DROPOUT, key);
  j.cutoff = cutoff_of(p);
  j.a = p < 1 ? 1.0 / (1.0 - p) : 0.0;
  run(j, global, y, x, mask);
}
