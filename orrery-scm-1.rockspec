-- The rock: `luarocks make` builds with the Makefile and installs the module and the command.
rockspec_format = "3.0"
package = "orrery"
version = "scm-1"
source = { url = "git+file://." }
description = {
  summary = "Multi-GPU training for Lua",
  detailed = "One Lua script drives many devices and computes what one would have computed.",
  license = "MIT",
}
supported_platforms = { "linux" }
dependencies = { "lua >= 5.1, < 5.5" }
external_dependencies = {}
build = {
  type = "make",
  build_target = "core",
  install_target = "install-lua",
  build_variables = { LUA = "$(LUA)", LUA_INCDIR = "$(LUA_INCDIR)" },
  install_variables = {
    LUA = "$(LUA)",
    LUA_INCDIR = "$(LUA_INCDIR)",
    LUADIR = "$(LUADIR)",
    LIBDIR = "$(LIBDIR)",
    BINDIR = "$(BINDIR)",
    ROCK = "1",
  },
}
deploy = { wrap_bin_scripts = false }
