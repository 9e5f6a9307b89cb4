-- Counts what changes modules and optimisers other than by values in tensors, for those who keep something
-- that was made from them.
-- Invariant: whoever moves parameters in place calls note() afterwards (nn's :to, parallel's placing), so
-- that what was made like a parameter (optimiser state) knows to follow it; whoever changes for good what
-- the next call does (freezing, loading an optimiser) calls changed(); train and eval call switch(), which
-- going back undoes.
-- To add a follower: keep what was seen, and compare it with `count`, `changes` or `modes` before use.
local moved = { count = 0, changes = 0, modes = 0 }

--- Says that modules or optimisers will do something else from now on.
function moved.changed() moved.changes = moved.changes + 1 end

--- Says that parameters have moved: to another layout, device or dtype, keeping their identity.
function moved.note()
  moved.count = moved.count + 1
  moved.changed()
end

--- Sets a module's mode. `modes` is the sum of a word for each module that is not in training mode (the
--- multiplier: Knuth 1973, The Art of Computer Programming 3, section 6.4).
---@param module orrery.Module
---@param training boolean
function moved.switch(module, training)
  if module.training == training then return end
  module.training = training
  local word = module._serial * 2654435761 % 2 ^ 32
  moved.modes = moved.modes + (training and -word or word)
end

return moved
