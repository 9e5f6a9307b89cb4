-- The GPU bench and the steps of gpu-kit/run on fake GPUs, in small form: that they run, what they store,
-- and what they say of what fails. Numbers of fake GPUs say nothing, so none is looked at.
-- To add a row or a step: nothing here, unless it stores something new.
local cjson = require "cjson"

local root, build = os.getenv "ORRERY_ROOT", os.getenv "ORRERY_BUILD"
local lua = os.getenv "ORRERY_LUA" or "luajit"
package.path = root .. "/bench/?.lua;" .. package.path
local lines, measured = require "gpu_lines", require "gpu_rows"
local control = build .. "/gpu_control"

local function read(path)
  local file = assert(io.open(path))
  local text = file:read "*a"
  file:close()
  return text
end

local function run(command, environment)
  local pipe = assert(io.popen(("cd '%s' && env ORRERY_GPU_CONTROL='%s' GPU_BENCH_SMALL=1 %s %s 2>&1; "
    .. "echo status $?"):format(root, control, environment or "", command)))
  local text = pipe:read "*a"
  pipe:close()
  return text:match "^(.*)status %d+\n$", tonumber(text:match "status (%d+)\n$")
end

local function new_folder()
  local folder = os.tmpname()
  os.remove(folder)
  return folder
end

describe("the GPU bench", function()
  it("runs every row in small form, and calls no goal met or missed", function()
    assert(io.open(control), control .. " is not there: make fake builds it"):close()
    local folder = new_folder()
    local text, status = run(lua .. " bench/gpu.lua --small --no-peer --out " .. folder)
    assert.equal(0, status, text)
    local stored = cjson.decode(read(folder .. "/gpu.json"))
    os.execute("rm -rf " .. folder)
    assert.is_true(stored.small)
    assert.equal("Fake GPU", stored.model)
    assert.is_truthy(stored.machine.date)
    local by_word = {}
    for _, line in ipairs(stored.lines) do
      assert.is_nil(line.met, line.case)
      by_word[line.word] = by_word[line.word] or line
    end
    for _, row in ipairs((measured(true))) do
      local line = by_word[row.case]
      assert.is_truthy(line, row.name)
      assert.is_nil(line.skipped, line.skipped)
      assert.is_true(line.orrery_seconds > 0, row.name)
      if row.bytes then assert.is_true(line.copy_bytes_a_second > 0, row.name) end
    end
    assert.is_truthy(text:find("no peer here: not asked for", 1, true))
  end)

  it("fails where Orrery's own side does", function()
    local text, status = run(lua .. " bench/gpu.lua --small --no-peer --only product",
      "ORRERY_FAKE_FAIL=cublasLtMatmul")
    assert.equal(1, status, text)
    assert.matches("| product of 32, f32 +| does not run | [^|]*CUBLAS_STATUS_EXECUTION_FAILED", text)
  end)

  it("compares with a copy, a peer, another side and a bound", function()
    local row = { name = "row", group = "bytes", case = "row", bytes = 1e9, copy = 0.85, most = 2 }
    local result = { used = 2, seconds = { { 1, 1 }, { 4, 2 }, { 0.8, 0.8 }, { 0.5, 0.5 } } }
    local list = { { role = "own", at = 1 }, { role = "copy", at = 2 },
      { role = "peer", at = 3, what = { "row", "PyTorch", 1 } },
      { role = "other", at = 4, what = { {}, "a launch", 1.2 } },
      { role = "peer", failed = "no", what = { "row", "compile", 1 } } }
    local found = {}
    for k, line in ipairs(lines.of_row(row, list, result, {}, { copy = 1e9 })) do
      found[k] = { line.ratio, line.met }
    end
    -- the copy makes 0.5 and 1 GB/s, both ways counted; the row 1 GB/s
    local want = { { "1.50", "pass" }, { "", "pass" }, { "0.80", "miss" }, { "2.00", "miss" }, { "", "" } }
    assert.same(want, found)
  end)
end)

describe("the steps of gpu-kit/run", function()
  local folder
  before_each(function()
    folder = new_folder()
    os.execute("mkdir -p " .. folder)
  end)
  after_each(function() os.execute("rm -rf " .. folder) end)

  -- Runs steps with a program in the place of compute-sanitizer; records by step, status.
  local function steps(words, script)
    local file = assert(io.open(folder .. "/compute-sanitizer", "w"))
    file:write("#!/bin/sh\n", script or "exit 1", "\n")
    file:close()
    os.execute("chmod +x " .. folder .. "/compute-sanitizer")
    local text, status = run(("%s tools/gpu_run.lua . %s/ %s"):format(lua, folder, words),
      ("BUILD='%s' PATH='%s':\"$PATH\""):format(build, folder))
    local by_name = {}
    for _, record in ipairs(cjson.decode(read(folder .. "/results.json")).records) do
      by_name[record.step] = record
    end
    return by_name, status, text
  end

  it("keep a record each, and the newest of a step", function()
    local records, status, text = steps "machine host"
    assert.equal(0, status, text)
    assert.equal("passed", records.host.status)
    assert.is_true(#records.host.bench.lines > 3)
    assert.is_truthy(records.machine.machine.date)
    records, status = steps("memcheck", "echo '= Error: Device not supported'; exit 1")
    assert.equal(0, status)
    assert.equal("passed", records.host.status)
    assert.same({ "skipped", "compute-sanitizer: Device not supported" },
      { records.memcheck.status, records.memcheck.reason })
    records, status = steps("memcheck racecheck", 'shift 4; "$@" && echo "ERROR SUMMARY: 0 errors"')
    assert.equal(1, status)
    assert.equal("passed", records.memcheck.status, records.memcheck.reason)
    assert.same({ "failed", "no line says: RACECHECK SUMMARY: 0 hazards" },
      { records.racecheck.status, records.racecheck.reason })
  end)

  it("that crash or run out of time are failed, and the next one runs", function()
    local records, status = steps("memcheck machine", "kill -SEGV $$")
    assert.equal(1, status)
    assert.equal("crashed: signal 11", records.memcheck.reason)
    assert.equal("passed", records.machine.status)
    records = steps("memcheck", "exit 124")
    assert.equal("ran out of time: 400 s", records.memcheck.reason)
  end)

  it("merge results of several runs", function()
    steps "machine"
    os.execute(("mv %s/results.json %s/first.json"):format(folder, folder))
    steps "memcheck"
    local text = run(("%s tools/gpu_run.lua . merge %s/all %s/first.json %s/results.json"):format(lua, folder,
      folder, folder))
    assert.matches("passed +machine", text)
    assert.matches("failed +memcheck", text)
  end)

  it("are listed, and an unknown one is an error", function()
    local text = run(lua .. " tools/gpu_run.lua . list")
    assert.matches("\nops +specs +%d+ s", text)
    local _, status = run(lua .. " tools/gpu_run.lua . nope")
    assert.equal(2, status)
  end)
end)
