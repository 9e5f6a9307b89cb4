/* lua_tensor.c: what a tensor says of itself, its values as Lua values, and moves between
 * devices and dtypes.
 *
 * Invariant: a value is read only after the work that makes it is done; an error of that work
 * is raised here.
 * To add a method: its row in `methods`.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/copy.h"
#include "lua_core.h"
#include "op.h"

static int size(lua_State *L) {
  const orr_tensor *t = orr_lua_check(L, 1);
  if (lua_isnoneornil(L, 2)) {
    lua_createtable(L, t->meta.ndim, 0);
    for (int d = 0; d < t->meta.ndim; d++) {
      lua_pushnumber(L, (lua_Number)t->meta.shape[d]);
#if LUA_VERSION_NUM >= 503
      lua_pop(L, 1);
      lua_pushinteger(L, t->meta.shape[d]);
#endif
      lua_rawseti(L, -2, d + 1);
    }
    return 1;
  }
  int d = (int)luaL_checkinteger(L, 2);
  if (d < 0) d += t->meta.ndim + 1;
  if (d < 1 || d > t->meta.ndim)
    return orr_lua_error(L, "size: dimension %d of a tensor with %d", d, t->meta.ndim);
  lua_pushinteger(L, (lua_Integer)t->meta.shape[d - 1]);
  return 1;
}

static int length(lua_State *L) {
  const orr_tensor *t = orr_lua_check(L, 1);
  if (t->meta.ndim == 0)
    return orr_lua_error(L, "#: a tensor without dimensions has no length");
  lua_pushinteger(L, (lua_Integer)t->meta.shape[0]);
  return 1;
}

static int stride(lua_State *L) {
  const orr_tensor *t = orr_lua_check(L, 1);
  lua_createtable(L, t->meta.ndim, 0);
  for (int d = 0; d < t->meta.ndim; d++) {
    lua_pushinteger(L, (lua_Integer)t->shard[0].stride[d]);
    lua_rawseti(L, -2, d + 1);
  }
  return 1;
}

static int dim(lua_State *L) {
  lua_pushinteger(L, orr_lua_check(L, 1)->meta.ndim);
  return 1;
}

static int numel(lua_State *L) {
  lua_pushinteger(L, (lua_Integer)orr_tensor_numel(orr_lua_check(L, 1)));
  return 1;
}

static int dtype(lua_State *L) {
  lua_pushstring(L, orr_dtype_name(orr_lua_check(L, 1)->meta.dtype));
  return 1;
}

static int device(lua_State *L) {
  const orr_tensor *t = orr_lua_check(L, 1);
  luaL_Buffer b;
  luaL_buffinit(L, &b);
  for (int r = 0; r < t->n; r++) {
    if (r) luaL_addchar(&b, ',');
    luaL_addstring(&b, orr_tensor_device(t, r)->name);
  }
  luaL_pushresult(&b);
  return 1;
}

static int layout(lua_State *L) {
  char text[512];
  lua_pushstring(L, orr_layout_text(orr_lua_check(L, 1)->layout, text, sizeof text));
  return 1;
}

static int is_contiguous(lua_State *L) {
  lua_pushboolean(L, orr_tensor_is_contiguous(orr_lua_check(L, 1)));
  return 1;
}

/* ---- values ---- */

/* The host's dense form of t in f64, i64 or bool, as a tensor pushed to keep it alive. */
static const orr_tensor *values(lua_State *L, orr_tensor *t) {
  orr_tensor *host, *wide = NULL;
  bool was = orr_set_grad_mode(false);
  orr_status status = orr_tensor_full(t, &host);
  orr_dtype to = orr_dtype_is_float(t->meta.dtype) ? ORR_F64
                 : t->meta.dtype == ORR_BOOL       ? ORR_BOOL
                                                   : ORR_I64;
  if (!status) {
    status = orr_cast(host, to, &wide);
    orr_tensor_free(host);
  }
  orr_set_grad_mode(was);
  if (status) orr_lua_raise(L, status);
  orr_lua_push(L, wide);
  return wide;
}

static void push_value(lua_State *L, const orr_view *v, int64_t at) {
  if (v->dtype == ORR_F64) lua_pushnumber(L, ((const double *)v->data)[at]);
  else if (v->dtype == ORR_BOOL) lua_pushboolean(L, ((const uint8_t *)v->data)[at]);
#if LUA_VERSION_NUM >= 503
  else lua_pushinteger(L, ((const int64_t *)v->data)[at]);
#else
  else lua_pushnumber(L, (lua_Number)((const int64_t *)v->data)[at]);
#endif
}

static void push_nested(lua_State *L, const orr_view *v, int d, int64_t *at) {
  if (d == v->ndim) {
    push_value(L, v, (*at)++);
    return;
  }
  luaL_checkstack(L, 3, "tensor with too many dimensions");
  lua_createtable(L, (int)v->shape[d], 0);
  for (int64_t k = 1; k <= v->shape[d]; k++) {
    push_nested(L, v, d + 1, at);
    lua_rawseti(L, -2, (int)k);
  }
}

static int totable(lua_State *L) {
  orr_view v;
  int64_t at = 0;
  orr_tensor_view(values(L, orr_lua_check(L, 1)), 0, &v);
  push_nested(L, &v, 0, &at);
  return 1;
}

static int item(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1);
  char text[300];
  orr_view v;
  if (orr_tensor_numel(t) != 1)
    return orr_lua_error(L, "item: the tensor holds %lld elements, not one; got %s",
                         (long long)orr_tensor_numel(t), orr_tensor_text(t, text, sizeof text));
  orr_tensor_view(values(L, t), 0, &v);
  push_value(L, &v, 0);
  return 1;
}

static int tobytes(lua_State *L) {
  orr_tensor *host;
  orr_view v;
  orr_lua_try(L, orr_tensor_full(orr_lua_check(L, 1), &host));
  orr_lua_push(L, host);
  orr_tensor_view(host, 0, &v);
  lua_pushlstring(L, v.data ? v.data : "",
                  (size_t)orr_tensor_numel(host) * orr_dtype_size(host->meta.dtype));
  return 1;
}

static int full(lua_State *L) {
  orr_tensor *host;
  orr_lua_try(L, orr_redistribute_op(orr_lua_check(L, 1), orr_layout_single(0), &host));
  orr_lua_push(L, host);
  return 1;
}

/* A host copy that shares memory with nothing. */
static int snapshot(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1), *host, *copy;
  orr_lua_try(L, orr_tensor_full(t, &host));
  orr_lua_push(L, host);
  bool was = orr_set_grad_mode(false);
  orr_status status = orr_call1(&orr_op_clone, host, NULL, &copy);
  orr_set_grad_mode(was);
  orr_lua_try(L, status);
  orr_lua_push(L, copy);
  return 1;
}

/* ---- moves ---- */

static int to(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1), *y = NULL;
  orr_dtype to_dtype = t->meta.dtype;
  orr_device *d = NULL;
  for (int k = 2; k <= lua_gettop(L); k++) {
    if (lua_type(L, k) == LUA_TSTRING &&
        orr_dtype_parse(lua_tostring(L, k), &to_dtype) == ORR_OK)
      continue;
    d = orr_lua_device(L, k);
  }
  orr_status status = orr_cast(t, to_dtype, &y);
  if (t->meta.dtype == to_dtype && !status) {
    orr_tensor_free(y);
    y = orr_tensor_ref(t);
  }
  if (!status && d && y->layout != orr_layout_single(d->index)) {
    orr_tensor *moved;
    status = orr_redistribute_op(y, orr_layout_single(d->index), &moved);
    orr_tensor_free(y);
    y = moved;
  }
  orr_lua_try(L, status);
  if (y == t) {
    orr_tensor_free(y);
    lua_pushvalue(L, 1);
  } else {
    orr_lua_push(L, y);
  }
  return 1;
}

static int detach(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1), *y;
  orr_lua_try(L, orr_tensor_alias(t, &y));
  orr_lua_push(L, y);
  return 1;
}

/* replace_(t, from): t becomes what `from` is and keeps its identity and its requires_grad. */
static int replace_(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1), *from = orr_lua_check(L, 2), *alias;
  if (t->node) return orr_lua_error(L, "replace_: the tensor was computed from others");
  orr_lua_try(L, orr_tensor_alias(from, &alias));
  orr_tensor_adopt(t, alias);
  t->is_view = false;
  lua_settop(L, 1);
  return 1;
}

static int requires_grad_(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1);
  bool on = lua_isnone(L, 2) || lua_toboolean(L, 2);
  if (on && !orr_dtype_is_float(t->meta.dtype))
    return orr_lua_error(L, "only floating-point tensors can require grad, not %s",
                         orr_dtype_name(t->meta.dtype));
  if (!on && t->node)
    return orr_lua_error(L,
                         "requires_grad: the tensor was computed from others; use x:detach()");
  orr_tensor_require_grad(t, on);
  lua_settop(L, 1);
  return 1;
}

int orr_lua_open_tensor(lua_State *L) {
  static const luaL_Reg methods[] = {{"size", size},
                                     {"stride", stride},
                                     {"dim", dim},
                                     {"numel", numel},
                                     {"dtype", dtype},
                                     {"device", device},
                                     {"layout", layout},
                                     {"is_contiguous", is_contiguous},
                                     {"totable", totable},
                                     {"item", item},
                                     {"tobytes", tobytes},
                                     {"full", full},
                                     {"to", to},
                                     {"detach", detach},
                                     {"requires_grad_", requires_grad_},
                                     {NULL, NULL}};
  static const luaL_Reg functions[] = {
      {"snapshot", snapshot}, {"replace_", replace_}, {NULL, NULL}};
  luaL_setfuncs(L, functions, 0);
  luaL_getmetatable(L, ORR_LUA_TENSOR);
  lua_pushcfunction(L, length);
  lua_setfield(L, -2, "__len");
  lua_getfield(L, -1, "__methods");
  luaL_setfuncs(L, methods, 0);
  lua_pop(L, 2);
  return 0;
}
