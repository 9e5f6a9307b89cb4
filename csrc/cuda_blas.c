/* cuda_blas.c: the product of matrices on CUDA, by cuBLASLt where it takes the types and
 * strides, else by the tiles of kernels/matmul.cu.
 *
 * Invariant: f16 and bf16 are summed in f32; f32 by tf32 only where the user allows it. One
 * shape on one GPU always takes the same way, so results repeat.
 * To add an epilogue: a member of orr_cuda_gemm, its attribute in cuda_blas_plan.c.
 */
#include "cuda.h"
#include "view.h"

enum { MATRIX_ALIGNMENT = 256, BIAS_ALIGNMENT = 16 };

/* ---- views as matrices ---- */

/* The last two dims of v; false where no leading dimension says them. */
static bool as_matrix(const orr_view *v, orr_cuda_matrix *out) {
  int r = v->ndim - 2;
  int64_t rows = v->shape[r], cols = v->shape[r + 1];
  int64_t by_row = v->stride[r], by_col = v->stride[r + 1];
  out->data = v->data;
  out->batch_stride = v->ndim > 2 && v->shape[0] > 1 ? v->stride[0] : 0;
  if ((by_col == 1 || cols == 1) && (by_row >= cols || rows == 1)) {
    out->by_column = false;
    out->ld = rows == 1 ? cols : by_row;
    return true;
  }
  if ((by_row == 1 || rows == 1) && (by_col >= rows || cols == 1)) {
    out->by_column = true;
    out->ld = cols == 1 ? rows : by_col;
    return true;
  }
  return false;
}

static orr_view turned(const orr_view *v) {
  orr_view t = *v;
  int r = v->ndim - 2;
  t.shape[r] = v->shape[r + 1];
  t.shape[r + 1] = v->shape[r];
  t.stride[r] = v->stride[r + 1];
  t.stride[r + 1] = v->stride[r];
  return t;
}

static orr_view first_of(const orr_view *v, int64_t k) {
  orr_view part = *v;
  part.data = (char *)v->data + k * v->stride[0] * orr_cuda_size_of(v->dtype);
  orr_view_drop(&part, 0);
  return part;
}

static void join_batches(orr_view *a, orr_view *b, orr_view *c) {
  while (c->ndim > 3) {
    int64_t sa, sb, sc;
    if (!orr_view_joins(a, 0, &sa) || !orr_view_joins(b, 0, &sb) || !orr_view_joins(c, 0, &sc))
      return;
    orr_view_join(a, 0, sa);
    orr_view_join(b, 0, sb);
    orr_view_join(c, 0, sc);
  }
}

/* ---- the bias, before the product ---- */

static void start_with_bias(const orr_view *bias, const orr_view *c) {
  orr_view y = *c, rows = *c;
  if (!bias) {
    orr_cuda_fill(&y, 0);
    return;
  }
  rows.data = bias->data;
  for (int d = 0; d < c->ndim; d++) rows.stride[d] = 0;
  rows.stride[c->ndim - 1] = bias->stride[0];
  orr_cuda_copy(&rows, &y);
}

static bool for_epilogue(const orr_view *bias, const orr_view *c) {
  return c->dtype != ORR_F64 && (bias->stride[0] == 1 || bias->shape[0] == 1) &&
         (uintptr_t)bias->data % BIAS_ALIGNMENT == 0;
}

/* ---- one product, or one batch ---- */

/* What does not fit is copied; the copies stand in the room before the plan's own. */
typedef struct copies {
  orr_view view[2];
  bool is_needed[2];
  size_t offset[2], bytes;
} copies;

static void plan_copy(copies *k, int which, const orr_view *v, orr_cuda_matrix *m) {
  k->view[which] = *v;
  k->is_needed[which] = !as_matrix(v, m);
  if (!k->is_needed[which]) return;
  size_t bytes = (size_t)orr_cuda_bytes(v);
  orr_view packed = orr_cuda_packed(v, NULL);
  as_matrix(&packed, m);
  k->offset[which] = k->bytes;
  k->bytes += (bytes + MATRIX_ALIGNMENT - 1) / MATRIX_ALIGNMENT * MATRIX_ALIGNMENT;
}

static void make_copies(const copies *k, char *room, orr_cuda_gemm *g) {
  for (int which = 0; which < 2; which++) {
    if (!k->is_needed[which]) continue;
    orr_view packed = orr_cuda_packed(&k->view[which], room + k->offset[which]);
    orr_cuda_copy(&k->view[which], &packed);
    (which ? &g->b : &g->a)->data = packed.data;
  }
}

/* Without a plan nothing has been launched; *done tells. */
static orr_status by_library(orr_cuda_queue *s, orr_cuda_gemm *g, const copies *k, bool *done) {
  struct orr_cuda_plan *plan;
  char *room = NULL;
  ORR_TRY(orr_cuda_gemm_plan(s->device, g, &plan));
  *done = plan != NULL;
  if (!plan) return ORR_OK;
  size_t bytes = k->bytes + orr_cuda_gemm_room(plan);
  if (bytes) {
    room = orr_cuda_room(bytes);
    if (!room) return orr_cuda_recorded(s);
    make_copies(k, room, g);
    room += k->bytes;
  }
  return orr_cuda_gemm_run(s, plan, g, room);
}

static orr_cuda_gemm gemm_of(const orr_view *a, const orr_view *c, bool accumulate) {
  int r = c->ndim - 2;
  return (orr_cuda_gemm){.dtype = c->dtype,
                         .m = c->shape[r],
                         .n = c->shape[r + 1],
                         .k = a->shape[r + 1],
                         .batch = c->ndim > 2 ? c->shape[0] : 1,
                         .accumulate = accumulate};
}

static orr_status one_product(orr_cuda_queue *s, const orr_view *a, const orr_view *b,
                              const orr_view *bias, const orr_view *c, bool accumulate) {
  orr_cuda_gemm g = gemm_of(a, c, accumulate);
  copies k = {.bytes = 0};
  bool done = false;
  if (c->dtype > ORR_BF16 || !as_matrix(c, &g.c))
    return orr_cuda_tiled_product(a, b, bias, c, accumulate);
  if (g.c.by_column) { /* its transpose, by rows */
    orr_view at = turned(a), bt = turned(b), ct = turned(c);
    if (bias) start_with_bias(bias, c);
    return one_product(s, &bt, &at, NULL, &ct, accumulate || bias);
  }
  plan_copy(&k, 0, a, &g.a);
  plan_copy(&k, 1, b, &g.b);
  if (bias && !accumulate && for_epilogue(bias, c)) {
    g.bias = bias->data;
    ORR_TRY(by_library(s, &g, &k, &done));
    g.bias = NULL;
    if (done) return ORR_OK;
  }
  if (bias && !accumulate) start_with_bias(bias, c);
  g.accumulate = accumulate || bias;
  ORR_TRY(by_library(s, &g, &k, &done));
  return done ? ORR_OK : orr_cuda_tiled_product(a, b, NULL, c, g.accumulate);
}

/* Several batch dims that are no single one: one by one along the first. */
static orr_status products(orr_cuda_queue *s, const orr_view *a, const orr_view *b,
                           const orr_view *bias, const orr_view *c, bool accumulate) {
  if (c->ndim <= 3) return one_product(s, a, b, bias, c, accumulate);
  for (int64_t k = 0; k < c->shape[0]; k++) {
    orr_view part_a = first_of(a, k), part_b = first_of(b, k), part_c = first_of(c, k);
    ORR_TRY(products(s, &part_a, &part_b, bias, &part_c, accumulate));
  }
  return ORR_OK;
}

orr_status orr_cuda_product(const orr_view *a_in, const orr_view *b_in, const orr_view *bias,
                            const orr_view *c_in, bool accumulate) {
  orr_view a = *a_in, b = *b_in, c = *c_in;
  orr_cuda_queue *s = orr_cuda_current();
  if (!s) return orr_fail(ORR_EDEVICE, "a product was launched outside of a queue");
  if (orr_cuda_numel(&c) == 0) return ORR_OK;
  if (a.shape[a.ndim - 1] == 0) {
    if (!accumulate) start_with_bias(bias, &c);
    return ORR_OK;
  }
  orr_view_merge_rows(&a, &b, &c);
  join_batches(&a, &b, &c);
  return products(s, &a, &b, bias, &c, accumulate);
}
