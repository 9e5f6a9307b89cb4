/* cuda_dnn.h: what the files that use cuDNN's backend share: descriptors, and plans made of
 * them.
 *
 * Invariant: a plan owns every descriptor that was made for it. The first failure stays in
 * plan.status, and whatever is asked after it does nothing: only the end of a graph is checked.
 * To add a kind of operation: a function that makes its descriptors and ends in orr_dnn_op.
 */
#ifndef ORR_CUDA_DNN_H
#define ORR_CUDA_DNN_H

#include <cudnn.h>

#include "cuda.h"

typedef cudnnBackendDescriptor_t orr_dnn_part;
enum { ORR_DNN_PARTS = 80, ORR_DNN_OPS = 24 };

typedef struct orr_dnn_plan {
  cudnnStatus_t status;
  orr_dnn_part engine; /* an execution plan; NULL: cuDNN refuses */
  int64_t room;
  orr_dnn_part part[ORR_DNN_PARTS], op[ORR_DNN_OPS];
  int n_parts, n_ops;
} orr_dnn_plan;

/* For whom plans are made: a GPU by its handle or, where none is there, by its properties. */
typedef struct orr_dnn_target {
  cudnnHandle_t handle;
  orr_dnn_part properties;
} orr_dnn_target;

/* What an engine's numbers may be like. */
typedef struct orr_dnn_demand {
  bool deterministic, tensor_cores, rounds_inputs;
} orr_dnn_demand;

typedef struct orr_dnn_tensor {
  cudnnDataType_t type;
  int64_t uid, shape[4], stride[4];
  bool is_virtual;  /* lives inside the engine */
  bool is_by_value; /* one number of the host */
} orr_dnn_tensor;

/* A GPU's handle, and its plans by what they are for. */
struct orr_cuda_dnn {
  cudnnHandle_t handle;
  cudaStream_t stream; /* the handle's */
  orr_cuda_table convolutions, attentions;
};

/* ---- cuda_dnn_plan.c ---- */

orr_status orr_dnn_open(orr_cuda_device *d);
orr_status orr_dnn_failed(orr_cuda_device *d, cudnnStatus_t status);
cudnnDataType_t orr_dnn_type(int32_t dtype);

orr_dnn_part orr_dnn_new(orr_dnn_plan *p, cudnnBackendDescriptorType_t type);
void orr_dnn_set(orr_dnn_plan *p, orr_dnn_part part, cudnnBackendAttributeName_t name,
                 cudnnBackendAttributeType_t type, int64_t n, const void *values);
void orr_dnn_set_part(orr_dnn_plan *p, orr_dnn_part part, cudnnBackendAttributeName_t name,
                      orr_dnn_part value);
void orr_dnn_finish(orr_dnn_plan *p, orr_dnn_part part);
orr_dnn_part orr_dnn_new_tensor(orr_dnn_plan *p, const orr_dnn_tensor *t);
void orr_dnn_op(orr_dnn_plan *p, orr_dnn_part take_op); /* finishes it; the graph's next */

/* The graph of the plan's operations, and the best engine that meets the demand. A refusal is
 * no failure: the plan has no engine then. */
cudnnStatus_t orr_dnn_choose(orr_dnn_plan *p, const orr_dnn_target *target,
                             const orr_dnn_demand *demand);
void orr_dnn_clear(orr_dnn_plan *p);
orr_status orr_dnn_run(orr_cuda_queue *s, const orr_dnn_plan *p, int n, const int64_t *uids,
                       const void *const *data, void *room);

/* ---- cuda_dnn_graph.c, cuda_dnn_sdpa.c: graphs, without an engine yet ---- */

void orr_dnn_conv_graph(orr_dnn_plan *p, const orr_cuda_conv *c);
orr_dnn_demand orr_dnn_conv_demand(const orr_cuda_conv *c);
void orr_dnn_sdpa_graph(orr_dnn_plan *p, const orr_cuda_sdpa *a);
orr_dnn_demand orr_dnn_sdpa_demand(const orr_cuda_sdpa *a);

#endif
