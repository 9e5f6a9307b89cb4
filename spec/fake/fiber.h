/* fiber.h: stacks to switch between, for lanes.cpp alone.
 *
 * Invariant: one thread at a time uses fibers. fiber_enter runs a fiber until it leaves; the
 * function at its bottom does not return; fiber_free may be called wherever the fiber stands.
 * AddressSanitizer is told of every switch, and a page below every stack may not be touched.
 * To add a machine: its registers in orr_fake_switch; ucontext serves the others.
 */
#ifndef ORR_FAKE_FIBER_H
#define ORR_FAKE_FIBER_H

#include <sys/mman.h>
#include <ucontext.h>

#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define FAKE_ASAN 1
#else
#define FAKE_ASAN 0
#endif

enum { FIBER_GUARD = 4096, FIBER_STACK = 256 * 1024 };

#if defined(__x86_64__)
#define FAKE_SWITCH 1
extern "C" void orr_fake_switch(void **save, void *load);
asm(".text\n.hidden orr_fake_switch\n.type orr_fake_switch,@function\norr_fake_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n"
    ".size orr_fake_switch,.-orr_fake_switch\n");
#elif defined(__aarch64__)
#define FAKE_SWITCH 1
extern "C" void orr_fake_switch(void **save, void *load);
asm(".text\n.hidden orr_fake_switch\n.type orr_fake_switch,%function\norr_fake_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n"
    "  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n"
    "  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n"
    ".size orr_fake_switch,.-orr_fake_switch\n");
#else
#define FAKE_SWITCH 0
#endif

struct Fiber {
  char *memory; /* above a page that nobody may touch */
  void (*bottom)();
#if FAKE_SWITCH
  void *at;
#else
  ucontext_t context;
#endif
  void *asan;
};

#if FAKE_SWITCH
static void *fiber_home;
#else
static ucontext_t fiber_home;
#endif
static Fiber *fiber_now; /* the one that is entered */
#if FAKE_ASAN
static const void *fiber_home_bottom;
static size_t fiber_home_size;
#endif

static void fiber_first() {
#if FAKE_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &fiber_home_bottom, &fiber_home_size);
#endif
  fiber_now->bottom();
}

static void fiber_prepare(Fiber *f) {
#if FAKE_SWITCH
  void **top = (void **)(f->memory + FIBER_STACK - 16);
#if defined(__x86_64__)
  *--top = nullptr; /* as a call leaves it */
  *--top = (void *)fiber_first;
  top -= 6;
  memset(top, 0, 6 * sizeof *top);
#else
  top -= 20;
  memset(top, 0, 20 * sizeof *top);
  top[11] = (void *)fiber_first; /* x30 */
#endif
  f->at = top;
#else
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->memory;
  f->context.uc_stack.ss_size = FIBER_STACK;
  makecontext(&f->context, fiber_first, 0);
#endif
}

static Fiber *fiber_new(void (*bottom)()) {
  Fiber *f = new Fiber();
  char *memory = (char *)mmap(nullptr, FIBER_GUARD + FIBER_STACK, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  mprotect(memory, FIBER_GUARD, PROT_NONE);
  f->memory = memory + FIBER_GUARD;
  f->bottom = bottom;
  fiber_prepare(f);
  return f;
}

static void fiber_free(Fiber *take_fiber) {
  Fiber *f = take_fiber;
#if FAKE_ASAN
  __asan_unpoison_memory_region(f->memory, FIBER_STACK);
#endif
  munmap(f->memory - FIBER_GUARD, FIBER_GUARD + FIBER_STACK);
  delete f;
}

static void fiber_enter(Fiber *f) {
  fiber_now = f;
#if FAKE_ASAN
  void *fake;
  __sanitizer_start_switch_fiber(&fake, f->memory, FIBER_STACK);
#endif
#if FAKE_SWITCH
  orr_fake_switch(&fiber_home, f->at);
#else
  swapcontext(&fiber_home, &f->context);
#endif
#if FAKE_ASAN
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

static void fiber_leave(Fiber *f) {
#if FAKE_ASAN
  __sanitizer_start_switch_fiber(&f->asan, fiber_home_bottom, fiber_home_size);
#endif
#if FAKE_SWITCH
  orr_fake_switch(&f->at, fiber_home);
#else
  swapcontext(&f->context, &fiber_home);
#endif
#if FAKE_ASAN
  __sanitizer_finish_switch_fiber(f->asan, &fiber_home_bottom, &fiber_home_size);
#endif
}

#endif
