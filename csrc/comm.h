/* comm.h: collectives as objects, shared by comm.c (their life in the queues), comm_run.c
 * (what a part does), comm_bucket.c and redistribute.c (who build them).
 *
 * Invariant: a collective is one block of memory that stands in the queue of each of its
 * parts. Its builder fills it, orr_collective_issue takes it, and its last part frees it. A
 * part writes only what `run` says, between the moment when all parts have arrived and the
 * one when all are finished.
 * To add a collective: a `run` over pieces in comm_run.c, and who builds it.
 */
#ifndef ORR_COMM_H
#define ORR_COMM_H

#include "orrery_int.h"

/* One shard in memory, and where it begins in the global tensor. */
typedef struct orr_piece {
  orr_buffer *buffer;
  orr_view view;
  int64_t lo[ORR_MAX_DIM];
} orr_piece;

typedef struct orr_part {
  orr_device *device;
  struct orr_queue *queue;
  orr_event done; /* controller: what the part's buffers will wait for */
  bool arrived;   /* worker: this part alone */
} orr_part;

typedef struct orr_collective {
  orr_status (*run)(struct orr_collective *c, int part);
  int n;      /* parts */
  bool meets; /* parts wait for each other; else each waits for all sources' events */
  bool alone; /* the first part to run does the work of all */
  bool use_comm;
  bool now;           /* run by the controller: one of the devices is inline */
  bool in_place;      /* an all-reduce: parts write into each other's targets */
  bool native;        /* run by the devices' own library: backend->collective_run */
  void *communicator; /* the library's, set by backend->collective_new */
  orr_collective_kind kind;
  orr_partial_kind op;
  /* A part pulls from every source. Sources stand in groups of `width`: the members of a
   * group hold terms of one value, under one box. No sources: the part's memory becomes 0. */
  int n_src, width;
  /* Where parts meet, source and target t of part r are src[t * n + r] and dst[t * n + r];
   * targets may be the sources themselves. Else target r is dst[r]. */
  int n_dst;
  orr_piece *src, *dst;
  orr_part *part;
  orr_event *deps;
  const char *name; /* for the timeline; NULL: what moves has no name of its own */
  orr_mark mark;
  atomic_int arrived, finished, holders, taken;
  atomic_bool poisoned;
} orr_collective;

/* n_dst 0: in place. Parts, pieces and run are the builder's to fill. */
orr_status orr_collective_new(int n, int n_src, int n_dst, orr_collective **out);
void orr_collective_free(orr_collective *take_c); /* one that was never issued */
orr_status orr_collective_copy(const orr_collective *c, orr_collective **out);
/* While a step is captured (op_capture.c), NULL else: what is about to be issued. */
extern orr_status (*orr_collective_hook)(const orr_collective *c);
void orr_piece_fill(orr_piece *piece, const orr_tensor *t, int rank);
/* Pushes all parts, or runs all at once where one of the devices is inline. */
orr_status orr_collective_issue(orr_collective *take_c);

/* comm_run.c */
orr_status orr_run_pull(orr_collective *c, int part);
/* The same where parts meet, target by target. */
orr_status orr_run_exchange(orr_collective *c, int part);
orr_status orr_run_all_reduce(orr_collective *c, int part);
/* Makes the pieces of an all-reduce one-dimensional wherever they are dense and alike. */
void orr_flatten_all_reduce(orr_collective *c);

/* comm.c: `out` gets, group by group along `axis`, the reduced value of `t`; may be t
 * itself. */
orr_status orr_comm_reduce_into(orr_tensor *const *ts, orr_tensor *const *out, int n, int axis,
                                orr_partial_kind op, bool use_comm);

/* comm_exchange.c: ys[k] is ts[k] under another placement of one axis: all-gather, all-to-all
 * or reduce-scatter, all tensors by one collective a group. ys[k] may be the memory that ts[k]
 * is a part of (all-gather). */
orr_status orr_comm_exchange(orr_collective_kind kind, orr_tensor *const *ts,
                             orr_tensor *const *ys, int n, int axis, bool use_comm);

/* redistribute.c: a dense row-major copy under the same layout, in memory of its own. */
orr_status orr_tensor_copy_local(const orr_tensor *t, orr_tensor **out);
/* t's layout with the placement of one axis changed; bounds as in orr_layout_new. Owned. */
orr_status orr_layout_with(const orr_tensor *t, int axis, const orr_place *place,
                           orr_layout **out);

/* comm_bucket.c: what reducer.c (L4) keeps of gradients on their way. */
typedef struct orr_bucket_entry {
  orr_tensor *p, *g;
  orr_tensor *old; /* while flushing: what p->grad was */
  bool replaces;   /* g is p->grad itself, to be reduced; else g is added to it */
} orr_bucket_entry;

struct orr_reducer {
  int rc;
  int64_t bucket_bytes;
  orr_bucket_entry *entry;
  int n, cap;
  int launched;      /* entries before it are on their way */
  int64_t bytes;     /* of a device's share of the others */
  bool failed;       /* an addition failed: the next flush drops all */
  bool active;       /* in the list of reducers with entries or held parameters */
  orr_tensor **held; /* parameters whose gradients stay Partial until the hold ends */
  int n_held, cap_held;
  struct orr_reducer *next;
};

/* Takes take_g, also when it fails. */
orr_status orr_bucket_add(orr_reducer *r, orr_tensor *p, orr_tensor *take_g, bool replaces);
/* Reduces, in place, what stands in the bucket that is being filled, and begins another. */
orr_status orr_bucket_launch(orr_reducer *r);
void orr_bucket_clear(orr_reducer *r);
bool orr_bucket_is_partial(const orr_tensor *g, int axis); /* reduced by buckets along axis */

#endif
