-- RMSprop.
-- Invariant: momentum state exists only for groups with momentum > 0.
-- To add a variant: a hyperparameter in the defaults, used by the fused kernel core.rmsprop_.
local core = require "orrery.core"
local check = require "orrery.check"
local optimizer = require "orrery.optim.optimizer"

local rmsprop_ = core.rmsprop_
local without, with_momentum = { "average" }, { "average", "momentum" }

local function slots_of(group)
  return group.momentum > 0 and with_momentum or without
end

local function validate(who, group)
  if group.alpha > 1 then check.raise("%s: alpha must be at most 1, got %g", who, group.alpha) end
end

local function update(group, _, params, grads, state)
  rmsprop_(params, grads, state.average, group.momentum > 0 and state.momentum or nil, group.lr, group.alpha,
    group.eps, group.weight_decay, group.momentum, state.master)
end

--- v = alpha v + (1 - alpha) g^2;  u = g / (sqrt(v) + eps);  p = p - lr u, or with momentum b =
--- momentum b + u; p = p - lr b (Tieleman & Hinton 2012, lecture 6.5, in PyTorch's form).
--- weight_decay adds weight_decay p to g.
---@param params orrery.Tensor[]|orrery.Module|table[] parameters, or groups {params=, lr=, ...}
---@param options? {lr?: number, alpha?: number, eps?: number, weight_decay?: number, momentum?:
---  number, master?: boolean} 0.01, 0.99, 1e-8, 0, 0; master: f32 copies of bf16 and f16 parameters (true)
local RMSprop = optimizer.class("RMSprop",
  { lr = 0.01, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0 },
  with_momentum, update, { validate = validate, slots_of = slots_of })

return { RMSprop = RMSprop }
