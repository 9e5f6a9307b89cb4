-- The smallest training script: learns y = sin(3 x) from 256 noisy points.
--
--   orrery examples/regression.lua [--steps N]
local orrery = require "orrery"
local nn, optim = orrery.nn, orrery.optim

local steps = arg[1] == "--steps" and tonumber(arg[2]) or 600
orrery.manual_seed(1)

-- 256 points: x (256, 1) from -1 to 1, y with a little noise.
local x = orrery.linspace(-1, 1, 256):view(256, 1)
local truth = (x * 3):sin()
local y = truth + orrery.randn(256, 1) * 0.05

local net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
local opt = optim.Adam(net:parameters(), { lr = 0.01 })

for step = 1, steps do
  opt:zero_grad()
  local loss = nn.mse_loss(net(x), y)
  loss:backward()
  opt:step()
  if step == 1 or step % 100 == 0 or step == steps then
    print(("step %4d  loss %.5f"):format(step, loss:item()))
  end
end

-- How far the learned curve is from the one without noise.
orrery.no_grad(function()
  print(("largest distance from sin(3 x): %.3f"):format((net(x) - truth):abs():max():item()))
end)
