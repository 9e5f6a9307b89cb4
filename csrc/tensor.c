/* tensor.c: tensors as headers over shared storage, one shard a device of the layout's mesh.
 *
 * Invariant: meta is global; shard k's shape is what the layout gives rank k; every shard stays
 * inside its buffer. Counts are the controller's alone.
 * To add a way of making tensors: build the header with header_new, then its shards.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/copy.h"
#include "orrery_int.h"
#include "pool.h"

void (*orr_node_release)(struct orr_node *node) = NULL;
void (*orr_node_hold)(struct orr_node *node) = NULL;
void (*orr_hook_release)(int hooks) = NULL;

static uint64_t serials = 0;
void (*orr_wrote_hook)(orr_tensor *t) = NULL;
void (*orr_host_hook)(const char *what) = NULL;

static orr_pool headers, storages; /* storages of one buffer */

void orr_tensor_require_grad(orr_tensor *t, bool on) {
  t->requires_grad = on;
  if (on && !t->serial) t->serial = ++serials;
}

static orr_status header_new(const orr_meta *meta, orr_layout *layout, orr_tensor **out) {
  orr_tensor *t = orr_pool_get(&headers, sizeof *t);
  if (!t) return orr_fail(ORR_EMEM, "out of host memory for a tensor's header");
  t->rc = 1;
  t->meta = *meta;
  t->storage = NULL;
  t->buffer0 = 0;
  t->n = layout->mesh->n;
  t->shard = &t->one;
  t->requires_grad = t->is_view = t->is_batch = false;
  t->node = NULL;
  t->out_index = 0;
  t->grad = NULL;
  t->serial = 0;
  t->reducer = NULL;
  t->use_layout = t->state_layout = NULL;
  t->hooks = 0;
  if (t->n > 1) {
    t->shard = malloc((size_t)t->n * sizeof *t->shard);
    if (!t->shard) {
      orr_pool_put(&headers, t);
      return orr_fail(ORR_EMEM, "out of host memory for a tensor's shards");
    }
  }
  t->layout = orr_layout_ref(layout);
  *out = t;
  return ORR_OK;
}

static void storage_free(orr_storage *s) {
  if (--s->rc) return;
  for (int k = 0; k < s->n; k++)
    if (s->buffer[k]) orr_buffer_free(s->buffer[k]);
  if (s->origin) orr_tensor_free(s->origin);
  if (s->cap == 1) orr_pool_put(&storages, s);
  else free(s);
}

/* Without buffers yet. */
static orr_storage *storage_room(int n) {
  size_t bytes = sizeof(orr_storage) + (size_t)n * sizeof(orr_buffer *);
  orr_storage *s = n == 1 ? orr_pool_get(&storages, bytes) : malloc(bytes);
  if (s) *s = (orr_storage){.rc = 1, .cap = n};
  return s;
}

static orr_status storage_new(const orr_tensor *t, orr_storage **out) {
  orr_storage *s = storage_room(t->n);
  if (!s) return orr_fail(ORR_EMEM, "out of host memory for a tensor's storage");
  size_t element = orr_dtype_size(t->meta.dtype);
  for (; s->n < t->n; s->n++) {
    size_t bytes = (size_t)orr_numel(t->meta.ndim, t->shard[s->n].shape) * element;
    orr_device *d = orr_device_at(t->layout->mesh->device[s->n]);
    orr_status status = orr_buffer_new(d, bytes, &s->buffer[s->n]);
    if (status) {
      storage_free(s);
      return status;
    }
  }
  *out = s;
  return ORR_OK;
}

/* Strides that walk `shape` in the order of `like`'s strides, densely. */
static void strides_like(int ndim, const int64_t *shape, const int64_t *like, int64_t *stride) {
  int order[ORR_MAX_DIM];
  for (int k = 0; k < ndim; k++) {
    int at = k;
    while (at > 0 && like[order[at - 1]] < like[k]) {
      order[at] = order[at - 1];
      at--;
    }
    order[at] = k;
  }
  int64_t step = 1;
  for (int k = ndim - 1; k >= 0; k--) {
    stride[order[k]] = step;
    step *= shape[order[k]] > 0 ? shape[order[k]] : 1;
  }
}

static bool repeats(int ndim, const orr_shard *s) {
  for (int k = 0; k < ndim; k++)
    if (s->stride[k] == 0 && s->shape[k] > 1) return true;
  return false;
}

orr_status orr_tensor_new(const orr_meta *meta, orr_layout *layout, const orr_tensor *like,
                          orr_tensor **out) {
  orr_tensor *t;
  ORR_TRY(header_new(meta, layout, &t));
  if (like && (like->meta.ndim != meta->ndim || like->n != t->n)) like = NULL;
  for (int r = 0; r < t->n; r++) {
    orr_shard *s = &t->shard[r];
    s->offset = 0;
    if (orr_tensor_is_single(t)) memcpy(s->shape, meta->shape, sizeof s->shape);
    else orr_layout_local(layout, r, meta->ndim, meta->shape, s->shape, NULL);
    if (like && !repeats(meta->ndim, &like->shard[r]))
      strides_like(meta->ndim, s->shape, like->shard[r].stride, s->stride);
    else orr_strides(meta->ndim, s->shape, s->stride);
  }
  orr_status status = storage_new(t, &t->storage);
  if (status) {
    orr_tensor_free(t);
    return status;
  }
  *out = t;
  return ORR_OK;
}

orr_status orr_tensor_alias_as(const orr_tensor *t, const orr_meta *meta, orr_layout *layout,
                               orr_tensor **out) {
  orr_tensor *a;
  ORR_TRY(header_new(meta, layout, &a));
  a->storage = t->storage;
  a->storage->rc++;
  a->buffer0 = t->buffer0;
  a->is_view = true;
  a->is_batch = t->is_batch;
  for (int r = 0; r < a->n && r < t->n; r++) a->shard[r] = t->shard[r];
  *out = a;
  return ORR_OK;
}

orr_status orr_tensor_alias(const orr_tensor *t, orr_tensor **out) {
  return orr_tensor_alias_as(t, &t->meta, t->layout, out);
}

orr_status orr_tensor_shard(const orr_tensor *t, int rank, orr_tensor **out) {
  orr_meta meta = t->meta;
  memcpy(meta.shape, t->shard[rank].shape, sizeof meta.shape);
  orr_tensor *s;
  ORR_TRY(orr_tensor_alias_as(t, &meta, orr_layout_single(t->layout->mesh->device[rank]), &s));
  s->buffer0 = t->buffer0 + rank;
  s->shard[0] = t->shard[rank];
  *out = s;
  return ORR_OK;
}

orr_status orr_tensor_join(const orr_meta *meta, orr_layout *layout, orr_tensor *const *part,
                           orr_tensor **out) {
  orr_tensor *t;
  int64_t local[ORR_MAX_DIM];
  ORR_TRY(header_new(meta, layout, &t));
  t->storage = storage_room(t->n);
  if (!t->storage) {
    orr_tensor_free(t);
    return orr_fail(ORR_EMEM, "out of host memory for a tensor's storage");
  }
  for (int r = 0; r < t->n; r++) {
    orr_layout_local(layout, r, meta->ndim, meta->shape, local, NULL);
    bool fits = part[r]->n == 1 && part[r]->meta.ndim == meta->ndim &&
                part[r]->meta.dtype == meta->dtype && part[r]->storage->rc == 1 &&
                part[r]->storage->buffer[part[r]->buffer0] &&
                part[r]->layout->mesh->device[0] == layout->mesh->device[r] &&
                memcmp(part[r]->meta.shape, local, (size_t)meta->ndim * sizeof local[0]) == 0;
    if (!fits) {
      char text[300];
      orr_tensor_free(t);
      return orr_fail(ORR_EARG, "part %d, %s, does not fit its place in the layout", r + 1,
                      orr_tensor_text(part[r], text, sizeof text));
    }
    t->shard[r] = part[r]->shard[0];
  }
  for (int r = 0; r < t->n; r++) { /* the buffers move; the parts are left empty */
    orr_storage *from = part[r]->storage;
    t->storage->buffer[t->storage->n++] = from->buffer[part[r]->buffer0];
    from->buffer[part[r]->buffer0] = NULL;
  }
  *out = t;
  return ORR_OK;
}

/* to takes from's place in the graph. */
static void copy_edge(orr_tensor *to, const orr_tensor *from) {
  to->requires_grad = from->requires_grad;
  to->out_index = from->out_index;
  to->node = from->node;
  if (to->node) orr_node_hold(to->node);
}

orr_status orr_tensor_ghost(const orr_tensor *t, orr_tensor **out) {
  orr_tensor *a;
  ORR_TRY(header_new(&t->meta, t->layout, &a));
  a->storage = storage_room(1);
  if (!a->storage) {
    orr_tensor_free(a);
    return orr_fail(ORR_EMEM, "out of host memory for a tensor's storage");
  }
  a->storage->origin = orr_tensor_ref(t->storage->origin);
  a->buffer0 = t->buffer0;
  for (int r = 0; r < t->n; r++) a->shard[r] = t->shard[r];
  copy_edge(a, t);
  *out = a;
  return ORR_OK;
}

orr_status orr_tensor_revive(const orr_tensor *ghost, const orr_tensor *whole,
                             orr_tensor **out) {
  ORR_TRY(orr_tensor_alias_as(whole, &ghost->meta, ghost->layout, out));
  (*out)->buffer0 = ghost->buffer0;
  for (int r = 0; r < ghost->n; r++) (*out)->shard[r] = ghost->shard[r];
  copy_edge(*out, ghost);
  return ORR_OK;
}

orr_tensor *orr_tensor_ref(orr_tensor *t) {
  t->rc++;
  return t;
}

static void forget_layouts(orr_tensor *t) {
  orr_layout_free(t->use_layout);
  orr_layout_free(t->state_layout);
  t->use_layout = t->state_layout = NULL;
}

void orr_tensor_free(orr_tensor *take_t) {
  orr_tensor *t = take_t;
  if (!t || --t->rc) return;
  if (t->grad) orr_tensor_free(t->grad);
  if (t->node) orr_node_release(t->node);
  if (t->hooks && orr_hook_release) orr_hook_release(t->hooks);
  if (t->reducer) orr_reducer_free(t->reducer);
  if (t->storage) storage_free(t->storage);
  orr_layout_free(t->layout);
  forget_layouts(t);
  if (t->shard != &t->one) free(t->shard);
  orr_pool_put(&headers, t);
}

void orr_tensor_adopt(orr_tensor *t, orr_tensor *take_from) {
  orr_tensor *from = take_from;
  storage_free(t->storage);
  t->storage = from->storage;
  t->storage->rc++;
  t->buffer0 = from->buffer0;
  if (t->layout->mesh != from->layout->mesh) forget_layouts(t);
  orr_layout_free(t->layout);
  t->layout = orr_layout_ref(from->layout);
  if (t->shard != &t->one) free(t->shard);
  t->shard = &t->one;
  t->n = from->n;
  t->one = from->one;
  t->meta = from->meta;
  if (from->shard != &from->one) {
    t->shard = from->shard;
    from->shard = &from->one;
    from->n = 0;
  }
  orr_tensor_free(from);
}

orr_device *orr_tensor_device(const orr_tensor *t, int shard) {
  return orr_device_at(t->layout->mesh->device[shard]);
}

void orr_tensor_view(const orr_tensor *t, int shard, orr_view *out) {
  const orr_shard *s = &t->shard[shard];
  char *base = orr_tensor_buffer(t, shard)->data;
  out->data = base ? base + s->offset * (int64_t)orr_dtype_size(t->meta.dtype) : NULL;
  out->dtype = t->meta.dtype;
  out->ndim = t->meta.ndim;
  for (int k = 0; k < t->meta.ndim; k++) {
    out->shape[k] = s->shape[k];
    out->stride[k] = s->stride[k];
  }
}

bool orr_tensor_is_contiguous(const orr_tensor *t) {
  for (int r = 0; r < t->n; r++)
    if (!orr_is_contiguous(t->meta.ndim, t->shard[r].shape, t->shard[r].stride)) return false;
  return true;
}

int64_t orr_tensor_numel(const orr_tensor *t) { return orr_numel(t->meta.ndim, t->meta.shape); }

char *orr_tensor_text(const orr_tensor *t, char *buf, size_t size) {
  char shape[128], layout[256];
  snprintf(buf, size, "%s %s on %s",
           orr_shape_text(t->meta.ndim, t->meta.shape, shape, sizeof shape),
           orr_dtype_name(t->meta.dtype), orr_layout_text(t->layout, layout, sizeof layout));
  return buf;
}

orr_status orr_tensor_from_host(const orr_meta *meta, const void *data, orr_tensor **out) {
  if (orr_host_hook) orr_host_hook("makes a tensor of the script's values");
  ORR_TRY(orr_tensor_new(meta, orr_layout_single(0), NULL, out));
  orr_status status = orr_buffer_wait_write(orr_tensor_buffer(*out, 0));
  if (status) {
    orr_tensor_free(*out);
    return status;
  }
  size_t bytes = (size_t)orr_numel(meta->ndim, meta->shape) * orr_dtype_size(meta->dtype);
  if (bytes) memcpy(orr_tensor_buffer(*out, 0)->data, data, bytes);
  return ORR_OK;
}

orr_status orr_tensor_full(orr_tensor *t, orr_tensor **out) {
  orr_tensor *host;
  if (orr_host_hook) orr_host_hook("reads a tensor's values");
  if (orr_tensor_device(t, 0)->kind == ORR_DEVICE_META)
    return orr_fail(ORR_EARG, "a tensor on the meta device has a shape and no values");
  ORR_TRY(orr_redistribute(t, orr_layout_single(0), &host));
  orr_status status = orr_buffer_wait_read(orr_tensor_buffer(host, 0));
  if (!status && orr_work_error_pending()) status = orr_synchronize(NULL);
  if (!status && !orr_tensor_is_contiguous(host)) {
    orr_tensor *packed;
    status = orr_tensor_new(&host->meta, host->layout, NULL, &packed);
    if (!status) {
      orr_view from, to;
      orr_tensor_view(host, 0, &from);
      orr_tensor_view(packed, 0, &to);
      orr_k_copy(&from, &to);
      orr_tensor_free(host);
      host = packed;
    }
  }
  if (status) {
    orr_tensor_free(host);
    return status;
  }
  *out = host;
  return ORR_OK;
}
