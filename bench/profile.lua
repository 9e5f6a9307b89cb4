--- The profile of one case of the bench: operations by calls, time and bytes.
--   LUA bench/profile.lua CASE [THREADS] [DEVICES] [SIZE] [STEPS]
-- Defaults: 1 thread, 0 devices (the device `cpu`), the case's own batch, 20 steps.
-- Invariant: the case runs as in the bench, once before to be warm. To add a case: cases.lua.
local bench = arg[0]:match "^(.*/)" or "./"
package.path = bench .. "?.lua;" .. package.path
local orrery = require "orrery"
local cases = require "cases"
local clock = require("orrery.terminal").clock()

local case = cases[arg[1]]
if not case then
  io.stderr:write("usage: profile.lua add|add_grad|tiny|mlp|cnn|wide|blocks|attention|gpt|allreduce",
    " [THREADS] [DEVICES] [SIZE] [STEPS]\n")
  os.exit(2)
end
local threads, devices = tonumber(arg[2] or 1), tonumber(arg[3] or 0)
local steps = tonumber(arg[5] or 20)
orrery.set_threads(threads)
local size = tonumber(arg[4] or 0)
local run = case { threads = threads, devices = devices, size = size > 0 and size or nil }
run(steps)
local start = clock()
run(steps)
print(("%.3f ms a step without the profile"):format((clock() - start) / steps * 1e3))
print(orrery.profile(function() run(steps) end))
