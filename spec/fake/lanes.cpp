/* lanes.cpp: runs kernels on the CPU, every CUDA thread a coroutine on the caller's thread.
 *
 * Invariant: one block at a time; blocks, and the lanes of a block, in the order that
 * ORRERY_FAKE_LANES says (forward, reverse, or a seed for a random order each round); a lane
 * runs until it meets others or ends, so a missing barrier shows. Shared memory is poisoned for
 * every block. What CUDA refuses to launch is refused; a barrier that some lanes never reach, a
 * shuffle with lanes that have ended or from a lane that is not there is an error of the
 * launch.
 * To add a way for lanes to meet: a kind in orr_fake_sync, its case in `settle`.
 */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "fake.h"
#include "fiber.h"

orr_fake_place orr_fake_now;
orr_fake_time orr_fake_when = {0, 0, ORR_FAKE_NO_LANE, 0, 0}; /* from the start: none runs */
thread_local bool orr_fake_is_runner;

namespace {

/* Without an attribute that nobody sets, a block has 48 KiB of shared memory, all kinds. */
enum { MOST_LANES = 1024, MOST_SHARED = 48 * 1024 };

enum State { IDLE, READY, WAITS, ENDED };

struct Lane {
  State state;
  orr_fake_sync kind;
  unsigned mask;
  uint64_t value;
  int source;
  uint32_t warp_epoch;
  Fiber *fiber;
};

struct Runner {
  Lane lane[MOST_LANES];
  int n, current;
  const std::function<void()> *kernel;
  std::vector<Fiber *> free;
  std::map<const void *, void *> shared;
  alignas(16) char arena[MOST_SHARED];
  size_t used, dynamic;
  size_t dirty; /* bytes that are not poison */
  std::string wrong;
  uint64_t random;
  bool reverse;
};

Runner &run = *new Runner(); /* for good: fibers outlive every launch */

uint64_t next_random() {
  run.random ^= run.random << 13;
  run.random ^= run.random >> 7;
  run.random ^= run.random << 17;
  return run.random * 0x2545F4914F6CDD1Dull >> 32;
}

void go_wrong(const std::string &what) {
  if (run.wrong.empty()) run.wrong = what;
}

void place_lane(int k) {
  const dim3 &b = orr_fake_now.block_size;
  orr_fake_now.thread =
      dim3((unsigned)k % b.x, (unsigned)k / b.x % b.y, (unsigned)k / b.x / b.y);
  orr_fake_when.lane = (uint32_t)k;
  orr_fake_when.warp_epoch = run.lane[k].warp_epoch;
  run.current = k;
}

/* The bottom of every fiber: one lane after another. */
void lane_main() {
  for (;;) {
    (*run.kernel)();
    Lane *me = &run.lane[run.current];
    Fiber *mine = me->fiber;
    me->state = ENDED;
    me->fiber = nullptr;
    run.free.push_back(mine);
    fiber_leave(mine);
  }
}

void enter(int k) {
  Lane *lane = &run.lane[k];
  if (!lane->fiber) {
    if (run.free.empty()) run.free.push_back(fiber_new(lane_main));
    lane->fiber = run.free.back();
    run.free.pop_back();
  }
  lane->state = READY;
  place_lane(k);
  fiber_enter(lane->fiber);
}

/* ---- meeting ---- */

struct Warp {
  int first, size;
  unsigned mask, there; /* of those that meet: whom they name, who is there */
  orr_fake_sync kind;
};

/* False: nobody of the warp waits for its others, or some are not there yet. */
bool gather(int first, Warp *w) {
  *w = Warp{first, run.n - first < 32 ? run.n - first : 32, 0, 0, ORR_FAKE_BLOCK};
  for (int k = 0; k < w->size; k++) {
    const Lane &l = run.lane[first + k];
    if (l.state != WAITS || l.kind == ORR_FAKE_BLOCK) continue;
    if (!w->mask) {
      w->mask = l.mask;
      w->kind = l.kind;
    }
    if (l.kind == w->kind && l.mask == w->mask) w->there |= 1u << k;
  }
  unsigned exist = w->size == 32 ? ~0u : (1u << w->size) - 1;
  return w->mask && !((w->mask & exist) & ~w->there);
}

uint64_t shuffled(const Warp &w, int k) {
  int from = run.lane[w.first + k].source;
  if (from >= 0 && from < w.size && w.there >> from & 1) return run.lane[w.first + from].value;
  go_wrong("thread " + std::to_string(w.first + k) + " shuffles from lane " +
           std::to_string(from) + ", which is not there");
  return 0xFFFFFFFFFFFFFFFFull;
}

bool settle_warp(int first) {
  Warp w;
  if (!gather(first, &w)) return false;
  uint64_t result[32] = {};
  unsigned ballot = 0;
  uint32_t epoch = 0;
  for (int k = 0; k < w.size; k++) {
    if (!(w.there >> k & 1)) continue;
    const Lane &l = run.lane[first + k];
    if (l.value) ballot |= 1u << k;
    if (l.warp_epoch > epoch) epoch = l.warp_epoch;
    if (w.kind == ORR_FAKE_SHUFFLE) result[k] = shuffled(w, k);
  }
  for (int k = 0; k < w.size; k++) {
    if (!(w.there >> k & 1)) continue;
    Lane &l = run.lane[first + k];
    l.value = w.kind == ORR_FAKE_BALLOT ? ballot : result[k];
    if (w.kind == ORR_FAKE_WARP) l.warp_epoch = epoch + 1;
    l.state = READY;
  }
  return true;
}

bool settle_block() {
  bool any = false;
  for (int k = 0; k < run.n; k++) {
    const Lane &l = run.lane[k];
    if (l.state != ENDED && (l.state != WAITS || l.kind != ORR_FAKE_BLOCK)) return false;
  }
  for (int k = 0; k < run.n; k++) {
    if (run.lane[k].state == ENDED) continue;
    run.lane[k].state = READY;
    any = true;
  }
  orr_fake_when.block_epoch++;
  return any;
}

bool settle() {
  bool moved = false;
  for (int first = 0; first < run.n; first += 32) moved = settle_warp(first) || moved;
  return moved || settle_block();
}

void say_stuck() {
  static const char *const what[] = {"a barrier of the block", "a barrier of the warp",
                                     "a shuffle", "a ballot"};
  char line[240];
  int waits = 0, ended = 0, first = -1;
  for (int k = 0; k < run.n; k++) {
    waits += run.lane[k].state == WAITS;
    ended += run.lane[k].state == ENDED;
    if (run.lane[k].state == WAITS && first < 0) first = k;
  }
  const Lane &l = run.lane[first < 0 ? 0 : first];
  unsigned there = 0;
  for (int k = first - first % 32; k < run.n && k < first - first % 32 + 32; k++)
    if (run.lane[k].state == WAITS && run.lane[k].kind == l.kind) there |= 1u << k % 32;
  snprintf(line, sizeof line,
           "%d of %d threads wait, %d have ended: thread %d waits at %s for lanes %08x, of "
           "which %08x are there",
           waits, run.n, ended, first, what[l.kind], l.kind == ORR_FAKE_BLOCK ? ~0u : l.mask,
           there);
  go_wrong(line);
}

/* ---- blocks ---- */

void start_block() {
  memset(run.arena, 0xFF, run.dirty);
  run.shared.clear();
  run.used = run.dirty = run.dynamic;
  orr_fake_when.block_epoch = 0;
  for (int k = 0; k < run.n; k++) run.lane[k] = Lane{IDLE, ORR_FAKE_BLOCK, 0, 0, 0, 0, nullptr};
}

/* Where something went wrong lanes stand in the middle of the kernel: their fibers go. */
void drop_lanes() {
  for (int k = 0; k < run.n; k++) {
    if (run.lane[k].fiber) fiber_free(run.lane[k].fiber);
    run.lane[k].fiber = nullptr;
  }
}

void run_block(std::vector<int> &order) {
  start_block();
  for (int left = run.n; left && run.wrong.empty();) {
    for (size_t i = order.size(); run.random && i > 1; i--)
      std::swap(order[i - 1], order[next_random() % i]);
    for (int k : order) {
      State s = run.lane[k].state;
      if (s == IDLE || s == READY) enter(k);
    }
    left = 0;
    for (int k = 0; k < run.n; k++) left += run.lane[k].state != ENDED;
    if (left && !settle()) say_stuck();
  }
  drop_lanes();
}

uint64_t common(uint64_t a, uint64_t b) { return b ? common(b, a % b) : a; }

/* The k-th of n blocks to run. */
uint64_t block_at(uint64_t k, uint64_t n, uint64_t step) {
  if (run.random) return (k * step + step / 2) % n;
  return run.reverse ? n - 1 - k : k;
}

void choose_order(std::vector<int> *order, uint64_t n_blocks, uint64_t *step) {
  const char *how = getenv("ORRERY_FAKE_LANES");
  run.reverse = how && strcmp(how, "reverse") == 0;
  run.random = how && *how >= '1' && *how <= '9' ? strtoull(how, nullptr, 10) : 0;
  for (int k = 0; k < run.n; k++) order->push_back(run.reverse ? run.n - 1 - k : k);
  *step = 1;
  if (run.random)
    for (*step = next_random() % n_blocks + 1; common(*step, n_blocks) != 1;) ++*step;
}

} // namespace

uint64_t orr_fake_meet(orr_fake_sync kind, unsigned mask, uint64_t value, int source) {
  int k = run.current;
  Lane *me = &run.lane[k];
  if (kind != ORR_FAKE_BLOCK && !(mask >> (k % 32) & 1))
    go_wrong("thread " + std::to_string(k) + " is not in the mask that it gives");
  me->state = WAITS;
  me->kind = kind;
  me->mask = mask;
  me->value = value;
  me->source = source;
  fiber_leave(me->fiber);
  place_lane(k);
  return me->value;
}

int orr_fake_lane(void) { return run.current % 32; }

void *orr_fake_dynamic_shared(void) { return run.arena; }

void *orr_fake_shared(const void *key, size_t bytes) {
  void *&p = run.shared[key];
  if (p) return p;
  bytes = (bytes + 15) / 16 * 16;
  if (run.used + bytes > sizeof run.arena) {
    go_wrong("more than 48 KiB of shared memory");
    return p = run.arena;
  }
  p = run.arena + run.used;
  run.used += bytes;
  if (run.dirty < run.used) run.dirty = run.used;
  return p;
}

std::string orr_fake_refusal(dim3 grid, dim3 block, size_t shared) {
  uint64_t lanes = (uint64_t)block.x * block.y * block.z;
  if (lanes < 1 || lanes > MOST_LANES || block.z > 64)
    return "a block of " + std::to_string(lanes) + " threads";
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > INT32_MAX || grid.y > 65535 ||
      grid.z > 65535)
    return "a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
           std::to_string(grid.z) + " blocks";
  if (shared > MOST_SHARED) return std::to_string(shared) + " bytes of shared memory";
  return "";
}

std::string orr_fake_run(dim3 grid, dim3 block, size_t shared,
                         const std::function<void()> &kernel) {
  std::vector<int> order;
  std::string refusal = orr_fake_refusal(grid, block, shared);
  uint64_t n = (uint64_t)grid.x * grid.y * grid.z, step;
  if (!refusal.empty()) return "not launched: " + refusal;
  run.n = (int)(block.x * block.y * block.z);
  run.kernel = &kernel;
  run.dynamic = (shared + 15) / 16 * 16;
  run.dirty = sizeof run.arena;
  run.wrong.clear();
  choose_order(&order, n, &step);
  orr_fake_now.block_size = block;
  orr_fake_now.grid_size = grid;
  orr_fake_when.launch++;
  orr_fake_is_runner = true;
  for (uint64_t k = 0; k < n && run.wrong.empty(); k++) {
    uint64_t b = block_at(k, n, step);
    orr_fake_when.block = (uint32_t)b;
    orr_fake_now.block = dim3((unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y),
                              (unsigned)(b / grid.x / grid.y));
    run_block(order);
  }
  orr_fake_is_runner = false;
  orr_fake_when.lane = ORR_FAKE_NO_LANE;
  return run.wrong;
}

void orr_fake_go_wrong(const std::string &what) { go_wrong(what); }

bool orr_fake_on_stack(const void *p) {
  const Fiber *f = run.lane[run.current].fiber;
  return f && (const char *)p >= f->memory && (const char *)p < f->memory + FIBER_STACK;
}

bool orr_fake_is_shared(const void *p) {
  return (const char *)p >= run.arena && (const char *)p < run.arena + sizeof run.arena;
}
