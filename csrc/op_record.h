/* op_record.h: the calls of one run in order, with what their tensors share: for passes that
 * must see a net as ops (the splits inside layers, the costs of layers).
 * Invariant: recorded tensors are kept until orr_record_clear; none is taken for another.
 */
#ifndef ORR_OP_RECORD_H
#define ORR_OP_RECORD_H

#include "orrery_int.h"

typedef struct orr_record {
  const orr_op *op;
  int n_in, n_out;
  orr_tensor **tensor;           /* inputs (NULL where absent), then outputs */
  uint8_t (*label)[ORR_MAX_DIM]; /* of each: dims that go together, as in orr_call */
} orr_record;

void orr_record_start(void);
/* Ends recording; *n calls, borrowed until orr_record_clear. */
const orr_record *orr_record_stop(int *n);
void orr_record_clear(void);
int orr_record_count(void);
bool orr_recording(void);
/* dispatch: a call that succeeded; given: its inputs before placing. */
orr_status orr_record_call(orr_call *c, orr_tensor *const *given);

#endif
