-- gpu_run.lua: the steps of gpu-kit/run, and their results.
--   LUA tools/gpu_run.lua HERE [FOLDER] [STEP...] | list | merge FOLDER FILE...
-- HERE is where paths are meant from. An argument with a "/" in it is the folder of the results, any other
-- a step or a group of steps; without steps all run. GPU_BENCH_SMALL=1: tiny sizes, for fake GPUs.
-- Invariant: a record stands in results.json only if this run, or the file merged, made it; a step that
-- fails, crashes or runs out of time is a failed step, and the next one runs. A step that is run again
-- replaces its record. To add a step: a row of `steps`.
package.path = "bench/?.lua;" .. package.path
local cjson = require "cjson"
local child = require "child"
local machine = require "gpu_machine"

local small = (os.getenv "GPU_BENCH_SMALL" or "") ~= ""
local lua = os.getenv "ORRERY_LUA" or "luajit"
local build = os.getenv "BUILD" or "build"
local unpack = table.unpack or unpack
local quote, output = child.quote, child.output
local out -- the folder of results.json and logs

local function read(path)
  local file = io.open(path, "rb")
  local text = file and file:read "*a"
  if file then file:close() end
  return text
end

local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

-- ---- the steps ----

-- k devices of the first GPU.
local function logical(k) return "ORRERY_CUDA_DEVICES=0" .. (",0"):rep(k - 1) end

-- Where calls are slow a spec takes fewer placements, and fewer steps.
local few = " ORRERY_SANITIZER=1"

local function specs(names, environment)
  return ("env ORRERY_SPEC_DEVICES=cuda SPEC_TIMEOUT=3600 %s %s tools/test.lua %s %s"):format(
    environment or "", lua, lua, quote(names))
end

local function bench(group)
  return function()
    return ("%s bench/gpu.lua --group %s --out %s %s"):format(lua, group, quote(out .. "/logs/" .. group),
      small and "--small" or "")
  end
end

-- The path of compute-sanitizer, or nil.
local function sanitizer()
  local home = os.getenv "CUDA_HOME" or "/usr/local/cuda"
  local places = { "compute-sanitizer", home .. "/bin/compute-sanitizer",
    home .. "/compute-sanitizer/compute-sanitizer" }
  for _, place in ipairs(places) do
    local path = output("command -v " .. quote(place))
    if path ~= "" then return path end
  end
end

-- A subset: every way that kernels share memory, wait for one another, and cut work.
local sanitized = "add gelu where sum mean max softmax logsumexp layer_norm batch_norm cross_entropy cumsum "
  .. "sort embedding index_add dropout max_pool2d scaled_dot_product_attention"

local function sanitize(tool)
  return function()
    return ("env ORRERY_CPU_DEVICES=8 %s --tool %s --error-exitcode 9 %s spec/support/run_against_cpu.lua %s")
      :format(sanitizer(), tool, quote(output("command -v " .. lua)), small and "add sum" or sanitized)
  end
end

local function without_sanitizer() return not sanitizer() and "compute-sanitizer is not found here" or nil end

local function unsupported(log)
  return log:find("Device not supported", 1, true) and "compute-sanitizer: Device not supported" or nil
end

local devices = [[local o = require "orrery" print(o.devices()) print(o.topology(true))]]

-- name, group, what, limit in seconds, command (or what gives it); without() gives the reason to skip the
-- step, unfit(log) the reason why one that failed could not have passed; must: what its log must hold.
local steps = {
  { name = "machine", what = "devices, topology, nvidia-smi", limit = 120,
    command = ("env %s %s -e %s && { nvidia-smi -q || echo no nvidia-smi; }"):format(logical(2), lua,
      quote(devices)), must = { "cuda:0" } },
  { name = "ops", group = "specs", what = "every op on CUDA against the CPU", limit = 420,
    command = specs("gpu_ops", logical(5)) },
  { name = "attention", group = "specs", what = "fused attention, autocast", limit = 180,
    command = specs("attention autocast", logical(5)) },
  { name = "digits", group = "specs", what = "the digits example's accuracy against the CPU's", limit = 300,
    command = specs "gpu_digits" },
  { name = "plans", group = "specs", what = "every plan on logical devices of one GPU: f64, 3 steps",
    limit = 400, command = specs(small and "resolved" or "plan", logical(8) .. few) },
  { name = "splits", group = "specs", what = "tensor<>, sequence= on logical devices", limit = 400,
    command = specs(small and "sequence" or "sequence tensor_plan training", logical(8) .. few) },
  { name = "zero", group = "specs", what = "zero= on logical devices", limit = 400,
    command = specs(small and "resolved" or "zero", logical(8) .. few) },
  { name = "pipelines", group = "specs", what = "pipelines, moves between layouts, on logical devices",
    limit = 300, command = specs(small and "resolved" or "pipeline redistribute", logical(8)) },
  { name = "behaviours", group = "specs", what = "what plans promise, on logical devices", limit = 300,
    command = specs(small and "behaviours_list" or "behaviours_*", logical(8)) },
  { name = "capture", group = "specs", what = "captured steps", limit = 400,
    command = specs("capture", logical(8) .. (small and few or "")) },
  { name = "matrix", group = "specs", what = "the op matrix: placements on logical devices", limit = 550,
    command = specs("op_matrix", logical(5) .. few .. (small and " ORRERY_OPS='add sum softmax'" or "")) },
  { name = "long", group = "specs", what = "every plan: f32 and f64, 20 steps, two nets", limit = 590,
    command = specs(small and "resolved" or "plan", logical(8)) },
  { name = "bytes", group = "bench", what = "benchmark: kernels beside a copy", limit = 560,
    command = bench "bytes" },
  { name = "arithmetic", group = "bench", what = "benchmark: products, convolution, attention", limit = 400,
    command = bench "arithmetic" },
  { name = "training", group = "bench", what = "benchmark: GPT-2, small MLP", limit = 580,
    command = bench "training" },
  { name = "host", group = "bench", what = "benchmark: what an op costs the host", limit = 200,
    command = bench "host" },
}
for _, tool in ipairs { "memcheck", "racecheck", "synccheck" } do
  steps[#steps + 1] = { name = tool, group = "sanitize", what = "compute-sanitizer on a subset of ops",
    limit = 400, command = sanitize(tool), without = without_sanitizer, unfit = unsupported,
    must = { "every row is within its tolerance",
      tool == "racecheck" and "RACECHECK SUMMARY: 0 hazards" or "ERROR SUMMARY: 0 errors" } }
end

-- ---- running one ----

-- Runs a command under a time limit, its output shown and kept; its status.
local function run(command, limit, log)
  local status = os.tmpname()
  write(status, "")
  -- Specs end by themselves before the limit: they are in a group that it does not reach.
  local script = "{ timeout -k 10 %d env SPEC_TOTAL=%d sh -c %s; echo $? > %s; } 2>&1 | tee %s"
  os.execute(script:format(limit, limit - 20, quote(command), quote(status), quote(log)))
  local code = tonumber(read(status))
  os.remove(status)
  return code or -1
end

-- Why a step with this status and log failed; nil: it passed.
local function failure(step, code, log)
  if code == 124 or code == 137 then return ("ran out of time: %d s"):format(step.limit) end
  if code > 128 then return "crashed: signal " .. code - 128 end
  if code ~= 0 then return ("ended with status %d: %s"):format(code, log:match "([^\n]*)%s*$" or "") end
  for _, text in ipairs(step.must or {}) do
    if not log:find(text, 1, true) then return "no line says: " .. text end
  end
end

-- What a log and the files beside it tell: counts of specs, worst errors, lines of the benchmark.
local function details(record, step, log)
  for passed, failed in log:gmatch "(%d+) passed, (%d+) failed" do
    record.passed, record.failed = tonumber(passed), tonumber(failed)
  end
  for dtype, value, where in log:gmatch "worst in (%w+)%s+(%S+) of %S+%s+([^\n]+)" do
    record.worst = record.worst or {}
    record.worst[dtype] = { error = tonumber(value), where = where }
  end
  for line in log:gmatch "digits: ([^\n]+)" do
    record.digits = record.digits or {}
    record.digits[#record.digits + 1] = line
  end
  local text = step.group == "bench" and read(out .. "/logs/" .. step.name .. "/gpu.json")
  if text then record.bench = cjson.decode(text) end
end

local function run_step(step)
  local record = { step = step.name, what = step.what, limit = step.limit, small = small or nil,
    log = "logs/" .. step.name .. ".log" }
  local reason = step.without and step.without()
  if reason then
    record.status, record.reason = "skipped", reason
  else
    local command = type(step.command) == "function" and step.command() or step.command
    if step.group == "bench" then os.remove(out .. "/logs/" .. step.name .. "/gpu.json") end
    local began = os.time()
    local code = run(command, step.limit, out .. "/" .. record.log)
    local log = read(out .. "/" .. record.log) or ""
    record.seconds = os.difftime(os.time(), began)
    record.reason = failure(step, code, log)
    record.status = record.reason and "failed" or "passed"
    if record.reason and step.unfit and step.unfit(log) then
      record.status, record.reason = "skipped", step.unfit(log)
    end
    if record.status == "failed" then record.tail = log:sub(-4000) end
    details(record, step, log)
  end
  record.machine = machine.now()
  return record
end

-- ---- results ----

-- Puts records in: one a step, the newest; in the order of the steps.
local function merge(into, records)
  local by_name = {}
  for _, list in ipairs { into, records } do
    for _, record in ipairs(list) do
      local before = by_name[record.step]
      if not before or before.machine.date <= record.machine.date then by_name[record.step] = record end
    end
  end
  local merged = {}
  for _, step in ipairs(steps) do merged[#merged + 1] = by_name[step.name] end
  return merged
end

local function stored(path)
  local text = read(path)
  return text and cjson.decode(text).records or {}
end

local function save(records)
  local path = out .. "/results.json"
  write(path, cjson.encode { records = merge(stored(path), records) } .. "\n")
  return path
end

local function summary(records)
  for _, r in ipairs(records) do
    local counts = r.passed and ("%d passed, %d failed"):format(r.passed, r.failed) or ""
    print(("%-8s %-11s %4s s  %-24s %s"):format(r.status, r.step, r.seconds or 0, counts, r.reason or ""))
  end
end

-- ---- the command line ----

local function chosen(words)
  local list = {}
  for _, word in ipairs(words) do
    local found = false
    for _, step in ipairs(steps) do
      if step.name == word or step.group == word then
        list[#list + 1], found = step, true
      end
    end
    if not found then
      io.stderr:write("gpu-kit/run: no step '", word, "' (run list); a folder has a '/' in it\n")
      os.exit(2)
    end
  end
  return #words > 0 and list or steps
end

local function from_here(here, path) return path:match "^/" and path or here .. "/" .. path end

local function open_folder(here, path)
  out = path and from_here(here, path) or build .. "/results"
  os.execute("mkdir -p " .. quote(out .. "/logs"))
end

local here, words = arg[1], { unpack(arg, 2) }
if words[1] == "list" then
  for _, step in ipairs(steps) do
    print(("%-11s %-9s %4d s  %s"):format(step.name, step.group or "", step.limit, step.what))
  end
  os.exit(0)
elseif words[1] == "merge" then
  open_folder(here, words[2])
  for k = 3, #words do save(stored(from_here(here, words[k]))) end
  local records = stored(out .. "/results.json")
  summary(records)
  os.exit(#records > 0 and 0 or 1)
end
local folder
if words[1] and words[1]:find("/", 1, true) then folder = table.remove(words, 1) end
local list = chosen(words)
open_folder(here, folder)
local records, failed = {}, 0
for k, step in ipairs(list) do
  print(("== %d of %d: %s: %s, at most %d s"):format(k, #list, step.name, step.what, step.limit))
  io.stdout:flush()
  records[k] = run_step(step)
  save { records[k] }
  if records[k].status == "failed" then failed = failed + 1 end
  print(("== %s: %s%s"):format(step.name, records[k].status,
    records[k].reason and ": " .. records[k].reason or ""))
  io.stdout:flush()
end
print ""
summary(records)
print(("%d steps, %d failed; %s/results.json"):format(#records, failed, out))
os.exit(failed == 0 and 0 or 1)
