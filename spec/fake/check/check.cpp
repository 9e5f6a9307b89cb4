/* check.cpp: runs the checks of one file of this folder, and gives them the services of
 * kernels/device.h.
 *
 * Invariant: launches run at once, by lanes.cpp; a room is poisoned when it is given, and the
 * one before it is gone.
 * Arguments: a seed, the name of one check (else all). Prints one line a check; exits with 1 at
 * the first failure.
 */
#include "check.h"

#include <string>

#include "../../../kernels/device.h"
#include "../fake.h"

std::string check_now;
static uint64_t seed_now;
static void *room;
orr_cuda_fault_slot check_slot;
static int poison;

void check_fail(const std::string &why) {
  printf("FAIL %s (seed %lu): %s\n", check_now.c_str(), (unsigned long)seed_now, why.c_str());
  exit(1);
}

void orr_fake_launch(cudaStream_t, dim3 grid, dim3 block, size_t shared,
                     std::function<void()> kernel) {
  std::string wrong = orr_fake_run(grid, block, shared, kernel);
  if (!wrong.empty()) check_fail(wrong);
}

extern "C" {
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaStream_t orr_cuda_stream(void) { return NULL; }
int orr_cuda_may_launch(void) { return 1; }
int orr_cuda_check(cudaError_t status, const char *) { return status == cudaSuccess; }
void *orr_cuda_room(size_t bytes) {
  free(room);
  room = malloc(bytes);
  memset(room, 0xa5, bytes);
  return room;
}
orr_cuda_fault_slot *orr_cuda_fault(int64_t limit) {
  check_slot = {};
  check_slot.limit = limit, check_slot.poison = &poison;
  return &check_slot;
}
const int *orr_cuda_poison(void) { return &poison; }
}

int main(int argc, char **argv) {
  uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
  for (const Check &c : checks) {
    if (argc > 2 && strcmp(argv[2], c.name) != 0) continue;
    for (int k = 0; k < c.times; k++) {
      Random r = {(seed * 1000003 + (uint64_t)k) * 0x9E3779B97F4A7C15ull | 1};
      seed_now = seed;
      check_now = std::string(c.name) + " " + std::to_string(k);
      for (int i = 0; i < 8; i++) r.next();
      c.run(r);
    }
    printf("ok %s (%d)\n", c.name, c.times);
  }
  free(room);
  return 0;
}
