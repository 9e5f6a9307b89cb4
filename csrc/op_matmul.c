/* op_matmul.c: matmul, linear, and the product over rows that weight gradients are.
 *
 * Invariant: any strides and placements; what a shard multiplies is a product of its own, so a
 * sharded inner dimension leaves Partial(sum). Transposes are views: nothing is copied for one.
 * To add a product: bring it to `product` on views (.., M, K), (.., K, N), (.., M, N).
 */
#include <string.h>

#include "op.h"
#include "op_view.h"

/* Labels above those of the leading dimensions. */
enum { LABEL_M = 7, LABEL_N = 8, LABEL_K = 9 };

/* ---- products of views ---- */

/* A new dim of size 1 before dim d. */
static void add_dim(orr_view *v, int d) {
  for (int k = v->ndim++; k > d; k--) {
    v->shape[k] = v->shape[k - 1];
    v->stride[k] = v->stride[k - 1];
  }
  v->shape[d] = 1;
  v->stride[d] = 0;
}

static void swap_last(orr_view *v) {
  int r = v->ndim - 2;
  int64_t shape = v->shape[r], stride = v->stride[r];
  v->shape[r] = v->shape[r + 1];
  v->stride[r] = v->stride[r + 1];
  v->shape[r + 1] = shape;
  v->stride[r + 1] = stride;
}

/* v with the leading dims of c, repeated where it lacks them. */
static orr_view with_batch(const orr_view *v, const orr_view *c) {
  orr_view to = *c, room;
  to.shape[c->ndim - 2] = v->shape[v->ndim - 2];
  to.shape[c->ndim - 1] = v->shape[v->ndim - 1];
  return *orr_expand_view(v, &to, &room);
}

/* c = a b + bias (N), or added to c. */
static orr_status product(const orr_work *w, const orr_view *a_in, const orr_view *b_in,
                          const orr_view *bias, const orr_view *c, bool accumulate) {
  orr_view a = with_batch(a_in, c), b = with_batch(b_in, c);
  return w->k->product(&a, &b, bias, c, accumulate);
}

/* ---- matmul ---- */

static orr_status same_dtype(orr_call *c) {
  orr_dtype dtype = c->in[0]->meta.dtype;
  for (int k = 1; k < c->n_in; k++)
    if (c->in[k]) dtype = orr_dtype_promote(dtype, c->in[k]->meta.dtype);
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k]) ORR_TRY(orr_call_cast(c, k, dtype));
  return ORR_OK;
}

static orr_status differ(int64_t a, int64_t b) {
  return orr_fail(ORR_EARG, "the inner sizes differ: %lld and %lld", (long long)a,
                  (long long)b);
}

static orr_status infer_matmul(orr_call *c) {
  ORR_TRY(same_dtype(c));
  const orr_meta *a = &c->in[0]->meta, *b = &c->in[1]->meta;
  orr_meta *y = &c->out_meta[0];
  if (!a->ndim || !b->ndim) return orr_fail(ORR_EARG, "needs vectors or matrices, not numbers");
  int64_t k = a->shape[a->ndim - 1], inner = b->shape[b->ndim > 1 ? b->ndim - 2 : 0];
  if (k != inner) return differ(k, inner);
  orr_meta lead_a = *a, lead_b = *b;
  lead_a.ndim = a->ndim > 2 ? a->ndim - 2 : 0;
  lead_b.ndim = b->ndim > 2 ? b->ndim - 2 : 0;
  ORR_TRY(orr_broadcast(c->op->name, &lead_a, &lead_b, y));
  y->dtype = a->dtype;
  if (a->ndim > 1) y->shape[y->ndim++] = a->shape[a->ndim - 2];
  if (b->ndim > 1) y->shape[y->ndim++] = b->shape[b->ndim - 1];
  return ORR_OK;
}

static void label_operand(const orr_meta *m, const orr_meta *y, int lead, uint8_t before,
                          uint8_t last, uint8_t *label) {
  if (m->ndim > 1) label[m->ndim - 2] = before;
  label[m->ndim - 1] = last;
  for (int d = 0; d < m->ndim - 2; d++) {
    int to = lead - (m->ndim - 2) + d;
    if (m->shape[d] == y->shape[to]) label[d] = (uint8_t)(to + 1);
  }
}

static void label_matmul(orr_call *c) {
  const orr_meta *a = &c->in[0]->meta, *b = &c->in[1]->meta, *y = &c->out_meta[0];
  int lead = y->ndim - (a->ndim > 1) - (b->ndim > 1), at = lead;
  label_operand(a, y, lead, LABEL_M, LABEL_K, c->in_label[0]);
  label_operand(b, y, lead, LABEL_K, b->ndim > 1 ? LABEL_N : LABEL_K, c->in_label[1]);
  for (int d = 0; d < lead; d++) c->out_label[0][d] = (uint8_t)(d + 1);
  if (a->ndim > 1) c->out_label[0][at++] = LABEL_M;
  if (b->ndim > 1) c->out_label[0][at] = LABEL_N;
}

static orr_status run_matmul(const orr_work *w, int shard) {
  orr_view a = *orr_work_in(w, shard, 0), b = *orr_work_in(w, shard, 1),
           c = *orr_work_out(w, shard, 0);
  bool row = a.ndim == 1, column = b.ndim == 1;
  if (column) {
    add_dim(&b, 1);
    add_dim(&c, c.ndim);
  }
  if (row) {
    add_dim(&a, 0);
    add_dim(&c, c.ndim - 1);
  }
  return product(w, &a, &b, NULL, &c, false);
}

/* t with a dim of size 1 at d, or (drop) without it. */
static orr_tensor *unit_dim(orr_grad *g, orr_tensor *t, int d, bool drop) {
  orr_args args = {.i = {d}};
  return t ? orr_g(g, drop ? &orr_op_squeeze : &orr_op_unsqueeze, &args, 1, t) : NULL;
}

static orr_tensor *transposed(orr_grad *g, orr_tensor *t) {
  return t ? orr_g_transpose(g, t, t->meta.ndim - 2, t->meta.ndim - 1) : NULL;
}

static orr_tensor *times(orr_grad *g, orr_tensor *a, orr_tensor *b) {
  return orr_g(g, &orr_op_matmul, NULL, 2, a, b);
}

static const orr_op rows_product;

static orr_status grad_matmul(orr_grad *g) {
  orr_tensor *a = g->x[0], *b = g->x[1], *gy = g->gy[0];
  bool row = g->x_meta[0].ndim == 1, column = g->x_meta[1].ndim == 1;
  if (row && column) {
    if (g->needs[0]) g->gx[0] = orr_g_mul(g, b, gy);
    if (g->needs[1]) g->gx[1] = orr_g_mul(g, a, gy);
    return g->status;
  }
  if (row) {
    a = unit_dim(g, a, 0, false);
    gy = unit_dim(g, gy, gy->meta.ndim - 1, false);
  }
  if (column) {
    b = unit_dim(g, b, 1, false);
    gy = unit_dim(g, gy, gy->meta.ndim, false);
  }
  if (g->status) return g->status;
  if (g->needs[0]) {
    orr_tensor *ga = times(g, gy, transposed(g, b));
    g->gx[0] = row && ga ? unit_dim(g, ga, ga->meta.ndim - 2, true) : ga;
  }
  if (g->needs[1]) {
    bool plain = b->meta.ndim == 2 && a->meta.ndim > 2 && a->meta.ndim == gy->meta.ndim;
    orr_tensor *gb =
        plain ? orr_g(g, &rows_product, NULL, 2, a, gy) : times(g, transposed(g, a), gy);
    g->gx[1] = column && gb ? unit_dim(g, gb, gb->meta.ndim - 1, true) : gb;
  }
  return g->status;
}

const orr_op orr_op_matmul = {.name = "matmul",
                              .args = "t t",
                              .flags = ORR_OP_MULTILINEAR | ORR_OP_NARROW,
                              .partial = ORR_SUM,
                              .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1),
                              .n_in = 2,
                              .n_out = 1,
                              .infer = infer_matmul,
                              .label = label_matmul,
                              .run = run_matmul,
                              .grad = grad_matmul};

/* ---- rows_product: a (.., m), b (.., n) to a^T b (m, n), summed over all rows ---- */

static orr_status infer_rows(orr_call *c) {
  const orr_meta *a = &c->in[0]->meta, *b = &c->in[1]->meta;
  for (int d = 0; d + 1 < a->ndim; d++)
    if (a->ndim != b->ndim || a->shape[d] != b->shape[d])
      return orr_fail(ORR_EARG, "the leading dimensions differ");
  c->out_meta[0] = (orr_meta){.dtype = a->dtype, .ndim = 2};
  c->out_meta[0].shape[0] = a->shape[a->ndim - 1];
  c->out_meta[0].shape[1] = b->shape[b->ndim - 1];
  return ORR_OK;
}

static void label_rows(orr_call *c) {
  int last = c->in[0]->meta.ndim - 1;
  for (int k = 0; k < 2; k++) {
    for (int d = 0; d < last; d++) c->in_label[k][d] = (uint8_t)(d + 1);
    c->in_label[k][last] = c->out_label[0][k] = k ? LABEL_K : LABEL_N;
  }
}

static orr_status add_rows(const orr_work *w, orr_view a, orr_view b, const orr_view *c,
                           bool accumulate) {
  while (a.ndim > 2) {
    int64_t a_stride, b_stride;
    int d = a.ndim - 3;
    if (!orr_view_joins(&a, d, &a_stride) || !orr_view_joins(&b, d, &b_stride)) break;
    orr_view_join(&a, d, a_stride);
    orr_view_join(&b, d, b_stride);
  }
  if (a.ndim == 2) {
    swap_last(&a);
    return product(w, &a, &b, NULL, c, accumulate);
  }
  for (int64_t i = 0; i < a.shape[0]; i++) {
    orr_view part_a = orr_narrow_view(&a, 0, i, 1), part_b = orr_narrow_view(&b, 0, i, 1);
    orr_view_drop(&part_a, 0);
    orr_view_drop(&part_b, 0);
    ORR_TRY(add_rows(w, part_a, part_b, c, true));
  }
  return ORR_OK;
}

static orr_status run_rows(const orr_work *w, int shard) {
  orr_view a = *orr_work_in(w, shard, 0), b = *orr_work_in(w, shard, 1);
  orr_view *c = orr_work_out(w, shard, 0);
  if (a.ndim == 1) {
    add_dim(&a, 0);
    add_dim(&b, 0);
  }
  if (a.ndim > 2) w->k->fill(c, 0);
  return add_rows(w, a, b, c, a.ndim > 2);
}

static orr_status grad_rows(orr_grad *g) {
  if (g->needs[0]) g->gx[0] = times(g, g->x[1], transposed(g, g->gy[0]));
  if (g->needs[1]) g->gx[1] = times(g, g->x[0], g->gy[0]);
  return g->status;
}

static const orr_op rows_product = {.name = "rows_product",
                                    .flags = ORR_OP_MULTILINEAR,
                                    .partial = ORR_SUM,
                                    .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1),
                                    .n_in = 2,
                                    .n_out = 1,
                                    .infer = infer_rows,
                                    .label = label_rows,
                                    .run = run_rows,
                                    .grad = grad_rows};

/* ---- the same, added to what is there: in: sum (m, n), a (.., m), b (.., n) ---- */

static orr_status infer_rows_add(orr_call *c) {
  c->n_written = 1;
  return ORR_OK;
}

static orr_status run_rows_add(const orr_work *w, int shard) {
  orr_view a = *orr_work_in(w, shard, 1), b = *orr_work_in(w, shard, 2);
  if (a.ndim == 1) {
    add_dim(&a, 0);
    add_dim(&b, 0);
  }
  return add_rows(w, a, b, orr_work_in(w, shard, 0), true);
}

static int rule_as_placed(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  *only = true;
  if (max < 1) return 0;
  for (int k = 0; k < c->n_in; k++) rows[0].in[k] = c->in[k]->layout->axis[axis];
  return 1;
}

static const orr_op rows_product_add_ = {.name = "rows_product_add_",
                                         .flags = ORR_OP_ALWAYS_IN_PLACE | ORR_OP_NO_GRAD,
                                         .n_in = 3,
                                         .infer = infer_rows_add,
                                         .rule = rule_as_placed,
                                         .run = run_rows_add};

static bool cut_alike(const orr_place *a, const orr_place *b, int parts) {
  return a->kind == ORR_SHARD && b->kind == ORR_SHARD && a->bounds && b->bounds &&
         memcmp(a->bounds, b->bounds, (size_t)(parts + 1) * sizeof *a->bounds) == 0;
}

/* Whether the product of the shards of a and b on this axis is what the shards of sum hold. */
static bool sums_alike(const orr_tensor *sum, const orr_tensor *a, const orr_tensor *b,
                       int axis) {
  const orr_place *s = &sum->layout->axis[axis], *pa = &a->layout->axis[axis],
                  *pb = &b->layout->axis[axis];
  int parts = sum->layout->mesh->size[axis], last = a->meta.ndim - 1;
  bool whole_a = pa->kind == ORR_REPLICATE, whole_b = pb->kind == ORR_REPLICATE;
  if (parts == 1) return true;
  if (s->kind == ORR_REPLICATE) return whole_a && whole_b;
  if (s->kind == ORR_PARTIAL)
    return s->op == ORR_SUM && cut_alike(pa, pb, parts) && pa->dim == pb->dim && pa->dim < last;
  const orr_place *cut = s->dim == 0 ? pa : pb;
  return (s->dim == 0 ? whole_b : whole_a) && cut->dim == last && cut_alike(s, cut, parts);
}

/* Whether the product of gy and x could be added to the weight's gradient; it has been then.
 * Meshes of one axis: bounds of a nested cut are another row of numbers. */
static bool added(orr_grad *g, orr_tensor *gy, orr_tensor *x) {
  orr_tensor *sum = g->sum ? g->sum[1] : NULL, *in[3] = {sum, gy, x};
  if (!sum || g->status) return false;
  const orr_mesh *mesh = sum->layout->mesh;
  if (mesh->n_axes > 1 || gy->layout->mesh != mesh || x->layout->mesh != mesh) return false;
  if (mesh->n_axes == 1 && !sums_alike(sum, gy, x, 0)) return false;
  if (gy->meta.dtype != sum->meta.dtype || x->meta.dtype != sum->meta.dtype) return false;
  g->status = orr_dispatch(&rows_product_add_, in, 3, NULL, true, NULL);
  return true;
}

/* ---- linear: x (.., in), w (out, in), b (out) or absent ---- */

static orr_status infer_linear(orr_call *c) {
  ORR_TRY(orr_need_float(c, 0));
  ORR_TRY(same_dtype(c));
  const orr_meta *x = &c->in[0]->meta, *w = &c->in[1]->meta;
  const orr_tensor *b = c->n_in > 2 ? c->in[2] : NULL;
  if (w->ndim != 2 || x->ndim < 1)
    return orr_fail(ORR_EARG, "needs x (..., in) and a weight (out, in)");
  if (x->shape[x->ndim - 1] != w->shape[1]) return differ(x->shape[x->ndim - 1], w->shape[1]);
  if (b && (b->meta.ndim != 1 || b->meta.shape[0] != w->shape[0]))
    return orr_fail(ORR_EARG, "the bias must be (%lld)", (long long)w->shape[0]);
  c->out_meta[0] = *x;
  c->out_meta[0].shape[x->ndim - 1] = w->shape[0];
  return ORR_OK;
}

static bool has_bias(const orr_call *c) { return c->n_in > 2 && c->in[2]; }

static void label_linear(orr_call *c) {
  int last = c->in[0]->meta.ndim - 1;
  uint8_t k = has_bias(c) ? ORR_WHOLE : LABEL_K;
  for (int d = 0; d < last; d++) c->in_label[0][d] = c->out_label[0][d] = (uint8_t)(d + 1);
  c->in_label[0][last] = c->in_label[1][1] = k;
  c->in_label[1][0] = c->out_label[0][last] = LABEL_N;
  if (has_bias(c)) c->in_label[2][0] = LABEL_N;
}

/* Split features, and a Partial x: the bias, made Partial too, is added once. */
static int rule_linear(const orr_call *c, int axis, orr_row *rows, int max, bool *only) {
  const orr_tensor *x = c->in[0], *w = c->in[1];
  const orr_place whole = {.kind = ORR_REPLICATE}, sum = {.kind = ORR_PARTIAL, .op = ORR_SUM};
  int last = x->meta.ndim - 1, n = 0;
  *only = false;
  if (max < 2) return 0;
  const orr_place *px = axis < x->layout->mesh->n_axes ? &x->layout->axis[axis] : &whole;
  const orr_place *pw = axis < w->layout->mesh->n_axes ? &w->layout->axis[axis] : &whole;
  bool x_split = px->kind == ORR_SHARD && px->dim == last;
  bool w_split = pw->kind == ORR_SHARD && pw->dim == 1;
  if (has_bias(c) && (x_split || w_split)) {
    const orr_tensor *from = w_split ? w : x;
    const orr_place *outer = &from->layout->axis[0], *now = w_split ? pw : px;
    bool nested = axis > 0 && outer->kind == ORR_SHARD && outer->dim == now->dim;
    int64_t *bounds = nested ? NULL : now->bounds;
    rows[n].in[0] = (orr_place){.kind = ORR_SHARD, .dim = last, .bounds = bounds};
    rows[n].in[1] = (orr_place){.kind = ORR_SHARD, .dim = 1, .bounds = bounds};
    rows[n].in[2] = rows[n].out[0] = sum;
    n++;
  }
  if (px->kind == ORR_PARTIAL && px->op == ORR_SUM) {
    rows[n].in[0] = rows[n].out[0] = sum;
    rows[n].in[1] = whole;
    if (c->n_in > 2) rows[n].in[2] = sum;
    n++;
  }
  return n;
}

static orr_status run_linear(const orr_work *w, int shard) {
  orr_view x = *orr_work_in(w, shard, 0), weight = *orr_work_in(w, shard, 1),
           y = *orr_work_out(w, shard, 0);
  bool biased = w->n_in > 2 && orr_work_has(w, shard, 2);
  if (x.ndim == 1) {
    add_dim(&x, 0);
    add_dim(&y, 0);
  }
  swap_last(&weight);
  return product(w, &x, &weight, biased ? orr_work_in(w, shard, 2) : NULL, &y, false);
}

static orr_status grad_linear(orr_grad *g) {
  orr_tensor *gy = g->gy[0];
  int last = gy->meta.ndim - 1;
  if (g->needs[0]) g->gx[0] = times(g, gy, g->x[1]);
  if (g->needs[1] && !added(g, gy, g->x[0]))
    g->gx[1] = orr_g(g, &rows_product, NULL, 2, gy, g->x[0]);
  if (g->n_in > 2 && g->needs[2])
    g->gx[2] = last > 0 ? orr_g_sum(g, gy, (1u << last) - 1, false) : gy;
  return g->status;
}

static const orr_op linear = {.name = "linear",
                              .args = "t t t?",
                              .flags = ORR_OP_LAYER | ORR_OP_SUM_GRAD | ORR_OP_NARROW,
                              .partial = ORR_SUM,
                              .save = ORR_SAVE_IN(0) | ORR_SAVE_IN(1),
                              .n_in = 2,
                              .n_out = 1,
                              .infer = infer_linear,
                              .label = label_linear,
                              .rule = rule_linear,
                              .run = run_linear,
                              .grad = grad_linear};

const orr_op *const orr_ops_matmul[] = {&orr_op_matmul, &rows_product, &rows_product_add_,
                                        &linear, NULL};
