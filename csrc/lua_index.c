/* lua_index.c: x[...] and x.name: methods, fields, and views by index.
 *
 * Invariant: an index gives a view that shares memory; an assignment writes through it.
 * To add a field: get_field and set_field.
 */
#include <math.h>
#include <string.h>

#include "lua_core.h"
#include "op.h"
#include "op_capture.h"

/* ---- fields ---- */

static int get_field(lua_State *L, orr_tensor *t, const char *name) {
  if (strcmp(name, "grad") == 0) {
    if (!t->node) orr_capture_leaf(t, false);
    if (t->grad) orr_lua_push(L, orr_tensor_ref(t->grad));
    else lua_pushnil(L);
  } else if (strcmp(name, "requires_grad") == 0) {
    lua_pushboolean(L, t->requires_grad);
  } else if (strcmp(name, "is_leaf") == 0) {
    lua_pushboolean(L, t->node == NULL);
  } else if (strcmp(name, "serial") == 0) {
    lua_pushnumber(L, (lua_Number)t->serial);
  } else {
    lua_pushnil(L);
  }
  return 1;
}

static int set_grad(lua_State *L, orr_tensor *t) {
  orr_tensor *g = NULL;
  char a[300], b[300];
  if (!lua_isnil(L, 3)) {
    g = orr_lua_check(L, 3);
    bool same = g->meta.ndim == t->meta.ndim && g->meta.dtype == t->meta.dtype &&
                memcmp(g->meta.shape, t->meta.shape,
                       (size_t)t->meta.ndim * sizeof t->meta.shape[0]) == 0;
    if (!same)
      return orr_lua_error(L, "grad: %s does not fit %s", orr_tensor_text(g, a, sizeof a),
                           orr_tensor_text(t, b, sizeof b));
    orr_tensor_ref(g);
  }
  if (!t->node) orr_capture_leaf(t, true);
  if (t->grad) orr_tensor_free(t->grad);
  t->grad = g;
  return 0;
}

static int set_field(lua_State *L, orr_tensor *t, const char *name) {
  if (strcmp(name, "grad") == 0) return set_grad(L, t);
  if (strcmp(name, "requires_grad") != 0)
    return orr_lua_error(L, "a tensor has no field '%s' to set; grad and requires_grad can be",
                         name);
  bool on = lua_toboolean(L, 3);
  if (on && !orr_dtype_is_float(t->meta.dtype))
    return orr_lua_error(L, "only floating-point tensors can require grad, not %s",
                         orr_dtype_name(t->meta.dtype));
  if (!on && t->node)
    return orr_lua_error(L,
                         "requires_grad: the tensor was computed from others; use x:detach()");
  orr_tensor_require_grad(t, on);
  return 0;
}

/* ---- index to view ---- */

static int64_t index_at(lua_State *L, int at, int64_t n, int d) {
  double v = lua_tonumber(L, at);
  if (lua_type(L, at) != LUA_TNUMBER || v != floor(v))
    orr_lua_error(L, "index of dimension %d must be a whole number, a range {a, b} or {}",
                  d + 1);
  int64_t i = (int64_t)v;
  if (i < 0) i += n + 1;
  if (i < 1 || i > n)
    orr_lua_error(L, "index %lld of dimension %d is out of range: it has %lld (from 1)",
                  (long long)v, d + 1, (long long)n);
  return i;
}

/* Replaces *t (owned) by op(*t); frees it on failure and raises. */
static void step(lua_State *L, orr_tensor **t, const orr_op *op, const orr_args *args) {
  orr_tensor *next;
  orr_status status = orr_call1(op, *t, args, &next);
  orr_tensor_free(*t);
  orr_lua_try(L, status);
  *t = next;
}

static void narrow(lua_State *L, orr_tensor **t, int d, int64_t first, int64_t n) {
  orr_args range = {.i = {d, first, n}};
  step(L, t, &orr_op_narrow, &range);
}

static void select_one(lua_State *L, orr_tensor **t, int d, int64_t i) {
  orr_args dim = {.i = {d}};
  narrow(L, t, d, i, 1);
  step(L, t, &orr_op_squeeze, &dim);
}

/* Checks a whole table index before any view is made; [d][0..1] = first, last; last 0:
 * select. */
static int read_ranges(lua_State *L, const orr_tensor *t, int64_t (*range)[2]) {
  int n = (int)lua_rawlen(L, 2);
  if (n > t->meta.ndim)
    orr_lua_error(L, "%d indices for a tensor with %d dimensions", n, t->meta.ndim);
  for (int d = 0; d < n; d++) {
    int64_t size = t->meta.shape[d];
    lua_rawgeti(L, 2, d + 1);
    if (lua_istable(L, -1)) {
      int given = (int)lua_rawlen(L, -1);
      range[d][0] = 1;
      range[d][1] = size;
      lua_rawgeti(L, -1, 1);
      if (given >= 1) range[d][0] = range[d][1] = index_at(L, -1, size, d);
      lua_rawgeti(L, -2, 2);
      if (given >= 2) range[d][1] = index_at(L, -1, size, d);
      lua_pop(L, 2);
      if (given && range[d][1] < range[d][0])
        orr_lua_error(L, "range {%lld, %lld} of dimension %d is empty", (long long)range[d][0],
                      (long long)range[d][1], d + 1);
    } else {
      range[d][0] = index_at(L, -1, size, d);
      range[d][1] = 0;
    }
    lua_pop(L, 1);
  }
  return n;
}

/* The view that index 2 of the stack asks for; owned. */
static orr_tensor *view_of(lua_State *L, orr_tensor *t) {
  if (lua_type(L, 2) == LUA_TNUMBER) {
    if (t->meta.ndim == 0) orr_lua_error(L, "a tensor without dimensions has no index");
    int64_t i = index_at(L, 2, t->meta.shape[0], 0);
    orr_tensor *v = orr_tensor_ref(t);
    select_one(L, &v, 0, i);
    return v;
  }
  orr_tensor *idx = orr_lua_test(L, 2);
  if (idx) {
    orr_tensor *in[2] = {t, idx}, *y;
    orr_args dim = {.i = {0}};
    if (idx->meta.dtype == ORR_BOOL)
      orr_lua_error(L,
                    "a mask cannot index: the result's size would depend on values; use "
                    "orrery.where, x:masked_fill, or x * mask");
    orr_lua_try(L, orr_dispatch(orr_op_find("index_select"), in, 2, &dim, false, &y));
    return y;
  }
  if (!lua_istable(L, 2)) {
    orr_lua_error(L, "an index must be a number, a table or a tensor, not a %s",
                  luaL_typename(L, 2));
    return NULL;
  }
  int64_t range[ORR_MAX_DIM][2];
  int n = read_ranges(L, t, range);
  orr_tensor *v = orr_tensor_ref(t);
  for (int d = n - 1; d >= 0; d--) {
    if (range[d][1] == 0) select_one(L, &v, d, range[d][0]);
    else if (range[d][0] != 1 || range[d][1] != t->meta.shape[d])
      narrow(L, &v, d, range[d][0], range[d][1] - range[d][0] + 1);
  }
  return v;
}

static int get(lua_State *L) {
  if (lua_type(L, 2) == LUA_TSTRING) {
    lua_pushvalue(L, 2);
    lua_rawget(L, lua_upvalueindex(1));
    if (!lua_isnil(L, -1)) return 1;
    return get_field(L, orr_lua_check(L, 1), lua_tostring(L, 2));
  }
  orr_lua_push(L, view_of(L, orr_lua_check(L, 1)));
  return 1;
}

static int set(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1), *out;
  if (lua_type(L, 2) == LUA_TSTRING) return set_field(L, t, lua_tostring(L, 2));
  orr_tensor *value = orr_lua_test(L, 3);
  if (!value && lua_type(L, 3) != LUA_TNUMBER && lua_type(L, 3) != LUA_TBOOLEAN)
    return orr_lua_error(L, "x[...] = value needs a number or a tensor, not a %s",
                         luaL_typename(L, 3));
  if (orr_lua_test(L, 2))
    return orr_lua_error(L,
                         "a tensor of indices cannot be assigned through; "
                         "use x:scatter_add or x:index_add");
  orr_tensor *view = view_of(L, t), *in[2] = {view, value};
  orr_args args = {.f = {lua_isboolean(L, 3) ? lua_toboolean(L, 3) : lua_tonumber(L, 3)}};
  orr_status status = value ? orr_dispatch(&orr_op_copy_, in, 2, NULL, true, &out)
                            : orr_dispatch(orr_op_find("fill_"), in, 1, &args, true, &out);
  if (!status) orr_tensor_free(out);
  orr_tensor_free(view);
  orr_lua_try(L, status);
  return 0;
}

int orr_lua_open_index(lua_State *L) {
  luaL_getmetatable(L, ORR_LUA_TENSOR);
  lua_getfield(L, -1, "__methods");
  lua_pushcclosure(L, get, 1);
  lua_setfield(L, -2, "__index");
  lua_pushcfunction(L, set);
  lua_setfield(L, -2, "__newindex");
  lua_pop(L, 1);
  return 0;
}
