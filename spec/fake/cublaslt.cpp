/* cublaslt.cpp: the fake cuBLASLt: products of matrices by columns, on lazy streams.
 *
 * Invariant: D = alpha op(A) op(B) + beta C + bias, summed in double and rounded once. What the
 * library would refuse (a leading dimension too small, types that differ) is refused.
 * To add an epilogue: its case in `product::run`.
 */
#include "include/cublasLt.h"

#include <cstring>

#include "fake.h"
#include "number.h"

struct orr_fake_blas {
  int device;
};
struct orr_fake_blas_op {
  cublasComputeType_t compute;
  cublasOperation_t turn[2];
  cublasLtEpilogue_t epilogue;
  const void *bias;
};
struct orr_fake_blas_layout {
  cudaDataType_t type;
  int64_t rows, cols, ld, stride;
  int32_t batch;
};
struct orr_fake_blas_preference {
  uint64_t room;
};

namespace {

orr_fake_type type_of(cudaDataType_t t) {
  switch (t) {
    case CUDA_R_64F: return FAKE_F64;
    case CUDA_R_16F: return FAKE_F16;
    case CUDA_R_16BF: return FAKE_BF16;
    default: return FAKE_F32;
  }
}

struct product {
  orr_fake_blas_op op;
  orr_fake_blas_layout la, lb, lc;
  const char *a, *b, *c;
  char *d;
  double alpha, beta;
  double at(const char *p, const orr_fake_blas_layout &l, int64_t batch, int64_t i, int64_t j,
            bool turned) const {
    return orr_fake_get(p, type_of(l.type), batch * l.stride + (turned ? j + i * l.ld : i + j * l.ld));
  }
  void run() const {
    int64_t k_size = op.turn[0] == CUBLAS_OP_T ? la.rows : la.cols;
    for (int64_t t = 0; t < lc.batch; t++)
      for (int64_t j = 0; j < lc.cols; j++)
        for (int64_t i = 0; i < lc.rows; i++) {
          double sum = 0;
          for (int64_t k = 0; k < k_size; k++)
            sum += at(a, la, t, i, k, op.turn[0] == CUBLAS_OP_T) *
                   at(b, lb, t, k, j, op.turn[1] == CUBLAS_OP_T);
          sum *= alpha;
          if (beta != 0) sum += beta * at(c, lc, t, i, j, false);
          if (op.epilogue == CUBLASLT_EPILOGUE_BIAS)
            sum += orr_fake_get(op.bias, type_of(lc.type), i);
          orr_fake_put(d, type_of(lc.type), t * lc.stride + i + j * lc.ld, sum);
        }
  }
};

bool fits(const orr_fake_blas_op *op, const orr_fake_blas_layout *a,
          const orr_fake_blas_layout *b, const orr_fake_blas_layout *c) {
  bool ta = op->turn[0] == CUBLAS_OP_T, tb = op->turn[1] == CUBLAS_OP_T;
  if (a->type != c->type || b->type != c->type) return false;
  if (a->ld < a->rows || b->ld < b->rows || c->ld < c->rows) return false;
  if (a->batch != c->batch || b->batch != c->batch) return false;
  return (ta ? a->cols : a->rows) == c->rows && (tb ? b->rows : b->cols) == c->cols &&
         (ta ? a->rows : a->cols) == (tb ? b->cols : b->rows);
}

}  // namespace

extern "C" {

#define CALL(name) FAKE_CALL(name, CUBLAS_STATUS_EXECUTION_FAILED)

cublasStatus_t cublasLtCreate(cublasLtHandle_t *out) {
  CALL("cublasLtCreate");
  *out = new orr_fake_blas{0};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  CALL("cublasLtDestroy");
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "execution failed";
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                        cudaDataType_t) {
  CALL("cublasLtMatmulDescCreate");
  *out = new orr_fake_blas_op{
      compute, {CUBLAS_OP_N, CUBLAS_OP_N}, CUBLASLT_EPILOGUE_DEFAULT, nullptr};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t op) {
  CALL("cublasLtMatmulDescDestroy");
  delete op;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t op,
                                              cublasLtMatmulDescAttributes_t attr,
                                              const void *value, size_t bytes) {
  CALL("cublasLtMatmulDescSetAttribute");
  void *to = attr == CUBLASLT_MATMUL_DESC_EPILOGUE       ? (void *)&op->epilogue
             : attr == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? (void *)&op->bias
                                                         : (void *)&op->turn[attr];
  memcpy(to, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  CALL("cublasLtMatrixLayoutCreate");
  *out = new orr_fake_blas_layout{type, (int64_t)rows, (int64_t)cols, ld, 0, 1};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  CALL("cublasLtMatrixLayoutDestroy");
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attr,
                                                const void *value, size_t bytes) {
  CALL("cublasLtMatrixLayoutSetAttribute");
  if (attr == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) memcpy(&layout->batch, value, bytes);
  else memcpy(&layout->stride, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) {
  CALL("cublasLtMatmulPreferenceCreate");
  *out = new orr_fake_blas_preference{0};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  CALL("cublasLtMatmulPreferenceDestroy");
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void *value, size_t bytes) {
  CALL("cublasLtMatmulPreferenceSetAttribute");
  if (attr == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) memcpy(&preference->room, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t,
    cublasLtMatmulPreference_t preference, int, cublasLtMatmulHeuristicResult_t *results,
    int *found) {
  CALL("cublasLtMatmulAlgoGetHeuristic");
  *found = 0;
  if (!fits(op, a, b, c)) return CUBLAS_STATUS_NOT_SUPPORTED;
  memset(results, 0, sizeof *results);
  results->workspaceSize = preference->room < 256 ? preference->room : 256;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t op, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t la, const void *b,
                              cublasLtMatrixLayout_t lb, const void *beta, const void *c,
                              cublasLtMatrixLayout_t lc, void *d, cublasLtMatrixLayout_t,
                              const cublasLtMatmulAlgo_t *, void *workspace, size_t bytes,
                              cudaStream_t stream) {
  CALL("cublasLtMatmul");
  if (!fits(op, la, lb, lc)) return CUBLAS_STATUS_INVALID_VALUE;
  if (bytes && !orr_fake_is_device(workspace, bytes)) {
    orr_fake_complain("cublasLtMatmul: its workspace is not %zu bytes of device memory", bytes);
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  bool wide = op->compute == CUBLAS_COMPUTE_64F;
  product p = {*op, *la, *lb, *lc, (const char *)a, (const char *)b, (const char *)c, (char *)d, 0, 0};
  p.alpha = wide ? *(const double *)alpha : *(const float *)alpha;
  p.beta = wide ? *(const double *)beta : *(const float *)beta;
  cudaError_t status = orr_fake_push(stream, "cublasLtMatmul", [=]() { p.run(); });
  return status == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // extern "C"
