/* streams.cpp: lazy streams, events and copies of the fake runtime. Capture: graphs.cpp.
 *
 * Invariant: a call only queues. What is queued runs while somebody synchronises or asks: the
 * heads of the streams in an order picked by ORRERY_FAKE_SEED, bound by stream order and event
 * waits alone, so that a missing wait gives wrong numbers. Who waits for what cannot run any
 * more (ORRERY_FAKE_PATIENCE looks, 0.1 ms apart) gets an error.
 * To add an asynchronous call: orr_fake_push.
 */
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "stream.h"

std::vector<cudaStream_t> &orr_fake_streams = *new std::vector<cudaStream_t>;

namespace {

bool running;

bool is_stream(cudaStream_t s) { return orr_fake_is(s, "a stream"); }
bool is_event(cudaEvent_t e) { return orr_fake_is(e, "an event"); }

/* Work of a lost device goes without running. */
bool can_run(cudaStream_t s) {
  if (s->queue.empty()) return false;
  const Item &head = s->queue.front();
  return !head.ready || orr_fake_is_lost(s->device) || head.ready();
}

bool any_can_run() {
  if (running) return false;
  for (cudaStream_t s : orr_fake_streams)
    if (can_run(s)) return true;
  return false;
}

void pop(cudaStream_t s) {
  s->queue.pop_front();
  s->done++;
}

/* Runs one head that can run; false: there is none. */
bool step() {
  static std::vector<cudaStream_t> &able = *new std::vector<cudaStream_t>;
  if (running) return false;
  able.clear();
  for (cudaStream_t s : orr_fake_streams)
    if (can_run(s)) able.push_back(s);
  if (able.empty()) return false;
  cudaStream_t s = able[orr_fake_random() % able.size()];
  bool ended = true;
  running = true;
  if (orr_fake_is_lost(s->device)) {
  } else if (s->queue.front().part) {
    ended = s->queue.front().part();
  } else {
    Item item = s->queue.front();
    orr_fake_run_item(item, s->device);
  }
  running = false;
  if (ended) pop(s);
  return true;
}

struct Open { /* device memory, for the time of draining */
  Open() { orr_fake_unlock_memory(); }
  ~Open() { orr_fake_lock_memory(); }
};

void say_stuck() {
  std::string text = "nothing can run, and a stream is waited for; the heads are";
  for (cudaStream_t s : orr_fake_streams)
    if (!s->queue.empty())
      text += " [device " + std::to_string(s->device) + ": " + s->queue.front().name + "]";
  orr_fake_complain("%s", text.c_str());
}

/* Other threads may have to bring work first: the lock is given up between looks. */
template <typename Done>
cudaError_t drain_until(Done done) {
  for (long idle = 0; !done(); idle++) {
    if (any_can_run()) {
      Open memory;
      while (!done() && step()) {}
      idle = 0;
      continue;
    }
    if (idle > orr_fake_number("ORRERY_FAKE_PATIENCE", 20000)) {
      say_stuck();
      return cudaErrorUnknown;
    }
    orr_fake_lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    orr_fake_lock.lock();
  }
  return cudaSuccess;
}

/* As a GPU gets on by itself while it is asked. */
template <typename Done>
void run_some(Done done) {
  if (done() || !any_can_run()) return;
  Open memory;
  for (uint64_t n = 1 + orr_fake_random() % 16; n > 0 && !done() && step(); n--) {}
}

bool is_complete(cudaEvent_t e) { return !e->stream || e->stream->done >= e->seq; }

} // namespace

uint64_t orr_fake_random(void) {
  static uint64_t state;
  if (!state) state = (uint64_t)orr_fake_number("ORRERY_FAKE_SEED", 1) * 2 + 1;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state * 0x2545F4914F6CDD1Dull >> 32;
}

void orr_fake_run_item(const Item &item, int device) {
  orr_fake_unlock_for(item.is_kernel ? device : -1);
  if (item.run) item.run();
}

void orr_fake_drain_all(void) {
  if (!any_can_run()) return;
  Open memory;
  while (step()) {}
}

int orr_fake_device_of(cudaStream_t stream) { return stream->device; }

cudaError_t orr_fake_push_item(cudaStream_t s, Item item) {
  if (!is_stream(s)) return orr_fake_note(cudaErrorInvalidResourceHandle);
  if (orr_fake_is_lost(s->device)) return orr_fake_note(cudaErrorIllegalAddress);
  if (s->capture) {
    orr_fake_capture(s, item);
    return cudaSuccess;
  }
  s->queue.push_back(std::move(item));
  s->pushed++;
  return cudaSuccess;
}

cudaError_t orr_fake_push(cudaStream_t s, const char *name, std::function<void()> work,
                          std::function<bool()> ready) {
  return orr_fake_push_item(s, Item{name, std::move(work), std::move(ready), false, nullptr});
}

cudaError_t orr_fake_wait_for(int device) {
  if (orr_fake_is_lost(device)) return cudaErrorIllegalAddress;
  return drain_until([=]() {
    for (cudaStream_t s : orr_fake_streams)
      if (s->device == device && !s->queue.empty()) return false;
    return true;
  });
}

void orr_fake_launch(cudaStream_t stream, dim3 grid, dim3 block, size_t shared,
                     std::function<void()> kernel) {
  std::lock_guard<std::recursive_mutex> hold(orr_fake_lock);
  if (orr_fake_fails("kernel launch")) {
    orr_fake_injected(cudaErrorLaunchOutOfResources);
    return;
  }
  if (!is_stream(stream)) {
    orr_fake_note(cudaErrorInvalidResourceHandle);
    return;
  }
  if (orr_fake_current() != stream->device) {
    orr_fake_complain(
        "a kernel is launched on a stream of device %d while device %d is current",
        stream->device, orr_fake_current());
    orr_fake_note(cudaErrorInvalidResourceHandle);
    return;
  }
  std::string refusal = orr_fake_refusal(grid, block, shared);
  if (!refusal.empty()) {
    orr_fake_complain("a kernel cannot be launched with %s", refusal.c_str());
    orr_fake_note(cudaErrorInvalidConfiguration);
    return;
  }
  int device = stream->device;
  auto run = [=]() {
    std::string wrong = orr_fake_run(grid, block, shared, kernel);
    if (wrong.empty()) return;
    orr_fake_complain("a kernel on device %d: %s", device, wrong.c_str());
    orr_fake_lose(device, wrong.c_str());
  };
  orr_fake_push_item(stream, Item{"kernel", run, nullptr, true, nullptr});
}

extern "C" {

#define CHECKED(status) return orr_fake_note(status)
#define CALL(name) FAKE_CALL(name, orr_fake_injected(cudaErrorUnknown))
#define CALL_ON(name, handle, kind)                                                        \
  std::lock_guard<std::recursive_mutex> hold(orr_fake_lock);                               \
  if (orr_fake_fails_on(orr_fake_is(handle, kind) ? (handle)->device : orr_fake_current(), \
                        name))                                                             \
  return orr_fake_injected(cudaErrorUnknown)
#define ALIVE(ordinal) \
  if (orr_fake_is_lost(ordinal)) CHECKED(cudaErrorIllegalAddress)
#define SAFE(name) \
  if (orr_fake_is_unsafe(name)) CHECKED(cudaErrorStreamCaptureUnsupported)

/* ---- streams and events ---- */

static cudaError_t new_stream(cudaStream_t *out) {
  ALIVE(orr_fake_current());
  *out = new orr_fake_stream{orr_fake_current(), {}, 0, 0, nullptr, 0};
  orr_fake_streams.push_back(*out);
  orr_fake_born(*out, "a stream");
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned, int) {
  CALL("cudaStreamCreateWithPriority");
  return new_stream(out);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned) {
  CALL("cudaStreamCreateWithFlags");
  return new_stream(out);
}

static cudaError_t end_stream(cudaStream_t s) {
  if (!is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  orr_fake_gone(s);
  if (s->queue.empty())
    orr_fake_streams.erase(std::find(orr_fake_streams.begin(), orr_fake_streams.end(), s));
  return cudaSuccess;
}

FAKE_RELEASE(cudaError_t, cudaStreamDestroy, cudaStream_t, s,
             orr_fake_injected(cudaErrorUnknown), end_stream)

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  CALL_ON("cudaStreamSynchronize", s, "a stream");
  SAFE("cudaStreamSynchronize");
  if (!is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  if (s->capture) CHECKED(cudaErrorStreamCaptureUnsupported);
  ALIVE(s->device);
  uint64_t all = s->pushed;
  cudaError_t status = drain_until([=]() { return s->done >= all; });
  ALIVE(s->device);
  CHECKED(status);
}

cudaError_t cudaDeviceSynchronize(void) {
  CALL("cudaDeviceSynchronize");
  SAFE("cudaDeviceSynchronize");
  int device = orr_fake_current();
  ALIVE(device);
  cudaError_t status = orr_fake_wait_for(device);
  ALIVE(device);
  CHECKED(status);
}

cudaError_t cudaStreamQuery(cudaStream_t s) {
  CALL_ON("cudaStreamQuery", s, "a stream");
  SAFE("cudaStreamQuery");
  if (!is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  if (s->capture) CHECKED(cudaErrorStreamCaptureUnsupported);
  ALIVE(s->device);
  run_some([=]() { return s->queue.empty(); });
  ALIVE(s->device);
  CHECKED(s->queue.empty() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  CALL("cudaEventCreateWithFlags");
  (void)flags;
  ALIVE(orr_fake_current());
  *out = new orr_fake_event{orr_fake_current(), nullptr, 0, nullptr, 0};
  orr_fake_born(*out, "an event");
  return cudaSuccess;
}

static cudaError_t end_event(cudaEvent_t e) {
  if (!is_event(e)) CHECKED(cudaErrorInvalidResourceHandle);
  orr_fake_gone(e); /* its struct stays: it may be waited for */
  return cudaSuccess;
}

FAKE_RELEASE(cudaError_t, cudaEventDestroy, cudaEvent_t, e, orr_fake_injected(cudaErrorUnknown),
             end_event)

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  CALL_ON("cudaEventRecord", s, "a stream");
  if (!is_event(e) || !is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  if (e->device != s->device) {
    orr_fake_complain("an event of device %d is recorded on a stream of device %d", e->device,
                      s->device);
    CHECKED(cudaErrorInvalidResourceHandle);
  }
  e->capture = s->capture;
  e->stream = nullptr;
  if (s->capture) {
    e->node = s->capture->last[(size_t)s->lane];
    return cudaSuccess;
  }
  cudaError_t status = orr_fake_push(s, "event", nullptr);
  if (status != cudaSuccess) CHECKED(status);
  e->stream = s;
  e->seq = s->pushed;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  CALL_ON("cudaStreamWaitEvent", s, "a stream");
  (void)flags;
  if (!is_event(e) || !is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  if (e->capture || s->capture) CHECKED(orr_fake_capture_wait(s, e));
  cudaStream_t from = e->stream;
  uint64_t seq = e->seq;
  if (!from) return cudaSuccess;
  CHECKED(orr_fake_push(s, "event wait", nullptr, [=]() { return from->done >= seq; }));
}

cudaError_t cudaEventQuery(cudaEvent_t e) {
  CALL_ON("cudaEventQuery", e, "an event");
  SAFE("cudaEventQuery");
  if (!is_event(e)) CHECKED(cudaErrorInvalidResourceHandle);
  if (e->capture) CHECKED(cudaErrorStreamCaptureUnsupported);
  ALIVE(e->device);
  run_some([=]() { return is_complete(e); });
  ALIVE(e->device);
  CHECKED(is_complete(e) ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  CALL_ON("cudaEventSynchronize", e, "an event");
  SAFE("cudaEventSynchronize");
  if (!is_event(e)) CHECKED(cudaErrorInvalidResourceHandle);
  if (e->capture) CHECKED(cudaErrorStreamCaptureUnsupported);
  ALIVE(e->device);
  cudaError_t status = drain_until([=]() { return is_complete(e); });
  ALIVE(e->device);
  CHECKED(status);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) {
  CALL("cudaLaunchHostFunc");
  CHECKED(orr_fake_push(s, "host function", [=]() { f(data); }));
}

/* ---- copies ---- */

static cudaError_t copy(void *to, const void *from, size_t bytes, cudaStream_t s) {
  bool to_device = orr_fake_is_arena(to), from_device = orr_fake_is_arena(from);
  if ((to_device && !orr_fake_is_device(to, bytes)) ||
      (from_device && !orr_fake_is_device(from, bytes))) {
    orr_fake_complain("a copy of %zu bytes leaves its block of device memory", bytes);
    return cudaErrorInvalidValue;
  }
  if (from_device || orr_fake_is_pinned(from, bytes)) {
    cudaError_t status = orr_fake_push(s, "copy", [=]() { memmove(to, from, bytes); });
    if (status != cudaSuccess || to_device || orr_fake_is_pinned(to, bytes)) return status;
    uint64_t all = s->pushed; /* pageable memory is written before the call returns */
    return drain_until([=]() { return s->done >= all; });
  }
  auto kept =
      std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
  return orr_fake_push(s, "copy", [=]() { memcpy(to, kept->data(), bytes); });
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
  CALL_ON("cudaMemcpyAsync", s, "a stream");
  if (!is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  ALIVE(s->device);
  bool to_device = orr_fake_is_arena(to), from_device = orr_fake_is_arena(from);
  bool fits = kind == cudaMemcpyDefault ||
              (kind == cudaMemcpyHostToDevice && to_device && !from_device) ||
              (kind == cudaMemcpyDeviceToHost && !to_device && from_device) ||
              (kind == cudaMemcpyDeviceToDevice && to_device && from_device);
  if (!fits) {
    orr_fake_complain("a copy's kind does not fit its pointers");
    CHECKED(cudaErrorInvalidValue);
  }
  CHECKED(bytes ? copy(to, from, bytes, s) : cudaSuccess);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t bytes, cudaStream_t s) {
  CALL_ON("cudaMemcpyPeerAsync", s, "a stream");
  if (!is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  ALIVE(s->device);
  if (orr_fake_owner(to) != to_device || orr_fake_owner(from) != from_device) {
    orr_fake_complain("a copy from device %d to device %d of memory that is not theirs",
                      from_device, to_device);
    CHECKED(cudaErrorInvalidValue);
  }
  CHECKED(bytes ? copy(to, from, bytes, s) : cudaSuccess);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  cudaStream_t s;
  cudaError_t status = cudaStreamCreateWithFlags(&s, 0);
  if (status != cudaSuccess) return status;
  status = cudaMemcpyAsync(to, from, bytes, kind, s);
  if (status == cudaSuccess) status = cudaStreamSynchronize(s);
  cudaStreamDestroy(s);
  return status;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s) {
  CALL_ON("cudaMemsetAsync", s, "a stream");
  if (!orr_fake_is_device(to, bytes)) {
    orr_fake_complain("a memset of %zu bytes leaves its block of device memory", bytes);
    CHECKED(cudaErrorInvalidValue);
  }
  CHECKED(orr_fake_push(s, "memset", [=]() { memset(to, value, bytes); }));
}

} // extern "C"
