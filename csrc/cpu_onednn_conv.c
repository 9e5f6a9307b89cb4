/* cpu_onednn_conv.c: convolution and pooling through oneDNN.
 *
 * Channels-last views are computed on as they are. Of any other strides the library chooses
 * its form and a reorder stands between: NCHW computed in place runs at half the speed and
 * worse. Weights are in the form the library picks, reordered at each run: they are small
 * beside the product.
 *
 * Invariant: shapes, settled strides and geometry are the key; pointers alone differ between
 * runs.
 */
#include "cpu_onednn_int.h"

#include <string.h>

/* One tensor in two forms: the caller's strides, and those the library computes on, or
 * `free_form` where it may choose. */
struct side {
  int n;
  bool free_form;
  int64_t shape[5], outer[5], inner[5];
};

enum layout { CHANNELS_LAST, CHANNELS_FIRST };

static void dense_strides(const int64_t shape[4], enum layout layout, int64_t stride[4]) {
  static const int orders[2][4] = {{1, 3, 2, 0}, {3, 2, 1, 0}};
  int64_t step = 1;
  for (int i = 0; i < 4; i++) {
    int d = orders[layout][i];
    stride[d] = step;
    step *= shape[d];
  }
}

static bool has_layout(const orr_view *v, enum layout layout) {
  int64_t stride[4];
  dense_strides(v->shape, layout, stride);
  for (int d = 0; d < 4; d++)
    if (v->shape[d] != 1 && v->stride[d] != stride[d]) return false;
  return true;
}

static void side_of(struct side *s, const orr_view *v, enum layout layout) {
  s->n = 4;
  s->free_form = false;
  memcpy(s->shape, v->shape, 4 * sizeof *s->shape);
  dense_strides(v->shape, layout, s->inner);
  if (has_layout(v, layout)) {
    memcpy(s->outer, s->inner, 4 * sizeof *s->outer);
    return;
  }
  for (int d = 0; d < 4; d++) s->outer[d] = v->shape[d] == 1 ? 1 : v->stride[d];
}

/* (O, I/G, KH, KW) is (G, O/G, I/G, KH, KW) to the library when groups are several. */
static void side_of_weights(struct side *s, const orr_view *w, int64_t groups) {
  int at = 0;
  if (groups > 1) {
    s->shape[0] = groups;
    s->outer[0] = w->stride[0] * (w->shape[0] / groups);
    at = 1;
  }
  for (int d = 0; d < 4; d++) {
    s->shape[at + d] = d == 0 ? w->shape[0] / groups : w->shape[d];
    s->outer[at + d] = w->stride[d];
  }
  s->n = at + 4;
  s->free_form = true;
  for (int d = 0; d < s->n; d++)
    if (s->shape[d] == 1) s->outer[d] = 1;
}

static bool repeats(const orr_view *v) {
  for (int d = 0; d < v->ndim; d++)
    if (v->shape[d] > 1 && v->stride[d] == 0) return true;
  return false;
}

/* What must stand after the last element for the output to have `out` elements. Negative
 * where the window never reaches the input's end. */
static int64_t pad_high(int64_t in, int64_t out, int64_t kernel, int64_t stride,
                        int64_t dilation, int64_t low) {
  return (out - 1) * stride + (kernel - 1) * dilation + 1 - in - low;
}

/* -- convolution */
struct conv {
  orr_dnn_kind kind;
  const orr_onednn_conv *g;
  const orr_view *x, *w, *bias, *y;
  bool relu;
};

static const char refusal[] = "not one that oneDNN takes";

static bool conv_is_sound(const struct conv *c) {
  const orr_view *x = c->x, *w = c->w, *y = c->y, *bias = c->bias;
  int64_t groups = c->g->groups;
  if (!orr_dnn_dtype(x->dtype) || w->dtype != x->dtype || y->dtype != x->dtype) return false;
  if (x->ndim != 4 || w->ndim != 4 || y->ndim != 4 || groups < 1) return false;
  if (x->shape[0] != y->shape[0] || y->shape[1] != w->shape[0]) return false;
  if (w->shape[0] % groups || w->shape[1] * groups != x->shape[1]) return false;
  for (int i = 0; i < 2; i++)
    if (c->g->stride[i] < 1 || c->g->dilation[i] < 1 || c->g->padding[i] < 0) return false;
  if (bias && (bias->ndim != 1 || bias->shape[0] != w->shape[0] || bias->dtype != x->dtype ||
               (bias->shape[0] != 1 && bias->stride[0] != 1)))
    return false;
  const orr_view *out = c->kind == ORR_DNN_CONV_FORWARD         ? y
                        : c->kind == ORR_DNN_CONV_BACKWARD_DATA ? x
                                                                : w;
  return !repeats(out);
}

static bool conv_is_empty(const struct conv *c) {
  return !orr_dnn_count(c->x) || !orr_dnn_count(c->w) || !orr_dnn_count(c->y);
}

/* An empty convolution has one answer, zero, except a forward with nothing to sum but a
 * bias, and a gradient of a bias that has terms though the weights have none. */
static bool empty_is_zero(const struct conv *c) {
  if (c->kind == ORR_DNN_CONV_FORWARD) return !orr_dnn_count(c->y) || (!c->bias && !c->relu);
  if (c->kind == ORR_DNN_CONV_BACKWARD_DATA) return true;
  return !orr_dnn_count(c->y) || !c->bias;
}

static void zero_result(const struct conv *c) {
  if (c->kind == ORR_DNN_CONV_FORWARD) orr_dnn_zero(c->y);
  else if (c->kind == ORR_DNN_CONV_BACKWARD_DATA) orr_dnn_zero(c->x);
  else {
    orr_dnn_zero(c->w);
    if (c->bias) orr_dnn_zero(c->bias);
  }
}

struct conv_sides {
  struct side x, w, y;
};

static void conv_key(orr_dnn_key *key, const struct conv *c, const struct conv_sides *s) {
  key->n = 0;
  orr_dnn_key_add(key, c->kind | c->x->dtype << 8 | (c->bias != NULL) << 16 | c->relu << 17);
  orr_dnn_key_add_array(key, 4, s->x.shape);
  orr_dnn_key_add_array(key, 4, s->x.outer);
  orr_dnn_key_add_array(key, 4, c->w->shape);
  orr_dnn_key_add_array(key, s->w.n, s->w.outer);
  orr_dnn_key_add_array(key, 2, s->y.shape + 2);
  orr_dnn_key_add_array(key, 4, s->y.outer);
  orr_dnn_key_add_array(key, 2, c->g->stride);
  orr_dnn_key_add_array(key, 2, c->g->padding);
  orr_dnn_key_add_array(key, 2, c->g->dilation);
  orr_dnn_key_add(key, c->g->groups);
}

/* Descriptors: of the caller's memory, and of what the library is asked for. */
struct conv_mds {
  orr_dnn_md x, w, y, bias, inner_x, inner_w, inner_y;
};

static int side_mds(const struct side *s, int dtype, orr_dnn_md *outer, orr_dnn_md *inner) {
  int status = orr_dnn_md_strided(outer, s->n, s->shape, s->outer, dtype);
  if (status != DNN_SUCCESS) return status;
  if (s->free_form) return orr_dnn_md_any(inner, s->n, s->shape, dtype);
  return orr_dnn_md_strided(inner, s->n, s->shape, s->inner, dtype);
}

static int conv_describe(struct conv_mds *m, const struct conv *c, const struct conv_sides *s) {
  static const int64_t one = 1;
  int dtype = orr_dnn_dtype(c->x->dtype);
  int status = side_mds(&s->x, dtype, &m->x, &m->inner_x);
  if (!status) status = side_mds(&s->y, dtype, &m->y, &m->inner_y);
  if (!status) status = side_mds(&s->w, dtype, &m->w, &m->inner_w);
  if (!status && c->bias) status = orr_dnn_md_strided(&m->bias, 1, c->bias->shape, &one, dtype);
  return status;
}

static void conv_mds_free(struct conv_mds *m) {
  orr_dnn_md *all[] = {&m->x, &m->w, &m->y, &m->bias, &m->inner_x, &m->inner_w, &m->inner_y};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) orr_dnn_md_free(all[i]);
}

/* Ports in the order x, w, y, bias. */
static void conv_ports(orr_dnn_port ports[4], const struct conv_mds *m, orr_dnn_kind kind) {
  bool data = kind == ORR_DNN_CONV_BACKWARD_DATA;
  bool weights = kind == ORR_DNN_CONV_BACKWARD_WEIGHTS;
  bool forward = kind == ORR_DNN_CONV_FORWARD;
  ports[0] = (orr_dnn_port){data ? DNN_ARG_DIFF_SRC : DNN_ARG_SRC,
                            data ? DNN_QUERY_DIFF_SRC : DNN_QUERY_SRC, 0, m->x.ptr, data};
  ports[1] = (orr_dnn_port){weights ? DNN_ARG_DIFF_WEIGHTS : DNN_ARG_WEIGHTS,
                            weights ? DNN_QUERY_DIFF_WEIGHTS : DNN_QUERY_WEIGHTS, 0, m->w.ptr,
                            weights};
  ports[2] = (orr_dnn_port){forward ? DNN_ARG_DST : DNN_ARG_DIFF_DST,
                            forward ? DNN_QUERY_DST : DNN_QUERY_DIFF_DST, 0, m->y.ptr, forward};
  ports[3] = (orr_dnn_port){weights ? DNN_ARG_DIFF_BIAS : DNN_ARG_BIAS,
                            weights ? DNN_QUERY_DIFF_WEIGHTS : DNN_QUERY_WEIGHTS, 1,
                            m->bias.ptr, weights};
}

static orr_dnn_entry *conv_make(const orr_dnn_key *key, const struct conv *c,
                                const struct conv_sides *s, orr_status *status) {
  struct conv_mds m;
  orr_dnn_port ports[4];
  memset(&m, 0, sizeof m);
  orr_dnn_op op = {.kind = c->kind,
                   .src = &m.inner_x,
                   .weights = &m.inner_w,
                   .dst = &m.inner_y,
                   .bias = c->bias ? &m.bias : NULL,
                   .dtype = orr_dnn_dtype(c->x->dtype),
                   .relu = c->relu};
  for (int i = 0; i < 2; i++) {
    op.kernel[i] = c->w->shape[2 + i];
    op.stride[i] = c->g->stride[i];
    op.dilation[i] = c->g->dilation[i] - 1;
    op.pad_low[i] = c->g->padding[i];
    op.pad_high[i] = pad_high(c->x->shape[2 + i], c->y->shape[2 + i], op.kernel[i],
                              op.stride[i], c->g->dilation[i], op.pad_low[i]);
  }
  int result = conv_describe(&m, c, s);
  conv_ports(ports, &m, c->kind);
  orr_dnn_entry *e =
      orr_dnn_make(key, result == DNN_SUCCESS ? &op : NULL, c->bias ? 4 : 3, ports, status);
  conv_mds_free(&m);
  return e;
}

static orr_dnn_entry *conv_entry(const struct conv *c, orr_status *status) {
  struct conv_sides s;
  orr_dnn_key key;
  side_of(&s.x, c->x, CHANNELS_LAST);
  side_of(&s.y, c->y, CHANNELS_LAST);
  s.x.free_form = s.y.free_form =
      !has_layout(c->x, CHANNELS_LAST) || !has_layout(c->y, CHANNELS_LAST);
  side_of_weights(&s.w, c->w, c->g->groups);
  conv_key(&key, c, &s);
  *status = ORR_OK;
  orr_dnn_entry *e = orr_dnn_find(&key);
  return e ? e : conv_make(&key, c, &s, status);
}

static bool conv_supported(const struct conv *c) {
  orr_status status;
  if (!orr_dnn_load() || !conv_is_sound(c)) return false;
  if (conv_is_empty(c)) return empty_is_zero(c);
  orr_dnn_entry *e = conv_entry(c, &status);
  return e && !orr_dnn_refused(e);
}

static orr_status conv_run(const struct conv *c) {
  orr_status status;
  if (!orr_dnn_load()) return orr_fail(ORR_EDEVICE, "oneDNN is not installed");
  if (!conv_is_sound(c)) return orr_fail(ORR_EARG, "convolution: %s", refusal);
  if (conv_is_empty(c)) {
    if (!empty_is_zero(c)) return orr_fail(ORR_EARG, "empty convolution: %s", refusal);
    zero_result(c);
    return ORR_OK;
  }
  orr_dnn_entry *e = conv_entry(c, &status);
  if (!e) return status;
  if (orr_dnn_refused(e)) return orr_fail(ORR_EARG, "convolution: %s", refusal);
  void *data[] = {c->x->data, c->w->data, c->y->data, c->bias ? c->bias->data : NULL};
  return orr_dnn_run(e, data);
}

bool orr_onednn_supports_conv_forward(const orr_onednn_conv *g, const orr_view *x,
                                      const orr_view *w, const orr_view *bias,
                                      const orr_view *y, orr_onednn_activation activation) {
  struct conv c = {ORR_DNN_CONV_FORWARD, g, x, w, bias, y, activation == ORR_ONEDNN_RELU};
  return conv_supported(&c);
}

orr_status orr_onednn_conv_forward(const orr_onednn_conv *g, const orr_view *x,
                                   const orr_view *w, const orr_view *bias, const orr_view *y,
                                   orr_onednn_activation activation) {
  struct conv c = {ORR_DNN_CONV_FORWARD, g, x, w, bias, y, activation == ORR_ONEDNN_RELU};
  return conv_run(&c);
}

bool orr_onednn_supports_conv_backward_data(const orr_onednn_conv *g, const orr_view *dy,
                                            const orr_view *w, const orr_view *dx) {
  struct conv c = {ORR_DNN_CONV_BACKWARD_DATA, g, dx, w, NULL, dy, false};
  return conv_supported(&c);
}

orr_status orr_onednn_conv_backward_data(const orr_onednn_conv *g, const orr_view *dy,
                                         const orr_view *w, const orr_view *dx) {
  struct conv c = {ORR_DNN_CONV_BACKWARD_DATA, g, dx, w, NULL, dy, false};
  return conv_run(&c);
}

bool orr_onednn_supports_conv_backward_weights(const orr_onednn_conv *g, const orr_view *x,
                                               const orr_view *dy, const orr_view *dw,
                                               const orr_view *dbias) {
  struct conv c = {ORR_DNN_CONV_BACKWARD_WEIGHTS, g, x, dw, dbias, dy, false};
  return conv_supported(&c);
}

orr_status orr_onednn_conv_backward_weights(const orr_onednn_conv *g, const orr_view *x,
                                            const orr_view *dy, const orr_view *dw,
                                            const orr_view *dbias) {
  struct conv c = {ORR_DNN_CONV_BACKWARD_WEIGHTS, g, x, dw, dbias, dy, false};
  return conv_run(&c);
}

/* -- pooling */
struct pool {
  orr_dnn_kind kind;
  const orr_onednn_pool *g;
  const orr_view *x, *y;
};

static bool pool_is_sound(const struct pool *p) {
  const orr_view *x = p->x, *y = p->y;
  if (!orr_dnn_dtype(x->dtype) || y->dtype != x->dtype) return false;
  if (x->ndim != 4 || y->ndim != 4) return false;
  if (x->shape[0] != y->shape[0] || x->shape[1] != y->shape[1]) return false;
  for (int i = 0; i < 2; i++) {
    const orr_onednn_pool *g = p->g;
    if (g->kernel[i] < 1 || g->stride[i] < 1 || g->dilation[i] < 1 || g->padding[i] < 0)
      return false;
  }
  return !repeats(p->kind == ORR_DNN_POOL_FORWARD ? y : x);
}

static orr_dnn_entry *pool_make(const orr_dnn_key *key, const struct pool *p,
                                const struct side *x, const struct side *y,
                                orr_status *status) {
  orr_dnn_md md[4] = {0};
  bool backward = p->kind == ORR_DNN_POOL_BACKWARD;
  int dtype = orr_dnn_dtype(p->x->dtype);
  orr_dnn_op op = {.kind = p->kind, .src = &md[1], .dst = &md[3], .pool = p->g->kind};
  for (int i = 0; i < 2; i++) {
    op.kernel[i] = p->g->kernel[i];
    op.stride[i] = p->g->stride[i];
    op.dilation[i] = p->g->dilation[i] - 1;
    op.pad_low[i] = p->g->padding[i];
    op.pad_high[i] = pad_high(x->shape[2 + i], y->shape[2 + i], op.kernel[i], op.stride[i],
                              p->g->dilation[i], op.pad_low[i]);
  }
  int result = side_mds(x, dtype, &md[0], &md[1]);
  if (!result) result = side_mds(y, dtype, &md[2], &md[3]);
  orr_dnn_port ports[] = {
      {backward ? DNN_ARG_DIFF_SRC : DNN_ARG_SRC, backward ? DNN_QUERY_DIFF_SRC : DNN_QUERY_SRC,
       0, md[0].ptr, backward},
      {backward ? DNN_ARG_DIFF_DST : DNN_ARG_DST, backward ? DNN_QUERY_DIFF_DST : DNN_QUERY_DST,
       0, md[2].ptr, !backward},
      {DNN_ARG_WORKSPACE, DNN_QUERY_WORKSPACE, 0, NULL, !backward}};
  int n_ports = p->g->kind == ORR_ONEDNN_POOL_MAX ? 3 : 2;
  orr_dnn_entry *e =
      orr_dnn_make(key, result == DNN_SUCCESS ? &op : NULL, n_ports, ports, status);
  for (int i = 0; i < 4; i++) orr_dnn_md_free(&md[i]);
  return e;
}

/* Pooling does little with each element, so NCHW views are taken as they are. Forward and
 * backward must agree on the form, for the workspace's sake: it is y's layout that decides. */
static orr_dnn_entry *pool_entry(const struct pool *p, orr_status *status) {
  enum layout layout = has_layout(p->y, CHANNELS_FIRST) && !has_layout(p->y, CHANNELS_LAST)
                           ? CHANNELS_FIRST
                           : CHANNELS_LAST;
  struct side x, y;
  orr_dnn_key key;
  side_of(&x, p->x, layout);
  side_of(&y, p->y, layout);
  key.n = 0;
  orr_dnn_key_add(&key, p->kind | p->x->dtype << 8 | p->g->kind << 16 | layout << 20);
  orr_dnn_key_add_array(&key, 4, x.shape);
  orr_dnn_key_add_array(&key, 4, x.outer);
  orr_dnn_key_add_array(&key, 2, y.shape + 2);
  orr_dnn_key_add_array(&key, 4, y.outer);
  orr_dnn_key_add_array(&key, 2, p->g->kernel);
  orr_dnn_key_add_array(&key, 2, p->g->stride);
  orr_dnn_key_add_array(&key, 2, p->g->padding);
  orr_dnn_key_add_array(&key, 2, p->g->dilation);
  *status = ORR_OK;
  orr_dnn_entry *e = orr_dnn_find(&key);
  return e ? e : pool_make(&key, p, &x, &y, status);
}

static bool pool_is_empty(const struct pool *p) {
  return !orr_dnn_count(p->x) || !orr_dnn_count(p->y);
}

static bool pool_supported(const struct pool *p) {
  orr_status status;
  if (!orr_dnn_load() || !pool_is_sound(p)) return false;
  if (pool_is_empty(p)) return p->kind == ORR_DNN_POOL_BACKWARD || !orr_dnn_count(p->y);
  orr_dnn_entry *e = pool_entry(p, &status);
  return e && !orr_dnn_refused(e);
}

static orr_status pool_run(const struct pool *p, void *workspace) {
  orr_status status;
  if (!orr_dnn_load()) return orr_fail(ORR_EDEVICE, "oneDNN is not installed");
  if (!pool_is_sound(p)) return orr_fail(ORR_EARG, "pooling: %s", refusal);
  if (pool_is_empty(p)) {
    if (p->kind == ORR_DNN_POOL_BACKWARD) orr_dnn_zero(p->x);
    else if (orr_dnn_count(p->y)) return orr_fail(ORR_EARG, "empty pooling: %s", refusal);
    return ORR_OK;
  }
  orr_dnn_entry *e = pool_entry(p, &status);
  if (!e) return status;
  if (orr_dnn_refused(e)) return orr_fail(ORR_EARG, "pooling: %s", refusal);
  if (orr_dnn_port_bytes(e, 2) && !workspace)
    return orr_fail(ORR_EARG, "pooling: the maximum needs a workspace");
  void *data[] = {p->x->data, p->y->data, workspace};
  return orr_dnn_run(e, data);
}

bool orr_onednn_supports_pool(const orr_onednn_pool *g, const orr_view *x, const orr_view *y) {
  struct pool p = {ORR_DNN_POOL_FORWARD, g, x, y};
  return pool_supported(&p);
}

size_t orr_onednn_pool_workspace_bytes(const orr_onednn_pool *g, const orr_view *x,
                                       const orr_view *y) {
  struct pool p = {ORR_DNN_POOL_FORWARD, g, x, y};
  orr_status status;
  if (!orr_dnn_load() || !pool_is_sound(&p) || pool_is_empty(&p)) return 0;
  orr_dnn_entry *e = pool_entry(&p, &status);
  return e ? orr_dnn_port_bytes(e, 2) : 0;
}

orr_status orr_onednn_pool_forward(const orr_onednn_pool *g, const orr_view *x,
                                   const orr_view *y, void *workspace) {
  struct pool p = {ORR_DNN_POOL_FORWARD, g, x, y};
  return pool_run(&p, workspace);
}

bool orr_onednn_supports_pool_backward(const orr_onednn_pool *g, const orr_view *dy,
                                       const orr_view *dx) {
  struct pool p = {ORR_DNN_POOL_BACKWARD, g, dx, dy};
  return pool_supported(&p);
}

orr_status orr_onednn_pool_backward(const orr_onednn_pool *g, const orr_view *dy,
                                    const orr_view *dx, const void *workspace) {
  struct pool p = {ORR_DNN_POOL_BACKWARD, g, dx, dy};
  return pool_run(&p, (void *)(uintptr_t)workspace);
}
