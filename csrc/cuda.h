/* cuda.h: what the files of the CUDA plug-in share: GPUs, logical devices, queues' streams, and
 * what each file does for the others.
 *
 * Invariant: the plug-in is not linked against the core: what it needs of it comes through
 * orr_cuda_host. A device's two queues are driven by one thread at a time, so their streams,
 * rooms and plans need no locks; what several threads reach (a GPU, a device's copy queue,
 * communicators) has a mutex. Locks are taken in this order: NCCL's, a copy queue's, a GPU's.
 * Every call of CUDA or its libraries is checked; an error is returned, or kept in the queue in
 * which it was met.
 * To add a file: its functions here, under its name, with the prefix orr_cuda_.
 */
#ifndef ORR_CUDA_H
#define ORR_CUDA_H

#include <cuda_runtime.h>
#include <pthread.h>

#include "../kernels/device.h"
#include "comm.h"
#include "kernel_table.h"
#include "machine.h"
#include "plugin.h"

/* The core's function, reached through the host. */
#undef orr_fail
#define orr_fail(status, ...) \
  orr_fail_known(orr_cuda_host->fail((status), __VA_ARGS__), (status))

#define ORR_MAX_GPUS ORR_MAX_CUDA_DEVICES

enum {
  ORR_CUDA_MARKS = 64,      /* of a queue, not complete */
  ORR_CUDA_FAULTS = 64,     /* slots of a queue */
  ORR_CUDA_BLOCKS = 8,      /* of pinned memory, a queue */
  ORR_CUDA_WORDS = 128,     /* of a GPU, two a queue */
  ORR_CUDA_WORD_STRIDE = 16 /* in ints: a word has its own cache line */
};

extern const orr_host *orr_cuda_host;

/* One physical GPU that some logical device stands for. */
typedef struct orr_cuda_gpu {
  int index;     /* in orr_cuda_machine.gpu */
  int ordinal;   /* CUDA's number */
  char name[16]; /* of its first logical device, "cuda:0" */
  pthread_mutex_t mutex;
  atomic_bool is_open; /* has a context, and `words` */
  atomic_bool lost;    /* for good; `why` says it all */
  atomic_bool told;    /* the loss was reported */
  char why[300];
  int *words;                      /* device memory: ORR_CUDA_WORDS words */
  int n_words;                     /* given to queues */
  atomic_uint epoch;               /* of the host's poison when the words were last cleared */
  atomic_char reach[ORR_MAX_GPUS]; /* 0: not tried, 1: its kernels reach that GPU, 2: no */
} orr_cuda_gpu;

struct orr_cuda_device;

/* The first failure met while issuing; status ORR_OK: none. */
typedef struct orr_cuda_failure {
  orr_status status;
  char words[400];
} orr_cuda_failure;

/* Pinned memory that the stream copies from or to. */
typedef struct orr_cuda_block {
  char *data;
  size_t bytes;
  cudaEvent_t event; /* recorded behind the last copy */
  bool is_busy;      /* that may not have been reached */
  bool is_held;      /* what came is not taken out yet */
} orr_cuda_block;

/* What a fault slot will say. */
typedef struct orr_cuda_fault_note {
  uint64_t mark; /* the slot is final when so many marks are complete */
  const char *op;
  bool part;
  int line;
  char source[160]; /* "": not known */
} orr_cuda_fault_note;

/* Calls of a queue, recorded. */
typedef struct orr_cuda_graph {
  struct orr_cuda_graph *next;  /* of the queue's */
  struct orr_cuda_queue *queue; /* NULL: it is closed */
  atomic_bool dead;             /* nobody will run it again */
  int failures;
  cudaGraphExec_t exec; /* NULL: not made */
  const void *room;     /* the queue's, when it was made */
  orr_cuda_fault_slot *fault;
  orr_cuda_fault_note note[ORR_CUDA_FAULTS];
  int n_faults;
  uint64_t mark; /* the last launch is complete when so many marks are; 0: none */
} orr_cuda_graph;

/* A queue's stream and what goes with it. */
typedef struct orr_cuda_queue {
  struct orr_cuda_device *device;
  bool is_comm;
  cudaStream_t stream;
  cudaStream_t issue; /* where calls go: the stream, or the recorder while a graph is made */
  int *poison;        /* the stream's word, of the GPU's: not zero: its numbers are worthless */
  int *mail;          /* another: what a poison on another GPU is */
  cudaEvent_t peer[ORR_MAX_GPUS]; /* recorded on streams of that GPU, waited for by this one */
  /* marks, by number from 0; mark m stands in slot m % ORR_CUDA_MARKS */
  cudaEvent_t mark[ORR_CUDA_MARKS];
  uint64_t mark_seq[ORR_CUDA_MARKS];
  uint64_t n_marked, n_complete, complete_seq;
  int n_odd; /* queries in a row that failed without reason */
  /* scratch and staging */
  void *room;
  size_t room_bytes;
  orr_cuda_block block[ORR_CUDA_BLOCKS];
  int n_blocks;
  /* faults, by number from 0, as marks */
  orr_cuda_fault_slot *fault; /* pinned; NULL until the first */
  orr_cuda_fault_note note[ORR_CUDA_FAULTS];
  uint64_t n_faults, n_seen;
  /* cuda_graph.c */
  cudaStream_t recorder; /* NULL until used */
  struct orr_cuda_graph *graphs;
  struct orr_cuda_graph *graph; /* being recorded; NULL: none */
  /* the collective of NCCL that the stream may be in */
  void *communicator;       /* ncclComm_t; NULL: none */
  uint64_t collective_mark; /* complete when so many marks are */
  double alive, asked;      /* when the stream last got on, when NCCL was last asked */
  /* while an item runs */
  const orr_work *work;
  int shard;
  orr_cuda_failure failure;
} orr_cuda_queue;

/* cuDNN's attention of one kind on one device. */
typedef struct orr_cuda_proof {
  enum { ORR_CUDA_UNTRIED, ORR_CUDA_PROVED, ORR_CUDA_REFUTED } state;
  char why[120]; /* it is not used */
} orr_cuda_proof;

/* One logical device. */
typedef struct orr_cuda_device {
  int k; /* cuda:k */
  char name[16];
  orr_cuda_gpu *gpu;
  pthread_mutex_t copy_mutex;
  orr_cuda_queue *copy;       /* the copy queue, of whoever holds the mutex; NULL until used */
  struct orr_cuda_blas *blas; /* NULL until used */
  struct orr_cuda_dnn *dnn;
  orr_cuda_proof attention[2][2]
                          [2]; /* bf16, f16; all keys, causal; sums in any order, in one */
} orr_cuda_device;

extern struct orr_cuda_machine {
  int n_gpus, n_devices;
  orr_cuda_gpu gpu[ORR_MAX_GPUS];
  orr_cuda_device device[ORR_MAX_CUDA_DEVICES];
  atomic_bool deterministic, tf32;
} orr_cuda_machine;

static inline orr_cuda_device *orr_cuda_device_of(const orr_device *d) {
  return &orr_cuda_machine.device[d->id];
}
static inline bool orr_cuda_is_lost(const orr_cuda_gpu *gpu) {
  return atomic_load_explicit(&gpu->lost, memory_order_acquire);
}

/* ---- views ---- */

static inline int64_t orr_cuda_size_of(orr_dtype dtype) {
  static const unsigned char size[ORR_N_DTYPES] = {8, 4, 2, 2, 8, 4, 1, 1};
  return size[dtype];
}
static inline int64_t orr_cuda_numel(const orr_view *v) {
  int64_t n = 1;
  for (int d = 0; d < v->ndim; d++) n *= v->shape[d];
  return n;
}
static inline int64_t orr_cuda_bytes(const orr_view *v) {
  return orr_cuda_numel(v) * orr_cuda_size_of(v->dtype);
}
/* v's shape, row-major, at data. */
orr_view orr_cuda_packed(const orr_view *v, void *data);
bool orr_cuda_is_packed(const orr_view *v);
/* Both without holes or repeats, their elements in one order: one flat copy does. */
bool orr_cuda_alike(const orr_view *a, const orr_view *b);

/* ---- cuda_error.c ---- */

/* ORR_OK, or the error in words; a sticky one loses the GPU. gpu may be NULL. */
void orr_cuda_ignore(cudaError_t error); /* it is not to be found by a later launch either */
orr_status orr_cuda_try(orr_cuda_gpu *gpu, cudaError_t error, const char *what);
/* "cuda:0: " before the message of the failure in hand, where nobody else says the device. */
orr_status orr_cuda_fail_on(const orr_cuda_device *d, orr_status status);
orr_status orr_cuda_lost(const orr_cuda_gpu *gpu); /* fails in the words of the loss */
/* A library's error, or the GPU's loss where that is its cause. */
orr_status orr_cuda_library(orr_cuda_gpu *gpu, const char *library, const char *words);
void orr_cuda_record(orr_status status, const char *words); /* in the current queue */
orr_status orr_cuda_recorded(orr_cuda_queue *s);            /* returns and forgets it */
void orr_cuda_tell_loss(orr_cuda_gpu *gpu); /* reports it, once; ends its collectives */

/* ---- cuda_plugin.c ---- */

/* Makes the GPU current, and its context and words at first use. */
orr_status orr_cuda_use(orr_cuda_gpu *gpu);

/* ---- cuda_stream.c ---- */

extern const orr_backend orr_cuda_backend;
orr_cuda_queue *orr_cuda_current(void); /* NULL: none is entered */
/* Makes s (NULL: none) the thread's and its GPU current; returns who was. */
orr_cuda_queue *orr_cuda_switch(orr_cuda_queue *s);
orr_status orr_cuda_queue_new(orr_cuda_device *d, bool is_comm, orr_cuda_queue **out);
void orr_cuda_queue_free(orr_cuda_queue *take_s);
/* s goes on after what was issued to `other` by now. */
orr_status orr_cuda_ready(orr_cuda_queue *s); /* to be issued to; else why not, told once */
orr_status orr_cuda_follow(orr_cuda_queue *s, orr_cuda_queue *other);
/* d's copy queue becomes current, after all that the current queue has issued; release waits
 * for it and returns what failed. */
orr_status orr_cuda_borrow(orr_cuda_device *d, orr_cuda_queue **before);
orr_status orr_cuda_release(orr_cuda_device *d, orr_cuda_queue *before);
double orr_cuda_now(void); /* seconds */

/* ---- cuda_poison.c, kernels/poison.cu ---- */

/* Lowers the words of s's GPU where the host has raised what went wrong: before they are first
 * looked at, by whomever. */
orr_status orr_cuda_clear_poison(orr_cuda_queue *s);
/* On s: it is poisoned where `other` is. */
orr_status orr_cuda_spread_from(orr_cuda_queue *s, orr_cuda_queue *other);
/* All queues of all GPUs, at once and past what they hold. */
void orr_cuda_poison_all(void);
void orr_cuda_spread(const int *from, int *to); /* kernels/poison.cu: if (*from) *to = 1 */

/* ---- cuda_memory.c ---- */

orr_status orr_cuda_memory_new(orr_device *d, size_t bytes, void **out);
void orr_cuda_memory_free(orr_device *d, void *data, size_t bytes);
/* A block of at least `bytes` (at most ORR_CUDA_BLOCK_BYTES) that the stream is through with;
 * orr_cuda_block_used behind the copy. */
#define ORR_CUDA_BLOCK_BYTES ((size_t)4 << 20)
orr_status orr_cuda_block_take(orr_cuda_queue *s, size_t bytes, orr_cuda_block **out);
orr_status orr_cuda_block_used(orr_cuda_queue *s, orr_cuda_block *b);
void orr_cuda_memory_close(orr_cuda_queue *s); /* its room and blocks */

/* ---- cuda_transfer.c ---- */

orr_status orr_cuda_transfer(orr_device *a, const orr_view *from, orr_device *b, orr_view *to);

/* ---- cuda_link.c ---- */

bool orr_cuda_reaches(const orr_device *a, const orr_device *b);
bool orr_cuda_gpu_reaches(orr_cuda_device *a, orr_cuda_device *b);
orr_status orr_cuda_link(int a, int b, bool measure, orr_link *out);

/* ---- cuda_fault.c ---- */

void orr_cuda_faults_look(orr_cuda_queue *s); /* reports those that are final */
void orr_cuda_faults_close(orr_cuda_queue *s);
orr_cuda_fault_slot *orr_cuda_fault_slots(void); /* ORR_CUDA_FAULTS of them; NULL: failed */
void orr_cuda_faults_of(orr_cuda_queue *s, orr_cuda_graph *g); /* tells and clears them */

/* ---- cuda_graph.c ---- */

bool orr_cuda_graph_run(orr_queue *q, void **graph, orr_status (*issue)(void *arg), void *arg);
void orr_cuda_graph_free(void *graph);
/* A slot of the graph that s records, and where its note goes; NULL: none is left. */
orr_cuda_fault_slot *orr_cuda_graph_fault(orr_cuda_queue *s, orr_cuda_fault_note **note);
void orr_cuda_graphs_look(orr_cuda_queue *s); /* what launches found, and graphs to be freed */
void orr_cuda_graphs_close(orr_cuda_queue *s);

/* ---- cuda_run.c ---- */

orr_status orr_cuda_run(const orr_work *work, int shard);

/* ---- cuda_kernels.c: the rows, wherever they are ---- */

extern const orr_kernels orr_kernels_cuda;
#define ORR_KERNEL(result, name, parameters) result orr_cuda_##name parameters;
#include "kernel_table.def"
/* kernels/matmul.cu, kernels/conv.cu, kernels/attention.cu: what the libraries do not take. */
orr_status orr_cuda_tiled_product(const orr_view *a, const orr_view *b, const orr_view *bias,
                                  const orr_view *c, bool accumulate);
orr_status orr_cuda_direct_conv2d(const orr_view *x, const orr_view *w, const orr_view *b,
                                  const orr_window *window, int64_t groups, const orr_view *y);
orr_status orr_cuda_direct_conv2d_back_data(const orr_view *g, const orr_view *w,
                                            const orr_window *window, int64_t groups,
                                            const orr_view *gx);
orr_status orr_cuda_direct_conv2d_back_weight(const orr_view *x, const orr_view *g,
                                              const orr_window *window, int64_t groups,
                                              const orr_view *gw, const orr_view *gb);
orr_status orr_cuda_tiled_attention(const orr_k_attention_args *a);
orr_status orr_cuda_tiled_attention_back(const orr_k_attention_args *a);

/* ---- cuda_table.c ---- */

typedef struct orr_cuda_table {
  void **slot; /* open addressing; NULL: free */
  int n, cap;
  size_t key_bytes;
  void (*entry_free)(void *entry);
} orr_cuda_table;

void *orr_cuda_table_find(const orr_cuda_table *t, const void *key); /* NULL: not there */
orr_status orr_cuda_table_add(orr_cuda_table *t, void *take_entry);  /* is not there */
void orr_cuda_table_clear(orr_cuda_table *t);

/* ---- cuda_blas.c, cuda_blas_plan.c ---- */

/* A matrix of a batch of them: row r, column c at r ld + c, or (by_column) at r + c ld. */
typedef struct orr_cuda_matrix {
  void *data;
  bool by_column;
  int64_t ld, batch_stride;
} orr_cuda_matrix;

/* c (M, N), by rows, = a (M, K) b (K, N) [+ bias (N)] [+ c], `batch` times. */
typedef struct orr_cuda_gemm {
  orr_dtype dtype; /* a float */
  int64_t m, n, k, batch;
  orr_cuda_matrix a, b, c;
  const void *bias; /* NULL: none */
  bool accumulate;
} orr_cuda_gemm;

struct orr_cuda_plan;
/* How cuBLASLt does it, from the device's cache. *out NULL: it does not. Once found, good until
 * the next call. */
orr_status orr_cuda_gemm_plan(orr_cuda_device *d, const orr_cuda_gemm *g,
                              struct orr_cuda_plan **out);
size_t orr_cuda_gemm_room(const struct orr_cuda_plan *p);
orr_status orr_cuda_gemm_run(orr_cuda_queue *s, struct orr_cuda_plan *p, const orr_cuda_gemm *g,
                             void *room);
void orr_cuda_blas_close(orr_cuda_device *d);

/* ---- cuda_dnn.c, cuda_dnn_graph.c, cuda_dnn_plan.c, cuda_dnn_sdpa.c ---- */

typedef enum orr_cuda_conv_kind {
  ORR_CUDA_CONV,       /* y of x, w */
  ORR_CUDA_CONV_DATA,  /* x of y, w */
  ORR_CUDA_CONV_WEIGHT /* w of x, y */
} orr_cuda_conv_kind;

/* A convolution of dense four-dimensional tensors, and which of the three is made. No padding
 * between the members: plans are found by these bytes. */
typedef struct orr_cuda_conv {
  int64_t x[4], w[4], y[4]; /* shapes */
  int64_t stride[2], padding[2], dilation[2];
  int32_t kind;          /* orr_cuda_conv_kind */
  int32_t dtype;         /* f32, f16 or bf16 */
  int32_t channels_last; /* all three; else row-major */
  int32_t deterministic, tf32, unused;
} orr_cuda_conv;

/* Attention, forward or backward, of tensors (N, H, rows, columns) whose columns lie side by
 * side. A key of plans, as orr_cuda_conv. */
typedef struct orr_cuda_sdpa {
  int64_t n, h, queries, keys, d, e;
  int64_t q[3], k[3], v[3], o[3];    /* strides of N, H, rows */
  int64_t g[3], gq[3], gk[3], gv[3]; /* backward's; else 0 */
  int32_t dtype;                     /* f16 or bf16 */
  int32_t backward, causal, deterministic;
} orr_cuda_sdpa;

struct orr_cuda_sdpa_plan;
/* As orr_cuda_conv_find. */
orr_status orr_cuda_sdpa_find(orr_cuda_device *d, const orr_cuda_sdpa *a,
                              struct orr_cuda_sdpa_plan **out);
size_t orr_cuda_sdpa_room(const struct orr_cuda_sdpa_plan *p);
orr_status orr_cuda_sdpa_run(orr_cuda_queue *s, struct orr_cuda_sdpa_plan *p,
                             const orr_k_attention_args *a, void *room);

struct orr_cuda_conv_plan;
/* How cuDNN does it, from the device's cache. *out NULL: it does not. */
orr_status orr_cuda_conv_find(orr_cuda_device *d, const orr_cuda_conv *c,
                              struct orr_cuda_conv_plan **out);
size_t orr_cuda_conv_room(const struct orr_cuda_conv_plan *p);
orr_status orr_cuda_conv_run(orr_cuda_queue *s, struct orr_cuda_conv_plan *p, const void *x,
                             const void *w, const void *y, void *room);
void orr_cuda_dnn_close(orr_cuda_device *d);

/* ---- cuda_attention.c ---- */

/* How d's attention in the halves runs, by what is known by now, as a line of text. */
void orr_cuda_attention_words(int k, char *text, size_t room);

/* ---- cuda_nccl.c ---- */

void orr_cuda_nccl_open(void);
void orr_cuda_nccl_close(void);
bool orr_cuda_collective_new(orr_collective *c);
orr_status orr_cuda_collective_run(orr_collective *c, int part);
void orr_cuda_nccl_lost(const orr_cuda_gpu *gpu); /* frees the others of its collectives */
/* Where the stream is stuck in a collective all are aborted, and it is reported. */
void orr_cuda_nccl_watch(orr_cuda_queue *s);

#endif
