/* cpu_onednn_int.h: what the files of cpu_onednn share, and no other file includes.
 *
 *   cpu_onednn_load.c   opens the library; hides what differs between versions 2 and 3
 *   cpu_onednn_cache.c  a thread's primitives, their memory objects and scratch; running them
 *   cpu_onednn.c        matmul
 *   cpu_onednn_conv.c   convolution and pooling
 *
 * Invariant: the library's own headers are not needed. Its objects are opaque pointers here;
 * the structs that version 2 has its caller hold (descriptors) live in buffers large enough
 * for them.
 */
#ifndef ORR_CPU_ONEDNN_INT_H
#define ORR_CPU_ONEDNN_INT_H

#include "cpu_onednn.h"

/* Values that versions 2 and 3 share. */
enum {
  DNN_SUCCESS = 0,
  DNN_OUT_OF_MEMORY = 1,
  DNN_INVALID_ARGUMENTS = 2,
  DNN_UNIMPLEMENTED = 3,

  DNN_F16 = 1,
  DNN_BF16 = 2,
  DNN_F32 = 3,

  DNN_QUERY_SRC = 129,
  DNN_QUERY_DIFF_SRC = 130,
  DNN_QUERY_WEIGHTS = 131,
  DNN_QUERY_DIFF_WEIGHTS = 132,
  DNN_QUERY_DST = 133,
  DNN_QUERY_DIFF_DST = 134,
  DNN_QUERY_WORKSPACE = 135,
  DNN_QUERY_SCRATCHPAD = 136,

  DNN_ARG_SRC = 1,
  DNN_ARG_DST = 17,
  DNN_ARG_WEIGHTS = 33,
  DNN_ARG_BIAS = 41,
  DNN_ARG_WORKSPACE = 64,
  DNN_ARG_SCRATCHPAD = 80,
  DNN_ARG_DIFF_SRC = 129,
  DNN_ARG_DIFF_DST = 145,
  DNN_ARG_DIFF_WEIGHTS = 161,
  DNN_ARG_DIFF_BIAS = 169
};

/* A memory descriptor: version 2 keeps it in `room` (696 bytes), version 3 gives a pointer.
 * Not to be copied: `ptr` may point into it. */
typedef struct orr_dnn_md {
  void *ptr;
  _Alignas(16) unsigned char room[1024];
} orr_dnn_md;

typedef struct orr_dnn_arg { /* dnnl_exec_arg_t */
  int arg;
  void *memory;
} orr_dnn_arg;

typedef enum orr_dnn_kind {
  ORR_DNN_MATMUL,
  ORR_DNN_CONV_FORWARD,
  ORR_DNN_CONV_BACKWARD_DATA,
  ORR_DNN_CONV_BACKWARD_WEIGHTS,
  ORR_DNN_POOL_FORWARD,
  ORR_DNN_POOL_BACKWARD
} orr_dnn_kind;

/* What a primitive is made from. src, dst, weights and bias stand for their gradients in
 * backward kinds. dilation is the library's: 0 is dense. */
typedef struct orr_dnn_op {
  orr_dnn_kind kind;
  const orr_dnn_md *src, *weights, *bias, *dst; /* bias may be NULL */
  int64_t kernel[2], stride[2], dilation[2], pad_low[2], pad_high[2];
  orr_onednn_pool_kind pool;
  int dtype; /* of dst */
  bool accumulate, relu;
} orr_dnn_op;

/* -- cpu_onednn_load.c: the library. Functions return its status, DNN_SUCCESS or another. */
bool orr_dnn_load(void);
const char *orr_dnn_word(int status);
int orr_dnn_dtype(orr_dtype dtype); /* 0: the library has no such type */
int orr_dnn_md_strided(orr_dnn_md *md, int ndim, const int64_t *shape, const int64_t *stride,
                       int dtype);
int orr_dnn_md_any(orr_dnn_md *md, int ndim, const int64_t *shape, int dtype);
void orr_dnn_md_free(orr_dnn_md *md); /* a zeroed one is fine */
bool orr_dnn_md_equal(const void *a, const void *b);
size_t orr_dnn_md_bytes(const void *md);
int orr_dnn_pd_new(void **pd, const orr_dnn_op *op);
int orr_dnn_pd_new_reorder(void **pd, const void *from, const void *to);
const void *orr_dnn_pd_md(void *pd, int query, int index); /* borrowed; NULL: none */
void orr_dnn_pd_free(void *pd);
int orr_dnn_primitive_new(void **primitive, void *pd);
void orr_dnn_primitive_free(void *primitive);
int orr_dnn_memory_new(void **memory, const void *md);
int orr_dnn_memory_set(void *memory, void *data);
void orr_dnn_memory_free(void *memory);
int orr_dnn_stream_new(void **stream);
int orr_dnn_stream_wait(void *stream);
void orr_dnn_stream_free(void *stream);
int orr_dnn_execute(void *primitive, void *stream, int n, const orr_dnn_arg *args);
void orr_dnn_team(int n);

/* -- cpu_onednn_cache.c */
#define ORR_DNN_KEY_WORDS 40
#define ORR_DNN_MAX_PORTS 4

typedef struct orr_dnn_key {
  int n;
  int64_t word[ORR_DNN_KEY_WORDS];
} orr_dnn_key;

/* One pointer the caller brings to each run: which argument it is, and its form in the caller's
 * memory. Where the primitive wants another form, a reorder through scratch is put between. */
typedef struct orr_dnn_port {
  int arg, query, index;
  const void *md; /* NULL: the form is the library's own (workspace) */
  bool output;
} orr_dnn_port;

typedef struct orr_dnn_entry orr_dnn_entry;

void orr_dnn_key_add(orr_dnn_key *key, int64_t word);
void orr_dnn_key_add_array(orr_dnn_key *key, int n, const int64_t *words);

/* The entry of the calling thread, or NULL when it is not there yet. */
orr_dnn_entry *orr_dnn_find(const orr_dnn_key *key);

/* Makes and stores the entry; NULL with *status set on failure. What the library refuses is
 * remembered as an entry too, see orr_dnn_refused. `op` NULL stores a refusal. */
orr_dnn_entry *orr_dnn_make(const orr_dnn_key *key, const orr_dnn_op *op, int n_ports,
                            const orr_dnn_port *ports, orr_status *status);
bool orr_dnn_refused(const orr_dnn_entry *entry);
size_t orr_dnn_port_bytes(const orr_dnn_entry *entry, int port);
orr_status orr_dnn_run(orr_dnn_entry *entry, void *const *data);

/* -- cpu_onednn.c: small things about views. */
int64_t orr_dnn_count(const orr_view *v);
void orr_dnn_zero(const orr_view *v);

#endif
