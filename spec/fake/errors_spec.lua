-- Errors injected at every call of CUDA, cuBLASLt, cuDNN and NCCL that the plug-in makes, in turn, in every
-- way that the call can fail: each time one clear error or the right numbers by another way, no hang, no
-- leak, and a process that computes after it (inject.lua judges).
-- A function that no workload reaches stands in `spared` with its reason, else this fails. By default the
-- first calls of every function, the last, and some between are failed; ORRERY_FAULTS=all: every one.
-- To add a way to fail: a row of orr_fake_kind (fake.h), of inject.kinds, and in `kinds`.
local behave = require "spec.support.behave"

local build = os.getenv "ORRERY_BUILD"
local step = os.getenv "ORRERY_FAULTS" == "all" and 1 or 48

-- Functions that never fail here, and why.
local spared = {
  cudaGetErrorString = "gives words", ncclGetErrorString = "gives words",
  cublasLtGetStatusString = "gives words", cudnnGetErrorString = "gives words",
  cudnnGetVersion = "gives a number",
  cudaDriverGetVersion = "asked where CUDA does not start: below",
  cudaRuntimeGetVersion = "asked where CUDA does not start: below",
  ncclCommAbort = "called when another call of NCCL has failed: below",
  ncclCommGetAsyncError = "asked of collectives that take long: below",
}

-- The functions that the plug-in's objects leave to be found.
local function functions()
  local seen, list = { ["kernel launch"] = true }, { "kernel launch" }
  local pipe = assert(io.popen(("nm -u '%s'/obj/cuda/csrc/*.o"):format(build)))
  for line in pipe:lines() do
    local name = line:match "^%s*U (%w+)$"
    local is_ours = name and (name:find "^cuda%u" or name:find "^cublasLt%u" or name:find "^cudnn%u"
      or name:find "^nccl%u")
    if is_ours and not seen[name] then
      seen[name] = true
      list[#list + 1] = name
    end
  end
  pipe:close()
  table.sort(list)
  return list
end

local names = functions()

local code = [[
  local inject, workloads = require "spec.fake.inject", require "spec.fake.workloads"
  inject.sweep { work = workloads.%s, kind = "%s", names = { %s }, step = %d, at_end = %s }
]]

local function quoted(list)
  local words = {}
  for k, name in ipairs(list) do words[k] = ("%q"):format(name) end
  return table.concat(words, ", ")
end

-- Fails calls of `list` in a workload; gives the output's end, and notes what failed in `failed`.
local function sweep(workload, kind, list, failed, environment, at_end)
  environment.ORRERY_FAKE_GPUS, environment.ORRERY_FAKE_LEAKS = "4", "1"
  local text = behave.run(code:format(workload, kind, quoted(list), step, tostring(at_end)), environment)
  for name in text:gmatch "failed: ([^\n]*)" do failed[name] = true end
  local swept, said, quiet = text:match "swept: (%d+), said: (%d+), quiet: (%d+)"
  assert.is_nil(text:match "[^\n]*bad: .*", text)
  return tonumber(swept), tonumber(said), tonumber(quiet), text
end

local places = {
  { "data", {} }, { "zero", {} }, { "tensor", {} }, { "pipeline", {} }, { "capture", {} },
  { "attention", {} }, { "moves", {} },
  { "pipeline", { ORRERY_FAKE_PEERS = "0" } }, { "moves", { ORRERY_FAKE_PEERS = "0" } },
}

describe("an error at any call", function()
  for _, kind in ipairs { "plain", "memory", "lost" } do
    local failed = {}
    for _, place in ipairs(places) do
      local peers = place[2].ORRERY_FAKE_PEERS and ", without peer access" or ""
      it(("of a kind %q is one clear error in the workload %q%s"):format(kind, place[1], peers), function()
        local swept, said = sweep(place[1], kind, names, failed, place[2])
        assert.is_true(swept > 50 and said > 0)
      end)
    end

    it(("of a kind %q when the process ends changes nothing"):format(kind), function()
      for _, workload in ipairs { "data", "capture" } do
        assert.is_true(sweep(workload, kind, names, failed, {}, true) > 10)
      end
    end)

    it(("of a kind %q: was met at every function that the plug-in calls"):format(kind), function()
      for _, name in ipairs(names) do
        assert.is_true(failed[name] or spared[name] ~= nil, name)
      end
    end)
  end
end)

describe("an error of NCCL", function()
  local collectives = { "ncclAllGather", "ncclAllReduce", "ncclReduceScatter" }
  for _, kind in ipairs { "remote", "async", "stall" } do
    it(("of a kind %q ends the step on all devices"):format(kind), function()
      local failed = {}
      for _, workload in ipairs { "data", "zero" } do
        local swept, said = sweep(workload, kind, collectives, failed, { ORRERY_NCCL_TIMEOUT = "0.3" })
        assert.equal(swept, said)
      end
      for _, name in ipairs(collectives) do assert.is_true(failed[name], name) end
    end)
  end
end)

describe("a driver that is too old", function()
  local print_why = [[print(select(2, pcall(require("orrery").zeros, 2, { device = "cuda:0" })))]]

  it("is told with both versions", function()
    local text = behave.run(print_why, { ORRERY_FAKE_DRIVER = "11080" })
    assert.matches("driver is too old: it serves CUDA 11.8, and this build needs %d+%.%d", text)
  end)

  it("is told as no driver where it gives no version, and needs the runtime's for no words", function()
    local text = behave.run(print_why,
      { ORRERY_FAKE_DRIVER = "11080", ORRERY_FAKE_FAIL = "cudaDriverGetVersion" })
    assert.matches("no NVIDIA driver is installed", text, 1, true)
    text = behave.run(print_why, { ORRERY_FAKE_DRIVER = "11080", ORRERY_FAKE_FAIL = "cudaRuntimeGetVersion" })
    assert.matches("this build needs %d+%.%d", text)
  end)
end)
