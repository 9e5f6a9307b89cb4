/* orrery_int.h: every internal struct and the functions between files, in the order of the
 * layers.
 *
 * Invariant: one controller thread (the one that runs Lua) owns everything here except what is
 * marked "worker": counts, layouts, tensors and the tape need no locks. Workers see orr_work
 * records, buffers' memory and their poison, nothing else.
 * To add to it: put a struct beside its layer; a function under the file that defines it.
 */
#ifndef ORRERY_INT_H
#define ORRERY_INT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels/kernel.h"
#include "err.h"

#define ORR_MAX_AXES 2
#define ORR_MAX_DEVICES 256

#define ORR_TRY(call)                          \
  do {                                         \
    orr_status orr_try_status = (call);        \
    if (orr_try_status) return orr_try_status; \
  } while (0)

/* ==== L0: dtype.c, shape.c ================================================================ */

size_t orr_dtype_size(orr_dtype dtype);
const char *orr_dtype_name(orr_dtype dtype);
orr_status orr_dtype_parse(const char *name,
                           orr_dtype *out); /* "f32"; lists the names on error */
bool orr_dtype_is_float(orr_dtype dtype);
orr_dtype orr_dtype_promote(orr_dtype a, orr_dtype b);

/* The global form of a tensor: what it is, without where it is. */
typedef struct orr_meta {
  orr_dtype dtype;
  int ndim;
  int64_t shape[ORR_MAX_DIM];
} orr_meta;

int64_t orr_numel(int ndim, const int64_t *shape);
/* Row-major strides of `shape`. */
void orr_strides(int ndim, const int64_t *shape, int64_t *stride);
bool orr_is_contiguous(int ndim, const int64_t *shape, const int64_t *stride);
/* "(2, 3)" into buf; returns buf. */
char *orr_shape_text(int ndim, const int64_t *shape, char *buf, size_t size);
orr_status orr_broadcast(const char *op, const orr_meta *a, const orr_meta *b, orr_meta *out);
/* Strides that give the same elements under `new_shape` without a copy; false where none
 * exist. */
bool orr_view_strides(int ndim, const int64_t *shape, const int64_t *stride, int new_ndim,
                      const int64_t *new_shape, int64_t *new_stride);

/* ==== L0: layout.c ======================================================================== */

typedef enum orr_place_kind { ORR_REPLICATE, ORR_SHARD, ORR_PARTIAL } orr_place_kind;
typedef enum orr_partial_kind { ORR_SUM, ORR_MAX, ORR_MIN } orr_partial_kind;

/* Devices are named by their index in the device table (device.c); 0 is `cpu`. Meshes are
 * interned: two with the same axes and devices are one pointer, and live for ever. */
struct orr_mesh {
  int n_axes; /* 0 for a single device */
  int size[ORR_MAX_AXES];
  const char *name[ORR_MAX_AXES]; /* "data", "tensor" or the user's */
  unsigned sequence; /* bit a: between layers that axis a splits, it splits the sequence */
  int n;             /* devices, row-major over the axes */
  int device[];
};

/* bounds: ORR_SHARD only. Part i of the dim is [bounds[i], bounds[i+1]). Where axis 0 shards
 * the same dim, axis 1 has one such row a coordinate of axis 0: row c starts at c*(size[1]+1).
 * Bounds are positions in the global dim, in nested rows too. */
typedef struct orr_place {
  orr_place_kind kind;
  int dim;             /* ORR_SHARD: from 0 */
  orr_partial_kind op; /* ORR_PARTIAL */
  int64_t *bounds;
  int64_t unit; /* ORR_SHARD without bounds: they are multiples of it; 0 counts as 1 */
} orr_place;

typedef struct orr_layout {
  int rc;
  const orr_mesh *mesh;
  orr_place axis[ORR_MAX_AXES];
} orr_layout;

orr_status orr_mesh_get(int n_axes, const int *size, const char *const *name, unsigned sequence,
                        const int *device, const orr_mesh **out);
const orr_mesh *orr_mesh_single(int device);
int orr_mesh_coordinate(const orr_mesh *mesh, int rank, int axis);
/* The first rank of `rank`'s group along `axis`, and the step to the next member. */
void orr_mesh_group(const orr_mesh *mesh, int rank, int axis, int *first, int *step);

/* `place` is copied, bounds included; bounds NULL asks for the balanced split of shape[dim]. */
orr_status orr_layout_new(const orr_mesh *mesh, const orr_place *place, int ndim,
                          const int64_t *shape, orr_layout **out);
orr_layout *orr_layout_single(int device);           /* borrowed; one a device */
orr_layout *orr_layout_replicate(const orr_mesh *m); /* borrowed; one a mesh */
orr_layout *orr_layout_ref(orr_layout *layout);
void orr_layout_free(orr_layout *layout);
bool orr_layout_equal(const orr_layout *a, const orr_layout *b);
bool orr_place_equal(const orr_mesh *mesh, int axis, const orr_layout *a, const orr_layout *b);
bool orr_layout_is_partial(const orr_layout *layout);
bool orr_layout_is_replicate(const orr_layout *layout); /* on every axis (single: true) */
/* Balanced parts: sizes differ by at most one, larger first. bounds has parts+1 entries. */
void orr_balanced_bounds(int64_t size, int parts, int64_t *bounds);
/* Rank's part of dim `dim` of size `size`: [*lo, *hi). */
void orr_layout_range(const orr_layout *layout, int rank, int dim, int64_t size, int64_t *lo,
                      int64_t *hi);
/* Local shape and the global origin of rank's shard. */
void orr_layout_local(const orr_layout *layout, int rank, int ndim, const int64_t *shape,
                      int64_t *local, int64_t *origin);
/* "data<0,1>: shard(1)", "data<0,1>: replicate", two axes: "data<tensor<0,1>, tensor<2,3>>:
 * partial(sum), replicate"; single: "cpu". */
char *orr_layout_text(const orr_layout *layout, char *buf, size_t size);
/* How texts call a device: its name, or in a plan the bare number. Set by device.c. */
extern const char *(*orr_device_label_hook)(int device, bool in_plan);
/* Reads one word per axis: "replicate", "shard(2)", "shard(2/16)" (bounds in multiples of 16),
 * "partial(sum)". */
orr_status orr_place_parse(const char *text, int ndim, orr_place *out);

#include "device.h"

/* ==== L2: tensor.c ======================================================================== */

struct orr_node;

/* The memory of a tensor over its devices; shared by views. */
typedef struct orr_storage {
  int rc;
  uint32_t version; /* moves with every in-place write */
  int n, cap;
  struct orr_tensor
      *origin; /* the parameter that it was gathered from (op_zero.c); NULL: none */
  orr_buffer *buffer[];
} orr_storage;

typedef struct orr_shard {
  int64_t offset; /* elements from the buffer's start */
  int64_t shape[ORR_MAX_DIM];
  int64_t stride[ORR_MAX_DIM];
} orr_shard;

struct orr_tensor {
  int rc;
  orr_meta meta; /* global */
  orr_layout *layout;
  orr_storage *storage;
  int buffer0;      /* shard i lives in storage->buffer[buffer0 + i] */
  int n;            /* shards: layout->mesh->n */
  orr_shard *shard; /* &one when n == 1 */
  orr_shard one;
  bool requires_grad, is_view, is_batch;
  struct orr_node *node; /* who made it; NULL for leaves */
  int out_index;
  struct orr_tensor *grad;
  uint64_t serial;             /* order of creation, of leaves that require grad */
  struct orr_reducer *reducer; /* reducer.c: who reduces its gradient; NULL: nobody */
  /* Of a parameter whose state is sharded (zero=); NULL: as it rests, under `layout`. */
  orr_layout *use_layout;   /* where ops see it, gathered for the call */
  orr_layout *state_layout; /* where its gradient and its optimizer state stand */
  int hooks;                /* the binding's reference to gradient hooks; 0: none */
};

/* While a step is captured (op_capture.c), NULL else: t is written in place; the step does
 * `what`, in which the host takes part. */
extern void (*orr_wrote_hook)(orr_tensor *t);
extern void (*orr_host_hook)(const char *what);
/* How a tensor gives back its node and its hooks: set by tape.c and the binding. */
extern void (*orr_node_release)(struct orr_node *node);
extern void (*orr_node_hold)(struct orr_node *node);
extern void (*orr_hook_release)(int hooks);

/* A new tensor with memory: row-major shards (like == NULL) or the stride order of `like`. */
orr_status orr_tensor_new(const orr_meta *meta, orr_layout *layout, const orr_tensor *like,
                          orr_tensor **out);
/* A new header on t's storage, same shape; no autograd. Callers then edit meta/shards. */
orr_status orr_tensor_alias(const orr_tensor *t, orr_tensor **out);
/* The same with another layout over the same buffers. */
orr_status orr_tensor_alias_as(const orr_tensor *t, const orr_meta *meta, orr_layout *layout,
                               orr_tensor **out);
/* Shard `rank` as a single-device tensor that shares its memory. */
orr_status orr_tensor_shard(const orr_tensor *t, int rank, orr_tensor **out);
/* One tensor made of single-device parts, part[r] on the layout's device r. The parts
 * must share their memory with nobody; it moves, and they are left without. */
orr_status orr_tensor_join(const orr_meta *meta, orr_layout *layout, orr_tensor *const *part,
                           orr_tensor **out);
/* t becomes what `from` is (storage, layout, shards), keeping its identity, grad and graph. */
void orr_tensor_adopt(orr_tensor *t, orr_tensor *take_from);
/* t's header over no memory, for a tensor that was gathered from a parameter; and the same
 * header over `whole`, the parameter gathered again. Both belong to t's place in the graph. */
orr_status orr_tensor_ghost(const orr_tensor *t, orr_tensor **out);
orr_status orr_tensor_revive(const orr_tensor *ghost, const orr_tensor *whole,
                             orr_tensor **out);
static inline bool orr_tensor_is_ghost(const orr_tensor *t) {
  return t->storage->origin && t->storage->n == 0;
}
static inline orr_layout *orr_state_layout(const orr_tensor *p) {
  return p->state_layout ? p->state_layout : p->layout;
}
/* Sets requires_grad; gives the tensor its creation serial the first time. */
void orr_tensor_require_grad(orr_tensor *t, bool on);
orr_tensor *orr_tensor_ref(orr_tensor *t);
void orr_tensor_free(orr_tensor *take_t);
/* t was written in place. */
static inline void orr_tensor_wrote(orr_tensor *t) {
  t->storage->version++;
  if (orr_wrote_hook) orr_wrote_hook(t);
}
static inline orr_buffer *orr_tensor_buffer(const orr_tensor *t, int shard) {
  return t->storage->buffer[t->buffer0 + shard];
}
orr_device *orr_tensor_device(const orr_tensor *t, int shard);
void orr_tensor_view(const orr_tensor *t, int shard, orr_view *out);
bool orr_tensor_is_contiguous(const orr_tensor *t); /* every shard */
static inline bool orr_tensor_is_single(const orr_tensor *t) {
  return t->layout->mesh->n_axes == 0;
}
int64_t orr_tensor_numel(const orr_tensor *t);
/* "(2, 3) f32 on data<0,1>: shard(1)". */
char *orr_tensor_text(const orr_tensor *t, char *buf, size_t size);
/* Host tensor (device `cpu`) from memory; copies. */
orr_status orr_tensor_from_host(const orr_meta *meta, const void *data, orr_tensor **out);
/* The global value on `cpu`, contiguous; waits for nothing but what it needs. */
orr_status orr_tensor_full(orr_tensor *t, orr_tensor **out);

/* ==== L2: redistribute.c, comm.c, comm_run.c, comm_bucket.c; L4: reducer.c ================ */

/* The same global value under another layout. Any pair on one mesh; a single device (or host)
 * tensor to any layout is a scatter, any layout to a single device is a gather. Shares memory
 * where nothing moves (replicate -> shard). Never recorded on the tape: the redistribute op
 * is. */
orr_status orr_redistribute(orr_tensor *t, orr_layout *layout, orr_tensor **out);
/* Bytes that would move over links, per the usual costs of ring collectives, along one axis. */
double orr_redistribute_cost(const orr_tensor *t, int axis, const orr_place *to);

typedef enum orr_collective_kind {
  ORR_ALL_REDUCE,
  ORR_ALL_GATHER,
  ORR_REDUCE_SCATTER,
  ORR_ALL_TO_ALL,
  ORR_BROADCAST,
  ORR_SEND_RECV
} orr_collective_kind;

/* In place over tensors that are Partial (or replicate, summed over `axis`): all of them by one
 * queued collective. use_comm: on the communication queues, else on the compute queues. After
 * it the caller gives the tensors their new layout. */
orr_status orr_comm_all_reduce(orr_tensor *const *ts, int n, int axis, orr_partial_kind op,
                               bool use_comm);
/* parallel.trace. bytes: of the whole value, a device's share of it in an all-reduce. moved:
 * what each device sends in the usual ring: of bytes, 2(n-1)/n in an all-reduce, (n-1)/n in an
 * all-gather or a reduce-scatter. */
typedef struct orr_trace_row {
  orr_collective_kind kind;
  const char *axis;
  int64_t bytes, count;
  double moved;
} orr_trace_row;
void orr_trace_start(void);
bool orr_tracing(void);
int orr_trace_stop(const orr_trace_row **rows); /* borrowed until the next start */
/* n: the devices of the group. */
void orr_trace_add(orr_collective_kind kind, const char *axis, int n, int64_t bytes);
const char *orr_collective_name(orr_collective_kind kind);

/* comm_bucket.c, reducer.c: gradients of the parameters of one placed module, reduced over the
 * axes on which they come out Partial, in buckets, while backward goes on. */
typedef struct orr_reducer orr_reducer;
orr_status orr_reducer_new(int64_t bucket_bytes, orr_reducer **out);
orr_reducer *orr_reducer_ref(orr_reducer *r);
void orr_reducer_free(orr_reducer *take_r);
/* A gradient for leaf p came out of backward (borrowed). Takes care of p->grad by the time of
 * orr_reducers_flush, which tape.c calls at the end of every backward. */
orr_status orr_reducer_add(orr_reducer *r, orr_tensor *p, orr_tensor *grad);
orr_status orr_reducers_flush(void);
/* Instead of it, where backward has failed: what it brought is forgotten. */
void orr_reducers_drop(void);
/* orrery.accumulate: between hold(true) and hold(false) partial gradients are added unreduced;
 * hold(false) reduces them once. */
orr_status orr_reducers_hold(bool hold);

/* ==== L3: op.c ============================================================================ */

#define ORR_MAX_OUT 4
#define ORR_MAX_INT 20
#define ORR_MAX_FLOAT 8

typedef struct orr_args {
  int64_t i[ORR_MAX_INT];
  double f[ORR_MAX_FLOAT];
} orr_args;

struct orr_op;

enum { ORR_WHOLE = 0 }; /* label of a dim that must not be sharded */

/* One call, on the controller's stack while it is dispatched. */
typedef struct orr_call {
  const struct orr_op *op;
  int n_in, n_out;
  orr_tensor **in; /* after placing: what run will see; NULL: optional, absent */
  orr_tensor *out[ORR_MAX_OUT];
  orr_args args;
  bool has_args;                  /* else args is not read */
  bool in_place;                  /* out[0] is in[0] */
  int n_written;                  /* leading inputs that run writes; infer may raise it */
  orr_meta out_meta[ORR_MAX_OUT]; /* by infer */
  orr_tensor *temp[4];            /* casts made by infer (orr_call_cast), released at the end */
  int n_temp;
  /* Set by `label`, for placed tensors only; zeroed before. */
  /* Dims that go together carry one label (1..31): sharding one shards all. */
  uint8_t (*in_label)[ORR_MAX_DIM];
  uint8_t out_label[ORR_MAX_OUT][ORR_MAX_DIM];
} orr_call;

/* A candidate on one mesh axis: what the op can do without looking at other devices. */
typedef struct orr_row {
  orr_place *in; /* n_in of them; bounds of a shard point into an existing layout or NULL */
  orr_place out[ORR_MAX_OUT];
} orr_row;

/* The immutable record that queues, capture and replay share. Views: [shard][n_in + n_out]. */
/* Which part of a step something belongs to; 0: not said. */
typedef struct orr_mark {
  int stage, micro; /* from 1 */
  bool backward;
} orr_mark;

typedef struct orr_work {
  const struct orr_op *op;
  const struct orr_kernels *k; /* of the devices' kind */
  orr_args args;
  int n_in, n_out, n_shards;
  atomic_int left; /* worker: shards not finished, and who else holds it */
  const orr_mesh *mesh;
  const char *source; /* Lua source and line that queued it; NULL: unknown */
  int line;
  orr_view *view;
  orr_buffer **buffer;            /* beside view; NULL where absent */
  int64_t (*origin)[ORR_MAX_DIM]; /* [shard]: where out[0]'s (or in[0]'s) shard begins */
  orr_meta global;                /* of out[0] */
  bool has_args;                  /* else args is not read */
  bool in_place;
  int n_written;
  orr_mark mark; /* for the timeline */
} orr_work;

static inline orr_view *orr_work_in(const orr_work *w, int shard, int k) {
  return &w->view[shard * (w->n_in + w->n_out) + k];
}
static inline orr_view *orr_work_out(const orr_work *w, int shard, int k) {
  return &w->view[shard * (w->n_in + w->n_out) + w->n_in + k];
}
static inline bool orr_work_has(const orr_work *w, int shard, int k) {
  return w->buffer[shard * (w->n_in + w->n_out) + k] != NULL;
}

typedef struct orr_grad orr_grad;

enum orr_op_flags {
  ORR_OP_IN_PLACE = 1,        /* has an in-place form: out[0] may be in[0] */
  ORR_OP_ALWAYS_IN_PLACE = 2, /* has only that form (the optimizers, copy_) */
  ORR_OP_VIEW = 4,            /* out shares in[0]'s memory: `view` instead of run */
  ORR_OP_LINEAR = 8,          /* Partial(sum) in (all inputs) gives Partial(sum) out */
  ORR_OP_NO_GRAD = 16,      /* its result never requires grad (comparisons, argmax, integers) */
  ORR_OP_LIST = 32,         /* any number of inputs */
  ORR_OP_ORIGIN = 64,       /* run reads work->origin */
  ORR_OP_FUSED_GRAD = 128,  /* .grad raises when create_graph is asked */
  ORR_OP_LIKE_IN = 256,     /* outputs take the stride order of in[0] (channels-last is kept) */
  ORR_OP_MULTILINEAR = 512, /* Partial in one input, replicate in the others: Partial out */
  ORR_OP_ORIGIN_IN = 1024,  /* with ORR_OP_ORIGIN: of in[0]'s shard instead of out[0]'s */
  ORR_OP_CHANNELS_LAST = 2048, /* a 4-d output is channels-last where oneDNN may run it */
  ORR_OP_LAYER =
      4096, /* the end of a layer: an output that comes out Partial is reduced at once */
  ORR_OP_SUM_GRAD = 8192, /* .grad can add to a gradient that is there (orr_grad.sum) */
  ORR_OP_NARROW = 16384,  /* under autocast its inputs are cast to the narrow type: products */
  ORR_OP_WIDE = 32768,    /* under autocast its inputs are cast to f32: sums, norms, losses */
  ORR_OP_KEYED = 65536    /* args.i[0..3] are the key of its random numbers */
};

/* Bits of .save: what the gradient will ask for. */
#define ORR_SAVE_IN(k) (1u << (k))
#define ORR_SAVE_OUT(k) (1u << (16 + (k)))

typedef struct orr_op {
  const char *name;
  /* Lua arguments, a word each: t tensor, t? optional tensor, T list of tensors (last), ts
   * tensor or number (a number goes to f[0] and selects .scalar), i integer, f number, b
   * boolean, d dimension (from 1, negative from the end; stored from 0), e the same with one
   * more (unsqueeze), L list of integers, D list of dims, r reduction of a loss ("none", "mean"
   * or "sum", as the integer 0, 1 or 2); each may end
   * in =default ("d=1", "f=1e-5", "b=false", "d=nil" gives i = ORR_NIL). Integers, booleans and
   * dims go to args.i in order, numbers to args.f in order. L and D fill i with a count, then
   * items. */
  const char *args;
  /* Einsum-like: a lower-case letter may be sharded, a capital stays whole, a letter missing
   * from an output is reduced with `partial`: "mk,kn->mn". NULL: `label` says, or all stays
   * whole. */
  const char *dims;
  unsigned flags;
  int n_in, n_out;
  int code;                 /* which of a family (a row of a .def table) */
  orr_partial_kind partial; /* op of the Partial that a summed letter leaves */
  unsigned save;
  const struct orr_op *scalar;      /* the same with args.f[0] for the second tensor */
  orr_status (*infer)(orr_call *c); /* checks; sets out_meta; NULL: from dims */
  void (*label)(orr_call *c);
  /* Own placement rows on one axis, instead of or (returning with *only = false) beside those
   * of the labels. rows has room for max; returns how many. */
  int (*rule)(const orr_call *c, int axis, orr_row *rows, int max, bool *only);
  orr_status (*view)(const orr_call *c, int shard, orr_shard *out); /* ORR_OP_VIEW */
  orr_status (*run)(const orr_work *w, int shard);
  orr_status (*grad)(orr_grad *g);
  /* Made of other ops instead of the path below; only name, args and this are set. */
  orr_status (*compose)(const struct orr_op *op, orr_tensor *const *in, int n_in,
                        const orr_args *args, orr_tensor **out);
} orr_op;

#define ORR_NIL INT64_MIN

/* op_place.c: picks, axis by axis, the row that moves the fewest bytes; gives every input its
 * layout (want[k], owned, NULL where it stays) and every output its own (owned). */
orr_status orr_place_call(orr_call *c, const orr_mesh *mesh, orr_layout **want,
                          orr_layout **out_layout);
/* op_run.c: runs a placed call: inline at once, else as one record pushed to every device. */
orr_status orr_run_call(orr_call *c);
/* A record that was run, again, on the same memory: inline as it is, else as a copy. */
orr_status orr_work_again(const orr_work *w);
orr_status orr_work_copy(const orr_work *w, orr_work **out); /* owned */
/* Worker: what the item of a shard does; what failed is reported. */
orr_status orr_work_issue(const orr_work *w, int shard);
void orr_work_free(orr_work *take_w);

/* Meshes of the stages of one pipeline, in order: an op whose tensors stand on several of them
 * runs on the latest, and the others travel there. Kept for ever, as meshes are. */
orr_status orr_stages_add(const orr_mesh *const *stage, int n);
/* The later of two stages of one pipeline; NULL where no pipeline holds both. */
const orr_mesh *orr_stages_later(const orr_mesh *a, const orr_mesh *b);
/* The stage being run: two of its pipeline's meshes meet on it. NULL: none. */
void orr_stages_set(const orr_mesh *mesh);
/* The layout of t on another stage: split by the same axes and dims where that mesh has them,
 * else replicated. Owned. */
orr_status orr_stages_layout(const orr_tensor *t, const orr_mesh *mesh, orr_layout **out);

/* op_zero.c: parameters whose state is sharded. A parameter as ops see it: gathered, recorded;
 * the copy lives as long as the call, or, where gradients are recorded, until the next one is
 * gathered, so that the communication queue works ahead of the compute queue. Owned. */
orr_status orr_zero_gather(orr_tensor *p, orr_tensor **out);
/* A saved tensor that was gathered (orr_tensor_ghost), gathered again. Owned. */
orr_status orr_zero_revive(const orr_tensor *ghost, orr_tensor **out);
void orr_zero_release(void); /* lets go of the last gathered copy */
/* What an optimizer updates of each parameter: its shard under the state layout (the parameter
 * itself where it has none), sharing memory where that is dense. Owned. */
orr_status orr_zero_slices(orr_tensor *const *param, int n, orr_tensor **slice);
/* The updated slices back into all replicas, one collective a mesh. */
orr_status orr_zero_put_back(orr_tensor *const *param, orr_tensor *const *slice, int n);

/* op_sequence.c: meshes whose tensor axis splits the sequence between split layers. */
/* Whether axis a of the layout splits the sequence of tensors of that rank. */
static inline bool orr_splits_sequence(const orr_mesh *mesh, int a, int ndim) {
  return ndim == 3 && mesh->sequence >> a & 1;
}
/* Input 0 of a layer whose weight is split: gathered along the sequence, once for all layers
 * that read it. */
orr_status orr_sequence_gather(orr_call *c);
/* The output of a layer becomes its reduced self: scattered along the sequence on the axes that
 * split it, whole on others. Differentiable. */
orr_status orr_sequence_end(orr_tensor **t);
/* The layout in which a gradient goes back through a redistribution of a tensor that stood
 * under `layout`: scattered where that was split, gathered where it was Partial. Owned; NULL:
 * as it is. */
orr_status orr_sequence_back(const orr_tensor *gy, const orr_layout *layout, orr_layout **out);
void orr_sequence_release(void); /* lets go of the last gathered tensor */
/* The same where `dropped` is that tensor: a node no longer keeps it for its gradient. */
void orr_sequence_forget(const orr_tensor *dropped);

/* infer: replaces input k by its cast to dtype, differentiably. */
orr_status orr_call_cast(orr_call *c, int k, orr_dtype dtype);
/* label: aligns dims from the right, as broadcasting does; for any rank. */
void orr_label_broadcast(orr_call *c);

/* THE path of every op: check, infer, place, redistribute, allocate, run, record. out:
 * owned. */
orr_status orr_dispatch(const orr_op *op, orr_tensor *const *in, int n_in, const orr_args *args,
                        bool in_place, orr_tensor **out);
/* Autocast: the narrow dtype, -1: off. Returns what it was. Backward runs without. */
int orr_set_autocast(int dtype);
int orr_autocast(void);
/* Out tensors with shapes given by the caller, on a layout (zeros, rand, arange...): no
 * inputs. */
orr_status orr_create(const orr_op *op, const orr_meta *meta, orr_layout *layout,
                      const orr_args *args, orr_tensor **out);
const orr_op *orr_op_find(const char *name);
int orr_op_count(void);
const orr_op *orr_op_at(int k);

/* Where in the script: set by the binding; NULL source where unknown. */
extern void (*orr_where_hook)(const char **source, int *line);
/* The module being called, "net.fc1", for messages and the profile; "" outside. */
extern const char *(*orr_scope_hook)(void);

typedef struct orr_profile_row {
  const char *name;
  int64_t calls, bytes;
  double seconds;
} orr_profile_row;
void orr_profile_start(void);
int orr_profile_stop(const orr_profile_row **rows); /* borrowed until the next start */
void orr_anomaly(bool on);
bool orr_anomaly_watching(void);

#include "grad.h"

#endif
