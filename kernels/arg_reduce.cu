/* arg_reduce.cu: the greatest or least along one dimension, and where it stands, on CUDA.
 *
 * Invariant: the first of ties, the first NaN before all: so the order of joining does not
 * matter. Long outputs are cut in splits, which a second launch joins.
 * To add a way to choose: its case in better.
 */
#include "device_number.cuh"

extern "C" {
#include "reduce.h"
}

/* A candidate; at: from 0; -1: none yet. */
template <typename W>
struct candidate {
  W value;
  int64_t at;
};

template <typename W>
struct better {
  bool max;
  __device__ candidate<W> operator()(candidate<W> a, candidate<W> b) const {
    if (b.at < 0) return a;
    if (a.at < 0) return b;
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan || b_nan) return a_nan && b_nan ? (a.at < b.at ? a : b) : a_nan ? a : b;
    if (a.value == b.value) return a.at < b.at ? a : b;
    return (max ? a.value > b.value : a.value < b.value) ? a : b;
  }
};

template <typename W>
struct search {
  orr_walk<3> kept; /* x, indices, values */
  bool max;
  int lanes;              /* of an output: 1, a warp or a block */
  int64_t len, per_split; /* a split is blockIdx.y */
  int64_t x_stride, offset;
  orr_dtype index_dtype, value_dtype;
  void *indices, *values;
  candidate<W> *part; /* NULL: outputs are written. Else (splits, outputs) */
  __device__ candidate<W> none(void) const {
    candidate<W> c;
    c.value = max ? orr_least<W>() : orr_greatest<W>();
    c.at = -1;
    return c;
  }
  __device__ void write(const int64_t (&off)[3], candidate<W> c) const {
    orr_write_number(indices, index_dtype, off[1], c.at < 0 ? (int64_t)0 : c.at + 1 + offset);
    if (values) orr_write_number(values, value_dtype, off[2], c.value);
  }
};

template <typename E>
static __global__ void __launch_bounds__(ORR_BLOCK)
    search_kernel(search<orr_wide<E>> s, const E *x) {
  typedef orr_wide<E> W;
  const better<W> join = {s.max};
  const uint32_t lane = threadIdx.x % s.lanes, per_block = blockDim.x / s.lanes;
  int64_t begin = blockIdx.y * s.per_split, end = begin + s.per_split;
  if (end > s.len) end = s.len;
  for (uint32_t o = blockIdx.x * per_block + threadIdx.x / s.lanes; o < s.kept.n;
       o += gridDim.x * per_block) {
    int64_t off[3];
    candidate<W> best = s.none();
    s.kept.at(o, off);
    for (int64_t i = begin + lane; i < end; i += s.lanes) {
      candidate<W> c = {(W)orr_get(x + off[0] + i * s.x_stride), i};
      best = join(best, c);
    }
    if (s.lanes == ORR_WARP) best = orr_warp_join(best, join);
    else if (s.lanes > 1) best = orr_block_join(best, s.none(), join);
    if (lane != 0) continue;
    if (s.part) s.part[(int64_t)blockIdx.y * s.kept.n + o] = best;
    else s.write(off, best);
  }
}

/* part (splits, outputs): a lane an output; splits are few. */
template <typename W>
static __global__ void finish_kernel(search<W> s, const candidate<W> *part, uint32_t splits) {
  const better<W> join = {s.max};
  for (uint32_t o = orr_first(); o < s.kept.n; o += orr_step()) {
    int64_t off[3];
    candidate<W> best = s.none();
    for (uint32_t i = 0; i < splits; i++) best = join(best, part[(int64_t)i * s.kept.n + o]);
    s.kept.at(o, off);
    s.write(off, best);
  }
}

enum {
  FEW = 32,       /* elements that one lane takes by itself */
  MANY = 4096,    /* outputs that are enough for one lane each */
  WARPFUL = 1024, /* elements that are enough for a warp */
  BLOCKS = 512,   /* blocks that splits aim at */
  LEAST_SPLIT = 4096
};

template <typename E>
static void search_outputs(search<orr_wide<E>> s, const orr_axes<3> &kept, const E *x) {
  typedef orr_wide<E> W;
  int64_t across = kept.ndim > 0 ? kept.stride[0][kept.ndim - 1] : 0;
  bool beside = kept.ndim > 0 && (s.x_stride < 0 ? -s.x_stride : s.x_stride) > across;
  bool single = kept.n >= MANY && (s.len <= FEW || beside);
  s.lanes = single ? 1 : s.len <= WARPFUL ? ORR_WARP : ORR_BLOCK;
  s.kept = orr_walk_of(kept);
  int64_t units = (kept.n + ORR_BLOCK / s.lanes - 1) / (ORR_BLOCK / s.lanes);
  int64_t splits = s.lanes == ORR_BLOCK ? BLOCKS / units : 1;
  if (splits > s.len / LEAST_SPLIT) splits = s.len / LEAST_SPLIT;
  if (splits < 1) splits = 1;
  s.per_split = (s.len + splits - 1) / splits;
  candidate<W> *part = NULL;
  if (splits > 1) {
    part = (candidate<W> *)orr_cuda_room((size_t)(splits * kept.n) * sizeof *part);
    if (part == NULL) return;
  }
  s.part = part;
  ORR_LAUNCH(search_kernel<E>, dim3(orr_grid(units, 1), (unsigned)splits), ORR_BLOCK, 0, s, x);
  s.part = NULL;
  if (part == NULL) return;
  ORR_LAUNCH(finish_kernel<W>, orr_grid(kept.n, ORR_BLOCK), ORR_BLOCK, 0, s, part,
             (uint32_t)splits);
}

ORR_EXPORT void orr_cuda_arg_reduce(orr_reduce_kind kind, const orr_view *x, int dim,
                                    const orr_view *values, const orr_view *indices,
                                    int64_t offset) {
  const orr_view *views[3] = {x, indices, values};
  orr_by_dtype(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    orr_pieces(
        orr_axes_of(views, 1u << dim), [&](const orr_axes<3> &kept, const int64_t(&at)[3]) {
          search<orr_wide<E>> s = {};
          s.max = kind == ORR_REDUCE_MAX;
          s.len = x->shape[dim], s.x_stride = x->stride[dim], s.offset = offset;
          s.index_dtype = indices->dtype;
          s.indices = (char *)indices->data + at[1] * (int64_t)orr_size_of(indices->dtype);
          if (values) {
            s.value_dtype = values->dtype;
            s.values = (char *)values->data + at[2] * (int64_t)orr_size_of(values->dtype);
          }
          search_outputs<E>(s, kept, orr_at<E>(x, at[0]));
        });
  });
}
