/* device.h: what CUDA kernels ask of the plug-in that hosts them; for C and C++.
 *
 * Invariant: these functions act on the calling thread's current stream, never synchronise, and
 * never fail loudly: an error is recorded by the plug-in, and the launch function that meets
 * one returns. A slot's memory is readable by the host and the device.
 * To add a service: a prototype here, its body in the plug-in (csrc/cuda*.c), and in the kernel
 * checks under spec/fake.
 */
#ifndef ORR_DEVICE_SERVICES_H
#define ORR_DEVICE_SERVICES_H

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a kernel found wrong in the data: the lowest position. Zero position: nothing. */
typedef struct orr_cuda_fault_slot {
  int64_t position; /* from 1 */
  int64_t value;
  int64_t limit; /* what the value had to stay within; set by orr_cuda_fault */
  int *poison;   /* device memory; raised with the report */
  unsigned lock; /* 0: free */
} orr_cuda_fault_slot;

cudaStream_t orr_cuda_stream(void);
/* False where nothing can be launched there (no queue, a lost GPU), which is recorded. */
int orr_cuda_may_launch(void);
/* Records an error; false where `status` is one. */
int orr_cuda_check(cudaError_t status, const char *what);
/* Scratch of the current stream, 256-byte aligned, valid until the next call on this stream:
 * one room a launch function. NULL on failure, which is recorded. */
void *orr_cuda_room(size_t bytes);
/* A slot for one launch; NULL on failure, which is recorded. */
orr_cuda_fault_slot *orr_cuda_fault(int64_t limit);
/* Device memory; not zero: this step's numbers are worthless, parameters keep their values. */
const int *orr_cuda_poison(void);

#ifdef __cplusplus
}
#endif
#endif
