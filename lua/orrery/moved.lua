-- Counts the times that parameters were moved: to another layout, device or dtype, keeping
-- their identity.
-- Invariant: whoever moves parameters in place calls note() afterwards (nn's :to, parallel's
-- placing), so that what was made like a parameter (optimiser state) knows to follow it.
-- To add a follower: keep the count that was seen, and compare it with `count` before use.
local moved = { count = 0 }

--- Says that parameters have moved.
function moved.note() moved.count = moved.count + 1 end

return moved
