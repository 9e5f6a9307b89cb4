/* lua_core.c: the module orrery.core: opens the engine, tensors as userdata, errors.
 *
 * Invariant: as lua_core.h says. The engine is opened by the first state and closed with it.
 * To add a part: its open function in `parts`.
 */
#include "lua_core.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "interrupt.h"
#include "lua_line.h"
#include "lua_plan.h"

typedef struct box {
  const void *tag; /* says that a userdata is a tensor of ours */
  orr_tensor *t;
} box;

static const char tag = 0;
static lua_State *main_state = NULL;
static int metatable = LUA_NOREF;
/* Chunk names that begin so are the library's: "@" and its folder. */
static char library[1024] = "";

lua_State *orr_lua_main(void) { return main_state; }

/* ---- where in the script ---- */

static bool outside(const lua_Debug *ar) {
  if (ar->currentline <= 0) return false;
  size_t n = strlen(library);
  return n == 0 || strncmp(ar->source, library, n) != 0;
}

static bool find_frame(lua_State *L, lua_Debug *ar) {
  for (int level = 0; lua_getstack(L, level, ar); level++) {
    lua_getinfo(L, "Sl", ar);
    if (outside(ar)) return true;
  }
  return false;
}

/* The state of the call in hand: the coroutine that runs, on which alone the collector and Lua
 * functions may be called. LuaJIT takes a call on another state for a switch to it. */
static lua_State *running = NULL;

/* Who resumed a micro-batch's coroutine: the script's line where the coroutine has none. */
static lua_State *resumer = NULL;

int orr_lua_set_resumer(lua_State *L) {
  resumer = lua_toboolean(L, 1) ? L : NULL;
  return 0;
}

static void where(const char **source, int *line) {
  lua_Debug ar;
  if (!running) return;
  if (!find_frame(running, &ar) && (!resumer || !find_frame(resumer, &ar))) return;
  *source = ar.source[0] == '@' || ar.source[0] == '=' ? ar.source + 1 : "script";
  *line = ar.currentline;
}

/* What the function given to watch_layer says of the layer in hand, for messages of memory. */
static int layer = LUA_NOREF;

static const char *layer_in_hand(void) {
  static char text[128];
  text[0] = 0;
  if (!main_state || !running || layer == LUA_NOREF || !lua_checkstack(running, 8)) return text;
  lua_rawgeti(running, LUA_REGISTRYINDEX, layer);
  if (!lua_pcall(running, 0, 1, 0) && lua_type(running, -1) == LUA_TSTRING)
    snprintf(text, sizeof text, "%s", lua_tostring(running, -1));
  lua_pop(running, 1);
  return text;
}

/* watch_layer(f): f() names the layer in hand, or gives nil. */
static int watch_layer(lua_State *L) {
  luaL_checktype(L, 1, LUA_TFUNCTION);
  lua_settop(L, 1);
  luaL_unref(L, LUA_REGISTRYINDEX, layer);
  layer = luaL_ref(L, LUA_REGISTRYINDEX);
  return 0;
}

int orr_lua_raise(lua_State *L, orr_status status) {
  lua_Debug ar;
  char place[160] = "";
  if (status == ORR_EINTERRUPT) orr_interrupt_clear();
  if (find_frame(L, &ar))
    snprintf(place, sizeof place, "%s:%d: ", ar.short_src, ar.currentline);
  lua_pushfstring(L, "%s%s", place, orr_last_error());
  return lua_error(L);
}

int orr_lua_error(lua_State *L, const char *format, ...) {
  char message[1024];
  va_list ap;
  va_start(ap, format);
  vsnprintf(message, sizeof message, format, ap);
  va_end(ap);
  return orr_lua_raise(L, orr_fail(ORR_EARG, "%s", message));
}

void orr_lua_enter(lua_State *L) { running = L; }

lua_State *orr_lua_running(void) { return running; }

/* ---- tensors ---- */

orr_tensor *orr_lua_test(lua_State *L, int index) {
  if (lua_type(L, index) != LUA_TUSERDATA || lua_rawlen(L, index) != sizeof(box)) return NULL;
  const box *b = lua_touserdata(L, index);
  if (b->tag != &tag) return NULL;
  running = L;
  if (!b->t) orr_lua_error(L, "the tensor was freed by x:free()");
  return b->t;
}

orr_tensor *orr_lua_check(lua_State *L, int index) {
  orr_tensor *t = orr_lua_test(L, index);
  if (!t)
    orr_lua_error(L, "argument %d must be a tensor and is a %s", index,
                  luaL_typename(L, index));
  return t;
}

void orr_lua_push(lua_State *L, orr_tensor *take_t) {
  box *b = lua_newuserdata(L, sizeof *b);
  b->tag = &tag;
  b->t = take_t;
  lua_rawgeti(L, LUA_REGISTRYINDEX, metatable);
  lua_setmetatable(L, -2);
}

static int collect(lua_State *L) {
  box *b = lua_touserdata(L, 1);
  if (b->t) orr_tensor_free(b->t);
  b->t = NULL;
  return 0;
}

static int free_now(lua_State *L) {
  orr_lua_check(L, 1);
  return collect(L);
}

orr_tensor **orr_lua_list(lua_State *L, int index, int *n) {
  luaL_checktype(L, index, LUA_TTABLE);
  *n = (int)lua_rawlen(L, index);
  orr_tensor **list = lua_newuserdata(L, (size_t)(*n + 1) * sizeof *list);
  for (int k = 0; k < *n; k++) {
    lua_rawgeti(L, index, k + 1);
    list[k] = orr_lua_test(L, -1);
    if (!list[k]) {
      orr_lua_error(L, "element %d of the list must be a tensor and is a %s", k + 1,
                    luaL_typename(L, -1));
      return NULL;
    }
    lua_pop(L, 1);
  }
  return list;
}

/* ---- the module ---- */

static size_t collect_garbage(bool full) {
  if (!main_state) return 0;
  lua_gc(running, LUA_GCCOLLECT, 0);
  if (full) lua_gc(running, LUA_GCCOLLECT, 0);
  return (size_t)lua_gc(running, LUA_GCCOUNT, 0) << 10;
}

static int set_library(lua_State *L) {
  snprintf(library, sizeof library, "%s", luaL_checkstring(L, 1));
  return 0;
}

static int tensor_metatable(lua_State *L) {
  luaL_getmetatable(L, ORR_LUA_TENSOR);
  return 1;
}

static int is_tensor(lua_State *L) {
  const box *b = lua_touserdata(L, 1);
  lua_pushboolean(
      L, lua_type(L, 1) == LUA_TUSERDATA && lua_rawlen(L, 1) == sizeof *b && b->tag == &tag);
  return 1;
}

static int close_engine(lua_State *L) {
  if (L == main_state || main_state) {
    main_state = NULL;
    orr_collect_hook = NULL;
    orr_where_hook = NULL;
    orr_alloc_context_hook = NULL;
    layer = LUA_NOREF;
    orr_devices_close();
  }
  return 0;
}

static void make_metatable(lua_State *L) {
  luaL_newmetatable(L, ORR_LUA_TENSOR);
  lua_pushcfunction(L, collect);
  lua_setfield(L, -2, "__gc");
  lua_pushvalue(L, -1);
  metatable = luaL_ref(L, LUA_REGISTRYINDEX);
  lua_newtable(L);
  lua_pushcfunction(L, free_now);
  lua_setfield(L, -2, "free");
  lua_setfield(L, -2, "__methods");
  lua_pop(L, 1);
}

/* A userdata in the registry whose collection closes the engine with the state. */
static void close_with(lua_State *L) {
  lua_newuserdata(L, 1);
  lua_newtable(L);
  lua_pushcfunction(L, close_engine);
  lua_setfield(L, -2, "__gc");
  lua_setmetatable(L, -2);
  luaL_ref(L, LUA_REGISTRYINDEX);
}

static lua_State *main_thread(lua_State *L) {
#ifdef LUA_RIDX_MAINTHREAD
  lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
  lua_State *m = lua_tothread(L, -1);
  lua_pop(L, 1);
  return m;
#else
  return L;
#endif
}

__attribute__((visibility("default"))) int luaopen_orrery_core(lua_State *L);

__attribute__((visibility("default"))) int luaopen_orrery_core(lua_State *L) {
  static int (*const parts[])(lua_State *) = {
      orr_lua_open_op,     orr_lua_open_tensor, orr_lua_open_index,  orr_lua_open_create,
      orr_lua_open_device, orr_lua_open_tape,   orr_lua_open_place,  orr_lua_open_optim,
      orr_lua_open_random, orr_lua_open_step,   orr_lua_open_record, orr_lua_open_capture,
  };
  static const luaL_Reg functions[] = {{"is_tensor", is_tensor},
                                       {"set_library", set_library},
                                       {"tensor_metatable", tensor_metatable},
                                       {"watch_layer", watch_layer},
                                       {NULL, NULL}};
  main_state = main_thread(L);
  running = main_state;
  orr_collect_hook = collect_garbage;
  orr_where_hook = where;
  orr_alloc_context_hook = layer_in_hand;
  orr_lua_try(L, orr_devices_open());
  close_with(L);
  make_metatable(L);
  luaL_newlib(L, functions);
  for (size_t k = 0; k < sizeof parts / sizeof *parts; k++) parts[k](L);
  orr_lua_open_plan(L);
  lua_setfield(L, -2, "plan");
  orr_lua_open_line(L);
  lua_setfield(L, -2, "line");
  return 1;
}
