/* plan_resolve.c: a plan's leaves to the devices that are visible, and what this engine runs.
 *
 * Invariant: a resolved plan names only devices that exist, each once, and one kind of device
 * in a mesh.
 * To name devices in another way: a naming in plan.h, its case in place_leaf.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* "; 2 cpu devices are visible: cpu:0 to cpu:1 (ORRERY_CPU_DEVICES=2)" */
static void visible_text(const orr_plan_env *env, bool cuda, char *buffer, size_t size) {
  const char *kind = cuda ? "cuda" : "cpu", *why = cuda ? env->cuda_why : env->cpu_why;
  bool tells = why && *why;
  int n = cuda ? env->n_cuda : env->n_cpu;
  char range[64] = "";
  if (n == 1) snprintf(range, sizeof range, ": %s:0", kind);
  if (n > 1) snprintf(range, sizeof range, ": %s:0 to %s:%d", kind, kind, n - 1);
  snprintf(buffer, size, "; %d %s device%s visible%s%s%.200s%s", n, kind,
           n == 1 ? " is" : "s are", range, tells ? " (" : "", tells ? why : "",
           tells ? ")" : "");
}

static orr_status place_leaf(const orr_plan *plan, const orr_plan_env *env,
                             const orr_plan_node *leaf, orr_plan_place *out) {
  bool cuda = leaf->naming == ORR_PLAN_CUDA || leaf->naming == ORR_PLAN_BUS ||
              (leaf->naming == ORR_PLAN_BARE && env->n_cuda > 0);
  int n = cuda ? env->n_cuda : env->n_cpu, id = leaf->index;
  char name[96], visible[400];
  orr_plan_device_text(leaf, name, sizeof name);
  visible_text(env, cuda, visible, sizeof visible);
  if (leaf->naming == ORR_PLAN_BUS) {
    id = env->find ? env->find(env->find_data, leaf->id) : -1;
    if (id < 0 || id >= n) {
      return orr_plan_fail(plan->source, leaf->at, "%s device answers to %s%s,",
                           id == -2 ? "more than one" : "no", name, visible);
    }
  }
  if (id >= n) {
    return orr_plan_fail(plan->source, leaf->at, "there is no device %s%s,", name, visible);
  }
  *out = (orr_plan_place){cuda ? "cuda" : "cpu", id};
  return ORR_OK;
}

/* Two names may mean one device: 0 and cpu:0, cuda:1 and its bus id. */
static orr_status place_stage(const orr_plan *plan, const orr_plan_env *env, int s,
                              orr_plan_places *places) {
  const orr_plan_stage *stage = &plan->stage[s];
  places->first[s] = places->n_places;
  for (int i = 0; i < stage->n_devices; i++) {
    orr_plan_place *place = &places->place[places->n_places];
    const orr_plan_node *leaf = stage->leaf[i];
    orr_status status = place_leaf(plan, env, leaf, place);
    if (status) return status;
    for (orr_plan_place *before = places->place; before < place; before++) {
      if (before->kind == place->kind && before->id == place->id) {
        return orr_plan_fail(plan->source, leaf->at,
                             "device %s:%d stands twice in the plan, again", place->kind,
                             place->id);
      }
    }
    if (place->kind != places->place[places->first[s]].kind) {
      return orr_plan_fail(plan->source, leaf->at,
                           "a mesh holds devices of one kind, this one is %s:%d beside %s,",
                           place->kind, place->id, places->place[places->first[s]].kind);
    }
    places->n_places++;
  }
  return ORR_OK;
}

orr_status orr_plan_resolve(const orr_plan *plan, const orr_plan_env *env,
                            orr_plan_places **out) {
  orr_status status = ORR_OK;
  *out = NULL;
  orr_plan_places *places = calloc(1, sizeof *places);
  if (!places) return orr_fail(ORR_EMEM, "plan: out of memory");
  places->first = calloc((size_t)plan->n_stages, sizeof *places->first);
  places->place = calloc((size_t)plan->n_devices, sizeof *places->place);
  if (!places->first || !places->place) {
    status = orr_fail(ORR_EMEM, "plan: out of memory");
    goto fail;
  }
  for (int s = 0; s < plan->n_stages; s++) {
    status = place_stage(plan, env, s, places);
    if (status) goto fail;
  }
  *out = places;
  return ORR_OK;
fail:
  orr_plan_places_free(places);
  return status;
}

void orr_plan_places_free(orr_plan_places *places) {
  if (!places) return;
  free(places->first);
  free(places->place);
  free(places);
}
