-- Pipelines: what a schedule promises, what a stage holds, what happens when a step fails, and what is
-- refused. Numbers under every plan are in plan_spec; behaviours_pipelines_spec has the contract's.
-- To add a schedule: its name in `kinds`, with what it may hold in `held`.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local device = require "spec.support.device"
local schedule = require "orrery.parallel.schedule"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local f64 = { dtype = "f64" }

-- Schedules -----------------------------------------------------------------------------------

local kinds = { "gpipe", "1f1b", "interleaved" }

-- Forwards without their backward that stage s (from 1) of n may hold of m micro-batches.
local function held(kind, s, n, m)
  return kind == "gpipe" and m or math.min(m, n - s + 1)
end

-- Follows an order; raises where a task comes twice or before what it needs. Gives the most that each
-- stage held, and the time at which all is done when every task takes one unit and every device runs
-- its tasks in the order given.
local function follow(order, stages, devices)
  local done, free, holds, most, last = { forward = {}, backward = {} }, {}, {}, {}, 0
  for _, task in ipairs(order) do
    local s, m, kind = task.stage, task.micro, task.kind
    local lane = (s - 1) % devices + 1
    local needs = {}
    if kind == "forward" and s > 1 then needs[1] = done.forward[(s - 1) * 100 + m] or false end
    if kind == "backward" then
      needs[1] = done.forward[s * 100 + m] or false
      if s < stages then needs[2] = done.backward[(s + 1) * 100 + m] or false end
    end
    local start = free[lane] or 0
    for _, time in ipairs(needs) do
      assert(time, ("%s of micro-batch %d on stage %d comes too early"):format(kind, m, s))
      start = math.max(start, time)
    end
    assert(not done[kind][s * 100 + m], "a task comes twice")
    done[kind][s * 100 + m] = start + 1
    free[lane] = start + 1
    last = math.max(last, start + 1)
    holds[s] = (holds[s] or 0) + (kind == "forward" and 1 or -1)
    most[s] = math.max(most[s] or 0, holds[s])
  end
  return most, last
end

describe("a schedule", function()
  it("runs every task once, after what it needs, and holds no more than it says", function()
    for _, kind in ipairs(kinds) do
      for devices = 1, 6 do
        for chunks = 1, kind == "interleaved" and 3 or 1 do
          for micro = 1, 12 do
            local stages = devices * chunks
            local order = schedule.order(kind, stages, micro, devices)
            local what = ("%s, %d stages on %d, %d micro-batches"):format(kind, stages, devices, micro)
            assert.equal(2 * stages * micro, #order, what)
            local most, last = follow(order, stages, devices)
            for s = 1, stages do assert.is_true(most[s] <= held(kind, s, stages, micro), what) end
            assert.is_true(last >= 2 * chunks * micro, what)
            -- The least possible where a device holds one stage: micro-batches and the pipeline's length.
            if chunks == 1 then assert.equal(2 * (micro + stages - 1), last, what) end
          end
        end
      end
    end
  end)

  it("interleaved ends no later than 1f1b over the same devices", function()
    for devices = 2, 6 do
      for chunks = 2, 3 do
        for micro = devices, 12, devices do
          local stages = devices * chunks
          local _, last = follow(schedule.order("interleaved", stages, micro, devices), stages, devices)
          local _, plain = follow(schedule.order("1f1b", devices, micro, devices), devices, devices)
          assert.is_true(last <= plain * chunks,
            ("%d devices, %d chunks, %d micro-batches: %d, 1f1b %d"):format(devices, chunks, micro, last,
              plain * chunks))
        end
      end
    end
  end)
end)

-- Memory --------------------------------------------------------------------------------------

-- k equal blocks whose activations, per sample, are large beside their weights.
local function blocks(k, width)
  local net = nn.Sequential()
  for i = 1, k do
    net[i] = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
  end
  return net
end

local function mean_square(y, t) return nn.mse_loss(y, t) end

local function live(k)
  collectgarbage()
  collectgarbage()
  orrery.synchronize()
  return orrery.memory(k).live
end

-- Peak bytes of a step above what lives before it, on each device.
local function step_peaks(text, net, x, n)
  local plan = parallel(text)
  plan(net, x)
  local before, peaks = {}, {}
  plan:step(net, mean_square, x, x) -- gradients and the caches of a first step
  net:zero_grad()
  for k = 0, n - 1 do before[k] = live(k) end
  orrery.reset_peak()
  plan:step(net, mean_square, x, x)
  orrery.synchronize()
  for k = 0, n - 1 do peaks[k] = orrery.memory(k).peak - before[k] end
  return peaks
end

describe("memory of a pipeline", function()
  local width, rows, micro, n = 32, 32768, 8, 4

  -- Bytes that one micro-batch keeps on a stage of one block: two inputs of Linear, two of GELU.
  local one = 4 * width * 4 * rows / micro

  it("1f1b holds stages - s micro-batches on stage s, gpipe all", function()
    local x = orrery.randn(rows, width)
    local text = "model<0: 4, 1: 4, 2: 4, 3: 4; micro=8%s>"
    local gpipe = step_peaks(text:format "", blocks(4, width), x, n)
    local few = step_peaks(text:format ", schedule=1f1b", blocks(4, width), x, n)
    for s = 0, n - 1 do
      -- What is being worked on beside them, and Lua's garbage, is about a micro-batch, with the loss
      -- two; the first stage also has the batch, the last one its labels.
      local batch = (s == 0 or s == n - 1) and rows * width * 4 or 0
      local beside = 1.25 * one + batch + (s == n - 1 and one or 0)
      assert.is_true(few[s] <= (n - s) * one + beside,
        ("1f1b, stage %d: %.2f micro-batches"):format(s, few[s] / one))
      assert.is_true(gpipe[s] >= micro * one, ("gpipe, stage %d: %.2f"):format(s, gpipe[s] / one))
    end
  end)

  it("two stages hold at most 0.55 of parameters and optimizer state each, on 8 equal blocks", function()
    local function held_by(text)
      local x, before, bytes = orrery.randn(8, 64), {}, {}
      for k = 0, 1 do before[k] = live(k) end
      local net = blocks(8, 64)
      local plan = parallel(text)
      plan(net, x)
      local opt = optim.AdamW(net:parameters(), { lr = 1e-3 })
      plan:step(net, mean_square, x, x)
      opt:step()
      opt:zero_grad()
      for k = 0, 1 do bytes[k] = live(k) - before[k] end
      assert.is_true(#net:parameters() == 32 and opt ~= nil)
      return bytes
    end
    local all = held_by("model<0>")[0]
    local each = held_by("model<0,1>")
    assert.is_true(all >= 3 * 8 * (2 * 64 * 64 + 2 * 64) * 4) -- weights, two moments
    for k = 0, 1 do
      assert.is_true(each[k] <= 0.55 * all, ("device %d: %d of %d bytes"):format(k, each[k], all))
    end
  end)

  it("recompute keeps less than a third of a GPT's activations", function()
    local GPT = nn.class("GPT", function(self)
      self.tokens = nn.Embedding(32, 64)
      self.blocks = nn.Sequential()
      for k = 1, 4 do self.blocks[k] = nn.TransformerBlock(64, 4, { causal = true, dropout = 0.1 }) end
      self.norm = nn.LayerNorm(64)
    end)
    function GPT:forward(ids)
      return self.norm(self.blocks(self.tokens(ids))):reshape(-1, 64):matmul(self.tokens.weight:t())
    end
    local ids, labels = orrery.randint(1, 32, 8, 64), orrery.randint(1, 32, 8 * 64)
    local function kept(options)
      orrery.manual_seed(3)
      local net, plan, bytes, before = GPT(), parallel("model<0,1; micro=1" .. options .. ">"), nil, nil
      plan(net, ids)
      local function criterion(y)
        local loss = nn.cross_entropy(y, plan:place(labels))
        bytes = live(0) + live(1)
        return loss
      end
      for _ = 1, 2 do
        net:zero_grad()
        before = live(0) + live(1)
        plan:step(net, criterion, ids, labels)
      end
      return bytes - before, behave.gradients(net)
    end
    local all, want = kept ""
    local few, got = kept ", recompute=true"
    assert.is_true(all >= 3 * few, ("%d bytes, %d with recompute: %.2f times"):format(all, few, all / few))
    behave.same_gradients(want, got, 1e-5)
  end)
end)

-- Nets of several stages ----------------------------------------------------------------------

describe("a net of its own forward", function()
  -- Children in any order: c reads what a gave, and skips b's stage.
  local Net = nn.class("Net", function(self)
    for _, name in ipairs { "a", "b", "c", "d" } do self[name] = nn.Linear(6, 6, f64) end
    self.scale = nn.parameter(orrery.full(0.5, 6, f64))
  end)

  function Net:forward(x, y)
    local first = self.a(x):tanh()
    local second = self.b(first) + x
    local third = self.c(first * self.scale):tanh()
    return self.d(second + third) + (y or first)
  end

  local function gradients(text)
    orrery.manual_seed(9)
    local net, x = Net(), orrery.randn(7, 6, f64)
    if not text then
      mean_square(net(x), x):backward()
    else
      local plan = parallel(text)
      plan(net, x)
      plan:step(net, mean_square, x, x)
    end
    return behave.gradients(net)
  end

  it("uses values and children of several stages as on one device", function()
    local want = gradients(nil)
    for _, text in ipairs { "model<0: 1, 1: 1, 2: 1, 3: 1; micro=3>",
      "model<0: 1, 1: 2, 2: 1; micro=4, schedule=1f1b>", "model<0: a, 1: b, 2: *; micro=2>",
      "model<0,1; micro=3, schedule=interleaved, chunks=2>", "model<0: 2, 1: 2; micro=3, recompute=true>",
      "data<model<0,1>, model<2,3>; micro=2>" } do
      behave.same_gradients(want, gradients(text), 1e-10, text)
    end
  end)

  it("works by net(x) and loss:backward() too, in evaluation and with no_grad", function()
    local want = gradients(nil)
    orrery.manual_seed(9)
    local net, x = Net(), orrery.randn(7, 6, f64)
    local host = net(x):detach():clone()
    parallel "model<0..2>" (net, x)
    mean_square(net(x), x):backward()
    behave.same_gradients(want, behave.gradients(net), 1e-10)
    orrery.no_grad(function() behave.near(host, net:eval()(x), 1e-12) end)
  end)
end)

-- Failing steps -------------------------------------------------------------------------------

describe("a step that fails", function()
  local function make()
    orrery.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8, f64), nn.BatchNorm1d(8, f64), nn.ReLU(), nn.Linear(8, 4, f64))
  end

  local x, y = orrery.randn(12, 6, f64), orrery.randint(1, 4, 12)

  -- fail(net, plan) runs a step that must raise.
  local function check(text, fail, ...)
    local want, got
    for _, failing in ipairs { false, true } do
      local net, plan = make(), parallel(text)
      plan(net, x)
      plan:step(net, nn.cross_entropy, x, y)
      if failing then
        local gradients, mean = behave.gradients(net), behave.list(net[2].running_mean)
        local ok, message = pcall(fail, net, plan)
        assert.is_false(ok, text)
        for _, word in ipairs { ... } do assert.truthy(tostring(message):find(word, 1, true), message) end
        behave.same_gradients(gradients, behave.gradients(net), 0, text)
        behave.near(mean, net[2].running_mean, 0, text)
      end
      net:zero_grad()
      local loss = plan:step(net, nn.cross_entropy, x, y):item()
      local result = { loss = loss, gradients = behave.gradients(net) }
      result.mean = behave.list(net[2].running_mean)
      if failing then got = result else want = result end
    end
    assert.equal(want.loss, got.loss, text)
    behave.same_gradients(want.gradients, got.gradients, 0, text)
    behave.near(want.mean, got.mean, 0, text)
  end

  local texts = { "model<0: 2, 1: 2; micro=3>", "model<0: 2, 1: 2; micro=3, schedule=1f1b>",
    "data<0,1; micro=3>", "model<data<0,1>, data<2,3>; micro=4, schedule=1f1b>" }

  it("in the criterion leaves gradients and running statistics as they were", function()
    for _, text in ipairs(texts) do
      check(text, function(net, plan)
        local calls = 0
        plan:step(net, function(out, labels)
          calls = calls + 1
          if calls == 2 then error "no second loss" end
          return nn.cross_entropy(out, labels)
        end, x, y)
      end, "no second loss", "pipeline_spec.lua")
    end
  end)

  it("by a shape on the last stage says which, and leaves all as it was", function()
    for _, text in ipairs(texts) do
      check(text, function(net, plan)
        local forward = net[4].forward
        rawset(net[4], "forward", function(self, h) return forward(self, h:narrow(2, 1, 5)) end)
        local ok, message = pcall(plan.step, plan, net, nn.cross_entropy, x, y)
        rawset(net[4], "forward", nil)
        if not ok then error(message, 0) end
      end, "(4, 8)")
    end
  end)

  it("in a hook in backward leaves gradients as they were", function()
    for _, text in ipairs(texts) do
      check(text, function(net, plan)
        local calls, fails = 0, true
        net[1].weight:register_hook(function()
          calls = calls + 1
          if fails and calls == 1 then error "no gradient" end
        end)
        local ok, message = pcall(plan.step, plan, net, nn.cross_entropy, x, y)
        fails = false
        if not ok then error(message, 0) end
      end, "no gradient")
    end
  end)
end)

-- Bad input -----------------------------------------------------------------------------------

describe("a pipeline refuses", function()
  local function make() return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2)) end

  -- Nothing is placed: parameters stand on the host, the net has no plan and still runs.
  local function refused(text, net, ...)
    local x = orrery.randn(8, 4)
    local message = behave.raises(function()
      local placed = parallel(text)(net, x)
      placed(x)
    end, ...)
    for name, p in net:named_parameters() do assert.equal("cpu", p:device(), name) end
    assert.is_nil(net:plan())
    assert.equal(8, net(x):size(1))
    return message
  end

  it("a pattern that names no layer, and a layer that no pattern names", function()
    refused('model<0: "1", 1: "2", 2: "x*", 3: "*">', make(), "x*", "no layer")
    refused('model<0: "1", 1: "2">', make(), "layer '3'", "pattern")
    refused('model<0: "2", 1: "*">', make(), "layer '2'", "stage 2 to 1")
  end)

  it("more stages than layers", function()
    refused("model<0..4>", make(), "5 stages", "4 layers", "at most 4")
  end)

  it("counts that do not sum", function()
    refused("model<0: 3, 1: 2>", make(), "sum to 5", "4 layers")
    refused("model<0: 1, 1: 2>", make(), "sum to 3", "4 layers")
  end)

  it("a schedule for one micro-batch", function()
    for _, kind in ipairs(kinds) do
      refused(("model<0,1; micro=1, schedule=%s>"):format(kind), make(), "micro=1", kind, "micro=8")
    end
  end)

  it("counts for interleaved chunks, which they cannot name", function()
    refused("model<0: 2, 1: 2; micro=4, schedule=interleaved, chunks=2>", make(), "chunks=2", "4 stages")
  end)

  it("a criterion that gives no number", function()
    local net, plan = make(), parallel "model<0,1; micro=2>"
    local x = orrery.randn(8, 4)
    plan(net, x)
    behave.raises(function()
      local loss = plan:step(net, function(y) return y end, x, x)
      return loss
    end, "one number")
    assert.is_nil(net[1].weight.grad)
  end)
end)

describe("recompute refuses a layer that", function()
  local function refused(layer, ...)
    local net = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
    local plan = parallel "model<0: 2, 1: 1; micro=2, recompute=true>"
    local x = orrery.randn(8, 4)
    plan(net, x)
    local words = { ... }
    local message = behave.raises(function()
      local loss = plan:step(net, mean_square, x, x)
      return loss
    end, behave.unpack(words))
    assert.is_nil(net[1].weight.grad)
    return message
  end

  it("changes its fields when it runs", function()
    local Counting = nn.class("Counting", function(self) self.count = 0 end)
    function Counting:forward(x)
      self.count = self.count + 1
      return x * 2
    end
    refused(Counting(), "recompute", "'2'", "count")
  end)

  it("gives several values, or a table", function()
    local net = nn.Module(function(x) return x, x end)
    refused(net, "recompute", "'2'", "2 values")
    refused(nn.Module(function(x) return { x } end), "recompute", "'2'", "table")
  end)

  it("uses tensors of others, whose gradients would be lost", function()
    local other = nn.Linear(4, 4)
    local first = device.name(0)
    refused(nn.Module(function(x) return x:matmul(other.weight:to(first)) end), "recompute", "'2'", "lost")
  end)
end)

describe("core.to_stage", function()
  it("leaves alone what is of no pipeline", function()
    local a = parallel("data<4,5>"):place(orrery.ones(4, 2))
    local stages = parallel("model<6,7>"):stages()
    assert.is_true(rawequal(a, core.to_stage(a, stages[1].mesh)))
    local host, first = orrery.ones(2), parallel("model<6,7>"):place(orrery.ones(4, 2))
    assert.is_true(rawequal(host, core.to_stage(host, stages[2].mesh)))
    assert.is_true(rawequal(first, core.to_stage(first, stages[1].mesh)))
    assert.equal(device.name(7), core.to_stage(first, stages[2].mesh):shards()[1].device)
  end)
end)

describe("plan:step", function()
  local function mse(a, b) return (a - b):square():mean() end

  for _, text in ipairs { "data<0; micro=3>", "data<0,1; micro=3>", "model<0,1; micro=4, schedule=1f1b>",
    "model<tensor<0,1>, tensor<2,3>; micro=3>" } do
    it(text .. ": gives an input that requires grad its gradient", function()
      orrery.manual_seed(1)
      local net = nn.Sequential(nn.Linear(4, 6, f64), nn.Tanh(), nn.Linear(6, 3, f64))
      local x, y = orrery.randn(7, 4, f64), orrery.randn(7, 3, f64)
      x.requires_grad = true
      mse(net(x), y):backward()
      local want = x.grad:clone()
      x.grad = nil
      local plan = parallel(text)
      net = plan(net, x:detach())
      plan:step(net, mse, x, y)
      behave.near(want, x.grad, 1e-12)
    end)
  end

  it("adds a micro-batch's gradients of weights within the product that makes them", function()
    local plan = parallel "data<0; micro=4>"
    local net = plan(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    local x, y, calls = orrery.randn(8, 4), orrery.randn(8, 3), {}
    for _, row in ipairs(orrery.profile(function() plan:step(net, mse, x, y) end)) do
      calls[row.op] = row.calls
    end
    assert.equal(2, calls.rows_product)
    assert.equal(6, calls.rows_product_add_)
  end)

  it("model<0; recompute=true> runs layers again, with the numbers of one device", function()
    local plan = parallel "model<0; micro=2, recompute=true>"
    local function make()
      orrery.manual_seed(2)
      return nn.Sequential(nn.Linear(4, 5, f64), nn.Dropout(0.5), nn.Linear(5, 3, f64))
    end
    local x, y = orrery.randn(8, 4, f64), orrery.randn(8, 3, f64)
    local function gradients(p)
      local net = p(make(), x)
      orrery.manual_seed(3)
      local calls = {}
      for _, row in ipairs(orrery.profile(function() p:step(net, mse, x, y) end)) do
        calls[row.op] = row.calls
      end
      return net:parameters(), calls.linear
    end
    local want, once = gradients(parallel "data<0; micro=2>")
    local got, twice = gradients(plan)
    for k, p in ipairs(want) do behave.near(p.grad, got[k].grad, 1e-12) end
    assert.equal(2 * once, twice)
  end)
end)
