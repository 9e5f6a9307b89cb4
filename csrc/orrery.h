/* orrery.h: Orrery's one public C header, and the manual for embedding it from C.
 *
 * Start. orrery_open() makes the devices: "cpu" is the whole host and works on the caller's
 * thread; "cpu:0" to "cpu:N-1" have a thread and a queue each, N from ORRERY_CPU_DEVICES. Set
 * OMP_WAIT_POLICY=passive in the environment of the process: idle OpenMP threads burn the cores
 * that devices need otherwise, and OpenMP reads it before main() runs.
 *
 * Threads. One thread of the host, the controller, makes every call; devices work beside it.
 * Calls queue work and return; orrery_read, orrery_item and orrery_synchronize wait for it.
 *
 * Errors. A function that can fail returns ORR_OK (0) or another orr_status, and then
 * orrery_last_error() says why, as one line for a person. What it should have given is NULL
 * and nothing else has changed. The library never prints, exits or aborts on a mistake of the
 * host. Queued work that fails is reported by the next call that waits.
 *
 * Ownership. A tensor given through `orr_tensor **out` is owned by the host, who gives it back
 * with orrery_free; one that a function returns is borrowed. Meshes live for ever.
 *
 * Tensors. A tensor has a dtype ("f64" "f32" "f16" "bf16" "i64" "i32" "u8" "bool"), up to 8
 * dimensions, and a layout over one device or a mesh of them. `shape` is always the global
 * shape; host memory is row-major.
 *
 * Ops. Every op of the Lua module is called by its name, with its tensors and then its numbers
 * in the order of the Lua method: x:sum(2, true) is orrery_call("sum", &x, 1, (double[]){2, 1},
 * 2, &y, 1). So dimensions, labels and indices count from 1 here as there, a boolean is 0 or 1,
 * a reduction is 0 "none", 1 "mean" or 2 "sum", and numbers left out at the end, or given as
 * NAN, take their default. A name that ends in "_" is the in-place form.
 *
 * Training. Place parameters as "replicate" and batches as "shard(1)" on the mesh of a plan:
 * gradients come out summed over the devices, and the numbers are those of one device.
 * examples/train.c is a whole program; examples/embed.c embeds Lua instead and shares tensors
 * with it.
 *
 * Linking. liborrery.so has everything but the three functions at the end, which need Lua; the
 * static liborrery.a of an interpreter has all. cc main.c -lorrery -lm, or with the archive too
 * -fopenmp -pthread -ldl.
 *
 * Invariant: nothing here shows a struct's inside; internal names begin with orr_, public
 * functions with orrery_. To add a function: its prototype here, its body in api.c.
 */
#ifndef ORRERY_H
#define ORRERY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ORR_API __attribute__((visibility("default")))
#else
#define ORR_API
#endif

typedef enum orr_status {
  ORR_OK = 0,
  ORR_EARG,       /* the caller's mistake: shape, dtype, device, option */
  ORR_EMEM,       /* a device's or the host's memory is used up */
  ORR_EDEVICE,    /* a device, or work queued on it, failed */
  ORR_EINTERRUPT, /* the user asked to stop */
  ORR_EIO         /* a file or stream */
} orr_status;

typedef struct orr_tensor orr_tensor;
typedef struct orr_mesh orr_mesh;

/* ---- the engine ---- */

/* Makes the devices from the environment; a second call does nothing. */
ORR_API orr_status orrery_open(void);
/* Waits for queued work and joins the devices' threads. Free the tensors before. */
ORR_API void orrery_close(void);
/* The words of this thread's last failure; never NULL, borrowed until the next one. */
ORR_API const char *orrery_last_error(void);
/* Asks the call in hand, or the next one, to stop with ORR_EINTERRUPT. Safe in a signal handler
 * and on any thread. */
ORR_API void orrery_interrupt(void);
/* The number of visible devices, cpu:0 to cpu:N-1. */
ORR_API int orrery_device_count(void);
/* Waits for the device of that name (NULL: for all), and reports the first failure of queued
 * work; after it the next step works. */
ORR_API orr_status orrery_synchronize(const char *device);
/* One seed for everything random; what follows does not depend on the devices. */
ORR_API void orrery_manual_seed(uint64_t seed);

typedef struct orr_memory {
  size_t live;   /* bytes that tensors hold now */
  size_t peak;   /* the most they held */
  size_t cached; /* bytes kept for the next tensors */
  size_t limit;  /* 0: none but the machine's */
} orr_memory;

ORR_API orr_status orrery_memory(const char *device, orr_memory *out);
/* Bytes that tensors of the device may hold; 0: no limit. Past it calls give ORR_EMEM. */
ORR_API orr_status orrery_set_memory_limit(const char *device, size_t bytes);

/* ---- tensors ---- */

/* A new tensor on `cpu` with a copy of the row-major elements at `data`; NULL: zeros. */
ORR_API orr_status orrery_tensor(const char *dtype, int ndim, const int64_t *shape,
                                 const void *data, orr_tensor **out);
ORR_API void orrery_free(orr_tensor *take_t); /* NULL is allowed */
/* One more owner of the same tensor; returns it. */
ORR_API orr_tensor *orrery_ref(orr_tensor *t);

ORR_API int orrery_ndim(const orr_tensor *t);
/* The size of dimension d, from 1; 0 where there is none. */
ORR_API int64_t orrery_size(const orr_tensor *t, int d);
ORR_API const char *orrery_dtype(const orr_tensor *t);
/* "(2, 3) f32 on data<0,1>: shard(1)" into buf; returns buf. */
ORR_API char *orrery_describe(const orr_tensor *t, char *buf, size_t size);

/* Copies the global value, row-major and in the tensor's dtype, to `data`, which has exactly
 * `bytes` bytes. Waits for the tensor. */
ORR_API orr_status orrery_read(orr_tensor *t, void *data, size_t bytes);
/* The value of a tensor of one element. Waits for it. */
ORR_API orr_status orrery_item(orr_tensor *t, double *out);

/* ---- ops ---- */

/* Calls the op `name` with n_in tensors and n_arg numbers. An op that takes a tensor or a
 * number gets the number where in[k] is NULL or in has ended; an optional tensor is left out
 * likewise. The first n_out results go to out, owned; results beyond it are dropped. The
 * in-place form writes in[0] and gives one more reference to it. */
ORR_API orr_status orrery_call(const char *name, orr_tensor *const *in, int n_in,
                               const double *arg, int n_arg, orr_tensor **out, int n_out);

/* The tensor in another dtype; in its own, the same tensor. Differentiable between floats. */
ORR_API orr_status orrery_cast(orr_tensor *t, const char *dtype, orr_tensor **out);

/* ---- gradients ---- */

/* Marks a leaf (a parameter) whose gradient backward collects. */
ORR_API orr_status orrery_require_grad(orr_tensor *t, bool on);
/* Gradients of y into every leaf that it was made from, added to what they have; gy is the
 * gradient of y, NULL: 1, for a y of one element. The graph is freed. */
ORR_API orr_status orrery_backward(orr_tensor *y, orr_tensor *gy);
/* The gradient of a leaf, borrowed until it is cleared; NULL: none came. */
ORR_API orr_tensor *orrery_grad(const orr_tensor *t);
ORR_API void orrery_zero_grad(orr_tensor *t);
/* Switches recording for backward; returns what it was. Off while parameters are written. */
ORR_API bool orrery_grad_mode(bool on);

/* ---- devices and plans ---- */

/* The mesh of a plan's text, "data<0,1>", or one device's, "cpu:1". A plan that cannot run is
 * refused with the reason and the nearest that can; a plan of several stages has a mesh a
 * stage. */
ORR_API orr_status orrery_mesh(const char *text, const orr_mesh **out);
/* The same value on the mesh: "replicate", "shard(d)" (balanced parts of dimension d, from 1),
 * or "partial(sum)", for every axis; ignored on one device. Recorded for backward. Memory is
 * shared where nothing moves. */
ORR_API orr_status orrery_distribute(orr_tensor *t, const orr_mesh *mesh, const char *placement,
                                     orr_tensor **out);

/* ---- beside Lua (in liborrery.a and in the Lua module alone) ---- */

struct lua_State;

/* The module `orrery.core`. A host puts it into package.preload, so that require "orrery" uses
 * this engine. The engine closes with the state, so lua_close comes last. */
ORR_API int luaopen_orrery_core(struct lua_State *L);
/* Pushes a tensor as the Lua value that scripts know; after luaopen_orrery_core. */
ORR_API void orrery_lua_push(struct lua_State *L, orr_tensor *take_t);
/* The tensor at `index`, borrowed from the Lua value; NULL when it is something else. */
ORR_API orr_tensor *orrery_lua_tensor(struct lua_State *L, int index);

#ifdef __cplusplus
}
#endif

#endif
