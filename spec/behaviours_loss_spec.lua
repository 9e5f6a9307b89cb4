-- Behaviours 1 to 4: a plan changes no loss and no gradient, whatever the reduction, the mask, the
-- split and the accumulation. (5 and 6 are of pipelines, which come with model plans.)
-- To add a loss: a row in `losses`.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local nn, optim = orrery.nn, orrery.optim

local f64 = { dtype = "f64" }

local function classes(n) return orrery.randint(1, 4, n) end

-- name, targets of n samples, loss(output, target)
local losses = {
  { "cross entropy, mean", classes, function(y, t) return nn.cross_entropy(y, t) end },
  { "cross entropy, sum", classes, function(y, t) return nn.cross_entropy(y, t, { reduction = "sum" }) end },
  { "cross entropy, smoothed", classes,
    function(y, t) return nn.cross_entropy(y, t, { label_smoothing = 0.1 }) end },
  { "cross entropy, class 2 ignored", classes,
    function(y, t) return nn.cross_entropy(y, t, { ignore_index = 2 }) end },
  { "nll", classes, function(y, t) return nn.nll_loss(y:log_softmax(2), t) end },
  { "mse", function(n) return orrery.randn(n, 4, f64) end, function(y, t) return nn.mse_loss(y, t) end },
  { "mse, sum", function(n) return orrery.randn(n, 4, f64) end,
    function(y, t) return nn.mse_loss(y, t, { reduction = "sum" }) end },
  { "l1", function(n) return orrery.randn(n, 4, f64) end, function(y, t) return nn.l1_loss(y, t) end },
  { "binary cross entropy", function(n) return orrery.rand(n, 4, f64) end,
    function(y, t) return nn.bce_with_logits(y, t) end },
  { "a masked mean by hand", function(n) return orrery.randint(0, 1, n, 4) end,
    function(y, t)
      local mask = t:to("f64")
      return (y * y * mask):sum() / mask:sum()
    end },
}

-- Loss and gradients of one step on n devices (0: the host, without a plan).
local function step(n, loss, x, t)
  orrery.manual_seed(3)
  local net = nn.Sequential(nn.Linear(6, 5, f64), nn.Tanh(), nn.Linear(5, 4, f64))
  if n > 0 then
    local plan = behave.plan(n)
    net = plan(net)
    t = plan:place(t)
  end
  local value = loss(net(x), t)
  value:backward()
  return value:item(), behave.gradients(net)
end

describe("behaviour 1", function()
  for _, row in ipairs(losses) do
    it(row[1] .. ": loss and gradients under data<> are those of one device", function()
      orrery.manual_seed(11)
      local x, t = orrery.randn(13, 6, f64), row[2](13)
      local want, gradients = step(0, row[3], x, t)
      for _, n in ipairs(behave.counts) do
        local got, other = step(n, row[3], x, t)
        behave.near(want, got, 1e-12, "loss on " .. n)
        behave.same_gradients(gradients, other, 1e-12, n .. " devices,")
      end
    end)
  end

  it("softmax regression's gradient is (softmax - one-hot)' x / N, computed here", function()
    local xs = { { 1, 2 }, { 0, -1 }, { 3, 1 }, { -2, 0 }, { 1, 1 } }
    local ts, w = { 1, 2, 2, 1, 2 }, { { 0.5, -0.25 }, { 0.125, 1 } }
    local want, loss = { { 0, 0 }, { 0, 0 } }, 0
    for k, x in ipairs(xs) do
      local z = { w[1][1] * x[1] + w[1][2] * x[2], w[2][1] * x[1] + w[2][2] * x[2] }
      local sum = math.exp(z[1]) + math.exp(z[2])
      loss = loss + (math.log(sum) - z[ts[k]]) / #xs
      for c = 1, 2 do
        local d = math.exp(z[c]) / sum - (ts[k] == c and 1 or 0)
        for i = 1, 2 do want[c][i] = want[c][i] + d * x[i] / #xs end
      end
    end
    for _, n in ipairs(behave.counts) do
      local net = nn.Linear(2, 2, { bias = false, dtype = "f64" })
      orrery.no_grad(function() net.weight:copy_(orrery.tensor(w, f64)) end)
      behave.plan(n)(net)
      local value = nn.cross_entropy(net(orrery.tensor(xs, f64)), orrery.tensor(ts, { dtype = "i64" }))
      value:backward()
      behave.near(loss, value:item(), 1e-12)
      behave.near(want, net.weight.grad, 1e-12, n .. " devices")
    end
  end)
end)

describe("behaviour 2", function()
  it("the mean of 13 samples over 2 devices (7 and 6) is over 13", function()
    for _, n in ipairs(behave.counts) do
      local x = behave.place(orrery.arange(1, 13, f64), n, "shard(1)")
      if n == 2 then
        local shards = x:shards()
        assert.equal(7, shards[1].tensor:size(1))
        assert.equal(6, shards[2].tensor:size(1))
      end
      assert.near(7, x:mean():item(), 1e-14) -- the mean of two means would be 7.25
      assert.near(14, (x - 7):pow(2):mean():item(), 1e-12)
      x.requires_grad = true
      x:mean():backward()
      behave.near(orrery.full(1 / 13, 13, f64), x.grad, 1e-15)
    end
  end)

  it("a mean over a sharded dimension keeps the other's", function()
    for _, n in ipairs(behave.counts) do
      local x = orrery.arange(1, 26, f64):view(13, 2)
      for _, word in ipairs { "shard(1)", "shard(2)" } do
        behave.near({ 13, 14 }, behave.place(x, n, word):mean(1), 1e-12)
        behave.near(x:mean(2), behave.place(x, n, word):mean(2), 1e-12)
      end
    end
  end)
end)

-- Labels of 13 samples; in `masked` the first seven (all of the first of two devices) are ignored.
local labels = { 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1 }
local masked = { 9, 9, 9, 9, 9, 9, 9, 4, 9, 2, 3, 9, 1 }

describe("behaviour 3", function()
  local function loss_of(y, t) return nn.cross_entropy(y, t, { ignore_index = 9 }) end

  it("a masked loss divides by the global count; an all-masked shard contributes 0", function()
    for _, n in ipairs(behave.counts) do
      -- Equal logits: every element's loss is log 4, so the mean is log 4 whatever is masked.
      local y = behave.place(orrery.zeros(13, 4, f64), n, "shard(1)")
      y.requires_grad = true
      local loss = loss_of(y, orrery.tensor(masked, { dtype = "i64" }))
      loss:backward()
      assert.near(math.log(4), loss:item(), 1e-12)
      local grad = y.grad:totable()
      for k = 1, 13 do
        for c = 1, 4 do
          local want = masked[k] == 9 and 0 or (0.25 - (masked[k] == c and 1 or 0)) / 4
          assert.near(want, grad[k][c], 1e-12)
        end
      end
    end
  end)

  it("gradients of a masked loss are those of one device", function()
    orrery.manual_seed(5)
    local x, t = orrery.randn(13, 6, f64), orrery.tensor(masked, { dtype = "i64" })
    local want, gradients = step(0, loss_of, x, t)
    for _, n in ipairs(behave.counts) do
      local got, other = step(n, loss_of, x, t)
      behave.near(want, got, 1e-12)
      behave.same_gradients(gradients, other, 1e-12, n .. " devices,")
    end
  end)

  it("where all is masked the loss is 0 and so are the gradients, not NaN", function()
    for _, n in ipairs(behave.counts) do
      local y = behave.place(orrery.ones(5, 4, f64), n, "shard(1)")
      y.requires_grad = true
      local loss = loss_of(y, orrery.full(9, 5, { dtype = "i64" }))
      loss:backward()
      assert.equal(0, loss:item())
      behave.near(orrery.zeros(5, 4, f64), y.grad, 0)
    end
  end)

  it("accumulated masked micro-batches divide by the count over all of them", function()
    orrery.manual_seed(5)
    local x, t = orrery.randn(13, 6, f64), orrery.tensor(masked, { dtype = "i64" })
    local want, gradients = step(0, loss_of, x, t)
    for _, n in ipairs(behave.counts) do
      orrery.manual_seed(3)
      local net = nn.Sequential(nn.Linear(6, 5, f64), nn.Tanh(), nn.Linear(5, 4, f64))
      behave.plan(n)(net)
      -- 5 + 3 + 5 samples; the first micro-batch is masked as a whole.
      local parts = {}
      for k, range in ipairs { { 1, 5 }, { 6, 8 }, { 9, 13 } } do
        parts[k] = { x[{ range }], t[{ range }] }
      end
      local got = orrery.accumulate(parts, function(part)
        local sum = nn.cross_entropy(net(part[1]), part[2], { ignore_index = 9, reduction = "sum" })
        return sum, part[2]:ne(9):sum()
      end)
      behave.near(want, got, 1e-12, "loss")
      behave.same_gradients(gradients, behave.gradients(net), 1e-12, n .. " devices,")
    end
  end)
end)

describe("behaviour 4", function()
  local x, t
  before_each(function()
    orrery.manual_seed(21)
    x, t = orrery.randn(13, 6, f64), orrery.tensor(labels, { dtype = "i64" })
  end)

  local function make(n)
    orrery.manual_seed(3)
    local net = nn.Sequential(nn.Linear(6, 5, f64), nn.Tanh(), nn.Linear(5, 4, f64))
    return n > 0 and behave.plan(n)(net) or net
  end

  local function sums(net)
    return function(part)
      return nn.cross_entropy(net(part[1]), part[2], { reduction = "sum" }), part[2]:size(1)
    end
  end

  local ranges = { { 1, 6 }, { 7, 7 }, { 8, 13 } }
  local function parts_of()
    local parts = {}
    for k, range in ipairs(ranges) do parts[k] = { x[{ range }], t[{ range }] } end
    return parts
  end

  it("accumulate over 6 + 1 + 6 samples, then a step, equals one step on the joined batch", function()
    local one = make(0)
    local want = nn.cross_entropy(one(x), t)
    want:backward()
    local gradients = behave.gradients(one)
    optim.SGD(one:parameters(), { lr = 0.5 }):step()
    for _, n in ipairs { 0, 1, 2, 3, 5 } do
      local net = make(n)
      local opt = optim.SGD(net:parameters(), { lr = 0.5 })
      behave.near(want:item(), orrery.accumulate(parts_of(), sums(net)), 1e-12, "loss")
      behave.same_gradients(gradients, behave.gradients(net), 1e-12, n .. " devices,")
      opt:step()
      for k, p in ipairs(net:parameters()) do
        behave.near(one:parameters()[k], p, 1e-12, n .. " devices, weights")
      end
    end
  end)

  it("accumulate adds to gradients that are there and reduces once", function()
    for _, n in ipairs(behave.counts) do
      local net = make(n)
      nn.cross_entropy(net(x), t):backward()
      local once = behave.gradients(net)
      local counts = behave.collectives(function() orrery.accumulate(parts_of(), sums(net)) end)
      assert.equal(n > 1 and 1 or nil, counts["all_reduce data"]) -- the gradients, in one bucket
      for name, values in pairs(once) do
        local twice = {}
        for k, v in ipairs(values) do twice[k] = 2 * v end
        behave.near(twice, behave.gradients(net)[name], 1e-12, name)
      end
    end
  end)

  it("plain repeated backward sums and never rescales", function()
    for _, n in ipairs(behave.counts) do
      local net = make(n)
      nn.cross_entropy(net(x), t):backward()
      local once = behave.gradients(net)
      nn.cross_entropy(net(x), t):backward()
      nn.cross_entropy(net(x), t):backward()
      for name, values in pairs(once) do
        local thrice = {}
        for k, v in ipairs(values) do thrice[k] = 3 * v end
        behave.near(thrice, behave.gradients(net)[name], 1e-12, name)
      end
      net:zero_grad()
      assert.is_nil(net:parameters()[1].grad)
    end
  end)

  it("an error inside accumulate leaves the gradients as they were", function()
    for _, n in ipairs(behave.counts) do
      local net = make(n)
      nn.cross_entropy(net(x), t):backward()
      local was = behave.gradients(net)
      local calls = 0
      local ok, message = pcall(orrery.accumulate, parts_of(), function(part)
        calls = calls + 1
        if calls == 2 then error "stop here" end
        return sums(net)(part)
      end)
      assert.is_false(ok)
      assert.truthy(message:find("stop here", 1, true), message)
      behave.same_gradients(was, behave.gradients(net), 0, n .. " devices,")
      nn.cross_entropy(net(x), t):backward() -- the next one counts from there
      behave.near(2 * was["1.weight"][1], behave.gradients(net)["1.weight"][1], 1e-12)
    end
  end)

  it("the core knows no world size", function()
    for name in pairs(core) do assert.is_nil(tostring(name):find "world") end
  end)
end)
