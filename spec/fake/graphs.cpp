/* graphs.cpp: capture of streams into graphs, and their launch.
 *
 * Invariant: a graph holds calls and what each must come after, by its stream and by the events
 * that were waited for; a launch runs its nodes one at a time in any order that these allow,
 * with other streams' work between them. What CUDA forbids in a capture spoils it.
 * To add a call that may be captured: orr_fake_push does it; NCCL's may not.
 */
#include <memory>
#include <set>

#include "stream.h"

namespace {

std::set<orr_fake_graph *> &open_captures = *new std::set<orr_fake_graph *>;

int add_node(orr_fake_graph *g, cudaStream_t s, const Item &item) {
  Node node = {item, s->lane, s->device, {}};
  int last = g->last[(size_t)s->lane];
  if (last >= 0) node.after.push_back(last);
  g->node.push_back(node);
  return g->last[(size_t)s->lane] = (int)g->node.size() - 1;
}

/* All nodes come before the origin's last one. */
bool is_joined(const orr_fake_graph *g) {
  std::vector<char> seen(g->node.size());
  std::vector<int> todo;
  if (g->last[0] >= 0) todo.push_back(g->last[0]);
  while (!todo.empty()) {
    int k = todo.back();
    todo.pop_back();
    if (seen[(size_t)k]++) continue;
    for (int before : g->node[(size_t)k].after) todo.push_back(before);
  }
  for (char one : seen)
    if (!one) return false;
  return true;
}

struct Replay {
  std::vector<Node> node;
  std::vector<char> done;
  size_t left;
  bool can_run(size_t k) const {
    if (done[k] || (node[k].item.ready && !node[k].item.ready())) return false;
    for (int before : node[k].after)
      if (!done[(size_t)before]) return false;
    return true;
  }
  bool any() const {
    for (size_t k = 0; k < node.size(); k++)
      if (can_run(k)) return true;
    return left == 0;
  }
  bool step() {
    std::vector<size_t> able;
    for (size_t k = 0; k < node.size(); k++)
      if (can_run(k)) able.push_back(k);
    if (able.empty()) return left == 0;
    size_t k = able[orr_fake_random() % able.size()];
    orr_fake_run_item(node[k].item, node[k].device);
    done[k] = 1;
    return --left == 0;
  }
};

bool is_graph(cudaGraph_t g) { return orr_fake_is(g, "a graph"); }

} // namespace

void orr_fake_capture(cudaStream_t s, const Item &item) { add_node(s->capture, s, item); }

cudaError_t orr_fake_capture_wait(cudaStream_t s, cudaEvent_t e) {
  orr_fake_graph *g = e->capture ? e->capture : s->capture;
  if (!open_captures.count(g) || (s->capture && s->capture != g) || !e->capture) {
    orr_fake_complain("a wait leads out of a capture or into it");
    if (s->capture) s->capture->is_valid = false;
    return cudaErrorStreamCaptureIsolation;
  }
  if (!s->capture) { /* a stream that waits for captured work joins the capture */
    s->capture = g;
    s->lane = (int)g->last.size();
    g->last.push_back(-1);
  }
  int k = add_node(g, s, Item{"event wait", nullptr, nullptr, false, nullptr});
  if (e->node >= 0) g->node[(size_t)k].after.push_back(e->node);
  return cudaSuccess;
}

bool orr_fake_is_unsafe(const char *name) {
  for (orr_fake_graph *g : open_captures) {
    if (!g->is_global) continue;
    orr_fake_complain("%s while a stream is captured", name);
    g->is_valid = false;
    return true;
  }
  return false;
}

extern "C" {

#define CHECKED(status) return orr_fake_note(status)
#define CALL(name) FAKE_CALL(name, orr_fake_injected(cudaErrorUnknown))

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
  CALL("cudaStreamBeginCapture");
  if (!orr_fake_is(s, "a stream")) CHECKED(cudaErrorInvalidResourceHandle);
  if (s->capture) CHECKED(cudaErrorStreamCaptureUnsupported);
  s->capture = new orr_fake_graph{s, mode == cudaStreamCaptureModeGlobal, true, {-1}, {}};
  s->lane = 0;
  open_captures.insert(s->capture);
  orr_fake_born(s->capture, "a graph");
  return cudaSuccess;
}

static cudaError_t end_capture(cudaStream_t s, cudaGraph_t *out) {
  *out = nullptr;
  if (!orr_fake_is(s, "a stream")) CHECKED(cudaErrorInvalidResourceHandle);
  orr_fake_graph *g = s->capture;
  if (!g || g->origin != s) CHECKED(cudaErrorStreamCaptureUnmatched);
  for (cudaStream_t each : orr_fake_streams)
    if (each->capture == g) each->capture = nullptr;
  open_captures.erase(g);
  bool joined = is_joined(g);
  if (g->is_valid && joined) {
    *out = g;
    return cudaSuccess;
  }
  if (!joined) orr_fake_complain("a captured stream is not joined to the one that was begun");
  cudaError_t status =
      g->is_valid ? cudaErrorStreamCaptureUnjoined : cudaErrorStreamCaptureInvalidated;
  orr_fake_gone(g); /* its struct stays: events may name it */
  CHECKED(status);
}

/* One that tells of an error has ended the capture too, and gives no graph. */
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out) {
  std::lock_guard<std::recursive_mutex> hold(orr_fake_lock);
  bool fails = orr_fake_fails("cudaStreamEndCapture");
  cudaError_t status = end_capture(s, out);
  if (!fails) return status;
  if (status == cudaSuccess) orr_fake_gone(*out);
  *out = nullptr;
  return orr_fake_injected(cudaErrorUnknown);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *out) {
  CALL("cudaStreamIsCapturing");
  if (!orr_fake_is(s, "a stream")) CHECKED(cudaErrorInvalidResourceHandle);
  *out = !s->capture            ? cudaStreamCaptureStatusNone
         : s->capture->is_valid ? cudaStreamCaptureStatusActive
                                : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph,
                                 unsigned long long flags) {
  CALL("cudaGraphInstantiate");
  (void)flags;
  if (!is_graph(graph)) CHECKED(cudaErrorInvalidValue);
  orr_fake_graph *copy = new orr_fake_graph(*graph);
  *out = (cudaGraphExec_t)copy;
  orr_fake_born(copy, "a graph to launch");
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  CALL("cudaGraphLaunch");
  if (!orr_fake_is(exec, "a graph to launch")) CHECKED(cudaErrorInvalidValue);
  orr_fake_graph *g = (orr_fake_graph *)exec;
  auto replay = std::make_shared<Replay>();
  *replay = Replay{g->node, std::vector<char>(g->node.size()), g->node.size()};
  CHECKED(orr_fake_push_item(s, Item{"graph", nullptr, [=]() { return replay->any(); }, false,
                                     [=]() { return replay->step(); }}));
}

static cudaError_t end_graph(cudaGraph_t graph) {
  if (!is_graph(graph)) CHECKED(cudaErrorInvalidValue);
  orr_fake_gone(graph); /* its struct stays: events may name it */
  return cudaSuccess;
}

FAKE_RELEASE(cudaError_t, cudaGraphDestroy, cudaGraph_t, graph,
             orr_fake_injected(cudaErrorUnknown), end_graph)

static cudaError_t end_exec(cudaGraphExec_t exec) {
  if (!orr_fake_is(exec, "a graph to launch")) CHECKED(cudaErrorInvalidValue);
  orr_fake_gone(exec);
  delete (orr_fake_graph *)exec;
  return cudaSuccess;
}

FAKE_RELEASE(cudaError_t, cudaGraphExecDestroy, cudaGraphExec_t, exec,
             orr_fake_injected(cudaErrorUnknown), end_exec)

} // extern "C"
