/* norm_batch_body.h: runs of batch norm; norm_batch.c includes it once for float, once for
 * double.
 *
 * Invariant: REAL, FN(name), READ, TARGET and WRITE are defined by the includer. A run is n
 * elements with n parameters each side by side (channels inner), or with one (space inner).
 * To add a formula of x, g and per-channel numbers: a case in run_of.
 */

/* out = (x - m) a + b, or a g - (x - m) d - b where g is given. */
static void FN(run_of)(const REAL *x, const REAL *g, const REAL *m, const REAL *a,
                       const REAL *b, const REAL *d, bool each, int64_t n, REAL *out) {
  if (g == NULL && each) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) out[j] = (x[j] - m[j]) * a[j] + b[j];
  } else if (g == NULL) {
    REAL m0 = *m, a0 = *a, b0 = *b;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) out[j] = (x[j] - m0) * a0 + b0;
  } else if (each) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) out[j] = a[j] * g[j] - (x[j] - m[j]) * d[j] - b[j];
  } else {
    REAL m0 = *m, a0 = *a, b0 = *b, d0 = *d;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) out[j] = a0 * g[j] - (x[j] - m0) * d0 - b0;
  }
}

static void FN(row)(const channels *k, const int64_t *off, int64_t len, bool each,
                    const REAL *m, const REAL *a, const REAL *b, const REAL *d) {
  REAL buf[ORR_CHUNK], gbuf[ORR_CHUNK], out[ORR_CHUNK];
  const int64_t *s = k->in.stride;
  for (int64_t i = 0; i < len; i += ORR_CHUNK) {
    int64_t n = len - i < ORR_CHUNK ? len - i : ORR_CHUNK;
    const REAL *x = READ(k->x, off[0] + i * s[0], s[0], n, buf);
    const REAL *g = k->g != NULL ? READ(k->g, off[1] + i * s[1], s[1], n, gbuf) : NULL;
    REAL *o = TARGET(k->y, off[2] + i * s[2], s[2], out);
    FN(run_of)(x, g, m, a, b, d, each, n, o);
    WRITE(k->y, off[2] + i * s[2], s[2], n, o);
  }
}

/* Unit u of the elementwise pass: rows of one channel, or pieces that hold all of a chunk. */
static void FN(apply)(const channels *k) {
  int64_t per = (k->channels + CHANNELS - 1) / CHANNELS;
  bool threads = k->total >= ORR_K_GRAIN;
  for (int64_t q = 0; q < per; q++) {
    REAL m[ORR_CHUNK], a[ORR_CHUNK], b[ORR_CHUNK], d[ORR_CHUNK];
    int64_t c = q * CHANNELS, n = k->channels - c < CHANNELS ? k->channels - c : CHANNELS;
    int64_t fold = k->inner && n == k->channels ? k->fold : 1, rows = k->outer.n;
    for (int64_t j = 0; j < n * fold; j++) {
      double p[4];
      k->param(k, c + j % n, p);
      m[j] = (REAL)p[0], a[j] = (REAL)p[1], b[j] = (REAL)p[2], d[j] = (REAL)p[3];
    }
    int64_t steps = k->inner ? (k->over.len + fold - 1) / fold * rows : n * rows;
#pragma omp parallel for schedule(static) if (threads)
    for (int64_t u = 0; u < steps; u++) {
      int64_t off[3];
      if (k->inner) {
        int64_t row = u % rows, first = u / rows * fold;
        int64_t count = k->over.len - first < fold ? k->over.len - first : fold;
        orr_loop_at(&k->outer, 3, row, off);
        for (int v = 0; v < 3; v++) off[v] += first * k->over.stride[v] + c * k->cs[v];
        FN(row)(k, off, n * count, true, m, a, b, d);
      } else {
        int64_t row = u / n, j = u % n;
        orr_loop_at(&k->outer, 3, row, off);
        for (int v = 0; v < 3; v++) off[v] += (c + j) * k->cs[v];
        FN(row)(k, off, k->in.len, false, m + j, a + j, b + j, d + j);
      }
    }
  }
}

/* The two gradient sums of channels [c, c + n), channels inner: rows [r0, r1) of over x
 * outer. */
static void FN(sums_inner)(const channels *k, int64_t c, int64_t n, int64_t fold, int64_t s0,
                           int64_t s1, double *sum, double *dot, const REAL *m) {
  REAL buf[ORR_CHUNK], gbuf[ORR_CHUNK];
  for (int64_t j = 0; j < n * fold; j++) sum[j] = dot[j] = 0;
  for (int64_t s = s0; s < s1; s++) {
    int64_t off[3], first = s / k->outer.n * fold;
    int64_t count = n * (k->over.len - first < fold ? k->over.len - first : fold);
    orr_loop_at(&k->outer, 2, s % k->outer.n, off);
    for (int v = 0; v < 2; v++) off[v] += first * k->over.stride[v] + c * k->cs[v];
    const REAL *x = READ(k->x, off[0], k->in.stride[0], count, buf);
    const REAL *g = READ(k->g, off[1], k->in.stride[1], count, gbuf);
#pragma omp simd
    for (int64_t j = 0; j < count; j++) {
      sum[j] += g[j];
      dot[j] += g[j] * (x[j] - m[j]);
    }
  }
  for (int64_t j = n; j < n * fold; j++) {
    sum[j % n] += sum[j];
    dot[j % n] += dot[j];
  }
}

static void FN(sums_spatial)(const channels *k, int64_t c, double *sum, double *dot, REAL m) {
  REAL buf[ORR_CHUNK], gbuf[ORR_CHUNK];
  const int64_t *s = k->in.stride;
  *sum = *dot = 0;
  for (int64_t row = 0; row < k->outer.n; row++) {
    int64_t off[2];
    orr_loop_at(&k->outer, 2, row, off);
    for (int v = 0; v < 2; v++) off[v] += c * k->cs[v];
    for (int64_t i = 0; i < k->in.len; i += ORR_CHUNK) {
      int64_t n = k->in.len - i < ORR_CHUNK ? k->in.len - i : ORR_CHUNK;
      const REAL *x = READ(k->x, off[0] + i * s[0], s[0], n, buf);
      const REAL *g = READ(k->g, off[1] + i * s[1], s[1], n, gbuf);
      double a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
      for (int64_t j = 0; j < n; j++) {
        a += g[j];
        b += g[j] * (x[j] - m);
      }
      *sum += a;
      *dot += b;
    }
  }
}

static void FN(store_sums)(const channels *k, int64_t c, int64_t n, double *sum, double *dot) {
  for (int64_t j = 0; j < n; j++) {
    orr_k_set(k->sum_g, (c + j) * k->sum_g->stride[0], sum[j]);
    orr_k_set(k->sum_gxhat, (c + j) * k->sum_gxhat->stride[0], dot[j] * at(k->rstd, c + j, 1));
  }
}

static void FN(grad_sums)(const channels *k) {
  if (!k->inner) {
#pragma omp parallel for schedule(static) if (k->total >= ORR_K_GRAIN)
    for (int64_t c = 0; c < k->channels; c++) {
      double sum, dot;
      FN(sums_spatial)(k, c, &sum, &dot, (REAL)at(k->mean, c, 0));
      FN(store_sums)(k, c, 1, &sum, &dot);
    }
    return;
  }
  for (int64_t c = 0; c < k->channels; c += CHANNELS) {
    double sum[PIECES][ORR_CHUNK], dot[PIECES][ORR_CHUNK];
    REAL m[ORR_CHUNK];
    int64_t n = k->channels - c < CHANNELS ? k->channels - c : CHANNELS;
    int64_t fold = n == k->channels ? k->fold : 1;
    int64_t steps = (k->over.len + fold - 1) / fold * k->outer.n;
    for (int64_t j = 0; j < n * fold; j++) m[j] = (REAL)at(k->mean, c + j % n, 0);
#pragma omp parallel for schedule(static) if (k->total >= ORR_K_GRAIN)
    for (int64_t p = 0; p < PIECES; p++) FN(sums_inner)
    (k, c, n, fold, steps * p / PIECES, steps * (p + 1) / PIECES, sum[p], dot[p], m);
    for (int64_t p = 1; p < PIECES; p++)
      for (int64_t j = 0; j < n; j++) {
        sum[0][j] += sum[p][j];
        dot[0][j] += dot[p][j];
      }
    FN(store_sums)(k, c, n, sum[0], dot[0]);
  }
}
