--- The process that runs Orrery's side of the bench: reads commands, answers each with one line.
--   LUA worker.lua [CASES], the module of the cases: "cases" or "gpu_cases"
--   prepare KEY CASE THREADS DEVICES SIZE   "ok LOSS", the loss of the first step or "-"
--   time KEY N                              seconds of N runs; a case may count them itself
--   drop KEY | memory | version             "ok" | the peak of resident memory in bytes | a version
--   peak | has NAME | device                the peak of device memory since prepare | "yes" or "no" |
--                                           name and model of the first device
-- Invariant: nothing else is written to standard output; a failure is answered with "error ...".
-- To add a command: a function in `commands`; peer.py knows the same ones.
local folder = arg[0]:match "^(.*/)" or "./"
package.path = folder .. "?.lua;" .. package.path
local orrery = require "orrery"
local cases = require(arg[1] or "cases")
local clock = require("orrery.terminal").clock()

local ready, commands = {}, {}

function commands.prepare(key, case, threads, devices, size)
  local given = { threads = tonumber(threads), devices = tonumber(devices) }
  given.size = size ~= "0" and tonumber(size) or nil
  orrery.set_threads(given.threads)
  orrery.reset_peak()
  local run, loss = cases[case](given)
  ready[key] = { run = run, threads = given.threads }
  return loss and ("ok %.7g"):format(loss) or "ok -"
end

function commands.time(key, n)
  local case = ready[key]
  orrery.set_threads(case.threads)
  collectgarbage()
  local start = clock()
  local counted = case.run(tonumber(n))
  return ("%.9f"):format(type(counted) == "number" and counted or clock() - start)
end

function commands.drop(key)
  ready[key] = nil
  collectgarbage()
  orrery.empty_cache()
  return "ok"
end

function commands.memory()
  for line in io.lines "/proc/self/status" do
    local kilobytes = line:match "^VmHWM:%s*(%d+) kB"
    if kilobytes then return ("%d"):format(tonumber(kilobytes) * 1024) end
  end
  return "0"
end

function commands.peak() return ("%d"):format(orrery.memory(orrery.devices()[1].name).peak) end

function commands.has(name) return orrery[name] and "yes" or "no" end

function commands.device()
  local first = orrery.devices()[1]
  return first.name .. " " .. first.model
end

function commands.version() return orrery._VERSION .. ", " .. (jit and jit.version or _VERSION) end

for line in io.lines() do
  local words = {}
  for word in line:gmatch "%S+" do words[#words + 1] = word end
  local ok, answer = pcall(commands[words[1]], (table.unpack or unpack)(words, 2))
  if not ok then answer = "error " .. tostring(answer):gsub("\n", " ") end
  io.stdout:write(answer, "\n")
  io.stdout:flush()
end
