/* cpu_kernels.c: the CPU's table of kernels, and the rows for which it has a choice (oneDNN or
 * kernels/) or needs room.
 *
 * Invariant: oneDNN where it takes the shard (f32, bf16) and is the faster, else kernels/.
 * To add a row: nothing where orr_k_NAME fits; else cpu_NAME here and its line in the table.
 */
#include <math.h>
#include <stdlib.h>

#include "../kernels/chunk.h"
#include "../kernels/matmul.h"
#include "../kernels/sort.h"
#include "cpu_onednn.h"
#include "kernel_table.h"
#include "view.h"

static bool for_onednn(const orr_view *x) {
  return x->dtype == ORR_F32 || x->dtype == ORR_BF16;
}

/* ---- products ---- */

/* Multiplications, and rows of the result, below which the library's own kernel is the faster
 * one: 1.1 to 6 times up to 96 x 96 x 96, 2.7 to 4.5 times for one row (one core with
 * AVX-512). */
static const int64_t few_products = 1 << 20, few_rows = 16;

static void own_product(const orr_view *a, const orr_view *b, orr_view *c, bool accumulate) {
  if (c->ndim <= 3) {
    orr_k_matmul(a, b, c, accumulate);
    return;
  }
  for (int64_t i = 0; i < c->shape[0]; i++) {
    orr_view part[3] = {orr_narrow_view(a, 0, i, 1), orr_narrow_view(b, 0, i, 1),
                        orr_narrow_view(c, 0, i, 1)};
    for (int k = 0; k < 3; k++) orr_view_drop(&part[k], 0);
    own_product(&part[0], &part[1], &part[2], accumulate);
  }
}

static void start_with_bias(const orr_view *bias, orr_view *c) {
  if (!bias) {
    orr_k_fill(c, 0);
    return;
  }
  orr_view rows = *c;
  rows.data = bias->data;
  for (int d = 0; d < c->ndim; d++) rows.stride[d] = 0;
  rows.stride[c->ndim - 1] = bias->stride[0];
  orr_k_copy(&rows, c);
}

static orr_status cpu_product(const orr_view *a_in, const orr_view *b_in, const orr_view *bias,
                              const orr_view *c_in, bool accumulate) {
  orr_view a = *a_in, b = *b_in, c = *c_in;
  int64_t work = orr_numel(c.ndim, c.shape), k = a.shape[a.ndim - 1];
  if (work == 0) return ORR_OK;
  if (k == 0) {
    if (!accumulate) start_with_bias(bias, &c);
    return ORR_OK;
  }
  orr_view_merge_rows(&a, &b, &c);
  bool ours = work * k < few_products || c.shape[c.ndim - 2] < few_rows ||
              (!bias && orr_k_matmul_excels(&a, &b, &c));
  if (!ours && for_onednn(&c) &&
      orr_onednn_supports_matmul(&a, &b, bias, &c, accumulate, ORR_ONEDNN_LINEAR))
    return orr_onednn_matmul(&a, &b, bias, &c, accumulate, ORR_ONEDNN_LINEAR);
  if (bias) start_with_bias(bias, &c);
  own_product(&a, &b, &c, accumulate || bias);
  return ORR_OK;
}

/* ---- convolution and pooling ---- */

static orr_onednn_conv conv_of(const orr_window *w, int64_t groups) {
  orr_onednn_conv g = {.groups = groups};
  for (int k = 0; k < 2; k++) {
    g.stride[k] = w->stride[k];
    g.padding[k] = w->padding[k];
    g.dilation[k] = w->dilation[k];
  }
  return g;
}

static orr_status cpu_conv2d(const orr_view *x, const orr_view *w, const orr_view *b,
                             const orr_window *window, int64_t groups, const orr_view *y) {
  orr_onednn_conv g = conv_of(window, groups);
  if (for_onednn(x) && orr_onednn_supports_conv_forward(&g, x, w, b, y, ORR_ONEDNN_LINEAR))
    return orr_onednn_conv_forward(&g, x, w, b, y, ORR_ONEDNN_LINEAR);
  orr_k_conv2d(x, w, b, window, groups, y);
  return ORR_OK;
}

static orr_status cpu_conv2d_back_data(const orr_view *gy, const orr_view *w,
                                       const orr_window *window, int64_t groups,
                                       const orr_view *gx) {
  orr_onednn_conv g = conv_of(window, groups);
  if (for_onednn(gy) && orr_onednn_supports_conv_backward_data(&g, gy, w, gx))
    return orr_onednn_conv_backward_data(&g, gy, w, gx);
  orr_k_conv2d_back_data(gy, w, window, groups, gx);
  return ORR_OK;
}

static orr_status cpu_conv2d_back_weight(const orr_view *x, const orr_view *gy,
                                         const orr_window *window, int64_t groups,
                                         const orr_view *gw, const orr_view *gb) {
  orr_onednn_conv g = conv_of(window, groups);
  if (for_onednn(x) && orr_onednn_supports_conv_backward_weights(&g, x, gy, gw, gb))
    return orr_onednn_conv_backward_weights(&g, x, gy, gw, gb);
  orr_k_conv2d_back_weight(x, gy, window, groups, gw);
  if (gb) orr_k_conv2d_back_bias(gy, gb);
  return ORR_OK;
}

/* By oneDNN where it may be, 2 to 4 times as fast on channels-last f32; for the maximum the
 * library's kernel is as fast as oneDNN or faster. */
static orr_onednn_pool mean_of(const orr_window *w, bool count_include_pad) {
  orr_onednn_pool g = {.kind = count_include_pad ? ORR_ONEDNN_POOL_MEAN_PADDED
                                                 : ORR_ONEDNN_POOL_MEAN};
  for (int k = 0; k < 2; k++) {
    g.kernel[k] = w->kernel[k];
    g.stride[k] = w->stride[k];
    g.padding[k] = w->padding[k];
    g.dilation[k] = 1;
  }
  return g;
}

static orr_status cpu_avg_pool2d(const orr_view *x, const orr_window *w, bool count_include_pad,
                                 const orr_view *y) {
  orr_onednn_pool g = mean_of(w, count_include_pad);
  if (for_onednn(x) && orr_onednn_supports_pool(&g, x, y))
    return orr_onednn_pool_forward(&g, x, y, NULL);
  orr_k_avg_pool2d(x, w, count_include_pad, y);
  return ORR_OK;
}

static orr_status cpu_avg_pool2d_back(const orr_view *gy, const orr_window *w,
                                      bool count_include_pad, const orr_view *gx) {
  orr_onednn_pool g = mean_of(w, count_include_pad);
  if (for_onednn(gy) && orr_onednn_supports_pool_backward(&g, gy, gx))
    return orr_onednn_pool_backward(&g, gy, gx, NULL);
  orr_k_avg_pool2d_back(gy, w, count_include_pad, gx);
  return ORR_OK;
}

/* ---- with room ---- */

static orr_status attention_in_room(const orr_k_attention_args *given, bool backward) {
  orr_k_attention_args a = *given;
  a.threads = orr_k_attention_threads(a.q);
  size_t bytes = orr_k_attention_room(&a, backward);
  a.room = aligned_alloc(64, bytes + 64);
  if (!a.room)
    return orr_fail(ORR_EMEM, "out of host memory: attention needs %zu bytes of room", bytes);
  if (backward) orr_k_attention_back(&a);
  else orr_k_attention(&a);
  free(a.room);
  return ORR_OK;
}

static orr_status cpu_attention(const orr_k_attention_args *a) {
  return attention_in_room(a, false);
}

static orr_status cpu_attention_back(const orr_k_attention_args *a) {
  return attention_in_room(a, true);
}

/* Room for a kernel's work; NULL where it needs none. */
static orr_status scratch_new(size_t bytes, void **out) {
  *out = bytes ? malloc(bytes) : NULL;
  if (bytes && !*out) return orr_fail(ORR_EMEM, "the host has no %zu bytes to sort in", bytes);
  return ORR_OK;
}

static orr_status cpu_sort(const orr_view *x, int dim, bool descending, const orr_view *values,
                           const orr_view *indices) {
  void *scratch;
  ORR_TRY(scratch_new(orr_k_sort_scratch(x, dim), &scratch));
  orr_k_sort(x, dim, descending, values, indices, scratch);
  free(scratch);
  return ORR_OK;
}

static orr_status cpu_topk(const orr_view *x, int dim, bool largest, const orr_view *values,
                           const orr_view *indices) {
  void *scratch;
  ORR_TRY(scratch_new(orr_k_topk_scratch(x, dim, values->shape[dim]), &scratch));
  orr_k_topk(x, dim, largest, values, indices, scratch);
  free(scratch);
  return ORR_OK;
}

/* ---- numbers of lists, counts, statistics ---- */

static double larger(double a, double b) { return a != a || a > b ? a : b; }

static double part_of_norm(const orr_view *x, double p) {
  double value = 0;
  orr_view y = {.data = &value, .dtype = ORR_F64, .ndim = x->ndim};
  unsigned mask = (1u << x->ndim) - 1;
  for (int d = 0; d < x->ndim; d++) y.shape[d] = 1;
  if (p == 2) return orr_k_sumsq(x);
  if (isinf(p)) orr_k_reduce(ORR_REDUCE_MAXABS, x, mask, &y);
  else orr_k_sum_pow(x, mask, p, &y);
  return value;
}

static void cpu_list_norm(const orr_view *const *xs, int n, double p, const orr_view *out) {
  double total = 0;
  for (int k = 0; k < n; k++) {
    double part = part_of_norm(xs[k], p);
    total = isinf(p) ? larger(total, part) : total + part;
  }
  orr_k_set(out, 0, total);
}

static void cpu_list_bad(const orr_view *const *xs, int n, const orr_view *out) {
  int bad = 0;
  for (int k = 0; k < n; k++) bad += !orr_k_all_finite(xs[k]);
  orr_k_set(out, 0, bad);
}

static void cpu_list_scale(const orr_view *const *xs, int n, const orr_view *by,
                           double factor) {
  if (by) factor = orr_k_get(by, 0);
  for (int k = 0; k < n; k++) {
    orr_view x = *xs[k];
    orr_k_scale(&x, factor);
  }
}

static void cpu_count_targets(const orr_view *target, int64_t ignore, const orr_view *out) {
  orr_view y = *out;
  orr_k_fill(&y, (double)orr_k_count_targets(target, ignore));
}

/* ---- the table ---- */

const orr_kernels orr_kernels_cpu = {
    .unary = orr_k_unary,
    .unary_grad = orr_k_unary_grad,
    .binary = orr_k_binary,
    .binary_scalar = orr_k_binary_scalar,
    .binary_grad = orr_k_binary_grad,
    .where = orr_k_where,
    .fill = orr_k_fill,
    .clamp = orr_k_clamp,
    .arange = orr_k_arange,
    .eye = orr_k_eye,
    .tril = orr_k_tril,
    .triu = orr_k_triu,
    .masked_fill = orr_k_masked_fill,
    .copy = orr_k_copy,
    .reduce_many = orr_k_reduce_many,
    .reduce = orr_k_reduce,
    .sum_pow = orr_k_sum_pow,
    .arg_reduce = orr_k_arg_reduce,
    .cumsum = orr_k_cumsum,
    .cumprod = orr_k_cumprod,
    .cumprod_back = orr_k_cumprod_back,
    .softmax = orr_k_softmax,
    .log_softmax = orr_k_log_softmax,
    .softmax_back = orr_k_softmax_back,
    .log_softmax_back = orr_k_log_softmax_back,
    .logsumexp = orr_k_logsumexp,
    .layer_norm = orr_k_layer_norm,
    .layer_norm_back = orr_k_layer_norm_back,
    .layer_norm_back_w = orr_k_layer_norm_back_w,
    .rms_norm = orr_k_rms_norm,
    .rms_norm_back = orr_k_rms_norm_back,
    .rms_norm_back_w = orr_k_rms_norm_back_w,
    .bn_sum = orr_k_bn_sum,
    .bn_centered_sumsq = orr_k_bn_centered_sumsq,
    .bn_apply = orr_k_bn_apply,
    .bn_grad_sums = orr_k_bn_grad_sums,
    .bn_grad_apply = orr_k_bn_grad_apply,
    .group_norm = orr_k_group_norm,
    .group_norm_grad_sums = orr_k_group_norm_grad_sums,
    .group_norm_grad_apply = orr_k_group_norm_grad_apply,
    .cross_entropy = orr_k_cross_entropy,
    .cross_entropy_back = orr_k_cross_entropy_back,
    .cross_entropy_max = orr_k_cross_entropy_max,
    .cross_entropy_parts = orr_k_cross_entropy_parts,
    .cross_entropy_finish = orr_k_cross_entropy_finish,
    .nll_loss = orr_k_nll_loss,
    .nll_loss_back = orr_k_nll_loss_back,
    .index_select = orr_k_index_select,
    .index_add = orr_k_index_add,
    .gather = orr_k_gather,
    .scatter_add = orr_k_scatter_add,
    .embedding = orr_k_embedding,
    .embedding_back = orr_k_embedding_back,
    .one_hot = orr_k_one_hot,
    .flip = orr_k_flip,
    .roll = orr_k_roll,
    .sgd = orr_k_sgd,
    .adam = orr_k_adam,
    .rmsprop = orr_k_rmsprop,
    .uniform = orr_k_uniform,
    .normal = orr_k_normal,
    .randint = orr_k_randint,
    .bernoulli = orr_k_bernoulli,
    .dropout = orr_k_dropout,
    .max_pool2d = orr_k_max_pool2d,
    .max_pool2d_back = orr_k_max_pool2d_back,
    .product = cpu_product,
    .conv2d = cpu_conv2d,
    .conv2d_back_data = cpu_conv2d_back_data,
    .conv2d_back_weight = cpu_conv2d_back_weight,
    .avg_pool2d = cpu_avg_pool2d,
    .avg_pool2d_back = cpu_avg_pool2d_back,
    .attention = cpu_attention,
    .attention_back = cpu_attention_back,
    .sort = cpu_sort,
    .topk = cpu_topk,
    .list_norm = cpu_list_norm,
    .list_bad = cpu_list_bad,
    .list_scale = cpu_list_scale,
    .count_targets = cpu_count_targets,
    .bn_rstd = orr_k_bn_rstd,
    .bn_running = orr_k_bn_running,
};
