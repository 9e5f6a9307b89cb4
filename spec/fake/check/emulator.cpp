/* emulator.cpp: the emulator of kernels itself: kernels that are right come out right, and
 * each kind of wrong one is found.
 *
 * Invariant: a check here holds for every order of lanes, so it is run in all of them.
 * To add a check: check.h.
 */
#include "../fake.h"
#include "check.h"

static void expect(const std::string &said, const char *words) {
  bool fits = *words ? said.find(words) != std::string::npos : said.empty();
  if (!fits) check_fail("the launch says '" + said + "', and not '" + words + "'");
}

static const char *const orders[] = {"forward", "reverse", "1", "77"};

template <typename F>
static void in_each_order(F f) {
  for (const char *order : orders) {
    setenv("ORRERY_FAKE_LANES", order, 1);
    f();
  }
  unsetenv("ORRERY_FAKE_LANES");
}

/* Sums of a block by shared memory and by shuffles; `syncs` false leaves out a barrier. */
static bool sums(Random &r, bool syncs, std::string *said) {
  static char key;
  int n = 32 * (int)r.from(2, 8), blocks = (int)r.from(1, 40);
  std::vector<int> x((size_t)(n * blocks)), y((size_t)blocks, -1);
  for (int &each : x) each = (int)r.below(1000);
  *said = orr_fake_run(dim3((unsigned)blocks), dim3((unsigned)n), 0, [&]() {
    int *part = (int *)orr_fake_shared(&key, 32 * sizeof(int));
    int k = x[(size_t)(blockIdx.x * blockDim.x + threadIdx.x)];
    for (int lanes = 16; lanes > 0; lanes /= 2) k += __shfl_xor_sync(~0u, k, lanes);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = k;
    if (syncs) __syncthreads();
    int all = 0;
    for (unsigned w = 0; w < blockDim.x / 32; w++) all += part[w];
    if (threadIdx.x == blockDim.x - 1) y[blockIdx.x] = all;
  });
  bool right = true;
  for (int b = 0; b < blocks; b++) {
    int all = 0;
    for (int k = 0; k < n; k++) all += x[(size_t)(b * n + k)];
    right = right && y[(size_t)b] == all;
  }
  return right;
}

static void right_kernel(Random &r) {
  in_each_order([&]() {
    std::string said;
    if (!sums(r, true, &said)) check_fail("a sum is wrong");
    expect(said, "");
  });
}

/* A missing barrier: wrong numbers in one order at least. */
static void missing_barrier(Random &r) {
  int wrong = 0;
  in_each_order([&]() {
    std::string said;
    wrong += !sums(r, false, &said);
  });
  if (wrong == 0) check_fail("a missing barrier makes no wrong number");
}

static void divergent_barrier(Random &) {
  in_each_order([]() {
    expect(orr_fake_run(dim3(3), dim3(96), 0,
                        []() {
                          if (threadIdx.x < 40) __syncthreads();
                          else __shfl_sync(~0u, 1, 0);
                        }),
           "waits at");
    expect(orr_fake_run(dim3(1), dim3(64), 0,
                        []() {
                          if (threadIdx.x == 5) return;
                          __ballot_sync(~0u, 1);
                        }),
           "a ballot for lanes ffffffff, of which ffffffdf are there");
    expect(orr_fake_run(dim3(1), dim3(32), 0,
                        []() {
                          if (threadIdx.x < 16) __syncwarp();
                        }),
           "a barrier of the warp for lanes ffffffff, of which 0000ffff are there");
  });
}

/* Lanes that have ended count as at the barrier of the block, as on a GPU. */
static void ended_lanes(Random &) {
  int passed = 0;
  expect(orr_fake_run(dim3(2), dim3(64), 0,
                      [&]() {
                        if (threadIdx.x >= 32) return;
                        __syncthreads();
                        passed++;
                      }),
         "");
  if (passed != 64) check_fail("lanes have stayed behind");
}

static void shuffle_from_nobody(Random &) {
  expect(orr_fake_run(dim3(1), dim3(48), 0, []() { __shfl_xor_sync(~0u, 1, 16); }),
         "shuffles from lane");
  expect(orr_fake_run(dim3(1), dim3(32), 0, []() { __shfl_sync(0xFFFFu, 1, 0); }),
         "is not in the mask");
  expect(orr_fake_run(dim3(1), dim3(32), 0,
                      []() {
                        unsigned half = threadIdx.x < 16 ? 0xFFFFu : 0xFFFF0000u;
                        int sum = 1;
                        for (int k = 8; k > 0; k /= 2) sum += __shfl_xor_sync(half, sum, k);
                        if (sum != 16) orr_fake_go_wrong("halves of a warp do not meet alone");
                      }),
         "");
}

static void shuffles(Random &r) {
  unsigned by = (unsigned)r.below(32);
  int width = 1 << r.below(6);
  in_each_order([=]() {
    expect(orr_fake_run(dim3(1), dim3(32), 0,
                        [=]() {
                          int me = (int)threadIdx.x, base = me / width * width;
                          int up = __shfl_up_sync(~0u, me, by, width);
                          int down = __shfl_down_sync(~0u, me, by, width);
                          double one = __shfl_sync(~0u, me + 0.5, (int)by, width);
                          bool fits =
                              up == (me - (int)by >= base ? me - (int)by : me) &&
                              down == (me + (int)by < base + width ? me + (int)by : me) &&
                              one == base + (int)by % width + 0.5 &&
                              __ballot_sync(~0u, me & 1) == 0xAAAAAAAAu;
                          if (!fits) orr_fake_go_wrong("a shuffle brings something else");
                        }),
           "");
  });
}

static void shared_memory(Random &) {
  static char key, big;
  expect(orr_fake_run(dim3(4), dim3(32), 64,
                      []() {
                        unsigned char *mine = (unsigned char *)orr_fake_shared(&key, 64);
                        unsigned char *dynamic = (unsigned char *)orr_fake_dynamic_shared();
                        if (dynamic[threadIdx.x] != 0xFF || mine[threadIdx.x] != 0xFF)
                          orr_fake_go_wrong("shared memory keeps its content");
                        if (mine < dynamic + 64) orr_fake_go_wrong("shared memory overlaps");
                        __syncthreads();
                        mine[threadIdx.x] = dynamic[threadIdx.x] = 7;
                      }),
         "");
  expect(
      orr_fake_run(dim3(1), dim3(1), 32 * 1024, []() { orr_fake_shared(&big, 16 * 1024 + 1); }),
      "48 KiB");
}

static void refusals(Random &) {
  auto nothing = []() {};
  expect(orr_fake_run(dim3(1), dim3(1025), 0, nothing), "a block of 1025 threads");
  expect(orr_fake_run(dim3(1), dim3(1, 1, 65), 0, nothing), "a block of 65 threads");
  expect(orr_fake_run(dim3(1, 65536), dim3(1), 0, nothing), "a grid of 1 x 65536 x 1 blocks");
  expect(orr_fake_run(dim3(1), dim3(1), 48 * 1024 + 1, nothing), "shared memory");
  expect(orr_fake_run(dim3(0), dim3(1), 0, nothing), "a grid of 0");
}

/* Every block and lane once, whatever the order. */
static void all_run(Random &r) {
  dim3 grid((unsigned)r.from(1, 9), (unsigned)r.from(1, 5), (unsigned)r.from(1, 4));
  dim3 block((unsigned)r.from(1, 9), (unsigned)r.from(1, 5), (unsigned)r.from(1, 4));
  size_t lanes = block.x * block.y * block.z, all = grid.x * grid.y * grid.z * lanes;
  in_each_order([&]() {
    std::vector<int> runs(all);
    expect(orr_fake_run(
               grid, block, 0,
               [&]() {
                 size_t b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
                 size_t t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
                 __syncthreads();
                 runs[b * lanes + t]++;
               }),
           "");
    for (int n : runs)
      if (n != 1) check_fail("a lane ran " + std::to_string(n) + " times");
  });
}

const std::vector<Check> checks = {{"right_kernel", 20, right_kernel},
                                   {"missing_barrier", 20, missing_barrier},
                                   {"divergent_barrier", 2, divergent_barrier},
                                   {"ended_lanes", 1, ended_lanes},
                                   {"shuffle_from_nobody", 1, shuffle_from_nobody},
                                   {"shuffles", 40, shuffles},
                                   {"shared_memory", 2, shared_memory},
                                   {"refusals", 1, refusals},
                                   {"all_run", 10, all_run}};
