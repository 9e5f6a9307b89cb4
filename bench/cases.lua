--- The work of every case, in Orrery. peer.py holds the same cases in PyTorch.
-- Invariant: a case is a function of {threads=, devices=, size=} that gives run(n), which does the work
-- n times and waits for its end, and the loss of the first step where there is one. Data and first
-- weights follow one formula on both sides, so that equal losses mean equal work.
-- devices = 0 is the device `cpu` with that many threads; k > 0 is the plan data<0..k-1>, or what the
-- case names for k devices.
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

local function plan_over(devices, plans)
  if devices == 0 then return nil end
  if plans and plans[devices] then return parallel(plans[devices]) end
  local ids = {}
  for k = 1, devices do ids[k] = k - 1 end
  return parallel("data<" .. table.concat(ids, ",") .. ">")
end

-- run(n) for n training steps on one batch; plans: by the number of devices.
local function training(net, x, y, make_optimizer, given, plans)
  local plan = plan_over(given.devices, plans)
  if plan then
    net = plan(net, x)
    x, y = plan:place(x), plan:place(y)
  end
  local opt = make_optimizer(net)
  local staged = plan and plan:shape().model
  local function step()
    opt:zero_grad()
    local loss
    if staged then
      loss = plan:step(net, nn.cross_entropy, x, y)
    else
      loss = nn.cross_entropy(net(x), y)
      loss:backward()
    end
    opt:step()
    return loss
  end
  if given.captured then step = orrery.capture(step) end
  local first = step():item()
  return function(n)
    for _ = 1, n do step() end
    orrery.synchronize()
  end, first
end

-- The same by SGD, from filled weights.
local function training_by_sgd(net, x, y, options, given, plans)
  fill(net)
  local function make(placed) return optim.SGD(placed:parameters(), options) end
  return training(net, x, y, make, given, plans)
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
  return training_by_sgd(net, tensor(32, 64), labels(32), { lr = 0.01 }, given)
end

function cases.tiny_captured(given)
  given.captured = true
  return cases.tiny(given)
end

function cases.mlp(given)
  local batch = given.size or 128
  local net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
    nn.Linear(512, 10))
  return training_by_sgd(net, tensor(batch, 784), labels(batch), { lr = 0.01, momentum = 0.9 }, given)
end

function cases.cnn(given)
  local batch = given.size or 64
  local net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))
  return training_by_sgd(net, tensor(batch, 1, 28, 28), labels(batch), { lr = 0.01, momentum = 0.9 },
    given)
end

-- Four layers of 2048, split inside over two devices.
function cases.wide(given)
  local batch = given.size or 256
  local net = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
    nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
  return training_by_sgd(net, tensor(batch, 784), labels(batch), { lr = 0.01, momentum = 0.9 }, given,
    { "data<0>", "tensor<0,1>" })
end

-- Eight equal blocks, four a device, in eight micro-batches on two devices.
function cases.blocks(given)
  local batch, net = given.size or 1024, nn.Sequential()
  for _ = 1, 8 do net:add(nn.Sequential(nn.Linear(512, 512), nn.ReLU())) end
  return training_by_sgd(net, tensor(batch, 512), labels(batch), { lr = 0.01, momentum = 0.9 }, given,
    { "data<0>", "model<0,1; micro=8, schedule=1f1b>" })
end

-- Forward and backward of causal attention: (batch, 8 heads, 128 positions, 32 features).
function cases.attention(given)
  local batch, x = given.size or 16, {}
  for k = 1, 3 do
    x[k] = tensor(batch, 8, 128, 32):mul(k)
    x[k].requires_grad = true
  end
  local g = tensor(batch, 8, 128, 32)
  local function once()
    local y = nn.scaled_dot_product_attention(x[1], x[2], x[3], { causal = true })
    return y, orrery.grad(y, x, { grad = g })
  end
  local y, grads = once()
  local first = y:square():sum():item()
  for k = 1, 3 do first = first + grads[k]:square():sum():item() end
  return function(n)
    for _ = 1, n do once() end
    orrery.synchronize()
  end, first
end

-- Four layers of width 256 and 8 heads over 128 bytes of text; the output weight is the embedding.
local GPT = nn.class("GPT", function(self)
  self.tokens, self.positions = nn.Embedding(256, 256), nn.Embedding(128, 256)
  self.blocks = nn.Sequential()
  for k = 1, 4 do self.blocks[k] = nn.TransformerBlock(256, 8, { causal = true }) end
  self.norm = nn.LayerNorm(256)
end)

function GPT:forward(ids)
  local x = self.tokens(ids) + self.positions(orrery.arange(1, ids:size(2)))
  x = self.norm(self.blocks(x))
  return x:reshape(-1, 256):matmul(self.tokens.weight:t())
end

-- Matrices by `fill`'s formula; norms and biases start from 1 and 0.
local function fill_matrices(net)
  for name, p in net:named_parameters() do
    if p:dim() > 1 then
      p:copy_(tensor(p:size(1), p:size(2)):mul(2 / math.sqrt(p:size(2))))
    elseif name:find "bias" then
      p:zero_()
    end
  end
end

function cases.gpt(given)
  local batch, net, ids = given.size or 16, GPT(), {}
  orrery.no_grad(fill_matrices, net)
  for k = 0, batch * 129 - 1 do ids[k + 1] = k * k % 251 + 1 end
  local text = orrery.tensor(ids, { dtype = "i64" }):reshape(batch, 129)
  local x, y = text:narrow(2, 1, 128):contiguous(), text:narrow(2, 2, 128):reshape(-1)
  return training(net, x, y, function(placed)
    return optim.AdamW(placed:parameters(), { lr = 1e-3, weight_decay = 0.1 })
  end, given)
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
