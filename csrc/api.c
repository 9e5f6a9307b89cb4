/* api.c: the public functions of orrery.h, thin over the engine.
 *
 * Invariant: every function that fails says so by its status and leaves *out NULL; an interrupt
 * that was reported is cleared, so that the next call works.
 * To add a function: its prototype and words in orrery.h, its body here in the same order.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "interrupt.h"
#include "op.h"
#include "op_words.h"
#include "plan.h"
#include "random_state.h"

static orr_status done(orr_status status) {
  status = orr_one_error(status);
  if (status == ORR_EINTERRUPT) orr_interrupt_clear();
  return status;
}

/* ---- the engine ---- */

orr_status orrery_open(void) { return done(orr_devices_open()); }

void orrery_close(void) { orr_devices_close(); }

const char *orrery_last_error(void) { return orr_last_error(); }

void orrery_interrupt(void) { orr_interrupt_raise(); }

int orrery_device_count(void) { return orr_device_visible(); }

orr_status orrery_synchronize(const char *device) {
  orr_device *d = NULL;
  if (device) ORR_TRY(orr_device_find(device, &d));
  return done(orr_synchronize(d));
}

void orrery_manual_seed(uint64_t seed) { orr_random_seed(seed); }

orr_status orrery_memory(const char *device, orr_memory *out) {
  orr_device *d;
  ORR_TRY(orr_device_find(device, &d));
  *out = (orr_memory){.live = d->live, .peak = d->peak, .cached = d->cached, .limit = d->limit};
  return ORR_OK;
}

orr_status orrery_set_memory_limit(const char *device, size_t bytes) {
  orr_device *d;
  ORR_TRY(orr_device_find(device, &d));
  orr_set_memory_limit(d, bytes);
  return ORR_OK;
}

/* ---- tensors ---- */

static size_t bytes_of(const orr_tensor *t) {
  return (size_t)orr_tensor_numel(t) * orr_dtype_size(t->meta.dtype);
}

orr_status orrery_tensor(const char *dtype, int ndim, const int64_t *shape, const void *data,
                         orr_tensor **out) {
  orr_meta meta = {.ndim = ndim};
  orr_args zero = {.f = {0}};
  *out = NULL;
  ORR_TRY(orr_devices_open());
  ORR_TRY(orr_dtype_parse(dtype, &meta.dtype));
  if (ndim < 0 || ndim > ORR_MAX_DIM)
    return orr_fail(ORR_EARG, "a tensor has 0 to %d dimensions, not %d", ORR_MAX_DIM, ndim);
  int64_t room = PTRDIFF_MAX / 8;
  for (int d = 0; d < ndim; d++) {
    int64_t size = shape[d];
    if (size < 0 || (size > 0 && size > room))
      return orr_fail(ORR_EARG, "dimension %d has %lld elements, which is not possible", d + 1,
                      (long long)size);
    if (size > 0) room /= size;
    meta.shape[d] = size;
  }
  return done(data ? orr_tensor_from_host(&meta, data, out)
                   : orr_create(&orr_op_full, &meta, orr_layout_single(0), &zero, out));
}

void orrery_free(orr_tensor *take_t) { orr_tensor_free(take_t); }

orr_tensor *orrery_ref(orr_tensor *t) { return orr_tensor_ref(t); }

int orrery_ndim(const orr_tensor *t) { return t->meta.ndim; }

int64_t orrery_size(const orr_tensor *t, int d) {
  return d >= 1 && d <= t->meta.ndim ? t->meta.shape[d - 1] : 0;
}

const char *orrery_dtype(const orr_tensor *t) { return orr_dtype_name(t->meta.dtype); }

char *orrery_describe(const orr_tensor *t, char *buf, size_t size) {
  return orr_tensor_text(t, buf, size);
}

orr_status orrery_read(orr_tensor *t, void *data, size_t bytes) {
  orr_tensor *host;
  if (bytes != bytes_of(t)) {
    char text[300];
    return orr_fail(ORR_EARG, "read: %zu bytes are not the %zu of %s", bytes, bytes_of(t),
                    orr_tensor_text(t, text, sizeof text));
  }
  ORR_TRY(done(orr_tensor_full(t, &host)));
  orr_view v;
  orr_tensor_view(host, 0, &v);
  if (bytes) memcpy(data, v.data, bytes);
  orr_tensor_free(host);
  return ORR_OK;
}

orr_status orrery_item(orr_tensor *t, double *out) {
  orr_tensor *wide;
  char text[300];
  if (orr_tensor_numel(t) != 1)
    return orr_fail(ORR_EARG, "item: needs one element and got %s",
                    orr_tensor_text(t, text, sizeof text));
  bool was = orr_set_grad_mode(false);
  orr_status status = done(orr_cast(t, ORR_F64, &wide));
  orr_set_grad_mode(was);
  if (status) return status;
  status = orrery_read(wide, out, sizeof *out);
  orr_tensor_free(wide);
  return status;
}

/* ---- ops ---- */

typedef struct reading {
  const orr_op *op; /* becomes the scalar form where a number stands for a tensor */
  const char *name;
  orr_tensor *const *in;
  const double *arg;
  int n_in, n_arg, at_in, at_arg;
  orr_tensor *tensor[ORR_MAX_WORDS];
  int n_tensor;
  orr_args args;
  int n_i, n_f;
} reading;

/* The next number, its default where it is left out. */
static orr_status next_number(reading *r, const orr_word *w, double *out) {
  bool given = r->at_arg < r->n_arg;
  if (given) *out = r->arg[r->at_arg++];
  if (w->has_default && (!given || isnan(*out))) *out = w->otherwise;
  else if (!given)
    return orr_fail(ORR_EARG, "%s: number %d is missing", r->name, r->at_arg + 1);
  return ORR_OK;
}

static orr_status whole(const reading *r, double value, int64_t *out) {
  if (!(fabs(value) <= 9007199254740992.0) || value != floor(value))
    return orr_fail(ORR_EARG, "%s: number %d must be whole and is %g", r->name, r->at_arg,
                    value);
  *out = (int64_t)value;
  return ORR_OK;
}

static orr_status dimension(const reading *r, double value, int extra, int64_t *out) {
  const orr_tensor *t = r->n_in ? r->in[0] : NULL;
  int ndim = t ? t->meta.ndim + extra : 0;
  ORR_TRY(whole(r, value, out));
  if (*out == 0 || *out > ndim || *out < -ndim)
    return orr_fail(ORR_EARG, "%s: dimension %g of a tensor with %d", r->name, value, ndim);
  *out += *out > 0 ? -1 : ndim;
  return ORR_OK;
}

static orr_status read_integer(reading *r, const orr_word *w) {
  double value;
  int before = r->at_arg;
  int64_t *to = &r->args.i[r->n_i++];
  ORR_TRY(next_number(r, w, &value));
  bool dim = w->kind == 'd' || w->kind == 'e',
       by_default = w->has_default && r->at_arg == before;
  if (w->has_default && isnan(value)) *to = ORR_NIL;
  else if (dim && by_default && r->n_in && r->in[0] && r->in[0]->meta.ndim == 0) *to = 0;
  else if (dim) return dimension(r, value, w->kind == 'e', to);
  else return whole(r, value, to);
  return ORR_OK;
}

/* All numbers that are left, behind their count. */
static orr_status read_list(reading *r, bool dims) {
  int n = r->n_arg - r->at_arg;
  if (n > ORR_MAX_DIM)
    return orr_fail(ORR_EARG, "%s: at most %d numbers, not %d", r->name, ORR_MAX_DIM, n);
  r->args.i[r->n_i++] = n;
  for (int k = 0; k < n; k++) {
    double value = r->arg[r->at_arg++];
    int64_t *to = &r->args.i[r->n_i++];
    ORR_TRY(dims ? dimension(r, value, 0, to) : whole(r, value, to));
  }
  return ORR_OK;
}

static orr_status read_tensor(reading *r, const orr_word *w) {
  orr_tensor *t = r->at_in < r->n_in ? r->in[r->at_in] : NULL;
  r->at_in++;
  if (t || w->optional) {
    r->tensor[r->n_tensor++] = t;
    return ORR_OK;
  }
  if (w->kind != 's' || !r->op->scalar)
    return orr_fail(ORR_EARG, "%s: tensor %d is missing", r->name, r->at_in);
  r->args.i[0] = r->at_in == 1;
  r->op = r->op->scalar;
  return next_number(r, w, &r->args.f[0]);
}

static orr_status read_word(reading *r, const orr_word *w) {
  switch (w->kind) {
    case 't':
    case 's': return read_tensor(r, w);
    case 'f': return next_number(r, w, &r->args.f[r->n_f++]);
    case 'L': return read_list(r, false);
    case 'D': return read_list(r, true);
    default: return read_integer(r, w);
  }
}

/* The op of that name, or the in-place form of "name_". */
static orr_status find_op(const char *name, const orr_op **op, bool *in_place) {
  char stem[64];
  size_t n = strlen(name);
  *op = orr_op_find(name);
  *in_place = *op && (*op)->flags & ORR_OP_ALWAYS_IN_PLACE;
  if (!*op && n > 1 && n < sizeof stem && name[n - 1] == '_') {
    memcpy(stem, name, n - 1);
    stem[n - 1] = 0;
    *op = orr_op_find(stem);
    if (*op && !((*op)->flags & ORR_OP_IN_PLACE)) *op = NULL;
    *in_place = true;
  }
  if (*op && (*op)->args) return ORR_OK;
  return orr_fail(ORR_EARG, "there is no op '%.60s'", name);
}

/* The tensors of a call: those of its words, or the whole list that it takes. */
static orr_status read_call(reading *r, orr_tensor *const **in, int *n) {
  orr_word words[ORR_MAX_WORDS];
  int n_words = orr_words_read(r->op->args, words);
  bool list = n_words && words[0].kind == 'T';
  for (int k = 0; list && k < r->n_in; k++)
    if (!r->in[k]) return orr_fail(ORR_EARG, "%s: tensor %d is missing", r->name, k + 1);
  if (list && r->n_in < 1) return orr_fail(ORR_EARG, "%s: needs a tensor", r->name);
  for (int k = list; k < n_words; k++) ORR_TRY(read_word(r, &words[k]));
  if (r->at_arg < r->n_arg || (!list && r->at_in < r->n_in))
    return orr_fail(ORR_EARG, "%s: %d tensors and %d numbers are more than it takes", r->name,
                    r->n_in, r->n_arg);
  *in = list ? r->in : r->tensor;
  *n = list ? r->n_in : r->n_tensor;
  return ORR_OK;
}

orr_status orrery_call(const char *name, orr_tensor *const *in, int n_in, const double *arg,
                       int n_arg, orr_tensor **out, int n_out) {
  reading r = {.name = name, .in = in, .n_in = n_in, .arg = arg, .n_arg = n_arg};
  orr_tensor *made[ORR_MAX_OUT] = {NULL};
  orr_tensor *const *tensors;
  bool in_place;
  int n;
  for (int k = 0; k < n_out; k++) out[k] = NULL;
  ORR_TRY(find_op(name, &r.op, &in_place));
  ORR_TRY(read_call(&r, &tensors, &n));
  ORR_TRY(done(orr_dispatch(r.op, tensors, n, &r.args, in_place, made)));
  for (int k = 0, to = 0; k < ORR_MAX_OUT; k++) {
    if (made[k] && to < n_out) out[to++] = made[k];
    else orr_tensor_free(made[k]);
  }
  return ORR_OK;
}

orr_status orrery_cast(orr_tensor *t, const char *dtype, orr_tensor **out) {
  orr_dtype to;
  *out = NULL;
  ORR_TRY(orr_dtype_parse(dtype, &to));
  if (t->meta.dtype != to) return done(orr_cast(t, to, out));
  *out = orr_tensor_ref(t);
  return ORR_OK;
}

/* ---- gradients ---- */

orr_status orrery_require_grad(orr_tensor *t, bool on) {
  if (t->node) return orr_fail(ORR_EARG, "only a leaf can be told whether it requires grad");
  if (on && !orr_dtype_is_float(t->meta.dtype))
    return orr_fail(ORR_EARG, "a tensor of %s has no gradient", orr_dtype_name(t->meta.dtype));
  orr_tensor_require_grad(t, on);
  return ORR_OK;
}

orr_status orrery_backward(orr_tensor *y, orr_tensor *gy) {
  return done(orr_backward(&y, 1, gy ? &gy : NULL, false, false));
}

orr_tensor *orrery_grad(const orr_tensor *t) { return t->grad; }

void orrery_zero_grad(orr_tensor *t) {
  if (t->grad) orr_tensor_free(t->grad);
  t->grad = NULL;
}

bool orrery_grad_mode(bool on) { return orr_set_grad_mode(on); }

/* ---- devices and plans ---- */

/* The mesh of a plan of one stage, on the devices that its names mean. */
static orr_status mesh_of_plan(const orr_plan *plan, const orr_plan_places *places,
                               const orr_mesh **out) {
  const orr_plan_stage *stage = &plan->stage[0];
  const char *name[ORR_MAX_AXES];
  int size[ORR_MAX_AXES], device[ORR_MAX_DEVICES];
  unsigned sequence = 0;
  if (places->n_places > ORR_MAX_DEVICES)
    return orr_fail(ORR_EARG, "plan: a mesh has at most %d devices", ORR_MAX_DEVICES);
  for (int k = 0; k < stage->n_axes; k++) {
    name[k] = orr_plan_kind_name(stage->axis[k].kind);
    size[k] = stage->axis[k].size;
    const orr_plan_value *v = &stage->axis[k].options[ORR_PLAN_SEQUENCE];
    sequence |= (unsigned)(v->set && v->number) << k;
  }
  for (int k = 0; k < places->n_places; k++) {
    orr_device *d;
    char label[32];
    snprintf(label, sizeof label, "%s:%d", places->place[k].kind, places->place[k].id);
    ORR_TRY(orr_device_find(label, &d));
    device[k] = d->index;
  }
  return orr_mesh_get(stage->n_axes, size, name, sequence, device, out);
}

orr_status orrery_mesh(const char *text, const orr_mesh **out) {
  orr_plan *plan = NULL;
  orr_plan_places *places = NULL;
  orr_device *d;
  *out = NULL;
  ORR_TRY(orr_devices_open());
  if (!strchr(text, '<')) {
    ORR_TRY(orr_device_find(text, &d));
    *out = orr_mesh_single(d->index);
    return ORR_OK;
  }
  orr_plan_env env = {.n_cpu = orr_device_cpus(),
                      .n_cuda = orr_device_cudas(),
                      .cuda_why = orr_cuda_why(),
                      .find = orr_cuda_find};
  orr_status status = orr_plan_parse(NULL, text, strlen(text), &plan);
  if (!status) status = orr_plan_resolve(plan, &env, &places);
  if (!status && plan->n_stages > 1)
    status = orr_fail(ORR_EARG,
                      "plan: %.400s has %d stages, each a mesh of its own; ask for one, "
                      "as in \"cpu:0\" or \"data<0,1>\"",
                      plan->text, plan->n_stages);
  if (!status) status = mesh_of_plan(plan, places, out);
  orr_plan_places_free(places);
  orr_plan_free(plan);
  return status;
}

/* "shard(1), replicate": a word an axis, or one for all. */
static orr_status read_places(const char *text, int ndim, int n_axes, orr_place *place) {
  char word[64];
  int n = 0;
  for (const char *at = text; n < n_axes; n++) {
    at += strspn(at, " ");
    size_t length = strcspn(at, ",");
    if (length >= sizeof word) length = sizeof word - 1;
    memcpy(word, at, length);
    word[length] = 0;
    ORR_TRY(orr_place_parse(word, ndim, &place[n]));
    at += strcspn(at, ",");
    if (!*at) break;
    at++;
  }
  if (n + 1 < n_axes && n > 0)
    return orr_fail(ORR_EARG,
                    "\"%s\" has %d placements for %d axes; give one each, or one for all", text,
                    n + 1, n_axes);
  for (int k = n + 1; k < n_axes; k++) place[k] = place[0];
  return ORR_OK;
}

orr_status orrery_distribute(orr_tensor *t, const orr_mesh *mesh, const char *placement,
                             orr_tensor **out) {
  orr_place place[ORR_MAX_AXES];
  orr_layout *layout;
  *out = NULL;
  if (mesh->n_axes == 0)
    return done(orr_redistribute_op(t, orr_layout_single(mesh->device[0]), out));
  ORR_TRY(read_places(placement, t->meta.ndim, mesh->n_axes, place));
  ORR_TRY(orr_layout_new(mesh, place, t->meta.ndim, t->meta.shape, &layout));
  orr_status status = done(orr_redistribute_op(t, layout, out));
  orr_layout_free(layout);
  return status;
}
