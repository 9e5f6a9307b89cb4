-- Recurrent layers: LSTM and GRU, several layers deep, in one or both directions.
-- Invariant: names, shapes and gate order of the weights are PyTorch's (weight_ih_l0 counts
-- layers from 0 for that reason), so weights and values compare one to one.
-- To add a cell: a row with its number of gates and a step function, and a call of `recurrent`.
local core = require "orrery.core"
local check = require "orrery.check"
local class = require("orrery.nn.module").class
local init = require "orrery.nn.initialize"

local known = {
  layers = true, bias = true, batch_first = true, dropout = true, bidirectional = true,
  dtype = true, device = true,
}

-- LSTM (Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000), gates in the
-- order i, f, g, o:
--   c' = s(f) c + s(i) tanh(g),  h' = s(o) tanh(c')
-- `gates` holds W_ih x + b_ih + b_hh for this moment, (N, 4H); h and c are nil where they are
-- zero.
local function lstm_step(gates, h, c, w_hh, _, size)
  if h then gates = gates + h:linear(w_hh) end
  local both = gates:narrow(2, 1, 2 * size):sigmoid()
  local g = gates:narrow(2, 2 * size + 1, size):tanh()
  local o = gates:narrow(2, 3 * size + 1, size):sigmoid()
  local next_c = both:narrow(2, 1, size) * g
  if c then next_c = next_c + both:narrow(2, size + 1, size) * c end
  return o * next_c:tanh(), next_c
end

-- GRU (Cho et al. 2014, with the reset after the product), gates in the order r, z, n:
--   n = tanh(W_in x + b_in + s(r) (W_hn h + b_hn)),  h' = (1 - s(z)) n + s(z) h
-- `gates` holds W_ih x + b_ih for this moment, (N, 3H); h is nil where it is zero.
local function gru_step(gates, h, _, w_hh, b_hh, size)
  local hidden = b_hh
  if h then hidden = h:linear(w_hh, b_hh) end
  local from_x, from_h = gates:narrow(2, 1, 2 * size), nil
  local n = gates:narrow(2, 2 * size + 1, size)
  if hidden then
    local dim = hidden:dim()
    from_x = from_x + hidden:narrow(dim, 1, 2 * size)
    from_h = hidden:narrow(dim, 2 * size + 1, size)
  end
  local both = from_x:sigmoid()
  if from_h then n = n + both:narrow(2, 1, size) * from_h end
  n = n:tanh()
  local z = both:narrow(2, size + 1, size)
  if h then return n + z * (h - n) end
  return n - z * n
end

local cells = {
  LSTM = { gates = 4, step = lstm_step, joined_bias = true, has_cell = true },
  GRU = { gates = 3, step = gru_step },
}

-- One layer in one direction over x (T, N, in): the outputs (T, N, H) and the last h and c.
local function run_layer(self, cell, x, suffix, reverse, h, c)
  local w_hh = self["weight_hh_" .. suffix]
  local b_ih, b_hh = self["bias_ih_" .. suffix], self["bias_hh_" .. suffix]
  if cell.joined_bias and b_ih then b_ih = b_ih + b_hh end
  local gates = x:linear(self["weight_ih_" .. suffix], b_ih)
  local length = x:size(1)
  local outputs = {}
  for i = 1, length do
    local t = reverse and length + 1 - i or i
    h, c = cell.step(gates:select(1, t), h, c, w_hh, b_hh, self.hidden)
    outputs[t] = h
  end
  return core.stack(outputs, 1), h, c
end

local function check_input(self, x)
  if check.tensor(self._class, "x", x):dim() ~= 3 or x:size(3) ~= self.inputs then
    check.raise("%s: expected x (%s, %d), got shape %s", self._class, self.batch_first and "N, T" or "T, N",
      self.inputs, check.shape(x))
  end
  if x:size(self.batch_first and 2 or 1) == 0 then check.raise("%s: the sequence is empty", self._class) end
end

local function check_state(self, state, name, batch)
  if state == nil then return end
  check.tensor(self._class, name, state)
  local want = { self.layers * self.directions, batch, self.hidden }
  if state:dim() ~= 3 or state:size(1) ~= want[1] or state:size(2) ~= want[2]
    or state:size(3) ~= want[3] then
    check.raise("%s: expected %s (%s), got shape %s", self._class, name, table.concat(want, ", "),
      check.shape(state))
  end
end

local function forward(self, x, h, c)
  if type(h) == "table" then h, c = h[1], h[2] end
  check_input(self, x)
  if self.batch_first then x = x:transpose(1, 2) end
  check_state(self, h, "h", x:size(2))
  check_state(self, c, "c", x:size(2))
  local cell, last_h, last_c = self.cell, {}, {}
  for layer = 0, self.layers - 1 do
    local sides = {}
    for side = 1, self.directions do
      local k = layer * self.directions + side
      local suffix = "l" .. layer .. (side == 2 and "_reverse" or "")
      sides[side], last_h[k], last_c[k] =
        run_layer(self, cell, x, suffix, side == 2, h and h:select(1, k), c and c:select(1, k))
    end
    x = self.directions == 2 and core.cat(sides, 3) or sides[1]
    if self.training and self.dropout > 0 and layer < self.layers - 1 then x = x:dropout(self.dropout) end
  end
  if self.batch_first then x = x:transpose(1, 2) end
  return x, core.stack(last_h, 1), cell.has_cell and core.stack(last_c, 1) or nil
end

local function recurrent(name, cell)
  local layer = class(name, function(self, inputs, hidden, options)
    options = check.options(name, options, known)
    self.inputs = check.count(name, "the number of inputs", inputs)
    self.hidden = check.count(name, "the hidden size", hidden)
    self.layers = check.count(name, "layers", options.layers or 1)
    self.directions = options.bidirectional and 2 or 1
    self.batch_first = options.batch_first or false
    self.dropout = check.number(name, "dropout", options.dropout or 0, 0, 1)
    local bound = 1 / math.sqrt(hidden)
    for l = 0, self.layers - 1 do
      local from = l == 0 and inputs or hidden * self.directions
      for side = 1, self.directions do
        local suffix = "l" .. l .. (side == 2 and "_reverse" or "")
        self["weight_ih_" .. suffix] = init.new_uniform(options, bound, cell.gates * hidden, from)
        self["weight_hh_" .. suffix] = init.new_uniform(options, bound, cell.gates * hidden, hidden)
        if options.bias ~= false then
          self["bias_ih_" .. suffix] = init.new_uniform(options, bound, cell.gates * hidden)
          self["bias_hh_" .. suffix] = init.new_uniform(options, bound, cell.gates * hidden)
        end
      end
    end
  end)
  layer.cell = cell
  layer.forward = forward
  function layer:describe()
    return ("%d, %d%s%s"):format(self.inputs, self.hidden,
      self.layers > 1 and ", layers=" .. self.layers or "", self.directions == 2 and ", bidirectional" or "")
  end
  return layer
end

--- y, h, c = lstm(x [, h, c]). x (T, N, in), or (N, T, in) with batch_first; y (T, N, D H), D =
--- 2 when bidirectional; h and c (layers D, N, H), zero by default, may also be given as {h,
--- c}. All weights start from U(-1/sqrt(H), 1/sqrt(H)), as in PyTorch.
---@param inputs integer
---@param hidden integer
---@param options? {layers?: integer, bias?: boolean, batch_first?: boolean, dropout?: number,
---  bidirectional?: boolean}
local LSTM = recurrent("LSTM", cells.LSTM)

--- y, h = gru(x [, h]). Shapes and options as of LSTM.
---@param inputs integer
---@param hidden integer
---@param options? table as of LSTM
local GRU = recurrent("GRU", cells.GRU)

return { LSTM = LSTM, GRU = GRU }
