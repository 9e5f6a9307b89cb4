/* cuda_dnn_sdpa.c: attention as a graph of cuDNN's backend, forward and backward, in the form
 * that its flash attention engines recognise: products, elementwise steps and reductions whose
 * (queries, keys) tensors are virtual.
 *
 * No engine notes whether its sums have an order. With gq summed in f32 in the room they have
 * none; without, the engine keeps one matrix of queries by keys in its room, and bits repeat.
 *
 * Invariant: shape comments are (N, H, rows, columns), T queries, S keys. Rows' logarithms are
 * (N, H, T), row-major, in f32. A key holds all that a plan depends on; the scale does not.
 * To add an input (a bias, say): a tensor in `tensors`, its step between scale and mask, and
 * its pointer in orr_cuda_sdpa_run.
 * Method: T. Dao, "FlashAttention-2", 2023, algorithms 1 and 2.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_dnn.h"

enum {
  UID_Q = 1,
  UID_K,
  UID_V,
  UID_O,
  UID_LSE,
  UID_G,
  UID_GQ,
  UID_GK,
  UID_GV,
  UID_DELTA, /* (N, H, T): sum of g o, through the room */
  UID_SUMS,  /* (N, H, T, D): gq in f32, through the room; where bits may differ */
  UID_SCALE, /* numbers of the host */
  UID_LEAST,
  UID_ONE,
  N_UIDS,
  UID_VIRTUAL = 100
};

typedef struct orr_cuda_sdpa_plan {
  orr_cuda_sdpa key;
  orr_dnn_plan plan;
} orr_cuda_sdpa_plan;

/* ---- tensors ---- */

typedef struct graph {
  orr_dnn_plan *p;
  const orr_cuda_sdpa *a;
  cudnnDataType_t type; /* of what is multiplied */
  int64_t next;         /* uid of a virtual tensor */
} graph;

/* (N, H, rows, columns), row-major. */
static orr_dnn_tensor packed(const graph *g, cudnnDataType_t type, int64_t rows,
                             int64_t columns) {
  const orr_cuda_sdpa *a = g->a;
  return (orr_dnn_tensor){.type = type,
                          .shape = {a->n, a->h, rows, columns},
                          .stride = {a->h * rows * columns, rows * columns, columns, 1}};
}

static orr_dnn_tensor turned(orr_dnn_tensor t) {
  int64_t rows = t.shape[2], stride = t.stride[2];
  t.shape[2] = t.shape[3], t.stride[2] = t.stride[3];
  t.shape[3] = rows, t.stride[3] = stride;
  return t;
}

static orr_dnn_part hidden(graph *g, orr_dnn_tensor t) {
  t.uid = UID_VIRTUAL + g->next++;
  t.is_virtual = true;
  return orr_dnn_new_tensor(g->p, &t);
}

/* A matrix of queries by keys, in the engine. */
static orr_dnn_part scores(graph *g, cudnnDataType_t type) {
  return hidden(g, packed(g, type, g->a->queries, g->a->keys));
}

static orr_dnn_part number_a_row(graph *g) {
  return hidden(g, packed(g, CUDNN_DATA_FLOAT, g->a->queries, 1));
}

static orr_dnn_tensor given(const graph *g, int64_t uid, const int64_t *stride, int64_t rows,
                            int64_t columns) {
  orr_dnn_tensor t = {.type = g->type,
                      .uid = uid,
                      .shape = {g->a->n, g->a->h, rows, columns},
                      .stride = {stride[0], stride[1], stride[2], 1}};
  return t;
}

static orr_dnn_part visible(graph *g, int64_t uid, const int64_t *stride, int64_t rows,
                            int64_t columns) {
  orr_dnn_tensor t = given(g, uid, stride, rows, columns);
  return orr_dnn_new_tensor(g->p, &t);
}

static orr_dnn_part visible_turned(graph *g, int64_t uid, const int64_t *stride, int64_t rows,
                                   int64_t columns) {
  orr_dnn_tensor t = turned(given(g, uid, stride, rows, columns));
  return orr_dnn_new_tensor(g->p, &t);
}

static orr_dnn_part visible_packed(graph *g, int64_t uid, int64_t rows, int64_t columns) {
  orr_dnn_tensor t = packed(g, CUDNN_DATA_FLOAT, rows, columns);
  t.uid = uid;
  return orr_dnn_new_tensor(g->p, &t);
}

static orr_dnn_part number(graph *g, int64_t uid) {
  orr_dnn_tensor t = {.type = CUDNN_DATA_FLOAT,
                      .uid = uid,
                      .shape = {1, 1, 1, 1},
                      .stride = {1, 1, 1, 1},
                      .is_by_value = true};
  return orr_dnn_new_tensor(g->p, &t);
}

/* ---- operations ---- */

static const cudnnDataType_t computed = CUDNN_DATA_FLOAT;

static void product(graph *g, orr_dnn_part a, orr_dnn_part b, orr_dnn_part c) {
  orr_dnn_part how = orr_dnn_new(g->p, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  orr_dnn_set(g->p, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &computed);
  orr_dnn_finish(g->p, how);
  orr_dnn_part op = orr_dnn_new(g->p, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
  orr_dnn_op(g->p, op);
}

/* y = mode(x[, b[, t]]); NULL: not given. axis: of an index; else -1. */
static void pointwise(graph *g, cudnnPointwiseMode_t mode, int64_t axis, orr_dnn_part x,
                      orr_dnn_part b, orr_dnn_part t, orr_dnn_part y) {
  const cudnnDataType_t type = mode == CUDNN_POINTWISE_CMP_GE ? CUDNN_DATA_BOOLEAN : computed;
  orr_dnn_part how = orr_dnn_new(g->p, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  orr_dnn_set(g->p, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  orr_dnn_set(g->p, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &type);
  if (axis >= 0) orr_dnn_set(g->p, how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
  orr_dnn_finish(g->p, how);
  orr_dnn_part op = orr_dnn_new(g->p, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
  if (b) orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
  if (t) orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
  orr_dnn_op(g->p, op);
}

/* mode(x, b), of the scores' shape. */
static orr_dnn_part of_scores(graph *g, cudnnPointwiseMode_t mode, orr_dnn_part x,
                              orr_dnn_part b) {
  orr_dnn_part y = scores(g, CUDNN_DATA_FLOAT);
  pointwise(g, mode, -1, x, b, NULL, y);
  return y;
}

static void reduce(graph *g, cudnnReduceTensorOp_t mode, orr_dnn_part x, orr_dnn_part y) {
  orr_dnn_part how = orr_dnn_new(g->p, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  orr_dnn_set(g->p, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1,
              &mode);
  orr_dnn_set(g->p, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &computed);
  orr_dnn_finish(g->p, how);
  orr_dnn_part op = orr_dnn_new(g->p, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
  orr_dnn_op(g->p, op);
}

/* x seen with rows and columns exchanged, as y. */
static void turn(graph *g, orr_dnn_part x, orr_dnn_part y) {
  orr_dnn_part op = orr_dnn_new(g->p, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
  orr_dnn_set_part(g->p, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
  orr_dnn_op(g->p, op);
}

static orr_dnn_part masked(graph *g, orr_dnn_part s) {
  if (!g->a->causal) return s;
  orr_dnn_part query = scores(g, CUDNN_DATA_INT32), key = scores(g, CUDNN_DATA_INT32);
  orr_dnn_part sees = scores(g, CUDNN_DATA_BOOLEAN), y = scores(g, CUDNN_DATA_FLOAT);
  pointwise(g, CUDNN_POINTWISE_GEN_INDEX, 2, s, NULL, NULL, query);
  pointwise(g, CUDNN_POINTWISE_GEN_INDEX, 3, s, NULL, NULL, key);
  pointwise(g, CUDNN_POINTWISE_CMP_GE, -1, query, key, NULL, sees);
  pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, -1, s, number(g, UID_LEAST), sees, y);
  return y;
}

/* ---- forward ---- */

static void forward(graph *g) {
  const orr_cuda_sdpa *a = g->a;
  orr_dnn_part q = visible(g, UID_Q, a->q, a->queries, a->d);
  orr_dnn_part kt = visible_turned(g, UID_K, a->k, a->keys, a->d);
  orr_dnn_part v = visible(g, UID_V, a->v, a->keys, a->e);
  orr_dnn_part o = visible(g, UID_O, a->o, a->queries, a->e);
  orr_dnn_part lse = visible_packed(g, UID_LSE, a->queries, 1);
  orr_dnn_part s = scores(g, CUDNN_DATA_FLOAT); /* (N, H, T, S) */
  product(g, q, kt, s);
  s = of_scores(g, CUDNN_POINTWISE_MUL, s, number(g, UID_SCALE));
  s = masked(g, s);
  orr_dnn_part most = number_a_row(g), sum = number_a_row(g), log = number_a_row(g);
  reduce(g, CUDNN_REDUCE_TENSOR_MAX, s, most);
  s = of_scores(g, CUDNN_POINTWISE_SUB, s, most);
  s = of_scores(g, CUDNN_POINTWISE_EXP, s, NULL);
  reduce(g, CUDNN_REDUCE_TENSOR_ADD, s, sum);
  pointwise(g, CUDNN_POINTWISE_LOG, -1, sum, NULL, NULL, log);
  pointwise(g, CUDNN_POINTWISE_ADD, -1, most, log, NULL, lse);
  orr_dnn_part weights = scores(g, g->type);
  pointwise(g, CUDNN_POINTWISE_DIV, -1, s, sum, NULL, weights);
  product(g, weights, v, o);
}

/* ---- backward ---- */

/* (N, H, T): sum of g o, in the room. */
static orr_dnn_part delta_of(graph *g, orr_dnn_part gy, orr_dnn_part o) {
  const orr_cuda_sdpa *a = g->a;
  orr_dnn_part both = hidden(g, packed(g, CUDNN_DATA_FLOAT, a->queries, a->e));
  orr_dnn_part sum = number_a_row(g), delta = visible_packed(g, UID_DELTA, a->queries, 1);
  pointwise(g, CUDNN_POINTWISE_MUL, -1, gy, o, NULL, both);
  reduce(g, CUDNN_REDUCE_TENSOR_ADD, both, sum);
  pointwise(g, CUDNN_POINTWISE_MUL, -1, sum, number(g, UID_ONE), NULL, delta);
  return delta;
}

/* to (N, H, S, columns) = s^T x */
static void product_of_keys(graph *g, orr_dnn_part s, orr_dnn_part x, orr_dnn_part to) {
  orr_dnn_part st = hidden(g, turned(packed(g, g->type, g->a->queries, g->a->keys)));
  turn(g, s, st);
  product(g, st, x, to);
}

/* gq (N, H, T, D) = s k; in the room first where its sums need no order. */
static void product_of_queries(graph *g, orr_dnn_part s, orr_dnn_part kt) {
  const orr_cuda_sdpa *a = g->a;
  orr_dnn_part k = hidden(g, given(g, 0, a->k, a->keys, a->d));
  orr_dnn_part gq = visible(g, UID_GQ, a->gq, a->queries, a->d);
  turn(g, kt, k);
  if (a->deterministic) {
    product(g, s, k, gq);
    return;
  }
  orr_dnn_part sums = visible_packed(g, UID_SUMS, a->queries, a->d);
  product(g, s, k, sums);
  pointwise(g, CUDNN_POINTWISE_IDENTITY, -1, sums, NULL, NULL, gq);
}

static void backward(graph *g) {
  const orr_cuda_sdpa *a = g->a;
  orr_dnn_part q = visible(g, UID_Q, a->q, a->queries, a->d);
  orr_dnn_part kt = visible_turned(g, UID_K, a->k, a->keys, a->d);
  orr_dnn_part vt = visible_turned(g, UID_V, a->v, a->keys, a->e);
  orr_dnn_part o = visible(g, UID_O, a->o, a->queries, a->e);
  orr_dnn_part gy = visible(g, UID_G, a->g, a->queries, a->e);
  orr_dnn_part lse = visible_packed(g, UID_LSE, a->queries, 1);
  orr_dnn_part scale = number(g, UID_SCALE), delta = delta_of(g, gy, o);
  orr_dnn_part s = scores(g, CUDNN_DATA_FLOAT), gs = scores(g, CUDNN_DATA_FLOAT);
  product(g, q, kt, s);
  s = of_scores(g, CUDNN_POINTWISE_MUL, s, scale);
  s = of_scores(g, CUDNN_POINTWISE_SUB, s, lse);
  s = masked(g, s);
  s = of_scores(g, CUDNN_POINTWISE_EXP, s, NULL);
  product_of_keys(g, s, gy, visible(g, UID_GV, a->gv, a->keys, a->e));
  product(g, gy, vt, gs);
  gs = of_scores(g, CUDNN_POINTWISE_SUB, gs, delta);
  gs = of_scores(g, CUDNN_POINTWISE_MUL, gs, s);
  gs = of_scores(g, CUDNN_POINTWISE_MUL, gs, scale);
  product_of_keys(g, gs, q, visible(g, UID_GK, a->gk, a->keys, a->d));
  product_of_queries(g, gs, kt);
}

void orr_dnn_sdpa_graph(orr_dnn_plan *p, const orr_cuda_sdpa *a) {
  graph g = {.p = p, .a = a, .type = orr_dnn_type(a->dtype)};
  if (a->backward) backward(&g);
  else forward(&g);
}

orr_dnn_demand orr_dnn_sdpa_demand(const orr_cuda_sdpa *a) {
  return (orr_dnn_demand){.deterministic = a->deterministic, .tensor_cores = true};
}

/* ---- plans ---- */

static void plan_free(void *take_plan) {
  orr_cuda_sdpa_plan *p = take_plan;
  orr_dnn_clear(&p->plan);
  free(p);
}

static orr_status new_plan(orr_cuda_device *d, const orr_cuda_sdpa *a) {
  const orr_dnn_target target = {.handle = d->dnn->handle};
  const orr_dnn_demand demand = orr_dnn_sdpa_demand(a);
  orr_cuda_sdpa_plan *p = calloc(1, sizeof *p);
  if (!p) return orr_fail(ORR_EMEM, "out of host memory for attention of %s", d->name);
  p->key = *a;
  orr_dnn_sdpa_graph(&p->plan, a);
  cudnnStatus_t status = orr_dnn_choose(&p->plan, &target, &demand);
  if (status) {
    plan_free(p);
    return orr_dnn_failed(d, status);
  }
  return orr_cuda_table_add(&d->dnn->attentions, p);
}

orr_status orr_cuda_sdpa_find(orr_cuda_device *d, const orr_cuda_sdpa *a,
                              orr_cuda_sdpa_plan **out) {
  *out = NULL;
  ORR_TRY(orr_dnn_open(d));
  orr_cuda_table *table = &d->dnn->attentions;
  table->key_bytes = sizeof(orr_cuda_sdpa);
  table->entry_free = plan_free;
  orr_cuda_sdpa_plan *p = orr_cuda_table_find(table, a);
  if (!p) {
    ORR_TRY(new_plan(d, a));
    p = orr_cuda_table_find(table, a);
  }
  if (p->plan.engine) *out = p;
  return ORR_OK;
}

/* The room: cuDNN's, then delta, then the sums of gq. */
static size_t aligned(int64_t bytes) { return ((size_t)bytes + 255) / 256 * 256; }

static size_t delta_bytes(const orr_cuda_sdpa *a) {
  return aligned(a->n * a->h * a->queries * (int64_t)sizeof(float));
}

size_t orr_cuda_sdpa_room(const orr_cuda_sdpa_plan *p) {
  const orr_cuda_sdpa *a = &p->key;
  size_t bytes = aligned(p->plan.room);
  if (!a->backward) return bytes;
  bytes += delta_bytes(a);
  return a->deterministic ? bytes : bytes + (size_t)a->d * delta_bytes(a);
}

orr_status orr_cuda_sdpa_run(orr_cuda_queue *s, orr_cuda_sdpa_plan *p,
                             const orr_k_attention_args *a, void *room) {
  const float scale = (float)a->scale, least = -INFINITY, one = 1;
  char *delta = (char *)room + aligned(p->plan.room), *sums = delta + delta_bytes(&p->key);
  const void *const all[N_UIDS] = {
      [UID_Q] = a->q->data,
      [UID_K] = a->k->data,
      [UID_V] = a->v->data,
      [UID_O] = a->o->data,
      [UID_LSE] = a->lse->data,
      [UID_G] = p->key.backward ? a->g->data : NULL,
      [UID_GQ] = p->key.backward ? a->gq->data : NULL,
      [UID_GK] = p->key.backward ? a->gk->data : NULL,
      [UID_GV] = p->key.backward ? a->gv->data : NULL,
      [UID_DELTA] = p->key.backward ? delta : NULL,
      [UID_SUMS] = p->key.backward && !p->key.deterministic ? sums : NULL,
      [UID_SCALE] = &scale,
      [UID_LEAST] = p->key.causal ? &least : NULL,
      [UID_ONE] = p->key.backward ? &one : NULL};
  const void *data[N_UIDS];
  int64_t uids[N_UIDS];
  int n = 0;
  for (int64_t uid = 1; uid < N_UIDS; uid++) {
    if (!all[uid]) continue;
    uids[n] = uid;
    data[n++] = all[uid];
  }
  return orr_dnn_run(s, &p->plan, n, uids, data, room);
}
