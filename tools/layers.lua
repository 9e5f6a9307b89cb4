-- layers.lua: checks that no C file calls a function of a layer below its own in layers.txt.
-- As a script it prints what is wrong; as a module it returns `check`. It reads the symbols of the
-- built objects, so a call through a macro counts and a comment does not.
-- Invariant: every .c file has a layer. To add a file or a layer: layers.txt.

local function glob(text)
  return "^" .. text:gsub("[%-%.]", "%%%0"):gsub("%*", ".*") .. "$"
end

---Reads layers.txt into an array of { layer=, rank=, pattern= } in the order of the file.
local function read_table(path)
  local rows, rank, ranks = {}, 0, {}
  for line in io.lines(path) do
    local layer, globs = line:match "^(%w+)%s+(.+)$"
    if layer then
      if not ranks[layer] then
        rank = rank + 1
        ranks[layer] = rank
      end
      for word in globs:gmatch "%S+" do
        rows[#rows + 1] = { layer = layer, rank = ranks[layer], pattern = glob(word) }
      end
    end
  end
  return rows
end

local function layer_of(rows, file)
  local name = file:gsub("%.c$", "")
  for _, row in ipairs(rows) do
    if name:match(row.pattern) then return row end
  end
end

local function lines_of(command)
  local list, pipe = {}, assert(io.popen(command))
  for line in pipe:lines() do list[#list + 1] = line end
  pipe:close()
  return list
end

---The object of a source file in a build folder, core or of one interpreter; nil when not built.
local function object_of(file, build, lua)
  local stem = file:gsub("%.c$", ".o")
  local folders = { build .. "/obj/", build .. "/obj/cuda/", build .. "/" .. lua .. "/obj/" }
  for _, folder in ipairs(folders) do
    local path = folder .. stem
    local found = io.open(path)
    if found then
      found:close()
      return path
    end
  end
end

---Symbols of an object: defined (name -> true) and wanted (array).
local function symbols(object)
  local defined, wanted = {}, {}
  for _, line in ipairs(lines_of("nm -g " .. object)) do
    local kind, name = line:match "(%a) ([%w_%.]+)$"
    if kind == "U" then
      wanted[#wanted + 1] = name
    elseif kind then
      defined[name] = true
    end
  end
  return defined, wanted
end

local function check_includes(file, problems)
  for line in io.lines(file) do
    local header = line:match '^%s*#%s*include%s+"([^"]+)"'
    if header and (header:match "csrc" or header:match "%.%./" or header == "err.h"
        or header:match "^orrery") then
      problems[#problems + 1] = file .. ": a kernel includes " .. header
    end
  end
end

---@param build string the build folder, with the objects in it
---@param lua string the interpreter's name, as "luajit"
---@return string[] problems empty when the layering holds
---@return integer calls calls between files that were looked at
local function check(build, lua)
  local rows = read_table "tools/layers.txt"
  local problems, files, owner, calls = {}, {}, {}, 0
  for _, file in ipairs(lines_of "ls csrc/*.c kernels/*.c 2>/dev/null") do
    local row, object = layer_of(rows, file), object_of(file, build, lua)
    if not row then
      problems[#problems + 1] = file .. ": in no layer; name it in tools/layers.txt"
    elseif not object then
      -- The CUDA plug-in is built where nvcc is found.
      if not file:match "^csrc/cuda" then problems[#problems + 1] = file .. ": not built in " .. build end
    else
      local defined, wanted = symbols(object)
      -- Every build has its own entry of the module's name in lua_open.c, which no file calls.
      if file ~= "csrc/lua_open.c" then
        for name in pairs(defined) do owner[name] = { file = file, row = row } end
      end
      files[#files + 1] = { file = file, row = row, wanted = wanted }
    end
    if file:match "^kernels/" then check_includes(file, problems) end
  end
  for _, caller in ipairs(files) do
    for _, name in ipairs(caller.wanted) do
      local callee = owner[name]
      if callee then
        calls = calls + 1
        if callee.row.rank > caller.row.rank then
          problems[#problems + 1] = ("%s (%s) calls %s of %s (%s)"):format(caller.file, caller.row.layer,
            name, callee.file, callee.row.layer)
        end
      end
    end
  end
  table.sort(problems)
  return problems, calls
end

if arg and (arg[0] or ""):match "layers%.lua$" then
  local lua = (os.getenv "LUA" or "luajit"):match "[^/]*$"
  local problems = check(os.getenv "BUILD" or "build", lua)
  for _, line in ipairs(problems) do print(line) end
  os.exit(#problems == 0 and 0 or 1)
end

return { check = check }
