/* race.cpp: races.cpp itself: kernels that are right have no race, and each kind of race is
 * found. Compiled as the kernels are, with -fsanitize=thread, and linked with races.cpp.
 * To add a check: check.h.
 */
#include "../fake.h"
#include "check.h"

static void expect(const std::string &said, const char *words) {
  bool fits = *words ? said.find(words) != std::string::npos : said.empty();
  if (!fits) check_fail("the launch says '" + said + "', and not '" + words + "'");
}

static char key;

static int *shared_ints() { return (int *)orr_fake_shared(&key, 256 * sizeof(int)); }

static void barrier(Random &) {
  int out[64] = {0}, *y = out;
  auto turn = [=](bool syncs) {
    int *x = shared_ints(), me = (int)threadIdx.x;
    x[me] = me;
    if (syncs) __syncthreads();
    y[me] = x[63 - me];
  };
  expect(orr_fake_run(dim3(1), dim3(64), 0, [=]() { turn(true); }), "");
  expect(orr_fake_run(dim3(1), dim3(64), 0, [=]() { turn(false); }),
         "a race in shared memory: thread ");
  expect(orr_fake_run(dim3(1), dim3(64), 0, [=]() { turn(false); }), "race.cpp:");
}

/* A second write without a barrier after the reads. */
static void reuse(Random &) {
  expect(orr_fake_run(dim3(1), dim3(64), 0,
                      []() {
                        int *x = shared_ints(), me = (int)threadIdx.x;
                        for (int k = 0; k < 2; k++) {
                          x[me] = k;
                          __syncthreads();
                          if (x[(me + 1) % 64] != k) orr_fake_go_wrong("another number");
                        }
                      }),
         "race");
}

static void warp(Random &) {
  auto turn = [](bool syncs) {
    int *x = shared_ints(), me = (int)threadIdx.x;
    x[me] = me;
    if (syncs) __syncwarp();
    else __shfl_sync(~0u, me, 0);
    if (x[me ^ 1] != (me ^ 1)) orr_fake_go_wrong("another number");
  };
  expect(orr_fake_run(dim3(1), dim3(64), 0, [=]() { turn(true); }), "");
  expect(orr_fake_run(dim3(1), dim3(64), 0, [=]() { turn(false); }), "race");
}

/* A warp's barrier does not order another warp. */
static void other_warp(Random &) {
  expect(orr_fake_run(dim3(1), dim3(64), 0,
                      []() {
                        int *x = shared_ints(), me = (int)threadIdx.x;
                        x[me] = me;
                        __syncwarp();
                        if (x[me ^ 32] == -5) orr_fake_go_wrong("another number");
                      }),
         "race");
}

static void blocks(Random &) {
  int out[64] = {0}, *y = out;
  expect(orr_fake_run(dim3(2), dim3(32), 0,
                      [=]() { y[blockIdx.x * 32 + threadIdx.x] = shared_ints()[0] = 1; }),
         "shared memory: thread");
  expect(orr_fake_run(dim3(2), dim3(32), 0, [=]() { y[blockIdx.x * 32 + threadIdx.x] = 1; }),
         "");
  expect(orr_fake_run(dim3(2), dim3(32), 0, [=]() { y[threadIdx.x] = (int)blockIdx.x; }),
         "a race in global memory");
  expect(orr_fake_run(dim3(2), dim3(32), 0, [=]() { atomicAdd(y, 1); }), "");
  expect(orr_fake_run(dim3(2), dim3(32), 0, [=]() { y[0] += 1; }), "global memory");
}

/* Bytes of one word are no race. */
static void bytes(Random &) {
  unsigned char out[64] = {0}, *y = out;
  expect(orr_fake_run(dim3(1), dim3(64), 0, [=]() { y[threadIdx.x] = 1; }), "");
  expect(orr_fake_run(dim3(1), dim3(32), 0,
                      [=]() {
                        if (threadIdx.x) y[threadIdx.x] = 1;
                        else *(uint64_t *)(void *)y = 0;
                      }),
         "race");
}

const std::vector<Check> checks = {{"barrier", 1, barrier}, {"reuse", 1, reuse},
                                   {"warp", 1, warp},       {"other_warp", 1, other_warp},
                                   {"blocks", 1, blocks},   {"bytes", 1, bytes}};
