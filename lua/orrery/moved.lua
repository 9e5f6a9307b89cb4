-- Counts the times that parameters were moved: to another layout, device or dtype, keeping
-- their identity.
-- Invariant: whoever moves parameters in place calls note() afterwards (nn's :to, parallel's
-- placing), so that what was made like a parameter (optimiser state) knows to follow it.
-- Invariant: whoever changes what modules or optimisers do at their next call, other than by values in
-- tensors, calls changed() (train and eval, freezing, loading an optimiser), so that a captured step runs
-- anew.
-- To add a follower: keep the count that was seen, and compare it with `count` (`changes`) before use.
local moved = { count = 0, changes = 0 }

--- Says that modules or optimisers will do something else.
function moved.changed() moved.changes = moved.changes + 1 end

--- Says that parameters have moved.
function moved.note()
  moved.count = moved.count + 1
  moved.changed()
end

return moved
