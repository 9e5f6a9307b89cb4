/* tape_backward.c: backward: a heap of nodes by falling serial, gradients added where paths
 * meet.
 *
 * Invariant: nothing is added to a leaf that was not asked for; when a formula fails, pending
 * gradients are dropped and leaves keep what they had. Leaves with a reducer hand their
 * gradients to it; the others get theirs under their own layout.
 * To add what happens when a leaf's gradient is ready: deliver_leaf.
 */
#include <stdlib.h>
#include <string.h>

#include "../kernels/elementwise.h"
#include "op.h"
#include "op_capture.h"
#include "tape.h"

enum { SUM_INPUTS = 3 }; /* of the ops with ORR_OP_SUM_GRAD */

typedef struct backward {
  orr_node **heap;
  int n, cap;
  bool create_graph, retain;
  orr_tensor *const *x; /* targets of orr_grad_of; NULL: collect in leaves */
  int n_x;
  orr_tensor **gx;
} backward;

static void swap(orr_node **heap, int a, int b) {
  orr_node *t = heap[a];
  heap[a] = heap[b];
  heap[b] = t;
}

static orr_status heap_push(backward *b, orr_node *node) {
  if (node->queued_by == b) return ORR_OK;
  if (node->queued_by)
    return orr_fail(ORR_EARG, "backward within backward over the same graph is not possible");
  if (b->n == b->cap) {
    int cap = b->cap ? 2 * b->cap : 64;
    orr_node **heap = realloc(b->heap, (size_t)cap * sizeof *heap);
    if (!heap) return orr_fail(ORR_EMEM, "out of host memory for backward");
    b->heap = heap;
    b->cap = cap;
  }
  node->rc++;
  node->queued_by = b;
  int k = b->n++;
  b->heap[k] = node;
  while (k > 0 && b->heap[(k - 1) / 2]->serial < b->heap[k]->serial) {
    swap(b->heap, k, (k - 1) / 2);
    k = (k - 1) / 2;
  }
  return ORR_OK;
}

static orr_node *heap_pop(backward *b) {
  orr_node *top = b->heap[0];
  b->heap[0] = b->heap[--b->n];
  for (int k = 0;;) {
    int big = k, l = 2 * k + 1, r = l + 1;
    if (l < b->n && b->heap[l]->serial > b->heap[big]->serial) big = l;
    if (r < b->n && b->heap[r]->serial > b->heap[big]->serial) big = r;
    if (big == k) return top;
    swap(b->heap, k, big);
    k = big;
  }
}

/* *sum += g; takes g. */
static orr_status add_to(orr_tensor **sum, orr_tensor *take_g) {
  if (!*sum) {
    *sum = take_g;
    return ORR_OK;
  }
  orr_tensor *total;
  orr_status status = orr_call2(orr_op_binary(ORR_BIN_add), *sum, take_g, NULL, &total);
  orr_tensor_free(take_g);
  if (status) return status;
  orr_tensor_free(*sum);
  *sum = total;
  return ORR_OK;
}

/* A tensor that nobody else holds, dense, under layout `to`; takes g. */
static orr_status make_own(orr_tensor *take_g, orr_layout *to, orr_tensor **out) {
  orr_tensor *g = take_g, *next;
  if (!orr_layout_equal(g->layout, to)) {
    orr_status status = orr_redistribute_op(g, to, &next);
    orr_tensor_free(g);
    if (status) return status;
    g = next;
  }
  if (g->rc > 1 || g->storage->rc > 1 || !orr_tensor_is_contiguous(g)) {
    orr_status status = orr_call1(&orr_op_clone, g, NULL, &next);
    orr_tensor_free(g);
    if (status) return status;
    g = next;
  }
  *out = g;
  return ORR_OK;
}

static orr_status run_hooks(int hooks, orr_tensor **g) {
  return hooks && orr_hook_run ? orr_hook_run(hooks, g) : ORR_OK;
}

/* Whether leaf or (node, out) is a target of orr_grad_of: adds g to its result. Borrows g. */
static orr_status capture(backward *b, const orr_tensor *leaf, const orr_node *node, int out,
                          orr_tensor *g) {
  for (int k = 0; k < b->n_x; k++) {
    const orr_tensor *x = b->x[k];
    if (leaf ? x == leaf : x->node && x->node == node && x->out_index == out)
      ORR_TRY(add_to(&b->gx[k], orr_tensor_ref(g)));
  }
  return ORR_OK;
}

static orr_status deliver_leaf(backward *b, orr_tensor *leaf, orr_tensor *take_g) {
  orr_tensor *g = take_g;
  if (!b->x) orr_capture_leaf(leaf, false);
  orr_status status = run_hooks(leaf->hooks, &g);
  if (!status && !b->x) status = orr_hold_note(leaf);
  if (!status && b->x) status = capture(b, leaf, NULL, 0, g);
  else if (!status && leaf->reducer) status = orr_reducer_add(leaf->reducer, leaf, g);
  else if (!status) {
    orr_tensor *own;
    status = make_own(g, leaf->layout, &own);
    return status ? status : add_to(&leaf->grad, own);
  }
  orr_tensor_free(g);
  return status;
}

static orr_status deliver(backward *b, const orr_edge *e, orr_tensor *take_g) {
  if (e->leaf) return deliver_leaf(b, e->leaf, take_g);
  if (!e->node) {
    orr_tensor_free(take_g);
    return ORR_OK;
  }
  orr_status status = heap_push(b, e->node);
  if (status) {
    orr_tensor_free(take_g);
    return status;
  }
  return add_to(&e->node->gy[e->out], take_g);
}

/* Whether the formula hands a Partial gradient on as it is, to one input or by linear ops. */
static bool passes_partial(const orr_node *node) {
  int n = 0;
  for (int k = 0; k < node->n_in; k++) n += node->needs[k];
  if (node->op == &orr_op_redistribute || node->op->flags & ORR_OP_LINEAR) return true;
  return n == 1 && node->op->flags & ORR_OP_MULTILINEAR;
}

/* The gradient of input k's leaf, where the formula may add to it in place: nobody else holds
 * it, nobody looks at what is added, and if backward fails it is dropped as a whole. */
static orr_status sum_of(backward *b, const orr_node *node, int k, orr_tensor **out) {
  orr_tensor *leaf = node->edge[k].leaf;
  *out = NULL;
  if (!leaf || !node->needs[k] || b->x || b->create_graph || leaf->hooks || !orr_holding())
    return ORR_OK;
  orr_capture_leaf(leaf, false);
  ORR_TRY(orr_hold_note(leaf));
  orr_tensor *g = leaf->grad;
  bool own = g && g->rc == 1 && g->storage->rc == 1 && !g->requires_grad;
  if (own && g->layout->mesh == leaf->layout->mesh && g->meta.dtype == leaf->meta.dtype)
    *out = g;
  return ORR_OK;
}

static orr_status run_op(backward *b, orr_node *node, orr_tensor **gx) {
  orr_tensor *sum[SUM_INPUTS] = {NULL};
  if (!(node->op->flags & ORR_OP_SUM_GRAD))
    return orr_node_run(node, b->create_graph, NULL, gx);
  for (int k = 0; k < node->n_in && k < SUM_INPUTS; k++) ORR_TRY(sum_of(b, node, k, &sum[k]));
  return orr_node_run(node, b->create_graph, sum, gx);
}

static orr_status run_node(backward *b, orr_node *node) {
  bool reduce = !passes_partial(node);
  for (int k = 0; k < node->n_out; k++) {
    if (!node->gy[k]) continue;
    if (reduce) ORR_TRY(orr_reduce_partial(&node->gy[k]));
    ORR_TRY(run_hooks(node->hooks[k], &node->gy[k]));
    if (b->x) ORR_TRY(capture(b, NULL, node, k, node->gy[k]));
  }
  orr_tensor **gx = calloc((size_t)node->n_in + 1, sizeof *gx);
  if (!gx) return orr_fail(ORR_EMEM, "out of host memory for backward");
  orr_status status = run_op(b, node, gx);
  for (int k = 0; k < node->n_out; k++) {
    if (node->gy[k]) orr_tensor_free(node->gy[k]);
    node->gy[k] = NULL;
  }
  if (!b->retain) orr_node_drop_saved(node);
  for (int k = 0; k < node->n_in; k++) {
    if (!gx[k]) continue;
    if (status) orr_tensor_free(gx[k]);
    else status = deliver(b, &node->edge[k], gx[k]);
  }
  free(gx);
  return status;
}

/* The gradient of y itself: what was given, or 1 for a single number. Owned. */
static orr_status seed(orr_tensor *y, orr_tensor *given, orr_tensor **out) {
  if (!y->requires_grad)
    return orr_fail(ORR_EARG,
                    "backward: the tensor does not require grad: none of what it was "
                    "made from does, or it was made under no_grad");
  if (given) {
    if (given->meta.ndim != y->meta.ndim ||
        memcmp(given->meta.shape, y->meta.shape,
               (size_t)y->meta.ndim * sizeof y->meta.shape[0]) != 0) {
      char a[128], b[128];
      return orr_fail(ORR_EARG, "backward: the gradient has shape %s and the tensor %s",
                      orr_shape_text(given->meta.ndim, given->meta.shape, a, sizeof a),
                      orr_shape_text(y->meta.ndim, y->meta.shape, b, sizeof b));
    }
    *out = orr_tensor_ref(given);
    return ORR_OK;
  }
  if (orr_tensor_numel(y) != 1) {
    char a[128];
    return orr_fail(ORR_EARG,
                    "backward: the tensor has shape %s; give a gradient of that shape, "
                    "or reduce it to one number first",
                    orr_shape_text(y->meta.ndim, y->meta.shape, a, sizeof a));
  }
  orr_args one = {.f = {1}};
  orr_layout *layout =
      orr_tensor_is_single(y) ? y->layout : orr_layout_replicate(y->layout->mesh);
  return orr_create(&orr_op_full, &y->meta, layout, &one, out);
}

static orr_status start(backward *b, orr_tensor *const *y, int n, orr_tensor *const *gy) {
  for (int k = 0; k < n; k++) {
    orr_tensor *g;
    ORR_TRY(seed(y[k], gy ? gy[k] : NULL, &g));
    orr_edge e = {.node = y[k]->node, .out = y[k]->out_index, .leaf = y[k]->node ? NULL : y[k]};
    ORR_TRY(deliver(b, &e, g));
  }
  return ORR_OK;
}

/* Takes the next node: runs it, or with `drop` only forgets what waits for it. */
static orr_status step(backward *b, bool drop) {
  orr_node *node = heap_pop(b);
  node->queued_by = NULL;
  orr_status status = drop ? ORR_OK : run_node(b, node);
  for (int k = 0; k < node->n_out; k++) {
    if (node->gy[k]) orr_tensor_free(node->gy[k]);
    node->gy[k] = NULL;
  }
  orr_node_free(node);
  return status;
}

static void drop_rest(backward *b) {
  while (b->n) (void)step(b, true);
  free(b->heap);
}

static orr_status run(backward *b, orr_tensor *const *y, int n, orr_tensor *const *gy) {
  bool was = orr_set_grad_mode(b->create_graph);
  int cast = orr_set_autocast(-1);
  orr_status status = start(b, y, n, gy);
  while (b->n && !status) status = step(b, false);
  drop_rest(b);
  orr_zero_release();
  orr_sequence_release();
  if (status) orr_reducers_drop();
  else status = orr_reducers_flush();
  orr_set_autocast(cast);
  orr_set_grad_mode(was);
  return status;
}

orr_status orr_backward(orr_tensor *const *y, int n, orr_tensor *const *gy, bool retain,
                        bool create_graph) {
  backward b = {.create_graph = create_graph, .retain = retain || create_graph};
  return run(&b, y, n, gy);
}

orr_status orr_grad_of(orr_tensor *const *y, int n, orr_tensor *const *gy, orr_tensor *const *x,
                       int n_x, bool retain, bool create_graph, orr_tensor **gx) {
  backward b = {.create_graph = create_graph,
                .retain = retain || create_graph,
                .x = x,
                .n_x = n_x,
                .gx = gx};
  for (int k = 0; k < n_x; k++) gx[k] = NULL;
  orr_status status = run(&b, y, n, gy);
  for (int k = 0; k < n_x && status; k++) {
    if (gx[k]) orr_tensor_free(gx[k]);
    gx[k] = NULL;
  }
  return status;
}

struct orr_backward_run {
  backward b;
};

orr_status orr_backward_start(orr_tensor *y, orr_tensor *gy, orr_backward_run **out) {
  orr_backward_run *r = calloc(1, sizeof *r);
  if (!r) return orr_fail(ORR_EMEM, "out of host memory for backward");
  bool was = orr_set_grad_mode(false);
  orr_status status = start(&r->b, &y, 1, gy ? &gy : NULL);
  orr_set_grad_mode(was);
  if (status) orr_backward_end(r);
  else *out = r;
  return status;
}

orr_status orr_backward_until(orr_backward_run *r, const orr_mesh *mesh, bool *more) {
  orr_status status = ORR_OK;
  bool was = orr_set_grad_mode(false);
  int cast = orr_set_autocast(-1);
  while (r->b.n && !status && (!mesh || r->b.heap[0]->mesh == mesh))
    status = step(&r->b, false);
  orr_set_autocast(cast);
  orr_set_grad_mode(was);
  *more = r->b.n > 0;
  return status;
}

void orr_backward_end(orr_backward_run *take_r) {
  drop_rest(&take_r->b);
  orr_zero_release();
  orr_sequence_release();
  free(take_r);
}
