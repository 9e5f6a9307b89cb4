--- The work of every case of the GPU bench, in Orrery. gpu_peer.py holds the same cases in PyTorch.
-- A case is a word, name:argument:..., such as "softmax:f32:8192:8192"; `cases` makes of it what
-- cases.lua makes of a name: a function that gives run(n), which does the work n times and waits, and a
-- number that both sides must find alike: a loss, or the mean of squares of the results.
-- Invariant: data and first weights follow one formula on both sides, and are made on the device.
-- To add a case: a function in `made`, its twin in gpu_peer.py, a row in gpu_rows.lua.
local orrery = require "orrery"
local core = require "orrery.core"
local clock = require("orrery.terminal").clock()
local nn, optim, parallel, amp = orrery.nn, orrery.optim, orrery.parallel, orrery.amp

local device = orrery.devices()[1].name
local unpack = table.unpack or unpack
local made = {}

-- ---- data: 65,536 scattered numbers in [-0.5, 0.5), over and over ----

local base

local function tensor(dtype, ...)
  if not base then
    local list = {}
    for i = 0, 65535 do list[i + 1] = (i * i % 65537) * 48271 % 65537 / 65537 - 0.5 end
    base = orrery.tensor(list, { dtype = "f32" }):to(device)
  end
  local n = 1
  for _, size in ipairs { ... } do n = n * size end
  local times = math.ceil(n / 65536)
  local all = times > 1 and base:unsqueeze(1):expand(times, 65536):reshape(-1) or base
  return all:narrow(1, 1, n):to(dtype):reshape(...):clone()
end

-- (i * i * 7919 % limit) + 1 for i from 0: ids of a vocabulary, labels.
local function ids(n, limit)
  local list = {}
  for i = 0, n - 1 do list[i + 1] = i * i % 1000003 * 7919 % limit + 1 end
  return orrery.tensor(list, { dtype = "i64" }):to(device)
end

-- run(n) of f, which gives its results, and their mean squares.
local function running(f)
  local first = 0
  for _, y in ipairs { f() } do first = first + y:to("f32"):square():mean():item() end
  return function(n)
    for _ = 1, n do f() end
    orrery.synchronize()
  end, first
end

local function with_grad(...)
  for _, x in ipairs { ... } do x.requires_grad = true end
  return ...
end

-- The same forward and backward: f(inputs) and its gradients by g, a tensor of its shape.
local function both_ways(f, g, ...)
  local inputs = { with_grad(...) }
  return running(function()
    local y = f(unpack(inputs))
    return y, unpack(orrery.grad(y, inputs, { grad = g }))
  end)
end

-- ---- bytes: elementwise, reductions, rows ----

function made.clone(dtype, n)
  local x = tensor(dtype, n)
  return running(function() return x:clone() end)
end

function made.add(dtype, n)
  local x, y = tensor(dtype, n), tensor(dtype, n)
  return running(function() return x + y end)
end

function made.gelu(dtype, n)
  local x = tensor(dtype, n)
  return running(function() return x:gelu() end)
end

-- x * w + b, w and b the same for every row: two kernels.
function made.muladd(dtype, rows, columns)
  local x, w, b = tensor(dtype, rows, columns), tensor(dtype, columns), tensor(dtype, columns)
  return running(function() return x * w + b end)
end

function made.strided(dtype, rows, columns)
  local x, y = tensor(dtype, columns, rows), tensor(dtype, rows, columns)
  return running(function() return x:t() + y end)
end

function made.sum(dtype, rows, columns, which)
  local x = tensor(dtype, rows, columns)
  local dim = which == "rows" and 2 or which == "columns" and 1 or nil
  return running(function() return x:sum(dim) end)
end

function made.softmax(dtype, rows, columns, how)
  local x = tensor(dtype, rows, columns)
  local function f(t) return t:softmax(2) end
  if how == "both" then return both_ways(f, tensor(dtype, rows, columns), x) end
  return running(function() return f(x) end)
end

function made.layer_norm(dtype, rows, columns, how)
  local x, w, b = tensor(dtype, rows, columns), tensor(dtype, columns), tensor(dtype, columns)
  if how == "both" then return both_ways(core.layer_norm, tensor(dtype, rows, columns), x, w, b) end
  return running(function() return core.layer_norm(x, w, b) end)
end

function made.rms_norm(dtype, rows, columns, how)
  local x, w = tensor(dtype, rows, columns), tensor(dtype, columns)
  if how == "both" then return both_ways(core.rms_norm, tensor(dtype, rows, columns), x, w) end
  return running(function() return core.rms_norm(x, w) end)
end

function made.cross_entropy(dtype, rows, columns)
  local x, y = tensor(dtype, rows, columns), ids(rows, columns)
  return both_ways(function(t) return nn.cross_entropy(t, y) end, nil, x)
end

function made.embedding(dtype, vocabulary, width, n)
  local w, at = tensor(dtype, vocabulary, width), ids(n, vocabulary)
  return both_ways(function(t) return core.embedding(t, at) end, tensor(dtype, n, width), w)
end

-- Parameters of `each` numbers, n in all.
function made.adamw(dtype, n, each)
  local params = {}
  for k = 1, math.floor(n / each) do
    params[k] = tensor(dtype, each)
    params[k].requires_grad = true
    params[k].grad = tensor(dtype, each)
  end
  local opt = optim.AdamW(params, { lr = 1e-3 })
  return running(function()
    opt:step()
    return params[1]:detach()
  end)
end

-- ---- arithmetic: products, convolution, attention ----

-- f with f32 products allowed to be rounded where the dtype is tf32, and the dtype of its tensors.
local function rounded(dtype, f)
  if dtype ~= "tf32" then return f, dtype end
  return function(...)
    local was = orrery.allow_tf32(true)
    local y = f(...)
    orrery.synchronize()
    orrery.allow_tf32(was)
    return y
  end, "f32"
end

function made.matmul(dtype, n)
  local x, y
  local run, real = rounded(dtype, function(times)
    local z
    for _ = 1, times do z = x:matmul(y) end
    return z
  end)
  x, y = tensor(real, n, n), tensor(real, n, n)
  local first = run(1):to("f32"):square():mean():item()
  return function(times)
    run(times)
    orrery.synchronize()
  end, first
end

-- Forward and backward of a k x k convolution that keeps the size.
function made.conv(dtype, n, channels, size, k)
  local pad, inputs, g = math.floor(k / 2), nil, nil
  local run, real = rounded(dtype, function(times)
    local y, grads
    for _ = 1, times do
      y = core.conv2d(inputs[1], inputs[2], nil, 1, 1, pad, pad, 1, 1, 1)
      grads = orrery.grad(y, inputs, { grad = g })
    end
    return { y, grads[1], grads[2] }
  end)
  inputs = { with_grad(tensor(real, n, channels, size, size), tensor(real, channels, channels, k, k)) }
  g = tensor(real, n, channels, size, size)
  local first = 0
  for _, y in ipairs(run(1)) do first = first + y:to("f32"):square():mean():item() end
  return function(times)
    run(times)
    orrery.synchronize()
  end, first
end

-- Causal; (batch, heads, positions, features).
function made.attention(dtype, batch, heads, positions, features, how)
  local x = {}
  for k = 1, 3 do x[k] = tensor(dtype, batch, heads, positions, features):mul(k) end
  local function f(q, k, v) return core.scaled_dot_product_attention(q, k, v, true) end
  if how == "both" then
    return both_ways(f, tensor(dtype, batch, heads, positions, features), unpack(x))
  end
  return running(function() return f(unpack(x)) end)
end

-- ---- training ----

-- Matrices by the formula, within 1 / sqrt(fan in); norms start from 1, biases from 0.
local function fill(net)
  orrery.no_grad(function()
    for name, p in net:named_parameters() do
      if p:dim() > 1 then
        p:copy_(tensor("f32", p:numel()):mul(2 / math.sqrt(p:size(2))):reshape(unpack(p:size())))
      elseif name:find "bias" then
        p:zero_()
      end
    end
  end)
end

local TRIES = 10 -- calls after which a captured step must have been replayed

-- run(n) for n training steps: eager, or captured, which raises where the step is not replayed.
local function training(step, how, ...)
  local given = { ... }
  if how == "captured" then step = orrery.capture(step) end
  local first = step(unpack(given)):item()
  if how == "captured" then
    for _ = 1, TRIES do step(unpack(given)) end
    if step.replays == 0 then error("the step is not replayed: " .. tostring(step:reason()), 0) end
  end
  return function(n)
    for _ = 1, n do step(unpack(given)) end
    orrery.synchronize()
  end, first
end

-- 64-64-10 on 32 rows, on one device or under data<0..k-1>.
function made.mlp(how, devices)
  local net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)):to(device)
  fill(net)
  local x, y = tensor("f32", 32, 64), ids(32, 10)
  if devices > 1 then
    local plan = parallel(("data<0..%d>"):format(devices - 1))
    net = plan(net, x)
    x, y = plan:place(x:to "cpu"), plan:place(y:to "cpu")
  end
  local opt = optim.SGD(net:parameters(), { lr = 0.01 })
  return training(function(a, b)
    opt:zero_grad()
    local loss = nn.cross_entropy(net(a), b)
    loss:backward()
    opt:step()
    return loss
  end, how, x, y)
end

local GPT = nn.class("GPT", function(self, o)
  self.tokens = nn.Embedding(o.vocabulary, o.width)
  self.positions = nn.Embedding(o.context, o.width)
  self.blocks = nn.Sequential()
  for k = 1, o.layers do self.blocks[k] = nn.TransformerBlock(o.width, o.heads, { causal = true }) end
  self.norm = nn.LayerNorm(o.width)
end)

function GPT:forward(text, at)
  local x = self.norm(self.blocks(self.tokens(text) + self.positions(at)))
  return x:reshape(-1, x:size(3)):matmul(self.tokens.weight:t())
end

-- A training step of a GPT with AdamW, in bf16 autocast, or ("masters") with bf16 parameters of which the
-- optimizer keeps f32 masters; the output weight is the embedding.
function made.gpt(how, batch, context, layers, width, heads, vocabulary)
  local net = GPT { context = context, layers = layers, width = width, heads = heads,
    vocabulary = vocabulary }
  net = net:to(device)
  fill(net)
  if how == "masters" then net = net:to "bf16" end
  local text = ids(batch * (context + 1), vocabulary):reshape(batch, context + 1)
  local x, y = text:narrow(2, 1, context):contiguous(), text:narrow(2, 2, context):reshape(-1)
  local at = orrery.arange(1, context):to(device)
  local opt = optim.AdamW(net:parameters(), { lr = 1e-3, weight_decay = 0.1 })
  return training(function(a, b, c)
    opt:zero_grad()
    local function forward() return nn.cross_entropy(net(a, c), b) end
    local loss = how == "masters" and forward() or amp.autocast("bf16", forward)
    loss:backward()
    opt:step()
    return loss
  end, how, x, y, at)
end

-- ---- what an op costs the host ----

-- Four numbers a device, on a mesh of k devices.
local function on_devices(k)
  if k == 1 then return tensor("f32", 4) end
  local names = {}
  for i = 1, k do names[i] = orrery.devices()[i].name end
  return core.distribute(orrery.ones(4 * k), core.mesh({ "data" }, { k }, names), "shard(1)")
end

-- Seconds of the controller alone: calls are timed, waiting for the devices is not.
function made.issue(k)
  local x = on_devices(k)
  return function(n)
    local seconds, left = 0, n
    while left > 0 do
      local part, y = math.min(left, 256), nil
      local start = clock()
      for _ = 1, part do y = x + x end
      seconds = seconds + clock() - start
      orrery.synchronize()
      left = y and left - part
    end
    return seconds
  end
end

-- Back to back, devices and all: as fast as the slowest of controller, worker and GPU.
function made.op(k)
  local x = on_devices(k)
  return running(function() return x + x end)
end

-- ---- words ----

return setmetatable({}, { __index = function(_, word)
  local parts = {}
  for part in word:gmatch "[^:]+" do parts[#parts + 1] = tonumber(part) or part end
  local f = made[parts[1]]
  return f and function() return f(unpack(parts, 2)) end
end })
