/* cuda_dnn_plan.c: a graph of cuDNN's backend, the engine that runs it, and the run.
 *
 * Invariant: of the engines that the heuristics name, best first, the first is taken that keeps
 * what the user asks (determinism, no tf32) and the precision of sums. What cuDNN refuses is
 * kept as refused. A device's tables are used by the one thread that drives its queues.
 * To add a note of an engine's numbers: its case in is_allowed.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda_dnn.h"

enum { MOST_CONFIGS = 24 };
static const int64_t most_room = (int64_t)1 << 30;

orr_status orr_dnn_failed(orr_cuda_device *d, cudnnStatus_t status) {
  (void)orr_cuda_library(d->gpu, "cuDNN", cudnnGetErrorString(status));
  return ORR_EDEVICE;
}

/* ---- opening and closing ---- */

orr_status orr_dnn_open(orr_cuda_device *d) {
  if (d->dnn) return ORR_OK;
  struct orr_cuda_dnn *dnn = calloc(1, sizeof *dnn);
  if (!dnn) return orr_fail(ORR_EMEM, "out of host memory for cuDNN's plans of %s", d->name);
  cudnnStatus_t status = cudnnCreate(&dnn->handle);
  if (status) {
    free(dnn);
    return orr_dnn_failed(d, status);
  }
  d->dnn = dnn;
  return ORR_OK;
}

void orr_cuda_dnn_close(orr_cuda_device *d) {
  if (!d->dnn) return;
  cudaSetDevice(d->gpu->ordinal);
  orr_cuda_table_clear(&d->dnn->convolutions);
  orr_cuda_table_clear(&d->dnn->attentions);
  cudnnDestroy(d->dnn->handle);
  free(d->dnn);
  d->dnn = NULL;
}

/* ---- descriptors ---- */

cudnnDataType_t orr_dnn_type(int32_t dtype) {
  return dtype == ORR_F32   ? CUDNN_DATA_FLOAT
         : dtype == ORR_F16 ? CUDNN_DATA_HALF
                            : CUDNN_DATA_BFLOAT16;
}

orr_dnn_part orr_dnn_new(orr_dnn_plan *p, cudnnBackendDescriptorType_t type) {
  orr_dnn_part part = NULL;
  if (!p->status && p->n_parts == ORR_DNN_PARTS) p->status = CUDNN_STATUS_INTERNAL_ERROR;
  if (!p->status) p->status = cudnnBackendCreateDescriptor(type, &part);
  if (p->status) return NULL;
  p->part[p->n_parts++] = part;
  return part;
}

void orr_dnn_set(orr_dnn_plan *p, orr_dnn_part part, cudnnBackendAttributeName_t name,
                 cudnnBackendAttributeType_t type, int64_t n, const void *values) {
  if (!p->status) p->status = cudnnBackendSetAttribute(part, name, type, n, values);
}

void orr_dnn_set_part(orr_dnn_plan *p, orr_dnn_part part, cudnnBackendAttributeName_t name,
                      orr_dnn_part value) {
  orr_dnn_set(p, part, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

void orr_dnn_finish(orr_dnn_plan *p, orr_dnn_part part) {
  if (!p->status) p->status = cudnnBackendFinalize(part);
}

orr_dnn_part orr_dnn_new_tensor(orr_dnn_plan *p, const orr_dnn_tensor *t) {
  const int64_t alignment = t->is_by_value ? 4 : 16;
  orr_dnn_part part = orr_dnn_new(p, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  orr_dnn_set(p, part, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &t->type);
  orr_dnn_set(p, part, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, t->shape);
  orr_dnn_set(p, part, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, t->stride);
  orr_dnn_set(p, part, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &t->uid);
  orr_dnn_set(p, part, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
  orr_dnn_set(p, part, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &t->is_virtual);
  orr_dnn_set(p, part, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &t->is_by_value);
  orr_dnn_finish(p, part);
  return part;
}

void orr_dnn_op(orr_dnn_plan *p, orr_dnn_part op) {
  orr_dnn_finish(p, op);
  if (!p->status && p->n_ops == ORR_DNN_OPS) p->status = CUDNN_STATUS_INTERNAL_ERROR;
  if (!p->status) p->op[p->n_ops++] = op;
}

static orr_dnn_part new_graph(orr_dnn_plan *p, const orr_dnn_target *target) {
  orr_dnn_part graph = orr_dnn_new(p, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  if (target->handle)
    orr_dnn_set(p, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1,
                &target->handle);
  orr_dnn_set(p, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, p->n_ops,
              p->op);
  orr_dnn_finish(p, graph);
  return graph;
}

/* ---- engines ---- */

static bool is_allowed(const orr_dnn_demand *demand, cudnnBackendNumericalNote_t note) {
  switch (note) {
    case CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC: return !demand->deterministic;
    case CUDNN_NUMERICAL_NOTE_TENSOR_CORE: return demand->tensor_cores;
    case CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS: return demand->rounds_inputs;
    case CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION:
    case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13: return false;
    default: return true;
  }
}

static bool is_fit(const orr_dnn_demand *demand, orr_dnn_part config) {
  cudnnBackendNumericalNote_t note[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
  orr_dnn_part engine;
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
    fit = is_allowed(demand, note[k]);
  cudnnBackendDestroyDescriptor(engine);
  return fit;
}

/* False: this engine cannot; the next may. */
static bool try_engine(orr_dnn_plan *p, const orr_dnn_target *target, orr_dnn_part config) {
  int64_t n = 0;
  orr_dnn_part plan = orr_dnn_new(p, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  if (!plan) return false;
  if (target->handle)
    orr_dnn_set(p, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1,
                &target->handle);
  else orr_dnn_set_part(p, plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, target->properties);
  orr_dnn_set_part(p, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
  orr_dnn_finish(p, plan);
  if (!p->status)
    p->status = cudnnBackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                         CUDNN_TYPE_INT64, 1, &n, &p->room);
  if (!p->status && p->room <= most_room) {
    p->engine = plan;
    return true;
  }
  p->status = CUDNN_STATUS_SUCCESS;
  cudnnBackendDestroyDescriptor(p->part[--p->n_parts]);
  return false;
}

/* The first engine that can; its configuration joins the plan, the others go. */
static void try_all(orr_dnn_plan *p, const orr_dnn_target *target, const orr_dnn_demand *demand,
                    orr_dnn_part *config, int64_t n) {
  for (int64_t k = 0; k < n; k++) {
    bool keeps = !p->engine && p->n_parts < ORR_DNN_PARTS - 1 && is_fit(demand, config[k]) &&
                 try_engine(p, target, config[k]);
    if (keeps) p->part[p->n_parts++] = config[k];
    else cudnnBackendDestroyDescriptor(config[k]);
  }
}

static cudnnStatus_t ask(orr_dnn_part heuristic, const orr_dnn_target *target,
                         orr_dnn_part graph, cudnnBackendHeurMode_t mode, orr_dnn_part *config,
                         int64_t *n) {
  orr_dnn_plan p = {.status = CUDNN_STATUS_SUCCESS};
  orr_dnn_set_part(&p, heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  orr_dnn_set(&p, heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  if (!target->handle)
    orr_dnn_set_part(&p, heuristic, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, target->properties);
  orr_dnn_finish(&p, heuristic);
  if (p.status) return p.status;
  return cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                  CUDNN_TYPE_BACKEND_DESCRIPTOR, MOST_CONFIGS, n, config);
}

static cudnnStatus_t choose(orr_dnn_plan *p, const orr_dnn_target *target,
                            const orr_dnn_demand *demand, orr_dnn_part graph,
                            cudnnBackendHeurMode_t mode) {
  orr_dnn_part heuristic, config[MOST_CONFIGS];
  int64_t n_made = 0, n = 0;
  cudnnStatus_t status =
      cudnnBackendCreateDescriptor(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &heuristic);
  if (status) return status;
  for (; n_made < MOST_CONFIGS && !status; n_made += !status)
    status = cudnnBackendCreateDescriptor(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &config[n_made]);
  if (!status) status = ask(heuristic, target, graph, mode, config, &n);
  if (status) n = 0;
  if (n > n_made) n = n_made;
  try_all(p, target, demand, config, n);
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

cudnnStatus_t orr_dnn_choose(orr_dnn_plan *p, const orr_dnn_target *target,
                             const orr_dnn_demand *demand) {
  static const cudnnBackendHeurMode_t modes[] = {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK};
  orr_dnn_part graph = new_graph(p, target);
  if (p->status) return is_refusal(p->status) ? CUDNN_STATUS_SUCCESS : p->status;
  for (int k = 0; k < 2 && !p->engine; k++) {
    cudnnStatus_t status = choose(p, target, demand, graph, modes[k]);
    if (status && !is_refusal(status)) return status;
  }
  return CUDNN_STATUS_SUCCESS;
}

void orr_dnn_clear(orr_dnn_plan *p) {
  for (int k = p->n_parts - 1; k >= 0; k--) cudnnBackendDestroyDescriptor(p->part[k]);
  memset(p, 0, sizeof *p);
}

/* ---- running ---- */

static cudnnStatus_t execute(struct orr_cuda_dnn *dnn, const orr_dnn_plan *plan, int n,
                             const int64_t *uids, const void *const *data, void *room) {
  orr_dnn_plan p = {.status = CUDNN_STATUS_SUCCESS};
  orr_dnn_part pack = orr_dnn_new(&p, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  orr_dnn_set(&p, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n, data);
  orr_dnn_set(&p, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, uids);
  orr_dnn_set(&p, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &room);
  orr_dnn_finish(&p, pack);
  if (!p.status) p.status = cudnnBackendExecute(dnn->handle, plan->engine, pack);
  cudnnStatus_t status = p.status;
  orr_dnn_clear(&p);
  return status;
}

orr_status orr_dnn_run(orr_cuda_queue *s, const orr_dnn_plan *p, int n, const int64_t *uids,
                       const void *const *data, void *room) {
  struct orr_cuda_dnn *dnn = s->device->dnn;
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  if (dnn->stream != s->issue) status = cudnnSetStream(dnn->handle, s->issue);
  if (!status) {
    dnn->stream = s->issue;
    status = execute(dnn, p, n, uids, data, room);
  }
  return status ? orr_dnn_failed(s->device, status) : ORR_OK;
}
