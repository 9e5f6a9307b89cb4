-- Normalisation: BatchNorm1d, BatchNorm2d, LayerNorm, RMSNorm, GroupNorm.
-- Invariant: weights start at 1 and biases at 0; running statistics are buffers, not
-- parameters.
-- To add an option: name it in the layer's `known` table, or the constructor refuses it.
local core = require "orrery.core"
local check = require "orrery.check"
local modules = require "orrery.nn.module"
local init = require "orrery.nn.initialize"

local class, parameter = modules.class, modules.parameter
local layer_norm, unpack = core.layer_norm, table.unpack or unpack

local function affine(self, options, bias, ...)
  self.weight = parameter(init.new_full(options, 1, ...))
  if bias then self.bias = parameter(init.new_full(options, 0, ...)) end
end

-- Batch norm ----------------------------------------------------------------------------------

local known_batch = {
  eps = true, momentum = true, affine = true, running = true, sync = true, dtype = true, device = true,
}
local known_layer = { eps = true, affine = true, bias = true, dtype = true, device = true }

local function init_batch(self, channels, options)
  local who = self._class
  options = check.options(who, options, known_batch)
  self.channels = check.count(who, "the number of channels", channels)
  self.eps = check.number(who, "eps", options.eps or 1e-5, 0)
  self.momentum = check.number(who, "momentum", options.momentum or 0.1, 0, 1)
  self.sync = options.sync ~= false
  if options.affine ~= false then affine(self, options, true, channels) end
  if options.running ~= false then
    self:buffer("running_mean", init.new_full(options, 0, channels))
    self:buffer("running_var", init.new_full(options, 1, channels))
  end
end

local function batch_norm(self, x)
  local training = self.training or not self.running_mean
  return core.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, training,
    self.momentum, self.eps, self.sync)
end

local function describe_batch(self)
  return ("%d%s%s"):format(self.channels, self.weight and "" or ", affine=false",
    self.running_mean and "" or ", running=false")
end

--- y = (x - mean) / sqrt(var + eps) * weight + bias per channel, over the whole batch wherever
--- it lies (Ioffe & Szegedy 2015, Alg. 1). In training the statistics are the batch's, with the
--- biased variance, and the running ones move by `momentum` towards them (with the unbiased
--- variance); in evaluation the running ones serve. x is (N, C) or (N, C, L).
---@param channels integer
---@param options? {eps?: number, momentum?: number, affine?: boolean, running?: boolean, sync?:
---  boolean} sync=false: statistics per device
local BatchNorm1d = class("BatchNorm1d", init_batch)

---@param x orrery.Tensor (N, C) or (N, C, L)
---@return orrery.Tensor of the shape of x
function BatchNorm1d:forward(x)
  local dims = check.tensor("BatchNorm1d", "x", x):dim()
  if dims ~= 2 and dims ~= 3 then
    check.raise("BatchNorm1d: expected x (N, %d) or (N, %d, L), got shape %s", self.channels, self.channels,
      check.shape(x))
  end
  return batch_norm(self, x)
end

BatchNorm1d.describe = describe_batch
BatchNorm1d.looks_across_batch = true

--- As BatchNorm1d, for x (N, C, H, W).
---@param channels integer
---@param options? table as of BatchNorm1d
local BatchNorm2d = class("BatchNorm2d", init_batch)

---@param x orrery.Tensor (N, C, H, W)
---@return orrery.Tensor of the shape of x
function BatchNorm2d:forward(x)
  if check.tensor("BatchNorm2d", "x", x):dim() ~= 4 then
    check.raise("BatchNorm2d: expected x (N, %d, H, W), got shape %s", self.channels, check.shape(x))
  end
  return batch_norm(self, x)
end

BatchNorm2d.describe = describe_batch
BatchNorm2d.looks_across_batch = true

-- Layer and RMS norm --------------------------------------------------------------------------

-- The last dimensions as a table, from a number or a table of them.
local function last_dims(who, dims)
  if type(dims) ~= "table" then return { check.count(who, "the dimension", dims) } end
  if #dims == 0 then check.raise("%s: the table of dimensions is empty", who) end
  for i = 1, #dims do check.count(who, "a dimension", dims[i]) end
  return dims
end

--- y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimensions (Ba et al. 2016),
--- biased variance.
---@param dims integer|integer[] the size of the last dimension, or of the last ones
---@param options? {eps?: number, affine?: boolean, bias?: boolean}
local LayerNorm = class("LayerNorm", function(self, dims, options)
  options = check.options("LayerNorm", options, known_layer)
  self.dims = last_dims("LayerNorm", dims)
  self.eps = check.number("LayerNorm", "eps", options.eps or 1e-5, 0)
  if options.affine ~= false then
    affine(self, options, options.bias ~= false, unpack(self.dims))
  end
end)

---@param x orrery.Tensor (..., dims)
---@return orrery.Tensor of the shape of x
function LayerNorm:forward(x)
  local dims = self.dims
  if #dims == 1 then return layer_norm(x, self.weight, self.bias, self.eps) end
  local first = check.tensor("LayerNorm", "x", x):dim() - #dims + 1
  for i = 1, #dims do
    if first < 1 or x:size(first + i - 1) ~= dims[i] then
      check.raise("LayerNorm: expected x to end in (%s), got shape %s", table.concat(dims, ", "),
        check.shape(x))
    end
  end
  local weight = self.weight and self.weight:flatten()
  local bias = self.bias and self.bias:flatten()
  local shape, flat = x:size(), {}
  for d = 1, first - 1 do flat[d] = shape[d] end
  flat[first] = -1
  if x:numel() == 0 then
    flat[first] = 1
    for i = 1, #dims do flat[first] = flat[first] * dims[i] end
  end
  return x:reshape(unpack(flat)):layer_norm(weight, bias, self.eps):reshape(unpack(shape))
end

function LayerNorm:describe()
  return table.concat(self.dims, ", ")
end

-- The spacing of numbers at 1: the default eps of RMSNorm, as in PyTorch.
local spacing = { f64 = 2 ^ -52 }

--- y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019, eq.
--- 4).
---@param dim integer
---@param options? {eps?: number} default: the spacing of f32 at 1 (of f64 in f64)
local RMSNorm = class("RMSNorm", function(self, dim, options)
  options = check.options("RMSNorm", options, { eps = true, dtype = true, device = true })
  self.size = check.count("RMSNorm", "the dimension", dim)
  if options.eps then self.eps = check.number("RMSNorm", "eps", options.eps, 0) end
  affine(self, options, false, dim)
end)

---@param x orrery.Tensor (..., dim)
---@return orrery.Tensor of the shape of x
function RMSNorm:forward(x)
  check.tensor("RMSNorm", "x", x)
  return core.rms_norm(x, self.weight, self.eps or spacing[x:dtype()] or 2 ^ -23)
end

function RMSNorm:describe() return tostring(self.size) end

-- Group norm ----------------------------------------------------------------------------------

--- As LayerNorm over each group of channels of a sample (Wu & He 2018); weight and bias are per
--- channel.
---@param groups integer must divide channels
---@param channels integer
---@param options? {eps?: number, affine?: boolean}
local GroupNorm = class("GroupNorm", function(self, groups, channels, options)
  options = check.options("GroupNorm", options, { eps = true, affine = true, dtype = true, device = true })
  self.groups = check.count("GroupNorm", "the number of groups", groups)
  self.channels = check.count("GroupNorm", "the number of channels", channels)
  if channels % groups ~= 0 then
    check.raise("GroupNorm: %d groups do not divide %d channels", groups, channels)
  end
  self.eps = check.number("GroupNorm", "eps", options.eps or 1e-5, 0)
  if options.affine ~= false then affine(self, options, true, channels) end
end)

---@param x orrery.Tensor (N, C, ...)
---@return orrery.Tensor of the shape of x
function GroupNorm:forward(x) return core.group_norm(x, self.groups, self.weight, self.bias, self.eps) end

function GroupNorm:describe() return ("%d, %d"):format(self.groups, self.channels) end

return {
  BatchNorm1d = BatchNorm1d,
  BatchNorm2d = BatchNorm2d,
  LayerNorm = LayerNorm,
  RMSNorm = RMSNorm,
  GroupNorm = GroupNorm,
}
