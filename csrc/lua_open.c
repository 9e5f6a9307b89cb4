/* lua_open.c: what `require "orrery.core"` opens; it opens the engine, libcore.so, beside it.
 *
 * Two files, because the OpenMP runtime reads its environment once, when it is loaded: before
 * the first line of any library that is linked to it. Idle OpenMP threads must sleep, for
 * waiting ones burn the cores that devices need (docs/design.md); but not at once: ops follow
 * each other within microseconds, so a helper first looks for more work for a fraction of a
 * millisecond. A value set by the user stays.
 * Invariant: this file links to neither the engine nor OpenMP; the engine is never unloaded,
 * since its threads may outlive a Lua state.
 * To set another variable for the engine: beside OMP_WAIT_POLICY.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <lauxlib.h>
#include <lua.h>

#define ENTRY "luaopen_orrery_core"

__attribute__((visibility("default"))) int luaopen_orrery_core(lua_State *L);

/* Writes the path of libcore.so into `path`; false when this file's own path is not known. */
static int engine_path(char *path, size_t size) {
  Dl_info self;
  if (!dladdr((void *)luaopen_orrery_core, &self) || !self.dli_fname) return 0;
  const char *slash = strrchr(self.dli_fname, '/');
  int length = slash ? (int)(slash - self.dli_fname) + 1 : 0;
  int n = snprintf(path, size, "%.*slibcore.so", length, self.dli_fname);
  return n > 0 && (size_t)n < size;
}

int luaopen_orrery_core(lua_State *L) {
  char path[4096];
  setenv("OMP_WAIT_POLICY", "passive", 0);
  setenv("GOMP_SPINCOUNT", "10000", 0);
  if (!engine_path(path, sizeof path))
    return luaL_error(L, "orrery.core: its directory is not known");
  void *engine = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!engine) return luaL_error(L, "orrery.core: %s", dlerror());
  lua_CFunction open = NULL;
  *(void **)&open = dlsym(engine, ENTRY);
  if (!open) return luaL_error(L, "orrery.core: %s", dlerror());
  return open(L);
}
