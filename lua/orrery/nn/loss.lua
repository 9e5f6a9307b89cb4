-- Losses: functions of (prediction, target), and a layer for each.
-- Invariant: "mean" divides by the global count of contributing elements, wherever they lie
-- (the sum and the count are reduced over devices, then divided once).
-- To add one: a function in `losses` built from tensor ops that ends in `reduce`, and a row in
-- `layers`.
local core = require "orrery.core"
local check = require "orrery.check"
local class = require("orrery.nn.module").class

local losses = {}
local reductions = { "mean", "sum", "none" }

local function reduction_of(who, options)
  local reduction = options and options.reduction
  if reduction == nil then return "mean" end
  return check.word(who, "reduction", reduction, reductions)
end

local function reduce(x, reduction)
  if reduction == "mean" then return x:mean() end
  if reduction == "sum" then return x:sum() end
  return x
end

-- Broadcasting a prediction (N, 1) with a target (N) is a common mistake with a silent wrong
-- result.
local function same_shape(who, x, y)
  check.tensor(who, "the prediction", x)
  check.tensor(who, "the target", y)
  if not check.same_shape(x, y) then
    check.raise("%s: the prediction %s and the target %s differ in shape", who, check.shape(x),
      check.shape(y))
  end
end

-- Targets that no class has: the default leaves no element out.
local no_index = -100

local known_cross_entropy = { ignore_index = true, label_smoothing = true, reduction = true }

--- Cross entropy of softmax: -log softmax(logits)[target], classes in dimension 2, labels from
--- 1 to C. With smoothing s the target distribution is (1 - s) one-hot + s / C (Szegedy et al.
--- 2016, section 7). "mean" divides by the number of elements that are not ignored.
---@param logits orrery.Tensor (N, C) or (N, C, ...)
---@param target orrery.Tensor (N) or (N, ...) of i64 or i32
---@param options? {ignore_index?: integer, label_smoothing?: number, reduction?:
---  "mean"|"sum"|"none"}
---@return orrery.Tensor
function losses.cross_entropy(logits, target, options)
  if options == nil then return core.cross_entropy(logits, target, no_index, 0, "mean") end
  check.options("cross_entropy", options, known_cross_entropy)
  local smoothing = check.number("cross_entropy", "label_smoothing", options.label_smoothing or 0, 0, 1)
  return core.cross_entropy(logits, target, options.ignore_index or no_index, smoothing,
    reduction_of("cross_entropy", options))
end

--- -log_probs[target], classes in dimension 2, labels from 1 to C.
---@param log_probs orrery.Tensor (N, C) or (N, C, ...), as log_softmax gives
---@param target orrery.Tensor (N) or (N, ...) of i64 or i32
---@param options? {ignore_index?: integer, reduction?: "mean"|"sum"|"none"}
---@return orrery.Tensor
function losses.nll_loss(log_probs, target, options)
  options = check.options("nll_loss", options, { ignore_index = true, reduction = true })
  return core.nll_loss(log_probs, target, options.ignore_index or no_index, reduction_of("nll_loss", options))
end

--- (x - y)^2.
---@param x orrery.Tensor
---@param y orrery.Tensor of the shape of x
---@param options? {reduction?: "mean"|"sum"|"none"}
---@return orrery.Tensor
function losses.mse_loss(x, y, options)
  check.options("mse_loss", options, { reduction = true })
  same_shape("mse_loss", x, y)
  local difference = x - y
  return reduce(difference * difference, reduction_of("mse_loss", options))
end

--- |x - y|.
---@param x orrery.Tensor
---@param y orrery.Tensor of the shape of x
---@param options? {reduction?: "mean"|"sum"|"none"}
---@return orrery.Tensor
function losses.l1_loss(x, y, options)
  check.options("l1_loss", options, { reduction = true })
  same_shape("l1_loss", x, y)
  return reduce((x - y):abs(), reduction_of("l1_loss", options))
end

--- -(y log s(x) + (1 - y) log(1 - s(x))) with s the sigmoid, as (1 - y) x + log(1 + exp(-x)).
--- The logarithm is taken as m + log(exp(-m) + exp(-x - m)) with the constant m = max(-x, 0),
--- which neither overflows nor bends the gradient at x = 0.
---@param x orrery.Tensor logits
---@param y orrery.Tensor of the shape of x, in [0, 1]
---@param options? {pos_weight?: number|orrery.Tensor, reduction?: "mean"|"sum"|"none"}
---  pos_weight multiplies the first term
---@return orrery.Tensor
function losses.bce_with_logits(x, y, options)
  options = check.options("bce_with_logits", options, { pos_weight = true, reduction = true })
  same_shape("bce_with_logits", x, y)
  local minus = -x
  local m = minus:detach():relu()
  local softplus = m + ((-m):exp() + (minus - m):exp()):log()
  if options.pos_weight then softplus = softplus * ((options.pos_weight - 1) * y + 1) end
  return reduce((1 - y) * x + softplus, reduction_of("bce_with_logits", options))
end

-- Each loss as a layer, whose constructor takes the options.
local layers = {
  CrossEntropyLoss = "cross_entropy",
  NLLLoss = "nll_loss",
  MSELoss = "mse_loss",
  L1Loss = "l1_loss",
  BCEWithLogitsLoss = "bce_with_logits",
}

local exports = {}
for name, loss in pairs(losses) do exports[name] = loss end
for name, loss in pairs(layers) do
  local layer = class(name, function(self, options) self.options = options end)
  function layer:forward(x, target) return losses[loss](x, target, self.options) end
  exports[name] = layer
end

return exports
