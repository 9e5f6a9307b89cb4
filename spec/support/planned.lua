-- What the behaviour specs of plans share: plans over n devices, criteria, a net deep enough for five
-- devices of two stages each, and its training.
-- Invariant: `train` draws the same batches with and without a plan, and gives values, not tensors.
-- To add a helper: beside its like.
local orrery = require "orrery"
local behave = require "spec.support.behave"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local f64 = { dtype = "f64" }
local planned = {}

--- "kind<0..n-1; options>" as a plan.
function planned.plan(kind, n, options)
  local devices = n == 1 and "0" or "0.." .. n - 1
  return parallel(("%s<%s%s>"):format(kind, devices, options and "; " .. options or ""))
end

function planned.mean(y, t) return nn.cross_entropy(y, t) end
function planned.mean_square(y, t) return (y - t):square():mean() end

--- The sum over labels other than 2, and their number.
function planned.masked(y, t)
  return nn.cross_entropy(y, t, { ignore_index = 2, reduction = "sum" }), t:ne(2):sum()
end

--- Eleven layers, from 6 numbers to 4 classes; dropout, and batch norm where asked for.
function planned.deep(norm)
  orrery.manual_seed(50)
  norm = norm and nn.BatchNorm1d(7, f64) or nn.LayerNorm(7, f64)
  return nn.Sequential(nn.Linear(6, 7, f64), nn.Tanh(), norm,
    nn.Dropout(0.25), nn.Linear(7, 9, f64), nn.GELU(), nn.Linear(9, 7, f64), nn.Tanh(), nn.Linear(7, 7, f64),
    nn.Tanh(), nn.Linear(7, 4, f64))
end

--- Three steps of SGD: losses, the last gradients, the last state. No plan: the whole batch.
function planned.train(net, criterion, plan, n_samples)
  if plan then plan(net) end
  local opt = optim.SGD(net:parameters(), { lr = 0.1, momentum = 0.9 })
  local result = { losses = {}, state = {} }
  orrery.manual_seed(51)
  for k = 1, 3 do
    local x, t = orrery.randn(n_samples, 6, f64), orrery.randint(1, 4, n_samples)
    opt:zero_grad()
    local loss, count
    if plan then
      loss = plan:step(net, criterion, x, t)
    else
      loss, count = criterion(net(x), t)
      if count then loss = loss / count end
      loss:backward()
    end
    result.losses[k] = loss:item()
    result.gradients = behave.gradients(net)
    opt:step()
  end
  for name, tensor in pairs(net:state()) do result.state[name] = behave.list(tensor) end
  return result
end

--- Compares what planned.train gave, within 1e-9.
function planned.same(want, got, what)
  behave.near(want.losses, got.losses, 1e-9, what .. ", losses")
  behave.same_gradients(want.gradients, got.gradients, 1e-9, what .. ",")
  for name, values in pairs(want.state) do
    behave.near(values, got.state[name], 1e-9, what .. ", " .. name)
  end
end

return planned
