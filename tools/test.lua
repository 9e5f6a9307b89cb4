-- test.lua: runs spec/*_spec.lua, each in a process of its own, and sums up.
--   INTERPRETER tools/test.lua INTERPRETER [PATTERN...]
-- A pattern is a shell glob on the name without _spec.lua ("op*"). From the environment: BUILD (the
-- build folder), COMMAND (the path of `orrery`), PUC_SKIP (patterns left out), SPEC_TIMEOUT (seconds
-- a file), SPEC_TOTAL (seconds of all files together).
-- Specs find ORRERY_ROOT, ORRERY_BUILD and ORRERY_COMMAND as absolute paths, ORRERY_LUA as the
-- interpreter, and ORRERY_SANITIZER under a sanitizer.
-- Invariant: a file that crashes, hangs, or runs no test counts as one failure; the last line is
-- exactly "N passed, N failed". To hand the specs another variable: `environment`.
local unpack = table.unpack or unpack

local function quote(text)
  return "'" .. text:gsub("'", "'\\''") .. "'"
end

local function lines_of(command)
  local list, pipe = {}, assert(io.popen(command))
  for line in pipe:lines() do list[#list + 1] = line end
  pipe:close()
  return list
end

---Turns a shell glob into a Lua pattern that matches whole names.
local function glob(text)
  local pattern = text:gsub("[%^%$%(%)%%%.%[%]%+%-]", "%%%0"):gsub("%*", ".*"):gsub("%?", ".")
  return "^" .. pattern .. "$"
end

---@param name string
---@param globs string words separated by blanks
local function matches(name, globs)
  for word in globs:gmatch "%S+" do
    if name:match(glob(word)) then return true end
  end
  return false
end

---Status of os.execute as one number on every Lua: 0 is success.
local function execute(command)
  local first, _, code = os.execute(command)
  if first == true then return 0 end
  if type(first) == "number" then
    return first >= 256 and math.floor(first / 256) or first
  end
  return code or 1
end

local interpreter = arg[1] or "luajit"
local wanted = table.concat({ unpack(arg, 2) }, " ")
if wanted == "" then wanted = "*" end
local root = lines_of("pwd")[1]
local build = os.getenv "BUILD" or "build"
if not build:match "^/" then build = root .. "/" .. build end
local name = interpreter:match "[^/]*$"
local busted = lines_of("command -v busted")[1]
if not busted then
  io.stderr:write("test: busted is not installed; run 'make deps'\n")
  os.exit(1)
end

-- What stands in the environment comes after the tree's own.
local environment = {
  LUA_PATH = root .. "/lua/?.lua;" .. root .. "/lua/?/init.lua;" .. root .. "/?.lua;"
    .. (os.getenv "LUA_PATH" or ";"),
  LUA_CPATH = build .. "/" .. name .. "/?.so;" .. (os.getenv "LUA_CPATH" or ";"),
  ORRERY_LUA = interpreter,
  ORRERY_ROOT = root,
  ORRERY_BUILD = build,
  ORRERY_COMMAND = os.getenv "COMMAND" or root .. "/bin/orrery",
  ORRERY_CPU_DEVICES = os.getenv "ORRERY_CPU_DEVICES" or "8",
}

local started = os.time()

local function seconds_left()
  local each, total = tonumber(os.getenv "SPEC_TIMEOUT") or 600, tonumber(os.getenv "SPEC_TOTAL")
  return math.floor(total and math.min(each, math.max(1, total - (os.time() - started))) or each)
end

local function command(file, counts)
  local words = { "env", "-u", "MAKEFLAGS", "-u", "MAKELEVEL", "-u", "MFLAGS",
    "ORRERY_SPEC_COUNTS=" .. quote(counts) }
  for key, value in pairs(environment) do words[#words + 1] = key .. "=" .. quote(value) end
  words[#words + 1] = "timeout -k 10 " .. seconds_left()
  words[#words + 1] = quote(interpreter) .. " " .. quote(busted)
  words[#words + 1] = "--output=tools/report.lua " .. quote(file)
  return table.concat(words, " ")
end

---Runs one file; gives passed, failed, pending, and a word when it ended badly.
local function run(file)
  local counts = os.tmpname()
  os.remove(counts)
  local status = execute(command(file, counts))
  local found = io.open(counts)
  if not found then
    local word = (status == 124 or status == 137) and "ran out of time"
      or ("ended before its end, status " .. status)
    return 0, 1, 0, word
  end
  local passed, failed, pending = found:read("*a"):match "(%d+) (%d+) (%d+)"
  found:close()
  os.remove(counts)
  passed, failed, pending = tonumber(passed), tonumber(failed), tonumber(pending)
  if passed + failed + pending == 0 then return 0, 1, 0, "has no test" end
  if status > 1 and failed == 0 then return passed, 1, pending, "ended with status " .. status end
  return passed, failed, pending
end

local folder = os.getenv "SPEC_FOLDER" or "spec"
local skip = os.getenv "PUC_SKIP" or ""
local passed, failed, ran = 0, 0, 0
for _, file in ipairs(lines_of("ls " .. folder .. "/*_spec.lua 2>/dev/null | LC_ALL=C sort")) do
  local spec = file:match "([^/]*)_spec%.lua$"
  if matches(spec, wanted) and not matches(spec, skip) then
    local began = os.time()
    local p, f, pending, word = run(file)
    passed, failed, ran = passed + p, failed + f, ran + 1
    io.write(("%s %-28s %d passed, %d failed%s, %d s%s\n"):format(f == 0 and "ok  " or "FAIL", spec, p, f,
      pending > 0 and ", " .. pending .. " pending" or "", os.time() - began, word and ": " .. word or ""))
    io.stdout:flush()
  end
end
if ran == 0 then
  io.write("no spec matches ", wanted, "\n")
  failed = 1
end
io.write(("%d passed, %d failed\n"):format(passed, failed))
os.exit(failed == 0 and 0 or 1)
