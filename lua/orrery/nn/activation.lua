-- Activations as layers. Those without options are rows of one table.
-- Invariant: each is one call of the op of the same meaning and holds no parameters.
-- To add one without options: a row in `plain`; with options: a class.
local core = require "orrery.core"
local check = require "orrery.check"
local class = require("orrery.nn.module").class

local layers = {}

-- { class name, op }
local plain = {
  { "ReLU", "relu" },
  { "GELU", "gelu" }, -- x Phi(x), exact (Hendrycks & Gimpel 2016)
  { "SiLU", "silu" }, -- x sigmoid(x)
  { "Tanh", "tanh" },
  { "Sigmoid", "sigmoid" },
}

for _, row in ipairs(plain) do
  local layer, op = class(row[1]), core[row[2]]
  function layer:forward(x) return op(x) end -- luacheck: ignore self
  layers[row[1]] = layer
end

-- Softmax family: the dimension counts from 1; the last one by default.
for name, op in pairs { Softmax = core.softmax, LogSoftmax = core.log_softmax } do
  local layer = class(name, function(self, dim)
    if dim ~= nil then self.over = check.count(name, "the dimension", dim) end
  end)
  function layer:forward(x) return op(x, self.over or -1) end
  function layer:describe() return self.over and tostring(self.over) or "" end
  layers[name] = layer
end

--- max(x, 0) + slope min(x, 0).
---@param slope? number default 0.01
local LeakyReLU = class("LeakyReLU", function(self, slope)
  self.slope = check.number("LeakyReLU", "the slope", slope or 0.01)
end)

function LeakyReLU:forward(x) return core.relu(x) - core.relu(-x) * self.slope end
function LeakyReLU:describe() return ("%g"):format(self.slope) end
layers.LeakyReLU = LeakyReLU

return layers
