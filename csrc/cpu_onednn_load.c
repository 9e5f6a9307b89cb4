/* cpu_onednn_load.c: opens oneDNN and hides what differs between its versions 2 and 3.
 *
 * Invariant: every library function goes through one table, filled once, before any other
 * thread can see it as loaded; it is never closed. Version 2 makes a primitive descriptor
 * from an operation descriptor, version 3 in one call; only this file knows.
 * To add a function: a row in the table of its version, or in the common one if the C
 * signature is the same in both.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cpu_onednn_int.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* F(result, member and symbol after "dnnl_", arguments) */
#define COMMON(F)                                                                     \
  F(int, engine_create, (void **engine, int kind, size_t index))                      \
  F(int, stream_create, (void **stream, void *engine, unsigned flags))                \
  F(int, stream_wait, (void *stream))                                                 \
  F(int, stream_destroy, (void *stream))                                              \
  F(int, memory_create, (void **memory, const void *md, void *engine, void *data))    \
  F(int, memory_set_data_handle, (void *memory, void *data))                          \
  F(int, memory_destroy, (void *memory))                                              \
  F(size_t, memory_desc_get_size, (const void *md))                                   \
  F(int, memory_desc_equal, (const void *a, const void *b))                           \
  F(int, primitive_create, (void **primitive, const void *pd))                        \
  F(int, primitive_execute,                                                           \
    (const void *primitive, void *stream, int n, const orr_dnn_arg *args))            \
  F(int, primitive_destroy, (void *primitive))                                        \
  F(int, primitive_desc_destroy, (void *pd))                                          \
  F(const void *, primitive_desc_query_md, (const void *pd, int what, int index))     \
  F(int, reorder_primitive_desc_create,                                               \
    (void **pd, const void *from, void *from_engine, const void *to, void *to_engine, \
     const void *attr))                                                               \
  F(int, primitive_attr_create, (void **attr))                                        \
  F(int, primitive_attr_destroy, (void *attr))                                        \
  F(int, primitive_attr_set_scratchpad_mode, (void *attr, int mode))                  \
  F(int, primitive_attr_set_post_ops, (void *attr, const void *post_ops))             \
  F(int, post_ops_create, (void **post_ops))                                          \
  F(int, post_ops_destroy, (void *post_ops))

typedef const int64_t *dims;

#define VERSION_2(F)                                                                          \
  F(int, memory_desc_init_by_strides, (void *md, int n, dims shape, int dtype, dims stride))  \
  F(int, memory_desc_init_by_tag, (void *md, int n, dims shape, int dtype, int tag))          \
  F(int, primitive_desc_create,                                                               \
    (void **pd, const void *op, const void *attr, void *engine, const void *hint))            \
  F(int, matmul_desc_init,                                                                    \
    (void *op, const void *src, const void *weights, const void *bias, const void *dst))      \
  F(int, dilated_convolution_forward_desc_init,                                               \
    (void *op, int prop, int alg, const void *src, const void *weights, const void *bias,     \
     const void *dst, dims stride, dims dilation, dims low, dims high))                       \
  F(int, dilated_convolution_backward_data_desc_init,                                         \
    (void *op, int alg, const void *src, const void *weights, const void *dst, dims stride,   \
     dims dilation, dims low, dims high))                                                     \
  F(int, dilated_convolution_backward_weights_desc_init,                                      \
    (void *op, int alg, const void *src, const void *weights, const void *bias,               \
     const void *dst, dims stride, dims dilation, dims low, dims high))                       \
  F(int, pooling_v2_forward_desc_init,                                                        \
    (void *op, int prop, int alg, const void *src, const void *dst, dims stride, dims kernel, \
     dims dilation, dims low, dims high))                                                     \
  F(int, pooling_v2_backward_desc_init,                                                       \
    (void *op, int alg, const void *src, const void *dst, dims stride, dims kernel,           \
     dims dilation, dims low, dims high))

#define VERSION_3(F)                                                                           \
  F(int, memory_desc_create_with_strides,                                                      \
    (void **md, int n, dims shape, int dtype, dims stride))                                    \
  F(int, memory_desc_create_with_tag, (void **md, int n, dims shape, int dtype, int tag))      \
  F(int, memory_desc_destroy, (void *md))                                                      \
  F(int, matmul_primitive_desc_create,                                                         \
    (void **pd, void *engine, const void *src, const void *weights, const void *bias,          \
     const void *dst, const void *attr))                                                       \
  F(int, convolution_forward_primitive_desc_create,                                            \
    (void **pd, void *engine, int prop, int alg, const void *src, const void *weights,         \
     const void *bias, const void *dst, dims stride, dims dilation, dims low, dims high,       \
     const void *attr))                                                                        \
  F(int, convolution_backward_data_primitive_desc_create,                                      \
    (void **pd, void *engine, int alg, const void *src, const void *weights, const void *dst,  \
     dims stride, dims dilation, dims low, dims high, const void *hint, const void *attr))     \
  F(int, convolution_backward_weights_primitive_desc_create,                                   \
    (void **pd, void *engine, int alg, const void *src, const void *weights, const void *bias, \
     const void *dst, dims stride, dims dilation, dims low, dims high, const void *hint,       \
     const void *attr))                                                                        \
  F(int, pooling_forward_primitive_desc_create,                                                \
    (void **pd, void *engine, int prop, int alg, const void *src, const void *dst,             \
     dims stride, dims kernel, dims dilation, dims low, dims high, const void *attr))          \
  F(int, pooling_backward_primitive_desc_create,                                               \
    (void **pd, void *engine, int alg, const void *src, const void *dst, dims stride,          \
     dims kernel, dims dilation, dims low, dims high, const void *hint, const void *attr))

#define MEMBER(result, name, args) result(*name) args;
static struct {
  COMMON(MEMBER)
  VERSION_2(MEMBER)
  VERSION_3(MEMBER)
  /* The same two symbols in both versions, with different arguments. */
  int (*append_sum_2)(void *post_ops, float scale);
  int (*append_sum_3)(void *post_ops, float scale, int32_t zero_point, int dtype);
  int (*append_eltwise_2)(void *post_ops, float scale, int alg, float alpha, float beta);
  int (*append_eltwise_3)(void *post_ops, int alg, float alpha, float beta);
  void (*omp_set_num_threads)(int n); /* NULL where the library runs on another runtime */
  void *engine;
  int major;
  char version[32];
} lib;

static pthread_once_t once = PTHREAD_ONCE_INIT;

struct symbol {
  const char *name;
  size_t offset;
};
#define SYMBOL(result, name, args) {"dnnl_" #name, offsetof(__typeof__(lib), name)},
static const struct symbol common_symbols[] = {COMMON(SYMBOL){NULL, 0}};
static const struct symbol symbols_2[] = {
    VERSION_2(SYMBOL){"dnnl_post_ops_append_sum", offsetof(__typeof__(lib), append_sum_2)},
    {"dnnl_post_ops_append_eltwise", offsetof(__typeof__(lib), append_eltwise_2)},
    {NULL, 0}};
static const struct symbol symbols_3[] = {
    VERSION_3(SYMBOL){"dnnl_post_ops_append_sum", offsetof(__typeof__(lib), append_sum_3)},
    {"dnnl_post_ops_append_eltwise", offsetof(__typeof__(lib), append_eltwise_3)},
    {NULL, 0}};

static bool fill(void *handle, const struct symbol *symbols) {
  for (; symbols->name; symbols++) {
    void *address = dlsym(handle, symbols->name);
    if (!address) return false;
    memcpy((char *)&lib + symbols->offset, &address, sizeof address);
  }
  return true;
}

/* The head of dnnl_version_t, the same in both versions. */
struct version_head {
  int major, minor, patch;
};

static bool take(void *handle) {
  const struct version_head *(*version)(void);
  *(void **)&version = dlsym(handle, "dnnl_version");
  if (!version) return false;
  const struct version_head *v = version();
  if (v->major != 2 && v->major != 3) return false;
  if (!fill(handle, common_symbols)) return false;
  if (!fill(handle, v->major == 2 ? symbols_2 : symbols_3)) return false;
  *(void **)&lib.omp_set_num_threads = dlsym(handle, "omp_set_num_threads");
  snprintf(lib.version, sizeof lib.version, "%d.%d.%d", v->major, v->minor, v->patch);
  if (lib.engine_create(&lib.engine, 1 /* cpu */, 0) != DNN_SUCCESS) return false;
  lib.major = v->major;
  return true;
}

static void load(void) {
  static const char *const names[] = {"libdnnl.so.2", "libdnnl.so.3", "libdnnl.so"};
  setenv("OMP_WAIT_POLICY", "passive", 0);
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    void *handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!handle) continue;
    if (take(handle)) return;
    dlclose(handle);
  }
}

bool orr_dnn_load(void) {
  pthread_once(&once, load);
  return lib.major != 0;
}

bool orr_onednn_available(void) { return orr_dnn_load(); }

const char *orr_onednn_version(void) { return orr_dnn_load() ? lib.version : ""; }

const char *orr_dnn_word(int status) {
  switch (status) {
    case DNN_OUT_OF_MEMORY: return "out of memory";
    case DNN_INVALID_ARGUMENTS: return "invalid arguments";
    case DNN_UNIMPLEMENTED: return "not implemented";
    default: return "runtime error";
  }
}

int orr_dnn_dtype(orr_dtype dtype) {
  switch (dtype) {
    case ORR_F32: return DNN_F32;
    case ORR_BF16: return DNN_BF16;
    case ORR_F16: return DNN_F16;
    default: return 0;
  }
}

/* -- memory descriptors */
int orr_dnn_md_strided(orr_dnn_md *md, int ndim, const int64_t *shape, const int64_t *stride,
                       int dtype) {
  md->ptr = NULL;
  if (lib.major == 3)
    return lib.memory_desc_create_with_strides(&md->ptr, ndim, shape, dtype, stride);
  md->ptr = md->room;
  return lib.memory_desc_init_by_strides(md->ptr, ndim, shape, dtype, stride);
}

int orr_dnn_md_any(orr_dnn_md *md, int ndim, const int64_t *shape, int dtype) {
  const int tag_any = 1;
  md->ptr = NULL;
  if (lib.major == 3)
    return lib.memory_desc_create_with_tag(&md->ptr, ndim, shape, dtype, tag_any);
  md->ptr = md->room;
  return lib.memory_desc_init_by_tag(md->ptr, ndim, shape, dtype, tag_any);
}

void orr_dnn_md_free(orr_dnn_md *md) {
  if (lib.major == 3 && md->ptr) lib.memory_desc_destroy(md->ptr);
  md->ptr = NULL;
}

bool orr_dnn_md_equal(const void *a, const void *b) { return lib.memory_desc_equal(a, b) != 0; }

size_t orr_dnn_md_bytes(const void *md) { return lib.memory_desc_get_size(md); }

/* -- primitive descriptors */
enum { PROP_TRAINING = 64, ALG_CONV_DIRECT = 1, SCRATCHPAD_USER = 1 };

/* The scratchpad is ours, a thread: the library's own would be shared by who knows whom. */
static int attr_new(void **attr, const orr_dnn_op *op) {
  int s = lib.primitive_attr_create(attr);
  if (s == DNN_SUCCESS) s = lib.primitive_attr_set_scratchpad_mode(*attr, SCRATCHPAD_USER);
  if (s != DNN_SUCCESS || !op || !(op->accumulate || op->relu)) return s;
  void *post_ops = NULL;
  s = lib.post_ops_create(&post_ops);
  bool is_3 = lib.major == 3;
  if (s == DNN_SUCCESS && op->accumulate)
    s = is_3 ? lib.append_sum_3(post_ops, 1, 0, op->dtype) : lib.append_sum_2(post_ops, 1);
  if (s == DNN_SUCCESS && op->relu) /* the one constant that changed: eltwise_relu */
    s = is_3 ? lib.append_eltwise_3(post_ops, 32, 0, 0)
             : lib.append_eltwise_2(post_ops, 1, 31, 0, 0);
  if (s == DNN_SUCCESS) s = lib.primitive_attr_set_post_ops(*attr, post_ops);
  if (post_ops) lib.post_ops_destroy(post_ops);
  return s;
}

static const void *md_of(const orr_dnn_md *md) { return md ? md->ptr : NULL; }

static int pool_algorithm(orr_onednn_pool_kind kind) {
  switch (kind) {
    case ORR_ONEDNN_POOL_MAX: return 511;
    case ORR_ONEDNN_POOL_MEAN_PADDED: return 767;
    default: return 1023;
  }
}

static int pd_new_2(void **pd, const orr_dnn_op *op, const void *hint, const void *attr) {
  _Alignas(16) unsigned char desc[16384]; /* the largest in use has 5976 bytes */
  const void *src = md_of(op->src), *weights = md_of(op->weights), *dst = md_of(op->dst);
  const void *bias = md_of(op->bias);
  dims s = op->stride, k = op->kernel, d = op->dilation, lo = op->pad_low, hi = op->pad_high;
  int conv = ALG_CONV_DIRECT, pool = pool_algorithm(op->pool), status = DNN_UNIMPLEMENTED;
  memset(desc, 0, sizeof desc);
  switch (op->kind) {
    case ORR_DNN_MATMUL: status = lib.matmul_desc_init(desc, src, weights, bias, dst); break;
    case ORR_DNN_CONV_FORWARD:
      status = lib.dilated_convolution_forward_desc_init(desc, PROP_TRAINING, conv, src,
                                                         weights, bias, dst, s, d, lo, hi);
      break;
    case ORR_DNN_CONV_BACKWARD_DATA:
      status = lib.dilated_convolution_backward_data_desc_init(desc, conv, src, weights, dst, s,
                                                               d, lo, hi);
      break;
    case ORR_DNN_CONV_BACKWARD_WEIGHTS:
      status = lib.dilated_convolution_backward_weights_desc_init(desc, conv, src, weights,
                                                                  bias, dst, s, d, lo, hi);
      break;
    case ORR_DNN_POOL_FORWARD:
      status = lib.pooling_v2_forward_desc_init(desc, PROP_TRAINING, pool, src, dst, s, k, d,
                                                lo, hi);
      break;
    case ORR_DNN_POOL_BACKWARD:
      status = lib.pooling_v2_backward_desc_init(desc, pool, src, dst, s, k, d, lo, hi);
      break;
  }
  if (status != DNN_SUCCESS) return status;
  return lib.primitive_desc_create(pd, desc, attr, lib.engine, hint);
}

static int pd_new_3(void **pd, const orr_dnn_op *op, const void *hint, const void *attr) {
  const void *src = md_of(op->src), *weights = md_of(op->weights), *dst = md_of(op->dst);
  const void *bias = md_of(op->bias);
  dims s = op->stride, k = op->kernel, d = op->dilation, lo = op->pad_low, hi = op->pad_high;
  int conv = ALG_CONV_DIRECT, pool = pool_algorithm(op->pool);
  switch (op->kind) {
    case ORR_DNN_MATMUL:
      return lib.matmul_primitive_desc_create(pd, lib.engine, src, weights, bias, dst, attr);
    case ORR_DNN_CONV_FORWARD:
      return lib.convolution_forward_primitive_desc_create(
          pd, lib.engine, PROP_TRAINING, conv, src, weights, bias, dst, s, d, lo, hi, attr);
    case ORR_DNN_CONV_BACKWARD_DATA:
      return lib.convolution_backward_data_primitive_desc_create(
          pd, lib.engine, conv, src, weights, dst, s, d, lo, hi, hint, attr);
    case ORR_DNN_CONV_BACKWARD_WEIGHTS:
      return lib.convolution_backward_weights_primitive_desc_create(
          pd, lib.engine, conv, src, weights, bias, dst, s, d, lo, hi, hint, attr);
    case ORR_DNN_POOL_FORWARD:
      return lib.pooling_forward_primitive_desc_create(pd, lib.engine, PROP_TRAINING, pool, src,
                                                       dst, s, k, d, lo, hi, attr);
    case ORR_DNN_POOL_BACKWARD:
      return lib.pooling_backward_primitive_desc_create(pd, lib.engine, pool, src, dst, s, k, d,
                                                        lo, hi, hint, attr);
  }
  return DNN_UNIMPLEMENTED;
}

static int pd_new(void **pd, const orr_dnn_op *op, const void *hint, const void *attr) {
  return lib.major == 3 ? pd_new_3(pd, op, hint, attr) : pd_new_2(pd, op, hint, attr);
}

int orr_dnn_pd_new(void **pd, const orr_dnn_op *op) {
  void *attr = NULL, *hint = NULL;
  *pd = NULL;
  int s = attr_new(&attr, op);
  if (s == DNN_SUCCESS && op->kind != ORR_DNN_MATMUL && op->kind != ORR_DNN_CONV_FORWARD &&
      op->kind != ORR_DNN_POOL_FORWARD) { /* a backward kind is told of its forward */
    orr_dnn_op forward = *op;
    bool is_pool = op->kind == ORR_DNN_POOL_BACKWARD;
    forward.kind = is_pool ? ORR_DNN_POOL_FORWARD : ORR_DNN_CONV_FORWARD;
    s = pd_new(&hint, &forward, NULL, attr);
  }
  if (s == DNN_SUCCESS) s = pd_new(pd, op, hint, attr);
  if (hint) lib.primitive_desc_destroy(hint);
  if (attr) lib.primitive_attr_destroy(attr);
  return s;
}

int orr_dnn_pd_new_reorder(void **pd, const void *from, const void *to) {
  void *attr = NULL;
  *pd = NULL;
  int s = attr_new(&attr, NULL);
  if (s == DNN_SUCCESS)
    s = lib.reorder_primitive_desc_create(pd, from, lib.engine, to, lib.engine, attr);
  if (attr) lib.primitive_attr_destroy(attr);
  return s;
}

const void *orr_dnn_pd_md(void *pd, int query, int index) {
  const void *md = lib.primitive_desc_query_md(pd, query, index);
  return md && lib.memory_desc_get_size(md) ? md : NULL;
}

void orr_dnn_pd_free(void *pd) {
  if (pd) lib.primitive_desc_destroy(pd);
}

/* -- primitives, memory, streams */
int orr_dnn_primitive_new(void **primitive, void *pd) {
  *primitive = NULL;
  return lib.primitive_create(primitive, pd);
}

void orr_dnn_primitive_free(void *primitive) {
  if (primitive) lib.primitive_destroy(primitive);
}

int orr_dnn_memory_new(void **memory, const void *md) {
  *memory = NULL;
  return lib.memory_create(memory, md, lib.engine, NULL);
}

int orr_dnn_memory_set(void *memory, void *data) {
  return lib.memory_set_data_handle(memory, data);
}

void orr_dnn_memory_free(void *memory) {
  if (memory) lib.memory_destroy(memory);
}

int orr_dnn_stream_new(void **stream) {
  *stream = NULL;
  return lib.stream_create(stream, lib.engine, 1 /* default flags */);
}

int orr_dnn_stream_wait(void *stream) { return lib.stream_wait(stream); }

void orr_dnn_stream_free(void *stream) {
  if (stream) lib.stream_destroy(stream);
}

int orr_dnn_execute(void *primitive, void *stream, int n, const orr_dnn_arg *args) {
  return lib.primitive_execute(primitive, stream, n, args);
}

void orr_dnn_team(int n) {
  if (lib.omp_set_num_threads) lib.omp_set_num_threads(n);
}
