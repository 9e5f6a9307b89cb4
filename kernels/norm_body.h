/* norm_body.h: rows of layer and RMS norm; norm.c includes it once for float, once for double.
 *
 * Invariant: REAL, FN(name), READ, TARGET and WRITE are defined by the includer. mean NULL is
 * RMS.
 * To add a row function: take the row's views and offsets as these do.
 */

static void FN(norm_row)(const norm_row *r, const int64_t *off) {
  REAL buf[ORR_CHUNK], wbuf[ORR_CHUNK], bbuf[ORR_CHUNK], out[ORR_CHUNK];
  double sum = 0, squares = 0;
  for (int64_t i = 0; r->mean != NULL && i < r->len; i += ORR_CHUNK) {
    int64_t n = left(r->len, i);
    const REAL *p = READ(r->x, off[0] + i * r->xs, r->xs, n, buf);
    double a = 0, b = 0;
    int64_t h = n / 2;
#pragma omp simd reduction(+ : a, b)
    for (int64_t j = 0; j < h; j++) {
      a += p[j];
      b += p[j + h];
    }
    sum += a + b + (n & 1 ? p[n - 1] : 0);
  }
  REAL m = r->len > 0 ? (REAL)(sum / (double)r->len) : 0;
  for (int64_t i = 0; i < r->len; i += ORR_CHUNK) {
    int64_t n = left(r->len, i);
    const REAL *p = READ(r->x, off[0] + i * r->xs, r->xs, n, buf);
    REAL part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = 0; j < n; j++) part += (p[j] - m) * (p[j] - m);
    squares += part;
  }
  REAL s = (REAL)(1 / sqrt(squares / (double)r->len + r->eps));
  for (int64_t i = 0; i < r->len; i += ORR_CHUNK) {
    int64_t n = left(r->len, i);
    const REAL *p = READ(r->x, off[0] + i * r->xs, r->xs, n, buf);
    const REAL *w = r->w != NULL ? READ(r->w, i * r->ws, r->ws, n, wbuf) : NULL;
    const REAL *b = r->b != NULL ? READ(r->b, i * r->bs, r->bs, n, bbuf) : NULL;
    REAL *o = TARGET(r->y, off[1] + i * r->ys, r->ys, out);
    if (w != NULL && b != NULL) {
#pragma omp simd
      for (int64_t j = 0; j < n; j++) o[j] = (p[j] - m) * s * w[j] + b[j];
    } else {
      for (int64_t j = 0; j < n; j++)
        o[j] = (p[j] - m) * s * (w != NULL ? w[j] : 1) + (b != NULL ? b[j] : 0);
    }
    WRITE(r->y, off[1] + i * r->ys, r->ys, n, o);
  }
  if (r->mean != NULL) WRITE(r->mean, off[2], 1, 1, &m);
  WRITE(r->rstd, off[3], 1, 1, &s);
}

/* gx = rstd (gw - mean(gw) - xhat mean(gw xhat)); RMS has no second term. off: x, gx, mean,
 * rstd, g. */
static void FN(norm_back_row)(const norm_row *r, const int64_t *off) {
  REAL buf[ORR_CHUNK], gbuf[ORR_CHUNK], wbuf[ORR_CHUNK], out[ORR_CHUNK];
  REAL m = r->mean != NULL ? (REAL)orr_k_get(r->mean, off[2]) : 0;
  REAL s = (REAL)orr_k_get(r->rstd, off[3]);
  double sum = 0, dot = 0;
  for (int64_t j = 0; r->w == NULL && j < ORR_CHUNK; j++) wbuf[j] = 1;
  for (int64_t i = 0; i < r->len; i += ORR_CHUNK) {
    int64_t n = left(r->len, i);
    const REAL *p = READ(r->x, off[0] + i * r->xs, r->xs, n, buf);
    const REAL *g = READ(r->g, off[4] + i * r->gs, r->gs, n, gbuf);
    const REAL *w = r->w != NULL ? READ(r->w, i * r->ws, r->ws, n, wbuf) : wbuf;
    REAL a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
    for (int64_t j = 0; j < n; j++) {
      REAL gw = g[j] * w[j];
      a += gw;
      b += gw * ((p[j] - m) * s);
    }
    sum += a;
    dot += b;
  }
  REAL first = r->mean != NULL ? (REAL)(sum / (double)r->len) : 0;
  REAL second = (REAL)(dot / (double)r->len);
  for (int64_t i = 0; i < r->len; i += ORR_CHUNK) {
    int64_t n = left(r->len, i);
    const REAL *p = READ(r->x, off[0] + i * r->xs, r->xs, n, buf);
    const REAL *g = READ(r->g, off[4] + i * r->gs, r->gs, n, gbuf);
    const REAL *w = r->w != NULL ? READ(r->w, i * r->ws, r->ws, n, wbuf) : wbuf;
    REAL *o = TARGET(r->y, off[1] + i * r->ys, r->ys, out);
#pragma omp simd
    for (int64_t j = 0; j < n; j++) o[j] = s * (g[j] * w[j] - first - (p[j] - m) * s * second);
    WRITE(r->y, off[1] + i * r->ys, r->ys, n, o);
  }
}

/* Columns [c, c + n) of the weight gradients, over all rows in their order. */
static void FN(norm_back_columns)(const norm_row *r, const orr_loop *l, int64_t c, int64_t n,
                                  double *gw, double *gb) {
  REAL buf[NORM_COLUMNS], gbuf[NORM_COLUMNS];
  for (int64_t j = 0; j < n; j++) gw[j] = gb[j] = 0;
  for (int64_t row = 0; row < l->n; row++) {
    int64_t off[5];
    orr_loop_at(l, 5, row, off);
    REAL m = r->mean != NULL ? (REAL)orr_k_get(r->mean, off[2]) : 0;
    REAL s = (REAL)orr_k_get(r->rstd, off[3]);
    const REAL *p = READ(r->x, off[0] + c * r->xs, r->xs, n, buf);
    const REAL *g = READ(r->g, off[4] + c * r->gs, r->gs, n, gbuf);
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
      gw[j] += g[j] * ((p[j] - m) * s);
      gb[j] += g[j];
    }
  }
}
