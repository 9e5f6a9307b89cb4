-- data.batches: goes over tensors in batches, epoch after epoch.
-- Invariant: the order of the samples depends on (seed, epoch) alone; every sample comes exactly once
-- an epoch (drop_last aside); a batch is gathered while the one before it is in the caller's hands.
-- To add an option: name it in `known`, store it in `batches`, act on it in `Batches:gather`.
local core = require "orrery.core"
local check = require "orrery.check"

local unpack = table.unpack or unpack
local who = "data.batches"
local known = {
  batch = true, shuffle = true, drop_last = true, plan = true, epoch = true, seed = true, transform = true,
}

---@class orrery.data.Batches
---@field epoch integer of the loop that runs, or ran last; 0 before the first
---@field samples integer
local Batches = {}
Batches.__index = Batches

-- Trees of tensors --------------------------------------------------------------------------------

-- Checks a (nested) table of tensors of one length; gives the length.
local function length_of(value, path, length)
  if core.is_tensor(value) then
    if value:dim() == 0 then check.raise("%s: %s has no dimension to split", who, path) end
    local rows = value:size(1)
    if length and rows ~= length then
      check.raise("%s: %s has %d samples, the tensors before it %d", who, path, rows, length)
    end
    return rows
  elseif type(value) ~= "table" or getmetatable(value) then
    check.raise("%s: %s must be a tensor or a table of tensors, got %s", who, path, type(value))
  end
  local keys = {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  for _, key in ipairs(keys) do
    length = length_of(value[key], ("%s[%s]"):format(path, tostring(key)), length)
  end
  return length
end

-- The same table with f(tensor) in the place of each tensor.
local function map(value, f)
  if core.is_tensor(value) then return f(value) end
  local result = {}
  for key, inner in pairs(value) do result[key] = map(inner, f) end
  return result
end

-- One epoch ----------------------------------------------------------------------------------------

-- Batch k (from 1) of the present epoch, as a list of the values that the loop gets.
function Batches:gather(k)
  local first = (k - 1) * self.batch + 1
  local count = math.min(self.batch, self.samples - first + 1)
  local rows = self.order and self.order:narrow(1, first, count)
  local values = map(self.data, function(tensor)
    if rows then return tensor:index_select(1, rows) end
    return tensor:narrow(1, first, count)
  end)
  if self.transform then values = { self.transform(unpack(values)) } end
  if self.plan then
    for i, value in ipairs(values) do values[i] = self.plan:place(value) end
  end
  return values
end

local function start_epoch(self)
  self.epoch = self.next_epoch
  self.next_epoch = self.epoch + 1
  self.at, self.last = 0, nil
  self.order = self.shuffle and core.permutation(self.samples, self.seed or core.seed(), self.epoch) or nil
  self.ahead = self.count > 0 and self:gather(1) or nil
end

local function next_batch(self)
  local values = self.ahead
  self.ahead = nil
  if not values then
    self.last, self.order = nil, nil
    return nil
  end
  self.at = self.at + 1
  if self.at < self.count then self.ahead = self:gather(self.at + 1) end
  self.last = values[1]
  return unpack(values)
end

-- A generic `for` calls with (state, control): a nil control is its first call, so a new epoch. A call
-- by hand, with no arguments, goes on, and begins an epoch after the end of the last.
function Batches:__call(...)
  local control = select(2, ...)
  if select("#", ...) > 0 then
    if control == nil then
      start_epoch(self)
    elseif not rawequal(control, self.last) then
      check.raise("%s: two loops over one object; make one for each", who)
    end
  elseif not self.ahead and not self.last then
    start_epoch(self)
  end
  return next_batch(self)
end

--- How many batches an epoch has.
---@return integer
function Batches:len() return self.count end
Batches.__len = Batches.len

function Batches:__tostring()
  return ("batches: %d of %d, %d samples"):format(self.count, self.batch, self.samples)
end

-- Making one ----------------------------------------------------------------------------------------

---@class orrery.data.batches.options
---@field batch? integer samples in a batch, default 64
---@field shuffle? boolean another order each epoch; default false
---@field drop_last? boolean leaves a smaller last batch out; default false
---@field plan? orrery.Plan places each batch, one batch ahead
---@field epoch? integer number of the first epoch, default 1: what a resumed run goes on with
---@field seed? integer of the order, default the seed of orrery.manual_seed
---@field transform? fun(...: orrery.Tensor): ... gets each batch before it is placed, for augmentation

--- An object for the generic `for`; each loop over it is a new epoch:
---   local train = data.batches({X, Y}, {batch=64, shuffle=true})
---   for epoch = 1, 10 do for x, y in train do ... end end
--- The order of an epoch is a function of (seed, epoch) alone. #train or train:len() is the number of
--- batches. A table with names ({image=X, label=Y}) gives one table a batch.
---@param tensors orrery.Tensor|table (nested) tables of tensors, dimension 1 the samples of each
---@param options? orrery.data.batches.options
---@return orrery.data.Batches raises where a value is no tensor or their lengths differ
local function batches(tensors, options)
  options = check.options(who, options, known)
  local samples = length_of(tensors, "data")
  if not samples then check.raise("%s: no tensor in the table", who) end
  -- A single tensor and a table with names are one value; a list is as many as it holds.
  local list = type(tensors) == "table" and tensors[1] ~= nil
  local self = setmetatable({}, Batches)
  self.data = list and tensors or { tensors }
  self.samples = samples
  self.batch = check.count(who, "batch", options.batch or 64)
  self.shuffle, self.plan, self.transform = options.shuffle, options.plan, options.transform
  self.seed = options.seed
  self.next_epoch = check.count(who, "epoch", options.epoch or 1, 0)
  self.epoch, self.at = 0, 0
  self.count = math.floor((samples + (options.drop_last and 0 or self.batch - 1)) / self.batch)
  return self
end

return batches
