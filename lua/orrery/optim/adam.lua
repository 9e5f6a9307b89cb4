-- Adam and AdamW.
-- Invariant: both are one kernel; only where the weight decay enters differs.
-- To add a variant: a hyperparameter in `defaults`, used by the fused kernel core.adam_.
local core = require "orrery.core"
local check = require "orrery.check"
local optimizer = require "orrery.optim.optimizer"

local adam_ = core.adam_
local slots = { "first", "second" }

local function defaults(weight_decay)
  return { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = weight_decay }
end

local function validate(who, group)
  for i = 1, 2 do
    check.number(who, "each of betas", group.betas[i], 0)
    if group.betas[i] >= 1 then check.raise("%s: betas must be below 1, got %g", who, group.betas[i]) end
  end
end

local function update_with(decoupled)
  return function(group, t, params, grads, state)
    local betas = group.betas
    adam_(params, grads, state.first, state.second, t, group.lr, betas[1], betas[2], group.eps,
      group.weight_decay, decoupled, state.master)
  end
end

--- m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p = p - lr m^ / (sqrt(v^) +
--- eps), with m^ = m / (1 - b1^t) and v^ = v / (1 - b2^t) (Kingma & Ba 2015, Alg. 1).
--- weight_decay adds weight_decay p to g.
---@param params orrery.Tensor[]|orrery.Module|table[] parameters, or groups {params=, lr=, ...}
---@param options? {lr?: number, betas?: number[], eps?: number, weight_decay?: number, master?: boolean}
---  1e-3, {0.9, 0.999}, 1e-8, 0; master: f32 copies of bf16 and f16 parameters (true)
local Adam = optimizer.class("Adam", defaults(0), slots, update_with(false), { validate = validate })

--- Adam with decoupled weight decay: p = p - lr weight_decay p before the step (Loshchilov &
--- Hutter 2019, Alg. 2).
---@param params orrery.Tensor[]|orrery.Module|table[]
---@param options? table as of Adam; weight_decay is 0.01 by default
local AdamW = optimizer.class("AdamW", defaults(0.01), slots, update_with(true), { validate = validate })

return { Adam = Adam, AdamW = AdamW }
