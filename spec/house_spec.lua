-- house_spec.lua: the rules of the house: layers, lengths, opening comments, the tour.
--
-- Invariant: every source file of the tree is looked at; a rule that meets no file fails.
-- To add a rule: an `it` that collects every offence and asserts that there is none.
local root = os.getenv "ORRERY_ROOT" or "."
local build = os.getenv "ORRERY_BUILD" or root .. "/build"
local interpreter = (os.getenv "ORRERY_LUA" or "luajit"):match "[^/]*$"

local function lines_of(command)
  local list, pipe = {}, assert(io.popen(command))
  for line in pipe:lines() do list[#list + 1] = line end
  pipe:close()
  return list
end

local function read(path)
  local lines = {}
  for line in io.lines(root .. "/" .. path) do lines[#lines + 1] = line end
  return lines
end

---Files below the folders whose names end in one of the suffixes.
local function files_in(folders, ...)
  local names = {}
  for _, suffix in ipairs { ... } do names[#names + 1] = "-name '*" .. suffix .. "'" end
  local list = lines_of(("cd '%s' && find %s -type f \\( %s \\) 2>/dev/null | LC_ALL=C sort"):format(root,
    folders, table.concat(names, " -o ")))
  assert(#list > 0, "no file in " .. folders)
  return list
end

local function none(problems)
  assert.are.equal("", table.concat(problems, "\n"))
end

local function c_files() return files_in("csrc kernels examples", ".c", ".h", ".def") end
local function lua_files() return files_in("lua tools examples spec bench", ".lua") end

---Calls found(name, first, length) for every C function: it starts with the last line in the first
---column that has a "(" before its body opens, and ends with "}" in the first column.
local function each_c_function(lines, found)
  local first, name, inside
  for i, line in ipairs(lines) do
    if inside then
      if line:match "^}" then
        if name and line == "}" then found(name, first, i - first + 1) end
        first, name, inside = nil, nil, false
      end
    else
      local word = line:match "^[%a_].-([%w_]+)%("
      if word and not first then first, name = i, word end
      if line:match "{%s*$" and not line:match "^#" then
        inside = true
      elseif line:match ";%s*$" or line:match "}%s*$" or line:match "^%s*$" then
        first, name = nil, nil
      end
    end
  end
end

---Calls found(name, first, length) for every named Lua function.
local function each_lua_function(lines, found)
  local open = {}
  for i, line in ipairs(lines) do
    local indent, name = line:match "^(%s*)local%s+function%s+([%w_]+)"
    if not name then indent, name = line:match "^(%s*)function%s+([%w_.:]+)" end
    if not name then indent, name = line:match "^(%s*)[%w_.]*%.?([%w_]+)%s*=%s*function" end
    if name and not line:match "%send[%s,)]*$" then
      open[#open + 1] = { indent = indent, name = name, first = i }
    end
    local top = open[#open]
    if top and i > top.first and line:match("^" .. top.indent .. "end[,)%s]*$") then
      found(top.name, top.first, i - top.first + 1)
      open[#open] = nil
    end
  end
end

describe("the house", function()
  it("calls only upwards in the list of layers", function()
    local problems, calls = require("tools.layers").check(build, interpreter)
    assert.is_true(calls > 50)
    none(problems)
  end)

  it("keeps the interpreter's headers out of everything but csrc/lua_*", function()
    local problems = {}
    for _, file in ipairs(files_in("csrc kernels", ".c", ".h")) do
      if not file:match "^csrc/lua_" then
        for i, line in ipairs(read(file)) do
          if line:match '#%s*include%s*[<"]l[ua]+[xlib]*%.h' then
            problems[#problems + 1] = file .. ":" .. i .. ": " .. line
          end
        end
      end
    end
    none(problems)
  end)

  it("keeps files under 600 lines", function()
    local problems = {}
    for _, list in ipairs { c_files(), lua_files() } do
      for _, file in ipairs(list) do
        -- Fixtures are values that a script wrote; nobody reads them from top to bottom.
        local n = file:match "^spec/fixtures/" and 0 or #read(file)
        if n >= 600 then problems[#problems + 1] = file .. ": " .. n .. " lines" end
      end
    end
    none(problems)
  end)

  it("keeps examples under 150 lines", function()
    local problems = {}
    for _, file in ipairs(files_in("examples", ".lua", ".c")) do
      local n = #read(file)
      if n >= 150 then problems[#problems + 1] = file .. ": " .. n .. " lines" end
    end
    none(problems)
  end)

  it("keeps C within 96 columns", function()
    local problems = {}
    for _, file in ipairs(c_files()) do
      for i, line in ipairs(read(file)) do
        -- Columns, not bytes: continuation bytes of UTF-8 take none.
        local columns = #line:gsub("[\128-\191]", "")
        if columns > 96 then problems[#problems + 1] = file .. ":" .. i .. ": " .. columns .. " columns" end
      end
    end
    none(problems)
  end)

  it("keeps C functions under 60 lines", function()
    local problems, seen = {}, 0
    for _, file in ipairs(files_in("csrc kernels examples", ".c", ".h")) do
      each_c_function(read(file), function(name, first, length)
        seen = seen + 1
        if length >= 60 then
          problems[#problems + 1] = ("%s:%d: %s has %d lines"):format(file, first, name, length)
        end
      end)
    end
    assert.is_true(seen > 100)
    none(problems)
  end)

  it("keeps Lua functions of the library under 60 lines", function()
    local problems, seen = {}, 0
    for _, file in ipairs(files_in("lua tools examples", ".lua")) do
      each_lua_function(read(file), function(name, first, length)
        seen = seen + 1
        if length >= 60 then
          problems[#problems + 1] = ("%s:%d: %s has %d lines"):format(file, first, name, length)
        end
      end)
    end
    assert.is_true(seen > 50)
    none(problems)
  end)

  it("opens every file with a comment on its purpose", function()
    local problems = {}
    local function check(list, mark)
      for _, file in ipairs(list) do
        local lines, i = read(file), 1
        if (lines[1] or ""):match "^#!" then i = 2 end
        local first = lines[i] or ""
        if first:match "^_=%[%[" then first = lines[i + 1] end
        local words = select(2, (first .. " " .. (lines[i + 1] or "")):gsub("%a+", ""))
        if first:sub(1, #mark) ~= mark or words < 4 then
          problems[#problems + 1] = file .. ": " .. first
        end
      end
    end
    check(c_files(), "/*")
    check(lua_files(), "--")
    check(files_in("tools", ".sh", ".in", ".txt", ".supp"), "#")
    none(problems)
  end)

  it("leaves no unfinished work and no personal words", function()
    local problems = {}
    local words = { "TO" .. "DO", "FIX" .. "ME", "X" .. "XX", "/work" .. "/", "/home" .. "/", "/ro" .. "ot/" }
    local list = lines_of("cd '" .. root .. "' && { git ls-files 2>/dev/null || "
      .. "find csrc kernels lua spec tools docs -type f; }")
    for _, file in ipairs(list) do
      local handle = io.open(root .. "/" .. file)
      local text = handle and handle:read "*a" or ""
      if handle then handle:close() end
      for _, word in ipairs(words) do
        if text:find(word, 1, true) then problems[#problems + 1] = file .. ": " .. word end
      end
    end
    none(problems)
  end)

  it("names every source file in docs/design.md", function()
    local text = table.concat(read "docs/design.md", "\n")
    local problems = {}
    for _, file in ipairs(files_in("csrc kernels lua", ".c", ".h", ".def", ".lua")) do
      local name = file:match "[^/]*$"
      -- One sentence may name a family's header beside its body: `csrc/tape.[ch]`.
      local stem, suffix = name:match "^(.*)%.([ch])$"
      local pair = stem and text:find(stem .. ".[ch]", 1, true)
      local plain = text:find(file, 1, true) or (name ~= "init.lua" and text:find(name, 1, true))
      if not plain and not (suffix and pair) then problems[#problems + 1] = file end
    end
    none(problems)
  end)
end)
