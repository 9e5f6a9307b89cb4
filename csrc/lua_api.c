/* lua_api.c: the part of orrery.h that stands beside Lua: tensors in and out of a state.
 *
 * Invariant: a tensor that crosses is the same tensor on both sides, never a copy.
 * To add a function: its prototype at the end of orrery.h.
 */
#include "lua_core.h"

void orrery_lua_push(lua_State *L, orr_tensor *take_t) { orr_lua_push(L, take_t); }

orr_tensor *orrery_lua_tensor(lua_State *L, int index) { return orr_lua_test(L, index); }
