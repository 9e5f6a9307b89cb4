-- Lua checks that `make lint` runs. The library runs on LuaJIT and on Lua 5.1 to 5.4.
std = "min"
max_line_length = 110
exclude_files = { "build*", "bench/venv", "lua_modules", ".luarocks" }
read_globals = { "table.unpack", "package.searchpath", "unpack", "loadstring", "setfenv", "jit", "utf8" }
files["spec"] = { std = "min+busted", read_globals = { "jit", "unpack", "loadstring" } }
files["orrery-scm-1.rockspec"] = { std = "rockspec" }
files[".luacheckrc"] = { std = "luacheckrc" }
files[".busted"] = { std = "min" }
