/* op_capture.h: a step as the list of what it ran, to run it again without the script that made
 * it (orrery.capture).
 *
 * A recording keeps every record of a call and every collective of a step (an action each), and
 * pins the memory that the step did not make; what it makes comes from pools that nobody else
 * uses, so that the same memory serves again. Two recordings that are the same say that a step
 * repeats itself (orr_capture_differs). What depends on the script's numbers stands in a host
 * part: the script runs that again. Its actions are then the script's (an aside: clipping by a
 * norm that the host looks at), except that steps of an optimizer over the same lists are
 * replayed with the new numbers (a feed: rate and step count).
 *
 * Invariant: one recording at a time; while none is made, dispatch pays one test. Replaying
 * pushes what the step pushed, in its order, so buffers' events order it as ever.
 * To add something that a step must not do: orr_capture_refuse where it does it.
 */
#ifndef ORR_OP_CAPTURE_H
#define ORR_OP_CAPTURE_H

#include "comm.h"
#include "op_optim.h"
#include "orrery_int.h"
#include "random_state.h"

typedef struct orr_capture orr_capture;

enum { ORR_HOST_FEED, ORR_HOST_ASIDE };

bool orr_capturing(void);
bool orr_capture_in_part(void); /* a host part of a replay runs */
/* op_run.c: w is about to run. */
orr_status orr_capture_work(const orr_work *w);
/* What the step did cannot be repeated: the first reason stays, with the line in hand. */
void orr_capture_refuse(const char *format, ...) ORR_PRINTF(1, 2);
/* tape_backward.c, the binding: the gradient of a leaf is about to be read or set; drops: set
 * to another, without a look at the one it has. */
void orr_capture_leaf(orr_tensor *leaf, bool drops);

/* Begins a recording whose memory comes from `pools`, which must outlive it; NULL: from
 * where it always does, for a look at what the step does. */
orr_status orr_capture_start(orr_pools *pools, orr_capture **out);
orr_status orr_capture_stop(orr_capture *c);
void orr_capture_free(orr_capture *take_c);
/* Why it cannot be repeated; "": it can. */
const char *orr_capture_why(const orr_capture *c);
/* Whether two recordings are of one step; else buf says what differs. */
bool orr_capture_differs(const orr_capture *a, const orr_capture *b, char *buf, size_t size);
/* Whether the recording made t's memory; whether it wrote into it, where it found it. */
bool orr_capture_made(const orr_capture *c, const orr_tensor *t);
bool orr_capture_wrote(const orr_capture *c, const orr_tensor *t);
/* Drops leaves that the step made and nobody else holds. Collect garbage first. */
void orr_capture_forget(orr_capture *c);
/* Whether somebody still holds a tensor that the recording made, apart from gradients of
 * leaves and the tensors `keep`; then buf names the op. Collect garbage first. */
bool orr_capture_escaped(const orr_capture *c, orr_tensor *const *keep, int n, char *buf,
                         size_t size);

/* Host parts, numbered from 0 in order; they do not nest. */
orr_status orr_capture_host(orr_capture *c, int kind);
void orr_capture_host_end(orr_capture *c);

/* op_optim.c: a step of an optimizer begins; and has ended. */
orr_status orr_capture_optim(const orr_op *op, const orr_optim_lists *lists,
                             const orr_args *args);
void orr_capture_optim_end(void);
/* Whether a replay has this step of an optimizer: then it gets the numbers, and is pushed. */
bool orr_capture_feed(const orr_op *op, const orr_optim_lists *lists, const orr_args *args,
                      orr_status *status);

/* Whether leaves have the gradients, or none, as when the recording began, and want them; else
 * buf says which. */
bool orr_capture_fits(const orr_capture *c, char *buf, size_t size);
/* Runs the actions before host part k (past the last: all that are left) that have not run. */
orr_status orr_capture_replay(orr_capture *c, int k);
/* Host part k is about to run: leaves have the gradients, and random numbers the position, that
 * they had there; and has run. */
void orr_capture_enter(orr_capture *c, int k);
void orr_capture_leave(void);
/* The recording will be replayed: puts calls together. */
orr_status orr_capture_prepare(orr_capture *c);
/* Before the first orr_capture_replay of a step, and after its last, also if one failed. */
orr_status orr_capture_begin(orr_capture *c);
void orr_capture_end(orr_capture *c);

#endif
