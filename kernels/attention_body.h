/* attention_body.h: attention of one head in type T; included once a type by attention.c.
 *
 * Invariant: before inclusion T is float or double and DTYPE its name, FN its suffixing, EXP
 * an exponential that gives exactly 0 at -inf. Everything in a room is in T, rows padded with
 * zeros to whole vectors, counts of rows to whole tiles, so that no product has an edge. In a
 * tile of scores, keys that a query does not see hold exactly 0 after the exponential, up to
 * the tile's `wide` columns.
 * To add a step per score: in `soften` (forward) and in `group_back`.
 *
 * Shapes: SPAN queries or keys make a block of forward, BLOCK one of backward, whose tiles of
 * scores are kept whole; ROWS rows make a group, the unit of a product.
 */
typedef T FN(vec) __attribute__((vector_size(VEC_BYTES)));
#define VEC FN(vec)
#define LANES ((int)(VEC_BYTES / sizeof(T)))
#define PAD (LANES > ROWS ? LANES : ROWS)

/* ---- products ---------------------------------------------------------------------------- */

/* c (ROWS, vecs * LANES) = or += a (ROWS, k) b (k, ..); a_m or a_k is 1. */
static inline __attribute__((always_inline)) void FN(tile)(const int vecs, const bool across,
                                                           const bool add, int64_t k,
                                                           const T *a, int64_t a_step,
                                                           const T *b, int64_t b_k, T *c,
                                                           int64_t c_m) {
  VEC sum[ROWS][2];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < vecs; v++) {
      sum[r][v] = (VEC){0};
      if (add) memcpy(&sum[r][v], c + r * c_m + v * LANES, sizeof(VEC));
    }
  for (int64_t i = 0; i < k; i++) {
    VEC b0, b1;
    memcpy(&b0, b + i * b_k, sizeof b0);
    if (vecs == 2) memcpy(&b1, b + i * b_k + LANES, sizeof b1);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      T x = across ? a[i * a_step + r] : a[r * a_step + i];
      sum[r][0] += x * b0;
      if (vecs == 2) sum[r][1] += x * b1;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < vecs; v++) memcpy(c + r * c_m + v * LANES, &sum[r][v], sizeof(VEC));
}

#define PRODUCT(name, across, add)                                                          \
  static void __attribute__((noinline))                                                     \
  FN(name)(int64_t n, int64_t k, const T *a, int64_t a_step, const T *b, int64_t b_k, T *c, \
           int64_t c_m) {                                                                   \
    int64_t j = 0;                                                                          \
    for (; j + 2 * LANES <= n; j += 2 * LANES)                                              \
      FN(tile)(2, across, add, k, a, a_step, b + j, b_k, c + j, c_m);                       \
    if (j < n) FN(tile)(1, across, add, k, a, a_step, b + j, b_k, c + j, c_m);              \
  }
/* c (ROWS, n) = or += a b, n a multiple of LANES; a (ROWS, k) with rows a_step apart, or
 * (across) its transpose (k, ROWS) so. */
PRODUCT(set_rows, false, false)
PRODUCT(add_rows, false, true)
PRODUCT(add_across, true, true)
#undef PRODUCT

/* ---- a head ------------------------------------------------------------------------------ */

typedef struct FN(head) {
  const orr_k_attention_args *a;
  int64_t n, h;
  int64_t next_n, next_h;      /* the head after this one */
  int64_t queries, keys, d, e; /* T, S, D, E */
  int64_t wide_d, wide_e;      /* D, E in whole vectors */
  T *p, *ds;                   /* scores: (ROWS, SPAN), of backward (BLOCK, BLOCK) */
  T *q, *k, *kt, *v, *vt, *o, *g, *gq, *gk, *gv, *lse, *delta;
} FN(head);

/* ---- moving between views and rooms ------------------------------------------------------ */

static inline int64_t FN(size_of)(const orr_view *v) {
  return v->dtype == DTYPE ? (int64_t)sizeof(T) : (int64_t)orr_element_size(v->dtype);
}

static inline bool FN(is_plain)(const orr_view *v) {
  return v->dtype == DTYPE && v->stride[3] == 1;
}

/* Where row t of the head lies. Rows of one head are often far apart and those of the next lie
 * between them, where no processor looks ahead: so that row of the next head is asked for. */
static inline char *FN(row_of)(const FN(head) * x, const orr_view *v, int64_t t,
                               const bool write) {
  int64_t size = FN(size_of)(v);
  int64_t at = x->n * v->stride[0] + x->h * v->stride[1];
  int64_t next = x->next_n * v->stride[0] + x->next_h * v->stride[1];
  char *row = (char *)v->data + (at + t * v->stride[2]) * size;
  if (v->stride[3] == 1) {
    const char *ahead = row + (next - at) * size;
    for (int64_t b = 0; b < v->shape[3] * size; b += 64) {
      if (write) __builtin_prefetch(ahead + b, 1, 2);
      else __builtin_prefetch(ahead + b, 0, 2);
    }
  }
  return row;
}

/* `size` elements of any type and stride times `scale` into to. */
static void FN(read)(const orr_view *v, const char *from, T scale, T *to) {
  orr_chunk buffer;
  int64_t size = v->shape[3], step = v->stride[3];
  for (int64_t d = 0; d < size; d += ORR_CHUNK) {
    int64_t len = size - d < ORR_CHUNK ? size - d : ORR_CHUNK;
    const T *row = orr_load_row(v->dtype, from + d * step * FN(size_of)(v), step, len, &buffer);
    for (int64_t i = 0; i < len; i++) to[d + i] = scale * row[i];
  }
}

/* Row t of the head times `scale` into to, zeros up to `wide`. */
static void FN(load_row)(const FN(head) * x, const orr_view *v, int64_t t, T scale, T *to,
                         int64_t wide) {
  int64_t size = v->shape[3];
  const char *from = FN(row_of)(x, v, t, false);
  if (FN(is_plain)(v)) {
    const T *row = (const T *)from;
    ORR_SIMD
    for (int64_t d = 0; d < size; d++) to[d] = scale * row[d];
  } else {
    FN(read)(v, from, scale, to);
  }
  for (int64_t d = size; d < wide; d++) to[d] = 0;
}

static void FN(write)(const T *from, const orr_view *v, char *to) {
  int64_t size = v->shape[3], step = v->stride[3];
  for (int64_t d = 0; d < size; d += ORR_CHUNK) {
    int64_t len = size - d < ORR_CHUNK ? size - d : ORR_CHUNK;
    orr_store_row(v->dtype, from + d, to + d * step * FN(size_of)(v), step, len);
  }
}

/* from times `scale` becomes row t of the head. */
static void FN(store_row)(const FN(head) * x, T *from, T scale, const orr_view *v, int64_t t) {
  int64_t size = v->shape[3];
  char *to = FN(row_of)(x, v, t, true);
  T *row = FN(is_plain)(v) ? (T *)to : from;
  ORR_SIMD
  for (int64_t d = 0; d < size; d++) row[d] = scale * from[d];
  if (row == from) FN(write)(from, v, to);
}

/* Rows [t, t + count) into to, zeros to `wide` columns and `rows` rows. */
static void FN(load_rows)(const FN(head) * x, const orr_view *v, int64_t t, int64_t count,
                          T scale, T *to, int64_t wide, int64_t rows) {
  for (int64_t i = 0; i < count; i++) FN(load_row)(x, v, t + i, scale, to + i * wide, wide);
  if (rows > count) memset(to + count * wide, 0, (size_t)((rows - count) * wide) * sizeof(T));
}

/* to (size, to_row) = rows (count, size) turned, zeros past count up to whole vectors. */
static void FN(turn)(const T *rows, int64_t count, int64_t size, int64_t wide, T *to,
                     int64_t to_row) {
  int64_t padded = ORR_UP(count, PAD);
  FN(orr_transpose)(count, size, rows, wide, to, to_row);
  for (int64_t d = 0; d < size && padded > count; d++)
    for (int64_t j = count; j < padded; j++) to[d * to_row + j] = 0;
}

/* How many of the keys [j0, j0 + count) query i sees. */
static int64_t FN(seen)(const FN(head) * x, int64_t i, int64_t j0, int64_t count) {
  if (!x->a->causal || i - j0 + 1 >= count) return count;
  return i < j0 ? 0 : i - j0 + 1;
}

static void FN(hide)(T *s, int64_t seen, int64_t wide) {
  for (int64_t j = seen; j < wide; j++) s[j] = -(T)INFINITY;
}

/* One row of scores becomes weights relative to the largest so far; *most, *sum follow. Returns
 * the factor for what was gathered before. */
static T FN(soften)(T *s, int64_t wide, T *most, T *sum) {
  T high = *most, total = 0;
#ifdef _OPENMP
#pragma omp simd reduction(max : high)
#endif
  for (int64_t j = 0; j < wide; j++) high = s[j] > high ? s[j] : high;
  T base = high == -(T)INFINITY ? 0 : high;
#ifdef _OPENMP
#pragma omp simd reduction(+ : total)
#endif
  for (int64_t j = 0; j < wide; j++) {
    s[j] = EXP(s[j] - base);
    total += s[j];
  }
  T factor = EXP(*most - base);
  *most = high;
  *sum = *sum * factor + total;
  return factor;
}

/* ---- forward ----------------------------------------------------------------------------- */

/* The group of queries at i (row r of the block) meets the keys of block j0. */
static void FN(group)(const FN(head) * x, int64_t i, int64_t r, int64_t j0, T *most, T *sum) {
  int64_t count = x->keys - j0 < SPAN ? x->keys - j0 : SPAN;
  int64_t used = FN(seen)(x, i + ROWS - 1, j0, count), wide = ORR_UP(used, LANES);
  if (used == 0) return;
  T *o = x->o + r * x->wide_e;
  FN(set_rows)
  (wide, x->d, x->q + r * x->wide_d, x->wide_d, x->kt + j0 * x->d, SPAN, x->p, SPAN);
  for (int64_t l = 0; l < ROWS; l++) {
    T *s = x->p + l * SPAN, *to = o + l * x->wide_e;
    FN(hide)(s, FN(seen)(x, i + l, j0, count), wide);
    T factor = FN(soften)(s, wide, &most[r + l], &sum[r + l]);
    if (factor == 1) continue;
    ORR_SIMD
    for (int64_t c = 0; c < x->wide_e; c++) to[c] *= factor;
  }
  FN(add_rows)(x->wide_e, used, x->p, SPAN, x->v + j0 * x->wide_e, x->wide_e, o, x->wide_e);
}

static void FN(finish)(const FN(head) * x, int64_t i, int64_t count, const T *most,
                       const T *sum) {
  const orr_view *lse = x->a->lse;
  T *logs = (T *)lse->data + x->n * lse->stride[0] + x->h * lse->stride[1];
  for (int64_t r = 0; r < count; r++) {
    FN(store_row)(x, x->o + r * x->wide_e, x->keys ? 1 / sum[r] : 0, x->a->o, i + r);
    logs[(i + r) * lse->stride[2]] = most[r] + (T)log((double)sum[r]);
  }
}

/* Room: kt, v of all keys; q, o of a block of queries. */
static void FN(forward)(const FN(head) * x) {
  const orr_k_attention_args *a = x->a;
  for (int64_t j = 0; j < x->keys; j += SPAN) {
    int64_t count = x->keys - j < SPAN ? x->keys - j : SPAN;
    FN(load_rows)(x, a->k, j, count, 1, x->k, x->wide_d, count);
    FN(turn)(x->k, count, x->d, x->wide_d, x->kt + j * x->d, SPAN);
    FN(load_rows)(x, a->v, j, count, 1, x->v + j * x->wide_e, x->wide_e, count);
  }
  for (int64_t i = 0; i < x->queries; i += SPAN) {
    T most[SPAN], sum[SPAN];
    int64_t count = x->queries - i < SPAN ? x->queries - i : SPAN, rows = ORR_UP(count, ROWS);
    FN(load_rows)(x, a->q, i, count, (T)a->scale, x->q, x->wide_d, rows);
    memset(x->o, 0, (size_t)(rows * x->wide_e) * sizeof(T));
    for (int r = 0; r < SPAN; r++) {
      most[r] = -(T)INFINITY;
      sum[r] = 0;
    }
    for (int64_t j = 0; j < x->keys && (!a->causal || j < i + count); j += SPAN)
      for (int64_t r = 0; r < rows; r += ROWS) FN(group)(x, i + r, r, j, most, sum);
    FN(finish)(x, i, count, most, sum);
  }
}

/* ---- backward ---------------------------------------------------------------------------- */

/* Weights p and the gradients ds of the scores of one group of queries and the keys of block
 * j0, and what they add to the queries' gradient. */
static void FN(group_back)(const FN(head) * x, int64_t i, int64_t r, int64_t j0,
                           int64_t count) {
  int64_t used = FN(seen)(x, i + ROWS - 1, j0, count), wide = ORR_UP(used, PAD);
  T *p = x->p + r * BLOCK, *ds = x->ds + r * BLOCK;
  if (used == 0) return;
  FN(set_rows)(wide, x->d, x->q + i * x->wide_d, x->wide_d, x->kt, BLOCK, p, BLOCK);
  FN(set_rows)(wide, x->e, x->g + i * x->wide_e, x->wide_e, x->vt, BLOCK, ds, BLOCK);
  for (int64_t l = 0; l < ROWS; l++) {
    T *s = p + l * BLOCK, *t = ds + l * BLOCK, log_sum = x->lse[i + l], mean = x->delta[i + l];
    FN(hide)(s, FN(seen)(x, i + l, j0, count), wide);
    ORR_SIMD
    for (int64_t j = 0; j < wide; j++) {
      s[j] = EXP(s[j] - log_sum);
      t[j] = s[j] * (t[j] - mean);
    }
  }
  FN(add_rows)(x->wide_d, used, ds, BLOCK, x->k, x->wide_d, x->gq + i * x->wide_d, x->wide_d);
}

/* The block of queries at i meets the block of keys at j0. */
static void FN(block_back)(const FN(head) * x, int64_t i, int64_t j0, int64_t count) {
  int64_t rows = x->queries - i < BLOCK ? ORR_UP(x->queries - i, ROWS) : BLOCK;
  for (int64_t r = 0; r < rows; r += ROWS) FN(group_back)(x, i + r, r, j0, count);
  for (int64_t c = 0; c < count; c += ROWS) {
    int64_t first = x->a->causal && j0 + c > i ? j0 + c - i : 0;
    if (first >= rows) break;
    const T *p = x->p + first * BLOCK + c, *ds = x->ds + first * BLOCK + c;
    FN(add_across)
    (x->wide_e, rows - first, p, BLOCK, x->g + (i + first) * x->wide_e, x->wide_e,
     x->gv + c * x->wide_e, x->wide_e);
    FN(add_across)
    (x->wide_d, rows - first, ds, BLOCK, x->q + (i + first) * x->wide_d, x->wide_d,
     x->gk + c * x->wide_d, x->wide_d);
  }
}

/* q (scaled), g, lse and delta = sum(g o) of all queries; gq is zeroed. */
static void FN(load_queries)(const FN(head) * x) {
  const orr_k_attention_args *a = x->a;
  const orr_view *lse = a->lse;
  int64_t rows = ORR_UP(x->queries, ROWS);
  const T *logs = (const T *)lse->data + x->n * lse->stride[0] + x->h * lse->stride[1];
  FN(load_rows)(x, a->q, 0, x->queries, (T)a->scale, x->q, x->wide_d, rows);
  FN(load_rows)(x, a->g, 0, x->queries, 1, x->g, x->wide_e, rows);
  memset(x->gq, 0, (size_t)(rows * x->wide_d) * sizeof(T));
  for (int64_t i = 0; i < rows; i++) {
    T *o = x->o, *g = x->g + i * x->wide_e, total = 0;
    x->lse[i] = x->delta[i] = 0;
    if (i >= x->queries) continue;
    FN(load_row)(x, a->o, i, 1, o, x->wide_e);
#ifdef _OPENMP
#pragma omp simd reduction(+ : total)
#endif
    for (int64_t c = 0; c < x->wide_e; c++) total += o[c] * g[c];
    x->lse[i] = logs[i * lse->stride[2]];
    x->delta[i] = total;
  }
}

static void FN(backward)(const FN(head) * x) {
  const orr_k_attention_args *a = x->a;
  FN(load_queries)(x);
  for (int64_t j = 0; j < x->keys; j += BLOCK) {
    int64_t count = x->keys - j < BLOCK ? x->keys - j : BLOCK;
    FN(load_rows)(x, a->v, j, count, 1, x->gv, x->wide_e, count);
    FN(turn)(x->gv, count, x->e, x->wide_e, x->vt, BLOCK);
    FN(load_rows)(x, a->k, j, count, 1, x->k, x->wide_d, count);
    FN(turn)(x->k, count, x->d, x->wide_d, x->kt, BLOCK);
    memset(x->gk, 0, BLOCK * (size_t)x->wide_d * sizeof(T));
    memset(x->gv, 0, BLOCK * (size_t)x->wide_e * sizeof(T));
    for (int64_t i = a->causal ? j : 0; i < x->queries; i += BLOCK)
      FN(block_back)(x, i, j, count);
    for (int64_t c = 0; c < count; c++) {
      FN(store_row)(x, x->gk + c * x->wide_d, 1, a->gk, j + c);
      FN(store_row)(x, x->gv + c * x->wide_e, 1, a->gv, j + c);
    }
  }
  for (int64_t i = 0; i < x->queries; i++)
    FN(store_row)(x, x->gq + i * x->wide_d, (T)a->scale, a->gq, i);
}

/* ---- rooms ------------------------------------------------------------------------------- */

/* `count` numbers at *at of the room, which moves past them; all stay aligned to a vector. */
static T *FN(take)(char *room, size_t *at, int64_t count) {
  T *t = room ? (T *)(room + *at) : NULL;
  *at += ORR_UP((size_t)count * sizeof(T), 64);
  return t;
}

/* Lays out one thread's room; with room NULL, only measures it. */
static size_t FN(lay_out)(FN(head) * x, const orr_k_attention_args *a, bool backward,
                          char *room) {
  size_t at = 0;
  *x = (FN(head)){.a = a,
                  .queries = a->q->shape[2],
                  .keys = a->k->shape[2],
                  .d = a->q->shape[3],
                  .e = a->v->shape[3]};
  x->wide_d = ORR_UP(x->d, LANES);
  x->wide_e = ORR_UP(x->e, LANES);
  int64_t span = backward ? BLOCK : SPAN, keys = ORR_UP(x->keys, SPAN);
  int64_t all = backward ? ORR_UP(x->queries, BLOCK) : SPAN;
  x->p = FN(take)(room, &at, (backward ? BLOCK : ROWS) * span);
  x->k = FN(take)(room, &at, span * x->wide_d);
  x->q = FN(take)(room, &at, all * x->wide_d);
  x->o = FN(take)(room, &at, span * x->wide_e);
  x->kt = FN(take)(room, &at, (backward ? BLOCK : keys) * x->d);
  if (!backward) x->v = FN(take)(room, &at, keys * x->wide_e);
  if (!backward) return at;
  x->ds = FN(take)(room, &at, BLOCK * BLOCK);
  x->vt = FN(take)(room, &at, BLOCK * x->e);
  x->gk = FN(take)(room, &at, BLOCK * x->wide_d);
  x->gv = FN(take)(room, &at, BLOCK * x->wide_e);
  x->g = FN(take)(room, &at, all * x->wide_e);
  x->gq = FN(take)(room, &at, all * x->wide_d);
  x->lse = FN(take)(room, &at, all);
  x->delta = FN(take)(room, &at, all);
  return at;
}

static void FN(heads)(const orr_k_attention_args *a, bool backward, int64_t begin, int64_t end,
                      char *room) {
  FN(head) x;
  FN(lay_out)(&x, a, backward, room);
  for (int64_t u = begin; u < end; u++) {
    int64_t next = u + 1 < end ? u + 1 : u;
    x.n = u / a->q->shape[1];
    x.h = u % a->q->shape[1];
    x.next_n = next / a->q->shape[1];
    x.next_h = next % a->q->shape[1];
    if (backward) FN(backward)(&x);
    else FN(forward)(&x);
  }
}

#undef VEC
#undef LANES
#undef PAD
