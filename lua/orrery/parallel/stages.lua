-- Stages: which layer runs on which stage of a plan, and the seam where a module call crosses stages.
-- Invariant: layers are the root's children after nested Sequentials are flattened; stages are
-- contiguous runs of them. Inside a step each micro-batch is a coroutine that yields where a call
-- enters another stage.
-- To add a way to assign layers: a case in `assign`.
local core = require "orrery.core"
local check = require "orrery.check"

local stages = {}

-- The micro-batch whose forward runs now; nil outside of plan:step.
local running = nil

--- Flattened children with their dotted names: {{name=, module=}, ...}.
---@param net orrery.Module
function stages.layers(net)
  local layers = {}
  local function flatten(module, prefix)
    for name, child in module:named_children() do
      if child._class == "Sequential" then flatten(child, prefix .. name .. ".")
      else layers[#layers + 1] = { name = prefix .. name, module = child } end
    end
  end
  flatten(net, "")
  return layers
end

local function by_counts(plan_stages, layers)
  local total, at, result = 0, 1, {}
  for _, stage in ipairs(plan_stages) do total = total + (stage.count or 0) end
  if total ~= #layers then
    check.raise("plan: the counts sum to %d and the net has %d layers; a layer is a child of the net "
      .. "after nested Sequentials are flattened, activations included", total, #layers)
  end
  for s, stage in ipairs(plan_stages) do
    for _ = 1, stage.count do
      result[at] = s
      at = at + 1
    end
  end
  return result
end

-- "conv*" as a Lua pattern.
local function glob(text)
  return "^" .. text:gsub("[%^%$%(%)%%%.%[%]%+%-%?]", "%%%0"):gsub("%*", ".*") .. "$"
end

local function by_patterns(plan_stages, layers)
  local result, used = {}, {}
  for k, layer in ipairs(layers) do
    for s, stage in ipairs(plan_stages) do
      if not result[k] and layer.name:find(glob(stage.pattern)) then result[k] = s end
    end
    if not result[k] then
      check.raise("plan: no stage takes layer '%s'; give a pattern that does", layer.name)
    end
    if k > 1 and result[k] < result[k - 1] then
      check.raise("plan: layer '%s' comes after '%s' and would go back from stage %d to %d",
        layer.name, layers[k - 1].name, result[k - 1], result[k])
    end
    used[result[k]] = true
  end
  for s, stage in ipairs(plan_stages) do
    if not used[s] then check.raise("plan: '%s' names no layer", stage.pattern) end
  end
  return result
end

--- Raises where the options of the plan's model node say what cannot be meant.
function stages.check(plan)
  local model, plan_stages = plan:options "model", plan:stages()
  if model.schedule and plan:micro() == 1 then
    check.raise("plan: schedule=%s orders micro-batches and micro=1 leaves one; give micro=%d or leave the "
      .. "schedule out", model.schedule, 4 * #plan_stages)
  end
  if model.schedule == "interleaved" and (model.chunks or 1) > 1
    and (plan_stages[1].count or plan_stages[1].pattern) then
    check.raise("plan: chunks=%d cuts the net into %d stages, which counts and patterns of %d cannot name; "
      .. "leave them out, and the stages are balanced", model.chunks, #plan_stages * model.chunks,
      #plan_stages)
  end
end

--- Whether the plan needs an example batch to assign layers.
function stages.needs_shapes(plan)
  local plan_stages, model = plan:stages(), plan:options "model"
  local chunks = model.schedule == "interleaved" and model.chunks or 1
  return #plan_stages * chunks > 1 and not plan_stages[1].count and not plan_stages[1].pattern
end

--- The stage of each layer, by counts, by names, or balanced by cost.
---@return integer[]
function stages.assign(plan, net, layers, x, n)
  local plan_stages = plan:stages()
  if n == 1 then
    local result = {}
    for k in ipairs(layers) do result[k] = 1 end
    return result
  end
  if #layers < n then
    check.raise("plan: %d stages for a net of %d layers; use at most %d stages", n, #layers,
      #layers)
  end
  if plan_stages[1].count then return by_counts(plan_stages, layers) end
  if plan_stages[1].pattern then return by_patterns(plan_stages, layers) end
  return require("orrery.parallel.balance").assign(plan, net, layers, x, n)
end

-- The arguments of a layer on the stage's devices: what it computes without parameters too runs there.
local function bring(mesh, first, ...)
  if core.is_tensor(first) then first = core.to_stage(first, mesh) end
  if select("#", ...) == 0 then return first end
  return first, bring(mesh, ...)
end

--- Called where a placed layer is called, with its arguments, which it gives back on the stage: the
--- ops that follow run there.
function stages.enter(stage, ...)
  if running and running.stage ~= stage.index then
    running.stage = stage.index
    coroutine.yield(stage.index)
  end
  core.set_stage(stage.mesh)
  core.mark(stage.index, running and running.micro)
  return bring(stage.mesh, ...)
end

--- A forward pass in pieces: run:resume() goes on until the pass enters another stage. run.stage is
--- where it stands; run.done and run.result when it is over.
---@param f fun(): any
function stages.forward(f)
  local run = { stage = 1 }
  local autocast = core.autocast() -- the pass's own: it may be inside of amp.autocast where it yields
  local thread = coroutine.create(function() run.result = f() end)
  function run.resume(self)
    local outer = running
    running = self
    core.mark(self.stage, self.micro)
    core.set_resumer(true)
    local callers = core.set_autocast(autocast)
    local ok, message = coroutine.resume(thread)
    autocast = core.set_autocast(callers)
    core.set_resumer(false)
    running = outer
    core.set_stage(nil)
    if not ok then error(message, 0) end
    self.done = coroutine.status(thread) == "dead"
  end
  return run
end

return stages
