/* op_replay.c: a recorded step run again (op_capture.h).
 *
 * Invariant: a replay pushes the actions in the order in which they were recorded; before a
 * host part, leaves have the gradients that they had there, and random numbers stand where they
 * stood there, counted from where the replay began.
 * To add an argument that changes from step to step: refresh.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "interrupt.h"
#include "op.h"
#include "op_capture_int.h"

static orr_capture *fed; /* whose host part runs */

bool orr_capture_in_part(void) { return fed != NULL; }

/* ---- state of the script's side ---- */

static void set_grad(orr_tensor *leaf, orr_tensor *grad) {
  if (leaf->grad == grad) return;
  if (leaf->grad) orr_tensor_free(leaf->grad);
  leaf->grad = grad ? orr_tensor_ref(grad) : NULL;
}

/* As far from the beginning of this step as `at` was from the recorded one's. */
static void set_random(const orr_capture *c, const orr_random_state *at) {
  orr_random_state s = c->base;
  for (int k = 0; k < ORR_N_STREAMS; k++)
    s.stream[k].call += at->stream[k].call - c->first.stream[k].call;
  orr_random_set(&s);
}

static bool same_memory(const orr_tensor *a, const orr_tensor *b) {
  return a->storage == b->storage && a->buffer0 == b->buffer0 &&
         a->shard[0].offset == b->shard[0].offset &&
         memcmp(a->shard[0].stride, b->shard[0].stride,
                (size_t)a->meta.ndim * sizeof a->shard[0].stride[0]) == 0;
}

static const char *unlike(const orr_leaf *l) {
  const orr_tensor *grad = l->leaf->grad;
  if (l->wants != l->leaf->requires_grad) return l->wants ? "is not wanted" : "is wanted";
  if (l->drops) return NULL;
  if (!grad != !l->first) return grad ? "is there" : "is not there";
  return grad && !same_memory(grad, l->first) ? "is another tensor" : NULL;
}

bool orr_capture_fits(const orr_capture *c, char *buf, size_t size) {
  char text[300];
  for (int k = 0; k < c->n_leaves; k++) {
    const orr_leaf *l = &c->leaf[k];
    const char *what = unlike(l);
    if (!what) continue;
    snprintf(buf, size, "the gradient of a parameter %s %s, unlike when the step was recorded",
             orr_tensor_text(l->leaf, text, sizeof text), what);
    return false;
  }
  return true;
}

orr_status orr_capture_begin(orr_capture *c) {
  const orr_event *end = c->end[c->n_replays % 2];
  for (int k = 0; k < c->n_queues; k++) ORR_TRY(orr_event_wait(end[k]));
  orr_zero_release();
  orr_sequence_release();
  c->base = orr_random_get();
  c->at = 0;
  c->entered = -1;
  return ORR_OK;
}

void orr_capture_end(orr_capture *c) {
  fed = NULL;
  for (int k = 0; k < c->n_leaves; k++) set_grad(c->leaf[k].leaf, c->leaf[k].grad);
  for (int k = 0; k < c->n_written; k++) orr_tensor_wrote(c->written[k]);
  set_random(c, &c->last);
  orr_event *end = c->end[c->n_replays++ % 2];
  for (int k = 0; k < c->n_queues; k++) end[k] = orr_queue_last(c->queue[k]);
}

/* ---- actions ---- */

static void refresh(const orr_capture *c, const orr_action *a) {
  int64_t *key = a->work->args.i;
  if (!(a->work->op->flags & ORR_OP_KEYED)) return;
  key[0] = (int64_t)c->base.seed;
  key[2] = (int64_t)c->base.stream[key[1]].step;
  key[3] = (int64_t)c->base.stream[key[1]].call + a->call;
}

static orr_status again(const orr_capture *c, const orr_action *a) {
  if (a->work) {
    refresh(c, a);
    return orr_work_again(a->work);
  }
  orr_collective *copy;
  ORR_TRY(orr_collective_copy(a->collective, &copy));
  return orr_collective_issue(copy);
}

static orr_status explain(const orr_action *a, orr_status status) {
  const orr_work *w = a->work;
  if (status == ORR_EINTERRUPT || !w) return status;
  if (!w->source) return orr_fail_in(status, "%s", w->op->name);
  return orr_fail_in(status, "%s (recorded at %.200s:%d)", w->op->name, w->source, w->line);
}

/* ---- units ---- */

/* A call that is fed gets new numbers while older replays wait in the queues. */
static bool joins(const orr_action *a) {
  return a->work && !a->fed && orr_block_takes(a->work);
}

static bool begins_host(const orr_capture *c, int k) {
  for (int h = 0; h < c->n_hosts; h++)
    if (c->host[h].first == k || c->host[h].last == k) return true;
  return false;
}

static int unit_end(const orr_capture *c, int first) {
  int k = first + 1;
  if (!joins(&c->action[first])) return k;
  while (k < c->n && joins(&c->action[k]) && !begins_host(c, k)) k++;
  return k;
}

static orr_status make_block(const orr_capture *c, orr_unit *u, orr_work **room) {
  if (u->last - u->first < 2) return ORR_OK;
  for (int k = u->first; k < u->last; k++) room[k - u->first] = c->action[k].work;
  return orr_block_new(room, u->last - u->first, &u->block);
}

orr_status orr_capture_prepare(orr_capture *c) {
  orr_work **room = malloc((size_t)c->n * sizeof *room + 1);
  c->unit = calloc((size_t)c->n + 1, sizeof *c->unit);
  orr_status status =
      room && c->unit ? ORR_OK : orr_fail(ORR_EMEM, "out of host memory for a captured step");
  for (int k = 0; k < c->n && !status;) {
    orr_unit *u = &c->unit[c->n_units++];
    u->first = k;
    k = u->last = unit_end(c, k);
    status = make_block(c, u, room);
  }
  free(room);
  return status;
}

/* Items of it may be left where waiting was cut short: then it stays. */
void orr_capture_drop_units(orr_capture *c) {
  bool idle = true;
  for (int k = 0; k < 2 && c->end[k]; k++)
    for (int i = 0; i < c->n_queues; i++) idle = idle && !orr_event_wait(c->end[k][i]);
  for (int k = 0; k < c->n_units && idle; k++) orr_block_free(c->unit[k].block);
  if (idle) free(c->unit);
}

static orr_status run_unit(const orr_capture *c, const orr_unit *u) {
  const orr_action *a = &c->action[u->first];
  if (orr_interrupt_pending()) return orr_fail(ORR_EINTERRUPT, "interrupted");
  if (u->block) return orr_block_push(u->block);
  orr_status status = again(c, a);
  return status ? explain(a, status) : ORR_OK;
}

/* ---- numbers of an optimizer ---- */

/* Momentum that is switched on, or a parameter that is left out, is another step. */
static bool is_same_step(const orr_fed_step *s, const orr_op *op, const orr_optim_lists *lists,
                         const orr_args *args) {
  if (s->op != op || s->n != lists->n * (2 + lists->n_states) ||
      memcmp(s->args.i, args->i, sizeof args->i) != 0)
    return false;
  for (int k = 0; k < s->n; k++)
    if (s->list[k] != orr_capture_listed(lists, k)) return false;
  return true;
}

static int unit_of(const orr_capture *c, int action) {
  int k = 0;
  while (k < c->n_units && c->unit[k].first < action) k++;
  return k;
}

bool orr_capture_feed(const orr_op *op, const orr_optim_lists *lists, const orr_args *args,
                      orr_status *status) {
  orr_capture *c = fed;
  if (!c || c->next >= c->host[c->entered].last_step) return false;
  const orr_fed_step *s = &c->step[c->next++];
  if (!is_same_step(s, op, lists, args)) return false;
  *status = ORR_OK;
  for (int k = s->first; k < s->last; k++) {
    orr_work *w = c->action[k].work;
    if (w && w->op == op) memcpy(w->args.f, args->f, sizeof args->f);
  }
  for (int k = unit_of(c, s->first); k < c->n_units && c->unit[k].first < s->last && !*status;
       k++)
    *status = run_unit(c, &c->unit[k]);
  return true;
}

/* ---- the step ---- */

orr_status orr_capture_replay(orr_capture *c, int k) {
  int end = k < c->n_hosts ? c->host[k].first : c->n;
  while (c->at < c->n_units && c->unit[c->at].first < end) {
    ORR_TRY(run_unit(c, &c->unit[c->at]));
    c->at++;
  }
  return ORR_OK;
}

void orr_capture_enter(orr_capture *c, int k) {
  const orr_host_part *h = &c->host[k];
  for (int i = 0; i < h->n_grads; i++) set_grad(c->leaf[i].leaf, h->grad[i]);
  set_random(c, &h->at);
  c->entered = k;
  c->next = h->first_step;
  fed = c;
}

/* What the script did in the part is done. */
void orr_capture_leave(void) {
  fed->at = unit_of(fed, fed->host[fed->entered].last);
  fed = NULL;
}
