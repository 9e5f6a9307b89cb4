/* lua_plan.h: plans as Lua values, for the other parts of the binding.
 *
 * Invariant: a plan is borrowed from its userdata; keep that on the stack or referenced.
 * To add to it: what another lua_*.c needs, no more.
 */
#ifndef ORR_LUA_PLAN_H
#define ORR_LUA_PLAN_H

#include <lua.h>

#include "plan.h"

/* Pushes the table of orrery.core.plan: parse, make; plans' metatable is made. */
int orr_lua_open_plan(lua_State *L);

/* The plan at the index, or NULL when the value is none. */
const orr_plan *orr_lua_toplan(lua_State *L, int index);

/* Parses and pushes a plan; raises without a position. `prefix` as in orr_plan_parse. */
void orr_lua_pushplan(lua_State *L, const char *prefix, const char *text, size_t length);

#endif
