-- Behaviours 7 to 10, 12 and 13: how batches and dimensions are split, and that the loader's order
-- and an evaluation's samples do not depend on the devices. (11 is of micro-batches, with model plans.)
-- To add a case: a value to expect on every count of devices.
local orrery = require "orrery"
local behave = require "spec.support.behave"
local nn, optim, parallel, data = orrery.nn, orrery.optim, orrery.parallel, orrery.data

local f64 = { dtype = "f64" }

local function sizes_of(x, d)
  local list = {}
  for k, shard in ipairs(x:shards()) do list[k] = shard.tensor:size(d or 1) end
  return list
end

describe("behaviour 7", function()
  it("38 samples over 8 devices are six of 5 and two of 4", function()
    local x = behave.plan(8):place(orrery.arange(1, 38))
    assert.same({ 5, 5, 5, 5, 5, 5, 4, 4 }, sizes_of(x))
    assert.same({ 6, 7, 8, 9, 10 }, x:shards()[2].tensor:totable())
    assert.same({ 35, 36, 37, 38 }, x:shards()[8].tensor:totable())
  end)

  it("parts differ by at most 1, larger ones first, and hold every sample in order", function()
    for n = 1, 8 do
      for total = 0, 20 do
        local x = behave.plan(n):place(total == 0 and orrery.zeros(0) or orrery.arange(1, total))
        local sizes, seen = sizes_of(x), {}
        for k, size in ipairs(sizes) do
          assert.equal(math.floor(total / n) + (k <= total % n and 1 or 0), size)
          for _, v in ipairs(x:shards()[k].tensor:totable()) do seen[#seen + 1] = v end
        end
        assert.equal(total, #seen)
        for k, v in ipairs(seen) do assert.equal(k, v) end
      end
    end
  end)
end)

describe("behaviour 8", function()
  local function train(n, net, x, t)
    if n > 0 then behave.plan(n)(net) end
    local opt = optim.SGD(net:parameters(), { lr = 0.1, momentum = 0.9 })
    local losses = {}
    for k = 1, 3 do
      opt:zero_grad()
      local loss = nn.cross_entropy(net(x), t)
      loss:backward()
      opt:step()
      losses[k] = loss:item()
    end
    return losses
  end

  for _, samples in ipairs { 1, 2, 4 } do
    it(samples .. " samples on 5 devices train as on one: linear, norm, dropout, convolution", function()
      local function make()
        orrery.manual_seed(8)
        return nn.Sequential(nn.Conv2d(2, 4, 3, { padding = 1, dtype = "f64" }), nn.BatchNorm2d(4, f64),
          nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 6, f64),
          nn.LayerNorm(6, f64), nn.Tanh(),
          nn.Linear(6, 3, f64))
      end
      orrery.manual_seed(9)
      local x, t = orrery.randn(samples, 2, 4, 4, f64), orrery.randint(1, 3, samples)
      local want = train(0, make(), x, t)
      for _, n in ipairs { 2, 3, 5 } do behave.near(want, train(n, make(), x, t), 1e-9, n .. " devices") end
    end)
  end

  it("recurrent and embedding layers take empty shards", function()
    local function make()
      orrery.manual_seed(8)
      local net = nn.Module { embed = nn.Embedding(7, 3, f64), rnn = nn.LSTM(3, 4, f64),
        head = nn.Linear(4, 3, f64) }
      function net:forward(ids)
        local h = self.rnn(self.embed(ids))
        return self.head(h:mean(2))
      end
      return net
    end
    orrery.manual_seed(10)
    local ids, t = orrery.randint(1, 7, 2, 5), orrery.randint(1, 3, 2)
    local want = train(0, make(), ids, t)
    for _, n in ipairs { 3, 5 } do behave.near(want, train(n, make(), ids, t), 1e-9, n .. " devices") end
  end)
end)

describe("behaviour 9", function()
  it("64 channels over 3 devices are 22, 21 and 21", function()
    local w = behave.place(orrery.randn(64, 3, 3, 3, f64), 3, "shard(1)")
    assert.same({ 22, 21, 21 }, sizes_of(w))
  end)

  it("a convolution whose filters are split 22, 21, 21 gives each its channels and the right values",
    function()
    orrery.manual_seed(1)
    local x, w, b = orrery.randn(2, 3, 6, 6, f64), orrery.randn(64, 3, 3, 3, f64), orrery.randn(64, f64)
    local want = x:conv2d(w, b, 1, 1, 1, 1, 1, 1, 1)
    for _, n in ipairs(behave.counts) do
      local y = behave.place(x, n, "replicate"):conv2d(behave.place(w, n, "shard(1)"),
        behave.place(b, n, "shard(1)"), 1, 1, 1, 1, 1, 1, 1)
      behave.near(want, y, 1e-10, n .. " devices")
      if n == 3 then assert.same({ 22, 21, 21 }, sizes_of(y, 2)) end
    end
  end)
end)

describe("behaviour 10", function()
  -- A placed module that keeps what its forward was called with.
  local seen
  local function echo(n)
    return behave.plan(n)(nn.Module(function(...)
      seen = { ... }
      return (...)
    end))
  end

  it("positional arguments, tables and nested tables are split alike", function()
    for _, n in ipairs(behave.counts) do
      local call = echo(n)
      local x, y = orrery.arange(1, 7), orrery.arange(11, 17)
      call(x, { y, inner = { mask = x } }, 3, "word", nil, true)
      local rule = sizes_of(behave.plan(n):place(x))
      assert.same(rule, sizes_of(seen[1]))
      assert.same(rule, sizes_of(seen[2][1]))
      assert.same(rule, sizes_of(seen[2].inner.mask))
      assert.same({ 1, 2, 3, 4, 5, 6, 7 }, seen[2].inner.mask:totable())
      assert.equal(3, seen[3])
      assert.equal("word", seen[4])
      assert.is_nil(seen[5])
      assert.is_true(seen[6])
    end
  end)

  it("an array as long as the batch raises and names parallel.whole", function()
    for _, n in ipairs(behave.counts) do
      local call = echo(n)
      local x = orrery.arange(1, 3)
      behave.raises(function() call(x, { "cat", "dog", "cow" }) end, "argument 2", "array of 3 strings",
        "parallel.whole")
      behave.raises(function() call(x, { 1, 2, 3 }) end, "argument 2", "array of 3 numbers", "parallel.whole")
      behave.raises(function() call { x, names = { "a", "b", "c" } } end, "argument 1.names",
        "parallel.whole")
      call(x, parallel.whole { "cat", "dog", "cow" }, { 1, 2 })
      assert.same({ "cat", "dog", "cow" }, seen[2])
      assert.same({ 1, 2 }, seen[3])
    end
  end)

  it("tensors of other lengths are ambiguous; parallel.whole replicates one", function()
    for _, n in ipairs(behave.counts) do
      local call = echo(n)
      behave.raises(function() call(orrery.zeros(6, 2), orrery.zeros(4)) end, "argument 2 has 4 samples",
        "argument 1 6", "parallel.whole")
      call(orrery.zeros(6, 2), parallel.whole(orrery.arange(1, 4)))
      assert.same(sizes_of(behave.plan(n):place(orrery.zeros(6))), sizes_of(seen[1]))
      for _, size in ipairs(sizes_of(seen[2])) do assert.equal(4, size) end
    end
  end)
end)

describe("behaviour 12", function()
  it("an evaluation sees every sample once, and no padding reaches a shape or a metric", function()
    for _, n in ipairs(behave.counts) do
      for _, samples in ipairs { 1, 4, 23 } do
        local plan = behave.plan(n)
        local net = plan(nn.Module(function(x) return x * 2 end)):eval()
        local ids = orrery.arange(1, samples, f64)
        local seen, right, total, shapes = {}, 0, 0, {}
        for x, y in data.batches({ ids, ids * 2 }, { batch = 5, plan = plan }) do
          local out = net(x)
          shapes[#shapes + 1] = out:size(1)
          right = right + out:eq(y):sum():item()
          total = total + out:size(1)
          for _, v in ipairs(out:totable()) do seen[v / 2] = (seen[v / 2] or 0) + 1 end
        end
        assert.equal(samples, total)
        assert.equal(samples, right)
        for k = 1, samples do assert.equal(1, seen[k]) end
        local rest, want = samples, {}
        while rest > 0 do
          want[#want + 1] = math.min(5, rest)
          rest = rest - 5
        end
        assert.same(want, shapes)
      end
    end
  end)
end)

describe("behaviour 13", function()
  local function epochs(plan, count, first)
    orrery.manual_seed(4)
    local ids, orders = orrery.arange(1, 23), {}
    local batches = data.batches({ ids }, { batch = 5, shuffle = true, plan = plan, epoch = first })
    for e = 1, count do
      orders[e] = {}
      for x in batches do
        for _, v in ipairs(x:totable()) do orders[e][#orders[e] + 1] = v end
      end
    end
    return orders
  end

  it("each epoch has another order, a function of (seed, epoch) alone", function()
    local want = epochs(nil, 3)
    for a = 1, 3 do
      local sorted = { behave.unpack(want[a]) }
      table.sort(sorted)
      for k = 1, 23 do assert.equal(k, sorted[k]) end
      for b = 1, a - 1 do assert.not_same(want[a], want[b]) end
    end
    for _, n in ipairs(behave.counts) do assert.same(want, epochs(behave.plan(n), 3)) end
    assert.same(want[3], epochs(nil, 1, 3)[1]) -- a resumed run
  end)

  it("random numbers drawn in between do not move the order", function()
    local want = epochs(nil, 2)
    orrery.manual_seed(4)
    local batches, got = data.batches({ orrery.arange(1, 23) }, { batch = 5, shuffle = true }), {}
    for e = 1, 2 do
      got[e] = {}
      for x in batches do
        orrery.rand(3)
        for _, v in ipairs(x:totable()) do got[e][#got[e] + 1] = v end
      end
    end
    assert.same(want, got)
  end)
end)
