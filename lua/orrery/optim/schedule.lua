-- Learning-rate schedules: s = optim.schedule.cosine(opt, {...}), then s:step() after each
-- opt:step().
-- Invariant: the rate is a function of the number of steps taken and of each group's base rate
-- alone, so a loaded schedule goes on exactly; the rate of step 0 is set when the schedule is
-- made.
-- To add one: a row in `kinds`, a function of (count, base, options) that gives the rate.
local check = require "orrery.check"
local host = require "orrery.host"

---@class orrery.Schedule
local Schedule = {}
Schedule.__index = Schedule

-- Rises linearly to the base rate over the first `warmup` steps; then the share done of what is
-- left up to `total`.
local function warmup_or_share(count, options)
  if count < options.warmup then return (count + 1) / options.warmup, nil end
  local length = options.total - options.warmup
  return nil, length > 0 and math.min(1, (count - options.warmup) / length) or 1
end

local kinds = {}

function kinds.cosine(count, base, options)
  local rise, share = warmup_or_share(count, options)
  if rise then return base * rise end
  return options.min + (base - options.min) * 0.5 * (1 + math.cos(math.pi * share))
end

function kinds.linear(count, base, options)
  local rise, share = warmup_or_share(count, options)
  if rise then return base * rise end
  return base + (options.min - base) * share
end

function kinds.step(count, base, options)
  return base * options.gamma ^ math.floor(count / options.size)
end

function kinds.lambda(count, base, options)
  return base * options.factor(count)
end

local function apply(self)
  local rate = kinds[self.kind]
  for g, group in ipairs(self.optimizer.param_groups) do
    if not self.base[g] then self.base[g] = group.lr end
    group.lr = rate(self.count, self.base[g], self.options)
  end
end

local function make(kind, optimizer, options)
  if type(optimizer) ~= "table" or type(optimizer.param_groups) ~= "table" then
    check.raise("schedule.%s: the first argument must be an optimiser, got %s", kind, type(optimizer))
  end
  local self = { kind = kind, optimizer = optimizer, options = options, count = 0, base = {} }
  setmetatable(self, Schedule)
  apply(self)
  return self
end

local function step(self)
  self.count = self.count + 1
  apply(self)
end

--- Goes on by one step and sets the rate of every group.
function Schedule:step() host.run("feed", step, self) end

--- The present rate of a group.
---@param g? integer default 1
---@return number
function Schedule:lr(g) return self.optimizer.param_groups[g or 1].lr end

--- What load_state needs to go on: the number of steps and the base rates.
---@return {kind: string, count: integer, base: number[]}
function Schedule:state()
  local base = {}
  for g, rate in ipairs(self.base) do base[g] = rate end
  return { kind = self.kind, count = self.count, base = base }
end

--- Loads a state and sets the rates of its step.
---@param state table as :state() gives
---@return orrery.Schedule self
function Schedule:load_state(state)
  if type(state) ~= "table" or state.kind ~= self.kind then
    check.raise("schedule.%s:load_state: the state is of %s", self.kind,
      type(state) == "table" and tostring(state.kind) or type(state))
  elseif #state.base ~= #self.optimizer.param_groups then
    check.raise("schedule.%s:load_state: the state has %d groups, the optimiser %d", self.kind, #state.base,
      #self.optimizer.param_groups)
  end
  self.count = state.count
  for g, rate in ipairs(state.base) do self.base[g] = rate end
  apply(self)
  return self
end

local schedule = {}

local function decay_options(who, options)
  options = check.options(who, options, { warmup = true, total = true, min = true })
  local total = check.count(who, "total", options.total)
  local warmup = check.count(who, "warmup", options.warmup or 0, 0)
  if warmup > total then check.raise("%s: warmup=%d is longer than total=%d", who, warmup, total) end
  return { warmup = warmup, total = total, min = check.number(who, "min", options.min or 0, 0) }
end

--- min + (base - min) (1 + cos(pi share)) / 2 after a linear warm-up (Loshchilov & Hutter 2017,
--- eq. 5, no restarts).
---@param optimizer orrery.Optimizer
---@param options {warmup?: integer, total: integer, min?: number} in steps; min is a rate,
---  default 0
---@return orrery.Schedule
function schedule.cosine(optimizer, options)
  return make("cosine", optimizer, decay_options("schedule.cosine", options))
end

--- From the base rate to min in a straight line, after a linear warm-up.
---@param optimizer orrery.Optimizer
---@param options {warmup?: integer, total: integer, min?: number}
---@return orrery.Schedule
function schedule.linear(optimizer, options)
  return make("linear", optimizer, decay_options("schedule.linear", options))
end

--- base gamma^floor(steps / size).
---@param optimizer orrery.Optimizer
---@param options {size: integer, gamma?: number} gamma 0.1 by default
---@return orrery.Schedule
function schedule.step(optimizer, options)
  options = check.options("schedule.step", options, { size = true, gamma = true })
  return make("step", optimizer, {
    size = check.count("schedule.step", "size", options.size),
    gamma = check.number("schedule.step", "gamma", options.gamma or 0.1, 0),
  })
end

--- base factor(steps), the count starting from 0.
---@param optimizer orrery.Optimizer
---@param factor fun(steps: integer): number
---@return orrery.Schedule
function schedule.lambda(optimizer, factor)
  if type(factor) ~= "function" then
    check.raise("schedule.lambda: expected a function, got %s", type(factor))
  end
  return make("lambda", optimizer, { factor = factor })
end

return schedule
