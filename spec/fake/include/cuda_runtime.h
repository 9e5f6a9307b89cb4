/* cuda_runtime.h: the part of the CUDA runtime that Orrery calls, for a machine without one:
 * host functions (cudart.cpp runs them) and, in C++, the words of kernel code (lanes.cpp runs
 * those).
 *
 * Invariant: names and parameters are CUDA's, so that what compiles here compiles there; values
 * of enums are the fake's own where nothing but their names is used.
 * To add a function: its declaration here, its body in cudart.cpp through FAKE_CALL.
 */
#ifndef ORR_FAKE_CUDA_RUNTIME_H
#define ORR_FAKE_CUDA_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#define CUDART_VERSION 12080

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInitializationError = 3,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorECCUncorrectable = 214,
  cudaErrorNvlinkUncorrectable = 220,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchTimeout = 702,
  cudaErrorAssert = 710,
  cudaErrorHardwareStackError = 714,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorInvalidAddressSpace = 717,
  cudaErrorInvalidPc = 718,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorPeerAccessUnsupported = 217,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureUnmatched = 903,
  cudaErrorStreamCaptureUnjoined = 904,
  cudaErrorStreamCaptureIsolation = 905,
  cudaErrorUnknown = 999
} cudaError_t;

typedef struct orr_fake_stream *cudaStream_t;
typedef struct orr_fake_event *cudaEvent_t;
typedef struct orr_fake_graph *cudaGraph_t;
typedef struct orr_fake_graph_exec *cudaGraphExec_t;

typedef enum cudaDataType_t { CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_16BF } cudaDataType_t;

typedef struct cudaUUID {
  char bytes[16];
} cudaUUID_t;

struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  size_t totalGlobalMem;
  int major, minor;
  int multiProcessorCount;
  int pciDomainID, pciBusID, pciDeviceID;
};

enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaDeviceP2PAttr {
  cudaDevP2PAttrPerformanceRank = 1,
  cudaDevP2PAttrAccessSupported = 2,
  cudaDevP2PAttrNativeAtomicSupported = 3
};
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone,
  cudaStreamCaptureStatusActive,
  cudaStreamCaptureStatusInvalidated
};
#define cudaStreamNonBlocking 1
#define cudaEventDisableTiming 2
#define cudaHostAllocPortable 1
#define cudaHostAllocMapped 2

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device);
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device);
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceGetP2PAttribute(int *value, enum cudaDeviceP2PAttr attr, int a, int b);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t status);

cudaError_t cudaMalloc(void **out, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMemGetInfo(size_t *left, size_t *total);
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);

typedef void (*cudaHostFn_t)(void *data);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void *data);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

#ifdef __cplusplus
}

/* ---- kernel code ---- */

#include <math.h>
#include <string.h>

#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __restrict__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

/* Where the lane that runs now stands. */
struct orr_fake_place {
  dim3 thread, block, block_size, grid_size;
};
extern orr_fake_place orr_fake_now;
#define threadIdx orr_fake_now.thread
#define blockIdx orr_fake_now.block
#define blockDim orr_fake_now.block_size
#define gridDim orr_fake_now.grid_size

void orr_fake_launch(cudaStream_t stream, dim3 grid, dim3 block, size_t shared,
                     std::function<void()> kernel);
void *orr_fake_shared(const void *key, size_t bytes);
void *orr_fake_dynamic_shared(void);

/* lanes.cpp: the lane waits until all of its kind are there. */
enum orr_fake_sync { ORR_FAKE_BLOCK, ORR_FAKE_WARP, ORR_FAKE_SHUFFLE, ORR_FAKE_BALLOT };
uint64_t orr_fake_meet(orr_fake_sync kind, unsigned mask, uint64_t value, int source);
int orr_fake_lane(void);

inline void __syncthreads() { orr_fake_meet(ORR_FAKE_BLOCK, 0, 0, 0); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { orr_fake_meet(ORR_FAKE_WARP, mask, 0, 0); }
inline unsigned __ballot_sync(unsigned mask, int p) {
  return (unsigned)orr_fake_meet(ORR_FAKE_BALLOT, mask, p != 0, 0);
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }

template <typename T> T orr_fake_shuffle(unsigned mask, T x, int source) {
  uint64_t bits = 0;
  static_assert(sizeof x <= sizeof bits, "shuffles move 8 bytes at most");
  memcpy(&bits, &x, sizeof x);
  bits = orr_fake_meet(ORR_FAKE_SHUFFLE, mask, bits, source);
  memcpy(&x, &bits, sizeof x);
  return x;
}
template <typename T> T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
  return orr_fake_shuffle(mask, x, orr_fake_lane() / width * width + lane % width);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32) {
  int me = orr_fake_lane(), to = me ^ lanes;
  return orr_fake_shuffle(mask, x, to / width == me / width ? to : me);
}
template <typename T> T __shfl_up_sync(unsigned mask, T x, unsigned lanes, int width = 32) {
  int me = orr_fake_lane(), to = me - (int)lanes;
  return orr_fake_shuffle(mask, x, to >= me / width * width ? to : me);
}
template <typename T> T __shfl_down_sync(unsigned mask, T x, unsigned lanes, int width = 32) {
  int me = orr_fake_lane(), to = me + (int)lanes;
  return orr_fake_shuffle(mask, x, to < (me / width + 1) * width ? to : me);
}

/* Atomic accesses race with nobody (check/races.cpp). */
#if defined(__SANITIZE_THREAD__)
#define ORR_FAKE_ATOMIC __attribute__((no_sanitize_thread))
#else
#define ORR_FAKE_ATOMIC
#endif
template <typename T> ORR_FAKE_ATOMIC T atomicAdd(T *p, T x) {
  T old = *p;
  *p = old + x;
  return old;
}
template <typename T> ORR_FAKE_ATOMIC T atomicMin(T *p, T x) {
  T old = *p;
  if (x < old) *p = x;
  return old;
}
template <typename T> ORR_FAKE_ATOMIC T atomicMax(T *p, T x) {
  T old = *p;
  if (x > old) *p = x;
  return old;
}
template <typename T> ORR_FAKE_ATOMIC T atomicExch(T *p, T x) {
  T old = *p;
  *p = x;
  return old;
}
template <typename T> ORR_FAKE_ATOMIC T atomicCAS(T *p, T was, T x) {
  T old = *p;
  if (old == was) *p = x;
  return old;
}
inline void __threadfence() {}
inline void __threadfence_system() {}
template <typename T> T __ldg(const T *p) { return *p; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
#endif
#endif
