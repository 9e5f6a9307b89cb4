/* op_place.c: placement. For every mesh axis it lists the rows under which the op needs no
 * other device (one a shardable label, replicate, partial rows of linear ops, the op's own),
 * prices the moves that each row asks of the inputs, and takes the cheapest; ties go to the
 * earlier row.
 *
 * Invariant: the choice depends on shapes and layouts alone; axes are chosen in mesh order; a
 * label sharded on one axis is not sharded again on another.
 * To add a row for one op: its `rule`.
 */
#include <stdlib.h>
#include <string.h>

#include "op.h"

enum { MAX_LABEL = 32, MAX_ROWS = MAX_LABEL + 32 };

typedef struct chooser {
  orr_call *c;
  const orr_mesh *mesh;
  int axis;
  uint32_t seen;    /* labels of the inputs */
  uint32_t used;    /* labels sharded on an earlier axis */
  double best_cost; /* < 0: none yet */
  int best_label;
  orr_row best, row;
} chooser;

static const orr_place replicate = {.kind = ORR_REPLICATE};

static orr_place partial(orr_partial_kind op) {
  return (orr_place){.kind = ORR_PARTIAL, .op = op};
}

static bool is_host(const chooser *s, int k) { return s->c->in[k]->layout->mesh != s->mesh; }

/* The present placement of input k on the axis; a host tensor counts as replicated. */
static orr_place present(const chooser *s, int k) {
  return is_host(s, k) ? replicate : s->c->in[k]->layout->axis[s->axis];
}

/* A Partial value that is scattered is gathered again before long: it costs what reducing it
 * does. Parameters rest where the plan put them: one moves only where every row moves one. */
static double move_cost(const chooser *s, int k, const orr_place *to) {
  static const double of_parameter = 1e6;
  const orr_tensor *t = s->c->in[k];
  bool scatters = t->layout->axis[s->axis].kind == ORR_PARTIAL && to->kind == ORR_SHARD;
  double cost = orr_redistribute_cost(t, s->axis, scatters ? &replicate : to);
  return t->reducer || t->storage->origin ? of_parameter * cost : cost;
}

static double row_cost(const chooser *s, const orr_row *row) {
  double cost = 0;
  for (int k = 0; k < s->c->n_in; k++)
    if (s->c->in[k] && !is_host(s, k)) cost += move_cost(s, k, &row->in[k]);
  return cost;
}

static bool keeps_target(const chooser *s, const orr_row *row) {
  orr_place now = present(s, 0), *to = &row->in[0];
  if (s->c->n_out == 0) return orr_redistribute_cost(s->c->in[0], s->axis, to) == 0;
  if (now.kind != to->kind) return false;
  if (now.kind == ORR_PARTIAL) return now.op == to->op && row->out[0].kind == ORR_PARTIAL;
  if (now.kind == ORR_REPLICATE) return row->out[0].kind == ORR_REPLICATE;
  return now.dim == to->dim && row->out[0].kind == ORR_SHARD && row->out[0].dim == to->dim &&
         orr_redistribute_cost(s->c->in[0], s->axis, to) == 0;
}

static void copy_row(const orr_call *c, orr_row *to, const orr_row *from) {
  memcpy(to->in, from->in, (size_t)c->n_in * sizeof *to->in);
  memcpy(to->out, from->out, sizeof to->out);
}

static void offer(chooser *s, const orr_row *row, int label) {
  if (s->c->in_place && !keeps_target(s, row)) return;
  double cost = row_cost(s, row);
  if (s->best_cost >= 0 && cost >= s->best_cost) return;
  s->best_cost = cost;
  s->best_label = label;
  copy_row(s->c, &s->best, row);
}

static void offer_uniform(chooser *s, orr_place in, orr_place out) {
  for (int k = 0; k < s->c->n_in; k++) s->row.in[k] = in;
  for (int k = 0; k < s->c->n_out; k++) s->row.out[k] = out;
  offer(s, &s->row, 0);
}

/* Whether axis 0 of input k's layout shards `dim` too: its bounds then hang on the
 * coordinate. */
static bool nested(const chooser *s, int k, int dim) {
  if (s->axis == 0) return false;
  const orr_place *outer = &s->c->in[k]->layout->axis[0];
  return outer->kind == ORR_SHARD && outer->dim == dim;
}

/* The bounds of the largest input that is sharded by the label now; NULL: balanced. */
static int64_t *label_bounds(const chooser *s, int label) {
  int64_t *bounds = NULL, largest = -1;
  for (int k = 0; k < s->c->n_in; k++) {
    const orr_tensor *t = s->c->in[k];
    if (!t || is_host(s, k)) continue;
    orr_place p = present(s, k);
    if (p.kind != ORR_SHARD || s->c->in_label[k][p.dim] != label || nested(s, k, p.dim))
      continue;
    if (orr_tensor_numel(t) <= largest) continue;
    largest = orr_tensor_numel(t);
    bounds = p.bounds;
  }
  return bounds;
}

static int label_dim(const uint8_t *labels, int ndim, int label) {
  for (int d = 0; d < ndim; d++)
    if (labels[d] == label) return d;
  return -1;
}

static void offer_label(chooser *s, int label) {
  orr_call *c = s->c;
  orr_place shard = {.kind = ORR_SHARD, .bounds = label_bounds(s, label)};
  for (int k = 0; k < c->n_in; k++) {
    shard.dim = c->in[k] ? label_dim(c->in_label[k], c->in[k]->meta.ndim, label) : -1;
    s->row.in[k] = shard.dim < 0 ? replicate : shard;
  }
  for (int k = 0; k < c->n_out; k++) {
    shard.dim = label_dim(c->out_label[k], c->out_meta[k].ndim, label);
    s->row.out[k] = shard.dim < 0 ? partial(c->op->partial) : shard;
  }
  offer(s, &s->row, label);
}

/* Rows in which Partial(sum) passes through. */
static void offer_linear(chooser *s) {
  orr_call *c = s->c;
  if (c->op->flags & ORR_OP_LINEAR) {
    /* Added once: a small addend that is not Partial stands on the first device alone. */
    for (int k = 0; k < c->n_in; k++) {
      bool small =
          orr_tensor_numel(c->in[k]) < orr_numel(c->out_meta[0].ndim, c->out_meta[0].shape);
      if (present(s, k).kind != ORR_PARTIAL && !small) return;
    }
    offer_uniform(s, partial(ORR_SUM), partial(ORR_SUM));
  } else if (c->op->flags & ORR_OP_MULTILINEAR) {
    for (int k = 0; k < c->n_in; k++) {
      if (!c->in[k] || present(s, k).kind != ORR_PARTIAL) continue;
      for (int j = 0; j < c->n_in; j++) s->row.in[j] = j == k ? partial(ORR_SUM) : replicate;
      for (int j = 0; j < c->n_out; j++) s->row.out[j] = partial(ORR_SUM);
      offer(s, &s->row, 0);
    }
  }
}

/* Rows of the op's own; false: they stand alone. */
static bool offer_rule(chooser *s) {
  enum { MAX_RULE = 16 };
  orr_row rows[MAX_RULE];
  bool only = true;
  orr_place *in = calloc((size_t)s->c->n_in * MAX_RULE, sizeof *in);
  if (!in) return true;
  for (int k = 0; k < MAX_RULE; k++) rows[k].in = in + k * s->c->n_in;
  int n = s->c->op->rule(s->c, s->axis, rows, MAX_RULE, &only);
  for (int k = 0; k < n; k++) offer(s, &rows[k], 0);
  free(in);
  return !only;
}

static orr_status choose(chooser *s) {
  s->best_cost = -1;
  bool rest = s->c->op->rule ? offer_rule(s) : true;
  if (rest) {
    offer_uniform(s, replicate, replicate);
    offer_linear(s);
    for (int label = 1; label < MAX_LABEL; label++)
      if ((s->seen & ~s->used) >> label & 1) offer_label(s, label);
  }
  if (s->best_cost < 0)
    return orr_fail(ORR_EARG,
                    "an in-place write would land on a redistributed copy of its "
                    "target; use the form without _");
  if (s->best_label) s->used |= 1u << s->best_label;
  return ORR_OK;
}

/* Bounds of axis 1 hang on axis 0 where both shard one dim: those of t as it is fit while axis
 * 0 stays; bounds that a row took from elsewhere do not, and the split is balanced instead. */
static void drop_stale_bounds(const orr_tensor *t, orr_place *in) {
  const orr_place *now = t->layout->axis;
  if (t->layout->mesh->n_axes < 2 || in[1].kind != ORR_SHARD) return;
  bool was = now[0].kind == ORR_SHARD && now[1].kind == ORR_SHARD && now[0].dim == now[1].dim;
  bool own = was && in[1].bounds == now[1].bounds;
  bool stays = in[0].kind == ORR_SHARD && in[0].bounds == now[0].bounds;
  bool nests = in[0].kind == ORR_SHARD && in[0].dim == in[1].dim;
  if (own ? !stays : nests) in[1].bounds = NULL;
}

/* The bounds that out's shard will have must live on: they are copied by orr_layout_new. */
static orr_status settle(orr_call *c, const orr_mesh *mesh, orr_place (*in)[ORR_MAX_AXES],
                         orr_place (*out)[ORR_MAX_AXES], orr_layout **want,
                         orr_layout **out_layout) {
  for (int k = 0; k < c->n_in; k++) {
    const orr_tensor *t = c->in[k];
    if (!t) continue;
    drop_stale_bounds(t, in[k]);
    ORR_TRY(orr_layout_new(mesh, in[k], t->meta.ndim, t->meta.shape, &want[k]));
    if (!orr_layout_equal(want[k], t->layout)) continue;
    orr_layout_free(want[k]);
    want[k] = NULL;
  }
  for (int k = 0; k < c->n_out; k++)
    ORR_TRY(orr_layout_new(mesh, out[k], c->out_meta[k].ndim, c->out_meta[k].shape,
                           &out_layout[k]));
  return ORR_OK;
}

/* Sets the call's labels; gives the set of those that inputs carry. */
static uint32_t label(orr_call *c) {
  uint32_t seen = 0;
  if (c->op->label) c->op->label(c);
  else if (c->op->dims) orr_label_dims(c);
  for (int k = 0; k < c->n_in; k++)
    for (int d = 0; c->in[k] && d < c->in[k]->meta.ndim; d++) seen |= 1u << c->in_label[k][d];
  return seen & ~(1u << ORR_WHOLE);
}

static orr_status place(orr_call *c, const orr_mesh *mesh, orr_layout **want,
                        orr_layout **out_layout) {
  size_t n = (size_t)c->n_in + 1; /* never zero */
  size_t places = n * (sizeof(orr_place) * (2 + ORR_MAX_AXES));
  char *room = calloc(1, places + n * sizeof *c->in_label);
  if (!room) return orr_fail(ORR_EMEM, "out of host memory");
  chooser s = {.c = c, .mesh = mesh};
  s.best.in = (orr_place *)room;
  s.row.in = s.best.in + n;
  orr_place(*in)[ORR_MAX_AXES] = (void *)(s.row.in + n);
  orr_place out[ORR_MAX_OUT][ORR_MAX_AXES];
  c->in_label = (void *)(room + places);
  memset(c->out_label, 0, sizeof c->out_label);
  s.seen = label(c);
  orr_status status = ORR_OK;
  for (s.axis = 0; s.axis < mesh->n_axes && !status; s.axis++) {
    status = choose(&s);
    for (int k = 0; k < c->n_in; k++) in[k][s.axis] = s.best.in[k];
    for (int k = 0; k < c->n_out; k++) out[k][s.axis] = s.best.out[k];
  }
  if (!status) status = settle(c, mesh, in, out, want, out_layout);
  free(room);
  c->in_label = NULL;
  return status;
}

/* The target of an in-place write becomes its reduced self, where nobody else looks at its
 * memory: on one device the write is legal, so it is under a plan. False: it stays as it
 * was. */
static bool reduce_target(const orr_call *c) {
  orr_tensor *t = c->in[0], *whole;
  const orr_layout *now = t->layout;
  if (!orr_layout_is_partial(now) || t->is_view || t->storage->rc > 1) return false;
  orr_place to[ORR_MAX_AXES];
  for (int a = 0; a < now->mesh->n_axes; a++)
    to[a] = now->axis[a].kind == ORR_PARTIAL ? replicate : now->axis[a];
  orr_layout *layout;
  uint32_t version = t->storage->version;
  if (orr_layout_new(now->mesh, to, t->meta.ndim, t->meta.shape, &layout)) return false;
  orr_status status = orr_redistribute(t, layout, &whole);
  orr_layout_free(layout);
  if (status) return false;
  if (whole->storage == t->storage) {
    orr_tensor_free(whole);
    return false;
  }
  orr_tensor_adopt(t, whole);
  t->storage->version = version; /* what saved t still sees whether it is written */
  return true;
}

orr_status orr_place_call(orr_call *c, const orr_mesh *mesh, orr_layout **want,
                          orr_layout **out_layout) {
  orr_status status = place(c, mesh, want, out_layout);
  if (status == ORR_EARG && c->in_place && reduce_target(c))
    status = place(c, mesh, want, out_layout);
  return status;
}
