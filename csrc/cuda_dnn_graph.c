/* cuda_dnn_graph.c: one convolution as a graph of cuDNN's backend: made once a shape, kept in
 * the device's table.
 *
 * Invariant: a key holds all that a plan depends on. What cuDNN refuses is kept as refused.
 * To add an operation: its attributes as a row of `ops`.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda_dnn.h"

enum { UID_X = 1, UID_W = 2, UID_Y = 3 };

typedef struct orr_cuda_conv_plan {
  orr_cuda_conv key;
  orr_dnn_plan plan;
} orr_cuda_conv_plan;

/* ---- the graph ---- */

static orr_dnn_part new_tensor(orr_dnn_plan *p, const orr_cuda_conv *c, const int64_t *shape,
                               int64_t uid) {
  static const int orders[2][4] = {{0, 1, 2, 3}, {0, 2, 3, 1}};
  orr_dnn_tensor t = {.type = orr_dnn_type(c->dtype), .uid = uid};
  int64_t step = 1;
  for (int k = 3; k >= 0; k--) {
    int d = orders[c->channels_last][k];
    t.shape[d] = shape[d];
    t.stride[d] = step;
    step *= shape[d];
  }
  return orr_dnn_new_tensor(p, &t);
}

static orr_dnn_part new_geometry(orr_dnn_plan *p, const orr_cuda_conv *c) {
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
  orr_dnn_part geometry = orr_dnn_new(p, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  orr_dnn_set(p, geometry, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &sums);
  orr_dnn_set(p, geometry, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1,
              &mode);
  orr_dnn_set(p, geometry, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &dims);
  for (int k = 0; k < 4; k++)
    orr_dnn_set(p, geometry, lists[k].name, CUDNN_TYPE_INT64, 2, lists[k].values);
  orr_dnn_finish(p, geometry);
  return geometry;
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

void orr_dnn_conv_graph(orr_dnn_plan *p, const orr_cuda_conv *c) {
  const struct op *op = &ops[c->kind];
  const float alpha = 1, beta = 0;
  orr_dnn_part geometry = new_geometry(p, c);
  orr_dnn_part x = new_tensor(p, c, c->x, UID_X), w = new_tensor(p, c, c->w, UID_W);
  orr_dnn_part y = new_tensor(p, c, c->y, UID_Y), part = orr_dnn_new(p, op->type);
  orr_dnn_set_part(p, part, op->geometry, geometry);
  orr_dnn_set_part(p, part, op->x, x);
  orr_dnn_set_part(p, part, op->w, w);
  orr_dnn_set_part(p, part, op->y, y);
  orr_dnn_set(p, part, op->alpha, CUDNN_TYPE_FLOAT, 1, &alpha);
  orr_dnn_set(p, part, op->beta, CUDNN_TYPE_FLOAT, 1, &beta);
  orr_dnn_op(p, part);
}

orr_dnn_demand orr_dnn_conv_demand(const orr_cuda_conv *c) {
  return (orr_dnn_demand){.deterministic = c->deterministic,
                          .tensor_cores = c->dtype != ORR_F32 || c->tf32,
                          .rounds_inputs = c->tf32};
}

/* ---- plans ---- */

static void plan_free(void *take_plan) {
  orr_cuda_conv_plan *p = take_plan;
  orr_dnn_clear(&p->plan);
  free(p);
}

static orr_status new_plan(orr_cuda_device *d, const orr_cuda_conv *c) {
  const orr_dnn_target target = {.handle = d->dnn->handle};
  const orr_dnn_demand demand = orr_dnn_conv_demand(c);
  orr_cuda_conv_plan *p = calloc(1, sizeof *p);
  if (!p) return orr_fail(ORR_EMEM, "out of host memory for convolutions of %s", d->name);
  p->key = *c;
  orr_dnn_conv_graph(&p->plan, c);
  cudnnStatus_t status = orr_dnn_choose(&p->plan, &target, &demand);
  if (status) {
    plan_free(p);
    return orr_dnn_failed(d, status);
  }
  return orr_cuda_table_add(&d->dnn->convolutions, p);
}

orr_status orr_cuda_conv_find(orr_cuda_device *d, const orr_cuda_conv *c,
                              orr_cuda_conv_plan **out) {
  *out = NULL;
  ORR_TRY(orr_dnn_open(d));
  orr_cuda_table *table = &d->dnn->convolutions;
  table->key_bytes = sizeof(orr_cuda_conv);
  table->entry_free = plan_free;
  orr_cuda_conv_plan *p = orr_cuda_table_find(table, c);
  if (!p) {
    ORR_TRY(new_plan(d, c));
    p = orr_cuda_table_find(table, c);
  }
  if (p->plan.engine) *out = p;
  return ORR_OK;
}

size_t orr_cuda_conv_room(const orr_cuda_conv_plan *p) { return (size_t)p->plan.room; }

orr_status orr_cuda_conv_run(orr_cuda_queue *s, orr_cuda_conv_plan *p, const void *x,
                             const void *w, const void *y, void *room) {
  static const int64_t uids[3] = {UID_X, UID_W, UID_Y};
  const void *const data[3] = {x, w, y};
  return orr_dnn_run(s, &p->plan, 3, uids, data, room);
}
