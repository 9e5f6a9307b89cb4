-- data.augment: random changes to a batch of images, for training on more than there is.
-- Invariant: images are (N, C, H, W), each sample draws for itself, and every draw comes from the
-- random stream "loader", so neither the model nor the devices change what is drawn.
-- To add one: a function of (batch, options) made of tensor ops that returns a new batch.
local core = require "orrery.core"
local check = require "orrery.check"

local augment = {}

local function images(who, x)
  who = "data.augment." .. who
  if check.tensor(who, "x", x):dim() ~= 4 then
    check.raise("%s: expected a batch (N, C, H, W), got shape %s", who, check.shape(x))
  end
  return x:size(1), x:size(2), x:size(3), x:size(4)
end

-- One random whole number from 0 to `high` a sample, as (N, 1, 1, 1).
local function offsets(n, high)
  return core.random_stream("loader", core.randint, 0, high, n):view(n, 1, 1, 1)
end

--- Pads each image with `pad` zeros on every side and cuts an H x W window at a random place.
---@param x orrery.Tensor (N, C, H, W)
---@param pad integer pixels
---@return orrery.Tensor (N, C, H, W)
function augment.random_crop(x, pad)
  local n, c, h, w = images("random_crop", x)
  check.count("data.augment.random_crop", "pad", pad, 0)
  if pad == 0 or n == 0 then return x end
  local wide = w + 2 * pad
  local padded = core.zeros(n, c, h + 2 * pad, wide, { dtype = x:dtype(), device = x:device() })
  padded:narrow(3, pad + 1, h):narrow(4, pad + 1, w):copy_(x)
  -- Row i of the window is row i + offset of the padded image; then the same for columns.
  local rows = core.arange(1, h, { dtype = "i64" }):view(1, 1, h, 1) + offsets(n, 2 * pad)
  local columns = core.arange(1, w, { dtype = "i64" }):view(1, 1, 1, w) + offsets(n, 2 * pad)
  return padded:gather(3, rows:expand(n, c, h, wide)):gather(4, columns:expand(n, c, h, w))
end

--- Mirrors each image left to right with probability p.
---@param x orrery.Tensor (N, C, H, W)
---@param p? number default 0.5
---@return orrery.Tensor (N, C, H, W)
function augment.flip(x, p)
  local n, _, _, w = images("flip", x)
  p = check.number("data.augment.flip", "p", p or 0.5, 0, 1)
  if n == 0 then return x end
  local mirrored = x:index_select(4, core.arange(w, 1, -1, { dtype = "i64" }))
  local chosen = core.random_stream("loader", core.rand, n):lt(p):view(n, 1, 1, 1)
  return core.where(chosen, mirrored, x)
end

-- A number, or a list of one number a channel as (1, C, 1, 1).
local function a_channel(who, what, value, c, like)
  if type(value) == "number" then return value end
  if type(value) ~= "table" or #value ~= c then
    check.raise("%s: %s must be a number or a list of %d, one a channel", who, what, c)
  end
  return core.tensor(value, { dtype = like:dtype(), device = like:device() }):view(1, c, 1, 1)
end

--- (x - mean) / std; whole numbers become f32 first.
---@param x orrery.Tensor (N, C, H, W)
---@param mean number|number[] one for all, or one a channel
---@param std number|number[]
---@return orrery.Tensor (N, C, H, W)
function augment.normalize(x, mean, std)
  local _, c = images("normalize", x)
  if not x:dtype():match "f%d" then x = x:to("f32") end
  local who = "data.augment.normalize"
  return (x - a_channel(who, "mean", mean, c, x)) / a_channel(who, "std", std, c, x)
end

return augment
