/* matmul.c: the matrix product for every dtype and stride, by tiles held in registers.
 *
 * Invariant: as matmul.h says. f32 and f64 whose output has contiguous rows or columns run in
 * matmul_tile.h where they lie; everything else goes block by block through f32 or f64 copies,
 * and integers through plain loops.
 * To make a dtype fast: a vector type and its masked load and store, and one more inclusion.
 * The method is that of Goto and van de Geijn, "Anatomy of high-performance matrix
 * multiplication", ACM TOMS 34(3), 2008, with b packed one panel at a time.
 */
#include "vector.h"

#include "matmul.h"

#include <string.h>

#include "loop.h"
#include "parallel.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif

#ifdef __AVX512F__
#define VEC_BYTES 64
#define TILE_ROWS 8
#define PACKED_ROWS 12
#else
#ifdef __AVX__
#define VEC_BYTES 32
#else
#define VEC_BYTES 16
#endif
#define TILE_ROWS 6
#define PACKED_ROWS 6
#endif
#define BLOCK_K 256
#define BLOCK_M 96             /* a multiple of PACKED_ROWS */
#define ORR_GRAIN_WORK 1000000 /* multiplications worth a second thread */

#define ORR_NAME_(a, b) a##b
#define ORR_NAME(a, b) ORR_NAME_(a, b)

/* ---- masked loads and stores, and the transposing pack ----------------------------------- */

#ifdef __AVX512F__
#define load_part_f32(p, n) ((vec_f32)_mm512_maskz_loadu_ps((__mmask16)((1u << (n)) - 1u), p))
#define load_part_f64(p, n) ((vec_f64)_mm512_maskz_loadu_pd((__mmask8)((1u << (n)) - 1u), p))
#define store_part_f32(p, v, n) \
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << (n)) - 1u), (__m512)(v))
#define store_part_f64(p, v, n) \
  _mm512_mask_storeu_pd(p, (__mmask8)((1u << (n)) - 1u), (__m512d)(v))

/* One step of a 16 by 16 transpose: swaps the off-diagonal blocks of side `s` of all blocks of
 * side 2 s. */
static inline __attribute__((always_inline)) void swap_blocks(__m512 *r, const int s) {
  int low[16], high[16];
  for (int l = 0; l < 16; l++) {
    low[l] = l & s ? 16 + l - s : l;
    high[l] = l & s ? 16 + l : l + s;
  }
  __m512i pick_low = _mm512_loadu_si512(low), pick_high = _mm512_loadu_si512(high);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    if (i & s) continue;
    __m512 a = r[i], b = r[i + s];
    r[i] = _mm512_permutex2var_ps(a, pick_low, b);
    r[i + s] = _mm512_permutex2var_ps(a, pick_high, b);
  }
}

/* Packs the first multiple of 16 rows of b, whose columns are contiguous; returns how many. */
static int64_t pack_across_f32(const float *b, int64_t b_n, int64_t k, int64_t n, float *to) {
  int64_t whole = k / 16 * 16;
  for (int64_t j = 0; j < n; j += 16) {
    int columns = n - j < 16 ? (int)(n - j) : 16;
    for (int64_t i = 0; i < whole; i += 16) {
      __m512 r[16];
      const float *from = b + i + j * b_n;
#pragma GCC unroll 16
      for (int l = 0; l < 16; l++) {
        r[l] = l < columns ? _mm512_loadu_ps(from + l * b_n) : _mm512_setzero_ps();
      }
      swap_blocks(r, 8);
      swap_blocks(r, 4);
      swap_blocks(r, 2);
      swap_blocks(r, 1);
#pragma GCC unroll 16
      for (int l = 0; l < 16; l++) _mm512_storeu_ps(to + (i + l) * 32 + j, r[l]);
    }
  }
  return whole;
}
#else
#define PARTS(T, S)                                            \
  typedef T part_##S __attribute__((vector_size(VEC_BYTES)));  \
  static inline part_##S load_part_##S(const T *p, int n) {    \
    part_##S v = {0};                                          \
    for (int i = 0; i < n; i++) v[i] = p[i];                   \
    return v;                                                  \
  }                                                            \
  static inline void store_part_##S(T *p, part_##S v, int n) { \
    for (int i = 0; i < n; i++) p[i] = v[i];                   \
  }
PARTS(float, f32)
PARTS(double, f64)
#define pack_across_f32(b, b_n, k, n, to) 0
#endif
#define pack_across_f64(b, b_n, k, n, to) 0

#define T float
#define S f32
#include "matmul_tile.h"

#define T double
#define S f64
#include "matmul_tile.h"

/* ---- any float dtype and any strides, by copied blocks ----------------------------------- */

#define COPY_M 32
#define COPY_N 32

typedef struct copied {
  const orr_view *a, *b;
  orr_view *c;
  bool accumulate;
  int64_t row_blocks, col_blocks;
  orr_dtype compute;
} copied;

static char *element(const orr_view *v, int64_t batch, int64_t i, int64_t j) {
  int r = v->ndim - 2;
  int64_t at = i * v->stride[r] + j * v->stride[r + 1] + (r > 0 ? batch * v->stride[0] : 0);
  return (char *)v->data + at * (int64_t)orr_element_size(v->dtype);
}

/* rows x cols of v from (i, j), contiguous in the compute type, rows `pitch` apart. */
static void copy_block(const orr_view *v, int64_t batch, int64_t i, int64_t j, int64_t rows,
                       int64_t cols, char *to, int64_t pitch) {
  int64_t size = (int64_t)orr_element_size(orr_compute_dtype(v->dtype));
  int64_t stride = v->stride[v->ndim - 1];
  for (int64_t r = 0; r < rows; r++) {
    orr_chunk buffer;
    const void *row =
        orr_load_row(v->dtype, element(v, batch, i + r, j), stride, cols, &buffer);
    memcpy(to + r * pitch * size, row, (size_t)(cols * size));
  }
}

static void multiply_block(const copied *q, int64_t m, int64_t n, int64_t k, const void *a,
                           const void *b, void *c) {
  if (q->compute == ORR_F64) {
    problem_f64 p = {.m = m,
                     .n = n,
                     .k = k,
                     .a = a,
                     .b = b,
                     .c = c,
                     .a_m = BLOCK_K,
                     .a_k = 1,
                     .b_k = COPY_N,
                     .b_n = 1,
                     .c_m = COPY_N,
                     .accumulate = true};
    int64_t step = 2 * VEC_BYTES / 8;
    for (int64_t j = 0; j < n; j += step) {
      panel_f64(&p, 0, m, n - j < step ? n - j : step, (const double *)b + j, (double *)c + j,
                a);
    }
    return;
  }
  problem_f32 p = {.m = m,
                   .n = n,
                   .k = k,
                   .a = a,
                   .b = b,
                   .c = c,
                   .a_m = BLOCK_K,
                   .a_k = 1,
                   .b_k = COPY_N,
                   .b_n = 1,
                   .c_m = COPY_N,
                   .accumulate = true};
  int64_t step = 2 * VEC_BYTES / 4;
  for (int64_t j = 0; j < n; j += step) {
    panel_f32(&p, 0, m, n - j < step ? n - j : step, (const float *)b + j, (float *)c + j, a);
  }
}

static void copied_units(const void *context, int64_t begin, int64_t end) {
  const copied *q = context;
  int r = q->c->ndim - 2;
  int64_t m_all = q->c->shape[r], n_all = q->c->shape[r + 1], k_all = q->a->shape[r + 1];
  int64_t size = (int64_t)orr_element_size(q->compute);
  _Alignas(64) char a[COPY_M * BLOCK_K * 8], b[BLOCK_K * COPY_N * 8], c[COPY_M * COPY_N * 8];
  for (int64_t u = begin; u < end; u++) {
    int64_t j = u % q->col_blocks * COPY_N, rest = u / q->col_blocks;
    int64_t i = rest % q->row_blocks * COPY_M, batch = rest / q->row_blocks;
    int64_t m = m_all - i < COPY_M ? m_all - i : COPY_M;
    int64_t n = n_all - j < COPY_N ? n_all - j : COPY_N;
    memset(c, 0, sizeof c);
    if (q->accumulate) copy_block(q->c, batch, i, j, m, n, c, COPY_N);
    for (int64_t l = 0; l < k_all; l += BLOCK_K) {
      int64_t k = k_all - l < BLOCK_K ? k_all - l : BLOCK_K;
      copy_block(q->a, batch, i, l, m, k, a, BLOCK_K);
      copy_block(q->b, batch, l, j, k, n, b, COPY_N);
      multiply_block(q, m, n, k, a, b, c);
    }
    for (int64_t row = 0; row < m; row++) {
      orr_store_row(q->c->dtype, c + row * COPY_N * size, element(q->c, batch, i + row, j),
                    q->c->stride[r + 1], n);
    }
  }
}

static void multiply_copied(const orr_view *a, const orr_view *b, orr_view *c,
                            bool accumulate) {
  int r = c->ndim - 2;
  copied q = {.a = a,
              .b = b,
              .c = c,
              .accumulate = accumulate,
              .row_blocks = (c->shape[r] + COPY_M - 1) / COPY_M,
              .col_blocks = (c->shape[r + 1] + COPY_N - 1) / COPY_N,
              .compute = orr_compute_dtype(c->dtype)};
  int64_t units = q.row_blocks * q.col_blocks * (r > 0 ? c->shape[0] : 1);
  int64_t work = COPY_M * COPY_N * a->shape[r + 1] + 1;
  orr_parallel(units, ORR_GRAIN_WORK / work + 1, copied_units, &q);
}

/* ---- integers ---------------------------------------------------------------------------- */

static int64_t read_integer(orr_dtype dtype, const char *p) {
  switch (dtype) {
    case ORR_I64: return *(const int64_t *)(const void *)p;
    case ORR_I32: return *(const int32_t *)(const void *)p;
    default: return *(const uint8_t *)p;
  }
}

static void write_integer(orr_dtype dtype, char *p, int64_t value) {
  switch (dtype) {
    case ORR_I64: *(int64_t *)(void *)p = value; break;
    case ORR_I32: *(int32_t *)(void *)p = (int32_t)value; break;
    case ORR_BOOL: *(uint8_t *)p = value != 0; break;
    default: *(uint8_t *)p = (uint8_t)value; break;
  }
}

static void multiply_integers(const orr_view *a, const orr_view *b, orr_view *c,
                              bool accumulate) {
  int r = c->ndim - 2;
  int64_t batches = r > 0 ? c->shape[0] : 1;
  for (int64_t batch = 0; batch < batches; batch++) {
    for (int64_t i = 0; i < c->shape[r]; i++) {
      for (int64_t j = 0; j < c->shape[r + 1]; j++) {
        char *to = element(c, batch, i, j);
        uint64_t sum = accumulate ? (uint64_t)read_integer(c->dtype, to) : 0;
        for (int64_t k = 0; k < a->shape[r + 1]; k++) {
          uint64_t x = (uint64_t)read_integer(a->dtype, element(a, batch, i, k));
          sum += x * (uint64_t)read_integer(b->dtype, element(b, batch, k, j));
        }
        write_integer(c->dtype, to, (int64_t)sum);
      }
    }
  }
}

void orr_k_matmul(const orr_view *a, const orr_view *b, orr_view *c, bool accumulate) {
  if (orr_view_numel(c) == 0) return;
  switch (c->dtype) {
    case ORR_F32:
      if (!try_views_f32(a, b, c, accumulate)) multiply_copied(a, b, c, accumulate);
      return;
    case ORR_F64:
      if (!try_views_f64(a, b, c, accumulate)) multiply_copied(a, b, c, accumulate);
      return;
    case ORR_F16:
    case ORR_BF16: multiply_copied(a, b, c, accumulate); return;
    default: multiply_integers(a, b, c, accumulate); return;
  }
}

bool orr_k_matmul_excels(const orr_view *a, const orr_view *b, const orr_view *c) {
#ifdef __AVX512F__
  int r = c->ndim - 2, s = c->ndim - 1;
  bool across = a->stride[r] == 1 && a->stride[s] != 1 && b->stride[s] == 1;
  return c->dtype == ORR_F32 && across && c->stride[s] == 1 && a->shape[s] <= 3 * BLOCK_K / 2;
#else
  (void)a, (void)b, (void)c;
  return false;
#endif
}
