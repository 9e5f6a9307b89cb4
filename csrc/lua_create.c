/* lua_create.c: new tensors from Lua values and from nothing.
 *
 * Invariant: sizes come first, then one table of options {dtype=, device=, requires_grad=};
 * what a nested table holds is checked before anything is made.
 * To add a creator: read its numbers, then orr_lua_create_options, then orr_create.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lua_core.h"
#include "op.h"

/* ---- options ---- */

orr_device *orr_lua_device(lua_State *L, int index) {
  orr_device *d;
  if (lua_isnoneornil(L, index)) return NULL;
  if (lua_type(L, index) == LUA_TNUMBER)
    orr_lua_try(L, orr_device_visible_at((int64_t)lua_tonumber(L, index), &d));
  else if (lua_type(L, index) == LUA_TSTRING)
    orr_lua_try(L, orr_device_find(lua_tostring(L, index), &d));
  else orr_lua_error(L, "a device must be a name like \"cpu:1\" or a number");
  return d;
}

static bool known_option(const char *key) {
  static const char *const known[] = {"dtype", "device", "requires_grad"};
  for (size_t k = 0; k < sizeof known / sizeof *known; k++)
    if (strcmp(key, known[k]) == 0) return true;
  return false;
}

void orr_lua_options_read(lua_State *L, int index, orr_dtype dtype, orr_lua_options *o) {
  orr_lua_enter(L);
  o->meta.dtype = dtype;
  o->layout = orr_layout_single(0);
  o->requires_grad = o->has_dtype = false;
  if (lua_isnoneornil(L, index)) return;
  index = lua_absindex(L, index);
  if (!lua_istable(L, index))
    orr_lua_error(L, "options must be a table like {dtype=\"f32\"} and are a %s",
                  luaL_typename(L, index));
  for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
    if (lua_type(L, -2) == LUA_TSTRING && known_option(lua_tostring(L, -2))) continue;
    lua_pushvalue(L, -2);
    orr_lua_error(L, "unknown option '%s'; known are dtype, device, requires_grad",
                  lua_tostring(L, -1));
  }
  lua_getfield(L, index, "dtype");
  if (!lua_isnil(L, -1)) {
    const char *name = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "(not a string)";
    orr_lua_try(L, orr_dtype_parse(name, &o->meta.dtype));
    o->has_dtype = true;
  }
  lua_getfield(L, index, "device");
  orr_device *d = orr_lua_device(L, -1);
  if (d) o->layout = orr_layout_single(d->index);
  lua_getfield(L, index, "requires_grad");
  o->requires_grad = lua_toboolean(L, -1);
  lua_pop(L, 3);
  if (o->requires_grad && !orr_dtype_is_float(o->meta.dtype))
    orr_lua_error(L, "only floating-point tensors can require grad, not %s",
                  orr_dtype_name(o->meta.dtype));
}

static int64_t size_at(lua_State *L, int index) {
  double v = lua_tonumber(L, index);
  if (lua_type(L, index) != LUA_TNUMBER || v != floor(v) || v < 0)
    orr_lua_error(
        L, "a size must be a whole number of at least 0, got %s",
        lua_type(L, index) == LUA_TNUMBER ? "another number" : luaL_typename(L, index));
  return (int64_t)v;
}

void orr_lua_create_options(lua_State *L, int first, orr_dtype dtype, orr_lua_options *o) {
  int at = first;
  o->meta.ndim = 0;
  if (lua_istable(L, at) && lua_rawlen(L, at) > 0) {
    int n = (int)lua_rawlen(L, at);
    if (n > ORR_MAX_DIM) orr_lua_error(L, "at most %d dimensions are possible", ORR_MAX_DIM);
    for (int k = 1; k <= n; k++) {
      lua_rawgeti(L, at, k);
      o->meta.shape[o->meta.ndim++] = size_at(L, -1);
      lua_pop(L, 1);
    }
    at++;
  } else {
    for (; !lua_isnoneornil(L, at) && !lua_istable(L, at); at++) {
      if (o->meta.ndim == ORR_MAX_DIM)
        orr_lua_error(L, "at most %d dimensions are possible", ORR_MAX_DIM);
      o->meta.shape[o->meta.ndim++] = size_at(L, at);
    }
  }
  orr_lua_options_read(L, at, dtype, o);
}

void orr_lua_push_new(lua_State *L, orr_tensor *take_t, const orr_lua_options *o) {
  if (o->requires_grad) orr_tensor_require_grad(take_t, true);
  orr_lua_push(L, take_t);
}

static int make(lua_State *L, const orr_op *op, const orr_lua_options *o,
                const orr_args *args) {
  orr_tensor *t;
  orr_lua_try(L, orr_create(op, &o->meta, o->layout, args, &t));
  orr_lua_push_new(L, t, o);
  return 1;
}

/* ---- from nothing ---- */

static int filled(lua_State *L, int first, double value) {
  orr_lua_options o;
  orr_args args = {.f = {value}};
  orr_lua_create_options(L, first, ORR_F32, &o);
  return make(L, &orr_op_full, &o, &args);
}

static int zeros(lua_State *L) { return filled(L, 1, 0); }
static int ones(lua_State *L) { return filled(L, 1, 1); }
static int full(lua_State *L) { return filled(L, 2, luaL_checknumber(L, 1)); }

static int filled_like(lua_State *L, double value) {
  orr_tensor *t = orr_lua_check(L, 1), *y;
  orr_args args = {.f = {value}};
  orr_layout *layout = t->layout;
  if (orr_layout_is_partial(layout)) layout = orr_layout_replicate(layout->mesh);
  orr_lua_try(L, orr_create(&orr_op_full, &t->meta, layout, &args, &y));
  orr_lua_push(L, y);
  return 1;
}

static int zeros_like(lua_State *L) { return filled_like(L, 0); }
static int ones_like(lua_State *L) { return filled_like(L, 1); }
static int full_like(lua_State *L) { return filled_like(L, luaL_checknumber(L, 2)); }

/* arange(from, to [, step] [, options]): both ends in where they are met, as Lua's for. */
static int arange(lua_State *L) {
  double from = luaL_checknumber(L, 1), to = luaL_checknumber(L, 2), step = 1;
  int at = 3;
  if (lua_type(L, at) == LUA_TNUMBER) step = lua_tonumber(L, at++);
  if (step == 0 || !isfinite(from) || !isfinite(to) || !isfinite(step))
    return orr_lua_error(L, "arange: from %g to %g by %g has no end", from, to, step);
  orr_lua_options o;
  bool whole = from == floor(from) && step == floor(step);
  orr_lua_options_read(L, at, whole ? ORR_I64 : ORR_F32, &o);
  double n = floor((to - from) / step + 1e-9) + 1;
  o.meta.ndim = 1;
  o.meta.shape[0] = n > 0 ? (int64_t)n : 0;
  orr_args args = {.f = {from, step}};
  return make(L, &orr_op_arange, &o, &args);
}

static int linspace(lua_State *L) {
  double from = luaL_checknumber(L, 1), to = luaL_checknumber(L, 2);
  orr_lua_options o;
  int64_t n = size_at(L, 3);
  orr_lua_options_read(L, 4, ORR_F32, &o);
  o.meta.ndim = 1;
  o.meta.shape[0] = n;
  orr_args args = {.f = {from, n > 1 ? (to - from) / (double)(n - 1) : 0}};
  return make(L, &orr_op_arange, &o, &args);
}

static int eye(lua_State *L) {
  orr_lua_options o;
  orr_lua_create_options(L, 1, ORR_F32, &o);
  if (o.meta.ndim == 1) o.meta.shape[o.meta.ndim++] = o.meta.shape[0];
  if (o.meta.ndim != 2) return orr_lua_error(L, "eye: needs one or two sizes");
  return make(L, &orr_op_eye, &o, NULL);
}

/* ---- from Lua values ---- */

/* The shape of the nested table at the top, by its first elements. */
static void nested_shape(lua_State *L, orr_meta *meta, bool *boolean) {
  int top = lua_gettop(L);
  meta->ndim = 0;
  while (lua_istable(L, -1)) {
    if (meta->ndim == ORR_MAX_DIM)
      orr_lua_error(L, "tensor: tables nest deeper than %d", ORR_MAX_DIM);
    int64_t n = (int64_t)lua_rawlen(L, -1);
    meta->shape[meta->ndim++] = n;
    if (n == 0) break;
    luaL_checkstack(L, 2, NULL);
    lua_rawgeti(L, -1, 1);
  }
  *boolean = lua_isboolean(L, -1);
  lua_settop(L, top);
}

static void store(void *data, orr_dtype dtype, int64_t at, double v) {
  if (dtype == ORR_F64) ((double *)data)[at] = v;
  else if (dtype == ORR_F32) ((float *)data)[at] = (float)v;
  else ((int64_t *)data)[at] = (int64_t)v;
}

/* Copies the table at the top into data; `at` counts elements. */
static void nested_fill(lua_State *L, const orr_meta *meta, int depth, void *data,
                        int64_t *at) {
  if (depth == meta->ndim) {
    int type = lua_type(L, -1);
    if (type != LUA_TNUMBER && type != LUA_TBOOLEAN)
      orr_lua_error(L, "tensor: element %lld is a %s, not a number", (long long)*at + 1,
                    luaL_typename(L, -1));
    double v = type == LUA_TBOOLEAN ? lua_toboolean(L, -1) : lua_tonumber(L, -1);
    store(data, meta->dtype, (*at)++, v);
    return;
  }
  if (!lua_istable(L, -1) || (int64_t)lua_rawlen(L, -1) != meta->shape[depth])
    orr_lua_error(L,
                  "tensor: ragged table: dimension %d has %lld in one row and %lld in another",
                  depth + 1, (long long)meta->shape[depth],
                  lua_istable(L, -1) ? (long long)lua_rawlen(L, -1) : 0LL);
  for (int64_t k = 1; k <= meta->shape[depth]; k++) {
    luaL_checkstack(L, 2, NULL);
    lua_rawgeti(L, -1, (int)k);
    nested_fill(L, meta, depth + 1, data, at);
    lua_pop(L, 1);
  }
}

/* The widest dtype that Lua numbers come in on their way to `dtype`. */
static orr_dtype staging(orr_dtype dtype) {
  return dtype == ORR_F32 || dtype == ORR_F64 ? dtype
         : orr_dtype_is_float(dtype)          ? ORR_F32
                                              : ORR_I64;
}

/* Brings a host tensor to the dtype and device asked for; takes it. */
static orr_tensor *deliver(lua_State *L, orr_tensor *take_t, const orr_lua_options *o) {
  orr_tensor *t = take_t, *next;
  if (t->meta.dtype != o->meta.dtype) {
    orr_status status = orr_cast(t, o->meta.dtype, &next);
    orr_tensor_free(t);
    orr_lua_try(L, status);
    t = next;
  }
  if (t->layout != o->layout) {
    orr_status status = orr_redistribute(t, o->layout, &next);
    orr_tensor_free(t);
    orr_lua_try(L, status);
    t = next;
  }
  return t;
}

static int from_table(lua_State *L) {
  orr_lua_options o;
  bool boolean;
  lua_settop(L, 2);
  int type = lua_type(L, 1);
  if (type != LUA_TTABLE && type != LUA_TNUMBER && type != LUA_TBOOLEAN)
    return orr_lua_error(L, "tensor: needs a number or a (nested) table of numbers, got %s",
                         luaL_typename(L, 1));
  lua_pushvalue(L, 1);
  nested_shape(L, &o.meta, &boolean);
  orr_lua_options_read(L, 2, boolean ? ORR_BOOL : ORR_F32, &o);
  orr_meta meta = o.meta;
  meta.dtype = staging(meta.dtype);
  size_t bytes = (size_t)orr_numel(meta.ndim, meta.shape) * orr_dtype_size(meta.dtype);
  void *data = lua_newuserdata(L, bytes + 1);
  int64_t at = 0;
  lua_pushvalue(L, 1);
  nested_fill(L, &meta, 0, data, &at);
  orr_tensor *t;
  orr_lua_try(L, orr_tensor_from_host(&meta, data, &t));
  orr_lua_push_new(L, deliver(L, t, &o), &o);
  return 1;
}

static int tensor(lua_State *L) {
  orr_tensor *t = orr_lua_test(L, 1), *copy;
  if (!t) return from_table(L);
  orr_lua_options o;
  orr_lua_options_read(L, 2, t->meta.dtype, &o);
  bool was = orr_set_grad_mode(false);
  orr_status status = orr_call1(&orr_op_clone, t, NULL, &copy);
  orr_set_grad_mode(was);
  orr_lua_try(L, status);
  o.meta.ndim = t->meta.ndim;
  if (lua_isnoneornil(L, 2)) o.layout = copy->layout;
  orr_lua_push_new(L, deliver(L, copy, &o), &o);
  return 1;
}

/* from_bytes(string, dtype, {sizes}): the bytes of a row-major tensor in native order. */
static int from_bytes(lua_State *L) {
  orr_lua_enter(L);
  size_t n;
  const char *data = luaL_checklstring(L, 1, &n);
  orr_meta meta = {.dtype = ORR_F32};
  orr_lua_try(L, orr_dtype_parse(luaL_checkstring(L, 2), &meta.dtype));
  luaL_checktype(L, 3, LUA_TTABLE);
  meta.ndim = (int)lua_rawlen(L, 3);
  if (meta.ndim > ORR_MAX_DIM) return orr_lua_error(L, "from_bytes: too many dimensions");
  for (int k = 0; k < meta.ndim; k++) {
    lua_rawgeti(L, 3, k + 1);
    meta.shape[k] = size_at(L, -1);
    lua_pop(L, 1);
  }
  size_t want = (size_t)orr_numel(meta.ndim, meta.shape) * orr_dtype_size(meta.dtype);
  if (want != n)
    return orr_lua_error(L, "from_bytes: %zu bytes do not fill the shape, which needs %zu", n,
                         want);
  orr_tensor *t;
  orr_lua_try(L, orr_tensor_from_host(&meta, data, &t));
  orr_lua_push(L, t);
  return 1;
}

int orr_lua_open_create(lua_State *L) {
  static const luaL_Reg functions[] = {{"zeros", zeros},
                                       {"ones", ones},
                                       {"full", full},
                                       {"arange", arange},
                                       {"linspace", linspace},
                                       {"eye", eye},
                                       {"tensor", tensor},
                                       {"from_bytes", from_bytes},
                                       {NULL, NULL}};
  static const luaL_Reg methods[] = {{"zeros_like", zeros_like},
                                     {"ones_like", ones_like},
                                     {"full_like", full_like},
                                     {NULL, NULL}};
  luaL_setfuncs(L, functions, 0);
  luaL_setfuncs(L, methods, 0);
  luaL_getmetatable(L, ORR_LUA_TENSOR);
  lua_getfield(L, -1, "__methods");
  luaL_setfuncs(L, methods, 0);
  lua_pop(L, 2);
  return 0;
}
