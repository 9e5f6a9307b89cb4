-- Every allocation of a training step fails once: one clear error each, live bytes return to where
-- they were, weights are whole, and the process goes on.
-- Invariant: the n-th allocation fails for n = 1, 2, ... until a step meets none.
-- To add a case: a row in `cases`: how many devices (0: the host alone), and the net.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local nn, optim, parallel, data = orrery.nn, orrery.optim, orrery.parallel, orrery.data

local most = 20000 -- allocations that a step may have

local function mlp() return behave.net("f32") end

local function cnn()
  return nn.Sequential(nn.Conv2d(1, 3, 3, { padding = 1 }), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(12, 4))
end

local cases = {
  { 0, "MLP", mlp, { 6 } }, { 1, "MLP", mlp, { 6 } }, { 2, "MLP", mlp, { 6 } }, { 3, "MLP", mlp, { 6 } },
  { 0, "CNN", cnn, { 1, 4, 4 } }, { 2, "CNN", cnn, { 1, 4, 4 } },
}

-- Runs f with its n-th allocation failing, for every n until none fails. after(n) checks each time.
local function each_failure(f, after)
  for n = 1, most do
    core.fail_allocation(n)
    local ok, message = pcall(f)
    core.fail_allocation(-1)
    if not ok then
      message = tostring(message)
      assert(message:find("out of memory", 1, true), ("allocation %d: %s"):format(n, message))
      local _, times = message:gsub("out of memory", "")
      assert(times == 1, ("allocation %d: not one error: %s"):format(n, message))
      assert(message:find("_spec.lua:%d+: "), ("allocation %d: not at the user's line: %s"):format(n,
        message))
    end
    after(n)
    if ok then return n - 1 end
  end
  error("a step has more allocations than " .. most)
end

describe("allocation failure", function()
  after_each(function() core.fail_allocation(-1) end)

  for _, case in ipairs(cases) do
    local devices, name, make, shape = behave.unpack(case)
    it(("at every allocation of a step of the %s on %s"):format(name, devices == 0 and "the host"
      or devices .. " devices"), function()
      orrery.manual_seed(71)
      local net = make()
      if devices > 0 then behave.plan(devices)(net) end
      local opt = optim.Adam(net:parameters(), { lr = 0.01 })
      local x, t = orrery.randn({ 7, behave.unpack(shape) }), orrery.randint(1, 4, 7)
      local function step()
        opt:zero_grad()
        local loss = nn.cross_entropy(net(x), t)
        loss:backward()
        optim.clip_grad_norm(net:parameters(), 1)
        opt:step()
        return loss:item()
      end
      step() -- optimiser state is there
      opt:zero_grad()
      local live = behave.live()
      local failures = each_failure(step, function(n)
        opt:zero_grad()
        local now = behave.live()
        assert(now == live, ("allocation %d: %d bytes live, %d before"):format(n, now, live))
      end)
      assert.is_true(failures > 20, "only " .. failures .. " allocations")
      for parameter, p in net:named_parameters() do
        for _, v in ipairs(behave.list(p)) do assert(v == v, "NaN in " .. parameter) end
      end
      assert.is_true(step() < 10)
    end)
  end

  it("while a plan is applied: the net stays where it was, or is placed as a whole", function()
    orrery.manual_seed(71)
    local net = mlp()
    local plan = behave.plan(3)
    local want = net:state()
    local failures = each_failure(function() plan(net) end, function(n)
      local placed = net:plan() ~= nil
      for parameter, p in net:named_parameters() do
        assert(placed == (p:device() ~= "cpu"), ("allocation %d: %s is on %s"):format(n, parameter,
          p:device()))
        behave.near(want[parameter], p, 0, parameter)
      end
    end)
    assert.is_true(failures > 5, tostring(failures))
  end)

  it("in accumulate: gradients are what they were", function()
    for _, devices in ipairs { 0, 2 } do
      orrery.manual_seed(71)
      local net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))
      if devices > 0 then behave.plan(devices)(net) end
      local x, t = orrery.randn(7, 6), orrery.randint(1, 4, 7)
      nn.cross_entropy(net(x), t):backward()
      local was = behave.gradients(net)
      local function f()
        orrery.accumulate({ 1, 2 }, function()
          return nn.cross_entropy(net(x), t, { reduction = "sum" }), 7
        end)
      end
      local failures = each_failure(f, function() end)
      for key, values in pairs(behave.gradients(net)) do
        for k, v in ipairs(values) do assert.near(2 * was[key][k], v, 1e-5) end -- the one that went well
      end
      assert.is_true(failures > 20, tostring(failures))
    end
  end)

  it("in a loader, placing, redistributing, reading: the next call works", function()
    local x, y = orrery.randn(23, 3), orrery.randint(1, 4, 23)
    local plan = parallel "data<0..2>"
    local live = behave.live()
    each_failure(function()
      local sum = 0
      for a, b in data.batches({ x, y }, { batch = 5, shuffle = true, plan = plan }) do
        sum = sum + a:redistribute("shard(2)"):redistribute("replicate"):sum():item() + b:full():sum():item()
        local _ = a:totable()
      end
      assert.near(x:sum():item() + y:sum():item(), sum, 1e-3)
    end, function(n)
      local now = behave.live()
      for _ = 1, 10 do -- a slot of the stack that nobody uses any more may still name a tensor
        if now ~= live then
          orrery.randn(2):sum():item()
          now = behave.live()
        end
      end
      assert(now == live, ("allocation %d: %d bytes live, %d before"):format(n, now, live))
    end)
  end)
end)
