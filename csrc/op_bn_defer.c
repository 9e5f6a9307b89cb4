/* op_bn_defer.c: running statistics of batch norm over the micro-batches of one step: kept
 * aside while the step runs, merged and applied once when it ends.
 *
 * Invariant: between begin and end no running statistic moves; end moves each once, by all rows
 * of all its micro-batches together, or drops what was kept.
 * To add another statistic: a list beside `mean`.
 */
#include <stdlib.h>

#include "op.h"
#include "op_batch_norm.h"

enum { MAX_PARTS = 4096 };

typedef struct deferred {
  orr_tensor *running_mean, *running_var;
  double momentum;
  int n, cap;
  orr_tensor **mean, **sumsq, **counts; /* of each micro-batch, (D, C), (D, C), (D) */
  struct deferred *next;
} deferred;

static deferred *list = NULL;
static bool deferring = false;

bool orr_bn_deferring(void) { return deferring; }

void orr_bn_defer_begin(void) { deferring = true; }

static deferred *find(orr_tensor *running_mean) {
  for (deferred *d = list; d; d = d->next)
    if (d->running_mean == running_mean) return d;
  return NULL;
}

static bool grow(orr_tensor ***room, int cap) {
  orr_tensor **more = realloc(*room, (size_t)cap * sizeof(**room));
  if (more) *room = more;
  return more != NULL;
}

static orr_status make_room(deferred *d) {
  if (d->n < d->cap) return ORR_OK;
  int cap = d->cap ? 2 * d->cap : 8;
  if (cap > MAX_PARTS || !grow(&d->mean, cap) || !grow(&d->sumsq, cap) ||
      !grow(&d->counts, cap))
    return orr_fail(ORR_EMEM, "out of host memory for the statistics of %d micro-batches",
                    d->n);
  d->cap = cap;
  return ORR_OK;
}

orr_status orr_bn_defer(orr_tensor *running_mean, orr_tensor *running_var, double momentum,
                        orr_tensor *mean, orr_tensor *sumsq, orr_tensor *take_counts) {
  deferred *d = find(running_mean);
  if (!d) {
    d = calloc(1, sizeof *d);
    if (!d) {
      orr_tensor_free(take_counts);
      return orr_fail(ORR_EMEM, "out of host memory for deferred statistics");
    }
    d->running_mean = orr_tensor_ref(running_mean);
    d->running_var = orr_tensor_ref(running_var);
    d->momentum = momentum;
    d->next = list;
    list = d;
  }
  orr_status status = make_room(d);
  if (status) {
    orr_tensor_free(take_counts);
    return status;
  }
  d->mean[d->n] = orr_tensor_ref(mean);
  d->sumsq[d->n] = orr_tensor_ref(sumsq);
  d->counts[d->n++] = take_counts;
  return ORR_OK;
}

static orr_status apply(deferred *d) {
  orr_args dim = {.i = {0}}, args = {.i = {1, -1}};
  orr_tensor *in[5] = {d->running_mean, d->running_var, NULL, NULL, NULL};
  orr_tensor **part[3] = {d->mean, d->sumsq, d->counts};
  orr_status status = ORR_OK;
  args.f[1] = d->momentum;
  for (int k = 0; k < 3 && !status; k++)
    status = orr_dispatch(&orr_op_cat, part[k], d->n, &dim, false, &in[2 + k]);
  if (!status) status = orr_dispatch(&orr_op_bn_running_, in, 5, &args, false, NULL);
  for (int k = 2; k < 5; k++)
    if (in[k]) orr_tensor_free(in[k]);
  return status;
}

static void release(deferred *d) {
  for (int k = 0; k < d->n; k++) {
    orr_tensor_free(d->mean[k]);
    orr_tensor_free(d->sumsq[k]);
    orr_tensor_free(d->counts[k]);
  }
  free(d->mean);
  free(d->sumsq);
  free(d->counts);
  orr_tensor_free(d->running_mean);
  orr_tensor_free(d->running_var);
  free(d);
}

orr_status orr_bn_defer_end(bool keep) {
  orr_status status = ORR_OK;
  bool was = orr_set_grad_mode(false);
  deferring = false;
  while (list) {
    deferred *d = list;
    list = d->next;
    if (keep && !status) status = apply(d);
    release(d);
  }
  orr_set_grad_mode(was);
  return status;
}
