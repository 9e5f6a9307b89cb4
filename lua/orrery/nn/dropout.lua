-- nn.Dropout (Srivastava et al. 2014), in the inverted form: what is kept is scaled by 1 / (1 -
-- p).
-- Invariant: masks come from the stream "dropout" by global index, so they are the same under
-- every plan.
-- To add a variant: a class whose forward is the identity outside training.
local core = require "orrery.core"
local check = require "orrery.check"
local class = require("orrery.nn.module").class

--- In training each element is zero with probability p, else x / (1 - p); the identity in
--- evaluation.
---@param p? number in [0, 1], default 0.5
local Dropout = class("Dropout", function(self, p)
  self.p = check.number("Dropout", "p", p or 0.5, 0, 1)
end)

---@param x orrery.Tensor
---@return orrery.Tensor of the shape of x
function Dropout:forward(x)
  if not self.training or self.p == 0 then return x end
  return core.dropout(x, self.p)
end

function Dropout:describe() return ("%g"):format(self.p) end

return { Dropout = Dropout }
