-- Behaviours 5, 6, 11, 27 and 45: pipelines. Schedules, the labels of micro-batches, batches that do not
-- divide, running statistics, balance.
-- To add a case: a describe that names its behaviour, on every count of devices where they matter.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local device = require "spec.support.device"
local balance = require "orrery.parallel.balance"
local planned = require "spec.support.planned"
local nn, parallel = orrery.nn, orrery.parallel

local f64 = { dtype = "f64" }
local counts = behave.counts
local plan_of, deep, train, same = planned.plan, planned.deep, planned.train, planned.same
local mean, mean_square, masked = planned.mean, planned.mean_square, planned.masked

local schedules = { "schedule=gpipe", "schedule=1f1b", "schedule=interleaved, chunks=2" }

describe("behaviour 5", function()
  for _, n in ipairs(counts) do
    it(("no schedule changes a number on %d devices"):format(n), function()
      for _, criterion in ipairs { mean, masked } do
        local whole = train(deep(), criterion, nil, 13)
        for _, micro in ipairs { 2, 4, 7 } do
          local cut = train(deep(), criterion, parallel(("data<0; micro=%d>"):format(micro)), 13)
          same(whole, cut, "micro-batches on one device")
          for _, schedule in ipairs(schedules) do
            local plan = plan_of("model", n, ("micro=%d, %s"):format(micro, schedule))
            same(whole, train(deep(), criterion, plan, 13), tostring(plan))
          end
        end
      end
    end)

    it(("with batch norm, %d devices equal the same micro-batches on one"):format(n), function()
      local cut = train(deep(true), mean, parallel "data<0; micro=4>", 13)
      assert.is_true(math.abs(cut.losses[1] - train(deep(true), mean, nil, 13).losses[1]) > 1e-6)
      for _, schedule in ipairs(schedules) do
        local plan = plan_of("model", n, "micro=4, " .. schedule)
        same(cut, train(deep(true), mean, plan, 13), tostring(plan))
      end
    end)
  end

  it("a net with batch norm is not cut unless the plan says so", function()
    local plan = parallel "model<0..2>"
    same(train(deep(true), mean, nil, 13), train(deep(true), mean, plan, 13), tostring(plan))
  end)
end)

describe("behaviour 6", function()
  -- Layers that pass their input on: a sample's output is its label where they are paired.
  local function identity()
    local net = nn.Sequential()
    for _ = 1, 10 do
      local layer = nn.Linear(1, 1, f64)
      core.no_grad(function()
        layer.weight:fill_(1)
        layer.bias:zero_()
      end)
      net:add(layer)
    end
    return net
  end

  it("each micro-batch meets its own labels, once, on the last stage", function()
    local x = orrery.arange(1, 13, f64):view(13, 1)
    for _, n in ipairs(counts) do
      for _, schedule in ipairs(schedules) do
        local plan = plan_of("model", n, "micro=5, " .. schedule)
        local net, seen, sizes = plan(identity(), x), {}, {}
        local loss = plan:step(net, function(y, t)
          assert.equal(device.name(n - 1), y:shards()[1].device)
          behave.near(t.label, y, 0, tostring(plan))
          for _, v in ipairs(behave.list(y)) do seen[#seen + 1] = v end
          sizes[#sizes + 1] = y:size(1)
          return mean_square(y, t.label + t.shift)
        end, x, { label = x, shift = x * 0 + 2 })
        assert.near(4, loss:item(), 1e-12)
        table.sort(seen)
        behave.near(x, seen, 0, tostring(plan))
        table.sort(sizes)
        assert.same({ 2, 2, 3, 3, 3 }, sizes)
      end
    end
  end)

  it("labels shuffled against the samples change the loss", function()
    local x, plan = orrery.arange(1, 13, f64):view(13, 1), parallel "model<0,1; micro=5, schedule=1f1b>"
    local loss = plan:step(plan(identity(), x), mean_square, x, orrery.arange(13, 1, -1, f64):view(13, 1))
    assert.near(4 * 14, loss:item(), 1e-12) -- the mean of (2 i - 14)^2 over 1..13
  end)
end)

describe("behaviour 11", function()
  it("13 samples in 5 micro-batches, and 3 in 5, count by their size", function()
    for _, samples in ipairs { 13, 3 } do
      for _, criterion in ipairs { mean, masked } do
        local whole = train(deep(), criterion, nil, samples)
        for _, n in ipairs(counts) do
          for _, kind in ipairs { "model", "data" } do
            local plan = plan_of(kind, n, "micro=5")
            same(whole, train(deep(), criterion, plan, samples), samples .. " samples, " .. tostring(plan))
          end
        end
        local plan = parallel "data<model<0,1; micro=5>, model<2,3; micro=5>>"
        same(whole, train(deep(), criterion, plan, samples), tostring(plan))
      end
    end
  end)

  it("the mean of a linear function is that of all samples, by hand", function()
    local net = nn.Sequential(nn.Linear(1, 1, f64), nn.Linear(1, 1, f64))
    core.no_grad(function()
      for k = 1, 2 do
        net[k].weight:fill_(k)
        net[k].bias:zero_()
      end
    end)
    local x, plan = orrery.arange(1, 7, f64):view(7, 1), parallel "model<0,1; micro=3>"
    local loss = plan:step(plan(net, x), function(y) return y:mean() end, x, x)
    assert.near(8, loss:item(), 1e-12) -- 2 times the mean of 1..7
    assert.near(8, net[1].weight.grad:item(), 1e-12)
    assert.near(4, net[2].weight.grad:item(), 1e-12)
  end)
end)

describe("behaviour 27", function()
  -- Batch norm sees the batch itself, so that its statistics are those of the numbers below.
  local function make()
    orrery.manual_seed(27)
    return nn.Sequential(nn.BatchNorm1d(2, f64), nn.Linear(2, 3, f64), nn.Tanh(), nn.BatchNorm1d(3, f64),
      nn.Linear(3, 3, f64), nn.Tanh(), nn.Linear(3, 1, f64))
  end

  local function batch(n) return orrery.arange(1, 2 * n, f64):view(n, 2):square() end

  local function step(plan, n)
    local net, x = make(), batch(n)
    plan(net, x)
    local loss = plan:step(net, mean_square, x, x:narrow(2, 1, 1) * 0 + 1)
    return net, loss
  end

  it("running statistics move once a step, by those of all micro-batches together", function()
    local n = 13
    local x = batch(n)
    local want_mean, want_var = x:mean(1) * 0.1, x:var(1) * 0.1 + 0.9 -- momentum 0.1, from 0 and 1
    for _, devices in ipairs(counts) do
      for _, schedule in ipairs { "schedule=gpipe", "schedule=1f1b" } do
        for _, more in ipairs { "", ", recompute=true" } do
          local plan = plan_of("model", devices, "micro=4, " .. schedule .. more)
          local net = step(plan, n)
          behave.near(want_mean, net[1].running_mean, 1e-10, tostring(plan))
          behave.near(want_var, net[1].running_var, 1e-8, tostring(plan))
        end
      end
    end
  end)

  it("recomputation counts once, and changes no number", function()
    local one, loss = step(parallel "data<0; micro=4>", 11)
    for _, text in ipairs { "model<0..2; micro=4>", "model<0..2; micro=4, recompute=true>",
      "model<0..4; micro=4, recompute=stage>", "model<0,1; micro=4, schedule=1f1b, recompute=true>" } do
      local net, got = step(parallel(text), 11)
      behave.near(loss, got, 1e-10, text)
      local state = net:state()
      for name, value in pairs(one:state()) do
        behave.near(value, state[name], 1e-10, text .. ", " .. name)
      end
      behave.same_gradients(behave.gradients(one), behave.gradients(net), 1e-9, text .. ",")
    end
  end)

  it("a step that fails moves none", function()
    local net, x, plan = make(), batch(8), parallel "model<0,1; micro=4>"
    plan(net, x)
    local calls = 0
    assert.has_error(function()
      plan:step(net, function(y)
        calls = calls + 1
        if calls == 3 then error "stop" end
        return y:mean()
      end, x, x)
    end)
    behave.near({ 0, 0 }, net[1].running_mean, 0)
    behave.near({ 1, 1 }, net[1].running_var, 0)
  end)
end)

describe("behaviour 45", function()
  it("the stages of a plan are those that minimise the largest cost of one, by trying all", function()
    local widths = { 6, 40, 8, 64, 16, 16, 48, 4, 32, 24, 4 }
    orrery.manual_seed(45)
    local net = nn.Sequential()
    for k = 1, #widths - 1 do net:add(nn.Linear(widths[k], widths[k + 1])) end
    local x = orrery.randn(16, 6)
    local _, rows = parallel.balance(net, x, 1)
    for _, n in ipairs(counts) do
      local best
      local function try(first, stages_left, worst)
        if stages_left == 0 then
          if first > #rows and (not best or worst < best) then best = worst end
          return
        end
        local cost = 0
        for last = first, #rows do
          cost = cost + rows[last].cost
          try(last + 1, stages_left - 1, math.max(worst, cost))
        end
      end
      try(1, n, 0)
      local placed, on = plan_of("model", n)(net, x), {}
      for k, row in ipairs(rows) do
        local place = placed[k].weight:shards()[1].device
        on[place] = (on[place] or 0) + row.cost
      end
      local worst, devices = 0, 0
      for _, cost in pairs(on) do worst, devices = math.max(worst, cost), devices + 1 end
      assert.equal(n, devices)
      assert.near(best, worst, 1e-6 * best, n .. " devices")
    end
  end)

  it("memory limits that would break the best cut give the best that keeps them", function()
    -- Costs alone cut after the third layer; the fourth stage's limit forbids it.
    assert.same({ 3, 4 }, (balance.partition({ 1, 1, 1, 3 }, 2)))
    assert.same({ 2, 4 }, (balance.partition({ 1, 1, 1, 3 }, 2, { 4, 4, 4, 4 }, { 8, 16 })))
    assert.is_nil((balance.partition({ 1, 1 }, 2, { 4, 4 }, { 3, 9 })))
  end)

  it("values that skip stages travel by themselves", function()
    local Skip = nn.class("Skip", function(self)
      for _, name in ipairs { "a", "b", "c", "d", "e" } do self[name] = nn.Linear(6, 6, f64) end
    end)
    function Skip:forward(x)
      local a = self.a(x):tanh()
      local b = self.b(a):tanh()
      local c = self.c(b):tanh() + x
      return self.e(self.d(c) + a) * b
    end
    local x = orrery.randn(7, 6, f64)
    orrery.manual_seed(46)
    local one = Skip()
    local want = mean_square(one(x), x * 2)
    want:backward()
    for _, n in ipairs(counts) do
      for _, options in ipairs { "micro=3", "micro=3, schedule=1f1b, recompute=true" } do
        orrery.manual_seed(46)
        local net, plan = Skip(), plan_of("model", n, options)
        plan(net, x)
        behave.near(want, plan:step(net, mean_square, x, x * 2), 1e-12, tostring(plan))
        behave.same_gradients(behave.gradients(one), behave.gradients(net), 1e-12, tostring(plan) .. ",")
      end
    end
  end)
end)
