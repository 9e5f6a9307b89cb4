-- Recomputation: a layer keeps its inputs alone and runs its forward again when backward comes (Chen
-- et al. 2016, "Training deep nets with sublinear memory cost").
-- Invariant: the second pass draws the same random numbers and moves no running statistics; a layer
-- that changes its own fields is refused.
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
  core.set_stage(module._stage.mesh)
  core.set_autocast(position.autocast)
  local ok, y = pcall(core.enable_grad, run, module, unpack(given, 1, n))
  core.set_autocast(nil)
  core.set_stage(nil)
  core.hold_statistics(false)
  core.random_micro()
  core.random_position(d, u)
  if not ok then error(y, 0) end
  return y, inputs
end

-- The fields of a module and of all below it.
local function fields_of(module)
  local list = {}
  for _, m in ipairs(module:modules()) do
    list[m] = {}
    for key, value in pairs(m) do list[m][key] = value end
  end
  return list
end

-- Raises where a pass changed a field of the module: the second pass would change it again.
local function check_fields(module, before)
  for m, fields in pairs(before) do
    for key, value in pairs(m) do
      if not rawequal(fields[key], value) then
        check.raise("recompute: layer '%s' changes its field '%s' when it runs, and would run twice; name "
          .. "the layers to run again without it, as in recompute=block*", module._name or module._class,
          tostring(key))
      end
    end
  end
end

local function pack(...) return { n = select("#", ...), ... } end

-- Raises where f's result needs a gradient though no parameter of the module asks for one.
local function check_own(module, f)
  local asking = {}
  for _, p in ipairs(module:parameters()) do
    if p.requires_grad then
      asking[#asking + 1] = p
      p.requires_grad = false
    end
  end
  local results = pack(pcall(core.enable_grad, f))
  for _, p in ipairs(asking) do p.requires_grad = true end
  if not results[1] then error(results[2], 0) end
  local y = results[2]
  if core.is_tensor(y) and y.requires_grad then
    check.raise("recompute: layer '%s' uses a tensor that is neither its argument nor its parameter, whose "
      .. "gradient would be lost; give it as an argument, or leave the layer out of recompute=",
      module._name or module._class)
  end
  return results.n - 1, y
end

-- The first pass of all is watched: for several results, fields that change, tensors of others.
local function watched_pass(module, run, given, n)
  local before, name = fields_of(module), module._name or module._class
  local count, y = check_own(module, function() return run(module, unpack(given, 1, n)) end)
  if count ~= 1 or not core.is_tensor(y) then
    check.raise("recompute: layer '%s' gives %s; only layers that give one tensor can run again", name,
      count == 1 and "a " .. type(y) or count .. " values")
  end
  check_fields(module, before)
  rawset(module, "_recompute", "watched")
  return y:detach()
end

-- The first pass, which keeps nothing but its arguments.
local function first_pass(module, run, args, n)
  if module._recompute == "watched" then return core.no_grad(run, module, unpack(args, 1, n)) end
  local given = {}
  for k = 1, n do
    given[k] = args[k]
    if core.is_tensor(args[k]) then given[k] = args[k]:detach()
    elseif type(args[k]) == "table" then
      check.raise("recompute: argument %d of layer '%s' is a table; only tensors among the arguments get "
        .. "gradients", k, module._name or module._class)
    end
  end
  return watched_pass(module, run, given, n)
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
  position.micro, position.autocast = { core.random_micro_now() }, core.autocast()
  local y = first_pass(module, run, args, n)
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
