/* cudart.cpp: the fake CUDA runtime: devices, memory, errors. Streams: streams.cpp.
 *
 * Invariant: under ORRERY_FAKE_GUARD=1 device memory cannot be read or written by the host
 * except while streams drain (from another thread it can, in that moment), and a kernel that
 * touches a GPU that it may not reach loses its own. Pointers, devices and sizes are checked at
 * every call; orr_fake_report gives the complaints.
 * ORRERY_FAKE_GUARD (0), ORRERY_FAKE_GPUS (4), ORRERY_FAKE_MEMORY (MiB a GPU, 4096),
 * ORRERY_FAKE_PEERS (1), ORRERY_FAKE_DRIVER (its CUDA version), ORRERY_FAKE_LEAKS (1: what lives at the end is printed; 2: and what was called), and
 * report.cpp's; CUDA_VISIBLE_DEVICES.
 * To add a device property: cudaDeviceProp in include/, its value in cudaGetDeviceProperties.
 */
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <vector>

#include "device.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

namespace {

std::map<char *, size_t> &pinned =
    *new std::map<char *, size_t>; /* lives as long as exit handlers */
thread_local int current;
thread_local cudaError_t last;
int unlocked;
int reader = -1; /* whose memory, and its peers', is open; -1: all of it */

struct Gpu {
  char *arena;
  size_t size;
  std::map<size_t, size_t> held; /* offset to bytes asked for */
  std::map<size_t, size_t> room; /* offset to bytes free */
  std::string lost;
  unsigned peers; /* ordinals whose memory its kernels may touch */
};
char *all_memory; /* the GPUs' arenas, one after another */
size_t all_bytes;
bool guarded;
std::vector<Gpu> &gpus = *new std::vector<Gpu>;    /* physical */
std::vector<int> &visible = *new std::vector<int>; /* ordinals to physical */
bool opened;

std::string uuid_text(int gpu) {
  char text[64];
  snprintf(text, sizeof text, "GPU-fa4e0000-0000-4000-8000-0000000000%02x", gpu);
  return text;
}

/* As the driver reads CUDA_VISIBLE_DEVICES: a list of indices or UUID prefixes; what is wrong
 * hides itself and the rest. */
void see(int n) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) {
    for (int k = 0; k < n; k++) visible.push_back(k);
    return;
  }
  std::stringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    char *end;
    long k = strtol(word.c_str(), &end, 10);
    if (word.rfind("GPU-", 0) == 0) {
      int fit = 0;
      for (int j = 0; j < n; j++)
        if (uuid_text(j).rfind(word, 0) == 0) fit++, k = j;
      if (fit != 1) return;
    } else if (word.empty() || *end) {
      return;
    }
    if (k < 0 || k >= n) return;
    for (int seen : visible)
      if (seen == k) return;
    visible.push_back((int)k);
  }
}

void watch_memory();

void open_gpus() {
  if (opened) return;
  opened = true;
  int n = (int)orr_fake_number("ORRERY_FAKE_GPUS", 4);
  size_t bytes = (size_t)orr_fake_number("ORRERY_FAKE_MEMORY", 4096) << 20;
  gpus.resize((size_t)n);
  all_bytes = bytes * (size_t)n;
  guarded = orr_fake_number("ORRERY_FAKE_GUARD", 0) != 0;
  all_memory = (char *)mmap(nullptr, all_bytes, guarded ? PROT_NONE : PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (Gpu &g : gpus) {
    g.size = bytes;
    g.peers = 0;
    g.arena = all_memory + bytes * (size_t)(&g - gpus.data());
    g.room[0] = bytes;
    ASAN_POISON_MEMORY_REGION(g.arena, bytes);
  }
  see(n);
  if (guarded) watch_memory();
}

Gpu *gpu_at(int ordinal) {
  open_gpus();
  return ordinal >= 0 && ordinal < (int)visible.size() ? &gpus[(size_t)visible[(size_t)ordinal]]
                                                       : nullptr;
}

Gpu *owner(const void *p) {
  for (Gpu &g : gpus)
    if ((char *)p >= g.arena && (char *)p < g.arena + g.size) return &g;
  return nullptr;
}

int ordinal_of(const Gpu *g) {
  for (int k = 0; k < (int)visible.size(); k++)
    if (&gpus[(size_t)visible[(size_t)k]] == g) return k;
  return -1;
}

bool reaches(int ordinal, const Gpu *g) {
  int other = ordinal_of(g);
  return other == ordinal || (other >= 0 && gpu_at(ordinal)->peers >> other & 1);
}

void set_access(int access) {
  if (guarded) mprotect(all_memory, all_bytes, access);
}

/* Device memory was touched by who may not: a kernel goes on, and its device is lost; the host
 * ends, as it does where memory is not its own. */
void caught(int, siginfo_t *info, void *) {
  static const char text[] = "fake: the host touches device memory\n";
  Gpu *g = owner(info->si_addr);
  if (g && unlocked && reader >= 0) {
    orr_fake_complain(
        "a kernel of device %d touches memory of device %d, which it cannot reach", reader,
        ordinal_of(g));
    orr_fake_lose(reader, "an illegal memory access");
    mprotect(g->arena, g->size, PROT_READ | PROT_WRITE);
    return;
  }
  if (g && write(2, text, sizeof text - 1) < 0) {}
  signal(SIGSEGV, SIG_DFL);
}

void watch_memory() {
  struct sigaction action = {};
  action.sa_sigaction = caught;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
}

} // namespace

/* ---- what all parts use ---- */

void orr_fake_lose(int ordinal, const char *why) {
  Gpu *g = gpu_at(ordinal);
  if (g && g->lost.empty()) g->lost = why;
}

bool orr_fake_is_lost(int ordinal) { return gpu_at(ordinal) && !gpu_at(ordinal)->lost.empty(); }

bool orr_fake_is_device(const void *p, size_t bytes) {
  Gpu *g = owner(p);
  if (!g) return false;
  size_t at = (size_t)((char *)p - g->arena);
  auto block = g->held.upper_bound(at);
  if (block == g->held.begin()) return false;
  --block;
  return at + bytes <= block->first + block->second;
}

bool orr_fake_may_use(int device, const void *p, size_t bytes, const char *who) {
  Gpu *g = owner(p);
  if (g && orr_fake_is_device(p, bytes) && reaches(device, g)) return true;
  orr_fake_complain("%s: %zu bytes are not memory that device %d can use", who, bytes, device);
  return false;
}

bool orr_fake_is_arena(const void *p) { return owner(p) != nullptr; }

int orr_fake_owner(const void *p) {
  Gpu *g = owner(p);
  return g ? ordinal_of(g) : -1;
}

bool orr_fake_is_pinned(const void *p, size_t bytes) {
  auto block = pinned.upper_bound((char *)p);
  if (block == pinned.begin()) return false;
  --block;
  return (char *)p + bytes <= block->first + block->second;
}

int orr_fake_current(void) { return current; }

cudaError_t orr_fake_note(cudaError_t status) {
  if (status != cudaSuccess) last = status;
  return status;
}

cudaError_t orr_fake_injected(cudaError_t plain) {
  orr_fake_kind kind = orr_fake_kind_now();
  return orr_fake_note(kind == FAKE_LOST     ? cudaErrorIllegalAddress
                       : kind == FAKE_MEMORY ? cudaErrorMemoryAllocation
                                             : plain);
}

void orr_fake_unlock_memory(void) {
  if (unlocked++ > 0) return;
  reader = -1;
  set_access(PROT_READ | PROT_WRITE);
}

void orr_fake_lock_memory(void) {
  if (--unlocked == 0) set_access(PROT_NONE);
}

void orr_fake_unlock_for(int ordinal) {
  if (!guarded || reader == ordinal) return;
  reader = ordinal;
  for (Gpu &g : gpus)
    mprotect(g.arena, g.size,
             ordinal < 0 || reaches(ordinal, &g) ? PROT_READ | PROT_WRITE : PROT_NONE);
}

extern "C" {

/* ---- devices ---- */

#define CHECKED(status) return orr_fake_note(status)
#define CALL(name) FAKE_CALL(name, orr_fake_injected(cudaErrorUnknown))
#define CALL_OF(device, name)                                \
  std::lock_guard<std::recursive_mutex> hold(orr_fake_lock); \
  if (orr_fake_fails_on(device, name)) return orr_fake_injected(cudaErrorUnknown)
#define ALIVE(ordinal) \
  if (orr_fake_is_lost(ordinal)) CHECKED(cudaErrorIllegalAddress)

cudaError_t cudaGetDeviceCount(int *count) {
  CALL("cudaGetDeviceCount");
  open_gpus();
  *count = 0;
  if (orr_fake_number("ORRERY_FAKE_DRIVER", CUDART_VERSION) < CUDART_VERSION)
    CHECKED(cudaErrorInsufficientDriver);
  *count = (int)visible.size();
  CHECKED(visible.empty() ? cudaErrorNoDevice : cudaSuccess);
}

cudaError_t cudaSetDevice(int device) {
  if (!gpu_at(device)) CHECKED(cudaErrorInvalidDevice);
  std::lock_guard<std::recursive_mutex> hold(orr_fake_lock);
  if (orr_fake_fails_on(device, "cudaSetDevice")) return orr_fake_injected(cudaErrorUnknown);
  current = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  CALL("cudaGetDevice");
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
  CALL_OF(device, "cudaGetDeviceProperties");
  Gpu *g = gpu_at(device);
  if (!g) CHECKED(cudaErrorInvalidDevice);
  int k = visible[(size_t)device];
  memset(prop, 0, sizeof *prop);
  snprintf(prop->name, sizeof prop->name, "Fake GPU");
  static const unsigned char id[16] = {0xfa, 0x4e, 0, 0, 0, 0, 0x40, 0, 0x80};
  memcpy(prop->uuid.bytes, id, 16);
  prop->uuid.bytes[15] = (char)k;
  prop->totalGlobalMem = g->size;
  prop->major = 9;
  prop->multiProcessorCount = 4;
  prop->pciBusID = 0x10 + k;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device) {
  CALL("cudaDeviceGetAttribute");
  (void)attr;
  if (!gpu_at(device)) CHECKED(cudaErrorInvalidDevice);
  *value = 4;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  CALL_OF(device, "cudaDeviceGetPCIBusId");
  if (!gpu_at(device)) CHECKED(cudaErrorInvalidDevice);
  snprintf(text, (size_t)size, "0000:%02x:00.0", 0x10 + visible[(size_t)device]);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  CALL("cudaDeviceCanAccessPeer");
  if (!gpu_at(device) || !gpu_at(peer)) CHECKED(cudaErrorInvalidDevice);
  *can = device != peer && orr_fake_number("ORRERY_FAKE_PEERS", 1) != 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  CALL("cudaDeviceEnablePeerAccess");
  (void)flags;
  Gpu *g = gpu_at(current);
  if (!gpu_at(peer) || peer == current) CHECKED(cudaErrorInvalidDevice);
  if (!orr_fake_number("ORRERY_FAKE_PEERS", 1)) CHECKED(cudaErrorPeerAccessUnsupported);
  if (g->peers >> peer & 1) CHECKED(cudaErrorPeerAccessAlreadyEnabled);
  g->peers |= 1u << peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetP2PAttribute(int *value, enum cudaDeviceP2PAttr attr, int a, int b) {
  CALL("cudaDeviceGetP2PAttribute");
  (void)attr;
  if (!gpu_at(a) || !gpu_at(b) || a == b) CHECKED(cudaErrorInvalidDevice);
  *value = (int)orr_fake_number("ORRERY_FAKE_PEERS", 1);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  CALL("cudaDriverGetVersion");
  *version = (int)orr_fake_number("ORRERY_FAKE_DRIVER", CUDART_VERSION);
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  CALL("cudaRuntimeGetVersion");
  *version = CUDART_VERSION;
  return cudaSuccess;
}

/* Forgets the error whatever happens; one that is injected is told and forgotten too. A lost
 * device stays lost: its calls fail again. */
cudaError_t cudaGetLastError(void) {
  std::lock_guard<std::recursive_mutex> hold(orr_fake_lock);
  cudaError_t status =
      orr_fake_fails("cudaGetLastError") ? orr_fake_injected(cudaErrorUnknown) : last;
  last = cudaSuccess;
  return status;
}

const char *cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorLaunchOutOfResources: return "too many resources requested for launch";
    case cudaErrorPeerAccessUnsupported: return "peer access is not supported";
    case cudaErrorPeerAccessAlreadyEnabled: return "peer access is already enabled";
    default: return "unknown error";
  }
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **out, size_t bytes) {
  FAKE_CALL("cudaMalloc", orr_fake_injected(cudaErrorMemoryAllocation));
  if (orr_fake_is_unsafe("cudaMalloc")) CHECKED(cudaErrorStreamCaptureUnsupported);
  Gpu *g = gpu_at(current);
  ALIVE(current);
  size_t size = (bytes + 511) / 512 * 512 + 512;
  for (auto room = g->room.begin(); room != g->room.end(); ++room) {
    if (room->second < size) continue;
    size_t at = room->first, rest = room->second - size;
    g->room.erase(room);
    if (rest) g->room[at + size] = rest;
    g->held[at] = bytes;
    *out = g->arena + at;
    orr_fake_born(*out, "memory of a GPU");
    orr_fake_unlock_memory();
    ASAN_UNPOISON_MEMORY_REGION(*out, bytes);
    memset(*out, 0xFF, bytes);
    orr_fake_lock_memory();
    return cudaSuccess;
  }
  CHECKED(cudaErrorMemoryAllocation);
}

static cudaError_t release(void *p) {
  if (orr_fake_is_unsafe("cudaFree")) CHECKED(cudaErrorStreamCaptureUnsupported);
  if (!p) return cudaSuccess;
  Gpu *g = owner(p);
  size_t at = g ? (size_t)((char *)p - g->arena) : 0;
  if (!g || !g->held.count(at)) {
    orr_fake_complain("cudaFree of what cudaMalloc did not give");
    CHECKED(cudaErrorInvalidValue);
  }
  orr_fake_gone(p);
  if (orr_fake_wait_for(ordinal_of(g)) == cudaErrorIllegalAddress)
    CHECKED(cudaErrorIllegalAddress); /* a lost device's memory is nobody's any more */
  ASAN_POISON_MEMORY_REGION(p, g->held[at]);
  size_t size = (g->held[at] + 511) / 512 * 512 + 512;
  g->held.erase(at);
  g->room[at] = size;
  for (auto room = g->room.begin(); room != g->room.end();) { /* join neighbours */
    auto next = std::next(room);
    if (next != g->room.end() && room->first + room->second == next->first) {
      room->second += next->second;
      g->room.erase(next);
    } else {
      room = next;
    }
  }
  return cudaSuccess;
}

FAKE_RELEASE(cudaError_t, cudaFree, void *, p, orr_fake_injected(cudaErrorUnknown), release)

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
  CALL("cudaMemGetInfo");
  Gpu *g = gpu_at(current);
  *total = *left = g->size;
  for (auto &block : g->held) *left -= block.second;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
  FAKE_CALL("cudaHostAlloc", orr_fake_injected(cudaErrorMemoryAllocation));
  (void)flags;
  *out = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (!*out) CHECKED(cudaErrorMemoryAllocation);
  memset(*out, 0xFF, bytes);
  pinned[(char *)*out] = bytes;
  orr_fake_born(*out, "pinned memory");
  return cudaSuccess;
}

static cudaError_t release_host(void *p) {
  if (!pinned.count((char *)p)) {
    orr_fake_complain("cudaFreeHost of what cudaHostAlloc did not give");
    CHECKED(cudaErrorInvalidValue);
  }
  orr_fake_wait_for(current);
  orr_fake_drain_all();
  pinned.erase((char *)p);
  orr_fake_gone(p);
  free(p);
  return cudaSuccess;
}

FAKE_RELEASE(cudaError_t, cudaFreeHost, void *, p, orr_fake_injected(cudaErrorUnknown),
             release_host)

} // extern "C"
