-- Placing batches: which arguments are the batch, and how they are split over a plan's devices.
-- Invariant: dimension 1 of every tensor of the batch is split by one rule; what is ambiguous raises
-- and names the way to say what is meant.
-- To add a kind of argument: its case in `place`.
local core = require "orrery.core"
local check = require "orrery.check"

local unpack = table.unpack or unpack
local batch = {}

local Whole = {} -- marks what must not be split
batch.Whole = Whole

--- Marks an argument as not part of the batch: a tensor is replicated, anything else passed on.
---@param x any
function batch.whole(x) return setmetatable({ value = x }, Whole) end

local function is_array(t)
  if #t == 0 then return false end
  for _, v in ipairs(t) do
    if type(v) == "table" or core.is_tensor(v) then return false end
  end
  return true
end

-- The number of samples that all host tensors of the arguments agree on; nil where there is none.
local function size_of(value, path, size, where)
  if core.is_tensor(value) then
    if value:dim() == 0 or core.mesh_of(value) then return size, where end
    local n = value:size(1)
    if size and n ~= size then
      check.raise("plan: %s has %d samples and %s %d; which is the batch? Mark what is not to be "
        .. "split with parallel.whole(x)", path, n, where, size)
    end
    return n, where or path
  end
  if type(value) == "table" and getmetatable(value) == nil then
    for k, inner in pairs(value) do
      size, where = size_of(inner, path .. "." .. tostring(k), size, where)
    end
  end
  return size, where
end

--- A word an axis of the stage: the batch is split over the data axis, replicated over the others.
---@param stage {mesh: userdata, axes: {name: string}[]}
---@return string ...
function batch.words(stage)
  local words = {}
  for k, axis in ipairs(stage.axes) do words[k] = axis.name == "data" and "shard(1)" or "replicate" end
  return unpack(words)
end

local function place(stage, value, path, size)
  if core.is_tensor(value) then
    if core.mesh_of(value) then return value end
    if value:dim() == 0 then return core.distribute(value, stage.mesh, "replicate") end
    return core.set_batch(core.distribute(value, stage.mesh, batch.words(stage)), true)
  end
  if type(value) ~= "table" then return value end
  if getmetatable(value) == Whole then
    if not core.is_tensor(value.value) then return value.value end
    return core.distribute(value.value, stage.mesh, "replicate")
  end
  if getmetatable(value) ~= nil then return value end
  if size and is_array(value) and #value == size then
    check.raise("plan: %s is an array of %d %ss, as long as the batch, and cannot be split; give a "
      .. "tensor, or parallel.whole(t) to pass it to every device as it is", path, #value,
      type(value[1]))
  end
  local placed = {}
  for k, inner in pairs(value) do placed[k] = place(stage, inner, path .. "." .. tostring(k), size) end
  return placed
end

--- One value, a tensor or a (nested) table of them.
function batch.place(stage, x)
  return place(stage, x, "the batch", (size_of(x, "the batch")))
end

--- The arguments of a call, placed together.
function batch.place_args(stage, a, ...)
  if select("#", ...) == 0 then
    if core.is_tensor(a) then return place(stage, a) end
    return place(stage, a, "argument 1", (size_of(a, "argument 1")))
  end
  local args, n = { a, ... }, select("#", ...) + 1
  local size, where
  for k = 1, n do size, where = size_of(args[k], "argument " .. k, size, where) end
  for k = 1, n do args[k] = place(stage, args[k], "argument " .. k, size) end
  return unpack(args, 1, n)
end

return batch
