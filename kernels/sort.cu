/* sort.cu: sort and topk along one dimension on CUDA.
 *
 * Invariant: keys are the CPU's (sort.c): unsigned integers in the order of the numbers, NaN
 * last; rows are sorted as many at once as the room takes.
 * To add an element type: key_of.
 */
#include "pairs.cuh"

extern "C" {
#include "sort.h"
}

enum : int64_t { MOST_PAIRS = (int64_t)4 << 20 }; /* in the room */

template <typename E> static __device__ inline uint64_t key_of(const E *x, bool falling) {
  const uint64_t top = (uint64_t)1 << 63;
  uint64_t key;
  if constexpr (orr_types<E>::is_float) {
    double v = (double)orr_get(x) + 0.0;
    if (v != v) return falling ? 0 : UINT64_MAX;
    memcpy(&key, &v, sizeof key);
    key = key & top ? ~key : key | top;
  } else {
    key = (uint64_t)(int64_t)orr_get(x) ^ top;
  }
  return falling ? ~key : key;
}

/* Views: pairs' rows; off[0]: the row of x, off[1]: its number. */
template <typename E> struct rows_in {
  orr_pair *pairs;
  const E *x;
  int64_t stride;
  uint32_t len, padded;
  bool falling;
  int64_t first, count; /* rows of this round */
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[2]) const {
    int64_t r = off[1] - first;
    if (r < 0 || r >= count) return;
    for (uint32_t i = team.lane; i < padded; i += team.size)
      pairs[r * padded + i] =
          i < len ? orr_pair{key_of(x + off[0] + i * stride, falling), (int64_t)i} : ORR_NO_PAIR;
  }
};

/* off: x, number, values, indices. */
template <typename E> struct rows_out {
  const orr_pair *pairs;
  const E *x;
  E *values;
  void *indices;
  orr_dtype index_dtype;
  int64_t x_stride, value_stride, index_stride;
  uint32_t k, padded;
  int64_t first, count;
  template <typename Team>
  __device__ void row(const Team &team, const int64_t (&off)[4]) const {
    int64_t r = off[1] - first;
    if (r < 0 || r >= count) return;
    for (uint32_t i = team.lane; i < k; i += team.size) {
      int64_t index = pairs[r * padded + i].index;
      if (values) values[off[2] + i * value_stride] = x[off[0] + index * x_stride];
      orr_write_number(indices, index_dtype, off[3] + i * index_stride, index + 1);
    }
  }
};

static void run(const orr_view *x, int dim, bool falling, int64_t k, const orr_view *values,
                const orr_view *indices) {
  int64_t len = x->shape[dim], total = orr_numel(x);
  if (total == 0 || k == 0) return;
  uint32_t padded = orr_power_above(len);
  int64_t rows = total / len, most = MOST_PAIRS / padded > 0 ? MOST_PAIRS / padded : 1;
  if (most > rows) most = rows;
  orr_pair *pairs = (orr_pair *)orr_cuda_room((size_t)most * padded * sizeof(orr_pair));
  if (!pairs) return;
  orr_view number = orr_row_numbers(x, dim);
  const orr_view *in[2] = {x, &number}, *out[4] = {x, &number, values ? values : x, indices};
  orr_by_dtype(x->dtype, [&](auto tag) {
    typedef typename decltype(tag)::type E;
    for (int64_t first = 0; first < rows; first += most) {
      int64_t count = rows - first < most ? rows - first : most;
      orr_rows(in, dim, [&](const int64_t (&)[2]) {
        return rows_in<E>{pairs,  orr_at<E>(x, 0), x->stride[dim], (uint32_t)len,
                          padded, falling,         first,          count};
      });
      orr_sort_pairs(pairs, count, padded);
      orr_rows(out, dim, [&](const int64_t (&)[4]) {
        return rows_out<E>{pairs,
                           orr_at<E>(x, 0),
                           values ? orr_at<E>(values, 0) : NULL,
                           indices->data,
                           indices->dtype,
                           x->stride[dim],
                           values ? values->stride[dim] : 0,
                           indices->stride[dim],
                           (uint32_t)k,
                           padded,
                           first,
                           count};
      });
    }
  });
}

ORR_EXPORT int orr_cuda_sort(const orr_view *x, int dim, bool descending, const orr_view *values,
                             const orr_view *indices) {
  run(x, dim, descending, x->shape[dim], values, indices);
  return 0;
}

ORR_EXPORT int orr_cuda_topk(const orr_view *x, int dim, bool largest, const orr_view *values,
                             const orr_view *indices) {
  run(x, dim, largest, indices->shape[dim], values, indices);
  return 0;
}
