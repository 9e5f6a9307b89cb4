/* streams.cpp: lazy streams, events, copies and graphs of the fake runtime.
 *
 * Invariant: a call only queues. What is queued runs while somebody synchronises or asks: the
 * heads of the streams in an order picked by ORRERY_FAKE_SEED, bound by stream order and event
 * waits alone, so that a missing wait gives wrong numbers. While a stream is captured its calls
 * become nodes, and a launch runs them with the same freedom.
 * To add an asynchronous call: orr_fake_push.
 */
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <deque>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "device.h"

namespace {

struct Item {
  const char *name;
  std::function<void()> run;
  std::function<bool()> ready;
};

}  // namespace

/* What was captured, in the order of the calls, which is one that its dependencies allow. */
struct orr_fake_graph {
  cudaStream_t origin;
  std::vector<Item> items;
};

struct orr_fake_graph_exec {
  orr_fake_graph graph;
};

struct orr_fake_stream {
  int device;
  bool live;
  std::deque<Item> queue;
  uint64_t pushed, done;
  orr_fake_graph *capture;
};

struct orr_fake_event {
  int device;
  bool live;
  cudaStream_t stream; /* NULL: never recorded, complete */
  uint64_t seq;
  orr_fake_graph *capture; /* recorded there */
};

namespace {

std::set<cudaStream_t> &streams = *new std::set<cudaStream_t>;
std::set<cudaEvent_t> &events = *new std::set<cudaEvent_t>;
long live;
uint64_t random_state;
bool running;

uint64_t next_random() {
  if (!random_state) random_state = (uint64_t)orr_fake_number("ORRERY_FAKE_SEED", 1) * 2 + 1;
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545F4914F6CDD1Dull >> 32;
}

bool is_stream(cudaStream_t s) {
  if (streams.count(s) && s->live) return true;
  orr_fake_complain("a stream that is not there");
  return false;
}

bool is_event(cudaEvent_t e) {
  if (events.count(e) && e->live) return true;
  orr_fake_complain("an event that is not there");
  return false;
}

bool can_run(cudaStream_t s) {
  return !s->queue.empty() && (!s->queue.front().ready || s->queue.front().ready());
}

bool any_can_run() {
  if (running) return false;
  for (cudaStream_t s : streams)
    if (can_run(s)) return true;
  return false;
}

/* Runs one head that can run; false: there is none. */
bool step() {
  static std::vector<cudaStream_t> &able = *new std::vector<cudaStream_t>;
  if (running) return false;
  able.clear();
  for (cudaStream_t s : streams)
    if (can_run(s)) able.push_back(s);
  if (able.empty()) return false;
  cudaStream_t s = able[next_random() % able.size()];
  Item item = std::move(s->queue.front());
  s->queue.pop_front();
  running = true;
  if (item.run && !orr_fake_is_lost(s->device)) item.run();
  running = false;
  s->done++;
  return true;
}

struct Open { /* device memory, for the time of draining */
  Open() { orr_fake_unlock_memory(); }
  ~Open() { orr_fake_lock_memory(); }
};

void say_stuck() {
  std::string text = "nothing can run, and a stream is waited for; the heads are";
  for (cudaStream_t s : streams)
    if (!s->queue.empty())
      text += " [device " + std::to_string(s->device) + ": " + s->queue.front().name + "]";
  orr_fake_complain("%s", text.c_str());
}

/* Other threads may have to bring work first: the lock is given up between looks. */
template <typename Done> cudaError_t drain_until(Done done) {
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

bool is_complete(cudaEvent_t e) { return !e->stream || e->stream->done >= e->seq; }

}  // namespace

long orr_fake_live_streams(void) { return live; }

void orr_fake_drain_all(void) {
  if (!any_can_run()) return;
  Open memory;
  while (step()) {}
}

int orr_fake_device_of(cudaStream_t stream) { return stream->device; }

cudaError_t orr_fake_push(cudaStream_t s, const char *name, std::function<void()> work,
                          std::function<bool()> ready) {
  if (!is_stream(s)) return orr_fake_note(cudaErrorInvalidResourceHandle);
  if (orr_fake_is_lost(s->device)) return orr_fake_note(cudaErrorIllegalAddress);
  Item item{name, std::move(work), std::move(ready)};
  if (s->capture) {
    s->capture->items.push_back(std::move(item));
    return cudaSuccess;
  }
  s->queue.push_back(std::move(item));
  s->pushed++;
  return cudaSuccess;
}

void orr_fake_launch(cudaStream_t stream, dim3 grid, dim3 block, size_t shared,
                     std::function<void()> kernel) {
  std::lock_guard<std::recursive_mutex> hold(orr_fake_lock);
  if (orr_fake_fails("kernel launch")) {
    orr_fake_note(cudaErrorLaunchOutOfResources);
    return;
  }
  if (!is_stream(stream)) {
    orr_fake_note(cudaErrorInvalidResourceHandle);
    return;
  }
  if (orr_fake_current() != stream->device) {
    orr_fake_complain("a kernel is launched on a stream of device %d while device %d is current",
                      stream->device, orr_fake_current());
    orr_fake_note(cudaErrorInvalidResourceHandle);
    return;
  }
  int device = stream->device;
  orr_fake_push(stream, "kernel", [=]() {
    std::string wrong = orr_fake_run(grid, block, shared, kernel);
    if (wrong.empty()) return;
    orr_fake_complain("a kernel on device %d: %s", device, wrong.c_str());
    orr_fake_lose(device, wrong.c_str());
  });
}

extern "C" {

#define CHECKED(status) return orr_fake_note(status)
#define CALL(name) FAKE_CALL(name, orr_fake_note(cudaErrorUnknown))
#define ALIVE(ordinal) \
  if (orr_fake_is_lost(ordinal)) CHECKED(cudaErrorIllegalAddress)

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
  CALL("cudaStreamCreate");
  (void)flags;
  (void)priority;
  ALIVE(orr_fake_current());
  *out = new orr_fake_stream{orr_fake_current(), true, {}, 0, 0, nullptr};
  streams.insert(*out);
  live++;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {
  CALL("cudaStreamDestroy");
  if (!is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  s->live = false; /* its struct stays: events may name it */
  live--;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  CALL("cudaStreamSynchronize");
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
  int device = orr_fake_current();
  ALIVE(device);
  cudaError_t status = drain_until([=]() {
    for (cudaStream_t s : streams)
      if (s->device == device && !s->queue.empty()) return false;
    return true;
  });
  ALIVE(device);
  CHECKED(status);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  CALL("cudaEventCreate");
  (void)flags;
  ALIVE(orr_fake_current());
  *out = new orr_fake_event{orr_fake_current(), true, nullptr, 0, nullptr};
  events.insert(*out);
  live++;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e) {
  CALL("cudaEventDestroy");
  if (!is_event(e)) CHECKED(cudaErrorInvalidResourceHandle);
  e->live = false;
  live--;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  CALL("cudaEventRecord");
  if (!is_event(e) || !is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  if (e->device != s->device) {
    orr_fake_complain("an event of device %d is recorded on a stream of device %d", e->device,
                      s->device);
    CHECKED(cudaErrorInvalidResourceHandle);
  }
  cudaError_t status = orr_fake_push(s, "event", nullptr);
  if (status != cudaSuccess) CHECKED(status);
  e->capture = s->capture;
  e->stream = s->capture ? nullptr : s;
  e->seq = s->pushed;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  CALL("cudaStreamWaitEvent");
  (void)flags;
  if (!is_event(e) || !is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  if (e->capture) {
    if (s->capture && s->capture != e->capture) CHECKED(cudaErrorStreamCaptureUnsupported);
    s->capture = e->capture; /* a stream that waits for captured work joins the capture */
    return cudaSuccess;
  }
  cudaStream_t from = e->stream;
  uint64_t seq = e->seq;
  if (!from) return cudaSuccess;
  if (s->capture) {
    orr_fake_complain("a captured stream waits for an event that was recorded outside");
    CHECKED(cudaErrorStreamCaptureUnsupported);
  }
  CHECKED(orr_fake_push(s, "event wait", nullptr, [=]() { return from->done >= seq; }));
}

cudaError_t cudaEventQuery(cudaEvent_t e) {
  CALL("cudaEventQuery");
  if (!is_event(e)) CHECKED(cudaErrorInvalidResourceHandle);
  ALIVE(e->device);
  if (!is_complete(e) && any_can_run()) {
    Open memory;
    for (uint64_t n = 1 + next_random() % 16; n > 0 && !is_complete(e) && step(); n--) {}
  }
  ALIVE(e->device);
  return is_complete(e) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  CALL("cudaEventSynchronize");
  if (!is_event(e)) CHECKED(cudaErrorInvalidResourceHandle);
  ALIVE(e->device);
  cudaError_t status = drain_until([=]() { return is_complete(e); });
  ALIVE(e->device);
  CHECKED(status);
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
  auto kept = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
  return orr_fake_push(s, "copy", [=]() { memcpy(to, kept->data(), bytes); });
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
  CALL("cudaMemcpyAsync");
  if (!is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  ALIVE(s->device);
  bool to_device = orr_fake_is_arena(to), from_device = orr_fake_is_arena(from);
  bool fits = kind == cudaMemcpyDefault || (kind == cudaMemcpyHostToDevice && to_device && !from_device) ||
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
  CALL("cudaMemcpyPeerAsync");
  (void)to_device;
  (void)from_device;
  if (!is_stream(s)) CHECKED(cudaErrorInvalidResourceHandle);
  ALIVE(s->device);
  if (!orr_fake_is_arena(to) || !orr_fake_is_arena(from)) CHECKED(cudaErrorInvalidValue);
  CHECKED(bytes ? copy(to, from, bytes, s) : cudaSuccess);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s) {
  CALL("cudaMemsetAsync");
  if (!orr_fake_is_device(to, bytes)) {
    orr_fake_complain("a memset of %zu bytes leaves its block of device memory", bytes);
    CHECKED(cudaErrorInvalidValue);
  }
  CHECKED(orr_fake_push(s, "memset", [=]() { memset(to, value, bytes); }));
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
  CALL("cudaStreamBeginCapture");
  (void)mode;
  if (!is_stream(s) || s->capture) CHECKED(cudaErrorStreamCaptureUnsupported);
  s->capture = new orr_fake_graph{s, {}};
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out) {
  CALL("cudaStreamEndCapture");
  if (!is_stream(s) || !s->capture || s->capture->origin != s)
    CHECKED(cudaErrorStreamCaptureUnsupported);
  *out = s->capture;
  for (cudaStream_t each : streams)
    if (each->capture == *out) each->capture = nullptr;
  live++;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph,
                                 unsigned long long flags) {
  CALL("cudaGraphInstantiate");
  (void)flags;
  *out = new orr_fake_graph_exec{*graph};
  live++;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  CALL("cudaGraphLaunch");
  auto graph = std::make_shared<orr_fake_graph>(exec->graph);
  CHECKED(orr_fake_push(s, "graph", [=]() {
    for (Item &item : graph->items)
      if (item.run) item.run();
  }));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  CALL("cudaGraphDestroy");
  delete graph;
  live--;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  CALL("cudaGraphExecDestroy");
  delete exec;
  live--;
  return cudaSuccess;
}

}  // extern "C"
