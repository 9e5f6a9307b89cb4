/* device.cuh: what every CUDA kernel file includes: launches, shared memory, element types,
 * walks over strided views, and reductions in a warp and in a block.
 *
 * Invariant: a launch function only launches on the current stream; its arguments are copied at
 * the call. Views hold device pointers, which the host never follows. Kernels use the CUDA C++
 * subset of this header and no other, so that the fake device runs them as they are. A result
 * depends on shapes and strides alone, never on the order of lanes or blocks.
 * To write a kernel: a __global__ function over orr_walk or plain indices, and a launch
 * function `ORR_EXPORT void orr_cuda_NAME(...)` that picks the types by orr_by_dtype, cuts
 * what is large by orr_pieces, and launches with ORR_LAUNCH.
 */
#ifndef ORR_DEVICE_CUH
#define ORR_DEVICE_CUH

#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

extern "C" {
#include "kernel.h"
}
#include "device.h"
#include "device_math.cuh"

#define ORR_EXPORT extern "C"

#ifdef ORR_FAKE
#define ORR_UNROLL
#else
#define ORR_UNROLL _Pragma("unroll")
#endif

/* ---- launching ----------------------------------------------------------------------------
 *
 * ORR_LAUNCH(kernel, grid, block, shared_bytes, arguments...): `kernel` in parentheses where it
 * is a template of several parameters. A grid of no blocks launches nothing.
 * ORR_SHARED(float, name, 32): an array of the block; its size is a constant.
 * ORR_SHARED_2D(float, name, 32, 33). ORR_SHARED_DYNAMIC(float, name): shared_bytes of it.
 */
#ifdef ORR_FAKE
#include <functional>
#include <tuple>

template <typename... P, typename... A>
void orr_launch_fake(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, A... args) {
  std::tuple<P...> packed(static_cast<P>(args)...);
  static_assert(sizeof packed <= 4096, "kernel parameters are 4 KiB at most");
  orr_fake_launch(orr_cuda_stream(), grid, block, shared,
                  [=]() { std::apply(kernel, packed); });
}

#define ORR_LAUNCH_(kernel, grid, block, shared, ...) \
  orr_launch_fake(kernel, grid, block, shared, __VA_ARGS__)
#define ORR_SHARED(type, name, count) \
  static char name##_key;             \
  type *name = (type *)orr_fake_shared(&name##_key, sizeof(type) * (count))
#define ORR_SHARED_2D(type, name, rows, cols) \
  static char name##_key;                     \
  type(*name)[cols] =                         \
      (type(*)[cols])orr_fake_shared(&name##_key, sizeof(type) * (rows) * (cols))
#define ORR_SHARED_DYNAMIC(type, name) type *name = (type *)orr_fake_dynamic_shared()
#else
#define ORR_LAUNCH_(kernel, grid, block, shared, ...) \
  kernel<<<grid, block, shared, orr_cuda_stream()>>>(__VA_ARGS__)
#define ORR_SHARED(type, name, count) __shared__ type name[count]
#define ORR_SHARED_2D(type, name, rows, cols) __shared__ type name[rows][cols]
#define ORR_SHARED_DYNAMIC(type, name)                       \
  extern __shared__ __align__(16) char orr_shared_dynamic[]; \
  type *name = reinterpret_cast<type *>(orr_shared_dynamic)
#endif

#define ORR_LAUNCH(kernel, grid, block, shared, ...)                               \
  do {                                                                             \
    const dim3 launch_grid(grid), launch_block(block);                             \
    if (launch_grid.x == 0 || launch_grid.y == 0 || launch_grid.z == 0) break;     \
    if (!orr_cuda_may_launch()) break;                                             \
    ORR_LAUNCH_(kernel, launch_grid, launch_block, (size_t)(shared), __VA_ARGS__); \
    orr_cuda_check(cudaGetLastError(), #kernel);                                   \
  } while (0)

enum {
  ORR_WARP = 32,
  ORR_BLOCK = 256,       /* the usual block */
  ORR_MOST_BLOCKS = 4096 /* fills any GPU; more work than that is a loop over the grid */
};

/* Blocks for n steps, `per_block` of them a block, at most ORR_MOST_BLOCKS. */
static inline unsigned orr_grid(int64_t n, int64_t per_block) {
  int64_t blocks = (n + per_block - 1) / per_block;
  const int64_t most = ORR_MOST_BLOCKS;
  return (unsigned)(blocks < most ? blocks : most);
}

/* for (uint32_t i = orr_first(); i < n; i += orr_step()): a loop over the grid; n < 2^31. */
static __device__ inline uint32_t orr_first(void) {
  return blockIdx.x * blockDim.x + threadIdx.x;
}
static __device__ inline uint32_t orr_step(void) { return gridDim.x * blockDim.x; }

/* ---- element types ------------------------------------------------------------------------
 *
 * double, float, orr_f16, orr_bf16, int64_t, int32_t, uint8_t, orr_bool. orr_get and orr_put
 * convert to and from orr_compute<T> (f32 for f16 and bf16, u8 for bool, else T itself).
 * orr_wide<T>: what sums are made in: f64, f32, int64.
 */
struct orr_f16 {
  uint16_t bits;
};
struct orr_bf16 {
  uint16_t bits;
};
struct orr_bool {
  uint8_t byte;
};

template <typename T>
struct orr_types {
  typedef T compute;
  typedef int64_t wide;
  static const bool is_float = false;
};
template <>
struct orr_types<double> {
  typedef double compute, wide;
  static const bool is_float = true;
};
template <>
struct orr_types<float> {
  typedef float compute, wide;
  static const bool is_float = true;
};
template <>
struct orr_types<orr_f16> {
  typedef float compute, wide;
  static const bool is_float = true;
};
template <>
struct orr_types<orr_bf16> {
  typedef float compute, wide;
  static const bool is_float = true;
};
template <>
struct orr_types<orr_bool> {
  typedef uint8_t compute;
  typedef int64_t wide;
  static const bool is_float = false;
};
template <typename T>
using orr_compute = typename orr_types<T>::compute;
template <typename T>
using orr_wide = typename orr_types<T>::wide;

template <typename T>
static __device__ inline T orr_get(const T *p) {
  return *p;
}
template <typename T>
static __device__ inline void orr_put(T *p, T x) {
  *p = x;
}

static __device__ inline float orr_f32_of(orr_f16 h) {
#ifdef __CUDA_ARCH__
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits));
  return x;
#else
  return orr_f32_of_f16(h.bits);
#endif
}
static __device__ inline orr_f16 orr_f16_of(float x) {
  orr_f16 h;
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
#else
  h.bits = orr_f16_of_f32(x);
#endif
  return h;
}
static __device__ inline float orr_f32_of(orr_bf16 h) { return orr_f32_of_bf16(h.bits); }
static __device__ inline orr_bf16 orr_bf16_of(float x) {
  orr_bf16 h;
#ifdef __CUDA_ARCH__
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
#else
  h.bits = orr_bf16_of_f32(x);
#endif
  return h;
}

static __device__ inline float orr_get(const orr_f16 *p) { return orr_f32_of(*p); }
static __device__ inline float orr_get(const orr_bf16 *p) { return orr_f32_of(*p); }
static __device__ inline uint8_t orr_get(const orr_bool *p) { return p->byte; }
static __device__ inline void orr_put(orr_f16 *p, float x) { *p = orr_f16_of(x); }
static __device__ inline void orr_put(orr_bf16 *p, float x) { *p = orr_bf16_of(x); }
static __device__ inline void orr_put(orr_bool *p, uint8_t x) { p->byte = x != 0; }

/* V elements (a power of 2) as accesses of 16 bytes, or one of fewer, where the address is
 * aligned to it (orr_aligned). */
template <typename T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) orr_pack {
  T at[V];
};
static inline bool orr_aligned(const void *p, size_t bytes) {
  return (uintptr_t)p % bytes == 0;
}

/* Calls f(orr_tag<T>{}) with the element type of a dtype:
 *   orr_by_dtype(x->dtype, [&](auto tag) { typedef typename decltype(tag)::type T; ... }); */
template <typename T>
struct orr_tag {
  typedef T type;
};
template <typename A, typename B>
struct orr_same {
  static const bool value = false;
};
template <typename A>
struct orr_same<A, A> {
  static const bool value = true;
};
template <typename F>
static inline void orr_by_float(orr_dtype dtype, F f) {
  switch (dtype) {
    case ORR_F64: f(orr_tag<double>{}); break;
    case ORR_F32: f(orr_tag<float>{}); break;
    case ORR_F16: f(orr_tag<orr_f16>{}); break;
    default: f(orr_tag<orr_bf16>{}); break;
  }
}
template <typename F>
static inline void orr_by_integer(orr_dtype dtype, F f) {
  switch (dtype) {
    case ORR_I64: f(orr_tag<int64_t>{}); break;
    case ORR_I32: f(orr_tag<int32_t>{}); break;
    case ORR_U8: f(orr_tag<uint8_t>{}); break;
    default: f(orr_tag<orr_bool>{}); break;
  }
}
template <typename F>
static inline void orr_by_dtype(orr_dtype dtype, F f) {
  if (dtype <= ORR_BF16) orr_by_float(dtype, f);
  else orr_by_integer(dtype, f);
}
/* By the size alone, for kernels that move bits: uint64_t, uint32_t, uint16_t, uint8_t. */
template <typename F>
static inline void orr_by_size(size_t size, F f) {
  switch (size) {
    case 8: f(orr_tag<uint64_t>{}); break;
    case 4: f(orr_tag<uint32_t>{}); break;
    case 2: f(orr_tag<uint16_t>{}); break;
    default: f(orr_tag<uint8_t>{}); break;
  }
}

static inline size_t orr_size_of(orr_dtype dtype) {
  static const unsigned char sizes[ORR_N_DTYPES] = {8, 4, 2, 2, 8, 4, 1, 1};
  return sizes[dtype];
}
static inline int64_t orr_numel(const orr_view *v) {
  int64_t n = 1;
  for (int d = 0; d < v->ndim; d++) n *= v->shape[d];
  return n;
}

#include "device_reduce.cuh"
#include "device_walk.cuh"

/* ---- faults ------------------------------------------------------------------------------- */

/* Reports a bad value at `position` (from 1); the lowest position is kept. slot may be NULL. */
static __device__ inline void orr_report(orr_cuda_fault_slot *slot, int64_t position,
                                         int64_t value) {
  if (slot == NULL) return;
  const int64_t lowest = *(volatile const int64_t *)&slot->position;
  if (lowest != 0 && lowest <= position) return; /* a whole tensor may be bad */
  bool done = false;
  while (!done) {
    if (atomicCAS(&slot->lock, 0u, 1u) != 0u) continue;
    __threadfence_system();
    volatile orr_cuda_fault_slot *s = slot;
    if (s->position == 0 || position < s->position) {
      s->position = position;
      s->value = value;
    }
    __threadfence_system();
    atomicExch(&slot->lock, 0u);
    done = true;
  }
  atomicExch(slot->poison, 1);
}

#endif
