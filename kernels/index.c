/* index.c: kernels that move elements by index (index.h).
 *
 * Invariant: moving is by element size; adding is as numbers, f16 and bf16 rounding at each
 * addition.
 * To add a kernel: index.h.
 */
#include "index.h"

#include <string.h>

static inline char *place(const orr_view *v, int64_t off) {
  return (char *)v->data + off * (int64_t)orr_k_size(v->dtype);
}

/* n elements of one size, from a stride to a stride; src NULL is zeros. */
static void move(char *dst, int64_t ds, const char *src, int64_t ss, int64_t n, size_t size) {
  if (n == 0) return; /* an empty shard has no memory */
  if (src == NULL && ds == 1) {
    memset(dst, 0, (size_t)n * size);
  } else if (src != NULL && ds == 1 && ss == 1) {
    memcpy(dst, src, (size_t)n * size);
  } else if (src != NULL && size == 4) {
    int32_t *d = (int32_t *)dst;
    for (int64_t i = 0; i < n; i++) d[i * ds] = ((const int32_t *)src)[i * ss];
  } else if (src != NULL && size == 8) {
    int64_t *d = (int64_t *)dst;
    for (int64_t i = 0; i < n; i++) d[i * ds] = ((const int64_t *)src)[i * ss];
  } else {
    int64_t step = (int64_t)size;
    for (int64_t i = 0; i < n; i++) {
      if (src != NULL) memcpy(dst + i * ds * step, src + i * ss * step, size);
      else memset(dst + i * ds * step, 0, size);
    }
  }
}

/* n elements of g added into y. */
static void add(const orr_view *y, int64_t yoff, int64_t ys, const orr_view *g, int64_t goff,
                int64_t gs, int64_t n) {
  for (int64_t i = 0; i < n; i += ORR_CHUNK) {
    int64_t m = n - i < ORR_CHUNK ? n - i : ORR_CHUNK, to = yoff + i * ys, from = goff + i * gs;
    if (!orr_k_is_float(y->dtype)) {
      int64_t sum[ORR_CHUNK], buf[ORR_CHUNK];
      const int64_t *b = orr_k_read_i64(g, from, gs, m, buf);
      const int64_t *a = orr_k_read_i64(y, to, ys, m, sum);
      for (int64_t j = 0; j < m; j++) sum[j] = (int64_t)((uint64_t)a[j] + (uint64_t)b[j]);
      orr_k_write_i64(y, to, ys, m, sum);
    } else if (y->dtype == ORR_F64) {
      double sum[ORR_CHUNK], buf[ORR_CHUNK];
      const double *b = orr_k_read_f64(g, from, gs, m, buf), *a;
      double *o = orr_k_target_f64(y, to, ys, sum);
      a = orr_k_read_f64(y, to, ys, m, sum);
      for (int64_t j = 0; j < m; j++) o[j] = a[j] + b[j];
      orr_k_write_f64(y, to, ys, m, o);
    } else {
      float sum[ORR_CHUNK], buf[ORR_CHUNK];
      const float *b = orr_k_read_f32(g, from, gs, m, buf), *a;
      float *o = orr_k_target_f32(y, to, ys, sum);
      a = orr_k_read_f32(y, to, ys, m, sum);
      for (int64_t j = 0; j < m; j++) o[j] = a[j] + b[j];
      orr_k_write_f32(y, to, ys, m, o);
    }
  }
}

/* Index i of idx less one, or -1 and a fault where it is not in [1, size]. */
static int64_t index_at(const orr_view *idx, int64_t off, int64_t position, int64_t size,
                        orr_fault *fault) {
  int64_t k = orr_k_get_int(idx, off);
  if (k >= 1 && k <= size) return k - 1;
  orr_k_blame(fault, position + 1, k);
  return -1;
}

/* The flat position of the p-th element of a view, to its offset. */
static int64_t offset_of(const orr_view *v, int64_t p) {
  int64_t off = 0;
  for (int d = v->ndim - 1; d >= 0; d--) {
    off += p % v->shape[d] * v->stride[d];
    p /= v->shape[d];
  }
  return off;
}

void orr_k_index_select(const orr_view *x, int dim, const orr_view *idx, const orr_view *y,
                        orr_fault *fault) {
  const orr_view *views[2] = {y, x};
  int64_t n = idx->shape[0], ys = y->stride[dim], xs = x->stride[dim];
  size_t size = orr_k_size(x->dtype);
  orr_loop l;
  orr_loop_init(&l, y, views, 2, 1u << dim);
  orr_run in = orr_loop_pop(&l);
#pragma omp parallel for schedule(static) if (n * l.n * in.len >= ORR_K_GRAIN)
  for (int64_t u = 0; u < n * l.n; u++) {
    int64_t i = u / l.n, off[2];
    int64_t k = index_at(idx, i * idx->stride[0], i, x->shape[dim], fault);
    orr_loop_at(&l, 2, u - i * l.n, off);
    const char *src = k < 0 ? NULL : place(x, off[1] + k * xs);
    move(place(y, off[0] + i * ys), in.stride[0], src, in.stride[1], in.len, size);
  }
}

void orr_k_index_add(const orr_view *gx, int dim, const orr_view *idx, const orr_view *g,
                     orr_fault *fault) {
  const orr_view *views[2] = {gx, g};
  enum { PIECE = 64 };
  orr_loop l;
  orr_loop_init(&l, gx, views, 2, 1u << dim);
  orr_run in = orr_loop_pop(&l);
  int64_t n = idx->shape[0], per = (in.len + PIECE - 1) / PIECE;
  bool threads = n * l.n * in.len >= ORR_K_GRAIN;
  if (!threads) per = in.len > 0;
#pragma omp parallel for schedule(static) if (threads)
  for (int64_t u = 0; u < l.n * per; u++) {
    int64_t first = u % per * PIECE, off[2], piece = threads ? PIECE : in.len;
    int64_t len = in.len - first < piece ? in.len - first : piece;
    orr_loop_at(&l, 2, u / per, off);
    for (int v = 0; v < 2; v++) off[v] += first * in.stride[v];
    for (int64_t i = 0; i < n; i++) {
      int64_t k = index_at(idx, i * idx->stride[0], i, gx->shape[dim], fault);
      if (k < 0) continue;
      add(gx, off[0] + k * gx->stride[dim], in.stride[0], g, off[1] + i * g->stride[dim],
          in.stride[1], len);
    }
  }
}

/* Flat position of element i of dim in row r (counted over the other dimensions). */
static int64_t position_in(const orr_view *v, int dim, int64_t r, int64_t i) {
  int64_t inner = 1;
  for (int d = dim + 1; d < v->ndim; d++) inner *= v->shape[d];
  return (r / inner * v->shape[dim] + i) * inner + r % inner;
}

/* Offsets of row r of three views by the shape of the first, dim left out. */
static void row_offsets(const orr_view *const *v, int dim, int64_t r, int64_t *off) {
  off[0] = off[1] = off[2] = 0;
  for (int d = v[0]->ndim - 1; d >= 0; d--) {
    if (d == dim) continue;
    int64_t i = r % v[0]->shape[d];
    r /= v[0]->shape[d];
    for (int k = 0; k < 3; k++) off[k] += i * v[k]->stride[d];
  }
}

void orr_k_gather(const orr_view *x, int dim, const orr_view *idx, const orr_view *y,
                  orr_fault *fault) {
  const orr_view *v[3] = {idx, x, y};
  int64_t n = idx->shape[dim], total = orr_k_count(idx), rows = n > 0 ? total / n : 0;
  size_t size = orr_k_size(x->dtype);
#pragma omp parallel for schedule(static) if (total >= ORR_K_GRAIN)
  for (int64_t r = 0; r < rows; r++) {
    int64_t off[3];
    row_offsets(v, dim, r, off);
    for (int64_t i = 0; i < n; i++) {
      int64_t k = orr_k_get_int(idx, off[0] + i * idx->stride[dim]) - 1;
      bool good = k >= 0 && k < x->shape[dim];
      if (!good) orr_k_blame(fault, position_in(idx, dim, r, i) + 1, k + 1);
      const char *src = good ? place(x, off[1] + k * x->stride[dim]) : NULL;
      move(place(y, off[2] + i * y->stride[dim]), 1, src, 1, 1, size);
    }
  }
}

void orr_k_scatter_add(const orr_view *gx, int dim, const orr_view *idx, const orr_view *g,
                       orr_fault *fault) {
  const orr_view *v[3] = {idx, gx, g};
  int64_t n = idx->shape[dim], total = orr_k_count(idx), rows = n > 0 ? total / n : 0;
#pragma omp parallel for schedule(static) if (total >= ORR_K_GRAIN)
  for (int64_t r = 0; r < rows; r++) {
    int64_t off[3];
    row_offsets(v, dim, r, off);
    for (int64_t i = 0; i < n; i++) {
      int64_t k = orr_k_get_int(idx, off[0] + i * idx->stride[dim]) - 1;
      if (k < 0 || k >= gx->shape[dim]) {
        orr_k_blame(fault, position_in(idx, dim, r, i) + 1, k + 1);
        continue;
      }
      add(gx, off[1] + k * gx->stride[dim], 1, g, off[2] + i * g->stride[dim], 1, 1);
    }
  }
}

/* y's first dimensions are idx's: the offset of y's row p. */
static int64_t head_offset(const orr_view *y, int64_t p) {
  orr_view head = *y;
  head.ndim = y->ndim - 1;
  return offset_of(&head, p);
}

void orr_k_embedding(const orr_view *w, const orr_view *idx, int64_t row0, const orr_view *y,
                     orr_fault *fault, int64_t vocabulary) {
  int64_t n = orr_k_count(idx), len = w->shape[1], ys = y->stride[y->ndim - 1];
  size_t size = orr_k_size(w->dtype);
#pragma omp parallel for schedule(static) if (n * len >= ORR_K_GRAIN)
  for (int64_t p = 0; p < n; p++) {
    int64_t k = index_at(idx, offset_of(idx, p), p, vocabulary, fault) - row0;
    const char *src = k < 0 || k >= w->shape[0] ? NULL : place(w, k * w->stride[0]);
    move(place(y, head_offset(y, p)), ys, src, w->stride[1], len, size);
  }
}

void orr_k_embedding_back(const orr_view *gw, const orr_view *idx, int64_t row0,
                          const orr_view *g, int64_t vocabulary) {
  int64_t n = orr_k_count(idx), len = gw->shape[1], gs = g->stride[g->ndim - 1];
  bool threads = n * len >= ORR_K_GRAIN;
  int64_t piece = threads || len == 0 ? 64 : len;
#pragma omp parallel for schedule(static) if (threads)
  for (int64_t c = 0; c < len; c += piece) {
    int64_t m = len - c < piece ? len - c : piece;
    for (int64_t p = 0; p < n; p++) {
      int64_t k = index_at(idx, offset_of(idx, p), p, vocabulary, NULL);
      if (k < row0 || k >= row0 + gw->shape[0]) continue;
      add(gw, (k - row0) * gw->stride[0] + c * gw->stride[1], gw->stride[1], g,
          head_offset(g, p) + c * gs, gs, m);
    }
  }
}

void orr_k_masked_fill(const orr_view *x, const orr_view *mask, double value,
                       const orr_view *y) {
  const orr_view *views[3] = {y, x, mask};
  size_t size = orr_k_size(y->dtype);
  int64_t filled = 0;
  orr_view one = {.data = &filled, .dtype = y->dtype};
  orr_k_set(&one, 0, value);
  orr_loop l;
  orr_loop_init(&l, y, views, 3, 0);
  orr_run in = orr_loop_pop(&l);
  const int64_t *s = in.stride;
#pragma omp parallel for schedule(static) if (l.n > 1 && l.n * in.len >= ORR_K_GRAIN)
  for (int64_t r = 0; r < l.n; r++) {
    int64_t off[3];
    orr_loop_at(&l, 3, r, off);
    if (y->data != x->data) move(place(y, off[0]), s[0], place(x, off[1]), s[1], in.len, size);
    const uint8_t *m = (const uint8_t *)mask->data + off[2];
    for (int64_t i = 0; i < in.len; i++)
      if (m[i * s[2]]) memcpy(place(y, off[0] + i * s[0]), &filled, size);
  }
}

void orr_k_one_hot(const orr_view *idx, int64_t class0, int64_t classes, const orr_view *y,
                   orr_fault *fault) {
  int64_t n = orr_k_count(idx), len = y->shape[y->ndim - 1], ys = y->stride[y->ndim - 1];
#pragma omp parallel for schedule(static) if (n * len >= ORR_K_GRAIN)
  for (int64_t p = 0; p < n; p++) {
    int64_t off = head_offset(y, p);
    int64_t k = index_at(idx, offset_of(idx, p), p, classes, fault) - class0;
    move(place(y, off), ys, NULL, 0, len, orr_k_size(y->dtype));
    if (k >= 0 && k < len) orr_k_set(y, off + k * ys, 1);
  }
}

static void copy(const orr_view *x, const orr_view *y) {
  const orr_view *views[2] = {y, x};
  size_t size = orr_k_size(y->dtype);
  orr_loop l;
  orr_loop_init(&l, y, views, 2, 0);
  orr_run in = orr_loop_pop(&l);
#pragma omp parallel for schedule(static) if (l.n > 1 && l.n * in.len >= ORR_K_GRAIN)
  for (int64_t r = 0; r < l.n; r++) {
    int64_t off[2];
    orr_loop_at(&l, 2, r, off);
    move(place(y, off[0]), in.stride[0], place(x, off[1]), in.stride[1], in.len, size);
  }
}

void orr_k_flip(const orr_view *x, unsigned mask, const orr_view *y) {
  orr_view back = *x;
  int64_t off = 0;
  if (orr_k_count(x) == 0) return;
  for (int d = 0; d < x->ndim; d++)
    if (mask >> d & 1) {
      off += (x->shape[d] - 1) * x->stride[d];
      back.stride[d] = -x->stride[d];
    }
  back.data = place(x, off);
  copy(&back, y);
}

void orr_k_roll(const orr_view *x, int dim, int64_t shift, const orr_view *y) {
  int64_t n = x->shape[dim];
  if (orr_k_count(x) == 0) return;
  int64_t s = (shift % n + n) % n;
  orr_view from = *x, to = *y;
  from.shape[dim] = to.shape[dim] = n - s;
  to.data = place(y, s * y->stride[dim]);
  copy(&from, &to);
  from.data = place(x, (n - s) * x->stride[dim]);
  to.data = y->data;
  from.shape[dim] = to.shape[dim] = s;
  copy(&from, &to);
}
