/* cuda_kernels.c: the table of kernels of CUDA devices.
 *
 * Invariant: a row NAME of kernel_table.def is orr_cuda_NAME, in kernels/ (.cu), or in
 * cuda_blas.c and cuda_dnn.c where a library does it.
 */
#include "cuda.h"

const orr_kernels orr_kernels_cuda = {
#define ORR_KERNEL(result, name, parameters) .name = orr_cuda_##name,
#include "kernel_table.def"
};
