/* matmul_tile.h: the f32 or f64 product of strided matrices; included once a type by matmul.c.
 *
 * Invariant: before inclusion T is the type and S its suffix. A tile is up to TILE_ROWS rows by
 * two vectors of c, held in registers while k runs; a's elements are read one by one, so its
 * strides are free, b's rows and c's rows are contiguous. Lanes past the edge are masked, never
 * touched.
 * To add a type: include this once more, and a load and store of its vectors.
 */
#define VEC ORR_NAME(vec_, S)
#define LANES ((int)(VEC_BYTES / sizeof(T)))
#define FN(name) ORR_NAME(name##_, S)

typedef T VEC __attribute__((vector_size(VEC_BYTES)));

typedef struct FN(problem) {
  int64_t m, n, k;
  const T *a, *b;
  T *c;
  int64_t a_m, a_k, b_k, b_n, c_m; /* strides; c's columns are contiguous */
  bool accumulate;
  int64_t batch_a, batch_b, batch_c; /* strides from one product to the next */
  int64_t row_blocks, panels;
} FN(problem);

static inline __attribute__((always_inline)) VEC FN(load)(const T *p, int n) {
  VEC v = {0};
  if (n >= LANES) {
    memcpy(&v, p, sizeof v);
  } else {
    v = FN(load_part)(p, n);
  }
  return v;
}

static inline __attribute__((always_inline)) void FN(store)(T *p, VEC v, int n) {
  if (n >= LANES) {
    memcpy(p, &v, sizeof v);
  } else {
    FN(store_part)(p, v, n);
  }
}

/* `packed` (a lies as pack_rows leaves it), `rows` and `vecs` are constants at each call;
 * `last` is how many lanes the last vector has. */
static inline __attribute__((always_inline)) void FN(tile)(const bool packed, const int rows,
                                                           const int vecs,
                                                           const FN(problem) * q, const T *a,
                                                           const T *b, T *c, int last) {
  VEC sum[PACKED_ROWS][2];
  const int64_t a_m = packed ? 1 : q->a_m, a_k = packed ? PACKED_ROWS : q->a_k;
  const int64_t b_k = packed ? 2 * LANES : q->b_k;
  const int first = vecs == 2 ? LANES : last;
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) {
    sum[r][0] = sum[r][1] = (VEC){0};
    if (packed) __builtin_prefetch(c + r * q->c_m, 1);
    if (packed && vecs == 2) __builtin_prefetch(c + r * q->c_m + LANES, 1);
  }
  for (int64_t k = 0; k < q->k; k++) {
    VEC b0 = FN(load)(b + k * b_k, first), b1 = {0};
    if (vecs == 2) b1 = FN(load)(b + k * b_k + LANES, last);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
      T x = a[r * a_m + k * a_k];
      sum[r][0] += x * b0;
      if (vecs == 2) sum[r][1] += x * b1;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) {
    T *row = c + r * q->c_m;
    if (q->accumulate) sum[r][0] += FN(load)(row, first);
    FN(store)(row, sum[r][0], first);
    if (vecs == 2 && q->accumulate) sum[r][1] += FN(load)(row + LANES, last);
    if (vecs == 2) FN(store)(row + LANES, sum[r][1], last);
  }
}

#define ROWS(count)                                           \
  case count:                                                 \
    if (n > LANES && n < 2 * LANES) {                         \
      FN(tile)(packed, count, 2, q, a, b, c, (int)n - LANES); \
    } else if (n == 2 * LANES) {                              \
      FN(tile)(packed, count, 2, q, a, b, c, LANES);          \
    } else if (n == LANES) {                                  \
      FN(tile)(packed, count, 1, q, a, b, c, LANES);          \
    } else {                                                  \
      FN(tile)(packed, count, 1, q, a, b, c, (int)n);         \
    }                                                         \
    break;

static inline __attribute__((always_inline)) void FN(choose)(const bool packed,
                                                             const FN(problem) * q,
                                                             int64_t rows, int64_t n,
                                                             const T *a, const T *b, T *c) {
  switch (rows) {
    ROWS(1)
    ROWS(2)
    ROWS(3)
    ROWS(4)
    ROWS(5)
    ROWS(6)
    ROWS(7)
    ROWS(8)
#if PACKED_ROWS == 12
    ROWS(9)
    ROWS(10)
    ROWS(11)
    ROWS(12)
#endif
  }
}
#undef ROWS

static void FN(tile_of)(const FN(problem) * q, int64_t rows, int64_t n, const T *a, const T *b,
                        T *c) {
  FN(choose)(false, q, rows, n, a, b, c);
}

static void FN(packed_tile)(const FN(problem) * q, int64_t rows, int64_t n, const T *a,
                            const T *b, T *c) {
  FN(choose)(true, q, rows, n, a, b, c);
}

/* Rows [i, m) of one panel of n <= 2 LANES columns, b's rows at hand. */
static void FN(panel)(const FN(problem) * q, int64_t i, int64_t m, int64_t n, const T *b, T *c,
                      const T *a) {
  for (; i < m; i += TILE_ROWS) {
    int64_t rows = m - i < TILE_ROWS ? m - i : TILE_ROWS;
    FN(tile_of)(q, rows, n, a + i * q->a_m, b, c + i * q->c_m);
  }
}

/* b (k, n) into rows of 2 LANES. */
static void FN(pack)(const T *b, int64_t b_k, int64_t b_n, int64_t k, int64_t n, T *to) {
  int64_t done = b_k == 1 ? FN(pack_across)(b, b_n, k, n, to) : 0;
  for (int64_t i = done; i < k; i++) {
    T *row = to + i * 2 * LANES;
    if (b_n == 1) {
      memcpy(row, b + i * b_k, (size_t)n * sizeof(T));
    } else {
      for (int64_t j = 0; j < n; j++) row[j] = b[i * b_k + j * b_n];
    }
  }
}

static void __attribute__((noinline))
FN(packed_panel)(const FN(problem) * q, int64_t i, int64_t m, int64_t n, const T *a, const T *b,
                 T *c) {
  _Alignas(64) T block[BLOCK_K * 2 * VEC_BYTES / sizeof(T)];
  FN(problem) part = *q;
  part.b_k = 2 * LANES;
  for (int64_t k = 0; k == 0 || k < q->k; k += BLOCK_K) {
    part.k = q->k - k < BLOCK_K ? q->k - k : BLOCK_K;
    FN(pack)(b + k * q->b_k, q->b_k, q->b_n, part.k, n, block);
    FN(panel)(&part, i, m, n, block, c, a + k * q->a_k);
    part.accumulate = true;
  }
}

/* a's rows [i, m) by k columns, into tiles of PACKED_ROWS whose columns are contiguous. */
static void FN(pack_rows)(const FN(problem) * q, const T *a, int64_t i, int64_t m, T *to) {
  for (; i < m; i += PACKED_ROWS, to += PACKED_ROWS * q->k) {
    int64_t rows = m - i < PACKED_ROWS ? m - i : PACKED_ROWS;
    const T *from = a + i * q->a_m;
    for (int64_t k = 0; k < q->k; k++) {
      if (rows == PACKED_ROWS && q->a_m == 1) {
        memcpy(to + k * PACKED_ROWS, from + k * q->a_k, PACKED_ROWS * sizeof(T));
      } else {
        for (int64_t r = 0; r < rows; r++)
          to[k * PACKED_ROWS + r] = from[r * q->a_m + k * q->a_k];
      }
    }
  }
}

/* Where a step along k in a is long, both operands are packed: the tiles of a block of rows,
 * which stay in the second cache for all panels, and each panel, in the first. One block of k
 * at a time over all of the units, so that a block of rows is packed once. */
static void FN(packed_units)(const void *context, int64_t begin, int64_t end) {
  _Alignas(64) T rows[BLOCK_M * BLOCK_K], columns[BLOCK_K * 2 * VEC_BYTES / sizeof(T)];
  FN(problem) part = *(const FN(problem) *)context;
  const FN(problem) *q = context;
  for (int64_t k = 0; k < q->k; k += BLOCK_K, part.accumulate = true) {
    part.k = q->k - k < BLOCK_K ? q->k - k : BLOCK_K;
    int64_t packed = -1;
    for (int64_t u = begin; u < end; u++) {
      int64_t j = u % q->panels * 2 * LANES, block = u / q->panels;
      int64_t i = block % q->row_blocks * BLOCK_M, batch = block / q->row_blocks;
      int64_t m = q->m - i < BLOCK_M ? q->m : i + BLOCK_M;
      int64_t n = q->n - j < 2 * LANES ? q->n - j : 2 * LANES;
      const T *b = q->b + batch * q->batch_b + j * q->b_n + k * q->b_k;
      T *c = q->c + batch * q->batch_c + j + i * q->c_m;
      if (packed != block)
        FN(pack_rows)(&part, q->a + batch * q->batch_a + k * q->a_k, i, m, rows);
      packed = block;
      FN(pack)(b, q->b_k, q->b_n, part.k, n, columns);
      for (int64_t r = 0; r < m - i; r += PACKED_ROWS) {
        int64_t count = m - i - r < PACKED_ROWS ? m - i - r : PACKED_ROWS;
        FN(packed_tile)(&part, count, n, rows + r * part.k, columns, c + r * q->c_m);
      }
    }
  }
}

/* Not worth packing. */
static bool FN(is_direct)(const FN(problem) * q) {
  return q->b_n == 1 && (q->m <= 64 || q->n <= 64) && q->k <= 2 * BLOCK_K;
}

/* Units of work: one panel of columns of one block of rows of one product. */
static void FN(run_units)(const void *context, int64_t begin, int64_t end) {
  const FN(problem) *q = context;
  bool direct = FN(is_direct)(q);
  for (int64_t u = begin; u < end; u++) {
    int64_t j = u % q->panels * 2 * LANES, rest = u / q->panels;
    int64_t i = rest % q->row_blocks * BLOCK_M, batch = rest / q->row_blocks;
    int64_t m = q->m - i < BLOCK_M ? q->m : i + BLOCK_M;
    int64_t n = q->n - j < 2 * LANES ? q->n - j : 2 * LANES;
    const T *a = q->a + batch * q->batch_a, *b = q->b + batch * q->batch_b + j * q->b_n;
    T *c = q->c + batch * q->batch_c + j;
    if (direct) {
      FN(panel)(q, i, m, n, b, c, a);
    } else {
      FN(packed_panel)(q, i, m, n, a, b, c);
    }
  }
}

/* A product with a vector whose matrix has contiguous rows is m inner products. */
static void FN(dot_rows)(const FN(problem) * q, int64_t batch) {
  const T *b = q->b + batch * q->batch_b;
  for (int64_t i = 0; i < q->m; i++) {
    const T *a = q->a + batch * q->batch_a + i * q->a_m;
    T *c = q->c + batch * q->batch_c + i * q->c_m, total = 0;
    VEC sum[2] = {{0}, {0}};
    int64_t k = 0;
    for (; k + 2 * LANES <= q->k; k += 2 * LANES) {
      sum[0] += FN(load)(a + k, LANES) * FN(load)(b + k, LANES);
      sum[1] += FN(load)(a + k + LANES, LANES) * FN(load)(b + k + LANES, LANES);
    }
    sum[0] += sum[1];
    for (int l = 0; l < LANES; l++) total += sum[0][l];
    for (; k < q->k; k++) total += a[k] * b[k];
    *c = q->accumulate ? *c + total : total;
  }
}

static void FN(multiply)(FN(problem) * q, int64_t batches) {
  if (q->n == 1 && q->a_k == 1 && q->b_k == 1 && q->k >= LANES) {
    for (int64_t batch = 0; batch < batches; batch++) FN(dot_rows)(q, batch);
    return;
  }
  q->panels = (q->n + 2 * LANES - 1) / (2 * LANES);
  q->row_blocks = (q->m + BLOCK_M - 1) / BLOCK_M;
  int64_t work = (q->m < BLOCK_M ? q->m : BLOCK_M) * q->k * 2 * LANES + 1;
  bool pack = q->a_k != 1 && q->m >= 2 * PACKED_ROWS && q->k >= LANES && !FN(is_direct)(q);
  orr_parallel(batches * q->row_blocks * q->panels, ORR_GRAIN_WORK / work + 1,
               pack ? FN(packed_units) : FN(run_units), q);
}

/* Reads the views; false where no form of the problem has contiguous rows of c. */
static bool FN(try_views)(const orr_view *a, const orr_view *b, orr_view *c, bool accumulate) {
  int r = c->ndim - 2, s = c->ndim - 1;
  bool swap = c->stride[s] != 1 && c->shape[s] != 1;
  if (swap && c->stride[r] != 1 && c->shape[r] != 1) return false;
  if (!swap && c->shape[r] == 1 && c->shape[s] > 1 && b->stride[r] == 1) {
    swap = b->stride[s] != 1 && a->stride[s] == 1; /* inner products */
  }
  const orr_view *x = swap ? b : a, *y = swap ? a : b;
  int row = swap ? s : r, col = swap ? r : s;
  FN(problem)
  q = {.m = c->shape[row],
       .n = c->shape[col],
       .k = a->shape[s],
       .a = x->data,
       .b = y->data,
       .c = c->data,
       .a_m = x->stride[row],
       .a_k = x->stride[col],
       .b_k = y->stride[row],
       .b_n = y->stride[col],
       .c_m = c->stride[row],
       .accumulate = accumulate};
  if (q.n == 1) q.b_n = 1;
  int64_t batches = r > 0 ? c->shape[0] : 1;
  if (r > 0) {
    q.batch_a = x->stride[0];
    q.batch_b = y->stride[0];
    q.batch_c = c->stride[0];
  }
  FN(multiply)(&q, batches);
  return true;
}

#undef VEC
#undef LANES
#undef FN
#undef T
#undef S
