/* op_random.c: tensors of random numbers, and dropout.
 *
 * Invariant: an element depends on the call's key and its global index, so no placement changes
 * it; dropout keeps no mask, its gradient draws it again from the key.
 * To add a distribution: a run function here, over `global_of` its shard.
 */
#include "op_random.h"

#include <string.h>

#include "random_state.h"

orr_random_key orr_random_key_of(const orr_args *args) {
  return (orr_random_key){.seed = (uint64_t)args->i[0],
                          .stream = (uint64_t)args->i[1],
                          .step = (uint64_t)args->i[2],
                          .call = (uint64_t)args->i[3]};
}

static orr_global global_of(const orr_work *w, int shard) {
  orr_global g = {.ndim = w->global.ndim};
  memcpy(g.shape, w->global.shape, sizeof g.shape);
  memcpy(g.origin, w->origin[shard], sizeof g.origin);
  return g;
}

static orr_status run_draw(const orr_work *w, int shard) {
  orr_random_key key = orr_random_key_of(&w->args);
  orr_global global = global_of(w, shard);
  orr_view *y = orr_work_out(w, shard, 0);
  const double *f = w->args.f;
  switch (w->op->code) {
    case 0: w->k->uniform(&key, &global, f[0], f[1], y); break;
    case 1: w->k->normal(&key, &global, f[0], f[1], y); break;
    case 2: w->k->randint(&key, &global, w->args.i[4], w->args.i[5], y); break;
    default: w->k->bernoulli(&key, &global, f[0], y);
  }
  return ORR_OK;
}

const orr_op orr_op_uniform = {.name = "uniform",
                               .flags = ORR_OP_ORIGIN | ORR_OP_KEYED,
                               .n_out = 1,
                               .code = 0,
                               .run = run_draw};
const orr_op orr_op_normal = {.name = "normal",
                              .flags = ORR_OP_ORIGIN | ORR_OP_KEYED,
                              .n_out = 1,
                              .code = 1,
                              .run = run_draw};
const orr_op orr_op_randint = {.name = "randint",
                               .flags = ORR_OP_ORIGIN | ORR_OP_KEYED,
                               .n_out = 1,
                               .code = 2,
                               .run = run_draw};
const orr_op orr_op_bernoulli = {.name = "bernoulli",
                                 .flags = ORR_OP_ORIGIN | ORR_OP_KEYED,
                                 .n_out = 1,
                                 .code = 3,
                                 .run = run_draw};

orr_status orr_random_permutation(const orr_random_key *key, int64_t n, orr_tensor **out) {
  orr_meta meta = {.dtype = ORR_I64, .ndim = 1, .shape = {n}};
  if (n < 0) return orr_fail(ORR_EARG, "a permutation needs a count of at least 0");
  ORR_TRY(orr_tensor_new(&meta, orr_layout_single(0), NULL, out));
  if (orr_host_hook) orr_host_hook("draws a permutation");
  orr_status status = orr_buffer_wait_write(orr_tensor_buffer(*out, 0));
  if (status) {
    orr_tensor_free(*out);
    return status;
  }
  if (n) orr_k_randperm(key, n, orr_tensor_buffer(*out, 0)->data);
  return ORR_OK;
}

/* ---- dropout ---- */

/* Rows of a micro-batch (args.i[4..6]: rows of the batch, the first, how many) are drawn as the
 * rows of the whole batch that they are. */
static void move_to_batch(const orr_args *args, orr_global *global) {
  int64_t rows = args->i[4], first = args->i[5], n = args->i[6];
  if (rows == 0 || n == 0 || global->ndim == 0 || global->shape[0] % n) return;
  int64_t times = global->shape[0] / n; /* rows a sample, where (N, T) was made one dimension */
  global->shape[0] = rows * times;
  global->origin[0] += first * times;
}

static orr_status run_dropout(const orr_work *w, int shard) {
  orr_random_key key = orr_random_key_of(&w->args);
  orr_global global = global_of(w, shard);
  move_to_batch(&w->args, &global);
  w->k->dropout(&key, &global, w->args.f[0], orr_work_in(w, shard, 0),
                orr_work_out(w, shard, 0), NULL);
  return ORR_OK;
}

static orr_status grad_dropout(orr_grad *g) {
  g->gx[0] = orr_g(g, g->op, g->args, 1, g->gy[0]);
  return g->status;
}

/* args.i[0..3]: the key; args.i[4..6]: the micro-batch; args.f[0]: p. */
static const orr_op dropout_keyed = {
    .name = "dropout_keyed",
    .flags = ORR_OP_ORIGIN | ORR_OP_KEYED | ORR_OP_LIKE_IN | ORR_OP_LINEAR,
    .n_in = 1,
    .n_out = 1,
    .infer = orr_infer_same,
    .label = orr_label_same,
    .run = run_dropout,
    .grad = grad_dropout};

static orr_status compose_dropout(const orr_op *op, orr_tensor *const *in, int n_in,
                                  const orr_args *args, orr_tensor **out) {
  double p = args->f[0];
  orr_args keyed = {.f = {p}};
  (void)n_in;
  if (!(p >= 0 && p <= 1))
    return orr_fail(ORR_EARG, "%s: the probability must be within 0 and 1, and is %g", op->name,
                    p);
  if (!orr_dtype_is_float(in[0]->meta.dtype))
    return orr_fail(ORR_EARG, "%s: needs a floating-point tensor and got %s", op->name,
                    orr_dtype_name(in[0]->meta.dtype));
  if (!args->i[0] || p == 0) {
    *out = orr_tensor_ref(in[0]);
    return ORR_OK;
  }
  orr_random_next(ORR_STREAM_DROPOUT, &keyed);
  orr_random_micro m = orr_random_get_micro();
  keyed.i[4] = m.rows;
  keyed.i[5] = m.first;
  keyed.i[6] = m.n;
  return orr_call1(&dropout_keyed, in[0], &keyed, out);
}

static const orr_op dropout = {.name = "dropout",
                               .args = "t f=0.5 b=true",
                               .n_in = 1,
                               .n_out = 1,
                               .compose = compose_dropout};

const orr_op *const orr_ops_random[] = {&orr_op_uniform,
                                        &orr_op_normal,
                                        &orr_op_randint,
                                        &orr_op_bernoulli,
                                        &dropout_keyed,
                                        &dropout,
                                        NULL};
