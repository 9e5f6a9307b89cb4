-- plan:step: one training step's forward and backward.
-- Invariant: the loss and the gradients are those of one device with the same micro-batches.
-- To add a schedule: schedule.lua says the order, this file follows it.
local check = require "orrery.check"

return function(plan, net, criterion, x, y)
  if net:plan() ~= plan then check.raise("plan:step: the module is not placed by this plan") end
  local loss, count = criterion(net(x), plan:place(y))
  if count then loss = loss / count end
  loss:backward()
  return loss:detach()
end
