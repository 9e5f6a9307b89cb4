-- bench_spec.lua: the bench measures, drops and reports as it says; every case runs in Orrery.
--
-- Invariant: no time is asserted, only that there is one. To add a check: an `it` that runs bench/run.lua
-- with --quick, or one on a module of bench/.
local root = os.getenv "ORRERY_ROOT" or "."
local interpreter = os.getenv "ORRERY_LUA" or "luajit"
package.path = root .. "/bench/?.lua;" .. package.path
local measure = require "measure"

local function output(command)
  local pipe = assert(io.popen(command .. " 2>&1"))
  local text = pipe:read "*a"
  pipe:close()
  return text
end

local function quick(arguments)
  return output(("cd '%s' && %s bench/run.lua --quick --no-peer %s"):format(root, interpreter, arguments))
end

-- A side that takes the given seconds a run, on a clock of its own.
local function fake(clock, seconds)
  return { time = function(n)
    clock.now = clock.now + n * seconds
    return n * seconds
  end }
end

describe("bench", function()
  it("takes the median of the ratios of repetitions", function()
    assert.equal(2, measure.median { 3, 1, 2 })
    assert.equal(2.5, measure.median { 4, 1, 3, 2 })
    local result = { used = 3, seconds = { { 1, 2, 4 }, { 3, 4, 16 } } }
    assert.equal(3, measure.ratio(result, 1, 2))
  end)

  it("counts only repetitions whose controls scaled", function()
    local clock, calls = { now = 0 }, 0
    local function control()
      calls = calls + 1
      return calls % 2 == 0 and 1.2 or 1.95 -- the first of every pair is good, the second is not
    end
    local options = { repetitions = 2, least = 0.1, limit = 5, clock = function() return clock.now end }
    options.control = control
    local result = measure.interleave({ fake(clock, 0.01), fake(clock, 0.03) }, options)
    assert.is_true(result.noisy)
    assert.is_true(result.dropped > 10)
    assert.equal(2, result.used)
    options.control = function() return 1.95 end
    result = measure.interleave({ fake(clock, 0.01), fake(clock, 0.03) }, options)
    assert.is_false(result.noisy)
    assert.equal(0, result.dropped)
    assert.is_true(math.abs(measure.ratio(result, 1, 2) - 3) < 1e-9)
  end)

  it("runs training on the whole host and on two devices, with equal first losses", function()
    local text = quick "--only batch"
    for _, name in ipairs { "MLP 64%-64%-10, batch 32", "batch 128, 2 threads", "two devices over one" } do
      assert.is_truthy(text:find("| [^\n]*" .. name .. "[^\n]*| [%d.]+ [mu]?s "), text)
    end
    assert.is_truthy(text:find("one device [%d.]+ ms +| [%d.]+ "), text)
  end)

  it("runs the plans inside and between layers, attention and the GPT", function()
    if os.getenv "ORRERY_SANITIZER" then return pending "these cases are large" end
    local text = quick "--only width"
    for _, name in ipairs { "tensor<0,1>, two devices over one", "GPT, [^|]*, 2 threads" } do
      assert.is_truthy(text:find("| [^\n|]*" .. name .. " +| [%d.]+ "), text)
    end
    assert.is_truthy(text:find "| %d+ tokens/s", text)
    text = quick "--only 1f1b"
    assert.is_truthy(text:find("one device [%d.]+ m?s +| [%d.]+ "), text)
    assert.is_truthy((quick "--only attention"):find "causal, 1 thread +| [%d.]+ m?s ")
  end)

  it("leaves out a side of PyTorch that does not run, and says so", function()
    local venv = os.tmpname()
    os.remove(venv)
    os.execute(("mkdir -p '%s/bin'"):format(venv))
    local file = assert(io.open(venv .. "/bin/python", "w"))
    file:write("#!/bin/sh\n[ \"$1\" = -c ] && echo 9.9\n") -- a version, and no answer to a command
    file:close()
    os.execute(("chmod +x '%s/bin/python'"):format(venv))
    local run = "cd '%s' && ORRERY_BENCH_VENV='%s' %s bench/run.lua --quick --only batch.512"
    local text = output(run:format(root, venv, interpreter))
    os.execute(("rm -rf '%s'"):format(venv))
    assert.is_truthy(text:find("two devices over one +| [%d.]+ m?s +| one device"), text)
    assert.is_truthy(text:find("beside DDP +| [%d.]+ m?s +| DDP does not run"), text)
    assert.is_truthy(text:find("over one process +| DDP does not run"), text)
  end)

  it("writes a table and its numbers", function()
    local folder = os.tmpname()
    os.remove(folder)
    local text = quick("--only add --out " .. folder)
    local path = text:match "\nin (%S+)%.md"
    assert.is_truthy(path, text)
    local file = assert(io.open(path .. ".md"))
    local table_text = file:read "*a"
    file:close()
    assert.is_truthy(table_text:find("| add of 4 f32 with grad *| [%d.]+ [nu]s"), table_text)
    os.execute("rm -rf " .. folder)
  end)

  it("times the collectives and the loading", function()
    local text = quick "--only 1.KiB"
    assert.is_truthy(text:find "| all%-reduce 1 KiB beside memcpy *| [%d.]+ [mu]s", text)
    text = quick "--only import"
    assert.is_truthy(text:find "| import[^|]*| [%d.]+ m?s", text)
  end)

  it("profiles a case by operation", function()
    local text = output(("cd '%s' && %s bench/profile.lua tiny 1 0 0 2"):format(root, interpreter))
    assert.is_truthy(text:find "ms a step without the profile", text)
    assert.is_truthy(text:find "linear", text)
  end)
end)
