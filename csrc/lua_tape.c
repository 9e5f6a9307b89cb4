/* lua_tape.c: backward, gradients, no_grad, hooks and custom functions.
 *
 * Invariant: the grad mode that a function sets is put back however it ends. Lua functions that
 * the tape must call live in the registry, released with the tensor or node that holds them.
 * To add a function: its row at the end.
 */
#include <stdlib.h>

#include "lua_core.h"
#include "timeline.h"

static int backward(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1), *g = NULL;
  bool retain = false, create_graph = false;
  if (!lua_isnoneornil(L, 2) && !lua_istable(L, 2)) g = orr_lua_check(L, 2);
  int options = lua_istable(L, 2) ? 2 : 3;
  if (lua_istable(L, options)) {
    lua_getfield(L, options, "retain");
    lua_getfield(L, options, "create_graph");
    retain = lua_toboolean(L, -2);
    create_graph = lua_toboolean(L, -1);
  }
  orr_mark pass = {.backward = true}, none = {0};
  orr_timeline_mark(&pass);
  orr_status status = orr_backward(&t, 1, g ? &g : NULL, retain, create_graph);
  orr_timeline_mark(&none);
  orr_lua_try(L, status);
  return 0;
}

/* grad(y, {x, ...}, {create_graph=, retain=, grad=}): a table of gradients, false where
 * none. */
static int grad(lua_State *L) {
  orr_tensor *y = orr_lua_check(L, 1), *g = NULL;
  bool retain = false, create_graph = false;
  int n;
  lua_settop(L, 3);
  if (lua_istable(L, 3)) {
    lua_getfield(L, 3, "retain");
    lua_getfield(L, 3, "create_graph");
    lua_getfield(L, 3, "grad");
    retain = lua_toboolean(L, -3);
    create_graph = lua_toboolean(L, -2);
    if (!lua_isnil(L, -1)) g = orr_lua_check(L, -1);
  }
  if (!lua_istable(L, 2))
    return orr_lua_error(L, "grad: the second argument is a list of tensors");
  orr_tensor **x = orr_lua_list(L, 2, &n);
  orr_tensor **gx = lua_newuserdata(L, (size_t)(n + 1) * sizeof *gx);
  for (int k = 0; k < n; k++)
    if (!x[k]->requires_grad)
      return orr_lua_error(L, "grad: tensor %d does not require grad", k + 1);
  orr_lua_try(L, orr_grad_of(&y, 1, g ? &g : NULL, x, n, retain, create_graph, gx));
  lua_createtable(L, n, 0);
  for (int k = 0; k < n; k++) {
    if (gx[k]) orr_lua_push(L, gx[k]);
    else lua_pushboolean(L, false);
    lua_rawseti(L, -2, k + 1);
  }
  return 1;
}

/* set_grad_mode(on) gives what it was; no_grad itself is Lua (yields must pass). */
static int set_grad_mode(lua_State *L) {
  lua_pushboolean(L, orr_set_grad_mode(lua_toboolean(L, 1)));
  return 1;
}

/* set_autocast(dtype or nil) gives what it was. */
static int set_autocast(lua_State *L) {
  orr_dtype dtype = ORR_F32;
  int narrow = -1;
  if (!lua_isnoneornil(L, 1)) {
    orr_lua_try(L, orr_dtype_parse(luaL_checkstring(L, 1), &dtype));
    narrow = (int)dtype;
  }
  int was = orr_set_autocast(narrow);
  if (was < 0) lua_pushnil(L);
  else lua_pushstring(L, orr_dtype_name((orr_dtype)was));
  return 1;
}

/* autocast(): the narrow dtype, or nil. */
static int autocast(lua_State *L) {
  if (orr_autocast() < 0) lua_pushnil(L);
  else lua_pushstring(L, orr_dtype_name((orr_dtype)orr_autocast()));
  return 1;
}

static int grad_mode(lua_State *L) {
  lua_pushboolean(L, orr_grad_mode());
  return 1;
}

/* hold_gradients(true), hold_gradients(false, scale) */
static int hold(lua_State *L) {
  orr_lua_enter(L);
  orr_lua_try(L, lua_toboolean(L, 1) ? orr_hold_begin() : orr_hold_end(luaL_checknumber(L, 2)));
  return 0;
}

/* ---- hooks: a reference to a Lua function g -> new g or nil, made in tensor.lua ---- */

static orr_status lua_failure(lua_State *L) {
  orr_status status = orr_fail(
      ORR_EARG, "%s", lua_tostring(L, -1) ? lua_tostring(L, -1) : "(error is not a string)");
  lua_pop(L, 1);
  return status;
}

static orr_status run_hook(int hooks, orr_tensor **g) {
  lua_State *L = orr_lua_running();
  lua_rawgeti(L, LUA_REGISTRYINDEX, hooks);
  orr_lua_push(L, orr_tensor_ref(*g));
  int failed = lua_pcall(L, 1, 1, 0);
  orr_lua_enter(L); /* the function may have run coroutines */
  if (failed) return lua_failure(L);
  orr_tensor *other = orr_lua_test(L, -1);
  if (other && other != *g) {
    orr_tensor_ref(other);
    orr_tensor_free(*g);
    *g = other;
  }
  lua_pop(L, 1);
  return ORR_OK;
}

static void release_hook(int hooks) {
  if (orr_lua_main()) luaL_unref(orr_lua_main(), LUA_REGISTRYINDEX, hooks);
}

static int set_hook(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1);
  int old = orr_tape_hooks(t);
  luaL_checktype(L, 2, LUA_TFUNCTION);
  if (!t->requires_grad)
    return orr_lua_error(L, "register_hook: the tensor does not require grad");
  if (old) luaL_unref(L, LUA_REGISTRYINDEX, old);
  lua_settop(L, 2);
  orr_tape_set_hooks(t, luaL_ref(L, LUA_REGISTRYINDEX));
  return 0;
}

static int get_hook(lua_State *L) {
  int hooks = orr_tape_hooks(orr_lua_check(L, 1));
  if (hooks) lua_rawgeti(L, LUA_REGISTRYINDEX, hooks);
  else lua_pushnil(L);
  return 1;
}

/* ---- custom: record(inputs, outputs, f); f(gy...) gives gx... ---- */

static orr_status run_custom(void *state, int n_out, orr_tensor **gy, int n_in,
                             orr_tensor **gx) {
  lua_State *L = orr_lua_running();
  int top = lua_gettop(L);
  luaL_checkstack(L, n_out + n_in + 4, NULL);
  lua_rawgeti(L, LUA_REGISTRYINDEX, (int)(intptr_t)state);
  for (int k = 0; k < n_out; k++) {
    if (gy[k]) orr_lua_push(L, orr_tensor_ref(gy[k]));
    else lua_pushnil(L);
  }
  int failed = lua_pcall(L, n_out, n_in, 0);
  orr_lua_enter(L);
  if (failed) return lua_failure(L);
  for (int k = 0; k < n_in; k++) {
    orr_tensor *g = orr_lua_test(L, top + 1 + k);
    if (g) gx[k] = orr_tensor_ref(g);
  }
  lua_settop(L, top);
  return ORR_OK;
}

static void release_custom(void *state) { release_hook((int)(intptr_t)state); }

static int record(lua_State *L) {
  int n_in, n_out;
  orr_tensor **in = orr_lua_list(L, 1, &n_in), **out = orr_lua_list(L, 2, &n_out);
  for (int k = 0; k < n_out; k++)
    if (out[k]->node || out[k]->requires_grad)
      return orr_lua_error(
          L, "custom: forward must return new tensors, made under its own no_grad");
  lua_pushvalue(L, 3);
  orr_custom custom = {.backward = run_custom, .release = release_custom};
  custom.state = (void *)(intptr_t)luaL_ref(L, LUA_REGISTRYINDEX);
  orr_lua_try(L, orr_tape_custom(in, n_in, out, n_out, &custom));
  return 0;
}

int orr_lua_open_tape(lua_State *L) {
  static const luaL_Reg functions[] = {
      {"grad", grad},           {"set_grad_mode", set_grad_mode},
      {"autocast", autocast},   {"set_autocast", set_autocast},
      {"grad_mode", grad_mode}, {"hold_gradients", hold},
      {"set_hook", set_hook},   {"get_hook", get_hook},
      {"record", record},       {NULL, NULL}};
  luaL_setfuncs(L, functions, 0);
  luaL_getmetatable(L, ORR_LUA_TENSOR);
  lua_getfield(L, -1, "__methods");
  lua_pushcfunction(L, backward);
  lua_setfield(L, -2, "backward");
  lua_pop(L, 2);
  orr_hook_run = run_hook;
  orr_hook_release = release_hook;
  return 0;
}
