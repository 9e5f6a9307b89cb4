/* loss_body.h: rows of cross entropy; loss.c includes it once for float, once for double.
 *
 * Invariant: REAL, FN(name), READ, TARGET, WRITE and EXP are defined by the includer.
 * To add a row function: take the loss and the row's offsets (in the order of loss.v).
 */

static REAL FN(max_of)(const loss *k, int64_t off) {
  REAL buf[ORR_CHUNK], m = -(REAL)INFINITY;
  for (int64_t i = 0; i < k->len; i += ORR_CHUNK) {
    int64_t n = left(k->len, i);
    const REAL *p = READ(k->x, off + i * k->xs, k->xs, n, buf);
#pragma omp simd reduction(max : m)
    for (int64_t j = 0; j < n; j++) m = p[j] > m ? p[j] : m;
  }
  return m;
}

static double FN(sums_of)(const loss *k, int64_t off, REAL m, double *sum_x) {
  REAL buf[ORR_CHUNK];
  double sum = 0;
  *sum_x = 0;
  for (int64_t i = 0; i < k->len; i += ORR_CHUNK) {
    int64_t n = left(k->len, i);
    const REAL *p = READ(k->x, off + i * k->xs, k->xs, n, buf);
    REAL a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
    for (int64_t j = 0; j < n; j++) {
      a += EXP(p[j] - m);
      b += p[j];
    }
    sum += a;
    *sum_x += b;
  }
  return sum;
}

static void FN(back_row)(const loss *k, const int64_t *off, int64_t t) {
  REAL buf[ORR_CHUNK], out[ORR_CHUNK];
  REAL g = (REAL)orr_k_get(k->v[2], off[2]), lse = (REAL)orr_k_get(k->v[1], off[1]);
  REAL spread = (REAL)(k->smooth / (double)k->classes), hit = (REAL)(1 - k->smooth);
  for (int64_t i = 0; i < k->len; i += ORR_CHUNK) {
    int64_t n = left(k->len, i), ys = k->gs;
    const REAL *p = READ(k->x, off[0] + i * k->xs, k->xs, n, buf);
    REAL *o = TARGET(k->v[3], off[3] + i * ys, ys, out);
    if (t < 0) {
      for (int64_t j = 0; j < n; j++) o[j] = 0;
    } else {
#pragma omp simd
      for (int64_t j = 0; j < n; j++) o[j] = g * (EXP(p[j] - lse) - spread);
      int64_t here = t - 1 - k->class0 - i;
      if (here >= 0 && here < n) o[here] -= g * hit;
    }
    WRITE(k->v[3], off[3] + i * ys, ys, n, o);
  }
}
