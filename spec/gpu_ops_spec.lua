-- Every op on a CUDA device against the CPU: each row of spec/ops.lua in f64, f32, tf32, f16 and bf16, and
-- sizes that fill a GPU (spec/support/large.lua), by relative norm. Prints the worst of each dtype.
-- Needs ORRERY_SPEC_DEVICES=cuda, a real GPU or fake ones. ORRERY_OPS="add sum" runs these rows alone.
-- To add an op: its row in spec/ops.lua; where its kernel cuts large work, also one in large.lua.
local rows = require "spec.ops"
local device = require "spec.support.device"
local against = require "spec.support.against_cpu"
local large = require "spec.support.large"

local chosen
for name in (os.getenv "ORRERY_OPS" or ""):gmatch "%S+" do
  chosen = chosen or {}
  chosen[name] = true
end

local worst = {} -- by dtype: {error=, where=}

local function note(dtype, found)
  if not worst[dtype] or found.error > worst[dtype].error then worst[dtype] = found end
end

local function check(name, f, row, dtype)
  it(("%s in %s"):format(name, dtype), function()
    local problems, found = f(row, dtype)
    note(dtype, found)
    assert(#problems == 0, table.concat(problems, "\n", 1, math.min(#problems, 10)))
  end)
end

describe("on a CUDA device against the CPU", function()
  if device.kind ~= "cuda" then return pending "needs ORRERY_SPEC_DEVICES=cuda" end
  for _, row in ipairs(rows) do
    for _, dtype in ipairs(against.order) do
      if (not chosen or chosen[row.name]) and against.takes(row, dtype) then
        check(row.name, against.check, row, dtype)
      end
    end
  end
  for _, row in ipairs(large.rows) do
    for _, dtype in ipairs(large.dtypes) do
      if not chosen or chosen[row.op] then
        check(row.op .. ", " .. row.name, large.check, row, dtype)
      end
    end
  end

  teardown(function()
    for _, dtype in ipairs(against.order) do
      local found = worst[dtype]
      if found then
        io.write(("worst in %-4s  %.2e of %g  %s\n"):format(dtype, found.error, against.tolerances[dtype],
          found.where))
      end
    end
  end)
end)
