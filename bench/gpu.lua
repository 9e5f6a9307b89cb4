--- make bench DEVICES=cuda: rates beside a copy's of the same run, and ratios to PyTorch, on one GPU.
--   LUA bench/gpu.lua [--only PATTERN] [--group bytes|arithmetic|training|host] [--no-peer] [--small]
--     [--limit SECONDS] [--out FOLDER]
-- PATTERN is a Lua pattern on the names of rows; --small takes one repetition of tiny sizes, for fake GPUs:
-- it proves that the bench runs, and says nothing of speed. --limit: seconds a row may take (30).
-- Environment: ORRERY_GPU_CONTROL, the program made of gpu_control.cu (default: beside the build);
-- ORRERY_BENCH_VENV as in deps.sh, else python3; ORRERY_PEER_LIBRARY_PATH, the LD_LIBRARY_PATH of Python;
-- ORRERY_PEER_DEVICE=cpu lets PyTorch run there, which checks that both sides do the same work.
-- Writes FOLDER/gpu.json and .md where FOLDER is given.
-- Invariant: every number was measured in this run; what could not run says why. The status is not 0 where
-- Orrery's own side failed or the sides' results differ; a miss of a goal is a result, not a failure.
-- To add a row: gpu_rows.lua.
local bench = arg[0]:match "^(.*/)" or "./"
package.path = bench .. "?.lua;" .. package.path
local measure, report, sides = require "measure", require "report", require "sides"
local lines, machine = require "gpu_lines", require "gpu_machine"
local child = require "child"
local quote, output = child.quote, child.output
local clock = require("orrery.terminal").clock()

local options = { limit = 30, only = "", peer = true }
local flags = {
  ["--small"] = function() options.small = true end,
  ["--no-peer"] = function() options.peer = false end,
}
local at = 1
while arg[at] do
  local name = arg[at]:match "^%-%-(.+)$"
  if flags[arg[at]] then
    flags[arg[at]]()
  elseif (name == "only" or name == "group" or name == "out" or name == "limit") and arg[at + 1] then
    at = at + 1
    options[name] = name == "limit" and assert(tonumber(arg[at]), "--limit needs seconds") or arg[at]
  else
    io.stderr:write("usage: gpu.lua [--only PATTERN] [--group bytes|arithmetic|training|host] [--no-peer]\n",
      "  [--small] [--limit SECONDS] [--out FOLDER]\n")
    os.exit(2)
  end
  at = at + 1
end
local rows, sizes = require "gpu_rows"(options.small)
lines.small = options.small or false

local function note(...) io.stderr:write("bench: ", string.format(...), "\n") end

-- ---- who runs ----

--- How PyTorch is called and what it is, or nil and why it cannot be.
local function find_peer()
  if not options.peer then return nil, "not asked for" end
  local kind = os.getenv "ORRERY_PEER_DEVICE" or "cuda"
  local path = os.getenv "ORRERY_PEER_LIBRARY_PATH"
  local before = path and "env LD_LIBRARY_PATH=" .. quote(path) .. " " or ""
  local venv = os.getenv "ORRERY_BENCH_VENV"
  local why = "no python3 with torch here"
  for _, python in ipairs { venv and quote(venv .. "/bin/python") or "python3", "python3" } do
    local version, cuda = output(before .. python
      .. " -c 'import torch; print(torch.__version__, torch.cuda.is_available())'"):match "^(%S+) (%S+)$"
    if version and (kind == "cpu" or cuda == "True") then
      return { command = before .. python, device = kind,
        name = "PyTorch " .. version .. (kind == "cpu" and " on the CPU" or "") }
    elseif version then
      why = "its PyTorch " .. version .. " sees no GPU"
    end
  end
  return nil, why
end

local function interpreter()
  local first = 0
  while arg[first - 1] do first = first - 1 end
  return quote(arg[first])
end

local function find_control()
  local given = os.getenv "ORRERY_GPU_CONTROL"
  local file = given and io.open(given, "rb")
  if file then file:close() end
  return file and given or nil
end

local function new_sides(folder, python, control)
  local worker = interpreter() .. " " .. quote(bench .. "worker.lua") .. " gpu_cases"
  return sides.new(folder, bench, interpreter(), python, clock, {
    orrery = worker,
    logical = "env ORRERY_CUDA_DEVICES=0,0,0,0,0,0,0,0 " .. worker,
    pytorch = python and ("%s %s %s"):format(python.command, quote(bench .. "gpu_peer.py"), python.device),
    control = control and quote(control),
  })
end

-- ---- measuring a row ----

-- The sides of a row in the order of its lines: its own, copies, other sides, PyTorch's.
local function specs_of(row, has)
  local list = { { row.who or "orrery", row.case, role = "own" } }
  local function add(spec, role, what)
    spec.role, spec.what = role, what
    list[#list + 1] = spec
  end
  if row.bytes and has.control then
    add({ "control", "copy", 1, 0, sizes.copy }, "copy")
    add({ "control", "memcpy", 1, 0, sizes.copy }, "copy")
  elseif row.bytes then
    add({ "orrery", "clone:f32:" .. sizes.copy / 4 }, "copy")
  end
  for _, other in ipairs(row.others or {}) do
    if other[1][1] ~= "control" or has.control then
      add({ other[1][1], other[1][2] }, "other", other)
    end
  end
  for _, peer in ipairs(has.python and row.peers or {}) do
    if not (options.small and peer.slow) then add({ "pytorch", peer[1] or row.case }, "peer", peer) end
  end
  return list
end

-- First losses must be near, or the sides do not do the same work.
local function compare(row, list)
  local own = list[1].side.loss
  for _, spec in ipairs(list) do
    local loss = spec.role ~= "copy" and spec.side and spec.side.loss
    local apart = own and loss and math.abs(loss - own)
    if apart and (apart ~= apart or apart > row.close * math.max(math.abs(own), 1e-6)) then
      spec.failed = ("its first result is %.6g, Orrery's %.6g: not the same work"):format(loss, own)
      spec.differs = spec.failed
    end
  end
end

local function first_line(problem) return (tostring(problem):match "[^\n]*") end

-- Makes each side; what fails has the reason in `failed`.
local function prepare(set, list)
  for _, spec in ipairs(list) do
    if not spec.failed then
      local ok, side = pcall(set.make, set, spec)
      if ok then spec.side = side else
        spec.failed = first_line(side)
        set:close(spec[1], true)
      end
    end
  end
end

local function let_go(list)
  for _, spec in ipairs(list) do
    if spec.side and spec.side.drop and not spec.failed then pcall(spec.side.drop) end
    spec.side = nil
  end
end

-- What measuring the sides gave; a process that fails meanwhile is left out and the rest runs again.
local function measure_row(set, row, list)
  prepare(set, list)
  if list[1].failed then return let_go(list) end
  compare(row, list)
  local ready = {}
  for _, spec in ipairs(list) do
    if spec.side and not spec.failed then
      ready[#ready + 1] = spec.side
      spec.at = #ready
    end
  end
  local ok, result = pcall(measure.interleave, ready, { repetitions = options.small and 1 or 9,
    least = options.small and 1e-4 or 0.05, limit = options.limit, clock = clock })
  if ok then
    let_go(list)
    return result
  end
  local who = type(result) == "table" and result.who or "orrery"
  for _, spec in ipairs(list) do
    if spec[1] == who then spec.failed = first_line(result) end
  end
  let_go(list)
  set:close(who, true)
  if not list[1].failed then return measure_row(set, row, list) end
end

-- The peak of device memory of a side alone.
local function peak(set, who, case)
  set:close(who)
  local ok, bytes = pcall(function()
    local side = set:make { who, case }
    side.time(options.small and 1 or 3)
    return tonumber(set:ask(who, "peak"))
  end)
  set:close(who, not ok)
  return ok and bytes or nil
end

-- ---- the run ----

local function wanted(row)
  return row.name:find(options.only) and (not options.group or row.group == options.group)
end

local function run_row(set, row, has, add)
  if row.needs and set:ask("orrery", "has " .. row.needs) ~= "yes" then
    return add(lines.skipped(row, "orrery." .. row.needs .. " is not there"))
  end
  local list = specs_of(row, has)
  local result = measure_row(set, row, list)
  for _, line in ipairs(lines.of_row(row, list, result, has, sizes)) do add(line) end
  if row.memory and result then
    local own = peak(set, "orrery", row.case)
    local word = row.peers[1][1] or row.case
    local other = has.python and peak(set, "pytorch", word)
    add(lines.memory(row, own, other, has))
  end
end

local function run(set, has)
  local list, failed = {}, 0
  local function add(line)
    note("%-52s %-16s %-26s %-6s %-8s %s", line.case, line.orrery, line.pytorch, line.ratio, line.goal,
      line.met)
    list[#list + 1] = line
    if line.data.failed then failed = failed + 1 end
  end
  for _, row in ipairs(rows) do
    if wanted(row) then run_row(set, row, has, add) end
  end
  for _, line in ipairs(lines.of_peaks(has)) do add(line) end
  return list, failed
end

local function main(folder)
  local python, why = find_peer()
  local control = find_control()
  local set = new_sides(folder, python, control)
  local ok, list, failed, model = pcall(function()
    local name, gpu = set:ask("orrery", "device"):match "^(%S+) (.*)$"
    if not name:find "^cuda" then error("bench: no CUDA device here (orrery devices says why)", 0) end
    local has = { python = python, why = why, control = control, model = gpu }
    local found, count = run(set, has)
    return found, count, gpu
  end)
  set:close(nil, true)
  if not ok then error(list, 0) end
  local now = machine.now()
  if options.out then os.execute("mkdir -p " .. quote(options.out)) end
  local text = lines.save(options.out, { model = model, state = now,
    peer = python and python.name or "no PyTorch: " .. why,
    control = control and "gpu_control" or "x:clone(), since gpu_control is not here" }, list, report)
  print(text)
  return failed == 0 and #list > 0
end

local folder = output "mktemp -d"
local ok, fine = pcall(main, folder)
os.execute("rm -rf " .. quote(folder))
if not ok then io.stderr:write(tostring(fine), "\n") end
os.exit(ok and fine and 0 or 1)
