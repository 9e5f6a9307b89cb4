/* cuda_blas_plan.c: how cuBLASLt does a product: asked once a shape, kept in the device's
 * table.
 *
 * Invariant: a device's table is used by the one thread that drives its queues. A plan depends
 * on its key alone (sizes, strides, types, alignments, what the user allows), never on when or
 * where the data came; a key that cuBLASLt refuses is kept too.
 * cuBLASLt counts by columns: c by rows is its c transposed, c^T (N, M) = b^T (N, K) a^T (K,
 * M).
 * To add what changes the choice: a member of `key`.
 */
#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

enum { WORKSPACE = 32 << 20, MOST_ALIGNMENT = 256 };

typedef struct key {
  int64_t m, n, k, batch, ld[3], stride[3];
  int32_t align[3], dtype;
  int32_t by_column[2], bias, tf32;
} key;

typedef struct orr_cuda_plan {
  key key;
  bool works;
  cublasLtMatmulDesc_t op;
  cublasLtMatrixLayout_t layout[3]; /* of b, a, c: what cuBLASLt calls A, B, C */
  cublasLtMatmulAlgo_t algorithm;
  size_t room;
} orr_cuda_plan;

struct orr_cuda_blas {
  cublasLtHandle_t handle;
  orr_cuda_table plans;
};

static orr_status failed(orr_cuda_device *d, cublasStatus_t status) {
  (void)orr_cuda_library(d->gpu, "cuBLASLt", cublasLtGetStatusString(status));
  return ORR_EDEVICE;
}

/* ---- opening and closing ---- */

static void plan_free(void *take_plan) {
  orr_cuda_plan *p = take_plan;
  for (int k = 0; k < 3; k++)
    if (p->layout[k]) cublasLtMatrixLayoutDestroy(p->layout[k]);
  if (p->op) cublasLtMatmulDescDestroy(p->op);
  free(p);
}

static orr_status open_blas(orr_cuda_device *d) {
  struct orr_cuda_blas *blas = calloc(1, sizeof *blas);
  if (!blas) return orr_fail(ORR_EMEM, "out of host memory for the products of %s", d->name);
  blas->plans = (orr_cuda_table){.key_bytes = sizeof(key), .entry_free = plan_free};
  cublasStatus_t status = cublasLtCreate(&blas->handle);
  if (status) {
    free(blas);
    return failed(d, status);
  }
  d->blas = blas;
  return ORR_OK;
}

void orr_cuda_blas_close(orr_cuda_device *d) {
  if (!d->blas) return;
  cudaSetDevice(d->gpu->ordinal);
  orr_cuda_table_clear(&d->blas->plans);
  cublasLtDestroy(d->blas->handle);
  free(d->blas);
  d->blas = NULL;
}

/* ---- a plan ---- */

static int alignment(const orr_cuda_matrix *m, const orr_cuda_gemm *g) {
  uintptr_t bits = (uintptr_t)m->data | MOST_ALIGNMENT;
  if (g->batch > 1) bits |= (uintptr_t)(m->batch_stride * orr_cuda_size_of(g->dtype));
  return (int)(bits & -bits);
}

static key key_of(const orr_cuda_gemm *g) {
  const orr_cuda_matrix *m[3] = {&g->b, &g->a, &g->c};
  key key;
  memset(&key, 0, sizeof key); /* padding is compared too */
  key.m = g->m;
  key.n = g->n;
  key.k = g->k;
  key.batch = g->batch;
  for (int k = 0; k < 3; k++) {
    key.ld[k] = m[k]->ld;
    key.stride[k] = g->batch > 1 ? m[k]->batch_stride : 0;
    key.align[k] = alignment(m[k], g);
  }
  key.by_column[0] = g->b.by_column;
  key.by_column[1] = g->a.by_column;
  key.dtype = (int32_t)g->dtype;
  key.bias = g->bias != NULL;
  key.tf32 = g->dtype == ORR_F32 && atomic_load(&orr_cuda_machine.tf32);
  return key;
}

static cudaDataType_t type_of(int32_t dtype) {
  static const cudaDataType_t type[] = {[ORR_F64] = CUDA_R_64F,
                                        [ORR_F32] = CUDA_R_32F,
                                        [ORR_F16] = CUDA_R_16F,
                                        [ORR_BF16] = CUDA_R_16BF};
  return type[dtype];
}

static cublasStatus_t make_op(orr_cuda_plan *p, const void *bias) {
  const key *key = &p->key;
  cublasComputeType_t compute = key->dtype == ORR_F64 ? CUBLAS_COMPUTE_64F
                                : key->tf32           ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                      : CUBLAS_COMPUTE_32F;
  cublasStatus_t status = cublasLtMatmulDescCreate(
      &p->op, compute, key->dtype == ORR_F64 ? CUDA_R_64F : CUDA_R_32F);
  static const cublasLtMatmulDescAttributes_t side[] = {CUBLASLT_MATMUL_DESC_TRANSA,
                                                        CUBLASLT_MATMUL_DESC_TRANSB};
  for (int k = 0; k < 2 && !status; k++) {
    cublasOperation_t turn = key->by_column[k] ? CUBLAS_OP_T : CUBLAS_OP_N;
    status = cublasLtMatmulDescSetAttribute(p->op, side[k], &turn, sizeof turn);
  }
  if (status || !key->bias) return status;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  status = cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                          sizeof epilogue);
  if (status) return status;
  return cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                        sizeof bias);
}

/* As stored: a matrix by rows is, by columns, its transpose. */
static cublasStatus_t make_layout(orr_cuda_plan *p, int which, int64_t rows, int64_t cols) {
  const key *key = &p->key;
  int32_t batch = (int32_t)key->batch;
  bool by_column = which < 2 && key->by_column[which];
  cublasStatus_t status = cublasLtMatrixLayoutCreate(
      &p->layout[which], type_of(key->dtype), (uint64_t)(by_column ? rows : cols),
      (uint64_t)(by_column ? cols : rows), key->ld[which]);
  if (status || batch == 1) return status;
  status = cublasLtMatrixLayoutSetAttribute(
      p->layout[which], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch);
  if (status) return status;
  return cublasLtMatrixLayoutSetAttribute(p->layout[which],
                                          CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                          &key->stride[which], sizeof key->stride[which]);
}

static cublasStatus_t make_layouts(orr_cuda_plan *p) {
  const key *key = &p->key;
  cublasStatus_t status = make_layout(p, 0, key->k, key->n);
  if (!status) status = make_layout(p, 1, key->m, key->k);
  return status ? status : make_layout(p, 2, key->m, key->n);
}

/* f16 and bf16 that are summed in several parts are rounded once, in f32. */
static cublasStatus_t set_preference(cublasLtMatmulPreference_t preference, const key *key) {
  static const cublasLtMatmulPreferenceAttributes_t align[] = {
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
  uint64_t room = WORKSPACE;
  uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(
      preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
  if (!status)
    status = cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes);
  for (int k = 0; k < 4 && !status; k++) {
    uint32_t bytes = (uint32_t)key->align[k < 3 ? k : 2];
    status = cublasLtMatmulPreferenceSetAttribute(preference, align[k], &bytes, sizeof bytes);
  }
  return status;
}

/* No result: works stays false. */
static cublasStatus_t ask(cublasLtHandle_t handle, orr_cuda_plan *p) {
  cublasLtMatmulPreference_t preference;
  cublasLtMatmulHeuristicResult_t result;
  int n = 0;
  cublasStatus_t status = cublasLtMatmulPreferenceCreate(&preference);
  if (status) return status;
  status = set_preference(preference, &p->key);
  if (!status)
    status =
        cublasLtMatmulAlgoGetHeuristic(handle, p->op, p->layout[0], p->layout[1], p->layout[2],
                                       p->layout[2], preference, 1, &result, &n);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE)
    return CUBLAS_STATUS_SUCCESS;
  if (status || n == 0 || result.state) return status;
  p->algorithm = result.algo;
  p->room = result.workspaceSize;
  p->works = true;
  return status;
}

static orr_status new_plan(orr_cuda_device *d, const key *key, const void *bias,
                           orr_cuda_plan **out) {
  orr_cuda_plan *p = calloc(1, sizeof *p);
  if (!p) return orr_fail(ORR_EMEM, "out of host memory for the products of %s", d->name);
  p->key = *key;
  cublasStatus_t status = make_op(p, bias);
  if (!status) status = make_layouts(p);
  if (!status) status = ask(d->blas->handle, p);
  if (status) {
    plan_free(p);
    return failed(d, status);
  }
  *out = p;
  return ORR_OK;
}

orr_status orr_cuda_gemm_plan(orr_cuda_device *d, const orr_cuda_gemm *g, orr_cuda_plan **out) {
  key key = key_of(g);
  *out = NULL;
  if (g->batch > INT32_MAX) return ORR_OK;
  if (!d->blas) ORR_TRY(open_blas(d));
  orr_cuda_plan *p = orr_cuda_table_find(&d->blas->plans, &key);
  if (!p) {
    ORR_TRY(new_plan(d, &key, g->bias, &p));
    ORR_TRY(orr_cuda_table_add(&d->blas->plans, p));
  }
  if (p->works) *out = p;
  return ORR_OK;
}

size_t orr_cuda_gemm_room(const orr_cuda_plan *p) { return p->room; }

/* ---- running ---- */

orr_status orr_cuda_gemm_run(orr_cuda_queue *s, orr_cuda_plan *p, const orr_cuda_gemm *g,
                             void *room) {
  const float one = 1, beta = g->accumulate ? 1 : 0;
  const double one64 = 1, beta64 = g->accumulate ? 1 : 0;
  bool wide = g->dtype == ORR_F64;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  if (g->bias)
    status = cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias,
                                            sizeof g->bias);
  if (!status)
    status = cublasLtMatmul(s->device->blas->handle, p->op, wide ? (const void *)&one64 : &one,
                            g->b.data, p->layout[0], g->a.data, p->layout[1],
                            wide ? (const void *)&beta64 : &beta, g->c.data, p->layout[2],
                            g->c.data, p->layout[2], &p->algorithm, room, p->room, s->issue);
  return status ? failed(s->device, status) : ORR_OK;
}
