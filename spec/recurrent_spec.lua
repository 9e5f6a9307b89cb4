-- Recurrent layers against their equations in plain Lua, and what states and directions promise.
-- To add a layer: its reference over numbers, and its row beside LSTM and GRU.
local orrery = require "orrery"
local behave = require "spec.support.behave"
local nn = orrery.nn

local near = behave.near

local function f64(...) return orrery.randn(...):to("f64") end

-- One direction of a recurrent layer over numbers: X[t][n], weights as nested tables.
local function sigmoid(v) return 1 / (1 + math.exp(-v)) end

local function affine(W, b, x)
  local y = {}
  for i = 1, #W do
    y[i] = b[i]
    for j = 1, #x do y[i] = y[i] + W[i][j] * x[j] end
  end
  return y
end

local function tanh(v)
  local e = math.exp(-2 * math.abs(v))
  local y = (1 - e) / (1 + e)
  return v < 0 and -y or y
end

local function lstm_reference(layer, X, size)
  local h, c, outputs = {}, {}, {}
  for k = 1, size do h[k], c[k] = 0, 0 end
  for t = 1, #X do
    local a = affine(layer.weight_ih_l0:totable(), layer.bias_ih_l0:totable(), X[t])
    local b = affine(layer.weight_hh_l0:totable(), layer.bias_hh_l0:totable(), h)
    h = {}
    for k = 1, size do
      local function gate(n) return a[n * size + k] + b[n * size + k] end
      c[k] = sigmoid(gate(1)) * c[k] + sigmoid(gate(0)) * tanh(gate(2))
      h[k] = sigmoid(gate(3)) * tanh(c[k])
    end
    outputs[t] = h
  end
  return outputs, c
end

local function gru_reference(layer, X, size)
  local h, outputs = {}, {}
  for k = 1, size do h[k] = 0 end
  for t = 1, #X do
    local a = affine(layer.weight_ih_l0:totable(), layer.bias_ih_l0:totable(), X[t])
    local b = affine(layer.weight_hh_l0:totable(), layer.bias_hh_l0:totable(), h)
    local new = {}
    for k = 1, size do
      local r = sigmoid(a[k] + b[k])
      local z = sigmoid(a[size + k] + b[size + k])
      local n = tanh(a[2 * size + k] + r * b[2 * size + k])
      new[k] = (1 - z) * n + z * h[k]
    end
    h = new
    outputs[t] = h
  end
  return outputs
end

describe("recurrent layers", function()
  before_each(function() orrery.manual_seed(13) end)

  it("LSTM follows its equations, gates i f g o", function()
    local layer, x = nn.LSTM(3, 4):to("f64"), f64(5, 1, 3)
    local y, h, c = layer(x)
    local outputs, cells = lstm_reference(layer, x:squeeze(2):totable(), 4)
    near(outputs, y, 1e-10)
    near(outputs[5], h, 1e-10)
    near(cells, c, 1e-10)
  end)

  it("GRU follows its equations, gates r z n", function()
    local layer, x = nn.GRU(3, 4):to("f64"), f64(5, 1, 3)
    local y, h = layer(x)
    local outputs = gru_reference(layer, x:squeeze(2):totable(), 4)
    near(outputs, y, 1e-10)
    near(outputs[5], h, 1e-10)
  end)

  for _, kind in ipairs { "LSTM", "GRU" } do
    it(kind .. " continues from a state as if it had not stopped", function()
      local layer, x = nn[kind](3, 4, { layers = 2 }):to("f64"), f64(6, 2, 3)
      local whole = layer(x)
      local first, h, c = layer(x:narrow(1, 1, 2))
      local second = layer(x:narrow(1, 3, 4), h, c)
      near(whole, orrery.cat({ first, second }, 1), 1e-12)
      if c then near(second, (layer(x:narrow(1, 3, 4), { h, c })), 0) end
    end)

    it(kind .. " in both directions is two layers, one of them backwards", function()
      local both, x = nn[kind](3, 4, { bidirectional = true }):to("f64"), f64(5, 2, 3)
      local back = nn[kind](3, 4):to("f64")
      orrery.no_grad(function()
        for name, p in back:named_parameters() do p:copy_(both[name .. "_reverse"]) end
      end)
      local order = orrery.tensor({ 5, 4, 3, 2, 1 }, { dtype = "i64" })
      local expected = back(x:index_select(1, order)):index_select(1, order)
      local y, h = both(x)
      assert.same({ 5, 2, 8 }, y:size())
      assert.same({ 2, 2, 4 }, h:size())
      near(expected, y:narrow(3, 5, 4), 1e-12)
    end)

    it(kind .. " takes the batch first, and has right gradients", function()
      local layer = nn[kind](2, 3, { batch_first = true }):to("f64")
      local x = f64(2, 4, 2)
      local swapped = nn[kind](2, 3):to("f64")
      swapped:load_state(layer:state())
      near(swapped(x:transpose(1, 2)):transpose(1, 2), (layer(x)), 1e-12)
      x.requires_grad = true
      local w = layer.weight_hh_l0
      assert.is_true(orrery.gradcheck(function(input) return (layer(input)) end, { x }))
      assert.is_true(orrery.gradcheck(function() return (layer(x:detach())) end, { w }))
    end)
  end

  it("refuse wrong shapes", function()
    behave.raises(function() local _ = nn.LSTM(3, 4)(orrery.randn(5, 3)) end,
      "LSTM: expected x (T, N, 3)")
    behave.raises(function()
      local _ = nn.GRU(3, 4)(orrery.randn(5, 2, 3), orrery.zeros(1, 1, 4))
    end, "GRU: expected h (1, 2, 4)")
  end)
end)
