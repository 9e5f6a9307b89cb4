/* cuda_dnn.c: convolution and its gradients on CUDA, by cuDNN where it takes them, else by
 * kernels/conv.cu.
 *
 * Invariant: cuDNN sees dense, aligned tensors, all row-major or all channels-last, as the
 * larger input is; what lies otherwise is copied through the room. One shape on one GPU always
 * takes the same way.
 * To add an operation: its kind, its three tensors, and its descriptor in cuda_dnn_graph.c.
 */
#include <string.h>

#include "cuda.h"

enum { ALIGNMENT = 16, ROOM_ALIGNMENT = 256 };

/* ---- order of the elements ---- */

static const int orders[2][4] = {{0, 1, 2, 3}, {0, 2, 3, 1}};

/* v's shape at data, dense in that order. */
static orr_view in_order(const orr_view *v, bool channels_last, void *data) {
  orr_view p = *v;
  int64_t stride = 1;
  p.data = data;
  for (int k = 3; k >= 0; k--) {
    int d = orders[channels_last][k];
    p.stride[d] = stride;
    stride *= v->shape[d];
  }
  return p;
}

static bool is_in_order(const orr_view *v, bool channels_last) {
  orr_view p = in_order(v, channels_last, NULL);
  for (int d = 0; d < 4; d++)
    if (v->shape[d] > 1 && v->stride[d] != p.stride[d]) return false;
  return true;
}

/* One that could be both leaves it to the other. */
static bool is_channels_last(const orr_view *v, const orr_view *other) {
  if (is_in_order(v, false))
    return is_in_order(v, true) && is_in_order(other, true) && !is_in_order(other, false);
  return is_in_order(v, true);
}

/* ---- through the room ---- */

/* The tensors of a call as cuDNN will see them: x, w, y, the `made`-th of which is made. */
typedef struct tensors {
  const orr_view *given[3];
  void *data[3];
  size_t offset[3], bytes;
  bool is_copied[3], channels_last;
  int made;
} tensors;

static void find_copies(tensors *t) {
  for (int k = 0; k < 3; k++) {
    const orr_view *v = t->given[k];
    t->data[k] = v->data;
    t->is_copied[k] = !is_in_order(v, t->channels_last) || (uintptr_t)v->data % ALIGNMENT != 0;
    if (!t->is_copied[k]) continue;
    size_t bytes = (size_t)orr_cuda_bytes(v);
    t->offset[k] = t->bytes;
    t->bytes += (bytes + ROOM_ALIGNMENT - 1) / ROOM_ALIGNMENT * ROOM_ALIGNMENT;
  }
}

static void copy_in(tensors *t, char *room) {
  for (int k = 0; k < 3; k++) {
    if (!t->is_copied[k]) continue;
    t->data[k] = room + t->offset[k];
    orr_view p = in_order(t->given[k], t->channels_last, t->data[k]);
    if (k != t->made) orr_cuda_copy(t->given[k], &p);
  }
}

static void copy_out(const tensors *t) {
  if (!t->is_copied[t->made]) return;
  orr_view to = *t->given[t->made];
  orr_view from = in_order(&to, t->channels_last, t->data[t->made]);
  orr_cuda_copy(&from, &to);
}

/* ---- a call ---- */

static orr_cuda_conv conv_of(const tensors *t, const orr_window *window) {
  orr_cuda_conv c;
  memset(&c, 0, sizeof c);
  for (int d = 0; d < 4; d++) {
    c.x[d] = t->given[0]->shape[d];
    c.w[d] = t->given[1]->shape[d];
    c.y[d] = t->given[2]->shape[d];
  }
  for (int k = 0; k < 2; k++) {
    c.stride[k] = window->stride[k];
    c.padding[k] = window->padding[k];
    c.dilation[k] = window->dilation[k];
  }
  static const orr_cuda_conv_kind kind[] = {ORR_CUDA_CONV_DATA, ORR_CUDA_CONV_WEIGHT,
                                            ORR_CUDA_CONV};
  c.kind = kind[t->made];
  c.dtype = (int32_t)t->given[0]->dtype;
  c.channels_last = t->channels_last;
  c.deterministic = atomic_load(&orr_cuda_machine.deterministic);
  c.tf32 = c.dtype == ORR_F32 && atomic_load(&orr_cuda_machine.tf32);
  return c;
}

static bool for_library(const tensors *t) {
  orr_dtype dtype = t->given[0]->dtype;
  for (int k = 0; k < 3; k++)
    if (t->given[k]->ndim != 4 || orr_cuda_numel(t->given[k]) == 0) return false;
  return dtype == ORR_F32 || dtype == ORR_F16 || dtype == ORR_BF16;
}

static orr_status by_library(tensors *t, const orr_window *window, bool *done) {
  orr_cuda_queue *s = orr_cuda_current();
  struct orr_cuda_conv_plan *plan;
  char *room = NULL;
  *done = false;
  if (!s) return orr_fail(ORR_EDEVICE, "a convolution was launched outside of a queue");
  if (!for_library(t)) return ORR_OK;
  orr_cuda_conv c = conv_of(t, window);
  ORR_TRY(orr_cuda_conv_find(s->device, &c, &plan));
  if (!plan) return ORR_OK;
  find_copies(t);
  size_t bytes = t->bytes + orr_cuda_conv_room(plan);
  if (bytes) {
    room = orr_cuda_room(bytes);
    if (!room) return orr_cuda_recorded(s);
    copy_in(t, room);
    room += t->bytes;
  }
  ORR_TRY(orr_cuda_conv_run(s, plan, t->data[0], t->data[1], t->data[2], room));
  copy_out(t);
  *done = true;
  return ORR_OK;
}

/* ---- rows of the table ---- */

static void add_bias(const orr_view *b, const orr_view *y) {
  orr_view to = *y, column = *y;
  column.data = b->data;
  for (int d = 0; d < 4; d++) column.stride[d] = d == 1 ? b->stride[0] : 0;
  orr_cuda_binary(ORR_BIN_add, y, &column, &to);
}

static void sum_bias(const orr_view *g, const orr_view *gb) {
  const unsigned all_but_channels = 1u << 0 | 1u << 2 | 1u << 3;
  orr_view row = *gb;
  row.ndim = 4;
  for (int d = 0; d < 4; d++) {
    row.shape[d] = d == 1 ? gb->shape[0] : 1;
    row.stride[d] = d == 1 ? gb->stride[0] : 0;
  }
  orr_cuda_reduce(ORR_REDUCE_SUM, g, all_but_channels, &row);
}

orr_status orr_cuda_conv2d(const orr_view *x, const orr_view *w, const orr_view *b,
                           const orr_window *window, int64_t groups, const orr_view *y) {
  tensors t = {.given = {x, w, y}, .made = 2, .channels_last = is_channels_last(x, y)};
  bool done;
  ORR_TRY(by_library(&t, window, &done));
  if (!done) return orr_cuda_direct_conv2d(x, w, b, window, groups, y);
  if (b) add_bias(b, y);
  return ORR_OK;
}

orr_status orr_cuda_conv2d_back_data(const orr_view *g, const orr_view *w,
                                     const orr_window *window, int64_t groups,
                                     const orr_view *gx) {
  tensors t = {.given = {gx, w, g}, .made = 0, .channels_last = is_channels_last(g, gx)};
  bool done;
  ORR_TRY(by_library(&t, window, &done));
  return done ? ORR_OK : orr_cuda_direct_conv2d_back_data(g, w, window, groups, gx);
}

orr_status orr_cuda_conv2d_back_weight(const orr_view *x, const orr_view *g,
                                       const orr_window *window, int64_t groups,
                                       const orr_view *gw, const orr_view *gb) {
  tensors t = {.given = {x, gw, g}, .made = 1, .channels_last = is_channels_last(x, g)};
  bool done;
  ORR_TRY(by_library(&t, window, &done));
  if (!done) return orr_cuda_direct_conv2d_back_weight(x, g, window, groups, gw, gb);
  if (gb) sum_bias(g, gb);
  return ORR_OK;
}
