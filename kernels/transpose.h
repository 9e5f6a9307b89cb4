/* transpose.h: turns rows into columns, 16 by 16 numbers of f32 at a time where AVX-512 is.
 *
 * Invariant: memory past the sizes given is neither read nor written.
 * To add a type: a function of its name beside orr_transpose_f32.
 */
#ifndef ORR_TRANSPOSE_H
#define ORR_TRANSPOSE_H

#include "vector.h"

#include <stdint.h>
#ifdef __AVX512F__
#include <immintrin.h>

/* Swaps the off-diagonal blocks of side `s` in all blocks of side 2 s. */
static inline __attribute__((always_inline)) void orr_swap_blocks_f32(__m512 *r, const int s) {
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

static inline void orr_transpose_16_f32(const float *x, int64_t x_row, float *y,
                                        int64_t y_row) {
  __m512 r[16];
#pragma GCC unroll 16
  for (int l = 0; l < 16; l++) r[l] = _mm512_loadu_ps(x + l * x_row);
  orr_swap_blocks_f32(r, 8);
  orr_swap_blocks_f32(r, 4);
  orr_swap_blocks_f32(r, 2);
  orr_swap_blocks_f32(r, 1);
#pragma GCC unroll 16
  for (int l = 0; l < 16; l++) _mm512_storeu_ps(y + l * y_row, r[l]);
}
#endif

/* y (n, m) = x (m, n) turned; rows are contiguous, x_row and y_row apart. */
static inline void orr_transpose_f32(int64_t m, int64_t n, const float *x, int64_t x_row,
                                     float *y, int64_t y_row) {
  int64_t m16 = 0, n16 = 0;
#ifdef __AVX512F__
  m16 = m / 16 * 16;
  n16 = n / 16 * 16;
  for (int64_t i = 0; i < m16; i += 16)
    for (int64_t j = 0; j < n16; j += 16)
      orr_transpose_16_f32(x + i * x_row + j, x_row, y + j * y_row + i, y_row);
#endif
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = i < m16 ? n16 : 0; j < n; j++) y[j * y_row + i] = x[i * x_row + j];
}

static inline void orr_transpose_f64(int64_t m, int64_t n, const double *x, int64_t x_row,
                                     double *y, int64_t y_row) {
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) y[j * y_row + i] = x[i * x_row + j];
}

#endif
