/* cublaslt.cpp: the fake cuBLASLt: products of matrices by columns, on lazy streams.
 *
 * Invariant: D = alpha op(A) op(B) + beta C + bias, summed in double and rounded once; tf32
 * rounds what is multiplied. What the library would refuse (a leading dimension too small,
 * types that differ) is refused; pointers are checked against the layouts, and against the
 * alignment that the algorithm was asked for.
 * To add an epilogue: its case in `product::run`.
 */
#include "include/cublasLt.h"

#include <cstring>

#include "device.h"
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
  uint32_t alignment[4];
};

namespace {

const char *const a_handle = "a handle of cuBLASLt";
const char *const an_op = "a product of cuBLASLt";
const char *const a_layout = "a layout of cuBLASLt";
const char *const a_preference = "a preference of cuBLASLt";

/* What an algorithm remembers in its data. */
enum { ALIGNMENT_OF_A, ROOM_OF_ALGORITHM = 4, IS_ALGORITHM, THIS_IS_ONE = 0x60D };

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
    double x = orr_fake_get(p, type_of(l.type),
                            batch * l.stride + (turned ? j + i * l.ld : i + j * l.ld));
    return op.compute == CUBLAS_COMPUTE_32F_FAST_TF32 ? orr_fake_tf32(x) : x;
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
          if (beta != 0)
            sum += beta * orr_fake_get(c, type_of(lc.type), t * lc.stride + i + j * lc.ld);
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

size_t bytes_of(const orr_fake_blas_layout *l) {
  int64_t last = (l->batch - 1) * l->stride + (l->cols - 1) * l->ld + l->rows;
  return (size_t)last * orr_fake_size(type_of(l->type));
}

/* The operand lies where the device can use it, as aligned as was promised. */
bool is_there(int device, const void *p, const orr_fake_blas_layout *l, uint64_t alignment,
              const char *name) {
  if (!orr_fake_may_use(device, p, bytes_of(l), name)) return false;
  if (!alignment || (uintptr_t)p % alignment == 0) return true;
  orr_fake_complain("%s is not aligned to %lu bytes, which the algorithm was asked for", name,
                    (unsigned long)alignment);
  return false;
}

bool are(cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
         cublasLtMatrixLayout_t c) {
  return orr_fake_is(op, an_op) && orr_fake_is(a, a_layout) && orr_fake_is(b, a_layout) &&
         orr_fake_is(c, a_layout);
}

} // namespace

extern "C" {

#define INJECTED                                                   \
  (orr_fake_kind_now() == FAKE_MEMORY ? CUBLAS_STATUS_ALLOC_FAILED \
                                      : CUBLAS_STATUS_EXECUTION_FAILED)
#define CALL(name) FAKE_CALL(name, INJECTED)

cublasStatus_t cublasLtCreate(cublasLtHandle_t *out) {
  CALL("cublasLtCreate");
  *out = new orr_fake_blas{orr_fake_current()};
  orr_fake_born(*out, a_handle);
  return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t end_handle(cublasLtHandle_t handle) {
  if (!orr_fake_is(handle, a_handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  orr_fake_gone(handle);
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

FAKE_RELEASE(cublasStatus_t, cublasLtDestroy, cublasLtHandle_t, handle, INJECTED, end_handle)

const char *cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "CUBLAS_STATUS_EXECUTION_FAILED";
  }
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                        cudaDataType_t) {
  CALL("cublasLtMatmulDescCreate");
  *out = new orr_fake_blas_op{
      compute, {CUBLAS_OP_N, CUBLAS_OP_N}, CUBLASLT_EPILOGUE_DEFAULT, nullptr};
  orr_fake_born(*out, an_op);
  return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t end_op(cublasLtMatmulDesc_t op) {
  if (!orr_fake_is(op, an_op)) return CUBLAS_STATUS_INVALID_VALUE;
  orr_fake_gone(op);
  delete op;
  return CUBLAS_STATUS_SUCCESS;
}

FAKE_RELEASE(cublasStatus_t, cublasLtMatmulDescDestroy, cublasLtMatmulDesc_t, op, INJECTED,
             end_op)

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t op,
                                              cublasLtMatmulDescAttributes_t attr,
                                              const void *value, size_t bytes) {
  CALL("cublasLtMatmulDescSetAttribute");
  if (!orr_fake_is(op, an_op)) return CUBLAS_STATUS_INVALID_VALUE;
  void *to = attr == CUBLASLT_MATMUL_DESC_EPILOGUE       ? (void *)&op->epilogue
             : attr == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? (void *)&op->bias
                                                         : (void *)&op->turn[attr];
  if (bytes != (attr == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? 8 : 4))
    return CUBLAS_STATUS_INVALID_VALUE;
  memcpy(to, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  CALL("cublasLtMatrixLayoutCreate");
  *out = new orr_fake_blas_layout{type, (int64_t)rows, (int64_t)cols, ld, 0, 1};
  orr_fake_born(*out, a_layout);
  return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t end_layout(cublasLtMatrixLayout_t layout) {
  if (!orr_fake_is(layout, a_layout)) return CUBLAS_STATUS_INVALID_VALUE;
  orr_fake_gone(layout);
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

FAKE_RELEASE(cublasStatus_t, cublasLtMatrixLayoutDestroy, cublasLtMatrixLayout_t, layout,
             INJECTED, end_layout)

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attr,
                                                const void *value, size_t bytes) {
  CALL("cublasLtMatrixLayoutSetAttribute");
  if (!orr_fake_is(layout, a_layout) ||
      bytes != (attr == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT ? 4 : 8))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (attr == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) memcpy(&layout->batch, value, bytes);
  else memcpy(&layout->stride, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) {
  CALL("cublasLtMatmulPreferenceCreate");
  *out = new orr_fake_blas_preference{0, {256, 256, 256, 256}};
  orr_fake_born(*out, a_preference);
  return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t end_preference(cublasLtMatmulPreference_t preference) {
  if (!orr_fake_is(preference, a_preference)) return CUBLAS_STATUS_INVALID_VALUE;
  orr_fake_gone(preference);
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}

FAKE_RELEASE(cublasStatus_t, cublasLtMatmulPreferenceDestroy, cublasLtMatmulPreference_t,
             preference, INJECTED, end_preference)

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void *value, size_t bytes) {
  CALL("cublasLtMatmulPreferenceSetAttribute");
  if (!orr_fake_is(preference, a_preference) ||
      bytes != (attr == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4))
    return CUBLAS_STATUS_INVALID_VALUE;
  int operand = attr - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
  if (attr == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) memcpy(&preference->room, value, bytes);
  else if (operand >= 0) memcpy(&preference->alignment[operand], value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int, cublasLtMatmulHeuristicResult_t *results,
    int *found) {
  CALL("cublasLtMatmulAlgoGetHeuristic");
  *found = 0;
  if (!orr_fake_is(handle, a_handle) || !are(op, a, b, c) || !orr_fake_is(d, a_layout) ||
      !orr_fake_is(preference, a_preference))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (!fits(op, a, b, c)) return CUBLAS_STATUS_NOT_SUPPORTED;
  memset(results, 0, sizeof *results);
  results->workspaceSize = preference->room < 256 ? preference->room : 256;
  for (int k = 0; k < 4; k++) results->algo.data[ALIGNMENT_OF_A + k] = preference->alignment[k];
  results->algo.data[ROOM_OF_ALGORITHM] = results->workspaceSize;
  results->algo.data[IS_ALGORITHM] = THIS_IS_ONE;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t op,
                              const void *alpha, const void *a, cublasLtMatrixLayout_t la,
                              const void *b, cublasLtMatrixLayout_t lb, const void *beta,
                              const void *c, cublasLtMatrixLayout_t lc, void *d,
                              cublasLtMatrixLayout_t ld, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t bytes, cudaStream_t stream) {
  CALL("cublasLtMatmul");
  if (!orr_fake_is(handle, a_handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!orr_fake_is(stream, "a stream") || !are(op, la, lb, lc) || !orr_fake_is(ld, a_layout) ||
      !fits(op, la, lb, lc) || bytes_of(ld) != bytes_of(lc))
    return CUBLAS_STATUS_INVALID_VALUE;
  int device = orr_fake_device_of(stream);
  if (device != handle->device || algo->data[IS_ALGORITHM] != THIS_IS_ONE ||
      algo->data[ROOM_OF_ALGORITHM] > bytes) {
    orr_fake_complain(
        "cublasLtMatmul: a handle of another device, or an algorithm that the "
        "heuristic did not give for so much workspace");
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const uint64_t *alignment = &algo->data[ALIGNMENT_OF_A];
  if (!is_there(device, a, la, alignment[0], "A") ||
      !is_there(device, b, lb, alignment[1], "B") ||
      !is_there(device, c, lc, alignment[2], "C") ||
      !is_there(device, d, ld, alignment[3], "D") ||
      (bytes && !orr_fake_may_use(device, workspace, bytes, "cublasLtMatmul's workspace")) ||
      (op->epilogue == CUBLASLT_EPILOGUE_BIAS &&
       !orr_fake_may_use(device, op->bias, (size_t)lc->rows * orr_fake_size(type_of(lc->type)),
                         "cublasLtMatmul's bias")))
    return CUBLAS_STATUS_INVALID_VALUE;
  bool wide = op->compute == CUBLAS_COMPUTE_64F;
  product p = {*op,       *la, *lb, *lc, (const char *)a, (const char *)b, (const char *)c,
               (char *)d, 0,   0};
  p.alpha = wide ? *(const double *)alpha : *(const float *)alpha;
  p.beta = wide ? *(const double *)beta : *(const float *)beta;
  cudaError_t status = orr_fake_push(stream, "cublasLtMatmul", [=]() { p.run(); });
  return status == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

} // extern "C"
