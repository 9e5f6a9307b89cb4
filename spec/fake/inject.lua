-- Fails calls of the fake libraries one by one, each in a process of its own that was forked before it
-- opened a device: what a workload says then, whether it computes after it, and what it leaves behind.
--   inject.sweep { work = f, kind = "lost", names = { "cudaMalloc", ... } }: in a process that has opened no
--   device yet; prints what it found.
-- Invariant: a child ends by itself or is killed after `patience` seconds; every way to end badly is a line
-- "bad: ...". A workload is a function of a list of devices that gives a list of numbers.
-- To add a demand on what follows an error: `judge`.
local ffi = require "ffi"
ffi.cdef(require("spec.fake.prelude").declared)
ffi.cdef [[
  int fork(void);
  int pipe(int *ends);
  int dup2(int from, int to);
  int close(int fd);
  int kill(int pid, int signal);
  int waitpid(int pid, int *status, int options);
  long read(int fd, void *to, size_t bytes);
  int setenv(const char *name, const char *value, int replaces);
  struct orr_pollfd { int fd; short events, revents; };
  int poll(struct orr_pollfd *list, unsigned long n, int milliseconds);
]]
local orrery = require "orrery"
local core = require "orrery.core"

if jit then jit.off() end -- compiled code may keep the last values of its loops

local inject = {}

inject.kinds = { plain = 0, lost = 1, memory = 2, remote = 3, async = 4, stall = 5 }

local fake = ffi.load(os.getenv "ORRERY_BUILD" .. "/luajit/orrery/cuda.so")

local function device(k) return "cuda:" .. k end

-- In a child --------------------------------------------------------------------------------------------

local function bad(...) print("bad: " .. string.format(...)) end

local function differ(a, b)
  if #a ~= #b then return true end
  for k, v in ipairs(a) do
    local near = math.abs(v - b[k]) <= 1e-4 * math.max(1, math.abs(v)) -- false where one is NaN
    if not near then return true end
  end
  return false
end

local unpack = table.unpack or unpack

local function live()
  local _ = select("#", unpack({}, 1, 200)) -- nil over what ended calls left on the stack
  collectgarbage()
  collectgarbage()
  pcall(orrery.synchronize)
  return orrery.memory().live
end

-- Devices that compute, and those that say that they are lost; `bad` where one does neither.
local function survey(n)
  local alive, lost = {}, {}
  for k = 0, n - 1 do
    local ok, value = pcall(function()
      local three = orrery.ones(3, { device = device(k) }):sum():item()
      return three
    end)
    if ok and value == 3 then alive[#alive + 1] = k
    elseif not ok and value:find "is lost: .*restart the process" then lost[#lost + 1] = k
    else bad("cuda:%d gives %s", k, tostring(value)) end
  end
  return alive, lost
end

-- The message names a device and the line of the workload, and there is one.
local function judge_message(message, name)
  if type(message) ~= "string" then return bad("%s: no message but %s", name, tostring(message)) end
  if not message:find "^[^%s:]+%.lua:%d+: " then bad("%s: no line: %s", name, message) end
  if not message:find "cuda:%d" then bad("%s: no device: %s", name, message) end
end

-- Where devices could not be opened, that is told with the reason, and the host computes.
local function judge_closed(failed)
  local why = core.visible().cuda_why
  if not why or not select(2, pcall(orrery.ones, 3, { device = "cuda:7" })):find(why, 1, true) then
    bad("%s: devices are missing for no reason", failed)
  end
  if orrery.ones(3):sum():item() ~= 3 then bad("%s: the host does not compute", failed) end
end

-- What is queued fails within it too.
local function run(work, devices)
  local value = work(devices)
  orrery.synchronize()
  return value
end

-- The call fails when the process ends: it ends well.
local function judge_end(p)
  run(p.work, p.devices)
  fake.orr_fake_fail_at(p.name, p.n, inject.kinds[p.kind])
end

local function judge(p, want)
  local before = live()
  fake.orr_fake_fail_at(p.name or "", p.n, inject.kinds[p.kind])
  local ok, value = pcall(run, p.work, p.devices)
  local failed = ffi.string(fake.orr_fake_failed_call())
  fake.orr_fake_fail_at("", 0, 0)
  print("failed: " .. failed)
  if failed == "" then return end
  local first = value
  if ok then
    if differ(want, value) then bad("%s: other numbers, no error", failed) end
    print "quiet"
  else
    print("said: " .. tostring(value))
    if core.visible().cuda == p.gpus then judge_message(value, failed) end
  end
  if core.visible().cuda < p.gpus then return judge_closed(failed) end
  -- A lost device may say so again.
  local again, later = pcall(orrery.synchronize)
  if not again and not (p.kind == "lost" and later:find "is lost") then
    bad("%s: a second error: %s", failed, later)
  end
  local alive, lost = survey(p.gpus)
  if p.kind ~= "lost" and #lost > 0 then bad("%s: cuda:%d was lost", failed, lost[1]) end
  if #lost > 1 then bad("%s: %d devices were lost", failed, #lost) end
  local use = {}
  for k = 1, #p.devices do use[k] = alive[k] end
  if #lost == 0 then use = p.devices end
  ok, value = pcall(run, p.work, use)
  if not ok then bad("%s: after it: %s (first: %s)", failed, tostring(value), tostring(first))
  elseif differ(want, value) then bad("%s: other numbers after it", failed) end
  first, value = nil, nil -- luacheck: ignore
  local after = live()
  if after > before then bad("%s: %d bytes live after it, %d before", failed, after, before) end
  local report = ffi.string(fake.orr_fake_report())
  if report ~= "" then bad("%s: the fake complains: %s", failed, report) end
end

-- In the parent -----------------------------------------------------------------------------------------

local function start(p, want)
  local ends = ffi.new "int[2]"
  assert(ffi.C.pipe(ends) == 0)
  io.flush()
  local pid = ffi.C.fork()
  assert(pid >= 0, "fork")
  if pid == 0 then
    ffi.C.dup2(ends[1], 1)
    ffi.C.dup2(ends[1], 2)
    ffi.C.close(ends[0])
    ffi.C.close(ends[1])
    if p.at_end then ffi.C.setenv("ORRERY_FAKE_LEAKS", "2", 1) end
    local ok, message = xpcall(p.at_end and p.n > 0 and judge_end or judge, debug.traceback, p, want)
    if not ok then bad("the child: %s", tostring(message)) end
    io.flush()
    os.exit(0, true)
  end
  ffi.C.close(ends[1])
  return { pid = pid, fd = ends[0], text = {}, since = os.time(), p = p }
end

local buffer = ffi.new("char[4096]")

local function finish(child, why)
  local status = ffi.new "int[1]"
  ffi.C.close(child.fd)
  if why then ffi.C.kill(child.pid, 9) end
  ffi.C.waitpid(child.pid, status, 0)
  local text = table.concat(child.text)
  if why then text = text .. "\nbad: " .. why .. "\n"
  elseif status[0] ~= 0 then text = text .. "\nbad: ended with status " .. status[0] .. "\n" end
  for line in text:gmatch "fake: [^\n]*" do text = text .. "\nbad: at the end, " .. line .. "\n" end
  child.text = text
  return child
end

-- Reads what children say; gives those that ended.
local function look(children, patience)
  local n, ended = #children, {}
  local list = ffi.new("struct orr_pollfd[?]", n)
  for k, child in ipairs(children) do
    list[k - 1].fd, list[k - 1].events = child.fd, 1
  end
  ffi.C.poll(list, n, 1000)
  for k = n, 1, -1 do
    local child = children[k]
    if list[k - 1].revents ~= 0 then
      local got = tonumber(ffi.C.read(child.fd, buffer, 4096))
      if got > 0 then child.text[#child.text + 1] = ffi.string(buffer, got)
      else ended[#ended + 1] = finish(table.remove(children, k)) end
    elseif os.time() - child.since > patience then
      ended[#ended + 1] = finish(table.remove(children, k), ("hangs for %d seconds"):format(patience))
    end
  end
  return ended
end

-- How often the workload calls each function, and its numbers: found in a process of its own.
local function measure(p)
  local function count(devices)
    local value = p.work(devices)
    orrery.synchronize()
    io.write("want: ", table.concat(value, " "), "\n")
    for _, name in ipairs(p.names) do
      print(("called: %s %d"):format(name, tonumber(fake.orr_fake_called(name))))
    end
    return value
  end
  local children = { start(setmetatable({ work = count, n = 0, kind = "plain" }, { __index = p }), {}) }
  local child = children[1]
  while #children > 0 do look(children, p.patience) end
  local want, counts = {}, {}
  assert(child.text:find "want: " and not child.text:find "bad: ", child.text)
  for word in child.text:match("want: ([^\n]*)"):gmatch "%S+" do want[#want + 1] = tonumber(word) end
  for name, n in child.text:gmatch "called: ([^\n]-) (%d+)\n" do
    counts[name] = p.at_end and -n or tonumber(n)
  end
  for name, n in child.text:gmatch "called by the end: ([^\n]-) (%d+)\n" do
    if counts[name] then counts[name] = counts[name] + n end
  end
  return want, counts
end

-- Which calls of a function that is called `count` times: all, or the first two, every step-th, the last.
local function picks(count, step)
  local list = {}
  for n = 1, count do
    if n <= 2 or n == count or n % step == 0 then list[#list + 1] = n end
  end
  return list
end

local function report(p, child, sum)
  sum.swept = sum.swept + 1
  if child.text:find "\nsaid: " then sum.said = sum.said + 1 end
  if child.text:find "\nquiet" then sum.quiet = sum.quiet + 1 end
  if child.text:find("failed: " .. p.name, 1, true) then sum.names[p.name] = true end
  for line in child.text:gmatch "bad: [^\n]*" do
    print(("%s error at call %d of %s: %s"):format(p.kind, p.n, p.name, line))
  end
  if os.getenv "ORRERY_FAULTS_VERBOSE" then print(p.n, p.name, child.text) end
end

--- Fails calls of a workload one by one, and prints how it went: a line for what went wrong, one
--- "failed: NAME" for every function that failed at least once, and one "swept: N, said: N, quiet: N".
---@param p {work: fun(devices: integer[]): number[], kind: string, names: string[], step?: integer,
---  at_end?: boolean} at_end: calls that are made when the process ends
function inject.sweep(p)
  p.devices, p.gpus = p.devices or { 0, 1 }, tonumber(os.getenv "ORRERY_FAKE_GPUS")
  p.patience, p.step = p.patience or 20, p.step or 1
  local want, counts = measure(p)
  local todo, children, sum = {}, {}, { swept = 0, said = 0, quiet = 0, names = {} }
  for _, name in ipairs(p.names) do
    for _, n in ipairs(picks(counts[name], p.step)) do todo[#todo + 1] = { name = name, n = n } end
  end
  local jobs, next_one = 3, 1
  while todo[next_one] or #children > 0 do
    while todo[next_one] and #children < jobs do
      children[#children + 1] = start(setmetatable(todo[next_one], { __index = p }), want)
      next_one = next_one + 1
    end
    for _, child in ipairs(look(children, p.patience)) do report(child.p, child, sum) end
  end
  for name in pairs(sum.names) do print("failed: " .. name) end
  print(("swept: %d, said: %d, quiet: %d"):format(sum.swept, sum.said, sum.quiet))
end

return inject
