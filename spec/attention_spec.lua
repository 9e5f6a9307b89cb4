-- Attention: the fused op against softmax(scale q k^T) v made of ops, its placements, the layers on top
-- of it, and a GPT that trains on devices as on one.
-- To add a size: a row of `sizes`; a plan of the GPT: a line of `plans`.
local orrery = require "orrery"
local core = require "orrery.core"
local behave = require "spec.support.behave"
local nn, optim = orrery.nn, orrery.optim

local attention = nn.scaled_dot_product_attention
local unpack = table.unpack or unpack

local function randn(dtype, ...) return orrery.randn(...):to(dtype) end

-- The value that a mask of what each query sees gives: ops alone, no fused kernel.
local function composed(q, k, v, causal, scale)
  local scores = q:matmul(k:transpose(3, 4)) * (scale or 1 / math.sqrt(q:size(4)))
  if causal then
    local sees = orrery.arange(1, q:size(3)):unsqueeze(2):ge(orrery.arange(1, k:size(3)))
    scores = orrery.where(sees, scores, orrery.full(-math.huge, 1, { dtype = q:dtype() }))
  end
  return scores:softmax(4):matmul(v)
end

-- The value of f and the gradients of its three inputs under the output gradient g.
local function value_and_gradients(f, q, k, v, g)
  local x = { q:detach(), k:detach(), v:detach() }
  for i = 1, 3 do x[i].requires_grad = true end
  local y = f(unpack(x))
  y:backward(g)
  return { y:detach(), x[1].grad, x[2].grad, x[3].grad }
end

local names = { "the output", "the gradient of q", "the gradient of k", "the gradient of v" }

local function near_all(want, got, tolerance, what)
  for i, name in ipairs(names) do behave.near(want[i], got[i], tolerance, what .. name) end
end

-- N, H, T, S, D, E: one query, odd sizes, whole blocks of 64 and one more or less, several blocks.
local sizes = {
  { 2, 3, 1, 1, 1, 1 }, { 2, 3, 7, 7, 5, 5 }, { 1, 2, 64, 64, 32, 32 }, { 1, 1, 65, 63, 16, 8 },
  { 2, 1, 63, 130, 3, 20 }, { 1, 1, 200, 200, 40, 40 }, { 1, 2, 130, 33, 33, 7 }, { 3, 1, 1, 9, 4, 4 },
  { 0, 2, 5, 5, 4, 4 }, { 2, 0, 5, 5, 4, 4 }, { 2, 2, 0, 5, 4, 4 }, { 1, 1, 5, 0, 4, 3 },
}

describe("scaled dot-product attention", function()
  for _, dtype in ipairs { "f64", "f32", "bf16" } do
    local tolerance = ({ f64 = 1e-12, f32 = 1e-5, bf16 = 0.1 })[dtype]
    for _, causal in ipairs { false, true } do
      it(("equals softmax(q k^T) v in %s, causal=%s"):format(dtype, tostring(causal)), function()
        orrery.manual_seed(3)
        for _, size in ipairs(sizes) do
          local n, h, t, s, d, e = unpack(size)
          local q, k = randn(dtype, n, t, h, d):transpose(2, 3), randn(dtype, n, s, h, d):transpose(2, 3)
          local v, g = randn(dtype, n, h, s, e), randn(dtype, n, h, t, e)
          local want = value_and_gradients(function(a, b, c)
            return composed(a:to "f64", b:to "f64", c:to "f64", causal)
          end, q, k, v, g:to "f64")
          local got = value_and_gradients(function(a, b, c)
            return attention(a, b, c, { causal = causal })
          end, q, k, v, g)
          near_all(want, got, tolerance, table.concat(size, ",") .. ": ")
        end
      end)
    end
  end

  it("passes a check by differences", function()
    orrery.manual_seed(4)
    for _, causal in ipairs { false, true } do
      local x = { randn("f64", 2, 2, 5, 3), randn("f64", 2, 2, 4, 3), randn("f64", 2, 2, 4, 2) }
      for i = 1, 3 do x[i].requires_grad = true end
      assert.is_true(orrery.gradcheck(function(q, k, v)
        return attention(q, k, v, { causal = causal, scale = 0.8 })
      end, x))
    end
  end)

  it("takes any strides, repeated ones too, and leaves the heads where the layer wants them", function()
    orrery.manual_seed(5)
    local q = randn("f64", 2, 9, 3, 4):transpose(2, 3)
    local k = randn("f64", 4, 9, 3, 2):permute(4, 3, 2, 1)
    local v = randn("f64", 1, 1, 9, 4):expand(2, 3, 9, 4)
    local y = attention(q, k, v)
    behave.near(composed(q, k, v), y, 1e-13)
    assert.same({ 2, 9, 12 }, y:transpose(2, 3):view(2, 9, 12):size()) -- view raises where it must copy
  end)

  it("does not overflow, and passes NaN and infinity on as softmax does", function()
    local q = orrery.full(1e4, 1, 1, 3, 2)
    local y = attention(q, q, orrery.ones(1, 1, 3, 2))
    behave.near(orrery.ones(1, 1, 3, 2), y, 1e-6)
    local k = orrery.ones(1, 1, 3, 2)
    k[{ 1, 1, 2, 1 }] = 0 / 0
    y = attention(orrery.ones(1, 1, 3, 2), k, orrery.ones(1, 1, 3, 2), { causal = true })
    assert.equal(1, y[{ 1, 1, 1, 1 }]:item())
    for t = 2, 3 do
      local value = y[{ 1, 1, t, 1 }]:item()
      assert.is_true(value ~= value)
    end
  end)

  it("keeps no matrix of queries by keys", function()
    local t = 2048
    local x = { orrery.randn(1, 1, t, 8), orrery.randn(1, 1, t, 8), orrery.randn(1, 1, t, 8) }
    for i = 1, 3 do x[i].requires_grad = true end
    behave.live()
    orrery.reset_peak()
    local before = orrery.memory().live
    attention(x[1], x[2], x[3], { causal = true }):sum():backward()
    local peak = orrery.memory().peak - before
    assert.is_true(peak < 12 * t * 8 * 4, peak .. " bytes") -- a matrix alone would be 16 MiB
  end)

  it("masks: added, boolean, causal by a mask, scaled", function()
    orrery.manual_seed(6)
    local q, k, v = randn("f64", 2, 3, 5, 4), randn("f64", 2, 3, 6, 4), randn("f64", 2, 3, 6, 2)
    local sees = orrery.arange(1, 5):unsqueeze(2):ge(orrery.arange(1, 6))
    local causal = attention(q, k, v, { causal = true })
    behave.near(causal, attention(q, k, v, { mask = sees }), 1e-13)
    local nothing = orrery.zeros(5, 6, { dtype = "f64" })
    behave.near(causal, attention(q, k, v, { mask = nothing, causal = true }), 1e-13)
    local bias = randn("f64", 3, 5, 6)
    local want = ((q:matmul(k:transpose(3, 4)) / 2) + bias):softmax(4):matmul(v)
    behave.near(want, attention(q, k, v, { mask = bias }), 1e-13)
    behave.near(composed(q, k, v, false, 0.3), attention(q, k, v, { scale = 0.3 }), 1e-13)
  end)

  it("says what does not fit, at the user's line", function()
    local x = orrery.zeros(2, 3, 5, 4)
    behave.raises(function() local _ = attention(x, x:narrow(4, 1, 3), x) end, "must be 4", "(2, 3, 5, 3)")
    behave.raises(function() local _ = attention(x, x, orrery.zeros(2, 3, 6, 4)) end, "must be 5")
    behave.raises(function() local _ = attention(x, x:to "i64", x) end, "floating")
    behave.raises(function() local _ = attention(x, x, x, { casual = true }) end, "unknown option 'casual'")
    behave.raises(function() local _ = nn.MultiheadAttention(10, 3) end, "3 heads do not divide", "10")
    local m = nn.MultiheadAttention(6, 2)
    behave.raises(function() local _ = m(orrery.zeros(2, 3, 5)) end, "(N, T, 6)", "(2, 3, 5)")
    behave.raises(function() local _ = nn.MultiheadAttention(6, 2, { rotary = true }) end, "even", "3")
  end)
end)

describe("placed attention", function()
  for _, word in ipairs { "shard(1)", "shard(2)", "replicate" } do
    for _, n in ipairs { 2, 3 } do
      it(("%s over %d devices is that of one"):format(word, n), function()
        orrery.manual_seed(7)
        for _, causal in ipairs { false, true } do
          local q, k, v = randn("f64", 4, 5, 9, 3), randn("f64", 4, 5, 9, 3), randn("f64", 4, 5, 9, 3)
          local g = randn("f64", 4, 5, 9, 3)
          local function f(a, b, c) return attention(a, b, c, { causal = causal }) end
          local function place(x) return behave.place(x, n, word) end
          local got = value_and_gradients(f, place(q), place(k), place(v), place(g))
          local function one(x) return behave.place(x, 1, "replicate") end
          near_all(value_and_gradients(f, one(q), one(k), one(v), one(g)), got, 0, word .. ": ")
          for i = 1, 4 do assert.truthy(got[i]:layout():find(word, 1, true), got[i]:layout()) end
        end
      end)
    end
  end

  it("moves nothing where samples or heads are sharded", function()
    for _, word in ipairs { "shard(1)", "shard(2)" } do
      local x = {}
      for i = 1, 3 do
        x[i] = behave.place(orrery.randn(4, 5, 9, 3), 3, word)
        x[i].requires_grad = true
      end
      local g = behave.place(orrery.randn(4, 5, 9, 3), 3, word)
      local moved = orrery.parallel.trace(function() attention(x[1], x[2], x[3]):backward(g) end)
      assert.equal(0, #moved)
    end
  end)
end)

describe("the layers", function()
  it("rotary positions: products depend on the distance, lengths stay, position 1 is itself", function()
    orrery.manual_seed(8)
    local a, b = randn("f64", 1, 1, 1, 6):expand(1, 1, 7, 6), randn("f64", 1, 1, 1, 6):expand(1, 1, 7, 6)
    local p, q = nn.rotary(a), nn.rotary(b)
    local products = p:matmul(q:transpose(3, 4)):view(7, 7):totable()
    for i = 1, 6 do
      for j = 1, 6 do assert.near(products[i][j], products[i + 1][j + 1], 1e-12) end
    end
    assert.is_true(math.abs(products[1][1] - products[1][3]) > 1e-6)
    behave.near(a:square():sum(4), p:square():sum(4), 1e-12)
    behave.near(a:narrow(3, 1, 1), p:narrow(3, 1, 1), 0)
    -- The pair (2, 5) of 6 features at position 4 turns by 3 * 10000^(-1/3).
    local angle, x = 3 * 10000 ^ (-1 / 3), a:select(3, 1):view(6):totable()
    assert.near(x[2] * math.cos(angle) - x[5] * math.sin(angle), p[{ 1, 1, 4, 2 }]:item(), 1e-12)
    assert.near(x[5] * math.cos(angle) + x[2] * math.sin(angle), p[{ 1, 1, 4, 5 }]:item(), 1e-12)
  end)

  it("MultiheadAttention is four products around attention, over memory too", function()
    orrery.manual_seed(9)
    local m = nn.MultiheadAttention(6, 3, { dtype = "f64" })
    for _, name in ipairs { "q", "k", "v", "o" } do nn.init.normal_(m[name].bias) end
    local x, memory = randn("f64", 2, 4, 6), randn("f64", 2, 5, 6)
    local function by_hand(s, mask)
      local heads = {}
      for h = 0, 2 do
        local function part(layer, t) return layer(t):narrow(3, 2 * h + 1, 2) end
        local scores = part(m.q, x):matmul(part(m.k, s):transpose(2, 3)) / math.sqrt(2)
        if mask then scores = scores + mask end
        heads[h + 1] = scores:softmax(3):matmul(part(m.v, s))
      end
      return m.o(orrery.cat(heads, 3))
    end
    behave.near(by_hand(x), m(x), 1e-13)
    behave.near(by_hand(memory), m(x, memory), 1e-13)
    local mask = randn("f64", 4, 4)
    behave.near(by_hand(x, mask), m(x, nil, mask), 1e-13)
    local listed = {}
    for name in m:named_parameters() do listed[#listed + 1] = name end
    assert.equal("q.weight q.bias k.weight k.bias v.weight v.bias o.weight o.bias", table.concat(listed, " "))
  end)

  it("drops attention weights in training alone", function()
    orrery.manual_seed(10)
    local m = nn.MultiheadAttention(6, 3, { dtype = "f64", dropout = 0.5 })
    local x = randn("f64", 2, 4, 6)
    local trained = m(x)
    m:eval()
    local still = m(x)
    assert.is_true((trained - still):abs():max():item() > 1e-3)
    behave.near(still, m(x), 0)
  end)

  it("TransformerBlock adds two branches, each with its norm before it", function()
    for _, norm in ipairs { "layer", "rms" } do
      for _, activation in ipairs { "gelu", "silu" } do
        orrery.manual_seed(11)
        local b = nn.TransformerBlock(6, 2,
          { causal = true, norm = norm, activation = activation, mlp = 2, dtype = "f64" })
        assert.same({ 12, 6 }, b.fc1.weight:size())
        local x = randn("f64", 2, 4, 6)
        local y = x + b.attention(b.norm1(x))
        behave.near(y + b.fc2(core[activation](b.fc1(b.norm2(y)))), b(x), 0)
        -- Causal: what a later token is does not reach an earlier one.
        local other = x:clone()
        other:narrow(2, 4, 1):fill_(3)
        behave.near(b(x):narrow(2, 1, 3), b(other):narrow(2, 1, 3), 1e-14)
      end
    end
  end)
end)

-- A GPT with tied embeddings, learned positions, rotary heads and dropout.
local GPT = nn.class("SpecGPT", function(self)
  local f64 = { dtype = "f64" }
  self.tokens = nn.Embedding(11, 12, f64)
  self.positions = nn.Embedding(7, 12, f64)
  self.dropout = nn.Dropout(0.1)
  self.blocks = nn.Sequential()
  for i = 1, 2 do
    self.blocks[i] = nn.TransformerBlock(12, 3,
      { causal = true, dropout = 0.1, rotary = true, dtype = "f64" })
  end
  self.norm = nn.LayerNorm(12, f64)
end)

function GPT:forward(ids)
  local x = self.dropout(self.tokens(ids) + self.positions(orrery.arange(1, ids:size(2))))
  return self.norm(self.blocks(x)):reshape(-1, 12):matmul(self.tokens.weight:t())
end

describe("a GPT", function()
  -- Losses of 20 steps and the final weights; batches of 6 with an uneven one of 5 among them.
  local function train(plan)
    orrery.manual_seed(12)
    local net = GPT()
    if plan then net = orrery.parallel(plan)(net) end
    local opt = optim.AdamW(net:parameters(), { lr = 1e-2, weight_decay = 0.1 })
    local losses = {}
    for step = 1, 20 do
      local n = step % 4 == 0 and 5 or 6
      local rows = orrery.randint(1, 11, n, 8)
      local x, y = rows:narrow(2, 1, 7):contiguous(), rows:narrow(2, 2, 7):reshape(-1)
      opt:zero_grad()
      local loss = nn.cross_entropy(net(x), y)
      loss:backward()
      optim.clip_grad_norm(net:parameters(), 0.5)
      opt:step()
      losses[step] = loss:item()
    end
    return losses, net:state()
  end

  local plans = { "data<0,1>", "data<0..2>", "data<0..4>" }
  local losses, state
  setup(function() losses, state = train() end)

  it("learns", function() assert.is_true(losses[20] < losses[1]) end)

  for _, plan in ipairs(plans) do
    it("trains under " .. plan .. " as on one device", function()
      local got_losses, got_state = train(plan)
      for step = 1, 20 do assert.near(losses[step], got_losses[step], 1e-9 * losses[step]) end
      for name, tensor in pairs(state) do behave.near(tensor, got_state[name], 1e-9, name) end
    end)
  end
end)
