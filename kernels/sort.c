/* sort.c: sort and topk (sort.h) by order-preserving keys.
 *
 * Invariant: every row is (key, index) pairs; since indices differ, pairs are strictly ordered,
 * and any order of work gives the same result. Rows are worked in SLOTS groups, each with its
 * scratch.
 * To add an element type: key_of.
 */
#include "sort.h"

#include <math.h>
#include <string.h>

enum { SLOTS = 8, RUN = 16 };

typedef struct pair {
  uint64_t key;
  int64_t index;
} pair;

static const uint64_t TOP = (uint64_t)1 << 63;

static uint64_t key_of(const orr_view *x, int64_t off) {
  if (!orr_k_is_float(x->dtype)) return (uint64_t)orr_k_get_int(x, off) ^ TOP;
  double v = orr_k_get(x, off) + 0.0;
  uint64_t u;
  if (v != v) return UINT64_MAX;
  memcpy(&u, &v, sizeof u);
  return u & TOP ? ~u : u | TOP;
}

static inline bool before(pair a, pair b) {
  return a.key < b.key || (a.key == b.key && a.index < b.index);
}

static void insertion(pair *p, int64_t n) {
  for (int64_t i = 1; i < n; i++) {
    pair v = p[i];
    int64_t j = i;
    for (; j > 0 && before(v, p[j - 1]); j--) p[j] = p[j - 1];
    p[j] = v;
  }
}

static void merge(const pair *a, int64_t na, const pair *b, int64_t nb, pair *out) {
  int64_t i = 0, j = 0, k = 0;
  while (i < na && j < nb) out[k++] = before(b[j], a[i]) ? b[j++] : a[i++];
  while (i < na) out[k++] = a[i++];
  while (j < nb) out[k++] = b[j++];
}

/* Sorts p, with q as room; returns the one that holds the result. */
static pair *sorted(pair *p, pair *q, int64_t n) {
  for (int64_t i = 0; i < n; i += RUN) insertion(p + i, n - i < RUN ? n - i : RUN);
  for (int64_t width = RUN; width < n; width *= 2) {
    for (int64_t i = 0; i < n; i += 2 * width) {
      int64_t na = n - i < width ? n - i : width;
      int64_t nb = n - i - na < width ? n - i - na : width;
      merge(p + i, na, p + i + na, nb, q + i);
    }
    pair *t = p;
    p = q;
    q = t;
  }
  return p;
}

/* Moves p[i] of a heap (greatest at the root) down to its place. */
static void sift(pair *p, int64_t i, int64_t n) {
  pair v = p[i];
  for (;;) {
    int64_t c = 2 * i + 1;
    if (c >= n) break;
    if (c + 1 < n && before(p[c], p[c + 1])) c++;
    if (!before(v, p[c])) break;
    p[i] = p[c];
    i = c;
  }
  p[i] = v;
}

static void store(const orr_view *const *v, const int64_t *off, int dim, const pair *p,
                  int64_t k) {
  const orr_view *x = v[0], *indices = v[1], *values = v[2];
  size_t size = orr_k_size(x->dtype);
  for (int64_t i = 0; i < k; i++) {
    int64_t index = p[i].index + 1;
    orr_k_write_i64(indices, off[1] + i * indices->stride[dim], 1, 1, &index);
    if (values == NULL) continue;
    int64_t from = off[0] + p[i].index * x->stride[dim], to = off[2] + i * values->stride[dim];
    memcpy((char *)values->data + (size_t)to * size,
           (const char *)x->data + from * (int64_t)size, size);
  }
}

static void sort_row(const orr_view *const *v, const int64_t *off, int dim, uint64_t flip,
                     pair *p) {
  int64_t n = v[0]->shape[dim];
  for (int64_t i = 0; i < n; i++)
    p[i] = (pair){key_of(v[0], off[0] + i * v[0]->stride[dim]) ^ flip, i};
  store(v, off, dim, sorted(p, p + n, n), n);
}

/* Keeps the first k pairs in a heap whose root is the last of them. */
static void topk_row(const orr_view *const *v, const int64_t *off, int dim, uint64_t flip,
                     pair *p) {
  int64_t n = v[0]->shape[dim], k = v[1]->shape[dim];
  for (int64_t i = 0; i < n && k > 0; i++) {
    pair next = {key_of(v[0], off[0] + i * v[0]->stride[dim]) ^ flip, i};
    if (i < k) {
      p[i] = next;
      for (int64_t j = k / 2 - 1; i == k - 1 && j >= 0; j--) sift(p, j, k);
    } else if (before(next, p[0])) {
      p[0] = next;
      sift(p, 0, k);
    }
  }
  store(v, off, dim, sorted(p, p + k, k), k);
}

typedef void row_fn(const orr_view *const *v, const int64_t *off, int dim, uint64_t flip,
                    pair *p);

static int64_t rows_of(const orr_view *x, int dim) {
  return x->shape[dim] > 0 ? orr_k_count(x) / x->shape[dim] : 0;
}

static void rows(const orr_view *const *v, int dim, bool flip, row_fn *fn, int64_t room,
                 void *scratch) {
  int64_t count = rows_of(v[0], dim), slots = count < SLOTS ? count : SLOTS;
  orr_loop l;
  orr_loop_init(&l, v[0], v, 3, 1u << dim);
#pragma omp parallel for schedule(static) if (count * v[0]->shape[dim] >= ORR_K_GRAIN / 8)
  for (int64_t s = 0; s < slots; s++)
    for (int64_t r = count * s / slots; r < count * (s + 1) / slots; r++) {
      int64_t off[3];
      orr_loop_at(&l, 3, r, off);
      fn(v, off, dim, flip ? UINT64_MAX : 0, (pair *)scratch + s * room);
    }
}

static size_t scratch_of(const orr_view *x, int dim, int64_t room) {
  int64_t count = rows_of(x, dim);
  return (size_t)((count < SLOTS ? count : SLOTS) * room) * sizeof(pair);
}

size_t orr_k_sort_scratch(const orr_view *x, int dim) {
  return scratch_of(x, dim, 2 * x->shape[dim]);
}

size_t orr_k_topk_scratch(const orr_view *x, int dim, int64_t k) {
  return scratch_of(x, dim, 2 * k);
}

void orr_k_sort(const orr_view *x, int dim, bool descending, const orr_view *values,
                const orr_view *indices, void *scratch) {
  const orr_view *v[3] = {x, indices, values};
  rows(v, dim, descending, sort_row, 2 * x->shape[dim], scratch);
}

void orr_k_topk(const orr_view *x, int dim, bool largest, const orr_view *values,
                const orr_view *indices, void *scratch) {
  const orr_view *v[3] = {x, indices, values};
  rows(v, dim, largest, topk_row, 2 * indices->shape[dim], scratch);
}
