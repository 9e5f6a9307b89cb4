/* softmax_body.h: rows of the softmax family; softmax.c includes it once for float, once for
 * double.
 *
 * Invariant: REAL, FN(name), READ, TARGET, WRITE and EXP are defined by the includer.
 * To add a row function: take (views, offsets, run) as these do.
 */

static inline int64_t FN(left)(int64_t len, int64_t i) {
  return len - i < ORR_CHUNK ? len - i : ORR_CHUNK;
}

static REAL FN(row_max)(const orr_view *x, int64_t off, int64_t stride, int64_t len) {
  REAL buf[ORR_CHUNK], m = -(REAL)INFINITY;
  for (int64_t i = 0; i < len; i += ORR_CHUNK) {
    int64_t n = FN(left)(len, i);
    const REAL *p = READ(x, off + i * stride, stride, n, buf);
#pragma omp simd reduction(max : m)
    for (int64_t j = 0; j < n; j++) m = p[j] > m ? p[j] : m;
  }
  return m;
}

/* Sum of exp(x - m), stored at y on the way where y is not NULL. */
static double FN(row_sum_exp)(const orr_view *x, int64_t off, int64_t stride, int64_t len,
                              REAL m, REAL *y) {
  REAL buf[ORR_CHUNK], out[ORR_CHUNK];
  double sum = 0;
  for (int64_t i = 0; i < len; i += ORR_CHUNK) {
    int64_t n = FN(left)(len, i);
    const REAL *p = READ(x, off + i * stride, stride, n, buf);
    REAL *e = y != NULL ? y + i : out, part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = 0; j < n; j++) {
      REAL v = EXP(p[j] - m);
      e[j] = v;
      part += v;
    }
    sum += part;
  }
  return sum;
}

static void FN(softmax_row)(const orr_view *const *v, const int64_t *off, orr_run run) {
  const orr_view *x = v[0], *y = v[1];
  int64_t xs = run.stride[0], ys = run.stride[1];
  REAL buf[ORR_CHUNK], out[ORR_CHUNK], m = FN(row_max)(x, off[0], xs, run.len);
  REAL *whole = TARGET(y, off[1], ys, NULL);
  if (whole == NULL && run.len <= ORR_CHUNK) whole = out;
  REAL scale = (REAL)(1 / FN(row_sum_exp)(x, off[0], xs, run.len, m, whole));
  for (int64_t i = 0; i < run.len; i += ORR_CHUNK) {
    int64_t n = FN(left)(run.len, i);
    REAL *o = whole != NULL ? whole + i : out;
    if (whole == NULL) {
      const REAL *p = READ(x, off[0] + i * xs, xs, n, buf);
      for (int64_t j = 0; j < n; j++) o[j] = EXP(p[j] - m);
    }
    for (int64_t j = 0; j < n; j++) o[j] *= scale;
    WRITE(y, off[1] + i * ys, ys, n, o);
  }
}

static REAL FN(log_sum_exp)(const orr_view *x, int64_t off, int64_t stride, int64_t len,
                            REAL *m) {
  *m = FN(row_max)(x, off, stride, len);
  if (*m == -(REAL)INFINITY) {
    *m = 0;
    return (REAL)log(FN(row_sum_exp)(x, off, stride, len, 0, NULL));
  }
  if (*m == (REAL)INFINITY) {
    double sum = FN(row_sum_exp)(x, off, stride, len, 0, NULL);
    *m = 0;
    return (REAL)sum;
  }
  return (REAL)log(FN(row_sum_exp)(x, off, stride, len, *m, NULL));
}

static void FN(log_softmax_row)(const orr_view *const *v, const int64_t *off, orr_run run) {
  const orr_view *x = v[0], *y = v[1];
  int64_t xs = run.stride[0], ys = run.stride[1];
  REAL buf[ORR_CHUNK], out[ORR_CHUNK], m;
  REAL rest = FN(log_sum_exp)(x, off[0], xs, run.len, &m);
  for (int64_t i = 0; i < run.len; i += ORR_CHUNK) {
    int64_t n = FN(left)(run.len, i);
    const REAL *p = READ(x, off[0] + i * xs, xs, n, buf);
    REAL *o = TARGET(y, off[1] + i * ys, ys, out);
    for (int64_t j = 0; j < n; j++) o[j] = p[j] - m - rest;
    WRITE(y, off[1] + i * ys, ys, n, o);
  }
}

static void FN(logsumexp_row)(const orr_view *const *v, const int64_t *off, orr_run run) {
  REAL m, y = FN(log_sum_exp)(v[0], off[0], run.stride[0], run.len, &m);
  y += m;
  WRITE(v[1], off[1], 1, 1, &y);
}

static void FN(softmax_back_row)(const orr_view *const *v, const int64_t *off, orr_run run) {
  REAL ybuf[ORR_CHUNK], gbuf[ORR_CHUNK], out[ORR_CHUNK];
  const int64_t *s = run.stride;
  double dot = 0;
  for (int64_t i = 0; i < run.len; i += ORR_CHUNK) {
    int64_t n = FN(left)(run.len, i);
    const REAL *y = READ(v[0], off[0] + i * s[0], s[0], n, ybuf);
    const REAL *g = READ(v[1], off[1] + i * s[1], s[1], n, gbuf);
    REAL part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = 0; j < n; j++) part += y[j] * g[j];
    dot += part;
  }
  for (int64_t i = 0; i < run.len; i += ORR_CHUNK) {
    int64_t n = FN(left)(run.len, i);
    const REAL *y = READ(v[0], off[0] + i * s[0], s[0], n, ybuf);
    const REAL *g = READ(v[1], off[1] + i * s[1], s[1], n, gbuf);
    REAL *o = TARGET(v[2], off[2] + i * s[2], s[2], out), d = (REAL)dot;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) o[j] = y[j] * (g[j] - d);
    WRITE(v[2], off[2] + i * s[2], s[2], n, o);
  }
}

static void FN(log_softmax_back_row)(const orr_view *const *v, const int64_t *off,
                                     orr_run run) {
  REAL ybuf[ORR_CHUNK], gbuf[ORR_CHUNK], out[ORR_CHUNK];
  const int64_t *s = run.stride;
  double sum = 0;
  for (int64_t i = 0; i < run.len; i += ORR_CHUNK) {
    int64_t n = FN(left)(run.len, i);
    const REAL *g = READ(v[1], off[1] + i * s[1], s[1], n, gbuf);
    REAL part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = 0; j < n; j++) part += g[j];
    sum += part;
  }
  for (int64_t i = 0; i < run.len; i += ORR_CHUNK) {
    int64_t n = FN(left)(run.len, i);
    const REAL *y = READ(v[0], off[0] + i * s[0], s[0], n, ybuf);
    const REAL *g = READ(v[1], off[1] + i * s[1], s[1], n, gbuf);
    REAL *o = TARGET(v[2], off[2] + i * s[2], s[2], out), d = (REAL)sum;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) o[j] = g[j] - EXP(y[j]) * d;
    WRITE(v[2], off[2] + i * s[2], s[2], n, o);
  }
}
