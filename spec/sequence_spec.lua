-- Sequence parallelism: tensor<...; sequence=true> computes what one device computes (20 steps of a GPT
-- stand in plan_spec), moves what all-reduces would have moved as reduce-scatters and all-gathers, and
-- keeps 1/n of the activations between split layers on a device.
-- To add a net: its forward under the plan against the same net without one.
local orrery = require "orrery"
local core = require "orrery.core"
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

-- Bytes held on the second device, the collector having run.
local function live()
  collectgarbage()
  collectgarbage()
  orrery.synchronize()
  return orrery.memory(1).live
end

-- Embeddings tied to the output; `last` is what the output reads.
local TiedGPT = nn.class("TiedGPT", function(self, words, width, layers)
  self.tokens = nn.Embedding(words, width)
  self.tokens:split "in"
  self.blocks = nn.Sequential()
  for k = 1, layers do self.blocks[k] = nn.TransformerBlock(width, 4, { causal = true, dropout = 0.1 }) end
  self.norm = nn.LayerNorm(width)
  self.last = false
end)

function TiedGPT:forward(ids)
  self.last = self.norm(self.blocks(self.tokens(ids)))
  return core.linear(self.last, self.tokens.weight)
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
    -- gradients of the weights and biases of a block's two norms, in one bucket: no activation
    assert.equal(4 * 32 * 4, backward3.all_reduce.bytes - backward2.all_reduce.bytes)
    assert.equal(backward2.all_reduce.count, backward3.all_reduce.count)
  end)

  for _, n in ipairs { 2, 3 } do
    it(("a GPT with a tied output scatters and gathers its activations, over %d"):format(n), function()
      local layers, width, words = 2, 24, 40
      orrery.manual_seed(8)
      local net = TiedGPT(words, width, layers)
      local ids, labels = orrery.randint(1, words, 3, 7), orrery.randint(1, words, 3, 7)
      parallel(("tensor<0..%d; sequence=true>"):format(n - 1))(net, ids)
      assert.matches("shard(1)", net.tokens.weight:layout(), 1, true)
      local loss
      local forward = traffic(parallel.trace(function()
        loss = nn.cross_entropy(net(ids):transpose(2, 3), labels)
      end))
      local backward = traffic(parallel.trace(function() loss:backward() end))
      assert.matches("shard(2)", net.last:layout(), 1, true)
      -- the ends of the embedding and of two pairs a block; the entries of those pairs and of the output
      local each = { count = 2 * layers + 1, bytes = (2 * layers + 1) * 3 * 7 * width * 4 }
      for _, rows in ipairs { forward, backward } do
        assert.same(each, rows.all_gather)
        assert.same(each, rows.reduce_scatter)
      end
      assert.is_true(forward.all_reduce.bytes < 3 * 7 * width * 4) -- a few numbers a row of the loss
      assert.same({ count = 1, bytes = (4 * layers + 2) * width * 4 }, backward.all_reduce) -- norms
    end)
  end

  it("what stands whole has a whole gradient: layers before the first split one sum nothing", function()
    orrery.manual_seed(4)
    local net = nn.Sequential(nn.Embedding(30, 12), nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(),
      nn.Linear(24, 12))
    for k, how in pairs { "none", [3] = "out", [5] = "in" } do net[k]:split(how) end
    local ids = orrery.randint(1, 30, 3, 8)
    parallel "tensor<0,1; sequence=true>"(net, ids)
    local loss = net(ids):square():sum()
    local rows = traffic(parallel.trace(function() loss:backward() end))
    local activation = 3 * 8 * 12 * 4
    assert.same({ count = 1, bytes = activation }, rows.all_reduce)
    assert.same({ count = 1, bytes = activation }, rows.all_gather)
    assert.is_nil(rows.reduce_scatter)
  end)

  it("costs what the programme says: a reduction 2, a scatter or a gather 1 a byte", function()
    local split, shapes = require "orrery.parallel.split", require "orrery.parallel.shapes"
    for _, sequence in ipairs { false, true } do
      orrery.manual_seed(4)
      local net = nn.Sequential(nn.Embedding(30, 12), nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(),
        nn.Linear(24, 12), nn.Dropout(0.2), nn.LayerNorm(12))
      local ids = orrery.randint(1, 30, 3, 8)
      local record, forced = shapes.record(net, { ids }), {}
      for k, how in pairs { { "in", 1 }, [3] = { "out", 1 }, [5] = { "in", 2 } } do
        net[k]:split(how[1])
        forced[record.index[net[k].weight]] = how[2]
      end
      local cost = select(3, split.choose(record, forced, 1, sequence))
      parallel("tensor<0,1; sequence=" .. tostring(sequence) .. ">")(net, ids)
      local bytes = 0
      for op, row in pairs(traffic(parallel.trace(function() net(ids):square():sum():backward() end))) do
        bytes = bytes + (op == "all_reduce" and 2 or 1) * row.bytes
      end
      assert.equal(cost, bytes, "sequence=" .. tostring(sequence))
    end
  end)

  it("says so beside the layers", function()
    local net = parallel "tensor<0,1; sequence=true>"(blocks(1), orrery.randn(2, 8, 32))
    local text = tostring(net)
    local _, reads = text:gsub("split out over 2 devices[^\n]*; reads the whole sequence\n", "")
    local _, ends = text:gsub("split in over 2 devices[^\n]*; what it gives stays split along the sequence\n",
      "")
    assert.same({ 4, 2 }, { reads, ends }) -- q, k, v, fc1; o, fc2
    net = parallel "tensor<0,1>"(blocks(1), orrery.randn(2, 8, 32))
    assert.is_nil(tostring(net):find "sequence")
  end)

  it("norms, dropout and residuals keep 1/n of the bytes on a device", function()
    local n = 4
    local function kept(text)
      orrery.manual_seed(5)
      local net = nn.Sequential(nn.Embedding(64, 64), nn.LayerNorm(64), nn.Dropout(0.5))
      net[1]:split "in"
      local ids = orrery.randint(1, 64, 4, 64)
      parallel(text)(net, ids)
      local x = net[1](ids)
      local before = live()
      local y = x
      for _ = 1, 4 do y = y + net[3](net[2](y)) end
      return live() - before, y
    end
    local whole, part = kept "tensor<0..3>", kept "tensor<0..3; sequence=true>"
    local activation = 4 * 64 * 64 * 4
    assert.is_true(whole >= 4 * activation, whole .. " bytes") -- the residuals, each the input of a norm
    assert.is_true(part <= whole / n * 1.02, ("%d of %d bytes"):format(part, whole))
  end)

  for _, mode in ipairs { "recording", "no_grad" } do
    it("a forward without a backward leaves nothing behind: " .. mode, function()
      local ids = orrery.randint(1, 40, 3, 8)
      local net = parallel "tensor<0,1; sequence=true>"(TiedGPT(40, 24, 2), ids)
      local before = live() -- nothing has run: what one forward leaves is not hidden by one before it
      if mode == "no_grad" then orrery.no_grad(function() net(ids) end) else net(ids) end
      net.last = false
      assert.equal(before, live())
    end)
  end

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
