/* cpu_onednn.c: matrix products through oneDNN.
 *
 * Views become one plan: leading dimensions matched, those that b lacks folded into M where
 * strides allow (a Linear over (B, T, C) is one product), a column-major c turned into c^T =
 * b^T a^T.
 *
 * Invariant: the plan's numbers are the key of the cached primitive; two calls with equal
 * plans differ only in pointers.
 */
#include "cpu_onednn_int.h"

#include <string.h>

enum { MAX_BATCH = ORR_MAX_DIM - 2, A = 0, B = 1, C = 2 };

/* Operand o has shape batch..., row[o], column[o]; a batch dimension it lacks has size 1. */
struct plan {
  int n_batch, dtype;
  int64_t batch[3][MAX_BATCH], batch_stride[3][MAX_BATCH];
  int64_t size[3][2], stride[3][2];
  bool bias, accumulate, relu;
};

int64_t orr_dnn_count(const orr_view *v) {
  int64_t n = 1;
  for (int i = 0; i < v->ndim; i++) n *= v->shape[i];
  return n;
}

static size_t item_bytes(orr_dtype dtype) { return dtype == ORR_F32 ? 4 : 2; }

void orr_dnn_zero(const orr_view *v) {
  int64_t at[ORR_MAX_DIM] = {0}, offset = 0;
  size_t item = item_bytes(v->dtype);
  for (int64_t left = orr_dnn_count(v); left > 0; left--) {
    memset((char *)v->data + offset * (int64_t)item, 0, item);
    for (int d = v->ndim - 1; d >= 0; d--) {
      offset += v->stride[d];
      if (++at[d] < v->shape[d]) break;
      offset -= at[d] * v->stride[d];
      at[d] = 0;
    }
  }
}

/* Fills batch dimensions of operand o, matched from the right with those of c. */
static bool match_batch(struct plan *p, int o, const orr_view *v, const orr_view *c) {
  int missing = c->ndim - v->ndim;
  if (missing < 0) return false;
  for (int d = 0; d < p->n_batch; d++) {
    int64_t size = d < missing ? 1 : v->shape[d - missing];
    int64_t stride = d < missing ? 0 : v->stride[d - missing];
    if (size != 1 && size != c->shape[d]) return false;
    if (stride == 0) size = 1;
    p->batch[o][d] = size;
    p->batch_stride[o][d] = stride;
  }
  for (int i = 0; i < 2; i++) {
    p->size[o][i] = v->shape[v->ndim - 2 + i];
    p->stride[o][i] = v->stride[v->ndim - 2 + i];
  }
  return true;
}

static void drop_batch(struct plan *p, int d) {
  for (int o = A; o <= C; o++)
    for (int i = d; i + 1 < p->n_batch; i++) {
      p->batch[o][i] = p->batch[o][i + 1];
      p->batch_stride[o][i] = p->batch_stride[o][i + 1];
    }
  p->n_batch--;
}

/* Operand o read as rows: its columns are adjacent. */
static bool is_row_major(const struct plan *p, int o) {
  return p->stride[o][1] == 1 || p->size[o][1] == 1;
}

/* Folds the innermost batch dimension into M while b has none of it and a and c step evenly. */
static void fold_batch(struct plan *p) {
  for (int d = p->n_batch - 1; d >= 0; d--)
    if (p->batch[C][d] == 1) drop_batch(p, d);
  while (p->n_batch) {
    int d = p->n_batch - 1;
    int64_t m = p->size[C][0];
    if (p->batch[B][d] != 1 || p->batch[A][d] == 1) return;
    if (m != 1 && (p->batch_stride[A][d] != m * p->stride[A][0] ||
                   p->batch_stride[C][d] != m * p->stride[C][0]))
      return;
    if (m == 1) {
      if (!is_row_major(p, A) || !is_row_major(p, C)) return;
      p->stride[A][0] = p->batch_stride[A][d];
      p->stride[C][0] = p->batch_stride[C][d];
    }
    p->size[A][0] = p->size[C][0] = m * p->batch[C][d];
    drop_batch(p, d);
  }
}

/* Gives a dimension of size 1 the stride that makes the matrix plain; false if neither inner
 * stride is 1 or rows overlap. */
static bool settle_strides(int64_t size[2], int64_t stride[2]) {
  if (size[0] == 1 && size[1] == 1) stride[0] = stride[1] = 1;
  else if (size[1] == 1) stride[1] = 1;
  else if (size[0] == 1) stride[0] = stride[1] == 1 ? size[1] : 1;
  if (stride[1] == 1) return stride[0] >= size[1];
  return stride[0] == 1 && stride[1] >= size[0];
}

static void swap(int64_t *x, int64_t *y) {
  int64_t t = *x;
  *x = *y;
  *y = t;
}

/* c = a b becomes c^T = b^T a^T. */
static void transpose_all(struct plan *p) {
  for (int o = A; o <= C; o++) {
    swap(&p->size[o][0], &p->size[o][1]);
    swap(&p->stride[o][0], &p->stride[o][1]);
  }
  for (int i = 0; i < 2; i++) {
    swap(&p->size[A][i], &p->size[B][i]);
    swap(&p->stride[A][i], &p->stride[B][i]);
  }
  for (int d = 0; d < p->n_batch; d++) {
    swap(&p->batch[A][d], &p->batch[B][d]);
    swap(&p->batch_stride[A][d], &p->batch_stride[B][d]);
  }
}

/* *swapped tells that a and b changed places. */
static bool plan_of(struct plan *p, const orr_view *a, const orr_view *b, const orr_view *bias,
                    const orr_view *c, bool accumulate, int activation, bool *swapped) {
  *swapped = false;
  p->dtype = orr_dnn_dtype(c->dtype);
  if (!p->dtype || a->dtype != c->dtype || b->dtype != c->dtype) return false;
  if (a->ndim < 2 || b->ndim < 2 || c->ndim < 2) return false;
  p->n_batch = c->ndim - 2;
  p->bias = bias != NULL;
  p->accumulate = accumulate;
  p->relu = activation == ORR_ONEDNN_RELU;
  if (!match_batch(p, A, a, c) || !match_batch(p, B, b, c) || !match_batch(p, C, c, c))
    return false;
  for (int d = 0; d < p->n_batch; d++)
    if (p->batch[C][d] != c->shape[d]) return false; /* c may not repeat itself */
  if (p->size[A][0] != p->size[C][0] || p->size[B][1] != p->size[C][1] ||
      p->size[A][1] != p->size[B][0])
    return false;
  if (bias && (bias->ndim != 1 || bias->shape[0] != p->size[C][1] || bias->dtype != c->dtype ||
               (bias->stride[0] != 1 && bias->shape[0] != 1)))
    return false;
  if (!orr_dnn_count(a) || !orr_dnn_count(b) || !orr_dnn_count(c)) return true;
  fold_batch(p);
  for (int o = A; o <= C; o++)
    if (!settle_strides(p->size[o], p->stride[o])) return false;
  if (p->stride[C][1] != 1) {
    if (bias) return false;
    transpose_all(p);
    *swapped = true;
  }
  return true;
}

static void key_of(orr_dnn_key *key, const struct plan *p) {
  key->n = 0;
  orr_dnn_key_add(key, ORR_DNN_MATMUL | p->dtype << 8 | p->n_batch << 16 | p->bias << 24 |
                           p->accumulate << 25 | p->relu << 26);
  orr_dnn_key_add(key, p->size[C][0]);
  orr_dnn_key_add(key, p->size[C][1]);
  orr_dnn_key_add(key, p->size[A][1]);
  for (int o = A; o <= C; o++) {
    orr_dnn_key_add_array(key, 2, p->stride[o]);
    orr_dnn_key_add_array(key, p->n_batch, p->batch[o]);
    orr_dnn_key_add_array(key, p->n_batch, p->batch_stride[o]);
  }
}

static int describe(orr_dnn_md *md, const struct plan *p, int o) {
  int64_t shape[ORR_MAX_DIM], stride[ORR_MAX_DIM];
  int n = p->n_batch;
  memcpy(shape, p->batch[o], sizeof p->batch[o]);
  memcpy(stride, p->batch_stride[o], sizeof p->batch_stride[o]);
  for (int i = 0; i < 2; i++) {
    shape[n + i] = p->size[o][i];
    stride[n + i] = p->stride[o][i];
  }
  for (int d = n - 1; d >= 0; d--) /* a repeated dimension: any stride that is no overlap */
    if (shape[d] == 1) stride[d] = shape[d + 1] * stride[d + 1];
  return orr_dnn_md_strided(md, n + 2, shape, stride, p->dtype);
}

static int describe_bias(orr_dnn_md *md, const struct plan *p) {
  int64_t shape[ORR_MAX_DIM], stride[ORR_MAX_DIM];
  int n = p->n_batch + 2;
  for (int d = 0; d < n; d++) {
    shape[d] = 1;
    stride[d] = p->size[C][1];
  }
  shape[n - 1] = p->size[C][1];
  stride[n - 1] = 1;
  return orr_dnn_md_strided(md, n, shape, stride, p->dtype);
}

static orr_dnn_entry *make(const orr_dnn_key *key, const struct plan *p, orr_status *status) {
  orr_dnn_md md[3] = {0}, bias = {0};
  int s = DNN_SUCCESS;
  for (int o = A; o <= C && s == DNN_SUCCESS; o++) s = describe(&md[o], p, o);
  if (s == DNN_SUCCESS && p->bias) s = describe_bias(&bias, p);
  orr_dnn_op op = {.kind = ORR_DNN_MATMUL,
                   .src = &md[A],
                   .weights = &md[B],
                   .dst = &md[C],
                   .bias = p->bias ? &bias : NULL,
                   .dtype = p->dtype,
                   .accumulate = p->accumulate,
                   .relu = p->relu};
  orr_dnn_port ports[] = {{DNN_ARG_SRC, DNN_QUERY_SRC, 0, md[A].ptr, false},
                          {DNN_ARG_WEIGHTS, DNN_QUERY_WEIGHTS, 0, md[B].ptr, false},
                          {DNN_ARG_DST, DNN_QUERY_DST, 0, md[C].ptr, true},
                          {DNN_ARG_BIAS, DNN_QUERY_WEIGHTS, 1, bias.ptr, false}};
  orr_dnn_entry *e =
      orr_dnn_make(key, s == DNN_SUCCESS ? &op : NULL, p->bias ? 4 : 3, ports, status);
  for (int o = A; o <= C; o++) orr_dnn_md_free(&md[o]);
  orr_dnn_md_free(&bias);
  return e;
}

static orr_dnn_entry *entry_of(const struct plan *p, orr_status *status) {
  orr_dnn_key key;
  key_of(&key, p);
  orr_dnn_entry *e = orr_dnn_find(&key);
  *status = ORR_OK;
  return e ? e : make(&key, p, status);
}

/* Nothing to multiply: c is empty, or a sum over K = 0 terms. */
static bool is_empty(const orr_view *a, const orr_view *b, const orr_view *c) {
  return !orr_dnn_count(a) || !orr_dnn_count(b) || !orr_dnn_count(c);
}

bool orr_onednn_supports_matmul(const orr_view *a, const orr_view *b, const orr_view *bias,
                                const orr_view *c, bool accumulate,
                                orr_onednn_activation activation) {
  struct plan p;
  bool swapped;
  orr_status status;
  if (!orr_dnn_load() || !plan_of(&p, a, b, bias, c, accumulate, activation, &swapped))
    return false;
  if (is_empty(a, b, c)) return !orr_dnn_count(c) || (!bias && !p.relu);
  orr_dnn_entry *e = entry_of(&p, &status);
  return e && !orr_dnn_refused(e);
}

orr_status orr_onednn_matmul(const orr_view *a, const orr_view *b, const orr_view *bias,
                             const orr_view *c, bool accumulate,
                             orr_onednn_activation activation) {
  struct plan p;
  bool swapped;
  orr_status status;
  if (!orr_dnn_load()) return orr_fail(ORR_EDEVICE, "oneDNN is not installed");
  if (!plan_of(&p, a, b, bias, c, accumulate, activation, &swapped))
    return orr_fail(ORR_EARG, "matmul: not one that oneDNN takes");
  if (is_empty(a, b, c)) {
    if (orr_dnn_count(c) && (bias || p.relu))
      return orr_fail(ORR_EARG, "matmul: K = 0 with a bias or an activation");
    if (!accumulate) orr_dnn_zero(c);
    return ORR_OK;
  }
  orr_dnn_entry *e = entry_of(&p, &status);
  if (!e) return status;
  if (orr_dnn_refused(e)) return orr_fail(ORR_EARG, "matmul: not one that oneDNN takes");
  void *data[] = {swapped ? b->data : a->data, swapped ? a->data : b->data, c->data,
                  bias ? bias->data : NULL};
  return orr_dnn_run(e, data);
}
