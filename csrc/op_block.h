/* op_block.h: calls in a row as one item a device: how a captured step replays them.
 *
 * Invariant: a block's calls do not change; no collective stands between them, so every device
 * runs its own in order without a look at others. It may stand in the queues several times.
 * To add what a backend does with a block: orr_backend.graph_run (device.h).
 */
#ifndef ORR_OP_BLOCK_H
#define ORR_OP_BLOCK_H

#include "orrery_int.h"

typedef struct orr_block orr_block;

/* Whether a call can be part of one: it is queued, and the same in every replay. */
bool orr_block_takes(const orr_work *w);
/* Borrows the calls for its lifetime. */
orr_status orr_block_new(orr_work *const *work, int n, orr_block **out);
orr_status orr_block_push(orr_block *b);
void orr_block_free(orr_block *take_b); /* no item of it may be left */

#endif
