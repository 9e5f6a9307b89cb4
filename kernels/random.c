/* random.c: distributions over Philox words, for views that are shards.
 *
 * Invariant: a drawing function sees words of consecutive elements, the first of an index
 * divisible by 4, and writes as many numbers in the compute type; what falls outside the row is
 * dropped.
 * To add a distribution: a draw_fn, and a function that calls run.
 */
#include "vector.h"

#include "random.h"

#include <string.h>

#include "loop.h"
#include "parallel.h"
#include "philox.h"
#include "scalar.h"

#define WORDS (4 * ORR_PHILOX_LANES)

/* `words` and `more` are two planes of random words; x is the input's row or NULL. */
typedef struct draw {
  const uint32_t *words, *more;
  orr_dtype compute;
  double a, b;     /* the distribution's numbers */
  int64_t lo;      /* randint */
  uint64_t range;  /* randint: hi - lo + 1, 0 for all of 2^64 */
  uint64_t cutoff; /* bernoulli, dropout: words under it mean 1, or dropped */
} draw;

typedef void draw_fn(const draw *d, void *out);

static orr_philox philox_of(const orr_random_key *key) {
  uint64_t h = orr_mix64(key->seed);
  h = orr_mix64(h ^ key->stream);
  h = orr_mix64(h ^ key->step);
  h = orr_mix64(h ^ key->call);
  uint64_t upper = orr_mix64(h);
  return (orr_philox){{(uint32_t)h, (uint32_t)(h >> 32)},
                      {(uint32_t)upper, (uint32_t)(upper >> 32)}};
}

/* ---- distributions ----------------------------------------------------------------------- */

static double unit_f64(uint32_t word, uint32_t more) {
  return (double)((((uint64_t)word << 32) | more) >> 11) * 0x1p-53;
}

static void draw_uniform(const draw *d, void *out) {
  if (d->compute == ORR_F64) {
    double *y = out, width = d->b - d->a;
    for (int i = 0; i < WORDS; i++) {
      double u = d->a + width * unit_f64(d->words[i], d->more[i]);
      y[i] = u < d->b ? u : d->a;
    }
    return;
  }
  float *y = out, lo = (float)d->a, hi = (float)d->b, width = (float)(d->b - d->a);
  for (int i = 0; i < WORDS; i++) {
    float u = lo + width * ((float)(int32_t)(d->words[i] >> 8) * 0x1p-24f);
    y[i] = u < hi ? u : lo;
  }
}

/* Box and Muller, "A note on the generation of random normal deviates", 1958: elements 2k and
 * 2k + 1 are the cosine and the sine of one pair of uniform numbers. */
static void draw_normal(const draw *d, void *out) {
  if (d->compute == ORR_F64) {
    double *y = out;
    for (int i = 0; i < WORDS; i += 2) {
      double u = 1.0 - unit_f64(d->words[i], d->more[i]);
      double angle = 6.28318530717958647692 * unit_f64(d->words[i + 1], d->more[i + 1]);
      double radius = sqrt(-2.0 * log(u)) * d->b;
      y[i] = d->a + radius * cos(angle);
      y[i + 1] = d->a + radius * sin(angle);
    }
    return;
  }
  float *y = out, mean = (float)d->a, std = (float)d->b;
  float radius[WORDS / 2], angle[WORDS / 2], c[WORDS / 2], s[WORDS / 2];
  for (int i = 0; i < WORDS / 2; i++) {
    float u = (float)(~d->words[2 * i]) * 0x1p-32f + 0x1p-33f;
    radius[i] = orr_sqrt_f32(-2.0f * orr_log_positive(u < 1.0f ? u : 1.0f)) * std;
    angle[i] = 6.28318531f * ((float)(int32_t)(d->words[2 * i + 1] >> 8) * 0x1p-24f);
  }
  for (int i = 0; i < WORDS / 2; i++) {
    c[i] = mean + radius[i] * orr_cos_f32(angle[i]);
    s[i] = mean + radius[i] * orr_sin_f32(angle[i]);
  }
  for (int i = 0; i < WORDS / 2; i++) {
    y[2 * i] = c[i];
    y[2 * i + 1] = s[i];
  }
}

static void put_integer(orr_dtype compute, void *out, int i, int64_t value) {
  switch (compute) {
    case ORR_F64: ((double *)out)[i] = (double)value; break;
    case ORR_F32: ((float *)out)[i] = (float)value; break;
    case ORR_I64: ((int64_t *)out)[i] = value; break;
    case ORR_I32: ((int32_t *)out)[i] = (int32_t)value; break;
    default: ((uint8_t *)out)[i] = (uint8_t)value; break;
  }
}

/* Scales 64 random bits to the range by a product (Lemire 2019, section 3, without rejection:
 * the bias is under range / 2^64). */
static void draw_randint(const draw *d, void *out) {
  for (int i = 0; i < WORDS; i++) {
    uint64_t u = ((uint64_t)d->words[i] << 32) | d->more[i];
    uint64_t at = d->range ? orr_mul_high64(u, d->range) : u;
    put_integer(d->compute, out, i, (int64_t)((uint64_t)d->lo + at));
  }
}

static void draw_bernoulli(const draw *d, void *out) {
  for (int i = 0; i < WORDS; i++) put_integer(d->compute, out, i, d->words[i] < d->cutoff);
}

/* The factor of each element: 0 where dropped. */
static void draw_dropout(const draw *d, void *out) {
  if (d->compute == ORR_F64) {
    double *y = out;
    for (int i = 0; i < WORDS; i++) y[i] = d->words[i] < d->cutoff ? 0.0 : d->a;
    return;
  }
  float *y = out, scale = (float)d->a;
  uint32_t last = d->cutoff ? (uint32_t)(d->cutoff - 1) : 0;
  for (int i = 0; i < WORDS; i++) y[i] = d->words[i] <= last ? 0.0f : scale;
  for (int i = 0; d->cutoff == 0 && i < WORDS; i++) y[i] = scale;
}

/* ---- the walk over a shard --------------------------------------------------------------- */

typedef struct job {
  draw_fn *fn;
  draw draw;
  bool two_planes;
  orr_philox philox;
  int ndim; /* of the outer dimensions */
  int64_t row, row_stride[3];
  int64_t shape[ORR_MAX_DIM], global_stride[ORR_MAX_DIM], stride[ORR_MAX_DIM][3];
  int64_t origin; /* global index of the shard's first element */
  char *data[3];  /* y; for dropout x, mask or NULL */
  orr_dtype dtype[3];
} job;

/* y = x times the factor. */
static void apply_dropout(const job *j, const void *factor, const char *x, void *out,
                          char *mask, int64_t n) {
  orr_chunk buffer;
  const void *in = orr_load_row(j->dtype[1], x, j->row_stride[1], n, &buffer);
  for (int64_t i = 0; i < n && j->draw.compute == ORR_F64; i++) {
    double f = ((const double *)factor)[i];
    ((double *)out)[i] = f == 0 ? 0 : ((const double *)in)[i] * f;
  }
  for (int64_t i = 0; i < n && j->draw.compute == ORR_F32; i++) {
    float f = ((const float *)factor)[i], v = ((const float *)in)[i] * f;
    ((float *)out)[i] = f == 0 ? 0 : v;
  }
  for (int64_t i = 0; mask && i < n; i++) {
    bool kept = j->draw.compute == ORR_F64 ? ((const double *)factor)[i] != 0
                                           : ((const float *)factor)[i] != 0;
    mask[i * j->row_stride[2]] = kept;
  }
}

/* `n` elements of a row, the first of global index `first`; data points at its elements. */
static void draw_row(const job *j, uint64_t first, int64_t n, char *const *data) {
  uint32_t words[WORDS], more[WORDS];
  draw d = j->draw;
  d.words = words;
  d.more = more;
  int64_t size[3];
  for (int v = 0; v < 3; v++) size[v] = (int64_t)orr_element_size(j->dtype[v]);
  size_t compute_size = orr_element_size(d.compute);
  for (int64_t i = 0; i < n;) {
    uint64_t index = first + (uint64_t)i;
    int64_t skip = (int64_t)(index % 4), m = n - i < WORDS - skip ? n - i : WORDS - skip;
    orr_chunk drawn, result;
    orr_philox_blocks(&j->philox, 0, index / 4, words);
    if (j->two_planes) orr_philox_blocks(&j->philox, 0x80000000u, index / 4, more);
    j->fn(&d, drawn.bytes);
    const char *numbers = drawn.bytes + (size_t)skip * compute_size;
    char *at[3];
    for (int v = 0; v < 3; v++) {
      at[v] = data[v] ? data[v] + i * j->row_stride[v] * size[v] : NULL;
    }
    if (at[1]) {
      apply_dropout(j, numbers, at[1], result.bytes, at[2], m);
      numbers = result.bytes;
    }
    orr_store_row(j->dtype[0], numbers, at[0], j->row_stride[0], m);
    i += m;
  }
}

/* Elements [begin, end) of the shard, in row-major order. */
static void draw_range(const void *context, int64_t begin, int64_t end) {
  const job *j = context;
  while (begin < end) {
    int64_t within = begin % j->row, rest = begin / j->row, global = j->origin + within;
    int64_t offset[3];
    for (int v = 0; v < 3; v++) offset[v] = within * j->row_stride[v];
    for (int d = j->ndim - 1; d >= 0; d--) {
      int64_t index = rest % j->shape[d];
      rest /= j->shape[d];
      global += index * j->global_stride[d];
      for (int v = 0; v < 3; v++) offset[v] += index * j->stride[d][v];
    }
    char *data[3];
    for (int v = 0; v < 3; v++) {
      int64_t size = (int64_t)orr_element_size(j->dtype[v]);
      data[v] = j->data[v] ? j->data[v] + offset[v] * size : NULL;
    }
    int64_t n = j->row - within < end - begin ? j->row - within : end - begin;
    draw_row(j, (uint64_t)global, n, data);
    begin += n;
  }
}

/* Splits the views into rows of consecutive global indices: the last dimension, with those
 * before it that are whole and that every view holds without gaps. */
static void plan_rows(job *j, const orr_global *global, const orr_view *const *views) {
  const orr_view *y = views[0];
  int64_t step = 1;
  int ndim = y->ndim, d = ndim - 1;
  j->origin = 0;
  for (int e = d; e >= 0; e--) {
    j->global_stride[e] = step;
    j->shape[e] = y->shape[e];
    if (global) j->origin += global->origin[e] * step;
    step *= global ? global->shape[e] : y->shape[e];
    for (int v = 0; v < 3; v++) j->stride[e][v] = views[v] ? views[v]->stride[e] : 0;
  }
  j->row = ndim ? y->shape[d] : 1;
  for (int v = 0; v < 3; v++) j->row_stride[v] = ndim ? j->stride[d][v] : 1;
  for (; d > 0 && (!global || y->shape[d] == global->shape[d]); d--) {
    bool joined = true;
    for (int v = 0; v < 3; v++) joined &= j->stride[d - 1][v] == j->stride[d][v] * y->shape[d];
    if (!joined) break;
    j->row *= y->shape[d - 1];
  }
  j->ndim = d > 0 ? d : 0;
}

static void run(job *j, const orr_random_key *key, const orr_global *global, orr_view *y,
                const orr_view *x, orr_view *mask) {
  const orr_view *views[3] = {y, x, mask};
  int64_t n = orr_view_numel(y);
  if (n == 0) return;
  j->data[0] = y->data;
  j->dtype[0] = y->dtype;
  for (int v = 1; v < 3; v++) {
    j->data[v] = views[v] ? views[v]->data : NULL;
    j->dtype[v] = views[v] ? views[v]->dtype : ORR_U8;
  }
  j->philox = philox_of(key);
  j->draw.compute = orr_compute_dtype(y->dtype);
  if (y->dtype == ORR_F64) j->two_planes = true;
  plan_rows(j, global, views);
  orr_parallel(n, ORR_GRAIN_HEAVY, draw_range, j);
}

/* ---- kernels ----------------------------------------------------------------------------- */

void orr_k_uniform(const orr_random_key *key, const orr_global *global, double lo, double hi,
                   orr_view *y) {
  job j = {.fn = draw_uniform, .draw = {.a = lo, .b = hi}};
  run(&j, key, global, y, NULL, NULL);
}

void orr_k_normal(const orr_random_key *key, const orr_global *global, double mean, double std,
                  orr_view *y) {
  job j = {.fn = draw_normal, .draw = {.a = mean, .b = std}};
  run(&j, key, global, y, NULL, NULL);
}

void orr_k_randint(const orr_random_key *key, const orr_global *global, int64_t lo, int64_t hi,
                   orr_view *y) {
  job j = {.fn = draw_randint, .two_planes = true};
  j.draw.lo = lo;
  j.draw.range = (uint64_t)hi - (uint64_t)lo + 1;
  run(&j, key, global, y, NULL, NULL);
}

static uint64_t cutoff_of(double p) {
  return p <= 0 ? 0 : p >= 1 ? (uint64_t)1 << 32 : (uint64_t)(p * 0x1p32);
}

void orr_k_bernoulli(const orr_random_key *key, const orr_global *global, double p,
                     orr_view *y) {
  job j = {.fn = draw_bernoulli, .draw = {.cutoff = cutoff_of(p)}};
  run(&j, key, global, y, NULL, NULL);
}

void orr_k_dropout(const orr_random_key *key, const orr_global *global, double p,
                   const orr_view *x, orr_view *y, orr_view *mask) {
  job j = {.fn = draw_dropout, .draw = {.cutoff = cutoff_of(p)}};
  j.draw.a = p < 1 ? 1.0 / (1.0 - p) : 0.0;
  run(&j, key, global, y, x, mask);
}

/* Fisher and Yates, as Durstenfeld's algorithm 235 (1964). */
void orr_k_randperm(const orr_random_key *key, int64_t n, int64_t *out) {
  orr_philox philox = philox_of(key);
  for (int64_t i = 0; i < n; i++) out[i] = i + 1;
  uint32_t words[WORDS], more[WORDS];
  for (int64_t i = 0; i < n - 1; i++) {
    if (i % WORDS == 0) {
      orr_philox_blocks(&philox, 0, (uint64_t)i / 4, words);
      orr_philox_blocks(&philox, 0x80000000u, (uint64_t)i / 4, more);
    }
    uint64_t u = ((uint64_t)words[i % WORDS] << 32) | more[i % WORDS];
    int64_t other = i + (int64_t)orr_mul_high64(u, (uint64_t)(n - i));
    int64_t kept = out[i];
    out[i] = out[other];
    out[other] = kept;
  }
}
