/* lua_compat.h: the C API of Lua 5.4 where LuaJIT, 5.1, 5.2 or 5.3 lack a piece of it.
 *
 * Invariant: a file that includes this one writes 5.4's names and runs on them all. On 5.1 and
 * LuaJIT our own functions stand in always, so that one build serves both.
 * To add a function: its body under the version that lacks it, with the manual's meaning.
 */
#ifndef ORR_LUA_COMPAT_H
#define ORR_LUA_COMPAT_H

#include <lauxlib.h>
#include <lua.h>
#include <math.h>

#ifndef LUA_OK
#define LUA_OK 0
#endif

#if LUA_VERSION_NUM < 502

static inline int orr_lua_absindex(lua_State *L, int index) {
  return index > 0 || index <= LUA_REGISTRYINDEX ? index : lua_gettop(L) + index + 1;
}

static inline void orr_lua_setfuncs(lua_State *L, const luaL_Reg *list, int n_upvalues) {
  luaL_checkstack(L, n_upvalues + 1, "too many upvalues");
  for (; list->name; list++) {
    for (int i = 0; i < n_upvalues; i++) lua_pushvalue(L, -n_upvalues);
    lua_pushcclosure(L, list->func, n_upvalues);
    lua_setfield(L, -(n_upvalues + 2), list->name);
  }
  lua_pop(L, n_upvalues);
}

static inline void *orr_lua_testudata(lua_State *L, int index, const char *name) {
  void *data = lua_touserdata(L, index);
  if (!data || !lua_getmetatable(L, index)) return NULL;
  luaL_getmetatable(L, name);
  int same = lua_rawequal(L, -1, -2);
  lua_pop(L, 2);
  return same ? data : NULL;
}

static inline void orr_lua_setmetatable(lua_State *L, const char *name) {
  luaL_getmetatable(L, name);
  lua_setmetatable(L, -2);
}

#undef lua_absindex
#undef lua_rawlen
#undef luaL_setfuncs
#undef luaL_newlib
#undef luaL_testudata
#undef luaL_setmetatable
#define lua_absindex orr_lua_absindex
#define lua_rawlen lua_objlen
#define luaL_setfuncs orr_lua_setfuncs
#define luaL_newlib(L, list)                                             \
  (lua_createtable((L), 0, (int)(sizeof(list) / sizeof((list)[0]) - 1)), \
   luaL_setfuncs((L), (list), 0))
#define luaL_testudata orr_lua_testudata
#define luaL_setmetatable orr_lua_setmetatable

#endif

#if LUA_VERSION_NUM < 503

/* A number without a fraction; these versions have no integer type. */
static inline int orr_lua_isinteger(lua_State *L, int index) {
  if (lua_type(L, index) != LUA_TNUMBER) return 0;
  lua_Number n = lua_tonumber(L, index);
  return n >= -9007199254740992.0 && n <= 9007199254740992.0 && floor(n) == n;
}

#undef lua_isinteger
#define lua_isinteger orr_lua_isinteger

#endif

#endif
