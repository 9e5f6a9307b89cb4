-- Modules, layers, losses and initialisation. Values of single ops are checked in ops_spec; here the
-- layers are checked against plain-Lua references, and the module tree against what it promises.
local orrery = require "orrery"
local nn = orrery.nn

-- Flattens nested tables of numbers.
local function flat(value, list)
  list = list or {}
  if type(value) == "table" then
    for i = 1, #value do flat(value[i], list) end
  else
    list[#list + 1] = value
  end
  return list
end

local function values(tensor) return flat(tensor:detach():totable()) end

local function assert_close(expected, actual, tolerance)
  assert.equal(#expected, #actual)
  for i = 1, #expected do
    local limit = (tolerance or 1e-6) * math.max(1, math.abs(expected[i]))
    local difference = math.abs(expected[i] - actual[i])
    if difference > limit or difference ~= difference then
      error(("element %d: expected %.9g, got %.9g"):format(i, expected[i], actual[i]), 2)
    end
  end
end

local function assert_error(pattern, fn)
  local ok, message = pcall(fn)
  assert.is_false(ok)
  message = tostring(message)
  if not message:find(pattern, 1, true) then
    error(("expected an error with '%s', got: %s"):format(pattern, message), 2)
  end
  assert.is_truthy(message:find("nn_spec.lua:", 1, true), "the error names this file: " .. message)
end

local function names_of(module)
  local names = {}
  for name in module:named_parameters() do names[#names + 1] = name end
  return table.concat(names, " ")
end

local function f64(...) return orrery.randn(...):to("f64") end

describe("a module", function()
  local Block

  setup(function()
    Block = nn.class("Block", function(self, dim)
      self.second = nn.Linear(dim, dim)
      self.first = nn.Linear(dim, dim, { bias = false })
      self.scale = nn.parameter(orrery.ones(1))
      self.free = orrery.rand(2, 2, { requires_grad = true })
      self:buffer("seen", orrery.zeros(1))
    end)
    function Block:forward(x) return self.first(self.second(x)) * self.scale end
  end)

  before_each(function() orrery.manual_seed(1) end)

  it("lists parameters by creation and children by name", function()
    local block = Block(3)
    assert.equal("scale free second.weight second.bias first.weight", names_of(block))
    assert.equal(5, #block:parameters())
    assert.equal(2, #block:children())
    assert.equal(block.second, block:children()[1])
    assert.equal(3, #block:modules())
    local names = {}
    for name in block:named_buffers() do names[#names + 1] = name end
    assert.same({ "seen" }, names)
  end)

  it("lists array fields by position", function()
    local late = nn.Linear(2, 2)
    local early = nn.Linear(2, 2)
    local net = nn.Sequential(early, nn.ReLU(), late)
    assert.equal("1.weight 1.bias 3.weight 3.bias", names_of(net))
    assert.equal(3, #net)
  end)

  it("comes from a function, with or without itself, and from a table", function()
    local x = orrery.randn(5, 4)
    local plain = nn.Module(function(t) return t:relu() end)
    assert_close(values(x:relu()), values(plain(x)))
    local net = nn.Module(function(self, t) return self.fc(t) end)
    net.fc = nn.Linear(4, 2)
    assert.same({ 5, 2 }, net(x):size())
    assert.equal("fc.weight fc.bias", names_of(net))
    local made = nn.Module { fc = net.fc, forward = function(self, t) return self.fc(t) + 1 end }
    assert_close(values(net(x) + 1), values(made(x)))
  end)

  it("22: lists, trains and saves a shared parameter once", function()
    local net = nn.Module { a = nn.Linear(3, 3, { bias = false }), b = nn.Linear(3, 3, { bias = false }) }
    net.b.weight = net.a.weight
    assert.equal(1, #net:parameters())
    local x = f64(2, 3)
    net:to("f64")
    net.b(net.a(x)):sum():backward()
    local twice = values(net.a.weight.grad)
    -- d/dW sum(x W^T W^T), as the sum of the gradients of the two uses
    local w = orrery.tensor(net.a.weight:totable(), { dtype = "f64", requires_grad = true })
    local v = orrery.tensor(net.a.weight:totable(), { dtype = "f64", requires_grad = true })
    x:linear(w):linear(v):sum():backward()
    assert_close(values(w.grad + v.grad), twice, 1e-12)
    local state = net:state()
    assert.is_truthy(state["a.weight"])
    assert.is_truthy(state["b.weight"])
  end)

  it("21: leaves an unused parameter without a gradient and names it", function()
    local block = Block(3)
    block(orrery.randn(2, 3)):sum():backward()
    assert.is_nil(block.free.grad)
    assert.same({ "free" }, block:unused_parameters())
  end)

  it("23: freezes and unfreezes, dropping gradients", function()
    local block = Block(3)
    local x = orrery.randn(2, 3)
    block(x):sum():backward()
    block.first:freeze()
    assert.is_nil(block.first.weight.grad)
    assert.is_false(block.first.weight.requires_grad)
    assert.equal(5, #block:parameters())
    block:zero_grad()
    block(x):sum():backward()
    assert.is_nil(block.first.weight.grad)
    assert.is_truthy(block.second.weight.grad)
    block:unfreeze()
    block:zero_grad()
    block(x):sum():backward()
    assert.is_truthy(block.first.weight.grad)
  end)

  it("switches between training and evaluation everywhere", function()
    local net = nn.Sequential(nn.Dropout(0.5), nn.Residual(nn.Dropout(0.5)))
    net:eval()
    assert.is_false(net[2].inner.training)
    local x = orrery.ones(10)
    assert_close(values(x * 2), values(net(x)))
    assert.equal(net, net:train())
    assert.is_true(net[2].inner.training)
  end)

  it("24: converts in place and keeps the identity of parameters", function()
    local layer = nn.Linear(3, 2)
    local weight, before = layer.weight, values(layer.weight)
    layer:to("f64")
    assert.equal(weight, layer.weight)
    assert.equal("f64", weight:dtype())
    assert.is_true(weight.requires_grad)
    assert_close(before, values(weight), 0)
    local counts = nn.Module {}
    counts:buffer("ids", orrery.arange(1, 3):to("i64"))
    counts:to("f64")
    assert.equal("i64", counts.ids:dtype())
  end)

  it("saves a snapshot and loads it", function()
    local block, other = Block(3), Block(3)
    local state = block:state()
    local before = values(block.first.weight)
    orrery.no_grad(function() block.first.weight:fill_(0) end)
    assert_close(before, values(state["first.weight"]), 0)
    other:load_state(state)
    assert_close(before, values(other.first.weight), 0)
    local x = orrery.randn(2, 3)
    block:load_state(state)
    assert_close(values(block(x)), values(other(x)), 0)
  end)

  it("refuses a state that does not fit, and changes nothing", function()
    local block = Block(3)
    local state = block:state()
    state["first.weight"] = orrery.zeros(2, 2)
    state["scale"] = nil
    state["extra"] = orrery.zeros(1)
    state["second.bias"] = orrery.zeros(3)
    local before = values(block.second.bias)
    local ok, message = pcall(block.load_state, block, state)
    assert.is_false(ok)
    local parts = { "missing: scale", "unexpected: extra", "first.weight is (2, 2), expected (3, 3)" }
    for _, part in ipairs(parts) do
      assert.is_truthy(message:find(part, 1, true), message)
    end
    assert_close(before, values(block.second.bias), 0)
    state["first.weight"] = nil
    block:load_state(state, { strict = false })
    assert_close({ 0, 0, 0 }, values(block.second.bias), 0)
  end)

  it("runs forward hooks, which may replace the output, until they are removed", function()
    local layer = nn.Linear(3, 2)
    local x, order = orrery.randn(4, 3), {}
    local first = layer:register_forward_hook(function(module, inputs, output)
      order[#order + 1] = "first"
      assert.equal(layer, module)
      assert.equal(x, inputs[1])
      assert.same({ 4, 2 }, output:size())
    end)
    layer:register_forward_hook(function(_, _, output)
      order[#order + 1] = "second"
      return output * 0
    end)
    assert_close({ 0, 0, 0, 0, 0, 0, 0, 0 }, values(layer(x)), 0)
    first:remove()
    layer(x)
    assert.same({ "first", "second", "second" }, order)
  end)

  it("places the arguments of a module that has a plan", function()
    local layer = nn.Linear(3, 2)
    local x, asked = orrery.randn(4, 3), nil
    layer._plan = {
      place_args = function(_, module, ...)
        asked = module
        return ...
      end,
    }
    assert.same({ 4, 2 }, layer(x):size())
    assert.equal(layer, asked)
    assert.equal(layer._plan, layer:plan())
  end)

  it("prints its tree", function()
    local text = tostring(nn.Sequential(nn.Linear(64, 10), nn.Residual(nn.ReLU())))
    for _, part in ipairs { "1: Linear(64, 10)", "weight (10, 64) f32", "inner: ReLU", "650 parameters" } do
      assert.is_truthy(text:find(part, 1, true), text)
    end
  end)

  it("refuses mistakes at the caller's line", function()
    assert_error("the number of outputs", function() nn.Linear(3, 0) end)
    assert_error("unknown option 'pading'", function() nn.Conv2d(1, 1, 3, { pading = 1 }) end)
    assert_error("groups=2 must divide", function() nn.Conv2d(3, 4, 3, { groups = 2 }) end)
    assert_error("which is a method", function() nn.Sequential().parameters = 3 end)
    assert_error("has no forward", function() nn.class("Empty")()(1) end)
    assert_error("must be a module or a function", function() nn.Sequential(3) end)
    assert_error("expected x (N, 3, H, W)", function() nn.BatchNorm2d(3)(orrery.randn(2, 3)) end)
    assert_error("differ in shape", function() nn.mse_loss(orrery.zeros(3, 1), orrery.zeros(3)) end)
    assert_error("reduction must be one of", function()
      nn.l1_loss(orrery.zeros(3), orrery.zeros(3), { reduction = "avg" })
    end)
    assert_error("linear", function() nn.Linear(3, 2)(orrery.randn(2, 4)) end)
  end)
end)

describe("initialisation", function()
  it("29: depends on the seed alone, not on other draws", function()
    orrery.manual_seed(7)
    local first = values(nn.Linear(5, 4).weight)
    orrery.manual_seed(7)
    orrery.ones(100):dropout(0.5)
    orrery.rand(17)
    assert_close(first, values(nn.Linear(5, 4).weight), 0)
    assert.is_false(values(nn.Linear(5, 4).weight)[1] == first[1])
  end)

  it("draws linear and convolution weights from U(-1/sqrt(fan_in), 1/sqrt(fan_in))", function()
    orrery.manual_seed(3)
    local function check(tensor, fan_in)
      local bound, sum, square, list = 1 / math.sqrt(fan_in), 0, 0, values(tensor)
      for _, v in ipairs(list) do
        assert.is_true(v >= -bound and v <= bound)
        sum, square = sum + v, square + v * v
      end
      local n = #list
      assert.is_true(math.abs(sum / n) < 5 * bound / math.sqrt(3 * n))
      local ratio = (square / n) / (bound * bound / 3)
      assert.is_true(math.abs(ratio - 1) < 5 * 0.9 / math.sqrt(n), "variance ratio " .. ratio)
    end
    check(nn.Linear(64, 100).weight, 64)
    check(nn.Conv2d(8, 32, 5, { groups = 2 }).weight, 4 * 25)
    check(nn.Conv1d(8, 64, 5).weight, 40)
    check(nn.ConvTranspose2d(8, 16, 5).weight, 16 * 25)
    check(nn.LSTM(10, 25).weight_hh_l0, 25)
  end)

  it("fills in place: constant, normal, Xavier, Kaiming", function()
    orrery.manual_seed(5)
    local function deviation(tensor)
      local square, list = 0, values(tensor)
      for _, v in ipairs(list) do square = square + v * v end
      return math.sqrt(square / #list)
    end
    local w = nn.parameter(orrery.zeros(200, 100))
    assert.equal(w, nn.init.kaiming_normal_(w, { nonlinearity = "relu" }))
    assert.is_true(w.requires_grad)
    assert.is_true(math.abs(deviation(w) / math.sqrt(2 / 100) - 1) < 0.03)
    nn.init.xavier_normal_(w)
    assert.is_true(math.abs(deviation(w) / math.sqrt(2 / 300) - 1) < 0.03)
    nn.init.xavier_uniform_(w)
    assert.is_true(math.abs(deviation(w) / math.sqrt(2 / 300) - 1) < 0.03)
    nn.init.kaiming_uniform_(w, { a = math.sqrt(5) })
    assert.is_true(math.abs(deviation(w) / math.sqrt(1 / 300) - 1) < 0.03)
    nn.init.constant_(w, 0.25)
    assert.equal(0.25, values(w)[7])
    nn.init.ones_(w)
    assert.equal(1, values(w)[20000])
  end)
end)

describe("layers", function()
  before_each(function() orrery.manual_seed(11) end)

  it("Conv1d is a sum over a window", function()
    local layer = nn.Conv1d(2, 3, 3, { stride = 2, padding = 1, dilation = 2 }):to("f64")
    local x = f64(2, 2, 9)
    local y, X, W, B = layer(x), x:totable(), layer.weight:totable(), layer.bias:totable()
    local expected = {}
    local length = math.floor((9 + 2 - 2 * 2 - 1) / 2) + 1
    for n = 1, 2 do
      for o = 1, 3 do
        for t = 0, length - 1 do
          local sum = B[o]
          for c = 1, 2 do
            for k = 0, 2 do
              local at = t * 2 - 1 + k * 2
              if at >= 0 and at < 9 then sum = sum + W[o][c][k + 1] * X[n][c][at + 1] end
            end
          end
          expected[#expected + 1] = sum
        end
      end
    end
    assert.same({ 2, 3, length }, y:size())
    assert_close(expected, values(y), 1e-12)
  end)

  it("padding='same' keeps the size", function()
    local layer = nn.Conv2d(2, 4, { 3, 5 }, { padding = "same" })
    assert.same({ 1, 4, 6, 7 }, layer(orrery.randn(1, 2, 6, 7)):size())
    assert_error("padding='same'", function() nn.Conv2d(2, 4, 2, { padding = "same" }) end)
  end)

  it("ConvTranspose2d is the gradient of Conv2d", function()
    local options = { stride = 2, padding = 1, output_padding = 1, bias = false }
    local up = nn.ConvTranspose2d(3, 2, 3, options):to("f64")
    local y = f64(2, 3, 4, 4)
    local x = orrery.zeros(2, 2, 8, 8, { dtype = "f64", requires_grad = true })
    local down = x:conv2d(up.weight:detach(), nil, 2, 2, 1, 1, 1, 1, 1)
    assert.same(y:size(), down:size())
    down:backward(y)
    assert_close(values(x.grad), values(up(y)), 1e-12)
  end)

  it("28: BatchNorm normalises, keeps running statistics, and two forwards precede one backward", function()
    local layer = nn.BatchNorm1d(2):to("f64")
    local a, b = f64(6, 2), f64(3, 2)
    local ya, yb = layer(a), layer(b)
    local mean, var = a:mean(1), a:var(1)
    local expected_mean = mean * 0.1 * 0.9 + b:mean(1) * 0.1
    local expected_var = ((var * 0.1 + 0.9) * 0.9) + b:var(1) * 0.1
    assert_close(values(expected_mean), values(layer.running_mean), 1e-12)
    assert_close(values(expected_var), values(layer.running_var), 1e-12)
    local biased = var * (5 / 6)
    assert_close(values((a - mean) / (biased + 1e-5):sqrt()), values(ya), 1e-10);
    (ya:sum() + (yb * yb):sum()):backward()
    assert_close({ 9, 9 }, values(layer.bias.grad - 2 * yb:sum(1):detach() + 3), 1e-9)
    layer:eval()
    local expected = (a - layer.running_mean) / (layer.running_var + 1e-5):sqrt()
    assert_close(values(expected), values(layer(a)), 1e-10)
  end)

  it("LayerNorm over several dimensions, GroupNorm and RMSNorm follow their formulas", function()
    local x = f64(3, 4, 6)
    local layer = nn.LayerNorm({ 4, 6 }):to("f64")
    nn.init.uniform_(layer.weight)
    nn.init.uniform_(layer.bias)
    local rows = x:reshape(3, 24)
    local mean = rows:mean(2, true)
    local normal = (rows - mean) / ((rows - mean):pow(2):mean(2, true) + 1e-5):sqrt()
    local expected = normal * layer.weight:reshape(1, 24) + layer.bias:reshape(1, 24)
    assert_close(values(expected), values(layer(x)), 1e-10)

    local group = nn.GroupNorm(2, 4):to("f64")
    local halves = x:reshape(6, 12)
    mean = halves:mean(2, true)
    normal = (halves - mean) / ((halves - mean):pow(2):mean(2, true) + 1e-5):sqrt()
    assert_close(values(normal), values(group(x)), 1e-10)

    local rms = nn.RMSNorm(6, { eps = 1e-3 }):to("f64")
    assert_close(values(x / ((x * x):mean(3, true) + 1e-3):sqrt()), values(rms(x)), 1e-10)
  end)

  it("Embedding looks up rows by ids from 1", function()
    local layer = nn.Embedding(5, 3)
    local ids = orrery.tensor({ { 1, 5 }, { 2, 2 } }, { dtype = "i64" })
    local rows = layer.weight:totable()
    assert_close(flat { rows[1], rows[5], rows[2], rows[2] }, values(layer(ids)), 0)
    layer(ids):sum():backward()
    assert_close({ 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 0, 1, 1, 1 }, values(layer.weight.grad), 0)
  end)

  it("Residual, Flatten, LeakyReLU, Softmax and pooling", function()
    local x = orrery.randn(2, 3, 4, 4)
    assert_close(values(x + x:relu()), values(nn.Residual(nn.ReLU())(x)))
    assert.same({ 2, 48 }, nn.Flatten()(x):size())
    local expected = values(x)
    for i, v in ipairs(expected) do expected[i] = v > 0 and v or 0.1 * v end
    assert_close(expected, values(nn.LeakyReLU(0.1)(x)))
    assert_close(values(orrery.ones(2, 3, 4)), values(nn.Softmax()(x):sum(4)), 1e-6)
    assert_close(values(nn.Softmax(2)(x):log()), values(nn.LogSoftmax(2)(x)), 1e-5)
    assert.same({ 2, 3, 2, 2 }, nn.MaxPool2d(2)(x):size())
    assert.same({ 2, 3, 4, 4 }, nn.MaxPool2d(3, { stride = 1, padding = 1 })(x):size())
    assert_close({ values(x:mean())[1] }, values(nn.AvgPool2d(4)(x):mean()), 1e-6)
  end)

  it("Dropout keeps the mean and is off in evaluation", function()
    local layer, x = nn.Dropout(0.25), orrery.ones(10000)
    local y = values(layer(x))
    local kept = 0
    for _, v in ipairs(y) do
      assert.is_true(v == 0 or math.abs(v - 4 / 3) < 1e-6)
      if v > 0 then kept = kept + 1 end
    end
    assert.is_true(math.abs(kept / 10000 - 0.75) < 0.025)
    assert.equal(x, layer:eval()(x))
  end)
end)

local function sigmoid(v) return 1 / (1 + math.exp(-v)) end

describe("losses", function()
  local function item(t) return t:item() end

  it("cross_entropy with classes from 1, ignore_index, smoothing and reductions", function()
    local logits = { { 1, 2, 3 }, { 0, -1, 4 }, { 2, 2, 2 } }
    local labels = { 3, 1, 2 }
    local rows = {}
    for i, row in ipairs(logits) do
      local sum, total = 0, 0
      for _, v in ipairs(row) do
        sum = sum + math.exp(v)
        total = total + v
      end
      local log_sum = math.log(sum)
      rows[i] = { plain = log_sum - row[labels[i]], uniform = log_sum - total / 3 }
    end
    local x = orrery.tensor(logits, { dtype = "f64" })
    local y = orrery.tensor(labels, { dtype = "i64" })
    local mean = (rows[1].plain + rows[2].plain + rows[3].plain) / 3
    assert_close({ mean }, { item(nn.cross_entropy(x, y)) }, 1e-12)
    assert_close({ mean * 3 }, { item(nn.cross_entropy(x, y, { reduction = "sum" })) }, 1e-12)
    assert_close({ rows[1].plain, rows[2].plain, rows[3].plain },
      values(nn.cross_entropy(x, y, { reduction = "none" })), 1e-12)
    local masked = nn.cross_entropy(x, y, { ignore_index = 1 })
    assert_close({ (rows[1].plain + rows[3].plain) / 2 }, { item(masked) }, 1e-12)
    local smooth = 0.9 * mean + 0.1 * (rows[1].uniform + rows[2].uniform + rows[3].uniform) / 3
    assert_close({ smooth }, { item(nn.cross_entropy(x, y, { label_smoothing = 0.1 })) }, 1e-12)
    assert_close({ mean }, { item(nn.nll_loss(x:log_softmax(2), y)) }, 1e-12)
    assert_close({ mean }, { item(nn.CrossEntropyLoss()(x, y)) }, 1e-12)
  end)

  it("mse, l1 and binary cross entropy", function()
    local x = orrery.tensor({ 0, 2, -30, 30 }, { dtype = "f64", requires_grad = true })
    local y = orrery.tensor({ 1, 0, 0, 1 }, { dtype = "f64" })
    assert_close({ (1 + 4 + 900 + 841) / 4 }, { item(nn.mse_loss(x, y)) }, 1e-12)
    assert_close({ 1 + 2 + 30 + 29 }, { item(nn.l1_loss(x, y, { reduction = "sum" })) }, 1e-12)
    local loss = nn.bce_with_logits(x, y, { reduction = "sum" })
    assert_close({ math.log(2) + math.log(1 + math.exp(2)) + 2 * math.exp(-30) }, { item(loss) }, 1e-12)
    loss:backward()
    assert_close({ sigmoid(0) - 1, sigmoid(2), sigmoid(-30), sigmoid(30) - 1 }, values(x.grad), 1e-12)
  end)

  it("weighs positives in binary cross entropy and stays finite far out", function()
    local x = orrery.tensor({ 0.5, -500, 500 })
    local y = orrery.tensor({ 1, 1, 0 })
    local loss = nn.bce_with_logits(x, y, { pos_weight = 3, reduction = "none" })
    assert_close({ 3 * math.log(1 + math.exp(-0.5)), 1500, 500 }, values(loss), 1e-6)
  end)
end)

describe("anomaly mode", function()
  it("names the layer that made a NaN", function()
    local net = nn.Module(function(self, x) return self.bad(x) end)
    net.bad = nn.Module(function(x) return x:log() end)
    orrery.anomaly(true)
    local ok, message = pcall(function() return net(orrery.tensor({ -1 })):item() end)
    orrery.anomaly(false)
    assert.is_false(ok)
    assert.is_truthy(tostring(message):find("bad", 1, true), message)
    assert.is_truthy(net(orrery.tensor({ 1 })):item() == 0)
  end)
end)
