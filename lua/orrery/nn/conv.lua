-- Convolutions: Conv1d, Conv2d, ConvTranspose2d. As in all of the field, "convolution" is
-- cross-correlation.
-- Invariant: Conv1d is Conv2d over one row, so the core has one convolution.
-- To add an option: name it in `known`, or the constructor refuses it.
local core = require "orrery.core"
local check = require "orrery.check"
local class = require("orrery.nn.module").class
local init = require "orrery.nn.initialize"

local conv2d, conv_transpose2d, floor = core.conv2d, core.conv_transpose2d, math.floor

local known = {
  stride = true, padding = true, dilation = true, groups = true, bias = true, dtype = true, device = true,
}
local known_transposed = { output_padding = true }
for name in pairs(known) do known_transposed[name] = true end

local function check_channels(who, cin, cout, groups)
  check.count(who, "the number of input channels", cin)
  check.count(who, "the number of output channels", cout)
  check.count(who, "groups", groups)
  if cin % groups ~= 0 or cout % groups ~= 0 then
    check.raise("%s: groups=%d must divide the %d input and the %d output channels", who, groups, cin, cout)
  end
end

-- padding="same" keeps the size: it needs stride 1 and an odd extent.
local function same_padding(who, kernel, dilation, stride)
  local extent = dilation * (kernel - 1)
  if stride ~= 1 or extent % 2 ~= 0 then
    check.raise("%s: padding='same' needs stride 1 and an odd kernel extent, got stride %d and extent %d",
      who, stride, extent + 1)
  end
  return floor(extent / 2)
end

-- W and b start from U(-1/sqrt(fan_in), 1/sqrt(fan_in)) (He et al. 2015, a = sqrt(5)).
local function make_weights(self, options, cout, ...)
  local shape = { ... }
  local fan_in = 1
  for i = 2, #shape do fan_in = fan_in * shape[i] end
  local bound = 1 / math.sqrt(fan_in)
  self.weight = init.new_uniform(options, bound, ...)
  if options.bias ~= false then self.bias = init.new_uniform(options, bound, cout) end
end

-- The options that two numbers describe, printed as one where they agree.
local function pair_text(a, b)
  return a == b and tostring(a) or ("{%d, %d}"):format(a, b)
end

local function describe(self, kernel, stride, padding, dilation)
  local parts = { self.cin, self.cout, kernel }
  if stride ~= "1" then parts[#parts + 1] = "stride=" .. stride end
  if padding ~= "0" then parts[#parts + 1] = "padding=" .. padding end
  if dilation ~= "1" then parts[#parts + 1] = "dilation=" .. dilation end
  if self.groups ~= 1 then parts[#parts + 1] = "groups=" .. self.groups end
  if not self.bias then parts[#parts + 1] = "bias=false" end
  return table.concat(parts, ", ")
end

local function describe_2d(self)
  return describe(self, pair_text(self.kh, self.kw), pair_text(self.sh, self.sw),
    pair_text(self.ph, self.pw), pair_text(self.dh, self.dw))
end

--- y (N, cout, H', W') from x (N, cin, H, W), H' = floor((H + 2 padding - dilation (k - 1) - 1)
--- / stride) + 1. The weight is (cout, cin/groups, kh, kw).
---@param cin integer
---@param cout integer
---@param k integer|integer[] {rows, columns}
---@param options? {stride?: any, padding?: any, dilation?: any, groups?: integer, bias?:
---  boolean} padding may be "same"
local Conv2d = class("Conv2d", function(self, cin, cout, k, options)
  options = check.options("Conv2d", options, known)
  self.groups = options.groups or 1
  check_channels("Conv2d", cin, cout, self.groups)
  self.cin, self.cout = cin, cout
  self.kh, self.kw = check.pair("Conv2d", "the kernel", k)
  self.sh, self.sw = check.pair("Conv2d", "stride", options.stride or 1)
  self.dh, self.dw = check.pair("Conv2d", "dilation", options.dilation or 1)
  if options.padding == "same" then
    self.ph = same_padding("Conv2d", self.kh, self.dh, self.sh)
    self.pw = same_padding("Conv2d", self.kw, self.dw, self.sw)
  else
    self.ph, self.pw = check.pair("Conv2d", "padding", options.padding or 0, 0)
  end
  make_weights(self, options, cout, cout, floor(cin / self.groups), self.kh, self.kw)
end)

---@param x orrery.Tensor (N, cin, H, W)
---@return orrery.Tensor (N, cout, H', W')
function Conv2d:forward(x)
  return conv2d(x, self.weight, self.bias, self.sh, self.sw, self.ph, self.pw, self.dh, self.dw, self.groups)
end

function Conv2d:describe()
  return describe_2d(self)
end

--- y (N, cout, L') from x (N, cin, L); the weight is (cout, cin/groups, k).
---@param cin integer
---@param cout integer
---@param k integer
---@param options? {stride?: integer, padding?: integer|string, dilation?: integer, groups?:
---  integer, bias?: boolean}
local Conv1d = class("Conv1d", function(self, cin, cout, k, options)
  options = check.options("Conv1d", options, known)
  self.groups = options.groups or 1
  check_channels("Conv1d", cin, cout, self.groups)
  self.cin, self.cout = cin, cout
  self.kernel = check.count("Conv1d", "the kernel", k)
  self.stride = check.count("Conv1d", "stride", options.stride or 1)
  self.dilation = check.count("Conv1d", "dilation", options.dilation or 1)
  if options.padding == "same" then
    self.padding = same_padding("Conv1d", k, self.dilation, self.stride)
  else
    self.padding = check.count("Conv1d", "padding", options.padding or 0, 0)
  end
  make_weights(self, options, cout, cout, floor(cin / self.groups), k)
end)

---@param x orrery.Tensor (N, cin, L)
---@return orrery.Tensor (N, cout, L')
function Conv1d:forward(x)
  if check.tensor("Conv1d", "x", x):dim() ~= 3 then
    check.raise("Conv1d: expected x (N, %d, L), got shape %s", self.cin, check.shape(x))
  end
  local y = conv2d(x:unsqueeze(3), self.weight:unsqueeze(3), self.bias, 1, self.stride, 0, self.padding, 1,
    self.dilation, self.groups)
  return y:squeeze(3)
end

function Conv1d:describe()
  return describe(self, tostring(self.kernel), tostring(self.stride), tostring(self.padding),
    tostring(self.dilation))
end

--- The gradient of Conv2d with respect to its input, as a layer: y (N, cout, H', W') from x (N,
--- cin, H, W), H' = (H - 1) stride - 2 padding + dilation (k - 1) + output_padding + 1. The
--- weight is (cin, cout/groups, kh, kw).
---@param cin integer
---@param cout integer
---@param k integer|integer[]
---@param options? {stride?: any, padding?: any, output_padding?: any, dilation?: any, groups?:
---  integer, bias?: boolean}
local ConvTranspose2d = class("ConvTranspose2d", function(self, cin, cout, k, options)
  options = check.options("ConvTranspose2d", options, known_transposed)
  self.groups = options.groups or 1
  check_channels("ConvTranspose2d", cin, cout, self.groups)
  self.cin, self.cout = cin, cout
  self.kh, self.kw = check.pair("ConvTranspose2d", "the kernel", k)
  self.sh, self.sw = check.pair("ConvTranspose2d", "stride", options.stride or 1)
  self.ph, self.pw = check.pair("ConvTranspose2d", "padding", options.padding or 0, 0)
  self.oph, self.opw = check.pair("ConvTranspose2d", "output_padding", options.output_padding or 0, 0)
  self.dh, self.dw = check.pair("ConvTranspose2d", "dilation", options.dilation or 1)
  make_weights(self, options, cout, cin, floor(cout / self.groups), self.kh, self.kw)
end)

---@param x orrery.Tensor (N, cin, H, W)
---@return orrery.Tensor (N, cout, H', W')
function ConvTranspose2d:forward(x)
  return conv_transpose2d(x, self.weight, self.bias, self.sh, self.sw, self.ph, self.pw, self.oph, self.opw,
    self.dh, self.dw, self.groups)
end

function ConvTranspose2d:describe()
  local text = describe_2d(self)
  if self.oph ~= 0 or self.opw ~= 0 then
    text = text .. ", output_padding=" .. pair_text(self.oph, self.opw)
  end
  return text
end

return { Conv1d = Conv1d, Conv2d = Conv2d, ConvTranspose2d = ConvTranspose2d }
