-- nn.Linear: y = x W^T + b.
-- Invariant: the weight is (out, in), so a layer's outputs are the rows of its weight.
-- To add an option: name it in `known`, or the constructor refuses it.
local core = require "orrery.core"
local check = require "orrery.check"
local class = require("orrery.nn.module").class
local init = require "orrery.nn.initialize"

local linear = core.linear
local known = { bias = true, dtype = true, device = true }

--- y (..., out) = x (..., in) W^T + b. W and b start from U(-1/sqrt(in), 1/sqrt(in)) (He et al.
--- 2015, a = sqrt(5)).
---@param inputs integer
---@param outputs integer
---@param options? {bias?: boolean, dtype?: string, device?: string}
local Linear = class("Linear", function(self, inputs, outputs, options)
  options = check.options("Linear", options, known)
  self.inputs = check.count("Linear", "the number of inputs", inputs)
  self.outputs = check.count("Linear", "the number of outputs", outputs)
  local bound = 1 / math.sqrt(inputs)
  self.weight = init.new_uniform(options, bound, outputs, inputs)
  if options.bias ~= false then self.bias = init.new_uniform(options, bound, outputs) end
end)

---@param x orrery.Tensor (..., in)
---@return orrery.Tensor (..., out)
function Linear:forward(x) return linear(x, self.weight, self.bias) end

function Linear:describe()
  return ("%d, %d%s"):format(self.inputs, self.outputs, self.bias and "" or ", bias=false")
end

return { Linear = Linear }
