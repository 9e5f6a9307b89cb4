-- Mixed precision: autocast, and loss scaling for gradients that a narrow dtype would flush to zero.
-- (Parameters that are narrow themselves: optimisers keep masters of them, optim/optimizer.lua.)
-- Invariant: whether a step is taken is decided once, from the gradients of all devices, before any
-- parameter or optimiser state changes.
-- To add a policy: what Scaler:update does with `self.found`.
local core = require "orrery.core"
local check = require "orrery.check"
local host = require "orrery.host"

local amp = {}

local function leave(was, ok, ...)
  core.set_autocast(was)
  if not ok then check.again(...) end
  return ...
end

--- Runs f with products (linear, matmul, convolution, attention) computed in `dtype` and what is delicate
--- (sums, softmax, norms, losses) in f32, whatever comes in; parameters stay as they are, and so do their
--- gradients (Micikevicius et al. 2018). Backward runs in the types that forward left. f16 wants a Scaler.
--- Lua 5.1 other than LuaJIT cannot change stages within f: there it goes around plan:step, not into a net.
---@param dtype "bf16"|"f16"
---@param f fun(...): ...
---@return ... what f returns
function amp.autocast(dtype, f, ...)
  check.word("autocast", "the dtype", dtype, { "bf16", "f16" })
  if type(f) ~= "function" then check.raise("autocast: expected a function, got %s", type(f)) end
  return leave(core.set_autocast(dtype), pcall(f, ...))
end

---@class orrery.Scaler
---@field factor number what losses are multiplied by
local Scaler = {}
Scaler.__index = Scaler

local known = { scale = true, growth = true, backoff = true, interval = true, enabled = true }

--- Multiplies losses, so that small gradients survive, and skips steps whose gradients are not
--- finite (Micikevicius et al. 2018, section 3.2).
---@param options? {scale?: number, growth?: number, backoff?: number, interval?: integer, enabled?:
---  boolean} 65536, 2, 0.5, 2000, true: after `interval` good steps the scale grows, after a skipped
---  one it shrinks; enabled = false scales by 1 and still skips
---@return orrery.Scaler
function amp.Scaler(options)
  options = check.options("Scaler", options, known)
  local self = setmetatable({}, Scaler)
  self.factor = check.number("Scaler", "scale", options.scale or 65536, 0)
  self.growth = check.number("Scaler", "growth", options.growth or 2, 1)
  self.backoff = check.number("Scaler", "backoff", options.backoff or 0.5, 0, 1)
  self.interval = check.count("Scaler", "interval", options.interval or 2000)
  self.enabled = options.enabled ~= false
  if not self.enabled then self.factor = 1 end
  self.good, self.found, self.unscaled = 0, false, {}
  self.cell = core.full(self.factor) -- the factor, for steps that are captured
  return self
end

local function hand_over(self) self.cell:fill_(self.factor) end

--- The loss times the scale; call backward on it.
---@param loss orrery.Tensor
---@return orrery.Tensor
function Scaler:scale(loss)
  check.tensor("Scaler:scale", "the loss", loss)
  if not host.recorder then return self.factor == 1 and loss or loss * self.factor end
  host.run("aside", hand_over, self)
  return loss * self.cell
end

local function gradients(opt)
  local list = {}
  for _, group in ipairs(opt.param_groups) do
    for _, p in ipairs(group.params) do list[#list + 1] = p.grad end
  end
  return list
end

local function unscale(self, opt)
  if type(opt) ~= "table" or type(opt.param_groups) ~= "table" then
    check.raise("Scaler: expected an optimiser, got %s", type(opt))
  end
  if self.unscaled[opt] == nil then
    local list = gradients(opt)
    local finite = #list == 0 or core.all_finite(list)
    if finite and self.factor ~= 1 and #list > 0 then core.scale_(list, 1 / self.factor) end
    self.unscaled[opt] = finite
    self.found = self.found or not finite
  end
  return self.unscaled[opt]
end

--- Divides the gradients of the optimiser's parameters by the scale, once a step: before clipping.
--- Waits for whether they are finite.
---@param opt orrery.Optimizer
---@return boolean finite on every device
function Scaler:unscale(opt) return host.run("aside", unscale, self, opt) end

local function step(self, opt)
  local finite = unscale(self, opt)
  if finite then opt:step() end
  return finite
end

--- opt:step() when every gradient on every device is finite; else nothing changes.
---@param opt orrery.Optimizer
---@return boolean stepped
function Scaler:step(opt) return host.run("aside", step, self, opt) end

local function update(self)
  if self.found then
    self.good = 0
    if self.enabled then self.factor = self.factor * self.backoff end
  else
    self.good = self.good + 1
    if self.good == self.interval then
      self.good = 0
      if self.enabled then self.factor = self.factor * self.growth end
    end
  end
  self.found, self.unscaled = false, {}
  return self.factor
end

--- Ends the step: the scale shrinks when a gradient was not finite, and grows after `interval` good
--- steps in a row.
---@return number scale of the next step
function Scaler:update() return host.run("aside", update, self) end

return amp
