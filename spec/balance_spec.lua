-- Balance of stages: the exact optimum against brute force, memory limits, costs by shapes and by time.
-- To add a case: beside its like.
local orrery = require "orrery"
local core = require "orrery.core"
local balance = require "orrery.parallel.balance"
local nn, parallel = orrery.nn, orrery.parallel

local huge = math.huge

local seed = 5
local function random(n)
  seed = (seed * 16807) % 2147483647
  return seed % n + 1
end

local function sum(list, from, to)
  local total = 0
  for i = from, to do total = total + list[i] end
  return total
end

-- Calls visit(ends) for every way to cut n layers into k runs.
local function each_partition(n, k, visit, ends, s)
  ends, s = ends or {}, s or 1
  local first = (ends[s - 1] or 0) + 1
  if s == k then
    ends[s] = n
    visit(ends)
    ends[s] = nil
    return
  end
  for last = first, n - (k - s) do
    ends[s] = last
    each_partition(n, k, visit, ends, s + 1)
    ends[s] = nil
  end
end

local function worst_of(list, ends)
  local worst, first = -huge, 1
  for _, last in ipairs(ends) do
    worst, first = math.max(worst, sum(list, first, last)), last + 1
  end
  return worst
end

local function excess_of(memory, limits, ends)
  local worst, first = -huge, 1
  for s, last in ipairs(ends) do
    worst, first = math.max(worst, sum(memory, first, last) - limits[s]), last + 1
  end
  return worst
end

local function random_list(n, largest)
  local list = {}
  for i = 1, n do list[i] = random(largest) - 1 end
  return list
end

describe("balance", function()
  it("is the optimum that brute force finds, on 300 random lists of layers", function()
    local refused = 0
    for case = 1, 300 do
      local n = random(10)
      local k = random(n)
      local costs, memory, limits = random_list(n, case % 3 == 0 and 4 or 100), nil, nil
      if case % 2 == 0 then
        memory, limits = random_list(n, 20), {}
        for s = 1, k do limits[s] = 15 + random(math.ceil(20 * n / k)) end
      end
      local best, least_excess = huge, huge
      each_partition(n, k, function(ends)
        local excess = limits and excess_of(memory, limits, ends) or -huge
        least_excess = math.min(least_excess, excess)
        if excess <= 0 then best = math.min(best, worst_of(costs, ends)) end
      end)
      local ends, worst = balance.partition(costs, k, memory, limits)
      if best == huge then
        refused = refused + 1
        assert.is_nil(ends)
        assert.equal(least_excess, worst)
      else
        assert.equal(best, worst)
        assert.equal(k, #ends)
        assert.equal(n, ends[k])
        assert.equal(best, worst_of(costs, ends))
        assert.is_true(not limits or excess_of(memory, limits, ends) <= 0)
        for s = 2, k do assert.is_true(ends[s] > ends[s - 1]) end
      end
    end
    assert.is_true(refused > 5 and refused < 140, refused .. " refused")
  end)

  local function deep(n)
    local net = nn.Sequential()
    for _ = 1, n do net:add(nn.Sequential(nn.Linear(32, 32), nn.ReLU())) end
    return net
  end

  it("counts operations, bytes and parameters of flattened children", function()
    local net = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4, { bias = false }))
    local ends, rows = parallel.balance(net, core.randn(5, 8), 2)
    assert.equal(3, #rows)
    assert.same({ "1.1", "1.2", "2" }, { rows[1].name, rows[2].name, rows[3].name })
    assert.same({ 2 * 5 * 8 * 16, 5 * 16, 2 * 5 * 16 * 4 }, { rows[1].flops, rows[2].flops, rows[3].flops })
    assert.same({ 4 * (8 * 16 + 16), 0, 4 * 64 },
      { rows[1].parameters, rows[2].parameters, rows[3].parameters })
    assert.equal(4 * 2 * 5 * 16, rows[2].bytes)
    assert.equal(4 * 5 * 16, rows[2].activations)
    assert.equal(3, ends[2])
    assert.matches("layer +MFLOP", tostring(rows))
    assert.equal("cpu", net[2].weight:layout())
  end)

  it("cuts equal blocks evenly, and a plan runs them so", function()
    local ends = parallel.balance(deep(8), core.randn(4, 32), 4)
    assert.same({ 4, 8, 12, 16 }, ends)
    local net = deep(4)
    parallel "model<0,1>"(net, core.randn(4, 32))
    for k = 1, 4 do
      local device = net[k][1].weight:shards()[1].device
      assert.equal(k <= 2 and "cpu:0" or "cpu:1", device)
    end
  end)

  it("measures times on request", function()
    local ends, rows = parallel.balance(deep(4), core.randn(64, 32), 2, { time = true })
    assert.equal(8, ends[2])
    for _, row in ipairs(rows) do assert.is_true(row.seconds > 0 and row.seconds == row.cost) end
  end)

  it("says by how many bytes limits are missed, and what would do", function()
    local net, x = deep(4), core.randn(4, 32)
    local _, rows = parallel.balance(net, x, 1)
    local block = 2 * rows[1].parameters + rows[1].activations + rows[2].activations
    local ok, message = pcall(parallel.balance, net, x, 2, { limit = block + 100 })
    assert.is_false(ok)
    assert.matches(("%d bytes"):format(block - 100), message, 1, true)
    assert.matches("4 such stages would do", message, 1, true)
    ok, message = pcall(parallel.balance, net, x, 2, { limit = 100 })
    assert.is_false(ok)
    assert.matches("larger than a device", message)
    ok, message = pcall(parallel.balance, net, x, 9)
    assert.is_false(ok)
    assert.matches("9 stages for a net of 8 layers", message)
  end)

  it("respects the memory limits of devices", function()
    local net = deep(4)
    orrery.set_memory_limit(0, 2 ^ 14)
    orrery.set_memory_limit(1, 2 ^ 14)
    local ok, message = pcall(function() parallel "model<0,1>"(net, core.randn(4, 32)) end)
    orrery.set_memory_limit(0, nil)
    orrery.set_memory_limit(1, nil)
    assert.is_false(ok)
    assert.matches("over; ", message)
    assert.equal("cpu", net[1][1].weight:layout())
  end)
end)
