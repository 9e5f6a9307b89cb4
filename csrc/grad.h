/* grad.h: the tape: what a gradient formula sees and calls, recording, and backward. The last
 * part of orrery_int.h, which includes it.
 *
 * Invariant: as orrery_int.h says; formulas borrow, backward owns.
 * To add a short form for formulas: an orr_g_name here, its body in tape_g.c.
 */
#ifndef ORR_GRAD_H
#define ORR_GRAD_H

/* ==== L4: tape.c ========================================================================== */

/* What a gradient formula sees. Formulas call orr_g*, which return borrowed tensors (released
 * when the formula is done) and NULL after a failure; NULL inputs pass through. */
#define ORR_SMALL_SCOPE 16
struct orr_grad {
  struct orr_node *node;
  const orr_op *op;
  const orr_args *args;
  int n_in, n_out;
  orr_tensor **x;              /* saved inputs (NULL where not saved or absent) */
  orr_tensor *y[ORR_MAX_OUT];  /* saved outputs */
  const orr_meta *x_meta;      /* of every input */
  orr_tensor *gy[ORR_MAX_OUT]; /* gradients of the outputs; NULL where none came */
  orr_layout *const *x_layout; /* of every input, before placing; NULL where absent */
  const bool *needs;           /* which inputs want a gradient */
  orr_tensor **gx;             /* to fill; borrowed */
  /* Of an input, the gradient that a leaf has: the formula may add to it in place, and leaves
   * gx NULL then. NULL: nothing to add to. */
  orr_tensor *const *sum;
  bool create_graph;
  orr_status status;
  orr_tensor **scope; /* what orr_g* made */
  int n_scope, cap_scope;
};
/* Dispatches op within a formula; up to the first NULL-terminated inputs. */
orr_tensor *orr_g(orr_grad *g, const orr_op *op, const orr_args *args, int n_in, ...);
orr_tensor *orr_g_out(orr_grad *g, const orr_op *op, const orr_args *args, int which, int n_in,
                      ...);
/* Puts an owned tensor into the formula's scope; returns it borrowed. */
orr_tensor *orr_g_keep(orr_grad *g, orr_tensor *take_t);
orr_tensor *orr_g_list(orr_grad *g, const orr_op *op, const orr_args *args, int which, int n,
                       orr_tensor *const *in);
orr_tensor *orr_g_add(orr_grad *g, orr_tensor *a, orr_tensor *b);
orr_tensor *orr_g_sub(orr_grad *g, orr_tensor *a, orr_tensor *b);
orr_tensor *orr_g_mul(orr_grad *g, orr_tensor *a, orr_tensor *b);
orr_tensor *orr_g_div(orr_grad *g, orr_tensor *a, orr_tensor *b);
orr_tensor *orr_g_scale(orr_grad *g, orr_tensor *a, double s); /* a * s */
orr_tensor *orr_g_shift(orr_grad *g, orr_tensor *a, double s); /* a + s */
orr_tensor *orr_g_unary(orr_grad *g, int code, orr_tensor *a); /* ORR_UN_… */
orr_tensor *orr_g_reshape(orr_grad *g, orr_tensor *a, int ndim, const int64_t *shape);
orr_tensor *orr_g_expand(orr_grad *g, orr_tensor *a, int ndim, const int64_t *shape);
orr_tensor *orr_g_sum(orr_grad *g, orr_tensor *a, unsigned dims, bool keep);
orr_tensor *orr_g_transpose(orr_grad *g, orr_tensor *a, int d0, int d1);
orr_tensor *orr_g_zeros(orr_grad *g, const orr_meta *meta, const orr_tensor *like_layout);
orr_tensor *orr_g_cast(orr_grad *g, orr_tensor *a, orr_dtype dtype);

bool orr_grad_mode(void);
bool orr_set_grad_mode(bool on); /* returns what it was */
/* dispatch's last step: records the call if an input requires grad. inputs: before placing. */
orr_status orr_tape_record(const orr_call *c, orr_tensor *const *inputs);
/* Checks that an in-place write on in[0] of a call is legal now. */
orr_status orr_tape_check_in_place(const orr_op *op, orr_tensor *const *in, int n_in);
/* Gradient hooks: a reference of the binding, 0 for none, released with the tensor or its
 * node. */
void orr_tape_set_hooks(orr_tensor *t, int hooks);
int orr_tape_hooks(const orr_tensor *t);
/* tape_hold.c: gradients that backward gives between begin and end are kept apart from what
 * leaves had; end multiplies their sums by `scale` and adds them (scale 0: drops them). */
orr_status orr_hold_begin(void);
orr_status orr_hold_note(orr_tensor *leaf);
orr_status orr_hold_end(double scale);
bool orr_holding(void);

/* A node whose gradient the binding computes (orrery.custom). */
typedef struct orr_custom {
  orr_status (*backward)(void *state, int n_out, orr_tensor **gy, int n_in, orr_tensor **gx);
  void (*release)(void *state);
  void *state;
} orr_custom;
orr_status orr_tape_custom(orr_tensor *const *in, int n_in, orr_tensor *const *out, int n_out,
                           const orr_custom *custom);
orr_status orr_backward(orr_tensor *const *y, int n, orr_tensor *const *gy, bool retain,
                        bool create_graph);
/* Backward in pieces, for pipelines: each call of `until` runs nodes while the next one's
 * result stands on `mesh` (NULL: any); *more says whether some are left. Gradients of
 * parameters with a reducer arrive with orr_reducers_flush, which the caller calls when all is
 * done. */
typedef struct orr_backward_run orr_backward_run;
orr_status orr_backward_start(orr_tensor *y, orr_tensor *gy, orr_backward_run **out);
orr_status orr_backward_until(orr_backward_run *r, const orr_mesh *mesh, bool *more);
void orr_backward_end(orr_backward_run *take_r); /* drops what has not run */
/* Gradients of y with respect to x, not accumulated into .grad. gx: owned, NULL where none. */
orr_status orr_grad_of(orr_tensor *const *y, int n, orr_tensor *const *gy, orr_tensor *const *x,
                       int n_x, bool retain, bool create_graph, orr_tensor **gx);
void orr_node_free(struct orr_node *node);
/* Runs hooks on gradient *g; replaces it when one returns another. Set by the binding. */
extern orr_status (*orr_hook_run)(int hooks, orr_tensor **g);

#endif
