/* lua_line.c: `core.line`, what REPL, command and progress bar need of the terminal.
 *
 *   edit(line)            opens readline and adds the next five to `line`; false without one
 *   read(prompt)          a line; nil at the end of input; false when Ctrl-C abandoned it
 *   add_history(line)     load_history(path)     save_history(path, most)
 *   set_completer(f)      f(word, line) -> list of whole words; nil takes it off
 *   isatty(fd)            now() -> seconds of a clock that never goes back
 *   interrupt_install()   Ctrl-C stops the running chunk with the error "interrupted"
 *   interrupt_pending()   interrupt_clear()
 *
 * Readline opens at run time: nothing links to it, and scripts that never edit never load it.
 * Invariants: readline runs through its callback interface, so no longjmp crosses it and a
 * signal only ever ends a poll(); the handler touches the interrupt flag and lua_sethook, which
 * the Lua manual allows in a handler, and nothing else.
 * To use another function of readline: a row in `symbols`. To add a field: a row in `fields`.
 */
#define _POSIX_C_SOURCE 200809L

#include "lua_line.h"

#include "interrupt.h"

#include <dlfcn.h>
#include <errno.h>
#include <lauxlib.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef char *entry_function(const char *, int);
typedef char **attempt_function(const char *, int, int);
typedef void line_function(char *);

/* The functions and variables of readline that are used, by their names there. */
static struct {
  void (*rl_callback_handler_install)(const char *, line_function *);
  void (*rl_callback_read_char)(void);
  void (*rl_callback_handler_remove)(void);
  void (*rl_free_line_state)(void);
  char **(*rl_completion_matches)(const char *, entry_function *);
  void (*add_history)(const char *);
  int (*read_history)(const char *);
  int (*write_history)(const char *);
  void (*stifle_history)(int);
  attempt_function **rl_attempted_completion_function;
  int *rl_attempted_completion_over;
  int *rl_completion_append_character;
  int *rl_catch_signals;
  const char **rl_completer_word_break_characters;
  char **rl_line_buffer;
} rl;

#define SYMBOL(name) \
  { #name, offsetof(__typeof__(rl), name) }
static const struct symbol {
  const char *name;
  size_t offset;
} symbols[] = {
    SYMBOL(rl_callback_handler_install),
    SYMBOL(rl_callback_read_char),
    SYMBOL(rl_callback_handler_remove),
    SYMBOL(rl_free_line_state),
    SYMBOL(rl_completion_matches),
    SYMBOL(add_history),
    SYMBOL(read_history),
    SYMBOL(write_history),
    SYMBOL(stifle_history),
    SYMBOL(rl_attempted_completion_function),
    SYMBOL(rl_attempted_completion_over),
    SYMBOL(rl_completion_append_character),
    SYMBOL(rl_catch_signals),
    SYMBOL(rl_completer_word_break_characters),
    SYMBOL(rl_line_buffer),
};
#undef SYMBOL

static const char *const libraries[] = {
    "libreadline.so.8",
    "libreadline.so.7",
    "libreadline.so",
    "libreadline.8.dylib",
};

/* One state reads lines and takes interrupts: the one that read or installed last. */
static lua_State *line_state, *interrupt_state;
static int completer = LUA_NOREF;
static char *line_read;
static bool line_done;

static bool open_library(const char *file) {
  void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (!library) return false;
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void *address = dlsym(library, symbols[i].name);
    if (!address) {
      dlclose(library);
      return false;
    }
    memcpy((char *)&rl + symbols[i].offset, &address, sizeof address);
  }
  return true;
}

static bool open_readline(void) {
  static bool opened;
  for (size_t i = 0; !opened && i < sizeof libraries / sizeof *libraries; i++)
    opened = open_library(libraries[i]);
  return opened;
}

/* --- completion ------------------------------------------------------------------------ */

/* The n-th word of the list on top of line_state's stack, as readline wants it: malloc'd. */
static char *nth_match(const char *word, int state) {
  static int next;
  (void)word;
  if (state == 0) next = 1;
  lua_State *L = line_state;
  lua_rawgeti(L, -1, next++);
  const char *match = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : NULL;
  char *copy = match ? strdup(match) : NULL;
  lua_pop(L, 1);
  return copy;
}

static char **attempt(const char *word, int start, int end) {
  (void)start, (void)end;
  lua_State *L = line_state;
  *rl.rl_attempted_completion_over = 1; /* never file names */
  *rl.rl_completion_append_character = '\0';
  if (completer == LUA_NOREF || !lua_checkstack(L, 6)) return NULL;
  int top = lua_gettop(L);
  char **matches = NULL;
  lua_rawgeti(L, LUA_REGISTRYINDEX, completer);
  lua_pushstring(L, word);
  lua_pushstring(L, *rl.rl_line_buffer);
  if (lua_pcall(L, 2, 1, 0) == 0 && lua_istable(L, -1))
    matches = rl.rl_completion_matches(word, nth_match);
  lua_settop(L, top);
  return matches;
}

static int line_set_completer(lua_State *L) {
  if (!lua_isnoneornil(L, 1)) luaL_checktype(L, 1, LUA_TFUNCTION);
  luaL_unref(L, LUA_REGISTRYINDEX, completer);
  completer = LUA_NOREF;
  if (lua_isnoneornil(L, 1)) return 0;
  lua_settop(L, 1);
  completer = luaL_ref(L, LUA_REGISTRYINDEX);
  return 0;
}

/* --- lines ----------------------------------------------------------------------------- */

static void take_line(char *take_text) {
  rl.rl_callback_handler_remove();
  line_read = take_text;
  line_done = true;
}

/* Runs the editor until a line, the end of input or Ctrl-C; true for Ctrl-C. */
static bool edit_line(void) {
  struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
  while (!line_done) {
    if (orr_interrupt_pending()) {
      rl.rl_free_line_state();
      rl.rl_callback_handler_remove();
      return true;
    }
    int ready = poll(&input, 1, -1);
    if (ready > 0) rl.rl_callback_read_char();
    if (ready < 0 && errno != EINTR) {
      rl.rl_callback_handler_remove();
      return false;
    }
  }
  return false;
}

static int line_read_edited(lua_State *L) {
  const char *prompt = luaL_optstring(L, 1, "");
  line_state = L;
  line_read = NULL;
  line_done = false;
  orr_interrupt_clear();
  rl.rl_callback_handler_install(prompt, take_line);
  if (edit_line()) {
    orr_interrupt_clear();
    fputc('\n', stdout);
    lua_pushboolean(L, 0);
    return 1;
  }
  if (!line_read) return 0;
  char *text = line_read;
  line_read = NULL;
  lua_pushstring(L, text);
  free(text);
  return 1;
}

static int line_add_history(lua_State *L) {
  rl.add_history(luaL_checkstring(L, 1));
  return 0;
}

static int line_load_history(lua_State *L) {
  lua_pushboolean(L, rl.read_history(luaL_checkstring(L, 1)) == 0);
  return 1;
}

static int line_save_history(lua_State *L) {
  const char *path = luaL_checkstring(L, 1);
  rl.stifle_history((int)luaL_optinteger(L, 2, 1000));
  lua_pushboolean(L, rl.write_history(path) == 0);
  return 1;
}

/* --- Ctrl-C ---------------------------------------------------------------------------- */

static lua_Hook saved_hook;
static int saved_mask, saved_count;

static void interrupt_hook(lua_State *L, lua_Debug *at) {
  (void)at;
  lua_sethook(L, saved_hook, saved_mask, saved_count);
  if (!orr_interrupt_pending()) return; /* a dispatch or a wait has raised it already */
  orr_interrupt_clear();
  luaL_error(L, "interrupted");
}

/* A third Ctrl-C that nothing answered ends the process, as it would without a handler. */
static void interrupt_handler(int signal_number) {
  if (orr_interrupt_raise() > 2) {
    signal(signal_number, SIG_DFL);
    raise(signal_number);
    return;
  }
  lua_State *L = interrupt_state;
  if (lua_gethook(L) != interrupt_hook) {
    saved_hook = lua_gethook(L);
    saved_mask = lua_gethookmask(L);
    saved_count = lua_gethookcount(L);
  }
  lua_sethook(L, interrupt_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
}

static int line_interrupt_install(lua_State *L) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = interrupt_handler; /* no SA_RESTART: a plain read of a line ends too */
  sigemptyset(&action.sa_mask);
  interrupt_state = L;
  orr_interrupt_clear();
  if (sigaction(SIGINT, &action, NULL) != 0)
    return luaL_error(L, "cannot take Ctrl-C: %s", strerror(errno));
  return 0;
}

static int line_interrupt_pending(lua_State *L) {
  lua_pushboolean(L, orr_interrupt_pending());
  return 1;
}

static int line_interrupt_clear(lua_State *L) {
  (void)L;
  orr_interrupt_clear();
  return 0;
}

/* --- the table ------------------------------------------------------------------------- */

static int line_isatty(lua_State *L) {
  lua_pushboolean(L, isatty((int)luaL_checkinteger(L, 1)));
  return 1;
}

static int line_now(lua_State *L) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  lua_pushnumber(L, (lua_Number)t.tv_sec + (lua_Number)t.tv_nsec * 1e-9);
  return 1;
}

static const struct field {
  const char *name;
  lua_CFunction function;
  bool edits; /* there only with readline */
} fields[] = {
    {"read", line_read_edited, true},
    {"add_history", line_add_history, true},
    {"load_history", line_load_history, true},
    {"save_history", line_save_history, true},
    {"set_completer", line_set_completer, true},
    {"isatty", line_isatty, false},
    {"now", line_now, false},
    {"interrupt_install", line_interrupt_install, false},
    {"interrupt_pending", line_interrupt_pending, false},
    {"interrupt_clear", line_interrupt_clear, false},
};

/* Puts the editing functions into the table when asked; until then readline stays closed. */
static int line_edit(lua_State *L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  if (!open_readline()) {
    lua_pushboolean(L, 0);
    return 1;
  }
  *rl.rl_catch_signals = 0;
  *rl.rl_completer_word_break_characters = " \t\n\"\\'><=;+-*/%^~#{}()[]|&,";
  *rl.rl_attempted_completion_function = attempt;
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    if (!fields[i].edits) continue;
    lua_pushcfunction(L, fields[i].function);
    lua_setfield(L, 1, fields[i].name);
  }
  lua_pushboolean(L, 1);
  return 1;
}

int orr_lua_open_line(lua_State *L) {
  lua_createtable(L, 0, 12);
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    if (fields[i].edits) continue;
    lua_pushcfunction(L, fields[i].function);
    lua_setfield(L, -2, fields[i].name);
  }
  lua_pushcfunction(L, line_edit);
  lua_setfield(L, -2, "edit");
  return 1;
}
