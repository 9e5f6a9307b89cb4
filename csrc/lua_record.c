/* lua_record.c: record_ops(): the calls of a run as Lua tables.
 *
 * Invariant: a tensor has one number in a record; those given to record_stop come first.
 * To add a field of a call or a value: push_call, push_value.
 */
#include "lua_core.h"
#include "op_record.h"

static int start(lua_State *L) {
  (void)L;
  orr_record_start();
  return 0;
}

/* Stack: 3 the numbers by pointer, 4 the values. The number of t, new or known. */
static int number_of(lua_State *L, const orr_tensor *t) {
  lua_pushlightuserdata(L, (void *)(uintptr_t)t);
  lua_rawget(L, 3);
  int id = (int)lua_tointeger(L, -1);
  lua_pop(L, 1);
  if (id) return id;
  id = (int)lua_rawlen(L, 4) + 1;
  lua_pushlightuserdata(L, (void *)(uintptr_t)t);
  lua_pushinteger(L, id);
  lua_rawset(L, 3);
  lua_createtable(L, t->meta.ndim, 2);
  for (int d = 0; d < t->meta.ndim; d++) {
    lua_pushnumber(L, (lua_Number)t->meta.shape[d]);
    lua_rawseti(L, -2, d + 1);
  }
  lua_pushnumber(L, (lua_Number)(orr_tensor_numel(t) * (int64_t)orr_dtype_size(t->meta.dtype)));
  lua_setfield(L, -2, "bytes");
  lua_pushboolean(L, t->requires_grad);
  lua_setfield(L, -2, "grad");
  lua_rawseti(L, 4, id);
  return id;
}

/* Fields `name` (numbers of tensors, false where absent) and `labels` of the call at the
 * top. */
static void push_side(lua_State *L, const orr_record *r, int first, int n, const char *name,
                      const char *labels) {
  lua_createtable(L, n, 0);
  lua_createtable(L, n, 0);
  for (int k = 0; k < n; k++) {
    const orr_tensor *t = r->tensor[first + k];
    if (t) lua_pushinteger(L, number_of(L, t));
    else lua_pushboolean(L, 0);
    lua_rawseti(L, -3, k + 1);
    lua_createtable(L, ORR_MAX_DIM, 0);
    for (int d = 0; t && d < t->meta.ndim; d++) {
      lua_pushinteger(L, r->label[first + k][d]);
      lua_rawseti(L, -2, d + 1);
    }
    lua_rawseti(L, -2, k + 1);
  }
  lua_setfield(L, -3, labels);
  lua_setfield(L, -2, name);
}

/* record_count(): calls so far. */
static int calls(lua_State *L) {
  lua_pushinteger(L, orr_record_count());
  return 1;
}

/* record_stop({tensors}): calls {op=, ins=, outs=, in_labels=, out_labels=}, values {sizes,
 * bytes=, grad=} by number, and the numbers of the tensors given. */
static int stop(lua_State *L) {
  int n, n_known;
  orr_tensor **known = orr_lua_list(L, 1, &n_known);
  const orr_record *r = orr_record_stop(&n);
  lua_settop(L, 2); /* the tensors and their list stay alive */
  lua_newtable(L);
  lua_newtable(L);
  lua_createtable(L, n, 0);
  lua_createtable(L, n_known, 0);
  for (int k = 0; k < n_known; k++) {
    lua_pushinteger(L, number_of(L, known[k]));
    lua_rawseti(L, 6, k + 1);
  }
  lua_insert(L, 5);
  for (int k = 0; k < n; k++) {
    lua_createtable(L, 0, 5);
    lua_pushstring(L, r[k].op->name);
    lua_setfield(L, -2, "op");
    push_side(L, &r[k], 0, r[k].n_in, "ins", "in_labels");
    push_side(L, &r[k], r[k].n_in, r[k].n_out, "outs", "out_labels");
    lua_rawseti(L, 6, k + 1);
  }
  orr_record_clear();
  lua_pushvalue(L, 4);
  lua_pushvalue(L, 5);
  return 3;
}

int orr_lua_open_record(lua_State *L) {
  static const luaL_Reg functions[] = {
      {"record_ops", start}, {"record_count", calls}, {"record_stop", stop}, {NULL, NULL}};
  luaL_setfuncs(L, functions, 0);
  return 0;
}
