/* tape_hold.c: gradients of several backward calls as one mean (orrery.accumulate): while held,
 * leaves collect sums apart from the gradients they had; the end divides once and adds.
 *
 * Invariant: after a failed hold every leaf has the gradient it had before it.
 * Partial gradients of placed parameters stay Partial until the end (reducer.c).
 */
#include <stdlib.h>

#include "../kernels/elementwise.h"
#include "op.h"
#include "tape.h"

typedef struct held {
  orr_tensor *leaf, *old;
} held;

static held *list = NULL;
static int n = 0, cap = 0;
static bool holding = false;

orr_status orr_hold_begin(void) {
  if (holding) return orr_fail(ORR_EARG, "accumulate within accumulate");
  ORR_TRY(orr_reducers_hold(true));
  holding = true;
  return ORR_OK;
}

orr_status orr_hold_note(orr_tensor *leaf) {
  if (!holding) return ORR_OK;
  for (int k = 0; k < n; k++)
    if (list[k].leaf == leaf) return ORR_OK;
  if (n == cap) {
    int grown = cap ? 2 * cap : 64;
    held *room = realloc(list, (size_t)grown * sizeof *room);
    if (!room) return orr_fail(ORR_EMEM, "out of host memory for %d held gradients", grown);
    list = room;
    cap = grown;
  }
  list[n++] = (held){orr_tensor_ref(leaf), leaf->grad};
  leaf->grad = NULL;
  return ORR_OK;
}

/* leaf->grad times scale, plus what it had. */
static orr_status settle(held *h, double scale) {
  orr_args args = {.f = {scale}};
  orr_tensor *scaled, *total;
  if (!h->leaf->grad || (scale == 1 && !h->old)) return ORR_OK;
  ORR_TRY(orr_call1(orr_op_binary(ORR_BIN_mul)->scalar, h->leaf->grad, &args, &scaled));
  if (h->old) {
    orr_status status = orr_call2(orr_op_binary(ORR_BIN_add), h->old, scaled, NULL, &total);
    orr_tensor_free(scaled);
    if (status) return status;
    scaled = total;
  }
  orr_tensor_free(h->leaf->grad);
  h->leaf->grad = scaled;
  return ORR_OK;
}

bool orr_holding(void) { return holding; }

orr_status orr_hold_end(double scale) {
  if (!holding) return ORR_OK;
  orr_status status = orr_reducers_hold(false);
  bool was = orr_set_grad_mode(false);
  int settled = 0;
  if (scale != 0)
    for (; settled < n && !status; settled++) status = settle(&list[settled], scale);
  orr_set_grad_mode(was);
  for (int k = 0; k < n; k++) {
    held *h = &list[k];
    if (status || scale == 0 || !h->leaf->grad) {
      if (h->leaf->grad) orr_tensor_free(h->leaf->grad);
      h->leaf->grad = h->old;
    } else if (h->old) {
      orr_tensor_free(h->old);
    }
    orr_tensor_free(h->leaf);
  }
  n = 0;
  holding = false;
  return status;
}
