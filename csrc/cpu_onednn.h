/* cpu_onednn.h: matrix products, convolution and pooling through oneDNN, on raw views.
 *
 * oneDNN is to the CPU what cuDNN and cuBLASLt are to the GPU. It is opened at run time,
 * version 2 or 3, and never linked; where it is missing every `supports` answers false and
 * the caller runs its reference kernel.
 *
 * Invariant: nothing here knows a tensor, a device or a queue. Primitives and their memory
 * objects are cached a thread; the cache is freed when the thread ends. So ask `supports` on
 * the thread that will run the call: its answer is exact, and leaves the primitive ready in
 * that thread's cache. A call made where `supports` is false fails with ORR_EARG and writes
 * nothing. Everything runs to its end before it returns.
 *
 * To add an operation: a kind in orr_dnn_kind (cpu_onednn_int.h), its two creations in
 * cpu_onednn_load.c, and a key with a plan of ports as in cpu_onednn_conv.c.
 */
#ifndef ORR_CPU_ONEDNN_H
#define ORR_CPU_ONEDNN_H

#include <stdbool.h>
#include <stddef.h>

#include "../kernels/kernel.h"
#include "err.h"

typedef enum orr_onednn_activation { ORR_ONEDNN_LINEAR, ORR_ONEDNN_RELU } orr_onednn_activation;

/* Opens the library at the first call. Call it before anything loads an OpenMP runtime: it sets
 * OMP_WAIT_POLICY=passive if unset, which such a runtime reads once, when it is loaded. */
bool orr_onednn_available(void);

/* "2.6.3", or "" where there is none. */
const char *orr_onednn_version(void);

/* The size of the OpenMP team that serves the calling thread. Drops the thread's cached
 * primitives when it changes, as each is made for one size. n < 1 counts as 1. */
void orr_onednn_set_threads(int n);

/* Frees what the calling thread has cached; it is made again when needed. */
void orr_onednn_thread_free(void);

/* c (.., M, N) = activation(a (.., M, K) b (.., K, N) + bias (N) [+ c when accumulate]).
 * bias may be NULL. Leading dimensions are matched from the right; those of a and b may be
 * missing, 1 or of stride 0. One of the two inner strides of each view is 1: a transpose is
 * a view. f32 and bf16 (f16 where the library and the machine have it), all views alike.
 * With K = 0, no bias and no activation, c is zeroed, or left alone when accumulating. */
bool orr_onednn_supports_matmul(const orr_view *a, const orr_view *b, const orr_view *bias,
                                const orr_view *c, bool accumulate,
                                orr_onednn_activation activation);
orr_status orr_onednn_matmul(const orr_view *a, const orr_view *b, const orr_view *bias,
                             const orr_view *c, bool accumulate,
                             orr_onednn_activation activation);

/* Two-dimensional geometry, [0] along H and [1] along W. Padding is what stands before the
 * first element; what follows the last is worked out from the shapes. dilation 1 is dense. */
typedef struct orr_onednn_conv {
  int64_t stride[2], padding[2], dilation[2];
  int64_t groups;
} orr_onednn_conv;

/* x (N, C, H, W) and y (N, O, OH, OW) of any strides, channels-last or NCHW without a copy;
 * w (O, C/groups, KH, KW); bias (O), stride 1, or NULL; all of one dtype.
 * The transposed convolution is `backward_data` with y's role given to its input and x's to its
 * output: w is then (input channels, output channels/groups, KH, KW), and output padding
 * shows in the shape of x alone. */
bool orr_onednn_supports_conv_forward(const orr_onednn_conv *g, const orr_view *x,
                                      const orr_view *w, const orr_view *bias,
                                      const orr_view *y, orr_onednn_activation activation);
orr_status orr_onednn_conv_forward(const orr_onednn_conv *g, const orr_view *x,
                                   const orr_view *w, const orr_view *bias, const orr_view *y,
                                   orr_onednn_activation activation);

/* Writes dx; an element no output reads becomes zero. */
bool orr_onednn_supports_conv_backward_data(const orr_onednn_conv *g, const orr_view *dy,
                                            const orr_view *w, const orr_view *dx);
orr_status orr_onednn_conv_backward_data(const orr_onednn_conv *g, const orr_view *dy,
                                         const orr_view *w, const orr_view *dx);

/* Writes dw and, unless NULL, dbias. An empty batch zeroes both. */
bool orr_onednn_supports_conv_backward_weights(const orr_onednn_conv *g, const orr_view *x,
                                               const orr_view *dy, const orr_view *dw,
                                               const orr_view *dbias);
orr_status orr_onednn_conv_backward_weights(const orr_onednn_conv *g, const orr_view *x,
                                            const orr_view *dy, const orr_view *dw,
                                            const orr_view *dbias);

typedef enum orr_onednn_pool_kind {
  ORR_ONEDNN_POOL_MAX,
  ORR_ONEDNN_POOL_MEAN_PADDED, /* padding counts in the divisor */
  ORR_ONEDNN_POOL_MEAN         /* elements inside x alone count */
} orr_onednn_pool_kind;

typedef struct orr_onednn_pool {
  orr_onednn_pool_kind kind;
  int64_t kernel[2], stride[2], padding[2], dilation[2];
} orr_onednn_pool;

/* x (N, C, H, W) to y (N, C, OH, OW). The maximum leaves in `workspace` where it was found, for
 * backward: `workspace_bytes` of it (0 for the means, whose workspace is NULL), in a form of
 * its own that only a backward call of the same views' shapes and strides can read. */
bool orr_onednn_supports_pool(const orr_onednn_pool *g, const orr_view *x, const orr_view *y);
size_t orr_onednn_pool_workspace_bytes(const orr_onednn_pool *g, const orr_view *x,
                                       const orr_view *y);
orr_status orr_onednn_pool_forward(const orr_onednn_pool *g, const orr_view *x,
                                   const orr_view *y, void *workspace);
bool orr_onednn_supports_pool_backward(const orr_onednn_pool *g, const orr_view *dy,
                                       const orr_view *dx);
orr_status orr_onednn_pool_backward(const orr_onednn_pool *g, const orr_view *dy,
                                    const orr_view *dx, const void *workspace);

#endif
