/* op_capture.c: recording a step, and whether two recordings are the same (op_capture.h).
 *
 * Invariant: what is kept of an action is a copy, made before the action is pushed.
 * To add what two recordings must agree on: same_work, same_collective.
 */
#include "op_capture.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op.h"
#include "op_capture_int.h"

static orr_capture *now; /* being recorded */
static uint64_t numbers; /* recordings so far */

bool orr_capturing(void) { return now != NULL; }

orr_status orr_capture_grow(void **list, int n, int *room, size_t size) {
  if (n < *room) return ORR_OK;
  int more = *room ? 2 * *room : 64;
  void *grown = realloc(*list, (size_t)more * size);
  if (!grown) return orr_fail(ORR_EMEM, "out of host memory for a captured step");
  *list = grown;
  *room = more;
  return ORR_OK;
}

void orr_capture_refuse(const char *format, ...) {
  if (!now || now->why[0]) return;
  va_list args;
  va_start(args, format);
  int used = vsnprintf(now->why, sizeof now->why, format, args);
  va_end(args);
  const char *source = NULL;
  int line = 0;
  if (orr_where_hook) orr_where_hook(&source, &line);
  if (source && used > 0 && (size_t)used < sizeof now->why)
    snprintf(now->why + used, sizeof now->why - (size_t)used, " (%.200s:%d)", source, line);
}

/* The same text for ever: the script may go before the record. */
static const char *kept_name(const char *name) {
  static struct kept {
    struct kept *next;
    char text[];
  } * all;
  for (struct kept *k = all; k; k = k->next)
    if (strcmp(k->text, name) == 0) return k->text;
  size_t n = strlen(name) + 1;
  struct kept *more = malloc(sizeof *more + n);
  if (!more) return NULL;
  memcpy(more->text, name, n);
  more->next = all;
  all = more;
  return more->text;
}

/* ---- what an action touches ---- */

/* Names what b holds; memory that the step found is pinned. */
static orr_status read_buffer(orr_capture *c, orr_buffer *b, uint64_t *source) {
  *source = 0;
  if (!b) return ORR_OK;
  if (b->made >> 32 == c->number) {
    *source = b->made;
    return ORR_OK;
  }
  for (int k = c->n_found - 1; k >= 0; k--)
    if (c->found[k] == b) return ORR_OK;
  ORR_TRY(orr_capture_grow((void **)&c->found, c->n_found, &c->found_room, sizeof(void *)));
  orr_buffer_pin(b);
  c->found[c->n_found++] = b;
  return ORR_OK;
}

/* What the step made has a new name from now on; what it found is known by itself. */
static void write_buffer(orr_capture *c, orr_buffer *b) {
  if (b && b->made >> 32 == c->number) b->made = c->number << 32 | ++c->writes;
}

static orr_status add_action(orr_capture *c, int n_sources, orr_action **out) {
  ORR_TRY(orr_capture_grow((void **)&c->action, c->n, &c->room, sizeof *c->action));
  orr_action *a = &c->action[c->n];
  *a = (orr_action){.n_sources = n_sources};
  a->source = calloc((size_t)n_sources + 1, sizeof *a->source);
  if (!a->source) return orr_fail(ORR_EMEM, "out of host memory for a captured step");
  c->n++;
  *out = a;
  return ORR_OK;
}

orr_status orr_capture_work(const orr_work *w) {
  orr_capture *c = now;
  int views = w->n_in + w->n_out;
  orr_action *a;
  ORR_TRY(add_action(c, views * w->n_shards, &a));
  for (int k = 0; k < a->n_sources; k++) ORR_TRY(read_buffer(c, w->buffer[k], &a->source[k]));
  ORR_TRY(orr_work_copy(w, &a->work));
  if (orr_where_hook && !w->source) orr_where_hook(&a->work->source, &a->work->line);
  if (a->work->source) a->work->source = kept_name(a->work->source);
  a->fed = c->in_step;
  if (w->op->flags & ORR_OP_KEYED)
    a->call = w->args.i[3] - (int64_t)c->first.stream[w->args.i[1]].call;
  for (int k = 0; k < a->n_sources; k++)
    if (k % views < w->n_written || k % views >= w->n_in) write_buffer(c, w->buffer[k]);
  return ORR_OK;
}

static orr_status capture_collective(const orr_collective *from) {
  orr_capture *c = now;
  orr_action *a;
  ORR_TRY(add_action(c, from->n_src + from->n_dst, &a));
  for (int k = 0; k < from->n_src; k++)
    ORR_TRY(read_buffer(c, from->src[k].buffer, &a->source[k]));
  for (int k = 0; k < from->n_dst; k++)
    ORR_TRY(read_buffer(c, from->dst[k].buffer, &a->source[from->n_src + k]));
  ORR_TRY(orr_collective_copy(from, &a->collective));
  a->fed = c->in_step;
  for (int k = 0; k < from->n_dst; k++) write_buffer(c, from->dst[k].buffer);
  return ORR_OK;
}

/* ---- what the step does beside its actions ---- */

static void note_host(const char *what) { orr_capture_refuse("the step %s", what); }

static void note_written(orr_tensor *t) {
  orr_capture *c = now;
  if (orr_tensor_buffer(t, 0)->made >> 32 == c->number) return;
  for (int k = 0; k < c->n_written; k++)
    if (c->written[k]->storage == t->storage) return;
  orr_status status =
      orr_capture_grow((void **)&c->written, c->n_written, &c->written_room, sizeof(void *));
  if (!status) status = orr_tensor_alias(t, &c->written[c->n_written]);
  if (status) orr_capture_refuse("there is no memory to record it");
  else c->n_written++;
}

void orr_capture_leaf(orr_tensor *leaf, bool drops) {
  orr_capture *c = now;
  if (!c) return;
  for (int k = 0; k < c->n_leaves; k++)
    if (c->leaf[k].leaf == leaf) return;
  if (orr_capture_grow((void **)&c->leaf, c->n_leaves, &c->leaf_room, sizeof *c->leaf)) {
    orr_capture_refuse("there is no memory to record it");
    return;
  }
  orr_leaf *l = &c->leaf[c->n_leaves];
  *l = (orr_leaf){.leaf = leaf, .drops = drops, .wants = leaf->requires_grad};
  if (leaf->grad && !drops && orr_tensor_alias(leaf->grad, &l->first)) {
    orr_capture_refuse("there is no memory to record it");
    return;
  }
  orr_tensor_ref(leaf);
  c->n_leaves++;
}

static void watch(orr_capture *c) {
  now = c;
  orr_buffer_made = c ? c->number << 32 : 0;
  orr_collective_hook = c ? capture_collective : NULL;
  orr_wrote_hook = c ? note_written : NULL;
  orr_host_hook = c ? note_host : NULL;
  orr_pools_use(c ? c->pools : NULL);
}

orr_status orr_capture_host(orr_capture *c, int kind) {
  ORR_TRY(orr_capture_grow((void **)&c->host, c->n_hosts, &c->host_room, sizeof *c->host));
  orr_host_part h = {.kind = kind, .first = c->n, .n_grads = c->n_leaves};
  h.grad = calloc((size_t)c->n_leaves + 1, sizeof(orr_tensor *));
  if (!h.grad) return orr_fail(ORR_EMEM, "out of host memory for a captured step");
  for (int k = 0; k < c->n_leaves; k++) {
    orr_tensor *g = c->leaf[k].leaf->grad;
    h.grad[k] = g ? orr_tensor_ref(g) : NULL;
  }
  h.at = orr_random_get();
  h.first_step = c->n_steps;
  c->host[c->n_hosts++] = h;
  c->in_host = true;
  if (kind == ORR_HOST_ASIDE) watch(NULL);
  return ORR_OK;
}

void orr_capture_host_end(orr_capture *c) {
  watch(c);
  c->host[c->n_hosts - 1].last = c->n;
  c->host[c->n_hosts - 1].last_step = c->n_steps;
  c->in_host = c->in_step = false;
}

orr_status orr_capture_optim(const orr_op *op, const orr_optim_lists *lists,
                             const orr_args *args) {
  orr_capture *c = now;
  if (!c || !c->in_host) return ORR_OK;
  ORR_TRY(orr_capture_grow((void **)&c->step, c->n_steps, &c->step_room, sizeof *c->step));
  int n = lists->n * (2 + lists->n_states);
  orr_fed_step *s = &c->step[c->n_steps];
  *s = (orr_fed_step){.op = op, .args = *args, .n = n, .first = c->n};
  s->list = malloc((size_t)n * sizeof(orr_tensor *) + 1);
  if (!s->list) return orr_fail(ORR_EMEM, "out of host memory for a captured step");
  for (int k = 0; k < n; k++) s->list[k] = orr_tensor_ref(orr_capture_listed(lists, k));
  c->n_steps++;
  c->in_step = true;
  return ORR_OK;
}

void orr_capture_optim_end(void) {
  orr_capture *c = now;
  if (!c || !c->in_step) return;
  c->step[c->n_steps - 1].last = c->n;
  c->in_step = false;
}

/* ---- its life ---- */

orr_status orr_capture_start(orr_pools *pools, orr_capture **out) {
  if (now) return orr_fail(ORR_EARG, "capture: a step is being recorded already");
  orr_capture *c = calloc(1, sizeof *c);
  if (!c) return orr_fail(ORR_EMEM, "out of host memory for a captured step");
  c->pools = pools;
  c->number = ++numbers;
  c->first = orr_random_get();
  orr_zero_release();
  orr_sequence_release();
  watch(c);
  *out = c;
  return ORR_OK;
}

static orr_status add_queue(orr_capture *c, struct orr_queue *q) {
  for (int k = 0; k < c->n_queues; k++)
    if (c->queue[k] == q) return ORR_OK;
  ORR_TRY(orr_capture_grow((void **)&c->queue, c->n_queues, &c->queue_room, sizeof(void *)));
  c->queue[c->n_queues++] = q;
  return ORR_OK;
}

/* Devices without queues have none to wait for. */
static orr_status find_queues(orr_capture *c) {
  for (int k = 0; k < c->n; k++) {
    const orr_work *w = c->action[k].work;
    const orr_collective *of = c->action[k].collective;
    for (int i = 0; i < (w ? w->n_shards : of->n); i++) {
      orr_device *d = w ? orr_device_at(w->mesh->device[i]) : of->part[i].device;
      struct orr_queue *q = of && of->use_comm ? d->comm : d->compute;
      if (!d->is_inline) ORR_TRY(add_queue(c, q));
    }
  }
  for (int k = 0; k < 2; k++) {
    c->end[k] = calloc((size_t)c->n_queues + 1, sizeof *c->end[k]);
    if (!c->end[k]) return orr_fail(ORR_EMEM, "out of host memory for a captured step");
  }
  return ORR_OK;
}

orr_status orr_capture_stop(orr_capture *c) {
  if (now != c) return ORR_OK;
  orr_zero_release();
  orr_sequence_release();
  c->last = orr_random_get();
  for (int k = 0; k < c->n_leaves; k++) {
    orr_tensor *g = c->leaf[k].leaf->grad;
    c->leaf[k].grad = g ? orr_tensor_ref(g) : NULL;
  }
  watch(NULL);
  return find_queues(c);
}

const char *orr_capture_why(const orr_capture *c) { return c->why; }

static void free_leaf(const orr_leaf *l) {
  if (l->grad) orr_tensor_free(l->grad);
  if (l->first) orr_tensor_free(l->first);
  orr_tensor_free(l->leaf);
}

static void free_tensors(orr_tensor **list, int n) {
  for (int k = 0; k < n; k++)
    if (list[k]) orr_tensor_free(list[k]);
  free(list);
}

void orr_capture_free(orr_capture *take_c) {
  orr_capture *c = take_c;
  if (!c) return;
  (void)orr_capture_stop(c);
  orr_capture_drop_units(c);
  for (int k = 0; k < c->n; k++) {
    if (c->action[k].work) orr_work_free(c->action[k].work);
    if (c->action[k].collective) orr_collective_free(c->action[k].collective);
    free(c->action[k].source);
  }
  for (int k = 0; k < c->n_found; k++) orr_buffer_unpin(c->found[k]);
  for (int k = 0; k < c->n_leaves; k++) free_leaf(&c->leaf[k]);
  for (int k = 0; k < c->n_hosts; k++) free_tensors(c->host[k].grad, c->host[k].n_grads);
  for (int k = 0; k < c->n_steps; k++) free_tensors(c->step[k].list, c->step[k].n);
  free_tensors(c->written, c->n_written);
  for (int k = 0; k < 2; k++) free(c->end[k]);
  free(c->queue);
  free(c->action);
  free(c->found);
  free(c->leaf);
  free(c->host);
  free(c->step);
  free(c);
}

/* ---- are two recordings of one step? ---- */

static bool same_view(const orr_view *a, const orr_buffer *of_a, const orr_view *b,
                      const orr_buffer *of_b) {
  if (!of_a || !of_b) return of_a == of_b;
  size_t dims = (size_t)a->ndim * sizeof a->shape[0];
  return a->dtype == b->dtype && a->ndim == b->ndim &&
         (char *)a->data - (char *)of_a->data == (char *)b->data - (char *)of_b->data &&
         memcmp(a->shape, b->shape, dims) == 0 && memcmp(a->stride, b->stride, dims) == 0;
}

/* The same writer's, by its count, or memory that both found. */
static bool same_source(uint64_t a, const orr_buffer *of_a, uint64_t b,
                        const orr_buffer *of_b) {
  return a && b ? (uint32_t)a == (uint32_t)b : !a && !b && of_a == of_b;
}

/* NaN is itself. */
static bool same_numbers(const double *a, const double *b, int n) {
  for (int k = 0; k < n; k++)
    if (a[k] != b[k] && (a[k] == a[k] || b[k] == b[k])) return false;
  return true;
}

/* Numbers that a replay sets anew may differ: a random key, what is fed. */
static bool same_args(const orr_action *x, const orr_action *y) {
  const orr_args *p = &x->work->args, *q = &y->work->args;
  bool keyed = x->work->op->flags & ORR_OP_KEYED, fed = x->fed && y->fed;
  int from = keyed ? 4 : 0;
  if (!x->work->has_args || !y->work->has_args) return x->work->has_args == y->work->has_args;
  if (keyed && (x->call != y->call || p->i[1] != q->i[1])) return false;
  return memcmp(p->i + from, q->i + from, (size_t)(ORR_MAX_INT - from) * sizeof p->i[0]) == 0 &&
         (fed || same_numbers(p->f, q->f, ORR_MAX_FLOAT));
}

static bool same_work(const orr_action *x, const orr_action *y) {
  const orr_work *v = x->work, *w = y->work;
  if (v->op != w->op || v->n_in != w->n_in || v->n_out != w->n_out || v->mesh != w->mesh ||
      v->in_place != w->in_place || v->n_written != w->n_written || !same_args(x, y))
    return false;
  for (int k = 0; k < x->n_sources; k++)
    if (!same_view(&v->view[k], v->buffer[k], &w->view[k], w->buffer[k]) ||
        !same_source(x->source[k], v->buffer[k], y->source[k], w->buffer[k]))
      return false;
  return true;
}

static bool same_piece(const orr_piece *a, uint64_t from_a, const orr_piece *b,
                       uint64_t from_b) {
  return same_view(&a->view, a->buffer, &b->view, b->buffer) &&
         same_source(from_a, a->buffer, from_b, b->buffer) &&
         memcmp(a->lo, b->lo, (size_t)a->view.ndim * sizeof a->lo[0]) == 0;
}

static bool same_collective(const orr_action *x, const orr_action *y) {
  const orr_collective *c = x->collective, *d = y->collective;
  if (c->run != d->run || c->n != d->n || c->n_src != d->n_src || c->n_dst != d->n_dst ||
      c->op != d->op || c->width != d->width || c->use_comm != d->use_comm)
    return false;
  for (int k = 0; k < c->n; k++)
    if (c->part[k].device != d->part[k].device) return false;
  for (int k = 0; k < c->n_src; k++)
    if (!same_piece(&c->src[k], x->source[k], &d->src[k], y->source[k])) return false;
  for (int k = 0; k < c->n_dst; k++)
    if (!same_piece(&c->dst[k], x->source[c->n_src + k], &d->dst[k], y->source[c->n_src + k]))
      return false;
  return true;
}

static const char *name_of(const orr_action *a) {
  if (a->work) return a->work->op->name;
  return a->collective->name ? a->collective->name : "copy";
}

static void where_text(const orr_action *a, char *buf, size_t size) {
  const orr_work *w = a->work;
  if (w && w->source) snprintf(buf, size, "%s (%.200s:%d)", w->op->name, w->source, w->line);
  else snprintf(buf, size, "%s", name_of(a));
}

static bool same_action(const orr_capture *a, const orr_capture *b, int k) {
  const orr_action *x = &a->action[k], *y = &b->action[k];
  if (!x->work != !y->work || x->n_sources != y->n_sources) return false;
  return x->work ? same_work(x, y) : same_collective(x, y);
}

static bool same_leaves(const orr_capture *a, const orr_capture *b) {
  if (a->n_leaves != b->n_leaves) return false;
  for (int k = 0; k < a->n_leaves; k++) {
    const orr_leaf *l = &a->leaf[k], *m = &b->leaf[k];
    if (l->leaf != m->leaf || l->drops != m->drops || l->wants != m->wants ||
        !l->first != !m->first || !l->grad != !m->grad)
      return false;
  }
  return true;
}

static bool same_hosts(const orr_capture *a, const orr_capture *b) {
  if (a->n_hosts != b->n_hosts || a->n_steps != b->n_steps) return false;
  for (int k = 0; k < a->n_hosts; k++) {
    const orr_host_part *g = &a->host[k], *h = &b->host[k];
    if (g->kind != h->kind || g->first != h->first || g->last != h->last ||
        g->last_step != h->last_step)
      return false;
  }
  return true;
}

bool orr_capture_differs(const orr_capture *a, const orr_capture *b, char *buf, size_t size) {
  char where[300];
  int n = a->n < b->n ? a->n : b->n;
  for (int k = 0; k < n; k++) {
    if (same_action(a, b, k)) continue;
    where_text(&b->action[k], where, sizeof where);
    snprintf(buf, size, "call %d of %d, %s, is not what it was in the step before", k + 1, b->n,
             where);
    return true;
  }
  if (a->n == b->n)
    snprintf(buf, size,
             "gradients or optimizer steps are not what they were in the step before");
  else snprintf(buf, size, "the step ran %d calls, and %d in the step before", b->n, a->n);
  return a->n != b->n || !same_hosts(a, b) || !same_leaves(a, b);
}

/* ---- what left the step ---- */

bool orr_capture_made(const orr_capture *c, const orr_tensor *t) {
  return orr_tensor_buffer(t, 0)->made >> 32 == c->number;
}

bool orr_capture_wrote(const orr_capture *c, const orr_tensor *t) {
  for (int k = 0; k < c->n_written; k++)
    if (c->written[k]->storage == t->storage) return true;
  return false;
}

static void drop_leaf(orr_capture *c, int k) {
  size_t after = (size_t)(--c->n_leaves - k);
  free_leaf(&c->leaf[k]);
  memmove(&c->leaf[k], &c->leaf[k + 1], after * sizeof c->leaf[0]);
  for (int h = 0; h < c->n_hosts; h++) {
    orr_host_part *p = &c->host[h];
    if (k >= p->n_grads) continue;
    if (p->grad[k]) orr_tensor_free(p->grad[k]);
    after = (size_t)(--p->n_grads - k);
    memmove(&p->grad[k], &p->grad[k + 1], after * sizeof p->grad[0]);
  }
}

void orr_capture_forget(orr_capture *c) {
  for (int k = c->n_leaves - 1; k >= 0; k--)
    if (c->leaf[k].leaf->rc == 1) drop_leaf(c, k);
}

static bool holds(const orr_tensor *t, const orr_buffer *b) {
  for (int k = 0; t && k < t->n; k++)
    if (orr_tensor_buffer(t, k) == b) return true;
  return false;
}

static const orr_buffer *touched(const orr_action *a, int i) {
  const orr_collective *c = a->collective;
  if (a->work) return a->work->buffer[i];
  return i < c->n_src ? c->src[i].buffer : c->dst[i - c->n_src].buffer;
}

static bool is_kept(const orr_capture *c, const orr_buffer *b, orr_tensor *const *keep, int n) {
  for (int k = 0; k < n; k++)
    if (holds(keep[k], b)) return true;
  for (int k = 0; k < c->n_leaves; k++)
    if (holds(c->leaf[k].grad, b)) return true;
  for (int h = 0; h < c->n_hosts; h++)
    for (int k = 0; k < c->host[h].n_grads; k++)
      if (holds(c->host[h].grad[k], b)) return true;
  return false;
}

bool orr_capture_escaped(const orr_capture *c, orr_tensor *const *keep, int n, char *buf,
                         size_t size) {
  char where[300];
  for (int k = 0; k < c->n; k++) {
    const orr_action *a = &c->action[k];
    for (int i = 0; i < a->n_sources; i++) {
      const orr_buffer *b = touched(a, i);
      if (!b || b->made >> 32 != c->number || !b->in_use || is_kept(c, b, keep, n)) continue;
      where_text(a, where, sizeof where);
      snprintf(buf, size,
               "the step keeps a tensor that it made, in %s; return it, or write it into one "
               "that was there before",
               where);
      return true;
    }
  }
  return false;
}
