-- Single ops against the values and gradients that PyTorch computed for spec/fixtures/ops.lua: on the
-- host, and (f64) with their inputs over two devices.
-- To add a case: spec/fixtures/ops.py.
local orrery = require "orrery"
local core = require "orrery.core"
local array = require "spec.support.array"
local placed = require "spec.support.placed"
local matrix = require "spec.support.matrix"

local unpack = table.unpack or unpack
local compile = loadstring or load
local here = debug.getinfo(1, "S").source:match "^@?(.*)op_fixtures_spec%.lua$"
local cases = dofile(here .. "fixtures/ops.lua")
local tolerances = { f64 = 1e-9, f32 = 2e-5 }

local function stored_array(stored) return array.new(stored.shape, stored.data, stored.dtype) end

local function build(text)
  return assert(compile("local orrery, core = ...; return " .. text))(orrery, core)
end

local function compare(what, stored, tensor, tolerance)
  assert.is_truthy(tensor, what .. " is missing")
  local difference = matrix.difference(placed.array(tensor), stored_array(stored), tolerance)
  if difference then error(what .. ": " .. difference, 0) end
end

local function is_float(tensor) return tensor:dtype():find("f", 1, true) ~= nil end

-- place(array) gives the tensor of an input.
local function check(case, place)
  local inputs, loss = {}, nil
  local tolerance = tolerances[case.inputs[1].dtype]
  for i, stored in ipairs(case.inputs) do
    inputs[i] = place(stored_array(stored))
    if is_float(inputs[i]) then inputs[i]:requires_grad_() end
  end
  local outputs = { build(case.make)(unpack(inputs)) }
  for i, stored in ipairs(case.outputs) do
    local whole = stored.dtype == "i64" or stored.dtype == "bool"
    compare("output " .. i, stored, outputs[i], whole and 0 or tolerance)
    if not is_float(outputs[i]) then assert.equal(stored.dtype, outputs[i]:dtype(), "output " .. i) end
  end
  local at = 0
  for _, y in ipairs(outputs) do
    if y.requires_grad then
      at = at + 1
      local part = core.mul(y, placed.host(stored_array(case.seeds[at]))):sum()
      loss = loss and loss + part or part
    end
  end
  assert.equal(#case.seeds, at, "outputs that require grad")
  if loss then loss:backward() end
  for i, stored in ipairs(case.input_grads) do
    if stored then compare("gradient of input " .. i, stored, inputs[i].grad, tolerance) end
  end
end

describe("as PyTorch:", function()
  for i, case in ipairs(cases) do
    it(("%d %s"):format(i, case.make), function()
      check(case, placed.host)
      local finite = true
      for _, stored in ipairs(case.inputs) do
        for _, v in ipairs(stored.data) do finite = finite and v - v == 0 end
      end
      if case.inputs[1].dtype ~= "f64" or not finite then return end
      local rand = array.random(i)
      for _ = 1, 2 do
        local m = rand.pick(placed.meshes)
        check(case, function(a)
          return placed.place(a, m, rand.pick(placed.choices(placed.words(a, a.dtype == "f64"), m)))
        end)
      end
    end)
  end
end)
