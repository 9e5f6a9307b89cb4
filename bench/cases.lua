--- The work of every case, in Orrery. peer.py holds the same cases in PyTorch.
-- Invariant: a case is a function of {threads=, devices=, size=} that gives run(n), which does the work
-- n times and waits for its end, and the loss of the first step where there is one. Data and first
-- weights follow one formula on both sides, so that equal losses mean equal work.
-- devices = 0 is the device `cpu` with that many threads; k > 0 is the plan data<0..k-1>.
-- To add a case: a function here, its twin in peer.py, a row in rows.lua.
local orrery = require "orrery"
local core = require "orrery.core"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local cases = {}

-- n numbers in [-0.5, 0.5): quadratic residues, scattered.
local function numbers(n)
  local list = {}
  for i = 0, n - 1 do list[i + 1] = (i * i % 65537) * 48271 % 65537 / 65537 - 0.5 end
  return list
end

local function tensor(...)
  local n = 1
  for _, size in ipairs { ... } do n = n * size end
  return orrery.tensor(numbers(n), { dtype = "f32" }):reshape(...)
end

-- Labels 1..10 (0..9 on the other side).
local function labels(n)
  local list = {}
  for i = 1, n do list[i] = (i - 1) * 7 % 10 + 1 end
  return orrery.tensor(list, { dtype = "i64" })
end

-- Weights and biases within 1 / sqrt(fan in), by the formula above.
local function fill(net)
  local bound = 1
  orrery.no_grad(function()
    for _, p in ipairs(net:parameters()) do
      if p:dim() > 1 then bound = 2 / math.sqrt(p:numel() / p:size(1)) end
      p:copy_(tensor(p:numel()):mul(bound):reshape((table.unpack or unpack)(p:size())))
    end
  end)
end

local function plan_over(devices)
  if devices == 0 then return nil end
  local ids = {}
  for k = 1, devices do ids[k] = k - 1 end
  return parallel("data<" .. table.concat(ids, ",") .. ">")
end

-- run(n) for n training steps on one batch.
local function training(net, x, y, options, given)
  fill(net)
  local plan = plan_over(given.devices)
  if plan then
    net, x, y = plan(net), plan:place(x), plan:place(y)
  end
  local opt = optim.SGD(net:parameters(), options)
  local function step()
    opt:zero_grad()
    local loss = nn.cross_entropy(net(x), y)
    loss:backward()
    opt:step()
    return loss
  end
  local first = step():item()
  return function(n)
    for _ = 1, n do step() end
    orrery.synchronize()
  end, first
end

local function add(requires_grad)
  local options = { dtype = "f32", requires_grad = requires_grad }
  local x, y = orrery.tensor({ 1, 2, 3, 4 }, options), orrery.tensor({ 5, 6, 7, 8 }, options)
  return function(n)
    local z
    for _ = 1, n do z = x + y end
    collectgarbage()
    return z
  end
end

function cases.add() return add(false) end
function cases.add_grad() return add(true) end

function cases.tiny(given)
  local net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
  return training(net, tensor(32, 64), labels(32), { lr = 0.01 }, given)
end

function cases.mlp(given)
  local batch = given.size or 128
  local net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
    nn.Linear(512, 10))
  return training(net, tensor(batch, 784), labels(batch), { lr = 0.01, momentum = 0.9 }, given)
end

function cases.cnn(given)
  local batch = given.size or 64
  local net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))
  return training(net, tensor(batch, 1, 28, 28), labels(batch), { lr = 0.01, momentum = 0.9 }, given)
end

-- size bytes a device, summed over the devices in place (as gloo does), n times queued, then waited
-- for. The shards are zeros after the first sum is taken, so that they stay finite.
function cases.allreduce(given)
  local count, shards, ids = given.size / 4, {}, {}
  for k = 1, given.devices do
    ids[k] = "cpu:" .. k - 1
    shards[k] = orrery.ones(count, { dtype = "f32", device = ids[k] })
  end
  local mesh = core.mesh({ "data" }, { given.devices }, ids)
  local partial = core.from_shards(mesh, { count }, shards, "partial(sum)")
  local sum = partial:redistribute "replicate":full()
  partial:zero_()
  return function(n)
    for _ = 1, n do core.all_reduce_(partial) end
    orrery.synchronize()
  end, sum[1]:item()
end

return cases
