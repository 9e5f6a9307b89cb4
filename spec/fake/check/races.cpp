/* races.cpp: finds races between the threads of a kernel: what the compiler calls before each
 * access under -fsanitize=thread (kernels alone are compiled so; nothing is linked so).
 *
 * Invariant: two accesses to a byte in one launch, one of them a write, race unless one thread
 * makes both, a barrier of their block lies between, or they are of one warp and a barrier of
 * the warp does. Shuffles order nothing, and nothing orders two blocks. Atomic and volatile
 * accesses, and those of threads that only launch, are left out. The first race of a launch is
 * its error, with both source lines.
 * To add an access that the compiler calls by another name: its row below.
 */
#include <dlfcn.h>

#include <cstdio>
#include <memory>
#include <unordered_map>

#include "../fake.h"

namespace {

enum { PAGE = 256 };

/* Who made an access. lane ORR_FAKE_NO_LANE: nobody. */
struct Stamp {
  uint32_t block, lane, block_epoch, warp_epoch;
  const void *where;
};

struct Cell {
  uint64_t launch;
  Stamp write, read[2]; /* reads: of two threads, so that one is not the next writer's */
};

struct Page {
  Cell cell[PAGE];
};

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
uintptr_t last_key;
Page *last_page;
uint64_t told; /* the launch whose race is known */

const Stamp nobody = {0, ORR_FAKE_NO_LANE, 0, 0, nullptr};

Cell *cell_at(uintptr_t at) {
  uintptr_t key = at / PAGE;
  if (!last_page || key != last_key) {
    std::unique_ptr<Page> &p = pages[key];
    if (!p) p.reset(new Page());
    last_key = key;
    last_page = p.get();
  }
  return &last_page->cell[at % PAGE];
}

bool is_ordered(const Stamp &old, const Stamp &now, bool shared) {
  if (old.lane == ORR_FAKE_NO_LANE) return true;
  if (old.block != now.block) return shared;
  return old.lane == now.lane || old.block_epoch < now.block_epoch ||
         (old.lane / 32 == now.lane / 32 && old.warp_epoch < now.warp_epoch);
}

/* "softmax.cu:120" */
std::string line_of(const void *where) {
  Dl_info info;
  char command[700], line[300] = "?";
  if (!dladdr(where, &info)) return line;
  snprintf(command, sizeof command, "addr2line -s -e '%s' %#lx 2>/dev/null", info.dli_fname,
           (unsigned long)((const char *)where - (const char *)info.dli_fbase - 1));
  FILE *out = popen(command, "r");
  if (!out) return line;
  if (fscanf(out, "%299s", line) != 1) line[0] = '?', line[1] = '\0';
  pclose(out);
  return line;
}

std::string text_of(const Stamp &s, const char *does) {
  return "thread " + std::to_string(s.lane) + " of block " + std::to_string(s.block) + " " +
         does + " at " + line_of(s.where);
}

void tell(const Stamp &old, const char *did, const Stamp &now, const char *does, bool shared) {
  if (told == orr_fake_when.launch) return;
  told = orr_fake_when.launch;
  orr_fake_go_wrong(std::string("a race in ") + (shared ? "shared" : "global") +
                    " memory: " + text_of(old, did) + ", " + text_of(now, does) +
                    ", and no barrier lies between");
}

void meet(Cell *c, const Stamp &now, bool writes, bool shared) {
  if (c->launch != orr_fake_when.launch)
    *c = Cell{orr_fake_when.launch, nobody, {nobody, nobody}};
  if (!is_ordered(c->write, now, shared))
    tell(c->write, "writes", now, writes ? "writes" : "reads", shared);
  if (!writes) {
    bool mine = c->read[0].block == now.block && c->read[0].lane == now.lane;
    if (!mine && c->read[0].lane != ORR_FAKE_NO_LANE) c->read[1] = c->read[0];
    c->read[0] = now;
    return;
  }
  for (const Stamp &read : c->read)
    if (!is_ordered(read, now, shared)) tell(read, "reads", now, "writes", shared);
  c->write = now;
  c->read[0] = c->read[1] = nobody;
}

void access(const void *p, size_t bytes, bool writes, const void *where) {
  const orr_fake_time &t = orr_fake_when;
  if (!orr_fake_is_runner || t.lane == ORR_FAKE_NO_LANE || orr_fake_on_stack(p)) return;
  Stamp now = {t.block, t.lane, t.block_epoch, t.warp_epoch, where};
  bool shared = orr_fake_is_shared(p);
  for (size_t k = 0; k < bytes; k++) meet(cell_at((uintptr_t)p + k), now, writes, shared);
}

} // namespace

#define CALLER __builtin_return_address(0)
#define ACCESSES(n)                                                       \
  void __tsan_read##n(void *p) { access(p, n, false, CALLER); }           \
  void __tsan_write##n(void *p) { access(p, n, true, CALLER); }           \
  void __tsan_unaligned_read##n(void *p) { access(p, n, false, CALLER); } \
  void __tsan_unaligned_write##n(void *p) { access(p, n, true, CALLER); } \
  void __tsan_volatile_read##n(void *) {}                                 \
  void __tsan_volatile_write##n(void *) {}                                \
  void __tsan_unaligned_volatile_read##n(void *) {}                       \
  void __tsan_unaligned_volatile_write##n(void *) {}

extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void *p, size_t bytes) { access(p, bytes, false, CALLER); }
void __tsan_write_range(void *p, size_t bytes) { access(p, bytes, true, CALLER); }
void __tsan_vptr_update(void **, void *) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
