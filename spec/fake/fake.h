/* fake.h: what the parts of the fake share: the lock, counted calls, streams of queued work,
 * and the report of what went wrong.
 *
 * Invariant: every call of a fake library goes through FAKE_CALL, which counts it and may make
 * it fail, or, where it gives something back, through FAKE_RELEASE: what is given back is gone
 * even where the call tells of an error. Work given to a stream runs when something drains: a synchronising call, a query, a
 * free; in an order that the seed picks and that only stream order and event waits bind.
 * To add a library: its functions over orr_fake_push, each beginning with FAKE_CALL.
 */
#ifndef ORR_FAKE_H
#define ORR_FAKE_H

#include <functional>
#include <mutex>
#include <string>

#include "include/cuda_runtime.h"

extern std::recursive_mutex orr_fake_lock;

/* How a call that was picked fails. */
enum orr_fake_kind {
  FAKE_PLAIN,  /* with an error that passes; allocations: out of memory */
  FAKE_LOST,   /* and the calling thread's device is lost */
  FAKE_MEMORY, /* out of memory, whatever the call */
  FAKE_REMOTE, /* NCCL: another rank went wrong; other calls: as FAKE_PLAIN */
  FAKE_ASYNC,  /* NCCL: well for now, and the communicator has an error later */
  FAKE_STALL   /* NCCL: well for now, and the collective never ends */
};
/* Counts a call; true: this one must fail. FAKE_ASYNC and FAKE_STALL pick calls of NCCL that
 * take a stream, by `orr_fake_picks`, and no other. */
bool orr_fake_fails(const char *name);
bool orr_fake_fails_on(int device, const char *name); /* it is that one that would be lost */
bool orr_fake_picks(const char *name, orr_fake_kind kind);
orr_fake_kind orr_fake_kind_now(void);
/* Adds a line to what orr_fake_report gives. */
void orr_fake_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define FAKE_CALL(name, failure)                             \
  std::lock_guard<std::recursive_mutex> hold(orr_fake_lock); \
  if (orr_fake_fails(name)) return failure

/* A function `result name(kind handle)` that gives something back, by `work`. */
#define FAKE_RELEASE(result, name, kind, handle, failure, work)  \
  result name(kind handle) {                                     \
    std::lock_guard<std::recursive_mutex> hold(orr_fake_lock);   \
    bool fails = orr_fake_fails(#name);                          \
    result status = work(handle);                                \
    return fails ? failure : status;                             \
  }

/* Queues work on a stream; `ready` (may be empty) says whether it can run yet. */
cudaError_t orr_fake_push(cudaStream_t stream, const char *name, std::function<void()> run,
                          std::function<bool()> ready = nullptr);
int orr_fake_device_of(cudaStream_t stream);
/* [p, p + bytes) lies in one live block of device memory, of pinned memory. */
bool orr_fake_is_device(const void *p, size_t bytes);
bool orr_fake_is_pinned(const void *p, size_t bytes);
/* ... of memory that work on that device may use, its own or its peers'; else complains. */
bool orr_fake_may_use(int device, const void *p, size_t bytes, const char *who);
/* A kernel went wrong: its device is lost. */
void orr_fake_lose(int device, const char *why);
/* lanes.cpp: runs all blocks now; empty: well, else what went wrong. */
std::string orr_fake_run(dim3 grid, dim3 block, size_t shared,
                         const std::function<void()> &kernel);
/* Why CUDA would not launch it; empty: it would. */
std::string orr_fake_refusal(dim3 grid, dim3 block, size_t shared);
void orr_fake_go_wrong(const std::string &what); /* from inside a kernel: it ends in this */

/* Where and when the lane that runs stands: what orders its memory accesses against others'. */
#define ORR_FAKE_NO_LANE UINT32_MAX
struct orr_fake_time {
  uint64_t launch;
  uint32_t block, lane;             /* numbers, x first */
  uint32_t block_epoch, warp_epoch; /* barriers passed */
};
extern orr_fake_time orr_fake_when;
extern thread_local bool orr_fake_is_runner; /* this thread runs a kernel now */
bool orr_fake_on_stack(const void *p); /* of the lane that runs */
bool orr_fake_is_shared(const void *p);
std::string orr_fake_left(void); /* what is out, in words */
/* From the environment. */
long orr_fake_number(const char *name, long otherwise);

/* What a library gave out and has not got back: by kind, so that a handle that is not there is
 * noticed, and what is left counts as live. */
void orr_fake_born(const void *handle, const char *kind);
bool orr_fake_is(const void *handle, const char *kind); /* else complains */
void orr_fake_gone(const void *handle);

/* For specs, by FFI. */
extern "C" {
__attribute__((visibility("default"))) const char *orr_fake_report(void);
__attribute__((visibility("default"))) void orr_fake_forget(void); /* the report */
__attribute__((visibility("default"))) long orr_fake_calls(void);
__attribute__((visibility("default"))) void orr_fake_fail_after(long n, int sticky);
/* The n-th call from now, of that name or of any (""), fails in that way (orr_fake_kind). */
__attribute__((visibility("default"))) void orr_fake_fail_at(const char *name, long n,
                                                             int kind);
__attribute__((visibility("default"))) long orr_fake_called(const char *name); /* so often */
__attribute__((visibility("default"))) const char *orr_fake_failed_call(void);
__attribute__((visibility("default"))) long orr_fake_live(void);
}

#endif
