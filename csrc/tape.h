/* tape.h: the node, shared by tape.c (recording), tape_backward.c and tape_g.c (formulas).
 * To add what a node keeps: here, freed in orr_node_free.
 */
#ifndef ORR_TAPE_H
#define ORR_TAPE_H

#include "orrery_int.h"

typedef struct orr_edge {
  struct orr_node *node; /* who made the input; NULL: see leaf */
  int out;
  orr_tensor *leaf; /* who collects; NULL: nobody */
} orr_edge;

typedef struct orr_node {
  int rc;
  uint64_t serial;
  const orr_op *op;
  int n_in, n_out;
  orr_edge *edge;
  orr_tensor **x; /* saved inputs */
  orr_meta *x_meta;
  orr_layout **x_layout;
  const orr_mesh *mesh; /* of the outputs */
  uint32_t *x_version;
  bool *needs;
  orr_tensor *y[ORR_MAX_OUT]; /* saved outputs, as aliases */
  uint32_t y_version[ORR_MAX_OUT];
  orr_tensor *gy[ORR_MAX_OUT]; /* while backward runs */
  const void *queued_by;       /* the backward whose heap holds it */
  int hooks[ORR_MAX_OUT];
  orr_custom custom;
  bool spent;         /* backward has freed what was saved */
  const char *source; /* where it was recorded, in anomaly mode */
  int line;
  struct orr_node *next; /* free list */
  orr_args args;         /* last, and only written where the call has any */
} orr_node;

uint32_t orr_saved_version(const orr_tensor *t);
void orr_node_drop_saved(orr_node *node);
/* Fills node->edge inputs' gradients: runs the op's formula. gx: owned, NULL where none. */
orr_status orr_node_run(orr_node *node, bool create_graph, orr_tensor *const *sum,
                        orr_tensor **gx);

#endif
