/* gpu_control.cu: what the first visible GPU can do at this moment, without Orrery: copies and launches.
 *
 * Reads commands from standard input and answers each with one line:
 *   copy BYTES N    seconds of N copies of BYTES by a kernel, 16 bytes an access
 *   memcpy BYTES N  seconds of N copies of BYTES by cudaMemcpyAsync, device to device
 *   launch 0 N      seconds of N launches of a kernel that does nothing, one after another
 * Invariant: each time begins and ends with an idle stream; blocks were written before they are read.
 * To add a command: a function and its row in `commands`. ORR_FAKE builds it over the fake CUDA.
 */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "device.cuh"

struct orr_quad {
  uint32_t x, y, z, w;
};

static cudaStream_t stream;
static char *from, *to;
static size_t room; /* bytes of each block */

cudaStream_t orr_cuda_stream(void) { return stream; }

/* The first failure is what is answered. */
static cudaError_t failed = cudaSuccess;
int orr_cuda_check(cudaError_t status, const char *) {
  if (failed == cudaSuccess) failed = status;
  return status == cudaSuccess;
}

static __global__ void copy_kernel(const orr_quad *a, orr_quad *b, uint32_t n) {
  for (uint32_t i = orr_first(); i < n; i += orr_step()) b[i] = a[i];
}

static __global__ void empty_kernel(int) {}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int make_room(size_t bytes) {
  if (bytes <= room) return 1;
  cudaFree(from);
  cudaFree(to);
  from = to = NULL;
  room = 0;
  if (!orr_cuda_check(cudaMalloc((void **)&from, bytes), "cudaMalloc")) return 0;
  if (!orr_cuda_check(cudaMalloc((void **)&to, bytes), "cudaMalloc")) return 0;
  orr_cuda_check(cudaMemsetAsync(from, 1, bytes, stream), "cudaMemsetAsync");
  orr_cuda_check(cudaMemsetAsync(to, 2, bytes, stream), "cudaMemsetAsync");
  room = bytes;
  return 1;
}

static void copy(size_t bytes) {
  uint32_t n = (uint32_t)(bytes / sizeof(orr_quad));
  ORR_LAUNCH_(copy_kernel, dim3(orr_grid(n, ORR_BLOCK)), dim3(ORR_BLOCK), 0,
              (const orr_quad *)from, (orr_quad *)to, n);
}

static void copy_by_runtime(size_t bytes) {
  orr_cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "memcpy");
}

static void launch(size_t) { ORR_LAUNCH_(empty_kernel, dim3(1), dim3(32), 0, 0); }

static const struct {
  const char *name;
  void (*once)(size_t bytes);
} commands[] = {{"copy", copy}, {"memcpy", copy_by_runtime}, {"launch", launch}};

/* Seconds of n runs after one that is not counted; negative where something failed. */
static double seconds(void (*once)(size_t), size_t bytes, long n) {
  failed = cudaSuccess;
  if (!make_room(bytes)) return -1;
  once(bytes);
  orr_cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  double start = now();
  for (long k = 0; k < n; k++) once(bytes);
  orr_cuda_check(cudaGetLastError(), "a launch");
  orr_cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  double end = now();
  return failed == cudaSuccess ? end - start : -1;
}

int main(void) {
  char line[128], name[16];
  orr_cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  while (fgets(line, sizeof line, stdin)) {
    size_t bytes;
    long n;
    double result = -1;
    if (sscanf(line, "%15s %zu %ld", name, &bytes, &n) == 3)
      for (const auto &command : commands)
        if (!strcmp(name, command.name)) result = seconds(command.once, bytes, n);
    if (result >= 0)
      printf("%.9f\n", result);
    else
      printf("error %s: %s\n", name, cudaGetErrorString(failed));
    fflush(stdout);
  }
  return 0;
}
