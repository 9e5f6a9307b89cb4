/* tape.c: autograd. Every recorded call is a node; an edge leads from each input to the node
 * that made it, or to the leaf that collects. Backward takes nodes by falling serial, so each
 * runs after all that used its outputs, and frees what it saved as it goes.
 *
 * Invariant: a node owns its saved tensors, never its own outputs' headers (saved outputs are
 * aliases), so there are no cycles. A saved value whose storage was written since raises.
 * To add a gradient: the op's .grad, made of orr_g* calls (tape_g.c).
 */
#include "tape.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op.h"
#include "pool.h"

orr_status (*orr_hook_run)(int hooks, orr_tensor **g) = NULL;

static bool grad_mode = true;
static uint64_t node_serials = 0;

enum { SMALL_NODE = 3 }; /* inputs of a node that is recycled */
static orr_pool small_nodes;

bool orr_grad_mode(void) { return grad_mode; }

bool orr_set_grad_mode(bool on) {
  bool was = grad_mode;
  if (on && !was) orr_sequence_release(); /* nothing recorded keeps what was gathered */
  grad_mode = on;
  return was;
}

/* ---- nodes ---- */

static void node_hold(orr_node *node) { node->rc++; }

static orr_status node_new(const orr_op *op, int n_in, int n_out, orr_node **out) {
  size_t n = n_in <= SMALL_NODE ? SMALL_NODE : (size_t)n_in;
  size_t bytes = sizeof(orr_node) + n * (sizeof(orr_edge) + 2 * sizeof(orr_tensor *) +
                                         sizeof(orr_meta) + sizeof(uint32_t) + sizeof(bool));
  orr_node *node = n_in <= SMALL_NODE ? orr_pool_get(&small_nodes, bytes) : malloc(bytes);
  if (!node) return orr_fail(ORR_EMEM, "out of host memory for the tape");
  memset(node, 0, offsetof(orr_node, args));
  orr_node_release = orr_node_free;
  orr_node_hold = node_hold;
  node->rc = 1;
  node->serial = ++node_serials;
  node->op = op;
  node->n_in = n_in;
  node->n_out = n_out;
  node->edge = (orr_edge *)(node + 1);
  node->x = (orr_tensor **)(node->edge + n);
  node->x_layout = (orr_layout **)(node->x + n);
  node->x_meta = (orr_meta *)(node->x_layout + n);
  node->x_version = (uint32_t *)(node->x_meta + n);
  node->needs = (bool *)(node->x_version + n);
  for (int k = 0; k < n_in; k++) {
    node->edge[k] = (orr_edge){NULL, 0, NULL};
    node->x[k] = NULL;
    node->x_layout[k] = NULL;
    node->needs[k] = false;
  }
  *out = node;
  return ORR_OK;
}

static void drop(orr_tensor **t) {
  if (*t) orr_tensor_free(*t);
  *t = NULL;
}

void orr_node_drop_saved(orr_node *node) {
  for (int k = 0; k < node->n_in; k++) {
    orr_sequence_forget(node->x[k]);
    drop(&node->x[k]);
  }
  for (int k = 0; k < node->n_out; k++) drop(&node->y[k]);
  if (node->custom.release) node->custom.release(node->custom.state);
  node->custom.release = NULL;
  node->spent = true;
}

/* Chains can be as long as a script's loop, so nodes that end are freed from a list, not by
 * recursion. */
void orr_node_free(orr_node *take_node) {
  static orr_node *ending = NULL;
  static bool busy = false;
  if (--take_node->rc) return;
  take_node->next = ending;
  ending = take_node;
  if (busy) return;
  busy = true;
  while (ending) {
    orr_node *node = ending;
    ending = node->next;
    orr_node_drop_saved(node);
    for (int k = 0; k < node->n_out; k++) drop(&node->gy[k]);
    for (int k = 0; k < node->n_in; k++) {
      if (node->edge[k].node) orr_node_free(node->edge[k].node);
      drop(&node->edge[k].leaf);
      if (node->x_layout[k]) orr_layout_free(node->x_layout[k]);
    }
    for (int k = 0; k < node->n_out; k++)
      if (node->hooks[k] && orr_hook_release) orr_hook_release(node->hooks[k]);
    if (node->n_in <= SMALL_NODE) orr_pool_put(&small_nodes, node);
    else free(node);
  }
  busy = false;
}

static void set_edge(orr_node *node, int k, orr_tensor *x) {
  node->x_meta[k] = x->meta;
  node->x_layout[k] = orr_layout_ref(x->layout);
  node->needs[k] = x->requires_grad;
  if (!x->requires_grad) return;
  if (x->node) {
    node->edge[k].node = x->node;
    node->edge[k].out = x->out_index;
    x->node->rc++;
  } else {
    node->edge[k].leaf = orr_tensor_ref(x);
  }
}

static bool any_requires(orr_tensor *const *x, int n) {
  for (int k = 0; k < n; k++)
    if (x[k] && x[k]->requires_grad) return true;
  return false;
}

/* The version of t's value: of the parameter's, where it was gathered. */
uint32_t orr_saved_version(const orr_tensor *t) {
  return t->storage->origin ? t->storage->origin->storage->version : t->storage->version;
}

/* What was gathered is not kept: its header is, and the value is gathered again (op_zero.c). */
static orr_status save_input(orr_node *node, int k, orr_tensor *x) {
  if (x->storage->origin) return orr_tensor_ghost(x, &node->x[k]);
  node->x[k] = orr_tensor_ref(x);
  return ORR_OK;
}

static orr_status save(orr_node *node, const orr_call *c) {
  unsigned save = c->op->save;
  for (int k = 0; k < c->n_in; k++) {
    if (!c->in[k]) continue;
    node->x_version[k] = orr_saved_version(c->in[k]) - (k < c->n_written ? 1 : 0);
    bool wanted =
        c->op->flags & ORR_OP_LIST ? save & ORR_SAVE_IN(0) : k < 16 && save & ORR_SAVE_IN(k);
    if (wanted || (k == 0 && c->op->flags & ORR_OP_VIEW))
      ORR_TRY(save_input(node, k, c->in[k]));
  }
  for (int k = 0; k < c->n_out; k++) {
    if (!(save & ORR_SAVE_OUT(k))) continue;
    ORR_TRY(orr_tensor_alias(c->out[k], &node->y[k]));
    node->y_version[k] = c->out[k]->storage->version;
  }
  return ORR_OK;
}

/* out becomes an output of the node; an in-place target leaves its old node to the edge. */
static void own_output(orr_node *node, int k, orr_tensor *out) {
  if (out->node) orr_node_free(out->node);
  out->node = node;
  node->rc++;
  out->out_index = k;
  out->requires_grad = true;
}

orr_status orr_tape_record(const orr_call *c, orr_tensor *const *inputs) {
  if (!grad_mode || c->op->flags & ORR_OP_NO_GRAD || !any_requires(inputs, c->n_in))
    return ORR_OK;
  bool differentiable = false;
  for (int k = 0; k < c->n_out; k++)
    differentiable = differentiable || orr_dtype_is_float(c->out[k]->meta.dtype);
  if (!differentiable) return ORR_OK;
  orr_node *node;
  ORR_TRY(node_new(c->op, c->n_in, c->n_out, &node));
  if (c->has_args) node->args = c->args;
  node->mesh = c->out[0]->layout->mesh;
  if (orr_where_hook && orr_anomaly_watching()) orr_where_hook(&node->source, &node->line);
  for (int k = 0; k < c->n_in; k++)
    if (inputs[k]) set_edge(node, k, inputs[k]);
  orr_status status = save(node, c);
  for (int k = 0; k < c->n_out && !status; k++)
    if (orr_dtype_is_float(c->out[k]->meta.dtype)) own_output(node, k, c->out[k]);
  orr_node_free(node);
  return status;
}

orr_status orr_tape_custom(orr_tensor *const *in, int n_in, orr_tensor *const *out, int n_out,
                           const orr_custom *custom) {
  static const orr_op op = {.name = "custom"};
  orr_node *node;
  if (!grad_mode || !any_requires(in, n_in)) {
    custom->release(custom->state);
    return ORR_OK;
  }
  if (n_out > ORR_MAX_OUT) {
    custom->release(custom->state);
    return orr_fail(ORR_EARG, "custom: forward returned %d tensors, and at most %d are allowed",
                    n_out, ORR_MAX_OUT);
  }
  orr_status status = node_new(&op, n_in, n_out, &node);
  if (status) {
    custom->release(custom->state);
    return status;
  }
  node->custom = *custom;
  node->mesh = out[0]->layout->mesh;
  for (int k = 0; k < n_in; k++)
    if (in[k]) set_edge(node, k, in[k]);
  for (int k = 0; k < n_out; k++) own_output(node, k, out[k]);
  orr_node_free(node);
  return ORR_OK;
}

orr_status orr_tape_check_in_place(const orr_op *op, orr_tensor *const *in, int n_in) {
  orr_tensor *t = in[0];
  if (!grad_mode || op->flags & ORR_OP_NO_GRAD || !any_requires(in, n_in)) return ORR_OK;
  if (t->requires_grad && !t->node)
    return orr_fail(ORR_EARG,
                    "its target is a leaf that requires grad; write it inside "
                    "orrery.no_grad(function() ... end)");
  if (t->is_view)
    return orr_fail(ORR_EARG,
                    "its target is a view, whose base would not learn of the gradient; "
                    "use the form without _, or orrery.no_grad");
  return ORR_OK;
}

void orr_tape_set_hooks(orr_tensor *t, int hooks) {
  if (t->node) t->node->hooks[t->out_index] = hooks;
  else t->hooks = hooks;
}

int orr_tape_hooks(const orr_tensor *t) {
  return t->node ? t->node->hooks[t->out_index] : t->hooks;
}
