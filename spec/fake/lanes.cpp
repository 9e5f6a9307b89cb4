/* lanes.cpp: runs kernels on the CPU, every CUDA thread a coroutine on the caller's thread.
 *
 * Invariant: one block at a time, its lanes in the order that ORRERY_FAKE_LANES says (forward,
 * reverse, or a seed for a random order each round); a lane runs until it meets others or ends,
 * so a missing barrier shows. Shared memory is poisoned for every block. A barrier that some
 * lanes never reach, or a shuffle with lanes that have ended, is an error of the launch.
 * To add a way for lanes to meet: a kind in orr_fake_sync, its case in `settle`.
 */
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "fake.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define FAKE_ASAN 1
#else
#define FAKE_ASAN 0
#endif

orr_fake_place orr_fake_now;

namespace {

enum { STACK = 64 * 1024, MOST_LANES = 1024, MOST_SHARED = 227 * 1024 };

enum State { IDLE, READY, WAITS, ENDED };

/* ---- switching stacks ---- */

#if defined(__x86_64__)
extern "C" void orr_fake_switch(void **save, void *load);
asm(".text\n.type orr_fake_switch,@function\norr_fake_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n"
    ".size orr_fake_switch,.-orr_fake_switch\n");
#define FAKE_SWITCH 1
#else
#define FAKE_SWITCH 0
#endif

struct Stack {
  char *memory;
#if FAKE_SWITCH
  void *at;
#else
  ucontext_t context;
#endif
};

struct Lane {
  State state;
  orr_fake_sync kind;
  unsigned mask;
  uint64_t value;
  int source;
  Stack *stack;
};

struct Runner {
  Lane lane[MOST_LANES];
  int n, current;
  const std::function<void()> *kernel;
  std::vector<Stack *> free;
  Stack *last; /* the one whose lane ended last: still warm */
#if FAKE_SWITCH
  void *home;
#else
  ucontext_t home;
#endif
  std::map<const void *, void *> shared;
  std::vector<char> arena;
  size_t used, dynamic;
  std::string wrong;
  uint64_t random;
#if FAKE_ASAN
  const void *home_bottom;
  size_t home_size;
  void *fake_stack;
#endif
};

Runner run;

uint64_t next_random() {
  run.random ^= run.random << 13;
  run.random ^= run.random >> 7;
  run.random ^= run.random << 17;
  return run.random * 0x2545F4914F6CDD1Dull >> 32;
}

/* Back to the scheduler; the stack's place is kept, or (ends) forgotten. */
void leave(Lane *lane, bool ends) {
#if FAKE_ASAN
  void *fake = nullptr;
  __sanitizer_start_switch_fiber(ends ? nullptr : &fake, run.home_bottom, run.home_size);
#endif
#if FAKE_SWITCH
  void *scrap;
  orr_fake_switch(ends ? &scrap : &lane->stack->at, run.home);
#else
  swapcontext(&lane->stack->context, &run.home);
#endif
#if FAKE_ASAN
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  (void)ends;
}

/* The bottom of every stack: lanes one after another, as long as they end without meeting. */
[[noreturn]] void lane_main() {
#if FAKE_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &run.home_bottom, &run.home_size);
#endif
  for (;;) {
    (*run.kernel)();
    Lane *me = &run.lane[run.current];
    me->state = ENDED;
    run.free.push_back(me->stack);
    Stack *mine = me->stack;
    me->stack = nullptr;
    Lane back = {};
    back.stack = mine;
    leave(&back, false);
  }
}

Stack *stack_new() {
  Stack *s = new Stack;
  s->memory = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                           -1, 0);
#if FAKE_SWITCH
  void **top = (void **)(s->memory + STACK - 16);
  *--top = nullptr; /* as a call leaves it */
  *--top = (void *)lane_main;
  top -= 6;
  memset(top, 0, 6 * sizeof *top);
  s->at = top;
#else
  getcontext(&s->context);
  s->context.uc_stack.ss_sp = s->memory;
  s->context.uc_stack.ss_size = STACK;
  makecontext(&s->context, (void (*)())lane_main, 0);
#endif
  return s;
}

void place_lane(int k) {
  const dim3 &b = orr_fake_now.block_size;
  orr_fake_now.thread = dim3((unsigned)k % b.x, (unsigned)k / b.x % b.y, (unsigned)k / b.x / b.y);
  run.current = k;
}

void enter(int k) {
  Lane *lane = &run.lane[k];
  if (!lane->stack) {
    if (run.free.empty()) run.free.push_back(stack_new());
    lane->stack = run.free.back();
    run.free.pop_back();
  }
  lane->state = READY;
  place_lane(k);
  Stack *s = lane->stack;
#if FAKE_ASAN
  __sanitizer_start_switch_fiber(&run.fake_stack, s->memory, STACK);
#endif
#if FAKE_SWITCH
  orr_fake_switch(&run.home, s->at);
#else
  swapcontext(&run.home, &s->context);
#endif
#if FAKE_ASAN
  __sanitizer_finish_switch_fiber(run.fake_stack, nullptr, nullptr);
#endif
}

/* ---- meeting ---- */

int warp_end(int first) { return first + 32 < run.n ? first + 32 : run.n; }

/* All lanes of the warp's mask that exist wait for the same; what each gets. */
bool settle_warp(int first) {
  int end = warp_end(first);
  unsigned mask = 0, there = 0;
  orr_fake_sync kind = ORR_FAKE_BLOCK;
  for (int k = first; k < end; k++) {
    const Lane &l = run.lane[k];
    if (l.state != WAITS || l.kind == ORR_FAKE_BLOCK) continue;
    if (!mask) {
      mask = l.mask;
      kind = l.kind;
    }
    if (l.kind == kind && l.mask == mask) there |= 1u << (k - first);
  }
  if (!mask) return false;
  unsigned exist = end - first == 32 ? ~0u : (1u << (end - first)) - 1;
  if ((mask & exist) & ~there) return false;
  unsigned ballot = 0;
  uint64_t result[32] = {};
  for (int k = first; k < end; k++)
    if (there >> (k - first) & 1 && run.lane[k].value) ballot |= 1u << (k - first);
  for (int k = first; k < end; k++) {
    if (!(there >> (k - first) & 1)) continue;
    int from = run.lane[k].source;
    bool has = from >= 0 && from < end - first && there >> from & 1;
    result[k - first] = kind == ORR_FAKE_BALLOT ? ballot
                        : has                   ? run.lane[first + from].value
                                                : run.lane[k].value;
  }
  for (int k = first; k < end; k++) {
    if (!(there >> (k - first) & 1)) continue;
    run.lane[k].value = result[k - first];
    run.lane[k].state = READY;
  }
  return true;
}

bool settle_block() {
  for (int k = 0; k < run.n; k++) {
    const Lane &l = run.lane[k];
    if (l.state != ENDED && (l.state != WAITS || l.kind != ORR_FAKE_BLOCK)) return false;
  }
  bool any = false;
  for (int k = 0; k < run.n; k++) {
    if (run.lane[k].state == ENDED) continue;
    run.lane[k].state = READY;
    any = true;
  }
  return any;
}

bool settle() {
  bool moved = false;
  for (int first = 0; first < run.n; first += 32) moved = settle_warp(first) || moved;
  return moved || settle_block();
}

/* "thread 33 waits for the block, 64 to 95 have ended" */
void say_stuck() {
  static const char *const what[] = {"a barrier of the block", "a barrier of the warp",
                                     "a shuffle", "a ballot"};
  char line[200];
  int waits = 0, ended = 0, first = -1;
  for (int k = 0; k < run.n; k++) {
    waits += run.lane[k].state == WAITS;
    ended += run.lane[k].state == ENDED;
    if (run.lane[k].state == WAITS && first < 0) first = k;
  }
  const Lane &l = run.lane[first < 0 ? 0 : first];
  snprintf(line, sizeof line,
           "%d of %d threads wait, %d have ended: thread %d waits at %s (mask %08x) that the "
           "others do not reach",
           waits, run.n, ended, first, what[l.kind], l.mask);
  run.wrong = line;
}

void run_block(const std::vector<int> &forward) {
  std::vector<int> order = forward;
  memset(run.arena.data(), 0xFF, run.used);
  run.shared.clear();
  run.used = run.dynamic;
  for (int k = 0; k < run.n; k++) run.lane[k] = Lane{IDLE, ORR_FAKE_BLOCK, 0, 0, 0, nullptr};
  for (;;) {
    int left = 0;
    for (size_t i = order.size(); run.random && i > 1; i--)
      std::swap(order[i - 1], order[next_random() % i]);
    for (int k : order) {
      State s = run.lane[k].state;
      if (s == IDLE || s == READY) enter(k);
    }
    for (int k = 0; k < run.n; k++) left += run.lane[k].state != ENDED;
    if (!left) return;
    if (!settle()) {
      say_stuck();
      return;
    }
  }
}

}  // namespace

uint64_t orr_fake_meet(orr_fake_sync kind, unsigned mask, uint64_t value, int source) {
  Lane *me = &run.lane[run.current];
  int k = run.current;
  me->state = WAITS;
  me->kind = kind;
  me->mask = mask;
  me->value = value;
  me->source = source;
  leave(me, false);
  place_lane(k);
  return me->value;
}

int orr_fake_lane(void) { return run.current % 32; }

void *orr_fake_dynamic_shared(void) { return run.arena.data(); }

void *orr_fake_shared(const void *key, size_t bytes) {
  void *&p = run.shared[key];
  if (p) return p;
  bytes = (bytes + 15) / 16 * 16;
  if (run.used + bytes > run.arena.size()) {
    run.wrong = "more shared memory than a block has";
    return p = run.arena.data();
  }
  p = run.arena.data() + run.used;
  run.used += bytes;
  return p;
}

std::string orr_fake_run(dim3 grid, dim3 block, size_t shared,
                         const std::function<void()> &kernel) {
  const char *how = getenv("ORRERY_FAKE_LANES");
  std::vector<int> order;
  run.n = (int)(block.x * block.y * block.z);
  if (run.n < 1 || run.n > MOST_LANES) return "a block of " + std::to_string(run.n) + " threads";
  if (shared > MOST_SHARED) return "more shared memory than a block has";
  bool reverse = how && strcmp(how, "reverse") == 0;
  run.random = how && *how >= '1' && *how <= '9' ? strtoull(how, nullptr, 10) : 0;
  for (int k = 0; k < run.n; k++) order.push_back(reverse ? run.n - 1 - k : k);
  run.arena.resize(MOST_SHARED + 4096);
  run.kernel = &kernel;
  run.dynamic = (shared + 15) / 16 * 16;
  run.used = run.arena.size() < 49152 ? run.arena.size() : run.dynamic + 49152;
  if (run.used > run.arena.size()) run.used = run.arena.size();
  run.wrong.clear();
  orr_fake_now.block_size = block;
  orr_fake_now.grid_size = grid;
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        orr_fake_now.block = dim3(x, y, z);
        run_block(order);
        if (!run.wrong.empty()) return run.wrong;
      }
  return "";
}
