-- Applying a plan to a module: every parameter and buffer to its stage and layout, in place.
-- Invariant: a parameter keeps its identity; nothing is placed unless everything can be. Where a
-- tensor goes is decided before, from the plan and shapes alone.
-- To add a reason for a layout: `words_of`.
local core = require "orrery.core"
local check = require "orrery.check"
local moved = require "orrery.moved"
local Plan = require "orrery.parallel.plan"
local recompute = require "orrery.parallel.recompute"
local resolved = require "orrery.parallel.resolved"
local split = require "orrery.parallel.split"
local stages = require "orrery.parallel.stages"
local zero = require "orrery.parallel.zero"

local unpack = table.unpack or unpack

-- Every tensor of the module once, parameters first.
local function tensors_of(net)
  local list, seen = {}, {}
  local function add(t)
    if not seen[t] then
      seen[t] = true
      list[#list + 1] = t
    end
  end
  for _, t in ipairs(net:parameters()) do add(t) end
  for _, t in net:named_buffers() do add(t) end
  return list
end

-- A word an axis of `stage` for a tensor that the tensor axis splits by `word` (nil: not at all).
local function words_of(stage, word)
  local words = {}
  for k, axis in ipairs(stage.axes) do
    words[k] = axis.name == "tensor" and word or "replicate"
  end
  return words
end

-- Copies of every tensor and gradient where they will be, before anything is changed. The first
-- `n_params` tensors are parameters, and may be sharded over the data axis (level: zero=).
local function copies(tensors, n_params, stage_of, splits, level)
  local made = {}
  for k, t in ipairs(tensors) do
    local stage, grad = stage_of[t], t.grad
    local words, use, state = zero.forms(k <= n_params and level, stage, t, words_of(stage, splits[t]))
    made[k] = {
      tensor = core.distribute(t:detach(), stage.mesh, unpack(words)):clone(),
      grad = grad and core.distribute(grad:detach(), stage.mesh, unpack(state or words)):clone(),
      use = use, state = state,
    }
  end
  return made
end

local function set_batch_norm(net, sync)
  for _, m in ipairs(net:modules()) do
    if m.sync ~= nil then m.sync = sync end
  end
end

local function place_tensors(plan, net, stage_of, splits)
  local tensors = tensors_of(net)
  local data = plan:options "data"
  local made = core.no_grad(copies, tensors, #net:parameters(), stage_of, splits, data.zero)
  local reducer = core.reducer(data.bucket or zero.bucket(data.zero))
  for k, t in ipairs(tensors) do
    t.grad = nil
    core.replace_(t, made[k].tensor)
    t.grad = made[k].grad
    core.set_reducer(t, reducer)
    core.set_sharding(t, made[k].use, made[k].state)
  end
  if data.sync_bn == false then set_batch_norm(net, false) end
  moved.note()
end

-- The stage of every tensor: that of the first layer that holds it; the net's own are on the first.
local function stages_of_tensors(net, layers, assigned, list)
  local stage_of = {}
  for k, layer in ipairs(layers) do
    for _, t in ipairs(tensors_of(layer.module)) do
      stage_of[t] = stage_of[t] or list[assigned[k]]
    end
  end
  for _, t in ipairs(tensors_of(net)) do stage_of[t] = stage_of[t] or list[1] end
  return stage_of
end

-- Virtual stages: with chunks, stage s runs on the devices of stage (s - 1) % n + 1.
local function virtual_stages(plan)
  local list, chunks = {}, plan:options("model").chunks or 1
  if plan:options("model").schedule ~= "interleaved" then chunks = 1 end
  local real = plan:stages()
  for s = 1, #real * chunks do
    local stage = real[(s - 1) % #real + 1]
    list[s] = { index = s, mesh = stage.mesh, axes = stage.axes, devices = stage.devices }
  end
  return list
end

-- The plan as text with the balance that was found, as a plan of its own.
local function resolve(plan, assigned, n)
  local counts = {}
  for s = 1, n do counts[s] = 0 end
  for _, s in ipairs(assigned) do counts[s] = counts[s] + 1 end
  local text = resolved.text(tostring(plan), counts)
  return text ~= tostring(plan) and Plan.parse(text) or plan
end

-- args: of a call, where a pass must see shapes.
local function complete(plan, net, args)
  local list, layers = virtual_stages(plan), stages.layers(net)
  local assigned = stages.assign(plan, net, layers, args[1], #list)
  local splits = split.words(plan, net, args)
  place_tensors(plan, net, stages_of_tensors(net, layers, assigned, list), splits)
  net._stages = list
  for k, layer in ipairs(layers) do
    local again = recompute.wanted(plan, layer.name)
    layer.module._stage = (#list > 1 or again) and list[assigned[k]]
    layer.module._recompute = again
  end
  net._resolved = resolve(plan, assigned, #list)
end

--- See Plan:__call.
return function(plan, net, x)
  if type(net) ~= "table" or type(net.parameters) ~= "function" then
    check.raise("a plan is applied to a module, not to a %s; place a tensor with plan:place(x)",
      type(net))
  end
  plan:stages()
  stages.check(plan)
  if x == nil and (stages.needs_shapes(plan) or split.wanted(plan)) then
    net._pending = function(...)
      complete(plan, net, { ... })
      net._pending = nil
    end
  else
    complete(plan, net, { x })
  end
  net._plan = plan
  return net
end
