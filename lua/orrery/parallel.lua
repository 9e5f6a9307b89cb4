-- Plans: the three coats of the plan language, placing modules and batches, tracing collectives.
-- Invariant: a plan is text that the C parser has read; applying it changes where parameters are and
-- never which tensors they are. Nothing is placed unless everything can be.
-- To add a node kind that runs: `runnable` in csrc/plan_resolve.c, and what it does in Plan:__call.
local core = require "orrery.core"
local check = require "orrery.check"
local moved = require "orrery.moved"

---@class orrery.Plan
local Plan = {}
Plan.__index = Plan

local Whole = {} -- marks what must not be split

-- The C side's message at the user's line.
local function guard(ok, value, ...)
  if not ok then check.raise("%s", tostring(value)) end
  return value, ...
end

-- ---- making plans ----

local function visible()
  local n = #core.devices()
  local set = os.getenv "ORRERY_CPU_DEVICES"
  return { cpu = n, cuda = 0, cpu_why = set and "ORRERY_CPU_DEVICES=" .. set
    or "ORRERY_CPU_DEVICES is not set: a device a core, at least 2" }
end

local function wrap(ast)
  return setmetatable({ _ast = ast, _stages = guard(pcall(ast.resolve, ast, visible())) }, Plan)
end

local function parse(text, kind) return wrap(guard(pcall(core.plan.parse, text, kind))) end

local function make(kind, ...)
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

-- parallel.data "<0,1>", parallel.data(0, 1, {bucket = ...}), and what says why parallel.data < 0 is
-- not a plan.
local function constructor(kind)
  local function refuse()
    check.raise("parallel.%s<...> is the literal form: run the script with `orrery`, or load it after "
      .. "require \"orrery.syntax\"; plain Lua has parallel.%s \"<0,1>\" and parallel.%s(0, 1)",
      kind, kind, kind)
  end
  return setmetatable({}, {
    __call = function(_, first, ...)
      if type(first) == "string" and first:find("<", 1, true) then return parse(first, kind) end
      return make(kind, first, ...)
    end,
    __lt = refuse,
    __le = refuse,
    __tostring = function() return "parallel." .. kind end,
  })
end

-- ---- what a plan says of itself ----

--- The plan's text; it can be pasted.
function Plan:__tostring() return self._ast:text() end

--- Names of its devices, in its order.
---@return string[]
function Plan:devices() return self._ast:devices() end

--- The sizes of its axes by name, such as {data = 2}; of the first stage where there are several.
---@return table<string, integer>
function Plan:shape()
  local shape = {}
  for _, axis in ipairs(self._stages[1].axes) do shape[axis.name] = axis.size end
  if #self._stages > 1 then shape.model = #self._stages end
  return shape
end

-- The mesh of its only stage; raises where the plan asks for what cannot run.
function Plan:_mesh_now()
  if self._mesh then return self._mesh end
  local ok, reason = self._ast:runnable()
  if not ok then check.raise("%s", reason) end
  local stage = self._stages[1]
  local names, sizes = {}, {}
  for k, axis in ipairs(stage.axes) do
    names[k], sizes[k] = axis.name, axis.size
  end
  self._mesh = core.mesh(names, sizes, stage.devices)
  return self._mesh
end

-- ---- placing modules ----

local function bucket_bytes(plan)
  local data = plan._ast:options().data
  return data and data.bucket or 25 * 2 ^ 20
end

-- Every tensor of the module once, parameters first.
local function tensors_of(net)
  local list, seen = {}, {}
  for _, t in ipairs(net:parameters()) do
    seen[t] = true
    list[#list + 1] = t
  end
  for _, t in net:named_buffers() do
    if not seen[t] then
      seen[t] = true
      list[#list + 1] = t
    end
  end
  return list
end

-- Replicas of every tensor and gradient, before anything is changed.
local function replicas(tensors, mesh)
  local made = {}
  for k, t in ipairs(tensors) do
    local grad = t.grad
    made[k] = {
      tensor = core.distribute(t:detach(), mesh, "replicate"):clone(),
      grad = grad and core.distribute(grad:detach(), mesh, "replicate"):clone(),
    }
  end
  return made
end

--- Places the module's parameters and buffers in place and gives the module back. An optimizer made
--- before still updates them; from now on net(x) splits the batch.
---@param net orrery.Module
---@return orrery.Module
function Plan:__call(net)
  if type(net) ~= "table" or type(net.parameters) ~= "function" then
    check.raise("a plan is applied to a module, not to a %s; place a tensor with plan:place(x)",
      type(net))
  end
  local mesh = self:_mesh_now()
  local tensors = tensors_of(net)
  local made = core.no_grad(replicas, tensors, mesh)
  local reducer = core.reducer(bucket_bytes(self))
  for k, t in ipairs(tensors) do
    t.grad = nil
    core.replace_(t, made[k].tensor)
    t.grad = made[k].grad
    core.set_reducer(t, reducer)
  end
  local data = self._ast:options().data
  if data and data.sync_bn == false then
    for _, m in ipairs(net:modules()) do
      if m.sync ~= nil then m.sync = false end
    end
  end
  net._plan = self
  moved.note()
  return net
end

-- ---- placing batches ----

--- Marks an argument as not part of the batch: a tensor is replicated, anything else passed on.
---@param x any
local function whole(x) return setmetatable({ value = x }, Whole) end

local function is_array(t)
  local n = #t
  if n == 0 then return false end
  for _, v in ipairs(t) do
    if type(v) == "table" or core.is_tensor(v) then return false end
  end
  return true
end

-- The number of samples that all tensors of the arguments agree on; nil where there is none.
local function batch_size(value, path, size, where)
  if core.is_tensor(value) then
    if value:dim() == 0 or core.mesh_of(value) then return size, where end -- placed: kept as it is
    local n = value:size(1)
    if size and n ~= size then
      check.raise("plan: %s has %d samples and %s %d; which is the batch? Mark what is not to be "
        .. "split with parallel.whole(x)", path, n, where, size)
    end
    return n, where or path
  end
  if type(value) == "table" and getmetatable(value) == nil then
    for k, inner in pairs(value) do
      size, where = batch_size(inner, path .. "." .. tostring(k), size, where)
    end
  end
  return size, where
end

local function place(plan, value, path, size)
  if core.is_tensor(value) then
    if core.mesh_of(value) then return value end
    local mesh = plan:_mesh_now()
    if value:dim() == 0 then return core.distribute(value, mesh, "replicate") end
    return core.distribute(value, mesh, "shard(1)")
  end
  if type(value) ~= "table" then return value end
  if getmetatable(value) == Whole then
    if not core.is_tensor(value.value) then return value.value end
    return core.distribute(value.value, plan:_mesh_now(), "replicate")
  end
  if getmetatable(value) ~= nil then return value end
  if size and is_array(value) and #value == size then
    check.raise("plan: %s is an array of %d %ss, as long as the batch, and cannot be split; give a "
      .. "tensor, or parallel.whole(t) to pass it to every device as it is", path, #value,
      type(value[1]))
  end
  local placed = {}
  for k, inner in pairs(value) do placed[k] = place(plan, inner, path .. "." .. tostring(k), size) end
  return placed
end

--- A batch tensor, or a (nested) table of them, split along dimension 1 as the plan says: parts
--- differ by at most one sample, the first ones larger. Does not wait.
---@param x any
---@return any
function Plan:place(x)
  return place(self, x, "the batch", (batch_size(x, "the batch")))
end

-- Arguments of a call of the placed module; the module calls this.
function Plan:place_args(_, a, ...)
  if select("#", ...) == 0 then
    if core.is_tensor(a) then return place(self, a) end
    return place(self, a, "argument 1", (batch_size(a, "argument 1")))
  end
  local args, n = { a, ... }, select("#", ...) + 1
  local size, where
  for k = 1, n do size, where = batch_size(args[k], "argument " .. k, size, where) end
  for k = 1, n do args[k] = place(self, args[k], "argument " .. k, size) end
  return (table.unpack or unpack)(args, 1, n)
end

--- One training step's forward and backward: the loss of criterion(net(x), y), gradients in the
--- parameters. Follow with optimizer:step().
---@param net orrery.Module placed by this plan
---@param criterion fun(output: any, y: any): orrery.Tensor
---@return orrery.Tensor loss
function Plan:step(net, criterion, x, y)
  if net:plan() ~= self then check.raise("plan:step: the module is not placed by this plan") end
  local loss = criterion(net(x), self:place(y))
  loss:backward()
  return loss:detach()
end

-- ---- the module ----

local parallel = {
  data = constructor "data",
  model = constructor "model",
  tensor = constructor "tensor",
  whole = whole,
}

--- The collectives that f queued, summed by kind, axis and size: {op=, axis=, bytes=, count=}.
---@param f fun()
---@return {op: string, axis: string, bytes: integer, count: integer}[]
function parallel.trace(f)
  core.trace_start()
  local ok, message = pcall(f)
  local rows = core.trace_stop()
  if not ok then error(message, 0) end
  return rows
end

--- Names of the parameters that got no gradient since zero_grad.
---@param net orrery.Module
---@return string[]
function parallel.unused(net)
  local names = {}
  for name, p in net:named_parameters() do
    if p.requires_grad and not p.grad then names[#names + 1] = name end
  end
  return names
end

--- Trains a small net on one device and under the plan (default: data over all devices), compares
--- losses and weights, and sends a tensor between every two devices and back. Prints what it finds;
--- raises where something differs.
---@param plan? orrery.Plan|string
---@return boolean
function parallel.selftest(plan) return require("orrery.selftest")(plan) end

return setmetatable(parallel, { __call = function(_, text) return parse(text) end })
