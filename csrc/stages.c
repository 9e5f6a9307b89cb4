/* stages.c: which meshes are stages of one pipeline, and how a tensor stands on another stage.
 *
 * Invariant: two meshes of one pipeline have one order, the first one registered that holds
 * both; nothing here moves data: op.c asks, redistribute.c moves.
 * To add a rule for crossing stages: orr_stages_layout.
 */
#include <stdlib.h>
#include <string.h>

#include "orrery_int.h"

typedef struct pipeline {
  int n;
  const orr_mesh **stage;
  struct pipeline *next;
} pipeline;

static pipeline *first = NULL, **last = &first;

static bool is_known(const orr_mesh *const *stage, int n) {
  for (const pipeline *p = first; p; p = p->next)
    if (p->n == n && memcmp(p->stage, stage, (size_t)n * sizeof(*stage)) == 0) return true;
  return false;
}

orr_status orr_stages_add(const orr_mesh *const *stage, int n) {
  if (is_known(stage, n)) return ORR_OK;
  size_t bytes = (size_t)n * sizeof(orr_mesh *);
  pipeline *p = malloc(sizeof(*p) + bytes);
  if (!p) return orr_fail(ORR_EMEM, "out of host memory for a pipeline of %d stages", n);
  *p = (pipeline){.n = n, .stage = (const orr_mesh **)(p + 1)};
  memcpy(p->stage, stage, bytes);
  *last = p;
  last = &p->next;
  return ORR_OK;
}

static int position(const pipeline *p, const orr_mesh *mesh) {
  for (int k = p->n - 1; k >= 0; k--)
    if (p->stage[k] == mesh) return k;
  return -1;
}

static const orr_mesh *current = NULL;

void orr_stages_set(const orr_mesh *mesh) { current = mesh; }

const orr_mesh *orr_stages_later(const orr_mesh *a, const orr_mesh *b) {
  for (const pipeline *p = first; p; p = p->next) {
    int at = position(p, a), bt = position(p, b);
    if (at < 0 || bt < 0) continue;
    if (current == a || current == b) return current;
    return at > bt ? a : b;
  }
  return NULL;
}

static int axis_named(const orr_mesh *mesh, const char *name) {
  for (int k = 0; k < mesh->n_axes; k++)
    if (strcmp(mesh->name[k], name) == 0) return k;
  return -1;
}

orr_status orr_stages_layout(const orr_tensor *t, const orr_mesh *mesh, orr_layout **out) {
  orr_place place[ORR_MAX_AXES];
  const orr_mesh *from = t->layout->mesh;
  if (mesh->n_axes == 0) {
    *out = orr_layout_ref(orr_layout_single(mesh->device[0]));
    return ORR_OK;
  }
  for (int k = 0; k < mesh->n_axes; k++) {
    int axis = axis_named(from, mesh->name[k]);
    place[k] = (orr_place){.kind = ORR_REPLICATE};
    if (axis < 0 || t->layout->axis[axis].kind != ORR_SHARD) continue;
    place[k] = t->layout->axis[axis];
    bool nested = axis == 1 && t->layout->axis[0].kind == ORR_SHARD &&
                  t->layout->axis[0].dim == place[k].dim;
    if (nested) place[k] = (orr_place){.kind = ORR_REPLICATE};
    if (from->size[axis] != mesh->size[k]) place[k].bounds = NULL; /* balanced over that mesh */
  }
  return orr_layout_new(mesh, place, t->meta.ndim, t->meta.shape, out);
}
