-- What the optimisers share: parameter groups, state by parameter index, and the lists handed
-- to the fused kernels.
-- Invariant: a parameter without a gradient is skipped and its step count stands still; the
-- lists are rebuilt only when the set of parameters with gradients changes, so a steady step
-- makes no Lua table.
-- To add an optimiser: `optimizer.class(name, defaults, slots, update)`, see sgd.lua.
local core = require "orrery.core"
local check = require "orrery.check"
local host = require "orrery.host"
local moved = require "orrery.moved"

local raise = check.raise

---@class orrery.Optimizer
---@field param_groups table[] each with `params` and the hyperparameters
local Optimizer = {}
Optimizer.__index = Optimizer

-- Groups --------------------------------------------------------------------------------------

local function params_of(who, list)
  if type(list) == "table" and type(list.parameters) == "function" then list = list:parameters() end
  if core.is_tensor(list) then list = { list } end
  if type(list) ~= "table" then
    raise("%s: expected a list of parameters, a module or a list of groups, got %s", who, type(list))
  end
  local params, seen = {}, {}
  for i = 1, #list do
    local p = list[i]
    if not core.is_tensor(p) then raise("%s: parameter %d is a %s, not a tensor", who, i, type(p)) end
    if not p.is_leaf then raise("%s: parameter %d is not a leaf: it was computed from others", who, i) end
    if not seen[p] then
      seen[p] = true
      params[#params + 1] = p
    end
  end
  return params
end

-- A copy of a hyperparameter: pairs such as betas are tables.
local function clone(value)
  return type(value) == "table" and { value[1], value[2] } or value
end

local function check_hyper(who, defaults, options, group)
  for name, default in pairs(defaults) do
    local value = options[name]
    if value == nil then value = default end
    if type(default) == "number" then
      check.number(who, name, value, 0)
    elseif type(value) ~= type(default) then
      raise("%s: %s must be a %s, got %s", who, name, type(default), type(value))
    end
    group[name] = clone(value)
  end
end

local function make_group(self, spec, options)
  local who, known = self.name, { params = true }
  for name in pairs(self.defaults) do known[name] = true end
  check.options(who, spec, known)
  local merged = {}
  for name in pairs(self.defaults) do
    merged[name] = options[name]
    if spec[name] ~= nil then merged[name] = spec[name] end
  end
  local group = { params = params_of(who, spec.params) }
  check_hyper(who, self.defaults, merged, group)
  if self.validate then self.validate(who, group) end
  return group
end

-- A list of groups is told from a list of parameters by its first entry.
local function is_group_list(params)
  return type(params) == "table" and type(params[1]) == "table" and params[1].params ~= nil
end

local function construct(class, params, options)
  local self = setmetatable({ param_groups = {} }, class)
  options = check.options(class.name, options, class.known)
  local specs = is_group_list(params) and params or { { params = params } }
  local owner = {}
  for g, spec in ipairs(specs) do
    local group = make_group(self, spec, options)
    for _, p in ipairs(group.params) do
      if owner[p] then raise("%s: a parameter stands in groups %d and %d", self.name, owner[p], g) end
      owner[p] = g
    end
    self.param_groups[g] = group
  end
  if next(owner) == nil then raise("%s: the list of parameters is empty", self.name) end
  self._steps = {} -- [index] = steps taken by that parameter
  self._slots = {} -- [slot name][index] = state tensor
  for _, slot in ipairs(class.slots) do self._slots[slot] = {} end
  self._slots.master = {}
  self._plans = {} -- [group] = cached lists, see rebuild
  self._moved = moved.count
  return self
end

-- Lists ---------------------------------------------------------------------------------------

-- The index of a parameter counts through the groups, in order.
local function first_index(self, g)
  local first = 1
  for k = 1, g - 1 do first = first + #self.param_groups[k].params end
  return first
end

-- Writes the step counts of the cached buckets back to the parameters.
local function settle(self, plan)
  for _, bucket in ipairs(plan.buckets) do
    for _, index in ipairs(bucket.indices) do self._steps[index] = bucket.steps end
  end
end

-- State of parameter p, all zero; half-precision parameters keep theirs in f32.
local zero_state = core.state_like

-- Whether the optimiser keeps an f32 master of the parameter; zero at first, for the kernels fill it.
local function has_master(group, p)
  local dtype = p:dtype()
  return group.master and (dtype == "bf16" or dtype == "f16")
end

-- Puts parameter `index` in the bucket of those with the same step count, all with a master or none: the
-- kernels take one count a list.
local function put(self, plan, k, index, p, slots, master)
  local steps = self._steps[index] or 0
  local key = master and -1 - steps or steps
  local bucket = plan.by_steps[key]
  if not bucket then
    bucket = { steps = steps, params = {}, grads = {}, indices = {}, state = {} }
    plan.by_steps[key] = bucket
    plan.buckets[#plan.buckets + 1] = bucket
  end
  local n = #bucket.params + 1
  bucket.params[n], bucket.indices[n] = p, index
  local function give(slot)
    local store, list = self._slots[slot], bucket.state[slot] or {}
    if not store[index] then store[index] = zero_state(p) end
    bucket.state[slot], list[n] = list, store[index]
  end
  for _, slot in ipairs(slots) do give(slot) end
  if master then give "master" end
  plan.bucket[k], plan.place[k] = bucket, n
end

local function rebuild(self, g, group)
  local old = self._plans[g]
  if old then settle(self, old) end
  local slots = self.slots_of and self.slots_of(group) or self.slots
  local plan = { buckets = {}, by_steps = {}, bucket = {}, place = {}, params = group.params, slots = slots,
    master = group.master }
  local first = first_index(self, g)
  for k, p in ipairs(group.params) do
    if p.grad then put(self, plan, k, first + k - 1, p, slots, has_master(group, p)) end
  end
  plan.by_steps = nil
  self._plans[g] = plan
  return plan
end

-- Fills the gradient lists of a cached plan; false when the set of gradients differs from the
-- cached one.
local function refill(plan, params)
  local bucket, place = plan.bucket, plan.place
  for k = 1, #params do
    local grad, b = params[k].grad, bucket[k]
    if grad then
      if not b then return false end
      b.grads[place[k]] = grad
    elseif b then
      return false
    end
  end
  return true
end

-- Drops the lists, so that the next step reads parameters and state afresh.
local function forget(self)
  for _, plan in pairs(self._plans) do settle(self, plan) end
  self._plans = {}
end

-- A state of parameter p with the values of a host tensor; nil: none, or a master that p has no use for.
local function state_of(group, p, slot, values)
  if not values or (slot == "master" and not has_master(group, p)) then return nil end
  return zero_state(p):copy_(values)
end

-- Parameters have moved: their state follows them, by way of the host.
local function follow(self)
  forget(self)
  local index = 0
  for _, group in ipairs(self.param_groups) do
    for _, p in ipairs(group.params) do
      index = index + 1
      for slot, store in pairs(self._slots) do
        store[index] = state_of(group, p, slot, store[index] and core.snapshot(store[index]))
      end
    end
  end
  self._moved = moved.count
end

local function step(self)
  local groups, update = self.param_groups, self.update
  if self._moved ~= moved.count then follow(self) end
  for g = 1, #groups do
    local group = groups[g]
    local plan = self._plans[g]
    if not plan or plan.params ~= group.params or plan.master ~= group.master
      or (self.slots_of and self.slots_of(group) ~= plan.slots) or not refill(plan, group.params) then
      plan = rebuild(self, g, group)
      refill(plan, group.params)
    end
    local buckets = plan.buckets
    for i = 1, #buckets do
      local bucket = buckets[i]
      bucket.steps = bucket.steps + 1
      update(group, bucket.steps, bucket.params, bucket.grads, bucket.state)
    end
  end
end

--- One update of every parameter that has a gradient.
function Optimizer:step() host.run("feed", step, self) end

--- Drops the gradients of all parameters.
function Optimizer:zero_grad()
  local groups = self.param_groups
  for g = 1, #groups do
    local params = groups[g].params
    for k = 1, #params do params[k].grad = nil end
    local plan = self._plans[g]
    for i = 1, plan and #plan.buckets or 0 do
      local grads = plan.buckets[i].grads
      for n = 1, #grads do grads[n] = false end
    end
  end
end

--- Adds a group: {params=, lr=, ...}; what it does not give is taken from the first group.
---@param spec table
function Optimizer:add_param_group(spec)
  local group = make_group(self, spec, self.param_groups[1])
  for g, other in ipairs(self.param_groups) do
    for _, a in ipairs(other.params) do
      for _, b in ipairs(group.params) do
        if a == b then raise("%s: a parameter of the new group already stands in group %d", self.name, g) end
      end
    end
  end
  self.param_groups[#self.param_groups + 1] = group
  moved.changed()
end

-- State ---------------------------------------------------------------------------------------

--- A snapshot: hyperparameters, step counts and logical state tensors on the host. A run
--- resumed from it and from the module's state goes on bit for bit, under any plan.
---@return {name: string, groups: table[], steps: table<integer, integer>, slots: table<string,
---  table>}
function Optimizer:state()
  for _, plan in pairs(self._plans) do settle(self, plan) end
  local state = { name = self.name, groups = {}, steps = {}, slots = {} }
  for g, group in ipairs(self.param_groups) do
    local copy = { count = #group.params }
    for name in pairs(self.defaults) do copy[name] = clone(group[name]) end
    state.groups[g] = copy
  end
  for index, steps in pairs(self._steps) do state.steps[index] = steps end
  for slot, tensors in pairs(self._slots) do
    state.slots[slot] = {}
    for index, tensor in pairs(tensors) do state.slots[slot][index] = core.snapshot(tensor) end
  end
  return state
end

local function check_state(self, state)
  local who = self.name
  if type(state) ~= "table" or type(state.groups) ~= "table" or type(state.steps) ~= "table"
    or type(state.slots) ~= "table" then
    raise("%s:load_state: not the state of an optimiser", who)
  elseif state.name ~= who then
    raise("%s:load_state: the state is of %s", who, tostring(state.name))
  elseif #state.groups ~= #self.param_groups then
    raise("%s:load_state: the state has %d groups, this optimiser %d", who, #state.groups, #self.param_groups)
  end
  local index = 0
  for g, group in ipairs(self.param_groups) do
    if state.groups[g].count ~= #group.params then
      raise("%s:load_state: group %d has %d parameters, the state %s", who, g, #group.params,
        tostring(state.groups[g].count))
    end
    for k, p in ipairs(group.params) do
      index = index + 1
      for slot in pairs(self._slots) do
        local tensor = (state.slots[slot] or {})[index]
        if tensor and not check.same_shape(tensor, p) then
          raise("%s:load_state: %s of parameter %d in group %d is %s, expected %s", who, slot, k, g,
            check.shape(tensor), check.shape(p))
        end
      end
    end
  end
end

--- Loads a state. All is checked before anything is written, so a failing call changes nothing.
---@param state table as :state() gives
---@return orrery.Optimizer self
function Optimizer:load_state(state)
  check_state(self, state)
  forget(self)
  moved.changed()
  local index = 0
  for g, group in ipairs(self.param_groups) do
    for name in pairs(self.defaults) do
      if state.groups[g][name] ~= nil then group[name] = clone(state.groups[g][name]) end
    end
    for _, p in ipairs(group.params) do
      index = index + 1
      self._steps[index] = state.steps[index]
      for slot, store in pairs(self._slots) do
        local tensor = (state.slots[slot] or {})[index]
        store[index] = state_of(group, p, slot, tensor)
      end
    end
  end
  return self
end

function Optimizer:__tostring()
  local names, lines = {}, {}
  for name in pairs(self.defaults) do names[#names + 1] = name end
  table.sort(names)
  for g, group in ipairs(self.param_groups) do
    local parts = { ("%d parameters"):format(#group.params) }
    for _, name in ipairs(names) do
      local value = group[name]
      if type(value) == "table" then value = ("{%g, %g}"):format(value[1], value[2]) end
      parts[#parts + 1] = name .. "=" .. tostring(value)
    end
    lines[g] = ("%s group %d: %s"):format(self.name, g, table.concat(parts, ", "))
  end
  return table.concat(lines, "\n")
end

local optimizer = { Optimizer = Optimizer }

--- Makes an optimiser class. `defaults` names every hyperparameter; `slots` the state tensors a
--- parameter has; `update(group, t, params, grads, state)` runs one fused step over equal
--- lists, state[slot] being a list too, and state.master where the parameters are f16 or bf16: f32 copies
--- that are updated, the parameters being what they round to. The option master = false does without.
---@param name string
---@param defaults table<string, number|boolean|number[]> a table is a pair of numbers
---@param slots string[]
---@param update fun(group: table, t: integer, params: table, grads: table, state: table)
---@param extra? {validate?: fun(who: string, group: table), slots_of?: fun(group: table):
---  string[]} slots_of must return the same table for the same choice
---@return table class
function optimizer.class(name, defaults, slots, update, extra)
  defaults.master = true
  local class = { name = name, defaults = defaults, slots = slots, update = update, known = {} }
  for key in pairs(defaults) do class.known[key] = true end
  class.validate, class.slots_of = extra and extra.validate, extra and extra.slots_of
  class.__index = class
  class.__tostring = Optimizer.__tostring
  return setmetatable(class, { __index = Optimizer, __call = construct })
end

return optimizer
