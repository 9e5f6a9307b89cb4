/* poison.cu: carries the word that says that this step's numbers are worthless from one place
 * to another.
 *
 * Invariant: a word is only ever raised here, so that streams of one GPU may do it at once.
 */
#include "device.cuh"

static __global__ void spread(const volatile int *from, int *to) {
  if (*from != 0) *to = 1;
}

ORR_EXPORT void orr_cuda_spread(const int *from, int *to) {
  ORR_LAUNCH(spread, 1, 1, 0, from, to);
}
