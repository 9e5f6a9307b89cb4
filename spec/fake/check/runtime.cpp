/* runtime.cpp: the fake CUDA runtime itself: what is right comes out right under every seed,
 * and each misuse that it is there to find is found. Libraries: libraries.cpp.
 *
 * Invariant: each check runs in a process of its own, which starts with the environment that
 * its row names; a check may end by the signal that its row names.
 * To add a check: a function, its row in `processes`.
 */
#include "process.h"

static void launch(cudaStream_t s, std::function<void()> kernel) {
  orr_fake_launch(s, dim3(1), dim3(1), 0, kernel);
}

static int *device_ints(int n) {
  void *p = nullptr;
  NEED(cudaMalloc(&p, (size_t)n * sizeof(int)) == cudaSuccess);
  return (int *)p;
}

static int *pinned_ints(int n) {
  void *p = nullptr;
  NEED(cudaHostAlloc(&p, (size_t)n * sizeof(int), cudaHostAllocPortable) == cudaSuccess);
  return (int *)p;
}

static cudaStream_t stream() {
  cudaStream_t s;
  NEED(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  return s;
}

static cudaEvent_t event() {
  cudaEvent_t e;
  NEED(cudaEventCreateWithFlags(&e, cudaEventDisableTiming) == cudaSuccess);
  return e;
}

static int read_int(const int *device) {
  int x = -1;
  NEED(cudaMemcpy(&x, device, sizeof x, cudaMemcpyDeviceToHost) == cudaSuccess);
  return x;
}

/* ---- order ---- */

static void nothing_runs_early() {
  int *d = device_ints(1), *h = pinned_ints(1);
  cudaStream_t s = stream();
  *h = 7;
  launch(s, [=]() { *d = 41; });
  launch(s, [=]() { *d += 1; });
  NEED(cudaMemcpyAsync(h, d, 4, cudaMemcpyDeviceToHost, s) == cudaSuccess);
  NEED(*h == 7);
  NEED(cudaStreamSynchronize(s) == cudaSuccess && *h == 42);
  SAYS("");
}

/* A pinned source is read when the stream gets there. */
static void pinned_source() {
  int *d = device_ints(1), *h = pinned_ints(1);
  cudaStream_t s = stream();
  *h = 1;
  NEED(cudaMemcpyAsync(d, h, 4, cudaMemcpyHostToDevice, s) == cudaSuccess);
  *h = 2;
  NEED(cudaStreamSynchronize(s) == cudaSuccess && read_int(d) == 2);
  int pageable = 3;
  NEED(cudaMemcpyAsync(d, &pageable, 4, cudaMemcpyHostToDevice, s) == cudaSuccess);
  pageable = 4;
  NEED(cudaStreamSynchronize(s) == cudaSuccess && read_int(d) == 3);
}

/* How often in 60 turns the second stream sees what the first one wrote. */
static int right_turns(bool waits) {
  int *d = device_ints(2), right = 0;
  cudaStream_t a = stream(), b = stream();
  cudaEvent_t e = event();
  for (int turn = 1; turn <= 60; turn++) {
    launch(a, [=]() { d[0] = turn; });
    NEED(cudaEventRecord(e, a) == cudaSuccess);
    if (waits) NEED(cudaStreamWaitEvent(b, e, 0) == cudaSuccess);
    launch(b, [=]() { d[1] = d[0]; });
    NEED(cudaDeviceSynchronize() == cudaSuccess);
    right += read_int(d + 1) == turn;
  }
  return right;
}

static void waits() { NEED(right_turns(true) == 60); }
static void missing_wait() {
  int right = right_turns(false);
  NEED(right > 0 && right < 60);
}

/* An event that is recorded again is waited for as it was. */
static void recorded_again() {
  int *d = device_ints(1);
  cudaStream_t a = stream(), b = stream(), c = stream();
  cudaEvent_t e = event();
  launch(a, [=]() { *d = 1; });
  NEED(cudaEventRecord(e, a) == cudaSuccess && cudaStreamWaitEvent(b, e, 0) == cudaSuccess);
  NEED(cudaEventRecord(e, c) == cudaSuccess);
  launch(b, [=]() { *d += 1; });
  NEED(cudaStreamSynchronize(b) == cudaSuccess && read_int(d) == 2);
}

static void queries() {
  int *d = device_ints(1), asked = 0;
  cudaStream_t s = stream();
  cudaEvent_t e = event();
  NEED(cudaEventQuery(e) == cudaSuccess);
  for (int k = 0; k < 100; k++) launch(s, [=]() { *d = k; });
  NEED(cudaEventRecord(e, s) == cudaSuccess);
  while (cudaEventQuery(e) == cudaErrorNotReady) {
    NEED(cudaGetLastError() == cudaErrorNotReady && ++asked < 1000);
  }
  NEED(asked > 3 && read_int(d) == 99);
}

/* ---- memory ---- */

static void host_reads() {
  int *d = device_ints(1);
  launch(stream(), [=]() { *d = 1; });
  NEED(cudaDeviceSynchronize() == cudaSuccess);
  NEED(*(volatile int *)d == 1);
}

static void copies_are_checked() {
  int *d = device_ints(4), *h = pinned_ints(8);
  cudaStream_t s = stream();
  NEED(cudaMemcpyAsync(h, d, 20, cudaMemcpyDeviceToHost, s) == cudaErrorInvalidValue);
  SAYS("leaves its block");
  orr_fake_forget();
  NEED(cudaMemcpyAsync(h, d, 16, cudaMemcpyHostToDevice, s) == cudaErrorInvalidValue);
  SAYS("kind does not fit");
  orr_fake_forget();
  NEED(cudaMemsetAsync(d + 1, 0, 16, s) == cudaErrorInvalidValue);
  SAYS("leaves its block");
  NEED(cudaMemcpyPeerAsync(d, 1, d, 0, 4, s) == cudaErrorInvalidValue);
  SAYS("not theirs");
  NEED(cudaFree(d) == cudaSuccess && cudaFree(d) == cudaErrorInvalidValue);
  SAYS("cudaMalloc did not give");
}

static void memory_ends() {
  void *p[9];
  int n = 0;
  while (n < 9 && cudaMalloc(&p[n], (size_t)16 << 20) == cudaSuccess) n++;
  NEED(n == 3 && cudaGetLastError() == cudaErrorMemoryAllocation);
  NEED(cudaFree(p[1]) == cudaSuccess && cudaMalloc(&p[1], (size_t)16 << 20) == cudaSuccess);
  for (int k = 0; k < n; k++) NEED(cudaFree(p[k]) == cudaSuccess);
  NEED(cudaMalloc(p, (size_t)50 << 20) == cudaSuccess && cudaFree(p[0]) == cudaSuccess);
  NEED(orr_fake_live() == 0);
}

/* Free waits for the device. */
static void free_waits() {
  int *d = device_ints(1), *h = pinned_ints(1);
  cudaStream_t s = stream();
  launch(s, [=]() { *d = 5; });
  NEED(cudaMemcpyAsync(h, d, 4, cudaMemcpyDeviceToHost, s) == cudaSuccess);
  NEED(cudaFree(d) == cudaSuccess && *h == 5);
}

/* ---- devices ---- */

static void touch_peer(bool enable) {
  NEED(cudaSetDevice(1) == cudaSuccess);
  int *theirs = device_ints(1);
  NEED(cudaSetDevice(0) == cudaSuccess);
  if (enable) NEED(cudaDeviceEnablePeerAccess(1, 0) == cudaSuccess);
  cudaStream_t s = stream();
  launch(s, [=]() { *theirs = 6; });
  cudaError_t status = cudaStreamSynchronize(s);
  if (enable) {
    NEED(status == cudaSuccess && read_int(theirs) == 6);
    return;
  }
  NEED(status == cudaErrorIllegalAddress);
  SAYS("a kernel of device 0 touches memory of device 1");
  NEED(cudaMalloc((void **)&theirs, 4) == cudaErrorIllegalAddress);
  NEED(cudaSetDevice(1) == cudaSuccess && cudaMalloc((void **)&theirs, 4) == cudaSuccess);
}

static void peers() { touch_peer(true); }
static void peers_not_enabled() { touch_peer(false); }
static void peers_not_there() {
  int can = 1;
  NEED(cudaDeviceCanAccessPeer(&can, 0, 1) == cudaSuccess && !can);
  NEED(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessUnsupported);
  touch_peer(false);
}

static void peer_copy() {
  NEED(cudaSetDevice(1) == cudaSuccess);
  int *theirs = device_ints(1);
  NEED(cudaSetDevice(0) == cudaSuccess);
  int *mine = device_ints(1);
  cudaStream_t s = stream();
  launch(s, [=]() { *mine = 12; });
  NEED(cudaMemcpyPeerAsync(theirs, 1, mine, 0, 4, s) == cudaSuccess);
  NEED(cudaStreamSynchronize(s) == cudaSuccess && read_int(theirs) == 12);
}

static void wrong_device() {
  cudaStream_t s = stream();
  cudaEvent_t e = event();
  NEED(cudaSetDevice(1) == cudaSuccess);
  launch(s, []() {});
  NEED(cudaGetLastError() == cudaErrorInvalidResourceHandle);
  SAYS("while device 1 is current");
  orr_fake_forget();
  cudaStream_t other = stream();
  NEED(cudaEventRecord(e, other) == cudaErrorInvalidResourceHandle);
  SAYS("an event of device 0");
  NEED(cudaSetDevice(9) == cudaErrorInvalidDevice);
  NEED(cudaStreamDestroy(s) == cudaSuccess);
  NEED(cudaStreamSynchronize(s) == cudaErrorInvalidResourceHandle);
  SAYS("a stream that is not there");
}

static int count() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}
static std::string bus(int k) {
  char text[32];
  NEED(cudaDeviceGetPCIBusId(text, sizeof text, k) == cudaSuccess);
  return text;
}
static void sees_all() { NEED(count() == 4 && bus(3) == "0000:13:00.0"); }
static void sees_order() {
  NEED(count() == 2 && bus(0) == "0000:12:00.0" && bus(1) == "0000:10:00.0");
}
static void sees_until_invalid() { NEED(count() == 1 && bus(0) == "0000:11:00.0"); }
static void sees_uuid() { NEED(count() == 1 && bus(0) == "0000:13:00.0"); }
static void sees_none() { NEED(count() == 0 && cudaGetLastError() == cudaErrorNoDevice); }

/* ---- launches and failures ---- */

static void bad_launches() {
  cudaStream_t s = stream();
  orr_fake_launch(s, dim3(1), dim3(2000), 0, []() {});
  NEED(cudaGetLastError() == cudaErrorInvalidConfiguration);
  launch(s, []() {});
  NEED(cudaStreamSynchronize(s) == cudaSuccess);
  orr_fake_launch(s, dim3(1), dim3(64), 0, []() {
    if (threadIdx.x < 3) __shfl_sync(~0u, 1, 0);
  });
  NEED(cudaGetLastError() == cudaSuccess);
  NEED(cudaStreamSynchronize(s) == cudaErrorIllegalAddress);
  SAYS("a shuffle");
}

/* Every call in turn fails, once; then all goes well. */
static void some_work(bool *well) {
  void *d = nullptr;
  cudaStream_t s = nullptr;
  *well = cudaMalloc(&d, 64) == cudaSuccess;
  *well = *well && cudaStreamCreateWithFlags(&s, 0) == cudaSuccess;
  if (*well) launch(s, []() {});
  *well = *well && cudaGetLastError() == cudaSuccess && cudaStreamSynchronize(s) == cudaSuccess;
  if (s) *well = cudaStreamDestroy(s) == cudaSuccess && *well;
  if (d) *well = cudaFree(d) == cudaSuccess && *well;
}

static void failures() {
  bool well;
  long before = orr_fake_calls();
  some_work(&well);
  long n = orr_fake_calls() - before;
  NEED(well && n == 7);
  for (long k = 1; k <= n; k++) {
    orr_fake_fail_after(k, 0);
    some_work(&well);
    NEED(!well && *orr_fake_failed_call());
    cudaGetLastError();
  }
  some_work(&well);
  NEED(well);
  orr_fake_fail_at("cudaFree", 2, 0);
  some_work(&well);
  NEED(well);
  some_work(&well);
  NEED(!well && !strcmp(orr_fake_failed_call(), "cudaFree"));
}

static void failure_by_name() {
  void *p;
  NEED(cudaMalloc(&p, 4) == cudaSuccess && cudaMalloc(&p, 4) == cudaErrorMemoryAllocation);
  NEED(cudaMalloc(&p, 4) == cudaSuccess);
}

static void sticky_failure() {
  void *p;
  NEED(cudaMalloc(&p, 4) == cudaErrorIllegalAddress);
  NEED(cudaMalloc(&p, 4) == cudaErrorIllegalAddress);
  NEED(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
}

/* ---- graphs ---- */

/* d[2] = (d[0] + 1) + (d[0] + 2) by two streams, and 10 times that. */
static cudaGraph_t captured(int *d, bool joins, cudaError_t *status) {
  cudaStream_t a = stream(), b = stream();
  cudaEvent_t fork = event(), join = event();
  cudaGraph_t graph;
  NEED(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal) == cudaSuccess);
  NEED(cudaEventRecord(fork, a) == cudaSuccess &&
       cudaStreamWaitEvent(b, fork, 0) == cudaSuccess);
  launch(a, [=]() { d[1] = d[0] + 1; });
  launch(b, [=]() { d[2] = d[0] + 2; });
  NEED(cudaEventRecord(join, b) == cudaSuccess);
  if (joins) NEED(cudaStreamWaitEvent(a, join, 0) == cudaSuccess);
  launch(a, [=]() { d[2] = 10 * (d[1] + d[2]); });
  *status = cudaStreamEndCapture(a, &graph);
  return graph;
}

static void graphs() {
  int *d = device_ints(3);
  cudaError_t status;
  cudaGraph_t graph = captured(d, true, &status);
  cudaGraphExec_t exec;
  cudaStream_t s = stream();
  NEED(status == cudaSuccess && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  NEED(cudaGraphDestroy(graph) == cudaSuccess);
  for (int k = 0; k < 50; k++) {
    launch(s, [=]() { d[0] = k; });
    NEED(cudaGraphLaunch(exec, s) == cudaSuccess);
    NEED(cudaStreamSynchronize(s) == cudaSuccess && read_int(d + 2) == 10 * (2 * k + 3));
  }
  NEED(cudaGraphExecDestroy(exec) == cudaSuccess);
  NEED(cudaGraphLaunch(exec, s) == cudaErrorInvalidValue);
  SAYS("a graph to launch that is not there");
}

static void graph_not_joined() {
  cudaError_t status;
  captured(device_ints(3), false, &status);
  NEED(status == cudaErrorStreamCaptureUnjoined);
  SAYS("not joined");
}

static void capture_spoiled() {
  cudaStream_t s = stream(), other = stream();
  cudaEvent_t e = event();
  cudaGraph_t graph;
  void *p;
  enum cudaStreamCaptureStatus is;
  NEED(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal) == cudaSuccess);
  NEED(cudaStreamIsCapturing(s, &is) == cudaSuccess && is == cudaStreamCaptureStatusActive);
  NEED(cudaMalloc(&p, 4) == cudaErrorStreamCaptureUnsupported);
  NEED(cudaStreamEndCapture(s, &graph) == cudaErrorStreamCaptureInvalidated);
  NEED(cudaEventRecord(e, other) == cudaSuccess);
  NEED(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed) == cudaSuccess);
  NEED(cudaStreamWaitEvent(s, e, 0) == cudaErrorStreamCaptureIsolation);
  NEED(cudaStreamEndCapture(s, &graph) == cudaErrorStreamCaptureInvalidated);
}

const std::vector<Process> processes = {
    {"nothing_runs_early", nothing_runs_early, "", 0},
    {"pinned_source", pinned_source, "", 0},
    {"waits", waits, "ORRERY_FAKE_SEED=3", 0},
    {"missing_wait", missing_wait, "ORRERY_FAKE_SEED=3", 0},
    {"recorded_again", recorded_again, "", 0},
    {"queries", queries, "", 0},
    {"host_reads", host_reads, "ORRERY_FAKE_GUARD=1", SIGSEGV},
    {"copies_are_checked", copies_are_checked, "", 0},
    {"memory_ends", memory_ends, "ORRERY_FAKE_MEMORY=64", 0},
    {"free_waits", free_waits, "", 0},
    {"peers", peers, "ORRERY_FAKE_GUARD=1", 0},
    {"peers_not_enabled", peers_not_enabled, "ORRERY_FAKE_GUARD=1", 0},
    {"peers_not_there", peers_not_there, "ORRERY_FAKE_GUARD=1 ORRERY_FAKE_PEERS=0", 0},
    {"peer_copy", peer_copy, "ORRERY_FAKE_GUARD=1 ORRERY_FAKE_PEERS=0", 0},
    {"wrong_device", wrong_device, "", 0},
    {"sees_all", sees_all, "", 0},
    {"sees_order", sees_order, "CUDA_VISIBLE_DEVICES=2,0", 0},
    {"sees_until_invalid", sees_until_invalid, "CUDA_VISIBLE_DEVICES=1,7,0", 0},
    {"sees_uuid", sees_uuid,
     "CUDA_VISIBLE_DEVICES=GPU-fa4e0000-0000-4000-8000-000000000003,GPU-fa4e", 0},
    {"sees_none", sees_none, "CUDA_VISIBLE_DEVICES=", 0},
    {"bad_launches", bad_launches, "", 0},
    {"failures", failures, "", 0},
    {"failure_by_name", failure_by_name, "ORRERY_FAKE_FAIL=cudaMalloc:2", 0},
    {"sticky_failure", sticky_failure,
     "ORRERY_FAKE_FAIL=cudaMalloc ORRERY_FAKE_FAIL_KIND=sticky", 0},
    {"graphs", graphs, "", 0},
    {"graph_not_joined", graph_not_joined, "", 0},
    {"capture_spoiled", capture_spoiled, "", 0}};
