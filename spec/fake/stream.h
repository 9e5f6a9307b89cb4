/* stream.h: streams, events and captured work, for streams.cpp (order) and graphs.cpp
 * (capture).
 * Invariant: a struct stays when its handle is destroyed: other work may name it.
 */
#ifndef ORR_FAKE_STREAM_H
#define ORR_FAKE_STREAM_H

#include <deque>
#include <vector>

#include "device.h"

struct Item {
  const char *name;
  std::function<void()> run;
  std::function<bool()> ready;
  bool is_kernel;
  std::function<bool()> part; /* instead of run: a part of it; true: that was the last */
};

/* One call in a capture: after which others it runs. */
struct Node {
  Item item;
  int lane, device;
  std::vector<int> after;
};

struct orr_fake_graph {
  cudaStream_t origin;
  bool is_global, is_valid;
  std::vector<int> last; /* node of each lane; -1: none */
  std::vector<Node> node;
};

struct orr_fake_stream {
  int device;
  std::deque<Item> queue;
  uint64_t pushed, done;
  orr_fake_graph *capture;
  int lane; /* in the capture */
};

struct orr_fake_event {
  int device;
  cudaStream_t stream; /* NULL: never recorded, complete */
  uint64_t seq;
  orr_fake_graph *capture; /* recorded there, */
  int node;                /* behind that node; -1: at its start */
};

extern std::vector<cudaStream_t> &orr_fake_streams; /* by age; dead ones with work too */
uint64_t orr_fake_random(void);
void orr_fake_run_item(const Item &item, int device);
cudaError_t orr_fake_push_item(cudaStream_t s, Item item);

/* graphs.cpp */
void orr_fake_capture(cudaStream_t s, const Item &item);
cudaError_t orr_fake_capture_wait(cudaStream_t s, cudaEvent_t e);
/* A call that no thread may make while anything is captured; it spoils the capture. */
bool orr_fake_is_unsafe(const char *name);

#endif
