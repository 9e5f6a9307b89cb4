-- tensor<> plans: splits inside layers, alone and over or under data<>: the numbers of one device, few
-- collectives, layouts that follow the choice.
-- To add a net: a maker in `nets` with its batches; every plan, optimiser and check runs over it.
local orrery = require "orrery"
local core = require "orrery.core"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local f64 = { dtype = "f64" }

local plans = {
  "tensor<0,1>", "tensor<0..2>", "data<tensor<0,1>, tensor<2,3>>", "tensor<data<0,1>, data<2,3>>",
  "tensor<0..2; sequence=true>",
}

local GPT = nn.class("TinyGPT", function(self)
  self.tokens = nn.Embedding(19, 12, f64)
  self.places = nn.Embedding(7, 12, f64)
  self.drop = nn.Dropout(0.2)
  self.block1 = nn.TransformerBlock(12, 3, { causal = true, dropout = 0.1, dtype = "f64" })
  self.block2 = nn.TransformerBlock(12, 3, { causal = true, dropout = 0.1, dtype = "f64" })
  self.norm = nn.LayerNorm(12, f64)
end)

function GPT:forward(ids)
  local x = self.drop(self.tokens(ids) + self.places(orrery.arange(1, ids:size(2))))
  return core.linear(self.norm(self.block2(self.block1(x))), self.tokens.weight)
end

local nets = {
  mlp = {
    make = function()
      return nn.Sequential(nn.Linear(10, 13, f64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(13, 8, f64),
        nn.BatchNorm1d(8, f64), nn.Tanh(), nn.Linear(8, 2, f64), nn.ReLU(), nn.Linear(2, 5, f64))
    end,
    batch = function() return core.randn(9, 10, f64), core.randint(1, 5, 9) end,
    loss = function(y, target)
      return nn.cross_entropy(y, target, { label_smoothing = 0.1, ignore_index = 3 })
    end,
  },
  cnn = {
    make = function()
      return nn.Sequential(nn.Conv2d(2, 7, 3, f64), nn.BatchNorm2d(7, f64), nn.ReLU(),
        nn.Conv2d(7, 6, 3, { padding = 1, dtype = "f64" }), nn.BatchNorm2d(6, f64), nn.ReLU(),
        nn.Conv2d(6, 6, 3, { padding = 1, groups = 3, dtype = "f64" }), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(54, 5, f64))
    end,
    batch = function() return core.randn(7, 2, 8, 8, f64), core.randint(1, 5, 7) end,
    loss = nn.cross_entropy,
  },
  gpt = {
    make = function() return GPT() end,
    batch = function()
      local ids = core.randint(1, 19, 5, 8)
      return ids:narrow(2, 1, 7), ids:narrow(2, 2, 7)
    end,
    loss = function(y, target) return nn.cross_entropy(y:transpose(2, 3), target) end,
  },
}

local optimisers = {
  sgd = function(net)
    return optim.SGD(net:parameters(), { lr = 0.05, momentum = 0.9, weight_decay = 0.01 })
  end,
  adamw = function(net) return optim.AdamW(net:parameters(), { lr = 0.01 }) end,
}

local function difference(a, b) return (a:full() - b:full()):abs():reshape(-1):max():item() end

local function train(net, make_optimiser, plan)
  orrery.manual_seed(11)
  local model = net.make()
  if plan then plan(model) end
  local opt, losses = make_optimiser(model), {}
  for step = 1, 20 do
    local x, target = net.batch()
    opt:zero_grad()
    local loss = net.loss(model(x), target)
    loss:backward()
    losses[#losses + 1] = optim.clip_grad_norm(model, 0.7)
    opt:step()
    losses[#losses + 1] = loss:item()
    if step == 1 and plan then
      for name, p in model:named_parameters() do assert.equal(p:layout(), p.grad:layout(), name) end
    end
  end
  return losses, model
end

local function traffic(f)
  local count, redistributions = 0, 0
  for _, row in ipairs(parallel.trace(f)) do
    if row.axis == "tensor" then
      if row.op == "all_reduce" then count = count + row.count
      else redistributions = redistributions + row.count end
    end
  end
  return count, redistributions
end

describe("tensor<> plans", function()
  for name, net in pairs(nets) do
    for optimiser, make in pairs(optimisers) do
      it(("train %s with %s as one device does"):format(name, optimiser), function()
        local want, one = train(net, make)
        for _, text in ipairs(plans) do
          local got, many = train(net, make, parallel(text))
          for k, value in ipairs(want) do
            assert.is_true(math.abs(value - got[k]) <= 1e-9 * (1 + math.abs(value)),
              ("%s, number %d: %.17g and %.17g"):format(text, k, value, got[k]))
          end
          local weights = many:state()
          for key, value in pairs(one:state()) do
            assert.is_true(difference(value, weights[key]) <= 1e-9, text .. ", " .. key)
          end
        end
      end)
    end
  end

  it("split channels 22, 21, 21 over three devices, and what reads them where they are cut", function()
    local net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(),
      nn.Linear(64 * 16, 10))
    parallel "tensor<0..2>"(net, core.randn(4, 3, 6, 6))
    local function sizes(t, d)
      local list = {}
      for k, shard in ipairs(t:shards()) do list[k] = shard.tensor:size(d) end
      return list
    end
    assert.same({ 22, 21, 21 }, sizes(net[1].weight, 1))
    assert.same({ 22, 21, 21 }, sizes(net[2].running_mean, 1))
    assert.same({ 22 * 16, 21 * 16, 21 * 16 }, sizes(net[5].weight, 2))
    assert.matches("split out over 3 devices", tostring(net), 1, true)
  end)

  it("make one all-reduce a pair of layers, forward and backward, and redistribute nothing", function()
    local pairs_of = {
      { nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 16)), core.randn(6, 16) },
      { nn.Sequential(nn.Conv2d(4, 8, 3, { padding = 1 }), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3, { padding = 1 })), core.randn(3, 4, 6, 6) },
    }
    for k, pair in ipairs(pairs_of) do
      local net, x = pair[1], pair[2]
      net[1]:split "out"
      net[#net]:split "in"
      local plan = parallel "tensor<0,1>"
      plan(net, x)
      x = plan:place(x)
      x.requires_grad = true
      local loss
      local n, other = traffic(function() loss = net(x):square():sum() end)
      assert.same({ k, 1, 0 }, { k, n, other })
      n, other = traffic(function() loss:backward() end)
      assert.same({ k, 1, 0 }, { k, n, other })
    end
  end)

  it("make two all-reduces a transformer block, forward and backward", function()
    local block = nn.TransformerBlock(24, 4, { causal = true, dropout = 0.1 })
    local x, plan = core.randn(2, 5, 24), parallel "tensor<0..2>"
    plan(block, x)
    x = plan:place(x)
    x.requires_grad = true
    local loss
    local n, other = traffic(function() loss = block(x):square():sum() end)
    assert.same({ 2, 0 }, { n, other })
    n, other = traffic(function() loss:backward() end)
    assert.same({ 2, 0 }, { n, other })
    assert.equal("tensor<0,1,2>: shard(1)", block.attention.q.weight:layout())
    assert.equal("tensor<0,1,2>: shard(2)", block.attention.o.weight:layout())
  end)

  it("keep logits where they are in a cross entropy over split classes", function()
    local net, x, y = nn.Linear(8, 30), core.randn(5, 8), core.randint(1, 30, 5)
    local one = nn.cross_entropy(net(x), y):item()
    net:split "out"
    local plan = parallel "tensor<0..2>"
    plan(net, x)
    local bytes, loss = 0, nil
    for _, row in ipairs(parallel.trace(function() loss = nn.cross_entropy(net(x), y) end)) do
      if row.axis == "tensor" then bytes = bytes + row.bytes end
    end
    assert.is_true(bytes <= 3 * 5 * 4, bytes .. " bytes")
    assert.near(one, loss:item(), 1e-5)
  end)

  it("choose what the cheapest of all choices moves", function()
    local split, shapes = require "orrery.parallel.split", require "orrery.parallel.shapes"
    local makers = {
      function() return nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 6), nn.Tanh(),
        nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 9)), core.randn(50, 8) end,
      function() return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, { groups = 4 }),
        nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(64, 3)), core.randn(5, 3, 8, 8) end,
      function() return nn.Sequential(nn.Embedding(9, 12), nn.TransformerBlock(12, 3)),
        core.randint(1, 9, 4, 5) end,
      function() return nn.Sequential(nn.Embedding(9, 12), nn.Linear(12, 30), nn.GELU(), nn.Linear(30, 12),
        nn.LayerNorm(12), nn.Linear(12, 12)), core.randint(1, 9, 4, 5) end,
    }
    for turn = 1, 2 * #makers do
      local which, sequence = (turn + 1 - (turn + 1) % 2) / 2, turn % 2 == 0
      local net, x = makers[which]()
      local record, weights = shapes.record(net, { x }), {}
      for name, p in net:named_parameters() do
        if name:find "weight" and p:dim() > 1 then weights[#weights + 1] = record.index[p] end
      end
      local function cost(forced)
        return select(3, split.choose(shapes.record(net, { x }), forced, 1, sequence))
      end
      local best, forced = math.huge, {}
      local function try(k)
        if k > #weights then
          best = math.min(best, cost(forced))
          return
        end
        for dim = 0, 2 do
          forced[weights[k]] = dim
          try(k + 1)
        end
      end
      if #weights > 4 then -- the first four decide, the others follow the programme
        for k = #weights, 5, -1 do weights[k] = nil end
      end
      try(1)
      assert.equal(best, cost {}, ("net %d, sequence=%s"):format(which, tostring(sequence)))
      assert.is_true(best > 0 and best < cost { [weights[1]] = 0, [weights[2]] = 0 })
    end
  end)

  it("complete at the first call, and obey split", function()
    local function make() return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)) end
    local net = make()
    parallel "tensor<0,1>"(net)
    assert.is_nil(core.mesh_of(net[1].weight))
    net(core.randn(3, 6))
    assert.matches("shard", net[1].weight:layout())
    net = make()
    net[1]:split "in"
    net[3]:split "none"
    parallel "tensor<0,1>"(net, core.randn(3, 6))
    assert.matches("shard(2)", net[1].weight:layout(), 1, true)
    assert.matches("replicate", net[3].weight:layout())
    assert.has_error(function() net[1]:split "out" end)
    assert.has_error(function() make()[1]:split "both" end)
    assert.has_error(function() make()[2]:split "out" end)
  end)

  it("leave the net and the random streams alone when they look at shapes", function()
    orrery.manual_seed(3)
    local net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    local before, mean = net[1].weight:clone(), net[2].running_mean:clone()
    local state = core.random_state()
    require("orrery.parallel.shapes").record(net, { core.randn(3, 6) })
    core.set_random_state(state)
    assert.equal(0, difference(before, net[1].weight))
    assert.equal(0, difference(mean, net[2].running_mean))
    assert.equal("cpu", net[1].weight:layout())
  end)

  it("hold a quarter of the parameters a device over four", function()
    local net = nn.Sequential(nn.TransformerBlock(64, 4, { causal = true }),
      nn.TransformerBlock(64, 4, { causal = true }))
    local total = 0
    for _, p in ipairs(net:parameters()) do total = total + p:numel() end
    parallel "tensor<0..3>"(net, core.randn(2, 8, 64))
    for k = 1, 4 do
      local held = 0
      for _, p in ipairs(net:parameters()) do held = held + p:shards()[k].tensor:numel() end
      assert.is_true(held <= 0.3 * total, ("%d of %d"):format(held, total))
    end
  end)
end)
