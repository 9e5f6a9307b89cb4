-- Sequence parallelism: tensor<...; sequence=true> computes what one device computes (20 steps of a GPT
-- stand in plan_spec), moves what all-reduces would have moved as reduce-scatters and all-gathers, and
-- keeps 1/n of the activations between split layers on a device.
-- To add a net: its forward under the plan against the same net without one.
local orrery = require "orrery"
local behave = require "spec.support.behave"
local nn, parallel = orrery.nn, orrery.parallel

local function traffic(rows)
  local counts = {}
  for _, row in ipairs(rows) do
    if row.axis == "tensor" then counts[row.op] = { count = row.count, bytes = row.bytes } end
  end
  return counts
end

local function blocks(n)
  orrery.manual_seed(5)
  local net = nn.Sequential()
  for k = 1, n do net[k] = nn.TransformerBlock(32, 4, { causal = true }) end
  return net
end

-- Counts in forward and backward of n blocks whose input and loss stand along the sequence.
local function count(n)
  local net = parallel "tensor<0,1; sequence=true>"(blocks(n), orrery.randn(2, 8, 32))
  local x, loss = orrery.randn(2, 8, 32)
  local forward = traffic(parallel.trace(function() loss = net(x):square():sum() end))
  local backward = traffic(parallel.trace(function() loss:backward() end))
  return forward, backward
end

describe("tensor<...; sequence=true>", function()
  it("a block more makes 2 all-gathers and 2 reduce-scatters forward, the same backward", function()
    local forward2, backward2 = count(2)
    local forward3, backward3 = count(3)
    local bytes = 2 * 2 * 8 * 32 * 4
    for _, pair in ipairs { { forward2, forward3 }, { backward2, backward3 } } do
      for _, op in ipairs { "all_gather", "reduce_scatter" } do
        assert.equal(2, pair[2][op].count - pair[1][op].count, op)
        assert.equal(bytes, pair[2][op].bytes - pair[1][op].bytes, op)
      end
    end
    assert.is_nil(forward3.all_reduce)
    -- weight and bias of two norms a block, and the biases added after a scatter: no activation
    assert.is_true(backward3.all_reduce.bytes - backward2.all_reduce.bytes <= 6 * 32 * 4)
  end)

  it("activations between split layers are 1/n of the sequence, uneven where it does not divide", function()
    local net = parallel "tensor<0..2; sequence=true>"(blocks(1), orrery.randn(2, 8, 32))
    local y = net(orrery.randn(2, 8, 32))
    local lengths = {}
    for k, shard in ipairs(y:shards()) do lengths[k] = shard.tensor:size(2) end
    assert.same({ 3, 3, 2 }, lengths)
  end)

  for _, length in ipairs { 1, 2, 7 } do
    it("holds for a sequence of " .. length, function()
      local x = orrery.randn(2, length, 32)
      local net = blocks(1)
      local expected = net(x)
      local placed = parallel "tensor<0..2; sequence=true>"(net, x)
      behave.near(expected, placed(x):full(), 1e-5)
    end)
  end

  it("leaves nets without a sequence as they are", function()
    orrery.manual_seed(6)
    local net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    local x = orrery.randn(5, 6)
    local expected = net(x)
    local placed = parallel "tensor<0,1; sequence=true>"(net, x)
    behave.near(expected, placed(x):full(), 1e-5)
    local conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    local images = orrery.randn(2, 3, 8, 8)
    expected = conv(images)
    placed = parallel "tensor<0,1; sequence=true>"(conv, images)
    behave.near(expected, placed(images):full(), 1e-5)
  end)

  it("evaluates without gradients", function()
    local x = orrery.randn(2, 8, 32)
    local net = blocks(2)
    local expected = net(x)
    local placed = parallel "tensor<0,1; sequence=true>"(net, x)
    local rows
    local y = orrery.no_grad(function()
      local out
      rows = traffic(parallel.trace(function() out = placed(x) end))
      return out
    end)
    behave.near(expected, y:full(), 1e-5)
    assert.equal(3, rows.all_gather.count) -- the first block's input is whole
  end)
end)
