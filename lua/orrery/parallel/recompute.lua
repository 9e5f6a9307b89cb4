-- Recomputation: a layer keeps its inputs alone and runs its forward again when backward comes (Chen
-- et al. 2016, "Training deep nets with sublinear memory cost").
-- Invariant: the second pass draws the same random numbers and moves no running statistics.
-- To add a way to choose layers: `wanted`.
local core = require "orrery.core"
local check = require "orrery.check"

local unpack = table.unpack or unpack

-- Forward again with recording on, from detached inputs; gives outputs and the new inputs.
local function again(run, module, args, n, position)
  local inputs, given = {}, {}
  for k = 1, n do
    given[k] = args[k]
    if core.is_tensor(args[k]) then
      given[k] = args[k]:detach()
      if args[k].requires_grad then
        given[k].requires_grad = true
        inputs[#inputs + 1] = given[k]
      end
    end
  end
  local d, u = core.random_position()
  core.random_position(position[1], position[2])
  core.random_micro(unpack(position.micro))
  core.hold_statistics(true)
  local ok, y = pcall(core.enable_grad, run, module, unpack(given, 1, n))
  core.hold_statistics(false)
  core.random_micro()
  core.random_position(d, u)
  if not ok then error(y, 0) end
  return y, inputs
end

local recompute = {}

--- Whether the plan's option recompute=true|"stage"|pattern names this layer.
---@return boolean
function recompute.wanted(plan, name)
  local option = plan:options("model").recompute
  if option == nil or option == false then return false end
  if option == true or option == "true" or option == "stage" then return true end
  return name:find("^" .. option:gsub("%*", ".*") .. "$") ~= nil
end

--- run(module, ...) keeping nothing but the arguments for backward.
local function call(_, module, run, ...)
  if not core.grad_mode() then return run(module, ...) end
  local args, n = { ... }, select("#", ...)
  local position = { core.random_position() }
  position.micro = { core.random_micro_now() }
  local y = core.no_grad(run, module, ...)
  if not core.is_tensor(y) then
    check.raise("recompute: layer '%s' gives a %s; only layers that give one tensor can be recomputed",
      module._name or module._class, type(y))
  end
  for k = 1, n do
    if rawequal(y, args[k]) then y = core.no_grad(core.clone, y) end
  end
  local params, wanted = {}, {}
  for k = 1, n do
    if core.is_tensor(args[k]) and args[k].requires_grad then wanted[#wanted + 1] = args[k] end
  end
  local n_inputs = #wanted
  for _, p in ipairs(module:parameters()) do
    if p.requires_grad then
      params[#params + 1] = p
      wanted[#wanted + 1] = p
    end
  end
  core.record(wanted, { y }, function(g)
    local out, inputs = again(run, module, args, n, position)
    for k, p in ipairs(params) do inputs[n_inputs + k] = p end
    local grads = core.grad(out, inputs, { grad = g })
    for k = 1, #wanted do grads[k] = grads[k] or nil end
    return unpack(grads, 1, #wanted)
  end)
  return y
end

return setmetatable(recompute, { __call = call })
