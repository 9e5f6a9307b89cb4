-- Behaviours 30 to 32: the gradient norm counts each logical element once, a non-finite gradient
-- skips the step everywhere, sums of halves across devices are taken in f32.
-- To add a case: a value that a wrong count or a wrong accumulator would miss.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local device = require "spec.support.device"
local nn, optim = orrery.nn, orrery.optim

local f64 = { dtype = "f64" }

describe("behaviour 30", function()
  it("replicated, sharded, uneven, empty and partial gradients count each element once", function()
    local g = orrery.tensor({ { 3, 4 }, { 0, 12 }, { 5, -1 } }, f64) -- squares: 9 16 0 144 25 1
    local sum = 195
    for _, n in ipairs(behave.counts) do
      local list = { g }
      for _, word in ipairs { "replicate", "shard(1)", "shard(2)" } do
        list[#list + 1] = behave.place(g, n, word)
      end
      list[#list + 1] = behave.partial(g, n)
      for _, one in ipairs(list) do
        assert.near(math.sqrt(sum), core.grad_norm({ one }):item(), 1e-12)
        assert.near(12, core.grad_norm({ one }, math.huge):item(), 0)
        assert.near(3 + 4 + 12 + 5 + 1, core.grad_norm({ one }, 1):item(), 1e-12)
      end
      assert.near(math.sqrt(sum * #list), core.grad_norm(list):item(), 1e-12)
    end
    local mesh = core.mesh({ "data", "tensor" }, { 2, 2 }, behave.names(4))
    for _, words in ipairs { { "replicate", "shard(1)" }, { "shard(1)", "replicate" },
      { "shard(2)", "shard(1)" },
      { "shard(1)", "shard(1)" }, { "replicate", "replicate" } } do
      assert.near(math.sqrt(sum), core.grad_norm({ core.distribute(g, mesh, words[1], words[2]) }):item(),
        1e-12)
    end
  end)

  it("clip_grad_norm gives the norm of one device and scales alike", function()
    local want
    for _, n in ipairs { 0, 1, 2, 3, 5 } do
      orrery.manual_seed(53)
      local net = nn.Sequential(nn.Linear(6, 8, f64), nn.Tanh(), nn.Linear(8, 4, f64))
      local x, t = orrery.randn(7, 6, f64), orrery.randint(1, 4, 7)
      if n > 0 then behave.plan(n)(net) end
      nn.cross_entropy(net(x), t):backward()
      local squares = 0
      for _, values in pairs(behave.gradients(net)) do
        for _, v in ipairs(values) do squares = squares + v * v end
      end
      local norm = optim.clip_grad_norm(net:parameters(), 0.05)
      assert.near(math.sqrt(squares), norm, 1e-12)
      assert.near(0.05, core.grad_norm((function()
        local list = {}
        for k, p in ipairs(net:parameters()) do list[k] = p.grad end
        return list
      end)()):item(), 1e-6)
      local got = behave.gradients(net)
      want = want or got
      behave.same_gradients(want, got, 1e-12, n .. " devices,")
    end
  end)
end)

describe("behaviour 31", function()
  for _, name in ipairs { "SGD", "Adam", "RMSprop" } do
    it(name .. ": a non-finite gradient on one device skips the step on all, before any state changes",
      function()
      for _, n in ipairs(behave.counts) do
        for _, poison in ipairs { math.huge, -math.huge, 0 / 0 } do
          orrery.manual_seed(54)
          local net = nn.Sequential(nn.Linear(3, 2, f64), nn.Tanh(), nn.Linear(2, 2, f64))
          behave.plan(n)(net)
          local opt = optim[name](net:parameters(), { lr = 0.1, momentum = name ~= "Adam" and 0.9 or nil })
          local scaler = orrery.amp.Scaler { scale = 8 }
          local x, t = orrery.randn(7, 3, f64), orrery.randint(1, 2, 7)
          local function step(input)
            opt:zero_grad()
            local loss = nn.cross_entropy(net(input), t)
            scaler:scale(loss):backward()
            return scaler:step(opt)
          end
          assert.is_true(step(x))
          assert.equal(8, scaler:update())
          local weights, state = net:state(), opt:state()
          local bad = x:clone()
          bad[{ 7, 2 }] = poison -- the last device's shard
          assert.is_false(step(bad))
          assert.equal(4, scaler:update())
          for key, w in pairs(net:state()) do
            behave.near(weights[key], w, 0, key)
            for _, shard in ipairs(net:parameters()[1]:shards()) do
              behave.near(net:parameters()[1], shard.tensor, 0, shard.device)
            end
          end
          local after = opt:state()
          for slot, tensors in pairs(state.slots) do
            for k, s in pairs(tensors) do behave.near(s, after.slots[slot][k], 0, slot) end
          end
          assert.same(state.steps, after.steps)
          assert.is_true(step(x)) -- and goes on
          assert.not_equal(behave.list(weights["1.weight"])[1], behave.list(net:parameters()[1])[1])
        end
      end
    end)
  end

  it("a scaled step equals an unscaled one", function()
    for _, n in ipairs(behave.counts) do
      local results = {}
      for k, scaled in ipairs { false, true } do
        orrery.manual_seed(54)
        local net = behave.plan(n)(nn.Sequential(nn.Linear(3, 2, f64)))
        local opt = optim.Adam(net:parameters(), { lr = 0.1 })
        local scaler = orrery.amp.Scaler { scale = 1024 }
        local x, t = orrery.randn(7, 3, f64), orrery.randint(1, 2, 7)
        for _ = 1, 3 do
          opt:zero_grad()
          local loss = nn.cross_entropy(net(x), t)
          if scaled then
            scaler:scale(loss):backward()
            scaler:unscale(opt)
            optim.clip_grad_norm(net:parameters(), 0.3)
            scaler:step(opt)
            scaler:update()
          else
            loss:backward()
            optim.clip_grad_norm(net:parameters(), 0.3)
            opt:step()
          end
        end
        results[k] = behave.list(net:parameters()[1])
      end
      behave.near(results[1], results[2], 1e-12, n .. " devices")
    end
  end)
end)

describe("behaviour 32", function()
  -- One value a device; the Partial whose terms they are.
  local function terms(dtype, values)
    local parts = {}
    for k, v in ipairs(values) do
      parts[k] = orrery.full(v, 3, { dtype = dtype }):to(device.name(k - 1)):clone()
    end
    return core.from_shards(behave.mesh(#values), { 3 }, parts, "partial(sum)")
  end

  it("bf16: 256 + 1 + 1 over three devices is 258, which bf16 addition would lose", function()
    assert.equal(258, orrery.tensor({ 258 }, { dtype = "bf16" }):item()) -- it can be held
    for _, values in ipairs { { 256, 1, 1 }, { 1, 256, 1 }, { 1, 1, 256 }, { 256, 0.5, 0.5, 0.5, 0.5 } } do
      local x = terms("bf16", values)
      assert.same({ 258, 258, 258 }, x:redistribute("replicate"):totable())
      assert.same({ 258, 258, 258 }, x:redistribute("shard(1)"):totable())
      assert.same({ 258, 258, 258 }, x:full():totable())
      for _, shard in ipairs(x:redistribute("replicate"):shards()) do
        assert.same({ 258, 258, 258 }, shard.tensor:totable())
      end
    end
  end)

  it("f16: 2048 + 1 + 1 is 2050, and 60000 + 60000 - 60000 does not overflow on the way", function()
    assert.same({ 2050, 2050, 2050 }, terms("f16", { 2048, 1, 1 }):redistribute("replicate"):totable())
    assert.same({ 60000, 60000, 60000 },
      terms("f16", { 60000, 60000, -60000 }):redistribute("replicate"):totable())
  end)

  it("the gradient of a bf16 weight under data<> is rounded once, after the sum", function()
    for _, n in ipairs { 2, 3, 5 } do
      local w = nn.parameter and nn.parameter(orrery.ones(1, { dtype = "bf16" }))
        or orrery.ones(1, { dtype = "bf16", requires_grad = true })
      local net = nn.Module { w = w, forward = function(self, x) return (x * self.w):sum() end }
      behave.plan(n)(net)
      -- The first device's share is 256, every other's is 2 / (n - 1).
      local values = { 256 }
      for k = 2, n do values[k] = 2 / (n - 1) end
      net(orrery.tensor(values, { dtype = "bf16" })):backward()
      assert.equal(258, w.grad:item(), n .. " devices")
    end
  end)
end)
