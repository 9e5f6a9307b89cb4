-- Layers, losses and optimisers against the values that PyTorch computed for spec/fixtures/modules.lua:
-- on the host, and on 1, 2, 3 and 5 devices with every split of the inputs.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local nn, optim = orrery.nn, orrery.optim

local unpack = table.unpack or unpack
local compile = loadstring or load
local here = debug.getinfo(1, "S").source:match("^@?(.*)nn_fixtures_spec%.lua$")
local cases = dofile(here .. "fixtures/modules.lua")
local tolerance = 1e-9

local function read(stored, grad)
  local tensor = orrery.tensor(stored.data, { dtype = stored.dtype })
  tensor = #stored.shape == 0 and tensor:sum() or tensor:reshape(unpack(stored.shape))
  if grad and stored.dtype == "f64" then
    tensor = tensor:detach():clone()
    tensor.requires_grad = true
  end
  return tensor
end

local function flat(value, list)
  list = list or {}
  if type(value) == "table" then
    for i = 1, #value do flat(value[i], list) end
  else
    list[#list + 1] = value
  end
  return list
end

local function compare(what, stored, tensor)
  assert.is_truthy(tensor, what .. " is missing")
  assert.same(stored.shape, tensor:size(), what)
  local actual = flat(tensor:detach():totable())
  for i, expected in ipairs(stored.data) do
    local difference = math.abs(expected - actual[i])
    if difference > tolerance * math.max(1, math.abs(expected)) or difference ~= difference then
      error(("%s, element %d: expected %.12g, got %.12g"):format(what, i, expected, actual[i]), 2)
    end
  end
end

local function build(text)
  return assert(compile("local nn, optim, p = ...; return " .. text))
end

-- sum(outputs * seeds), whose gradients are stored.
local function backward(outputs, case)
  local total
  for i, seed in ipairs(case.seeds) do
    local part = (outputs[i] * read(seed)):sum()
    total = total and total + part or part
  end
  if total.requires_grad then total:backward() end
end

local function check_inputs(inputs, case)
  for i, stored in ipairs(case.input_grads) do
    if stored then compare("gradient of input " .. i, stored, inputs[i].grad) end
  end
end

-- Where a case runs: on the host, or on a mesh of n devices with the inputs split along dimension d.
local function place(where, tensor, grad)
  if not where then return tensor end
  local d = where.dim
  local word = d >= 1 and d <= tensor:dim() and "shard(" .. d .. ")" or "replicate"
  tensor = core.distribute(tensor:detach(), where.mesh, word)
  if grad then tensor.requires_grad = true end
  return tensor
end

local kinds = {}

function kinds.module(case, where)
  local layer = build(case.make)(nn, optim):to("f64")
  local state, inputs = {}, {}
  for name, stored in pairs(case.state) do state[name] = read(stored) end
  layer:load_state(state)
  if where then where.plan(layer) end
  if case.evaluation then layer:eval() end
  for i, stored in ipairs(case.inputs) do
    inputs[i] = place(where, read(stored, true), stored.dtype == "f64")
  end
  local outputs = { layer(unpack(inputs)) }
  for i, stored in ipairs(case.outputs) do compare("output " .. i, stored, outputs[i]) end
  backward(outputs, case)
  check_inputs(inputs, case)
  for name, p in layer:named_parameters() do compare("gradient of " .. name, case.grads[name], p.grad) end
  for name, buffer in layer:named_buffers() do compare(name, case.buffers[name], buffer) end
end

function kinds.loss(case, where)
  local fn = build(case.make)(nn, optim)
  local inputs = { place(where, read(case.inputs[1], true), true), place(where, read(case.inputs[2])) }
  local outputs = { fn(inputs[1], inputs[2]) }
  compare("loss", case.outputs[1], outputs[1])
  backward(outputs, case)
  check_inputs(inputs, case)
end

function kinds.optimiser(case, where)
  local p = place(where, read(case.start, true), true)
  local opt = build(case.make)(nn, optim, { p })
  for step, gradient in ipairs(case.gradients) do
    p.grad = place(where, read(gradient))
    opt:step()
    compare("parameter after step " .. step, case.values[step], p)
  end
end

describe("as PyTorch:", function()
  for i, case in ipairs(cases) do
    it(("%d %s"):format(i, case.make), function() kinds[case.kind](case) end)
  end
end)

-- Every split of every case; dimension 0 stands for replicated inputs.
for _, n in ipairs { 1, 2, 3, 5 } do
  describe(("as PyTorch, on %d devices:"):format(n), function()
    for i, case in ipairs(cases) do
      it(("%d %s"):format(i, case.make), function()
        local rank = #(case.inputs and case.inputs[1] or case.start).shape
        for d = 0, rank do
          local where = { plan = behave.plan(n), mesh = behave.mesh(n), dim = d }
          local ok, message = pcall(kinds[case.kind], case, where)
          if not ok then error(("split along dimension %d: %s"):format(d, tostring(message)), 0) end
        end
      end)
    end
  end)
end
