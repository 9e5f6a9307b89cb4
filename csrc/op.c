/* op.c: the list of ops, and the only path that every op takes: check, infer, place,
 * redistribute, allocate, run, record.
 *
 * Invariant: nothing changes before every check has passed; a call that fails leaves no tensor
 * behind. A single-device call skips placing. What runs, runs through orr_run_call.
 * To add an op: write it in the file of its family (op_*.c), whose NULL-terminated list stands
 * in `families` below. docs/add-an-op.md shows one end to end.
 */
#include "op.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_onednn.h"
#include "interrupt.h"
#include "op_capture.h"
#include "op_record.h"

void (*orr_where_hook)(const char **source, int *line) = NULL;
const char *(*orr_scope_hook)(void) = NULL;

static const orr_op *const *const families[] = {
    orr_ops_unary,   orr_ops_binary, orr_ops_copy,    orr_ops_create, orr_ops_shape,
    orr_ops_reduce,  orr_ops_matmul, orr_ops_softmax, orr_ops_index,  orr_ops_conv,
    orr_ops_pool,    orr_ops_norm,   orr_ops_loss,    orr_ops_optim,  orr_ops_random,
    orr_ops_moments, orr_ops_scan,   orr_ops_sort,    orr_ops_move,   orr_ops_attention,
};

int orr_op_count(void) {
  int n = 0;
  for (size_t f = 0; f < sizeof families / sizeof *families; f++)
    for (const orr_op *const *op = families[f]; *op; op++) n++;
  return n;
}

const orr_op *orr_op_at(int k) {
  for (size_t f = 0; f < sizeof families / sizeof *families; f++)
    for (const orr_op *const *op = families[f]; *op; op++)
      if (k-- == 0) return *op;
  return NULL;
}

const orr_op *orr_op_find(const char *name) {
  for (int k = 0;; k++) {
    const orr_op *op = orr_op_at(k);
    if (!op || strcmp(op->name, name) == 0) return op;
  }
}

char *orr_mesh_text(const orr_mesh *mesh, char *buf, size_t size) {
  size_t used = 0;
  buf[0] = 0;
  for (int k = 0; k < mesh->n && used + 1 < size; k++)
    used += (size_t)snprintf(buf + used, size - used, "%s%s", k ? "," : "",
                             orr_device_at(mesh->device[k])->name);
  return buf;
}

/* "op: message; got (2, 3) f32 on cpu, ..." */
static orr_status explain(const orr_call *c, orr_status status) {
  char got[900] = "";
  size_t used = 0;
  if (status != ORR_EARG) return orr_fail_in(status, "%s", c->op->name);
  for (int k = 0; k < c->n_in && k < 4 && used < sizeof got - 300; k++) {
    char text[300];
    if (!c->in[k]) continue;
    used += (size_t)snprintf(got + used, sizeof got - used, "%s%s", used ? ", " : "",
                             orr_tensor_text(c->in[k], text, sizeof text));
  }
  char message[1024];
  snprintf(message, sizeof message, "%.1000s", orr_last_error());
  size_t n = strlen(c->op->name);
  bool named = strncmp(message, c->op->name, n) == 0 && message[n] == ':';
  return orr_fail(status, "%s%s%s%s%s", named ? "" : c->op->name, named ? "" : ": ", message,
                  used ? "; got " : "", got);
}

orr_status orr_call_cast(orr_call *c, int k, orr_dtype dtype) {
  if (c->in[k]->meta.dtype == dtype) return ORR_OK;
  orr_tensor *cast;
  ORR_TRY(orr_cast(c->in[k], dtype, &cast));
  c->in[k] = c->temp[c->n_temp++] = cast;
  return ORR_OK;
}

/* The mesh on which the call runs: that of the inputs; a host tensor joins any. */
static orr_status find_mesh(const orr_call *c, const orr_mesh **out) {
  const orr_mesh *mesh = NULL, *host = orr_mesh_single(0);
  for (int k = 0; k < c->n_in; k++) {
    const orr_mesh *m = c->in[k] ? c->in[k]->layout->mesh : NULL;
    if (!m || m == host || m == mesh) continue;
    const orr_mesh *later = mesh ? orr_stages_later(mesh, m) : m;
    if (!later) {
      char a[128], b[128];
      return orr_fail(ORR_EARG,
                      "its tensors stand on different devices, %s and %s; move one with "
                      "x:to(device), or place both by one plan",
                      orr_mesh_text(mesh, a, sizeof a), orr_mesh_text(m, b, sizeof b));
    }
    mesh = later;
  }
  if (!mesh) mesh = host;
  *out = mesh;
  for (int k = 0; k < c->n_in && mesh != host; k++) {
    if (!c->in[k] || c->in[k]->layout->mesh != host || !c->in[k]->requires_grad) continue;
    char a[128];
    return orr_fail(ORR_EARG,
                    "a tensor on cpu that requires grad meets one on %s; place it by the same "
                    "plan, or move it with x:to(device)",
                    orr_mesh_text(mesh, a, sizeof a));
  }
  return ORR_OK;
}

/* Moves input k to `layout`, recording the move when its gradient is wanted. */
static orr_status move_input(orr_call *c, int k, orr_layout *layout, orr_tensor **owned) {
  orr_tensor *t = c->in[k];
  if (c->in_place && k == 0)
    return orr_fail(ORR_EARG, "the in-place write would land on a redistributed copy");
  orr_tensor *before = *owned, *now;
  ORR_TRY(orr_grad_mode() && t->requires_grad ? orr_redistribute_op(t, layout, &now)
                                              : orr_redistribute(t, layout, &now));
  if (before) orr_tensor_free(before); /* the move to the stage, where placing moves again */
  c->in[k] = *owned = now;
  return ORR_OK;
}

/* Brings tensors of earlier stages to the mesh of the call, split there as they are. */
static orr_status join_stage(orr_call *c, const orr_mesh *mesh, orr_tensor **moved) {
  const orr_mesh *host = orr_mesh_single(0);
  for (int k = 0; k < c->n_in; k++) {
    const orr_tensor *t = c->in[k];
    if (!t || t->layout->mesh == mesh || t->layout->mesh == host) continue;
    orr_layout *layout;
    ORR_TRY(orr_stages_layout(t, mesh, &layout));
    orr_status status = move_input(c, k, layout, &moved[k]);
    orr_layout_free(layout);
    if (status) return status;
  }
  return ORR_OK;
}

static orr_status make_view(orr_call *c, orr_layout *layout) {
  orr_tensor *y;
  ORR_TRY(orr_tensor_alias_as(c->in[0], &c->out_meta[0], layout, &y));
  for (int r = 0; r < y->n; r++) {
    orr_layout_local(layout, r, y->meta.ndim, y->meta.shape, y->shard[r].shape, NULL);
    orr_status status = c->op->view(c, r, &y->shard[r]);
    if (status) {
      orr_tensor_free(y);
      return status;
    }
  }
  c->out[0] = y;
  return ORR_OK;
}

/* Strides of a new (N, C, H, W) tensor: C fastest, then W, H, N. */
static void make_channels_last(orr_tensor *t) {
  for (int r = 0; r < t->n; r++) {
    orr_shard *s = &t->shard[r];
    int64_t c = s->shape[1], h = s->shape[2], w = s->shape[3];
    s->stride[0] = h * w * c;
    s->stride[1] = 1;
    s->stride[2] = w * c;
    s->stride[3] = c;
  }
}

static orr_status make_outputs(orr_call *c, orr_layout *const *layout) {
  if (c->op->flags & ORR_OP_VIEW) return make_view(c, layout[0]);
  for (int k = 0; k < c->n_out; k++) {
    if (k == 0 && c->in_place) {
      c->out[0] = orr_tensor_ref(c->in[0]);
      continue;
    }
    const orr_tensor *like = c->op->flags & ORR_OP_LIKE_IN && c->n_in ? c->in[0] : NULL;
    ORR_TRY(orr_tensor_new(&c->out_meta[k], layout[k], like, &c->out[k]));
    orr_dtype dtype = c->out_meta[k].dtype;
    if (c->op->flags & ORR_OP_CHANNELS_LAST && c->out_meta[k].ndim == 4 &&
        (dtype == ORR_F32 || dtype == ORR_BF16) && orr_onednn_available())
      make_channels_last(c->out[k]);
  }
  return ORR_OK;
}

/* Parameters that rest as shards are gathered. Writes and the lists of optimizers and norms see
 * them as they rest. */
static orr_status gather_inputs(orr_call *c, orr_tensor **moved) {
  enum { AT_REST = ORR_OP_LIST | ORR_OP_NO_GRAD };
  if ((c->op->flags & AT_REST) == AT_REST) return ORR_OK;
  for (int k = c->n_written; k < c->n_in; k++) {
    if (!c->in[k] || !c->in[k]->use_layout) continue;
    ORR_TRY(orr_zero_gather(c->in[k], &moved[k]));
    c->in[k] = moved[k];
  }
  return ORR_OK;
}

/* Place, redistribute, allocate, run. moved[k]: owned copies that placing made. */
static orr_status place_and_run(orr_call *c, orr_tensor **moved) {
  orr_layout *layout[ORR_MAX_OUT] = {NULL};
  const orr_mesh *mesh;
  orr_status status = ORR_OK;
  ORR_TRY(gather_inputs(c, moved));
  ORR_TRY(find_mesh(c, &mesh));
  ORR_TRY(join_stage(c, mesh, moved));
  if (mesh->n_axes == 0) {
    orr_layout *single = orr_layout_single(mesh->device[0]);
    for (int k = 0; k < c->n_out; k++) layout[k] = single;
    for (int k = 0; k < c->n_in && !status; k++)
      if (c->in[k] && c->in[k]->layout->mesh != mesh)
        status = move_input(c, k, single, &moved[k]);
    if (!status) status = make_outputs(c, layout);
  } else {
    orr_layout *small[8] = {NULL};
    orr_layout **want = c->n_in <= 8 ? small : calloc((size_t)c->n_in, sizeof(orr_layout *));
    if (!want) return orr_fail(ORR_EMEM, "out of host memory");
    status = orr_place_call(c, mesh, want, layout);
    for (int k = 0; k < c->n_in; k++) {
      if (!want[k]) continue;
      if (!status) status = move_input(c, k, want[k], &moved[k]);
      orr_layout_free(want[k]);
    }
    if (want != small) free(want);
    if (!status) status = make_outputs(c, layout);
    for (int k = 0; k < c->n_out; k++) orr_layout_free(layout[k]);
  }
  if (!status && !(c->op->flags & ORR_OP_VIEW)) status = orr_run_call(c);
  return status;
}

/* ---- autocast: products in a narrow type, what is delicate in f32 (Micikevicius et al. 2018,
 * "Mixed Precision Training", section 3) ---- */

static int autocast = -1;

int orr_autocast(void) { return autocast; }

int orr_set_autocast(int dtype) {
  int was = autocast;
  autocast = dtype;
  return was;
}

static orr_status cast_inputs(orr_call *c) {
  bool narrow = c->op->flags & ORR_OP_NARROW, wide = c->op->flags & ORR_OP_WIDE;
  for (int k = 0; k < c->n_in && (narrow || wide); k++) {
    orr_dtype dtype = c->in[k] ? c->in[k]->meta.dtype : ORR_BOOL;
    bool half = dtype == ORR_F16 || dtype == ORR_BF16;
    if (narrow && (half || dtype == ORR_F32)) ORR_TRY(orr_call_cast(c, k, (orr_dtype)autocast));
    if (wide && half) ORR_TRY(orr_call_cast(c, k, ORR_F32));
  }
  return ORR_OK;
}

static orr_status infer(orr_call *c) {
  if (c->n_in < c->op->n_in && !(c->op->flags & ORR_OP_LIST))
    return orr_fail(ORR_EARG, "needs %d tensors", c->op->n_in);
  if (c->op->infer) return c->op->infer(c);
  return orr_infer_dims(c);
}

static orr_status check_in_place(orr_call *c, const orr_meta *was) {
  const orr_meta *now = c->n_out ? &c->out_meta[0] : was;
  if (c->in[0]->meta.dtype != was->dtype || now->dtype != was->dtype ||
      now->ndim != was->ndim ||
      memcmp(now->shape, was->shape, (size_t)now->ndim * sizeof now->shape[0]) != 0)
    return orr_fail(ORR_EARG,
                    "an in-place write cannot change the shape or dtype of its target");
  if (c->in[0]->storage->origin)
    return orr_fail(ORR_EARG,
                    "its target was gathered from a parameter whose shards rest on "
                    "several devices (zero=3); write the parameter itself");
  return orr_tape_check_in_place(c->op, c->in, c->n_in);
}

static void release(orr_call *c, orr_tensor **moved, orr_status status) {
  for (int k = 0; k < c->n_in; k++)
    if (moved[k]) orr_tensor_free(moved[k]);
  for (int k = 0; k < c->n_temp; k++) orr_tensor_free(c->temp[k]);
  if (!status) return;
  orr_sequence_release();
  for (int k = 0; k < c->n_out; k++)
    if (c->out[k]) orr_tensor_free(c->out[k]);
}

/* A gradient goes back to another stage by the recorded move, to be worked on there; a move on
 * the mesh of the call is none of the tape's. */
static void cross_stages(const orr_call *c, orr_tensor **given) {
  for (int k = 0; k < c->n_in; k++)
    if (given[k] && given[k]->requires_grad && given[k]->layout->mesh != c->in[k]->layout->mesh)
      given[k] = c->in[k];
}

orr_status orr_dispatch(const orr_op *op, orr_tensor *const *in, int n_in, const orr_args *args,
                        bool in_place, orr_tensor **out) {
  if (orr_interrupt_pending()) return orr_fail(ORR_EINTERRUPT, "interrupted");
  if (op->compose) return op->compose(op, in, n_in, args, out);
  enum { SMALL = 8 };
  orr_tensor *small[3 * SMALL];
  orr_tensor **room = small;
  if (n_in > SMALL && !(room = malloc(3 * (size_t)n_in * sizeof *room)))
    return orr_fail(ORR_EMEM, "out of host memory for a call of %d tensors", n_in);
  orr_tensor **given = room + n_in, **moved = room + 2 * n_in;
  orr_call c;
  c.op = op;
  c.n_in = n_in;
  c.n_out = op->n_out;
  c.in = room;
  c.n_temp = 0;
  c.in_place = in_place || op->flags & ORR_OP_ALWAYS_IN_PLACE;
  c.n_written = c.in_place ? 1 : 0;
  c.in_label = NULL;
  c.has_args = args != NULL;
  if (args) c.args = *args;
  else if (orr_capturing()) memset(&c.args, 0, sizeof c.args); /* recordings are compared */
  for (int k = 0; k < n_in; k++) {
    c.in[k] = in[k];
    moved[k] = NULL;
  }
  for (int k = 0; k < op->n_out; k++) c.out[k] = NULL;
  orr_status status = autocast < 0 || c.in_place ? ORR_OK : cast_inputs(&c);
  if (!status) status = infer(&c);
  if (!status && n_in > 1) status = orr_sequence_gather(&c);
  if (!status && c.in_place) status = check_in_place(&c, &in[0]->meta);
  for (int k = 0; k < n_in; k++) given[k] = c.in[k];
  if (!status) status = place_and_run(&c, moved);
  if (!status && orr_recording()) status = orr_record_call(&c, given);
  if (!status) cross_stages(&c, given);
  if (!status) status = orr_tape_record(&c, given);
  if (!status && op->flags & ORR_OP_LAYER) status = orr_sequence_end(&c.out[0]);
  if (status) status = explain(&c, status);
  release(&c, moved, status);
  if (room != small) free(room);
  if (!status)
    for (int k = 0; k < op->n_out; k++) out[k] = c.out[k];
  return status;
}

orr_status orr_create(const orr_op *op, const orr_meta *meta, orr_layout *layout,
                      const orr_args *args, orr_tensor **out) {
  orr_call c;
  memset(&c, 0, sizeof c);
  c.op = op;
  c.n_out = 1;
  c.has_args = args != NULL;
  if (args) c.args = *args;
  c.out_meta[0] = *meta;
  orr_status status = orr_tensor_new(meta, layout, NULL, &c.out[0]);
  if (!status) status = orr_run_call(&c);
  if (status) {
    if (c.out[0]) orr_tensor_free(c.out[0]);
    return orr_fail_in(status, "%s", op->name);
  }
  *out = c.out[0];
  return ORR_OK;
}
