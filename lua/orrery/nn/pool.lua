-- Pooling layers: MaxPool2d, AvgPool2d.
-- Invariant: the stride is the kernel unless it is given.
-- To add an option: name it in the layer's `known` table, or the constructor refuses it.
local core = require "orrery.core"
local check = require "orrery.check"
local class = require("orrery.nn.module").class

local function window(self, who, k, options)
  self.kh, self.kw = check.pair(who, "the kernel", k)
  self.sh, self.sw = check.pair(who, "stride", options.stride or k)
  self.ph, self.pw = check.pair(who, "padding", options.padding or 0, 0)
  if 2 * self.ph > self.kh or 2 * self.pw > self.kw then
    check.raise("%s: padding {%d, %d} is more than half the kernel {%d, %d}", who, self.ph, self.pw,
      self.kh, self.kw)
  end
end

local function describe(self)
  local text = ("{%d, %d}"):format(self.kh, self.kw)
  if self.kh == self.kw then text = tostring(self.kh) end
  if self.sh ~= self.kh or self.sw ~= self.kw then
    text = text .. (", stride={%d, %d}"):format(self.sh, self.sw)
  end
  if self.ph ~= 0 or self.pw ~= 0 then
    text = text .. (", padding={%d, %d}"):format(self.ph, self.pw)
  end
  return text
end

--- The maximum of each window; padding never wins. H' = floor((H + 2 padding - dilation (k - 1)
--- - 1) / stride) + 1.
---@param k integer|integer[]
---@param options? {stride?: any, padding?: any, dilation?: any}
local MaxPool2d = class("MaxPool2d", function(self, k, options)
  options = check.options("MaxPool2d", options, { stride = true, padding = true, dilation = true })
  window(self, "MaxPool2d", k, options)
  self.dh, self.dw = check.pair("MaxPool2d", "dilation", options.dilation or 1)
end)

---@param x orrery.Tensor (N, C, H, W)
---@return orrery.Tensor (N, C, H', W')
function MaxPool2d:forward(x)
  return core.max_pool2d(x, self.kh, self.kw, self.sh, self.sw, self.ph, self.pw, self.dh, self.dw)
end

MaxPool2d.describe = describe

--- The mean of each window; padding counts as zeros unless count_include_pad=false.
---@param k integer|integer[]
---@param options? {stride?: any, padding?: any, count_include_pad?: boolean}
local AvgPool2d = class("AvgPool2d", function(self, k, options)
  options = check.options("AvgPool2d", options, { stride = true, padding = true, count_include_pad = true })
  window(self, "AvgPool2d", k, options)
  self.include_pad = options.count_include_pad ~= false
end)

---@param x orrery.Tensor (N, C, H, W)
---@return orrery.Tensor (N, C, H', W')
function AvgPool2d:forward(x)
  return core.avg_pool2d(x, self.kh, self.kw, self.sh, self.sw, self.ph, self.pw, self.include_pad)
end

AvgPool2d.describe = describe

return { MaxPool2d = MaxPool2d, AvgPool2d = AvgPool2d }
