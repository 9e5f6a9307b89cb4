-- f32 masters of bf16 and f16 parameters: updates smaller than the parameter's spacing add up, values are
-- those of a run in f32 that is rounded, and whoever writes a parameter is followed.
-- To add an optimizer: a row in `optimizers`, with its step on numbers.
local orrery = require "orrery"
local behave = require "spec.support.behave"
local device = require "spec.support.device"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

-- v rounded to a dtype and back.
local function rounded(dtype, v) return orrery.tensor({ v }, { dtype = "f32" }):to(dtype):to("f64"):item() end

local function parameter(dtype, values)
  local p = orrery.tensor(values, { dtype = "f32", device = device.single }):to(dtype)
  p.requires_grad = true
  return p
end

local function set_grad(p, values)
  p.grad = orrery.tensor(values, { dtype = "f32", device = device.single }):to(p:dtype())
end

-- Name, maker, the definition: step(s, p, g, t) gives the new p, s being the state of one number.
local optimizers = {
  { "SGD", function(p, o) return optim.SGD(p, o) end, { lr = 0.01 },
    function(_, p, g) return p - 0.01 * g end },
  { "SGD with momentum and weight decay", function(p, o) return optim.SGD(p, o) end,
    { lr = 0.01, momentum = 0.9, weight_decay = 0.1 },
    function(s, p, g)
      local d = g + 0.1 * p
      s.b = s.b and 0.9 * s.b + d or d
      return p - 0.01 * s.b
    end },
  { "AdamW", function(p, o) return optim.AdamW(p, o) end, { lr = 1e-3, weight_decay = 0.01 },
    function(s, p, g, t)
      s.m, s.v = 0.9 * (s.m or 0) + 0.1 * g, 0.999 * (s.v or 0) + 0.001 * g * g
      return p * (1 - 1e-3 * 0.01) - 1e-3 * (s.m / (1 - 0.9 ^ t)) / (math.sqrt(s.v / (1 - 0.999 ^ t)) + 1e-8)
    end },
  { "RMSprop with momentum", function(p, o) return optim.RMSprop(p, o) end, { lr = 1e-3, momentum = 0.5 },
    function(s, p, g)
      s.v = 0.99 * (s.v or 0) + 0.01 * g * g
      s.b = 0.5 * (s.b or 0) + g / (math.sqrt(s.v) + 1e-8)
      return p - 1e-3 * s.b
    end },
}

describe("a master", function()
  for _, row in ipairs(optimizers) do
    local name, make, options, step = behave.unpack(row)
    for _, dtype in ipairs { "bf16", "f16" } do
      it(("makes %s on %s what it is in f32, rounded"):format(name, dtype), function()
        local start, grads = { 1, -0.5, 3, 0 }, { 0.25, -0.5, 0.0625, 1 }
        local p = parameter(dtype, start)
        local opt = make({ p }, options)
        local want, states = { 1, -0.5, 3, 0 }, { {}, {}, {}, {} }
        for t = 1, 40 do
          set_grad(p, grads)
          opt:step()
          for k = 1, 4 do want[k] = step(states[k], want[k], grads[k], t) end
        end
        behave.near(want, opt:state().slots.master[1], 2e-5, "masters")
        for k = 1, 4 do
          local near = { rounded(dtype, want[k] - 2e-5), rounded(dtype, want[k] + 2e-5) }
          local got = p[k]:item()
          assert.is_true(got >= near[1] and got <= near[2], ("%g of %g to %g"):format(got, near[1], near[2]))
        end
      end)
    end
  end

  it("keeps updates that the parameter cannot hold, which are lost without", function()
    local with, without = parameter("bf16", { 1 }), parameter("bf16", { 1 })
    local a, b = optim.SGD({ with }, { lr = 1 }), optim.SGD({ without }, { lr = 1, master = false })
    for _ = 1, 64 do
      for _, p in ipairs { with, without } do set_grad(p, { -2 ^ -10 }) end
      a:step()
      b:step()
    end
    assert.equal(1 + 2 ^ -4, with:item())
    assert.equal(1, without:item())
    assert.is_nil(b:state().slots.master[1])
  end)

  it("follows whoever writes the parameter, element by element", function()
    local p = parameter("bf16", { 1, 1 })
    local opt = optim.SGD({ p }, { lr = 1 })
    set_grad(p, { -2 ^ -10, -2 ^ -10 })
    opt:step()
    local now = orrery.tensor({ 1, 4 }, { dtype = "bf16", device = device.single })
    orrery.no_grad(function() p:copy_(now) end)
    set_grad(p, { -2 ^ -10, -2 ^ -10 })
    opt:step()
    behave.near({ 1 + 2 ^ -9, 4 + 2 ^ -10 }, opt:state().slots.master[1], 0)
  end)

  it("stays where a step is skipped", function()
    local p = parameter("f16", { 1, 2 })
    local opt, scaler = optim.Adam({ p }, { lr = 1e-4 }), orrery.amp.Scaler { scale = 4 }
    local function step(g)
      set_grad(p, g)
      scaler:step(opt)
      scaler:update()
      return opt:state().slots
    end
    local before = step { 1, 1 }
    local after = step { 1, math.huge }
    for slot, list in pairs(before) do assert.same(list[1]:totable(), after[slot][1]:totable(), slot) end
    assert.not_same(before.master[1]:totable(), step({ 1, 1 }).master[1]:totable())
  end)

  it("is saved and loaded, in either order with the parameters, bit for bit", function()
    local function run(resume)
      local p = parameter("bf16", { 1, 2, 3 })
      local opt = optim.Adam({ p }, { lr = 1e-3 })
      local function steps(n)
        for k = 1, n do
          set_grad(p, { 0.5, k / 8, -1 })
          opt:step()
        end
      end
      steps(20)
      if resume then
        local values, state = p:detach():clone(), opt:state()
        p = parameter("bf16", { 7, 7, 7 })
        opt = optim.Adam({ p }, { lr = 1e-3 })
        if resume == 1 then opt:load_state(state) end
        orrery.no_grad(function() p:copy_(values) end)
        if resume == 2 then opt:load_state(state) end
      end
      steps(20)
      return opt:state().slots.master[1]:totable()
    end
    local want = run()
    assert.same(want, run(1))
    assert.same(want, run(2))
  end)

  it("is for f16 and bf16 only, and goes when the parameter becomes f32", function()
    local net = nn.Linear(2, 2)
    if device.single then net:to(device.single) end
    net:to "bf16"
    local opt = optim.SGD(net, { lr = 0.1 })
    local function step()
      net:zero_grad()
      net(orrery.ones(3, 2, { dtype = net.weight:dtype(), device = device.single })):sum():backward()
      opt:step()
    end
    step()
    assert.equal("f32", opt:state().slots.master[1]:dtype())
    net:to "f32"
    step()
    assert.is_nil(opt:state().slots.master[1])
  end)

  it("costs 4 bytes an element", function()
    local name = device.single or "cpu"
    local live = {}
    for k, master in ipairs { true, false } do
      local p = orrery.zeros(2 ^ 16, { dtype = "bf16", device = name })
      p.requires_grad = true
      p.grad = orrery.ones(2 ^ 16, { dtype = "bf16", device = name })
      local before = behave.live()
      local opt = optim.SGD({ p }, { lr = 1, master = master })
      opt:step()
      live[k] = behave.live() - before
      opt:zero_grad()
    end
    assert.equal(4 * 2 ^ 16, live[1] - live[2])
  end)
end)

-- Losses in f32 of a bf16 net trained under a plan, and its masters.
local function train(plan, dtype, scaler)
  orrery.manual_seed(12)
  local net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
  net:to(dtype)
  if plan then parallel(plan)(net) end
  local opt = optim.AdamW(net:parameters(), { lr = 3e-3 })
  local losses = {}
  for k = 1, 12 do
    local x, y = orrery.randn(24, 16):to(dtype), orrery.randint(1, 8, 24)
    opt:zero_grad()
    local loss = nn.cross_entropy(net(x), y)
    if scaler then
      scaler:scale(loss):backward()
      if k == 5 then net:parameters()[1].grad:fill_(math.huge) end
      scaler:step(opt)
      scaler:update()
    else
      loss:backward()
      opt:step()
    end
    losses[k] = loss:item()
  end
  local masters = {}
  for index, tensor in pairs(opt:state().slots.master) do masters[index] = behave.list(tensor) end
  return losses, masters
end

describe("a bf16 net with masters", function()
  local wide = train(nil, "f32")

  it("learns as in f32", function()
    local losses, masters = train(nil, "bf16")
    assert.equal(6, #masters)
    for k, loss in ipairs(wide) do assert.near(loss, losses[k], 0.03) end
  end)

  for _, plan in ipairs { "data<0,1>", "tensor<0,1>", "model<0,1>", "data<0,1; zero=1>", "data<0,1; zero=3>",
    "data<tensor<0,1>, tensor<2,3>>" } do
    it("computes under " .. plan .. " what one device computes", function()
      local want, one = train(nil, "bf16")
      local got, masters = train(plan, "bf16")
      behave.near(want, got, 0.02)
      for index, values in ipairs(one) do behave.near(values, masters[index], 0.03, "master " .. index) end
    end)
  end

  it("skips a step on all devices where one gradient is not finite, masters included", function()
    for _, plan in ipairs { "data<0,1>", "data<0,1; zero=2>" } do
      local scaler = orrery.amp.Scaler { scale = 256 }
      local losses, masters = train(plan, "f16", scaler)
      assert.equal(128, scaler.factor)
      for _, values in ipairs(masters) do
        for _, v in ipairs(values) do assert.is_true(v == v and math.abs(v) < 100) end
      end
      assert.is_true(losses[12] < losses[1])
    end
  end)
end)
