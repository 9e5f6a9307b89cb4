-- plan:step: one training step's forward and backward, in micro-batches and the plan's schedule.
-- Invariant: the loss and the gradients are those of one device with the same micro-batches; when
-- anything fails, parameters keep the gradients they had.
-- To add a schedule: schedule.lua says the order, this file follows it.
local core = require "orrery.core"
local check = require "orrery.check"
local batch = require "orrery.parallel.place"
local schedule = require "orrery.parallel.schedule"
local stages = require "orrery.parallel.stages"

-- The number of samples of a placed batch.
local function rows_of(value)
  if core.is_tensor(value) then return value:dim() > 0 and value:size(1) or nil end
  if type(value) ~= "table" then return nil end
  for _, inner in pairs(value) do
    local n = rows_of(inner)
    if n then return n end
  end
  return nil
end

-- Rows [first, first + n) of every batch tensor, split over the stage's devices.
local function cut(stage, value, first, n)
  if core.is_tensor(value) then
    if not core.is_batch(value) then return value end
    local part = value:narrow(1, first, n)
    if core.mesh_of(part) then part = part:redistribute(batch.words(stage)) end
    return part
  end
  if type(value) ~= "table" or getmetatable(value) ~= nil then return value end
  local pieces = {}
  for k, inner in pairs(value) do pieces[k] = cut(stage, inner, first, n) end
  return pieces
end

-- First rows and sizes of the micro-batches: balanced, larger first.
local function balanced(rows, micro)
  local base, more, at, cuts = math.floor(rows / micro), rows % micro, 1, {}
  for m = 1, micro do
    local n = base + (m <= more and 1 or 0)
    cuts[m] = { first = at, n = n }
    at = at + n
  end
  return cuts
end

-- A net that looks across the batch must not be cut unless the plan says so.
local function looks_across(net)
  for _, m in ipairs(net:modules()) do
    if m.looks_across_batch then return true end
  end
  return false
end

--- Micro-batches of a step where the plan does not say: DESIGN, Semantics 1.
local function micro_of(plan, net, rows, n_stages)
  if plan:micro() then return plan:micro() end
  if n_stages == 1 or looks_across(net) then return 1 end
  return math.max(1, math.min(rows or 1, 4 * n_stages))
end

local function plain(net, criterion, x, y)
  local loss, count = criterion(net(x), y)
  if count then loss = loss / count end
  loss:backward()
  return loss:detach()
end

-- What the tasks of one step share.
local Step = {}
Step.__index = Step

function Step:cut(stage, value, micro)
  return cut(stage, value, self.cuts[micro].first, self.cuts[micro].n)
end

function Step:forward(task)
  local run = self.runs[task.micro]
  if not run then
    local x = self:cut(self.stages[1], self.x, task.micro)
    run = stages.forward(function() return self.net:run_placed(x) end)
    run.position = { self.position[1], self.position[2] }
    self.runs[task.micro] = run
  end
  if run.done or run.stage ~= task.stage then return end
  core.random_position(run.position[1], run.position[2])
  core.random_micro(self.rows, self.cuts[task.micro].first, self.cuts[task.micro].n)
  run.micro = task.micro
  run:resume()
  core.random_micro()
  run.position = { core.random_position() }
  if run.done then self:finish(run, task.micro) end
end

-- The loss of a micro-batch, and the start of its backward.
function Step:finish(run, micro)
  local y = self:cut(self.stages[#self.stages], self.y, micro)
  local loss, count = self.criterion(run.result, y)
  run.result = nil
  local weight = 1
  if count then
    self.count = (self.count or 0) + (core.is_tensor(count) and count:item() or count)
  else
    weight = self.rows > 0 and self.cuts[micro].n / self.rows or 0
  end
  run.loss, run.weight = loss:detach(), weight
  run.backward = core.backward_start(loss, weight)
  self.last = run.position
end

function Step:backward(task)
  local run = self.runs[task.micro]
  core.mark(task.stage, task.micro, true)
  local more = core.backward_until(run.backward, self.stages[task.stage].mesh)
  core.collect_hint() -- Lua still holds what the layers of this stage gave each other
  if more then return end
  core.backward_end(run.backward)
  core.flush_gradients()
end

function Step:total()
  local total
  for m = 1, self.micro do
    local run = self.runs[m]
    local part = run.weight == 1 and run.loss or run.loss * run.weight
    total = total and total + part or part
  end
  return self.count and total / self.count or total
end

function Step:follow(order)
  for _, task in ipairs(order) do self[task.kind](self, task) end
  for m = 1, self.micro do -- what a backward left, where its nodes lay on stages out of order
    local run = self.runs[m]
    while core.backward_until(run.backward, nil) do end -- luacheck: ignore
    core.backward_end(run.backward)
  end
  core.flush_gradients()
  if self.last then core.random_position(self.last[1], self.last[2]) end
  return self:total()
end

local function run_step(step, order)
  core.hold_gradients(true)
  core.defer_statistics(true)
  local ok, result = pcall(step.follow, step, order)
  core.random_micro()
  core.set_stage(nil)
  core.mark()
  if not ok then
    for _, run in pairs(step.runs) do
      if run.backward then core.backward_end(run.backward) end
    end
    core.drop_gradients()
  end
  local scale = not ok and 0 or step.count and (step.count > 0 and 1 / step.count or 0) or 1
  local held, why = pcall(core.hold_gradients, false, scale)
  local kept, reason = pcall(core.defer_statistics, false, ok)
  if not ok then check.again(result) end
  if not held then error(why, 0) end
  if not kept then error(reason, 0) end
  return result
end

-- The tensors of value on the stage where the loss is: what the loss needs must not wait for the queues
-- of other stages.
local function on_stage(stage, value)
  if core.is_tensor(value) then return core.to_stage(value, stage.mesh) end
  if type(value) ~= "table" or getmetatable(value) ~= nil then return value end
  local moved = {}
  for k, inner in pairs(value) do moved[k] = on_stage(stage, inner) end
  return moved
end

-- Placed tensors that lead back to one that requires grad, as leaves of the step: micro-batches share
-- the way back, which is walked once, when all is done.
local function leaves(value, made)
  if core.is_tensor(value) then
    if not value.requires_grad or value.is_leaf then return value end
    local leaf = value:detach()
    leaf.requires_grad = true
    made[#made + 1] = { from = value, leaf = leaf }
    return leaf
  end
  if type(value) ~= "table" or getmetatable(value) ~= nil then return value end
  local copies = {}
  for k, inner in pairs(value) do copies[k] = leaves(inner, made) end
  return copies
end

--- See Plan:step.
return function(plan, net, criterion, x, y)
  if net._plan ~= plan and net:plan() ~= plan then
    check.raise("plan:step: the module is not placed by this plan")
  end
  if net._pending then net._pending(x) end
  local list = net._stages or plan:stages()
  x, y = plan:place(x), on_stage(list[#list], batch.place(list[#list], y))
  local rows = rows_of(x) or 0
  local micro = micro_of(plan, net, rows, #list)
  if micro == 1 and #list == 1 then return plain(net, criterion, x, y) end
  local made = {}
  x, y = leaves(x, made), leaves(y, made)
  local step = setmetatable({
    net = net, criterion = criterion, x = x, y = y, rows = rows, micro = micro, stages = list,
    cuts = balanced(rows, micro), runs = {}, position = { core.random_position() },
  }, Step)
  local model = plan:options "model"
  local loss = run_step(step, schedule.order(model.schedule or "gpipe", #list, micro, #plan:stages()))
  for _, m in ipairs(made) do
    if m.leaf.grad then m.from:backward(m.leaf.grad) end
  end
  return loss
end
