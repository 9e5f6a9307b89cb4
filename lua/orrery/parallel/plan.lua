-- The plan object: text that the C parser has read, resolved to stages and meshes.
-- Invariant: a plan is immutable but for its meshes, which are made when it is first applied; what it
-- asks for is refused, with the reason, before anything is placed.
-- To add what a plan can do: a method here, its work in a file beside this one.
local core = require "orrery.core"
local check = require "orrery.check"
local batch = require "orrery.parallel.place"

---@class orrery.Plan
local Plan = {}
Plan.__index = Plan

-- The C side's message at the user's line.
local function guard(ok, value, ...)
  if not ok then check.raise("%s", tostring(value)) end
  return value, ...
end

local function visible()
  local env, set = core.visible(), os.getenv "ORRERY_CPU_DEVICES"
  env.cpu_why = set and "ORRERY_CPU_DEVICES=" .. set
    or "ORRERY_CPU_DEVICES is not set: a device a core, at least 2"
  return env
end

local function wrap(ast)
  return setmetatable({ _ast = ast, _stages = guard(pcall(ast.resolve, ast, visible())) }, Plan)
end

--- A plan from its text; `kind` is the root where the text begins at "<".
---@param text string
---@param kind? string
---@return orrery.Plan
function Plan.parse(text, kind) return wrap(guard(pcall(core.plan.parse, text, kind))) end

--- A plan from its parts: devices and plans, then options.
---@param kind string "data", "model" or "tensor"
---@return orrery.Plan
function Plan.make(kind, ...)
  local children, options = { ... }, nil
  local last = children[#children]
  if type(last) == "table" and getmetatable(last) ~= Plan then
    options = last
    children[#children] = nil
  end
  for k, child in ipairs(children) do
    if getmetatable(child) == Plan then children[k] = child._ast end
  end
  return wrap(guard(pcall(core.plan.make, kind, children, options)))
end

--- The plan's text; it can be pasted. Once applied to a net, the resolved text.
function Plan:__tostring() return self._ast:text() end

--- Names of its devices, "cpu:0", in its order.
---@return string[]
function Plan:devices()
  local name, list = {}, {}
  for s, stage in ipairs(self._ast:stages()) do
    for k, text in ipairs(stage.devices) do name[text] = self._stages[s].devices[k] end
  end
  for k, text in ipairs(self._ast:devices()) do list[k] = name[text] end
  return list
end

--- The sizes of its axes by name, such as {data = 2}; of the first stage where there are several.
---@return table<string, integer>
function Plan:shape()
  local shape = {}
  for _, axis in ipairs(self._stages[1].axes) do shape[axis.name] = axis.size end
  if #self._stages > 1 then shape.model = #self._stages end
  return shape
end

--- Options of a kind of node, an empty table where none are set.
---@param kind string
---@return table<string, any>
function Plan:options(kind) return self._ast:options()[kind] or {} end

--- Micro-batches a step, nil where the plan does not say.
---@return integer?
function Plan:micro() return self._ast:options().micro end

--- The stages in order: their mesh, axes, devices, and the count or pattern of layers where given.
---@return {mesh: userdata, axes: {name: string, size: integer}[], devices: string[]}[]
function Plan:stages()
  if self._stages[1].mesh then return self._stages end
  local meshes = {}
  for s, stage in ipairs(self._stages) do
    local names, sizes, sequence = {}, {}, {}
    for k, axis in ipairs(stage.axes) do
      names[k], sizes[k], sequence[k] = axis.name, axis.size, axis.options.sequence or false
    end
    stage.mesh = core.mesh(names, sizes, stage.devices, sequence)
    meshes[s] = stage.mesh
  end
  if #meshes > 1 then core.stages(meshes) end
  return self._stages
end

--- Places the module's parameters and buffers in place and gives the module back. An optimizer made
--- before still updates them; from now on net(x) splits the batch. Where the plan must see shapes
--- (the balance of stages, splits inside layers) and x is missing, the first call completes it.
---@param net orrery.Module
---@param x? any an example batch
---@return orrery.Module
function Plan:__call(net, x) return require("orrery.parallel.apply")(self, net, x) end

--- A batch tensor, or a (nested) table of them, split along dimension 1 as the plan says: parts
--- differ by at most one sample, the first ones larger. Does not wait.
---@param x any
---@return any
function Plan:place(x) return batch.place(self:stages()[1], x) end

-- Arguments of a call of the placed module; the module calls this.
function Plan:place_args(net, ...)
  if net._pending then net._pending(...) end
  return batch.place_args(self._stages[1], ...)
end

--- One training step's forward and backward in the plan's schedule: the loss of criterion(net(x), y),
--- gradients in the parameters. Follow with optimizer:step(). The criterion gives a mean over its
--- samples, or a sum and the count that divides it.
---@param net orrery.Module placed by this plan
---@param criterion fun(output: any, y: any): orrery.Tensor, number|orrery.Tensor|nil
---@return orrery.Tensor loss
function Plan:step(net, criterion, x, y)
  return require("orrery.parallel.step")(self, net, criterion, x, y)
end

return Plan
