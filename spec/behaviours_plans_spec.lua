-- Behaviours 9, 14 to 19, 22, 23, 24, 29, 30, 34, 39 and 41 as far as model<>, tensor<> and zero= meet
-- them. (The same with hand-placed tensors and under data<>: the other behaviours_*_spec files.)
-- To add a case: a describe that names its behaviour, on every count of devices where they matter.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local device = require "spec.support.device"
local planned = require "spec.support.planned"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local f64 = { dtype = "f64" }
local counts = behave.counts
local plan_of, deep, train, same = planned.plan, planned.deep, planned.train, planned.same
local mean, mean_square = planned.mean, planned.mean_square

describe("behaviour 9", function()
  it("64 channels under tensor<> over three devices are 22, 21 and 21, with one device's values", function()
    local function make()
      orrery.manual_seed(9)
      return nn.Sequential(nn.Conv2d(3, 64, 3, f64), nn.ReLU(), nn.Conv2d(64, 5, 3, f64), nn.Flatten(),
        nn.Linear(20, 4, f64))
    end
    orrery.manual_seed(8)
    local x, t = orrery.randn(3, 3, 6, 6, f64), orrery.randint(1, 4, 3)
    local one = make()
    local want = nn.cross_entropy(one(x), t)
    want:backward()
    for _, n in ipairs(counts) do
      local net = make()
      net[1]:split "out"
      plan_of("tensor", n)(net, x)
      local sizes, total = {}, 0
      for k, shard in ipairs(net[1].weight:shards()) do
        sizes[k] = shard.tensor:size(1)
        total = total + sizes[k]
      end
      assert.equal(64, total)
      if n == 3 then assert.same({ 22, 21, 21 }, sizes) end
      local loss = nn.cross_entropy(net(x), t)
      loss:backward()
      behave.near(want, loss, 1e-10, n .. " devices")
      behave.same_gradients(behave.gradients(one), behave.gradients(net), 1e-10, n .. " devices,")
    end
  end)
end)

describe("behaviours 14 to 19 under tensor<>", function()
  -- f(net, x) on one device and under tensor<0..n-1>: value, gradients of x and of every parameter.
  local function compare(n, make, split, x, what)
    local function run(plan)
      orrery.manual_seed(14)
      local net, input = make(), x:clone()
      for at, how in pairs(split) do net[at]:split(how) end
      if plan then
        plan(net, x)
        input = plan:place(x):clone()
      end
      input.requires_grad = true
      local y = net(input)
      local weight = (orrery.arange(1, y:numel(), f64) * 0.37):sin():view(y:size())
      local loss = (y * weight):sum()
      loss:backward()
      return y, input.grad, net
    end
    local y, gx, one = run(nil)
    local py, pgx, net = run(plan_of("tensor", n))
    what = ("%s on %d devices"):format(what, n)
    behave.near(y, py, 1e-10, what)
    behave.near(gx, pgx, 1e-10, what .. ", gradient of x")
    behave.same_gradients(behave.gradients(one), behave.gradients(net), 1e-10, what .. ",")
    return net
  end

  it("behaviour 14: the bias of a layer split by rows is added once", function()
    for _, n in ipairs(counts) do
      local function make() return nn.Sequential(nn.Linear(7, 5, f64)) end
      compare(n, make, { "in" }, orrery.randn(3, 7, f64), "rows")
      local net = make()
      net[1]:split "in"
      core.no_grad(function()
        net[1].weight:zero_()
        net[1].bias:fill_(3)
      end)
      local x = orrery.randn(4, 7, f64)
      plan_of("tensor", n)(net, x)
      local y = net(x)
      behave.near(orrery.full(3, 4, 5, f64), y, 0, n .. " devices")
      y:sum():backward()
      behave.near({ 4, 4, 4, 4, 4 }, net[1].bias.grad, 0, n .. " devices") -- one a row
    end
  end)

  it("behaviour 15: what follows a layer split by rows sees its sum", function()
    for _, n in ipairs(counts) do
      for _, after in ipairs { nn.ReLU, nn.Tanh, nn.GELU, nn.Softmax } do
        compare(n, function()
          return nn.Sequential(nn.Linear(7, 5, f64), after(after == nn.Softmax and 2 or nil))
        end, { "in" }, orrery.randn(3, 7, f64), "rows and a function")
      end
    end
  end)

  it("behaviour 16: a flatten of split channels keeps the values", function()
    for _, n in ipairs(counts) do
      for _, channels in ipairs { 2, 4, 6 } do
        compare(n, function()
          return nn.Sequential(nn.Conv2d(2, channels, 3, f64), nn.Flatten(), nn.Linear(channels * 4, 3, f64))
        end, { "out" }, orrery.randn(2, 2, 4, 4, f64), channels .. " channels")
      end
    end
  end)

  it("behaviour 17: convolutions in every order of splits, batch norm between", function()
    for _, n in ipairs(counts) do
      for _, split in ipairs { { "out", [4] = "in" }, { "in", [4] = "out" }, { "out", [4] = "out" },
        { "in", [4] = "in" } } do
        for _, o in ipairs { { stride = 1, padding = 0 }, { stride = 2, padding = 1 } } do
          compare(n, function()
            local first = nn.Conv2d(3, 5, 3, { stride = o.stride, padding = o.padding, dtype = "f64" })
            return nn.Sequential(first, nn.BatchNorm2d(5, f64), nn.ReLU(),
              nn.Conv2d(5, 4, 3, { padding = o.padding, dtype = "f64" }))
          end, split, orrery.randn(2, 3, 8, 8, f64), "convolutions")
        end
      end
    end
  end)

  it("behaviour 18: groups are divided, and gathered where a split would cut one", function()
    for _, n in ipairs(counts) do
      for _, groups in ipairs { 1, 2, 3, 6 } do
        for _, how in ipairs(groups == 1 and { "out", "in", "none" } or { "out", "none" }) do
          compare(n, function()
            return nn.Sequential(nn.Conv2d(3, 6, 3, { padding = 1, dtype = "f64" }), nn.ReLU(),
              nn.Conv2d(6, 6, 3, { padding = 1, groups = groups, dtype = "f64" }), nn.ReLU(),
              nn.Conv2d(6, 3, 1, f64))
          end, { [3] = how }, orrery.randn(2, 3, 4, 4, f64), ("%d groups, %s"):format(groups, how))
        end
      end
    end
  end)

  it("behaviour 19: every gradient lies as its parameter does, reduced before a hook reads it", function()
    local x, t = orrery.randn(7, 6, f64), orrery.randint(1, 4, 7)
    local one = deep()
    nn.cross_entropy(one:eval()(x), t):backward()
    local want = behave.gradients(one)
    local texts = { "data<tensor<0,1>, tensor<2,3>>", "tensor<data<0,1>, data<2,3>>" }
    for _, n in ipairs(counts) do texts[#texts + 1] = tostring(plan_of("tensor", n)) end
    for _, text in ipairs(texts) do
      local net, seen = deep():eval(), {}
      parallel(text)(net, x)
      for name, p in net:named_parameters() do
        p:register_hook(function(g) seen[name] = behave.list(g) end)
      end
      nn.cross_entropy(net(x), t):backward()
      for name, p in net:named_parameters() do
        assert.equal(p:layout(), p.grad:layout(), text .. ", " .. name)
        behave.near(want[name], seen[name], 1e-10, text .. ", hook of " .. name)
        behave.near(want[name], p.grad, 1e-10, text .. ", " .. name)
      end
    end
  end)
end)

describe("behaviour 22", function()
  -- A table that embeds on the first stage and reads out on the last, and a matrix of two layers.
  local Tied = nn.class("Tied", function(self)
    self.embed = nn.Embedding(6, 4, f64)
    for _, name in ipairs { "a", "b", "c", "d" } do self[name] = nn.Linear(4, 4, f64) end
    self.d.weight = self.a.weight
  end)

  function Tied:forward(ids)
    local h = self.embed(ids):mean(2)
    h = self.d(self.c(self.b(self.a(h):tanh()):tanh()):tanh()):tanh()
    return h:matmul(self.embed.weight:t())
  end

  local texts = { "data<0..2; zero=1>", "data<0..2; zero=2>", "data<0..4; zero=3>",
    "data<model<0,1>, model<2,3>>", "model<tensor<0,1>, tensor<2,3>>",
    "model<0..2; micro=5, recompute=true>" }
  for _, n in ipairs(counts) do
    texts[#texts + 1] = tostring(plan_of("model", n, "micro=3, schedule=1f1b"))
    texts[#texts + 1] = tostring(plan_of("tensor", n))
  end

  it("a parameter shared by stages has one value, one summed gradient and one update", function()
    local function run(plan)
      orrery.manual_seed(22)
      local net, ids, t = Tied(), orrery.randint(1, 6, 9, 3), orrery.randint(1, 6, 9)
      if plan then plan(net, ids) end
      local opt, result = optim.SGD(net, { lr = 0.3, momentum = 0.9 }), { losses = {} }
      for k = 1, 3 do
        opt:zero_grad()
        local loss = plan and plan:step(net, mean, ids, t) or mean(net(ids), t)
        if not plan then loss:backward() end
        result.losses[k], result.gradients = loss:item(), behave.gradients(net)
        opt:step()
      end
      assert.equal(8, #net:parameters()) -- the table, three matrices, four biases
      assert.is_true(rawequal(net.a.weight, net.d.weight))
      result.state = { embed = behave.list(net.embed.weight), a = behave.list(net.a.weight) }
      return result
    end
    local want = run(nil)
    for _, text in ipairs(texts) do same(want, run(parallel(text)), text) end
  end)
end)

describe("behaviour 23", function()
  it("frozen and trainable parameters mix under every plan; the frozen ones keep their values", function()
    local function make()
      local net = deep()
      net[1]:freeze()
      net[7].bias.requires_grad = false
      net[9].weight.requires_grad = false
      return net
    end
    local want, frozen = train(make(), mean, nil, 13), make()
    for _, n in ipairs(counts) do
      for _, options in ipairs { "zero=1", "zero=2", "zero=3" } do
        same(want, train(make(), mean, plan_of("data", n, options), 13), n .. " devices, " .. options)
      end
      local pipeline = plan_of("model", n, "micro=4, schedule=1f1b, recompute=true")
      for _, plan in ipairs { plan_of("tensor", n), pipeline } do
        local net = make()
        same(want, train(net, mean, plan, 13), tostring(plan))
        behave.near(frozen[1].weight, net[1].weight, 0)
        behave.near(frozen[7].bias, net[7].bias, 0)
        assert.is_nil(net[9].weight.grad)
      end
    end
  end)
end)

describe("behaviour 24", function()
  it("an optimizer made before the plan still updates, under every kind and from one to the next", function()
    local function run(texts)
      local net = deep()
      local opt = optim.AdamW(net:parameters(), { lr = 0.05 })
      local before = net:parameters()
      orrery.manual_seed(24)
      for k = 1, 6 do
        local x = orrery.randn(9, 6, f64)
        if texts and texts[k] then parallel(texts[k])(net, x) end
        opt:zero_grad()
        mean(net(x), orrery.randint(1, 4, 9)):backward()
        opt:step()
      end
      for k, p in ipairs(net:parameters()) do assert.is_true(rawequal(before[k], p)) end
      return net
    end
    local want = run(nil)
    for _, texts in ipairs { { "model<0,1>", nil, "tensor<0..2>", nil, "data<0..4; zero=3>" },
      { "data<0,1; zero=2>", nil, "model<0..4>", "data<tensor<0,1>, tensor<2,3>>", "model<2,1,0>" } } do
      local got = run(texts)
      for name, p in want:named_parameters() do
        behave.near(p, got:state()[name], 1e-9, texts[1] .. ", " .. name)
      end
    end
  end)
end)

describe("behaviour 29", function()
  it("dropout masks are the same under every plan, micro-batches and recomputation included", function()
    -- Ones pass through: the output is the product of the masks, of dropouts on every stage.
    local function masks(plan)
      orrery.manual_seed(29)
      local first = nn.Linear(8, 8, { bias = false, dtype = "f64" })
      core.no_grad(function() first.weight:copy_(orrery.eye(8, f64)) end)
      local net = nn.Sequential(first, nn.Dropout(0.5), nn.Dropout(0.25), nn.Dropout(0.1), nn.Dropout(0.25))
      local x, seen, all = orrery.ones(13, 8, f64), {}, {}
      orrery.manual_seed(28)
      if not plan then return behave.list(net(x)) end
      plan(net, x)
      plan:step(net, function(y, at)
        for row = 1, y:size(1) do seen[at[row]:item()] = behave.list(y[row]) end
        return y:sum(), 1
      end, x, orrery.arange(1, 13))
      for row = 1, 13 do
        for _, v in ipairs(seen[row]) do all[#all + 1] = v end
      end
      return all
    end
    local want = masks(nil)
    local zeros = 0
    for _, v in ipairs(want) do zeros = zeros + (v == 0 and 1 or 0) end
    assert.is_true(zeros > 30 and zeros < 104)
    for _, n in ipairs(counts) do
      for _, options in ipairs { "micro=1", "micro=5", "micro=5, schedule=1f1b, recompute=true" } do
        local plan = plan_of("model", n, options)
        behave.near(want, masks(plan), 1e-12, tostring(plan))
      end
    end
  end)
end)

describe("behaviour 30", function()
  it("the norm of gradients counts each element once under every plan, and clips alike", function()
    local x, t = orrery.randn(9, 6, f64), orrery.randint(1, 4, 9)
    local one = deep():eval()
    mean(one(x), t):backward()
    local norm = optim.clip_grad_norm(one, 0.01)
    local texts = { "data<tensor<0,1>, tensor<2,3>; zero=3>", "model<data<0,1>, data<2,3>>",
      "model<tensor<0,1>, tensor<2,3>>" }
    for _, n in ipairs(counts) do
      texts[#texts + 1] = tostring(plan_of("tensor", n))
      texts[#texts + 1] = tostring(plan_of("model", n))
      for level = 1, 3 do texts[#texts + 1] = tostring(plan_of("data", n, "zero=" .. level)) end
    end
    for _, text in ipairs(texts) do
      local net, plan = deep():eval(), parallel(text)
      plan(net, x)
      plan:step(net, mean, x, t)
      assert.near(norm, optim.clip_grad_norm(net, 0.01), 1e-10, text)
      behave.same_gradients(behave.gradients(one), behave.gradients(net), 1e-10, text .. ",")
    end
  end)
end)

describe("behaviour 34", function()
  it("stages stand on the devices in the user's order, and no other device is touched", function()
    local net, x, plan = deep(), orrery.randn(9, 6, f64), parallel "model<5,3; micro=3>"
    local before = {}
    behave.live()
    orrery.reset_peak()
    for k = 0, 7 do before[k] = orrery.memory(k).live end
    plan(net, x)
    plan:step(net, mean, x, orrery.randint(1, 4, 9))
    orrery.synchronize()
    assert.equal(device.name(5), net[1].weight:shards()[1].device)
    assert.equal(device.name(3), net[11].weight:shards()[1].device)
    for k = 0, 7 do
      if k ~= 5 and k ~= 3 then assert.equal(before[k], orrery.memory(k).peak, device.name(k)) end
    end
  end)
end)

describe("behaviour 39, of states held in memory", function()
  it("a state taken under any plan goes on under any other, bit-equal where the plan is the same", function()
    local function parts(text)
      local net, plan = deep(), parallel(text)
      plan(net, orrery.randn(9, 6, f64))
      return net, optim.AdamW(net:parameters(), { lr = 0.02 }), plan
    end
    local function go_on(net, opt, plan, n)
      local losses = {}
      for k = 1, n do
        opt:zero_grad()
        losses[k] = plan:step(net, mean, orrery.randn(9, 6, f64), orrery.randint(1, 4, 9)):item()
        opt:step()
      end
      return losses
    end
    local texts = { "model<0..2; micro=3, schedule=1f1b>", "tensor<0..2>", "data<0..4; zero=3>", "data<0>" }
    for _, from in ipairs(texts) do
      local net, opt, plan = parts(from)
      orrery.manual_seed(39)
      go_on(net, opt, plan, 2)
      local state, opt_state, random = net:state(), opt:state(), orrery.random_state()
      local want = go_on(net, opt, plan, 3)
      for _, to in ipairs(texts) do
        local other, other_opt, other_plan = parts(to)
        other:load_state(state)
        other_opt:load_state(opt_state)
        orrery.set_random_state(random)
        local got = go_on(other, other_opt, other_plan, 3)
        behave.near(want, got, from == to and 0 or 1e-9, from .. " then " .. to)
      end
    end
  end)
end)

describe("behaviour 41, of one process", function()
  it("an error on one device ends the step with its cause, weights stay, and the next step works", function()
    local x, t = orrery.randn(9, 6, f64), orrery.randint(1, 4, 9)
    for _, text in ipairs { "data<0..2>", "tensor<0..2>", "model<0..2; micro=3, schedule=1f1b>",
      "data<0..2; zero=3>" } do
      local net, plan = deep():eval(), parallel(text)
      plan(net, x)
      local opt = optim.AdamW(net, { lr = 0.1 })
      plan:step(net, mean, x, t)
      local gradients, weights = behave.gradients(net), behave.list(net[5].weight)
      local bad = plan:place(t:clone())
      core.no_grad(function() bad:narrow(1, 8, 1):fill_(7) end) -- of 4 classes
      opt:zero_grad()
      behave.raises(function()
        local loss = plan:step(net, mean, x, bad)
        opt:step()
        loss:item()
      end, "cross_entropy", "label 7", "4 classes")
      behave.near(weights, net[5].weight, 0, text)
      opt:zero_grad()
      plan:step(net, mean, x, t)
      behave.same_gradients(gradients, behave.gradients(net), 1e-12, text .. ",")
    end
  end)

  it("a device without memory ends the step of all, with its name", function()
    local plan = parallel "model<0,1; micro=2>"
    local function make() return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) end
    local x = orrery.randn(512, 64)
    local net = plan(make(), x:narrow(1, 1, 4))
    behave.live()
    orrery.set_memory_limit(1, orrery.memory(1).live + 2 ^ 15)
    local ok, message = pcall(function() return plan:step(net, mean_square, x, x):item() end)
    orrery.set_memory_limit(1, nil)
    assert.is_false(ok)
    assert.truthy(tostring(message):find(device.name(1), 1, true), message)
    assert.is_nil(net[1].weight.grad)
    assert.is_true(plan:step(net, mean_square, x, x):item() > 0)
  end)
end)
