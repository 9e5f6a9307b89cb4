-- The op matrix: every op of the core's table, through every check of spec/support/matrix.lua.
-- Invariant: an op without a row fails. ORRERY_OPS="add sum" runs these rows alone.
-- To add a check: a function of the matrix, and its line below.
local orrery = require "orrery"
local core = require "orrery.core"
local rows = require "spec.ops"
local matrix = require "spec.support.matrix"

-- A sanitizer makes every call tens of times as slow: fewer placements then.
local few = os.getenv "ORRERY_SANITIZER" and { rest = 4 }
local checks = {
  { "values", matrix.check_values },
  { "gradients", matrix.check_gradients },
  { "second derivatives", matrix.check_second },
  { "dtypes", matrix.check_dtypes },
  { "strides", matrix.check_strides },
  { "placements", matrix.check_placements, few or { ["2"] = 400, rest = 100 } },
  { "in place", matrix.check_in_place, few or { ["2"] = 150, rest = 40 } },
}

local chosen
for name in (os.getenv "ORRERY_OPS" or ""):gmatch "%S+" do
  chosen = chosen or {}
  chosen[name] = true
end

describe("the op matrix", function()
  it("has a row for every op", function()
    local seen, missing = {}, {}
    for _, row in ipairs(rows) do
      assert.is_nil(seen[row.name], "two rows for " .. row.name)
      seen[row.name] = true
    end
    for _, op in ipairs(core.op_table()) do
      if not seen[op.name] then missing[#missing + 1] = op.name end
    end
    assert.same({}, missing)
  end)

  it("knows no op that is not there", function()
    local known = {}
    for _, op in ipairs(core.op_table()) do known[op.name] = true end
    for _, row in ipairs(rows) do assert.is_truthy(known[row.name], row.name .. " is not an op") end
  end)

  for _, row in ipairs(rows) do
    if not chosen or chosen[row.name] then
      for _, check in ipairs(checks) do
        it(row.name .. ": " .. check[1], function() matrix.report(check[2](row, check[3])) end)
      end
    end
  end

  -- Queued work in adversarial order gives the same numbers.
  for _, seed in ipairs(chosen and {} or few and { 1 } or { 1, 2, 3 }) do
    it("holds when the queues are shuffled, seed " .. seed, function()
      local command = ("ORRERY_ENGINE=shuffle:%d %s spec/support/run_matrix.lua %d 2>&1; echo $?")
        :format(seed, os.getenv "ORRERY_LUA" or "luajit", seed)
      local pipe = assert(io.popen(command))
      local text = pipe:read "*a"
      pipe:close()
      assert.equal("0", text:match "(%d+)%s*$", text)
    end)
  end

  it("leaves nothing queued", function() orrery.synchronize() end)
end)
