-- Sharded state, data<...; zero=1|2|3>: which parameters are sharded over the data axis, and where
-- (Rajbhandari et al. 2020, "ZeRO": stages os, os+g, os+g+p).
-- Invariant: where a parameter stands is a function of the plan and of shapes; tensors under 4,096
-- elements, and buffers, stay as they are.
-- To add a level: `forms`.
local zero = {}

local smallest = 4096

local function data_axis(stage)
  for k, axis in ipairs(stage.axes) do
    if axis.name == "data" and axis.size > 1 then return k end
  end
end

-- The dimensions that other axes shard: dimension -> the number of parts.
local function taken_by(stage, words, data)
  local parts = {}
  for k, word in ipairs(words) do
    local d = k ~= data and tonumber(word:match "^shard%((%d+)")
    if d then parts[d] = stage.axes[k].size end
  end
  return parts
end

-- The longest dimension of what a device holds. One that another axis shards serves only where data
-- is the inner axis: its shards then lie inside that axis' shards, and gathering them moves no more.
local function longest(t, data, taken)
  local best, length = nil, 1
  for d = 1, t:dim() do
    local n = t:size(d) / (taken[d] or 1)
    if n > length and not (taken[d] and data == 1) then best, length = d, n end
  end
  return best
end

--- Where parameter t stands: the words of its rest layout, where ops see it (nil: as it rests), and
--- where its gradient and its optimizer state stand (nil: as it rests).
---@param level integer? the plan's zero=
---@param stage {axes: {name: string, size: integer}[]}
---@param t orrery.Tensor
---@param words string[] where t would stand without zero=, a word an axis
---@return string[] rest, string[]? use, string[]? state
function zero.forms(level, stage, t, words)
  local data = level and data_axis(stage)
  if not data or words[data] ~= "replicate" or t:numel() < smallest then return words end
  local d = longest(t, data, taken_by(stage, words, data))
  if not d then return words end
  local shard = {}
  for k, word in ipairs(words) do shard[k] = word end
  shard[data] = ("shard(%d)"):format(d)
  if level == 3 then return shard, words end
  return words, nil, shard
end

--- Bytes of gradients reduced at a time, where the plan does not say: what waits is held whole.
---@param level integer?
---@return integer
function zero.bucket(level) return (level or 0) >= 2 and 2 ^ 18 or 25 * 2 ^ 20 end

return zero
