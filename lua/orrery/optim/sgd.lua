-- Stochastic gradient descent with momentum.
-- Invariant: momentum state exists only for groups with momentum > 0.
-- To add a variant: a hyperparameter in the defaults, used by the fused kernel core.sgd_.
local core = require "orrery.core"
local check = require "orrery.check"
local optimizer = require "orrery.optim.optimizer"

local sgd_ = core.sgd_
local none, with_momentum = {}, { "momentum" }

local function slots_of(group)
  return group.momentum > 0 and with_momentum or none
end

local function validate(who, group)
  if group.nesterov and (group.momentum == 0 or group.dampening ~= 0) then
    check.raise("%s: nesterov needs momentum > 0 and dampening = 0", who)
  end
end

-- The buffer starts as the first gradient, undamped: from zeros, a step with dampening 0.
local function update(group, t, params, grads, state)
  local dampening = t == 1 and 0 or group.dampening
  sgd_(params, grads, group.momentum > 0 and state.momentum or nil, group.lr, group.momentum, dampening,
    group.nesterov, group.weight_decay, state.master)
end

--- g = grad + weight_decay p;  b = momentum b + (1 - dampening) g;  p = p - lr b, or with
--- nesterov p = p - lr (g + momentum b) (Sutskever et al. 2013, in PyTorch's form: lr
--- multiplies the whole buffer).
---@param params orrery.Tensor[]|orrery.Module|table[] parameters, or groups {params=, lr=, ...}
---@param options? {lr?: number, momentum?: number, dampening?: number, nesterov?: boolean,
---  weight_decay?: number, master?: boolean} lr 1e-3 by default, the others 0; master: f32 copies of bf16 and
---  f16 parameters (true)
local SGD = optimizer.class("SGD",
  { lr = 1e-3, momentum = 0, dampening = 0, nesterov = false, weight_decay = 0 },
  with_momentum, update, { validate = validate, slots_of = slots_of })

return { SGD = SGD }
