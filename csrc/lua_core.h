/* lua_core.h: what the files of the binding share: tensors as userdata, errors at the user's
 * line, and reading of options.
 *
 * Invariant: a tensor userdata owns one reference, dropped by its collection. Every error that
 * leaves the binding starts with "file:line:" of the first frame outside the library.
 * To add a part of the module: a file lua_*.c with an open function, called in lua_core.c.
 */
#ifndef ORR_LUA_CORE_H
#define ORR_LUA_CORE_H

#include "lua_compat.h"
#include "orrery_int.h"

#define ORR_LUA_TENSOR "orrery.Tensor"

/* The tensor at index, or NULL; raises where it is another value (orr_lua_check). Borrowed. */
orr_tensor *orr_lua_test(lua_State *L, int index);
orr_tensor *orr_lua_check(lua_State *L, int index);
void orr_lua_push(lua_State *L, orr_tensor *take_t);
/* Says which state calls, for the line of queued work; reading a tensor argument says it
 * too. */
void orr_lua_enter(lua_State *L);
/* Raises the failure in hand; a message given by orr_fail. Returns never. */
int orr_lua_raise(lua_State *L, orr_status status);
/* Raises a message of its own. */
int orr_lua_error(lua_State *L, const char *format, ...) ORR_PRINTF(2, 3);
static inline void orr_lua_try(lua_State *L, orr_status status) {
  if (status) orr_lua_raise(L, status);
}

/* How a new tensor is asked for: sizes, then {dtype=, device=, requires_grad=}. */
typedef struct orr_lua_options {
  orr_meta meta;
  orr_layout *layout; /* borrowed */
  bool requires_grad;
  bool has_dtype;
} orr_lua_options;
/* Reads the options table at `index` alone (nil or none: the defaults). */
void orr_lua_options_read(lua_State *L, int index, orr_dtype dtype, orr_lua_options *o);
/* Reads sizes from `first` on (numbers, or one table of them), then options. */
void orr_lua_create_options(lua_State *L, int first, orr_dtype dtype, orr_lua_options *o);
/* Pushes a new tensor after setting requires_grad. */
void orr_lua_push_new(lua_State *L, orr_tensor *take_t, const orr_lua_options *o);
/* A list of tensors (a Lua array) at `index`, borrowed, kept alive by the table; as a userdata
 * left on the stack. *n: how many. */
orr_tensor **orr_lua_list(lua_State *L, int index, int *n);
/* The device named at `index` ("cpu:1", 1); nil: NULL. */
orr_device *orr_lua_device(lua_State *L, int index);

/* The coroutine whose call is in hand: Lua functions are called on no other. */
lua_State *orr_lua_running(void);
/* The main state, NULL once it is closed: for the registry alone. */
lua_State *orr_lua_main(void);

/* Each adds its functions to the table on top of the stack. */
int orr_lua_open_op(lua_State *L);     /* lua_op.c: also the methods */
int orr_lua_open_tensor(lua_State *L); /* lua_tensor.c */
int orr_lua_open_index(lua_State *L);  /* lua_index.c */
int orr_lua_open_create(lua_State *L); /* lua_create.c */
int orr_lua_open_device(lua_State *L); /* lua_device.c */
int orr_lua_open_tape(lua_State *L);   /* lua_tape.c */
int orr_lua_open_place(lua_State *L);  /* lua_place.c */
int orr_lua_set_resumer(
    lua_State *L); /* set_resumer(on): the caller is about to resume a coroutine */
int orr_lua_open_step(lua_State *L);    /* lua_step.c */
int orr_lua_open_optim(lua_State *L);   /* lua_optim.c */
int orr_lua_open_random(lua_State *L);  /* lua_random.c */
int orr_lua_open_record(lua_State *L);  /* lua_record.c */
int orr_lua_open_capture(lua_State *L); /* lua_capture.c */

#endif
