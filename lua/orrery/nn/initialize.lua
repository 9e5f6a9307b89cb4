-- nn.init: filling tensors with initial values, and the default initialisation of the layers.
-- Invariant: every draw comes from the random stream "init", by global index, so initial
-- weights depend on the seed alone: not on devices, not on how often dropout or a loader drew
-- before.
-- To add one: a function that ends in `_`, fills the tensor in place without grad, and returns
-- it.
local core = require "orrery.core"
local check = require "orrery.check"
local module = require "orrery.nn.module"

local init = {}
local sqrt, unpack = math.sqrt, table.unpack or unpack

-- Fills `tensor` with scale * draw + shift, where draw is core.rand or core.randn.
local function fill(tensor, draw, scale, shift)
  core.no_grad(function()
    core.random_stream("init", function()
      local shape = tensor:size()
      shape[#shape + 1] = { dtype = tensor:dtype() }
      local values = draw(unpack(shape))
      if scale ~= 1 then values:mul_(scale) end
      if shift ~= 0 then values:add_(shift) end
      tensor:copy_(values)
    end)
  end)
  return tensor
end

local function fill_constant(tensor, value)
  core.no_grad(function() tensor:fill_(value) end)
  return tensor
end

--- Fan-in and fan-out of a weight of shape (out, in, ...): the extra dimensions multiply both.
---@param tensor orrery.Tensor at least two dimensions
---@return integer fan_in, integer fan_out
function init.fans(tensor)
  if tensor:dim() < 2 then
    check.raise("nn.init: fans need at least 2 dimensions, got shape %s", check.shape(tensor))
  end
  local field = 1
  for d = 3, tensor:dim() do field = field * tensor:size(d) end
  return tensor:size(2) * field, tensor:size(1) * field
end

--- The gain that keeps the variance of a layer followed by this non-linearity (He et al. 2015,
--- section 2.2).
---@param nonlinearity string "linear"|"sigmoid"|"tanh"|"relu"|"leaky_relu"
---@param slope? number of leaky_relu, default 0.01
---@return number
function init.gain(nonlinearity, slope)
  check.word("nn.init.gain", "the non-linearity", nonlinearity,
    { "linear", "sigmoid", "tanh", "relu", "leaky_relu" })
  if nonlinearity == "tanh" then return 5 / 3 end
  if nonlinearity == "relu" then return sqrt(2) end
  if nonlinearity == "leaky_relu" then return sqrt(2 / (1 + (slope or 0.01) ^ 2)) end
  return 1
end

--- U(low, high), default U(0, 1).
function init.uniform_(tensor, low, high)
  low, high = low or 0, high or 1
  return fill(tensor, core.rand, high - low, low)
end

--- N(mean, std^2), default N(0, 1).
function init.normal_(tensor, mean, std) return fill(tensor, core.randn, std or 1, mean or 0) end

function init.constant_(tensor, value) return fill_constant(tensor, value) end
function init.zeros_(tensor) return fill_constant(tensor, 0) end
function init.ones_(tensor) return fill_constant(tensor, 1) end

--- U(-b, b), b = gain sqrt(6 / (fan_in + fan_out)) (Glorot & Bengio 2010, eq. 16).
function init.xavier_uniform_(tensor, gain)
  local fan_in, fan_out = init.fans(tensor)
  local bound = (gain or 1) * sqrt(6 / (fan_in + fan_out))
  return init.uniform_(tensor, -bound, bound)
end

--- N(0, s^2), s = gain sqrt(2 / (fan_in + fan_out)) (Glorot & Bengio 2010, eq. 12).
function init.xavier_normal_(tensor, gain)
  local fan_in, fan_out = init.fans(tensor)
  return init.normal_(tensor, 0, (gain or 1) * sqrt(2 / (fan_in + fan_out)))
end

local function kaiming_deviation(who, tensor, options)
  options = check.options(who, options, { a = true, mode = true, nonlinearity = true })
  local mode = check.word(who, "mode", options.mode or "fan_in", { "fan_in", "fan_out" })
  local fan_in, fan_out = init.fans(tensor)
  local gain = init.gain(options.nonlinearity or "leaky_relu", options.a or 0)
  return gain / sqrt(mode == "fan_in" and fan_in or fan_out)
end

--- U(-b, b), b = gain sqrt(3 / fan) (He et al. 2015, eq. 10 and 15).
---@param tensor orrery.Tensor
---@param options? {a?: number, mode?: string, nonlinearity?: string} a: slope of leaky_relu,
---  default 0
function init.kaiming_uniform_(tensor, options)
  local bound = sqrt(3) * kaiming_deviation("kaiming_uniform_", tensor, options)
  return init.uniform_(tensor, -bound, bound)
end

--- N(0, s^2), s = gain / sqrt(fan) (He et al. 2015, eq. 10 and 15).
function init.kaiming_normal_(tensor, options)
  return init.normal_(tensor, 0, kaiming_deviation("kaiming_normal_", tensor, options))
end

-- Making parameters: used by the layers -------------------------------------------------------

local function place_options(options)
  return { dtype = options.dtype, device = options.device }
end

--- A new parameter of the given shape filled from U(-bound, bound). With bound = 1 /
--- sqrt(fan_in) this is the uniform of He et al. 2015 with a = sqrt(5), as PyTorch initialises
--- linear and convolution layers.
---@param options table with dtype and device, each may be nil
---@param bound number
---@param ... integer the shape
function init.new_uniform(options, bound, ...)
  local shape = { ... }
  shape[#shape + 1] = place_options(options)
  local tensor
  core.random_stream("init", function() tensor = core.rand(unpack(shape)) end)
  tensor:mul_(2 * bound)
  tensor:add_(-bound)
  return module.parameter(tensor)
end

--- A new parameter of the given shape filled from N(0, 1).
function init.new_normal(options, ...)
  local shape = { ... }
  shape[#shape + 1] = place_options(options)
  local tensor
  core.random_stream("init", function() tensor = core.randn(unpack(shape)) end)
  return module.parameter(tensor)
end

--- A new tensor of the given shape filled with one value; not yet a parameter.
function init.new_full(options, value, ...)
  local shape = { ... }
  shape[#shape + 1] = place_options(options)
  local tensor = core.zeros(unpack(shape))
  if value ~= 0 then tensor:fill_(value) end
  return tensor
end

return init
