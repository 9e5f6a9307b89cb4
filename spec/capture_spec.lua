-- Captured steps: what a replay computes is, bit for bit where sums have one order, what the function
-- computes; where it could not be, the function runs and `reason` says why.
-- To add a plan, a net: `plans`, spec/support/nets.lua. To add a reason: a row in "what is not replayed".
local orrery = require "orrery"
local behave = require "spec.support.behave"
local device = require "spec.support.device"
local nets = require "spec.support.nets"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local f64 = { dtype = "f64" }
local few = os.getenv "ORRERY_SANITIZER"

local function criterion(logits, y)
  if logits:dim() == 3 then logits, y = logits:reshape(-1, logits:size(3)), y:reshape(-1) end
  return nn.cross_entropy(logits, y)
end

-- Losses and final weights of `steps` steps of a net under a plan (text or nil), captured or not.
local function train(row, plan, captured, steps, clip)
  local _, make, batch = behave.unpack(row)
  orrery.manual_seed(31)
  local net = make { dtype = "f32" }
  plan = plan and parallel(plan)
  if plan then plan(net) end
  local opt = optim.AdamW(net:parameters(), { lr = 2e-3, eps = 1e-6 })
  local schedule = optim.schedule.cosine(opt, { warmup = 3, total = 20, min = 1e-4 })
  local function step(x, y)
    opt:zero_grad()
    local loss
    if plan then
      loss = plan:step(net, criterion, x, y)
    else
      loss = criterion(net(x), y)
      loss:backward()
    end
    if clip then optim.clip_grad_norm(net:parameters(), clip) end
    opt:step()
    schedule:step()
    return loss
  end
  local f = captured and orrery.capture(step) or step
  local losses, state = {}, {}
  for k = 1, steps do
    local x, y = batch(12, { dtype = "f32" })
    losses[k] = f(x, y):item()
  end
  for name, tensor in pairs(net:state()) do state[name] = behave.list(tensor) end
  return { losses = losses, state = state, f = f, draws = orrery.randn(3):totable() }
end

-- NCCL adds in an order of its own, another in each run.
local tolerance = device.kind == "cuda" and 1e-5 or 0

local function same(want, got, what)
  behave.near(want.losses, got.losses, tolerance, what)
  assert.same(want.draws, got.draws, what .. ": random numbers afterwards")
  for name, values in pairs(want.state) do
    behave.near(values, got.state[name], tolerance, what .. ", " .. name)
  end
end

local plans = {
  false, "data<0,1>", "data<0..2; micro=3>", "tensor<0,1>", "tensor<0..2; sequence=true>", "model<0,1>",
  "model<0..2; micro=5, schedule=1f1b>", "model<0,1; micro=4, schedule=1f1b, recompute=true>",
  "model<0,1; micro=5, schedule=interleaved, chunks=2>", "data<tensor<0,1>, tensor<2,3>>",
  "data<model<0,1>, model<2,3>>", "data<0,1; zero=1>", "data<0..2; zero=2>", "data<0..2; zero=3>",
}

describe("a captured step computes what the step computes:", function()
  for _, plan in ipairs(plans) do
    for n, row in ipairs(nets) do
      it(("%s, %s"):format(plan or "no plan", row[1]), function()
        if few and n > 1 then return end
        local clip = n == 1 and 0.5 or nil
        local want, got = train(row, plan, false, 7, clip), train(row, plan, true, 7, clip)
        same(want, got, tostring(plan))
        assert.equal(4, got.f.replays, tostring(got.f))
        assert.is_nil(got.f:reason())
      end)
    end
  end
end)

-- A net with one weight, w = 2 at first; SGD with rate 1. The gradient of (w x) is x.
local function one_weight(make)
  local w = orrery.tensor({ 2 }, { dtype = "f64", requires_grad = true, device = device.single })
  local opt = optim.SGD({ w }, { lr = 1 })
  return w, opt, orrery.capture(make(w, opt))
end

local function on(values) return orrery.tensor(values, { dtype = "f64", device = device.single }) end

local function plain_step(w, opt)
  return function(x)
    opt:zero_grad()
    local y = (w * x):sum()
    y:backward()
    opt:step()
    return y
  end
end

describe("a captured step", function()
  it("renews the rate that the script sets", function()
    local w, opt, f = one_weight(plain_step)
    for _ = 1, 4 do f(on { 1 }) end
    assert.equal(1, f.replays)
    assert.equal(-2, w:item())
    opt.param_groups[1].lr = 0.25
    f(on { 2 })
    assert.equal(2, f.replays)
    assert.equal(-2.5, w:item())
  end)

  it("gives results that the next step does not overwrite", function()
    local _, _, f = one_weight(plain_step)
    local kept = {}
    for k = 1, 6 do kept[k] = f(on { 1 }) end
    assert.equal(3, f.replays)
    for k = 1, 6 do assert.equal(3 - k, kept[k]:item()) end
  end)

  it("leaves gradients as the function does", function()
    local w, opt, f = one_weight(function(w, opt)
      return function(x)
        (w * x):sum():backward()
        opt:step()
        opt:zero_grad()
      end
    end)
    for _ = 1, 5 do f(on { 1 }) end
    assert.equal(2, f.replays)
    assert.is_nil(w.grad)
    assert.equal(-3, w:item())
    local _ = opt
    local v, g = w, orrery.capture(function(x) return (w * x):sum():backward() end)
    for k = 1, 5 do
      v.grad = nil
      g(on { k })
      assert.equal(k, v.grad:item())
    end
    assert.equal(2, g.replays)
  end)

  it("records each form of its arguments, so that an uneven last batch is right", function()
    local w, _, f = one_weight(plain_step)
    for _ = 1, 5 do
      f(on { 1, 1 })
      f(on { 3 })
    end
    assert.equal(2 - 25, w:item())
    assert.equal(4, f.replays)
  end)

  it("takes tables of tensors, and plain values as part of the form", function()
    local f = orrery.capture(function(batch, times) return { sum = (batch.x * times + batch[1]):sum() } end)
    for k = 1, 6 do assert.equal(2 * k + 1, f({ on { 1 }, x = on { k } }, 2).sum:item()) end
    assert.equal(3, f.replays)
    assert.equal(31, f({ on { 1 }, x = on { 10 } }, 3).sum:item())
    assert.equal(3, f.replays)
  end)

  it("runs again in training and in evaluation mode", function()
    local net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    if device.single then net:to(device.single) end
    local x = orrery.ones(4, 3, { device = device.single })
    local f = orrery.capture(function(v) return orrery.no_grad(function() return net(v) end) end)
    for _ = 1, 4 do
      net:eval()
      local y, plain = f(x), net[1](x)
      assert.same(plain:totable(), y:totable())
      net:train()
      y = f(x)
      local zeros = (y:eq(0)):sum():item()
      assert.is_true(zeros > 0, "dropout is on")
    end
    assert.equal(2, f.replays)
  end)

  it("draws other random numbers in each replay, those of the function", function()
    local function draws(captured)
      orrery.manual_seed(9)
      local f = function(x) return x + orrery.rand(3, { device = device.single }) end
      f = captured and orrery.capture(f) or f
      local list = {}
      for k = 1, 5 do
        list[k] = f(orrery.zeros(3, { device = device.single })):totable()
        list[k + 5] = orrery.rand(2):totable()
      end
      return list
    end
    assert.same(draws(false), draws(true))
  end)

  it("works with two optimizers that take turns", function()
    local function run(captured)
      orrery.manual_seed(4)
      local a, b = nn.Linear(3, 3, f64), nn.Linear(3, 1, f64)
      if device.single then a:to(device.single) b:to(device.single) end
      local left, right = optim.SGD(a, { lr = 0.1, momentum = 0.5 }), optim.Adam(b, { lr = 0.1 })
      local f = function(x)
        b:zero_grad()
        b(a(x):detach()):square():mean():backward()
        right:step()
        a:zero_grad()
        local loss = b(a(x)):square():mean()
        loss:backward()
        left:step()
        return loss
      end
      f = captured and orrery.capture(f) or f
      local losses = {}
      for k = 1, 7 do losses[k] = f(orrery.randn(5, 3, f64):to(device.single or "cpu")):item() end
      return losses, f
    end
    local want = run(false)
    local got, f = run(true)
    assert.same(want, got)
    assert.equal(4, f.replays)
  end)

  it("scales, skips and grows as a Scaler says", function()
    local function run(captured)
      orrery.manual_seed(8)
      local net = nn.Linear(3, 2)
      if device.single then net:to(device.single) end
      net:to "f16"
      local opt, scaler = optim.SGD(net, { lr = 0.1 }), orrery.amp.Scaler { scale = 8, interval = 3 }
      local f = function(x)
        opt:zero_grad()
        local loss = net(x):to("f32"):square():mean()
        scaler:scale(loss):backward()
        scaler:step(opt)
        scaler:update()
        return loss
      end
      f = captured and orrery.capture(f) or f
      local list = {}
      for k = 1, 12 do
        local x = orrery.randn(4, 3):to(device.single or "cpu"):to "f16"
        if k == 8 then x:fill_(30000) end
        list[#list + 1] = tostring(f(x):item())
        list[#list + 1] = scaler.factor
      end
      return list, f
    end
    local want = run(false)
    local got, f = run(true)
    assert.same(want, got)
    assert.equal(32, got[14])
    assert.equal(16, got[16])
    assert.equal(9, f.replays)
  end)

  it("follows an optimizer that is loaded, and a net that is moved", function()
    local function run(captured)
      orrery.manual_seed(6)
      local net = nn.Linear(2, 1, f64)
      local opt = optim.Adam(net, { lr = 0.1 })
      local f = function(x)
        opt:zero_grad()
        local loss = net(x):square():mean()
        loss:backward()
        opt:step()
        return loss
      end
      f = captured and orrery.capture(f) or f
      local losses, saved = {}, nil
      for k = 1, 14 do
        if k == 3 then saved = opt:state() end
        if k == 6 then opt:load_state(saved) end
        if k == 10 then net:to(device.name(1)) end
        local x = orrery.randn(4, 2, f64)
        losses[k] = f(k >= 10 and x:to(device.name(1)) or x):item()
      end
      return losses
    end
    behave.near(run(false), run(true), 1e-12)
  end)

  it("keeps as much memory as one step, and gives it back", function()
    local name = device.single or "cpu"
    local net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    if device.single then net:to(name) end
    local function step(x)
      net:zero_grad()
      local loss = net(x):square():mean()
      loss:backward()
      return loss
    end
    local x = orrery.ones(512, 64, { device = name })
    local function cycle(f, n)
      for _ = 1, n do f(x):item() end
      collectgarbage()
      collectgarbage()
      local m = orrery.memory(name)
      return m.live, m.live + m.cached
    end
    local live, all = cycle(step, 4)
    local f = orrery.capture(step)
    local captured_live, captured_all = cycle(f, 12)
    assert.equal(9, f.replays)
    assert.is_true(captured_all <= all + x:numel() * 4 + 2 ^ 16, ("%d, %d"):format(all, captured_all))
    f:reset()
    local live_after = cycle(step, 1)
    assert.is_true(live_after <= live + 2 ^ 16, ("%d, %d, %d"):format(live, captured_live, live_after))
  end)
end)

-- Name, maker of a function of x, pattern of the reason, what 6 calls with x = 1..6 must give.
local count, stash = 0, {}
local state = {}
local refused = {
  { "a value that the host reads", function()
    return function(x) return x:item() > 2 and x * 10 or x end
  end, "reads a tensor's values", { 1, 2, 30, 40, 50, 60 } },
  { "a tensor of the script's values", function()
    return function(x)
      count = count + 1
      return x + orrery.tensor({ count }, { dtype = "f64" }):to(x:device())
    end
  end, "makes a tensor of the script's values", { 2, 4, 6, 8, 10, 12 } },
  { "a number that changes", function()
    return function(x)
      count = count + 1
      return x * count
    end
  end, "is not what it was in the step before", { 1, 4, 9, 16, 25, 36 } },
  { "state that is replaced", function()
    return function(x)
      state.mean = state.mean and state.mean * 0.5 + x or x + 0
      return state.mean * 1
    end
  end, "keeps a tensor that it made", { 1, 2.5, 4.25, 6.125, 8.0625, 10.03125 } },
  { "a tensor that it keeps elsewhere", function()
    return function(x)
      stash[#stash + 1] = x * 2
      return x + 1
    end
  end, "keeps a tensor that it made", { 2, 3, 4, 5, 6, 7 } },
  { "a result that is a number", function()
    return function(x) return x * 1, 7 end
  end, "returns a number", { 1, 2, 3, 4, 5, 6 } },
  { "a result whose backward is to come", function()
    local w = orrery.tensor({ 3 }, { dtype = "f64", requires_grad = true, device = device.single })
    return function(x) return w * x end
  end, "backward is still to come", { 3, 6, 9, 12, 15, 18 } },
  { "a seed that is set", function()
    return function(x)
      orrery.manual_seed(3)
      return x + orrery.zeros(1, { dtype = "f64", device = device.single })
    end
  end, "sets the seed", { 1, 2, 3, 4, 5, 6 } },
}

describe("what is not replayed:", function()
  for _, row in ipairs(refused) do
    local name, make, reason, want = behave.unpack(row)
    it(name, function()
      count, stash, state = 0, {}, {}
      local f = orrery.capture(make())
      for k = 1, 6 do
        local y = f(on { k })
        assert.equal(want[k], y:item())
      end
      assert.equal(0, f.replays)
      assert.matches(reason, f:reason(), 1, true)
    end)
  end

  it("a call whose gradients stand otherwise, which runs", function()
    local w, _, f = one_weight(function(w) return function(x) (w * x):sum():backward() end end)
    for k = 1, 5 do
      w.grad = nil
      f(on { k })
    end
    assert.equal(2, f.replays)
    f(on { 2 })
    assert.equal(7, w.grad:item())
    assert.matches("the gradient of a parameter .* is there", f:reason())
  end)

  it("an argument that requires grad, a call within another, one that is watched", function()
    local f = orrery.capture(function(x) return x:detach() * 2 end)
    for _ = 1, 3 do f(on { 1 }) end
    local x = on { 1 }
    x.requires_grad = true
    f(x)
    assert.matches("requires grad", f:reason())
    parallel.trace(function() f(on { 1 }) end)
    assert.matches("parallel.trace is on", f:reason())
    assert.equal(2, f(on { 1 }):item())
    assert.is_nil(f:reason())
    local outer = orrery.capture(function(v) return f(v) + 1 end)
    for k = 1, 5 do assert.equal(2 * k + 1, outer(on { k }):item()) end
    assert.equal(2, outer.replays)
  end)
end)

describe("an error", function()
  it("in a step that is recorded leaves nothing behind, and is raised at its line", function()
    local bad = true
    local f = orrery.capture(function(x)
      local y = x * 2
      if bad then return y:matmul(orrery.ones(3, 3, { device = device.single })) end
      return y
    end)
    for _ = 1, 3 do
      local ok, message = pcall(f, orrery.ones(2, 2, { device = device.single }))
      assert.is_false(ok)
      assert.matches("capture_spec.lua:%d+: matmul: the inner sizes differ", message)
    end
    bad = false
    for k = 1, 4 do assert.equal(2 * k, f(on { k }):item()) end
  end)

  it("in a replay names the op and where it was recorded; the next call is right", function()
    local table_of = orrery.arange(1, 6, { dtype = "f32" }):to(device.name(0))
    local f = orrery.capture(function(at) return table_of:index_select(1, at) end)
    local function at(k) return orrery.tensor({ k }, { dtype = "i64" }):to(device.name(0)) end
    for _ = 1, 4 do f(at(2)) end
    assert.equal(1, f.replays)
    local y = f(at(9))
    behave.raises(function() y:item() end, "index_select", "9", device.name(0), "capture_spec.lua:")
    assert.equal(3, f(at(3)):item())
    assert.equal(3, f.replays)
  end)

  it("of use is raised at the caller's line", function()
    behave.raises(function() orrery.capture(1) end, "capture: expected a function, got number",
      "capture_spec.lua:")
  end)
end)
