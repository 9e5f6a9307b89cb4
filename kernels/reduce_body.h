/* reduce_body.h: the reduction of chunks of T into ACC; reduce.c includes it once a number
 * type.
 *
 * Invariant: T, ACC, ABS, ISNAN, LEAST, GREATEST and FN(name) are defined by the includer. The
 * order of joining is fixed by the shapes.
 * To add a kind: its case in nothing_of, join, row and column.
 */

static ACC FN(nothing_of)(int kind) {
  switch (kind) {
    case ORR_REDUCE_PROD:
    case ORR_REDUCE_ALL: return 1;
    case ORR_REDUCE_MAX: return LEAST;
    case ORR_REDUCE_MIN: return GREATEST;
    default: return 0;
  }
}

static inline ACC FN(greater)(ACC a, ACC b) { return b > a || ISNAN(b) ? b : a; }
static inline ACC FN(less)(ACC a, ACC b) { return b < a || ISNAN(b) ? b : a; }

static ACC FN(join)(int kind, ACC a, ACC b) {
  switch (kind) {
    case ORR_REDUCE_PROD: return a * b;
    case ORR_REDUCE_MAX:
    case ORR_REDUCE_MAXABS:
    case ORR_REDUCE_ANY: return FN(greater)(a, b);
    case ORR_REDUCE_MIN:
    case ORR_REDUCE_ALL: return FN(less)(a, b);
    default: return a + b;
  }
}

/* Four sums side by side: enough to keep the adders busy, and a shorter chain of roundings. */
static ACC FN(row_sum)(const T *p, int64_t n) {
  ACC a = 0, b = 0, c = 0, d = 0;
  int64_t q = n / 4;
#pragma omp simd reduction(+ : a, b, c, d)
  for (int64_t i = 0; i < q; i++) {
    a += p[i];
    b += p[i + q];
    c += p[i + 2 * q];
    d += p[i + 3 * q];
  }
  for (int64_t i = 4 * q; i < n; i++) a += p[i];
  return a + b + (c + d);
}

static ACC FN(row_sumsq)(const T *p, int64_t n, ACC m) {
  ACC a = 0, b = 0;
  int64_t q = n / 2;
#pragma omp simd reduction(+ : a, b)
  for (int64_t i = 0; i < q; i++) {
    ACC u = p[i] - m, v = p[i + q] - m;
    a += u * u;
    b += v * v;
  }
  for (int64_t i = 2 * q; i < n; i++) a += (p[i] - m) * (p[i] - m);
  return a + b;
}

static ACC FN(row_max)(const T *p, int64_t n, ACC start) {
  T m = (T)start, nan = 0;
  int bad = 0;
#pragma omp simd reduction(max : m) reduction(| : bad)
  for (int64_t i = 0; i < n; i++) {
    m = p[i] > m ? p[i] : m;
    bad |= ISNAN(p[i]);
  }
  for (int64_t i = 0; bad && i < n; i++)
    if (ISNAN(p[i])) nan = p[i];
  return bad ? nan : m;
}

static ACC FN(row_min)(const T *p, int64_t n, ACC start) {
  T m = (T)start, nan = 0;
  int bad = 0;
#pragma omp simd reduction(min : m) reduction(| : bad)
  for (int64_t i = 0; i < n; i++) {
    m = p[i] < m ? p[i] : m;
    bad |= ISNAN(p[i]);
  }
  for (int64_t i = 0; bad && i < n; i++)
    if (ISNAN(p[i])) nan = p[i];
  return bad ? nan : m;
}

static int64_t FN(row_count)(const T *p, int64_t n) {
  int64_t a = 0;
#pragma omp simd reduction(+ : a)
  for (int64_t i = 0; i < n; i++) a += p[i] != 0;
  return a;
}

static ACC FN(row)(const reduction *r, const T *p, int64_t n, ACC m) {
  ACC a = FN(nothing_of)(r->kind);
  switch (r->kind) {
    case ORR_REDUCE_SUM: return FN(row_sum)(p, n);
    case ORR_REDUCE_PROD:
      for (int64_t i = 0; i < n; i++) a *= p[i];
      return a;
    case ORR_REDUCE_MAX: return FN(row_max)(p, n, a);
    case ORR_REDUCE_MIN: return FN(row_min)(p, n, a);
    case ORR_REDUCE_ANY: return FN(row_count)(p, n) != 0;
    case ORR_REDUCE_ALL: return FN(row_count)(p, n) == n;
    case ORR_REDUCE_SUMSQ: return FN(row_sumsq)(p, n, 0);
    case ORR_REDUCE_SUMABS:
#pragma omp simd reduction(+ : a)
      for (int64_t i = 0; i < n; i++) a += ABS((ACC)p[i]);
      return a;
    case ORR_REDUCE_MAXABS:
      for (int64_t i = 0; i < n; i++) a = FN(greater)(a, ABS((ACC)p[i]));
      return a;
    case ORR_REDUCE_COUNT: return (ACC)FN(row_count)(p, n);
    case SUM_POW:
      for (int64_t i = 0; i < n; i++) a += (ACC)pow(fabs((double)p[i]), r->power);
      return a;
    default: return FN(row_sumsq)(p, n, m);
  }
}

static void FN(column)(const reduction *r, ACC *a, const T *p, int64_t n, const ACC *m) {
  switch (r->kind) {
    case ORR_REDUCE_SUM:
      for (int64_t i = 0; i < n; i++) a[i] += p[i];
      break;
    case ORR_REDUCE_PROD:
      for (int64_t i = 0; i < n; i++) a[i] *= p[i];
      break;
    case ORR_REDUCE_MAX:
      for (int64_t i = 0; i < n; i++) a[i] = FN(greater)(a[i], p[i]);
      break;
    case ORR_REDUCE_MIN:
      for (int64_t i = 0; i < n; i++) a[i] = FN(less)(a[i], p[i]);
      break;
    case ORR_REDUCE_ANY:
      for (int64_t i = 0; i < n; i++) a[i] = p[i] != 0 ? 1 : a[i];
      break;
    case ORR_REDUCE_ALL:
      for (int64_t i = 0; i < n; i++) a[i] = p[i] == 0 ? 0 : a[i];
      break;
    case ORR_REDUCE_SUMSQ:
      for (int64_t i = 0; i < n; i++) a[i] += (ACC)p[i] * p[i];
      break;
    case ORR_REDUCE_SUMABS:
      for (int64_t i = 0; i < n; i++) a[i] += ABS((ACC)p[i]);
      break;
    case ORR_REDUCE_MAXABS:
      for (int64_t i = 0; i < n; i++) a[i] = FN(greater)(a[i], ABS((ACC)p[i]));
      break;
    case ORR_REDUCE_COUNT:
      for (int64_t i = 0; i < n; i++) a[i] += p[i] != 0;
      break;
    case SUM_POW:
      for (int64_t i = 0; i < n; i++) a[i] += (ACC)pow(fabs((double)p[i]), r->power);
      break;
    default:
      for (int64_t i = 0; i < n; i++) a[i] += (p[i] - m[i]) * (p[i] - m[i]);
  }
}

/* Chunks [u0, u1) of one output whose innermost dimension is reduced. */
static ACC FN(span)(const reduction *r, int64_t xoff, int64_t u0, int64_t u1, ACC m) {
  T buf[ORR_CHUNK];
  ACC a = FN(nothing_of)(r->kind);
  int64_t row = u0 / r->per_row, at = u0 % r->per_row, off;
  orr_loop_at(&r->reduced, 1, row, &off);
  for (int64_t u = u0; u < u1; u++) {
    int64_t i = at * ORR_CHUNK, n = r->in.len - i < ORR_CHUNK ? r->in.len - i : ORR_CHUNK;
    int64_t from = xoff + off + i * r->in.stride[0];
    a = FN(join)(r->kind, a, FN(row)(r, READ(r->x, from, r->in.stride[0], n, buf), n, m));
    if (++at == r->per_row && u + 1 < u1) {
      at = 0;
      orr_loop_at(&r->reduced, 1, ++row, &off);
    }
  }
  return a;
}

static void FN(reduce_rows)(const reduction *r) {
  int64_t outputs = r->kept.n, units = r->reduced.n * r->per_row;
  int64_t blocks = outputs < SPLIT && outputs * r->total >= 2 * ORR_K_GRAIN ? SPLIT : 1;
  if (blocks > units) blocks = units > 0 ? units : 1;
#pragma omp parallel for schedule(static) if (blocks == 1 && outputs * r->total >= ORR_K_GRAIN)
  for (int64_t o = 0; o < outputs; o++) {
    int64_t off[3];
    ACC part[SPLIT], a = FN(nothing_of)(r->kind);
    orr_loop_at(&r->kept, 3, o, off);
    ACC m = r->mean != NULL ? *READ_ACC(r->mean, off[2], 1, 1, part) : 0;
    if (r->total == 0) {
      WRITE_ACC(r->y, off[1], 1, 1, &a);
      continue;
    }
    if (blocks == 1) {
      a = FN(span)(r, off[0], 0, units, m);
    } else {
#pragma omp parallel for schedule(static)
      for (int64_t b = 0; b < blocks; b++)
        part[b] = FN(span)(r, off[0], units * b / blocks, units * (b + 1) / blocks, m);
      for (int64_t b = 0; b < blocks; b++) a = FN(join)(r->kind, a, part[b]);
    }
    WRITE_ACC(r->y, off[1], 1, 1, &a);
  }
}

/* Steps [s0, s1) of n outputs that lie beside each other; a step is r->fold rows in one
 * piece. */
static void FN(pile)(const reduction *r, int64_t xoff, int64_t n, int64_t s0, int64_t s1,
                     ACC *a, const ACC *m) {
  T buf[ORR_CHUNK];
  for (int64_t i = 0; i < n * r->fold; i++) a[i] = FN(nothing_of)(r->kind);
  for (int64_t s = s0; s < s1; s++) {
    int64_t outer = s / r->per_row, first = (s - outer * r->per_row) * r->fold, off;
    int64_t rows = r->over.len - first < r->fold ? r->over.len - first : r->fold;
    orr_loop_at(&r->reduced, 1, outer, &off);
    off += xoff + first * r->over.stride[0];
    FN(column)(r, a, READ(r->x, off, r->in.stride[0], n * rows, buf), n * rows, m);
  }
  for (int64_t f = 1; f < r->fold; f++)
    for (int64_t i = 0; i < n; i++) a[i] = FN(join)(r->kind, a[i], a[f * n + i]);
}

static void FN(reduce_columns)(const reduction *r) {
  int64_t per = (r->in.len + PILE - 1) / PILE, units = r->kept.n * per;
  int64_t steps = r->reduced.n * r->per_row;
  bool split = units < PILES && steps * r->in.len >= ORR_K_GRAIN;
  int64_t blocks = split ? PILES : 1;
#pragma omp parallel for schedule(static) if (!split && units * PILE * r->total >= ORR_K_GRAIN)
  for (int64_t u = 0; u < units; u++) {
    int64_t off[3], i = u % per * PILE, n = r->in.len - i < PILE ? r->in.len - i : PILE;
    ACC a[PILES][PILE], m[PILE], mbuf[PILE];
    orr_loop_at(&r->kept, 3, u / per, off);
    for (int v = 0; v < 3; v++) off[v] += i * r->in.stride[v];
    if (r->mean != NULL) {
      const ACC *from = READ_ACC(r->mean, off[2], r->in.stride[2], n, mbuf);
      for (int64_t j = 0; j < n * r->fold; j++) m[j] = from[j % n];
    }
    if (blocks == 1) {
      FN(pile)(r, off[0], n, 0, steps, a[0], m);
    } else {
#pragma omp parallel for schedule(static)
      for (int64_t b = 0; b < blocks; b++)
        FN(pile)(r, off[0], n, steps * b / blocks, steps * (b + 1) / blocks, a[b], m);
    }
    for (int64_t b = 1; b < blocks; b++)
      for (int64_t j = 0; j < n; j++) a[0][j] = FN(join)(r->kind, a[0][j], a[b][j]);
    WRITE_ACC(r->y, off[1], r->in.stride[1], n, a[0]);
  }
}

/* The best of one row: its chunk by a vector pass, then the first place where it stands. */
static int64_t FN(arg_row)(bool max, const orr_view *x, int64_t off, orr_run run, ACC *best) {
  T buf[ORR_CHUNK];
  int64_t at = -1;
  *best = max ? LEAST : GREATEST;
  for (int64_t i = 0; i < run.len; i += ORR_CHUNK) {
    int64_t n = run.len - i < ORR_CHUNK ? run.len - i : ORR_CHUNK;
    const T *p = READ(x, off + i * run.stride[0], run.stride[0], n, buf);
    ACC a = max ? FN(row_max)(p, n, *best) : FN(row_min)(p, n, *best);
    if (at >= 0 && a == *best) continue;
    for (int64_t j = 0; j < n; j++)
      if (p[j] == a || (ISNAN(a) && ISNAN(p[j]))) {
        *best = a;
        at = i + j;
        break;
      }
    if (ISNAN(a)) break;
  }
  return at;
}

static void FN(arg_reduce)(bool max, const orr_view *x, int dim, const orr_view *values,
                           const orr_view *indices, int64_t offset) {
  const orr_view *views[3] = {x, indices, values};
  orr_run run = {.len = x->shape[dim], .stride = {x->stride[dim]}};
  orr_loop l;
  orr_loop_init(&l, x, views, 3, 1u << dim);
#pragma omp parallel for schedule(static) if (l.n * run.len >= ORR_K_GRAIN)
  for (int64_t o = 0; o < l.n; o++) {
    int64_t off[3];
    ACC best;
    orr_loop_at(&l, 3, o, off);
    int64_t at = FN(arg_row)(max, x, off[0], run, &best) + 1;
    if (at > 0) at += offset;
    orr_k_write_i64(indices, off[1], 1, 1, &at);
    if (values != NULL) WRITE_ACC(values, off[2], 1, 1, &best);
  }
}

static void FN(scan)(bool product, const orr_view *x, int dim, bool reverse,
                     const orr_view *y) {
  const orr_view *views[2] = {x, y};
  int64_t len = x->shape[dim], xs = x->stride[dim], ys = y->stride[dim];
  int64_t start = reverse ? len - 1 : 0, sign = reverse ? -1 : 1;
  orr_loop l;
  orr_loop_init(&l, x, views, 2, 1u << dim);
#pragma omp parallel for schedule(static) if (l.n * len >= ORR_K_GRAIN)
  for (int64_t o = 0; o < l.n; o++) {
    T buf[ORR_CHUNK];
    ACC out[ORR_CHUNK], a = product ? 1 : 0;
    int64_t off[2];
    orr_loop_at(&l, 2, o, off);
    for (int64_t i = 0; i < len; i += ORR_CHUNK) {
      int64_t n = len - i < ORR_CHUNK ? len - i : ORR_CHUNK, at = start + sign * i;
      const T *p = READ(x, off[0] + at * xs, sign * xs, n, buf);
      for (int64_t j = 0; j < n; j++) out[j] = a = product ? a * p[j] : a + p[j];
      WRITE_ACC(y, off[1] + at * ys, sign * ys, n, out);
    }
  }
}
