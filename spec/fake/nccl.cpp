/* nccl.cpp: the fake NCCL: collectives that run when all ranks' calls head their streams.
 *
 * Invariant: the k-th call of every rank of a communicator is one collective; calls that differ
 * in kind, type or count are an error of the communicator. A rank that never comes leaves the
 * others standing, which who waits for them reports.
 * To add a collective: a kind, its case in `Collective::run`.
 */
#include "include/nccl.h"

#include <memory>
#include <vector>

#include "fake.h"
#include "number.h"

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
  bool done = false;
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
};

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

}  // namespace

struct orr_fake_comm {
  std::shared_ptr<Clique> clique;
  int rank, device;
  size_t calls;
};

void Collective::run() {
  orr_fake_type t = type_of(type);
  size_t n = send.size(), total = kind == REDUCE_SCATTER ? count * n : count;
  std::vector<std::vector<double>> in(n, std::vector<double>(total));
  for (size_t r = 0; r < n; r++)
    for (size_t i = 0; i < total; i++) in[r][i] = orr_fake_get(send[r], t, (int64_t)i);
  if (kind == ALL_GATHER) {
    for (size_t to = 0; to < n; to++)
      for (size_t r = 0; r < n; r++)
        for (size_t i = 0; i < count; i++)
          orr_fake_put(recv[to], t, (int64_t)(r * count + i), in[r][i]);
    return;
  }
  for (size_t i = 0; i < total; i++) {
    double x = in[0][i];
    for (size_t r = 1; r < n; r++) {
      double y = in[r][i];
      x = op == ncclSum ? x + y : op == ncclMax ? (y > x ? y : x) : (y < x ? y : x);
    }
    if (kind == ALL_REDUCE)
      for (size_t r = 0; r < n; r++) orr_fake_put(recv[r], t, (int64_t)i, x);
    else orr_fake_put(recv[i / count], t, (int64_t)(i % count), x);
  }
}

static ncclResult_t issue(const Call &call) {
  std::shared_ptr<Clique> clique = call.comm->clique;
  size_t k = call.comm->calls++, rank = (size_t)call.comm->rank, n = (size_t)clique->n;
  if (clique->aborted) return ncclInvalidUsage;
  if (orr_fake_device_of(call.stream) != call.comm->device) {
    orr_fake_complain("NCCL: a stream of another device than the communicator's");
    return ncclInvalidArgument;
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
  if (c->kind != call.kind || c->count != call.count || c->type != call.type) {
    orr_fake_complain("NCCL: call %zu of rank %zu differs from that of the others", k, rank);
    clique->error = ncclInvalidUsage;
    return ncclInvalidUsage;
  }
  c->send[rank] = call.send;
  c->recv[rank] = call.recv;
  cudaError_t status = orr_fake_push(
      call.stream, "NCCL",
      [=]() {
        if (!c->done && !clique->aborted) c->run();
        c->done = true;
      },
      [=]() {
        c->heads[rank] = true;
        if (clique->aborted || c->done) return true;
        for (size_t r = 0; r < n; r++)
          if (!c->heads[r]) return false;
        return true;
      });
  return status == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

static ncclResult_t add(const Call &call) {
  if (depth == 0) return issue(call);
  waiting.push_back(call);
  return ncclSuccess;
}

extern "C" {

#define CALL(name) FAKE_CALL(name, ncclSystemError)

ncclResult_t ncclCommInitAll(ncclComm_t *comm, int n, const int *device) {
  CALL("ncclCommInitAll");
  auto clique = std::make_shared<Clique>(Clique{n, n, false, ncclSuccess, {}});
  for (int r = 0; r < n; r++) {
    for (int k = 0; k < r; k++)
      if (device[k] == device[r]) {
        orr_fake_complain("NCCL: one GPU as two ranks");
        return ncclInvalidUsage;
      }
    comm[r] = new orr_fake_comm{clique, r, device[r], 0};
  }
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  CALL("ncclCommDestroy");
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  CALL("ncclCommAbort");
  comm->clique->aborted = true;
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  CALL("ncclCommGetAsyncError");
  *error = comm->clique->error;
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess        ? "no error"
         : result == ncclInvalidUsage ? "invalid usage"
                                      : "unhandled system error";
}

ncclResult_t ncclGroupStart(void) {
  CALL("ncclGroupStart");
  depth++;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  std::lock_guard<std::recursive_mutex> hold(orr_fake_lock);
  bool fails = orr_fake_fails("ncclGroupEnd");
  ncclResult_t result = fails ? ncclSystemError : ncclSuccess;
  if (--depth > 0) return result;
  std::vector<Call> calls;
  calls.swap(waiting);
  for (const Call &call : calls)
    if (result == ncclSuccess) result = issue(call);
  return result;
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  CALL("ncclAllReduce");
  return add({comm, stream, ALL_REDUCE, send, recv, count, type, op});
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  CALL("ncclAllGather");
  return add({comm, stream, ALL_GATHER, send, recv, count, type, ncclSum});
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  CALL("ncclReduceScatter");
  return add({comm, stream, REDUCE_SCATTER, send, recv, count, type, op});
}

}  // extern "C"
