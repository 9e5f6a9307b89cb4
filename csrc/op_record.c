/* op_record.c: keeps the calls of a run (op_record.h).
 *
 * Invariant: nothing is kept while recording is off, and then dispatch pays one test.
 * To keep more of a call: a field of orr_record, filled in orr_record_call.
 */
#include "op_record.h"

#include <stdlib.h>
#include <string.h>

#include "op.h"

static orr_record *list;
static int count, room;
static bool on;

bool orr_recording(void) { return on; }

int orr_record_count(void) { return count; }

void orr_record_clear(void) {
  for (int k = 0; k < count; k++) {
    for (int i = 0; i < list[k].n_in + list[k].n_out; i++)
      if (list[k].tensor[i]) orr_tensor_free(list[k].tensor[i]);
    free(list[k].tensor);
  }
  free(list);
  list = NULL;
  count = room = 0;
  on = false;
}

void orr_record_start(void) {
  orr_record_clear();
  on = true;
}

const orr_record *orr_record_stop(int *n) {
  on = false;
  *n = count;
  return list;
}

static void fill_labels(orr_call *c, orr_record *r) {
  uint8_t(*before)[ORR_MAX_DIM] = c->in_label;
  c->in_label = r->label;
  memset(c->out_label, 0, sizeof c->out_label);
  if (c->op->label) c->op->label(c);
  else if (c->op->dims) orr_label_dims(c);
  memcpy(r->label + r->n_in, c->out_label, (size_t)r->n_out * sizeof *r->label);
  c->in_label = before;
}

orr_status orr_record_call(orr_call *c, orr_tensor *const *given) {
  if (count == room) {
    int more = room ? 2 * room : 256;
    orr_record *grown = realloc(list, (size_t)more * sizeof *grown);
    if (!grown) return orr_fail(ORR_EMEM, "out of host memory for a record of %d calls", more);
    list = grown;
    room = more;
  }
  size_t n = (size_t)c->n_in + (size_t)c->n_out;
  orr_record r = {.op = c->op, .n_in = c->n_in, .n_out = c->n_out};
  r.tensor = calloc(1, n * (sizeof *r.tensor + sizeof *r.label) + 1);
  if (!r.tensor) return orr_fail(ORR_EMEM, "out of host memory for a record of a call");
  r.label = (void *)(r.tensor + n);
  for (int k = 0; k < c->n_in; k++) r.tensor[k] = given[k] ? orr_tensor_ref(given[k]) : NULL;
  for (int k = 0; k < c->n_out; k++) r.tensor[c->n_in + k] = orr_tensor_ref(c->out[k]);
  fill_labels(c, &r);
  list[count++] = r;
  return ORR_OK;
}
