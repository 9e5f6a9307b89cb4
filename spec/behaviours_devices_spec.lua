-- Behaviours 34, 35, 37 and 38 (38 over 5,000 steps: memory_spec): order and equality of devices, ops
-- between devices, running out of memory. (33 and 36 are of CUDA devices.)
-- To add a case: what each device holds, by orrery.memory(device).
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local device = require "spec.support.device"
local nn, optim, parallel = orrery.nn, orrery.optim, orrery.parallel

local f64 = { dtype = "f64" }

local function train(net, steps)
  local opt = optim.Adam(net:parameters(), { lr = 0.01 })
  for _ = 1, steps do
    opt:zero_grad()
    nn.cross_entropy(net(orrery.randn(12, 6, f64)), orrery.randint(1, 4, 12)):backward()
    opt:step()
  end
  orrery.synchronize()
end

describe("behaviour 34", function()
  it("the order of devices is the user's", function()
    for _, order in ipairs { { 2, 0 }, { 4, 1, 3 }, { 1 } } do
      local plan = parallel("data<" .. table.concat(order, ",") .. ">")
      local names = {}
      for k, id in ipairs(order) do names[k] = device.name(id) end
      assert.same(names, plan:devices())
      local shards = plan:place(orrery.arange(1, 7)):shards()
      local first = 1
      for k, shard in ipairs(shards) do
        assert.equal(names[k], shard.device)
        assert.equal(first, shard.tensor[1]:item())
        first = first + shard.tensor:size(1)
      end
    end
  end)

  it("the first device holds no more than the others", function()
    for _, n in ipairs(behave.counts) do
      behave.live()
      local before = {}
      for k = 0, n - 1 do before[k] = orrery.memory(device.name(k)).live end
      orrery.manual_seed(60)
      local net = behave.plan(n)(behave.net())
      local opt = optim.Adam(net:parameters())
      for k = 0, n - 1 do orrery.reset_peak(device.name(k)) end
      nn.cross_entropy(net(orrery.randn(n * 4, 6, f64)), orrery.randint(1, 4, n * 4)):backward()
      opt:step()
      behave.live()
      local first = orrery.memory(device.name(0))
      for k = 1, n - 1 do
        local m = orrery.memory(device.name(k))
        assert.equal(first.live - before[0], m.live - before[k], "live on " .. device.name(k))
        assert.equal(first.peak - before[0], m.peak - before[k], "peak of " .. device.name(k))
      end
    end
  end)

  it("a device that is not in the plan is never touched", function()
    local untouched = behave.run([[
      local nn, optim = orrery.nn, orrery.optim
      local net = orrery.parallel "data<1,3>" (nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8),
        nn.Dropout(0.2), nn.Linear(8, 4)))
      local opt = optim.Adam(net:parameters())
      for _ = 1, 3 do
        opt:zero_grad()
        nn.cross_entropy(net(orrery.randn(5, 6)), orrery.randint(1, 4, 5)):backward()
        optim.clip_grad_norm(net:parameters(), 1)
        opt:step()
      end
      orrery.synchronize()
      for _, k in ipairs { 0, 2, 4 } do
        local m = orrery.memory(k)
        io.write(m.live + m.peak + m.cached, " ")
      end
      io.write(orrery.memory(1).peak > 0 and "used" or "unused")
    ]], { ORRERY_CPU_DEVICES = "5" })
    assert.equal("0 0 0 used", untouched)
  end)

  it("duplicates in one node are refused by name", function()
    local two = device.name(2)
    for text, name in pairs { ["data<0,0>"] = "0", ["data<2,1,2>"] = "2", ["data<" .. two .. ",2>"] = two,
      ["data<2,0..2>"] = "2" } do
      behave.raises(function() parallel(text) end, "device " .. name .. " stands twice", text)
    end
  end)

  it("a device that is not there: how many are visible, and why", function()
    behave.raises(function() parallel "data<0,17>" end, "17", "8",
      device.kind == "cuda" and "cuda:7" or "ORRERY_CPU_DEVICES=8")
    behave.raises(function() orrery.zeros(2, { device = "cpu:9" }) end, "device 9 is not there",
      "8 CPU devices", "ORRERY_CPU_DEVICES=10")
    behave.raises(function() orrery.zeros(2):to "gpu:0" end, "gpu:0")
  end)
end)

describe("behaviour 35", function()
  it("an op on tensors of two devices with no plan raises and names both", function()
    local one, three = device.name(1), device.name(3)
    local a, b = orrery.ones(2, { device = one }), orrery.ones(2, { device = three })
    behave.raises(function() local _ = a + b end, "add", one, three)
    behave.raises(function() a:add_(b) end, one, three)
    behave.raises(function() orrery.cat { a, b } end, one, three)
    behave.raises(function() a:view(1, 2):matmul(b:view(2, 1)) end, "matmul", one, three)
    behave.raises(function() orrery.where(a:gt(0), a, b) end, one, three)
    behave.raises(function() nn.mse_loss(a, b) end, one, three)
    behave.near({ 2, 2 }, a + b:to(one), 0) -- and the next one works
  end)

  it("so do tensors of two plans, and of a plan and a device", function()
    local first, second = device.name(0) .. "," .. device.name(1), device.name(2) .. "," .. device.name(3)
    local a = behave.place(orrery.ones(4), 2, "shard(1)")
    local b = parallel "data<2,3>":place(orrery.ones(4))
    behave.raises(function() local _ = a * b end, "mul", first, second)
    local fifth = device.name(4)
    behave.raises(function() local _ = a * orrery.ones(4, { device = fifth }) end, first, fifth)
  end)

  it("a module and its input on two devices", function()
    local one, two = device.name(1), device.name(2)
    local net = nn.Linear(3, 2):to(one)
    behave.raises(function() net(orrery.ones(2, 3, { device = two })) end, "linear", one, two)
    assert.same({ 2, 2 }, net(orrery.ones(2, 3)):size()) -- a host tensor joins
  end)
end)

describe("behaviour 37", function()
  after_each(function()
    for k = 0, 7 do core.set_memory_limit(device.name(k), 0) end
    core.set_memory_limit("cpu", 0)
  end)

  it("says device, bytes asked, in use and free, op, largest categories and a remedy; tensors stay intact",
    function()
    for _, name in ipairs { "cpu", device.name(2) } do
      behave.live()
      orrery.empty_cache()
      local kept = orrery.arange(1, 1000, { dtype = "f32", device = name })
      orrery.synchronize()
      core.set_memory_limit(name, orrery.memory(name).live + 2 ^ 20)
      local big = orrery.ones(2 ^ 17, { device = name }) -- 512 KiB
      local message = behave.raises(function() local _ = orrery.cat { big, big, big } end,
        name .. " is out of memory", "asked for 1.5 MiB", "in use", "limit", "largest", "Free ",
          "smaller batch")
      assert.truthy(message:find("cat", 1, true), message)
      core.set_memory_limit(name, 0)
      assert.equal(500500, kept:to("f64"):sum():item())
      assert.equal(2 ^ 17, big:to("f64"):sum():item())
      core.set_memory_limit(name, orrery.memory(name).live + 2 ^ 20)
      local part = big[{ { 1, 2 ^ 15 } }]
      assert.equal(2 ^ 16, orrery.cat({ part, part }):sum():item()) -- smaller works
      core.set_memory_limit(name, 0)
    end
  end)

  it("names the layer, and a smaller batch then works, under a plan", function()
    for _, n in ipairs { 1, 2, 3, 5 } do
      behave.live()
      orrery.empty_cache()
      orrery.manual_seed(61)
      local net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 4))
      behave.plan(n)(net)
      local opt = optim.SGD(net:parameters(), { lr = 0.1 })
      local function step(batch)
        opt:zero_grad()
        local y = orrery.ones(batch * n, { dtype = "i64" })
        local loss = nn.cross_entropy(net(orrery.ones(batch * n, 16)), y)
        loss:backward()
        opt:step()
        return loss:item()
      end
      step(4)
      behave.live()
      local last = device.name(n - 1)
      core.set_memory_limit(last, orrery.memory(last).live + 6 * 2 ^ 20)
      local weights = net:state()
      local x = orrery.ones(1024 * n, 16)
      behave.raises(function() local _ = net(x) end, last .. " is out of memory", "asked for 16.0 MiB",
        "linear: ", "layer '2' (Linear)", "limit")
      for name, w in pairs(net:state()) do behave.near(weights[name], w, 0, name) end
      assert.is_true(step(4) < 2)
      core.set_memory_limit(last, 0)
    end
  end)

  it("collects what the script has dropped before giving up", function()
    local name = device.name(3)
    behave.live()
    orrery.empty_cache(name)
    core.set_memory_limit(name, orrery.memory(name).live + 2 ^ 20)
    for _ = 1, 50 do
      local x = orrery.ones(2 ^ 17, { device = name }) -- half of what there is
      assert.equal(1, x[5]:item())
    end
  end)
end)

describe("behaviour 38", function()
  it("live bytes return to where they were after training, on every count", function()
    for _, n in ipairs(behave.counts) do
      local before = behave.live()
      do
        orrery.manual_seed(62)
        train(behave.plan(n)(behave.net()), 20)
      end
      assert.equal(before, behave.live(), n .. " devices")
    end
  end)

  it("peak and cached bytes stand still from step to step", function()
    for _, n in ipairs(behave.counts) do
      orrery.manual_seed(62)
      local net = behave.plan(n)(behave.net())
      train(net, 30)
      local was = orrery.memory()
      train(net, 30)
      local now = orrery.memory()
      assert.is_true(now.live + now.cached <= 1.25 * (was.live + was.cached),
        ("%d devices: %d then %d bytes"):format(n,
        was.live + was.cached, now.live + now.cached))
    end
  end)
end)
