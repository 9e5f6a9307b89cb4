-- What is run while calls of the fake libraries fail: together they reach every function that the plug-in
-- calls.
-- Invariant: a workload is a function of the numbers of two CUDA devices; it gives numbers that depend on
-- nothing else, and leaves nothing behind.
-- To add one: a function here; errors_spec.lua runs all of them.
local orrery = require "orrery"
local core = require "orrery.core"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local workloads = {}

-- "data<%s>" over both devices.
local function plan_over(text, devices)
  return parallel(text:format(("cuda:%d, cuda:%d"):format(devices[1], devices[2])))
end

-- Losses of two steps.
local function train(plan, net, x, y)
  local opt, losses = optim.SGD(net:parameters(), { lr = 0.1, momentum = 0.9 }), {}
  for k = 1, 2 do
    opt:zero_grad()
    local loss = plan:step(net, nn.cross_entropy, x, y)
    opt:step()
    losses[k] = loss:item()
  end
  return losses
end

local function rows() return orrery.randn(8, 6), orrery.randint(1, 3, 8) end

local function mlp(width)
  return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3))
end

local function trains(text, width)
  return function(devices)
    orrery.manual_seed(3)
    local plan = plan_over(text, devices)
    local x, y = rows()
    return train(plan, plan(mlp(width), x), x, y)
  end
end

--- Convolutions, an all-reduce of gradients.
function workloads.data(devices)
  orrery.manual_seed(3)
  local plan = plan_over("data<%s>", devices)
  local x, y = orrery.randn(4, 1, 4, 4), orrery.randint(1, 3, 4)
  local net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
  return train(plan, plan(net, x), x, y)
end

--- Parameters gathered and gradients scattered.
workloads.zero = trains("data<%s; zero=3>", 64)

--- Sums inside layers, an embedding.
function workloads.tensor(devices)
  orrery.manual_seed(3)
  local plan = plan_over("tensor<%s>", devices)
  local x, y = orrery.randint(1, 6, 8), orrery.randint(1, 4, 8)
  local net = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
  return train(plan, plan(net, x), x, y)
end

--- Activations from stage to stage.
workloads.pipeline = trains("model<%s; micro=2>", 8)

--- Steps replayed as graphs.
function workloads.capture(devices)
  orrery.manual_seed(3)
  local plan = plan_over("data<%s>", devices)
  local net, losses = plan(mlp(8), orrery.ones(8, 6)), {}
  local opt = optim.SGD(net:parameters(), { lr = 0.1 })
  local f = orrery.capture(function(x, y)
    opt:zero_grad()
    local loss = nn.cross_entropy(net(x), y)
    loss:backward()
    opt:step()
    return loss
  end)
  for k = 1, 6 do
    local x, y = rows()
    losses[k] = f(plan:place(x), plan:place(y)):item()
  end
  return losses
end

--- Attention in bf16, by graphs of cuDNN; of ones, so that another way gives the same bits.
function workloads.attention(devices)
  local sums = {}
  local function ones()
    return orrery.ones(2, 2, 4, 8, { dtype = "bf16", device = "cuda:" .. devices[1] }):requires_grad_()
  end
  local q, k, v = ones(), ones(), ones()
  local y = nn.scaled_dot_product_attention(q, k, v)
  y:sum():backward()
  for i, x in ipairs { y:detach(), v.grad, q.grad } do sums[i] = x:to("f32"):sum():item() end
  return sums
end

--- Memory of the host and of both devices, of any order; what devices are and how they are joined.
function workloads.moves(devices)
  local a, b = "cuda:" .. devices[1], "cuda:" .. devices[2]
  local out, x = {}, orrery.arange(1, 60, { dtype = "f64" }):reshape(3, 4, 5)
  local there = x:to(a)
  out[1] = there:transpose(1, 3):to(b):transpose(1, 2):to("cpu"):narrow(1, 2, 1):sum():item()
  out[2] = x:transpose(1, 2):to(b):mul(2):to(a):to("cpu"):select(1, 3):sum():item()
  local labels = orrery.tensor({ 2, 3 }, { dtype = "i64" }):to(a)
  out[3] = there:index_select(1, labels):sum():item()
  out[4] = orrery.arange(1, 40000):to(a):to(b):sum():item()
  local batch = orrery.arange(1, 24, { dtype = "f32" }):reshape(2, 3, 4):to(b)
  out[6] = batch:matmul(batch:transpose(2, 3)):sum():item()
  assert(tostring(orrery.devices()):find(a, 1, true))
  for _, d in ipairs(orrery.devices()) do
    if d.name == a then out[5] = d.free > 0 and 1 or 0 end
  end
  core.link(devices[1], devices[2], true)
  return out
end

return workloads
