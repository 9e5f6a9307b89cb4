/* libraries.cpp: the fakes of NCCL, cuBLASLt and cuDNN: right numbers, and each misuse found.
 * To add a check: process.h.
 */
#include <cmath>
#include <functional>

#include "cublasLt.h"
#include "cudnn.h"
#include "nccl.h"
#include "process.h"

static cudaStream_t stream_on(int device) {
  cudaStream_t s;
  NEED(cudaSetDevice(device) == cudaSuccess);
  NEED(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  return s;
}

template <typename T>
static T *on(int device, const std::vector<T> &values) {
  void *p;
  NEED(cudaSetDevice(device) == cudaSuccess);
  NEED(cudaMalloc(&p, values.size() * sizeof(T)) == cudaSuccess);
  NEED(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice) ==
       cudaSuccess);
  return (T *)p;
}

template <typename T>
static std::vector<T> read(const T *device, size_t n) {
  std::vector<T> values(n);
  NEED(cudaMemcpy(values.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
  return values;
}

static void finish(const std::vector<cudaStream_t> &streams) {
  for (cudaStream_t s : streams) NEED(cudaStreamSynchronize(s) == cudaSuccess);
}

/* ---- NCCL ---- */

enum { RANKS = 3 };
struct Ranks {
  ncclComm_t comm[RANKS];
  std::vector<cudaStream_t> stream;
  Ranks() {
    static const int devices[RANKS] = {2, 0, 1};
    NEED(ncclCommInitAll(comm, RANKS, devices) == ncclSuccess);
    for (int d : devices) stream.push_back(stream_on(d));
  }
  static int device(int r) { return (r + 2) % 3; }
};

static void all_reduce() {
  Ranks r;
  float *x[RANKS];
  int64_t *big[RANKS];
  for (int k = 0; k < RANKS; k++) {
    x[k] = on<float>(Ranks::device(k), {1.f + (float)k, -5.f * (float)k});
    big[k] = on<int64_t>(Ranks::device(k), {((int64_t)1 << 60) + k});
  }
  NEED(ncclGroupStart() == ncclSuccess);
  for (int k = 0; k < RANKS; k++) {
    NEED(!ncclAllReduce(x[k], x[k], 2, ncclFloat32, ncclSum, r.comm[k], r.stream[(size_t)k]));
    NEED(!ncclAllReduce(big[k], big[k], 1, ncclInt64, ncclMax, r.comm[k], r.stream[(size_t)k]));
  }
  NEED(ncclGroupEnd() == ncclSuccess);
  finish(r.stream);
  for (int k = 0; k < RANKS; k++) {
    NEED(read(x[k], 2) == (std::vector<float>{6, -15}));
    NEED(read(big[k], 1)[0] == ((int64_t)1 << 60) + 2);
    NEED(ncclCommDestroy(r.comm[k]) == ncclSuccess);
  }
  NEED(ncclCommDestroy(r.comm[0]) == ncclInvalidArgument);
  SAYS("a communicator that is not there");
}

static void gather_and_scatter() {
  Ranks r;
  int *part[RANKS], *whole[RANKS];
  for (int k = 0; k < RANKS; k++) {
    part[k] = on<int>(Ranks::device(k), {10 * k, 10 * k + 1});
    whole[k] = on<int>(Ranks::device(k), {0, 0, 0, 0, 0, 0});
  }
  for (int k = 0; k < RANKS; k++)
    NEED(!ncclAllGather(part[k], whole[k], 2, ncclInt32, r.comm[k], r.stream[(size_t)k]));
  for (int k = 0; k < RANKS; k++)
    NEED(!ncclReduceScatter(whole[k], part[k], 2, ncclInt32, ncclSum, r.comm[k],
                            r.stream[(size_t)k]));
  finish(r.stream);
  for (int k = 0; k < RANKS; k++) {
    NEED(read(whole[k], 6) == (std::vector<int>{0, 1, 10, 11, 20, 21}));
    NEED(read(part[k], 2) == (std::vector<int>{30 * k, 30 * k + 3}));
  }
}

static void rank_that_never_comes() {
  Ranks r;
  for (int k = 0; k < 2; k++) {
    int *x = on<int>(Ranks::device(k), {1});
    NEED(!ncclAllReduce(x, x, 1, ncclInt32, ncclSum, r.comm[k], r.stream[(size_t)k]));
  }
  NEED(cudaStreamSynchronize(r.stream[0]) == cudaErrorUnknown);
  SAYS("nothing can run, and a stream is waited for; the heads are [device 2: NCCL]");
  for (int k = 0; k < RANKS; k++) NEED(ncclCommAbort(r.comm[k]) == ncclSuccess);
  finish(r.stream);
}

/* A lost device leaves the others standing, until they are aborted. */
static void lost_rank() {
  Ranks r;
  int *x[RANKS];
  for (int k = 0; k < RANKS; k++) x[k] = on<int>(Ranks::device(k), {1});
  cudaSetDevice(Ranks::device(2));
  orr_fake_launch(r.stream[2], dim3(1), dim3(1), 0, []() { orr_fake_go_wrong("planted"); });
  for (int k = 0; k < RANKS; k++)
    NEED(!ncclAllReduce(x[k], x[k], 1, ncclInt32, ncclSum, r.comm[k], r.stream[(size_t)k]));
  NEED(cudaStreamSynchronize(r.stream[2]) == cudaErrorIllegalAddress);
  NEED(cudaStreamSynchronize(r.stream[0]) == cudaErrorUnknown);
  for (int k = 0; k < RANKS; k++) NEED(ncclCommAbort(r.comm[k]) == ncclSuccess);
  NEED(cudaStreamSynchronize(r.stream[0]) == cudaSuccess);
}

static void calls_that_differ() {
  Ranks r;
  int *x = on<int>(Ranks::device(0), {1, 2}), *y = on<int>(Ranks::device(1), {1, 2});
  ncclResult_t error;
  NEED(!ncclAllReduce(x, x, 2, ncclInt32, ncclSum, r.comm[0], r.stream[0]));
  NEED(ncclAllReduce(y, y, 2, ncclInt32, ncclMax, r.comm[1], r.stream[1]) == ncclInvalidUsage);
  SAYS("differs from that of the others");
  NEED(!ncclCommGetAsyncError(r.comm[0], &error) && error == ncclInvalidUsage);
}

static void bad_buffers() {
  Ranks r;
  int *mine = on<int>(Ranks::device(0), {1, 2, 3}), *theirs = on<int>(Ranks::device(1), {1});
  NEED(ncclAllReduce(mine, theirs, 1, ncclInt32, ncclSum, r.comm[0], r.stream[0]) ==
       ncclInvalidArgument);
  SAYS("NCCL's receive buffer: 4 bytes are not memory that device 2 can use");
  NEED(ncclAllReduce(mine, mine, 4, ncclInt32, ncclSum, r.comm[0], r.stream[0]) ==
       ncclInvalidArgument);
  NEED(ncclAllReduce(mine, mine + 1, 2, ncclInt32, ncclSum, r.comm[0], r.stream[0]) ==
       ncclInvalidArgument);
  SAYS("overlap");
  NEED(ncclAllReduce(mine, mine, 1, ncclInt32, ncclSum, r.comm[0], r.stream[1]) ==
       ncclInvalidArgument);
  SAYS("a stream of another device");
  ncclComm_t twice[2];
  const int same[2] = {1, 1};
  NEED(ncclCommInitAll(twice, 2, same) == ncclInvalidUsage);
}

/* ---- cuBLASLt ---- */

/* D (m, n) by columns = op(A) op(B) + bias; returns cublasLtMatmul's status. */
struct Product {
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t op;
  cublasLtMatrixLayout_t a, b, d;
  cublasLtMatmulPreference_t preference;
  cublasLtMatmulHeuristicResult_t found;
  void *room;
  Product(cublasComputeType_t compute, cudaDataType_t type, cublasOperation_t turn_a, int m,
          int n, int k) {
    uint64_t bytes = 1024;
    int count;
    NEED(!cublasLtCreate(&handle) && !cublasLtMatmulDescCreate(&op, compute, type));
    NEED(!cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &turn_a, 4));
    bool turned = turn_a == CUBLAS_OP_T;
    NEED(!cublasLtMatrixLayoutCreate(&a, type, (uint64_t)(turned ? k : m),
                                     (uint64_t)(turned ? m : k), turned ? k : m));
    NEED(!cublasLtMatrixLayoutCreate(&b, type, (uint64_t)k, (uint64_t)n, k));
    NEED(!cublasLtMatrixLayoutCreate(&d, type, (uint64_t)m, (uint64_t)n, m));
    NEED(!cublasLtMatmulPreferenceCreate(&preference));
    NEED(!cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes));
    NEED(
        !cublasLtMatmulAlgoGetHeuristic(handle, op, a, b, d, d, preference, 1, &found, &count));
    NEED(count == 1 && cudaMalloc(&room, 1024) == cudaSuccess);
  }
  cublasStatus_t run(const float *pa, const float *pb, float *pd, cudaStream_t s) {
    float one = 1, zero = 0;
    return cublasLtMatmul(handle, op, &one, pa, a, pb, b, &zero, pd, d, pd, d, &found.algo,
                          room, 1024, s);
  }
};

static void product() {
  enum { M = 3, N = 2, K = 4 };
  cudaStream_t s = stream_on(1);
  std::vector<float> a, b;
  for (int k = 0; k < M * K; k++) a.push_back((float)(k * k % 7));
  for (int k = 0; k < K * N; k++) b.push_back((float)(k % 5 - 2));
  float *pa = on(1, a), *pb = on(1, b), *pd = on(1, std::vector<float>(M * N));
  for (cublasOperation_t turn : {CUBLAS_OP_N, CUBLAS_OP_T}) {
    Product p(CUBLAS_COMPUTE_32F, CUDA_R_32F, turn, M, N, K);
    NEED(!p.run(pa, pb, pd, s) && cudaStreamSynchronize(s) == cudaSuccess);
    std::vector<float> d = read(pd, M * N);
    for (int i = 0; i < M; i++)
      for (int j = 0; j < N; j++) {
        float sum = 0;
        for (int k = 0; k < K; k++)
          sum +=
              a[(size_t)(turn == CUBLAS_OP_T ? i * K + k : k * M + i)] * b[(size_t)(j * K + k)];
        NEED(d[(size_t)(j * M + i)] == sum);
      }
  }
  SAYS("");
}

static void tf32() {
  cudaStream_t s = stream_on(0);
  float x = 1 + 1.f / 4096, *pa = on<float>(0, {x}), *pb = on<float>(0, {1}),
        *pd = on<float>(0, {0});
  Product exact(CUBLAS_COMPUTE_32F, CUDA_R_32F, CUBLAS_OP_N, 1, 1, 1);
  NEED(!exact.run(pa, pb, pd, s) && !cudaStreamSynchronize(s) && read(pd, 1)[0] == x);
  Product fast(CUBLAS_COMPUTE_32F_FAST_TF32, CUDA_R_32F, CUBLAS_OP_N, 1, 1, 1);
  NEED(!fast.run(pa, pb, pd, s) && !cudaStreamSynchronize(s) && read(pd, 1)[0] == 1);
}

static void bad_products() {
  cudaStream_t s = stream_on(0), other = stream_on(1);
  float *x = on(0, std::vector<float>(8));
  Product p(CUBLAS_COMPUTE_32F, CUDA_R_32F, CUBLAS_OP_N, 2, 2, 2);
  NEED(p.run(x + 1, x, x, s) == CUBLAS_STATUS_INVALID_VALUE);
  SAYS("A is not aligned to 256 bytes");
  NEED(p.run(x, x, x + 64, s) == CUBLAS_STATUS_INVALID_VALUE);
  SAYS("not memory that device 0 can use");
  NEED(p.run(x, x, x, other) == CUBLAS_STATUS_INVALID_VALUE);
  SAYS("a handle of another device");
  NEED(!cublasLtMatrixLayoutDestroy(p.b) && p.run(x, x, x, s) == CUBLAS_STATUS_INVALID_VALUE);
  SAYS("a layout of cuBLASLt that is not there");
}

/* ---- cuDNN ---- */

static cudnnBackendDescriptor_t part(cudnnBackendDescriptorType_t type) {
  cudnnBackendDescriptor_t p;
  NEED(!cudnnBackendCreateDescriptor(type, &p));
  return p;
}

static void unfinished_parts() {
  cudnnBackendDescriptor_t tensor = part(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  cudnnBackendDescriptor_t op = part(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
  NEED(cudnnBackendFinalize(tensor) == CUDNN_STATUS_BAD_PARAM);
  SAYS("lacks attribute");
  NEED(cudnnBackendSetAttribute(op, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                                CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                &tensor) == CUDNN_STATUS_BAD_PARAM);
  NEED(!cudnnBackendDestroyDescriptor(tensor));
  NEED(cudnnBackendDestroyDescriptor(tensor) == CUDNN_STATUS_BAD_PARAM);
  SAYS("a descriptor of cuDNN that is not there");
  cudaStream_t s = stream_on(1);
  cudnnHandle_t handle;
  NEED(!cudaSetDevice(0) && !cudnnCreate(&handle));
  NEED(cudnnSetStream(handle, s) == CUDNN_STATUS_BAD_PARAM);
  SAYS("a handle of device 0 gets a stream of device 1");
}

const std::vector<Process> processes = {
    {"all_reduce", all_reduce, "ORRERY_FAKE_SEED=5", 0},
    {"gather_and_scatter", gather_and_scatter, "", 0},
    {"rank_that_never_comes", rank_that_never_comes, "ORRERY_FAKE_PATIENCE=20", 0},
    {"lost_rank", lost_rank, "ORRERY_FAKE_PATIENCE=20", 0},
    {"calls_that_differ", calls_that_differ, "", 0},
    {"bad_buffers", bad_buffers, "", 0},
    {"product", product, "", 0},
    {"tf32", tf32, "", 0},
    {"bad_products", bad_products, "", 0},
    {"unfinished_parts", unfinished_parts, "", 0}};
