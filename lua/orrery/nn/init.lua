-- orrery.nn: modules, layers, losses and initialisation in one table.
-- Invariant: this file only gathers; a layer is written in the file of its family.
-- To add a family: write its file, which returns a table of name -> class, and name it in
-- `families`.
local module = require "orrery.nn.module"

local nn = {
  Module = module.from,
  class = module.class,
  parameter = module.parameter,
  is_module = module.is_module,
  init = require "orrery.nn.initialize",
}

local families = {
  "activation", "attention", "container", "conv", "dropout", "embedding", "linear", "loss", "norm", "pool",
  "recurrent",
}

for _, family in ipairs(families) do
  for name, value in pairs(require("orrery.nn." .. family)) do nn[name] = value end
end

return nn
