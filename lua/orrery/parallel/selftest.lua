-- parallel.selftest: does this machine compute under a plan what one device computes?
-- Invariant: everything is compared with a value, and a difference raises.
-- To add a check: a function in `checks`.
local core = require "orrery.core"
local check = require "orrery.check"

local function max_difference(a, b)
  return (a:full() - b:full()):abs():reshape(-1):to("f64"):max():item()
end

-- A tensor goes from each device to each other one and comes back as it was.
local function peer_copies(plan)
  local names, pairs_done = plan:devices(), 0
  local x = core.arange(1, 1000, { dtype = "f32" })
  for _, from in ipairs(names) do
    for _, to in ipairs(names) do
      local back = x:to(from):to(to):to(from):to("cpu")
      if max_difference(back, x) ~= 0 then check.raise("selftest: %s to %s gave other values", from, to) end
      pairs_done = pairs_done + 1
    end
  end
  return string.format("%d copies between devices came back as they were", pairs_done)
end

local function train(plan)
  local orrery = require "orrery"
  local nn, optim = orrery.nn, orrery.optim
  orrery.manual_seed(7)
  local net = nn.Sequential(nn.Linear(12, 24, { dtype = "f64" }),
    nn.BatchNorm1d(24, { dtype = "f64" }), nn.ReLU(), nn.Dropout(0.25),
    nn.Linear(24, 5, { dtype = "f64" }))
  if plan then plan(net) end
  local opt = optim.SGD(net:parameters(), { lr = 0.1, momentum = 0.9 })
  local losses = {}
  for step = 1, 10 do
    local x = core.randn(13, 12, { dtype = "f64" })
    local y = core.randint(1, 5, 13)
    opt:zero_grad()
    local loss = nn.cross_entropy(net(x), y)
    loss:backward()
    opt:step()
    losses[step] = loss:item()
  end
  return losses, net:parameters()
end

-- math.max that keeps NaN, which is no agreement.
local function worse(a, b) return (b > a or b ~= b) and b or a end

local function parity(plan)
  local one, weights = train(nil)
  local many, placed = train(plan)
  local worst = 0
  for k, loss in ipairs(one) do worst = worse(worst, math.abs(loss - many[k])) end
  for k, w in ipairs(weights) do worst = worse(worst, max_difference(w, placed[k])) end
  if worst > 1e-9 or worst ~= worst then
    check.raise("selftest: losses or weights under %s differ from one device by %g", tostring(plan),
      worst)
  end
  return string.format("10 training steps equal one device's within %.1e", worst)
end

local checks = { peer_copies, parity }

return function(plan)
  local parallel = require "orrery.parallel"
  if plan == nil then
    local env = core.visible()
    plan = parallel("data<0.." .. ((env.cuda > 0 and env.cuda or env.cpu) - 1) .. ">")
  elseif type(plan) == "string" then
    plan = parallel(plan)
  end
  io.write("selftest of ", tostring(plan), "\n")
  for _, run in ipairs(checks) do io.write("  ", run(plan), "\n") end
  return true
end
