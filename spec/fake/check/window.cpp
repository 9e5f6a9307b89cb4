/* window.cpp: pool.cu and conv.cu against the CPU's.
 *
 * Invariant: kernels, strides, paddings and dilations come that leave inputs out, that overlap
 * and that reach over the edge; channels-first, channels-last and any strides; groups.
 * To add a check: check.h.
 */
#include "check.h"

extern "C" {
#include "../../../kernels/conv.h"
#include "../../../kernels/pool.h"

void orr_cuda_max_pool2d(const orr_view *x, const orr_window *w, const orr_view *y,
                         const orr_view *indices);
void orr_cuda_max_pool2d_back(const orr_view *g, const orr_view *indices, const orr_window *w,
                              const orr_view *gx);
int orr_cuda_avg_pool2d(const orr_view *x, const orr_window *w, bool count_include_pad,
                        const orr_view *y);
int orr_cuda_avg_pool2d_back(const orr_view *g, const orr_window *w, bool count_include_pad,
                             const orr_view *gx);
int orr_cuda_direct_conv2d(const orr_view *x, const orr_view *w, const orr_view *b,
                           const orr_window *window, int64_t groups, const orr_view *y);
int orr_cuda_direct_conv2d_back_data(const orr_view *g, const orr_view *w,
                                     const orr_window *window, int64_t groups,
                                     const orr_view *gx);
int orr_cuda_direct_conv2d_back_weight(const orr_view *x, const orr_view *g,
                                       const orr_window *window, int64_t groups,
                                       const orr_view *gw, const orr_view *gb);
}

static orr_dtype any_float(Random &r) { return (orr_dtype)r.below(4); }

/* Planes of four dimensions: as images mostly lie, or anyhow. */
static Array image(Random &r, orr_dtype dtype, const Shape &s, bool repeats = false) {
  if (r.once_in(3)) return make(r, dtype, s, ANY_LIE, repeats);
  Array a = make(r, dtype, s, ROW_MAJOR);
  int64_t last[4] = {s[1] * s[2] * s[3], 1, s[1] * s[3], s[1]};
  if (r.once_in(2)) memcpy(a.view.stride, last, sizeof last);
  return a;
}

struct Problem {
  orr_window w;
  int64_t in[2], out[2];
};

static Problem problem(Random &r, bool pool) {
  Problem p;
  for (int a = 0; a < 2; a++) {
    p.in[a] = r.from(1, 12);
    p.w.dilation[a] = r.once_in(3) ? r.from(1, 3) : 1;
    do {
      p.w.kernel[a] = r.from(1, 5);
      p.w.padding[a] = r.below((pool ? p.w.kernel[a] / 2 : 6) + 1);
    } while (p.in[a] + 2 * p.w.padding[a] < p.w.dilation[a] * (p.w.kernel[a] - 1) + 1);
    p.w.stride[a] = r.from(1, 4);
    int64_t span = p.w.dilation[a] * (p.w.kernel[a] - 1) + 1;
    p.out[a] = (p.in[a] + 2 * p.w.padding[a] - span) / p.w.stride[a] + 1;
    /* Some sizes do not follow from the others: rounded up, as a part of a plane has it. */
    if (pool && r.once_in(6)) p.out[a]++;
  }
  return p;
}

static std::string text_of(const Problem &p) {
  char text[200];
  const orr_window &w = p.w;
  snprintf(text, sizeof text,
           " in %ldx%ld kernel %ldx%ld stride %ld,%ld padding %ld,%ld dilation %ld,%ld",
           (long)p.in[0], (long)p.in[1], (long)w.kernel[0], (long)w.kernel[1],
           (long)w.stride[0], (long)w.stride[1], (long)w.padding[0], (long)w.padding[1],
           (long)w.dilation[0], (long)w.dilation[1]);
  return text;
}

static void max_pool(Random &r) {
  Problem p = problem(r, true);
  orr_dtype dtype = any_float(r);
  int64_t n = r.from(1, 3), c = r.from(1, 9);
  Array x = image(r, dtype, {n, c, p.in[0], p.in[1]}, r.once_in(5));
  Array y = image(r, dtype, {n, c, p.out[0], p.out[1]}), z = copy_of(y);
  Array at = image(r, r.once_in(2) ? ORR_I32 : ORR_I64, {n, c, p.out[0], p.out[1]});
  Array at_too = copy_of(at);
  fill(r, x, -4, 4, 20);
  if (r.once_in(3))
    for (int64_t i = 0; i < count(x); i++) put(x, i, (double)r.below(3));
  check_now += " " + text_of(x) + text_of(p);
  orr_k_max_pool2d(x, &p.w, y, at);
  orr_cuda_max_pool2d(x, &p.w, z, at_too);
  same(y, z, 0), same(at, at_too, 0);
  Array gx = image(r, dtype, {n, c, p.in[0], p.in[1]}), gz = copy_of(gx);
  fill(r, y, -1, 1);
  orr_k_max_pool2d_back(y, at, &p.w, gx);
  orr_cuda_max_pool2d_back(y, at, &p.w, gz);
  same(gx, gz);
}

static void avg_pool(Random &r) {
  Problem p = problem(r, true);
  for (int64_t &d : p.w.dilation) d = 1;
  orr_dtype dtype = any_float(r);
  int64_t n = r.from(1, 3), c = r.from(1, 9);
  Array x = image(r, dtype, {n, c, p.in[0], p.in[1]}, r.once_in(5));
  Array y = image(r, dtype, {n, c, p.out[0], p.out[1]}), z = copy_of(y);
  bool padded = r.once_in(2);
  fill(r, x, -4, 4, 200);
  check_now += " " + text_of(x) + text_of(p);
  orr_k_avg_pool2d(x, &p.w, padded, y);
  orr_cuda_avg_pool2d(x, &p.w, padded, z);
  same(y, z, -1, 4);
  Array gx = image(r, dtype, {n, c, p.in[0], p.in[1]}), gz = copy_of(gx);
  fill(r, y, -4, 4);
  orr_k_avg_pool2d_back(y, &p.w, padded, gx);
  orr_cuda_avg_pool2d_back(y, &p.w, padded, gz);
  same(gx, gz, -1, 4);
}

static void conv(Random &r) {
  Problem p = problem(r, false);
  orr_dtype dtype = any_float(r);
  int64_t n = r.from(1, 3), groups = r.from(1, 3), c = r.from(1, 4), k = r.from(1, 5);
  Array x = image(r, dtype, {n, groups * c, p.in[0], p.in[1]}, r.once_in(5));
  Array w = image(r, dtype, {groups * k, c, p.w.kernel[0], p.w.kernel[1]}, r.once_in(5));
  Array b = make(r, dtype, {groups * k});
  Array y = image(r, dtype, {n, groups * k, p.out[0], p.out[1]}), z = copy_of(y);
  const orr_view *bias = r.once_in(2) ? &b.view : NULL;
  double taps = (double)(p.w.kernel[0] * p.w.kernel[1]), plane = (double)(p.out[0] * p.out[1]);
  fill(r, x, -1, 1), fill(r, w, -1, 1), fill(r, b, -1, 1);
  check_now += " " + text_of(x) + text_of(p) + " groups " + std::to_string(groups);
  orr_k_conv2d(x, w, bias, &p.w, groups, y);
  orr_cuda_direct_conv2d(x, w, bias, &p.w, groups, z);
  same(y, z, -1, std::sqrt(taps * (double)c));
  fill(r, y, -1, 1);
  Array gx = image(r, dtype, {n, groups * c, p.in[0], p.in[1]}), gz = copy_of(gx);
  orr_k_conv2d_back_data(y, w, &p.w, groups, gx);
  orr_cuda_direct_conv2d_back_data(y, w, &p.w, groups, gz);
  same(gx, gz, -1, std::sqrt(taps * (double)k));
  Array gw = image(r, dtype, {groups * k, c, p.w.kernel[0], p.w.kernel[1]}), gv = copy_of(gw);
  Array gb = make(r, dtype, {groups * k}), ga = copy_of(gb);
  orr_k_conv2d_back_weight(x, y, &p.w, groups, gw);
  orr_k_conv2d_back_bias(y, gb);
  bool biased = r.once_in(2);
  orr_cuda_direct_conv2d_back_weight(x, y, &p.w, groups, gv, biased ? &ga.view : NULL);
  same(gw, gv, -1, std::sqrt(plane * (double)n));
  if (biased) same(gb, ga, -1, std::sqrt(plane * (double)n));
}

/* Long sums: many samples of a plane into few weights. */
static void long_conv(Random &r) {
  orr_window w = {{3, 3}, {1, 1}, {1, 1}, {1, 1}};
  Array x = image(r, ORR_F32, {4, 2, 40, 40}), g = image(r, ORR_F32, {4, 3, 40, 40});
  Array gw = make(r, ORR_F32, {3, 2, 3, 3}), gv = copy_of(gw);
  fill(r, x, 0, 1), fill(r, g, 0, 1);
  orr_k_conv2d_back_weight(x, g, &w, 1, gw);
  orr_cuda_direct_conv2d_back_weight(x, g, &w, 1, gv, NULL);
  same(gw, gv, 2e-6);
}

const std::vector<Check> checks = {{"max_pool", 150, max_pool},
                                   {"avg_pool", 150, avg_pool},
                                   {"conv", 120, conv},
                                   {"long_conv", 2, long_conv}};
