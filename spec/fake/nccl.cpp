/* nccl.cpp: the fake NCCL: collectives that run when all ranks' calls head their streams.
 *
 * Invariant: the k-th call of every rank of a communicator is one collective; calls that differ
 * in kind, type, operation or count are an error of the communicator. A rank that never comes,
 * or whose device is lost, leaves the others standing until they are aborted; who waits for
 * them reports it. Buffers are checked when they are given.
 * To add a collective: a kind, its row in `sizes_of`, its case in `Collective::run`.
 */
#include "include/nccl.h"

#include <memory>
#include <vector>

#include "number.h"
#include "stream.h"

namespace {

enum Kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER };

struct Collective {
  Kind kind;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  std::vector<const void *> send;
  std::vector<void *> recv;
  std::vector<bool> heads;
  bool done = false, never_ends = false;
  void run();
};

struct Clique {
  int n;
  int left; /* communicators not destroyed */
  bool aborted;
  ncclResult_t error;
  std::vector<std::shared_ptr<Collective>> calls;
};

struct Call {
  ncclComm_t comm;
  cudaStream_t stream;
  Kind kind;
  const void *send;
  void *recv;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  bool is_broken, never_ends; /* FAKE_ASYNC, FAKE_STALL */
};

const char *const kind_of_comm = "a communicator";
thread_local int depth;
thread_local std::vector<Call> waiting;

orr_fake_type type_of(ncclDataType_t t) {
  switch (t) {
    case ncclFloat64: return FAKE_F64;
    case ncclFloat32: return FAKE_F32;
    case ncclFloat16: return FAKE_F16;
    case ncclBfloat16: return FAKE_BF16;
    case ncclInt64: return FAKE_I64;
    case ncclInt32: return FAKE_I32;
    default: return FAKE_U8;
  }
}

} // namespace

struct orr_fake_comm {
  std::shared_ptr<Clique> clique;
  int rank, device;
  size_t calls;
};

template <typename T>
static T join(ncclRedOp_t op, T x, T y) {
  return op == ncclSum ? x + y : op == ncclMax ? (y > x ? y : x) : (y < x ? y : x);
}

template <typename T, typename Get, typename Put>
static void reduce(const Collective &c, Get get, Put put) {
  orr_fake_type t = type_of(c.type);
  size_t n = c.send.size(), total = c.kind == REDUCE_SCATTER ? c.count * n : c.count;
  for (size_t i = 0; i < total; i++) {
    T x = get(c.send[0], t, (int64_t)i);
    for (size_t r = 1; r < n; r++) x = join(c.op, x, (T)get(c.send[r], t, (int64_t)i));
    for (size_t r = 0; r < n && c.kind == ALL_REDUCE; r++) put(c.recv[r], t, (int64_t)i, x);
    if (c.kind == REDUCE_SCATTER) put(c.recv[i / c.count], t, (int64_t)(i % c.count), x);
  }
}

void Collective::run() {
  size_t n = send.size(), bytes = count * orr_fake_size(type_of(type));
  for (size_t to = 0; to < n && kind == ALL_GATHER; to++)
    for (size_t r = 0; r < n; r++) memmove((char *)recv[to] + r * bytes, send[r], bytes);
  if (kind == ALL_GATHER) return;
  if (orr_fake_is_float(type_of(type))) reduce<double>(*this, orr_fake_get, orr_fake_put);
  else reduce<int64_t>(*this, orr_fake_get_int, orr_fake_put_int);
}

/* Bytes of both buffers. */
static void sizes_of(const Call &call, size_t *send, size_t *recv) {
  size_t one = call.count * orr_fake_size(type_of(call.type)), n = (size_t)call.comm->clique->n;
  *send = call.kind == REDUCE_SCATTER ? one * n : one;
  *recv = call.kind == ALL_GATHER ? one * n : one;
}

/* In their device's memory; one buffer, its own part of it, or two that do not overlap. */
static bool fits(const Call &call) {
  size_t send, recv;
  sizes_of(call, &send, &recv);
  if (!orr_fake_may_use(call.comm->device, call.send, send, "NCCL's send buffer") ||
      !orr_fake_may_use(call.comm->device, call.recv, recv, "NCCL's receive buffer"))
    return false;
  const char *from = (const char *)call.send, *to = (const char *)call.recv;
  size_t rank = (size_t)call.comm->rank;
  bool in_place = call.kind == ALL_GATHER       ? from == to + rank * send
                  : call.kind == REDUCE_SCATTER ? to == from + rank * recv
                                                : from == to;
  if (in_place || from + send <= to || to + recv <= from) return true;
  orr_fake_complain("NCCL: the buffers of rank %zu overlap", rank);
  return false;
}

static ncclResult_t issue(const Call &call) {
  if (!orr_fake_is(call.comm, kind_of_comm)) return ncclInvalidArgument;
  std::shared_ptr<Clique> clique = call.comm->clique;
  size_t k = call.comm->calls++, rank = (size_t)call.comm->rank, n = (size_t)clique->n;
  if (clique->aborted) return ncclInvalidUsage;
  if (!orr_fake_is(call.stream, "a stream")) return ncclInvalidArgument;
  if (orr_fake_device_of(call.stream) != call.comm->device) {
    orr_fake_complain("NCCL: a stream of another device than the communicator's");
    return ncclInvalidArgument;
  }
  if (!fits(call)) return ncclInvalidArgument;
  if (call.stream->capture) {
    orr_fake_complain(
        "NCCL: a call on a stream that is captured, which this fake cannot replay");
    return ncclInvalidUsage;
  }
  if (clique->calls.size() <= k) {
    auto made = std::make_shared<Collective>();
    made->kind = call.kind;
    made->count = call.count;
    made->type = call.type;
    made->op = call.op;
    made->send.resize(n);
    made->recv.resize(n);
    made->heads.resize(n);
    clique->calls.push_back(made);
  }
  std::shared_ptr<Collective> c = clique->calls[k];
  if (c->kind != call.kind || c->count != call.count || c->type != call.type ||
      c->op != call.op) {
    orr_fake_complain("NCCL: call %zu of rank %zu differs from that of the others", k, rank);
    clique->error = ncclInvalidUsage;
    return ncclInvalidUsage;
  }
  if (call.is_broken) clique->error = ncclRemoteError;
  c->never_ends = c->never_ends || call.never_ends;
  c->send[rank] = call.send;
  c->recv[rank] = call.recv;
  int device = call.comm->device;
  cudaError_t status = orr_fake_push(
      call.stream, "NCCL",
      [=]() {
        if (!c->done && !clique->aborted) c->run();
        c->done = true;
      },
      [=]() {
        if (!orr_fake_is_lost(device)) c->heads[rank] = true;
        if (clique->aborted || c->done) return true;
        if (c->never_ends) return false;
        for (size_t r = 0; r < n; r++)
          if (!c->heads[r]) return false;
        return true;
      });
  return status == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

static ncclResult_t injected() {
  switch (orr_fake_kind_now()) {
    case FAKE_LOST:
    case FAKE_MEMORY: return ncclUnhandledCudaError;
    case FAKE_REMOTE: return ncclRemoteError;
    default: return ncclSystemError;
  }
}

static ncclResult_t add(Call call, const char *name) {
  call.is_broken = orr_fake_picks(name, FAKE_ASYNC);
  call.never_ends = call.is_broken || orr_fake_picks(name, FAKE_STALL);
  if (depth == 0) return issue(call);
  waiting.push_back(call);
  return ncclSuccess;
}

extern "C" {

#define CALL(name) FAKE_CALL(name, injected())

ncclResult_t ncclCommInitAll(ncclComm_t *comm, int n, const int *device) {
  CALL("ncclCommInitAll");
  auto clique = std::make_shared<Clique>(Clique{n, n, false, ncclSuccess, {}});
  for (int r = 0; r < n; r++)
    for (int k = 0; k < r; k++)
      if (device[k] == device[r]) {
        orr_fake_complain("NCCL: one GPU as two ranks");
        return ncclInvalidUsage;
      }
  for (int r = 0; r < n; r++) {
    comm[r] = new orr_fake_comm{clique, r, device[r], 0};
    orr_fake_born(comm[r], kind_of_comm);
  }
  return ncclSuccess;
}

static ncclResult_t end_comm(ncclComm_t comm) {
  if (!orr_fake_is(comm, kind_of_comm)) return ncclInvalidArgument;
  orr_fake_gone(comm);
  delete comm;
  return ncclSuccess;
}

FAKE_RELEASE(ncclResult_t, ncclCommDestroy, ncclComm_t, comm, injected(), end_comm)

static ncclResult_t abort_comm(ncclComm_t comm) {
  if (!orr_fake_is(comm, kind_of_comm)) return ncclInvalidArgument;
  comm->clique->aborted = true;
  orr_fake_gone(comm);
  delete comm;
  return ncclSuccess;
}

FAKE_RELEASE(ncclResult_t, ncclCommAbort, ncclComm_t, comm, injected(), abort_comm)

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  CALL("ncclCommGetAsyncError");
  if (!orr_fake_is(comm, kind_of_comm)) return ncclInvalidArgument;
  *error = comm->clique->error;
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "unhandled system error";
  }
}

ncclResult_t ncclGroupStart(void) {
  CALL("ncclGroupStart");
  depth++;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  std::lock_guard<std::recursive_mutex> hold(orr_fake_lock);
  bool fails = orr_fake_fails("ncclGroupEnd");
  ncclResult_t result = fails ? injected() : ncclSuccess;
  if (--depth > 0) return result;
  if (depth < 0) {
    orr_fake_complain("ncclGroupEnd without ncclGroupStart");
    depth = 0;
    return ncclInvalidUsage;
  }
  std::vector<Call> calls;
  calls.swap(waiting);
  for (const Call &call : calls)
    if (result == ncclSuccess) result = issue(call);
  return result;
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  CALL("ncclAllReduce");
  return add({comm, stream, ALL_REDUCE, send, recv, count, type, op, false, false},
             "ncclAllReduce");
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  CALL("ncclAllGather");
  return add({comm, stream, ALL_GATHER, send, recv, count, type, ncclSum, false, false},
             "ncclAllGather");
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  CALL("ncclReduceScatter");
  return add({comm, stream, REDUCE_SCATTER, send, recv, count, type, op, false, false},
             "ncclReduceScatter");
}

} // extern "C"
