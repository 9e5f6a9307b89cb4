/* op_index.h: checks of indices and labels, shared by the ops that take them.
 * Invariant: what the host holds is checked before anything is queued; the rest by the kernel.
 */
#ifndef ORR_OP_INDEX_H
#define ORR_OP_INDEX_H

#include "op_reduce.h"

/* infer: in[k] holds indices 1..size (or `ignore`; INT64_MIN for none). Looks at them now
 * where they are on the host and the call will run elsewhere. Complains in the words of
 * orr_index_fault. */
orr_status orr_check_index(const orr_call *c, int k, int64_t size, int64_t ignore, bool labels);
/* The message for an index, or a class label, that is out of range at a position from 1. */
orr_status orr_index_fault(int64_t value, int64_t position, int64_t size, bool labels,
                           bool part);

#endif
