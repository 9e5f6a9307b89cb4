-- Behaviours 26, 28 and 29: batch norm over the global batch, two forwards before one backward, and
-- random numbers that do not know the devices. (27 is of micro-batches, with model plans.)
-- To add a random layer: a row in `draws`, equal on every count of devices.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local f64 = { dtype = "f64" }

describe("behaviour 26", function()
  -- Outputs, gradients and running statistics of one training forward and backward.
  local function run(n, samples, options, shape)
    orrery.manual_seed(41)
    local layer = (#shape == 0 and nn.BatchNorm1d or nn.BatchNorm2d)(3, f64)
    orrery.no_grad(function()
      layer.weight:copy_(orrery.tensor({ 1.5, -0.5, 2 }, f64))
      layer.bias:copy_(orrery.tensor({ 0.25, 1, -1 }, f64))
    end)
    local net = nn.Sequential(layer)
    local x = orrery.randn({ samples, 3, behave.unpack(shape) }, f64)
    local g = (orrery.arange(1, x:numel(), f64) * 0.7):sin():view(x:size())
    local plan = n > 0 and behave.plan(n, options)
    if plan then
      plan(net)
      x, g = plan:place(x):clone(), plan:place(g)
    end
    x.requires_grad = true
    local y = net(x)
    y:backward(g)
    return { y = behave.list(y), x = behave.list(x.grad), weight = behave.list(layer.weight.grad),
      bias = behave.list(layer.bias.grad), mean = behave.list(layer.running_mean),
      var = behave.list(layer.running_var) },
      x:totable()
  end

  local function compare(want, got, what)
    for key, values in pairs(want) do behave.near(values, got[key], 1e-11, what .. ", " .. key) end
  end

  for _, shape in ipairs { {}, { 2, 3 } } do
    it(("is one device's on the global batch, shards of 0 and 1 included (%d-d)"):format(2 + #shape),
      function()
      for _, samples in ipairs { 2, 3, 7, 13 } do
        local want = run(0, samples, nil, shape)
        for _, n in ipairs(behave.counts) do
          compare(want, (run(n, samples, nil, shape)), ("%d samples on %d"):format(samples, n))
        end
      end
    end)
  end

  it("weights shards by their counts: 7 values over 2 devices, by hand", function()
    local x = orrery.tensor({ { 1 }, { 2 }, { 3 }, { 4 }, { 5 }, { 6 }, { 21 } }, f64)
    local net = nn.Sequential(nn.BatchNorm1d(1, { momentum = 1, eps = 0, dtype = "f64" }))
    behave.plan(2)(net)
    local y = net(x)
    local var, mean = 0, 6
    for _, v in ipairs { 1, 2, 3, 4, 5, 6, 21 } do var = var + (v - mean) ^ 2 end
    assert.near(mean, net:children()[1].running_mean:item(), 1e-12)
    assert.near(var / 6, net:children()[1].running_var:item(), 1e-12) -- the unbiased one
    assert.near((21 - mean) / math.sqrt(var / 7), y[7]:item(), 1e-12)
  end)

  it("sync_bn=false asks for statistics per device; running ones merge all devices", function()
    local samples = 13
    local global = run(0, samples, nil, {})
    for _, n in ipairs { 2, 3, 5 } do
      local got, x = run(n, samples, "sync_bn=false", {})
      local weight, bias = { 1.5, -0.5, 2 }, { 0.25, 1, -1 }
      local at, k = 0, 0
      for device = 1, n do
        local count = math.floor(samples / n) + (device <= samples % n and 1 or 0)
        for row = 1, count do
          for c = 1, 3 do
            local mean, var = 0, 0
            for i = at + 1, at + count do mean = mean + x[i][c] / count end
            for i = at + 1, at + count do var = var + (x[i][c] - mean) ^ 2 / count end
            k = k + 1
            assert.near((x[at + row][c] - mean) / math.sqrt(var + 1e-5) * weight[c] + bias[c], got.y[k],
              1e-11)
          end
        end
        at = at + count
      end
      behave.near(global.mean, got.mean, 1e-11, n .. " devices, running mean")
      behave.near(global.var, got.var, 1e-11, n .. " devices, running variance")
    end
  end)

  it("in evaluation the running statistics serve, whatever the split", function()
    for _, n in ipairs(behave.counts) do
      local net = nn.Sequential(nn.BatchNorm1d(2, { eps = 0, dtype = "f64" }))
      net:children()[1].running_mean:copy_(orrery.tensor({ 1, -1 }, f64))
      net:children()[1].running_var:copy_(orrery.tensor({ 4, 0.25 }, f64))
      behave.plan(n)(net):eval()
      behave.near({ { 0, 2 }, { 1, 6 } }, net(orrery.tensor({ { 1, 0 }, { 3, 2 } }, f64)), 1e-12)
      behave.near({ 1, -1 }, net:children()[1].running_mean, 0)
    end
  end)

  it("every replica holds the same running statistics", function()
    for _, n in ipairs(behave.counts) do
      local net = behave.plan(n)(nn.Sequential(nn.BatchNorm1d(3, f64)))
      net(orrery.randn(7, 3, f64))
      local want = net:children()[1].running_var
      for _, shard in ipairs(want:shards()) do behave.near(want, shard.tensor, 0, shard.device) end
    end
  end)
end)

describe("behaviour 28", function()
  it("two forwards before one backward work with batch norm", function()
    local want
    for _, n in ipairs { 0, 1, 2, 3, 5 } do
      orrery.manual_seed(43)
      local net = behave.net()
      local a, b = orrery.randn(7, 6, f64), orrery.randn(5, 6, f64)
      local ta, tb = orrery.randint(1, 4, 7), orrery.randint(1, 4, 5)
      if n > 0 then behave.plan(n)(net) end
      local first, second = net(a), net(b)
      local loss = nn.cross_entropy(first, ta) + nn.cross_entropy(second, tb)
      loss:backward()
      local got = behave.gradients(net)
      got.loss = { loss:item() }
      got.mean = behave.list(net:children()[2].running_mean)
      want = want or got
      behave.same_gradients(want, got, 1e-11, n .. " devices,")
    end
  end)

  it("the first forward's backward after the second forward is that of the first", function()
    for _, n in ipairs(behave.counts) do
      orrery.manual_seed(43)
      local net = behave.plan(n)(nn.Sequential(nn.BatchNorm1d(3, f64)))
      local a, b = orrery.randn(7, 3, f64), orrery.randn(5, 3, f64)
      net(a):pow(2):sum():backward()
      local want = behave.gradients(net)
      net:zero_grad()
      local y = net(a):pow(2):sum()
      net(b)
      y:backward()
      behave.same_gradients(want, behave.gradients(net), 1e-12, n .. " devices,")
    end
  end)
end)

describe("behaviour 29", function()
  local counts = { 1, 2, 3, 5, 8 }

  it("initial weights are the same on 1, 2, 3, 5 and 8 devices", function()
    local function make()
      orrery.manual_seed(47)
      return nn.Sequential(nn.Linear(6, 5), nn.Conv2d(2, 3, 3), nn.Embedding(7, 3), nn.LSTM(3, 4))
    end
    local want = make():parameters()
    for _, n in ipairs(counts) do
      local net = behave.plan(n)(make())
      for k, p in ipairs(net:parameters()) do behave.near(want[k], p, 0, n .. " devices") end
    end
  end)

  -- Each gets a batch that may be placed, and draws.
  local draws = {
    { "dropout", function(x) return core.dropout(x, 0.4) end },
    { "two dropouts", function(x) return core.dropout(core.dropout(x, 0.2), 0.2) end },
    { "nn.Dropout", function(x) return nn.Dropout(0.5)(x) end },
  }
  for _, draw in ipairs(draws) do
    it(draw[1] .. " drops the same elements under every placement", function()
      local x = orrery.full(1, 13, 6, f64)
      orrery.manual_seed(48)
      local want = draw[2](x)
      local dropped = want:eq(0):sum():item()
      assert.is_true(dropped > 10 and dropped < 68, tostring(dropped))
      for _, n in ipairs(counts) do
        for _, word in ipairs { "replicate", "shard(1)", "shard(2)" } do
          orrery.manual_seed(48)
          behave.near(want, draw[2](behave.place(x, n, word)), 0, n .. " devices, " .. word)
        end
      end
      local mesh = core.mesh({ "data", "tensor" }, { 2, 3 }, { "cpu:0", "cpu:1", "cpu:2", "cpu:3", "cpu:4",
        "cpu:5" })
      orrery.manual_seed(48)
      behave.near(want, draw[2](core.distribute(x, mesh, "shard(1)", "shard(2)")), 0, "2x3")
    end)
  end

  it("two dropouts of one shape differ, and so do two steps", function()
    orrery.manual_seed(48)
    local x = orrery.full(1, 40, f64)
    local a, b = core.dropout(x, 0.5), core.dropout(x, 0.5)
    assert.is_true(a:ne(b):any():item())
  end)

  it("loader, init and dropout draw from streams of their own", function()
    local x = orrery.full(1, 20, f64)
    orrery.manual_seed(49)
    local mask, weights = core.dropout(x, 0.5), nn.Linear(4, 3).weight
    local order = core.permutation(20, 49, 1)
    orrery.manual_seed(49)
    orrery.rand(5)
    orrery.randperm(6)
    behave.near(mask, core.dropout(x, 0.5), 0, "dropout after user draws")
    behave.near(weights, nn.Linear(4, 3).weight, 0, "init after user draws and dropout")
    behave.near(order, core.permutation(20, 49, 1), 0, "order")
    orrery.manual_seed(49)
    local user = orrery.rand(5)
    orrery.manual_seed(49)
    nn.Linear(4, 3)
    core.dropout(x, 0.5)
    behave.near(user, orrery.rand(5), 0, "user draws after init and dropout")
  end)

  it("rand, randn, randint, bernoulli and randperm are the same on every device", function()
    local function draw(device)
      orrery.manual_seed(50)
      local o = { device = device, dtype = "f64" }
      return orrery.cat({ orrery.rand(9, o), orrery.randn(9, o),
        orrery.randint(1, 9, 9, { device = device }):to("f64"),
        orrery.bernoulli(0.3, 9, o) }, 1)
    end
    local want = draw("cpu")
    for k = 0, 7 do behave.near(want, draw("cpu:" .. k), 0, "cpu:" .. k) end
  end)

  it("a training run with dropout has the same losses under every plan", function()
    local want
    for _, n in ipairs { 0, 1, 2, 3, 5, 8 } do
      orrery.manual_seed(51)
      local net = behave.net()
      local x, t = orrery.randn(11, 6, f64), orrery.randint(1, 4, 11)
      if n > 0 then parallel("data<" .. (n == 1 and "0" or "0.." .. n - 1) .. ">")(net) end
      local opt, got = optim.SGD(net:parameters(), { lr = 0.1 }), {}
      for k = 1, 5 do
        opt:zero_grad()
        local loss = nn.cross_entropy(net(x), t)
        loss:backward()
        opt:step()
        got[k] = loss:item()
      end
      want = want or got
      behave.near(want, got, 1e-11, n .. " devices")
    end
  end)
end)
