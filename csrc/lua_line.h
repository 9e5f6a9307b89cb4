/* lua_line.h: the terminal's side of the module: line editing, Ctrl-C, terminal detection, a
 * clock.
 * To add a function: its row in lua_line.c's table.
 */
#ifndef ORR_LUA_LINE_H
#define ORR_LUA_LINE_H

#include <lua.h>

/* Pushes the table `core.line`; see lua_line.c for its fields. Returns 1. */
int orr_lua_open_line(lua_State *L);

#endif
