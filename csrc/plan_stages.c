/* plan_stages.c: from the tree of a plan to stages, one mesh of at most two axes each.
 *
 * `model` is never a mesh axis, it is pulled outermost:
 *     data<model<0,1>, model<2,3>>        stages data<0,2> and data<1,3>
 *     model<model<0,1>, 2>                three stages
 *     data<data<0,1>, data<2,3>>          one axis of four
 *     data<tensor<0,1>, tensor<2,3>>      one stage of data 2 x tensor 2, row-major
 *
 * Invariant: the stages of a subtree are whole before its parent joins them. The parent appends
 * the stages of its children (model) or joins them stage by stage, along its own axis (data,
 * tensor).
 * To add a kind of node: say in `build` what it does to its children's stages.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan.h"

typedef struct stages {
  int n;
  orr_plan_stage *stage;
} stages;

static orr_status build(orr_plan *plan, const orr_plan_node *node, stages *out);

/* -- options ------------------------------------------------------------------------------ */

static bool same_value(const orr_plan_value *a, const orr_plan_value *b) {
  return a->number == b->number && !strcmp(a->text ? a->text : "", b->text ? b->text : "");
}

/* Adds the options of `from` to `into`; two values of one option are refused. */
static orr_status merge_options(const orr_plan *plan, orr_plan_value *into,
                                const orr_plan_value *from) {
  for (int i = 0; i < ORR_PLAN_N_OPTIONS; i++) {
    if (!from[i].set) continue;
    if (into[i].set && !same_value(&into[i], &from[i])) {
      int later = from[i].at > into[i].at ? from[i].at : into[i].at;
      return orr_plan_fail(plan->source, later,
                           "%s has another value elsewhere in the plan, in a node of the same "
                           "axis or for the same stages; give it once",
                           orr_plan_option_of(i)->name);
    }
    into[i] = from[i];
  }
  return ORR_OK;
}

/* model's options, and micro of every node, hold for the whole plan. */
static orr_status merge_plan_options(const orr_plan *plan, const orr_plan_node *node,
                                     orr_plan_value *into) {
  orr_plan_value own[ORR_PLAN_N_OPTIONS] = {{0}};
  if (!node->options) return ORR_OK;
  for (int i = 0; i < ORR_PLAN_N_OPTIONS; i++) {
    if (node->kind == ORR_PLAN_MODEL || i == ORR_PLAN_MICRO) own[i] = node->options[i];
  }
  orr_status status = merge_options(plan, into, own);
  for (const orr_plan_node *c = node->first; c && !status; c = c->next) {
    status = merge_plan_options(plan, c, into);
  }
  return status;
}

/* -- words for errors --------------------------------------------------------------------- */

static void shape_text(const orr_plan_stage *stage, char *buffer, size_t size) {
  snprintf(buffer, size, "one device");
  for (int i = 0, n = 0; i < stage->n_axes && n < (int)size; i++) {
    n += snprintf(buffer + n, size - (size_t)n, "%s%s %d", i ? " x " : "",
                  orr_plan_kind_name(stage->axis[i].kind), stage->axis[i].size);
  }
}

/* "tensor<0,1>", cut to fit a message. */
static void node_words(const orr_plan_node *node, char *buffer, size_t size) {
  char *text = orr_plan_node_text(node);
  snprintf(buffer, size, "%.*s%s", (int)size - 5, text ? text : "?",
           text && strlen(text) > size - 5 ? "..." : "");
  free(text);
}

static orr_status fail_shapes(const orr_plan *plan, const orr_plan_node *parent,
                              const orr_plan_node *branch, const stages *a, const stages *b,
                              int s) {
  char first[80], other[80], one[80], two[80];
  const char *name = orr_plan_kind_name(parent->kind);
  node_words(parent->first, first, sizeof first);
  node_words(branch, other, sizeof other);
  if (a->n != b->n) {
    snprintf(one, sizeof one, "%d stage%s", a->n, a->n > 1 ? "s" : "");
    snprintf(two, sizeof two, "%d stage%s", b->n, b->n > 1 ? "s" : "");
  } else {
    shape_text(&a->stage[s], one, sizeof one);
    shape_text(&b->stage[s], two, sizeof two);
  }
  return orr_plan_fail(
      plan->source, branch->at,
      "the branches of %s need one shape, but %s is %s and %s is %s; give each "
      "branch as many devices, nested alike, or list all the devices in one %s<>,",
      name, first, one, other, two, name);
}

/* -- data and tensor ---------------------------------------------------------------------- */

static bool same_shape(const orr_plan_stage *a, const orr_plan_stage *b) {
  if (a->n_axes != b->n_axes) return false;
  for (int i = 0; i < a->n_axes; i++) {
    if (a->axis[i].kind != b->axis[i].kind || a->axis[i].size != b->axis[i].size) return false;
  }
  return true;
}

/* The branches of a pipeline's replicas hold the same layers in a stage. */
static orr_status merge_share(const orr_plan *plan, const orr_plan_node *branch,
                              orr_plan_stage *into, const orr_plan_stage *from) {
  bool given = into->count || into->pattern;
  if (!from->count && !from->pattern) return ORR_OK;
  if (given && (into->count != from->count || strcmp(into->pattern ? into->pattern : "",
                                                     from->pattern ? from->pattern : ""))) {
    return orr_plan_fail(
        plan->source, branch->at,
        "the branches give a stage different layers; give them alike, or in one "
        "branch only,");
  }
  into->count = from->count;
  into->pattern = from->pattern;
  return ORR_OK;
}

/* Puts the node's axis before its branches' axes; nested nodes of one kind are one axis. */
static orr_status add_axis(orr_plan *plan, const orr_plan_node *node, orr_plan_stage *stage) {
  orr_plan_value *options = orr_plan_take(plan, ORR_PLAN_N_OPTIONS * sizeof *options);
  if (!options) return ORR_EMEM;
  orr_status status = merge_options(plan, options, node->options);
  if (status) return status;
  if (stage->n_axes && stage->axis[0].kind == node->kind) {
    status = merge_options(plan, options, stage->axis[0].options);
    stage->axis[0].size *= node->n_children;
    stage->axis[0].options = options;
    return status;
  }
  if (stage->n_axes == ORR_PLAN_MAX_AXES) {
    return orr_plan_fail(
        plan->source, node->at,
        "%s over %s over %s is three axes, and a mesh has two, one data and one "
        "tensor; nest the nodes of one kind in each other,",
        orr_plan_kind_name(node->kind), orr_plan_kind_name(stage->axis[0].kind),
        orr_plan_kind_name(stage->axis[1].kind));
  }
  memmove(stage->axis + 1, stage->axis, (size_t)stage->n_axes * sizeof stage->axis[0]);
  stage->axis[0] = (orr_plan_axis){node->kind, node->n_children, options};
  stage->n_axes++;
  return ORR_OK;
}

/* Joins stage s of every branch, in the branches' order, into *joined. */
static orr_status join_stage(orr_plan *plan, const orr_plan_node *node, const stages *branch,
                             int s, orr_plan_stage *joined) {
  const orr_plan_node *child = node->first;
  int n = branch[0].stage[s].n_devices, n_axes = branch[0].stage[s].n_axes;
  *joined = branch[0].stage[s];
  joined->n_devices = node->n_children * n;
  joined->leaf = orr_plan_take(plan, (size_t)joined->n_devices * sizeof *joined->leaf);
  if (!joined->leaf) return ORR_EMEM;
  orr_plan_value *inner[ORR_PLAN_MAX_AXES] = {NULL};
  for (int i = 0; i < n_axes; i++) {
    inner[i] = orr_plan_take(plan, ORR_PLAN_N_OPTIONS * sizeof *inner[i]);
    if (!inner[i]) return ORR_EMEM;
    joined->axis[i].options = inner[i];
  }
  for (int b = 0; b < node->n_children; b++, child = child->next) {
    const orr_plan_stage *stage = &branch[b].stage[s];
    if (!same_shape(&branch[0].stage[s], stage)) {
      return fail_shapes(plan, node, child, &branch[0], &branch[b], s);
    }
    memcpy(joined->leaf + b * n, stage->leaf, (size_t)n * sizeof *stage->leaf);
    orr_status status = merge_share(plan, child, joined, stage);
    for (int i = 0; i < n_axes && !status; i++) {
      status = merge_options(plan, inner[i], stage->axis[i].options);
    }
    if (status) return status;
  }
  return add_axis(plan, node, joined);
}

static orr_status join_branches(orr_plan *plan, const orr_plan_node *node, const stages *branch,
                                stages *out) {
  const orr_plan_node *child = node->first;
  for (int b = 0; b < node->n_children; b++, child = child->next) {
    if (branch[b].n != branch[0].n) {
      return fail_shapes(plan, node, child, &branch[0], &branch[b], 0);
    }
  }
  out->n = branch[0].n;
  out->stage = orr_plan_take(plan, (size_t)out->n * sizeof *out->stage);
  if (!out->stage) return ORR_EMEM;
  for (int s = 0; s < out->n; s++) {
    orr_status status = join_stage(plan, node, branch, s, &out->stage[s]);
    if (status) return status;
  }
  return ORR_OK;
}

/* -- model, and the tree ------------------------------------------------------------------ */

static orr_status append_stages(orr_plan *plan, const orr_plan_node *node, const stages *branch,
                                stages *out) {
  const orr_plan_node *child = node->first;
  for (int b = 0; b < node->n_children; b++) out->n += branch[b].n;
  out->stage = orr_plan_take(plan, (size_t)out->n * sizeof *out->stage);
  if (!out->stage) return ORR_EMEM;
  for (int b = 0, s = 0; b < node->n_children; b++, child = child->next) {
    if ((child->count || child->pattern) && branch[b].n != 1) {
      return orr_plan_fail(plan->source, child->at,
                           "this child of model is %d stages; give the counts to them,",
                           branch[b].n);
    }
    memcpy(out->stage + s, branch[b].stage, (size_t)branch[b].n * sizeof *out->stage);
    if (child->count || child->pattern) {
      out->stage[s].count = child->count;
      out->stage[s].pattern = child->pattern;
    }
    s += branch[b].n;
  }
  return ORR_OK;
}

static orr_status build_leaf(orr_plan *plan, const orr_plan_node *node, stages *out) {
  out->n = 1;
  out->stage = orr_plan_take(plan, sizeof *out->stage);
  if (!out->stage) return ORR_EMEM;
  out->stage->n_devices = 1;
  out->stage->leaf = orr_plan_take(plan, sizeof *out->stage->leaf);
  if (!out->stage->leaf) return ORR_EMEM;
  out->stage->leaf[0] = node;
  return ORR_OK;
}

static orr_status build(orr_plan *plan, const orr_plan_node *node, stages *out) {
  *out = (stages){0};
  if (node->kind == ORR_PLAN_DEVICE) return build_leaf(plan, node, out);
  stages *branch = calloc((size_t)node->n_children, sizeof *branch);
  if (!branch) return orr_fail(ORR_EMEM, "plan: out of memory");
  orr_status status = ORR_OK;
  const orr_plan_node *child = node->first;
  for (int b = 0; b < node->n_children && !status; b++, child = child->next) {
    status = build(plan, child, &branch[b]);
  }
  if (!status) {
    status = node->kind == ORR_PLAN_MODEL ? append_stages(plan, node, branch, out)
                                          : join_branches(plan, node, branch, out);
  }
  free(branch);
  return status;
}

static bool same_device(const orr_plan_node *a, const orr_plan_node *b) {
  if (a->naming != b->naming) return false;
  return a->naming == ORR_PLAN_BUS ? !strcmp(a->id, b->id) : a->index == b->index;
}

/* A device has one place in a plan. `seen` lists the leaves before this subtree. */
static orr_status refuse_twice(const orr_plan *plan, const orr_plan_node *node,
                               const orr_plan_node **seen, int *n) {
  if (node->kind == ORR_PLAN_DEVICE) {
    char name[96];
    orr_plan_device_text(node, name, sizeof name);
    for (int i = 0; i < *n; i++) {
      if (same_device(seen[i], node)) {
        return orr_plan_fail(plan->source, node->at,
                             "device %s stands twice in the plan, again", name);
      }
    }
    seen[(*n)++] = node;
  }
  orr_status status = ORR_OK;
  for (const orr_plan_node *c = node->first; c && !status; c = c->next) {
    status = refuse_twice(plan, c, seen, n);
  }
  return status;
}

orr_status orr_plan_build_stages(orr_plan *plan) {
  stages all;
  const orr_plan_node **seen = calloc(ORR_PLAN_MAX_DEVICES, sizeof *seen);
  if (!seen) return orr_fail(ORR_EMEM, "plan: out of memory");
  plan->n_devices = 0;
  orr_status status = refuse_twice(plan, plan->root, seen, &plan->n_devices);
  free(seen);
  if (!status) status = build(plan, plan->root, &all);
  if (status) return status;
  orr_plan_value *options = orr_plan_take(plan, ORR_PLAN_N_OPTIONS * sizeof *options);
  if (!options) return ORR_EMEM;
  plan->n_stages = all.n;
  plan->stage = all.stage;
  plan->options = options;
  return merge_plan_options(plan, plan->root, options);
}
