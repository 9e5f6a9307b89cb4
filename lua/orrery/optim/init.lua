-- orrery.optim: optimisers, clipping and schedules in one table.
-- Invariant: this file only gathers.
-- To add an optimiser: write its file, which returns a table of name -> class, and name it in
-- `families`.
local optim = { schedule = require "orrery.optim.schedule" }

for _, family in ipairs { "sgd", "adam", "rmsprop", "clip" } do
  for name, value in pairs(require("orrery.optim." .. family)) do optim[name] = value end
end

return optim
