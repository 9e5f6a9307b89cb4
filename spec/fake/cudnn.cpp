/* cudnn.cpp: the fake cuDNN backend: descriptors are attributes by name; a plan of one
 * convolution (or one of its gradients) runs on a lazy stream.
 *
 * Invariant: a descriptor is used only when it is finalized, and finalized only with all that
 * it needs; tensors are checked when they run: where they lie, their alignment, that the shapes
 * fit the geometry. Heuristics give an engine of each kind in `engines`, best (worst for us)
 * first: those that round too much give numbers that no tolerance takes.
 * Graphs of other operations are cudnn_flow.cpp's.
 * To add an operation: its case in `Work::run`. An engine: its row in `engines`.
 */
#include <cstring>

#include "cudnn_flow.h"

struct orr_fake_dnn {
  int device;
  cudaStream_t stream;
};

using namespace orr_fake_dnn_parts;

namespace {

enum { ROOM = 512 };

const char *const a_handle = "a handle of cuDNN";

/* What an engine notes of its numbers, and how far off they are. */
const struct Engine {
  std::vector<cudnnBackendNumericalNote_t> notes;
  double spoil;
  bool tf32;
} engines[] = {
    {{CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION}, 1e3, false},
    {{CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13}, 1e3, false},
    {{CUDNN_NUMERICAL_NOTE_TENSOR_CORE, CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS}, 0, true},
    {{CUDNN_NUMERICAL_NOTE_TENSOR_CORE, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC}, 0, false},
    {{CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC}, 0, false},
    {{}, 0, false}};
enum { ENGINES = sizeof engines / sizeof *engines };

enum Made { MAKES_Y, MAKES_X, MAKES_W };

struct Work {
  Made made;
  Tensor x, w, y;
  std::vector<int64_t> stride, padding, after, dilation;
  double spoil;
  bool fits() const {
    if (x.dims.size() != 4 || w.dims.size() != 4 || y.dims.size() != 4) return false;
    for (size_t k = 0; k < 2; k++) {
      int64_t span = (w.dims[k + 2] - 1) * dilation[k] + 1;
      int64_t room = x.dims[k + 2] + padding[k] + after[k] - span;
      if (room < 0 || room / stride[k] + 1 != y.dims[k + 2]) return false;
    }
    return x.dims[0] == y.dims[0] && w.dims[0] == y.dims[1] && x.dims[1] % w.dims[1] == 0 &&
           y.dims[1] % (x.dims[1] / w.dims[1]) == 0;
  }
  /* f(n, o, oh, ow, c, i, j, h, k): every product of the convolution. */
  template <typename F>
  void each(F f) const {
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
    each([&](int64_t n, int64_t o, int64_t oh, int64_t ow, int64_t c, int64_t channel,
             int64_t i, int64_t j, int64_t h, int64_t k) {
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

/* What a descriptor cannot be finalized without. */
const std::map<int, std::vector<int>> &needs = *new std::map<int, std::vector<int>>{
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR,
     {CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_ATTR_TENSOR_STRIDES,
      CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT}},
    {CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR,
     {CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_ATTR_CONVOLUTION_CONV_MODE,
      CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_ATTR_CONVOLUTION_DILATIONS,
      CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS,
      CUDNN_ATTR_CONVOLUTION_POST_PADDINGS}},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
     {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
      CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA}},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
     {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA}},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
     {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
      CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA}},
    {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR,
     {CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_ATTR_OPERATIONGRAPH_OPS}},
    {CUDNN_BACKEND_MATMUL_DESCRIPTOR, {CUDNN_ATTR_MATMUL_COMP_TYPE}},
    {CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
     {CUDNN_ATTR_POINTWISE_MODE, CUDNN_ATTR_POINTWISE_MATH_PREC}},
    {CUDNN_BACKEND_REDUCTION_DESCRIPTOR,
     {CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_ATTR_REDUCTION_COMP_TYPE}},
    {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
     {CUDNN_ATTR_OPERATION_MATMUL_ADESC, CUDNN_ATTR_OPERATION_MATMUL_BDESC,
      CUDNN_ATTR_OPERATION_MATMUL_CDESC, CUDNN_ATTR_OPERATION_MATMUL_DESC}},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
     {CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
      CUDNN_ATTR_OPERATION_POINTWISE_YDESC}},
    {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
     {CUDNN_ATTR_OPERATION_REDUCTION_XDESC, CUDNN_ATTR_OPERATION_REDUCTION_YDESC,
      CUDNN_ATTR_OPERATION_REDUCTION_DESC}},
    {CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
     {CUDNN_ATTR_OPERATION_RESHAPE_XDESC, CUDNN_ATTR_OPERATION_RESHAPE_YDESC}},
    {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
     {CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_ATTR_ENGINEHEUR_MODE}},
    {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
     {CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG}},
    {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR,
     {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS,
      CUDNN_ATTR_VARIANT_PACK_WORKSPACE}}};

bool has_all(const Part *part) {
  auto need = needs.find(part->type);
  if (need == needs.end()) return true;
  for (int name : need->second)
    if (!part->attributes.count(name)) {
      orr_fake_complain("cuDNN: a descriptor of kind %d lacks attribute %d", part->type, name);
      return false;
    }
  return true;
}

const std::vector<Part *> operations(const Part *graph) {
  return graph ? graph->list<Part *>(CUDNN_ATTR_OPERATIONGRAPH_OPS) : std::vector<Part *>();
}

bool is_convolution(const Part *graph) {
  int name[4];
  Made made;
  std::vector<Part *> ops = operations(graph);
  return ops.size() == 1 && names_of(ops[0], name, &made);
}

/* Fills w; false: some part is not there, or does not fit. */
bool make_work(const Part *plan, const Part *pack, Work *w) {
  int name[4];
  Part *config = inner(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  Part *graph = config && config->graph ? part_at(config->graph) : nullptr;
  Part *op = inner(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
  if (!op || !names_of(op, name, &w->made)) return false;
  Part *geometry = inner(op, name[0]), *tensor[3];
  for (int k = 0; k < 3; k++)
    if (!(tensor[k] = inner(op, name[k + 1]))) return false;
  if (!geometry) return false;
  const Engine &engine = engines[config->engine];
  Tensor *to[3] = {&w->x, &w->w, &w->y};
  for (int k = 0; k < 3; k++) {
    *to[k] = tensor_of(tensor[k], pack);
    to[k]->tf32 = engine.tf32;
  }
  w->stride = geometry->list<int64_t>(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
  w->padding = geometry->list<int64_t>(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
  w->after = geometry->list<int64_t>(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS);
  w->dilation = geometry->list<int64_t>(CUDNN_ATTR_CONVOLUTION_DILATIONS);
  w->spoil = engine.spoil;
  if (w->fits()) return true;
  orr_fake_complain("cuDNN: the shapes of a convolution do not fit its geometry");
  return false;
}

bool has_engine(const Part *graph) {
  return graph && (is_convolution(graph) || orr_fake_dnn_flow_fits(operations(graph)));
}

cudnnStatus_t execute_flow(cudnnHandle_t handle, const Part *plan, const Part *pack) {
  Part *config = inner(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  std::function<void()> run =
      orr_fake_dnn_flow(operations(config->graph), pack, handle->device,
                        engines[config->engine].spoil);
  if (!run) return CUDNN_STATUS_BAD_PARAM;
  cudaError_t status = orr_fake_push(handle->stream, "cuDNN", run);
  return status == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

} // namespace

extern "C" {

#define INJECTED                                                                           \
  (orr_fake_kind_now() == FAKE_MEMORY ? CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED \
                                      : CUDNN_STATUS_EXECUTION_FAILED)
#define CALL(name) FAKE_CALL(name, INJECTED)

cudnnStatus_t cudnnCreate(cudnnHandle_t *out) {
  CALL("cudnnCreate");
  *out = new orr_fake_dnn{orr_fake_current(), nullptr};
  orr_fake_born(*out, a_handle);
  return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t end_handle(cudnnHandle_t handle) {
  if (!orr_fake_is(handle, a_handle)) return CUDNN_STATUS_BAD_PARAM;
  orr_fake_gone(handle);
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}

FAKE_RELEASE(cudnnStatus_t, cudnnDestroy, cudnnHandle_t, handle, INJECTED, end_handle)

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  CALL("cudnnSetStream");
  if (!orr_fake_is(handle, a_handle) || !orr_fake_is(stream, "a stream"))
    return CUDNN_STATUS_BAD_PARAM;
  if (orr_fake_device_of(stream) != handle->device) {
    orr_fake_complain("cuDNN: a handle of device %d gets a stream of device %d", handle->device,
                      orr_fake_device_of(stream));
    return CUDNN_STATUS_BAD_PARAM;
  }
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

size_t cudnnGetVersion(void) { return 91900; }

const char *cudnnGetErrorString(cudnnStatus_t status) {
  switch (status) {
    case CUDNN_STATUS_SUCCESS: return "CUDNN_STATUS_SUCCESS";
    case CUDNN_STATUS_BAD_PARAM: return "CUDNN_STATUS_BAD_PARAM";
    case CUDNN_STATUS_NOT_SUPPORTED: return "CUDNN_STATUS_NOT_SUPPORTED";
    default: return "CUDNN_STATUS_EXECUTION_FAILED";
  }
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t *out) {
  CALL("cudnnBackendCreateDescriptor");
  Part *part = new Part{type, false, 0, nullptr, {}};
  orr_fake_born(part, a_part);
  *out = part;
  return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t end_part(cudnnBackendDescriptor_t p) {
  Part *part = part_at(p);
  if (!part) return CUDNN_STATUS_BAD_PARAM;
  orr_fake_gone(part);
  delete part;
  return CUDNN_STATUS_SUCCESS;
}

FAKE_RELEASE(cudnnStatus_t, cudnnBackendDestroyDescriptor, cudnnBackendDescriptor_t, p,
             INJECTED, end_part)

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
  if (!has_all(part)) return CUDNN_STATUS_BAD_PARAM;
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
      if (!has_engine(inner(part, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)))
        return CUDNN_STATUS_NOT_SUPPORTED;
      *n = wanted < ENGINES ? wanted : (int64_t)ENGINES;
      for (int64_t k = 0; k < *n; k++) {
        Part *config = part_at(list[k]);
        if (!config) return CUDNN_STATUS_BAD_PARAM;
        config->engine = (int)k;
        config->graph = part->one<Part *>(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
        config->final = true;
      }
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      if (!part_at(list[0])) return CUDNN_STATUS_BAD_PARAM;
      part_at(list[0])->engine = part->engine;
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
      *n = (int64_t)engines[part->engine].notes.size();
      for (int64_t k = 0; k < *n && k < wanted; k++)
        ((cudnnBackendNumericalNote_t *)values)[k] = engines[part->engine].notes[(size_t)k];
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
  Part *planned = part_at(plan), *pack = part_at(variant);
  Work work;
  if (!orr_fake_is(handle, a_handle) || !planned || !planned->final || !pack || !pack->final ||
      !orr_fake_is(handle->stream, "a stream"))
    return CUDNN_STATUS_BAD_PARAM;
  int device = handle->device;
  if (!orr_fake_may_use(device, pack->one<void *>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE), ROOM,
                        "cuDNN's workspace"))
    return CUDNN_STATUS_BAD_PARAM;
  Part *config = inner(planned, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  if (!config || !config->graph || !part_at(config->graph)) return CUDNN_STATUS_BAD_PARAM;
  if (!is_convolution(config->graph)) return execute_flow(handle, planned, pack);
  if (!make_work(planned, pack, &work) || !is_there(device, work.x, "cuDNN's x") ||
      !is_there(device, work.w, "cuDNN's w") || !is_there(device, work.y, "cuDNN's y"))
    return CUDNN_STATUS_BAD_PARAM;
  cudaError_t status = orr_fake_push(handle->stream, "cuDNN", [=]() { work.run(); });
  return status == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

} // extern "C"
