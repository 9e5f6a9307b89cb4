/* op_capture_int.h: what op_capture.c (recording) and op_replay.c (running it again) share.
 *
 * Invariant: symbols. A buffer written in a recording has in `made` the recording's number and
 * the count of writes before; so what an action reads is named by who wrote it, or, where the
 * step found it, by the buffer itself.
 * To add what is kept of a step: a list here, freed in orr_capture_free.
 */
#ifndef ORR_OP_CAPTURE_INT_H
#define ORR_OP_CAPTURE_INT_H

#include "op_block.h"
#include "op_capture.h"

typedef struct orr_action {
  orr_work *work;             /* owned; NULL: a collective */
  orr_collective *collective; /* owned */
  uint64_t *source; /* owned: of every buffer it touches, its `made`; 0: it was found */
  int n_sources;
  bool fed;     /* a part of an optimizer's step in a host part: it gets new numbers */
  int64_t call; /* of random numbers: draws of their stream since the step began */
} orr_action;

typedef struct orr_leaf {
  orr_tensor *leaf, *grad; /* owned; grad: at the end */
  orr_tensor *first; /* owned alias of its gradient when the recording began; NULL: none */
  bool drops;        /* that one, whether it is there or not */
  bool wants;        /* a gradient */
} orr_leaf;

/* An optimizer's step in a host part. */
typedef struct orr_fed_step {
  const struct orr_op *op;
  orr_args args;
  orr_tensor **list; /* owned: parameters, gradients, states */
  int n;
  int first, last; /* its actions */
} orr_fed_step;

typedef struct orr_host_part {
  int kind, first, last; /* its actions [first, last) */
  orr_tensor **grad;     /* owned: of the leaves known at its beginning, NULL where absent */
  int n_grads;
  orr_random_state at;       /* random numbers at its beginning */
  int first_step, last_step; /* its optimizer steps [first, last) */
} orr_host_part;

/* Actions [first, last) at once. */
typedef struct orr_unit {
  int first, last;
  orr_block *block; /* owned; NULL: the one action, by itself */
} orr_unit;

struct orr_capture {
  orr_pools *pools;
  uint64_t number; /* of the recording, from 1; the high half of `made` */
  uint64_t writes;
  orr_action *action;
  int n, room;
  orr_buffer **found; /* pinned: memory that the step did not make */
  int n_found, found_room;
  orr_tensor **written; /* owned headers of tensors found and written in place */
  int n_written, written_room;
  orr_leaf *leaf;
  int n_leaves, leaf_room;
  orr_host_part *host;
  int n_hosts, host_room;
  orr_fed_step *step;
  int n_steps, step_room;
  bool in_host, in_step;
  orr_random_state first, last; /* random numbers at both ends */
  char why[400];
  struct orr_queue **queue; /* that it pushes to */
  int n_queues, queue_room;
  orr_event *end[2]; /* of the last replays, by queue: the controller is two ahead at most */
  int n_replays;
  struct orr_unit *unit; /* how it is replayed: actions in blocks where they can be */
  int n_units;
  /* while it is replayed */
  int at; /* the next unit */
  int entered;
  int next; /* optimizer step of the host part */
  orr_random_state base;
};

/* Number k of what an optimizer's step is given: parameters, gradients, states. */
static inline orr_tensor *orr_capture_listed(const orr_optim_lists *lists, int k) {
  int of = k / lists->n, at = k % lists->n;
  if (of < 2) return of ? lists->grad[at] : lists->param[at];
  return lists->state[of - 2][at];
}

/* op_replay.c */
void orr_capture_drop_units(orr_capture *c);

/* Room for one more of n in *list; NULL in err: none. */
orr_status orr_capture_grow(void **list, int n, int *room, size_t size);

#endif
