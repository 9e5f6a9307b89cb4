/* cuda_dnn_graph.c: one convolution as a graph of cuDNN's backend, and the engine that runs it:
 * asked once a shape, kept in the device's table.
 *
 * Invariant: a device's table is used by the one thread that drives its queues. Of the engines
 * that the heuristics name, best first, the first is taken that keeps what the user asks
 * (determinism, no tf32) and the precision of sums. What cuDNN refuses is kept as refused.
 * To add an operation: its attributes as a row of `ops`.
 */
#include <cudnn.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

enum { MOST_PARTS = 16, MOST_CONFIGS = 24 };
enum { UID_X = 1, UID_W = 2, UID_Y = 3 };
static const int64_t most_room = (int64_t)1 << 30;

typedef struct orr_cuda_conv_plan {
  orr_cuda_conv key;
  cudnnBackendDescriptor_t engine_plan; /* NULL: refused */
  int64_t room;
  cudnnBackendDescriptor_t part[MOST_PARTS]; /* all that was made for it */
  int n_parts;
} orr_cuda_conv_plan;

struct orr_cuda_dnn {
  cudnnHandle_t handle;
  cudaStream_t stream; /* the handle's */
  orr_cuda_table plans;
};

static orr_status failed(orr_cuda_device *d, cudnnStatus_t status) {
  (void)orr_cuda_library(d->gpu, "cuDNN", cudnnGetErrorString(status));
  return ORR_EDEVICE;
}

/* ---- opening and closing ---- */

static void plan_free(void *take_plan) {
  orr_cuda_conv_plan *p = take_plan;
  for (int k = p->n_parts - 1; k >= 0; k--) cudnnBackendDestroyDescriptor(p->part[k]);
  free(p);
}

static orr_status open_dnn(orr_cuda_device *d) {
  struct orr_cuda_dnn *dnn = calloc(1, sizeof *dnn);
  if (!dnn) return orr_fail(ORR_EMEM, "out of host memory for convolutions of %s", d->name);
  dnn->plans = (orr_cuda_table){.key_bytes = sizeof(orr_cuda_conv), .entry_free = plan_free};
  cudnnStatus_t status = cudnnCreate(&dnn->handle);
  if (status) {
    free(dnn);
    return failed(d, status);
  }
  d->dnn = dnn;
  return ORR_OK;
}

void orr_cuda_dnn_close(orr_cuda_device *d) {
  if (!d->dnn) return;
  cudaSetDevice(d->gpu->ordinal);
  orr_cuda_table_clear(&d->dnn->plans);
  cudnnDestroy(d->dnn->handle);
  free(d->dnn);
  d->dnn = NULL;
}

/* ---- descriptors ---- */

typedef cudnnBackendDescriptor_t descriptor;

static cudnnStatus_t set(descriptor part, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t type, int64_t n, const void *values) {
  return cudnnBackendSetAttribute(part, name, type, n, values);
}

static cudnnStatus_t set_part(descriptor part, cudnnBackendAttributeName_t name,
                              descriptor value) {
  return set(part, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

/* The plan owns it. */
static cudnnStatus_t make(orr_cuda_conv_plan *p, cudnnBackendDescriptorType_t type,
                          descriptor *out) {
  if (p->n_parts == MOST_PARTS) return CUDNN_STATUS_INTERNAL_ERROR;
  cudnnStatus_t status = cudnnBackendCreateDescriptor(type, out);
  if (!status) p->part[p->n_parts++] = *out;
  return status;
}

/* The last one that was made is not needed after all. */
static void unmake(orr_cuda_conv_plan *p) {
  cudnnBackendDestroyDescriptor(p->part[--p->n_parts]);
}

static cudnnDataType_t type_of(int32_t dtype) {
  return dtype == ORR_F32   ? CUDNN_DATA_FLOAT
         : dtype == ORR_F16 ? CUDNN_DATA_HALF
                            : CUDNN_DATA_BFLOAT16;
}

static cudnnStatus_t make_tensor(orr_cuda_conv_plan *p, const int64_t *shape, int64_t uid,
                                 descriptor *out) {
  static const int orders[2][4] = {{0, 1, 2, 3}, {0, 2, 3, 1}};
  cudnnDataType_t type = type_of(p->key.dtype);
  int64_t stride[4], alignment = 16, step = 1;
  for (int k = 3; k >= 0; k--) {
    int d = orders[p->key.channels_last][k];
    stride[d] = step;
    step *= shape[d];
  }
  cudnnStatus_t status = make(p, CUDNN_BACKEND_TENSOR_DESCRIPTOR, out);
  if (!status) status = set(*out, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
  if (!status) status = set(*out, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, shape);
  if (!status) status = set(*out, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride);
  if (!status) status = set(*out, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
  if (!status)
    status = set(*out, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
  return status ? status : cudnnBackendFinalize(*out);
}

static cudnnStatus_t make_geometry(orr_cuda_conv_plan *p, descriptor *out) {
  const orr_cuda_conv *c = &p->key;
  const struct {
    cudnnBackendAttributeName_t name;
    const int64_t *values;
  } lists[] = {{CUDNN_ATTR_CONVOLUTION_DILATIONS, c->dilation},
               {CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, c->stride},
               {CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, c->padding},
               {CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, c->padding}};
  cudnnDataType_t sums = CUDNN_DATA_FLOAT;
  cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  int64_t dims = 2;
  cudnnStatus_t status = make(p, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, out);
  if (!status)
    status = set(*out, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &sums);
  if (!status)
    status = set(*out, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
  if (!status)
    status = set(*out, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &dims);
  for (int k = 0; k < 4 && !status; k++)
    status = set(*out, lists[k].name, CUDNN_TYPE_INT64, 2, lists[k].values);
  return status ? status : cudnnBackendFinalize(*out);
}

/* By orr_cuda_conv_kind. */
static const struct op {
  cudnnBackendDescriptorType_t type;
  cudnnBackendAttributeName_t geometry, x, w, y, alpha, beta;
} ops[] = {
    [ORR_CUDA_CONV] = {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                       CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
    [ORR_CUDA_CONV_DATA] = {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
    [ORR_CUDA_CONV_WEIGHT] = {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA}};

static cudnnStatus_t make_op(orr_cuda_conv_plan *p, descriptor *out) {
  const struct op *op = &ops[p->key.kind];
  const float alpha = 1, beta = 0;
  descriptor geometry, x, w, y;
  cudnnStatus_t status = make_geometry(p, &geometry);
  if (!status) status = make_tensor(p, p->key.x, UID_X, &x);
  if (!status) status = make_tensor(p, p->key.w, UID_W, &w);
  if (!status) status = make_tensor(p, p->key.y, UID_Y, &y);
  if (!status) status = make(p, op->type, out);
  if (!status) status = set_part(*out, op->geometry, geometry);
  if (!status) status = set_part(*out, op->x, x);
  if (!status) status = set_part(*out, op->w, w);
  if (!status) status = set_part(*out, op->y, y);
  if (!status) status = set(*out, op->alpha, CUDNN_TYPE_FLOAT, 1, &alpha);
  if (!status) status = set(*out, op->beta, CUDNN_TYPE_FLOAT, 1, &beta);
  return status ? status : cudnnBackendFinalize(*out);
}

static cudnnStatus_t make_graph(orr_cuda_conv_plan *p, cudnnHandle_t handle, descriptor *out) {
  descriptor op;
  cudnnStatus_t status = make_op(p, &op);
  if (!status) status = make(p, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, out);
  if (!status)
    status = set(*out, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
  if (!status) status = set_part(*out, CUDNN_ATTR_OPERATIONGRAPH_OPS, op);
  return status ? status : cudnnBackendFinalize(*out);
}

/* ---- engines ---- */

/* What an engine says about its numbers. */
static bool is_allowed(const orr_cuda_conv *c, cudnnBackendNumericalNote_t note) {
  switch (note) {
    case CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC: return !c->deterministic;
    case CUDNN_NUMERICAL_NOTE_TENSOR_CORE: return c->dtype != ORR_F32 || c->tf32;
    case CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS: return c->tf32;
    case CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION:
    case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13: return false;
    default: return true;
  }
}

static bool is_fit(const orr_cuda_conv *c, descriptor config) {
  cudnnBackendNumericalNote_t note[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
  descriptor engine;
  int64_t n = 0, one = 0;
  if (cudnnBackendCreateDescriptor(CUDNN_BACKEND_ENGINE_DESCRIPTOR, &engine)) return false;
  cudnnStatus_t status = cudnnBackendGetAttribute(
      config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &one, &engine);
  if (!status)
    status = cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                      CUDNN_TYPE_NUMERICAL_NOTE,
                                      CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &n, note);
  bool fit = !status;
  for (int64_t k = 0; k < n && k < CUDNN_NUMERICAL_NOTE_TYPE_COUNT && fit; k++)
    fit = is_allowed(c, note[k]);
  cudnnBackendDestroyDescriptor(engine);
  return fit;
}

/* False: this engine cannot; the next may. */
static bool try_engine(orr_cuda_conv_plan *p, cudnnHandle_t handle, descriptor config) {
  descriptor plan;
  int64_t n = 0;
  if (!is_fit(&p->key, config) || make(p, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &plan))
    return false;
  cudnnStatus_t status =
      set(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
  if (!status) status = set_part(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
  if (!status) status = cudnnBackendFinalize(plan);
  if (!status)
    status = cudnnBackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                      CUDNN_TYPE_INT64, 1, &n, &p->room);
  if (!status && p->room <= most_room) {
    p->engine_plan = plan;
    return true;
  }
  unmake(p);
  return false;
}

/* The first engine that can; its configuration joins the plan, the others go. */
static void try_all(orr_cuda_conv_plan *p, cudnnHandle_t handle, descriptor *config,
                    int64_t n) {
  for (int64_t k = 0; k < n; k++) {
    bool keeps =
        !p->engine_plan && p->n_parts < MOST_PARTS - 1 && try_engine(p, handle, config[k]);
    if (keeps) p->part[p->n_parts++] = config[k];
    else cudnnBackendDestroyDescriptor(config[k]);
  }
}

static cudnnStatus_t ask(descriptor heuristic, descriptor graph, cudnnBackendHeurMode_t mode,
                         descriptor *config, int64_t *n) {
  cudnnStatus_t status = set_part(heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  if (!status)
    status = set(heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  if (!status) status = cudnnBackendFinalize(heuristic);
  if (status) return status;
  return cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                  CUDNN_TYPE_BACKEND_DESCRIPTOR, MOST_CONFIGS, n, config);
}

static cudnnStatus_t choose(orr_cuda_conv_plan *p, cudnnHandle_t handle, descriptor graph,
                            cudnnBackendHeurMode_t mode) {
  descriptor heuristic, config[MOST_CONFIGS];
  int64_t n_made = 0, n = 0;
  cudnnStatus_t status =
      cudnnBackendCreateDescriptor(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &heuristic);
  if (status) return status;
  for (; n_made < MOST_CONFIGS && !status; n_made += !status)
    status = cudnnBackendCreateDescriptor(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &config[n_made]);
  if (!status) status = ask(heuristic, graph, mode, config, &n);
  if (status) n = 0;
  if (n > n_made) n = n_made;
  try_all(p, handle, config, n);
  for (int64_t k = n; k < n_made; k++) cudnnBackendDestroyDescriptor(config[k]);
  cudnnBackendDestroyDescriptor(heuristic);
  return status;
}

/* ---- plans ---- */

/* Refusals, in cuDNN's numbers: bad parameters 2000, not supported 3000, internal 4000. */
static bool is_refusal(cudnnStatus_t status) {
  return status >= CUDNN_STATUS_BAD_PARAM && status < CUDNN_STATUS_EXECUTION_FAILED &&
         status != CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED &&
         status != CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
}

static cudnnStatus_t make_plan(orr_cuda_conv_plan *p, cudnnHandle_t handle) {
  static const cudnnBackendHeurMode_t modes[] = {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK};
  descriptor graph;
  cudnnStatus_t status = make_graph(p, handle, &graph);
  if (status) return is_refusal(status) ? CUDNN_STATUS_SUCCESS : status;
  for (int k = 0; k < 2 && !p->engine_plan; k++) {
    status = choose(p, handle, graph, modes[k]);
    if (status && !is_refusal(status)) return status;
  }
  return CUDNN_STATUS_SUCCESS;
}

static orr_status new_plan(orr_cuda_device *d, const orr_cuda_conv *c) {
  orr_cuda_conv_plan *p = calloc(1, sizeof *p);
  if (!p) return orr_fail(ORR_EMEM, "out of host memory for convolutions of %s", d->name);
  p->key = *c;
  cudnnStatus_t status = make_plan(p, d->dnn->handle);
  if (status) {
    plan_free(p);
    return failed(d, status);
  }
  return orr_cuda_table_add(&d->dnn->plans, p);
}

orr_status orr_cuda_conv_find(orr_cuda_device *d, const orr_cuda_conv *c,
                              orr_cuda_conv_plan **out) {
  *out = NULL;
  if (!d->dnn) ORR_TRY(open_dnn(d));
  orr_cuda_conv_plan *p = orr_cuda_table_find(&d->dnn->plans, c);
  if (!p) {
    ORR_TRY(new_plan(d, c));
    p = orr_cuda_table_find(&d->dnn->plans, c);
  }
  if (p->engine_plan) *out = p;
  return ORR_OK;
}

size_t orr_cuda_conv_room(const orr_cuda_conv_plan *p) { return (size_t)p->room; }

/* ---- running ---- */

static cudnnStatus_t execute(struct orr_cuda_dnn *dnn, const orr_cuda_conv_plan *p,
                             const void *const data[3], void *room) {
  static const int64_t uids[3] = {UID_X, UID_W, UID_Y};
  descriptor pack;
  cudnnStatus_t status =
      cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
  if (status) return status;
  status = set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 3, data);
  if (!status)
    status = set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 3, uids);
  if (!status)
    status = set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &room);
  if (!status) status = cudnnBackendFinalize(pack);
  if (!status) status = cudnnBackendExecute(dnn->handle, p->engine_plan, pack);
  cudnnBackendDestroyDescriptor(pack);
  return status;
}

orr_status orr_cuda_conv_run(orr_cuda_queue *s, orr_cuda_conv_plan *p, const void *x,
                             const void *w, const void *y, void *room) {
  struct orr_cuda_dnn *dnn = s->device->dnn;
  const void *const data[3] = {x, w, y};
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  if (dnn->stream != s->issue) status = cudnnSetStream(dnn->handle, s->issue);
  if (!status) {
    dnn->stream = s->issue;
    status = execute(dnn, p, data, room);
  }
  return status ? failed(s->device, status) : ORR_OK;
}
