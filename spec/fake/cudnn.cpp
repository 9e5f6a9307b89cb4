/* cudnn.cpp: the fake cuDNN backend: descriptors are attributes by name; a plan of one
 * convolution (or one of its gradients) runs on a lazy stream.
 *
 * Invariant: a descriptor is used only when it is finalized, and knows its parts; heuristics
 * give two engines, the first of which says that it is not deterministic and gives wrong
 * numbers, so that nobody takes it by mistake.
 * To add an operation: its case in `Work::run`.
 */
#include "include/cudnn.h"

#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "fake.h"
#include "number.h"

struct orr_fake_dnn {
  cudaStream_t stream;
};

namespace {

enum { ENGINES = 2, ROOM = 512 };

struct Part {
  cudnnBackendDescriptorType_t type;
  bool final;
  int engine;  /* of a configuration or an engine */
  Part *graph; /* of those */
  std::map<int, std::vector<char>> attributes;
  template <typename T> std::vector<T> list(int name) const {
    auto found = attributes.find(name);
    if (found == attributes.end()) return {};
    const T *p = (const T *)found->second.data();
    return std::vector<T>(p, p + found->second.size() / sizeof(T));
  }
  template <typename T> T one(int name) const {
    std::vector<T> all = list<T>(name);
    return all.empty() ? T() : all[0];
  }
};
std::set<Part *> &parts = *new std::set<Part *>;

size_t size_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    default: return 4;
  }
}

struct Tensor {
  orr_fake_type type;
  std::vector<int64_t> dims, strides;
  char *data;
  double get(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return orr_fake_get(data, type, a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3]);
  }
  void put(int64_t a, int64_t b, int64_t c, int64_t d, double x) const {
    orr_fake_put(data, type, a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3], x);
  }
};

orr_fake_type type_of(cudnnDataType_t t) {
  return t == CUDNN_DATA_DOUBLE ? FAKE_F64 : t == CUDNN_DATA_HALF ? FAKE_F16
         : t == CUDNN_DATA_BFLOAT16                               ? FAKE_BF16
                                                                  : FAKE_F32;
}

enum Made { MAKES_Y, MAKES_X, MAKES_W };

struct Work {
  Made made;
  Tensor x, w, y;
  std::vector<int64_t> stride, padding, dilation;
  double spoil;
  /* f(n, o, oh, ow, c, i, j, h, k): every product of the convolution. */
  template <typename F> void each(F f) const {
    int64_t per = w.dims[1], groups = x.dims[1] / per, out = y.dims[1] / groups;
    for (int64_t n = 0; n < y.dims[0]; n++)
      for (int64_t o = 0; o < y.dims[1]; o++)
        for (int64_t oh = 0; oh < y.dims[2]; oh++)
          for (int64_t ow = 0; ow < y.dims[3]; ow++)
            for (int64_t c = 0; c < per; c++)
              for (int64_t i = 0; i < w.dims[2]; i++)
                for (int64_t j = 0; j < w.dims[3]; j++) {
                  int64_t h = oh * stride[0] - padding[0] + i * dilation[0];
                  int64_t k = ow * stride[1] - padding[1] + j * dilation[1];
                  if (h < 0 || k < 0 || h >= x.dims[2] || k >= x.dims[3]) continue;
                  f(n, o, oh, ow, c, o / out * per + c, i, j, h, k);
                }
  }
  void run() const {
    const Tensor &to = made == MAKES_Y ? y : made == MAKES_X ? x : w;
    std::vector<double> sum((size_t)(to.dims[0] * to.dims[1] * to.dims[2] * to.dims[3]), spoil);
    auto at = [&](int64_t a, int64_t b, int64_t c, int64_t d) -> double & {
      return sum[(size_t)(((a * to.dims[1] + b) * to.dims[2] + c) * to.dims[3] + d)];
    };
    each([&](int64_t n, int64_t o, int64_t oh, int64_t ow, int64_t c, int64_t channel, int64_t i,
             int64_t j, int64_t h, int64_t k) {
      if (made == MAKES_Y) at(n, o, oh, ow) += x.get(n, channel, h, k) * w.get(o, c, i, j);
      if (made == MAKES_X) at(n, channel, h, k) += y.get(n, o, oh, ow) * w.get(o, c, i, j);
      if (made == MAKES_W) at(o, c, i, j) += x.get(n, channel, h, k) * y.get(n, o, oh, ow);
    });
    for (int64_t a = 0; a < to.dims[0]; a++)
      for (int64_t b = 0; b < to.dims[1]; b++)
        for (int64_t c = 0; c < to.dims[2]; c++)
          for (int64_t d = 0; d < to.dims[3]; d++) to.put(a, b, c, d, at(a, b, c, d));
  }
};

Part *part_at(cudnnBackendDescriptor_t p) {
  Part *part = (Part *)p;
  if (parts.count(part)) return part;
  orr_fake_complain("cuDNN: a descriptor that is not there");
  return nullptr;
}

/* The attributes of an operation: geometry, x, w, y. */
bool names_of(const Part *op, int (&name)[4], Made *made) {
  switch (op->type) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR: {
      int names[4] = {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y};
      memcpy(name, names, sizeof names);
      *made = MAKES_Y;
      return true;
    }
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR: {
      int names[4] = {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY};
      memcpy(name, names, sizeof names);
      *made = MAKES_X;
      return true;
    }
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR: {
      int names[4] = {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY};
      memcpy(name, names, sizeof names);
      *made = MAKES_W;
      return true;
    }
    default: return false;
  }
}

Tensor tensor_of(const Part *part, const Part *pack) {
  std::vector<int64_t> uids = pack->list<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  std::vector<char *> data = pack->list<char *>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  Tensor t = {type_of(part->one<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE)),
              part->list<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS),
              part->list<int64_t>(CUDNN_ATTR_TENSOR_STRIDES), nullptr};
  int64_t uid = part->one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
  for (size_t k = 0; k < uids.size(); k++)
    if (uids[k] == uid) t.data = data[k];
  return t;
}

}  // namespace

extern "C" {

#define CALL(name) FAKE_CALL(name, CUDNN_STATUS_EXECUTION_FAILED)

cudnnStatus_t cudnnCreate(cudnnHandle_t *out) {
  CALL("cudnnCreate");
  *out = new orr_fake_dnn{nullptr};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  CALL("cudnnDestroy");
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  CALL("cudnnSetStream");
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

const char *cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_EXECUTION_FAILED";
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t *out) {
  CALL("cudnnBackendCreateDescriptor");
  Part *part = new Part{type, false, 0, nullptr, {}};
  parts.insert(part);
  *out = part;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t p) {
  CALL("cudnnBackendDestroyDescriptor");
  Part *part = part_at(p);
  if (!part) return CUDNN_STATUS_BAD_PARAM;
  parts.erase(part);
  delete part;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t p,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t n,
                                       const void *values) {
  CALL("cudnnBackendSetAttribute");
  Part *part = part_at(p);
  if (!part || part->final) return CUDNN_STATUS_BAD_PARAM;
  for (int64_t k = 0; type == CUDNN_TYPE_BACKEND_DESCRIPTOR && k < n; k++) {
    Part *inner = part_at(((const cudnnBackendDescriptor_t *)values)[k]);
    if (!inner || !inner->final) return CUDNN_STATUS_BAD_PARAM;
  }
  const char *bytes = (const char *)values;
  part->attributes[name].assign(bytes, bytes + (size_t)n * size_of(type));
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t p) {
  CALL("cudnnBackendFinalize");
  Part *part = part_at(p);
  if (!part || part->final) return CUDNN_STATUS_BAD_PARAM;
  if (part->type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR &&
      !part->one<Part *>(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG))
    return CUDNN_STATUS_BAD_PARAM;
  part->final = true;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t p,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t, int64_t wanted, int64_t *n,
                                       void *values) {
  CALL("cudnnBackendGetAttribute");
  Part *part = part_at(p);
  if (!part) return CUDNN_STATUS_BAD_PARAM;
  cudnnBackendDescriptor_t *list = (cudnnBackendDescriptor_t *)values;
  *n = 1;
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
      *n = wanted < ENGINES ? wanted : (int64_t)ENGINES;
      for (int64_t k = 0; k < *n; k++) {
        Part *config = part_at(list[k]);
        config->engine = (int)k;
        config->graph = part->one<Part *>(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
        config->final = true;
      }
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      part_at(list[0])->engine = part->engine;
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
      *n = part->engine == 0;
      if (*n) *(cudnnBackendNumericalNote_t *)values = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      *(int64_t *)values = ROOM;
      return CUDNN_STATUS_SUCCESS;
    default: return CUDNN_STATUS_NOT_SUPPORTED;
  }
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t variant) {
  CALL("cudnnBackendExecute");
  Part *config = part_at(plan)->one<Part *>(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  Part *pack = part_at(variant), *op, *geometry;
  Work work;
  int name[4];
  op = config->graph ? config->graph->one<Part *>(CUDNN_ATTR_OPERATIONGRAPH_OPS) : nullptr;
  if (!op || !pack->final || !names_of(op, name, &work.made)) return CUDNN_STATUS_BAD_PARAM;
  void *room = pack->one<void *>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
  if (!orr_fake_is_device(room, ROOM)) {
    orr_fake_complain("cuDNN: its workspace is not device memory");
    return CUDNN_STATUS_BAD_PARAM;
  }
  geometry = op->one<Part *>(name[0]);
  work.x = tensor_of(op->one<Part *>(name[1]), pack);
  work.w = tensor_of(op->one<Part *>(name[2]), pack);
  work.y = tensor_of(op->one<Part *>(name[3]), pack);
  work.stride = geometry->list<int64_t>(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
  work.padding = geometry->list<int64_t>(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
  work.dilation = geometry->list<int64_t>(CUDNN_ATTR_CONVOLUTION_DILATIONS);
  work.spoil = config->engine == 0 ? 1e3 : 0;
  cudaError_t status = orr_fake_push(handle->stream, "cuDNN", [=]() { work.run(); });
  return status == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

}  // extern "C"
