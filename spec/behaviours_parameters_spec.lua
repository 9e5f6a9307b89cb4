-- Behaviours 21 to 25: unused, shared and frozen parameters, identity of parameters, any output table.
-- (22 across two stages and 23 under zero=3 come with those plans.)
-- To add a case: run it on every count of devices and compare with one device.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local f64 = { dtype = "f64" }
local all = { 0, 1, 2, 3, 5 } -- 0: no plan

local function batch(n)
  orrery.manual_seed(31)
  return orrery.randn(n or 7, 6, f64), orrery.randint(1, 3, n or 7)
end

local function placed(n, net)
  if n > 0 then behave.plan(n)(net) end
  return net
end

describe("behaviour 21", function()
  local function make()
    orrery.manual_seed(30)
    local net = nn.Module { used = nn.Linear(6, 3, f64), spare = nn.Linear(6, 3, f64) }
    function net:forward(x, both)
      local y = self.used(x)
      return both and y + self.spare(x) or y
    end
    return net
  end

  it("an unused parameter has a nil gradient; nothing hangs or raises; a debug call names it", function()
    local x, t = batch()
    for _, n in ipairs(all) do
      local net = placed(n, make())
      local opt = optim.Adam(net:parameters(), { lr = 0.1 })
      local was = behave.list(net.spare.weight)
      for _ = 1, 3 do
        opt:zero_grad()
        nn.cross_entropy(net(x), t):backward()
        assert.is_nil(net.spare.weight.grad)
        assert.is_nil(net.spare.bias.grad)
        assert.same({ "spare.bias", "spare.weight" }, (function(list)
          table.sort(list)
          return list
        end)(parallel.unused(net)))
        opt:step()
      end
      behave.near(was, net.spare.weight, 0, "an unused weight moved")
      -- Used later, it trains: its step count is its own.
      opt:zero_grad()
      nn.cross_entropy(net(x, true), t):backward()
      assert.same({}, parallel.unused(net))
      opt:step()
      assert.not_equal(was[1], behave.list(net.spare.weight)[1])
    end
  end)

  it("used on some steps only: equal to one device", function()
    local x, t = batch()
    local want
    for _, n in ipairs(all) do
      local net = placed(n, make())
      local opt = optim.AdamW(net:parameters(), { lr = 0.05 })
      for k = 1, 6 do
        opt:zero_grad()
        nn.cross_entropy(net(x, k % 3 == 0), t):backward()
        opt:step()
      end
      local got = behave.list(net.spare.weight)
      want = want or got
      behave.near(want, got, 1e-12, n .. " devices")
    end
  end)
end)

describe("behaviour 22", function()
  -- One matrix is both embedding and output projection, and used by two layers beside.
  local function make()
    orrery.manual_seed(30)
    local net = nn.Module { embed = nn.Embedding(5, 4, f64), a = nn.Linear(4, 4, f64),
      b = nn.Linear(4, 4, f64) }
    net.b.weight = net.a.weight
    function net:forward(ids)
      local h = self.embed(ids):mean(2)
      h = self.b(self.a(h):tanh()):tanh()
      return h:matmul(self.embed.weight:t())
    end
    return net
  end

  it("a shared parameter has one value, one summed gradient and one update", function()
    orrery.manual_seed(32)
    local ids, t = orrery.randint(1, 5, 7, 3), orrery.randint(1, 5, 7)
    local weights, gradients
    for _, n in ipairs(all) do
      local net = placed(n, make())
      assert.equal(4, #net:parameters()) -- embedding, weight of a and b, two biases
      assert.is_true(rawequal(net.a.weight, net.b.weight))
      local opt = optim.SGD(net:parameters(), { lr = 0.3, momentum = 0.9 })
      nn.cross_entropy(net(ids), t):backward()
      gradients = gradients or behave.gradients(net)
      behave.same_gradients(gradients, behave.gradients(net), 1e-12, n .. " devices,")
      local before, g = behave.list(net.a.weight), behave.list(net.a.weight.grad)
      opt:step()
      for k, v in ipairs(behave.list(net.b.weight)) do assert.near(before[k] - 0.3 * g[k], v, 1e-12) end
      for _ = 1, 3 do
        opt:zero_grad()
        nn.cross_entropy(net(ids), t):backward()
        opt:step()
      end
      weights = weights or behave.list(net.embed.weight)
      behave.near(weights, net.embed.weight, 1e-12, n .. " devices")
    end
  end)

  it("the gradient is the sum of the uses: w x and w y give x + y", function()
    for _, n in ipairs(behave.counts) do
      local w = behave.place(orrery.tensor({ 2, -1 }, f64), n, "replicate"):clone()
      w.requires_grad = true
      local x = behave.place(orrery.tensor({ { 1, 2 }, { 3, 4 }, { 5, 6 } }, f64), n, "shard(1)")
      local y = (x * w):sum() + (x * w * 10):sum() + w:sum()
      y:backward()
      behave.near({ 11 * 9 + 1, 11 * 12 + 1 }, w.grad, 0, n .. " devices")
    end
  end)
end)

describe("behaviour 23", function()
  it("frozen and trainable parameters mix", function()
    local x, t = batch()
    local want
    for _, n in ipairs(all) do
      orrery.manual_seed(30)
      local net = nn.Sequential(nn.Linear(6, 8, f64), nn.Tanh(), nn.Linear(8, 8, f64), nn.Tanh(),
        nn.Linear(8, 3, f64))
      net:children()[3]:freeze()
      net:children()[1].bias.requires_grad = false
      placed(n, net)
      local opt = optim.AdamW(net:parameters(), { lr = 0.02 })
      local frozen, bias = behave.list(net:children()[3].weight), behave.list(net:children()[1].bias)
      for k = 1, 6 do
        if k == 4 then net:children()[1].bias.requires_grad = true end
        opt:zero_grad()
        nn.cross_entropy(net(x), t):backward()
        assert.is_nil(net:children()[3].weight.grad)
        assert.equal(k >= 4, net:children()[1].bias.grad ~= nil)
        opt:step()
        if k == 3 then behave.near(bias, net:children()[1].bias, 0) end
      end
      behave.near(frozen, net:children()[3].weight, 0, "a frozen weight moved")
      local got = behave.list(net:children()[1].weight)
      want = want or got
      behave.near(want, got, 1e-12, n .. " devices")
    end
  end)
end)

describe("behaviour 24", function()
  local function train(net, opt, steps)
    local x, t = batch()
    local losses = {}
    for k = 1, steps do
      opt:zero_grad()
      local loss = nn.cross_entropy(net(x), t)
      loss:backward()
      opt:step()
      losses[k] = loss:item()
    end
    return losses
  end

  local function make()
    orrery.manual_seed(30)
    return nn.Sequential(nn.Linear(6, 8, f64), nn.Tanh(), nn.Linear(8, 3, f64))
  end

  it("a plan keeps the parameters' identity: an optimizer made before updates them", function()
    local one = make()
    local want = train(one, optim.Adam(one:parameters(), { lr = 0.1 }), 8)
    for _, n in ipairs(behave.counts) do
      local net = make()
      local opt = optim.Adam(net:parameters(), { lr = 0.1 })
      local before = net:parameters()
      assert.is_true(rawequal(net, behave.plan(n)(net)))
      for k, p in ipairs(net:parameters()) do assert.is_true(rawequal(before[k], p)) end
      behave.near(want, train(net, opt, 8), 1e-12, n .. " devices")
      for k, p in ipairs(before) do behave.near(one:parameters()[k], p, 1e-12) end
    end
  end)

  it("placed, moved and placed again in the middle of training, state and all", function()
    local one = make()
    local want = train(one, optim.Adam(one:parameters(), { lr = 0.1 }), 8)
    local net = make()
    local opt, got = optim.Adam(net:parameters(), { lr = 0.1 }), {}
    for _, move in ipairs {
      function() end, function() behave.plan(2)(net) end, function() behave.plan(3)(net) end,
      function() parallel "data<4,1>" (net) end,
    } do
      move()
      for _, loss in ipairs(train(net, opt, 2)) do got[#got + 1] = loss end
    end
    behave.near(want, got, 1e-12)
  end)

  it("moving one parameter by hand keeps its identity and its gradient's", function()
    local w = orrery.ones(3, 2, { dtype = "f64", requires_grad = true })
    local net = nn.Module { w = w }
    net:to "cpu:1"
    assert.equal("cpu:1", w:device())
    assert.is_true(w.requires_grad and w.is_leaf)
    local y = (w * 3):sum()
    y:backward()
    optim.SGD({ w }, { lr = 1 }):step()
    behave.near(orrery.full(-2, 3, 2, f64), w, 0)
  end)

  it("gradients that were there move along", function()
    local x, t = batch()
    for _, n in ipairs(behave.counts) do
      local net = make()
      nn.cross_entropy(net(x), t):backward()
      local was = behave.gradients(net)
      behave.plan(n)(net)
      behave.same_gradients(was, behave.gradients(net), 0, n .. " devices,")
    end
  end)

  it("a plan that cannot be applied changes nothing", function()
    local net = make()
    local was = behave.list(net:parameters()[1])
    assert.is_false((pcall(function() parallel "data<0,99>" (net) end)))
    assert.is_nil(net:plan())
    assert.equal("cpu", net:parameters()[1]:device())
    behave.near(was, net:parameters()[1], 0)
  end)
end)

describe("behaviour 25", function()
  it("outputs may be any Lua table; the loss finds its own way back", function()
    local x, t = batch()
    local want
    for _, n in ipairs(all) do
      orrery.manual_seed(30)
      local net = nn.Module { a = nn.Linear(6, 3, f64), b = nn.Linear(6, 3, f64) }
      function net:forward(v)
        local out = setmetatable({ deep = { list = { self.a(v) } }, name = "out", fn = print },
          { __index = function(_, key) return key == "lazy" and self.b(v) or nil end })
        out.self = out
        return out, 7
      end
      placed(n, net)
      local out, seven = net(x)
      assert.equal(7, seven)
      assert.equal("out", out.name)
      nn.cross_entropy(out.deep.list[1] + out.self.lazy, t):backward()
      want = want or behave.gradients(net)
      behave.same_gradients(want, behave.gradients(net), 1e-12, n .. " devices,")
    end
  end)

  it("outputs that nobody uses are no trouble", function()
    local x, t = batch()
    for _, n in ipairs(all) do
      orrery.manual_seed(30)
      local net = nn.Module { a = nn.Linear(6, 3, f64), b = nn.Linear(6, 3, f64) }
      function net:forward(v) return { main = self.a(v), extra = self.b(v) } end
      placed(n, net)
      nn.cross_entropy(net(x).main, t):backward()
      assert.is_nil(net.b.weight.grad)
      assert.is_true(core.is_tensor(net.a.weight.grad))
    end
  end)
end)
