/* op_dims.c: shapes and labels from an op's einsum-like `dims`, and the labels that
 * broadcasting gives.
 *
 * Invariant: the same letter has one size over all tensors of a call; letter a..z has label
 * 1..26, a capital is ORR_WHOLE.
 * To add a form: read it in `next_tensor`.
 */
#include <ctype.h>
#include <string.h>

#include "op.h"

/* The next tensor's letters in *at, which moves past them and the ',' or "->". */
static int next_tensor(const char **at, char letters[ORR_MAX_DIM]) {
  int n = 0;
  while (isalpha((unsigned char)**at)) letters[n++] = *(*at)++;
  if (**at == ',') (*at)++;
  else if (**at == '-') *at += 2;
  return n;
}

orr_status orr_infer_dims(orr_call *c) {
  int64_t size[128];
  char letters[ORR_MAX_DIM];
  const char *at = c->op->dims;
  memset(size, -1, sizeof size);
  for (int k = 0; k < c->op->n_in; k++) {
    int n = next_tensor(&at, letters);
    const orr_meta *m = &c->in[k]->meta;
    if (m->ndim != n)
      return orr_fail(ORR_EARG, "tensor %d has %d dimensions and needs %d", k + 1, m->ndim, n);
    for (int d = 0; d < n; d++) {
      int64_t *s = &size[(unsigned char)letters[d]];
      if (*s >= 0 && *s != m->shape[d])
        return orr_fail(ORR_EARG, "dimension %d of tensor %d is %lld and must be %lld", d + 1,
                        k + 1, (long long)m->shape[d], (long long)*s);
      *s = m->shape[d];
    }
  }
  for (int k = 0; k < c->n_out; k++) {
    orr_meta *m = &c->out_meta[k];
    m->dtype = c->in[0]->meta.dtype;
    m->ndim = next_tensor(&at, letters);
    for (int d = 0; d < m->ndim; d++) m->shape[d] = size[(unsigned char)letters[d]];
  }
  return ORR_OK;
}

static void set_labels(const char *letters, int n, uint8_t *label) {
  for (int d = 0; d < n; d++)
    label[d] = islower((unsigned char)letters[d]) ? (uint8_t)(letters[d] - 'a' + 1) : ORR_WHOLE;
}

void orr_label_dims(orr_call *c) {
  char letters[ORR_MAX_DIM];
  const char *at = c->op->dims;
  for (int k = 0; k < c->op->n_in; k++) {
    int n = next_tensor(&at, letters);
    if (c->in[k]) set_labels(letters, n, c->in_label[k]);
  }
  for (int k = 0; k < c->n_out; k++) {
    int n = next_tensor(&at, letters);
    set_labels(letters, n, c->out_label[k]);
  }
}

void orr_label_broadcast(orr_call *c) {
  const orr_meta *out = &c->out_meta[0];
  for (int j = 0; j < c->n_out; j++)
    for (int d = 0; d < c->out_meta[j].ndim; d++) c->out_label[j][d] = (uint8_t)(d + 1);
  for (int k = 0; k < c->n_in; k++) {
    if (!c->in[k]) continue;
    const orr_meta *m = &c->in[k]->meta;
    for (int d = 0; d < m->ndim; d++) {
      int to = out->ndim - m->ndim + d;
      if (m->shape[d] == out->shape[to]) c->in_label[k][d] = (uint8_t)(to + 1);
    }
  }
}

orr_status orr_infer_same(orr_call *c) {
  c->out_meta[0] = c->in[0]->meta;
  return ORR_OK;
}

void orr_label_same(orr_call *c) {
  int ndim = c->in[0]->meta.ndim;
  for (int k = 0; k < c->n_in; k++)
    for (int d = 0; c->in[k] && d < ndim && c->in[k]->meta.ndim == ndim; d++)
      c->in_label[k][d] = (uint8_t)(d + 1);
  for (int k = 0; k < c->n_out; k++)
    for (int d = 0; d < ndim && c->out_meta[k].ndim == ndim; d++)
      c->out_label[k][d] = (uint8_t)(d + 1);
}

orr_status orr_need_float(const orr_call *c, int k) {
  orr_dtype dtype = c->in[k]->meta.dtype;
  if (orr_dtype_is_float(dtype)) return ORR_OK;
  return orr_fail(ORR_EARG, "needs a floating-point tensor and got %s; use x:to(\"f32\")",
                  orr_dtype_name(dtype));
}

orr_status orr_need_index(const orr_call *c, int k) {
  orr_dtype dtype = c->in[k]->meta.dtype;
  if (dtype == ORR_I64 || dtype == ORR_I32) return ORR_OK;
  return orr_fail(ORR_EARG, "indices must be i64 or i32 and are %s; use x:to(\"i64\")",
                  orr_dtype_name(dtype));
}
