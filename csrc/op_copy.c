/* op_copy.c: ops that give the same values elsewhere or in another form: cast, clone,
 * contiguous, redistribute, and the in-place copy and fill.
 *
 * Invariant: a cast or copy is differentiable; a redistribution's gradient goes back to the
 * mesh that the input was on and keeps whatever placement it has there.
 * To add one: an orr_op here and in the list at the end.
 */
#include "../kernels/copy.h"
#include "../kernels/elementwise.h"
#include "op.h"
#include "op_view.h"

static orr_status run_copy(const orr_work *w, int shard) {
  w->k->copy(orr_work_in(w, shard, 0), orr_work_out(w, shard, 0));
  return ORR_OK;
}

static orr_status grad_same(orr_grad *g) {
  g->gx[0] = g->gy[0]; /* the tape casts it to the input's dtype */
  return ORR_OK;
}

static orr_status infer_to(orr_call *c) {
  c->out_meta[0] = c->in[0]->meta;
  c->out_meta[0].dtype = (orr_dtype)c->args.i[0];
  return ORR_OK;
}

/* args.i[0]: the dtype. */
const orr_op orr_op_to = {.name = "to",
                          .flags = ORR_OP_LIKE_IN,
                          .n_in = 1,
                          .n_out = 1,
                          .infer = infer_to,
                          .label = orr_label_same,
                          .run = run_copy,
                          .grad = grad_same};

orr_status orr_cast(orr_tensor *t, orr_dtype dtype, orr_tensor **out) {
  orr_args args = {.i = {dtype}};
  return orr_call1(&orr_op_to, t, &args, out);
}

const orr_op orr_op_clone = {.name = "clone",
                             .args = "t",
                             .flags = ORR_OP_LIKE_IN | ORR_OP_LINEAR,
                             .n_in = 1,
                             .n_out = 1,
                             .infer = orr_infer_same,
                             .label = orr_label_same,
                             .run = run_copy,
                             .grad = grad_same};

/* A row-major copy, whatever the input's strides. */
const orr_op orr_op_pack = {.name = "pack",
                            .flags = ORR_OP_LINEAR,
                            .n_in = 1,
                            .n_out = 1,
                            .infer = orr_infer_same,
                            .label = orr_label_same,
                            .run = run_copy,
                            .grad = grad_same};

static orr_status compose_contiguous(const orr_op *op, orr_tensor *const *in, int n_in,
                                     const orr_args *args, orr_tensor **out) {
  (void)op;
  (void)n_in;
  if (!orr_tensor_is_contiguous(in[0])) return orr_call1(&orr_op_pack, in[0], args, out);
  *out = orr_tensor_ref(in[0]);
  return ORR_OK;
}

const orr_op orr_op_contiguous = {
    .name = "contiguous", .args = "t", .n_in = 1, .n_out = 1, .compose = compose_contiguous};

/* ---- redistribute ---- */

static orr_status grad_redistribute(orr_grad *g) {
  orr_layout *layout = g->x_layout[0];
  orr_tensor *gy = g->gy[0], *back;
  if (gy->layout->mesh == layout->mesh) {
    orr_layout *to;
    g->gx[0] = gy;
    ORR_TRY(orr_sequence_back(gy, layout, &to));
    if (!to) return ORR_OK;
    orr_status status = orr_redistribute_op(gy, to, &back);
    orr_layout_free(to);
    if (!status) g->gx[0] = orr_g_keep(g, back);
    return status ? status : g->status;
  }
  if (orr_layout_is_partial(layout)) layout = orr_layout_replicate(layout->mesh);
  ORR_TRY(orr_redistribute_op(gy, layout, &back));
  g->gx[0] = orr_g_keep(g, back);
  return g->status;
}

const orr_op orr_op_redistribute = {
    .name = "redistribute", .n_in = 1, .n_out = 1, .grad = grad_redistribute};

orr_status orr_redistribute_op(orr_tensor *t, orr_layout *layout, orr_tensor **out) {
  if (orr_layout_equal(t->layout, layout)) {
    *out = orr_tensor_ref(t);
    return ORR_OK;
  }
  ORR_TRY(orr_redistribute(t, layout, out));
  if (orr_tensor_device(*out, 0)->is_inline && orr_work_error_pending()) {
    orr_tensor_free(*out);
    return orr_synchronize(NULL);
  }
  orr_call c = {.op = &orr_op_redistribute, .n_in = 1, .n_out = 1, .in = &t, .out = {*out}};
  orr_status status = orr_tape_record(&c, &t);
  if (status) orr_tensor_free(*out);
  return status;
}

orr_status orr_reduce_partial(orr_tensor **t) {
  const orr_layout *now = (*t)->layout;
  orr_place place[ORR_MAX_AXES];
  orr_layout *layout;
  orr_tensor *whole;
  if (!orr_layout_is_partial(now)) return ORR_OK;
  for (int a = 0; a < now->mesh->n_axes; a++) {
    place[a] = now->axis[a];
    if (place[a].kind == ORR_PARTIAL) place[a] = (orr_place){.kind = ORR_REPLICATE};
  }
  ORR_TRY(orr_layout_new(now->mesh, place, (*t)->meta.ndim, (*t)->meta.shape, &layout));
  orr_status status = orr_redistribute_op(*t, layout, &whole);
  orr_layout_free(layout);
  if (status) return status;
  orr_tensor_free(*t);
  *t = whole;
  return ORR_OK;
}

/* ---- in place ---- */

static orr_status infer_copy_(orr_call *c) {
  orr_meta both;
  ORR_TRY(orr_broadcast("copy_", &c->in[0]->meta, &c->in[1]->meta, &both));
  c->out_meta[0] = both;
  c->out_meta[0].dtype = c->in[0]->meta.dtype;
  return ORR_OK;
}

static orr_status run_copy_(const orr_work *w, int shard) {
  orr_view room;
  orr_view *y = orr_work_out(w, shard, 0);
  w->k->copy(orr_expand_view(orr_work_in(w, shard, 1), y, &room), y);
  return ORR_OK;
}

static orr_status grad_copy_(orr_grad *g) {
  g->gx[0] = orr_g_scale(g, g->gy[0], 0);
  g->gx[1] = g->gy[0];
  return g->status;
}

const orr_op orr_op_copy_ = {.name = "copy_",
                             .args = "t t",
                             .flags = ORR_OP_ALWAYS_IN_PLACE,
                             .n_in = 2,
                             .n_out = 1,
                             .infer = infer_copy_,
                             .label = orr_label_broadcast,
                             .run = run_copy_,
                             .grad = grad_copy_};

static orr_status run_fill_(const orr_work *w, int shard) {
  w->k->fill(orr_work_out(w, shard, 0), w->args.f[0]);
  return ORR_OK;
}

static orr_status grad_fill_(orr_grad *g) {
  g->gx[0] = orr_g_scale(g, g->gy[0], 0);
  return g->status;
}

static const orr_op fill_ = {.name = "fill_",
                             .args = "t f",
                             .flags = ORR_OP_ALWAYS_IN_PLACE,
                             .n_in = 1,
                             .n_out = 1,
                             .infer = orr_infer_same,
                             .label = orr_label_same,
                             .run = run_fill_,
                             .grad = grad_fill_};

static const orr_op zero_ = {.name = "zero_",
                             .args = "t f=0",
                             .flags = ORR_OP_ALWAYS_IN_PLACE | ORR_OP_LINEAR,
                             .n_in = 1,
                             .n_out = 1,
                             .infer = orr_infer_same,
                             .label = orr_label_same,
                             .run = run_fill_,
                             .grad = grad_fill_};

/* ---- where, clamp ---- */

static orr_status infer_where(orr_call *c) {
  orr_meta ab;
  if (c->in[0]->meta.dtype != ORR_BOOL) ORR_TRY(orr_call_cast(c, 0, ORR_BOOL));
  orr_dtype dtype = orr_dtype_promote(c->in[1]->meta.dtype, c->in[2]->meta.dtype);
  if (c->in[1]->meta.ndim == 0 && orr_dtype_is_float(c->in[2]->meta.dtype))
    dtype = c->in[2]->meta.dtype;
  else if (c->in[2]->meta.ndim == 0 && orr_dtype_is_float(c->in[1]->meta.dtype))
    dtype = c->in[1]->meta.dtype;
  ORR_TRY(orr_call_cast(c, 1, dtype));
  ORR_TRY(orr_call_cast(c, 2, dtype));
  ORR_TRY(orr_broadcast("where", &c->in[1]->meta, &c->in[2]->meta, &ab));
  ORR_TRY(orr_broadcast("where", &c->in[0]->meta, &ab, &c->out_meta[0]));
  c->out_meta[0].dtype = dtype;
  return ORR_OK;
}

static orr_status run_where(const orr_work *w, int shard) {
  orr_view room[3];
  orr_view *y = orr_work_out(w, shard, 0);
  w->k->where(orr_expand_view(orr_work_in(w, shard, 0), y, &room[0]),
              orr_expand_view(orr_work_in(w, shard, 1), y, &room[1]),
              orr_expand_view(orr_work_in(w, shard, 2), y, &room[2]), y);
  return ORR_OK;
}

static orr_status grad_where(orr_grad *g) {
  orr_meta number = {.dtype = g->gy[0]->meta.dtype};
  orr_tensor *zero = orr_g_zeros(g, &number, g->gy[0]);
  if (g->needs[1]) g->gx[1] = orr_g(g, &orr_op_where, NULL, 3, g->x[0], g->gy[0], zero);
  if (g->needs[2]) g->gx[2] = orr_g(g, &orr_op_where, NULL, 3, g->x[0], zero, g->gy[0]);
  return g->status;
}

const orr_op orr_op_where = {.name = "where",
                             .args = "t ts ts",
                             .save = ORR_SAVE_IN(0),
                             .n_in = 3,
                             .n_out = 1,
                             .infer = infer_where,
                             .label = orr_label_broadcast,
                             .run = run_where,
                             .grad = grad_where};

static orr_status infer_clamp(orr_call *c) {
  if (c->args.f[0] > c->args.f[1])
    return orr_fail(ORR_EARG, "the lower bound %g is above the upper bound %g", c->args.f[0],
                    c->args.f[1]);
  return orr_infer_same(c);
}

static orr_status run_clamp(const orr_work *w, int shard) {
  w->k->clamp(orr_work_in(w, shard, 0), w->args.f[0], w->args.f[1], orr_work_out(w, shard, 0));
  return ORR_OK;
}

/* The gradient passes where lo <= x <= hi. */
static orr_status grad_clamp(orr_grad *g) {
  orr_args lo = {.f = {g->args->f[0]}}, hi = {.f = {g->args->f[1]}};
  orr_tensor *above = orr_g(g, orr_op_binary(ORR_BIN_ge)->scalar, &lo, 1, g->x[0]);
  orr_tensor *below = orr_g(g, orr_op_binary(ORR_BIN_le)->scalar, &hi, 1, g->x[0]);
  orr_tensor *inside = orr_g(g, orr_op_binary(ORR_BIN_logical_and), NULL, 2, above, below);
  g->gx[0] = orr_g_mul(g, g->gy[0], orr_g_cast(g, inside, g->gy[0]->meta.dtype));
  return g->status;
}

static const orr_op clamp = {.name = "clamp",
                             .args = "t f f",
                             .flags = ORR_OP_IN_PLACE | ORR_OP_LIKE_IN,
                             .save = ORR_SAVE_IN(0),
                             .n_in = 1,
                             .n_out = 1,
                             .infer = infer_clamp,
                             .label = orr_label_same,
                             .run = run_clamp,
                             .grad = grad_clamp};

const orr_op *const orr_ops_copy[] = {
    &orr_op_to,           &orr_op_clone, &orr_op_pack, &orr_op_contiguous,
    &orr_op_redistribute, &orr_op_copy_, &fill_,       &zero_,
    &orr_op_where,        &clamp,        NULL};
